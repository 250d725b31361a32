"""What makes sense in operands of attention that are no data."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kernel_api.arguments.attention import AttentionArguments

#: How far above the logarithm of the number of keys the log-sum-exp of random scores lies.
_SPREAD = 0.5


def draw(args: AttentionArguments) -> None:
    """Sequences of equal length that fill what there is, pages in order, blocks that are visible,
    and a log-sum-exp that the scores of a row may have."""
    import torch

    tensors = {name: one.tensor for name, one in args.named_operands.items()}
    if args.is_padded:
        for name, extent in (("seq_lens_q", args.S_q), ("seq_lens_kv", args.S_kv)):
            if name in tensors:
                tensors[name].fill_(extent)
    if args.is_packed:
        parts = torch.arange(args.B + 1, device=args.device)
        for name, rows, longest in (
            ("cu_seqlens_q", args.Q.shape[0], args.S_q),
            ("cu_seqlens_kv", args.K.shape[0], args.S_kv),
        ):
            if name in tensors:  # keys may be in pages
                filled = min(rows, args.B * longest)
                tensors[name].copy_(parts * filled // max(args.B, 1))
    if args.is_paged:
        table = tensors["page_table"]
        pages = torch.arange(table.numel(), device=args.device)
        table.copy_((pages % max(args.K.shape[0], 1)).view(table.shape))
    if "blocks" in tensors:
        tensors["blocks"].fill_(True)
    for name in ("dropout_seed", "dropout_offset"):
        if name in tensors:
            tensors[name].fill_(1)
    if "lse" in tensors and "lse" not in args.outputs:
        tensors["lse"].fill_(math.log(max(args.S_kv, 1)) + _SPREAD)

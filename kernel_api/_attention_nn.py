"""Attention with gradients, see :mod:`kernel_api.nn`."""

from __future__ import annotations

from typing import Any

import torch

from kernel_api import _attention_ops as ops
from kernel_api._autocast import cast
from kernel_api.fusions._attention import OPTIONS
from kernel_api.operands import require_tensors

__all__ = ["attention"]


@OPTIONS.told
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    mask: Any = None,
    scale: float | None = None,
    bias: torch.Tensor | None = None,
    sink: torch.Tensor | None = None,
    **options: Any,
) -> torch.Tensor:
    """softmax(scale · q kᵀ, with masks and what is added to scores) · v, of q's element type;
    bfloat16 where that has 8 bits.

    Args:
        q: (B, H, S_q, D), or packed (T, H, D).
        k, v: (B, H_kv, S_kv, D), or packed (T_kv, H_kv, D).
        mask: One of :mod:`kernel_api.masks`, or several combined with ``&``.
        scale: 1 / √D by default.
        bias: Broadcastable to (B, H, S_q, S_kv).
        sink: (H,), of any floating type.
        options: Further ones of :class:`kernel_api.arguments.SdpaArguments`.

    Gradients are those of q, k, v, bias and sink. In a packed tensor (B, S, 3, H, D), the slices
    ``qkv[:, :, 0].transpose(1, 2)`` and so on are taken without a copy.

    Raises:
        ArgumentError: operands contradict each other.
        NoKernelError: no kernel takes the operands; says why.
    """
    OPTIONS.check("attention", options)
    require_tensors(q=q, k=k, v=v, **({} if bias is None else {"bias": bias}))
    q, k, v, bias = cast(q, k, v, bias)
    given = {"mask": mask, "scale": scale, "bias": bias}
    if sink is not None:
        require_tensors(sink=sink)
        given["sink"] = sink.to(torch.float64 if q.dtype is torch.float64 else torch.float32)
    options.update((name, one) for name, one in given.items() if one is not None)
    found: torch.Tensor = ops.sdpa(_rows(q), _rows(k), _rows(v), **options)
    return found


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    """With the elements of a head side by side."""
    return tensor if not tensor.dim() or tensor.stride(-1) == 1 else tensor.contiguous()

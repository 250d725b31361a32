"""Rows sorted by group with torch's own sort; nothing waits for the device."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from kernel_api.arguments import GroupRowsArguments
from kernel_api.artifact import CompiledArtifact
from kernel_api.kernel import Kernel
from kernel_api.metadata import DesignMetadata, GroupRowsOperandsMetadata
from kernel_api.providers.streams import on_stream
from kernel_api.providers.torch import TorchProvider
from kernel_api.space import Operands, Space

#: Groups whose number, and one more, int16 holds; the sort takes half as long as of int32.
_MOST_OF_INT16 = 2**15 - 2

_INTEGERS = "i64 | i32 | i16 | i8 | u64 | u32 | u16 | u8"


@TorchProvider.register
class TorchGroupRows(Kernel):
    """torch.Tensor.sort of group numbers, and torch.searchsorted for where each ends."""

    family: ClassVar[str] = "torch.group_rows"
    arguments = GroupRowsArguments
    devices: ClassVar[tuple[str, ...]] = ("cpu", "cuda")
    operands = (
        Operands(
            index=_INTEGERS,
            offsets="i32",
            row_index="i32",
            place="i32",
            accumulator="i32",
            majors="strided",
        ),
    )
    operands_metadata = GroupRowsOperandsMetadata
    space = Space()
    design = DesignMetadata

    def _run(
        self, args: Any, artifact: CompiledArtifact, stream: Any, workspace: Any = None
    ) -> None:
        with torch.no_grad(), on_stream(stream, args.device.index):
            index, groups = args.index.tensor, args.L
            # What is no group becomes -1 or E, and then E: behind all groups. Large ones of uint64
            # become negative.
            bounded = index.long().flatten().clamp(-1, groups)
            bounded = bounded.to(torch.int16 if groups <= _MOST_OF_INT16 else torch.int32)
            group, place = bounded.remainder(groups + 1).sort(stable=True)
            every = torch.arange(groups, dtype=group.dtype, device=index.device)
            ends = torch.searchsorted(group, every, right=True, out_int32=True)
            order = torch.arange(len(place), dtype=torch.int32, device=index.device)
            rank = torch.empty_like(order).index_copy_(0, place, order.where(group < groups, -1))
            args.offsets.tensor.copy_(ends)
            args.row_index.tensor.copy_(rank.view(index.shape))
            args.place.tensor.copy_(place)
            if args.weight is not None:
                args.grouped.tensor.copy_(args.weight.tensor.flatten().index_select(0, place))

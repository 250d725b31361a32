"""Rows sorted by group, counted one group after the other."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from kernel_api.arguments import GroupRowsArguments
from kernel_api.metadata import GroupRowsOperandsMetadata
from kernel_api.providers.reference import ReferenceProvider
from kernel_api.providers.reference.norm import ReferenceRows, Values
from kernel_api.space import Operands


@ReferenceProvider.register
class ReferenceGroupRows(ReferenceRows):
    """The pairs of each group in their order, and those of none at the end."""

    family: ClassVar[str] = "reference.group_rows"
    arguments = GroupRowsArguments
    operands = (
        Operands(
            index="any",
            offsets="any",
            row_index="any",
            place="any",
            accumulator="any",
            majors="strided",
        ),
    )
    operands_metadata = GroupRowsOperandsMetadata

    @classmethod
    def values(cls, args: Any, wide: torch.dtype) -> Values:
        group = args.index.tensor.long().flatten()
        group = group.where((group >= 0) & (group < args.L), args.L)
        found = [(group == one).nonzero().flatten() for one in group.unique().tolist()]
        place = torch.cat(found) if found else group
        counts = torch.bincount(group, minlength=args.L + 1)
        rank = torch.empty_like(place)
        rank[place] = torch.arange(len(place), device=place.device)
        values = {
            "offsets": counts.cumsum(0)[: args.L],
            "row_index": rank.where(group < args.L, -1).view(args.index.shape),
            "place": place,
        }
        if args.weight is not None:
            values["grouped"] = args.weight.tensor.flatten()[place].to(wide)
        return values

    @classmethod
    def same_dtype(cls, args: Any) -> Values:
        return cls.exact(args)

    @staticmethod
    def allowance(args: Any) -> Values:
        """Nothing: what is stored was counted, or copied."""
        return {}

"""Rows that an index names, in float64."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from kernel_api.arguments import GatherRowsArguments, ScatterRowsArguments
from kernel_api.metadata import NormOperandsMetadata
from kernel_api.providers.reference import ReferenceProvider
from kernel_api.providers.reference.norm import ReferenceRows, Values
from kernel_api.space import Operands
from kernel_api.verification import taken


class _IndexedRows(ReferenceRows):
    operands = (Operands(x="any", out="any", accumulator="any", majors="strided"),)
    operands_metadata = NormOperandsMetadata


@ReferenceProvider.register
class ReferenceGatherRows(_IndexedRows):
    """Σ over j of weight[m, j] · x[row_index[m, j]]."""

    family: ClassVar[str] = "reference.gather_rows"
    arguments = GatherRowsArguments

    @classmethod
    def values(cls, args: Any, wide: torch.dtype) -> Values:
        return {"out": _added(args, wide)}

    @staticmethod
    def allowance(args: Any) -> Values:
        """One rounding of the arithmetic at the scale of what is added up."""
        unit = 2.0**-52 if args.accumulator_type.bits == 64 else 2.0**-23
        return {"out": unit * _added(args, torch.float64, magnitudes=True)}


@ReferenceProvider.register
class ReferenceScatterRows(_IndexedRows):
    """weight[m, j] · x[m], for row row_index[m, j]."""

    family: ClassVar[str] = "reference.scatter_rows"
    arguments = ScatterRowsArguments

    @classmethod
    def values(cls, args: Any, wide: torch.dtype) -> Values:
        x, index, weight = args.x.tensor, args.row_index.tensor, _weight(args, wide)
        m, j = _within(index, args.out.shape[0]).nonzero(as_tuple=True)
        rows = taken(x, m).to(wide)
        return {"out": rows if weight is None else rows * weight[m, j, None]}

    @staticmethod
    def allowance(args: Any) -> Values:
        """Nothing: a product is rounded once to the type of the arithmetic, and then stored."""
        return {}


def _added(args: Any, wide: torch.dtype, *, magnitudes: bool = False) -> Any:
    """Rows times their weights, of each place in turn; or magnitudes of them, without NaN."""
    x, index, weight = args.x.tensor, args.row_index.tensor.long(), _weight(args, wide)
    whole = torch.zeros(args.M, args.N, dtype=wide, device=x.device)
    for j in range(args.k):
        (named,) = _within(index[:, j], len(x)).nonzero(as_tuple=True)
        rows = taken(x, index[named, j]).to(wide)
        if weight is not None:
            rows = rows * weight[named, j, None]
        whole[named] += rows.nan_to_num().abs() if magnitudes else rows
    return whole


def _weight(args: Any, wide: torch.dtype) -> Any:
    return None if args.weight is None else args.weight.tensor.to(wide)


def _within(index: Any, rows: int) -> Any:
    return (index >= 0) & (index < rows)

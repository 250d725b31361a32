"""Rows that an index names, in float64."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from kernel_api.arguments import GatherRowsArguments, ScatterRowsArguments
from kernel_api.artifact import CompiledArtifact
from kernel_api.kernel import Kernel
from kernel_api.metadata import DesignMetadata, NormOperandsMetadata
from kernel_api.providers.reference import ReferenceProvider
from kernel_api.providers.reference.epilogue import held, rounded, saturated
from kernel_api.providers.streams import on_stream
from kernel_api.space import Operands, Space

Values = dict[str, Any]


class _IndexedRows(Kernel):
    """Computed in float64 and rounded once; any float types, any strides. Values are those of the
    rows that are written."""

    devices = ("cpu", "cuda")
    operands = (Operands(x="any", out="any", accumulator="any", majors="strided"),)
    operands_metadata = NormOperandsMetadata
    space = Space()
    design = DesignMetadata

    def _run(
        self, args: Any, artifact: CompiledArtifact, stream: Any, workspace: Any = None
    ) -> None:
        with torch.no_grad(), on_stream(stream, args.device.index):
            rows = args.rows_written().get("out", ...)
            values = self.computed(args, torch.float64)
            args.out.tensor[rows] = rounded(values, args.out.dtype).to(args.out.dtype.torch)

    @classmethod
    def exact(cls, args: Any) -> Values:
        """The oracle of ``verify``: what is stored, before it is rounded, in float64."""
        return {"out": saturated(cls.computed(args, torch.float64), args.out.dtype).double()}

    @classmethod
    def same_dtype(cls, args: Any) -> Values:
        """As torch computes it in the type of the arithmetic, rounded once."""
        return {"out": held(cls.computed(args, args.accumulator_type.torch), args.out.dtype)}

    @classmethod
    def computed(cls, args: Any, wide: torch.dtype) -> Any:
        raise NotImplementedError


@ReferenceProvider.register
class ReferenceGatherRows(_IndexedRows):
    """Σ over j of weight[m, j] · x[row_index[m, j]]."""

    family: ClassVar[str] = "reference.gather_rows"
    arguments = GatherRowsArguments

    @classmethod
    def computed(cls, args: Any, wide: torch.dtype) -> Any:
        x, index, weight = args.x.tensor, args.row_index.tensor.long(), _weight(args, wide)
        whole = torch.zeros(args.M, args.N, dtype=wide, device=x.device)
        for j in range(args.k):
            (named,) = _within(index[:, j], len(x)).nonzero(as_tuple=True)
            rows = x[index[named, j]].to(wide)
            whole[named] += rows if weight is None else rows * weight[named, j, None]
        return whole

    @staticmethod
    def allowance(args: Any) -> Values:
        """One rounding of the arithmetic at the scale of what is added up."""
        unit = 2.0**-52 if args.accumulator_type.bits == 64 else 2.0**-23
        x, index, weight = args.x.tensor, args.row_index.tensor.long(), _weight(args, torch.float64)
        whole = torch.zeros(args.M, args.N, dtype=torch.float64, device=x.device)
        for j in range(args.k):
            (named,) = _within(index[:, j], len(x)).nonzero(as_tuple=True)
            rows = torch.nan_to_num(x[index[named, j]].double()).abs()
            whole[named] += rows if weight is None else rows * weight[named, j, None].abs()
        return {"out": unit * whole}


@ReferenceProvider.register
class ReferenceScatterRows(_IndexedRows):
    """weight[m, j] · x[m], for row row_index[m, j]."""

    family: ClassVar[str] = "reference.scatter_rows"
    arguments = ScatterRowsArguments

    @classmethod
    def computed(cls, args: Any, wide: torch.dtype) -> Any:
        x, index, weight = args.x.tensor, args.row_index.tensor, _weight(args, wide)
        m, j = _within(index, args.out.shape[0]).nonzero(as_tuple=True)
        rows = x[m].to(wide)
        return rows if weight is None else rows * weight[m, j, None]

    @staticmethod
    def allowance(args: Any) -> Values:
        """Nothing: a product is rounded once to the type of the arithmetic, and then stored."""
        return {}


def _weight(args: Any, wide: torch.dtype) -> Any:
    return None if args.weight is None else args.weight.tensor.to(wide)


def _within(index: Any, rows: int) -> Any:
    return (index >= 0) & (index < rows)

"""Rows that an index names, by torch's own indexing."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from kernel_api.arguments import GatherRowsArguments, ScatterRowsArguments
from kernel_api.artifact import CompiledArtifact
from kernel_api.kernel import Kernel
from kernel_api.metadata import DesignMetadata, NormOperandsMetadata
from kernel_api.providers.streams import on_stream
from kernel_api.providers.torch import TorchProvider
from kernel_api.space import Operands, Space

_FLOATS = "f32 | f16 | bf16"


class _IndexedRows(Kernel):
    """Sums and products in the type of the arithmetic, one choice after the other."""

    operands = (
        Operands(x=_FLOATS, out=_FLOATS, accumulator="f32", majors="strided"),
        Operands(x="f64", out=f"f64 | {_FLOATS}", accumulator="f64", majors="strided"),
    )
    operands_metadata = NormOperandsMetadata
    space = Space()
    design = DesignMetadata


@TorchProvider.register
class TorchGatherRows(_IndexedRows):
    """torch.Tensor.index_select, added up."""

    family: ClassVar[str] = "torch.gather_rows"
    arguments = GatherRowsArguments
    devices: ClassVar[tuple[str, ...]] = ("cpu", "cuda")

    def _run(
        self, args: Any, artifact: CompiledArtifact, stream: Any, workspace: Any = None
    ) -> None:
        with torch.no_grad(), on_stream(stream, args.device.index):
            x, index, wide = args.x.tensor, args.row_index.tensor, args.accumulator_type.torch
            whole = torch.zeros(args.M, args.N, dtype=wide, device=x.device)
            absent = (index < 0) | (index >= len(x))
            for j in range(args.k if len(x) else 0):
                rows = x.index_select(0, index[:, j].masked_fill(absent[:, j], 0)).to(wide)
                if args.weight is not None:
                    rows = rows * args.weight.tensor[:, j, None].to(wide)
                whole += rows.masked_fill_(absent[:, j, None], 0)
            args.out.tensor.copy_(whole)


@TorchProvider.register
class TorchScatterRows(_IndexedRows):
    """torch.Tensor.index_copy_; on a GPU it would wait for the number of rows."""

    family: ClassVar[str] = "torch.scatter_rows"
    arguments = ScatterRowsArguments
    devices: ClassVar[tuple[str, ...]] = ("cpu",)

    def _run(
        self, args: Any, artifact: CompiledArtifact, stream: Any, workspace: Any = None
    ) -> None:
        with torch.no_grad():
            index, wide = args.row_index.tensor, args.accumulator_type.torch
            m, j = ((index >= 0) & (index < args.out.shape[0])).nonzero(as_tuple=True)
            rows = args.x.tensor[m]
            if args.weight is not None:
                rows = rows.to(wide) * args.weight.tensor[m, j, None].to(wide)
            args.out.tensor[index[m, j].long()] = rows.to(args.out.dtype.torch)

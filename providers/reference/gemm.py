"""The dense matrix product in float64, and exactly for integers."""

from __future__ import annotations

from typing import Any, ClassVar

from kernel_api.arguments import GemmArguments
from kernel_api.artifact import CompiledArtifact
from kernel_api.kernel import Kernel
from kernel_api.metadata import DesignMetadata
from kernel_api.providers.reference import ReferenceProvider
from kernel_api.providers.streams import on_stream
from kernel_api.space import Operands, Space
from kernel_api.status import Status

#: Elements of the float64 copies that are held at a time.
_BLOCK_ELEMENTS = 1 << 27


@ReferenceProvider.register
class ReferenceGemm(Kernel):
    """out = A · B, computed in float64 (int64 for integers) and rounded once."""

    family: ClassVar[str] = "reference.gemm"
    arguments = GemmArguments
    devices = ("cpu", "cuda")
    operands = (Operands(A="any", B="any", out="any", accumulator="any", majors="strided"),)
    space = Space()
    design = DesignMetadata

    def _supports(self, args: Any) -> Status:
        for name, operand in zip(args.operand_names, args.operands, strict=True):
            if operand.dtype.kind == "other" and not operand.dtype.name.startswith("complex"):
                return Status.fail(
                    f"{name} is {operand.dtype}, which torch cannot convert to float64",
                    rule="element types",
                    operand=name,
                )
        return Status.success()

    def _run(
        self, args: Any, artifact: CompiledArtifact, stream: Any, workspace: Any = None
    ) -> None:
        with on_stream(stream):
            multiply_into(args.A.tensor, args.B.tensor, args.out.tensor)


def multiply_into(A: Any, B: Any, out: Any) -> None:
    """Write the exact product, rounded once to the type of ``out``; block by block of rows."""
    wide = B.to(_wide_type(A, B))
    rows = max(_BLOCK_ELEMENTS // max(A.shape[-1] + B.shape[-1], 1), 1)
    batches = range(A.shape[0]) if A.dim() == 3 else (None,)
    for batch in batches:
        a, b, d = (A, wide, out) if batch is None else (A[batch], wide[batch], out[batch])
        for start in range(0, a.shape[0], rows):
            block = product(a[start : start + rows], b)
            d[start : start + rows] = block.to(d.dtype)


def product(A: Any, B: Any) -> Any:
    """A · B in float64, complex128 or int64, for one matrix or a batch."""
    import torch

    wide = _wide_type(A, B)
    if wide is torch.int64 and A.is_cuda:
        # CUDA has no integer matmul in torch: float64 is exact below 2**53, the CPU always.
        bound = _magnitude(A) * _magnitude(B) * max(A.shape[-1], 1)
        if bound < 2**53:
            return (A.double() @ B.double()).to(torch.int64)
        return (A.cpu().to(wide) @ B.cpu().to(wide)).to(A.device)
    return A.to(wide) @ B.to(wide)


def _wide_type(A: Any, B: Any) -> Any:
    import torch

    if A.dtype.is_complex or B.dtype.is_complex:
        return torch.complex128
    floating = A.dtype.is_floating_point or B.dtype.is_floating_point
    return torch.float64 if floating else torch.int64


def _magnitude(tensor: Any) -> int:
    return int(tensor.long().abs().max()) if tensor.numel() else 0

"""The dense matrix product in float64, and exactly for integers."""

from __future__ import annotations

from typing import Any, ClassVar

from kernel_api.arguments import GemmArguments
from kernel_api.artifact import CompiledArtifact
from kernel_api.kernel import Kernel
from kernel_api.metadata import DesignMetadata
from kernel_api.providers.precision import float32_multiplication
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

    @staticmethod
    def exact(args: GemmArguments) -> dict[str, Any]:
        """The oracle of ``verify``: out in float64, complex128 or int64."""
        return {"out": product(args.A.tensor, args.B.tensor)}

    @staticmethod
    def same_dtype(args: GemmArguments) -> dict[str, Any]:
        """Out as torch computes it from the operands' own types, accumulated and rounded once."""
        return {"out": _same_dtype(args)}

    @staticmethod
    def bounds(args: GemmArguments) -> dict[str, float]:
        """K · u · max(|A|·|B|) for double precision: Higham, Accuracy and Stability of Numerical
        Algorithms, section 3.5."""
        A, B, out = args.tensors
        if out.dtype.itemsize < 8 or args.accumulator_type.bits < 64 or not out.numel():
            return {}
        magnitude = float(product(A.abs(), B.abs()).abs().max())
        return {"out": 2 * max(args.K, 1) * 2.0**-53 * magnitude}


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


def _same_dtype(args: GemmArguments) -> Any:
    import torch

    A, B, out = args.tensors
    multiply = torch.bmm if A.dim() == 3 else torch.mm
    if not (A.dtype.is_floating_point and B.dtype.is_floating_point):
        return product(A, B)
    if args.accumulator_type.bits == 64:
        return product(A, B)
    with torch.no_grad(), float32_multiplication(args.fp32_precision):
        if A.is_cuda and A.dtype is B.dtype and A.dtype in (torch.float16, torch.bfloat16):
            return multiply(A, B, out_dtype=torch.float32).to(out.dtype)
        a, b = A.float(), B.float()
        if args.fp32_precision == "tf32" and not A.is_cuda:
            a, b = _rounded_to_tf32(a), _rounded_to_tf32(b)
        return multiply(a, b).to(out.dtype)


def _rounded_to_tf32(x: Any) -> Any:
    """To nearest with 10 explicit mantissa bits, as the hardware's conversion does."""
    import torch

    bits = x.contiguous().view(torch.int32)
    return ((bits + 0x1000) & ~0x1FFF).view(torch.float32)


def _wide_type(A: Any, B: Any) -> Any:
    import torch

    if A.dtype.is_complex or B.dtype.is_complex:
        return torch.complex128
    floating = A.dtype.is_floating_point or B.dtype.is_floating_point
    return torch.float64 if floating else torch.int64


def _magnitude(tensor: Any) -> int:
    return int(tensor.long().abs().max()) if tensor.numel() else 0

"""The dense matrix product in float64, and exactly for integers."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from kernel_api import _float32
from kernel_api.arguments import GemmArguments
from kernel_api.arguments.scaled import BLOCK_MODES, expanded_scale
from kernel_api.providers.reference import ReferenceProvider
from kernel_api.providers.reference.oracle import ProductOracle, ReferenceProduct, floating
from kernel_api.providers.reference.tensor_cores import EIGHT_BITS, tensor_core_product
from kernel_api.space import Operands


class DenseOracle(ProductOracle):
    """Of a matrix product, or a batch."""

    def exact_product(self) -> Any:
        return exact_product(self.args)

    def float32_product(self) -> Any:
        return float32_product(self.args)

    def rounding(self) -> Any:
        return rounding(self.args)

    def out_scale(self, wide: Any) -> Any:
        return _scale(self.args, "out", wide)


@ReferenceProvider.register
class ReferenceGemm(ReferenceProduct):
    """out = A · B, computed in float64 (int64 for integers) and rounded once, to nearest; integers
    and 8-bit floats saturate, but of the product of integers ``out`` keeps the low bits.

    Operands and out may carry any scale, and the arguments any epilogue.
    """

    family: ClassVar[str] = "reference.gemm"
    arguments = GemmArguments
    oracle = DenseOracle
    operands = (
        Operands(
            A="any",
            B="any",
            out="any",
            accumulator="any",
            majors="strided",
            scales={"A": "any", "B": "any", "out": "any"},
        ),
    )


def exact_product(args: GemmArguments) -> Any:
    """In float64, complex128 or int64, scales of A and B applied."""
    A, B, _ = args.tensors
    wide = _wide_type(A, B, scaled=bool(args.scaled))
    by_blocks = any(getattr(args, name).mode in BLOCK_MODES for name in args.scaled)
    if args.scaled and not by_blocks and not floating(args):
        # Scales behind the sum, so that what cancels is exactly zero.
        exact = product(A, B).to(wide)
        for name in {"A", "B"} & set(args.scaled):
            exact = exact * _scale(args, name, wide)
        return exact
    return product(_real(args, "A", wide), _real(args, "B", wide))


def rounding(args: GemmArguments) -> Any:
    """See :meth:`ProductOracle.rounding`."""
    unit = args.K * 2.0**-52 if args.accumulator_type.bits == 64 else 2.0**-23
    wide = _wide_type(args.A.tensor, args.B.tensor, scaled=bool(args.scaled))
    rows = _norm(_real(args, "A", wide), -1)
    columns = _norm(_real(args, "B", wide), -2)
    return unit * rows * (columns.amax(-1, keepdim=True) if columns.numel() else 0.0)


def product(A: Any, B: Any) -> Any:
    """A · B in float64, complex128 or int64, for one matrix or a batch."""
    wide = _wide_type(A, B)
    if wide is torch.int64 and A.is_cuda:
        # CUDA has no integer matmul in torch: float64 is exact below 2**53, the CPU always.
        bound = _magnitude(A) * _magnitude(B) * max(A.shape[-1], 1)
        if bound < 2**53:
            return (A.double() @ B.double()).to(torch.int64)
        return (A.cpu().to(wide) @ B.cpu().to(wide)).to(A.device)
    return A.to(wide) @ B.to(wide)


def _norm(matrix: Any, mode: int) -> Any:
    finite = torch.nan_to_num(matrix, nan=0.0, posinf=0.0, neginf=0.0)
    return torch.linalg.vector_norm(finite, dim=mode, keepdim=True)


def float32_product(args: GemmArguments) -> Any:
    """The accumulator as torch computes it."""
    A, B, _ = args.tensors
    with torch.no_grad():
        if A.is_cuda and _hardware_multiplies(A, B):
            return tensor_core_product(args)
        a, b = _real(args, "A", torch.float32), _real(args, "B", torch.float32)
        if args.fp32_precision == "tf32x3":
            return _three_products(a, b)
        if args.fp32_precision == "tf32":
            a, b = _rounded_to_tf32(a), _rounded_to_tf32(b)
        with _float32.products("ieee"):
            return torch.matmul(a, b)


def _hardware_multiplies(A: Any, B: Any) -> bool:
    """Whether tensor cores multiply these types, with an accumulator that is not IEEE float32."""
    if A.dtype is B.dtype and A.dtype in (torch.float16, torch.bfloat16):
        return True
    eight_bits = all(t.dtype in EIGHT_BITS for t in (A, B))
    return eight_bits and torch.cuda.get_device_capability(A.device) >= (8, 9)


def _three_products(a: Any, b: Any) -> Any:
    """float32 as the sum of two tfloat32, the product of the smaller parts left out."""
    with _float32.products("ieee"):
        large_a, large_b = _cut_to_tf32(a), _cut_to_tf32(b)
        small_a, small_b = _rounded_to_tf32(a - large_a), _rounded_to_tf32(b - large_b)
        small = torch.matmul(small_a, large_b) + torch.matmul(large_a, small_b)
        return small + torch.matmul(large_a, large_b)


def _real(args: GemmArguments, name: str, wide: Any) -> Any:
    """What the stored values of an operand mean."""
    stored = getattr(args, name).tensor
    if name not in args.scaled:
        return stored if wide is stored.dtype else stored.to(wide)
    return stored.to(wide) * _scale(args, name, wide)


def _scale(args: GemmArguments, name: str, wide: Any) -> Any:
    operand = getattr(args, name)
    return expanded_scale(operand, args.modes[name], args.contracted).to(wide)


def _rounded_to_tf32(x: Any) -> Any:
    """To nearest with 10 explicit mantissa bits, as the hardware's conversion does."""
    bits = x.contiguous().view(torch.int32)
    return ((bits + 0x1000) & ~0x1FFF).view(torch.float32)


def _cut_to_tf32(x: Any) -> Any:
    return (x.contiguous().view(torch.int32) & ~0x1FFF).view(torch.float32)


def _wide_type(A: Any, B: Any, scaled: bool = False) -> Any:
    if A.dtype.is_complex or B.dtype.is_complex:
        return torch.complex128
    floating = A.dtype.is_floating_point or B.dtype.is_floating_point
    return torch.float64 if floating or scaled else torch.int64


def _magnitude(tensor: Any) -> int:
    return int(tensor.long().abs().max()) if tensor.numel() else 0

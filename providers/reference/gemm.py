"""The dense matrix product in float64, and exactly for integers."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from kernel_api.arguments import GemmArguments
from kernel_api.arguments.scaled import BLOCK_MODES, expanded_scale
from kernel_api.artifact import CompiledArtifact
from kernel_api.epilogue.tracing import RESULT
from kernel_api.kernel import Kernel
from kernel_api.metadata import DesignMetadata
from kernel_api.operands import Operand
from kernel_api.providers.precision import float32_multiplication
from kernel_api.providers.reference import ReferenceProvider
from kernel_api.providers.reference.epilogue import evaluate, rounded, saturated
from kernel_api.providers.reference.tensor_cores import EIGHT_BITS, tensor_core_product
from kernel_api.providers.streams import on_stream
from kernel_api.space import Operands, Space
from kernel_api.status import Status
from kernel_api.verification import FACTOR


@ReferenceProvider.register
class ReferenceGemm(Kernel):
    """out = A · B, computed in float64 (int64 for integers) and rounded once.

    Operands and out may carry any scale, and the arguments any epilogue.
    """

    family: ClassVar[str] = "reference.gemm"
    arguments = GemmArguments
    devices = ("cpu", "cuda")
    any_epilogue = True
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
    space = Space()
    design = DesignMetadata

    def _supports(self, args: Any) -> Status:
        real_out = not args.out.tensor.dtype.is_complex
        if real_out and (args.A.tensor.dtype.is_complex or args.B.tensor.dtype.is_complex):
            return Status.fail(
                f"out is {args.out.dtype}; a complex product needs a complex out",
                rule="element types",
                operand="out",
            )
        if args.epilogue is not None and args.A.tensor.dtype.is_complex:
            return Status.fail(
                f"A is {args.A.dtype}; epilogues compute with real numbers",
                rule="element types",
                operand="A",
            )
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
        with torch.no_grad(), on_stream(stream, args.device.index):
            if args.epilogue is None:
                out = args.out.tensor
                out.copy_(self.exact(args)["out"].to(out.dtype))
                return
            for name, values in self.exact(args).items():
                written = args.outputs[name]
                written.tensor.copy_(rounded(values, written.dtype))

    @staticmethod
    def exact(args: GemmArguments) -> dict[str, Any]:
        """The oracle of ``verify``: what is stored, before it is rounded, in float64, complex128
        or int64."""
        result = _exact_product(args)
        if args.epilogue is not None:
            return _fused(args, result, wide=True)
        wide = result.dtype
        return {"out": result / _scale(args, "out", wide) if "out" in args.scaled else result}

    @staticmethod
    def same_dtype(args: GemmArguments) -> dict[str, Any]:
        """Outputs as torch computes them from the operands' own types, rounded once; integers
        that an epilogue computes are not rounded."""
        exact = args.accumulator_type.bits == 64 or not _floating(args)
        if args.epilogue is None:
            return ReferenceGemm.exact(args) if exact else {"out": _same_dtype(args)}
        product = _exact_product(args) if exact else _float32_product(args)
        found = _fused(args, product, wide=False)
        return {name: _as_stored(values, args.outputs[name]) for name, values in found.items()}

    @staticmethod
    def allowance(args: GemmArguments) -> dict[str, Any]:
        """Per row i: u · ‖a_i‖ · max‖b_j‖, one rounding of the accumulator at the scale of the
        data; in float64 K times that, the bound of Higham, Accuracy and Stability of Numerical
        Algorithms, section 3.5 (with the norms for |a|·|b|).

        Of an epilogue's outputs: what they change by where the accumulator is off by as much as
        a plain product may be. Steps (a comparison, a cast) are allowed where that crosses them.
        """
        if args.epilogue is not None:
            return _fused_allowance(args)
        integers = args.out.dtype.kind in ("int", "uint", "bool")
        if not _floating(args) or not args.writes_anything or integers:
            return {}
        allowed = _rounding(args)
        if "out" in args.scaled:
            allowed = allowed / _scale(args, "out", allowed.dtype).abs()
        return {"out": allowed.expand(*args.out.shape[:-1], 1)}


def _exact_product(args: GemmArguments) -> Any:
    A, B, _ = args.tensors
    wide = _wide_type(A, B, scaled=bool(args.scaled))
    by_blocks = any(getattr(args, name).mode in BLOCK_MODES for name in args.scaled)
    if args.scaled and not by_blocks and not _floating(args):
        # Scales behind the sum, so that what cancels is exactly zero.
        exact = product(A, B).to(wide)
        for name in {"A", "B"} & set(args.scaled):
            exact = exact * _scale(args, name, wide)
        return exact
    return product(_real(args, "A", wide), _real(args, "B", wide))


def _rounding(args: GemmArguments) -> Any:
    """What one rounding of the accumulator costs, or in float64 the bound on all: (..., M, 1)."""
    unit = args.K * 2.0**-52 if args.accumulator_type.bits == 64 else 2.0**-23
    wide = _wide_type(args.A.tensor, args.B.tensor)
    rows = _norm(_real(args, "A", wide), -1)
    columns = _norm(_real(args, "B", wide), -2)
    return unit * rows * (columns.amax(-1, keepdim=True) if columns.numel() else 0.0)


def _fused(args: GemmArguments, product: Any, *, wide: bool) -> dict[str, Any]:
    """Every output of the epilogue, in the shape that it is stored with."""
    assert args.epilogue is not None
    double = args.accumulator_type.bits == 64
    graph, operands = args.epilogue.graph, args.epilogue.operands
    found = evaluate(graph, product, operands, wide=wide, double=double)
    found = {"out": found.pop(RESULT), **found}
    if "out" in args.scaled:
        result = found["out"]
        found["out"] = result / _scale(args, "out", result.dtype)
    shaped = {}
    for name, operand in args.outputs.items():
        values = saturated(found[name], operand.dtype).reshape(operand.shape)
        shaped[name] = values.to(torch.float64) if wide else values
    return shaped


def _as_stored(values: Any, operand: Operand) -> Any:
    return rounded(values, operand.dtype) if operand.dtype.is_float else values


def _fused_allowance(args: GemmArguments) -> dict[str, Any]:
    outputs = {name: 0.0 if o.dtype.is_float else 0.5 for name, o in args.outputs.items()}
    if not _floating(args) or not args.K or not args.writes_anything:
        return {n: torch.full((), least) for n, least in outputs.items() if least}
    product = _exact_product(args)
    error = _rounding(args)
    if args.accumulator_type.bits < 64:
        off = torch.nan_to_num(_float32_product(args).double() - product, posinf=0.0, neginf=0.0)
        error = error + FACTOR * (off.abs().max() if off.numel() else 0.0)
    exact = _fused(args, product, wide=True)
    generator = torch.Generator(device=product.device).manual_seed(0)
    drawn = torch.randint(0, 2, product.shape, generator=generator, device=product.device)
    signs = 2.0 * drawn - 1.0
    allowed = {name: torch.full_like(exact[name], least) for name, least in outputs.items()}
    for direction in (1.0, -1.0, signs, -signs):
        for name, values in _fused(args, product + direction * error, wide=True).items():
            change = torch.nan_to_num(values - exact[name], posinf=0.0, neginf=0.0).abs()
            allowed[name] = torch.maximum(allowed[name], outputs[name] + change)
    return allowed


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


def _floating(args: GemmArguments) -> bool:
    return all(t.dtype.is_floating_point for t in (args.A.tensor, args.B.tensor))


def _same_dtype(args: GemmArguments) -> Any:
    result = _float32_product(args)
    if "out" in args.scaled:
        result = result / _scale(args, "out", torch.float32)
    return result.to(args.out.tensor.dtype)


def _float32_product(args: GemmArguments) -> Any:
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
        with float32_multiplication("ieee"):
            return torch.matmul(a, b)


def _hardware_multiplies(A: Any, B: Any) -> bool:
    """Whether tensor cores multiply these types, with an accumulator that is not IEEE float32."""
    if A.dtype is B.dtype and A.dtype in (torch.float16, torch.bfloat16):
        return True
    eight_bits = all(t.dtype in EIGHT_BITS for t in (A, B))
    return eight_bits and torch.cuda.get_device_capability(A.device) >= (8, 9)


def _three_products(a: Any, b: Any) -> Any:
    """float32 as the sum of two tfloat32, the product of the smaller parts left out."""
    with float32_multiplication("ieee"):
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

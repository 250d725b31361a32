"""Is a kernel's result right? The error-ratio rule, poisoned outputs, untouched inputs.

The reference is computed in float64 (exactly for integers). A kernel may be off by at most

    max|out − ref| ≤ factor · max|same-dtype torch − ref| + one unit in the last place of max|ref|

with factor 2, or 3 where it accumulates in another order. The same holds per row, relative to the
row's norm, so that a few wrong rows cannot hide behind a large maximum. float64 results have no
wider reference: they are held to the classical bound K · u · max(|A|·|B|) (Higham, Accuracy and
Stability of Numerical Algorithms, section 3.5).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kernel_api.errors import ArgumentError

if TYPE_CHECKING:
    from kernel_api.arguments import Arguments, GemmArguments
    from kernel_api.kernel import Kernel

FACTOR, FACTOR_REORDERED = 2.0, 3.0


@dataclass(frozen=True)
class Verification:
    """Truthy if the result is right.

    Attributes:
        passed: The verdict.
        error_ratio: Largest error in units of the allowed one; at most 1 if passed.
        max_abs_error: Largest absolute error.
        reason: What was wrong; None if nothing.
    """

    passed: bool
    error_ratio: float
    max_abs_error: float
    reason: str | None = None

    def __bool__(self) -> bool:
        return self.passed

    def __str__(self) -> str:
        verdict = "passed" if self.passed else f"failed: {self.reason}"
        return f"{verdict} (error {self.error_ratio:.2f} of the allowed)"


def verify(kernel: Kernel, args: Arguments, *, stream: Any = None) -> Verification:
    """Run the kernel on poisoned outputs and compare with the reference.

    Overwrites the outputs. Raises what ``kernel.run`` raises; a wrong result is a falsy
    Verification, not an error.
    """
    from kernel_api.arguments import GemmArguments

    if not isinstance(args, GemmArguments):
        raise ArgumentError(f"verify has no reference for {type(args).__name__}")
    inputs = [(n, getattr(args, n)) for n in args.operand_names if n not in args.output_names]
    before = [operand.tensor.clone() for _, operand in inputs]
    guards = {name: _Guard(getattr(args, name).tensor) for name in args.output_names}
    kernel.run(args, stream=stream)
    _synchronize(args)
    for (name, operand), copy in zip(inputs, before, strict=True):
        if not _same_bits(operand.tensor, copy):
            return _failed(f"the kernel changed its input {name}")
    for name, guard in guards.items():
        if guard.broken():
            return _failed(f"the kernel wrote outside of {name}, into memory between its rows")
    factor = FACTOR_REORDERED if kernel.reorders_accumulation else FACTOR
    return _compare_gemm(args, factor)


def _failed(reason: str, error: float = float("inf"), ratio: float = float("inf")) -> Verification:
    return Verification(False, ratio, error, reason)


def _synchronize(args: Arguments) -> None:
    if args.device.type == "cuda":
        import torch

        torch.cuda.synchronize(args.device)


def _same_bits(a: Any, b: Any) -> bool:
    import torch

    return bool(torch.equal(_bits(a), _bits(b)))


def _bits(tensor: Any) -> Any:
    import torch

    packed = tensor.contiguous()
    if packed.dtype is torch.bool or packed.dtype.is_complex:
        return packed
    sizes = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return packed.view(sizes[packed.element_size()])


class _Guard:
    """Poisons an output, and remembers the memory between its rows."""

    #: Storage far larger than the output (a slice of a big buffer) is not copied.
    LARGEST_SHARE = 16

    def __init__(self, out: Any) -> None:
        import torch

        self._out = out
        storage = out.untyped_storage()
        own = out.numel() * out.element_size()
        self._watch = own < storage.nbytes() <= self.LARGEST_SHARE * max(own, 1 << 20)
        poison(out)
        if self._watch:
            self._bytes = torch.empty(0, dtype=torch.uint8, device=out.device).set_(storage)
            self._before = self._bytes.clone()

    def broken(self) -> bool:
        import torch

        if not self._watch:
            return False
        after = self._bytes.clone()
        view = torch.empty(0, dtype=self._out.dtype, device=self._out.device).set_(
            self._before.untyped_storage(),
            self._out.storage_offset(),
            self._out.shape,
            self._out.stride(),
        )
        view.copy_(self._out)
        return not torch.equal(after, self._before)


def poison(out: Any) -> None:
    """Fill with what no right result contains: NaN, or the lowest integer."""
    import torch

    if out.dtype.is_floating_point or out.dtype.is_complex:
        out.fill_(float("nan"))
    elif out.dtype is not torch.bool:
        out.fill_(torch.iinfo(out.dtype).min)


def _compare_gemm(args: GemmArguments, factor: float) -> Verification:
    from kernel_api.providers.reference.gemm import product

    A, B, out = args.tensors
    if out.numel() == 0:
        return Verification(True, 0.0, 0.0)
    ref = product(A, B)
    if not out.dtype.is_floating_point:
        return _compare_exactly(out, ref)
    if out.dtype.itemsize == 8:
        bound = A.shape[-1] * 2.0**-53 * product(A.abs(), B.abs()).max().item()
        return compare(out, ref, ref, factor=1.0, floor=bound)
    base = _same_dtype_torch(args)
    return compare(out, ref, base, factor=factor)


def _compare_exactly(out: Any, ref: Any) -> Verification:
    import torch

    expected = ref.to(out.dtype)
    if torch.equal(out, expected):
        return Verification(True, 0.0, 0.0)
    wrong = int((out != expected).sum())
    error = float((out.double() - expected.double()).abs().max())
    return _failed(f"{wrong} of {out.numel()} integers differ", error)


def compare(
    out: Any, ref: Any, base: Any, *, factor: float = FACTOR, floor: float | None = None
) -> Verification:
    """The error-ratio rule on tensors: ``base`` is what the same dtype gives in torch.

    ``floor`` is one unit in the last place of the largest reference value by default.
    """
    import torch

    ref, wide, base = ref.double(), out.double(), base.double()
    expected_finite = torch.isfinite(ref) & torch.isfinite(base)
    if not bool(torch.isfinite(wide)[expected_finite].all()):
        count = int((~torch.isfinite(wide) & expected_finite).sum())
        return _failed(f"{count} of {out.numel()} elements are not finite")
    not_a_number = torch.isnan(ref)
    if not bool(torch.isnan(wide)[not_a_number].all()):
        return _failed("a NaN of the inputs is lost")
    zero = torch.zeros((), dtype=torch.float64, device=ref.device)
    ref = torch.where(expected_finite, ref, zero)
    error = torch.where(expected_finite, wide, zero) - ref
    base_error = torch.where(expected_finite, base, zero) - ref
    if floor is None:
        floor = torch.finfo(out.dtype).eps * float(ref.abs().max())
    largest = float(error.abs().max())
    allowed = factor * float(base_error.abs().max()) + floor
    ratio = largest / allowed if allowed else (0.0 if largest == 0 else float("inf"))
    if ratio > 1:
        return _failed(f"largest error {largest:.3g}, allowed {allowed:.3g}", largest, ratio)
    row_ratio = _row_ratio(error, base_error, ref, out.dtype, factor, floor)
    if row_ratio > 1:
        return _failed(
            f"a row is off by {row_ratio:.2f} of what is allowed relative to its norm",
            largest,
            row_ratio,
        )
    return Verification(True, max(ratio, row_ratio), largest)


def _row_ratio(
    error: Any, base_error: Any, ref: Any, out_dtype: Any, factor: float, floor: float
) -> float:
    """Worst row: its error norm over what is allowed for it."""
    import torch

    norm = torch.linalg.vector_norm
    worst_base = norm(base_error, dim=-1) / norm(ref, dim=-1).clamp_min(1e-300)
    # A row's own rounding varies; the worst row of the baseline is what any row may have.
    allowed_relative = factor * worst_base.max() + torch.finfo(out_dtype).eps
    width = max(ref.shape[-1], 1) ** 0.5
    allowed = allowed_relative * norm(ref, dim=-1) + floor * width
    found = norm(error, dim=-1)
    return float(torch.where(found > 0, found / allowed.clamp_min(1e-300), found).max())


def _same_dtype_torch(args: GemmArguments) -> Any:
    """What torch gives with the operands' types and one rounding to the type of ``out``."""
    import torch

    from kernel_api.providers.torch.gemm import float32_multiplication

    A, B, out = args.tensors
    multiply = torch.bmm if A.dim() == 3 else torch.mm
    with torch.no_grad(), float32_multiplication(args.fp32_precision):
        if A.is_cuda and A.dtype is B.dtype and A.dtype in (torch.float16, torch.bfloat16):
            return multiply(A, B, out_dtype=torch.float32).to(out.dtype)
        a, b = A.float(), B.float()
        if args.fp32_precision == "tf32" and not A.is_cuda:
            a, b = _rounded_to_tf32(a), _rounded_to_tf32(b)
        return multiply(a, b).to(out.dtype)


def _rounded_to_tf32(x: Any) -> Any:
    """Round to nearest with 10 explicit mantissa bits, as the hardware's conversion does."""
    import torch

    bits = x.view(torch.int32)
    return ((bits + 0x1000) & ~0x1FFF).view(torch.float32)

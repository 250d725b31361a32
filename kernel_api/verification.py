"""Is a kernel's result right? The error-ratio rule, poisoned outputs, untouched inputs.

The reference is computed in float64 (exactly for integers). A kernel may be off by at most

    max|out − ref| ≤ factor · max|same-dtype torch − ref| + one unit in the last place of max|ref|

with factor 2, or 3 where it accumulates in another order or the arguments ask for what is less
precise. The same holds per row, relative to the row's norm, so that a few wrong rows cannot hide
behind a large maximum; but rows of which the baseline has hardly a digit right, as they cancel or
the type does not hold them, may be off by what that is off in them, or in the worst that is alike.
Integers and infinities must be equal, powers of two (e8m0) but for some that are next to the right
one. Where the type of the baseline does not hold what the reference does, a result is that of
either. The reference may add an allowance: what one rounding of the accumulator costs, because the
baseline's error can be small by luck; for float64 an error bound, because there is nothing wider to
compare with; behind an epilogue what all that changes, and half a unit for the integers that it
rounds.

Rows of an output that are not written have to stay. An output that is added to begins with numbers
that are the same every time.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol, cast

from kernel_api.arguments.experts import ExpertPointers, memory_of
from kernel_api.arguments.scaled import ScaledOperand
from kernel_api.errors import ArgumentError
from kernel_api.provider import providers

if TYPE_CHECKING:
    from kernel_api.arguments import Arguments
    from kernel_api.kernel import Kernel
    from kernel_api.operands import Operand

FACTOR, FACTOR_REORDERED = 2.0, 3.0

#: Elements of float64 temporaries that a comparison holds at a time.
_BLOCK_ELEMENTS = 1 << 25


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


class Oracle(Protocol):
    """What the ``reference`` provider's kernel classes offer beside running."""

    def exact(self, args: Any) -> dict[str, Any]:
        """Every output in float64, complex128 or int64."""

    def same_dtype(self, args: Any) -> dict[str, Any]:
        """Every output as torch computes it in the operands' own types."""

    def allowance(self, args: Any) -> dict[str, Any]:
        """Absolute error that is always allowed: of the output's shape, or one per row."""


def verify(kernel: Kernel, args: Arguments, *, stream: Any = None) -> Verification:
    """Run the kernel on poisoned outputs and compare with the reference.

    Overwrites the outputs. Raises what ``kernel.run`` raises; a wrong result is a falsy
    Verification, not an error.
    """
    from kernel_api.kernel import Kernel

    if not isinstance(kernel, Kernel):
        raise ArgumentError(
            f"kernel is a {type(kernel).__name__}; expected one that get_kernels returns"
        )
    _oracle(args)  # before anything runs
    broken = conduct(args, lambda: kernel.run(args, stream=stream))
    if broken is not None:
        return _failed(broken)
    return judge(args, factor_of(kernel))


def factor_of(kernel: Kernel) -> float:
    """How often the error of the same-dtype baseline is allowed."""
    return FACTOR_REORDERED if kernel.reorders_accumulation else FACTOR


def conduct(args: Arguments, run: Callable[[], Any]) -> str | None:
    """Run what computes the outputs, which are poisoned before, and see that it touches nothing
    else; what it did, if it did."""
    outputs = args.outputs
    inputs: list[tuple[str, Operand]] = []
    for name, operand in args.named_operands.items():
        if name not in outputs and name not in args.in_place:
            inputs.append((f"its input {name}", operand))
        scaled = (one for one in memory_of(operand) if isinstance(one, ScaledOperand))
        inputs += [(f"the scale of {name}", one.scale) for one in scaled]
    before = [[part.tensor.clone() for part in memory_of(operand)] for _, operand in inputs]
    prepare(args)
    written = [(name, one) for name, o in outputs.items() for one in _written(o)]
    guards = [(name, _Guard(one, [other for _, other in written])) for name, one in written]
    rest = {n: _Rest(outputs[n].tensor, rows) for n, rows in args.rows_written().items()}
    run()
    _synchronize(args)
    for (what, operand), copies in zip(inputs, before, strict=True):
        parts = zip(memory_of(operand), copies, strict=True)
        if not all(_same_bits(part.tensor, copy) for part, copy in parts):
            return f"the kernel changed {what}"
    for name, guard in guards:
        if guard.broken():
            return f"the kernel wrote outside of {name}, into memory between its rows"
    for name, others in rest.items():
        if others.broken():
            return f"the kernel wrote rows of {name} that are none of the result's"
    return None


def prepare(args: Arguments) -> None:
    """Poison the outputs; those that are read, too, get the numbers that they begin with."""
    read = _read_outputs(args)
    for name, operand in args.outputs.items():
        for tensor in _written(operand):
            if name in read:
                _begin(tensor)
            else:
                poison(tensor)


def _read_outputs(args: Arguments) -> tuple[str, ...]:
    """Names of outputs that are added to, or hold an operand."""
    return (*args.accumulated, *args.overwriting)


def _written(operand: Operand) -> list[Any]:
    """The tensors that an output is written to."""
    if isinstance(operand, ExpertPointers):
        raise ArgumentError(
            "an output is given by addresses, and verify looks at tensors; pass a list of them"
        )
    return [part.tensor for part in memory_of(operand)]


def _whole(operand: Operand) -> Any:
    """What is in an output."""
    import torch

    return torch.stack(_written(operand)) if operand.discrete else operand.tensor


def _begin(out: Any) -> None:
    """Fill with numbers that depend on its shape alone."""
    import torch

    random = torch.Generator(out.device).manual_seed(0)
    if out.dtype.is_floating_point:
        drawn = torch.randn(out.shape, generator=random, device=out.device)
    else:
        drawn = torch.randint(0, 9, out.shape, generator=random, device=out.device)
    out.copy_(drawn)


def _oracle(args: Arguments) -> Oracle:
    for provider in providers(["reference"]):
        for family in provider.families():
            if family.arguments is not None and isinstance(args, family.arguments):
                return cast(Oracle, family)
    raise ArgumentError(f"there is no reference for {type(args).__name__}")


def judge(args: Arguments, factor: float = FACTOR) -> Verification:
    """Compare what stands in the outputs with the reference, by the error-ratio rule."""
    return Expected(args).judge(args, factor)


class Expected:
    """What the reference computes from the inputs of some arguments, to judge outputs by.

    Raises ArgumentError where there is no reference.
    """

    def __init__(self, args: Arguments) -> None:
        from kernel_api._autocast import off

        oracle = _oracle(args)
        with _beginnings(args), off():
            self._exact = oracle.exact(args)
            self._allowance = oracle.allowance(args)
            self._base = oracle.same_dtype(args)

    def judge(self, args: Arguments, factor: float = FACTOR) -> Verification:
        """Of outputs that were computed from the same inputs."""
        factor = max(factor, args.least_factor)
        worst = Verification(True, 0.0, 0.0)
        rows = args.rows_written()
        for name, ref in self._exact.items():
            out, base = taken(_whole(args.outputs[name]), rows.get(name, ...)), self._base[name]
            found = compare(out, ref, base, factor=factor, allowance=self._allowance.get(name))
            if not found:
                several = len(self._exact) > 1
                return replace(found, reason=f"{name}: {found.reason}") if several else found
            worst = max(worst, found, key=lambda v: v.error_ratio)
        return worst


@contextlib.contextmanager
def _beginnings(args: Arguments) -> Iterator[None]:
    """Within it, outputs that are read, too, hold what they begin with."""
    tensors = [one for name in _read_outputs(args) for one in _written(args.outputs[name])]
    kept = [tensor.clone() for tensor in tensors]
    for tensor in tensors:
        _begin(tensor)
    yield
    for tensor, before in zip(tensors, kept, strict=True):
        tensor.copy_(before)


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
    if packed.dtype.is_complex:
        packed = torch.view_as_real(packed.resolve_conj())
    if packed.dtype is torch.bool:
        return packed
    sizes = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return packed.view(sizes[packed.element_size()])


class _Guard:
    """Remembers the memory around an output, between its rows.

    Args:
        out: The output.
        written: Every output, which may be parts of one storage.
    """

    #: Storage far larger than the output (a slice of a big buffer) is not copied.
    LARGEST_SHARE = 16

    def __init__(self, out: Any, written: Iterable[Any]) -> None:
        import torch

        storage = out.untyped_storage()
        own = out.numel() * out.element_size()
        self._watch = own < storage.nbytes() <= self.LARGEST_SHARE * max(own, 1 << 20)
        if self._watch:
            here = storage.data_ptr()
            self._written = [t for t in written if t.untyped_storage().data_ptr() == here]
            self._bytes = torch.empty(0, dtype=torch.uint8, device=out.device).set_(storage)
            self._before = self._bytes.clone()

    def broken(self) -> bool:
        import torch

        if not self._watch:
            return False
        for out in self._written:
            view = torch.empty(0, dtype=out.dtype, device=out.device).set_(
                self._before.untyped_storage(), out.storage_offset(), out.shape, out.stride()
            )
            view.copy_(out)
        return not torch.equal(self._bytes, self._before)


class _Rest:
    """Remembers the rows of an output that are not to be written.

    Args:
        written: Indexes those that are.
    """

    def __init__(self, out: Any, written: Any) -> None:
        import torch

        self._out = out
        self._rows = torch.ones(len(out), dtype=torch.bool, device=out.device)
        self._rows[written] = False
        self._before = _bits(out)[self._rows]

    def broken(self) -> bool:
        import torch

        return not torch.equal(_bits(self._out)[self._rows], self._before)


def taken(tensor: Any, index: Any) -> Any:
    """``tensor[index]``."""
    import torch

    if tensor.element_size() > 1:
        return tensor[index]
    # Before torch 2.10 the CPU takes no rows of 8-bit floats by their places.
    return tensor.view(torch.uint8)[index].view(tensor.dtype)


def poison(out: Any) -> None:
    """Fill with what a right result hardly contains: NaN, or the largest integer."""
    import torch

    if out.dtype.is_floating_point or out.dtype.is_complex:
        out.fill_(float("nan"))
    else:
        out.fill_(True if out.dtype is torch.bool else torch.iinfo(out.dtype).max)


def compare(
    out: Any, ref: Any, base: Any, *, factor: float = FACTOR, allowance: Any = None
) -> Verification:
    """The error-ratio rule on tensors.

    Args:
        out: What is judged.
        ref: The exact result, in float64, complex128 or int64.
        base: What the same dtype gives in torch.
        factor: How often its error is allowed.
        allowance: Absolute error that is always allowed, of out's shape or one per row,
            (..., M, 1). Integers without an allowance must be equal.
    """
    import torch

    if out.numel() == 0:
        return Verification(True, 0.0, 0.0)
    if out.dtype is torch.float8_e8m0fnu:
        return _compare_powers(out, ref, base, factor)
    if allowance is None and not (out.dtype.is_floating_point or out.dtype.is_complex):
        return _compare_exactly(out, ref)
    return _Limits(out, ref, base, factor, allowance).judge()


def _compare_exactly(out: Any, ref: Any) -> Verification:
    import torch

    expected = ref.to(out.dtype)
    if torch.equal(out, expected):
        return Verification(True, 0.0, 0.0)
    wrong = int((out != expected).sum())
    error = float((out.double() - expected.double()).abs().max())
    return _failed(f"{wrong} of {out.numel()} integers differ", error)


def _compare_powers(out: Any, ref: Any, base: Any, factor: float) -> Verification:
    """Of two, by their exponents. One that is the next to the right one may come of a maximum that
    is all but a power of two: of these there are few."""
    import torch

    found, right, near = (
        t.to(torch.float8_e8m0fnu).view(torch.uint8).int() for t in (out, ref, base)
    )
    off, allowed = (found - right).abs(), factor * int((near != right).sum()) + out.numel() // 64
    wrong, most = int((off > 0).sum()), int(off.max())
    if most > 1 or wrong > allowed:
        error = float((out.double() - right.double().sub(127).exp2()).abs().max())
        return _failed(
            f"{wrong} of {out.numel()} powers of two differ, by 2 ** {most} at most", error
        )
    return Verification(True, wrong / max(allowed, 1), 0.0)


class _Limits:
    """What is allowed, from one pass over the baseline; then one pass over the result."""

    def __init__(self, out: Any, ref: Any, base: Any, factor: float, allowance: Any) -> None:
        import torch

        if out.dtype.is_complex:  # the product of real matrices may be stored so, too
            ref, base = ref.to(torch.complex128), base.to(torch.complex128)
            if allowance is not None:
                allowance = allowance.expand_as(out) * (1 + 1j)
        self._out, self._ref, self._base = (_as_rows(t) for t in (out, ref, base))
        self._dtype = self._out.dtype
        floating = out.dtype.is_floating_point or out.dtype.is_complex
        self._eps = torch.finfo(out.dtype).eps if floating else 0.0
        self._allowance = None if allowance is None else _as_rows(allowance)
        largest_ref = largest_error = worst_row = lost = 0.0
        for _, ref_rows, base_rows, finite, _ in self._blocks():
            base_error = torch.where(finite, base_rows - ref_rows, 0.0)
            ref_rows = torch.where(finite, ref_rows, 0.0)
            largest_ref = max(largest_ref, float(ref_rows.abs().max()))
            largest_error = max(largest_error, float(base_error.abs().max()))
            error, norm = _norm(base_error), _norm(ref_rows)
            cancels = error > _LOST * norm
            lost = max(lost, float(torch.where(cancels, error, 0.0).max()))
            relative = torch.where(cancels, 0.0, error / norm.clamp_min(_TINY))
            worst_row = max(worst_row, float(relative.max()))
        self._allowed = factor * largest_error + self._eps * largest_ref
        # Rows differ in rounding: any row may have what the baseline's worst row has, and if it
        # cancels as much as others, what the worst of these has.
        self._row = factor * worst_row + self._eps
        self._factor, self._worst_lost = factor, lost

    def judge(self) -> Verification:
        import torch

        largest = worst = worst_row = 0.0
        for out_rows, ref_rows, base_rows, finite, allowance in self._blocks():
            if not bool(torch.isfinite(out_rows)[finite].all()):
                return _failed("elements are not finite where the reference is")
            if not bool(torch.isnan(out_rows)[torch.isnan(ref_rows)].all()):
                return _failed("a NaN of the inputs is lost")
            infinite = torch.isinf(ref_rows)
            if not torch.equal(out_rows[infinite], ref_rows[infinite]):
                return _failed("an infinity of the inputs is lost")
            beyond = torch.isfinite(ref_rows) & ~torch.isfinite(base_rows)
            if not self._are_of_either(*(t[beyond] for t in (out_rows, ref_rows, base_rows))):
                return _failed("elements are wrong where torch in the same type overflows")
            error = torch.where(finite, out_rows - ref_rows, 0.0)
            ref_rows = torch.where(finite, ref_rows, 0.0)
            largest = max(largest, float(error.abs().max()))
            worst = max(worst, _worst(error.abs(), self._allowed + allowance))
            norm, base_error = _norm(ref_rows), torch.where(finite, base_rows - ref_rows, 0.0)
            row_allowed = self._row * norm + _norm(allowance.expand_as(error))
            row_allowed = self._with_lost(row_allowed, norm, _norm(base_error))
            worst_row = max(worst_row, _worst(_norm(error), row_allowed))
        if worst > 1:
            text = f"largest error {largest:.3g}, {worst:.2f} of what is allowed"
            return _failed(text, largest, worst)
        if worst_row > 1:
            text = f"a row is off by {worst_row:.2f} of what is allowed relative to its norm"
            return _failed(text, largest, worst_row)
        return Verification(True, max(worst, worst_row), largest)

    def _with_lost(self, allowed: Any, norm: Any, base_error: Any) -> Any:
        """What is allowed in rows, also for having hardly a digit right as the baseline has not:
        the error of the worst of such rows where one is like those, else that of the same row. But
        a row that is missing is not like one that the baseline has."""
        import torch

        cancels = self._cancel(norm, base_error)
        allowed = allowed + torch.where(cancels, self._factor * self._worst_lost, 0.0)
        present = torch.maximum(base_error, (1 - _LOST) * norm)
        own = torch.minimum(self._factor * base_error, present)
        return torch.where(base_error > _LOST * norm, torch.maximum(allowed, own), allowed)

    def _cancel(self, norm: Any, base_error: Any) -> Any:
        """Whether rows cancel as those do of which the baseline has no digit: altogether; or
        somewhat, and the baseline has about the error of those."""
        altogether = norm <= self._worst_lost * _NOTHING
        somewhat = norm <= self._worst_lost / _LOST
        return altogether | (somewhat & (base_error >= self._worst_lost * _LIKE))

    def _are_of_either(self, out: Any, ref: Any, base: Any) -> bool:
        """Whether results are those of the baseline, or right."""
        same = (out == base) | (out.isnan() & base.isnan()) | (out == ref.to(self._dtype).double())
        right = (out - ref).abs() <= self._allowed + self._eps * ref.abs()
        return bool((same | right).all())

    def _blocks(self) -> Iterator[tuple[Any, Any, Any, Any, Any]]:
        """Rows of out, reference and baseline in float64; where the latter two are finite; and
        what is always allowed, broadcastable to them."""
        import torch

        rows = max(_BLOCK_ELEMENTS // self._out.shape[-1], 1)
        for start in range(0, self._out.shape[0], rows):
            part = slice(start, start + rows)
            out, ref, base = (t[part].double() for t in (self._out, self._ref, self._base))
            allowance = ref.new_zeros(len(ref), 1)
            if self._allowance is not None:
                per_row = len(self._allowance) > 1  # else one row is all, or one value for all
                allowance = (self._allowance[part] if per_row else self._allowance).double()
            yield out, ref, base, torch.isfinite(ref) & torch.isfinite(base), allowance


_TINY = 1e-300
#: Error of the baseline, by a row's norm, from which on the row is taken to cancel: such that a row
#: that is missing altogether is off by more than three times as much.
_LOST = 1 / 8
#: Of the largest of these errors: a norm that is nothing beside it, and an error that is like it.
_NOTHING, _LIKE = 2.0**-10, 1 / 64


def _norm(rows: Any) -> Any:
    import torch

    return torch.linalg.vector_norm(rows, dim=-1)


def _worst(found: Any, allowed: Any) -> float:
    """Largest share of what is allowed; nothing found is nothing, whatever is allowed."""
    import torch

    return float(torch.where(found > 0, found / allowed.clamp_min(_TINY), 0.0).max())


def _as_rows(tensor: Any) -> Any:
    """Two-dimensional, real: complex numbers are two neighbours."""
    import torch

    if tensor.dtype.is_complex:
        tensor = torch.view_as_real(tensor.resolve_conj()).flatten(-2)
    if not tensor.dim():
        return tensor.reshape(1, 1)
    return tensor.reshape(-1, tensor.shape[-1]) if tensor.dim() != 2 else tensor

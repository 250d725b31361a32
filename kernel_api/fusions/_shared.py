"""What the fusions share: operands checked before anything is traced, functions traced once."""

from __future__ import annotations

import functools
import math
import numbers
from collections.abc import Callable, Iterable
from typing import Any

from kernel_api._numbers import real_number, whole_number
from kernel_api.arguments import EpilogueArguments, GemmArguments
from kernel_api.errors import ArgumentError
from kernel_api.operands import Operand

#: From the accumulator and operands to everything that may be written: ``out`` and others by name.
#: Every operand has a default; one that is absent is None.
Function = Callable[..., dict[str, Any]]

Extents = tuple[int, ...]

#: Characters of a value that messages leave out.
_LONG = 80


@functools.lru_cache(maxsize=512)
def writing(function: Function, written: tuple[str, ...]) -> EpilogueArguments:
    """The epilogue that writes those values; without operands, which it is applied to."""

    @functools.wraps(function)
    def fn(*args: Any, **operands: Any) -> tuple[Any, ...]:
        values = function(*args, **operands)
        return tuple(values[name] for name in ("out", *written))

    return EpilogueArguments(fn)


def fused(
    function: Function,
    A: Operand,
    B: Operand,
    out: Any,
    *,
    reads: dict[str, Any],
    writes: dict[str, Any] | None = None,
) -> GemmArguments:
    """Arguments with the epilogue that a function computes; operands that are None are absent."""
    return GemmArguments(A, B, out, epilogue=epilogue_of(function, reads, writes or {}))


def epilogue_of(
    function: Function, reads: dict[str, Any], writes: dict[str, Any]
) -> EpilogueArguments:
    """What a function computes of what is there, on operands that are there."""
    written = {name: value for name, value in writes.items() if value is not None}
    operands = {name: value for name, value in reads.items() if value is not None}
    return writing(function, tuple(written)).applied_to(**operands, **written)


# Operands --------------------------------------------------------------------------------


def matrices(A: Any, B: Any) -> tuple[Operand, Operand]:
    return matrix(A, "A"), matrix(B, "B")


def matrix(value: Any, name: str) -> Operand:
    operand = value if isinstance(value, Operand) else Operand(value, name)
    if operand.rank not in (2, 3):
        raise ArgumentError(f"{name} has rank {operand.rank}; expected 2, or 3 with a batch")
    return operand


def rows(A: Operand) -> Extents:
    """Extents of what has one value per row: (M,) or (L, M)."""
    return A.shape[:-1]


def batches(A: Operand) -> Extents:
    """Extents of what has one value per product: () or (L,)."""
    return A.shape[:-2]


def shaped(name: str, value: Any, shape: Extents, *others: Extents) -> Operand | None:
    """An operand that must have one of these shapes; None stays None."""
    if value is None:
        return None
    operand = value if isinstance(value, Operand) else Operand(value, name)
    if operand.shape not in (shape, *others):
        expected = " or ".join(map(str, dict.fromkeys((shape, *others))))
        raise ArgumentError(f"{name} has shape {operand.shape}; expected {expected}")
    return operand


def per_row(name: str, value: Any, A: Operand) -> Operand | None:
    """(M,) or (M, 1), or with a batch in front; as it broadcasts against the accumulator."""
    of_rows = rows(A)
    shapes = [of_rows, of_rows[-1:], (*of_rows, 1), (of_rows[-1], 1)]
    operand = shaped(name, value, *shapes)
    if operand is None or operand.shape not in shapes[:2]:
        return operand
    return operand.viewed(operand.tensor.unsqueeze(-1), name)


def per_column(name: str, value: Any, A: Operand, N: int) -> Operand | None:
    """(N,), or (L, N); as it broadcasts against the accumulator."""
    operand = shaped(name, value, (N,), (*batches(A), N))
    if operand is None or operand.rank == 1:
        return operand
    return operand.viewed(operand.tensor.unsqueeze(-2), name)


def real(name: str, value: Any) -> Any:
    """A factor: a number, passed at run time as a float, or a tensor that holds one."""
    if value is None:
        return None
    if isinstance(value, bool):
        raise ArgumentError(f"{name} is {value}; expected a number")
    if isinstance(value, numbers.Real):
        return real_number(name, value)
    operand = value if isinstance(value, Operand) else Operand(value, name)
    if any(extent != 1 for extent in operand.shape):
        raise ArgumentError(f"{name} has shape {operand.shape}; expected one number")
    return operand


def above_0(name: str, value: Any) -> Any:
    """A factor that is divided by; what a tensor holds is not looked at."""
    factor = real(name, value)
    if isinstance(factor, float) and not 0 < factor < math.inf:
        raise ArgumentError(f"{name} is {value}; expected a finite number above 0")
    return factor


def whole(name: str, value: Any, of: str = "columns") -> int:
    """A number of columns, or of what it is else."""
    found = whole_number(value)
    if found is None:
        raise ArgumentError(f"{name} is {value!r}; expected a whole number of {of}")
    return found


def one_of(name: str, value: Any, choices: Iterable[Any]) -> Any:
    # Tensors are compared element by element, and have no answer.
    if not isinstance(value, (str, numbers.Real)) or value not in choices:
        shown = repr(value)
        if len(shown) > _LONG:
            shown = f"a {type(value).__name__}"
        raise ArgumentError(f"{name} is {shown}; expected one of {', '.join(map(str, choices))}")
    return value


def required(name: str, value: Any, shape: Extents, *others: Extents) -> Operand:
    operand = shaped(name, value, shape, *others)
    if operand is None:
        raise ArgumentError(f"{name} is None; expected a tensor {shape}")
    return operand


def typed(name: str, operand: Operand, element: str) -> Operand:
    if operand.dtype.name != element:
        raise ArgumentError(f"{name} is {operand.dtype}; expected {element}")
    return operand


# What several of them do ----------------------------------------------------------------


def times(factor: Any, x: Any) -> Any:
    """factor · x, or x where there is no factor."""
    return x if factor is None else factor * x


def affine(accum: Any, alpha: Any, bias: Any) -> Any:
    """alpha · acc + bias"""
    x = times(alpha, accum)
    return x if bias is None else x + bias


def weighted(accum: Any, alpha: Any, bias: Any, prob: Any = None, row_scale: Any = None) -> Any:
    """alpha · row_scale · acc · prob, or with a bias alpha · row_scale · acc + bias · prob"""
    x = times(row_scale, times(alpha, accum))
    if bias is None:
        return x if prob is None else x * prob
    return x + (bias if prob is None else bias * prob)


def gradient_arguments(
    function: Function,
    A: Operand,
    B: Operand,
    out: Any,
    wide: int,
    reads: dict[str, Any],
    alpha: Any,
    prob: Any,
    dprob: Any,
    dbias: Any,
) -> GemmArguments:
    """Of a backward pass: ``out`` has ``wide`` columns."""
    reads = {**reads, "alpha": real("alpha", alpha), "prob": per_row("prob", prob, A)}
    writes = {
        "dprob": shaped("dprob", dprob, rows(A)),
        "dbias": shaped("dbias", dbias, (*batches(A), wide)),
    }
    out = shaped("out", out, (*rows(A), wide))
    return fused(function, A, B, out, reads=reads, writes=writes)


def point_and_gradient(
    accum: Any, preactivation: Any, upstream: Any, alpha: Any, bias: Any
) -> tuple[Any, Any]:
    """Where the derivative is taken, and what it is multiplied with: the accumulator is one."""
    if preactivation is None:
        return affine(accum, alpha, bias), upstream
    return preactivation, times(alpha, accum)

"""Functions of each element, as precise as what comes of them can show."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import cutlass.cute as cute
from cutlass import BFloat16, Boolean, Float32

from .conversion import select

_Value = Any  # Float32 or Boolean
Functions = dict[str, Callable[..., _Value]]

_LOG2_E = 1.0 / math.log(2.0)

#: Of log₂(1 - erf(x)) for x ≥ 0, from x on. What they make of 1 - erf(x) is off by 3.2e-4 and
#: 3.8e-6 of it (minimax up to 4, where it is 1.5e-8), and the long one by 2.5e-7 of 1. The last is
#: negative: beyond, it goes to 0.
_SHORTEST_TAIL = (-1.6225009, -0.93800447, -0.12648884, 0.019447546, -0.0013052240)
_TAIL = (-1.6280598, -0.91710342, -0.15238474, 0.033868897, -5.2048967e-3, 4.8201021e-4)
_TAIL += (-1.9976379e-5,)
_LONG_TAIL = (-1.62791693, -0.918323874, -0.148806989, 0.0287307482, -1.02603529e-3)
_LONG_TAIL += (-1.5760432e-3, 6.06951711e-4, -1.15695395e-4, 1.18785383e-5, -5.21937068e-7)

#: Below it tanh(x) is x, x³ and x⁵ by its series, to 2e-7 of it: a difference of 1 and what is
#: nearly 1 would keep few digits, and what is written may be a large multiple of them.
_SMALL = 0.125


def functions_for(
    full: tuple[Any, ...], all_: tuple[Any, ...], has_steps: bool = False
) -> tuple[Functions, bool]:
    """By operation, and whether they are approximations; these have also ``one_plus_erf``, which
    keeps the digits that 1 + erf(x) loses.

    Args:
        full: Element types of the outputs with rows and columns. In what is reduced of more digits
            than they have, the errors of most approximations average out; those of a polynomial do
            not, which are the same wherever the values are.
        all_: Of all outputs.
        has_steps: Whether something is rounded down, which makes whole numbers of the last digit,
            so that nothing is approximated beside it.
    """
    if any(t.width > 16 for t in full) or has_steps:
        return exact_functions(), False
    shortest = all(t is BFloat16 or t.width <= 8 for t in all_)
    tail = _SHORTEST_TAIL if shortest else _TAIL
    if any(t.width > 16 for t in all_):
        tail = _LONG_TAIL
    return {**exact_functions(), **_approximations(shortest, tail)}, True


def exact_functions() -> Functions:
    """Within a few units in the last place of float32."""
    return {
        "neg": lambda x: -x,
        "abs": cute.math.abs,
        "floor": cute.math.floor,
        "exp": cute.math.exp,
        "expm1": cute.math.expm1,
        "log": cute.math.log,
        "log1p": cute.math.log1p,
        "sqrt": cute.math.sqrt,
        "rsqrt": cute.math.rsqrt,
        "tanh": cute.math.tanh,
        "sigmoid": lambda x: 1.0 / (1.0 + cute.math.exp(-x)),
        "erf": cute.math.erf,
        "add": lambda a, b: a + b,
        "sub": lambda a, b: a - b,
        "mul": lambda a, b: a * b,
        "div": lambda a, b: a / b,
        "floor_divide": _floor_divide,
        "modulo": _modulo,
        "minimum": lambda a, b: cute.arch.fmin(a, b, nan=True),
        "maximum": lambda a, b: cute.arch.fmax(a, b, nan=True),
        "lt": lambda a, b: a < b,
        "le": lambda a, b: a <= b,
        "gt": lambda a, b: a > b,
        "ge": lambda a, b: a >= b,
        "eq": lambda a, b: a == b,
        "ne": lambda a, b: a != b,
        "and": lambda a, b: a & b,
        "or": lambda a, b: a | b,
        "not": lambda a: a == Boolean(False),
        "where": select,
    }


def _modulo(a: _Value, b: _Value) -> _Value:
    """Of the sign of b, as in Python."""
    rest = _rest(a, b)
    return select(_differ_in_sign(rest, b), rest + b, rest)


def _floor_divide(a: _Value, b: _Value) -> _Value:
    rest = _rest(a, b)
    whole = cute.math.roundeven((a - rest) / b)
    below = select(_differ_in_sign(rest, b), whole - 1.0, whole)
    return select(b == 0.0, a / b, below)


def _rest(a: _Value, b: _Value) -> _Value:
    """What is left of a quotient that is cut off, or that was rounded up to a whole number. Each
    step is exact and leaves 2⁻²⁴ of what was there: so are quotients up to 2⁴⁷. (fmod, which
    is at any, loops, and takes registers that some tiles do not have.)"""
    rest = a
    for _ in range(2):
        rest = cute.math.fma(-cute.math.trunc(rest / b), b, rest)
    return select(cute.math.abs(b) == math.inf, a, rest)


def _differ_in_sign(rest: _Value, b: _Value) -> Boolean:
    return (rest * cute.math.copysign(Float32(1.0), b)) < 0.0


def _approximations(shortest: bool, tail: tuple[float, ...]) -> Functions:
    """Of 16 bits; shortest: of 8. Results below the normal range become 0.

    tail: Of the error function, see above.
    """

    def exp(x: _Value) -> _Value:
        return _power_of_two(x * _LOG2_E)

    def tanh(x: _Value) -> _Value:
        if shortest:
            return cute.math.tanh(x, approx=True)
        large = 1.0 - 2.0 * _reciprocal(1.0 + _power_of_two(x * (2.0 * _LOG2_E)))
        small = cute.math.fma(x, _polynomial(x * x, (-1 / 3, 2 / 15)), x)
        return select(cute.math.abs(x) < _SMALL, small, large)

    def sigmoid(x: _Value) -> _Value:
        if shortest:
            return cute.math.fma(cute.math.tanh(0.5 * x, approx=True), Float32(0.5), Float32(0.5))
        return _reciprocal(1.0 + _power_of_two(x * -_LOG2_E))

    def one_plus_erf(x: _Value) -> _Value:
        rest = _power_of_two(_polynomial(cute.math.abs(x), tail))
        sign = cute.math.copysign(Float32(1.0), x)
        return cute.math.fma(-sign, rest, 1.0 + sign)  # the rest, or 2 less it

    return {
        "exp": exp,
        "log": lambda x: cute.math.log(x, fastmath=True),
        "tanh": tanh,
        "sigmoid": sigmoid,
        "one_plus_erf": one_plus_erf,
    }


def _polynomial(x: _Value, coefficients: tuple[float, ...]) -> _Value:
    """Of x, x², and so on."""
    *lower, found = coefficients
    found = Float32(found)
    for coefficient in reversed(lower):
        found = cute.math.fma(found, x, Float32(coefficient))
    return found * x


def _power_of_two(x: _Value) -> _Value:
    return cute.math.exp2(x, approx=True, ftz=True)


def _reciprocal(x: _Value) -> _Value:
    """Of numbers that are 1 or more."""
    return cute.math.rcp(x, approx=True, ftz=True)

"""More instructions that compute registers from registers: what epilogues and scalings use.

Approximations are computed exactly and rounded once; a test that relies on the last bits of a
result relies on too much.
"""

from __future__ import annotations

import operator
from collections.abc import Callable

import ml_dtypes
import numpy as np

from support.ptx.arithmetic import (
    BITS,
    F32,
    F64,
    FLOATS,
    HALVES,
    OPERATIONS,
    PREDICATE,
    SIGNED,
    U32,
    UNSIGNED,
    Array,
    Operation,
    to_tf32,
)

U16 = UNSIGNED["u16"]


def _define(
    name: str, result: np.dtype, inputs: tuple[np.dtype, ...], function: Callable[..., Array]
) -> None:
    OPERATIONS.setdefault(name, Operation(result, inputs, function))


def _flushed(x: Array) -> Array:
    """Subnormal numbers become zeros of their sign."""
    return np.where(np.abs(x) < np.finfo(F32).tiny, np.copysign(F32.type(0), x), x)


def _with_flush(function: Callable[..., Array]) -> Callable[..., Array]:
    return lambda *args: _flushed(function(*map(_flushed, args)).astype(F32))


def _in_f64(function: Callable[..., Array]) -> Callable[..., Array]:
    return lambda *args: function(*(x.astype(F64) for x in args)).astype(F32)


# float32 ------------------------------------------------------------------------------------------

_UNARY: dict[str, Callable[..., Array]] = {
    "ex2.approx": np.exp2,
    "lg2.approx": np.log2,
    "rcp.approx": np.reciprocal,
    "rcp.rn": np.reciprocal,
    "sqrt.approx": np.sqrt,
    "sqrt.rn": np.sqrt,
    "rsqrt.approx": lambda x: 1 / np.sqrt(x),
    "tanh.approx": np.tanh,
    "sin.approx": np.sin,
    "cos.approx": np.cos,
}
for _name, _function in _UNARY.items():
    _define(f"{_name}.f32", F32, (F32,), _in_f64(_function))
    _define(f"{_name}.ftz.f32", F32, (F32,), _with_flush(_in_f64(_function)))
for _name, _function in {"rcp.rn": np.reciprocal, "sqrt.rn": np.sqrt}.items():
    _define(f"{_name}.f64", F64, (F64,), _function)

_BINARY: dict[str, Callable[..., Array]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "min": np.fmin,
    "max": np.fmax,
    "div": operator.truediv,
}
for _name, _function in _BINARY.items():
    for _how in ("", ".rn", ".full", ".approx"):
        _define(f"{_name}{_how}.f32", F32, (F32, F32), _in_f64(_function))
        _define(f"{_name}{_how}.ftz.f32", F32, (F32, F32), _with_flush(_in_f64(_function)))
        _define(
            f"{_name}{_how}.sat.f32", F32, (F32, F32), lambda a, b, f=_function: f(a, b).clip(0, 1)
        )
_define("div.rn.f64", F64, (F64, F64), operator.truediv)
for _name, _function in {"min": np.minimum, "max": np.maximum}.items():
    _define(f"{_name}.NaN.f32", F32, (F32, F32), _function)
    _define(f"{_name}.ftz.NaN.f32", F32, (F32, F32), _with_flush(_function))
for _name, _function in {"neg": operator.neg, "abs": np.abs}.items():
    _define(f"{_name}.ftz.f32", F32, (F32,), _with_flush(_function))
_define("fma.rn.f64", F64, (F64, F64, F64), lambda a, b, c: a * b + c)
_FMA = OPERATIONS["fma.rn.f32"].function
_define("fma.rn.ftz.f32", F32, (F32, F32, F32), _with_flush(_FMA))
_define("fma.rn.sat.f32", F32, (F32, F32, F32), lambda *x: _FMA(*x).clip(0, 1))
_define("copysign.f32", F32, (F32, F32), lambda a, b: np.copysign(b, a))


def _directed(rounding: str) -> Callable[..., Array]:
    """a · b + c, rounded down (rm), up (rp) or towards zero (rz)."""

    def compute(a: Array, b: Array, c: Array) -> Array:
        product, c = a.astype(F64) * b.astype(F64), c.astype(F64)  # the product is exact
        total = product + c
        added = total - product
        lost = (product - (total - added)) + (c - added)
        nearest = total.astype(F32)
        beyond = np.where(total == nearest, lost, total - nearest)
        down = np.asarray({"rm": True, "rp": False, "rz": total > 0}[rounding])
        wrong = np.where(down, beyond < 0, beyond > 0)
        limit = np.where(down, F32.type(-np.inf), F32.type(np.inf))
        return np.where(wrong, np.nextafter(nearest, limit), nearest)

    return compute


for _rounding in ("rm", "rp", "rz"):
    _directed_fma = _directed(_rounding)
    for _name, _count, _function in (
        ("fma", 3, _directed_fma),
        ("add", 2, lambda a, b, f=_directed_fma: f(a, np.ones_like(b), b)),
        ("sub", 2, lambda a, b, f=_directed_fma: f(a, np.ones_like(b), -b)),
        ("mul", 2, lambda a, b, f=_directed_fma: f(a, b, np.zeros_like(a))),
    ):
        _define(f"{_name}.{_rounding}.f32", F32, (F32,) * _count, _function)
        _define(f"{_name}.{_rounding}.ftz.f32", F32, (F32,) * _count, _with_flush(_function))

# Comparisons --------------------------------------------------------------------------------------

for _comparison in ("eq", "neu", "lt", "le", "gt", "ge"):
    _compared = OPERATIONS[f"setp.{_comparison}.f32"]
    _define(f"setp.{_comparison}.ftz.f32", PREDICATE, _compared.inputs, _compared.function)
for _name, _f in FLOATS.items():
    _define(f"setp.nan.{_name}", PREDICATE, (_f, _f), lambda a, b: np.isnan(a) | np.isnan(b))
    _define(f"setp.num.{_name}", PREDICATE, (_f, _f), lambda a, b: ~(np.isnan(a) | np.isnan(b)))
    for _comparison, _function in (
        ("equ", operator.eq),
        ("ltu", operator.lt),
        ("leu", operator.le),
        ("gtu", operator.gt),
        ("geu", operator.ge),
    ):
        for _ftz in ("", ".ftz") if _name == "f32" else ("",):
            _define(
                f"setp.{_comparison}{_ftz}.{_name}",
                PREDICATE,
                (_f, _f),
                lambda a, b, f=_function: f(a, b) | np.isnan(a) | np.isnan(b),
            )

# 16 bits, one or two in a register ----------------------------------------------------------------


def _of_halves(function: Callable[..., Array], element: np.dtype) -> Callable[..., Array]:
    """In float32, and rounded; of packed registers each half."""

    def compute(*args: Array) -> Array:
        size = max(x.size for x in args)
        parts = [np.ascontiguousarray(np.broadcast_to(x, (size,))).view(element) for x in args]
        result = function(*(x.astype(F64) for x in parts)).astype(element)
        return result.view(args[0].dtype)

    return compute


def _compared_halves(
    function: Callable[..., Array], element: np.dtype, unordered: bool
) -> Callable[..., Array]:
    """As float32; unordered: true as well if one is NaN."""

    def compute(a: Array, b: Array) -> Array:
        a, b = (np.ascontiguousarray(x).view(element).astype(F32) for x in (a, b))
        found = function(a, b)
        return found | np.isnan(a) | np.isnan(b) if unordered else found

    return compute


_ORDERED = {"eq": operator.eq, "lt": operator.lt, "le": operator.le}
_ORDERED |= {"gt": operator.gt, "ge": operator.ge}
for _name, _t in HALVES.items():
    _both = (BITS["b16"], BITS["b16"])
    for _comparison, _function in _ORDERED.items():
        _plain = _compared_halves(_function, _t, unordered=False)
        _define(f"setp.{_comparison}.{_name}", PREDICATE, _both, _plain)
        _or_nan = _compared_halves(_function, _t, unordered=True)
        _define(f"setp.{_comparison}u.{_name}", PREDICATE, _both, _or_nan)
    _unlike = _compared_halves(operator.ne, _t, unordered=True)
    _define(f"setp.neu.{_name}", PREDICATE, _both, _unlike)
    for _comparison, _function in (("nan", operator.or_), ("num", lambda a, b: ~(a | b))):
        _define(
            f"setp.{_comparison}.{_name}",
            PREDICATE,
            _both,
            _compared_halves(
                lambda a, b, f=_function: f(np.isnan(a), np.isnan(b)), _t, unordered=False
            ),
        )

for _name, _t in HALVES.items():
    for _packed, _container in (("", BITS["b16"]), ("x2", BITS["b32"])):
        for _operation_name, _count, _function in (
            ("add", 2, operator.add),
            ("add.rn", 2, operator.add),
            ("sub", 2, operator.sub),
            ("sub.rn", 2, operator.sub),
            ("mul", 2, operator.mul),
            ("mul.rn", 2, operator.mul),
            ("fma.rn", 3, lambda a, b, c: a * b + c),
            ("min", 2, np.fmin),
            ("max", 2, np.fmax),
            ("min.NaN", 2, np.minimum),
            ("max.NaN", 2, np.maximum),
            ("neg", 1, operator.neg),
            ("abs", 1, np.abs),
            ("ex2.approx", 1, np.exp2),
            ("tanh.approx", 1, np.tanh),
        ):
            _define(
                f"{_operation_name}.{_name}{_packed}",
                _container,
                (_container,) * _count,
                _of_halves(_function, _t),
            )

# Conversions --------------------------------------------------------------------------------------

_ROUNDINGS: dict[str, Callable[..., Array]] = {
    "rni": np.rint,
    "rzi": np.trunc,
    "rmi": np.floor,
    "rpi": np.ceil,
}


def _to_integer(rounding: Callable[..., Array], to: np.dtype) -> Callable[[Array], Array]:
    """Clamped to the range of the integers; NaN becomes zero."""
    low, high = np.iinfo(to).min, np.iinfo(to).max

    def convert(x: Array) -> Array:
        rounded = rounding(np.nan_to_num(x.astype(F64), nan=0.0))
        inside = (rounded >= low) & (rounded < float(high) + (high < 2**53))
        clamped = np.where(rounded < low, to.type(low), to.type(high))
        return np.where(inside, np.where(inside, rounded, 0).astype(to), clamped)

    return convert


for _rounding, _function in _ROUNDINGS.items():
    for _from, _f in {**FLOATS, **HALVES}.items():
        for _to, _t in {**SIGNED, **UNSIGNED}.items():
            for _how in ("", ".ftz", ".sat", ".ftz.sat"):
                _define(
                    f"cvt.{_rounding}{_how}.{_to}.{_from}", _t, (_f,), _to_integer(_function, _t)
                )
        for _how in ("", ".ftz"):
            _define(f"cvt.{_rounding}{_how}.{_from}.{_from}", _f, (_f,), _function)
for _to, _t in {**SIGNED, **UNSIGNED}.items():
    for _from, _f in {**SIGNED, **UNSIGNED}.items():
        _low, _high = np.iinfo(_t).min, np.iinfo(_t).max
        _define(
            f"cvt.sat.{_to}.{_from}",
            _t,
            (_f,),
            lambda a, low=_low, high=_high: np.clip(
                a, max(low, np.iinfo(a.dtype).min), min(high, np.iinfo(a.dtype).max)
            ),
        )
    for _from, _half in HALVES.items():
        _define(f"cvt.rn.{_from}.{_to}", _half, (_t,), lambda a, h=_half: a.astype(F32).astype(h))

E4M3, E5M2 = np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(ml_dtypes.float8_e5m2)
_LARGEST = {E4M3: 448.0, E5M2: 57344.0}


def _to_8_bits(element: np.dtype) -> Callable[..., Array]:
    """Two numbers, the first to the upper byte; too large ones become the largest."""

    def one(x: Array) -> Array:
        largest = _LARGEST[element]
        return np.clip(x.astype(F32), -largest, largest).astype(element).view(np.uint8)

    return lambda upper, lower: one(upper).astype(U16) << 8 | one(lower)


def _halves_of(element: np.dtype) -> Callable[[Array], tuple[Array, Array]]:
    """The upper and the lower one of a register."""

    def split(packed: Array) -> tuple[Array, Array]:
        parts = np.ascontiguousarray(packed).view(element).reshape(-1, 2)
        return parts[:, 1], parts[:, 0]

    return split


for _name, _element in (("e4m3x2", E4M3), ("e5m2x2", E5M2)):
    _pack = _to_8_bits(_element)
    for _relu in ("", ".relu"):
        _zero = -np.inf if not _relu else 0.0
        _define(
            f"cvt.rn.satfinite{_relu}.{_name}.f32",
            U16,
            (F32, F32),
            lambda a, b, p=_pack, z=_zero: p(
                np.maximum(a, F32.type(z)), np.maximum(b, F32.type(z))
            ),
        )
    _define(
        f"cvt.rn.satfinite.{_name}.f16x2",
        U16,
        (U32,),
        lambda a, p=_pack: p(*_halves_of(HALVES["f16"])(a)),
    )
    _define(
        f"cvt.rn.f16x2.{_name}",
        U32,
        (U16,),
        lambda a, e=_element: (
            np.ascontiguousarray(a).view(e).reshape(-1, 2).astype("f2").view(U32)[:, 0]
        ),
    )
for _name, _t in HALVES.items():
    _define(f"cvt.ftz.f32.{_name}", F32, (_t,), lambda a: a.astype(F32))
    for _how in ("rn.ftz", "rn.satfinite"):
        _define(f"cvt.{_how}.{_name}.f32", _t, (F32,), lambda a, t=_t: a.astype(t))
    _define(
        f"cvt.rn.relu.{_name}x2.f32",
        U32,
        (F32, F32),
        lambda a, b, f=OPERATIONS[f"cvt.rn.{_name}x2.f32"].function: f(
            np.maximum(a, F32.type(0)), np.maximum(b, F32.type(0))
        ),
    )
_define("cvt.sat.f32.f32", F32, (F32,), lambda a: np.nan_to_num(a).clip(0, 1))
_define("cvt.rna.satfinite.tf32.f32", U32, (F32,), to_tf32)

# Bits and sums of products ------------------------------------------------------------------------


def _bits_of(x: Array) -> Array:
    """(elements, bits), the lowest first."""
    width = 8 * x.dtype.itemsize
    return x[:, None] >> np.arange(width, dtype=x.dtype) & x.dtype.type(1)


def _leading_zeros(x: Array) -> Array:
    bits = _bits_of(x)[:, ::-1]
    return np.where(bits.any(axis=1), bits.argmax(axis=1), bits.shape[1]).astype(U32)


def _reversed(x: Array) -> Array:
    width = 8 * x.dtype.itemsize
    weights = x.dtype.type(1) << np.arange(width, dtype=x.dtype)
    return (_bits_of(x)[:, ::-1] * weights).sum(axis=1, dtype=x.dtype)


for _name in ("b32", "b64"):
    _t = BITS[_name]
    _define(f"popc.{_name}", U32, (_t,), lambda a: _bits_of(a).sum(axis=1).astype(U32))
    _define(f"clz.{_name}", U32, (_t,), _leading_zeros)
    _define(f"brev.{_name}", _t, (_t,), _reversed)


def _dot(first: np.dtype, second: np.dtype) -> Callable[[Array, Array, Array], Array]:
    """Of four bytes each."""

    def dot(a: Array, b: Array, c: Array) -> Array:
        size = max(a.size, b.size)
        x, y = (
            np.ascontiguousarray(np.broadcast_to(r, (size,))).view(t).reshape(-1, 4)
            for r, t in ((a, first), (b, second))
        )
        return ((x.astype(np.int64) * y).sum(axis=1) + c).astype(np.int64).astype(U32)

    return dot


for _a_name in ("s32", "u32"):
    for _b_name in ("s32", "u32"):
        _kinds = [np.dtype("i1" if one == "s32" else "u1") for one in (_a_name, _b_name)]
        _define(f"dp4a.{_a_name}.{_b_name}", U32, (U32, U32, U32), _dot(*_kinds))

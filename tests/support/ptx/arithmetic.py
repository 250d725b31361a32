"""Instructions that compute registers from registers, by their full names.

The table is written out by type, so that an unknown modifier is an unknown instruction.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

Array = np.ndarray

SIGNED = {f"s{bits}": np.dtype(f"i{bits // 8}") for bits in (8, 16, 32, 64)}
UNSIGNED = {f"u{bits}": np.dtype(f"u{bits // 8}") for bits in (8, 16, 32, 64)}
BITS = {f"b{bits}": np.dtype(f"u{bits // 8}") for bits in (8, 16, 32, 64)}
PREDICATE = np.dtype(bool)
F32, F64 = np.dtype("f4"), np.dtype("f8")
FLOATS = {"f32": F32, "f64": F64}
HALVES = {"f16": np.dtype("f2"), "bf16": np.dtype(ml_dtypes.bfloat16)}
TYPES = {**SIGNED, **UNSIGNED, **BITS, **FLOATS, **HALVES, "pred": PREDICATE}

U32 = UNSIGNED["u32"]


@dataclass(frozen=True)
class Operation:
    """The first operand of an instruction as a function of the others."""

    result: np.dtype
    inputs: tuple[np.dtype, ...]
    function: Callable[..., Array]


OPERATIONS: dict[str, Operation] = {}


def _define(name: str, result: np.dtype, inputs: Any, function: Callable[..., Array]) -> None:
    OPERATIONS[name] = Operation(result, tuple(inputs), function)


# Integers of at least 16 bits; numpy wraps them around as the hardware does -----------------


def _wider(dtype: np.dtype) -> np.dtype:
    return np.dtype(f"{dtype.kind}{2 * dtype.itemsize}")


def high_half(a: Array, b: Array) -> Array:
    if a.dtype.itemsize == 8:
        return _high_of_64(a, b)
    wide = _wider(a.dtype)
    return (a.astype(wide) * b.astype(wide) >> 8 * a.dtype.itemsize).astype(a.dtype)


def _high_of_64(a: Array, b: Array) -> Array:
    """By products of halves, of which a sum fits in 64 bits; of negative numbers 2**64 too much is
    multiplied with the other one."""
    (low_a, high_a), (low_b, high_b) = (
        (x.astype(np.uint64) & np.uint64(0xFFFFFFFF), x.astype(np.uint64) >> np.uint64(32))
        for x in (a, b)
    )
    middle = high_a * low_b + (low_a * low_b >> np.uint64(32))
    other = low_a * high_b + (middle & np.uint64(0xFFFFFFFF))
    high = (high_a * high_b + (middle >> np.uint64(32)) + (other >> np.uint64(32))).astype(a.dtype)
    if a.dtype.kind == "i":
        high = high - np.where(a < 0, b, 0) - np.where(b < 0, a, 0)
    return high


def _divide(a: Array, b: Array) -> tuple[Array, Array]:
    """Quotient, truncated, and remainder; a quotient by zero is all ones, as on hardware."""
    zero = b == 0
    unsigned = np.dtype(f"u{a.dtype.itemsize}")
    divisor = np.where(zero, np.ones_like(b), np.abs(b)).view(unsigned)
    quotient = (np.abs(a).view(unsigned) // divisor).view(a.dtype)
    if a.dtype.kind == "i":
        quotient = np.where((a < 0) ^ (b < 0), -quotient, quotient)
    quotient = np.where(zero, ~np.zeros_like(quotient), quotient)
    return quotient, a - quotient * b


def _shift_left(a: Array, amount: Array) -> Array:
    bits = 8 * a.dtype.itemsize
    if amount.size == 1:  # as it is in the usual case
        return a << a.dtype.type(amount[0]) if amount[0] < bits else np.zeros_like(a)
    shifted = a << np.minimum(amount, bits - 1).astype(a.dtype)
    return np.where(amount < bits, shifted, np.zeros_like(a))


def _shift_right(a: Array, amount: Array) -> Array:
    bits = 8 * a.dtype.itemsize
    if amount.size == 1 and amount[0] < bits:  # as it is in the usual case
        return a >> a.dtype.type(amount[0])
    shifted = a >> np.minimum(amount, bits - 1).astype(a.dtype)
    return shifted if a.dtype.kind == "i" else np.where(amount < bits, shifted, np.zeros_like(a))


_INTEGERS = {n: t for n, t in {**SIGNED, **UNSIGNED}.items() if t.itemsize > 1}
for _name, _t in _INTEGERS.items():
    _define(f"add.{_name}", _t, (_t, _t), operator.add)
    _define(f"sub.{_name}", _t, (_t, _t), operator.sub)
    _define(f"mul.lo.{_name}", _t, (_t, _t), operator.mul)
    _define(f"mad.lo.{_name}", _t, (_t, _t, _t), lambda a, b, c: a * b + c)
    _define(f"div.{_name}", _t, (_t, _t), lambda a, b: _divide(a, b)[0])
    _define(f"rem.{_name}", _t, (_t, _t), lambda a, b: _divide(a, b)[1])
    _define(f"min.{_name}", _t, (_t, _t), np.minimum)
    if np.issubdtype(_t, np.signedinteger):
        _define(f"min.relu.{_name}", _t, (_t, _t), lambda a, b: np.maximum(np.minimum(a, b), 0))
        _define(f"max.relu.{_name}", _t, (_t, _t), lambda a, b: np.maximum(np.maximum(a, b), 0))
    _define(f"max.{_name}", _t, (_t, _t), np.maximum)
    _define(f"shr.{_name}", _t, (_t, U32), _shift_right)
    _define(f"mul.hi.{_name}", _t, (_t, _t), high_half)
    if _t.itemsize < 8:
        _w = _wider(_t)
        _define(f"mul.wide.{_name}", _w, (_t, _t), lambda a, b, w=_w: a.astype(w) * b.astype(w))
        _define(
            f"mad.wide.{_name}",
            _w,
            (_t, _t, _w),
            lambda a, b, c, w=_w: a.astype(w) * b.astype(w) + c,
        )
for _name, _t in SIGNED.items():
    _define(f"neg.{_name}", _t, (_t,), operator.neg)
    _define(f"abs.{_name}", _t, (_t,), np.abs)

# Bits ---------------------------------------------------------------------------------------


def _lop3(a: Array, b: Array, c: Array, table: Array) -> Array:
    """Bit by bit, the entry of the table that a (most significant), b and c select."""
    result = np.zeros_like(a)
    for entry in range(8):
        chosen = [x if entry >> shift & 1 else ~x for x, shift in ((a, 2), (b, 1), (c, 0))]
        result = result | np.where(table >> entry & 1, chosen[0] & chosen[1] & chosen[2], 0)
    return result.astype(a.dtype)


def _prmt(a: Array, b: Array, selector: Array) -> Array:
    """Four bytes of b:a, each selected by a nibble; its top bit asks for the sign instead."""
    both = b.astype(np.uint64) << 32 | a
    result = np.zeros(np.broadcast(a, b, selector).shape, np.uint64)
    for i in range(4):
        nibble = (selector >> 4 * i & 15).astype(np.uint64)
        byte = both >> 8 * (nibble & 7) & 255
        byte = np.where(nibble & 8, 255 * (byte >> 7), byte)
        result |= byte << 8 * i
    return result.astype(np.uint32)


def _ones(length: Array) -> Array:
    return (np.uint64(1) << np.minimum(length & 255, 32).astype(np.uint64)) - np.uint64(1)


def _bfe(a: Array, position: Array, length: Array) -> Array:
    """Bits of a from a position on; of signed ones the top bit is repeated."""
    bits = a.view(np.uint32).astype(np.uint64) if a.dtype.kind == "u" else a.astype(np.int64)
    field = (bits >> (position & 255).clip(0, 63).astype(bits.dtype)).astype(np.uint64)
    field &= _ones(length)
    if a.dtype.kind == "i":
        sign = _ones(length) & ~(_ones(length) >> np.uint64(1))
        field = np.where(field & sign, field | ~_ones(length), field)
    return field.astype(np.uint32).view(a.dtype)


def _bfi(a: Array, b: Array, position: Array, length: Array) -> Array:
    """b with a field of its bits replaced by a."""
    position = (position & 255).clip(0, 63).astype(np.uint64)
    field = _ones(length) << position
    return (a.astype(np.uint64) << position & field | b & ~field).astype(np.uint32)


def _dp2a(first: int, signed: tuple[bool, bool]) -> Callable[[Array, Array, Array], Array]:
    """Both halves of a times two bytes of b, the first of which is named, added to c."""

    def add(a: Array, b: Array, c: Array) -> Array:
        result = c.astype(np.int64)
        for i in range(2):
            half, byte = a >> 16 * i & 0xFFFF, b >> 8 * (first + i) & 0xFF
            half = (half.astype(np.int64) ^ 1 << 15) - (1 << 15) if signed[0] else half
            byte = (byte.astype(np.int64) ^ 1 << 7) - (1 << 7) if signed[1] else byte
            result = result + half.astype(np.int64) * byte.astype(np.int64)
        return result.astype(np.uint32)

    return add


def _funnel(left: bool, clamp: bool) -> Callable[[Array, Array, Array], Array]:
    def shift(low: Array, high: Array, amount: Array) -> Array:
        amount = (np.minimum(amount, 32) if clamp else amount & 31).astype(np.uint64)
        both = high.astype(np.uint64) << 32 | low
        return (both << amount >> 32 if left else both >> amount).astype(np.uint32)

    return shift


for _name, _t in {**BITS, "pred": PREDICATE}.items():
    _define(f"and.{_name}", _t, (_t, _t), operator.and_)
    _define(f"or.{_name}", _t, (_t, _t), operator.or_)
    _define(f"xor.{_name}", _t, (_t, _t), operator.xor)
    _define(f"not.{_name}", _t, (_t,), operator.invert)
for _name, _t in BITS.items():
    _define(f"shl.{_name}", _t, (_t, U32), _shift_left)
    _define(f"shr.{_name}", _t, (_t, U32), _shift_right)
_define("lop3.b32", U32, (U32, U32, U32, U32), _lop3)
_define("prmt.b32", U32, (U32, U32, U32), _prmt)
_define("bfe.u32", U32, (U32, U32, U32), _bfe)
_define("bfe.s32", SIGNED["s32"], (SIGNED["s32"], U32, U32), _bfe)
_define("bfi.b32", U32, (U32, U32, U32, U32), _bfi)
for _a, _b in itertools.product("us", repeat=2):
    for _part, _first in (("lo", 0), ("hi", 2)):
        _signed = _a == "s", _b == "s"
        _define(f"dp2a.{_part}.{_a}32.{_b}32", U32, (U32, U32, U32), _dp2a(_first, _signed))
for _side in "lr":
    for _mode in ("wrap", "clamp"):
        _define(
            f"shf.{_side}.{_mode}.b32",
            U32,
            (U32, U32, U32),
            _funnel(_side == "l", _mode == "clamp"),
        )

# Floating point -----------------------------------------------------------------------------


def _fma(a: Array, b: Array, c: Array) -> Array:
    return (a.astype(F64) * b.astype(F64) + c.astype(F64)).astype(F32)


for _name, _t in FLOATS.items():
    for _rounding in ("", ".rn"):
        _define(f"add{_rounding}.{_name}", _t, (_t, _t), operator.add)
        _define(f"sub{_rounding}.{_name}", _t, (_t, _t), operator.sub)
        _define(f"mul{_rounding}.{_name}", _t, (_t, _t), operator.mul)
    _define(f"neg.{_name}", _t, (_t,), operator.neg)
    _define(f"abs.{_name}", _t, (_t,), np.abs)
    _define(f"min.{_name}", _t, (_t, _t), np.fmin)
    _define(f"max.{_name}", _t, (_t, _t), np.fmax)
_define("fma.rn.f32", F32, (F32, F32, F32), _fma)

# Comparison and selection -------------------------------------------------------------------

_COMPARISONS = {
    "eq": operator.eq,
    "ne": operator.ne,
    "lt": operator.lt,
    "le": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
}
_COMBINATIONS = {"and": operator.and_, "or": operator.or_, "xor": operator.xor}


def _compare(name: str, dtype: np.dtype, comparison: str, function: Any) -> None:
    _define(f"setp.{comparison}.{name}", PREDICATE, (dtype, dtype), function)
    for combination, combine in _COMBINATIONS.items():
        _define(
            f"setp.{comparison}.{combination}.{name}",
            PREDICATE,
            (dtype, dtype, PREDICATE),
            lambda a, b, c, combine=combine: combine(function(a, b), c),
        )


for _comparison, _function in _COMPARISONS.items():
    for _name, _t in _INTEGERS.items():
        _compare(_name, _t, _comparison, _function)
    if _comparison in ("eq", "ne"):
        for _name, _t in BITS.items():
            _compare(_name, _t, _comparison, _function)
    for _name, _t in FLOATS.items():
        # numpy's == and < are false for NaN, as PTX's eq and lt are; its != is PTX's neu.
        _compare(_name, _t, "neu" if _comparison == "ne" else _comparison, _function)
for _name, _t in FLOATS.items():
    _compare(_name, _t, "ne", lambda a, b: (a < b) | (a > b))
for _name, _t in {**_INTEGERS, **BITS, **FLOATS}.items():
    _define(f"selp.{_name}", _t, (_t, _t, PREDICATE), lambda a, b, p: np.where(p, a, b))

# Moves and conversions ----------------------------------------------------------------------


def to_tf32(a: Array) -> Array:
    """10 mantissa bits, ties away from zero; infinities and NaN stay."""
    bits = a.view(np.uint32)
    rounded = (bits + np.uint32(0x1000)) & np.uint32(0xFFFFE000)
    return np.where(np.isfinite(a), rounded, bits)


def _pack(half: np.dtype) -> Callable[[Array, Array], Array]:
    def pack(upper: Array, lower: Array) -> Array:
        high, low = (x.astype(half).view(np.uint16).astype(U32) for x in (upper, lower))
        return high << 16 | low

    return pack


for _name, _t in {**_INTEGERS, **BITS, **FLOATS, "pred": PREDICATE}.items():
    _define(f"mov.{_name}", _t, (_t,), lambda a: a)
_define("cvta.to.global.u64", UNSIGNED["u64"], (UNSIGNED["u64"],), lambda a: a)
for _to, _t in {**SIGNED, **UNSIGNED}.items():
    for _from, _f in {**SIGNED, **UNSIGNED}.items():
        _define(f"cvt.{_to}.{_from}", _t, (_f,), lambda a, t=_t: a.astype(t))
    for _from, _f in FLOATS.items():
        _define(f"cvt.rn.{_from}.{_to}", _f, (_t,), lambda a, f=_f: a.astype(f))
for _name, _t in HALVES.items():
    _define(f"cvt.f32.{_name}", F32, (_t,), lambda a: a.astype(F32))
    _define(f"cvt.rn.{_name}.f32", _t, (F32,), lambda a, t=_t: a.astype(t))
    _define(f"cvt.rn.{_name}x2.f32", U32, (F32, F32), _pack(_t))
_define("cvt.f64.f32", F64, (F32,), lambda a: a.astype(F64))
_define("cvt.rn.f32.f64", F32, (F64,), lambda a: a.astype(F32))
_define("cvt.rna.tf32.f32", U32, (F32,), to_tf32)

"""Numbers to the types that outputs are stored in, and back.

To nearest, ties to even. Integers and 8-bit floats saturate at their largest finite value, and
NaN becomes 0 in integers. To float8_e8m0fnu, up to the next power of two.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import (
    BFloat16,
    Boolean,
    Float8E4M3FN,
    Float8E5M2,
    Float8E8M0FNU,
    Float16,
    Float32,
    Int8,
    Int16,
    Int32,
    Numeric,
    Uint8,
    Uint32,
)

CONVERTED = 4  # numbers at a time: the hardware converts to 8-bit floats in vectors

_INTEGERS = {Int8: (-128, 127), Uint8: (0, 255), Int16: (-(2**15), 2**15 - 1), Int32: None}
_MANTISSA, _BIAS = 23, 127  # of float32
_SIGN, _INFINITY = 0x80000000, 0x7F800000

#: What `Conversions.converted` takes.
STORED = (Float32, Float16, BFloat16, Float8E4M3FN, Float8E5M2, Float8E8M0FNU, *_INTEGERS)


@dataclass(frozen=True)
class Float8:
    """How 8 bits hold a number.

    Attributes:
        mantissa, bias: Bits of the mantissa; what the exponent is stored with.
        largest: Code of the largest finite number.
        infinity: Whether the next code is infinity; all others are NaN.
    """

    mantissa: int
    bias: int
    largest: int
    infinity: bool


FLOAT8 = {Float8E4M3FN: Float8(3, 7, 0x7E, False), Float8E5M2: Float8(2, 15, 0x7B, True)}
_NAN = 0x7F  # in both


@dataclass(frozen=True)
class Conversions:
    """What is traced for conversions.

    Args:
        float8: Whether the hardware converts to and from 8-bit floats, as it does from 8.9 on.
    """

    float8: bool = True

    def put(self, values: list, target: cute.Tensor) -> None:
        """Numbers into registers of an element type, as many; they are of one type."""
        if self._in_hardware(type(values[0]), target.element_type):
            target.store(_vector(values).load().to(target.element_type))
        else:
            for i, value in enumerate(values):
                target[i] = self.converted(value, target.element_type)

    def converted(self, value: Numeric, element_type: type[Numeric]) -> Numeric:
        """A number as an element of a type."""
        if self._in_hardware(type(value), element_type):
            return _vector([value] * CONVERTED).load().to(element_type)[0]
        if element_type is Float8E8M0FNU:
            return Uint8(_power_of_two_above(value)).bitcast(Float8E8M0FNU)
        if element_type in FLOAT8:
            return Uint8(_to_float8(Float32(value), FLOAT8[element_type])).bitcast(element_type)
        return element_type(_whole(value, _INTEGERS[element_type]))

    def _in_hardware(self, from_type: type[Numeric], to_type: type[Numeric]) -> bool:
        if to_type in FLOAT8:
            return self.float8
        whole = to_type in _INTEGERS and from_type is Float32  # the DSL's conversion cuts off
        return not whole and to_type is not Float8E8M0FNU

    def widened(self, value: Numeric) -> Float32:
        """An element as a number."""
        element_type = type(value)
        if element_type is Float8E8M0FNU:
            return _power_of_two(Uint32(value.bitcast(Uint8)))
        if element_type in FLOAT8 and not self.float8:
            return _from_float8(Uint32(value.bitcast(Uint8)), FLOAT8[element_type])
        if element_type in FLOAT8:
            return _vector([value] * CONVERTED).load().to(Float32)[0]
        return value.to(Float32)

    def rounded(self, value: Float32, element_type: type[Numeric]) -> Float32:
        """As a number of a narrower type, and back."""
        if element_type is Float32:
            return value
        if self._in_hardware(Float32, element_type):
            vector = _vector([value] * CONVERTED).load()
            return vector.to(element_type).to(Float32)[0]
        return self.widened(self.converted(value, element_type))


def select(condition: Boolean, a: Numeric, b: Numeric) -> Numeric:
    """a where the condition holds, else b; both are numbers of one type."""
    return type(a)(cutlass.select_(condition, a.ir_value(), b.ir_value()))


def reciprocal_of_power(value: Float32) -> Float32:
    """1 / value, exactly, of what float8_e8m0fnu holds."""
    exponent = value.bitcast(Uint32) >> Uint32(_MANTISSA)
    found = (Uint32(2 * _BIAS) - exponent) << Uint32(_MANTISSA)
    found = select(exponent == Uint32(2 * _BIAS), Uint32(1 << (_MANTISSA - 1)), found)
    return select(value == value, found.bitcast(Float32), value)


def _vector(values: list) -> cute.Tensor:
    vector = cute.make_rmem_tensor(len(values), type(values[0]))
    for i, value in enumerate(values):
        vector[i] = value
    return vector


def _whole(value: Float32, limits: tuple[int, int] | None) -> Int32:
    whole = cute.arch.inline_ptx(
        "cvt.rni.s32.f32 {$w0}, {$r0};", write_only_types=[Int32], read_only_args=[value]
    )
    if limits is None:
        return whole
    return cutlass.max(cutlass.min(whole, limits[1]), limits[0])


def _power_of_two_above(value: Float32) -> Uint32:
    """The biased exponent, which is all that float8_e8m0fnu holds; 255 is NaN."""
    bits = value.bitcast(Int32)
    above = (bits + Int32((1 << _MANTISSA) - 1)) >> Int32(_MANTISSA)
    # What is at most 2 ** -127, zero and negative numbers are 2 ** -127.
    above = select(bits <= Int32(1 << (_MANTISSA - 1)), Int32(0), above)
    finite = cutlass.min(above, 2 * _BIAS)
    return Uint32(select(value == value, finite, Int32(255)))


def _power_of_two(code: Uint32) -> Float32:
    bits = select(code == Uint32(0), Uint32(1 << (_MANTISSA - 1)), code << Uint32(_MANTISSA))
    nan = Uint32(_INFINITY | 1)
    return select(code == Uint32(255), nan, bits).bitcast(Float32)


def _to_float8(value: Float32, to: Float8) -> Uint32:
    bits = value.bitcast(Uint32)
    magnitude = bits & Uint32(~_SIGN & 0xFFFFFFFF)
    cut = _MANTISSA - to.mantissa
    odd = (magnitude >> Uint32(cut)) & Uint32(1)
    normal = (magnitude + Uint32((1 << (cut - 1)) - 1) + odd) >> Uint32(cut)
    normal = normal - Uint32((_BIAS - to.bias) << to.mantissa)
    # Below the smallest normal number all are multiples of one, which adding this rounds to.
    fixed = Float32(2.0 ** (cut + 1 - to.bias))
    small = (magnitude.bitcast(Float32) + fixed).bitcast(Uint32) - fixed.bitcast(Uint32)
    code = select(magnitude < Uint32((_BIAS + 1 - to.bias) << _MANTISSA), small, normal)
    code = select(code > Uint32(to.largest), Uint32(to.largest), code)
    code = select(magnitude > Uint32(_INFINITY), Uint32(_NAN), code)
    return code | ((bits >> Uint32(24)) & Uint32(0x80))


def _from_float8(code: Uint32, of: Float8) -> Float32:
    """An exponent that is too small by a constant, made good by a multiplication: of numbers
    below the smallest normal one, too."""
    magnitude = code & Uint32(0x7F)
    scaled = (magnitude << Uint32(_MANTISSA - of.mantissa)).bitcast(Float32)
    number = (scaled * Float32(2.0 ** (_BIAS - of.bias))).bitcast(Uint32)
    first_nan = of.largest + 1 + of.infinity
    special = Uint32(_INFINITY) | select(
        magnitude >= Uint32(first_nan), Uint32(1 << (_MANTISSA - 1)), Uint32(0)
    )
    number = select(magnitude > Uint32(of.largest), special, number)
    return (number | ((code & Uint32(0x80)) << Uint32(24))).bitcast(Float32)


def bfloat16_pair(word: Uint32) -> tuple[Float32, Float32]:
    """A bfloat16 is the upper half of a Float32: one instruction each."""
    upper = word & Uint32(0xFFFF0000)
    return (word << Uint32(16)).bitcast(Float32), upper.bitcast(Float32)

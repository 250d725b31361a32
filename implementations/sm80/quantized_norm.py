"""Normalised rows in units of scales, which are found on the way."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float8E8M0FNU, Float32, Int32, Numeric, Uint32, const_expr

from ..common.conversion import Conversions, reciprocal_of_power, select
from ..common.maxima import larger_magnitude, largest_magnitude
from ..common.rows import GlobalRow, over_lanes
from ..common.threads import WARP
from .norm import Norm

LEAST_SCALE = 2.0**-126  # the smallest normal number, of which the inverse is one
_OF_ROWS = 2  # the buffer of largest magnitudes, where sums take turns with those before


@dataclass(frozen=True)
class FoundScales:
    """Which elements share a scale.

    Attributes:
        columns: So many neighbours do; None: a row.
        top: What the largest magnitude becomes.
        powers: Scales are powers of two, rounded up.
    """

    columns: int | None
    top: float
    powers: bool = False

    @property
    def of_rows(self) -> bool:
        return self.columns is None


class QuantizedNorm(Norm):
    """out = round(y / scale) of what `Norm` makes y of; without a Hadamard transform.

    Roles are those there, but for

    role     does                                                            waits on
    -------  --------------------------------------------------------------  -------------------
    largest  the largest magnitude of a row, from values that are not kept:  warps of the row
             `write` makes them again; or of neighbouring columns            lanes of a block
    write    whole vectors of elements of 8 bits; scales

    operand    is
    ---------  ------------------------------------------------------------------------------
    scale      (M,), or (M, N / columns), Float32, or float8_e8m0fnu of powers; written. Without
               `scales` a number or (), read; or absent: out is y.

    normalises: False: y is x.
    """

    def __init__(
        self,
        *args,
        scales: FoundScales | None = None,
        normalises: bool = True,
        conversions: Conversions,
        **options,
    ):
        super().__init__(*args, **options)
        self.scales = scales
        self.normalises = normalises
        self.conversions = conversions
        if self.columns is not None and (self.rows.step % self.columns or self.lanes > WARP):
            raise ValueError(
                f"{self.columns} columns are with {self.lanes} lanes, {self.rows.step} at once; "
                f"expected whole blocks of a warp's"
            )

    @property
    def columns(self) -> int | None:
        """That share a scale, if those of a row do not."""
        return None if self.scales is None else self.scales.columns

    @property
    def lanes(self) -> int:
        """That have a block of columns."""
        return max(1, (self.columns or 1) // self.rows.vector)

    @property
    def buffers(self) -> int:
        return 3

    @cute.jit
    def _measured(self, source, target, N, operands, sSums, turn, thread):
        if const_expr(not self.normalises):
            return Float32(0), Float32(1)
        return super()._measured(source, target, N, operands, sSums, turn, thread)

    @cute.jit
    def _write(self, source, target, mean, rstd, operands, factors, place, sPartials) -> Int32:
        """Writes the thread's part of out, and scales; nothing is found for others."""
        inverse = Float32(1)
        if const_expr(self.scales is None and "scale" in self.operands):
            inverse = Float32(1) / self._number(self.operand("scale", operands))
        elif const_expr(self.scales is not None and self.scales.of_rows):
            inverse = self._of_row(source, target, mean, rstd, operands, place, sPartials)
        for v in cutlass.range(self._vectors(place.N), unroll=self.unroll):
            values = self._normalised(source, v, mean, rstd, operands, place)
            divided = [value * inverse for value in values]
            if const_expr(self.columns is not None):
                found = self._of_block(values, target, v, operands, place)
                divided = [value * found for value in values]
            self._put(target, v, divided)
        return Int32(0)

    @cute.jit
    def _of_block(self, values, target, v: Int32, operands, place) -> Float32:
        """The inverse of the scale of a vector, which is written."""
        columns, first = self.columns, v * self.rows.step
        mScale = self.operand("scale", operands)
        (largest,) = over_lanes((_magnitude(values),), larger_magnitude, self.lanes)
        scale, inverse = self._scale(largest)
        if place.column % columns == 0 and target.has(first):
            mScale[place.row, (place.column + first) // columns] = scale
        return inverse

    @cute.jit
    def _of_row(self, source, target, mean, rstd, operands, place, sPartials) -> Float32:
        """The inverse of a row's scale, which is written."""
        mScale = self.operand("scale", operands)
        part = self._largest(source, target, mean, rstd, operands, place)
        buffer = Int32(_OF_ROWS) if self.normalises else place.turn % 2
        (largest,) = self.rows.across((part,), place.thread, sPartials, buffer, larger_magnitude)
        scale, inverse = self._scale(largest)
        if place.column == 0 and target.has(Int32(0)):
            mScale[place.row] = scale
        return inverse

    def _normalised(self, source, v: Int32, mean, rstd, operands, place) -> list:
        """A vector of y."""
        values = [value * rstd for value in self._distances(source, v, mean)]
        return self._with_factors(values, operands, place.column + v * self.rows.step)

    @cute.jit
    def _largest(self, source, target, mean, rstd, operands, place) -> Float32:
        """The magnitude, of what the thread has of a row."""
        largest = Float32(0)
        for v in cutlass.range(self._vectors(place.N), unroll=self.unroll):
            found = _magnitude(self._normalised(source, v, mean, rstd, operands, place))
            # What is behind the end is not where the mean is.
            found = select(target.has(v * self.rows.step), found, Float32(0))
            largest = larger_magnitude(largest, found)
        return largest

    def _scale(self, largest: Float32) -> tuple[Numeric, Float32]:
        """As it is stored, and its inverse."""
        if self.scales.powers:
            scale = self.conversions.converted(largest / self.scales.top, Float8E8M0FNU)
            return scale, reciprocal_of_power(self.conversions.widened(scale))
        scale = larger_magnitude(largest * (1.0 / self.scales.top), Float32(LEAST_SCALE))
        scale = select(largest == Float32(0), Float32(1), scale)
        return scale, cute.math.rcp(scale, approx=True)

    def _number(self, scale) -> Float32:
        if isinstance(scale, cute.Tensor):
            scale = scale[(0,) * cute.rank(scale)]
        return self.conversions.widened(scale)

    def _put(self, target: GlobalRow, v: Int32, values: list) -> None:
        fragment = cute.make_rmem_tensor(len(values), target.vector.element_type)
        self.conversions.put(values, fragment)
        packed = cute.recast_tensor(fragment, Uint32)
        words = [packed[i] for i in range(target.vector.words)]
        target.store_words(v * self.rows.step, words)


def _magnitude(values: list) -> Float32:
    """The largest one; NaN if one is."""
    return largest_magnitude([*values, Float32(0)])

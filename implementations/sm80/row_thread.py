"""Which elements of a matrix a thread has, and how it reads them."""

from dataclasses import dataclass
from fractions import Fraction

import cutlass
from cutlass import Boolean, Int32, Int64, Numeric

from ..common.conversion import Conversions
from ..common.epilogue import LANES, PAIR, Thread
from .row_vectors import load_inside, loads_vectors, vector_of

WIDTH = 32  # columns of a quad at a time, at least


def moved(column: int, lane_columns: int, merged: int) -> int:
    """Where a column of a quad's first thread lies when `merged` groups of its threads' columns
    have changed places, so that those of each thread are neighbours:

    lane    0    1    2    3    0    1    2    3              0          1          2    ...
          [0 1][2 3][4 5][6 7][8 9] ...             →      [0 1 8 9][2 3 10 11][4 5 12 13] ...
    """
    wide = LANES * merged * lane_columns
    if not wide:
        return column
    block, rest = divmod(column, wide)
    group, own = divmod(rest, LANES * lane_columns)
    return block * wide + group * lane_columns + own


@dataclass
class RowThread(Thread):
    """A thread of a quad that reads its accumulators, and everything else in vectors.

    Attributes:
        width: Columns of the bundle.
        rows_apart: From its first row to the other one.
        merged: See `moved`. What the epilogue asks of columns must not see it.
        conversions: To numbers; None: elements of x are handed out as they are.
    """

    width: int = WIDTH
    rows_apart: int = 8
    merged: int = 1
    conversions: Conversions | None = None

    @property
    def bundle(self) -> int:
        return self.width

    def accumulator(self, half: int, column: int) -> Numeric:
        value = self.operand(len(self.kinds) - 1, half, column)
        return value if self.conversions is None else self.conversions.widened(value)

    def row_of(self, half: int) -> Int32:
        return self.row + self.rows_apart * half

    def column_of(self, column: int, lane_columns: int = PAIR, columns: Fraction = Fraction(1)):
        first, distance = self.place_of(column, lane_columns, columns)
        return first + distance

    def place_of(self, column: int, lane_columns: int, columns: Fraction | None) -> tuple:
        """(a column of the thread's, known at run time; from there to the one asked for)"""
        start, distance = self._start(moved(column, lane_columns, self.merged), columns)
        key = ("first", start, lane_columns, columns)
        if key not in self.memory:
            first = self.lane * (self.merged * lane_columns)
            if columns is not None:
                first += super().column_of(start, 0, columns)
            self.memory[key] = first
        return self.memory[key], distance

    def is_inside(self, column: int, lane_columns: int, columns: Fraction) -> Boolean:
        first, distance = self.place_of(column, lane_columns, columns)
        return self.end_of(column, lane_columns, columns) - first > distance

    def start_of(self, column: int, lane_columns: int, columns: Fraction | None) -> int:
        """Which of the columns that others are at a constant distance from."""
        start, _ = self._start(moved(column, lane_columns, self.merged), columns)
        return start

    def end_of(self, column: int, lane_columns: int, columns: Fraction) -> Int32:
        """Of the matrix, or of the half that a column is of."""
        width = self.extents[1] * columns.numerator // columns.denominator
        if columns not in self.halves:
            return width
        right = self.start_of(column, lane_columns, columns) > 0
        return width if right else width // 2

    def _side_by_side(self, index: int) -> bool:
        return loads_vectors(self.operands[index])

    def _element(self, index, half, column, lane_columns, columns) -> Numeric:
        operand, modes = self.operands[index], self.kinds[index]
        m = n = Int32(0)
        if half is not None:
            m = cutlass.min(self.row_of(half), operand.shape[0] - 1)
        if "n" in modes:
            first, distance = self.place_of(column, lane_columns, columns)
            n = cutlass.min(first + distance, operand.shape[1] - 1)
        return operand[m, n, self.batch]

    def _neighbours(self, index, half, column, lane_columns, columns) -> dict:
        operand = self.operands[index]
        chunk = self.merged * lane_columns
        count = vector_of(chunk, self.vector_bytes, operand.element_type)
        place, chunks = moved(column, lane_columns, self.merged), LANES * chunk
        begin = (
            place % chunks // count * count
        )  # of the vector, in what the thread has side by side
        first, distance = self.place_of(column, lane_columns, columns)
        distance -= place % chunks - begin
        key = (index, half, self.start_of(column, lane_columns, columns), lane_columns, columns)
        if key not in self._first:
            self._first[key] = self._row_from(index, half, first)
        values = load_inside(*self._first[key], distance, count, operand.element_type)
        block = place // chunks * chunks
        found = {}
        for i, value in enumerate(values):
            group, own = divmod(begin + i, lane_columns)
            at = block + group * LANES * lane_columns + own
            found[index, half, at, lane_columns, columns] = value
        return found

    def _row_from(self, index, half, first) -> tuple:
        """(address of a column's element, elements from there to the end of the row)"""
        operand = self.operands[index]
        m = Int32(0)
        if half is not None:
            m = cutlass.min(self.row_of(half), operand.shape[0] - 1)
        offset = Int64(m) * operand.stride[0] + first + Int64(self.batch) * operand.stride[2]
        address = operand.iterator.toint() + offset * (operand.element_type.width // 8)
        return address, operand.shape[1] - first

"""Epilogues of a transposed product: pairs of columns are pairs of rows there.

Of every 16 rows tensor cores leave a thread two, 8 apart. A kernel that deals out the rows of its
first operand so that those two are a pair has both in one thread. A tile of so many rows then holds
half as many pairs.
"""

from dataclasses import dataclass
from fractions import Fraction

from cutlass import Boolean, Int32, Numeric

from .epilogue import Epilogue, Full, Thread, places
from .row_pairs import RowPairs

BOTH = 2  # beside the halves 0 and 1 of a thread: the row of what is made of the two


class PairedRows(Epilogue):
    """A transposed epilogue for pairs of rows: a matrix with both rows of every pair is written as
    two matrices, one of the first rows and one of the second; all have a row per pair.

    Attributes:
        row_pairs: Which rows are pairs.
        parts: Of the outputs, in turn: (which of the epilogue's, half; BOTH: it has a row per
            pair).
    """

    def __init__(self, epilogue: Epilogue, row_pairs: RowPairs, per_pair: tuple[bool, ...]):
        """per_pair: Whether an output, or what is reduced to one, has one row per pair."""
        self.epilogue = epilogue
        self.row_pairs = row_pairs
        self.kinds = epilogue.kinds
        self.conversions = epilogue.conversions
        self.reduced = epilogue.reduced
        self._per_pair = per_pair
        self.parts = tuple(
            (output, half)
            for output, one in enumerate(per_pair[: len(epilogue.full)])
            for half in ((BOTH,) if one else (0, 1))
        )
        self.full = (Full(),) * len(self.parts)

    @property
    def reads_little(self) -> bool:
        return self.epilogue.reads_little

    def element(self, output: int, thread: Thread, half: int, column: int) -> Numeric:
        """Of what has a row per pair `half` is 0."""
        output, half = self._element_of(output, half)
        return self.epilogue.element(output, thread, half, column)

    def factors(self, output: int, thread: Thread, half: int, column: int) -> tuple | None:
        output, half = self._element_of(output, half)
        return self.epilogue.factors(output, thread, half, column)

    def places(self, output: int, bundle: int) -> list[tuple[int, int]]:
        both = output >= len(self.parts) and not self._per_pair[self._element_of(output, 0)[0]]
        return [(half, column) for half, column in places(bundle) if both or half == 0]

    def finished(self, output: int, value: Numeric, extents: tuple) -> Numeric:
        M, N, L = extents
        return self.epilogue.finished(output, value, (N, M, L))

    def _element_of(self, output: int, half: int) -> tuple[int, int]:
        """(which of the epilogue's outputs, half)"""
        if output < len(self.parts):
            return self.parts[output]
        return output - len(self.parts) + len(self.epilogue.full), half

    def reads(self, bundle: int) -> list[tuple]:
        return self.epilogue.reads(bundle)


@dataclass
class PairedThread(Thread):
    """The elements of a thread whose two rows are a pair; `row` is that of what has a row per pair.

    Where a value is read, `columns` says which matrix it belongs to: of half as many columns of the
    product, so rows here, as the accumulators or of as many.
    """

    row_pairs: RowPairs | None = None

    def row_of(self, half: int) -> Int32:
        if half == BOTH:
            return self.row
        return self.row_pairs.row(self.row, half, self.extents[0])

    def has_row(self, half: int) -> Boolean:
        """Both of a pair lie in it, or neither. The second one tells: behind the last of the first
        rows there may be second ones."""
        return super().has_row(1)

    def _named(self, half: int, columns: Fraction) -> tuple:
        return BOTH if columns < 1 else half, Fraction(1)

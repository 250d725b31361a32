"""Which rows of a matrix are pairs."""

from dataclasses import dataclass

import cutlass.cute as cute
from cutlass import Int32

TOGETHER = 32  # pairs of a half that are dealt out at a time


@dataclass(frozen=True)
class RowPairs:
    """Which rows are pairs.

    Attributes:
        granularity: So many rows are the first ones of their pairs, then as many the second ones;
            ``"halves"``: the first half of all rows, and the second. Of those 32 are dealt out at
            a time, so they are a multiple.
    """

    granularity: int | str

    def distance(self, rows: Int32) -> Int32 | int:
        """From the first of a pair to the second, in a matrix of so many rows."""
        return rows // 2 if self.granularity == "halves" else self.granularity

    def row(self, pair: Int32, half: int, rows: Int32) -> Int32:
        """The one of a pair, in a matrix of so many rows."""
        first = pair
        if self.granularity != "halves":
            first = pair + pair // self.granularity * self.granularity
        return first + half * self.distance(rows)

    def rows_of(self, mX: cute.Tensor, half: int) -> cute.Tensor:
        """Of a matrix (M, N, L) the first rows of pairs, or the second ones."""
        (rows, *others), (pitch, *pitches) = mX.shape, mX.stride
        if self.granularity == "halves":
            own, steps = rows // 2, pitch
        else:
            block = self.granularity
            own, steps = (block, rows // (2 * block)), (pitch, 2 * block * pitch)
        layout = cute.make_layout((own, *others), stride=(steps, *pitches))
        first = mX.iterator
        if half:
            first += cute.assume(self.distance(rows), divby=TOGETHER) * pitch
        return cute.make_tensor(first, layout)

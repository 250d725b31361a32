"""Which modes of the result a traced value has; the others are broadcast."""

from __future__ import annotations

from fractions import Fraction
from typing import Any, NamedTuple

#: Widths that an operand may have, in units of N: itself, and pairs of columns joined or split.
_WIDTHS = (Fraction(1), Fraction(2), Fraction(1, 2))


class Problem(NamedTuple):
    """Extents of the accumulator.

    Attributes:
        L: None where it has no batch mode.
        M: Rows; of a ragged problem those of all batches.
        ragged: Whether every row belongs to one batch, in one mode of rows. What has rows then
            has no batch mode in memory: (M, N); what has none is as without: (L, 1, N).
        out_rows: Rows of the arguments' ``out``, where these are not those of the result.
    """

    L: int | None
    M: int
    N: int
    ragged: bool = False
    out_rows: int | None = None

    @property
    def of_out(self) -> Problem:
        """The same with the rows that ``out`` has."""
        return self if self.out_rows is None else self._replace(M=self.out_rows)

    def __str__(self) -> str:
        if self.ragged:
            return f"({self.M}, {self.N}) in {self.L} groups of rows"
        batch = () if self.L is None else (self.L,)
        return f"({', '.join(map(str, (*batch, self.M, self.N)))})"


class Shape(NamedTuple):
    """Modes of a value.

    Attributes:
        batch: Whether it has a batch mode (of extent L; 1 where there is no batch).
        rows: Whether it has M rows.
        columns: Its columns in units of N: 1, 1/2 for one of a pair; 0: it has no such mode.
    """

    batch: bool = False
    rows: bool = False
    columns: Fraction = Fraction(0)

    @property
    def is_full(self) -> bool:
        """Whether it has every mode: one value per element of a matrix."""
        return self.batch and self.rows and self.columns > 0

    def extents(self, problem: Problem) -> tuple[int, int, int]:
        """(L, M, N) of a tensor that broadcasts; 1 for the modes that are not there."""
        batches = problem.L if problem.L is not None and self._has_batch_in(problem) else 1
        columns = int(self.columns * problem.N) if self.columns else 1
        return batches, problem.M if self.rows else 1, columns

    def stored(self, problem: Problem) -> tuple[int, ...]:
        """The extents of the modes that are there, as an output operand has them."""
        batch, rows, columns = self.extents(problem)
        found: tuple[int, ...] = (batch,) if self._has_batch_in(problem) else ()
        found += (rows,) if self.rows else ()
        return found + ((columns,) if self.columns else ())

    def kept(self, problem: Problem) -> tuple[int, ...]:
        """The same with modes of extent 1 in place of those that are not there."""
        alone = problem.L is None or (problem.ragged and self.rows)
        return self.extents(problem)[1 if alone else 0 :]

    def _has_batch_in(self, problem: Problem) -> bool:
        """Whether a tensor has its batch mode."""
        return self.batch and problem.L is not None and not (problem.ragged and self.rows)

    def to_list(self) -> list[Any]:
        return [self.batch, self.rows, str(self.columns)]

    @classmethod
    def from_list(cls, data: Any) -> Shape:
        batch, rows, columns = data
        return cls(bool(batch), bool(rows), Fraction(columns))

    def __str__(self) -> str:
        modes = (["L"] if self.batch else []) + (["M"] if self.rows else [])
        if self.columns:
            top, bottom = self.columns.numerator, self.columns.denominator
            modes.append(("" if top == 1 else str(top)) + "N" + (f"/{bottom}" * (bottom > 1)))
        return f"({', '.join(modes)})"


SCALAR = Shape()
FULL = Shape(True, True, Fraction(1))


def broadcast(a: Shape, b: Shape) -> Shape | None:
    """The modes of either; None where both have columns, and not equally many."""
    if a.columns and b.columns and a.columns != b.columns:
        return None
    return Shape(a.batch or b.batch, a.rows or b.rows, a.columns or b.columns)


def shape_of(extents: tuple[int, ...], problem: Problem) -> Shape | None:
    """The modes of a tensor that broadcasts, as torch does, against the accumulator.

    Trailing modes are compared. A mode of the problem's own extent is there, also where that is
    1; any other mode of extent 1 is broadcast. A tensor (N,) is one value per column, (M, 1) one
    per row, (L, 1, 1) one per batch. In a ragged problem, where (M, 1) is one per row of any
    batch, three modes are for what has no rows. None for what does not broadcast.
    """
    rank = len(extents)
    if rank > (2 if problem.L is None else 3):
        return None
    batch, rows, columns = (1,) * (3 - rank) + extents
    if rank == 3 and batch not in (1, problem.L):
        return None
    if rank >= 2 and rows not in (1, problem.M):
        return None
    has_rows = rank >= 2 and rows == problem.M
    if problem.ragged and rank == 3:
        if rows != 1:
            return None
        has_rows = False
    width = Fraction(0)
    if rank >= 1 and (columns == problem.N or columns != 1):
        found = [w for w in _WIDTHS if w * problem.N == columns]
        if not found:
            return None
        width = found[0]
    has_batch = rank == 3 and batch == problem.L
    return Shape(has_batch or (problem.ragged and has_rows), has_rows, width)

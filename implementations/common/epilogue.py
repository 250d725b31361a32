"""What becomes of the accumulators: between a kernel, which holds them, and what is made of them.

Tensor cores leave accumulators in registers in one pattern: of every 8 columns a thread has two
neighbours, in two rows 8 apart; the four threads of a quad have the same rows. A kernel works on
bundles of columns, as wide as an output needs to see at once, and asks an `Epilogue` for each
element of each output. All that is decided while the kernel is traced, so that a bundle becomes
straight-line code.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from fractions import Fraction

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Numeric

from .modes import transposed_modes

_SWAPPED = str.maketrans("mn", "nm")
NUMBER = "number"  # an operand that is no tensor, but a number known at run time

PAIR = 2  # neighbouring columns of a thread in every 8 accumulators, so what lanes are apart


@dataclass(frozen=True)
class Full:
    """An output with rows and columns.

    Attributes:
        columns: Of it, per column of the accumulators.
        lane_columns: From a thread's columns to those of the next one in its quad.
    """

    columns: Fraction = Fraction(1)
    lane_columns: int = PAIR


@dataclass(frozen=True)
class Reduced:
    """An output that is one value per row, per column, per batch, or one in all.

    Attributes:
        kind: ``sum``, ``max``, ``min``. NaN is the largest and the smallest of all.
        over: ``columns``, ``rows``, ``matrix`` or ``all``.
        columns: Of what is reduced, per column of the accumulators.
        lane_columns: As in `Full`.
    """

    kind: str
    over: str
    columns: Fraction = Fraction(1)
    lane_columns: int = PAIR


class Epilogue:
    """What kernels ask. D is the first of the full outputs.

    Attributes:
        kinds: Of the operands that are read: which of the modes ``lmn`` each varies in, or
            `NUMBER`. Trailing modes of a tensor are L, M, N, as in a broadcast.
        full, reduced: The outputs.
        bundle: Columns of accumulators that a kernel has to hand out at once: a multiple.
    """

    kinds: tuple[str, ...] = ()
    full: tuple[Full, ...] = (Full(),)
    reduced: tuple[Reduced, ...] = ()
    bundle: int = 1

    @property
    def is_plain(self) -> bool:
        """Whether D is the accumulators as they are."""
        return False

    def element(self, output: int, thread: "Thread", half: int, column: int) -> Numeric:
        """An element of a full output, or, behind those, of what is reduced.

        half, column: which of the thread's elements in the bundle, see `Thread`.
        """
        raise NotImplementedError

    def finished(self, output: int, value: Numeric, extents: tuple) -> Numeric:
        """What is stored of a value that is reduced over all of (M, N, L)."""
        return value

    def transposed(self) -> "Epilogue":
        """The same for the transposed product; only for elements that stand alone."""
        raise ValueError(f"{type(self).__name__} looks at rows and columns differently")

    def operand_modes(self, operands: tuple) -> tuple:
        """Tensors as (M, N, L); the modes that one does not vary in have stride 0."""
        return tuple(
            operand if kind == NUMBER else _modes(operand, kind)
            for operand, kind in zip(operands, self.kinds, strict=True)
        )

    def transposed_modes(self, operands: tuple) -> tuple:
        """Operands as (N, M, L), from (M, N, L)."""
        return tuple(
            operand if kind == NUMBER else transposed_modes(operand)
            for operand, kind in zip(operands, self.kinds, strict=True)
        )


def _identity(accumulator: Numeric) -> Numeric:
    return accumulator


@dataclass(frozen=True)
class Finish(Epilogue):
    """An element of D = function(accumulator, one value of each operand)."""

    kinds: tuple[str, ...] = ()
    function: Callable[..., Numeric] = _identity

    @property
    def is_plain(self) -> bool:
        return self.function is _identity

    def element(self, output: int, thread: "Thread", half: int, column: int) -> Numeric:
        values = (thread.operand(i, half, column) for i in range(len(self.kinds)))
        return self.function(thread.accumulator(half, column), *values)

    def transposed(self) -> "Finish":
        return Finish(tuple(k.translate(_SWAPPED) for k in self.kinds), self.function)


def _modes(mX: cute.Tensor, kind: str) -> cute.Tensor:
    shape = dict(zip("lmn"[3 - len(mX.shape) :], mX.shape, strict=True))
    stride = dict(zip("lmn"[3 - len(mX.shape) :], mX.stride, strict=True))
    layout = cute.make_layout(
        tuple(shape.get(mode, 1) if mode in kind else 1 for mode in "mnl"),
        stride=tuple(stride.get(mode, 0) if mode in kind else 0 for mode in "mnl"),
    )
    return cute.make_tensor(mX.iterator, layout)


@dataclass
class Thread:
    """The elements of one thread in one bundle.

    They are named, while the kernel is traced, by `half` (0, or 1 for the row 8 below) and by
    `column`: that of the quad's first thread, counted from the start of the bundle. The columns of
    its neighbours are `lane_columns` apart.

    Attributes:
        accumulators: Of the bundle, in registers: (column pair, half, 8 columns).
        operands: (M, N, L), see `Epilogue.operand_modes`.
        row: Of its first element.
        first_column: Of the bundle, in columns of accumulators.
        lane: 0 to 3, in its quad.
        batch: Mode L.
        extents: (M, N) of the accumulators.
        memory: For an epilogue to keep what it has computed of this bundle.
    """

    accumulators: cute.Tensor
    kinds: tuple[str, ...]
    operands: tuple
    row: Int32
    first_column: Int32
    lane: Int32
    batch: Int32
    extents: tuple[Int32, Int32]
    memory: dict = field(default_factory=dict)
    _read: dict = field(default_factory=dict)

    def accumulator(self, half: int, column: int) -> Numeric:
        return self.accumulators[column // 8 * 4 + half * 2 + column % 8]

    def row_of(self, half: int) -> Int32:
        return self.row + 8 * half

    def column_of(self, column: int, lane_columns: int = PAIR, columns: Fraction = Fraction(1)):
        """The column in a matrix that has `columns` per column of the accumulators."""
        first = self.first_column * columns.numerator // columns.denominator
        return first + (column + self.lane * lane_columns)

    def operand(
        self, index: int, half: int, column: int, lane_columns: int = PAIR, columns=Fraction(1)
    ) -> Numeric:
        """The value that belongs to an element; columns None: `column` is counted from the
        operand's own first column, not from the bundle's.

        An element beyond the operand gets its last row or column: nothing comes of it.
        """
        modes = self.kinds[index]
        if modes == NUMBER:
            return self.operands[index]
        key = (index, half if "m" in modes else None)
        key += (column, lane_columns, columns) if "n" in modes else ()
        if key not in self._read:
            operand = self.operands[index]
            m = n = Int32(0)
            if "m" in modes:
                m = cutlass.min(self.row_of(half), operand.shape[0] - 1)
            if "n" in modes:
                n = column + self.lane * lane_columns
                if columns is not None:
                    n = self.column_of(column, lane_columns, columns)
                n = cutlass.min(n, operand.shape[1] - 1)
            self._read[key] = operand[m, n, self.batch]
        return self._read[key]

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
from cutlass import BFloat16, Float16, Float32, Int32, Int64, Numeric, Uint16, Uint32

from .modes import transposed_modes

_SWAPPED = str.maketrans("mn", "nm")
NUMBER = "number"  # an operand that is no tensor, but a number known at run time

HALF = 32  # columns that halves take turns in
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
        halves: Matrices, by their columns per column of the accumulators, of which the columns
            come in another order: 32 of the left half, 32 of the right half, and so on. What is
            a half apart thus lies in one tile. Their columns are a multiple of 64.
    """

    kinds: tuple[str, ...] = ()
    full: tuple[Full, ...] = (Full(),)
    reduced: tuple[Reduced, ...] = ()
    bundle: int = 1
    halves: frozenset[Fraction] = frozenset()

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


def halves_in_turn(mX: cute.Tensor, mode: int) -> cute.Tensor:
    """(..., N, ...) with the columns in the order that `Epilogue.halves` says."""
    shape, stride = list(mX.shape), list(mX.stride)
    columns, pitch = shape[mode], stride[mode]
    shape[mode] = (HALF, 2, columns // (2 * HALF))
    stride[mode] = (pitch, columns // 2 * pitch, HALF * pitch)
    return cute.make_tensor(mX.iterator, cute.make_layout(tuple(shape), stride=tuple(stride)))


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
        halves: As in `Epilogue`.
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
    halves: frozenset = frozenset()
    memory: dict = field(default_factory=dict)
    _read: dict = field(default_factory=dict)
    _first: dict = field(default_factory=dict)

    def accumulator(self, half: int, column: int) -> Numeric:
        return self.accumulators[column // 8 * 4 + half * 2 + column % 8]

    def row_of(self, half: int) -> Int32:
        return self.row + 8 * half

    def column_of(self, column: int, lane_columns: int = PAIR, columns: Fraction = Fraction(1)):
        """The column in a matrix that has `columns` per column of the accumulators."""
        first = self.first_column * columns.numerator // columns.denominator
        if columns in self.halves:
            block, half, rest = column // (2 * HALF), column // HALF % 2, column % HALF
            width = self.extents[1] * columns.numerator // columns.denominator
            first = first // 2 + half * (width // 2)
            column = block * HALF + rest
        return first + (column + self.lane * lane_columns)

    def operand(
        self, index: int, half: int, column: int, lane_columns: int = PAIR, columns=Fraction(1)
    ) -> Numeric:
        """The value that belongs to an element; columns None: `column` is counted from the
        operand's own first column, not from the bundle's.

        An element beyond the operand gets some value: nothing comes of it.
        """
        modes = self.kinds[index]
        if modes == NUMBER:
            return self.operands[index]
        key = (index, half if "m" in modes else None)
        key += (column, lane_columns, columns) if "n" in modes else ()
        if key not in self._read:
            operand = self.operands[index]
            if "n" in modes and _is_one(operand.stride[1]) and operand.element_type in _LOADED_AS:
                value = self._neighbour(index, half, column, lane_columns, columns)
            else:
                value = self._element(index, half, column, lane_columns, columns)
            self._read[key] = value
        return self._read[key]

    def _element(self, index, half, column, lane_columns, columns) -> Numeric:
        operand, modes = self.operands[index], self.kinds[index]
        m = n = Int32(0)
        if "m" in modes:
            m = cutlass.min(self.row_of(half), operand.shape[0] - 1)
        if "n" in modes:
            n = column + self.lane * lane_columns
            if columns is not None:
                n = self.column_of(column, lane_columns, columns)
            n = cutlass.min(n, operand.shape[1] - 1)
        return operand[m, n, self.batch]

    def _neighbour(self, index, half, column, lane_columns, columns) -> Numeric:
        """An element of a row that lies side by side: at a constant distance from the first one
        of the thread, and zero beyond the end of the row."""
        operand, modes = self.operands[index], self.kinds[index]
        start, column = self._start(column, columns)
        key = (index, half if "m" in modes else None, lane_columns, columns, start)
        if key not in self._first:
            m = Int32(0)
            if "m" in modes:
                m = cutlass.min(self.row_of(half), operand.shape[0] - 1)
            n = self.lane * lane_columns
            if columns is not None:
                n = self.column_of(start, lane_columns, columns)
            offset = Int64(m) * operand.stride[0] + n + Int64(self.batch) * operand.stride[2]
            address = operand.iterator.toint() + offset * (operand.element_type.width // 8)
            self._first[key] = (address, operand.shape[1] - n)
        return _load_inside(*self._first[key], column, operand.element_type)

    def _start(self, column, columns) -> tuple:
        """(column that others are at a constant distance from, that distance)"""
        if columns is None or columns not in self.halves:
            return 0, column
        half, block = column // HALF % 2, column // (2 * HALF)
        return half * HALF, block * HALF + column % HALF


_LOADED_AS = {Float32: Uint32, Float16: Uint16, BFloat16: Uint16}


def _is_one(stride) -> bool:
    """Known to be, while the kernel is traced."""
    return isinstance(stride, int) and stride == 1


def _load_inside(first: Int64, left: Int32, column: int, element_type) -> Numeric:
    """Element `column` of a row, zero if fewer are left."""
    word = _LOADED_AS[element_type]
    kind = f"b{word.width}"
    value = cute.arch.inline_ptx(
        f"{{ .reg .pred inside; setp.gt.s32 inside, {{$r1}}, {column}; mov.{kind} {{$w0}}, 0; "
        f"@inside ld.global.{kind} {{$w0}}, [{{$r0}} + {column * word.width // 8}]; }}",
        write_only_types=[word],
        read_only_args=[first, left],
    )
    return value.bitcast(element_type)

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
from cutlass import (
    BFloat16,
    Boolean,
    Float16,
    Float32,
    Int8,
    Int32,
    Int64,
    Numeric,
    Uint16,
    Uint32,
)

from .conversion import Conversions, bfloat16_pair, select
from .modes import transposed_modes
from .row_pairs import RowPairs
from .vectors import load_words

_SWAPPED = str.maketrans("mn", "nm")
NUMBER = "number"  # an operand that is no tensor, but a number known at run time

HALF = 32  # columns that halves take turns in
LANES = 4  # threads of a quad, which share their rows
QUAD_COLUMNS = 32  # of a row that a quad loads at once: vectors of 16 bytes, elements of 16 bits
VECTOR_REGISTERS = 4  # of a thread of the quad
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
class PerBlock:
    """An output with one value for every row and block of columns; all threads of a quad have it.

    Attributes:
        columns: Of it, per column of the accumulators; 0: it has one value for every row.
    """

    columns: Fraction


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
        full, per_block, reduced: The outputs, in this order.
        bundle: Columns of accumulators that a kernel has to hand out at once: a multiple.
        halves: Matrices, by their columns per column of the accumulators, of which the columns
            come in another order: 32 of the left half, 32 of the right half, and so on. What is
            a half apart thus lies in one tile. Their columns are a multiple of 64.
        heads: Columns of heads whose own columns come in such an order: 32 of the left half of the
            first head, 32 of its right half, and so on; then a bundle has 64. None: as they are.
        spans_row: Whether elements depend on whole rows: then a bundle is as wide as a tile, and
            a tile at least as wide as the matrix.
        conversions: To the types of outputs.
        row_pairs: Which rows of a transposed product are pairs, see `PairedRows`; None: none.
    """

    kinds: tuple[str, ...] = ()
    full: tuple[Full, ...] = (Full(),)
    per_block: tuple[PerBlock, ...] = ()
    reduced: tuple[Reduced, ...] = ()
    bundle: int = 1
    halves: frozenset[Fraction] = frozenset()
    heads: int | None = None
    spans_row: bool = False
    conversions: Conversions = Conversions()
    row_pairs: RowPairs | None = None

    @property
    def is_plain(self) -> bool:
        """Whether D is the accumulators as they are."""
        return False

    @property
    def reads_little(self) -> bool:
        """Whether a thread has registers for all that it reads of a tile."""
        return False

    def element(self, output: int, thread: "Thread", half: int, column: int) -> Numeric:
        """An element of an output; of one that is reduced, an element of what is reduced.

        half, column: which of the thread's elements in the bundle, see `Thread`.
        """
        raise NotImplementedError

    def factors(self, output: int, thread: "Thread", half: int, column: int) -> tuple | None:
        """Two numbers whose product an element is, if there are such."""
        return None

    def reads(self, bundle: int) -> list[tuple]:
        """What the elements of a bundle of so many columns need, as `Thread.request` takes it."""
        return []

    def fetch(self, thread: "Thread", bundle: int) -> None:
        """Starts to read it."""
        for read in self.reads(bundle):
            thread.request(*read)

    def places(self, output: int, bundle: int) -> list[tuple[int, int]]:
        """(half, column) of the elements that a thread has of an output in a bundle."""
        one = (*self.full, *self.per_block, *self.reduced)[output]
        columns = int(bundle * one.columns)
        if isinstance(one, PerBlock):
            return [(half, block) for block in range(max(1, columns)) for half in (0, 1)]
        return places(columns, one.lane_columns)

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

    def reads(self, bundle: int) -> list[tuple]:
        return [(i, *place) for place in places(bundle) for i in range(len(self.kinds))]

    @property
    def reads_little(self) -> bool:
        return not any({"m", "n"} <= set(kind) for kind in self.kinds if kind != NUMBER)

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


def column_in_heads(column, heads: int):
    """Where a column is of a matrix whose columns come in the order that `Epilogue.heads` says."""
    head, rest = column // heads, column % heads
    pair, half = rest // (2 * HALF), rest // HALF % 2
    return head * heads + half * (heads // 2) + pair * HALF + rest % HALF


def places(columns: int, lane_columns: int = PAIR) -> list[tuple[int, int]]:
    """(half, column) of a thread's elements in so many columns, see `Thread`; of pairs in the
    order of the registers that tensor cores leave accumulators in."""
    return [
        (half, first + i)
        for first in range(0, columns, LANES * lane_columns)
        for half in (0, 1)
        for i in range(lane_columns)
    ]


def store_per_block(epilogue: Epilogue, thread: "Thread", tensors: tuple, bundle: int) -> None:
    """Writes what a thread's quad has of the outputs per block of columns; its threads take turns.

    tensors: (M, blocks, L) of each.
    """
    for i, (mX, of) in enumerate(zip(tensors, epilogue.per_block, strict=True)):
        output = len(epilogue.full) + i
        for half, block in epilogue.places(output, bundle):
            value = epilogue.element(output, thread, half, block)
            value = epilogue.conversions.converted(value, mX.element_type)
            column = thread.column_of(block, 0, of.columns) if of.columns else Int32(0)
            mine = thread.lane == block % LANES
            if not of.columns:
                mine = mine & (thread.first_column == 0)
            store_element(mX, value, thread.row_of(half), column, thread.batch, mine)


@cute.jit
def store_element(mX, value, row, column, batch, mine: Boolean):
    """Where the matrix has it, and if it is this thread's."""
    if mine & (row < mX.shape[0]) & (column < mX.shape[1]):
        mX[row, column, batch] = value


@dataclass
class Thread:
    """The elements of one thread in one bundle.

    They are named, while the kernel is traced, by `half` (0, or 1 for the row 8 below) and by
    `column`: that of the quad's first thread, counted from the start of the bundle. The columns of
    its neighbours are `lane_columns` apart; 0 if all of the quad have the same.

    Attributes:
        accumulators: Of the bundle, in registers: (column pair, half, 8 columns).
        operands: (M, N, L), see `Epilogue.operand_modes`.
        row: Of its first element.
        first_column: Of the bundle, in columns of accumulators.
        lane: 0 to 3, in its quad.
        batch: Mode L.
        extents: (M, N) of the accumulators.
        halves, heads: As in `Epilogue`.
        vector_bytes: What divides addresses, strides and rows of all operands with columns side
            by side, in bytes; 1 if nothing is known of them.
        of_columns, of_rows: What is read that all rows, or all columns, share; so may threads of
            one bundle, or of the same rows.
        shares_vectors: Whether all of a warp read what they read together, so that each thread of a
            quad may load a whole vector of a row, and they exchange the elements.
        is_whole: Whether all of the bundle is known to lie in the matrix.
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
    heads: int | None = None
    vector_bytes: int = 1
    shares_vectors: bool = False
    is_whole: bool = False
    of_columns: dict = field(default_factory=dict)
    of_rows: dict = field(default_factory=dict)
    memory: dict = field(default_factory=dict)
    _read: dict = field(default_factory=dict)
    _vectors: dict = field(default_factory=dict)
    _first: dict = field(default_factory=dict)

    @property
    def bundle(self) -> int:
        """Columns of it."""
        return 2 * cute.size(self.accumulators)

    def accumulator(self, half: int, column: int) -> Numeric:
        return self.accumulators[column // 8 * 4 + half * 2 + column % 8]

    def row_of(self, half: int) -> Int32:
        return self.row + 8 * half

    def has_row(self, half: int) -> Boolean:
        """Whether it lies in the matrix."""
        return self.row_of(half) < self.extents[0]

    def column_of(self, column: int, lane_columns: int = PAIR, columns: Fraction = Fraction(1)):
        """The column in a matrix that has `columns` per column of the accumulators."""
        first = self.first_column * columns.numerator // columns.denominator
        if self.heads is not None:
            start, distance = self._start(column, columns)
            return self.first_of_bundle + (start + distance + self.lane * lane_columns)
        if columns in self.halves:
            block, half, rest = column // (2 * HALF), column // HALF % 2, column % HALF
            width = self.extents[1] * columns.numerator // columns.denominator
            first = first // 2 + half * (width // 2)
            column = block * HALF + rest
        return first + (column + self.lane * lane_columns)

    @property
    def first_of_bundle(self) -> Int32:
        """The column of the matrix that the bundle begins with, of a bundle of a head."""
        if "first of bundle" not in self.memory:
            self.memory["first of bundle"] = column_in_heads(self.first_column, self.heads)
        return self.memory["first of bundle"]

    @property
    def first_of_table(self) -> Int32:
        """The column that a bundle begins with, of tables with one for each pair of a head's."""
        if self.heads is None:
            return Int32(0)
        if "first of table" not in self.memory:
            self.memory["first of table"] = self.first_column % self.heads // 2
        return self.memory["first of table"]

    def is_inside(self, column: int, lane_columns: int, columns: Fraction):
        """Whether a column lies in the matrix that has `columns` per column of accumulators."""
        start, distance = self._start(column, columns)
        key = ("left", start, lane_columns, columns)
        if key not in self.memory:
            width = self.extents[1] * columns.numerator // columns.denominator
            if columns in self.halves and start // HALF % 2 == 0:
                width = width // 2  # behind it the other half begins
            self.memory[key] = width - self.column_of(start, lane_columns, columns)
        return self.memory[key] > distance

    def operand(
        self, index: int, half: int, column: int, lane_columns: int = PAIR, columns=Fraction(1)
    ) -> Numeric:
        """The value that belongs to an element; columns None: `column` is counted from the
        operand's own first column, not from the bundle's.

        An element beyond the operand gets some value: nothing comes of it.
        """
        if self.kinds[index] == NUMBER:
            return self.operands[index]
        half, columns = self._named(half, columns)
        read, key = self._kept(index, half, column, lane_columns, columns)
        half = key[1]
        if key not in read:
            if self._in_vectors(index, lane_columns, columns):
                read.update(self._exchanged(index, half, column, columns))
            elif self._in_words(index):
                read.update(self._neighbours(index, half, column, lane_columns, columns))
            else:
                read[key] = self._element(index, half, column, lane_columns, columns)
        return read[key]

    def _named(self, half: int, columns: Fraction | None) -> tuple:
        """How what is read says of which row it is, and of which matrix."""
        return half, columns

    def _kept(self, index: int, half: int, column: int, lane_columns: int, columns) -> tuple:
        """(where it is kept, its key there) of what is read."""
        modes = self.kinds[index]
        read = self.of_rows if "n" not in modes else self._read
        if "m" not in modes:
            half, read = None, self.of_columns
        return read, (index, half, *((column, lane_columns, columns) if "n" in modes else ()))

    def request(
        self, index: int, half: int, column: int, lane_columns: int = PAIR, columns=Fraction(1)
    ) -> None:
        """Starts to load what `operand` gives."""
        half, columns = self._named(half, columns)
        if self._in_vectors(index, lane_columns, columns):
            self._vector(index, half, column, columns)
        elif self._in_words(index):
            self._words(index, half, column, lane_columns, columns)
        else:
            self.operand(index, half, column, lane_columns, columns)

    def _in_words(self, index: int) -> bool:
        """Whether neighbours of a row come in one load, as they are, and are taken apart later."""
        return "n" in self.kinds[index] and self._side_by_side(index)

    def _in_vectors(self, index: int, lane_columns: int, columns: Fraction | None) -> bool:
        """Whether a quad loads the elements of its four threads in vectors of their rows."""
        modes = self.kinds[index]
        if not self.shares_vectors or modes == NUMBER or not {"m", "n"} <= set(modes):
            return False
        if lane_columns != PAIR or columns is None or self.bundle * columns % QUAD_COLUMNS:
            return False
        if columns in self.halves:  # two addresses of each row: there are no registers for them
            return False
        width = self.operands[index].element_type.width
        whole = width == 16 and self.vector_bytes * LANES * 8 == QUAD_COLUMNS * width
        return whole and self._side_by_side(index)

    def registers_of(self, reads: list[tuple], of_matrices: bool) -> dict[tuple, int]:
        """Of `reads`, each load once, with the registers that it takes until it is needed: vectors
        of matrices, or everything else that is not there."""
        found: dict[tuple, tuple] = {}
        for read in reads:
            index, half, column, lane_columns, columns = (*read, PAIR, Fraction(1))[:5]
            half, columns = self._named(half, columns)
            if self._in_vectors(index, lane_columns, columns):
                if of_matrices:
                    found[index, half, column // QUAD_COLUMNS] = (read, VECTOR_REGISTERS)
            elif self.kinds[index] != NUMBER and not of_matrices:
                kept, key = self._kept(index, half, column, lane_columns, columns)
                count = 1
                if self._in_words(index):
                    first, count = self._load_of(index, column, lane_columns)
                    key = self._key_of_words(index, key[1], first, lane_columns, columns)
                    count = -(-count * self.operands[index].element_type.width // 32)
                if key not in kept:
                    found[(id(kept), *key)] = (read, count)
        return dict(found.values())

    def _vector(self, index: int, half: int, column: int, columns: Fraction) -> list:
        """Eight elements of a row, in pairs: the thread's share of those of its quad."""
        first = column - column % QUAD_COLUMNS
        key = (index, half, first, columns)
        if key not in self._vectors:
            count = QUAD_COLUMNS // LANES
            start, distance = self._start(first, columns)
            place = self._first_of_row(index, half, start, count, columns)
            self._vectors[key] = load_words(*place, distance, count, 16)
        return self._vectors[key]

    def _exchanged(self, index: int, half: int, column: int, columns: Fraction) -> dict:
        """The thread's own elements of what its quad has loaded, by their keys."""
        first = column - column % QUAD_COLUMNS
        pairs = transposed_over_quad(self._vector(index, half, column, columns), self.lane)
        element_type = self.operands[index].element_type
        return {
            (index, half, first + LANES * PAIR * j + i, PAIR, columns): value
            for j, pair in enumerate(pairs)
            for i, value in enumerate(_two_of(pair, element_type))
        }

    def _side_by_side(self, index: int) -> bool:
        """Whether the columns of an operand are, and are loaded without a type of their own."""
        operand = self.operands[index]
        return _is_one(operand.stride[1]) and operand.element_type in _LOADED

    def _element(self, index, half, column, lane_columns, columns) -> Numeric:
        operand, modes = self.operands[index], self.kinds[index]
        m = n = Int32(0)
        if half is not None:
            m = cutlass.min(self.row_of(half), operand.shape[0] - 1)
        if "n" in modes:
            if columns is None:
                n = self.first_of_table + (column + self.lane * lane_columns)
            else:
                n = self.column_of(column, lane_columns, columns)
            n = cutlass.min(n, operand.shape[1] - 1)
        return operand[m, n, self.batch]

    def _neighbours(self, index, half, column, lane_columns, columns) -> dict:
        """What one load gives: an element of a row, with its neighbours as far as they are this
        thread's and a vector reaches; by their keys. Zeros beyond the end of the row."""
        column, count = self._load_of(index, column, lane_columns)
        words = self._words(index, half, column, lane_columns, columns)
        values = _taken_apart(words, count, self.operands[index].element_type)
        return {
            (index, half, column + i, lane_columns, columns): value
            for i, value in enumerate(values)
        }

    def _load_of(self, index: int, column: int, lane_columns: int) -> tuple[int, int]:
        """(first column, columns) of the load that an element comes with."""
        width = self.operands[index].element_type.width
        count = min(lane_columns, max(1, self.vector_bytes * 8 // width))
        return column - column % (LANES * lane_columns) % count, count

    def _key_of_words(self, index, half, first, lane_columns, columns) -> tuple:
        return "words", index, half, first, lane_columns, columns

    def _words(self, index, half, column, lane_columns, columns) -> list:
        """What one load gives, as it is."""
        kept, (_, half, *_) = self._kept(index, half, column, lane_columns, columns)
        column, count = self._load_of(index, column, lane_columns)
        key = self._key_of_words(index, half, column, lane_columns, columns)
        if key not in kept:
            start, distance = self._start(column, columns)
            row = (index, half, lane_columns, columns, start)
            if row not in self._first:
                self._first[row] = self._first_of_row(index, half, start, lane_columns, columns)
            width = self.operands[index].element_type.width
            kept[key] = load_words(*self._first[row], distance, count, width)
        return kept[key]

    def _first_of_row(self, index, half, start, lane_columns, columns) -> tuple:
        """(address of a thread's element, elements from there to the end of the row if that may
        be behind it)"""
        operand = self.operands[index]
        m = Int32(0)
        if half is not None:
            m = cutlass.min(self.row_of(half), operand.shape[0] - 1)
        if columns is None:
            n = self.first_of_table + self.lane * lane_columns
        else:
            n = self.column_of(start, lane_columns, columns)
        offset = Int64(m) * operand.stride[0] + n + Int64(self.batch) * operand.stride[2]
        address = operand.iterator.toint() + offset * (operand.element_type.width // 8)
        if columns is None and self.heads is not None:
            return address, None  # a table has as many columns as bundles have places in a head
        return address, operand.shape[1] - n

    def _start(self, column, columns) -> tuple:
        """(column that others are at a constant distance from, that distance)"""
        if columns is not None and self.heads is not None:
            return 0, column // HALF * (self.heads // 2) + column % HALF
        if columns is None or columns not in self.halves:
            return 0, column
        half, block = column // HALF % 2, column // (2 * HALF)
        return half * HALF, block * HALF + column % HALF


_LOADED = (Float32, Float16, BFloat16, Int8)


def _is_one(stride) -> bool:
    """Known to be, while the kernel is traced."""
    return isinstance(stride, int) and stride == 1


def _taken_apart(words: list, count: int, element_type) -> list:
    """The `count` neighbours of a row that one load has brought."""
    if element_type is Int8:
        bytes_of_word = words[0].width // 8
        return [Int8(words[i // bytes_of_word] >> (i % bytes_of_word * 8)) for i in range(count)]
    if element_type.width * count == 16 or element_type is Float32:
        return [value.bitcast(element_type) for value in words]
    return [value for pair in words for value in _two_of(pair, element_type)]


def transposed_over_quad(words: list, lane: Int32) -> list:
    """Of four words of each thread of a quad: word `lane` of all four, in their order."""
    for bit in (1, 2):
        upper = (lane & bit) != 0
        for low in (0, 3 - bit):
            high = low + bit
            sent = select(upper, words[low], words[high])
            received = cute.arch.shuffle_sync_bfly(sent, offset=bit)
            words = list(words)
            words[low] = select(upper, received, words[low])
            words[high] = select(upper, words[high], received)
    return words


def _two_of(pair: Uint32, element_type) -> tuple:
    """Two neighbours of 16 bits."""
    if element_type is BFloat16:
        return bfloat16_pair(pair)
    return tuple(Uint16(half).bitcast(element_type) for half in (pair, pair >> Uint32(16)))

"""Accumulation of 8-bit floats that keeps the precision of float32.

Hopper's tensor cores add products of 8-bit floats with about 14 bits. So the products of one
k tile are formed apart, and added to the accumulators by ordinary float32 arithmetic, which is
also where a scale per block of K can be applied (DeepSeek-V3 technical report, section 3.3.2).
"""

from math import gcd

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from ..common.conversion import select
from ..common.epilogue import HALF
from ..common.modes import operand_batch_last
from ..common.threads import GROUP, QUAD

COLUMNS = 192  # multiplied at once, so that products and accumulators fit into registers
MOST_SCALED_COLUMNS = 32  # that have a scale each: factors of more take longer than products
SCALE_BLOCK = 128  # elements along K, and along N for B
_WITHIN_QUAD = (32 - QUAD) << 8 | 31  # a shuffle's segments
_WITHIN_WARP = 31


def straddling_pieces(tile_n: int) -> int:
    """Of a tile's columns, which have one block scale each wherever it begins; 1: all have."""
    return tile_n // gcd(tile_n, SCALE_BLOCK) if tile_n % SCALE_BLOCK else 1


def straddled_blocks(tile_n: int) -> int:
    """Of scales, that a tile has columns of at most, if it may begin within one; else 1."""
    apart = tile_n - gcd(tile_n, SCALE_BLOCK)
    return 1 + -(-apart // SCALE_BLOCK) if straddling_pieces(tile_n) > 1 else 1


def promoted_columns(tile_n: int, rows_scaled: bool) -> int:
    """Columns that are multiplied at once: of the whole tile if they are few enough, because every
    wgmma reads A again; where rows have block scales, those that share one of B, if all do."""
    most = SCALE_BLOCK if rows_scaled and straddling_pieces(tile_n) == 1 else COLUMNS
    blocks = -(-tile_n // most)
    while tile_n % (blocks * 16):
        blocks += 1
    return tile_n // blocks


def scale_modes(scale_a: cute.Tensor, scale_b: cute.Tensor) -> tuple:
    """Scales of A (M, ceil(K/128)) and of B (ceil(K/128), ceil(N/128)), with L in front if
    batched, seen as (M, K blocks, L) and (N blocks, K blocks, L)."""
    return operand_batch_last(scale_a), operand_batch_last(scale_b, transposed=True)


class BlockScales:
    """Scales per block of K: each k tile has factors of its own.

    The threads that share scales of A read those of a k tile each, for as many k tiles as they
    are, while the k tiles before are multiplied, and hand their factors to each other: scales may
    come from device memory, which takes longer than a k tile.

    A thread's registers are the scales of A that are read, those of B, the factors of the k tile
    that it has read them of, and the factors of the one that is multiplied.

    Attributes:
        readers: Threads that share scales of A.
        of_a, of_b: How many scales a thread reads of a k tile.
        shape: Of its factors.
        handed: The shape of those that products are multiplied with.
    """

    readers: int
    of_a: int
    of_b: int
    shape: tuple[int, ...]

    @property
    def handed(self) -> tuple[int, ...]:
        return self.shape

    def registers(self) -> tuple:
        shapes = (self.of_a, self.of_b, self.shape, self.handed)
        return tuple(cute.make_rmem_tensor(shape, Float32) for shape in shapes)

    @cute.jit
    def read(self, registers: tuple, scales: tuple, place: tuple, k_block: Int32):
        """Starts to read those of as many k tiles as there are readers, from this one on.

        scales: Those of A and B, and if rows of A are picked, (M,) Int32 of which they are.
        place: (row, column, batch) where the accumulators of the group of threads begin.
        """
        scale_a, scale_b, *picked = scales
        rows, columns, batch = self.scaled(place)
        read_a, read_b, _, _ = registers
        k_block = cutlass.min(k_block + self.reader(), scale_a.shape[1] - 1)
        for i in cutlass.range_constexpr(self.of_a):
            m = rows + self.row(i)
            if const_expr(len(picked) > 0):
                m = picked[0][cutlass.min(m, picked[0].shape[0] - 1)]
            m = cutlass.min(m, scale_a.shape[0] - 1)
            read_a[i] = scale_a[m, k_block, batch]
        for block in cutlass.range_constexpr(self.of_b):
            n = self.column(columns, block, scale_b.shape[0])
            read_b[block] = scale_b[cutlass.min(n, scale_b.shape[0] - 1), k_block, batch]

    def column(self, columns: Int32, block: int, count: Int32) -> Int32:
        """Of the scales of B, of which there are so many: the one of a block of columns, of a tile
        that begins at `columns`."""
        return columns // SCALE_BLOCK + block

    @cute.jit
    def advance(self, registers: tuple, scales: tuple, place: tuple, k_block: Int32, turn: Int32):
        """Before the k tile that is this turn of the readers': at the first one what was read
        becomes factors, and the next scales are read."""
        if turn == 0:
            read_a, read_b, own, _ = registers
            for block in cutlass.range_constexpr(self.of_b):
                for i in cutlass.range_constexpr(self.of_a):
                    own[i + block * self.of_a] = read_a[i] * read_b[block]
            self.read(registers, scales, place, k_block + self.readers)

    @cute.jit
    def hand_out(self, registers: tuple, place: tuple, turn: Int32):
        """The factors of a k tile; this one of the readers has them."""
        _, _, own, factors = registers
        for i in cutlass.range_constexpr(cute.size(own)):
            factors[i] = self._taken(own[i], turn)

    def _taken(self, factor, turn: Int32):
        """A factor of the reader whose turn it is."""
        source, segments = self.source(turn)
        return cute.arch.shuffle_sync(factor, offset=source, mask_and_clamp=segments)


class RowScales(BlockScales):
    """Rows of accumulators are rows of A: a thread has two, 8 apart, and the four threads that
    share them read. Every block of columns that is multiplied at once has a scale of B."""

    readers, of_a = QUAD, 2

    def __init__(self, blocks: int):
        self.of_b, self.shape = blocks, (2, blocks)

    def scaled(self, place: tuple) -> tuple:
        """(row of A, column of B, batch) of a thread's first accumulator."""
        (row, column, batch), thread = place, cute.arch.thread_idx()[0] % GROUP
        return row + thread // 32 * 16 + thread % 32 // QUAD, column, batch

    def row(self, i: int) -> int:
        """Of A, behind the first, that a thread reads the scale of."""
        return 8 * i

    def reader(self) -> Int32:
        return cute.arch.lane_idx() % QUAD

    def source(self, turn: Int32) -> tuple:
        """(offset, segments) of a shuffle that takes from a reader."""
        return turn, _WITHIN_QUAD

    def factor(self, factors, i: int, block: int):
        """Of the i-th product of a block."""
        return factors[i // 2 % 2, block]


class HalvedRowScales(RowScales):
    """Of tiles that have 32 columns of the left half of B and 32 of the right half in turns, half a
    block of scales or a whole one of each."""

    def __init__(self):
        super().__init__(blocks=2)

    def column(self, columns: Int32, block: int, count: Int32) -> Int32:
        return columns // (2 * SCALE_BLOCK) + block * (count // 2)

    def factor(self, factors, i: int, block: int):
        """What is multiplied at once begins with the left half."""
        return factors[i // 2 % 2, i // 4 * 8 // HALF % 2]


class StraddlingRowScales(RowScales):
    """Of tiles whose columns may begin within a block of scales and end within the next: pieces of
    them, as wide as divides tile and block, have the scale of the one or the other."""

    def __init__(self, tile_n: int):
        super().__init__(blocks=2)
        self.pieces = straddling_pieces(tile_n)
        self.width = tile_n // self.pieces

    @property
    def handed(self) -> tuple[int, ...]:
        return 2, self.pieces

    @cute.jit
    def hand_out(self, registers: tuple, place: tuple, turn: Int32):
        _, _, own, factors = registers
        _, column, _ = place
        of_first = (SCALE_BLOCK - column % SCALE_BLOCK) // self.width
        for i in cutlass.range_constexpr(self.of_a):
            first, second = (self._taken(own[i, block], turn) for block in range(2))
            for piece in cutlass.range_constexpr(self.pieces):
                factors[i, piece] = select(of_first > piece, first, second)

    def factor(self, factors, i: int, block: int):
        """All columns are multiplied at once."""
        return factors[i // 2 % 2, i // 4 * 8 // self.width]


class ColumnScales(BlockScales):
    """Columns of accumulators are rows of A, where the transposed product is computed: a thread has
    two of every 8, and the eight threads of a warp that share them read. The 64 rows of a group of
    threads share a scale of B."""

    readers, of_b = 32 // QUAD, 1

    def __init__(self, columns: int):
        self.of_a = columns // QUAD
        self.shape = (self.of_a,)

    def scaled(self, place: tuple) -> tuple:
        row, column, batch = place
        return column + 2 * (cute.arch.lane_idx() % QUAD), row, batch

    def row(self, i: int) -> int:
        return i // 2 * 8 + i % 2

    def reader(self) -> Int32:
        return cute.arch.lane_idx() // QUAD

    def source(self, turn: Int32) -> tuple:
        return turn * QUAD + cute.arch.lane_idx() % QUAD, _WITHIN_WARP

    def factor(self, factors, i: int, block: int):
        return factors[i // 4 * 2 + i % 2]


@cute.jit
def promote(
    accumulators: cute.Tensor,
    products: cute.Tensor,
    block: cutlass.Constexpr,
    scales: cutlass.Constexpr,
    factors,
):
    """accumulators += products · factors, of one block of columns; scales, factors None: 1."""
    first = block * cute.size(products)
    # Multiplication with an unknown 1 costs nothing, and ptxas lets wgmma run asynchronously
    # beside it; beside plain additions it does not if registers are short.
    one = cute.arch.inline_ptx("mov.b32 {$w0}, 0f3F800000;", write_only_types=[Float32])
    for i in cutlass.range_constexpr(cute.size(products)):
        factor = one
        if const_expr(scales is not None):
            factor = scales.factor(factors, i, block)
        accumulators[first + i] += products[i] * factor

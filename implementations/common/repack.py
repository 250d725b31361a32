"""Matrices that TMA cannot read, copied to where it can."""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int8, Int16, Int32, Int64, Uint32, Uint64, const_expr
from cutlass.cute import AddressSpace
from cutlass.memory import SmemAllocator

from .conversion import select
from .flat_grid import flat_block_idx, flat_grid

THREADS = 256
ROW_BYTES = 128  # that a tile has of each of its rows
ROWS, TURNED_ROWS = 128, 64  # of a tile
PIECE = 16  # bytes that are read and written at once
WORD = 4
ALIGNMENT = 128  # of the copy's address, and the bytes of a line of L2
LONG_ROW = 512  # bytes of a row, from which on the next one begins with a line

_BITS = {8: Int8, 16: Int16, 32: Int32}


class Repack:
    """Copies (R, C, L) into rows along C that start at multiples of 16 bytes, and long ones of 128:
    what is read of those is in as few lines as it fits.

    The matrix has any strides, of which that of C is 1, or that of R if `transposes`. A block
    copies a tile. What a row has behind its last element is zero.

    rows are  threads
    --------  ---------------------------------------------------------------------------------
    copied    read two aligned pieces, of which the one that is written is a part, wherever the
              matrix begins and ends: elsewhere element by element
    turned    read along what is contiguous, into shared memory, and write rows of whole pieces

    follows: Whether the kernel before is such a copy, of something else: this one waits for it at
        its end, for the sake of the kernel behind. What was before both has ended when it begins.
    """

    def __init__(
        self,
        element_type: type[cutlass.Numeric],
        transposes: bool,
        dependent_launch: bool,
        follows: bool,
    ):
        self.element_type = element_type
        self.dependent_launch = dependent_launch
        self.transposes = transposes
        self.follows = follows
        self.bits = _BITS[element_type.width]
        self.size = element_type.width // 8
        self.rows = TURNED_ROWS if transposes else ROWS
        self.columns = ROW_BYTES // self.size  # of a tile
        self.piece = PIECE // self.size  # elements
        self.across = ROW_BYTES // PIECE  # pieces of a tile's row
        self.each = self.rows * self.across // THREADS  # pieces that a thread writes

    @cute.jit
    def __call__(self, mX: cute.Tensor, address: Int64, stream: cuda.CUstream):
        """Launches the copy of mX to the address; returns it as a tensor of the same modes."""
        rows, columns, batches = mX.shape
        pitch = pitch_bytes(mX) * 8 // self.element_type.width
        pitch = cute.assume(pitch, divby=self.piece)
        layout = cute.make_layout((rows, columns, batches), stride=(pitch, 1, pitch * rows))
        pointer = cute.make_ptr(
            self.element_type, address, AddressSpace.gmem, assumed_align=ALIGNMENT
        )
        mY = cute.make_tensor(pointer, layout)
        self.kernel(_as(mX, self.bits), _as(mY, self.bits)).launch(
            grid=flat_grid(*self._tiles(mX), batches),
            block=(THREADS, 1, 1),
            stream=stream,
            use_pdl=self.dependent_launch,
        )
        return mY

    @cute.kernel
    def kernel(self, mX: cute.Tensor, mY: cute.Tensor):
        tile_column, tile_row, batch = flat_block_idx(*self._tiles(mX))
        if const_expr(self.dependent_launch):
            if const_expr(not self.follows):
                cute.arch.griddepcontrol_wait()
            cute.arch.griddepcontrol_launch_dependents()
        mX, mY = mX[None, None, batch], mY[None, None, batch]
        first = (tile_row * self.rows, tile_column * self.columns)
        if const_expr(self.transposes):
            self._turn(mX, mY, *first)
        else:
            self._copy(mX, mY, *first)
        if const_expr(self.dependent_launch and self.follows):
            cute.arch.griddepcontrol_wait()

    def _tiles(self, mX: cute.Tensor) -> tuple[Int32, Int32]:
        """Of a matrix: beside each other, and below."""
        rows, columns, _ = mX.shape
        return cute.ceil_div(columns, self.columns), cute.ceil_div(rows, self.rows)

    @cute.jit
    def _copy(self, mX: cute.Tensor, mY: cute.Tensor, first_row: Int32, first_column: Int32):
        tid, _, _ = cute.arch.thread_idx()
        rows, columns = mX.shape
        begin = mX.iterator.toint()
        end = mX[rows - 1, None].iterator.toint() + Int64(columns) * self.size
        read = [
            [cute.make_rmem_tensor(PIECE // WORD, Uint32) for _ in range(2)]
            for _ in range(self.each)
        ]
        for i in cutlass.range_constexpr(self.each):
            for piece in read[i]:
                piece.fill(0)
            row, column = self._place(tid, i, first_row, first_column)
            if row < rows and column < columns:
                aligned, _, count = self._pieces(mX, row, column)
                if _lie_within(aligned, count, begin, end):
                    cute.autovec_copy(_words(aligned, AddressSpace.gmem), read[i][0])
                    if count == 2:
                        cute.autovec_copy(_words(aligned + PIECE, AddressSpace.gmem), read[i][1])
        for i in cutlass.range_constexpr(self.each):
            row, column = self._place(tid, i, first_row, first_column)
            if row < rows and column < columns:
                aligned, offset, count = self._pieces(mX, row, column)
                left = cutlass.min(columns - column, self.piece)
                written = cute.make_rmem_tensor(PIECE // WORD, Uint32)
                if _lie_within(aligned, count, begin, end):
                    _cut(read[i], offset, left * self.size, written)
                else:
                    elements = cute.recast_tensor(written, self.bits)
                    for j in cutlass.range_constexpr(self.piece):
                        element = self.bits(0)
                        if j < left:
                            element = mX[row, column + j]
                        elements[j] = element
                to = _address(mY, row, column, self.size)
                cute.autovec_copy(written, _words(to, AddressSpace.gmem))

    def _pieces(self, mX: cute.Tensor, row: Int32, column: Int32) -> tuple:
        """Of the aligned pieces that have the elements of one: (address, bytes in front of those,
        count)."""
        left = cutlass.min(mX.shape[1] - column, self.piece)
        start = _address(mX, row, column, self.size)
        offset = Int32(start % PIECE)
        return start - offset, offset, (offset + left * self.size + PIECE - 1) // PIECE

    @cute.jit
    def _turn(self, mX: cute.Tensor, mY: cute.Tensor, first_row: Int32, first_column: Int32):
        tid, _, _ = cute.arch.thread_idx()
        rows, columns = mX.shape
        # One piece more per row, so that reading columns of it does not hit one bank.
        shared = cute.make_layout((self.rows, self.columns), stride=(self.columns + self.piece, 1))
        sX = SmemAllocator().allocate_tensor(self.bits, shared, byte_alignment=PIECE)
        for i in cutlass.range_constexpr(self.rows * self.columns // THREADS):
            place = tid + i * THREADS
            row, column = place % self.rows, place // self.rows
            element = self.bits(0)
            if first_row + row < rows and first_column + column < columns:
                element = mX[first_row + row, first_column + column]
            sX[row, column] = element
        cute.arch.barrier()
        for i in cutlass.range_constexpr(self.each):
            row, column = self._place(tid, i, 0, 0)
            if first_row + row < rows and first_column + column < columns:
                to = _address(mY, first_row + row, first_column + column, self.size)
                cute.autovec_copy(
                    _words(_address(sX, row, column, self.size), AddressSpace.smem),
                    _words(to, AddressSpace.gmem),
                )

    def _place(self, tid, i: int, first_row, first_column):
        """(row, column) where the i-th piece of a thread begins."""
        place = tid + i * THREADS
        return first_row + place // self.across, first_column + place % self.across * self.piece


def _as(tensor, element_type):
    """The same memory, of another type of the same width."""
    pointer = cute.recast_ptr(tensor.iterator, dtype=element_type)
    return cute.make_tensor(pointer, tensor.layout)


def _address(tensor, row, column, size: int):
    """Of an element of a matrix that is contiguous along its columns."""
    return tensor[row, None].iterator.toint() + column * size


def _words(address, space):
    """An aligned piece."""
    pointer = cute.make_ptr(Uint32, address, space, assumed_align=PIECE)
    return cute.make_tensor(pointer, cute.make_layout(PIECE // WORD))


@cute.jit
def _lie_within(aligned: Int64, count: Int32, begin: Int64, end: Int64) -> Boolean:
    """Whether so many pieces are the matrix's, which begins and ends there."""
    return aligned >= begin and aligned + count * PIECE <= end


@cute.jit
def _cut(read: list, offset: Int32, count: Int32, written: cute.Tensor):
    """The piece that begins `offset` bytes behind where the two of `read` do; zeros behind
    `count`."""
    words = [piece[i] for piece in read for i in range(PIECE // WORD)]
    for power in (1, 2):
        skips = offset // WORD & power != 0
        words = [
            select(skips, later, word) for word, later in zip(words, words[power:], strict=False)
        ]
    shift = Uint64(offset % WORD * 8)
    for i in cutlass.range_constexpr(PIECE // WORD):
        both = Uint64(words[i + 1]) << Uint64(32) | Uint64(words[i])
        bits = Uint32(cutlass.min(cutlass.max(count - i * WORD, 0), WORD) * 8)
        kept = (Uint64(1) << Uint64(bits)) - Uint64(1)
        written[i] = Uint32(both >> shift & kept)


@cute.jit
def pitch_bytes(mX: cute.Tensor) -> Int64:
    """Of the rows of the copy of (R, C, L)."""
    size = Int64(mX.shape[1]) * (mX.element_type.width // 8)
    multiple = Int64(PIECE)
    if size >= LONG_ROW:
        multiple = Int64(ALIGNMENT)
    return (size + multiple - 1) // multiple * multiple


def copy_bytes(mX: cute.Tensor) -> Int64:
    """Of the copy of (R, C, L), up to where the next one may begin."""
    rows, _, batches = mX.shape
    return cute.ceil_div(pitch_bytes(mX) * rows * batches, ALIGNMENT) * ALIGNMENT

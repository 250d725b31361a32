"""Matrices that TMA cannot read, copied to where it can."""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Int8, Int16, Int32, Int64, const_expr
from cutlass.cute import AddressSpace
from cutlass.memory import SmemAllocator

THREADS = 256
ROWS = 64  # of a tile, which has ROW_BYTES of each
ROW_BYTES = 128
PIECE = 16  # bytes that are written at once
ALIGNMENT = 128  # of the copy's address, and the bytes of a line of L2
LONG_ROW = 512  # bytes of a row, from which on the next one begins with a line

_BITS = {8: Int8, 16: Int16, 32: Int32}


class Repack:
    """Copies (R, C, L) into rows along C that start at multiples of 16 bytes, and long ones of 128:
    what is read of those is in as few lines as it fits.

    The matrix has any strides, of which that of C is 1, or that of R if `transposes`. A block
    copies a tile: its threads read along what is contiguous, into shared memory, and write rows
    of whole pieces. What a row has behind its last element is zero.
    """

    def __init__(
        self, element_type: type[cutlass.Numeric], transposes: bool, dependent_launch: bool
    ):
        self.element_type = element_type
        self.dependent_launch = dependent_launch
        self.transposes = transposes
        self.bits = _BITS[element_type.width]
        self.columns = ROW_BYTES * 8 // element_type.width  # of a tile
        self.piece = PIECE * 8 // element_type.width  # elements

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
            grid=(cute.ceil_div(columns, self.columns), cute.ceil_div(rows, ROWS), batches),
            block=(THREADS, 1, 1),
            stream=stream,
            use_pdl=self.dependent_launch,
        )
        return mY

    @cute.kernel
    def kernel(self, mX: cute.Tensor, mY: cute.Tensor):
        tid, _, _ = cute.arch.thread_idx()
        tile_column, tile_row, batch = cute.arch.block_idx()
        first_row, first_column = tile_row * ROWS, tile_column * self.columns
        rows, columns, _ = mX.shape
        if const_expr(self.dependent_launch):
            cute.arch.griddepcontrol_wait()
            cute.arch.griddepcontrol_launch_dependents()

        # One piece more per row, so that reading columns of it does not hit one bank.
        shared = cute.make_layout((ROWS, self.columns), stride=(self.columns + self.piece, 1))
        sX = SmemAllocator().allocate_tensor(self.bits, shared, byte_alignment=PIECE)
        for i in cutlass.range_constexpr(ROWS * self.columns // THREADS):
            place = tid + i * THREADS
            row, column = place // self.columns, place % self.columns
            if const_expr(self.transposes):
                row, column = place % ROWS, place // ROWS
            element = self.bits(0)
            if first_row + row < rows and first_column + column < columns:
                element = mX[first_row + row, first_column + column, batch]
            sX[row, column] = element
        cute.arch.barrier()

        pieces = self.columns // self.piece
        for i in cutlass.range_constexpr(ROWS * pieces // THREADS):
            place = tid + i * THREADS
            row, column = place // pieces, place % pieces * self.piece
            if first_row + row < rows and first_column + column < columns:
                to = mY[first_row + row, None, batch].iterator + (first_column + column)
                cute.autovec_copy(
                    self._piece(sX[row, None].iterator + column, AddressSpace.smem),
                    self._piece(to, AddressSpace.gmem),
                )

    def _piece(self, pointer, space):
        aligned = cute.make_ptr(self.bits, pointer.toint(), space, assumed_align=PIECE)
        return cute.make_tensor(aligned, cute.make_layout(self.piece))


def _as(tensor, element_type):
    """The same memory, of another type of the same width."""
    pointer = cute.recast_ptr(tensor.iterator, dtype=element_type)
    return cute.make_tensor(pointer, tensor.layout)


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

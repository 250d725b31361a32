"""Largest magnitudes over blocks of rows, and over all of them.

They are compared as the bits of non-negative floats, as integers: NaN is larger than all. The
largest does not depend on the order, so atomics may find it.

The workspace starts with zeros and is left so: a largest value and a counter of all, then of each
block of rows that several thread blocks share.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute import AddressSpace

from .reductions import is_last
from .rows import combined, over_lanes
from .threads import WARP

SHARED_BLOCKS = 8000  # of rows, that have places in the workspace
_PLACE_BYTES = 8  # a largest value and a counter
_MAGNITUDE = 0x7FFFFFFF


def bits_of_magnitude(values: list) -> Int32:
    """Of the largest one."""
    if len(values) == 1:
        return values[0].bitcast(Int32) & _MAGNITUDE
    return largest_magnitude(values).bitcast(Int32)


def largest_magnitude(values: list) -> Float32:
    """Of two or more; NaN if one is."""
    return combined(values, larger_magnitude)


def larger_magnitude(a: Float32, b: Float32) -> Float32:
    """NaN if one is; not negative."""
    return cute.arch.inline_ptx(
        "{ .reg .f32 a, b; abs.f32 a, {$r0}; abs.f32 b, {$r1}; max.NaN.f32 {$w0}, a, b; }",
        write_only_types=[Float32],
        read_only_args=[a, b],
    )


def larger(a: Int32, b: Int32) -> Int32:
    return cutlass.max(a, b)


@cute.jit
def shares(size: Int32, rows: Int32, most: cutlass.Constexpr[int]) -> tuple:
    """(blocks, chunk, parts) of so many rows in blocks of `rows`, as in `Maxima`.

    most: Rows that a thread block may have, unless there are too many blocks of rows.
    """
    blocks = cute.ceil_div(size, rows)
    chunk = cutlass.min(rows, most)
    if blocks > SHARED_BLOCKS:
        chunk = rows
    return blocks, chunk, cute.ceil_div(rows, chunk)


@dataclass
class Maxima:
    """Run-time facts: which rows are whose.

    Attributes:
        size: Rows of the matrix.
        rows: Of a block.
        blocks: Of rows.
        chunk: Rows of a thread block.
        parts: Thread blocks that share a block of rows.
        workspace: An address.
    """

    size: Int32
    rows: Int32
    blocks: Int32
    chunk: Int32
    parts: Int32
    workspace: Int64

    def rows_of(self, block: Int32) -> tuple:
        """(first, behind the last) of a thread block; it may have none."""
        rows_before = block // self.parts * self.rows
        first = rows_before + block % self.parts * self.chunk
        end = cutlass.min(first + self.chunk, rows_before + self.rows)
        return first, cutlass.min(end, self.size)

    @cute.jit
    def write(
        self,
        largest: Int32,
        mAmax: cute.Tensor | None,
        mGlobal: cute.Tensor | None,
        sLargest: cute.Tensor,
        block: Int32,
        thread: Int32,
    ) -> None:
        """What all threads have found of their rows; sLargest: one of each warp."""
        (largest,) = over_lanes((largest,), larger, WARP)
        if thread % WARP == 0:
            sLargest[thread // WARP] = largest
        cute.arch.sync_threads()
        if thread == 0:
            for warp in cutlass.range_constexpr(1, cute.size(sLargest)):
                largest = larger(largest, sLargest[warp])
            if const_expr(mAmax is not None):
                rows = block // self.parts
                if self.parts == 1:
                    mAmax[rows] = largest.bitcast(Float32)
                else:
                    self._join(largest, mAmax, rows, rows + 1, self.parts)
            if const_expr(mGlobal is not None):
                self._join(largest, mGlobal, (), 0, self.blocks * self.parts)

    @cute.jit
    def _join(self, largest, mTarget, index, place, arrivals) -> None:
        """One thread block's; the last one writes the largest of all."""
        address = self.workspace + place * _PLACE_BYTES
        known = cute.make_ptr(Int32, address, AddressSpace.gmem, assumed_align=4)
        cute.arch.red(known.llvm_ptr, largest, op="max", dtype="s32", sem="relaxed", scope="gpu")
        if is_last(known + 1, arrivals):
            found = cute.arch.atomic_exch(known.llvm_ptr, Int32(0))
            mTarget[index] = found.bitcast(Float32)

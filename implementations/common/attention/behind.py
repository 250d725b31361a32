"""Rows of packed tensors behind the last sequence: they belong to none, and what is written to
them is what rows hold that see nothing."""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Numeric, const_expr

from ..conversion import select

_COUNTED = 1 << 14  # rows at a time: their elements are counted in 32 bits


class Behind(NamedTuple):
    """Those that a block of threads writes to.

    first, end: Of the tensor; none unless first < end.
    thread, threads: One of those that share them, and how many they are.
    """

    first: Int32
    end: Int32
    thread: Int32
    threads: int


def behind_last(
    starts: cute.Tensor,
    batch: Int32,
    rows: Int32,
    block: Int32,
    blocks: Int32,
    thread: Int32,
    threads: int,
) -> Behind:
    """The share of one of the blocks that each sequence has: those of the last sequence have all.

    starts: (B + 1,), the rows where sequences begin and the last one ends.
    rows: Of the tensor.
    """
    begin = starts[batch + 1]
    left = select(batch == starts.shape[0] - 2, rows - begin, Int32(0))
    share = cute.ceil_div(cutlass.max(left, 0), blocks)
    first = begin + cutlass.min(block * share, left)
    return Behind(first, cutlass.min(first + share, begin + left), thread, threads)


@cute.jit
def fill_behind(tensor: cute.Tensor, behind: Behind, value: cutlass.Constexpr = 0.0):
    """tensor: (rows, columns), or (rows,)."""
    columns = Int32(1)
    if const_expr(len(tensor.shape) == 2):
        columns = Int32(tensor.shape[1])
    for first in cutlass.range(behind.first, behind.end, _COUNTED, unroll=1):
        count = cutlass.min(behind.end - first, _COUNTED) * columns
        for i in cutlass.range(behind.thread, count, behind.threads, unroll=1):
            row, column = first + i // columns, i % columns
            offset = Int64(row) * tensor.stride[0]
            if const_expr(len(tensor.shape) == 2):
                offset = offset + Int64(column) * tensor.stride[1]
            _store(tensor.element_type, tensor.iterator.toint(), offset, value)


def _store(element_type: type[Numeric], address: Int64, offset: Int64, value: float) -> None:
    """Rows may lie further apart than 32 bits count."""
    there = address + offset * (element_type.width // 8)
    pointer = cute.make_ptr(element_type, there, cute.AddressSpace.gmem)
    cute.make_tensor(pointer, cute.make_layout(1))[0] = element_type(value)

"""How threads are grouped on every GPU."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32

QUAD = 4  # that share rows of accumulators
WARP = 32
GROUP = 128  # of warps that multiply together
WHOLE_BLOCK = 0  # the named barrier of all threads


@cute.jit
def summed_through(value: Int32) -> Int32:
    """Of the values of a warp's lanes up to each, the sum."""
    lane = cute.arch.lane_idx()
    for bit in cutlass.range_constexpr(WARP.bit_length() - 1):
        other = cute.arch.shuffle_sync_up(value, offset=1 << bit)
        if lane >= 1 << bit:
            value += other
    return value

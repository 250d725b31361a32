"""Blocks of 16 columns times the Sylvester Hadamard matrix, spread over neighbouring threads."""

import cutlass.cute as cute
from cutlass import Float32, Int32

BLOCK = 16
_SCALE = 0.25  # 1 / √16: orthonormal


def hadamard(values: list, column: Int32) -> list:
    """H16 / 4 times the blocks that the threads of a warp have.

    values: Float32, neighbours that start at `column`, a multiple of their number; that is a power
        of two, and the other columns of a block are those of the next threads.
    """
    count, distance = len(values), 1
    while distance < min(count, BLOCK):
        values = [
            values[i] + values[i ^ distance]
            if not i & distance
            else values[i ^ distance] - values[i]
            for i in range(count)
        ]
        distance *= 2
    offset = 1
    while count * offset < BLOCK:
        # Behind the middle of a pair of halves, its own value counts negative.
        sign = Float32(1 - 2 * (column // (count * offset) % 2))
        values = [
            value * sign + cute.arch.shuffle_sync_bfly(value, offset=offset) for value in values
        ]
        offset *= 2
    return [value * _SCALE for value in values]

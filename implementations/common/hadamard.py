"""Blocks of 16 columns times the Sylvester Hadamard matrix, spread over neighbouring threads."""

import cutlass.cute as cute
from cutlass import Float32, Int32

BLOCK = 16
_SCALE = 0.25  # 1 / √16: orthonormal


def hadamard(
    values: list, column: Int32, factors: list | None = None, scale: Float32 | float = 1.0
) -> list:
    """H16 / 4 times the blocks that the threads of a warp have, times `scale`.

    values: Float32, neighbours that start at `column`, a multiple of their number; that is a power
        of two, and the other columns of a block are those of the next threads.
    factors: Of the values, before the transform.
    """
    count, distance = len(values), 1
    if factors is not None:
        values = _first_sums(values, factors) if count > 1 else [values[0] * factors[0]]
        distance = min(2, count)
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
    scale = scale * _SCALE
    return [value * scale for value in values]


def _first_sums(values: list, factors: list) -> list:
    """a · f + b · g and a · f − b · g of neighbours: a multiplication and two additions to it."""
    found = []
    for i in range(0, len(values), 2):
        right = values[i + 1] * factors[i + 1]
        found += [values[i] * factors[i] + right, values[i] * factors[i] - right]
    return found

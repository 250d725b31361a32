"""Accumulation of 8-bit floats that keeps the precision of float32.

Hopper's tensor cores add products of 8-bit floats with about 14 bits. So the products of one
k tile are formed apart, and added to the accumulators by ordinary float32 arithmetic, which is
also where a scale per block of K can be applied (DeepSeek-V3 technical report, section 3.3.2).
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from ..common.modes import operand_batch_last

COLUMNS = 192  # multiplied at once, so that products and accumulators fit into registers
SCALE_BLOCK = 128  # elements along K, and along N for B


def promoted_columns(tile_n: int, block_scales: bool) -> int:
    """Columns that are multiplied at once: of the whole tile if they are few enough, because every
    wgmma reads A again; with block scales those that share a scale of B."""
    most = SCALE_BLOCK if block_scales else COLUMNS
    blocks = -(-tile_n // most)
    while tile_n % (blocks * 16):
        blocks += 1
    return tile_n // blocks


def scale_modes(scale_a: cute.Tensor, scale_b: cute.Tensor) -> tuple:
    """Scales of A (M, ceil(K/128)) and of B (ceil(K/128), ceil(N/128)), with L in front if
    batched, seen as (M, K blocks, L) and (N blocks, K blocks, L)."""
    return operand_batch_last(scale_a), operand_batch_last(scale_b, transposed=True)


@cute.jit
def load_factors(factors: cute.Tensor, scales: tuple, place: tuple, k_block: Int32):
    """factors (2, column blocks): scales of A times scales of B for the accumulators of a thread,
    in its two rows and in each block of columns.

    place: (row, column, batch) of its first accumulator; the second row is 8 below.
    """
    scale_a, scale_b = scales
    row, column, batch = place
    k_block = cutlass.min(k_block, scale_a.shape[1] - 1)
    for half in cutlass.range_constexpr(2):
        m = cutlass.min(row + 8 * half, scale_a.shape[0] - 1)
        a = scale_a[m, k_block, batch]
        for j in cutlass.range_constexpr(cute.size(factors, mode=[1])):
            n = cutlass.min(column // SCALE_BLOCK + j, scale_b.shape[0] - 1)
            factors[half, j] = a * scale_b[n, k_block, batch]


@cute.jit
def promote(accumulators: cute.Tensor, products: cute.Tensor, factors, block: cutlass.Constexpr):
    """accumulators += products · factors, of one block of columns; factors None: 1."""
    first = block * cute.size(products)
    # Multiplication with an unknown 1 costs nothing, and ptxas lets wgmma run asynchronously
    # beside it; beside plain additions it does not if registers are short.
    one = cute.arch.inline_ptx("mov.b32 {$w0}, 0f3F800000;", write_only_types=[Float32])
    for i in cutlass.range_constexpr(cute.size(products)):
        factor = one
        if const_expr(factors is not None):
            factor = factors[i // 2 % 2, block]
        accumulators[first + i] += products[i] * factor

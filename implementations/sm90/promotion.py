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
QUAD = 4  # threads that share rows of accumulators
_WITHIN_QUAD = (32 - QUAD) << 8 | 31  # a shuffle's segments


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


def block_registers(blocks: int) -> tuple:
    """What a thread has of block scales: those of A that are read, of B, the factors of the k tile
    that it has read them of, and (2, column blocks) the factors of the one that is multiplied.

    The four threads that share rows read the scales of four k tiles, one each, while the four
    before are multiplied, and hand their factors to each other: scales may come from device memory,
    which takes longer than a k tile.
    """
    shapes = (2, blocks, (2, blocks), (2, blocks))
    return tuple(cute.make_rmem_tensor(shape, Float32) for shape in shapes)


@cute.jit
def read_scales(registers: tuple, scales: tuple, place: tuple, k_block: Int32):
    """Starts to read those of four k tiles from this one on.

    place: (row, column, batch) of a thread's first accumulator; its second row is 8 below.
    """
    (scale_a, scale_b), (row, column, batch) = scales, place
    read_a, read_b, _, _ = registers
    k_block = cutlass.min(k_block + cute.arch.lane_idx() % QUAD, scale_a.shape[1] - 1)
    for half in cutlass.range_constexpr(2):
        m = cutlass.min(row + 8 * half, scale_a.shape[0] - 1)
        read_a[half] = scale_a[m, k_block, batch]
    for block in cutlass.range_constexpr(cute.size(read_b)):
        n = cutlass.min(column // SCALE_BLOCK + block, scale_b.shape[0] - 1)
        read_b[block] = scale_b[n, k_block, batch]


@cute.jit
def advance_scales(registers: tuple, scales: tuple, place: tuple, k_block: Int32, turn: Int32):
    """Before the k tile that is this turn of four: at the first one those that were read become
    factors, and those of the next four are read."""
    if turn == 0:
        read_a, read_b, own, _ = registers
        for block in cutlass.range_constexpr(cute.size(read_b)):
            for half in cutlass.range_constexpr(2):
                own[half, block] = read_a[half] * read_b[block]
        read_scales(registers, scales, place, k_block + QUAD)


@cute.jit
def hand_out_factors(registers: tuple, turn: Int32):
    """Those of a k tile; this one of the four threads has read its scales."""
    _, _, own, factors = registers
    for i in cutlass.range_constexpr(cute.size(own)):
        factors[i] = cute.arch.shuffle_sync(own[i], offset=turn, mask_and_clamp=_WITHIN_QUAD)


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

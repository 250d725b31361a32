"""Grids of several modes that lie along x: of y and z, GPUs have 65535 blocks."""

import cutlass.cute as cute
from cutlass import Int32


def flat_grid(*extents: Int32 | int) -> tuple[Int32 | int, int, int]:
    """The grid of a launch: as many blocks as places."""
    blocks = extents[0]
    for extent in extents[1:]:
        blocks = blocks * extent
    return blocks, 1, 1


def flat_block_idx(*extents: Int32 | int) -> tuple[Int32, ...]:
    """The place of this block, in the modes of ``flat_grid`` but for the last extent, which is not
    needed; of neighbours, the first mode differs."""
    rest, place = cute.arch.block_idx()[0], []
    for extent in extents:
        place.append(rest % extent)
        rest = rest // extent
    return *place, rest

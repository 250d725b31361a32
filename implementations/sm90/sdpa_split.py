"""Into how many parts the keys of decoding are cut, and what that takes.

Numbers are those of Python, to rank kernels, or of a kernel's host code, as it is launched:
``select(condition, one, other)`` is what chooses between two of them. No compiler is loaded here.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from .sdpa_workspace import MOST_PARTS

_WAVES = 4  # of blocks, at most, that parts are made for
_OF_A_WAVE = (2, 4)  # and shares of one wave that they are made for, if they are costly

#: Elements of a tile's part from which on a kernel behind adds parts up.
_MANY = 2048

#: Operations per nanosecond of one multiprocessor, by rows of a tile and columns of Q and K.
_MULTIPLIED = {
    (64, 64): 2800,
    (64, 128): 4000,
    (64, 256): 5700,
    (128, 64): 3560,
    (128, 128): 5150,
    (128, 256): 5785,
}
_OTHERS = 4000
#: Bytes per nanosecond: of one of all multiprocessors, and of one that reads alone; of parts that
#: are written or read, by all together.
_READ, _READ_ALONE, _MOVED = 32.6, 78.0, 4300.0
#: Nanoseconds: until parts are added up, by who comes last and by a kernel behind, beside what they
#: read; of how a tile begins and ends, by columns. Measured on an H100, as all here.
_SUMS_BY_LAST, _SUMS_BEHIND = 1000.0, 1500.0
_TILE_OF_128 = 1300.0

#: Of clusters: multiprocessors that may be in one of them, at least, so none is of several; and
#: blocks of keys that are read while sums of clusters are added up.
_OF_A_GPC, _BY_WORKSPACE = 16, 3


class Costs(NamedTuple):
    """Nanoseconds.

    tile: How one begins and ends.
    block: Of keys, where one multiprocessor reads alone.
    read: The same, where all of them do, and products take no time.
    part: Of all multiprocessors together, what is left of a part and read again by a kernel behind.
    sums: Whatever adds parts up.
    """

    tile: float
    block: float
    read: float
    part: Any
    sums: Any


#: Blocks are counted.
_IN_BLOCKS = Costs(tile=2.0, block=1.0, read=0.0, part=0.0, sums=0.0)


class Size(NamedTuple):
    """Of a launch.

    tiles: Of all heads of keys; row_blocks: of one of them, which read the same keys.
    blocks: Of keys, of a tile.
    multiprocessors: Or as many blocks as they have room for.
    """

    tiles: Any
    row_blocks: Any
    blocks: Any
    multiprocessors: Any


def are_many(rows: Any, tile_m: int, columns: int, select: Callable) -> Any:
    """Whether parts are added up by a kernel behind, of so many rows of a head of keys."""
    return select(rows < tile_m, rows, tile_m) * columns >= _MANY


def costs_of(
    tile: tuple[int, int],
    head_dims: tuple[int, int],
    element_bytes: int,
    rows: Any,
    resident: int,
    select: Callable,
) -> Costs:
    """rows: Of a head of keys; resident: blocks that share a multiprocessor."""
    many = are_many(rows, tile[0], head_dims[1], select)
    (tile_m, tile_n), columns = tile, sum(head_dims)
    rate = _MULTIPLIED.get((tile_m, head_dims[0]), _OTHERS)
    read = tile_n * columns * element_bytes * resident
    moved = select(rows < tile_m, rows, tile_m) * (head_dims[1] * 8)
    return Costs(
        _TILE_OF_128 * head_dims[0] / 128,
        max(2 * tile_m * tile_n * columns * resident / rate, read / _READ_ALONE),
        read / _READ,
        select(many, moved / _MOVED, 0.0),
        select(many, _SUMS_BEHIND, _SUMS_BY_LAST),
    )


def nanoseconds(parts: Any, size: Size, costs: Costs, select: Callable) -> Any:
    """What is expected of a launch."""
    work, room = size.tiles * parts, size.multiprocessors
    waves, blocks = (work + room - 1) // room, (size.blocks + parts - 1) // parts
    apart = costs.block * waves * blocks
    together = costs.read / (room * size.row_blocks) * work * blocks
    found = _most(apart, together, select) + costs.tile * waves
    return found + select(parts > 1, costs.part * work + costs.sums, 0.0)


def parts_of(size: Size, costs: Costs, select: Callable) -> Any:
    """That each tile is cut into: what takes the least time."""
    room, tiles = size.multiprocessors, size.tiles
    best: Any = 1
    least = nanoseconds(best, size, costs, select)
    several = [waves * room for waves in range(1, _WAVES + 1)]
    for together in (*several, *(room // share for share in _OF_A_WAVE)):
        most = select(together < MOST_PARTS, together, MOST_PARTS) // tiles
        parts = _most(select(most < size.blocks, most, size.blocks), 1, select)
        expected = nanoseconds(parts, size, costs, select)
        is_less = expected < least
        best, least = select(is_less, parts, best), select(is_less, expected, least)
    return best


def parts_in_clusters(size: Size, most: int, waves: int, select: Callable) -> Any:
    """Where a cluster adds parts up: as many as it has blocks, or as some have. They are made for
    so many waves, of clusters with so many blocks at most."""
    resident = size.multiprocessors // _OF_A_GPC * _OF_A_GPC
    resident = select(resident > 0, resident, size.multiprocessors) * waves
    found = parts_of(size._replace(multiprocessors=resident), _IN_BLOCKS, select)
    more = _most(found // most, 1, select) * most
    saved = (size.blocks + most - 1) // most - (size.blocks + more - 1) // more
    return select(saved > _BY_WORKSPACE, more, cluster_of(found, most, select))


def cluster_of(parts: Any, most: int, select: Callable) -> Any:
    """Blocks of a cluster: the largest power of two of a tile's parts."""
    found: Any = 1
    for count in (2, 4, 8, 16):
        if count <= most:
            found = select(parts >= count, count, found)
    return found


def _most(one: Any, other: Any, select: Callable) -> Any:
    return select(one > other, one, other)

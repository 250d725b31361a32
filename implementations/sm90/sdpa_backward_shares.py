"""How many blocks share a block of keys of the gradient of attention: each has some of the heads of
queries that share the keys, and what they leave is added up.

Numbers are those of Python, or of a kernel's host code: ``select(condition, one, other)`` is what
chooses between two of them. No compiler is loaded here.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

_BLOCKS = 132  # of a launch: one for each multiprocessor
_MOST = 16
_FLOAT_BYTES = 4
ALIGNMENT = 16  # of what they leave

#: Products of a multiprocessor in a nanosecond, bytes that blocks leave in one, or that are read
#: again, and nanoseconds of who adds them up.
_PRODUCTS, _LEFT, _ADDING_UP = 2000.0, 3300.0, 1500.0
#: Parts of the time of a tile, in which times are counted: as whole numbers, so that they are the
#: same for whoever makes a workspace and for the kernel.
_PARTS = 256
#: Time of the longest of blocks that see different numbers of queries, in that of an average one.
_LONGEST = 2
#: What more shares must gain: of the time with fewer, one in so many.
_WORTH = 16
#: Rounds of blocks, tiles of all heads that share keys, and such heads, up to which numbers stay
#: within 32 bits: the first two and `_PARTS` have a product of 2³⁰, as the last two have.
_ROUNDS, _TILES, _HEADS = 16, 1 << 18, 1 << 12
#: Operands by which a band has a bound at either side. With one of both, the first or the last
#: block of keys is seen by few queries, the other by all, and one by half of them on average.
_LEFT_BOUNDS, _RIGHT_BOUNDS = frozenset(("left", "left_end")), frozenset(("right", "right_end"))
#: Operands with which it is not known here how many queries see a block of keys.
_HIDING = frozenset(("blocks", "seq_lens_q", "seq_lens_kv"))


class Blocks(NamedTuple):
    """Of keys, of a launch.

    number: Of all heads of all sequences.
    sharing: Heads of queries of each.
    tiles: Of queries, of each of these heads.
    """

    number: Any
    sharing: Any
    tiles: Any


class Costs(NamedTuple):
    """By which a launch takes longer, in parts of the time of a tile: for each block that leaves
    something, and for adding up. And how many bounds there are; None: it is not known which tiles
    are computed."""

    left: int
    added: int
    bounds: int | None


def costs_of(tile: tuple[int, int], head_dims: tuple[int, int], names: tuple[str, ...]) -> Costs:
    """names: Of what scores are called by."""
    queries, keys = tile
    bounds: int | None = sum(not one.isdisjoint(names) for one in (_LEFT_BOUNDS, _RIGHT_BOUNDS))
    if bounds == 2 or not _HIDING.isdisjoint(names):
        bounds = None
    part = queries * keys * (3 * head_dims[0] + 2 * head_dims[1]) / _PRODUCTS / _PARTS
    return Costs(round(_left(tile, head_dims) / part), round(_ADDING_UP / part), bounds)


def shares_of(blocks: Blocks, costs: Costs, select: Callable) -> Any:
    """The most that have as many heads each, and a multiprocessor; or more, where multiprocessors
    would have different numbers of blocks, or wait for the longest one."""
    number, sharing, tiles = blocks
    found: Any = 1
    for shares in _possible(sharing):
        fits = (sharing % shares == 0) & (number * shares <= _BLOCKS)
        found = select(fits, shares, found)
    if costs.bounds is None:
        return found
    counted = (tiles <= _TILES) & (sharing <= _HEADS) & (tiles * sharing <= _TILES)
    least = _parts(found, blocks, costs, select)
    for shares in _possible(sharing):
        expected = _parts(shares, blocks, costs, select)
        known = counted & (number * shares <= _BLOCKS * _ROUNDS)
        better = (sharing % shares == 0) & known & (expected < least - least // _WORTH)
        found, least = select(better, shares, found), select(better, expected, least)
    return found


def _possible(sharing: Any) -> list[int]:
    known = isinstance(sharing, int)
    return [one for one in range(2, _MOST + 1) if not (known and sharing % one)]


def _parts(shares: Any, blocks: Blocks, costs: Costs, select: Callable) -> Any:
    """What is expected of a launch, in parts of the time of a tile."""
    number, tiles = blocks.number * shares, blocks.tiles * (blocks.sharing // shares)
    if costs.bounds == 0:
        alone = tiles * ((number + (_BLOCKS - 1)) // _BLOCKS * _PARTS)
    else:
        rounds = number * _PARTS // _BLOCKS
        least = _LONGEST * _PARTS
        alone = tiles * (select(rounds > least, rounds, least) // 2)  # half of all are seen
    return alone + select(shares > 1, number * costs.left + costs.added, 0)


def _left(tile: tuple[int, int], head_dims: tuple[int, int]) -> float:
    """Nanoseconds of all, by which a launch takes longer for each block that leaves something."""
    return 2 * share_bytes(tile[1], head_dims) / _LEFT


def adding_up(blocks: int, tile: tuple[int, int], head_dims: tuple[int, int]) -> float:
    """Seconds of what so many leave, and of adding it up."""
    return (_left(tile, head_dims) * blocks + _ADDING_UP) * 1e-9


def may_share(tile: tuple[int, int], head_dims: tuple[int, int], packed: bool) -> bool:
    """Whether a design has what it takes. Where 128 keys of 64 columns fill the registers it made
    all problems 2 to 4 % slower, on an H100; of packed sequences it is not known on the host how
    many blocks there are."""
    _, keys = tile
    return not packed and not (max(head_dims) == 64 and keys == 128)


def share_bytes(keys: int, head_dims: tuple[int, int]) -> int:
    """Of dK and dV in float32, of a block of so many keys."""
    return keys * sum(head_dims) * _FLOAT_BYTES

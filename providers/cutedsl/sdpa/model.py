"""How long attention takes, to rank designs."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from kernel_api.providers.cutedsl.sdpa.base import AttentionDesign

#: Seconds of a launch.
_LAUNCH = 2.2e-6
#: Multiprocessors of an H200, and products that one of them adds per second while others wait.
MULTIPROCESSORS, RATE = 132, 3.2e12
#: Seconds of a tile beside its products, by columns of Q and K, or those and the tile: loads that
#: nothing hides, and what it writes. Fitted to the rows of an H200; of tiles of 64 x 64 with more
#: than 64 columns, and of 192 columns, to those of an H100, here and below.
_TILE, _OTHER_TILES = (
    2.0e-6,
    {
        256: 3.4e-6,
        (64, (128, 128)): 1.33e-6,
        (64, (64, 64)): 0.5e-6,
        (64, (64, 96)): 0.5e-6,
        (96, (64, 64)): 0.48e-6,
        (128, (64, 64)): 0.52e-6,
        (192, (64, 64)): 2.8e-6,
        (192, (128, 112)): 5.4e-6,
        (192, (128, 128)): 6.0e-6,
    },
)
#: Of the rate, by (columns of Q and K, tile): what designs reached on an H200.
_REACHED = {
    (64, (192, 128)): 0.62,
    (64, (128, 128)): 0.52,
    (64, (64, 64)): 0.527,
    (64, (64, 96)): 0.575,
    (96, (64, 64)): 0.49,
    (96, (128, 128)): 0.7,
    (96, (192, 96)): 0.68,
    (128, (64, 64)): 0.645,
    (128, (128, 128)): 0.87,
    (128, (128, 160)): 0.85,
    (128, (128, 176)): 0.84,
    (128, (128, 192)): 0.9,
    (128, (128, 224)): 0.89,
    (192, (64, 64)): 0.876,
    (192, (128, 112)): 1.026,
    (192, (128, 128)): 1.003,
    (256, (128, 128)): 0.97,
    (256, (128, 80)): 0.95,
    (256, (128, 64)): 0.91,
}
_OTHERS = 0.85
#: The same over what is reached if sums are scaled at once, by (columns of Q and K, tile, scaling):
#: where all keys are seen, and where a bound is looked for.
_SCALED = {
    (64, (192, 128), "late"): (1.0, 0.98),
    (64, (192, 128), "seldom"): (1.02, 1.012),
    (64, (128, 128), "late"): (0.993, 1.015),
    (64, (128, 128), "seldom"): (0.975, 1.005),
    (64, (64, 64), "seldom"): (1.02, 1.02),
    (64, (64, 96), "seldom"): (1.02, 1.02),
    (128, (64, 64), "seldom"): (1.002, 1.002),
    (128, (128, 128), "late"): (1.025, 0.998),
    (128, (128, 128), "seldom"): (1.02, 0.985),
    (128, (128, 160), "late"): (1.045, 0.985),
    (128, (128, 160), "seldom"): (0.87, 0.98),
    (128, (128, 176), "late"): (1.07, 1.0),
    (128, (128, 176), "seldom"): (1.077, 0.995),
    (192, (64, 64), "seldom"): (1.02, 1.003),
    (192, (128, 112), "late"): (1.0, 0.995),
    (192, (128, 112), "seldom"): (0.96, 0.946),
    (192, (128, 128), "late"): (1.009, 1.004),
    (192, (128, 128), "seldom"): (0.99, 0.94),
    (256, (128, 80), "late"): (1.045, 1.045),
    (256, (128, 80), "seldom"): (1.055, 1.055),
    (256, (128, 64), "late"): (1.075, 1.07),
    (256, (128, 64), "seldom"): (1.11, 1.105),
}
_OTHER_SCALED = (0.99, 0.99)
#: The same of packed sequences: a chunk of a prompt behind many keys shows the most of it.
_SCALED_PACKED = {
    (64, (128, 128), "late"): 0.98,
    (64, (128, 128), "seldom"): 0.97,
    (128, (128, 128), "late"): 1.01,
}
#: Of the keys that a table of pages has room for, what a packed sequence has, about.
_FILLED = 0.35
#: Bytes that rows of keys and values begin at multiples of, so that TMA moves no more than them;
#: and seconds that it takes for each piece of a row where they do not, and bytes of a piece: as
#: long for few bytes as for all. Measured on an H100.
_SECTOR, _APART, _PIECE = 32, 3.9e-9, 128
#: Of blocks that share a multiprocessor, by how many do: how much longer one takes that has it for
#: itself, because there are few, or few are left, than its share of the time of all.
_BY_ITSELF = {2: 1.11, 3: 1.46}
#: Seconds until these scale seldom, instead of at once.
_SELDOM = 0.1e-6
#: Bytes per second of what blocks load before they can begin, and store when they end, while no
#: other block of their multiprocessor does anything.
_MOVED = 4.2e12
#: How much longer blocks of keys take where scores have a bias, by how that comes to them, and of
#: some (columns of Q and K, tile). Measured on an H100.
_BIASED = {"read": 2.6, "tiles": 1.38, "rows": 1.07}
_BIASED_TILES = {("read", 64, (192, 128)): 5.2, ("tiles", 64, (128, 128)): 1.27}

#: Of its gradient, where scores are made again: seconds, and those of each score.
_BIAS_AGAIN = 10e-6, 5e-12


def seconds(args: Any, design: AttentionDesign) -> float:
    """Of the tiles of all heads, one after the other on each multiprocessor; no less than the
    longest takes."""
    (queries, keys), (wide, wide_v) = design.tile_shape, design.head_dim
    products = queries * keys * (wide + wide_v)
    rate = RATE * _REACHED.get((wide, design.tile_shape), _OTHERS) * _scaled(args, design)
    fixed = _OTHER_TILES.get((wide, design.tile_shape), _OTHER_TILES.get(wide, _TILE))
    average = blocks_seen(args, queries, keys)
    most = longest(args, -(-keys_of(args) // keys), average)
    block = max(products / rate * biased(args, design), loaded(args, keys))
    tile, longest_tile = (blocks * block + fixed for blocks in (average, most))
    tiles, resident = row_tiles(args, queries) * args.H, getattr(design, "resident", 1)
    rounds, left = divmod(tiles, MULTIPROCESSORS * resident)
    last = max(left / MULTIPROCESSORS, _BY_ITSELF[resident]) if resident > 1 else 1
    if most > average:  # tiles are of all lengths, and the longest come first
        together = resident if tiles > MULTIPROCESSORS else last
        found = max(tiles / MULTIPROCESSORS * tile, together * longest_tile)
    else:
        found = (rounds * resident + (last if left else 0)) * tile
    if resident > 1 and getattr(design, "scaling", "at_once") == "seldom":
        found += _SELDOM
    return float(_LAUNCH + found + _moved(args, tiles, resident, average))


def _moved(args: Any, tiles: int, resident: int, blocks: float) -> float:
    """Seconds in which nothing is multiplied, as the first tiles of all multiprocessors begin and
    the last ones end."""
    queries, keys = _facts(args).moved
    share = min(MULTIPROCESSORS * resident / max(tiles, 1), 1.0)
    return float((queries + keys / blocks) / _MOVED * share)


def loaded(args: Any, keys: int) -> float:
    """Seconds for a block of keys and values, where it may be that which takes longest."""
    if min(args.K.alignment, args.V.alignment) >= _SECTOR:
        return 0.0
    rows = (one.shape[-1] * one.dtype.bits // 8 for one in (args.K, args.V))
    return float(keys * _APART * sum(-(-row // _PIECE) for row in rows))


def biased(args: Any, design: Any) -> float:
    """How much longer blocks of keys take for a bias; 1 without one."""
    if "bias" not in args.further:
        return 1.0
    how = getattr(design, "bias", "read")
    return _BIASED_TILES.get((how, design.head_dim[0], design.tile_shape), _BIASED[how])


def bias_again(args: Any) -> float:
    """Seconds for the gradient of a bias where scores are made again; 0 if it is not asked for."""
    if "dBias" not in args.further:
        return 0.0
    at_least, of_score = _BIAS_AGAIN
    return float(at_least + args.B * args.H * args.S_q * args.S_kv * of_score)


def _scaled(args: Any, design: AttentionDesign) -> float:
    """Of the rate, over that of a design that scales at once."""
    scaling = getattr(design, "scaling", "at_once")
    if scaling == "at_once":
        return 1.0
    key = design.head_dim[0], design.tile_shape, scaling
    if args.is_packed and key in _SCALED_PACKED:
        return _SCALED_PACKED[key]
    return _SCALED.get(key, _OTHER_SCALED)[bool(args.bounds)]


def row_tiles(args: Any, rows: int, rows_of_query: int = 1) -> int:
    """Tiles of so many rows, of the queries of all sequences."""
    found = args.B * -(-args.S_q * rows_of_query // rows)
    if args.is_packed:
        found = min(found, args.Q.shape[0] * rows_of_query // rows + args.B)
    return int(found)


class _Facts(NamedTuple):
    """What estimates of all designs begin with.

    Attributes:
        keys: Of a sequence, as far as is known: where they are packed, most have less than there is
            room.
        seen: Of the keys, about what a query sees.
        moved: Bytes of queries and what comes of them, and of keys and values.
    """

    keys: int
    seen: float
    moved: tuple[int, int]

    @classmethod
    def of(cls, args: Any) -> _Facts:
        keys = int(args.S_kv)
        if args.is_packed and args.is_paged:
            keys = math.ceil(_FILLED * keys)
        queries, read = queries_of(args), args.B * args.H_kv * keys
        if args.is_packed:
            read = min(read, math.prod(args.K.shape[:-1]))
        columns = args.D + args.D_v
        moved = queries * columns * args.Q.dtype.itemsize, read * columns * args.K.dtype.itemsize
        return cls(keys, _share_seen(args, max(keys, 1)), moved)


#: The key of the last arguments asked about, and their facts: a query asks for many kernels.
_last: tuple[Any, _Facts | None] = (None, None)


def _facts(args: Any) -> _Facts:
    global _last
    key, facts = _last
    if facts is None or key is not args.key:
        facts = _Facts.of(args)
        _last = (args.key, facts)
    return facts


def queries_of(args: Any) -> int:
    """Of all heads and sequences."""
    return int(math.prod(args.Q.shape[:-1]) if args.is_packed else args.B * args.H * args.S_q)


def keys_of(args: Any) -> int:
    """A sequence, as far as is known: where they are packed, most have less than there is room."""
    return _facts(args).keys


def blocks_seen(args: Any, queries: int, keys: int) -> float:
    """Blocks of keys that a tile of queries meets, on average."""
    return met(args, -(-keys_of(args) // keys), queries, keys)


def tiles_seen(args: Any, queries: int, keys: int) -> float:
    """Tiles of queries that meet a block of keys, on average."""
    return met(args, -(-args.S_q // queries), keys, queries)


def met(args: Any, count: int, own: int, others: int) -> float:
    """Of so many tiles of `others` keys or queries, those that one of `own` queries or keys meets:
    where a bound runs through it, half a tile's more than is seen, and half of what is rounded up
    to whole tiles."""
    further = len(args.bounds) * (own / others + 1 - math.gcd(own, others) / others) / 2
    return float(max(1.0, min(count, count * seen(args) + further)))


def choose(condition: Any, one: Any, other: Any) -> Any:
    """What the same formulas of a kernel's host code choose by, of Python's numbers."""
    return one if condition else other


def longest(args: Any, blocks: float, average: float) -> float:
    """Blocks, of so many, that the longest tile meets: with one bound, tiles are of all lengths."""
    return min(blocks, 2 * average) if len(args.bounds) == 1 else average


#: Bytes per second of kernels that write keys and values in 16 bits before they are read.
_WIDENED = 3e12


def widening_seconds(args: Any) -> float:
    """Of keys and values of 8-bit floats, to 16 bits."""
    elements = args.B * args.H_kv * args.S_kv * (args.D + args.D_v)
    return float(2 * _LAUNCH + 3 * elements / _WIDENED)


def seen(args: Any) -> float:
    """Of the keys, about what a query sees."""
    return _facts(args).seen


def _share_seen(args: Any, keys: int) -> float:
    bounds, queries = args.bounds, max(args.S_q, 1)
    shares = [1.0]
    for left, right, behind in (("left", "right", 0), ("left_end", "right_end", keys - queries)):
        if left in bounds or right in bounds:
            end = _share_before(bounds[right] + 1 + behind, queries, keys) if right in bounds else 1
            begin = _share_before(behind - bounds[left], queries, keys) if left in bounds else 0
            shares.append(max(end - begin, 0.0))
    return float(min(shares))


def _share_before(places: int, queries: int, keys: int) -> float:
    """Of the keys, those before the one that lies so many places behind a query's own: on average
    of all queries."""
    together = _keys_before(places + queries, keys) - _keys_before(places, keys)
    return together / (queries * keys)


def _keys_before(end: int, keys: int) -> int:
    """Before each place up to an end, as many keys as there are: of all places together."""
    inside = min(max(end, 0), keys + 1)
    return inside * (inside - 1) // 2 + keys * max(end - keys - 1, 0)

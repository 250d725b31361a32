"""Which blocks of keys a table lets a tile of queries see: the others are left out."""

import math
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32

from ..conversion import select
from .sequences import Range, Sequence
from .values import Values

_ASKED = 32  # blocks at once: one by each lane of a warp
_MOST = 64  # entries that a tile meets, to be asked for


class Rows(NamedTuple):
    """Of the table "blocks" that a tile of queries meets.

    heads: From `head` on.
    first, last: Of a head.
    """

    batch: Int32
    head: Int32
    heads: Int32
    first: Int32
    last: Int32


class Seen(NamedTuple):
    """A block of keys of which the table lets a query see some, and those in front of it.

    block: Less than the first of all if there is none any more.
    whole: Whether the table lets every query see all of its keys, as functions do if entries tell.
    asked: All from this one on were asked for.
    some, every: A bit per block from that one on: whether it is still to come; whether it is whole.
    """

    block: Int32
    whole: Boolean
    asked: Int32
    some: Int32
    every: Int32


class Hidden(NamedTuple):
    """What hides keys of a block from some query."""

    by_band: Boolean
    by_table: Boolean


def are_searched(block_shape: tuple[int, int] | None, tile: tuple[int, int]) -> bool:
    """Whether a table has so few entries for a tile of (queries, keys) that it is worth to look
    which blocks can be left out."""
    if block_shape is None:
        return False
    return math.prod(map(_met, tile, block_shape)) <= _MOST


def seen_of(blocks: Range) -> Seen:
    """In front of the first call of `following`."""
    return Seen(blocks.end, Boolean(False), blocks.end, Int32(0), Int32(0))


@cute.jit
def following(
    seen: Seen,
    rows: Rows,
    begin: Int32,
    sequence: Sequence,
    values: Values,
    columns: cutlass.Constexpr,
    keys: cutlass.Constexpr,
    full: cutlass.Constexpr,
) -> Seen:
    """The next block, not before `begin`; by a whole warp.

    columns, keys: Of an entry, of a block.
    full: The entry that says that functions show all; None: there is none.
    """
    asked, some, every = seen.asked, seen.some, seen.every
    while (some == 0) & (asked > begin):
        asked = asked - _ASKED
        some, every = _ask(asked, rows, begin, sequence, values, columns, keys, full)
    place = (31 - Int32(cute.arch.clz(some))) & 31  # of the last one
    block = select(some == 0, begin - 1, asked + place)
    whole = ((every >> place) & 1) != 0
    return Seen(block, whole, asked, some & ~(Int32(1) << place), every)


@cute.jit
def _ask(
    asked: Int32,
    rows: Rows,
    begin: Int32,
    sequence: Sequence,
    values: Values,
    columns: cutlass.Constexpr,
    keys: cutlass.Constexpr,
    full: cutlass.Constexpr,
):
    """Each lane for a block; (those of which something is seen, those that are seen whole)."""
    block = asked + cute.arch.lane_idx()
    first = cutlass.max(block, begin) * keys
    last = cutlass.min(first + keys, sequence.keys) - 1
    some, every = Boolean(False), Boolean(True)
    # One after the other: a consumer has its registers full.
    for head in cutlass.range(rows.heads, unroll=1):
        for row in cutlass.range(rows.first, rows.last + 1, unroll=1):
            for i in cutlass.range(_met(keys, columns), unroll=1):
                column = cutlass.min(first // columns + i, last // columns)
                entry = values.element("blocks", rows.batch, rows.head + head, row, column)
                some = some | (entry != 0)
                every = every & (entry != 0 if full is None else entry == full)
    return (
        cute.arch.vote_ballot_sync(some & (block >= begin)),
        cute.arch.vote_ballot_sync(every),
    )


def _met(tile: int, entry: int) -> int:
    """Entries that a tile meets, at most, which begins at a multiple of its length."""
    if entry % tile == 0 or tile % entry == 0:
        return max(tile // entry, 1)
    return (tile - 2) // entry + 2

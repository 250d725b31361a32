"""What a block of the Hopper attention gradient computes, and what a table lets it leave out."""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, const_expr

from ..common.attention.sequences import Range, Sequence
from ..common.attention.values import Values
from ..common.conversion import select

_ASKED = 32  # tiles at once: one by each lane of a warp


class Work(NamedTuple):
    """Of a block.

    first_head: Of queries.
    first_key: Within the sequence.
    key_rows: Of the sequence, `keys` of them in use.
    total: Tiles of queries, of all heads.
    blocks: Of queries, of every head.
    first, step: The block that comes first, and from each to the next: 1 or -1.
    """

    batch: Int32
    key_head: Int32
    first_head: Int32
    first_key: Int32
    key_rows: Int32
    total: Int32
    blocks: Range
    first: Int32
    step: Int32

    def place(self, index: Int32) -> tuple[Int32, Int32]:
        """(head, block of queries) of a tile, of all in their order."""
        blocks = self.blocks.end - self.blocks.begin
        return self.first_head + index // blocks, self.first + index % blocks * self.step

    def following(self, head: Int32, block: Int32) -> tuple[Int32, Int32]:
        """What is behind."""
        last = self.blocks.begin + self.blocks.end - 1 - self.first
        wraps = block == last
        return select(wraps, head + 1, head), select(wraps, self.first, block + self.step)


class Search(NamedTuple):
    """A tile of which the table lets a query see some key.

    index: Not less than the number of all if there is none any more.
    some, full: A bit for each of 32 tiles, of those that this one is among: whether it is still to
        come; whether functions show all of it.
    """

    index: Int32
    some: Int32
    full: Int32

    @property
    def is_full(self) -> Int32:
        """1 if it is, else 0."""
        return (self.full >> (self.index & (_ASKED - 1))) & 1


def search_of() -> Search:
    """In front of the first call of `following`."""
    return Search(Int32(-_ASKED), Int32(0), Int32(0))


@cute.jit
def following(
    search: Search,
    work: Work,
    sequence: Sequence,
    values: Values,
    block_shape: cutlass.Constexpr,
    tile: cutlass.Constexpr,
    entry_of_full: cutlass.Constexpr,
) -> Search:
    """The next tile; by a whole warp.

    block_shape, tile: (queries, keys) of an entry, of a tile.
    entry_of_full: That says that functions show all; None: there is none.
    """
    first, some, full = search.index // _ASKED * _ASKED, search.some, search.full
    while (some == 0) & (first + _ASKED < work.total):
        first = first + _ASKED
        some, full = _ask(first, work, sequence, values, block_shape, tile, entry_of_full)
    place = 31 - Int32(cute.arch.clz(some & -some))
    index = select(some == 0, work.total, first + place)
    return Search(cute.arch.make_warp_uniform(index), some & (some - 1), full)


@cute.jit
def _ask(
    asked: Int32,
    work: Work,
    sequence: Sequence,
    values: Values,
    block_shape: cutlass.Constexpr,
    tile: cutlass.Constexpr,
    entry_of_full: cutlass.Constexpr,
):
    """Each lane for a tile; (those of which some is seen, those that functions show all of)."""
    index = asked + cute.arch.lane_idx()
    head, block = work.place(cutlass.min(index, work.total - 1))
    place = work.batch, head, block, work.first_key
    some, full = _seen(place, sequence, values, block_shape, tile, entry_of_full)
    return (
        Int32(cute.arch.vote_ballot_sync(some & (index < work.total))),
        Int32(cute.arch.vote_ballot_sync(full)),
    )


@cute.jit
def blocks_that_see(
    begin: Int32,
    end: Int32,
    batch: Int32,
    head: Int32,
    block: Int32,
    sequence: Sequence,
    values: Values,
    block_shape: cutlass.Constexpr,
    tile: cutlass.Constexpr,
) -> Int32:
    """How many blocks of keys begin, ... end - 1 have some that the table lets a block of queries
    see; by a whole warp."""
    found = Int32(0)
    for asked in cutlass.range(begin, end, _ASKED, unroll=1):
        own = asked + cute.arch.lane_idx()
        place = batch, head, block, cutlass.min(own, end - 1) * tile[1]
        some, _ = _seen(place, sequence, values, block_shape, tile, None)
        found = found + Int32(cute.arch.popc(cute.arch.vote_ballot_sync(some & (own < end))))
    return found


@cute.jit
def _seen(
    place: tuple,
    sequence: Sequence,
    values: Values,
    block_shape: cutlass.Constexpr,
    tile: cutlass.Constexpr,
    entry_of_full: cutlass.Constexpr,
):
    """Whether the table lets a tile see some key; whether functions show all of it.

    place: (sequence, head, block of queries, first key)
    """
    batch, head, block, first_key = place
    (queries, keys), (rows, columns) = tile, block_shape
    last_query = cutlass.min((block + 1) * queries, sequence.queries) - 1
    last_key = cutlass.min(first_key + keys, sequence.keys) - 1
    some, full = Boolean(False), Boolean(entry_of_full is not None)
    for row in cutlass.range(block * queries // rows, last_query // rows + 1, unroll=1):
        for column in cutlass.range(first_key // columns, last_key // columns + 1, unroll=1):
            entry = values.element("blocks", batch, head, row, column)
            some = some | (entry != 0)
            if const_expr(entry_of_full is not None):
                full = full & (entry == entry_of_full)
    return some, full

"""Which tiles of attention a block computes: whichever is next, until there are no more."""

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64
from cutlass.cute import AddressSpace

from ..common.attention.blocks import Rows, Seen
from ..common.attention.scores import Place
from ..common.attention.sequences import Range, Sequence, keys_seen
from ..common.conversion import select


@dataclass
class Tiles:
    """All of a launch: blocks of queries of each head of each sequence, in this order; made on the
    host and passed to the kernel.

    together: Heads that take turns, see `in_turn`; with one each has all its tiles at once.
    counters: An address: tiles that were fetched, and blocks that found none any more. Both are
        zero before and after every launch.
    """

    blocks: Int32
    heads: Int32
    total: Int32
    together: Int32
    counters: Int64

    def at(self, index: Int32) -> Int32:
        """The tile that is fetched as this one; less than `total`."""
        head, block = in_turn(index, self.blocks, self.total // self.blocks, self.together)
        return head * self.blocks + block

    def place(self, tile: Int32, rows: int, last_first: bool) -> Place:
        """Of the first query of a tile."""
        block, others = tile % self.blocks, tile // self.blocks
        if last_first:
            block = self.blocks - 1 - block
        return Place(others // self.heads, others % self.heads, block * rows, Int32(0))

    @cute.jit
    def fetch(self) -> Int32:
        """By a whole warp: a tile that nobody else has, in the first lane, see `fetched`. The first
        of each block is its own number and needs no fetching."""
        found = Int32(0)
        if cute.arch.lane_idx() == 0:
            found = cute.arch.atomic_add(self._counter(0).llvm_ptr, Int32(1))
        return found

    @cute.jit
    def leave(self):
        """By a whole warp of each block, behind its last fetch."""
        if cute.arch.lane_idx() == 0:
            cute.arch.fence_acq_rel_gpu()
            left = cute.arch.atomic_add(self._counter(1).llvm_ptr, Int32(1))
            cute.arch.fence_acq_rel_gpu()
            if left == cute.arch.grid_dim()[0] - 1:
                for i in cutlass.range_constexpr(2):
                    self._counter(i).store(Int32(0))

    def _counter(self, index: int) -> cute.Pointer:
        address = self.counters + index * Int32.width // 8
        return cute.make_ptr(Int32, address, AddressSpace.gmem, assumed_align=4)


#: Blocks that heads which take turns have at least, two for each multiprocessor: with fewer, some
#: would wait for the first of the last head. Of heads with more blocks than `_SHORT`, as many more
#: as L2 keeps the keys and values of; of shorter ones that was slower on an H200.
_BLOCKS_TOGETHER, _SHORT, _KEPT = 264, 16, 48 << 20


def heads_together(heads: Int32, blocks: Int32, bytes_of_head: Int64) -> Int32:
    """Of so many, how many take turns where their first blocks have the most to do.

    bytes_of_head: Of what its blocks read, all of them the same.
    """
    least = cute.ceil_div(_BLOCKS_TOGETHER, cutlass.max(blocks, 1))
    kept = Int32(cutlass.min(_KEPT // cutlass.max(bytes_of_head, Int64(1)), Int64(heads)))
    found = select(blocks > _SHORT, cutlass.max(least, kept), least)
    return cutlass.max(cutlass.min(found, heads), 1)


def in_turn(index: Int32, blocks: Int32, heads: Int32, together: Int32) -> tuple[Int32, Int32]:
    """(head, block) of a place in the order where some heads give their first blocks, then their
    second ones, until they have no more, and the next heads follow. The last ones are `together`,
    the first ones may be fewer."""
    missing = together - 1 - (heads - 1) % together
    turns = (index + missing * blocks) // (together * blocks)
    end = (turns + 1) * together - missing
    first = cutlass.max(end - together, 0)
    place = index - first * blocks
    return first + place % (end - first), place // (end - first)


def fetched(found: Int32) -> Int32:
    """The tile, in all lanes; here it is waited for."""
    return cute.arch.shuffle_sync(found, 0) + cute.arch.grid_dim()[0]


AHEAD = 2  # tiles that the producer is, at most


@cute.jit
def send(queue, sTiles, state, tile):
    """To the consumers, by a whole warp."""
    queue.producer_acquire(state)
    if cute.arch.lane_idx() == 0:
        sTiles[state.index] = tile
    cute.arch.sync_warp()
    queue.producer_commit(state)


@cute.jit
def receive(queue, sTiles, state):
    queue.consumer_wait(state)
    tile = sTiles[state.index]
    queue.consumer_release(state)
    return tile


class Work(NamedTuple):
    """A tile: its number, what it is, and the blocks of keys that its queries see.

    parts: That the keys of a tile are cut into, if they may be.
    rows, seen: Of a table that is searched for blocks to be left out: what the tile meets of it,
        and the last block, which the others stand in front of. Else None.
    """

    tile: Int32
    place: Place
    sequence: Sequence
    blocks: Range
    parts: Int32 | None = None
    rows: Rows | None = None
    seen: Seen | None = None


def blocks_of(sequence: Sequence, place: Place, rows: int, keys: int) -> Range:
    """Of so many keys, seen by the queries from a place on."""
    seen = keys_seen(sequence, place.query, rows, keys)
    # Behind the last query there is nothing to see.
    end = select(place.query < sequence.queries, seen.end, seen.begin)
    return seen._replace(end=end, full_end=cutlass.min(seen.full_end, end))

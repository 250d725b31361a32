"""What decoding of packed sequences has to do, part by part: a kernel in front writes it down."""

import math
from dataclasses import replace
from typing import NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cute import AddressSpace
from cutlass.memory import SmemAllocator

from ..common.attention.scores import Place
from ..common.attention.sequences import sequence_of
from ..common.attention.values import Values
from ..common.conversion import select
from ..common.rows import added, over_lanes
from ..common.threads import GROUP, WARP, summed_through
from .sdpa_packed import TakesPacked
from .sdpa_parts import AT_ONCE_BEHIND, DecodeTiles, choose
from .sdpa_rows import load_vector, store
from .sdpa_split import costs_of
from .sdpa_tiles import Work
from .sdpa_workspace import ENTRY_NUMBERS, MOST_PARTS, Listing

_THREADS = 256
_SPLIT, _WHOLE = range(2)  # numbers in front
_BITS = 16  # of a number of parts
_LOW = (1 << _BITS) - 1
_LEAST = 256  # keys of a part
_WAVES = (1, 2, 3, 5)  # of blocks, that parts are made for
_UNEVEN = 0.3  # of the time of keys that a part has more than others, what nothing hides
_ALIKE = 1.25  # how much longer than others a part may be that is like them
_SUMS = 3 * len(_WAVES)  # of all threads of a block at once
_SHARES = 4  # of a part's share of the sums, by as many blocks


class Schedule(NamedTuple):
    """In memory, see `Listing`.

    counts: Parts of tiles that have several, and other tiles.
    entries: Those parts, then from `most_parts` on the other tiles.
    """

    counts: cute.Tensor
    entries: cute.Tensor


class Scheduled(TakesPacked):
    """A part of a kernel, which adds up parts. Packed sequences are of different lengths: a kernel
    in front lists parts of about as many keys each, however many a sequence has. Parts of tiles
    that have several come first: the number of a part is its place in the workspace.
    """

    schedules = True  # packed sequences
    most_parts = MOST_PARTS  # of all tiles together

    @property
    def scheduled(self) -> bool:
        return self.packed and self.schedules

    @property
    def asks_ahead(self) -> bool:
        return not self.scheduled and super().asks_ahead

    def _known(self, tiles: DecodeTiles) -> DecodeTiles:
        """The same, when the kernel in front has written how many tiles there are."""
        if not self.scheduled:
            return tiles
        counts = self._schedule(tiles).counts
        split, whole = counts[_SPLIT], counts[_WHOLE]
        return replace(tiles, split=split, total=split + whole)

    def _item(self, tiles: DecodeTiles, tile: Int32, values: Values) -> tuple[Place, Int32]:
        """A tile, and how many parts it has."""
        if not self.scheduled:
            return self._place(tiles, tile, values), tiles.parts
        behind = tile - tiles.split + self.most_parts
        entry = select(tile < tiles.split, tile, behind)
        own = cute.make_rmem_tensor(ENTRY_NUMBERS, Int32)
        load_vector(self._schedule(tiles).entries, entry * ENTRY_NUMBERS, own)
        batch, row, head, part = (own[i] for i in range(ENTRY_NUMBERS))
        return Place(batch, head, row, part >> _BITS), part & _LOW

    def _schedule(self, tiles: DecodeTiles) -> Schedule:
        listing = Listing(self.most_parts, tiles.places * tiles.heads)
        return Schedule(*map(_numbers, listing.addresses(tiles.schedule)))

    # The kernel in front -----------------------------------------------------------------

    def _launch_schedule(
        self, mQ, mK, operands, tiles: DecodeTiles, multiprocessors, stream: cuda.CUstream
    ) -> None:
        if self.scheduled:
            self.schedule(mQ, mK, operands, tiles, multiprocessors * self.resident).launch(
                grid=(1, 1, 1), block=(_THREADS, 1, 1), stream=stream, use_pdl=True
            )

    @cute.kernel
    def schedule(self, mQ, mK, operands, tiles: DecodeTiles, room: Int32):
        """By one block, a thread for each block of rows. room: Blocks of the kernel behind."""
        thread = cute.arch.thread_idx()[0]
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        values = Values(self.scores.names, operands)
        of_warps = cute.make_layout((_SUMS, _THREADS // WARP))
        sSums = SmemAllocator().allocate_tensor(Int32, of_warps)
        found, met = self._all_met(tiles, values, mQ, mK, sSums, thread)
        lengths = [self._length(met, waves * room, tiles) for waves in _WAVES]
        of_head = self._chosen(lengths, found, met, tiles, room, values, mQ, mK, sSums, thread)
        self._write_entries(*of_head, found, tiles, values, mQ, mK, sSums, thread)

    @cute.jit
    def _all_met(self, tiles: DecodeTiles, values, mQ, mK, sSums, thread):
        """(what `_met` found of this thread's last block of rows, blocks of keys that all meet)"""
        found, met = self._met(tiles, thread, values, mQ, mK), Int32(0)
        for i in cutlass.range(self._rounds(tiles), unroll=1):
            found = self._met_in_round(i, found, tiles, thread, values, mQ, mK)
            met = met + cutlass.max(found[2], 0)
        (met,) = _over_block((met,), (), sSums, thread)
        return found, met

    @cute.jit
    def _chosen(self, lengths: list, found, met, tiles, room, values, mQ, mK, sSums, thread):
        """(the length of which the least time is expected; of a head of keys, parts of tiles that
        have several, and other tiles)"""
        sizes = cute.make_rmem_tensor((3, len(_WAVES)), Int32)
        sizes.fill(0)
        for i in cutlass.range(self._rounds(tiles), unroll=1):
            found = self._met_in_round(i, found, tiles, thread, values, mQ, mK)
            for w in cutlass.range_constexpr(len(_WAVES)):
                self._count(sizes[None, w], found[2], lengths[w])
        kinds = [[sizes[kind, w] for w in range(len(_WAVES))] for kind in range(3)]
        every = _over_block((*kinds[0], *kinds[1]), tuple(kinds[2]), sSums, thread)
        length, least, split, whole = lengths[0], Float32(math.inf), Int32(0), Int32(0)
        for w in cutlass.range_constexpr(len(_WAVES)):
            parts, several, longest = every[w :: len(_WAVES)]
            expected = self._nanoseconds(met, parts, several, longest, tiles, room)
            length = select(expected < least, lengths[w], length)
            split = select(expected < least, several, split)
            whole = select(expected < least, parts - several, whole)
            least = cute.arch.fmin(expected, least)
        return length, split, whole

    @cute.jit
    def _write_entries(self, length, split, whole, found, tiles, values, mQ, mK, sSums, thread):
        begun, alone = Int32(0), Int32(0)
        for i in cutlass.range(self._rounds(tiles), unroll=1):
            found = self._met_in_round(i, found, tiles, thread, values, mQ, mK)
            parts = select(found[2] < 0, Int32(0), _parts(found[2], length))
            several = select(parts > 1, parts, Int32(0))
            both = several << _BITS | parts - several  # at once: neither is large
            before, all_of_round = _before_and_all(both, sSums, thread)
            places = begun + (before >> _BITS), alone + (before & _LOW)
            self._enter(tiles, found, parts, places, (split, whole))
            begun, alone = begun + (all_of_round >> _BITS), alone + (all_of_round & _LOW)
        if thread == 0:
            counts, _ = self._schedule(tiles)
            counts[_SPLIT], counts[_WHOLE] = split * tiles.heads, whole * tiles.heads

    def _rounds(self, tiles: DecodeTiles) -> Int32:
        return cute.ceil_div(tiles.places, _THREADS)

    @cute.jit
    def _met_in_round(self, i, found, tiles, thread, values, mQ, mK):
        """What was found, if there is one round only."""
        if tiles.places > _THREADS:
            found = self._met(tiles, thread + i * _THREADS, values, mQ, mK)
        return found

    def _length(self, met: Int32, parts: Int32, tiles: DecodeTiles) -> Int32:
        """In blocks of keys, of so many parts; there is room for as many as none is shorter."""
        several = Int64(cutlass.min(parts, Int32(self.most_parts)))
        blocks = Int64(met) * tiles.heads
        length = Int32((blocks + several - 1) // several)
        return cutlass.max(length, Int32(max(_LEAST // self.tile_n, 1)))

    def _count(self, sizes: cute.Tensor, blocks: Int32, length: Int32) -> None:
        """One block of rows more: (parts, those of tiles that have several, the longest part)."""
        parts = select(blocks < 0, Int32(0), _parts(blocks, length))
        sizes[0] = sizes[0] + parts
        sizes[1] = sizes[1] + select(parts > 1, parts, Int32(0))
        sizes[2] = cutlass.max(sizes[2], cute.ceil_div(blocks, cutlass.max(parts, 1)))

    def _nanoseconds(
        self,
        met: Int32,
        parts: Int32,
        several: Int32,
        longest: Int32,
        tiles: DecodeTiles,
        room: Int32,
    ) -> Float32:
        """What is expected of the parts of all heads of keys, each head's with so many blocks of
        keys together. Parts that are alike end in waves; of others the longest one may be left at
        the end, when it has more of the memory for itself."""
        costs = costs_of(
            *((self.tile_m, self.tile_n), (self.head_dim, self.head_dim_v)),
            *(self.element_type.width // 8, tiles.rows, self.resident, choose),
        )
        every = parts * tiles.heads
        average = Float32(met) / Float32(cutlass.max(parts, 1))
        of_part = average * costs.block + costs.tile
        uneven = (Float32(longest) - average) * (costs.block * _UNEVEN)
        waves = Float32(every) / Float32(room)
        if_alike = Float32(cute.ceil_div(every, room)) * of_part
        found = select(longest <= average * _ALIKE, if_alike, waves * of_part + uneven)
        return found + Float32(several * tiles.heads) * costs.part

    @cute.jit
    def _enter(self, tiles: DecodeTiles, found: tuple, parts, places: tuple, of_head: tuple):
        """A block of rows, head by head of keys: sequences of few and of many queries take turns.

        places, of_head: Of the first part, and of a head the number, where tiles have several
            parts; and the same of others.
        """
        (batch, row, _), (first, place), (split, whole) = found, places, of_head
        _, entries = self._schedule(tiles)
        for part in cutlass.range(parts, unroll=1):
            for head in cutlass.range(tiles.heads, unroll=1):
                at = self.most_parts + place + head * whole
                if parts > 1:
                    at = first + part + head * split
                entry = cute.make_rmem_tensor(ENTRY_NUMBERS, Int32)
                entry[0], entry[1], entry[2], entry[3] = batch, row, head, part << _BITS | parts
                store(entry, entries, at * ENTRY_NUMBERS)

    @cute.jit
    def _met(self, tiles: DecodeTiles, place, values, mQ, mK):
        """(sequence, first row, blocks of keys that a block of rows meets); -1 if there is nothing
        to do. A block of the last sequence has to be there: it clears the rows behind it."""
        last = Int32(values["cu_seqlens_q"].shape[0]) - 2
        inside = cutlass.min(place, tiles.places - 1)
        batch, block = divmod(inside, tiles.by_block)
        batch, row = self._in_sequence_of_thread(tiles, batch, block, values)
        sequence = sequence_of(values, batch, mQ.shape[0], self._keys(mK, values))
        _, _, blocks = self._seen(sequence, row, tiles)
        exists = (row < self._rows(sequence, tiles)) | ((batch == last) & (row == 0))
        count = select(exists & (place == inside), blocks.end - blocks.begin, Int32(-1))
        return batch, row, count

    # Sums --------------------------------------------------------------------------------

    @cute.jit
    def _launch_scheduled_sums(self, mQ, mK, mO, operands, tiles: DecodeTiles, stream):
        if tiles.behind:
            self.scheduled_sums(mQ, mK, mO, operands, tiles).launch(
                grid=(self.most_parts * _SHARES, 1, 1),
                block=(GROUP, 1, 1),
                stream=stream,
                use_pdl=True,
            )

    @cute.kernel
    def scheduled_sums(self, mQ, mK, mO, operands, tiles: DecodeTiles):
        """Vectors of a tile by as many blocks as it has parts, times `_SHARES`."""
        block, thread = cute.arch.block_idx()[0], cute.arch.thread_idx()[0]
        tile, share = block // _SHARES, block % _SHARES
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        values = Values(self.scores.names, operands)
        tiles = self._known(tiles)
        if tile < tiles.split:
            place, parts = self._item(tiles, tile, values)
            sequence = sequence_of(values, place.batch, mQ.shape[0], self._keys(mK, values))
            work = Work(tile, place, sequence, None, parts=parts)
            rows = cutlass.min(self._rows(sequence, tiles) - place.query, self.tile_m)
            across = self.head_dim_v // AT_ONCE_BEHIND
            first = (place.key * _SHARES + share) * GROUP + thread
            step = parts * _SHARES * GROUP
            for vector in cutlass.range(first, rows * across, step, unroll=1):
                local, column = vector // across, vector % across * AT_ONCE_BEHIND
                self._sum_vector(local, column, mO, work, values, tiles)


def _parts(blocks: Int32, length: Int32) -> Int32:
    """Of a tile that meets so many blocks of keys."""
    return cutlass.max(blocks // length, 1)


@cute.jit
def _before_and_all(number: Int32, sSums: cute.Tensor, thread: Int32):
    """Of the numbers of a block, the sum of those of the threads in front, and of all."""
    lane, warp = thread % WARP, thread // WARP
    before = summed_through(number)
    if lane == WARP - 1:
        sSums[0, warp] = before
    cute.arch.sync_threads()
    before, every = before - number, Int32(0)
    for i in cutlass.range_constexpr(_THREADS // WARP):
        before = before + select(warp > i, sSums[0, i], Int32(0))
        every = every + sSums[0, i]
    cute.arch.sync_threads()
    return before, every


def _over_block(sums: tuple, largest: tuple, sSums: cute.Tensor, thread: Int32) -> tuple:
    """Of the numbers of a block, some sums and then the largest of some."""
    warps = _THREADS // WARP
    found = (*over_lanes(sums, added, WARP), *over_lanes(largest, cutlass.max, WARP))
    _leave(found, sSums, thread)
    own = tuple(sSums[i, thread % warps] for i in range(len(found)))
    cute.arch.sync_threads()
    sums, largest = own[: len(sums)], own[len(sums) :]
    return *over_lanes(sums, added, warps), *over_lanes(largest, cutlass.max, warps)


@cute.jit
def _leave(numbers: tuple, sSums: cute.Tensor, thread: Int32):
    """Those of each warp in shared memory."""
    if thread % WARP == 0:
        for i in cutlass.range_constexpr(len(numbers)):
            sSums[i, thread // WARP] = numbers[i]
    cute.arch.sync_threads()


def _numbers(address: Int64) -> cute.Tensor:
    """However many there are from there on."""
    pointer = cute.make_ptr(Int32, address, AddressSpace.gmem, assumed_align=16)
    return cute.make_tensor(pointer, cute.make_layout(1 << 30))

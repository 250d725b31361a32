"""What decoding of packed sequences has to do, part by part: a kernel in front writes it down."""

from dataclasses import replace
from typing import NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64
from cutlass.cute import AddressSpace

from ..common.attention.scores import Place
from ..common.attention.sequences import sequence_of
from ..common.attention.values import Values
from ..common.conversion import select
from ..common.threads import GROUP
from .sdpa_packed import TakesPacked
from .sdpa_parts import AT_ONCE_BEHIND, FEW_PARTS, DecodeTiles
from .sdpa_rows import load_vector, store
from .sdpa_tiles import Work
from .sdpa_workspace import ENTRY_NUMBERS, MOST_PARTS, Listing

_THREADS = 512
_SPLIT, _WHOLE, _BLOCKS = range(3)  # numbers in front
_BITS = 16  # of a number of parts
_LEAST = 512  # keys of a part, if all multiprocessors have some
_SHARES = 4  # of a part's share of the sums, by as many blocks


class Schedule(NamedTuple):
    """In memory, see `Listing`.

    counts: Parts of tiles that have several, other tiles, and blocks of keys of all tiles.
    entries: Those parts, then from `most` on the other tiles.
    seen: Of a block of rows, the blocks of keys that it meets; -1 if there is nothing to do.
    """

    counts: cute.Tensor
    entries: cute.Tensor
    seen: cute.Tensor


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
        return Place(batch, head, row, part >> _BITS), part & (1 << _BITS) - 1

    def _schedule(self, tiles: DecodeTiles) -> Schedule:
        listing = Listing(self.most_parts, tiles.places, tiles.heads)
        return Schedule(*map(_numbers, listing.addresses(tiles.schedule)))

    # The kernel in front -----------------------------------------------------------------

    def _launch_schedule(
        self, mQ, mK, operands, tiles: DecodeTiles, multiprocessors, stream: cuda.CUstream
    ) -> None:
        if self.scheduled:
            self.schedule(mQ, mK, operands, tiles, multiprocessors).launch(
                grid=(1, 1, 1), block=(_THREADS, 1, 1), stream=stream, use_pdl=True
            )

    @cute.kernel
    def schedule(self, mQ, mK, operands, tiles: DecodeTiles, multiprocessors: Int32):
        """By one block, a thread for each block of rows."""
        thread = cute.arch.thread_idx()[0]
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        values = Values(self.scores.names, operands)
        counts, _, seen = self._schedule(tiles)
        if thread < ENTRY_NUMBERS:
            counts[thread] = Int32(0)
        cute.arch.sync_threads()
        met = Int32(0)
        for place in cutlass.range(thread, tiles.places, _THREADS, unroll=1):
            count = self._count(tiles, place, values, mQ, mK)
            seen[place] = count
            met = met + cutlass.max(count, 0)
        if met > 0:
            cute.arch.atomic_add((counts.iterator + _BLOCKS).llvm_ptr, met)
        cute.arch.sync_threads()
        length = self._length(counts[_BLOCKS] * tiles.heads, multiprocessors)
        for place in cutlass.range(thread, tiles.places, _THREADS, unroll=1):
            if seen[place] >= 0:
                parts = cutlass.max(seen[place] // length, 1)
                self._enter(tiles, place, parts, values)

    def _length(self, blocks: Int32, multiprocessors: Int32) -> Int32:
        """Of a part, in blocks of keys, of which all tiles together have so many. Parts of tiles
        that have several are not more than there is room for: none is shorter."""
        each = cute.ceil_div(blocks, multiprocessors * self.resident)
        few = cutlass.min(each, Int32(max(_LEAST // self.tile_n, 1)))
        return cutlass.max(cutlass.max(few, cute.ceil_div(blocks, self.most_parts)), 1)

    @cute.jit
    def _count(self, tiles: DecodeTiles, place, values, mQ, mK):
        """Blocks of keys that a block of rows meets. One of the last sequence has to be there: it
        clears the rows behind it."""
        batch, block = divmod(place, tiles.by_block)
        batch, row = self._in_sequence(tiles, batch, block, values)
        sequence = sequence_of(values, batch, mQ.shape[0], self._keys(mK, values))
        _, _, blocks = self._seen(sequence, row, tiles)
        count = blocks.end - blocks.begin
        last = Int32(values["cu_seqlens_q"].shape[0]) - 2
        exists = (row < self._rows(sequence, tiles)) | ((batch == last) & (row == 0))
        return select(exists, count, Int32(-1))

    @cute.jit
    def _enter(self, tiles: DecodeTiles, place, parts, values):
        counts, entries, _ = self._schedule(tiles)
        batch, block = divmod(place, tiles.by_block)
        batch, row = self._in_sequence(tiles, batch, block, values)
        which = select(parts > 1, Int32(_SPLIT), Int32(_WHOLE))
        own = parts * tiles.heads
        first = cute.arch.atomic_add((counts.iterator + which).llvm_ptr, own)
        first = first + select(parts > 1, Int32(0), Int32(self.most_parts))
        for i in cutlass.range(own, unroll=1):
            entry = cute.make_rmem_tensor(ENTRY_NUMBERS, Int32)
            entry[0], entry[1], entry[2] = batch, row, i // parts
            entry[3] = (i % parts << _BITS) | parts
            store(entry, entries, (first + i) * ENTRY_NUMBERS)

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
                if parts <= FEW_PARTS:
                    self._sum_vector(local, column, mO, work, values, tiles, FEW_PARTS)
                else:
                    self._sum_vector(local, column, mO, work, values, tiles, self.sums_at_once)


def _numbers(address: Int64) -> cute.Tensor:
    """However many there are from there on."""
    pointer = cute.make_ptr(Int32, address, AddressSpace.gmem, assumed_align=16)
    return cute.make_tensor(pointer, cute.make_layout(1 << 30))

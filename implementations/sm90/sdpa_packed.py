"""Which of the packed sequences a tile of decoding is of, and where its rows lie."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from ..common.attention.scores import Place, Scores
from ..common.attention.sequences import Sequence
from ..common.conversion import select
from ..common.threads import WARP
from .sdpa_ahead import of_lane
from .sdpa_parts import DecodeTiles
from .sdpa_tiles import Work
from .sdpa_workspace import first_place


class TakesPacked:
    """A part of a kernel, which has `tile_m` and `scores`. Queries may be packed (T,H,D), and keys
    as well, or they are in pages.

    A head of keys has as many blocks of rows of each sequence as the longest has; or, where that is
    less, places for the blocks of all of them together, see `first_place`. A block may have no row.
    """

    tile_m: int
    scores: Scores

    @property
    def packed(self) -> bool:
        return "cu_seqlens_q" in self.scores.names

    def _place(self, tiles: DecodeTiles, tile: Int32, values) -> Place:
        place = tiles.place(tile, self.tile_m, False)
        if self.packed:
            batch, query = self._in_sequence(tiles, place.batch, place.query // self.tile_m, values)
            place = place._replace(batch=batch, query=query)
        return place

    @cute.jit
    def _in_sequence(self, tiles: DecodeTiles, batch, block, values):
        """(the sequence that has a block, the first row of it there), by a whole warp."""
        first, block = Int32(batch), Int32(block)
        if tiles.joined:
            starts, lane = values["cu_seqlens_q"], cute.arch.lane_idx()
            last = Int32(starts.shape[0]) - 2
            first, left, own = Int32(0), last + 1, Int32(0)
            while left > 0:
                # As many sequences as there are lanes, and between them as many others each.
                apart = cute.ceil_div(left, WARP)
                sequence = cutlass.min(first + lane * apart, last)
                begin = self._first_place(of_lane(starts, sequence), sequence, tiles)
                begun = cute.arch.vote_ballot_sync((lane * apart < left) & (begin <= block))
                found = cutlass.max(Int32(cute.arch.popc(begun)) - 1, 0)
                own = cute.arch.shuffle_sync(begin, found)
                first = first + found * apart
                left = select(apart > 1, cutlass.min(apart, left - found * apart), Int32(0))
            block = block - own
        return first, block * self.tile_m

    @cute.jit
    def _in_sequence_of_thread(self, tiles: DecodeTiles, batch, block, values):
        """The same by each thread, of a block of its own."""
        first, block = Int32(batch), Int32(block)
        if tiles.joined:
            starts = values["cu_seqlens_q"]
            first, last = Int32(0), Int32(starts.shape[0]) - 2
            while first < last:
                middle = (first + last + 1) // 2
                begun = self._first_place(starts[middle], middle, tiles) <= block
                first = select(begun, middle, first)
                last = select(begun, last, middle - 1)
            block = block - self._first_place(starts[first], first, tiles)
        return first, block * self.tile_m

    def _first_place(self, query: Int32, sequence: Int32, tiles: DecodeTiles) -> Int32:
        """Of a sequence that begins at a query."""
        return first_place(query * tiles.group.divisor, sequence, self.tile_m)

    def _rows(self, sequence: Sequence, tiles: DecodeTiles) -> Int32:
        """Of a head of keys."""
        return sequence.query_rows * tiles.group.divisor if self.packed else tiles.rows

    def _row(self, tensor: cute.Tensor, query: Int32, head: Int32, work: Work) -> cute.Tensor:
        """Of a query, of Q or O: (S,D,H,B)."""
        batch = work.place.batch
        if self.packed:
            query, batch = work.sequence.first_query + query, Int32(0)
        return tensor[query, None, head, batch]

    def _first_key(self, sequence: Sequence) -> Int32 | None:
        """Where keys of a sequence begin, if that is not always the first."""
        return sequence.first_key if "cu_seqlens_kv" in self.scores.names else None


def blocks_of_packed(blocks: Int32, sequences: Int32, rows: Int32, tile: int) -> tuple:
    """(blocks, sequences that have as many, whether they are places of all sequences together)

    blocks: Of the longest sequence; rows: of all of them.
    """
    places = first_place(rows, sequences, tile)
    joined = places < blocks * sequences
    return select(joined, places, blocks), select(joined, Int32(1), sequences), joined

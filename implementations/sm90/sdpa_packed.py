"""Which of the packed sequences a tile of decoding is of, and where its rows lie."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from ..common.attention.scores import Place, Scores
from ..common.attention.sequences import Sequence
from ..common.conversion import select
from ..common.threads import WARP
from .sdpa_ahead import of_lane
from .sdpa_parts import DecodeTiles
from .sdpa_tiles import Work


class TakesPacked:
    """A part of a kernel, which has `tile_m` and `scores`. Queries may be packed (T,H,D), and keys
    as well, or they are in pages.

    Sequences have as many blocks of rows each as the longest has; or, where those are more, one
    list has the blocks of all of them, as if every sequence had one block more than its rows fill:
    sequence b, behind n rows of others, begins at place ⌊n / tile_m⌋ + b. None reaches the next
    one: m rows behind r others of a block add ⌊(r + m) / tile_m⌋ + 1 places, and the ⌈m / tile_m⌉
    blocks that they fill are no more. What has no rows ends at once.
    """

    tile_m: int
    scores: Scores

    @property
    def packed(self) -> bool:
        return "cu_seqlens_q" in self.scores.names

    @cute.jit
    def _place(self, tiles: DecodeTiles, tile, values) -> Place:
        """By a whole warp."""
        place = tiles.place(tile, self.tile_m, False)
        if const_expr(self.packed):
            batch, query = Int32(place.batch), Int32(place.query)
            if tiles.listed:
                batch, query = self._found(tiles, query // self.tile_m, values)
            place = place._replace(batch=batch, query=query)
        return place

    @cute.jit
    def _found(self, tiles: DecodeTiles, block, values):
        """(the sequence whose block has a place in the list, the first row of it there)"""
        starts = values["cu_seqlens_q"]
        last = Int32(starts.shape[0]) - 2
        first, left, query = Int32(0), last + 1, Int32(0)
        while left > 0:
            # As many sequences as there are lanes, and between them as many others each.
            apart = cute.ceil_div(left, WARP)
            step = cute.arch.lane_idx() * apart
            sequence = cutlass.min(first + step, last)
            rows = of_lane(starts, sequence) * tiles.group.divisor
            own = first_block(rows, sequence, self.tile_m)
            begun = cute.arch.vote_ballot_sync((step < left) & (own <= block))
            lane = cutlass.max(Int32(cute.arch.popc(begun)) - 1, 0)
            query = (block - cute.arch.shuffle_sync(own, lane)) * self.tile_m
            first = first + lane * apart
            left = select(apart > 1, cutlass.min(apart, left - lane * apart), Int32(0))
        return first, query

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


def first_block(rows, sequence, tile: int):
    """The place of a sequence behind as many others, which have so many rows together."""
    return rows // tile + sequence


def blocks_of_packed(blocks: Int32, sequences: Int32, rows: Int32, tile: int) -> tuple:
    """(blocks, sequences that have as many, whether it is a list of all)

    blocks: Of the longest sequence; rows: of all of them.
    """
    places = first_block(rows, sequences, tile)
    listed = places < blocks * sequences
    return select(listed, places, blocks), select(listed, Int32(1), sequences), listed

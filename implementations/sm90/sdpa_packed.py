"""Which of the packed sequences a tile of decoding is of, and where its rows lie."""

import cutlass.cute as cute
from cutlass import Int32

from ..common.attention.scores import Place, Scores
from ..common.attention.sequences import Sequence
from ..common.conversion import select
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
        """(the sequence that has a block, the first row of it there)"""
        first, block = Int32(batch), Int32(block)
        if tiles.joined:
            starts, group = values["cu_seqlens_q"], tiles.group.divisor
            first, last = Int32(0), Int32(starts.shape[0]) - 2
            while first < last:
                middle = (first + last + 1) // 2
                begun = first_place(starts[middle] * group, middle, self.tile_m) <= block
                first = select(begun, middle, first)
                last = select(begun, last, middle - 1)
            block = block - first_place(starts[first] * group, first, self.tile_m)
        return first, block * self.tile_m

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

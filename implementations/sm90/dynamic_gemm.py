"""Dense matrix products for Hopper whose tiles are taken."""

import cutlass.cute as cute
from cutlass import Int32

from .gemm import Gemm
from .scheduled import ScheduledGemm


class DynamicGemm(ScheduledGemm):
    """D = epilogue(A · B) as `Gemm` computes it, by clusters that take their tiles.

    A static share of tiles has to wait where another kernel has some of the multiprocessors:
    clusters that begin behind it have as many as the others. Whoever is free takes the next one
    here, see `TileQueue`. Roles, pipelines and operands are those of `Gemm`; K is not split.

    The workspace has the counter that tiles are taken from, behind those of what is reduced.
    """

    cuts_edges = True  # rows behind those of a matrix belong to nobody

    def __init__(self, *args, **keywords):
        super().__init__(*args, scheduler="dynamic", **keywords)
        if self.split_k is not None or any(self.repacked):
            raise ValueError("tiles that are taken are not split, and of no copies")

    _begin = Gemm._begin

    @cute.jit
    def _produce_tiles(self, tiles, place, order, queue, stage, work):
        first, end, _ = tiles
        tile, position = Int32(first), Int32(0)
        while tile < end:
            stage, answer = self._produce_tile(tile, place, tile == first, stage, *work)
            tile, position = self._next_to_load(queue, tile, position, answer)
            place = order.coordinates(tile)
        self._finish_loading(queue, tile, end, position)
        return stage

    @cute.jit
    def _consume_tiles(self, tiles, queue, stage, turn, work):
        first, end, _ = tiles
        tile, position = self._first_to_multiply(queue, work[0], Int32(first))
        while tile < end:
            stage, turn = self._consume_tile(tile, stage, turn, *work)
            tile, position = self._next_to_multiply(queue, tile, position)

"""Dropout of the Hopper attention gradient: warps that draw ahead what consumers would have to."""

import itertools
from collections.abc import Callable
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint16, Uint32

from ..common.attention.dropout import COUNTED, counter_of, halves_of, least_half
from ..common.attention.scores import Tile
from ..common.conversion import select
from ..common.philox import philox
from ..common.threads import GROUP, QUAD, WARP
from .sdpa_backward_plan import CONSUMERS, DRAWN, DRAWN_QUERIES
from .sdpa_backward_turns import TakesTurns
from .sdpa_backward_work import Work

_ROWS = WARP // QUAD  # of an accumulator, side by side: as many keys, and so many again behind them
_PAIRS = _ROWS // 2  # of keys that share a counter
_COLUMNS = QUAD * 2  # of an accumulator: as many queries
_BITS = 4  # of the two queries and two keys that a thread has there
_HALVES = 4  # of the words of a thread
_LANES = CONSUMERS * GROUP // WARP // 2 * _PAIRS * QUAD  # that share the keys of a tile

#: Warps of the producer's group that draw, from this one on: for so many columns of queries each,
#: the last one for fewer. For each thread that is half a word.
DRAWERS = 1
_DRAWERS = GROUP // WARP - DRAWERS
_COLUMNS_EACH = -(-DRAWN_QUERIES // (_COLUMNS * _DRAWERS))

_READERS = CONSUMERS * GROUP // WARP  # warps


class Kept(NamedTuple):
    """Of probabilities, behind dropout: they themselves, or whether each is, and the factor."""

    powers: cute.Tensor | None = None
    is_kept: Callable[[int, int], Boolean] | None = None
    factor: Float32 | None = None

    def gradient(self, at: tuple[int, int], power, gradient, delta) -> Float32:
        """dS = P (keep dP - delta)"""
        if self.powers is not None:  # numbers are drawn once
            return cute.math.fma(self.powers[at], gradient, -(power * delta))
        kept = select(self.is_kept(*at), gradient, Float32(0.0))
        return power * cute.math.fma(kept, self.factor, -delta)


class DrawsAhead(TakesTurns):
    """Where scores stand as keys × queries, a thread has one key of each pair that shares a
    counter, and half of its words: it would draw 4 times as many numbers as it needs. Warps of the
    producer's group that have nothing else to do draw them for all, some tiles ahead, and tell of
    each score whether it is kept: a bit of two words for each thread of the consumers.

    barrier  waits       arrives      when
    -------  ----------  -----------  -------------------------------------------------
    drawn    consumers   the drawers  the words of a tile are there; one for each stage
    read     drawers     consumers    they have them in registers; the same

    Where a table hides tiles, drawers wait for Q as well, which comes with the tile's place.
    """

    @cute.jit
    def _prepare_drawing(self, storage, warp_index: Int32):
        """In front of everything."""
        if warp_index == 0:
            with cute.arch.elect_one():
                for stage in cutlass.range_constexpr(DRAWN):
                    cute.arch.mbarrier_init(storage.drawn_full.data_ptr() + stage, _DRAWERS)
                    cute.arch.mbarrier_init(storage.drawn_read.data_ptr() + stage, _READERS)

    @cute.jit
    def _draw(self, drawer: Int32, storage, pipelines, work: Work, operands, heads: Int32):
        """One warp, for all tiles of a block. heads: Of queries."""

        def draw(number: Int32, head: Int32, block: Int32) -> None:
            self._draw_tile(drawer, storage, number, work, head, block, operands, heads)

        self._for_each_tile(storage, pipelines, work, draw)

    @cute.jit
    def _draw_tile(self, drawer: Int32, storage, number: Int32, work, head, block, operands, heads):
        """number: Of the tile, among those of this block."""
        values = self._values(operands)
        least = least_half(values.number("dropout_p"))
        seed = Int64(values.integer("dropout_seed"))
        offset = Int64(values.integer("dropout_offset")) + Int64(work.batch * heads + head)
        stage, phase = number % DRAWN, number // DRAWN % 2
        cute.arch.mbarrier_wait(storage.drawn_read.data_ptr() + stage, 1 - phase)
        words = self._words(storage, stage)[drawer, None]
        query = block * self.tile_m + drawer * (_COLUMNS_EACH * _COLUMNS)
        columns = DRAWN_QUERIES // _COLUMNS - drawer * _COLUMNS_EACH
        columns = cutlass.min(columns, _COLUMNS_EACH)
        for first in cutlass.range_constexpr(0, _LANES, WARP):
            lane = first + cute.arch.lane_idx()
            self._draw_columns(words, lane, query, columns, work, (offset, seed, least))
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(storage.drawn_full.data_ptr() + stage)

    @cute.jit
    def _draw_columns(self, words, lane: Int32, query, columns: Int32, work, of_head: tuple):
        """words: Halves of them, by thread. lane: Among those that share the keys of a tile."""
        column, pair, group = lane % QUAD, lane // QUAD % _PAIRS, lane // (_PAIRS * QUAD)
        counter = counter_of(work.first_key + group * COUNTED + pair * 2)
        query = query + column * 2
        kept = cute.make_rmem_tensor((2, 2), Uint32)  # (second of a pair of keys, of two warps)
        kept.fill(0)
        for _ in cutlass.range(columns, unroll=1):
            found = _kept_of_two(counter, query, *of_head)
            for i in cutlass.range_constexpr(cute.size(kept)):
                kept[i] = (kept[i] >> _BITS) | found[i]
            query += _COLUMNS
        thread = group * (2 * WARP) + pair * (2 * QUAD) + column
        above = Uint32(32 - columns * _BITS)
        for second in cutlass.range_constexpr(2):
            for warp in cutlass.range_constexpr(2):
                bits = kept[second, warp] >> above
                words[thread + second * QUAD + warp * WARP] = Uint16(bits)

    def _drop(self, tile: Tile, powers: cute.Tensor, number: Int32, context) -> Kept:
        """Of a consumer: the probabilities of a tile behind dropout, up to the factor if numbers
        are drawn ahead.

        powers: (rows, columns), which become those.
        number: Of the tile, among those of this block.
        """
        values, everywhere = context.values, itertools.product(*map(range, tile.extents))
        if not self.draws_ahead:
            for at in everywhere:
                powers[at] = tile.values[at]
            self.scores.drop(tile.of(powers), context.space.heads, values, keys=self.warp_keys)
            return Kept(powers=powers)
        is_kept = self._await_drawn(context.storage, number, context.thread)
        for at in everywhere:
            powers[at] = select(is_kept(*at), tile.values[at], Float32(0.0))
        return Kept(is_kept=is_kept, factor=self.scores.kept_factor(values))

    def _await_drawn(self, storage, number: Int32, thread: Int32) -> Callable[[int, int], Boolean]:
        """Whether a score, (row, column) of those of a thread, is kept."""
        stage, phase = number % DRAWN, number // DRAWN % 2
        cute.arch.mbarrier_wait(storage.drawn_full.data_ptr() + stage, phase)
        halves = self._words(storage, stage)[None, thread]
        words = cute.recast_tensor(halves, Uint32)[0], Uint32(halves[_DRAWERS - 1])
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(storage.drawn_read.data_ptr() + stage)

        def is_kept(row: int, column: int) -> Boolean:
            part, pair = divmod(column // 2, _COLUMNS_EACH)
            bit = 16 * (part % 2) + pair * _BITS + column % 2 * 2 + row
            return (words[part // 2] & Uint32(1 << bit)) != 0

        return is_kept

    def _words(self, storage, stage: Int32) -> cute.Tensor:
        """Halves of those of a thread of the consumers: (halves, threads)"""
        layout = cute.make_layout((_HALVES, CONSUMERS * GROUP, DRAWN))
        return storage.drawn.get_tensor(layout)[None, None, stage]


def _kept_of_two(
    counter: Uint32, query: Int32, offset: Int64, seed: Int64, least: Uint32
) -> list[Uint32]:
    """Of two queries and the keys of a counter: (second of a pair, of two warps), as bits of the
    upper end, those of a query side by side."""
    found = [Uint32(0)] * 4
    for column in range(2):
        for i, word in enumerate(philox(counter, query + column, offset, seed)):
            warp, row = divmod(i, 2)
            bit = Uint32(1 << (32 - _BITS + 2 * column + row))
            for second, half in enumerate(halves_of(word)):
                to = second + 2 * warp
                found[to] = select(half >= least, found[to] | bit, found[to])
    return found

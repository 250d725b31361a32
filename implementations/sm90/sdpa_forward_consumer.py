"""What a consumer of Hopper's attention does with each tile of queries."""

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
import cutlass.utils.hopper_helpers as sm90
from cutlass import Boolean, Float32, Int32, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup
from cutlass.cute.nvgpu.warpgroup import OperandSource

from ..common.attention.blocks import Hidden, Rows, Seen, following, seen_of
from ..common.attention.scores import LEAST, Place, Tile, rows_and_columns
from ..common.attention.sequences import Range, keys_in_pages, sequence_of
from ..common.attention.softmax import LOG2_E, softmax_of, update
from ..common.attention.values import Values
from ..common.threads import GROUP
from .mma import WGMMA_M
from .sdpa_output import OWN, SdpaOutput
from .sdpa_tiles import AHEAD, Tiles, Work, blocks_of, receive

TURNS = 1  # named barriers: one per consumer from this one on
TOGETHER = OWN + 3  # of all consumers

_PIECE = 8  # accumulators of 16 columns that a thread has


class ForwardConsumer(SdpaOutput):
    """The consumers' part of `SdpaForward`, which has the design."""

    @cute.jit
    def _consume(
        self,
        consumer: Int32,
        mQ,
        sQ,
        mK,
        sK,
        sV,
        sO,
        mO,
        pipelines,
        queue,
        sTiles,
        tiles: Tiles,
        operands,
    ):
        """One group: 64 queries of every tile of this block."""
        values = self._values(operands, sK)
        thread = cute.arch.thread_idx()[0] - GROUP
        fragments, registers, local = self._parts_of_products(consumer, thread, sQ, sK, sV, sO)
        states = tuple(
            pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, stages)
            for stages in (1, self.stages, self.stages)
        )
        received = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, AHEAD)
        if const_expr(self.turns):
            self._first_turn(consumer)
        tile = receive(queue, sTiles, received)
        received.advance()
        while tile < tiles.total:
            work = self._work(tiles, tile, values, mQ, mK)
            states = self._attend(
                *(consumer, thread, fragments, registers, local),
                *(mQ, sQ, sV, sO, mO, pipelines, states, work, values, tiles),
            )
            tile = receive(queue, sTiles, received)
            received.advance()

    def _parts_of_products(self, consumer, thread, sQ, sK, sV, sO) -> tuple:
        """Of this group: (fragments of Q, K and V), (registers of scores, powers and O), and where
        its scores stand in a tile."""
        mma_qk, mma_pv = self._mma_qk(), self._mma_pv()
        group_qk, group_pv = (mma.get_slice(consumer * GROUP) for mma in (mma_qk, mma_pv))
        tCrQ = mma_qk.make_fragment_A(group_qk.partition_A(sQ))[None, None, None, 0]
        tCrK = mma_qk.make_fragment_B(group_qk.partition_B(sK))
        tCrV = mma_pv.make_fragment_B(group_pv.partition_B(sV))
        tSrS = cute.make_rmem_tensor(mma_qk.partition_shape_C((self.tile_m, self.tile_n)), Float32)
        tOrO = cute.make_rmem_tensor(
            mma_pv.partition_shape_C((self.tile_m, self.head_dim_v)), Float32
        )
        tOrP = cute.make_rmem_tensor(cute.size(tSrS), self.powers_type)
        identity = cute.make_identity_tensor((self.tile_m, self.tile_n))
        local = rows_and_columns(mma_qk.get_slice(thread).partition_C(identity))
        return (tCrQ, tCrK, tCrV), (tSrS, tOrP, tOrO), local

    @cute.jit
    def _attend(
        self,
        consumer,
        thread,
        fragments,
        registers,
        local,
        mQ,
        sQ,
        sV,
        sO,
        mO,
        pipelines,
        states,
        work: Work,
        values,
        tiles: Tiles,
    ):
        """A tile. Returns the states of the pipelines behind it."""
        (tCrQ, tCrK, tCrV), (tSrS, tOrP, tOrO) = fragments, registers
        place, sequence, blocks = work.place, work.sequence, work.blocks
        pipeline_q, pipeline_k, pipeline_v = pipelines
        q_state, k_state, v_state = states
        scores = rows_and_columns(tSrS)
        tile = Tile(scores, local, place.query, Int32(0), place.batch, place.head)
        tile = tile._replace(group=self._group(tiles), factors=self._factors_of_rows())
        multiplier = self._multiplier(values, place, tiles)
        softmax = softmax_of(2, multiplier, self.largest_power, self._slack, self._least)
        tOrO.fill(0.0)
        if self._takes_queries(blocks):
            self._await_queries(thread, mQ, sQ, pipeline_q, q_state, work, tiles, tile.factors)
        if blocks.end > blocks.begin:
            last = blocks.end - 1
            pipeline_k.consumer_wait(k_state)
            multiply(self._mma_qk(), tSrS, tCrQ, tCrK[None, None, None, k_state.index], fresh=True)
            warpgroup.wait_group(0)
            hidden = self._hidden(work, work.seen) if const_expr(self.searches) else True
            of_block = self._of_block(tile, last)
            self._score_with(pipeline_k, k_state, of_block, sequence, values, tiles, hidden)
            k_state.advance()
            update(softmax, scores, None)
            self._store_powers(tOrP, tSrS, self._of_block(tile, last), tiles, values)
            if const_expr(self.keys_end_early):
                self._clear_behind(thread, sV, last, sequence, pipeline_v, v_state)

            factors = cute.make_rmem_tensor(2, Float32)
            factors.fill(1.0)
            of_tile = (
                *(consumer, fragments, registers, tile, softmax, factors),
                *(sequence, values, tiles),
            )
            inner = (k_state, v_state)
            if const_expr(self.searches):
                inner = self._pass_seen(of_tile, pipelines, inner, work, values)
            elif const_expr(self.scores.hides_anywhere):
                inner = self._pass(of_tile, pipelines, inner, last, blocks.begin, True)
            else:
                full_begin = cutlass.min(last, blocks.full_begin)
                full_end = cutlass.min(last, blocks.full_end)
                if const_expr(sequence.high is not None):
                    inner = self._pass(of_tile, pipelines, inner, last, full_end, True)
                inner = self._pass(of_tile, pipelines, inner, full_end, full_begin, False)
                if const_expr(sequence.low is not None):
                    inner = self._pass(of_tile, pipelines, inner, full_begin, blocks.begin, True)
            k_state, v_state = inner
            if const_expr(self.output_memory != "queries"):
                self._release_queries(pipeline_q, q_state)
            values_of = self._await_values(tCrV, pipeline_v, v_state)
            if const_expr(self.scaling != "at_once"):
                self._scale(tOrO, factors)
            powers = self._operand(tOrP, tSrS)
            multiply(self._mma_pv(), tOrO, powers, values_of, fresh=False)
            warpgroup.wait_group(0)
            pipeline_v.consumer_release(v_state)
            v_state.advance()
        self._write(consumer, thread, tOrO, sO, mO, softmax, work, values, tiles)
        if const_expr(self.output_memory == "queries"):
            # What was written there, or read, comes before what TMA writes.
            cute.arch.fence_view_async_shared()
            cute.arch.sync_warp()
            self._release_queries(pipeline_q, q_state)
        if self._takes_queries(blocks):
            q_state.advance()
        return q_state, k_state, v_state

    def _multiplier(self, values: Values, place: Place, tiles: Tiles) -> Float32:
        """Of scores, to exponents of 2."""
        return values.number("scale") * LOG2_E if self.scores.plain else Float32(LOG2_E)

    @property
    def _least(self) -> float | None:
        """See `OnlineSoftmax`."""
        return LEAST if self.scores.hides_by_value else None

    def _group(self, tiles: Tiles) -> Int32 | None:
        """Heads whose queries are the rows of a tile, see `Tile`."""
        return None

    def _factors_of_rows(self) -> cute.Tensor | None:
        """See `Tile`; they are known when queries are there."""
        return None

    def _await_queries(self, thread, mQ, sQ, pipeline_q, state, work: Work, tiles, factors) -> None:
        pipeline_q.consumer_wait(state)

    def _takes_queries(self, blocks: Range) -> Boolean:
        """Whether a tile has the memory of Q for a while."""
        if self.output_memory == "queries":
            return Boolean(True)
        return blocks.end > blocks.begin

    def _release_queries(self, pipeline_q, state) -> None:
        pipeline_q.consumer_release(state)

    @cute.jit
    def _pass(self, of_tile, pipelines, states, begin, end, hidden: cutlass.Constexpr):
        """Blocks of keys begin - 1, ... end; returns the states of the pipelines behind them.

        of_tile: What `_add_block` takes in front.
        hidden: Whether queries may not see all their keys.
        """
        for i in cutlass.range(begin - end, unroll=1):
            states = self._add_block(*of_tile, pipelines, states, begin - 1 - i, hidden)
        return states

    @cute.jit
    def _pass_seen(self, of_tile, pipelines, states, work: Work, values: Values):
        """The same of the blocks that a table shows, in front of the last one."""
        seen = self._following(work.seen, work, values)
        while seen.block >= work.blocks.begin:
            hidden = self._hidden(work, seen)
            states = self._add_block(*of_tile, pipelines, states, seen.block, hidden)
            seen = self._following(seen, work, values)
        return states

    @cute.jit
    def _add_block(
        self,
        consumer,
        fragments,
        registers,
        tile,
        softmax,
        factors,
        sequence,
        values,
        tiles: Tiles,
        pipelines,
        states,
        block,
        hidden: cutlass.Constexpr,
    ):
        """Scores of a block of keys, and the values of the one behind it. Returns the states of the
        pipelines behind them.

        factors: Of the rows: what O is multiplied with before more is added. Written.
        """
        (tCrQ, tCrK, tCrV), (tSrS, tOrP, tOrO) = fragments, registers
        _, pipeline_k, pipeline_v = pipelines
        k_state, v_state = states
        pipeline_k.consumer_wait(k_state)
        self._await_turn(consumer)
        multiply(self._mma_qk(), tSrS, tCrQ, tCrK[None, None, None, k_state.index], fresh=True)
        if const_expr(self.scaling != "at_once"):
            self._scale(tOrO, factors)
        values_of = self._await_values(tCrV, pipeline_v, v_state)
        powers = self._operand(tOrP, tSrS)
        multiply(self._mma_pv(), tOrO, powers, values_of, fresh=False)
        self._pass_turn(consumer)
        warpgroup.wait_group(1)
        of_block = self._of_block(tile, block)
        self._score_with(pipeline_k, k_state, of_block, sequence, values, tiles, hidden)
        update(softmax, tile.values, factors)
        warpgroup.wait_group(0)
        pipeline_v.consumer_release(v_state)
        self._store_powers(tOrP, tSrS, self._of_block(tile, block), tiles, values)
        if const_expr(self.scaling == "at_once"):
            self._scale(tOrO, factors)
        k_state.advance()
        v_state.advance()
        return k_state, v_state

    def _await_values(self, tCrV, pipeline_v, state) -> cute.Tensor:
        """Of a block of keys."""
        pipeline_v.consumer_wait(state)
        return tCrV[None, None, None, state.index]

    @cute.jit
    def _scale(self, tOrO, factors):
        outputs = rows_and_columns(tOrO)
        if const_expr(self.scaling == "seldom"):
            if cute.arch.vote_any_sync((factors[0] != 1.0) | (factors[1] != 1.0)):
                scale_rows(outputs, factors)
        else:
            scale_rows(outputs, factors)

    def _of_block(self, tile: Tile, block: Int32) -> Tile:
        """Of keys."""
        return tile._replace(first_key=block * self.tile_n)

    def _score_with(self, pipeline_k, k_state, tile: Tile, *of_scores) -> None:
        """Products with a block of keys, which are released, into scores."""
        pipeline_k.consumer_release(k_state)
        self._score(tile, *of_scores)

    def _score(self, tile: Tile, sequence, values: Values, tiles, hidden: bool | Hidden) -> None:
        """Products with a block of keys into scores."""
        if not self.scores.plain:
            self.scores.change(tile, values, by_rows=True)
        if isinstance(hidden, Hidden):
            self._hide_known(tile, sequence, values, hidden)
        elif hidden:
            self.scores.hide(tile, sequence, values, keys=self.tile_n)

    @cute.jit
    def _hide_known(self, tile: Tile, sequence, values: Values, hidden: Hidden):
        if hidden.by_table:
            by_table = self.meets_several
            self.scores.hide(tile, sequence, values, by_table=by_table, keys=self.tile_n)
        else:
            if const_expr(self.scores.functions.visible is not None and self.scores.full is None):
                self.scores.hide(tile, sequence, values, by_table=False)
            else:
                if hidden.by_band:
                    self.scores.hide(tile, sequence, values, by_table=False, by_functions=False)

    def _store_powers(self, tOrP, tSrS, tile: Tile, tiles: Tiles, values: Values) -> None:
        """The numerators of probabilities, as the second product reads them."""
        if self.scores.drops:
            self.scores.drop(tile, tiles.heads, values, keys=self.tile_n, scaled=False)
        # In pieces of registers that the second product takes: others would be put together anew.
        for first in range(0, cute.size(tSrS), _PIECE):
            powers = cute.make_tensor(tSrS.iterator + first, cute.make_layout(_PIECE))
            rounded = cute.make_tensor(tOrP.iterator + first, cute.make_layout(_PIECE))
            rounded.store(powers.load().to(self.powers_type))

    def _operand(self, tOrP: cute.Tensor, tSrS: cute.Tensor) -> cute.Tensor:
        """Accumulators, rounded, as the first operand of the next product: 16 of their columns are
        a k block of it."""
        blocks = cute.size(tSrS) // _PIECE
        layout = cute.make_layout(((2, 2, 2), 1, blocks), stride=((1, 2, 4), 0, _PIECE))
        return cute.make_tensor(tOrP.iterator, layout)

    @cute.jit
    def _clear_behind(self, thread, sV, block, sequence, pipeline_v, v_state):
        """Rows of V behind the last key become 0: their probabilities are 0, but they may hold
        what is not a number."""
        first_behind = sequence.keys - block * self.tile_n
        if first_behind < self.tile_n:
            pipeline_v.consumer_wait(v_state)
            stage = sV[None, None, v_state.index]
            behind = (self.tile_n - first_behind) * self.head_dim_v
            for i in cutlass.range(thread, behind, GROUP * self.consumers, unroll=1):
                row, column = i // self.head_dim_v, i % self.head_dim_v
                stage[column, first_behind + row] = self.element_type(0.0)
            cute.arch.fence_view_async_shared()
            cute.arch.barrier(barrier_id=TOGETHER, number_of_threads=GROUP * self.consumers)

    # Turns: a consumer issues its products while the others have their softmax.

    @cute.jit
    def _first_turn(self, consumer):
        if consumer == self.consumers - 1:
            cute.arch.barrier_arrive(barrier_id=TURNS, number_of_threads=2 * GROUP)

    def _await_turn(self, consumer) -> None:
        if self.turns:
            cute.arch.barrier(barrier_id=TURNS + consumer, number_of_threads=2 * GROUP)

    def _pass_turn(self, consumer) -> None:
        if self.turns:
            following = (consumer + 1) % self.consumers
            cute.arch.barrier_arrive(barrier_id=TURNS + following, number_of_threads=2 * GROUP)

    def _work(self, tiles: Tiles, tile: Int32, values: Values, mQ, mK) -> Work:
        place = tiles.place(tile, self.tile_m, self.longest_first)
        sequence = sequence_of(values, place.batch, mQ.shape[0], self._keys(mK, values))
        work = Work(tile, place, sequence, blocks_of(sequence, place, self.tile_m, self.tile_n))
        last = cutlass.min(place.query + self.tile_m, sequence.queries) - 1
        return self._searched(work, (place.head, Int32(1)), place.query, last, values)

    def _keys(self, mK: cute.Tensor, values: Values) -> Int32:
        """Of a sequence, at most; K (S,D,H,B), or in pages."""
        if self.page_size is None:
            return Int32(mK.shape[0])
        return keys_in_pages(values, self.page_size)

    # Blocks that a table hides whole. The producer and each warp of the consumers search for
    # themselves, and find the same.

    def _searched(self, work: Work, heads: tuple, first: Int32, last: Int32, values) -> Work:
        """The same without the blocks behind the last one that is seen.

        heads: The first, and how many.
        first, last: Queries.
        """
        if not self.searches:
            return work
        queries, _ = self.scores.block_shape
        head, count = heads
        count = cutlass.min(count, Int32(values["blocks"].shape[1]))
        rows = Rows(work.place.batch, head, count, first // queries, last // queries)
        work = work._replace(rows=rows)
        seen = self._following(seen_of(work.blocks), work, values)
        return work._replace(seen=seen, blocks=work.blocks._replace(end=seen.block + 1))

    def _following(self, seen: Seen, work: Work, values: Values) -> Seen:
        begin, (_, columns) = work.blocks.begin, self.scores.block_shape
        of_entries = columns, self.tile_n, self.scores.full
        return following(seen, work.rows, begin, work.sequence, values, *of_entries)

    def _hidden(self, work: Work, seen: Seen) -> Hidden:
        """By the table also where functions may, if entries tell where they do not."""
        blocks = work.blocks
        by_band = (seen.block < blocks.full_begin) | (seen.block >= blocks.full_end)
        return Hidden(by_band, seen.whole == Boolean(False))

    # An atom has a state, which a loop would have to carry: so each product has one of its own.

    def _mma_qk(self) -> cute.TiledMma:
        return self._mma(self.tile_n, OperandMajorMode.K, OperandSource.SMEM)

    def _mma_pv(self) -> cute.TiledMma:
        return self._mma(self.head_dim_v, OperandMajorMode.MN, OperandSource.RMEM)

    def _mma(self, columns, b_major, a_source) -> cute.TiledMma:
        return sm90.make_trivial_tiled_mma(
            *(self.element_type, self.element_type, OperandMajorMode.K, b_major),
            *(Float32, (self.consumers, 1, 1), (WGMMA_M, columns), a_source),
        )


def scale_rows(outputs: cute.Tensor, factors: cute.Tensor) -> None:
    for row in range(2):
        for column in range(cute.size(outputs, mode=[1])):
            outputs[row, column] = outputs[row, column] * factors[row]


def multiply(tiled_mma, accumulators, tCrA, tCrB, fresh: bool) -> None:
    """One wgmma group. fresh: the accumulators are overwritten. Of several A side by side, the
    products of all with B are added up."""
    warpgroup.fence()
    for k in range(cute.size(tCrA, mode=[2])):
        tiled_mma.set(warpgroup.Field.ACCUMULATE, not (fresh and k == 0))
        of_B = tCrB[None, None, k % cute.size(tCrB, mode=[2])]
        cute.gemm(tiled_mma, accumulators, tCrA[None, None, k], of_B, accumulators)
    warpgroup.commit_group()

"""What a consumer of the Hopper attention gradient does with each tile of queries."""

import itertools
from collections.abc import Iterator
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
from cutlass import Float32, Int32, Uint32, const_expr
from cutlass.cute.nvgpu import warpgroup

from ..common.attention.scores import Tile, rows_and_columns
from ..common.attention.softmax import LOG2_E, power_of_two
from ..common.attention.values import Values
from ..common.conversion import select
from ..common.threads import GROUP
from .sdpa_backward_drawn import DrawsAhead, Kept
from .sdpa_backward_plan import CONSUMERS, tile_layout, transposed_layout
from .sdpa_backward_rows import (
    RowTile,
    add_accumulators,
    add_by_copy,
    await_copy,
    store_accumulators,
    store_matrices,
)
from .sdpa_backward_work import Work

TOGETHER = 1  # the named barrier of all consumers
OWN = 2  # one for each, from this one on


class Fragments(NamedTuple):
    """What wgmma reads of shared memory: A and B of each product, (MMA, M or N, K, stages). A is
    None where it is in registers."""

    scores: tuple
    dp: tuple
    dv: tuple
    dk: tuple
    dq: tuple


class Sums(NamedTuple):
    """A thread's accumulators, and what is rounded of P and dS."""

    S: cute.Tensor
    dp: cute.Tensor
    dq: cute.Tensor
    dk: cute.Tensor
    dv: cute.Tensor
    P: cute.Tensor
    ds: cute.Tensor


class Turn(NamedTuple):
    """A tile of queries: the stages of Q, of dO and of dS, its head and its block.

    told: What the producer says of it; None: nothing, it is the next one.
    """

    q: pipeline.PipelineState
    do: pipeline.PipelineState
    ds: Int32
    head: Int32
    block: Int32
    told: Int32 | None = None


class Context(NamedTuple):
    """What does not change from one tile of queries to the next.

    local: Coordinates of a thread's scores, (query, key) or (key, query).
    p_tile, ds_tile: Where P and dS go, of the shape of scores, with stages.
    """

    consumer: Int32
    thread: Int32
    storage: object
    pipelines: tuple
    work: Work
    sequence: object
    values: Values
    space: object
    local: cute.Tensor
    p_tile: cute.Tensor | None
    ds_tile: cute.Tensor


class BackwardConsumer(DrawsAhead):
    """The consumers' part of `SdpaBackward`."""

    @cute.jit
    def _consume(
        self,
        consumer,
        storage,
        pipelines,
        mdK,
        mdV,
        work: Work,
        sequence,
        operands,
        space,
        shares,
        left,
    ):
        """One of two groups: dK and dV of a block of keys. left: An address, for a share of it."""
        values = self._values(operands)
        thread = cute.arch.thread_idx()[0] - GROUP
        fragments = self._fragments(storage, consumer)
        sums = self._sums()
        _clear(sums.dk)
        _clear(sums.dv)
        local = self.score_product.own_part(
            cute.make_identity_tensor(self.score_product.shape), thread
        )
        sP = None if self.transposed else self._score_tile_transposed(storage.P)
        context = Context(
            *(consumer, thread, storage, pipelines, work, sequence, values, space),
            *(rows_and_columns(local), sP, self._score_tile_transposed(storage.ds)),
        )
        if work.total > 0:
            self._await_keys(context)
            turn = self._first_turn(work, context)
            if const_expr("scores" in self.early):
                self._begin_scores(turn, fragments, sums, context)
                warpgroup.wait_group(0)
                if const_expr(self.searches):
                    while turn.told < self._as_told(work.total):
                        self._form(turn, fragments, sums, context)
                        turn = self._apply(turn, fragments, sums, context, goes_on=True)
                else:
                    for _ in cutlass.range(work.total - 1, unroll=1):
                        self._form(turn, fragments, sums, context)
                        turn = self._apply(turn, fragments, sums, context, goes_on=True)
                    self._form(turn, fragments, sums, context)
                    self._apply(turn, fragments, sums, context)
            elif const_expr(self.searches):
                while turn.told < self._as_told(work.total):
                    self._begin_scores(turn, fragments, sums, context)
                    self._form(turn, fragments, sums, context)
                    self._apply(turn, fragments, sums, context)
                    turn = self._next_turn(turn, context)
            else:
                for _ in cutlass.range(work.total, unroll=1):
                    self._begin_scores(turn, fragments, sums, context)
                    self._form(turn, fragments, sums, context)
                    self._apply(turn, fragments, sums, context)
                    turn = self._next_turn(turn, context)
        if const_expr(self.draws_ahead):
            sums.dv.store(sums.dv.load() * self.scores.kept_factor(values))
        end = work.key_rows
        if const_expr(self.shares_keys):
            # Both without a branch: of a share no rows are before the end.
            self._leave(sums, left, shares > 1, thread)
            end = select(shares > 1, Int32(0), end)
        self._write(sums, storage, mdK, mdV, work, end, sequence, values, thread)
        self._end_scores(context, mdK.shape[2] * shares)

    def _as_told(self, index: Int32) -> Int32:
        """What is told of a tile, at least, and more than of those before."""
        return index if self.scores.full is None else 2 * index

    def _found(self, turn: Turn, context) -> Turn:
        """With the tile that the producer has found for it, once its Q is there; behind the last
        one, with any that there is."""
        if not self.searches:
            return turn
        context.pipelines[2].consumer_wait(turn.q)
        place = self._place_found(context.storage, turn.q.count)
        told = cute.arch.make_warp_uniform(place[0])
        index = cutlass.min(self._index_told(told), context.work.total - 1)
        head, block = context.work.place(index)
        return turn._replace(head=head, block=block, told=told)

    def _first_turn(self, work: Work, context) -> Turn:
        consumer = pipeline.PipelineUserType.Consumer
        q = pipeline.make_pipeline_state(consumer, self.q_stages)
        do = pipeline.make_pipeline_state(consumer, self.do_stages)
        return self._found(Turn(q, do, Int32(0), work.first_head, work.first), context)

    def _next_turn(self, turn: Turn, context) -> Turn:
        q, do = turn.q.clone(), turn.do.clone()
        q.advance()
        do.advance()
        place = context.work.following(turn.head, turn.block)
        return self._found(Turn(q, do, (turn.ds + 1) % self.ds_stages, *place), context)

    def _form(self, turn: Turn, fragments, sums, context) -> None:
        """P and dS of a tile; dS, and P if it has to be, go to shared memory.

        S is there, or in flight. dV is left in flight if it starts early.
        """
        work = context.work
        pipeline_do = context.pipelines[3]
        pipeline_do.consumer_wait(turn.do)
        memory = context.storage.do
        self._clear_queries(context, memory, self.head_dim_v, self.do_stages, turn.do, turn.block)
        self._issue(self.score_product, sums.dp, fragments.dp, turn.do.index, True)
        if "scores" not in self.early:
            warpgroup.wait_group(1)

        products = None
        if self.has_slopes:
            products = cute.make_rmem_tensor_like(sums.S)
            products.store(sums.S.load())
        tile = Tile(
            *(rows_and_columns(sums.S), context.local, turn.block * self.tile_m, work.first_key),
            *(work.batch, turn.head, self.transposed),
        )
        lses = self._numbers(context, context.storage.lse, turn.q)
        self._powers(self._with_bias(tile, turn, context), turn, lses, context)
        kept = self._round_powers(tile, turn, sums, context)
        if self.ds_stages == 1:
            self._meet()
        if not self.transposed:
            self._store(sums.P, context.p_tile, turn, context)
        if "values" in self.early:
            self._issue_values(turn, fragments, sums)
            warpgroup.wait_group(1)
        else:
            warpgroup.wait_group(0)
        deltas = self._numbers(context, context.storage.delta, turn.do)
        self._gradients(tile, sums, deltas, products, kept, context)
        self._store(sums.ds, context.ds_tile, turn, context)
        cute.arch.fence_view_async_shared()
        if self.staged:
            await_copy()
        self._await_scores(context)
        self._meet()
        self._write_scores(turn, context)

    # What scores have beside: nothing comes with the queries, and dS goes nowhere else -----

    def _with_bias(self, tile: Tile, turn: Turn, context) -> Tile:
        return tile

    def _await_scores(self, context) -> None:
        """All dS but the last one may be written over, by those who then meet."""

    def _write_scores(self, turn: Turn, context) -> None:
        """dS of a tile, which all have met to find in shared memory."""

    def _end_scores(self, context, key_heads: Int32) -> None:
        """Behind all tiles. key_heads: That heads of queries are dealt out to."""

    # Turns -------------------------------------------------------------------------------

    def _store(self, rounded, tiles, turn: Turn, context) -> None:
        tile = tiles[None, None, turn.ds]
        store_matrices(self.score_product, rounded, tile, context.thread, True)

    def _apply(self, turn: Turn, fragments, sums, context, *, goes_on: bool = False) -> Turn | None:
        """What a tile adds to dV, dQ and dK. Returns the next one, if S of that is formed
        meanwhile: goes_on."""
        _, _, pipeline_q, pipeline_do = context.pipelines
        if "values" not in self.early:
            self._issue_values(turn, fragments, sums)
        self._issue_dq(0, turn, fragments, sums)
        stages = (turn.ds, turn.q.index)
        self._issue_key_product(self.dk_product, sums.dk, sums.ds, fragments.dk, *stages)
        warpgroup.wait_group(1)
        pipeline_do.consumer_release(turn.do)
        self._add_dq(0, turn, sums, context)
        following = None
        if goes_on:
            following = self._next_turn(turn, context)
            self._begin_scores(following, fragments, sums, context)
        for part in range(1, self.dq_product.parts):
            self._issue_dq(part, turn, fragments, sums)
            warpgroup.wait_group(0)
            self._add_dq(part, turn, sums, context)
        warpgroup.wait_group(0)
        pipeline_q.consumer_release(turn.q)
        return following

    def _add_dq(self, part: int, turn: Turn, sums, context) -> None:
        first = context.sequence.first_query
        tile = self.tile_index(context.space, context.work.batch, turn.head, first, turn.block)
        address = self.dq_address(context.space, tile)
        if part == 0:
            self._await_turn(context.consumer, context.storage, turn.q.count)
        if self.staged:
            barrier_id = OWN + context.consumer
            add_by_copy(sums.dq, address, context.storage.dq, context.thread, barrier_id)
        else:
            add_accumulators(sums.dq, address, context.thread, self.dq_product.parts, part)
        if part == self.dq_product.parts - 1:
            self._tell_added(context.consumer, context.storage)

    # Products ----------------------------------------------------------------------------

    def _sums(self) -> Sums:
        S = self.score_product.accumulators()
        return Sums(
            *(S, self.score_product.accumulators(), self.dq_product.accumulators()),
            *(self.dk_product.accumulators(), self.dv_product.accumulators()),
            *(cute.make_rmem_tensor_like(S, self.element_type) for _ in range(2)),
        )

    def _tile(self, memory, rows: int, columns: int, stages: int = 1) -> cute.Tensor:
        """(rows, columns, stages) of Q, K, V or dO."""
        layout = tile_layout(self.element_type, rows, columns, stages, self.span(columns))
        return memory.get_tensor(layout.outer, swizzle=layout.inner)

    def _transposed(self, memory, rows: int, columns: int, stages: int = 1) -> cute.Tensor:
        """(columns, rows, stages) of the same."""
        layout = transposed_layout(self.element_type, rows, columns, stages, self.span(columns))
        return memory.get_tensor(layout.outer, swizzle=layout.inner)

    def _score_tile(self, memory) -> cute.Tensor:
        """P or dS: (columns, rows, stages) of scores, rows side by side."""
        rows, columns = self.score_product.shape
        layout = tile_layout(self.element_type, columns, rows, self.ds_stages)
        return memory.get_tensor(layout.outer, swizzle=layout.inner)

    def _score_tile_transposed(self, memory) -> cute.Tensor:
        """The same of the shape of scores."""
        rows, columns = self.score_product.shape
        layout = transposed_layout(self.element_type, columns, rows, self.ds_stages)
        return memory.get_tensor(layout.outer, swizzle=layout.inner)

    def _fragments(self, storage, consumer) -> Fragments:
        m, n, d, e = self.tile_m, self.tile_n, self.head_dim, self.head_dim_v
        sK, sV = self._tile(storage.K, n, d), self._tile(storage.V, n, e)
        sQ = self._tile(storage.Q, m, d, self.q_stages)
        sdO = self._tile(storage.do, m, e, self.do_stages)
        sKt = self._transposed(storage.K, n, d)
        sQt = self._transposed(storage.Q, m, d, self.q_stages)
        sdOt = self._transposed(storage.do, m, e, self.do_stages)
        dS = self._score_tile(storage.ds)

        def operands(product, a, b):
            a = None if product.from_registers else product.operand_a(a, consumer)
            return a, product.operand_b(b, consumer)

        if self.transposed:
            return Fragments(
                operands(self.score_product, sK, sQ),
                operands(self.score_product, sV, sdO),
                operands(self.dv_product, None, sdOt),
                operands(self.dk_product, None, sQt),
                operands(self.dq_product, *((sKt, dS) if self.swaps_dq else (dS, sKt))),
            )
        P = self._score_tile(storage.P)
        dSt = self._score_tile_transposed(storage.ds)
        return Fragments(
            operands(self.score_product, sQ, sK),
            operands(self.score_product, sdO, sV),
            operands(self.dv_product, *((sdOt, P) if self.swaps_dkv else (P, sdOt))),
            operands(self.dk_product, *((sQt, dS) if self.swaps_dkv else (dS, sQt))),
            operands(self.dq_product, dSt, sKt),
        )

    def _begin_scores(self, turn: Turn, fragments, sums, context) -> None:
        _, _, pipeline_q, _ = context.pipelines
        pipeline_q.consumer_wait(turn.q)
        memory = context.storage.Q
        self._clear_queries(context, memory, self.head_dim, self.q_stages, turn.q, turn.block)
        self._issue(self.score_product, sums.S, fragments.scores, turn.q.index, True)

    def _issue_values(self, turn: Turn, fragments, sums) -> None:
        stages = (turn.ds, turn.do.index)
        self._issue_key_product(self.dv_product, sums.dv, sums.P, fragments.dv, *stages)

    def _issue(self, product, result, operands, stage, fresh: bool) -> None:
        """Of keys, which have one stage, and queries."""
        stages = (0, stage) if self.transposed else (stage, 0)
        a, b = (_at(operand, i) for operand, i in zip(operands, stages, strict=True))
        product.issue(result, a, b, fresh)

    def _issue_key_product(self, product, result, factors, operands, ds, stage) -> None:
        """Of P or dS, and rows of queries."""
        a, b = operands
        if self.transposed:
            product.issue(result, _operand(factors), _at(b, stage), fresh=False)
        else:
            stages = (stage, ds) if self.swaps_dkv else (ds, stage)
            product.issue(result, _at(a, stages[0]), _at(b, stages[1]), fresh=False)

    def _issue_dq(self, part: int, turn: Turn, fragments, sums) -> None:
        a, b = fragments.dq
        stages = (0, turn.ds) if self.swaps_dq else (turn.ds, 0)
        self.dq_product.issue(sums.dq, _at(a, stages[0]), _at(b, stages[1]), True, part)

    def _meet(self) -> None:
        cute.arch.barrier(barrier_id=TOGETHER, number_of_threads=CONSUMERS * GROUP)

    # Elements ----------------------------------------------------------------------------

    def _numbers(self, context, memory, state) -> "_RowNumbers":
        start = memory.data_ptr().toint() + state.index * (self.tile_m * 4)
        return _RowNumbers(Int32(start), context.thread, self.transposed)

    def _powers(self, tile: Tile, turn: Turn, lses: "_RowNumbers", context) -> None:
        """Products into probabilities."""
        values = context.values
        multiplier = Float32(LOG2_E)
        if self.scores.plain:
            multiplier = values.number("scale") * LOG2_E
        else:
            self.scores.change(tile, values)
        self._hide(tile, turn, context)
        for row, column, lse in lses.of(tile):
            exponent = cute.math.fma(tile.values[row, column], multiplier, -lse)
            tile.values[row, column] = power_of_two(exponent)

    def _hide(self, tile: Tile, turn: Turn, context) -> None:
        of_tile = tile.values, tile.local, tile.first_query, tile.head
        if turn.told is not None and self.scores.full is not None:
            self._hide_unless_full(*of_tile, turn.told % 2 != 0, context)
        elif self.hides_by_table or self.scores.functions.visible is not None:
            self._hide_all(tile, context)
        else:
            self._hide_in_part(*of_tile, context)

    @cute.jit
    def _hide_unless_full(self, scores, local, first_query, head, full, context: Context):
        if full:
            self._hide_in_part(scores, local, first_query, head, context)
        else:
            self._hide_all(self._tile_of(scores, local, first_query, head, context), context)

    @cute.jit
    def _hide_in_part(self, scores, local, first_query, head, context: Context):
        """By a band, unless the queries see all keys."""
        blocks = context.work.blocks
        block = first_query // self.tile_m
        if (block < blocks.full_begin) | (block >= blocks.full_end):
            tile = self._tile_of(scores, local, first_query, head, context)
            of_sequence = context.sequence, context.values
            self.scores.hide(tile, *of_sequence, by_table=False, by_functions=False)

    def _tile_of(self, scores, local, first_query, head, context) -> Tile:
        work = context.work
        place = first_query, work.first_key, work.batch, head
        return Tile(scores, local, *place, self.transposed)

    def _hide_all(self, tile: Tile, context) -> None:
        by_table = self.hides_by_table
        self.scores.hide(tile, context.sequence, context.values, by_table=by_table)

    def _round_powers(self, tile: Tile, turn: Turn, sums: Sums, context) -> Kept | None:
        """What values are multiplied with. Returns what is kept, where some are dropped."""
        if not self.scores.drops:
            _round(sums.S, sums.P)
            return None
        powers = cute.make_rmem_tensor_like(sums.S)
        found = self._drop(tile, rows_and_columns(powers), turn.q.count, context)
        _round(powers, sums.P)
        return found

    def _gradients(
        self, tile: Tile, sums: Sums, deltas: "_RowNumbers", products, kept: Kept | None, context
    ) -> None:
        """dS of scale · products, in place of dP, and rounded."""
        powers, gradients = tile.values, rows_and_columns(sums.dp)
        for row, column, delta in deltas.of(tile):
            at = row, column
            if kept is None:
                found = powers[at] * (gradients[at] - delta)
            else:
                found = kept.gradient(at, powers[at], gradients[at], delta)
            gradients[at] = found
        if products is not None:
            products = rows_and_columns(products)
            self.scores.multiply_by_slopes(tile.of(gradients), products, context.values)
        _round(sums.dp, sums.ds)

    # What is behind the end --------------------------------------------------------------

    def _await_keys(self, context) -> None:
        one = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, 1)
        for i in range(2):
            context.pipelines[i].consumer_wait(one)
        if self.keys_end_early:
            left = context.sequence.keys - context.work.first_key
            storage = context.storage
            self._clear(context.thread, self._tile(storage.K, self.tile_n, self.head_dim), 0, left)
            self._clear(
                context.thread, self._tile(storage.V, self.tile_n, self.head_dim_v), 0, left
            )

    def _clear_queries(self, context, memory, columns: int, stages: int, state, block) -> None:
        if self.queries_end_early:
            tile = self._tile(memory, self.tile_m, columns, stages)
            left = context.sequence.queries - block * self.tile_m
            self._clear(context.thread, tile, state.index, left)

    @cute.jit
    def _clear(self, thread, tiles, stage, first):
        """Rows from `first` on become 0: they may hold what is not a number."""
        rows, columns = tiles.shape[:2]
        tile = tiles[None, None, stage]
        if first < cute.size(rows):
            for i in cutlass.range(
                thread + first * cute.size(columns),
                cute.size(rows) * cute.size(columns),
                CONSUMERS * GROUP,
                unroll=1,
            ):
                tile[i // cute.size(columns), i % cute.size(columns)] = self.element_type(0.0)
            cute.arch.fence_view_async_shared()
            self._meet()

    # What is written ---------------------------------------------------------------------

    def _leave(self, sums: Sums, address, is_shared, thread) -> None:
        """dK and dV in float32, for who adds them up."""
        store_accumulators(sums.dk, address, is_shared, thread)
        store_accumulators(sums.dv, address + self.share_of_dk_bytes, is_shared, thread)

    @cute.jit
    def _write(self, sums: Sums, storage, mdK, mdV, work: Work, end, sequence, values, thread):
        """dK and dV of keys before an end, by way of where K and V were."""
        batch = Int32(0) if const_expr(self.packed) else work.batch
        dK = RowTile(self, self.tile_n, self.head_dim)
        dV = RowTile(self, self.tile_n, self.head_dim_v)
        swapped = self.swaps_dkv
        if const_expr(self.staged):
            await_copy()
        self._meet()
        dK.put(storage.K, self.dk_product, sums.dk, values.number("scale"), thread, swapped)
        dV.put(storage.V, self.dv_product, sums.dv, Float32(1.0), thread, swapped)
        self._meet()
        mdK, mdV = (
            cute.domain_offset((sequence.first_key, 0), m[None, None, work.key_head, batch])
            for m in (mdK, mdV)
        )
        dK.copy_out(storage.K, mdK, work.first_key, end, thread)
        dV.copy_out(storage.V, mdV, work.first_key, end, thread)


def _at(fragment: cute.Tensor, stage) -> cute.Tensor:
    return fragment[None, None, None, stage]


def _operand(rounded: cute.Tensor) -> cute.Tensor:
    """Accumulators, rounded, as A of the next product: 16 of their columns are a k block of it."""
    blocks = cute.size(rounded) // 8
    layout = cute.make_layout(((2, 2, 2), 1, blocks), stride=((1, 2, 4), 0, 8))
    return cute.make_tensor(rounded.iterator, layout)


def _clear(accumulators: cute.Tensor) -> None:
    """Here, and not where they are first added to."""
    flat = cute.make_tensor(accumulators.iterator, cute.make_layout(cute.size(accumulators)))
    for i in range(cute.size(flat)):
        flat[i] = cute.arch.inline_ptx("mov.f32 {$w0}, 0f00000000;", write_only_types=[Float32])


def _round(numbers: cute.Tensor, rounded: cute.Tensor) -> None:
    """Here, and not behind the fence before the wgmma that reads them from registers."""
    rounded.store(numbers.load().to(rounded.element_type))
    words = cute.recast_tensor(rounded, Uint32)
    for i in range(cute.size(words)):
        words[i] = cute.arch.inline_ptx(
            "mov.b32 {$w0}, {$r0};", write_only_types=[Uint32], read_only_args=[words[i]]
        )


class _RowNumbers:
    """One of every row of queries, in shared memory from an address on."""

    def __init__(self, address: Int32, thread: Int32, transposed: bool):
        lane = thread % 32
        own = lane % 4 * 2 if transposed else thread % GROUP // 32 * 16 + lane // 4
        self.address = address + own * 4
        self.transposed = transposed

    def of(self, tile: Tile) -> Iterator:
        """(row, column, number) of the scores of a thread."""
        rows, columns = tile.extents
        if self.transposed:
            for first in range(0, columns, 2):
                pair = self._load(first * 4 * 4, ".v2", 2)
                for i, row in itertools.product(range(2), range(rows)):
                    yield row, first + i, pair[i]
        else:
            for row in range(rows):
                number = self._load(row * 8 * 4, "", 1)
                for column in range(columns):
                    yield row, column, number

    def _load(self, offset: int, vector: str, count: int):
        names = ", ".join(f"{{$w{i}}}" for i in range(count))
        return cute.arch.inline_ptx(
            f"ld.shared{vector}.f32 {f'{{{names}}}' if vector else names}, [{{$r0}} + {offset}];",
            write_only_types=[Float32] * count,
            read_only_args=[self.address],
        )

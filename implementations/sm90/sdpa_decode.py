"""Attention of few queries to many keys, for Hopper: keys are cut into parts."""

import math

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, const_expr

from ..common.attention.behind import behind_last, fill_behind
from ..common.attention.blocks import Hidden
from ..common.attention.modes import attention_modes
from ..common.attention.scores import Place, Scores, Tile, rows_and_columns
from ..common.attention.sequences import Sequence, keys_seen, sequence_of
from ..common.attention.softmax import Finished, finished
from ..common.attention.statistics import (
    fill_statistics_behind,
    statistics_rows,
    where_seen,
    write_statistics,
)
from ..common.attention.values import Values
from ..common.conversion import select
from ..common.threads import GROUP
from ..common.tile_order import Divisor
from ..common.work_split import COUNTER_BYTES
from .sdpa_ahead import AsksAhead
from .sdpa_forward import SdpaForward
from .sdpa_output import OWN
from .sdpa_packed import blocks_of_packed
from .sdpa_pages import RowLoads
from .sdpa_parts import AddsUpParts, DecodeTiles, query_and_head
from .sdpa_rows import load_vector, store_row
from .sdpa_schedule import Scheduled
from .sdpa_split import Size
from .sdpa_tiles import Work
from .sdpa_workspace import first_place, part_bytes


class SdpaDecode(Scheduled, AddsUpParts, AsksAhead, RowLoads, SdpaForward):
    """The same for few queries: the rows of a tile are the queries of all heads that share a
    head of keys, and its keys are cut into parts, so that all multiprocessors read some. They are
    added up in their order, see `AddsUpParts`.

    K and V may be pages: (pages, H_kv, page_size, D), page `page_table[b, i]` has keys
    i · page_size and following of sequence b. Queries may be packed, see `TakesPacked`.

    page_size: None, or a divisor or multiple of `tile[1]` and a multiple of 8.
    """

    tiles = DecodeTiles
    of_one_head = False

    def __init__(
        self,
        head_dims: tuple[int, int],
        tile: tuple[int, int],
        stages: int,
        element_type: type[cutlass.Numeric],
        scores: Scores,
        *,
        page_size: int | None,
        **options,
    ):
        super().__init__(
            *(head_dims, tile, stages, element_type, scores),
            longest_first=False,
            page_size=page_size,
            **options,
        )
        self.output_memory = "none"  # it is not staged
        #: Of a row of a part: the log-sum-exp, then the largest score if it is asked for.
        self.numbers = 1 + any(name in scores.names for name in ("score_max", "score_sum_exp"))

    @cute.jit
    def with_operands(
        self,
        mQ: cute.Tensor,
        mK: cute.Tensor,
        mV: cute.Tensor,
        mO: cute.Tensor,
        operands,
        workspace: Int64,
        multiprocessors: Int32,
        stream: cuda.CUstream,
    ):
        """operands: a tuple of what the scores are called by; workspace: an address, of counters
        that are zero, then of room for parts."""
        values = Values(self.scores.names, operands)
        sequences, queries = self._sequences(mQ, values)
        mQ, mK, mV, mO = (attention_modes(tensor) for tensor in (mQ, mK, mV, mO))
        tma_k, tK = self._tma_rows(mK, self.head_dim)
        tma_v, tV = self._tma_of_values(mV)

        heads, key_heads = mQ.shape[2], mK.shape[2]
        group = heads // key_heads
        rows = queries * group
        blocks, batches = cute.ceil_div(rows, self.tile_m), sequences
        joined = Boolean(False)
        if const_expr(self.packed):
            blocks, batches, joined = blocks_of_packed(
                blocks, sequences, mQ.shape[0] * group, self.tile_m
            )
        tiles = blocks * key_heads * batches
        row_blocks = cutlass.max(blocks, 1)
        if const_expr(self.scheduled):
            parts, total = Int32(1), tiles + self.most_parts
            behind = self._are_many(rows)
        else:
            keys = cute.ceil_div(self._most_keys(mK, values), self.tile_n)
            each = cutlass.max(tiles // cutlass.max(key_heads * sequences, 1), 1)
            size = Size(cutlass.max(tiles, 1), each, keys, multiprocessors * self.resident)
            parts = self._parts(size, rows)
            total = tiles * parts
            behind = (parts > 1) & self._are_many(rows)
        partial = workspace + COUNTER_BYTES
        of_part = part_bytes(self.tile_m, self.head_dim_v, self.numbers)
        schedule = partial + self.most_parts * of_part
        # A kernel that is launched takes them over.
        of_schedule, tiles, of_sums = (
            self.tiles(
                *(blocks, key_heads, total, Int32(1), workspace),
                *(parts, Divisor(group), rows, partial, behind),
                *(joined, blocks * batches, schedule, Int32(0)),
                *map(Divisor, (parts, row_blocks, cutlass.max(key_heads, 1))),
            )
            for _ in range(3)
        )
        self._launch_schedule(mQ, mK, operands, of_schedule, multiprocessors, stream)
        self._launch(
            *(None, mQ, tma_k, tK, tma_v, tV, mO),
            *(self._shared_layouts(), operands, tiles, multiprocessors, stream),
        )
        if const_expr(self.scheduled):
            self._launch_scheduled_sums(mQ, mK, mO, operands, of_sums, stream)
        else:
            self._launch_sums(mQ, mK, mO, operands, of_sums, stream)

    def _tma_of_values(self, mV: cute.Tensor) -> tuple:
        return self._tma_rows(mV, self.head_dim_v)

    def _work(self, tiles: DecodeTiles, tile: Int32, values: Values, mQ, mK) -> Work:
        return self._part_of(tiles, tile, values, mQ, mK)

    def _part_of(self, tiles: DecodeTiles, tile: Int32, values: Values, mQ, mK) -> Work:
        place, parts = self._item(tiles, tile, values)
        sequence = sequence_of(values, place.batch, mQ.shape[0], self._keys(mK, values))
        first, last, blocks = self._seen(sequence, place.query, tiles)
        count, part = blocks.end - blocks.begin, place.key
        if self.scheduled:
            each, further = count // parts, count % parts
        else:
            each, further = divmod(count, tiles.by_part)
        begin = blocks.begin + each * part + cutlass.min(part, further)
        end = begin + each + select(part < further, Int32(1), Int32(0))
        full_begin = cutlass.min(cutlass.max(blocks.full_begin, begin), end)
        full_end = cutlass.min(cutlass.max(blocks.full_end, full_begin), end)
        blocks = type(blocks)(begin, end, full_begin, full_end)
        last_query = cutlass.min(last // tiles.group, sequence.queries - 1)
        heads = place.head * tiles.group.divisor, tiles.group.divisor
        work = Work(tile, place, sequence, blocks, parts)
        return self._searched(work, heads, first, last_query, values)

    def _seen(self, sequence: Sequence, row: Int32, tiles: DecodeTiles) -> tuple:
        """(the first query and last row of those from a row on, blocks of keys that they see)"""
        first = row // tiles.group
        last = cutlass.min(row + self.tile_m, self._rows(sequence, tiles)) - 1
        if self.packed:
            last = cutlass.max(last, 0)
        blocks = keys_seen(sequence, first, last // tiles.group - first + 1, self.tile_n)
        end = select(first < sequence.queries, blocks.end, blocks.begin)
        return first, last, blocks._replace(end=end)

    # Loads -------------------------------------------------------------------------------

    @cute.jit
    def _load_tile(
        self,
        tma_q,
        mQ,
        sQ,
        tma_k,
        mK,
        sK,
        tma_v,
        mV,
        sV,
        pipelines,
        states,
        work: Work,
        values,
    ):
        place, sequence, blocks = work.place, work.sequence, work.blocks
        _, pipeline_k, pipeline_v = pipelines
        q_state, k_state, v_state = states
        first_key = self._first_key(sequence)
        tKsK, tKgK = self._partitioned(tma_k, mK, sK, self.head_dim, place.head, first_key)
        tVsV, tVgV = self._partitioned(tma_v, mV, sV, self.head_dim_v, place.head, first_key)
        if blocks.end > blocks.begin:
            last, batch = blocks.end - 1, self._batch_of_keys(place)
            of_batch = (place.batch, sequence, values)
            pages = self._pages_of(self._no_pages(), last, *of_batch)
            self._load_block(tma_k, tKgK, tKsK, last, pages, pipeline_k, k_state, batch)
            k_state.advance()
            if const_expr(self.searches):
                seen = self._following(work.seen, work, values)
                while seen.block >= blocks.begin:
                    own = pages
                    pages = self._pages_of(pages, seen.block, *of_batch)
                    self._load_block(
                        tma_k, tKgK, tKsK, seen.block, pages, pipeline_k, k_state, batch
                    )
                    self._load_block(tma_v, tVgV, tVsV, last, own, pipeline_v, v_state, batch)
                    k_state.advance()
                    v_state.advance()
                    last = seen.block
                    seen = self._following(seen, work, values)
            else:
                for i in cutlass.range(last - blocks.begin, unroll=1):
                    below, own = last - 1 - i, pages
                    pages = self._pages_of(pages, below, *of_batch)
                    self._load_block(tma_k, tKgK, tKsK, below, pages, pipeline_k, k_state, batch)
                    self._load_block(tma_v, tVgV, tVsV, below + 1, own, pipeline_v, v_state, batch)
                    k_state.advance()
                    v_state.advance()
                last = blocks.begin
            self._load_block(tma_v, tVgV, tVsV, last, pages, pipeline_v, v_state, batch)
            v_state.advance()
            q_state.advance()
        return q_state, k_state, v_state

    def _await_queries(self, thread, mQ, sQ, pipeline_q, state, work: Work, tiles, factors) -> None:
        """The consumers load them: heads of queries have rows in turns."""
        # Other warps may still multiply those of the tile before.
        self._meet(thread // GROUP)
        self._load_queries(thread, mQ, sQ, work, tiles, factors)

    def _meet(self, consumer) -> None:
        """Of the warps that multiply the same queries."""
        cute.arch.barrier(barrier_id=OWN + consumer, number_of_threads=GROUP)

    def _release_queries(self, pipeline_q, state) -> None:
        """Nobody waits."""

    @cute.jit
    def _load_queries(self, thread, mQ, sQ, work: Work, tiles: DecodeTiles, factors):
        """Its share of a tile's rows by each group. Rows behind the last are that one again."""
        lane, consumer = thread % GROUP, thread // GROUP
        vector, columns = 128 // self.element_type.width, self._slab(self.head_dim)
        across = columns // vector
        atom = cute.make_copy_atom(
            cute.nvgpu.CopyUniversalOp(), self.element_type, num_bits_per_copy=128
        )
        threads = cute.make_ordered_layout((GROUP // across, across), order=(1, 0))
        copy = cute.make_tiled_copy_tv(atom, threads, cute.make_layout((1, vector)))
        copy = copy.get_slice(lane)
        place, slabs = work.place, self.head_dim // columns
        rows = self.tile_m // self.consumers
        at_once = rows * across // GROUP
        # All loads before the first of them is waited for.
        loaded = cute.make_rmem_tensor((vector, at_once, slabs), self.element_type)
        first = place.query + consumer * rows + lane // across
        last = self._rows(work.sequence, tiles) - 1
        for i in cutlass.range_constexpr(at_once):
            row = cutlass.min(first + i * (GROUP // across), last)
            query, head = query_and_head(place, row - place.query, tiles)
            source = self._row(mQ, query, head, work)
            for slab in cutlass.range_constexpr(slabs):
                column = slab * columns + lane % across * vector
                column = cutlass.min(column, mQ.shape[1] - vector)
                load_vector(source, column, loaded[None, i, slab])
        for slab in cutlass.range_constexpr(slabs):
            target = cute.local_tile(sQ, (rows, columns, 1), (consumer, slab, 0))
            tQsQ = copy.partition_D(target[None, None, 0])
            exists = slab * columns + lane % across * vector < mQ.shape[1]
            for i in cutlass.range_constexpr(at_once):
                words = cute.recast_tensor(loaded[None, i, slab], Int32)
                for j in cutlass.range_constexpr(cute.size(words)):
                    words[j] = select(exists, words[j], Int32(0))
                cute.copy(atom, loaded[None, i, slab], tQsQ[None, i, 0])
        cute.arch.fence_view_async_shared()
        self._meet(consumer)

    # Scores and results ------------------------------------------------------------------

    def _group(self, tiles: DecodeTiles) -> Int32:
        return tiles.group.divisor

    def _score(self, tile: Tile, sequence, values: Values, tiles, hidden: bool | Hidden) -> None:
        by_band = hidden and not self.scores.hides_anywhere
        super()._score(tile, sequence, values, tiles, False if by_band else hidden)
        if by_band:
            self._hide(tile, sequence, tiles.group)

    def _hide(self, tile: Tile, sequence, group: Divisor) -> None:
        """-inf where a band hides a key."""
        rows, columns = tile.extents
        row_of_thread, key = tile.first
        for row in range(rows):
            query = (row_of_thread + tile.offset(row, 0)[0]) // group
            last = sequence.keys - 1
            if sequence.high is not None:
                last = cutlass.min(last, query + sequence.high)
            for column in range(columns):
                _, other = tile.offset(row, column)
                hidden = last - key < other
                if sequence.low is not None:
                    hidden = hidden | (query + sequence.low - key > other)
                score = tile.values[row, column]
                tile.values[row, column] = select(hidden, Float32(-math.inf), score)

    def _staged_output(self, storage, layout):
        """Instead: whether this block completes a tile."""
        return storage.flag.data_ptr()

    @cute.jit
    def _write(self, consumer, thread, tOrO, memory, mO, softmax, work: Work, values, tiles):
        """The rows of a tile, or of a part of it."""
        own, first = self._own_place(consumer, thread)
        outputs = rows_and_columns(tOrO)
        part, numbers = self._own_part(consumer, memory, work, tiles)
        end = self._rows(work.sequence, tiles)
        for i in cutlass.range_constexpr(2):
            local = own + 8 * i
            query, head = query_and_head(work.place, local, tiles)
            sink = self._sink(values, head)
            done = finished(softmax, i, sink)
            exists = query < work.sequence.queries
            if const_expr(sink is not None):
                done = _either(work.parts == 1, done, finished(softmax, i, None))
            done = where_seen(exists, done)
            if work.place.query + local < end:
                factor = self._factor(done.factor, values, work.place, tiles)
                scale = select(exists, factor, Float32(0.0))
                if work.parts > 1:
                    store_row(outputs, i, scale, exists, part[local, None], first, thread)
                    if self._tells(consumer, thread):
                        found = done.lse, done.score_max
                        for j in cutlass.range_constexpr(self.numbers):
                            numbers[local, j] = found[j]
                else:
                    row = self._row(mO, query, head, work)
                    store_row(outputs, i, scale, exists, row, first, thread)
                    rows = statistics_rows(values, work.place.batch, head, work.sequence)
                    if self._tells(consumer, thread):
                        write_statistics(rows, query, done)
        if const_expr(self.packed):
            self._fill_behind(thread, mO, work.place, values, tiles)
        if work.parts > 1:
            self._combine(thread, memory, mO, work, values, tiles)

    @cute.jit
    def _fill_behind(self, thread, mO, place: Place, values, tiles: DecodeTiles):
        """By the first parts of the tiles of the last sequence."""
        starts = values["cu_seqlens_q"]
        last = Int32(starts.shape[0]) - 2
        if (place.key == 0) & (place.batch == last):
            blocks = tiles.blocks
            if tiles.joined:
                rows = starts[last] * tiles.group.divisor
                blocks = blocks - first_place(rows, last, self.tile_m)
            if const_expr(self.scheduled):
                rows = (starts[last + 1] - starts[last]) * tiles.group.divisor
                blocks = cutlass.max(cute.ceil_div(rows, self.tile_m), 1)
            behind = behind_last(
                *(starts, last, mO.shape[0], place.query // self.tile_m, blocks),
                *(thread, self.consumers * GROUP),
            )
            for i in cutlass.range(tiles.group.divisor, unroll=1):
                head = place.head * tiles.group.divisor + i
                fill_behind(mO[None, None, head, 0], behind)
                fill_statistics_behind(values, head, behind)

    def _own_place(self, consumer, thread) -> tuple:
        """The first row and column of O that a thread has."""
        return thread // 32 * 16 + thread % 32 // 4, 0

    def _tells(self, consumer, thread) -> Boolean:
        """Whether a thread tells of the rows that it has."""
        return thread % 4 == 0

    def _own_part(self, consumer, memory, work: Work, tiles) -> tuple:
        """Where the rows of this block are to lie, and their numbers."""
        return self._parts_of_tile(work, tiles).at(work.place.key)


def _either(condition, one: Finished, other: Finished) -> Finished:
    return Finished(*(select(condition, a, b) for a, b in zip(one, other, strict=True)))

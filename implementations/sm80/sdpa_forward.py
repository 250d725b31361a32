"""Scaled dot-product attention for every GPU from Ampere on."""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int64, Numeric, const_expr
from cutlass.memory import SmemAllocator

from ..common.attention.behind import behind_last, fill_behind
from ..common.attention.scores import Scores, Tile, rows_and_columns
from ..common.attention.sequences import keys_seen, sequence_of
from ..common.attention.softmax import LOG2_E, finished, softmax_of, update
from ..common.attention.statistics import (
    fill_statistics_behind,
    statistics_of,
    where_seen,
    write_statistics,
)
from ..common.attention.values import Values
from ..common.conversion import select
from .sdpa_tiles import (
    THREADS,
    Extents,
    Products,
    SharedTile,
    Tiles,
    arrived,
    commit,
    extents_of,
    matrix_of,
    paged_matrix_of,
)


class SdpaForward:
    """out = softmax(scores(Q · Kᵀ)) · V with cp.async, ldmatrix and mma.sync.

    A block has some queries of a head, and visits the keys that they see, block by block. All four
    warps, each with rows of its own, play the same roles:

    role      does                                                     waits on
    --------  -------------------------------------------------------  ------------------------
    fetch     cp.async of a block of V and of a later one of K         what it replaces is read
    score     S = Q · Kᵀ; changes and hides scores                     K of the block
    softmax   powers of S, which stay in registers                     own registers
    sum       O = factor · O + P · V                                   V of the block
    write     O → elements → shared memory, where Q was → vectors      own rows

    Shared memory: Q, `stages` blocks of K, as many of V.

    Q (B, H, S, D), K (B, H_kv, T, D), V (B, H_kv, T, D_v), out (B, H, S, D_v), D_v side by side;
    packed: (T, H, D), in the same order; pages: K and V (pages, H_kv, page_size, D). The rest is in
    a tuple, in the order of `scores.names`.

    Args:
        head_dims: That there is room for, of Q and K, of V; multiples of 64.
        tile: (queries, keys) of a block: multiples of 64, of 16.
        stages: Blocks of keys in shared memory.
        page_size: Rows of a page of K and V; None: they have no pages.
        aligned: Whether all rows begin at multiples of 16 bytes.
    """

    threads = THREADS

    def __init__(
        self,
        head_dims: tuple[int, int],
        tile: tuple[int, int],
        stages: int,
        element_type: type[Numeric],
        scores: Scores,
        *,
        page_size: int | None = None,
        aligned: bool = True,
    ):
        self.tile = tile
        self.stages = stages
        self.element_type = element_type
        self.scores = scores
        self.page_size = page_size
        queries, keys = tile
        wide, wide_v = head_dims
        self.q = Tiles(queries, wide, element_type, aligned)
        self.k = Tiles(keys, wide, element_type, aligned, stages)
        self.v = Tiles(keys, wide_v, element_type, aligned, stages)
        self.out = Tiles(queries, wide_v, element_type, aligned)

    @property
    def shared_memory_bytes(self) -> int:
        return max(self.q.bytes, self.out.bytes) + self.k.bytes + self.v.bytes

    @cute.jit
    def with_operands(
        self,
        mQ: cute.Tensor,
        mK: cute.Tensor,
        mV: cute.Tensor,
        mO: cute.Tensor,
        operands,
        workspace: Int64,
        stream: cuda.CUstream,
    ):
        """workspace: None is needed."""
        extents = self._extents(mQ, mK, Values(self.scores.names, operands))
        blocks = cute.ceil_div(extents.queries, self.tile[0]) * extents.heads * extents.batches
        self.kernel(mQ, mK, mV, mO, operands).launch(
            grid=(cutlass.max(blocks, 1), 1, 1),
            block=(THREADS, 1, 1),
            min_blocks_per_mp=1,
            stream=stream,
        )

    def _extents(self, mQ, mK, values: Values) -> Extents:
        return extents_of(mQ, mK, values, self.page_size)

    @cute.kernel
    def kernel(self, mQ, mK, mV, mO, operands):
        thread, _, _ = cute.arch.thread_idx()
        index, _, _ = cute.arch.block_idx()
        values = Values(self.scores.names, operands)
        extents = self._extents(mQ, mK, values)
        blocks, heads = cute.ceil_div(extents.queries, self.tile[0]), extents.heads
        if index < blocks * heads * extents.batches:
            batch, head = index // blocks // heads, index // blocks % heads
            sequence = sequence_of(values, batch, extents.queries, extents.keys)
            block = index % blocks
            if const_expr(sequence.high is not None):
                block = blocks - 1 - block  # those that see most keys are first
            first = block * self.tile[0]
            if first < sequence.query_rows:
                self._attend(mQ, mK, mV, mO, values, sequence, batch, head, first, thread)
            if const_expr("cu_seqlens_q" in self.scores.names):
                behind = behind_last(
                    *(values["cu_seqlens_q"], batch, mO.shape[0], block, blocks, thread, THREADS)
                )
                fill_behind(mO[None, head, None], behind)
                fill_statistics_behind(values, head, behind)

    @cute.jit
    def _attend(self, mQ, mK, mV, mO, values, sequence, batch, head, first, thread):
        """One block of queries."""
        memory = SmemAllocator().allocate(self.shared_memory_bytes, byte_alignment=1024)
        memory_k = memory + max(self.q.bytes, self.out.bytes)
        memory_v = memory_k + self.k.bytes
        mine = Products(self.element_type, thread)
        head_kv = head // (mQ.shape[1] // mK.shape[1])
        q = matrix_of(mQ, batch, head, sequence.first_query, sequence.queries)
        k, v = (self._keys(mX, values, sequence, batch, head_kv) for mX in (mK, mV))
        seen = keys_seen(sequence, first, *self.tile)
        begin, end = seen.begin, select(first < sequence.queries, seen.end, seen.begin)

        self.q.fill(q, first, memory, 0, thread)
        self._fetch(self.k, k, begin, end, memory_k, 0, thread)
        for ahead in cutlass.range_constexpr(1, self.stages):
            self._fetch(self.v, v, begin + ahead - 1, end, memory_v, ahead - 1, thread)
            self._fetch(self.k, k, begin + ahead, end, memory_k, ahead, thread)

        queries, keys = self.tile
        multiplier = self._multiplier(values, batch, head_kv)
        rO = mine.accumulators(queries, self.v.columns)
        places = rows_and_columns(mine.places(queries, keys))
        softmax = softmax_of(cute.size(places, mode=[0]), multiplier)
        later = self.stages - 1
        for step in cutlass.range(end - begin, unroll=1):
            block, stage = begin + step, step % self.stages
            next_v = (step + later) % self.stages
            arrived(2 * later)
            self._fetch(self.v, v, block + later, end, memory_v, next_v, thread)
            rS = self._products(mine, memory, memory_k, stage)
            arrived(2 * later)
            self._fetch(self.k, k, block + self.stages, end, memory_k, stage, thread)
            tile = Tile(rows_and_columns(rS), places, first, block * keys, batch, head)
            partly = (block < seen.full_begin) | (block >= seen.full_end)
            self._powers(tile, rO, softmax, sequence, values, partly, mQ.shape[1], head_kv)
            self._sum(mine, rO, rS, memory_v, stage)
        arrived()  # where Q was, O will be

        self._finish(rO, places, softmax, values, sequence, batch, head, first, head_kv)
        mine.store(rO, self.out.tensor(memory))
        cute.arch.sync_warp()
        out = matrix_of(mO, batch, head, sequence.first_query, sequence.query_rows)
        self.out.write(memory, out, first, thread)

    def _multiplier(self, values: Values, batch, key_head) -> Float32:
        """Of scores, to exponents of 2."""
        return values.number("scale") * LOG2_E if self.scores.plain else Float32(LOG2_E)

    def _change(self, tile: Tile, values: Values, key_head) -> None:
        """Products into scores."""
        self.scores.change(tile, values)

    def _factor(self, factor: Float32, values: Values, batch, key_head) -> Float32:
        """Of what was summed up."""
        return factor

    def _products(self, mine: Products, memory, memory_k, stage) -> cute.Tensor:
        rS = mine.accumulators(*self.tile)
        mine.of_shared(rS, SharedTile(self.q, memory), SharedTile(self.k, memory_k, stage))
        return rS

    @cute.jit
    def _powers(self, tile, rO, softmax, sequence, values, partly, heads, head_kv):
        """Products into what is multiplied with V; what O has so far becomes relative to them.

        partly: Whether a query may not see a key of the block.
        """
        if const_expr(not self.scores.plain):
            self._change(tile, values, head_kv)
        if const_expr(self.scores.hides_anywhere):
            self.scores.hide(tile, sequence, values)
        else:
            if partly:
                self.scores.hide(tile, sequence, values)
        factors = cute.make_rmem_tensor((tile.extents[0],), Float32)
        update(softmax, tile.values, factors)
        _multiply_rows(rO, factors)
        if const_expr(self.scores.drops):
            self.scores.drop(tile, heads, values, keys=self.tile[1])

    def _sum(self, mine: Products, rO, rS, memory_v, stage) -> None:
        mine.of_registers(rO, mine.left_operand(rS), self.v.transposed(memory_v, stage))

    def _keys(self, mX, values, sequence, batch, head):
        if self.page_size is not None:
            return paged_matrix_of(mX, values, batch, head, sequence.keys, self.page_size)
        return matrix_of(mX, batch, head, sequence.first_key, sequence.keys)

    @cute.jit
    def _fetch(self, tiles, matrix, block, end, memory, stage, thread):
        """Starts to copy a block of keys if there is one; a group in any case."""
        if block < end:
            tiles.fill(matrix, block * tiles.rows, memory, stage, thread)
        commit()

    @cute.jit
    def _finish(self, rO, places, softmax, values, sequence, batch, head, first, head_kv):
        """Divides by the sums of powers; writes statistics."""
        factors = cute.make_rmem_tensor((cute.size(places, mode=[0]),), Float32)
        sink = None
        if const_expr("sink" in self.scores.names):
            sink = Float32(values.element("sink", head))
        for row in cutlass.range_constexpr(cute.size(factors)):
            local, column = places[row, 0]
            query = first + local
            done = finished(softmax, row, sink)
            exists = query < sequence.queries
            factor = self._factor(done.factor, values, batch, head_kv)
            factors[row] = select(exists, factor, Float32(0.0))
            done = where_seen(exists, done)
            if (column == 0) & (query < sequence.query_rows):
                place = batch, head, query
                if const_expr("cu_seqlens_q" in self.scores.names):
                    place = head, sequence.first_query + query
                write_statistics(statistics_of(values), place, done)
        _multiply_rows(rO, factors)


def _multiply_rows(accumulators: cute.Tensor, factors: cute.Tensor) -> None:
    """Each with a factor of its own."""
    values = rows_and_columns(accumulators)
    for row in range(cute.size(values, mode=[0])):
        for column in range(cute.size(values, mode=[1])):
            values[row, column] = values[row, column] * factors[row]

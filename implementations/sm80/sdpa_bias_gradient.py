"""The gradient of a bias: derivatives by scores, summed over the modes that it does not have."""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Numeric
from cutlass.memory import SmemAllocator

from ..common.attention.scores import Scores, Tile, rows_and_columns
from ..common.attention.sequences import sequence_of
from ..common.attention.values import Values
from ..common.conversion import select
from .sdpa_gradients import TileStatistics, differentiate, recomputed
from .sdpa_rows import row_statistics
from .sdpa_tiles import (
    BLOCK_M,
    THREADS,
    Products,
    SharedTile,
    Tiles,
    arrived,
    commit,
    extents_of,
    matrix_of,
)


class BiasGradient:
    """A block has a tile of dBias, and makes the tiles of scores again that it was added to, one
    after the other: those of other batches and heads, and of other queries and keys, if dBias has
    one for all of them. Then it adds up rows and columns likewise, and writes.

    Shared memory: Q, dO, K and V of a tile; then its sums.
    """

    def __init__(
        self,
        head_dims: tuple[int, int],
        columns: int,
        element_type: type[Numeric],
        scores: Scores,
        aligned: bool,
    ):
        self.columns = columns
        self.element_type = element_type
        self.scores = scores
        of_queries, of_keys = (
            tuple(Tiles(rows, wide, element_type, aligned) for wide in head_dims)
            for rows in (BLOCK_M, columns)
        )
        self.tiles = (*of_queries, *of_keys)

    @property
    def shared_memory_bytes(self) -> int:
        sums = BLOCK_M * self.columns * Float32.width // 8
        return max(sum(one.bytes for one in self.tiles), sums)

    @cute.jit
    def launch(self, mQ, mK, mV, mDo, mLse, operands, workspace, stream: cuda.CUstream):
        values = Values(self.scores.names, operands)
        batches, heads, rows, columns = values["dBias"].shape
        tiles = cute.ceil_div(rows, BLOCK_M) * cute.ceil_div(columns, self.columns)
        self.kernel(mQ, mK, mV, mDo, mLse, operands, workspace).launch(
            grid=(cutlass.max(tiles * heads * batches, 1), 1, 1),
            block=(THREADS, 1, 1),
            min_blocks_per_mp=1,
            stream=stream,
        )

    @cute.kernel
    def kernel(self, mQ, mK, mV, mDo, mLse, operands, workspace: Int64):
        thread, _, _ = cute.arch.thread_idx()
        index, _, _ = cute.arch.block_idx()
        values = Values(self.scores.names, operands)
        batches, heads, rows, columns = values["dBias"].shape
        down, across = cute.ceil_div(rows, BLOCK_M), cute.ceil_div(columns, self.columns)
        if index < down * across * heads * batches:
            # Batch, head, block of queries, block of keys.
            tile = (
                index // across // down // heads,
                index // across // down % heads,
                index // across % down,
                index % across,
            )
            self._sum((mQ, mDo, mK, mV), mLse, values, workspace, tile, thread)

    @cute.jit
    def _sum(self, read, mLse, values, workspace, own, thread):
        mQ, _, mK, _ = read
        extents = extents_of(mQ, mK, values)
        blocks = (
            extents.batches,
            extents.heads,
            cute.ceil_div(extents.queries, BLOCK_M),
            cute.ceil_div(extents.keys, self.columns),
        )
        shared = [Int32(extent) == 1 for extent in values["dBias"].shape]
        repeats = [select(one, Int32(n), Int32(1)) for one, n in zip(shared, blocks, strict=True)]
        memory = SmemAllocator().allocate(self.shared_memory_bytes, byte_alignment=1024)
        mine = Products(self.element_type, thread)
        places = rows_and_columns(mine.places(BLOCK_M, self.columns))
        sums = mine.accumulators(BLOCK_M, self.columns)
        statistics = row_statistics(workspace, mLse)
        steps = repeats[0] * repeats[1] * repeats[2] * repeats[3]
        for step in cutlass.range(steps, unroll=1):
            at = self._place(own, repeats, step)
            self._add(read, values, extents, statistics, memory, mine, places, sums, at, thread)
        self._write(sums, places, memory, values["dBias"], own, thread)

    def _place(self, own: tuple, repeats: list, step: Int32) -> tuple:
        """(batch, head, block of queries, block of keys) of a step."""
        found = []
        for first, count in reversed(list(zip(own, repeats, strict=True))):
            found.insert(0, first + step % count)
            step = step // count
        return tuple(found)

    @cute.jit
    def _add(self, read, values, extents, statistics, memory, mine, places, sums, at, thread):
        """A tile of derivatives by scores."""
        batch, head, block_q, block_k = at
        sequence = sequence_of(values, batch, extents.queries, extents.keys)
        first_query, first_key = block_q * BLOCK_M, block_k * self.columns
        head_kv = head // (extents.heads // extents.heads_kv)
        of_queries = batch, head, sequence.first_query, sequence.queries
        of_keys = batch, head_kv, sequence.first_key, sequence.keys
        cute.arch.sync_threads()
        start = memory
        parts = []
        for i in cutlass.range_constexpr(4):
            where, first = (of_queries, first_query) if i < 2 else (of_keys, first_key)
            self.tiles[i].fill(matrix_of(read[i], *where), first, start, 0, thread)
            parts.append(SharedTile(self.tiles[i], start))
            start = start + self.tiles[i].bytes
        commit()
        arrived()
        count = cute.size(places, mode=[0])
        lse, delta = (cute.make_rmem_tensor((count,), Float32) for _ in range(2))
        lse.fill(Float32(float("inf")))
        delta.fill(0.0)
        given = statistics.tensors(statistics.first(batch, head, sequence), sequence.queries)
        for row in cutlass.range_constexpr(count):
            query = first_query + places[row, 0][0]
            if query < sequence.queries:
                lse[row] = given[0][query]
                delta[row] = given[1][query]
        found, gradients = (mine.accumulators(BLOCK_M, self.columns) for _ in range(2))
        mine.of_shared(found, parts[0], parts[2])
        mine.of_shared(gradients, parts[1], parts[3])
        tile = Tile(rows_and_columns(found), places, first_query, first_key, batch, head)
        powers = recomputed(
            self.scores, tile, found, TileStatistics(lse, delta), sequence, values, extents.heads,
            Boolean(True), self.columns,
        )  # fmt: skip
        differentiate(tile, powers, gradients, delta)
        sums.store(sums.load() + found.load())

    @cute.jit
    def _write(self, sums, places, memory, mBias, own, thread):
        layout = cute.make_layout((BLOCK_M, self.columns), stride=(self.columns, 1))
        sSums = cute.make_tensor(cute.recast_ptr(memory, dtype=Float32), layout)
        cute.arch.sync_threads()
        values = rows_and_columns(sums)
        for row in cutlass.range_constexpr(cute.size(values, mode=[0])):
            for column in cutlass.range_constexpr(cute.size(values, mode=[1])):
                sSums[places[row, column]] = values[row, column]
        cute.arch.sync_threads()
        batch, head, block_q, block_k = own
        _, _, rows, columns = mBias.shape
        # What is one for all rows, or columns, is the sum of them.
        down = select(Int32(rows) == 1, Int32(BLOCK_M), Int32(1))
        across = select(Int32(columns) == 1, Int32(self.columns), Int32(1))
        wide = self.columns // across
        for i in cutlass.range(thread, BLOCK_M // down * wide, THREADS, unroll=1):
            row, column = i // wide, i % wide
            total = Float32(0.0)
            for r in cutlass.range(down, unroll=1):
                for c in cutlass.range(across, unroll=1):
                    total = total + sSums[row + r, column + c]
            row, column = row + block_q * BLOCK_M, column + block_k * self.columns
            if (row < rows) & (column < columns):
                mBias[batch, head, row, column] = total.to(mBias.element_type)

"""Gradients of queries, or of keys and values: sums over tiles of scores that are made again."""

from typing import NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Numeric, const_expr
from cutlass.memory import SmemAllocator

from ..common.attention.behind import behind_last, fill_behind
from ..common.attention.scores import Scores, Tile, rows_and_columns
from ..common.attention.sequences import Sequence, keys_seen, queries_seeing, sequence_of
from ..common.attention.values import Values
from ..common.conversion import select
from .mma import MMA_M
from .sdpa_gradients import TileStatistics, differentiate, differentiate_changes, recomputed
from .sdpa_rows import RowStatistics, row_statistics
from .sdpa_tiles import (
    BLOCK_M,
    THREADS,
    Extents,
    Products,
    SharedTile,
    Tiles,
    arrived,
    commit,
    extents_of,
    matrix_of,
)

_FLOAT_BYTES = Float32.width // 8


class Work(NamedTuple):
    """What a block works on.

    head: Of dQ: of queries; of dK and dV: of keys.
    first: Row of the block's own.
    begin, count: Blocks that it visits, per head.
    full_begin, full_end: Of these, those of which every query sees every key.
    """

    read: tuple
    values: Values
    extents: Extents
    sequence: Sequence
    statistics: RowStatistics
    batch: Int32
    head: Int32
    first: Int32
    begin: Int32
    count: Int32
    full_begin: Int32
    full_end: Int32
    thread: Int32


class Memory(NamedTuple):
    """Where in shared memory a block's parts begin."""

    own: tuple[cute.Pointer, cute.Pointer]
    visited: tuple[cute.Pointer, cute.Pointer]
    statistics: cute.Pointer


class GradientPass:
    """Some of dQ, dK, dV. A block has 64 rows of its own: queries (dQ), or keys. It visits the
    keys, or queries, that belong to them, block by block. Each of four warps has rows of its own:

    role      does                                                           waits on
    --------  -------------------------------------------------------------  ------------------
    fetch     cp.async of visited rows of two matrices; of queries, their    what it replaces is
              statistics, too                                                read
    score     S of own and visited rows, then P in registers                 visited rows
    sum       dV += Pᵀ · dO
    slope     dP likewise, then dS in registers
    sum       dQ += dS · K, or dK += dSᵀ · Q
    write     sums → elements → shared memory, where own rows were           own rows

    Shared memory: own rows of two matrices, `stages` blocks of visited ones with statistics.
    """

    def __init__(
        self,
        names: tuple[str, ...],
        head_dims: tuple[int, int],
        columns: int,
        stages: int,
        element_type: type[Numeric],
        scores: Scores,
        *,
        aligned: bool,
    ):
        self.names = names
        self.columns = columns
        self.stages = stages
        self.element_type = element_type
        self.scores = scores
        self.of_keys = names != ("dQ",)
        self.scores_differ = names != ("dV",)  # derivatives by scores are needed
        tiles = element_type, aligned
        self.own = tuple(Tiles(BLOCK_M, columns_of, *tiles) for columns_of in head_dims)
        self.visited = tuple(Tiles(columns, columns_of, *tiles, stages) for columns_of in head_dims)
        wide_v = Tiles(BLOCK_M, head_dims[1], *tiles)
        self.outputs = tuple(wide_v if name == "dV" else self.own[0] for name in names)

    @property
    def own_bytes(self) -> tuple[int, int]:
        """Of both matrices, where the outputs get room."""
        if not self.scores_differ:
            return max(self.own[0].bytes, self.outputs[0].bytes), 0
        return self.own[0].bytes, self.own[1].bytes

    @property
    def shared_memory_bytes(self) -> int:
        statistics = 2 * self.columns * self.stages * _FLOAT_BYTES
        return sum(self.own_bytes) + sum(one.bytes for one in self.visited) + statistics

    @cute.jit
    def launch(self, mQ, mK, mV, mDo, mLse, outputs, operands, workspace, stream: cuda.CUstream):
        values = Values(self.scores.names, operands)
        extents = extents_of(mQ, mK, values)
        blocks = self._blocks(extents) * self._heads(extents) * extents.batches
        self.kernel(mQ, mK, mV, mDo, mLse, outputs, operands, workspace).launch(
            grid=(cutlass.max(blocks, 1), 1, 1),
            block=(THREADS, 1, 1),
            min_blocks_per_mp=1,
            stream=stream,
        )

    def _blocks(self, extents: Extents) -> Int32:
        return cute.ceil_div(extents.keys if self.of_keys else extents.queries, BLOCK_M)

    def _heads(self, extents: Extents) -> Int32:
        return extents.heads_kv if self.of_keys else extents.heads

    @cute.kernel
    def kernel(self, mQ, mK, mV, mDo, mLse, outputs, operands, workspace: Int64):
        thread, _, _ = cute.arch.thread_idx()
        index, _, _ = cute.arch.block_idx()
        values = Values(self.scores.names, operands)
        extents = extents_of(mQ, mK, values)
        blocks, heads = self._blocks(extents), self._heads(extents)
        if index < blocks * heads * extents.batches:
            batch, head = index // blocks // heads, index // blocks % heads
            sequence = sequence_of(values, batch, extents.queries, extents.keys)
            block = index % blocks
            if const_expr(not self.of_keys and sequence.high is not None):
                block = blocks - 1 - block  # those that see most keys are first
            first = block * BLOCK_M
            rows, used = self._rows(sequence, extents)
            if first < rows:
                seeing = queries_seeing if self.of_keys else keys_seen
                seen = seeing(sequence, first, BLOCK_M, self.columns)
                count = select(first < used, seen.end - seen.begin, Int32(0))
                work = Work(
                    (mQ, mK, mV, mDo), values, extents, sequence, row_statistics(workspace, mLse),
                    batch, head, first, seen.begin, count, seen.full_begin, seen.full_end, thread,
                )  # fmt: skip
                self._differentiate(work, outputs)
            if const_expr("cu_seqlens_q" in self.scores.names):
                starts = values["cu_seqlens_kv" if self.of_keys else "cu_seqlens_q"]
                behind = behind_last(
                    *(starts, batch, outputs[0].shape[0], block, blocks, thread, THREADS)
                )
                for gradient in outputs:
                    fill_behind(gradient[None, head, None], behind)

    def _rows(self, sequence: Sequence, extents: Extents) -> tuple[Int32, Int32]:
        """Of the sequence: that are written, that are used."""
        if not self.of_keys:
            return sequence.query_rows, sequence.queries
        packed = "cu_seqlens_q" in self.scores.names
        return sequence.keys if packed else extents.keys, sequence.keys

    @cute.jit
    def _differentiate(self, work: Work, outputs):
        memory = self._memory()
        mine = Products(self.element_type, work.thread)
        self._fetch_own(work, memory)
        sums = tuple(mine.accumulators(BLOCK_M, one.columns) for one in self.outputs)
        places = rows_and_columns(mine.places(BLOCK_M, self.columns))
        statistics = self._own_statistics(work, places)
        steps = work.count
        if const_expr(self.of_keys):
            steps = work.count * self._group(work)
        if const_expr(self.stages > 1):
            self._fetch(work, memory, Int32(0), steps)
        for step in cutlass.range(steps, unroll=1):
            if const_expr(self.stages > 1):
                arrived()
                self._fetch(work, memory, step + 1, steps)
            else:
                cute.arch.sync_threads()
                self._fetch(work, memory, step, steps)
                arrived()
            self._add(work, memory, mine, places, statistics, sums, step)
        arrived()  # where own rows were, sums will be
        self._write(work, memory, mine, sums, outputs)

    def _memory(self) -> Memory:
        start = SmemAllocator().allocate(self.shared_memory_bytes, byte_alignment=1024)
        second = start + self.own_bytes[0]
        visited = second + self.own_bytes[1]
        other = visited + self.visited[0].bytes
        return Memory((start, second), (visited, other), other + self.visited[1].bytes)

    # Visited rows ------------------------------------------------------------------------

    def _head_of(self, work: Work, step: Int32) -> Int32:
        """Of queries."""
        if not self.of_keys:
            return work.head
        return work.head * self._group(work) + step // work.count

    def _group(self, work: Work) -> Int32:
        """Heads of queries that share one of keys."""
        return work.extents.heads // work.extents.heads_kv

    def _matrices(self, work: Work, of_keys: bool, head: Int32) -> tuple:
        """(K, V) or (Q, dO); head: of the queries."""
        mQ, mK, mV, mDo = work.read
        sequence = work.sequence
        if of_keys:
            if not self.of_keys:
                head = head // self._group(work)
            rows = sequence.first_key, sequence.keys
            return tuple(matrix_of(mX, work.batch, head, *rows) for mX in (mK, mV))
        rows = sequence.first_query, sequence.queries
        return tuple(matrix_of(mX, work.batch, head, *rows) for mX in (mQ, mDo))

    def _fetch_own(self, work: Work, memory: Memory) -> None:
        matrices = self._matrices(work, self.of_keys, work.head)
        for i in range(2 if self.scores_differ else 1):
            self.own[i].fill(matrices[i], work.first, memory.own[i], 0, work.thread)
        commit()

    @cute.jit
    def _fetch(self, work: Work, memory: Memory, step: Int32, steps: Int32):
        """Starts to copy what a step visits, if there is such a step."""
        if step < steps:
            stage = step % self.stages
            head = self._head_of(work, step)
            first = (work.begin + step % work.count) * self.columns
            matrices = self._matrices(work, not self.of_keys, head)
            for i in cutlass.range_constexpr(2):
                self.visited[i].fill(matrices[i], first, memory.visited[i], stage, work.thread)
            if const_expr(self.of_keys):
                self._fetch_statistics(work, memory, head, first, stage)
        commit()

    @cute.jit
    def _fetch_statistics(self, work: Work, memory: Memory, head, first, stage):
        """Of the queries that are visited."""
        start = work.statistics.first(work.batch, head, work.sequence)
        addresses = work.statistics.lse, work.statistics.delta
        target = memory.statistics.toint() + stage * (2 * self.columns * _FLOAT_BYTES)
        for i in cutlass.range_constexpr(2):
            local = work.thread - i * self.columns
            if (local >= 0) & (local < self.columns):
                query = first + local
                inside = select(query < work.sequence.queries, Int32(_FLOAT_BYTES), Int32(0))
                cute.arch.inline_ptx(
                    f"cp.async.ca.shared.global [{{$r0}}], [{{$r1}}], {_FLOAT_BYTES}, {{$r2}};",
                    read_only_args=[
                        target + work.thread * _FLOAT_BYTES,
                        addresses[i] + (start + query) * _FLOAT_BYTES,
                        inside,
                    ],
                )

    @cute.jit
    def _own_statistics(self, work: Work, places):
        """Of own queries, in registers; what it is of keys does not matter."""
        count = cute.size(places, mode=[0])
        if const_expr(self.of_keys):
            count = cute.size(places, mode=[1])
        lse, delta = (cute.make_rmem_tensor((count,), Float32) for _ in range(2))
        lse.fill(Float32(float("inf")))
        delta.fill(0.0)
        if const_expr(not self.of_keys):
            start = work.statistics.first(work.batch, work.head, work.sequence)
            given = work.statistics.tensors(start, work.sequence.queries)
            for row in cutlass.range_constexpr(count):
                query = work.first + places[row, 0][0]
                if query < work.sequence.queries:
                    lse[row] = given[0][query]
                    delta[row] = given[1][query]
        return TileStatistics(lse, delta)

    def _read(self, memory: Memory, places, values: cute.Tensor, which: int, stage) -> None:
        """A statistic of the queries of a step: 0, lse; 1, delta."""
        layout = cute.make_layout((self.columns, 2, self.stages))
        pointer = cute.recast_ptr(memory.statistics, dtype=Float32)
        given = cute.make_tensor(pointer, layout)
        for column in range(cute.size(values)):
            values[column] = given[places[0, column][1], which, stage]

    # One step ----------------------------------------------------------------------------

    @cute.jit
    def _add(self, work: Work, memory: Memory, mine, places, statistics, sums, step):
        """What a block of visited rows adds to the sums."""
        stage = step % self.stages
        block = work.begin + step % work.count
        if const_expr(self.of_keys):
            self._read(memory, places, statistics.lse, 0, stage)
        rS = self._products(mine, memory, 0, stage)
        own, other = work.first, block * self.columns
        first_query, first_key = (other, own) if self.of_keys else (own, other)
        tile = Tile(
            rows_and_columns(rS), places, first_query, first_key,
            work.batch, self._head_of(work, step), self.of_keys,
        )  # fmt: skip
        found = recomputed(
            self.scores, tile, rS, statistics, work.sequence, work.values, work.extents.heads,
            (block < work.full_begin) | (block >= work.full_end),
            MMA_M if self.of_keys else self.columns,
        )  # fmt: skip
        if const_expr("dV" in self.names):
            visited = self.visited[1].transposed(memory.visited[1], stage)
            mine.of_registers(sums[-1], mine.left_operand(found.kept), visited)
        if const_expr(self.scores_differ):
            gradients = self._products(mine, memory, 1, stage)
            if const_expr(self.of_keys):
                self._read(memory, places, statistics.delta, 1, stage)
            differentiate(tile, found, gradients, statistics.delta)
            differentiate_changes(self.scores, tile, found, work.values)
            visited = self.visited[0].transposed(memory.visited[0], stage)
            mine.of_registers(sums[0], mine.left_operand(rS), visited)

    def _products(self, mine: Products, memory: Memory, i: int, stage) -> cute.Tensor:
        """Of own and visited rows."""
        found = mine.accumulators(BLOCK_M, self.columns)
        visited = SharedTile(self.visited[i], memory.visited[i], stage)
        mine.of_shared(found, SharedTile(self.own[i], memory.own[i]), visited)
        return found

    def _write(self, work: Work, memory: Memory, mine: Products, sums: tuple, outputs) -> None:
        """Rows that are not used are zeros."""
        sequence = work.sequence
        first = sequence.first_key if self.of_keys else sequence.first_query
        rows, _ = self._rows(sequence, work.extents)
        for i, (name, tiles) in enumerate(zip(self.names, self.outputs, strict=True)):
            if name != "dV":
                sums[i].store(sums[i].load() * work.values.number("scale"))
            mine.store(sums[i], tiles.tensor(memory.own[i]))
        cute.arch.sync_warp()
        for i, tiles in enumerate(self.outputs):
            matrix = matrix_of(outputs[i], work.batch, work.head, first, rows)
            tiles.write(memory.own[i], matrix, work.first, work.thread)

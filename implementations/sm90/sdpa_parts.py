"""Keys of a tile of decoding are cut into parts, whose results are added up."""

import math
from dataclasses import dataclass
from typing import NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, const_expr
from cutlass.cute import AddressSpace

from ..common.attention.scores import Place, Scores
from ..common.attention.sequences import sequence_of
from ..common.attention.softmax import LN_2, LOG2_E, Finished, finite, power_of_two
from ..common.attention.statistics import statistics_rows, where_seen, write_statistics
from ..common.attention.values import Values
from ..common.conversion import select
from ..common.threads import GROUP
from ..common.tile_order import Divisor
from .sdpa_forward_consumer import TOGETHER
from .sdpa_rows import load_vector, number, store
from .sdpa_split import Size, are_many, costs_of, parts_of
from .sdpa_tiles import Tiles, Work
from .sdpa_workspace import part_bytes

_COUNTERS = 2  # of `Tiles`; those of the tiles follow

#: Columns of parts, by a thread of the block that adds them up, and of a kernel that does.
_AT_ONCE, AT_ONCE_BEHIND = 8, 4
_FEW_PARTS = 4


@dataclass
class DecodeTiles(Tiles):
    """Parts of blocks of rows of each head of keys of each sequence, in this order. The rows of a
    head of keys are those of its `group` heads of queries, query by query.

    partial: An address: of each part the rows in float32, then their numbers.
    behind: Whether a kernel behind adds parts up.
    joined: Whether `blocks` are places of those of all packed sequences, see `TakesPacked`.
    places: Blocks of rows of a head of keys, of all sequences.
    schedule, split: An address, and parts of tiles that have several, see `Scheduled`.
    by_part, by_block, by_head: Divide by `parts`, `blocks` and `heads`: a block that has one tile
        waits for each division before its first load.
    """

    parts: Int32
    group: Divisor
    rows: Int32
    partial: Int64
    behind: Boolean
    joined: Boolean
    places: Int32
    schedule: Int64
    split: Int32
    by_part: Divisor
    by_block: Divisor
    by_head: Divisor

    def place(self, tile: Int32, rows: int, last_first: bool) -> Place:
        """Of the first row; its head is that of the keys, its key is the number of the part."""
        others, part = divmod(tile, self.by_part)
        others, block = divmod(others, self.by_block)
        batch, head = divmod(others, self.by_head)
        if last_first:
            block = self.blocks - 1 - block
        return Place(batch, head, block * rows, part)


def arrivals(tiles: DecodeTiles, work: Work) -> cute.Pointer:
    """Counts the parts of a tile that are there; zero before and after every launch."""
    first = work.tile - work.place.key
    address = tiles.counters + Int64(_COUNTERS + first) * (Int32.width // 8)
    return cute.make_ptr(Int32, address, AddressSpace.gmem, assumed_align=4)


@dataclass
class Parts:
    """Those of a tile in the workspace, side by side: of each its rows, then their numbers.

    shape: Rows, columns, and numbers of a row.
    """

    address: Int64
    count: Int32
    shape: tuple[int, int, int]  # known while tracing

    def read_instead(self) -> Int32:
        """The number of a part that is read where there is none, and not used."""
        return self.count - 1

    def at(self, part: Int32) -> tuple[cute.Tensor, cute.Tensor]:
        """((rows, columns), (rows, numbers))"""
        rows, columns, numbers = self.shape
        address = self.address + Int64(part) * part_bytes(*self.shape)
        values = cute.make_tensor(
            cute.make_ptr(Float32, address, AddressSpace.gmem, assumed_align=16),
            cute.make_ordered_layout((rows, columns), order=(1, 0)),
        )
        behind = address + rows * columns * Float32.width // 8
        pointer = cute.make_ptr(Float32, behind, AddressSpace.gmem, assumed_align=16)
        return values, cute.make_tensor(pointer, cute.make_layout((rows, numbers)))


class Sum(NamedTuple):
    """Of vectors of parts: `largest` is the largest log-sum-exp, `total` the sum of exponentials
    relative to it, `values` the vectors weighted by them."""

    values: cute.Tensor
    largest: Float32
    total: Float32


class AddsUpParts:
    """A part of a kernel. Parts of few rows are added up by who comes last of a tile; one block
    would take long for many, which a kernel behind adds up, by all multiprocessors."""

    sums_at_once = 16  # parts that are loaded from the workspace together

    tile_m: int
    tile_n: int
    head_dim: int
    head_dim_v: int
    consumers: int
    resident: int
    numbers: int
    scores: Scores
    element_type: type[cutlass.Numeric]
    output_type: type[cutlass.Numeric]

    def _parts(self, size: Size, rows: Int32) -> Int32:
        """That each tile is cut into. rows: Of a head of keys."""
        costs = costs_of(
            *((self.tile_m, self.tile_n), (self.head_dim, self.head_dim_v)),
            *(self.element_type.width // 8, rows, self.resident, choose),
        )
        return parts_of(size, costs, choose)

    def _are_many(self, rows: Int32) -> Boolean:
        """Whether those of a tile are added up by a kernel behind."""
        return are_many(rows, self.tile_m, self.head_dim_v, choose)

    def _parts_of_tile(self, work: Work, tiles) -> Parts:
        shape = self.tile_m, self.head_dim_v, self.numbers
        first = work.tile - work.place.key
        return Parts(tiles.partial + Int64(first) * part_bytes(*shape), work.parts, shape)

    def _sink(self, values: Values, head):
        if "sink" not in self.scores.names:
            return None
        return Float32(values["sink"][head])

    @cute.jit
    def _combine(self, thread, flag, mO, work: Work, values, tiles):
        """The parts of a tile, by who comes last."""
        if not tiles.behind:
            self._combine_last(thread, flag, mO, work, values, tiles)

    @cute.jit
    def _combine_last(self, thread, flag, mO, work: Work, values, tiles):
        if self._completes(thread, flag, work, tiles):
            parts = self._parts_of_tile(work, tiles)
            across = self.head_dim_v // _AT_ONCE
            end = self._rows(work.sequence, tiles)
            rows = cutlass.min(end - work.place.query, self.tile_m)
            for vector in cutlass.range(thread, rows * across, GROUP * self.consumers, unroll=1):
                local, column = vector // across, vector % across * _AT_ONCE
                added = self._sum(parts, local, column, _AT_ONCE, self.sums_at_once)
                self._finish(added, parts, local, column, mO, work, values, tiles)

    @cute.jit
    def _completes(self, thread, flag, work: Work, tiles) -> Boolean:
        """Whether all parts of a tile are there, for the block that wrote the last one."""
        threads = GROUP * self.consumers
        cute.arch.barrier(barrier_id=TOGETHER, number_of_threads=threads)
        if thread == 0:
            counter = arrivals(tiles, work)
            # What all threads of the block wrote in front of the barrier is released with it.
            arrived = cute.arch.atomic_add(counter.llvm_ptr, Int32(1), sem="acq_rel", scope="gpu")
            if arrived == work.parts - 1:
                counter.store(Int32(0))  # for the next launch
            flag.store(arrived)
        cute.arch.barrier(barrier_id=TOGETHER, number_of_threads=threads)
        return flag.load() == work.parts - 1

    @cute.jit
    def _finish(self, added: Sum, parts, local, column, mO, work: Work, values, tiles):
        """Writes a vector of a row, and with the first one the row's statistics."""
        query, head = query_and_head(work.place, local, tiles)
        sink = self._sink(values, head)
        largest, total, factor = added.largest, added.total, Float32(1.0)
        if const_expr(sink is not None):
            largest = cute.arch.fmax(largest, sink)
            factor = power_of_two((added.largest - finite(largest)) * LOG2_E)
            total = cute.math.fma(total, factor, power_of_two((sink - finite(largest)) * LOG2_E))
        exists = (total != 0.0) & (query < work.sequence.queries)
        scale = select(exists, factor / total, Float32(0.0))
        if column < mO.shape[1]:
            rounded = cute.make_rmem_tensor(cute.size(added.values), self.output_type)
            rounded.store((added.values.load() * scale).to(self.output_type))
            store(rounded, self._row(mO, query, head, work), column)
        lse = log_sum_exp(Sum(added.values, largest, total))
        score_max, score_sum_exp = Float32(0.0), Float32(0.0)
        if const_expr(self.numbers > 1):
            # Maxima do not tell of what is no number.
            score_max = self._largest_score(parts, local, sink) + (total - total)
            score_sum_exp = total * power_of_two((largest - score_max) * LOG2_E)
        done = where_seen(exists, Finished(scale, lse, score_max, score_sum_exp))
        statistics = statistics_rows(values, work.place.batch, head, work.sequence)
        if column == 0:
            write_statistics(statistics, query, done)

    @cute.jit
    def _largest_score(self, parts, local, sink) -> Float32:
        """Of a row in all parts."""
        largest = Float32(-math.inf)
        if const_expr(sink is not None):
            largest = sink
        for part in cutlass.range(parts.count, unroll=8):
            _, numbers = parts.at(part)
            largest = cute.arch.fmax(largest, number(numbers, local, 1))
        return largest

    @cute.jit
    def _sum(
        self, parts, local, column, width: cutlass.Constexpr, at_once: cutlass.Constexpr
    ) -> Sum:
        """Of a vector of a row in all parts, in their order.

        width: Columns of the vector.
        at_once: Parts that are loaded before the first of them is waited for.
        """
        largest, total = Float32(-math.inf), Float32(0.0)
        added = cute.make_rmem_tensor(width, Float32)
        added.fill(0.0)
        for first in cutlass.range(0, parts.count, at_once, unroll=1):
            largest, total = self._add_parts(
                added, largest, total, parts, first, local, column, at_once
            )
        return Sum(added, largest, total)

    @cute.jit
    def _add_parts(
        self, added, largest, total, parts, first, local, column, at_once: cutlass.Constexpr
    ):
        """Returns the largest log-sum-exp so far, and the sum of exponentials relative to it."""
        width = cute.size(added)
        logs = cute.make_rmem_tensor(at_once, Float32)
        loaded = cute.make_rmem_tensor((width, at_once), Float32)
        for i in cutlass.range_constexpr(at_once):
            there = first + i < parts.count
            part, numbers = parts.at(select(there, first + i, parts.read_instead()))
            logs[i] = number(numbers, local, 0)
            load_vector(part[local, None], column, loaded[None, i])
        most = largest
        for i in cutlass.range_constexpr(at_once):
            logs[i] = select(first + i < parts.count, logs[i], Float32(-math.inf))
            most = cute.arch.fmax(most, logs[i])
        base = finite(most) * LOG2_E
        factor = power_of_two(cute.math.fma(largest, Float32(LOG2_E), -base))
        total = total * factor
        for j in cutlass.range_constexpr(width):
            added[j] = added[j] * factor
        for i in cutlass.range_constexpr(at_once):
            # Where there is no further part, what was read may be infinite, and its weight is zero.
            if first + i < parts.count:
                weight = power_of_two(cute.math.fma(logs[i], Float32(LOG2_E), -base))
                total = total + weight
                for j in cutlass.range_constexpr(width):
                    added[j] = cute.math.fma(loaded[j, i], weight, added[j])
        return most, total

    @cute.jit
    def _launch_sums(self, mQ, mK, mO, operands, tiles: DecodeTiles, stream: cuda.CUstream):
        if tiles.behind:
            rows = cutlass.min(tiles.rows, self.tile_m)
            blocks = cute.ceil_div(rows * (self.head_dim_v // AT_ONCE_BEHIND), GROUP)
            self.sums(mQ, mK, mO, operands, tiles, Divisor(blocks)).launch(
                grid=(tiles.total // tiles.parts * blocks, 1, 1),
                block=(GROUP, 1, 1),
                stream=stream,
                use_pdl=True,
            )

    @cute.kernel
    def sums(self, mQ, mK, mO, operands, tiles: DecodeTiles, blocks: Divisor):
        """Some vectors of a tile by each block. blocks: Of a tile."""
        tile, block = divmod(cute.arch.block_idx()[0], blocks)
        vector = block * GROUP + cute.arch.thread_idx()[0]
        tile *= tiles.parts
        across = self.head_dim_v // AT_ONCE_BEHIND
        local, column = vector // across, vector % across * AT_ONCE_BEHIND
        place = tiles.place(tile, self.tile_m, False)
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        values = Values(self.scores.names, operands)
        sequence = sequence_of(values, place.batch, mQ.shape[0], self._keys(mK, values))
        work = Work(tile, place, sequence, None, parts=tiles.parts)
        if (local < self.tile_m) & (place.query + local < tiles.rows):
            self._sum_vector(local, column, mO, work, values, tiles)

    @cute.jit
    def _sum_vector(self, local, column, mO, work: Work, values, tiles):
        # What is loaded at once is loaded however few there are.
        if work.parts <= _FEW_PARTS:
            self._sum_at_once(local, column, mO, work, values, tiles, _FEW_PARTS)
        else:
            self._sum_at_once(local, column, mO, work, values, tiles, self.sums_at_once)

    @cute.jit
    def _sum_at_once(
        self, local, column, mO, work: Work, values, tiles, at_once: cutlass.Constexpr
    ):
        parts = self._parts_of_tile(work, tiles)
        added = self._sum(parts, local, column, AT_ONCE_BEHIND, at_once)
        self._finish(added, parts, local, column, mO, work, values, tiles)


def choose(condition, one, other) -> Int32 | Float32:
    """Of numbers of a kernel's host code, some of which are known while tracing."""
    kind = Float32 if any(isinstance(n, float | Float32) for n in (one, other)) else Int32
    return select(Boolean(condition), kind(one), kind(other))


def log_sum_exp(added: Sum) -> Float32:
    return added.largest + cute.math.log2(added.total) * LN_2


def query_and_head(place: Place, local: Int32, tiles: DecodeTiles) -> tuple[Int32, Int32]:
    """Of a row of a tile."""
    row = place.query + local
    query, head = divmod(row, tiles.group)
    return query, place.head * tiles.group.divisor + head

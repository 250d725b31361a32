"""What the gradient of attention needs of each query beside its scores: Δ and the log-sum-exp."""

import math
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Numeric, const_expr
from cutlass.cute import AddressSpace
from cutlass.memory import SmemAllocator

from ..common.attention.sequences import Sequence
from ..common.attention.softmax import LOG2_E, power_of_two
from ..common.attention.values import Values
from ..common.conversion import select
from ..common.rows import GlobalRow, Vector, added, combined, over_lanes
from ..common.threads import WARP
from ..common.work_split import COUNTER_BYTES
from .sdpa_tiles import THREADS, VECTOR, matrix_of

_LANES = 8  # that share a row
_BYTES = Float32.width // 8


class RowStatistics(NamedTuple):
    """In the workspace: all heads and batches, one behind the other, as lse has them.

    lse: Address of the logarithms to the base of 2 of sums of exponentials; +inf of rows that have
        no gradient.
    delta: Address of the sums of out · dO; 0 of such rows.
    heads: Of queries.
    pitch: From a head to the next.
    packed: Whether all sequences are in one batch.
    """

    lse: Int64
    delta: Int64
    heads: Int32
    pitch: Int32
    packed: bool

    def first(self, batch: Int32, head: Int32, sequence: Sequence) -> Int64:
        """Place of the first query."""
        if self.packed:
            return Int64(head) * self.pitch + sequence.first_query
        return Int64(batch * self.heads + head) * self.pitch

    def tensors(self, first: Int64, rows: Int32) -> tuple[cute.Tensor, cute.Tensor]:
        """lse and delta of some rows."""
        found = []
        for address in (self.lse, self.delta):
            start = address + first * _BYTES
            pointer = cute.make_ptr(Float32, start, AddressSpace.gmem, assumed_align=_BYTES)
            found.append(cute.make_tensor(pointer, cute.make_layout((rows,), stride=(1,))))
        return tuple(found)


def row_statistics(workspace: Int64, mLse: cute.Tensor) -> RowStatistics:
    """mLse: (B, H, S), or packed (H, T)."""
    *outer, pitch = mLse.shape
    rows = Int64(pitch)
    for extent in outer:
        rows = rows * extent
    lse = workspace + COUNTER_BYTES
    return RowStatistics(lse, lse + rows * _BYTES, outer[-1], pitch, len(outer) == 1)


class RowSums:
    """Writes the statistics of a block's queries. Eight threads share a row.

    columns: That there is room for.
    """

    rows = 64  # of a block

    def __init__(self, columns: int, element_type: type[Numeric], aligned: bool):
        self.columns = columns
        self.vector = Vector(VECTOR if aligned else 1, element_type)

    @cute.jit
    def write(self, mO, mDo, mLse, statistics, sequence, batch, head, first, thread):
        """Of the queries from `first` on."""
        starts = (sequence.first_query, sequence.query_rows)
        out, gradient = (matrix_of(mX, batch, head, *starts) for mX in (mO, mDo))
        rows = sequence.query_rows
        place = statistics.first(batch, head, sequence)
        lse, delta = statistics.tensors(place, rows)
        for step in cutlass.range_constexpr(self.rows * _LANES // THREADS):
            query = first + step * (THREADS // _LANES) + thread // _LANES
            used = query < sequence.queries
            total = self._product(out, gradient, query, used, thread % _LANES)
            (total,) = over_lanes((total,), added, _LANES)
            if (thread % _LANES == 0) & (query < rows):
                logarithm = Float32(math.inf)
                if used:
                    logarithm = _given(mLse, batch, head, sequence.first_query + query)
                lse[query] = logarithm
                delta[query] = total

    def _product(self, out, gradient, query: Int32, used: Boolean, lane: Int32) -> Float32:
        """What a thread has of the product of two rows; 0 of those that are not used."""
        rows = []
        column = lane * self.vector.count
        for matrix in (out, gradient):
            address = matrix.row(query) + Int64(column) * self.vector.element_bytes
            left = (matrix.columns - column) * Int32(used)
            rows.append(GlobalRow(address, left, self.vector))
        terms = []
        for first in range(0, self.columns, _LANES * self.vector.count):
            factors = (row.load(Int32(first)) for row in rows)
            terms += [a * b for a, b in zip(*factors, strict=True)]
        return combined(terms)


def _given(mLse: cute.Tensor, batch: Int32, head: Int32, row: Int32) -> Float32:
    """To the base of 2; +inf of a row that sees nothing."""
    place = (head, row) if len(mLse.shape) == 2 else (batch, head, row)
    lse = mLse[place]
    return select(lse == Float32(-math.inf), Float32(math.inf), lse * LOG2_E)


class SinkGradient:
    """dSink = −Σ over batches and queries of exp(sink − lse) · Δ, in an order that is always the
    same. A block has a head."""

    @cute.jit
    def write(self, statistics, values: Values, batches, thread):
        head, _, _ = cute.arch.block_idx()
        rows, heads, pitch = statistics.pitch, statistics.heads, statistics.pitch
        if const_expr(statistics.packed):
            starts = values["cu_seqlens_q"]
            rows, batches, heads = starts[starts.shape[0] - 1], Int32(1), Int32(0)
        every = Int64(batches * statistics.heads) * pitch
        lse, delta = statistics.tensors(Int64(0), every)
        sink = Float32(values.element("sink", head)) * LOG2_E
        total = Float32(0.0)
        for i in cutlass.range(thread, rows * batches, THREADS, unroll=1):
            place = (Int64(i // rows) * heads + head) * pitch + i % rows
            total = total - power_of_two(sink - lse[place]) * delta[place]
        (total,) = over_lanes((total,), added, WARP)
        sums = SmemAllocator().allocate_tensor(Float32, cute.make_layout(THREADS // WARP))
        if thread % WARP == 0:
            sums[thread // WARP] = total
        cute.arch.sync_threads()
        if thread == 0:
            mSink = values["dSink"]
            whole = combined([sums[warp] for warp in range(THREADS // WARP)])
            mSink[head] = whole.to(mSink.element_type)

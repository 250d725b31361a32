"""How attention's results leave the registers of a consumer, on Hopper."""

import math

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import warp

from ..common.attention.behind import behind_last, fill_behind
from ..common.attention.scores import Place, rows_and_columns
from ..common.attention.softmax import finished
from ..common.attention.statistics import (
    fill_statistics_behind,
    statistics_rows,
    where_seen,
    write_statistics,
)
from ..common.attention.values import Values
from ..common.conversion import select
from ..common.threads import GROUP
from .mma import WGMMA_M
from .sdpa_tiles import Tiles, Work

OWN = 4  # named barriers: one per consumer from this one on


class SdpaOutput:
    """O goes through shared memory, row by row of a consumer, and from there in whole vectors.

    A part of the kernel, which has `tile_m`, `consumers`, `head_dim_v`, `output_type`, `scores` and
    `_mma_pv`.
    """

    @cute.jit
    def _write(self, consumer, thread, tOrO, sO, mO, softmax, work: Work, values, tiles: Tiles):
        """O and the statistics of this consumer's queries."""
        if work.place.query < work.sequence.query_rows:
            self._write_rows(consumer, thread, tOrO, sO, mO, softmax, work, values, tiles)
        if const_expr("cu_seqlens_q" in self.scores.names):
            self._fill_behind(consumer * GROUP + thread % GROUP, mO, work.place, values, tiles)

    def _fill_behind(self, thread, mO, place: Place, values, tiles: Tiles) -> None:
        """Rows behind the last sequence."""
        behind = behind_last(
            *(values["cu_seqlens_q"], place.batch, mO.shape[0]),
            *(place.query // self.tile_m, tiles.blocks, thread, self.consumers * GROUP),
        )
        fill_behind(mO[None, None, place.head, 0], behind)
        fill_statistics_behind(values, place.head, behind)

    @cute.jit
    def _write_rows(self, consumer, thread, tOrO, sO, mO, softmax, work: Work, values, tiles):
        place, sequence = work.place, work.sequence
        lane = thread % GROUP
        own_row = place.query + consumer * WGMMA_M + lane // 32 * 16 + lane % 32 // 4
        sink = None
        if const_expr("sink" in self.scores.names):
            sink = Float32(values["sink"][place.head])
        outputs = rows_and_columns(tOrO)
        statistics = statistics_rows(values, place.batch, place.head, sequence)
        for row in cutlass.range_constexpr(2):
            query = own_row + 8 * row
            done = finished(softmax, row, sink)
            factor = self._factor(done.factor, values, place, tiles)
            if const_expr(self.scores.drops):
                factor = factor * self.scores.kept_factor(values)
            exists = query < sequence.queries
            for column in cutlass.range_constexpr(cute.size(outputs, mode=[1])):
                value = outputs[row, column] * factor
                outputs[row, column] = select(exists, value, Float32(0.0))
            writes = (lane % 4 == 0) & (query < sequence.query_rows)
            done = where_seen(exists, done)
            if writes:
                write_statistics(statistics, query, done)

        to_shared = cute.make_tiled_copy_C(
            cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), self.output_type), self._mma_pv()
        )
        rounded = cute.make_rmem_tensor_like(tOrO, self.output_type)
        rounded.store(tOrO.load().to(self.output_type))
        shared = to_shared.get_slice(thread).partition_D(sO[None, None, 0])
        # Nobody in the group reads what lay there any more.
        cute.arch.barrier(barrier_id=OWN + consumer, number_of_threads=GROUP)
        cute.copy(to_shared, to_shared.retile(rounded), shared)
        cute.arch.barrier(barrier_id=OWN + consumer, number_of_threads=GROUP)
        batch = place.batch
        if const_expr("cu_seqlens_q" in self.scores.names):
            batch = Int32(0)
        mO = cute.domain_offset((sequence.first_query, 0), mO[None, None, place.head, batch])
        self._copy_out(consumer, lane, sO, mO, place.query, sequence.query_rows)

    def _factor(self, factor: Float32, values: Values, place: Place, tiles: Tiles) -> Float32:
        """Of a row of O."""
        return factor

    @cute.jit
    def _copy_out(self, consumer, lane, sO, mO, first, rows):
        """In vectors, as far as there are rows and columns."""
        vector = 128 // self.output_type.width
        columns = math.gcd(self.head_dim_v, 64)
        across = columns // vector
        atom = cute.make_copy_atom(
            cute.nvgpu.CopyUniversalOp(), self.output_type, num_bits_per_copy=128
        )
        threads = cute.make_ordered_layout((GROUP // across, across), order=(1, 0))
        copy = cute.make_tiled_copy_tv(atom, threads, cute.make_layout((1, vector)))
        copy = copy.get_slice(lane)
        for part in cutlass.range_constexpr(self.head_dim_v // columns):
            sO_part = cute.local_tile(sO, (WGMMA_M, columns, 1), (consumer, part, 0))
            tOsO = copy.partition_S(sO_part[None, None, 0])
            column = part * columns + lane % across * vector
            for i in cutlass.range_constexpr(cute.size(tOsO, mode=[1])):
                row = first + consumer * WGMMA_M + lane // across + i * (GROUP // across)
                if (row < rows) & (column < mO.shape[1]):
                    fragment = cute.make_rmem_tensor(vector, self.output_type)
                    cute.copy(atom, tOsO[None, i, 0], fragment)
                    target = cute.make_ptr(
                        self.output_type,
                        mO[row, None].iterator.toint() + column * (self.output_type.width // 8),
                        cute.AddressSpace.gmem,
                        assumed_align=16,
                    )
                    cute.copy(atom, fragment, cute.make_tensor(target, cute.make_layout(vector)))

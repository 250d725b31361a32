"""What the warp groups of a Hopper matrix product do that multiply."""

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
from cutlass import const_expr
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

from ..common.threads import GROUP
from .cluster_sums import ClusterShare
from .mainloop import Fragments
from .mma import WGMMA_M, make_tiled_mma
from .plan import CONSUMER_BARRIERS, GemmPlan
from .split_float32 import SMALL_BUFFERS


class GemmConsumer(GemmPlan):
    """The consumers' part of `Gemm`: tiles are multiplied, summed up if they are split, written."""

    @cute.jit
    def _consume(
        self,
        consumer,
        tiled_mma,
        sA,
        sB,
        a_layout,
        b_layout,
        k_tiles,
        tma_d,
        mD,
        sD,
        d_majors: cutlass.Constexpr,
        operands,
        reduced,
        scales,
        extents,
        pipeline_ab,
        turns,
        order,
        split,
        queue,
        storage,
    ):
        """One group: its rows of all tiles, or all of every other tile (pingpong)."""
        tile_m, tile_n, _ = self.tile_shape
        block = cute.arch.block_idx()
        fragments = self._fragments(consumer, tiled_mma, sA, sB, a_layout, b_layout, storage)
        accumulators = cute.make_rmem_tensor(
            tiled_mma.partition_shape_C((tile_m, tile_n)), self.accumulator_type
        )
        stage = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, self.stages)
        first, end, step = self._tiles(order, split)
        turn = None
        if const_expr(self.pingpong):
            first, step = first + consumer * step, 2 * step
            turn = turns.state
            if consumer == 1:
                stage.advance(k_tiles)
        if const_expr(self.promoted and self.groups_per_tile > 1 and self.split_k is None):
            self._fall_behind(consumer, k_tiles, pipeline_ab, stage)
        work = (
            *(consumer, tiled_mma, fragments, accumulators, scales, k_tiles, pipeline_ab, turns),
            *(tma_d, mD, sD, d_majors, operands, reduced, extents, order, split, storage, block),
            self._carry(),
        )
        self._consume_tiles((first, end, step), queue, stage, turn, work)
        self.output.drain()

    def _carry(self):
        """Of reductions, from tile to tile; None: each tile is by itself, as those are whose K is
        cut: it is the last group to arrive that has a tile, and sums would be rounded otherwise
        from run to run."""
        return self.output.reduced.carry() if self.split_k is None else None

    @cute.jit
    def _consume_tiles(self, tiles, queue, stage, turn, work):
        first, end, step = tiles
        for tile in cutlass.range(first, end, step, unroll=1):
            stage, turn = self._consume_tile(tile, stage, turn, *work)
            if const_expr(work[-1] is not None):
                self._finish(tile, tile + step, end, *work)

    @cute.jit
    def _finish(self, tile, following, end, consumer, *work):
        """Behind the last tile of a matrix: what was carried leaves."""
        *_, reduced, extents, order, _, storage, _, carried = work
        batch = order.coordinates(tile)[2]
        last = following >= end
        if not last:
            last = order.coordinates(following)[2] != batch
        if last:
            self.output.finish(
                *(consumer, carried, batch, extents, *reduced),
                *(storage.D.data_ptr(), storage.flags.data_ptr() + consumer),
            )

    @cute.jit
    def _consume_tile(
        self,
        tile,
        stage,
        turn,
        consumer,
        tiled_mma,
        fragments,
        accumulators,
        scales,
        k_tiles,
        pipeline_ab,
        turns,
        tma_d,
        mD,
        sD,
        d_majors: cutlass.Constexpr,
        operands,
        reduced,
        extents,
        order,
        split,
        storage,
        block,
        carried,
    ):
        """Multiplies and writes one; (stage behind it, the next turn)."""
        tile_m, tile_n, _ = self.tile_shape
        block_m, block_n, _ = block
        share = 0 if const_expr(self.pingpong) else consumer
        m, n, batch = order.coordinates(tile)
        first_k, count = self._k_range(k_tiles, split, tile, batch)
        row = (m * self.cluster_shape[0] + block_m) * (tile_m // WGMMA_M) + share
        column = n * self.cluster_shape[1] + block_n
        if const_expr(self.pingpong):
            turns.wait(turn)
        start, place = (row * WGMMA_M, column * tile_n, batch), (row, column, batch)
        early, steps = None, []
        if const_expr(self.early_registers > 0):
            early, steps = self.output.read_early(
                accumulators, operands, place, extents, self.early_registers
            )
        stage, last = self._multiply(
            *(tiled_mma, fragments, accumulators, scales, start, first_k, count),
            *(pipeline_ab, stage, steps),
        )
        if const_expr(self.pingpong):
            turn = turns.arrive(turn)
            stage.advance(k_tiles)
        if const_expr(not self.promoted):
            warpgroup.wait_group(0)
            pipeline_ab.consumer_release(last)

        destination = (
            *(tma_d, mD, sD, operands, d_majors, place, extents),
            *(*reduced, storage.D.data_ptr(), storage.flags.data_ptr() + consumer),
        )
        if const_expr(self.split_k is None):
            self.output.write(consumer, accumulators, *destination, carried=carried, threads=early)
        elif const_expr(self.parallel):
            self._leave(consumer, accumulators, split)
        else:
            if self._combine(consumer, accumulators, split, tile, storage):
                self.output.write(consumer, accumulators, *destination)
        return stage, turn

    def _multiply(
        self,
        tiled_mma,
        fragments,
        accumulators,
        scales,
        place,
        first_k,
        count,
        pipeline_ab,
        stage,
        meanwhile: cutlass.Constexpr = (),
    ):
        """The products of a tile. (stage behind it, last one of it: its products are in flight, and
        it is not released, unless they are promoted)"""
        if not self.promoted:
            return self.mainloop.multiply(
                tiled_mma, fragments, accumulators, count, pipeline_ab, stage, meanwhile
            )
        for call in meanwhile:
            call()
        stage = self.mainloop.multiply_promoted(
            *(tiled_mma, fragments, accumulators, scales, place, first_k, count),
            *(pipeline_ab, stage),
        )
        return stage, stage

    @cute.jit
    def _fall_behind(self, consumer, k_tiles, pipeline_ab, stage):
        """Consumers that share a tile stay a k tile apart: while one promotes its products, or
        writes its part, another has the tensor cores."""
        if consumer > 0 and k_tiles > 1:
            following = stage.clone()
            following.advance()
            pipeline_ab.consumer_wait(following)

    def _fragments(self, consumer, tiled_mma, sA, sB, a_layout, b_layout, storage):
        """What this group reads of shared memory."""
        thr_mma = tiled_mma.get_slice((0 if self.pingpong else consumer) * GROUP)
        A = tiled_mma.make_fragment_A(thr_mma.partition_A(sA))
        B = self._fragment_b(tiled_mma, sB)
        if not self.split_float32:
            return Fragments(A, B)
        sA = storage.A_small.get_tensor(_buffers(a_layout.outer), swizzle=a_layout.inner)
        sB = storage.B_small.get_tensor(_buffers(b_layout.outer), swizzle=b_layout.inner)
        return Fragments(
            A,
            B,
            tiled_mma.make_fragment_A(thr_mma.partition_A(sA)),
            tiled_mma.make_fragment_B(thr_mma.partition_B(sB)),
            tiles=(
                (storage.A.data_ptr(), storage.A_small.data_ptr()),
                (storage.B.data_ptr(), storage.B_small.data_ptr()),
            ),
            barrier_id=CONSUMER_BARRIERS + self.consumers + (consumer if self.pingpong else 0),
        )

    def _fragment_b(self, tiled_mma, sB):
        """Of all columns that are loaded: the tile's are the first of them, and a wgmma of more
        columns describes them by the same strides."""
        if self.loaded_columns != self.tile_shape[1]:
            a_type, b_type = self.operand_types
            majors = OperandMajorMode.K, OperandMajorMode.MN
            wide = (1, self.loaded_columns)
            tiled_mma = make_tiled_mma(a_type, b_type, self.accumulator_type, *majors, *wide)
        return tiled_mma.make_fragment_B(tiled_mma.get_slice(0).partition_B(sB))

    def _combine(self, consumer, accumulators, split, tile, storage):
        """Adds up what several blocks computed of a tile; True for the group that has it all."""
        worker = cute.arch.block_idx()[2]
        if self.cluster_sums is not None:
            further = None
            if self.meets_in_workspace:
                cluster = worker // self.cluster_k
                further = ClusterShare(split, cluster, tile, storage.flags.data_ptr())
            return self.cluster_sums.combine(
                accumulators,
                # All that was loaded has been multiplied.
                cute.recast_ptr(storage.A.data_ptr(), dtype=accumulators.element_type),
                thread=cute.arch.thread_idx()[0] - GROUP,
                barrier_id=CONSUMER_BARRIERS + self.consumers,
                further=further,
            )
        return self.partial_sums.combine(
            accumulators,
            split,
            *(worker, tile),
            group=self._summing_group(consumer),
            thread=cute.arch.thread_idx()[0] % GROUP,
            flag=storage.flags.data_ptr() + consumer,
            barrier_id=CONSUMER_BARRIERS + consumer,
        )

    def _leave(self, consumer, accumulators, split):
        """A part of a tile, or all of it, for a kernel that adds them up."""
        worker, thread = cute.arch.block_idx()[2], cute.arch.thread_idx()[0] % GROUP
        group = self._summing_group(consumer)
        self.partial_sums.leave(accumulators, split, worker, group, thread)

    def _summing_group(self, consumer):
        """Its number among those of the cluster."""
        block_m, block_n, _ = cute.arch.block_idx()
        return (block_m + block_n * self.cluster_shape[0]) * self.consumers + consumer


def _buffers(layout):
    """A layout of stages, of as many as there are buffers of small parts."""
    stage = cute.select(layout, mode=[0, 1])
    return cute.append(stage, cute.make_layout(SMALL_BUFFERS, stride=cute.cosize(stage)))

"""How a grouped product for Hopper brings rows to its consumers that lie anywhere."""

from functools import partial

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
from cutlass import Int32, const_expr

from .gathered import ROW_BYTES, STAGES, RowGather, stages_behind, tell
from .gemm_producer import tma_copy_options
from .scheduled import ScheduledGemm


class GatheringProducer(ScheduledGemm):
    """The producer's part of `GroupedGemm` where rows are gathered: all four of its warps copy A
    (`gathered`), and the first of them lets TMA copy B; a stage is full when all have said so."""

    def _plan_gather(self):
        width = self.operand_types[0].width
        if self.swap_ab or self.cluster_shape[1] > 1 or self.stages < STAGES:
            raise ValueError(
                f"rows are gathered as rows of the instruction, by each block, in {STAGES} stages"
            )
        if self.tile_shape[2] * width != 8 * ROW_BYTES:
            raise ValueError(f"rows are gathered {ROW_BYTES} bytes of K at a time")
        self.gathered = True
        self.producer_warps = 4
        self._row_gather = RowGather(self.tile_shape[0], width // 8)
        if self.consumers == 2:
            self.registers = (56, 224)

    def _arrivals(self) -> int:
        return 1 + (self.producer_warps if self.gathered else 0)

    def _bytes_by_tma(self) -> int:
        copied = self._row_gather.rows * ROW_BYTES if self.gathered else 0
        return self._stage_bytes() - copied

    @cute.jit
    def _gather(
        self,
        mA,
        sA,
        tma_b,
        mB,
        sB,
        cluster_layout,
        pipeline_ab,
        k_tiles,
        offsets,
        row_index,
        descriptors,
        queue,
    ):
        thread = cute.arch.thread_idx()[0]
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        block_m, _, _ = cute.arch.block_idx()
        rows, behind = self._row_gather, stages_behind(self.stages)
        b_mask = self._multicast_masks(cluster_layout)[1]
        weights = self._weights((None, None, None), (tma_b, mB, sB))
        stage = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, self.stages)
        tiles = self._grouped_tiles(offsets, (cute.size(mA, mode=[0]), cute.size(mB, mode=[0])))
        index, position = self._first_to_load(queue)
        begun = Int32(0)
        is_tile, tile, state = tiles.find(tiles.start_at(index), index)
        while is_tile:
            first = tile.first_row + tile.m * self.rows_per_tile + block_m * self.tile_shape[0]
            sources = rows.sources(mA, row_index, first, tile.end_row, thread)
            _, tBgB, tBsB = self._weights_of(weights, tile)
            descriptor = self._descriptor(descriptors, tile)
            load = partial(
                self._gather_steps,
                *(sources, mA.shape[1], sA, tma_b, tBgB, tBsB),
                *(b_mask, descriptor, pipeline_ab),
            )
            (stage, begun), answer = self._load_and_ask(
                queue, load, *self._part(k_tiles), (stage, begun)
            )
            index, position = self._next_to_load(queue, index, position, answer)
            is_tile, tile, state = tiles.find(state, index)
        for before in cutlass.range_constexpr(behind, 0, -1):
            if begun >= before:
                tell(self._full_before(pipeline_ab, stage, before), before - 1)
        if const_expr(queue is not None):
            self._finish_loading(queue, index, tiles.count(state), position)
        if warp == 0:
            self._stay(pipeline_ab, stage)

    @cute.jit
    def _gather_steps(
        self,
        sources,
        size_k,
        sA,
        tma_b,
        tBgB,
        tBsB,
        b_mask,
        descriptor,
        pipeline_ab,
        first_k,
        count,
        state,
    ):
        """Some k tiles of a tile; state: (the stage of the first, stages begun before)."""
        stage, begun = state
        thread = cute.arch.thread_idx()[0]
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        rows, behind = self._row_gather, stages_behind(self.stages)
        for k in cutlass.range(first_k, first_k + count, unroll=1):
            if warp == 0:
                pipeline_ab.producer_acquire(stage)
                full = pipeline_ab.producer_get_barrier(stage)
                b = tBgB[None, k], tBsB[None, stage.index]
                cute.copy(tma_b, *b, **tma_copy_options(full, b_mask, descriptor))
            else:
                pipeline_ab.sync_object_empty.wait(stage.index, stage.phase)
            target = sA.iterator.toint() + stage.index * (rows.rows * ROW_BYTES)
            rows.copy(sources, k, size_k, target, thread)
            if begun >= behind:
                tell(self._full_before(pipeline_ab, stage, behind), behind)
            begun += 1
            stage.advance()
        return stage, begun

    def _full_before(self, pipeline_ab, stage, count: int) -> cute.Pointer:
        """The barrier of the stage so many before this one."""
        index = (stage.index + (self.stages - count)) % self.stages
        return pipeline_ab.sync_object_full.get_barrier(index)

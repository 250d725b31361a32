"""Grouped matrix products for Hopper, summed over each group: gradients of weights."""

from dataclasses import replace
from functools import partial

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
from cutlass import Int32, Int64, const_expr

from ..common.accumulated import Accumulated
from ..common.expert_matrices import ExpertMatrices
from ..common.longest_first import LongestFirst
from ..common.modes import gemm_modes, operand_batch_last
from ..common.work_split import COUNTER_BYTES
from .descriptors import BYTES as DESCRIPTOR_BYTES
from .descriptors import Descriptors
from .grid import grid_of
from .grouped_output import ExpertsOutput, written_as
from .ragged import loaded_by_groups, loads_of_group
from .scheduled import ScheduledGemm


class GroupedSumGemm(ScheduledGemm):
    """D[group] = epilogue(A · B) summed over the group: gradients of weights.

    Roles, pipelines and shared memory are those of `Gemm`, a group is a batch. The k tiles of a
    group begin where it begins; TMA fills the last one with zeros behind its end (`ragged`).

    A (M,T), B (T,N), D (E,M,N), offsets (E,) Int32: group e has the columns of A and rows of B
    from offsets[e - 1] (0 for the first) to offsets[e]; without any, the product is 0. A and B
    have 16 bits and stride 1 along M and N; alignment as in `Gemm`. The schedule is cooperative,
    because groups have different numbers of k tiles; K is not split.

    accumulate: D is added to, see `Accumulated`.
    experts: D is (E,) Int64, addresses of matrices that lie anywhere; the first further operands
             are the columns of one and its stride that is not 1. A small kernel makes a descriptor
             of each before, if TMA stores D (`descriptors`), in the workspace.
    scheduler: see `ScheduledGemm`; tiles of the longest groups are taken first (`LongestFirst`).
    """

    def __init__(
        self,
        *args,
        accumulate: bool = False,
        experts: ExpertMatrices | None = None,
        **keywords,
    ):
        if accumulate:
            keywords["epilogue"] = Accumulated(keywords.get("epilogue"))
        super().__init__(*args, **keywords)
        self.accumulate = accumulate
        self.experts = experts
        if self.pingpong or self.split_k is not None or any(self.repacked) or self.promoted:
            raise ValueError("sums over groups are cooperative, not split, copied or promoted")
        self._check_loads_tiles_alone()
        if experts is not None:
            self._plan_experts()

    def _plan_experts(self):
        if self.swap_ab or self.epilogue.full[0].columns in self.epilogue.halves:
            raise ValueError(
                "sums that lie anywhere are neither transposed nor dealt out in halves"
            )
        self.output = written_as(
            ExpertsOutput, self.output, experts=self.experts, accumulate=self.accumulate
        )

    @cute.jit
    def with_operands(
        self,
        mA: cute.Tensor,
        mB: cute.Tensor,
        mD: cute.Tensor,
        offsets: cute.Tensor,
        operands,
        workspace: Int64,
        max_clusters: Int32,
        stream: cuda.CUstream,
    ):
        """operands: a tuple of what describes experts, then what the epilogue reads, and its
        outputs beside D; workspace: an address, used if anything is reduced, described or taken."""
        described, parts = (), None
        if const_expr(self.experts is not None):
            shape, pitch = (mA.shape[0], Int32(operands[0])), operands[1]
            first = workspace + COUNTER_BYTES
            parts = first + Int64(offsets.shape[0]) * DESCRIPTOR_BYTES
            described, operands = (mD, shape, pitch, first), operands[2:]
            # Of some address: what the kernel writes is described apart.
            mD = self.experts.at(mA.iterator.toint(), shape, pitch)
            before = cute.make_tensor(mD.iterator, cute.select(mD.layout, mode=[2, 0, 1]))
            mA, mB = operand_batch_last(mA), operand_batch_last(mB, transposed=True)
        else:
            before = mD
            mA, mB, mD = gemm_modes(mA, mB, mD)
        if const_expr(self.accumulate):
            read = len(self.epilogue.kinds) - 1
            operands = (*operands[:read], before, *operands[read:])
        mA, mB, mD, mR, operands = self._modes(mA, mB, mD, operands)
        extents, batches = (mA.shape[0], mB.shape[0]), mD[0].shape[2]
        if const_expr(self.experts is not None):
            batches, operands = offsets.shape[0], (*operands, described)
        order = self._order(extents, batches, max_clusters)
        clusters = cutlass.min(order.total, max_clusters)
        space = self._reduction_space(extents, batches, order, clusters, workspace)
        if const_expr(self.experts is not None):
            if const_expr(space is not None):
                space = replace(space, parts=parts)
            if const_expr(not self.tma_stores[0]):
                described = ()
        self._launch(
            *(loaded_by_groups(mA), loaded_by_groups(mB), mD, operands, (mR, space), ()),
            *(order, offsets, grid_of(clusters, max_clusters), stream, described),
            counter=self._counter(workspace),
        )

    def _describe(self, tma_a, tma_b, addresses, shape, pitch, first, stream):
        Descriptors(self.experts)(self.output.atom, addresses, shape, pitch, first, stream)

    @cute.jit
    def _produce(
        self,
        tma_a,
        mA,
        sA,
        tma_b,
        mB,
        sB,
        cluster_layout,
        pipeline_ab,
        k_tiles,
        order,
        offsets,
        queue,
        tma_edges,
        begin,
        leaves_room,
    ):
        """One warp: every stage of every tile of this block, in order."""
        self._await_inputs(leaves_room)
        stage = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, self.stages)
        loads = (tma_a, mA, sA, tma_b, mB, sB)
        how = self._multicast_masks(cluster_layout), pipeline_ab
        if const_expr(queue is None):
            first, end, step = self._tiles(order, offsets)
            for tile in cutlass.range(first, end, step, unroll=1):
                stage, _ = self._load_sum(tile, order, offsets, *loads, *how, stage, queue)
        else:
            longest_first = LongestFirst(offsets)
            taken_in = longest_first, longest_first.places(), order
            tile, position = self._first_in_order(queue, taken_in)
            while tile < order.total:
                stage, answer = self._load_sum(tile, order, offsets, *loads, *how, stage, queue)
                tile, position = self._next_to_load(queue, tile, position, answer, taken_in)
            self._finish_loading(queue, tile, order.total, position)
        # The other block of the cluster still signals this one's barriers: stay until it is done.
        pipeline_ab.producer_tail(stage)

    @cute.jit
    def _load_sum(
        self, tile, order, offsets, tma_a, mA, sA, tma_b, mB, sB, masks, pipeline_ab, stage, queue
    ):
        """The k tiles of a tile, see `_load_and_ask`."""
        tile_m, tile_n, tile_k = self.tile_shape
        block_m, block_n, _ = cute.arch.block_idx()
        m, n, group = order.coordinates(tile)
        first, end = _range_of_group(offsets, group)
        m, n = m * self.cluster_shape[0] + block_m, n * self.cluster_shape[1] + block_n
        mA_group, mB_group = (loads_of_group(mX, first, end) for mX in (mA, mB))
        gA = cute.local_tile(mA_group, (tile_m, tile_k), (m, None, 0, 0))
        gB = cute.local_tile(mB_group, (tile_n, tile_k), (n, None, 0, 0))
        tAsA, tAgA = self._partition_load(tma_a, sA, gA, block_n, self.cluster_shape[1])
        tBsB, tBgB = self._partition_load(tma_b, sB, gB, block_m, self.cluster_shape[0])
        of_tile = tma_a, tAgA, tAsA, tma_b, tBgB, tBsB
        load = partial(self._load_tile, *of_tile, masks, pipeline_ab)
        return self._load_and_ask(queue, load, Int32(0), self._k_tiles(first, end), stage)

    @cute.jit
    def _first_in_order(self, queue, order) -> tuple:
        """(number of the first tile to load, position in the queue of the next one). The others
        read it, as they do not know the order."""
        index, position = self._first_to_load(queue)
        if self._leads():
            index = self._in_order(index, order)
            queue.put(index, position)
        else:
            index = queue.read(position)
        return index, position + 1

    @cute.jit
    def _in_order(self, number, order):
        longest_first, places, tiles = order
        if number < tiles.total:
            place, in_group = divmod(number, tiles.per_batch)
            group = longest_first.group_at(places, Int32(place))
            number = group * Int32(tiles.per_batch.divisor) + Int32(in_group)
        return number

    @cute.jit
    def _consume_tiles(self, tiles, queue, stage, turn, work):
        first, end, step = tiles
        if const_expr(queue is None):
            for tile in cutlass.range(first, end, step, unroll=1):
                stage, turn = self._consume_tile(tile, stage, turn, *work)
        else:
            tile, position = self._next_to_multiply(queue, Int32(0), Int32(0))
            while tile < end:
                stage, turn = self._consume_tile(tile, stage, turn, *work)
                tile, position = self._next_to_multiply(queue, tile, position)

    def _k_range(self, k_tiles, offsets, tile, group):
        """(first k tile, number of them) of a group."""
        return Int32(0), self._k_tiles(*_range_of_group(offsets, group))

    def _k_tiles(self, first, end):
        """An empty group has one, of zeros."""
        return cutlass.max(cute.ceil_div(end - first, self.tile_shape[2]), 1)


@cute.jit
def _range_of_group(offsets: cute.Tensor, group: Int32) -> tuple:
    """(first, behind the last)"""
    first = Int32(0)
    if group > 0:
        first = offsets[group - 1]
    return first, cutlass.max(offsets[group], first)

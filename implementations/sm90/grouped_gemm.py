"""Grouped matrix products for Hopper."""

from fractions import Fraction
from functools import partial

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
from cutlass import Int32, Int64, const_expr
from cutlass.cute.nvgpu import cpasync, warpgroup

from ..common.epilogue import halves_in_turn
from ..common.expert_matrices import ExpertMatrices
from ..common.grouped_reductions import GroupedReductions
from ..common.grouped_tiles import GroupedTiles, GroupTile, most_row_tiles
from ..common.modes import gemm_modes, operand_batch_last
from ..common.threads import GROUP
from ..common.work_split import COUNTER_BYTES
from .descriptors import BYTES as DESCRIPTOR_BYTES
from .descriptors import Descriptors, descriptor_of
from .grid import grid_of
from .grouped_output import ScatteredOutput, written_as
from .grouped_producer import GatheringProducer
from .mainloop import apart
from .mma import WGMMA_M
from .paired_output import ROWS, MatricesOfPairs
from .plan import MOST_COLUMNS
from .promotion import scale_modes
from .ragged import ending_at


class MatricesInHalves(ExpertMatrices):
    """Matrices of which the columns of the product are taken in turns, as TMA sees them."""

    def at(self, address, shape, pitch):
        return halves_in_turn(super().at(address, shape, pitch), 0)


class GroupedGemm(GatheringProducer):
    """D = epilogue(A · B[group]) for groups of rows: each has a matrix B of its own.

    Roles, pipelines, schedules and shared memory are those of `Gemm`. Tiles are numbered group by
    group; every warp that needs to know finds its own tiles from the offsets (`GroupedTiles`), so
    nothing is known on the host and nothing is prepared on the device.

    A's rows are loaded from wherever a group begins; those of the next group come along and are
    dropped. Outputs end with the group: TMA clips them (`ragged`), or threads do.

    A (T,K), B (E,K,N), D (T,N), offsets (E,) Int32: group e has the rows from offsets[e - 1] (0 for
    the first) to offsets[e]. Rows behind the last group are left alone. Alignment and majors as in
    `Gemm`, but D's rows have stride 1 along N. If K is split, a cluster has the parts of one tile:
    there are as many clusters as there may be tiles.

    gathered: the first further operand is (T,) Int32; row t of the product is that row of A, which
               has any number of rows. All four warps of the producer copy A then (`gathered`), and
               the first of them lets TMA copy B; a stage is full when all have said so.
    scattered: the next one is, too; row t of the result becomes that row of D, which is written by
               threads then. What else an epilogue reads and writes by rows has row t.

    experts: B is (E,) Int64, addresses of matrices that lie anywhere; the next further operands are
             the columns of one and its stride that is not 1. A small kernel makes a descriptor of
             each before (`descriptors`), in the workspace.
    scheduler: see `ScheduledGemm`.

    Values with rows have no batch mode, others have one of E: what is reduced over rows is (E,N),
    over rows and columns (E,). Groups without rows have the latter two as well.
    """

    def __init__(
        self,
        *args,
        gathered: bool = False,
        scattered: bool = False,
        experts: ExpertMatrices | None = None,
        **keywords,
    ):
        super().__init__(*args, **keywords)
        self.experts = experts
        if self.split_k != (self.cluster_k if self.cluster_k > 1 else None):
            raise ValueError("grouped products split K among the blocks of a cluster alone")
        if any(self.repacked):
            raise ValueError("grouped products copy no operands")
        if self.dynamic and self.cluster_k > 1:
            raise ValueError("clusters along K have a tile each, and take none")
        self._check_loads_tiles_alone()
        if scattered and (self.swap_ab or not self.tma_stores[0]):
            raise ValueError("rows are scattered in whole vectors, as rows of the instruction")
        columns = self.epilogue.full[0].columns
        if scattered and columns in self.epilogue.halves:
            raise ValueError("rows that are scattered are not dealt out in halves")
        if scattered and columns != 1:
            self.output = written_as(ScatteredOutput, self.output)
        if gathered:
            self._plan_gather()
        self.ragged = 1 if self.swap_ab else 0
        self.output.ragged = self.ragged
        self.output.scattered = scattered
        self.rows_per_tile = self.tile_shape[self.ragged] * self.cluster_shape[self.ragged]
        #: Whether a group of threads may have a tile without any rows, and whether it passes over
        #: blocks of rows behind the end of a group: blocks that have a static share of tiles would
        #: no longer read the same operands at one time, which costs more.
        self.may_have_none = self.groups_per_tile > 1 or self.cluster_shape[0] > 1
        several = self.row_blocks > 1 or self.may_have_none
        # Those that split float32 together wait for each other.
        may = not (self.swap_ab or self.split_float32)
        self.passes_over = self.dynamic and may and several
        if self.groups_per_tile > 1 and self.tile_shape[1] == MOST_COLUMNS:
            # Their stages hide what the counter takes; asked early they were up to 2 % slower.
            self.asks_early = 0

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
        """operands: a tuple of row indices of A and of D, as there are, and what describes experts;
        then the block scales of A and B if there are, what the epilogue reads, and its outputs
        beside D; workspace: an address, used if anything is reduced, described or taken."""
        rows, groups = mA.shape[0], offsets.shape[0]
        picked, places = None, None
        if const_expr(self.gathered):
            picked, operands = operands[0], operands[1:]
            rows = picked.shape[0]
        if const_expr(self.output.scattered):
            places, operands = operands[0], operands[1:]
        (columns, pitch), scales = (None, None), ()
        if const_expr(self.experts is not None):
            (columns, pitch), operands = operands[:2], operands[2:]
        if const_expr(self.block_scales):
            scales, operands = scale_modes(*operands[:2]), operands[2:]
            if const_expr(self.gathered):
                scales = (*scales, picked)
        descriptors, described, parts = None, (), workspace + COUNTER_BYTES
        if const_expr(self.experts is not None):
            shape = (Int32(columns), mA.shape[1])
            descriptors, described = parts, (mB, shape, pitch, parts)
            parts += Int64(groups) * DESCRIPTOR_BYTES
            mA, mD = operand_batch_last(mA), operand_batch_last(mD)
            # Of some address: what the kernel reads is described apart.
            mB = self.experts.at(mA.iterator.toint(), shape, pitch)
        else:
            mA, mB, mD = gemm_modes(mA, mB, mD)
        mA, mB, mD, mR, operands = self._modes(mA, mB, mD, operands)
        row_tiles = most_row_tiles(rows, groups, self.rows_per_tile)
        tiles = row_tiles * self._tiles_across((mA.shape[0], mB.shape[0]))
        clusters = cutlass.max(tiles, 1)
        if const_expr(self.cluster_k == 1):
            clusters = cutlass.min(clusters, max_clusters)
        grid = grid_of(clusters, max_clusters)
        space = None
        if const_expr(len(self.epilogue.reduced) > 0):
            space = (workspace, parts)
        self._launch(
            *(mA, mB, mD, operands, (mR, space), scales),
            *(offsets, (picked, places, descriptors), grid, stream, described),
            counter=self._counter(workspace),
        )

    def _describe(self, tma_a, tma_b, addresses, shape, pitch, first, stream):
        tma, experts = tma_a if self.swap_ab else tma_b, self.experts
        pairs = self.output.epilogue.row_pairs
        if pairs is not None and pairs.granularity != ROWS:
            experts = MatricesOfPairs(**vars(experts), row_pairs=pairs)
        elif Fraction(1) in self.output.epilogue.halves:
            experts = MatricesInHalves(**vars(experts))
        Descriptors(experts)(tma, addresses, shape, pitch, first, stream)

    def _tiles_across(self, extents) -> Int32:
        """Clusters of tiles along the mode that groups do not cut."""
        across = 1 - self.ragged
        width = self.tile_shape[across] * self.cluster_shape[across]
        return Int32(cute.ceil_div(extents[across], width))

    def _grouped_tiles(self, offsets, extents) -> GroupedTiles:
        width = self._band_widths()[self.ragged]
        return GroupedTiles(offsets, self._tiles_across(extents), self.rows_per_tile, width)

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
        offsets,
        indices,
        queue,
        tma_edges,
        begin,
        leaves_room,
    ):
        """One warp, or four that gather rows: every stage of every tile of this block, in order."""
        self._await_inputs(leaves_room)
        if const_expr(self.gathered):
            self._gather(
                *(mA, sA, tma_b, mB, sB),
                *(cluster_layout, pipeline_ab, k_tiles, offsets, indices[0], indices[2], queue),
            )
        else:
            self._load(
                *(tma_a, mA, sA, tma_b, mB, sB),
                *(cluster_layout, pipeline_ab, k_tiles, offsets, indices[2], queue),
            )

    @cute.jit
    def _load(
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
        offsets,
        descriptors,
        queue,
    ):
        masks = self._multicast_masks(cluster_layout)
        weights = self._weights((tma_a, mA, sA), (tma_b, mB, sB))
        stage = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, self.stages)
        tiles = self._grouped_tiles(offsets, (cute.size(mA, mode=[0]), cute.size(mB, mode=[0])))
        index, position = self._first_to_load(queue)
        is_tile, tile, state = tiles.find(tiles.start_at(index), index)
        while is_tile:
            rows = self._rows((tma_a, mA, sA), (tma_b, mB, sB), tile)
            of_group = self._weights_of(weights, tile)
            own = (None, self._descriptor(descriptors, tile))
            a, b = rows, of_group
            if const_expr(self.swap_ab):
                a, b, own = b, a, own[::-1]
            load = partial(self._load_tile, *a, *b, masks, pipeline_ab, descriptors=own)
            stage, answer = self._load_and_ask(queue, load, *self._part(k_tiles), stage)
            index, position = self._next_to_load(queue, index, position, answer)
            is_tile, tile, state = tiles.find(state, index)
        if const_expr(queue is not None):
            self._finish_loading(queue, index, tiles.count(state), position)
        self._stay(pipeline_ab, stage)

    def _stay(self, pipeline_ab, stage):
        """Until nobody signals this block's barriers any more: the others of its cluster, unless
        each has a part of K."""
        if self.cluster_k == 1:
            pipeline_ab.producer_tail(stage)

    def _part(self, k_tiles):
        """(first k tile, number of them) that this block has of each of its tiles."""
        return self._k_range(k_tiles, None, self._cluster(), None)

    def _weights(self, a, b) -> tuple:
        """(TMA, all tiles, where they go in shared memory) of the operand that every group has."""
        across = 1 - self.ragged
        tma, mX, sX = (a, b)[across]
        tile = (self.tile_shape[across], self.tile_shape[2])
        gX = cute.local_tile(mX, tile, (None, None, None))
        shared, tiles = self._share(tma, sX, gX, across)
        return tma, tiles, shared

    def _weights_of(self, weights, tile: GroupTile) -> tuple:
        """The same of a tile: (TMA, k tiles, where they go)."""
        tma, tiles, shared = weights
        across = 1 - self.ragged
        place = tile.n * self.cluster_shape[across] + cute.arch.block_idx()[across]
        batch = tile.group if self.experts is None else 0
        return tma, tiles[None, place, None, batch], shared

    def _descriptor(self, descriptors, tile: GroupTile):
        """Of the group's matrix, which another kernel has written; None: that of the atom."""
        if descriptors is None:
            return None
        descriptor = descriptor_of(descriptors, tile.group)
        cpasync.fence_tma_desc_acquire(descriptor)
        return descriptor

    def _rows(self, a, b, tile: GroupTile) -> tuple:
        """(TMA, k tiles, where they go) of a tile's rows, which begin anywhere."""
        tma, mX, sX = (a, b)[self.ragged]
        first = tile.first_row + tile.m * self.rows_per_tile
        gX = cute.local_tile(
            cute.domain_offset((first, 0, 0), mX),
            (self.tile_shape[self.ragged], self.tile_shape[2]),
            (cute.arch.block_idx()[self.ragged], None, 0),
        )
        shared, tiles = self._share(tma, sX, gX, self.ragged)
        return tma, tiles, shared

    def _share(self, tma, sX, gX, mode: int) -> tuple:
        """This block's part of tiles of A (mode 0) or B (1), which blocks side by side share."""
        other = 1 - mode
        sharers = self.cluster_shape[other]
        return self._partition_load(tma, sX, gX, cute.arch.block_idx()[other], sharers)

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
        offsets,
        indices,
        queue,
        storage,
    ):
        """One group of threads: its rows of all tiles, or all of every other tile (pingpong)."""
        tile_m, tile_n, _ = self.tile_shape
        block_m, block_n, _ = cute.arch.block_idx()

        share = 0 if const_expr(self.pingpong) else consumer
        fragments = self._fragments(consumer, tiled_mma, sA, sB, a_layout, b_layout, storage)
        accumulators = cute.make_rmem_tensor(
            tiled_mma.partition_shape_C((tile_m, tile_n)), self.accumulator_type
        )
        if const_expr(self.passes_over):
            accumulators.fill(0.0)  # of rows that are never written
        stage = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, self.stages)
        index, position = self._first_to_multiply(queue, consumer, self._cluster())
        turn = None
        if const_expr(self.pingpong):
            turn = turns.state
            if consumer == 1:
                stage.advance(k_tiles)
        self._write_empty(consumer, offsets, extents, reduced)
        tiles = self._grouped_tiles(offsets, extents)
        is_tile, tile, state = tiles.find(tiles.start_at(index), index)
        if const_expr(self.promoted and self.groups_per_tile > 1 and self.split_k is None):
            self._fall_behind(consumer, Int32(is_tile) * k_tiles, pipeline_ab, stage)
        while is_tile:
            m, n = tile.m, tile.n
            if const_expr(self.swap_ab):
                m, n = n, m
            row = (m * self.cluster_shape[0] + block_m) * (tile_m // WGMMA_M) + share
            column = n * self.cluster_shape[1] + block_n
            start = (tile.first_row + row * WGMMA_M, column * tile_n, tile.group)
            if const_expr(self.swap_ab):
                start = (row * WGMMA_M, tile.first_row + column * tile_n, tile.group)
            left = tile.end_row - start[self.ragged]
            stage, turn = self._multiply_rows(
                *(left, tiled_mma, fragments, accumulators, scales, start, *self._part(k_tiles)),
                *(pipeline_ab, turns, stage, turn),
            )
            destination = (
                *(tma_d, self.output.of_group(mD, tile.first_row, tile.end_row)),
                *(sD, operands, d_majors, (row, column, tile.group)),
                *(self._extents_of(tile, extents), *self._reduced_of(tile, extents, reduced)),
                *(storage.D.data_ptr(), storage.flags.data_ptr() + consumer),
            )
            origin = (0, tile.first_row) if self.swap_ab else (tile.first_row, 0)
            beside = {"origin": origin, "rows": indices[1]}
            if const_expr(self.cluster_k == 1):
                self.output.write(consumer, accumulators, *destination, **beside)
            else:
                if self._combine(consumer, accumulators, None, None, storage):
                    self.output.write(consumer, accumulators, *destination, **beside)
            index, position = self._next_to_multiply(queue, index, position)
            is_tile, tile, state = tiles.find(state, index)
        self.output.drain()

    @cute.jit
    def _multiply_rows(self, left, *work):
        """A tile's products. (stage behind the tile, the next turn)

        Where blocks of rows are passed over, others have more of the tensor cores, and of the
        power.

        left: Rows of the group from the first one of the tile that this group of threads has.
        work: What `_multiply_blocks` takes.
        """
        *work, stage, turn = work
        most = self.row_blocks
        if const_expr(not self.passes_over):
            return self._multiply_blocks(most, *work, stage, turn)
        if left > (most - 1) * self.groups_per_tile * WGMMA_M:
            stage, turn = self._multiply_blocks(most, *work, stage, turn)
        else:
            stage, turn = self._multiply_fewer(most - 1, left, *work, stage, turn)
        return stage, turn

    @cute.jit
    def _multiply_fewer(self, blocks: cutlass.Constexpr, left, *work):
        """Those of a tile that does not have all of its blocks of rows; blocks: 0 or 1."""
        *work, stage, turn = work
        if const_expr(blocks == 0 or not self.may_have_none):
            return self._multiply_blocks(blocks, *work, stage, turn)
        if left > 0:
            stage, turn = self._multiply_blocks(blocks, *work, stage, turn)
        else:
            stage, turn = self._multiply_blocks(0, *work, stage, turn)
        return stage, turn

    @cute.jit
    def _multiply_blocks(
        self,
        blocks: cutlass.Constexpr,
        tiled_mma,
        fragments,
        accumulators,
        scales,
        start,
        first_k,
        count,
        pipeline_ab,
        turns,
        stage,
        turn,
    ):
        """The products of a tile's first blocks of rows; its stages are released."""
        if const_expr(self.pingpong):
            turns.wait(turn)
        if const_expr(blocks == 0):
            stage = self.mainloop.pass_over(count, pipeline_ab, stage)
        else:
            if const_expr(blocks < self.row_blocks):
                fragments = fragments.of_rows(blocks)
                accumulators = _first_rows(accumulators, blocks)
            stage, last = self._multiply(
                *(apart(tiled_mma), fragments, accumulators, scales, start, first_k, count),
                *(pipeline_ab, stage),
            )
        if const_expr(self.pingpong):
            turn = turns.arrive(turn)
            stage.advance(count)
        if const_expr(blocks > 0 and not self.promoted):
            warpgroup.wait_group(0)
            pipeline_ab.consumer_release(last)
        return stage, turn

    def _extents_of(self, tile: GroupTile, extents) -> tuple:
        """(M, N) of a group's accumulators."""
        rows = tile.end_row - tile.first_row
        return (extents[0], rows) if self.swap_ab else (rows, extents[1])

    # What is reduced ---------------------------------------------------------------------

    @property
    def _grouped(self) -> GroupedReductions:
        return GroupedReductions(self.output.reduced.reductions)

    def _reduced_of(self, tile: GroupTile, extents, reduced) -> tuple:
        """(outputs, space) of a group: those per block, then those that are reduced."""
        mR, space = reduced
        blocks = len(self.epilogue.per_block)
        outputs = tuple(ending_at(output, tile.end_row) for output in mR[:blocks])
        if space is None:
            return outputs, None
        counters, parts = space
        clusters = self.cluster_shape[self.ragged]
        of_tiles = GroupTile(
            *(tile.group, tile.first_row, tile.end_row, tile.m, tile.n),
            *(tile.first_tile * clusters, tile.tiles * clusters),
        )
        across = self._tiles_across(extents) * self.cluster_shape[1 - self.ragged]
        space = self._grouped.space(of_tiles, across, counters, parts)
        if self.swap_ab:
            space.tiles_m, space.tiles_n = space.tiles_n, space.tiles_m
        return (
            *outputs,
            *self._grouped.outputs_of(tile.group, tile.first_row, mR[blocks:]),
        ), space

    @cute.jit
    def _write_empty(self, consumer, offsets, extents, reduced):
        """Groups without rows are reduced by no tile."""
        mR = reduced[0][len(self.epilogue.per_block) :]
        if const_expr(len(mR) > 0):
            block_m, block_n, cluster = cute.arch.block_idx()
            _, _, clusters = cute.arch.grid_dim()
            if (consumer == 0) & (block_m == 0) & (block_n == 0):
                thread = cute.arch.thread_idx()[0] % GROUP
                self._grouped.write_empty(
                    *(offsets, mR, extents[1 - self.ragged], cluster, clusters, thread)
                )


def _first_rows(accumulators: cute.Tensor, blocks: int) -> cute.Tensor:
    """Those of the first blocks of rows."""
    return cute.logical_divide(accumulators, (None, blocks, None))[None, (None, 0), None]

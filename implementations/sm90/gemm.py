"""Dense matrix product for Hopper."""

from dataclasses import replace
from fractions import Fraction
from math import prod

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
import cutlass.utils.hopper_helpers as sm90
from cutlass import Boolean, Int32, Int64, Uint8, const_expr
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator
from cutlass.tensor_utils import LayoutEnum

from ..common.epilogue import halves_in_turn
from ..common.modes import gemm_modes, operand_batch_last, transposed_modes
from ..common.reductions import ReductionSpace
from ..common.repack import Repack, copy_bytes
from ..common.threads import GROUP
from ..common.tile_order import make_tile_order, preferred_band_widths
from ..common.work_split import COUNTER_BYTES, WorkSplit, share
from . import tile_queue
from .gemm_consumer import GemmConsumer
from .gemm_producer import GemmProducer
from .gpc import IN_STEP, TileOrderByGpc, by_gpc
from .grid import Grid, grid_of
from .mma import make_tiled_mma, multiplied_as
from .promotion import scale_modes
from .split_float32 import SMALL_BUFFERS

FEW_COLUMNS = 64  # a tile that has less is for products that have no more: nobody shares its rows
CONCURRENT_TILES = 132  # multiprocessors of the SXM parts; only the visiting order depends on it


class Gemm(GemmProducer, GemmConsumer):
    """D = epilogue(A · B) on Hopper: TMA, wgmma, persistent and warp-specialised.

    warp group  role      does                                      waits on      signals
    ----------  --------  ----------------------------------------  ------------  -------------
    0           producer  warp 0: TMA loads of A and B, stage by    stage empty   stage full
                          stage, for all tiles of this block                      (by TMA)
    1 (2, 3)    consumer  wgmma over the stages, then writes D      stage full,   stage empty,
                                                                    own turn      other's turn

    cooperative: the consumers share a tile, each takes every other block of 64 rows. Tile M 64
                 has one consumer, 128 and 256 have two, 192 has three.
    pingpong:    each of two consumers owns every other tile and they take turns at the main
                 loop, so that one writes D while the other multiplies. Tile M 64 or 128.

    Pipelines: the main loop (`stages` × [A | B]); the turns (pingpong only); per consumer the
    ring of `Output`, which writes D.
    Clusters: blocks side by side share rows of A or columns of B, each loads a part for all.
    Edges: tiles beyond the last row of A or B are loaded in pieces (`EdgeLoad`, `PanelLoad`),
           unless the rows are halves or pairs of more than 8, more than those of the tile are
           loaded, or float32 is split.
    Heads: where a tile does not hold whole ones, it has 32 columns of the left and of the right
           half of a head in turns (`Epilogue.heads`), loaded in pieces by `HeadLoad`.
    Registers: producer 40 and two consumers 232 (24 and 240 if the accumulators need them), or 32
               and three 160; one consumer alone finds enough at launch.
    Shared memory: see `GemmPlan`.

    split_k: None, a block computes whole tiles. A number: every tile is cut along K into so many
             parts, a block computes one. "stream": the k tiles of all tiles are dealt out evenly
             to the blocks that are resident at once. What several blocks compute of a tile is
             added up in a fixed order, through a workspace (`WorkSplit`).
             "even": every tile is cut into as many equal parts as find room at once, so that
             blocks that read the same k tile of different tiles of D do so at about one time.
    cluster_k: 1, or split_k: the blocks that have the parts of a tile are a cluster, with no other
               tile, and add them up through their shared memory, where the stages were
               (`ClusterSums`). The first one writes the tile. With "even", the parts are those of
               clusters, and the last one to come adds up the sums.
    parallel: parts of a tile, which are split but in no cluster along K, are added up by a kernel
              that is launched behind this one (`ParallelSums`): by all multiprocessors.
    swap_ab: computes Dᵀ = Bᵀ · Aᵀ, so that few rows of D become few columns of wgmma, which takes
             8 or 16 of them where it takes 64 rows. Tile and cluster are those of Dᵀ. Pairs of
             columns of D are rows there, which `PairedOutput` has.
    loaded_columns: of a stage, of which the first ones are the tile's; those of the tile alone by
                    default. More of them, if B, as it is multiplied, is contiguous along N: TMA
                    copies boxes as wide as the swizzle that divides them, row by row, and takes
                    less time for few wide ones.
    repacked: whether A and B are copied before, which then may have any address and strides, of
             which one is 1. The copies are K-major where wgmma wants it. Partial sums have their
             place behind them if a kernel of its own adds them up, which needs no counters.
    dependent_launch: blocks may start while the kernel before still runs, and let the next one do
             so where there is room (`grid_of`): setting up overlaps its end. They wait for it
             before they read or write anything.
    promoted, block_scales, split_float32: how products are formed and added up, see `Mainloop`.

    A (M,K), B (K,N), D (M,N), or the same with a leading batch mode; every mode of a size known
    at run time only, one mode of each operand with a static stride of 1: K for A and B unless
    their elements have 16 bits. A and B, unless repacked: base address and the other strides are
    multiples of 16 bytes; of D too if tma_store. K is at least 1. An operand without the batch
    mode serves every batch.
    """

    @cute.jit
    def __call__(
        self,
        mA: cute.Tensor,
        mB: cute.Tensor,
        mD: cute.Tensor,
        max_clusters: Int32,
        stream: cuda.CUstream,
    ):
        self.with_operands(mA, mB, mD, (), Int64(0), max_clusters, stream)

    @cute.jit
    def with_operands(
        self,
        mA: cute.Tensor,
        mB: cute.Tensor,
        mD: cute.Tensor,
        operands,
        workspace: Int64,
        max_clusters: Int32,
        stream: cuda.CUstream,
    ):
        """operands: a tuple of tensors: the block scales of A and B if there are, what the epilogue
        reads, and its outputs beside D; workspace: an address, used if the work is split, operands
        are repacked, the epilogue reduces or tiles are taken."""
        mA, mB, mD = gemm_modes(mA, mB, mD)
        if const_expr(any(self.repacked)):
            mA, mB, workspace = self._repack_both(mA, mB, workspace, stream)
        scales = ()
        if const_expr(self.block_scales):
            scales, operands = scale_modes(*operands[:2]), operands[2:]
        mA, mB, mD, mR, operands = self._modes(mA, mB, mD, operands)
        extents, batches = (mA.shape[0], mB.shape[0]), mD[0].shape[2]
        order = self._order(extents, batches, max_clusters)
        k_tiles = cute.ceil_div(mA.shape[1], self.tile_shape[2])
        clusters, split = self._workers(order.total, k_tiles, max_clusters, workspace)
        space = self._reduction_space(extents, batches, order, clusters, workspace)
        grid = grid_of(clusters, max_clusters)
        known = self._copies(order, split)
        self._launch(
            *(mA, mB, mD, operands, (mR, space), scales, order, split, grid, stream),
            counter=self._counter(workspace),
        )
        if const_expr(self.parallel):
            self.parallel_sums.launch(mD, operands, extents, *known, stream)

    def _copies(self, order, split):
        """For a kernel behind this one, whose tracing leaves its own values in what it takes."""
        return (replace(order), replace(split)) if self.parallel else ()

    def _modes(self, mA, mB, mD, operands) -> tuple:
        """(A, B, outputs, reduced outputs, what the epilogue reads) as they are multiplied; from
        (M,K,L), (N,K,L), (M,N,L) and what `with_operands` takes beside."""
        read = len(self.epilogue.kinds)
        written = read + len(self.output_types) - 1
        mD = (mD, *(operand_batch_last(operand) for operand in operands[read:written]))
        mR = self.output.reduced.reductions.output_modes(operands[written:])
        operands = self.epilogue.operand_modes(operands[:read])
        if self.swap_ab:
            mA, mB, mD = mB, mA, tuple(transposed_modes(output) for output in mD)
            operands = self.epilogue.transposed_modes(operands)
        self._check_operands(mA, mB, mD)
        return mA, mB, mD, mR, operands

    @cute.jit
    def _order(self, extents, batches, max_clusters):
        tiles = tuple(
            cute.ceil_div(extent, tile * cluster)
            for extent, tile, cluster in zip(
                extents, self.tile_shape[:2], self.cluster_shape, strict=True
            )
        )
        shared, in_step = self._shared_in_gpc, Boolean(True)
        if const_expr(shared != "ab"):
            in_step = cute.size(tiles) * batches <= IN_STEP * max_clusters
        order = make_tile_order(*tiles, batches, self._band_widths(), shared, in_step)
        if const_expr(shared == ""):
            return order
        clusters = cutlass.min(order.total, max_clusters)
        return by_gpc(order, clusters, prod(self.cluster_shape))

    @property
    def _shared_in_gpc(self) -> str:
        """The operands that are not multicast, and which blocks of a GPC are to read at once."""
        if self.split_k is not None or self.tile_shape[1] < FEW_COLUMNS:
            return ""
        cluster_m, cluster_n = self.cluster_shape
        return ("a" if cluster_n == 1 else "") + ("b" if cluster_m == 1 else "")

    def _band_widths(self):
        return preferred_band_widths(self.tile_shape, self.cluster_shape, CONCURRENT_TILES)

    @cute.jit
    def _launch(
        self,
        mA,
        mB,
        mD,
        operands,
        reduced,
        scales,
        order,
        split,
        grid: Grid,
        stream,
        described=(),
        counter=None,
    ):
        """Operands are as the kernel multiplies them: (M,K,L), (N,K,L), (M,N,L).

        described: What `_describe` takes, if further descriptors are to be made.
        counter: The address of what numbers of tiles are taken from, if they are.
        """
        a_major, b_major, *d_majors = (LayoutEnum.from_tensor(t) for t in (mA, mB, *mD))
        tile_m, tile_n, tile_k = self.tile_shape
        cluster_m, cluster_n = self.cluster_shape
        a_type, b_type = (multiplied_as(element_type) for element_type in self.operand_types)

        a_layout = sm90.make_smem_layout_a(a_major, self.tile_shape, a_type, self.stages)
        if const_expr(self.loaded_columns != tile_n and b_major.is_k_major_b()):
            raise TypeError("B is contiguous along K, the kernel is for columns side by side")
        loaded = tile_m, self.loaded_columns, tile_k
        b_layout = sm90.make_smem_layout_b(b_major, loaded, b_type, self.stages)
        if const_expr(Fraction(1) in self.output.epilogue.halves):
            mB = halves_in_turn(mB, 0)
        self.edge_loads = self._edge_loads(a_major, b_major)
        tma_edges = tuple(map(self._tma_edge, (mA, mB), self.edge_loads))
        # Blocks side by side along N work on the same rows of A: its tile is shared by cluster_n.
        tma_a = None
        if const_expr(not self.gathered):
            tma_a, mA = self._tma_load_a(mA, a_major, a_layout)
        of_stage = cute.slice_(b_layout, (None, None, 0))
        tma_b, mB = self._tma_load(mB, of_stage, loaded[1:], cluster_m)
        mD, d_majors = self.output.views(mD), self.output.of_parts(tuple(d_majors))
        d_layouts = self.output.shared_layouts(d_majors, self.consumers)
        tma_d, mD = self.output.tma(mD, d_layouts)
        small_stages = SMALL_BUFFERS if self.split_float32 else 0

        @cute.struct
        class SharedStorage:
            A: cute.struct.Align[cute.struct.MemRange[a_type, cute.cosize(a_layout)], 1024]
            B: cute.struct.Align[cute.struct.MemRange[b_type, cute.cosize(b_layout)], 1024]
            D: cute.struct.Align[
                cute.struct.MemRange[
                    Uint8, self.consumers * self.output.buffers * self.output.slot_bytes
                ],
                1024,
            ]
            A_small: cute.struct.MemRange[a_type, small_stages * tile_m * tile_k]
            B_small: cute.struct.MemRange[b_type, small_stages * tile_n * tile_k]
            stages: cute.struct.MemRange[Int64, 2 * self.stages]
            turns: cute.struct.MemRange[Int64, 2]
            flags: cute.struct.MemRange[Int32, 4]
            queue: cute.struct.MemRange[Int64, tile_queue.SLOTS if self.dynamic else 0]
            numbers: cute.struct.MemRange[Int32, tile_queue.SLOTS if self.dynamic else 0]

        self.shared_storage = SharedStorage
        cluster = cluster_m, cluster_n, self.cluster_k
        # Blocks in no cluster are dealt out GPC by GPC.
        in_clusters = self._shared_in_gpc != "ab"
        if const_expr(len(described) > 0):
            self._describe(tma_a, tma_b, *described, stream)
        self.kernel(
            make_tiled_mma(
                *(a_type, b_type, self.accumulator_type),
                *(a_major.sm90_mma_major_mode(), b_major.sm90_mma_major_mode()),
                *(self.groups_per_tile, self.columns),
            ),
            *(tma_a, mA, a_layout),
            *(tma_b, mB, b_layout),
            *(tma_d, mD, d_layouts),
            d_majors,
            tma_edges,
            operands,
            reduced,
            scales,
            order,
            split,
            grid.leaves_room,
            counter,
        ).launch(
            grid=(cluster_m, cluster_n, grid.clusters * self.cluster_k),
            block=(self.threads, 1, 1),
            cluster=cluster if in_clusters else None,
            min_blocks_per_mp=1,
            stream=stream,
            use_pdl=self.dependent_launch,
        )

    def _repack_both(self, mA, mB, workspace, stream):
        """(A, B, the workspace for all else: with no zeros, which nobody behind copies asks for)"""
        address = workspace + COUNTER_BYTES
        if self.repacked[0]:
            mA, address = self._repack(mA, address, stream, follows=False)
        if self.repacked[1]:
            mB, address = self._repack(mB, address, stream, follows=self.repacked[0])
        return mA, mB, address - COUNTER_BYTES

    def _repack(self, tensor, address, stream, follows: bool):
        """(a copy of (M or N, K, L), the address behind it). It is K-major, unless elements of 16
        bits are not."""
        k_major = LayoutEnum.from_tensor(tensor).is_k_major_a()
        turned = not k_major and tensor.element_type.width == 16
        if turned:
            tensor = transposed_modes(tensor)
        transposes = not k_major and not turned
        copy = Repack(tensor.element_type, transposes, self.dependent_launch, follows)
        copied, behind = copy(tensor, address, stream), address + copy_bytes(tensor)
        return transposed_modes(copied) if turned else copied, behind

    def _check_operands(self, mA, mB, mD) -> None:
        expected = (*self.operand_types, *self.output_types)
        for tensor, element_type in zip((mA, mB, *mD), expected, strict=True):
            if tensor.element_type is not element_type:
                raise TypeError(f"got {tensor.element_type}, the kernel is for {element_type}")

    def _workers(self, tiles, k_tiles, max_clusters, workspace):
        """(clusters to launch, how they split the work)"""
        if self.split_k is None:
            return cutlass.min(tiles, max_clusters), None
        if not self.meets_in_workspace:
            return tiles, None
        if self.split_k == "even":
            sharing = cutlass.min(max_clusters // tiles, k_tiles // self.cluster_k)
            workers = tiles * cutlass.max(sharing, 1)
        else:
            workers = max_clusters if self.split_k == "stream" else tiles * self.split_k
            workers = cutlass.min(workers, tiles * k_tiles)
        return workers, WorkSplit(k_tiles, tiles * k_tiles, workers, workspace)

    def _reduction_space(self, extents, batches, order, workers, workspace):
        """Behind what a split needs of the workspace."""
        if not self.epilogue.reduced:
            return None
        counters, parts = workspace, workspace + COUNTER_BYTES
        if self.meets_in_workspace:
            sums = self.cluster_sums or self.partial_sums
            counters += Int64(order.total) * sums.groups * Int32.width // 8
            parts += Int64(workers) * sums.bytes_per_worker
        tiles = [
            cute.ceil_div(extent, tile * cluster) * cluster
            for extent, tile, cluster in zip(
                extents, self.tile_shape[:2], self.cluster_shape, strict=True
            )
        ]
        return ReductionSpace(*tiles, batches, counters, parts)

    @cute.kernel
    def kernel(
        self,
        tiled_mma: cute.TiledMma,
        tma_a: cute.CopyAtom | None,
        mA: cute.Tensor,
        a_layout: cute.ComposedLayout,
        tma_b: cute.CopyAtom,
        mB: cute.Tensor,
        b_layout: cute.ComposedLayout,
        tma_d,
        mD,
        d_layouts,
        d_majors: cutlass.Constexpr,
        tma_edges,
        operands,
        reduced,
        scales,
        order,
        split,
        leaves_room: Boolean,
        counter: Int64 | None,
    ):
        warp_index = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        group = warp_index // 4
        if warp_index == 0:
            of_edges = (edge[0] for edge in tma_edges if edge is not None)
            for atom in (tma_a, tma_b, *tma_d, *of_edges):
                if const_expr(atom is not None):
                    cpasync.prefetch_descriptor(atom)

        storage = SmemAllocator().allocate(self.shared_storage)
        sA = storage.A.get_tensor(a_layout.outer, swizzle=a_layout.inner)
        sB = storage.B.get_tensor(b_layout.outer, swizzle=b_layout.inner)
        sD = tuple(
            storage.D.get_tensor(layout.outer, swizzle=layout.inner, dtype=element_type)
            for layout, element_type in zip(d_layouts, self.output.element_types, strict=True)
        )

        cluster_layout = cute.make_layout((1, *self.cluster_shape, 1))
        pipeline_ab = self._make_pipeline(storage, cluster_layout)
        turns = None
        if const_expr(self.pingpong):
            turns = self._make_turns(storage, group - 1)
        queue = self._make_queue(storage, counter)
        # No block may signal or write into another of its cluster that is not set up yet.
        pipeline.pipeline_init_arrive(cluster_layout, is_relaxed=True)
        produces = warp_index < self.producer_warps
        begin = self._begin(produces, order, split)
        pipeline.pipeline_init_wait(cluster_layout)

        k_tiles = cute.ceil_div(mA.shape[1], self.tile_shape[2])
        if group == 0:
            if const_expr(self.registers is not None):
                cute.arch.setmaxregister_decrease(self.registers[0])
            if produces:
                self._produce(
                    *(tma_a, mA, sA, tma_b, mB, sB),
                    *(cluster_layout, pipeline_ab, k_tiles, order, split, queue, tma_edges),
                    *(begin, leaves_room),
                )
        else:
            if const_expr(self.registers is not None):
                cute.arch.setmaxregister_increase(self.registers[1])
            self._await_inputs(leaves_room)
            self._consume(
                group - 1,
                *(tiled_mma, sA, sB, a_layout, b_layout, k_tiles),
                *(tma_d, mD, sD, d_majors, operands, reduced, scales),
                (cute.size(mA, mode=[0]), cute.size(mB, mode=[0])),
                *(pipeline_ab, turns, order, split, queue),
                storage,
            )

    @cute.jit
    def _await_inputs(self, leaves_room):
        """Behind the kernel before this one, which may write what is read here, and read what is
        written. leaves_room: whether the next one may begin."""
        if const_expr(self.dependent_launch):
            cute.arch.griddepcontrol_wait()
            if leaves_room:
                cute.arch.griddepcontrol_launch_dependents()

    def _make_pipeline(self, storage, cluster_layout):
        """A stage is full when its bytes have landed (fewer at edges, see `_load_tile`), empty when
        every warp that reads it, in every block that it is multicast to, has released it."""
        readers = self.groups_per_tile * 4 * (sum(self.cluster_shape) - 1)
        return pipeline.PipelineTmaAsync.create(
            num_stages=self.stages,
            producer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, self._arrivals()),
            consumer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, readers),
            tx_count=self._bytes_by_tma(),
            barrier_storage=storage.stages.data_ptr(),
            cta_layout_vmnk=cluster_layout,
            defer_sync=True,
        )

    def _arrivals(self) -> int:
        """That fill a stage, beside the bytes: of who announces those that TMA copies."""
        return 1

    def _bytes_by_tma(self) -> int:
        """Of a whole stage."""
        return self._stage_bytes()

    def _make_turns(self, storage, consumer):
        """Who may run the main loop: consumer 0 first, then each after the other."""
        return pipeline.PipelineOrder.create(
            depth=1,
            length=2,
            group_id=consumer,
            producer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, GROUP),
            barrier_storage=storage.turns.data_ptr(),
            defer_sync=True,
        )

    def _counter(self, workspace: Int64):
        """The address of the one that tiles are taken from; None without."""
        return

    def _make_queue(self, storage, counter):
        """Of numbers of tiles that are taken from a counter; None where they are not."""
        return

    @cute.jit
    def _begin(self, produces, order, split):
        """Of a producer: the tiles of this cluster as arguments of a range, and coordinates of the
        first one. It finds them while others set up."""
        first, end, step, m, n, batch = (Int32(0) for _ in range(6))
        if produces:
            first, end, step = self._tiles(order, split)
            m, n, batch = order.coordinates(first)
        return (first, end, step), (m, n, batch)

    def _tiles(self, order, split):
        """The tiles of this cluster, as arguments of a range."""
        cluster = cute.arch.block_idx()[2] // self.cluster_k
        if self.split_k is None:
            if isinstance(order, TileOrderByGpc):
                cluster = order.numbers.of(cluster, prod(self.cluster_shape))
            return cluster, order.total, cute.arch.grid_dim()[2]
        if not self.meets_in_workspace:
            return cluster, cluster + 1, 1
        first, end = split.tiles_of(cluster)
        return first, end, 1

    def _k_range(self, k_tiles, split, tile, batch):
        """(first k tile, number of them) that this block, or all of its cluster that share
        operands, computes of a tile. Of fewer k tiles than a cluster has blocks along K, some have
        one behind the last, whose elements are zero."""
        block = cute.arch.block_idx()[2]
        if self.split_k is None:
            return Int32(0), k_tiles
        if not self.meets_in_workspace:
            first, count = share(block - tile * self.cluster_k, self.cluster_k, k_tiles)
        else:
            first, count = split.k_range(block // self.cluster_k, tile)
            if self.cluster_k == 1:
                return first, count
            rank = cute.arch.block_idx_in_cluster()
            before, count = share(rank, self.cluster_k, count)
            first += before
        missing = cutlass.max(1 - count, 0)
        return first + missing * (k_tiles - first), count + missing

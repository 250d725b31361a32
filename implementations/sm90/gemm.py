"""Dense matrix product for Hopper."""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
import cutlass.utils.hopper_helpers as sm90
from cutlass import BFloat16, Float16, Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warp, warpgroup
from cutlass.memory import SmemAllocator
from cutlass.tensor_utils import LayoutEnum

from ..common.modes import gemm_modes
from ..common.tile_order import (
    TileOrder,
    make_tile_order,
    preferred_band_widths,
)

GROUP = 128  # threads of a warp group, the unit that issues wgmma
WGMMA_M = 64  # rows of every wgmma
SUBTILE = (64, 32)  # of D, written by one group at a time; 32 columns: 64 or 128 bytes, a swizzle
SHARED_MEMORY = 227 * 1024  # per block, on every Hopper GPU
CONCURRENT_TILES = 132  # multiprocessors of the SXM parts; only the visiting order depends on it

STORE_BARRIERS = 1  # named barriers 1, 2: one per consumer group


class Gemm:
    """D = A · B on Hopper: TMA, wgmma, persistent and warp-specialised.

    warp group  role      does                                      waits on      signals
    ----------  --------  ----------------------------------------  ------------  -------------
    0           producer  warp 0: TMA loads of A and B, stage by    stage empty   stage full
                          stage, for all tiles of this block                      (by TMA)
    1 (and 2)   consumer  wgmma over the stages, then writes D      stage full,   stage empty,
                                                                    own turn      other's turn

    cooperative: the consumers share a tile, each takes every other block of 64 rows. Tile M 64
                 has one consumer, 128 and 256 have two.
    pingpong:    each of two consumers owns every other tile and they take turns at the main
                 loop, so that one writes D while the other multiplies. Tile M 64 or 128.

    Pipelines: the main loop (`stages` × [A | B]); the turns (pingpong only); per consumer a ring
    of `store_buffers` subtiles of D in shared memory, drained by TMA, or by the consumer's own
    threads element by element (tma_store=False, for a D that is not aligned).
    Clusters: blocks side by side share rows of A or columns of B, each loads a part for all.
    Registers: producer 40, consumers 232 (24 and 240 if the accumulators need them); one
    consumer alone finds enough at launch. Shared memory: see `_plan_shared_memory`.

    A (M,K), B (K,N), D (M,N), or the same with a leading batch mode; every mode of a size known
    at run time only, one mode of each operand with a static stride of 1. A and B: base address
    and the other strides are multiples of 16 bytes; of D too if tma_store. K is at least 1.
    An operand without the batch mode serves every batch.
    """

    def __init__(
        self,
        tile_shape: tuple[int, int, int],
        cluster_shape: tuple[int, int] = (1, 1),
        schedule: str = "cooperative",
        *,
        operand_type: type[cutlass.Numeric],
        output_type: type[cutlass.Numeric],
        accumulator_type: type[cutlass.Numeric] = Float32,
        stages: int | None = None,
        tma_store: bool = True,
    ):
        self.tile_shape = tuple(tile_shape)
        self.cluster_shape = tuple(cluster_shape)
        self.schedule = schedule
        self.operand_type = operand_type
        self.output_type = output_type
        self.accumulator_type = accumulator_type
        self.tma_store = tma_store
        self._check()

        tile_m, tile_n, _ = self.tile_shape
        self.pingpong = schedule == "pingpong"
        self.consumers = 2 if self.pingpong or tile_m > WGMMA_M else 1
        self.groups_per_tile = 1 if self.pingpong else self.consumers
        self.row_blocks = tile_m // WGMMA_M // self.groups_per_tile  # of a tile, per consumer
        self.subtiles = self.row_blocks * tile_n // SUBTILE[1]  # of a tile, per consumer
        self.threads = GROUP * (1 + self.consumers)
        accumulators = self.row_blocks * tile_n // 2  # per thread
        if accumulators > 208:
            raise ValueError(
                f"tile {tile_m}x{tile_n}, {schedule}, needs {accumulators} accumulators per "
                "thread; at most 208 leave room for the rest"
            )
        # Three warp groups start with 168 registers per thread each, 504 to share out again.
        self.registers = (24, 240) if accumulators >= 192 else (40, 232)
        self.stages, self.store_buffers, self.shared_memory_bytes = self._plan_shared_memory(stages)

    def _check(self) -> None:
        tile_m, tile_n, tile_k = self.tile_shape
        if self.schedule not in ("cooperative", "pingpong"):
            raise ValueError(f"schedule is cooperative or pingpong, not {self.schedule!r}")
        rows = (64, 128) if self.schedule == "pingpong" else (64, 128, 256)
        if tile_m not in rows:
            raise ValueError(f"{self.schedule} takes a tile M of {rows}, not {tile_m}")
        if tile_n not in range(64, 257, 32):
            raise ValueError(f"tile N is a multiple of 32 from 64 to 256, not {tile_n}")
        if tile_k <= 0 or tile_k % 16:
            raise ValueError(f"tile K is a multiple of wgmma's 16, not {tile_k}")
        if self.cluster_shape not in ((1, 1), (2, 1), (1, 2)):
            raise ValueError(f"cluster is (1,1), (2,1) or (1,2), not {self.cluster_shape}")
        if self.operand_type not in (Float16, BFloat16):
            raise ValueError(f"operands are Float16 or BFloat16, not {self.operand_type}")
        if self.output_type not in (Float16, BFloat16, Float32):
            raise ValueError(f"D is Float16, BFloat16 or Float32, not {self.output_type}")
        if self.accumulator_type is not Float32:
            raise ValueError(f"accumulation is in Float32, not {self.accumulator_type}")

    def _plan_shared_memory(self, stages: int | None) -> tuple[int, int, int]:
        """(stages, store buffers, bytes). In this order: A stages, B stages, D buffers, barriers.

        The main loop gets all stages that fit beside two buffers of D per consumer; what is left
        becomes more buffers, up to four.
        """
        tile_m, tile_n, tile_k = self.tile_shape
        stage = (tile_m + tile_n) * tile_k * self.operand_type.width // 8
        store = self.consumers * SUBTILE[0] * SUBTILE[1] * self.output_type.width // 8
        turns = 2 * 8

        def size(stages, buffers):
            return stages * (stage + 2 * 8) + buffers * store + turns

        most = (SHARED_MEMORY - size(0, 2)) // (stage + 2 * 8)
        stages = most if stages is None else stages
        if not 2 <= stages <= most:
            raise ValueError(
                f"tile {self.tile_shape} has room for 2 to {most} stages, not {stages}"
            )
        buffers = 2
        while self.tma_store and buffers < 4 and size(stages, buffers + 1) <= SHARED_MEMORY:
            buffers += 1
        bytes_needed = size(stages, buffers)
        return stages, buffers, -(-bytes_needed // 1024) * 1024  # the swizzles' alignment

    @cute.jit
    def __call__(
        self,
        mA: cute.Tensor,
        mB: cute.Tensor,
        mD: cute.Tensor,
        max_clusters: Int32,
        stream: cuda.CUstream,
    ):
        if const_expr(mA.element_type is not self.operand_type):
            raise TypeError(f"A is {mA.element_type}, the kernel takes {self.operand_type}")
        if const_expr(mB.element_type is not self.operand_type):
            raise TypeError(f"B is {mB.element_type}, the kernel takes {self.operand_type}")
        if const_expr(mD.element_type is not self.output_type):
            raise TypeError(f"D is {mD.element_type}, the kernel makes {self.output_type}")
        mA, mB, mD = gemm_modes(mA, mB, mD)
        a_major, b_major, d_major = (LayoutEnum.from_tensor(t) for t in (mA, mB, mD))
        tile_m, tile_n, tile_k = self.tile_shape
        cluster_m, cluster_n = self.cluster_shape

        a_layout = sm90.make_smem_layout_a(a_major, self.tile_shape, self.operand_type, self.stages)
        b_layout = sm90.make_smem_layout_b(b_major, self.tile_shape, self.operand_type, self.stages)
        # Blocks side by side along N work on the same rows of A: its tile is shared by cluster_n.
        tma_a, mA = self._tma_load(mA, a_layout, (tile_m, tile_k), cluster_n)
        tma_b, mB = self._tma_load(mB, b_layout, (tile_n, tile_k), cluster_m)
        d_layout = sm90.make_smem_layout_epi(
            self.output_type, d_major, SUBTILE, self.consumers * self.store_buffers
        )
        tma_d = None
        if const_expr(self.tma_store):
            tma_d, mD = cpasync.make_tiled_tma_atom(
                cpasync.CopyBulkTensorTileS2GOp(),
                mD,
                cute.slice_(d_layout, (None, None, 0)),
                SUBTILE,
            )

        @cute.struct
        class SharedStorage:
            A: cute.struct.Align[
                cute.struct.MemRange[self.operand_type, cute.cosize(a_layout)], 1024
            ]
            B: cute.struct.Align[
                cute.struct.MemRange[self.operand_type, cute.cosize(b_layout)], 1024
            ]
            D: cute.struct.Align[
                cute.struct.MemRange[self.output_type, cute.cosize(d_layout)], 1024
            ]
            stages: cute.struct.MemRange[Int64, 2 * self.stages]
            turns: cute.struct.MemRange[Int64, 2]

        self.shared_storage = SharedStorage

        order = make_tile_order(
            cute.ceil_div(mD.shape[0], tile_m * cluster_m),
            cute.ceil_div(mD.shape[1], tile_n * cluster_n),
            mD.shape[2],
            preferred_band_widths(self.tile_shape, self.cluster_shape, CONCURRENT_TILES),
        )
        self.kernel(
            self._tiled_mma(a_major, b_major),
            *(tma_a, mA, a_layout),
            *(tma_b, mB, b_layout),
            *(tma_d, mD, d_layout),
            d_major,
            order,
        ).launch(
            grid=(cluster_m, cluster_n, cutlass.min(order.total, max_clusters)),
            block=(self.threads, 1, 1),
            cluster=(cluster_m, cluster_n, 1),
            min_blocks_per_mp=1,
            stream=stream,
        )

    def _tma_load(self, tensor, shared_layout, tiler, sharers):
        op = cpasync.CopyBulkTensorTileG2SOp()
        if sharers > 1:
            op = cpasync.CopyBulkTensorTileG2SMulticastOp()
        layout = cute.slice_(shared_layout, (None, None, 0))
        return cpasync.make_tiled_tma_atom(op, tensor, layout, tiler, num_multicast=sharers)

    def _tiled_mma(self, a_major, b_major):
        """The whole tile's product, by all consumers that share it."""
        return sm90.make_trivial_tiled_mma(
            self.operand_type,
            self.operand_type,
            a_major.sm90_mma_major_mode(),
            b_major.sm90_mma_major_mode(),
            self.accumulator_type,
            (self.groups_per_tile, 1, 1),
            (WGMMA_M, self.tile_shape[1]),
        )

    def _subtile_mma(self):
        """Never issued: the wgmma whose accumulators lie in registers as one subtile of D does."""
        return sm90.make_trivial_tiled_mma(
            self.operand_type,
            self.operand_type,
            OperandMajorMode.K,
            OperandMajorMode.K,
            self.accumulator_type,
            (1, 1, 1),
            SUBTILE,
        )

    @cute.kernel
    def kernel(
        self,
        tiled_mma: cute.TiledMma,
        tma_a: cute.CopyAtom,
        mA: cute.Tensor,
        a_layout: cute.ComposedLayout,
        tma_b: cute.CopyAtom,
        mB: cute.Tensor,
        b_layout: cute.ComposedLayout,
        tma_d: cute.CopyAtom | None,
        mD: cute.Tensor,
        d_layout: cute.ComposedLayout,
        d_major: cutlass.Constexpr,
        order: TileOrder,
    ):
        warp_index = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        group = warp_index // 4
        if warp_index == 0:
            cpasync.prefetch_descriptor(tma_a)
            cpasync.prefetch_descriptor(tma_b)
            if const_expr(self.tma_store):
                cpasync.prefetch_descriptor(tma_d)

        storage = SmemAllocator().allocate(self.shared_storage)
        sA = storage.A.get_tensor(a_layout.outer, swizzle=a_layout.inner)
        sB = storage.B.get_tensor(b_layout.outer, swizzle=b_layout.inner)
        sD = storage.D.get_tensor(d_layout.outer, swizzle=d_layout.inner)

        cluster_layout = cute.make_layout((1, *self.cluster_shape, 1))
        mainloop = self._make_mainloop(storage, cluster_layout)
        turns = None
        if const_expr(self.pingpong):
            turns = self._make_turns(storage, group - 1)
        # No block may signal or write into another of its cluster that is not set up yet.
        pipeline.pipeline_init_arrive(cluster_layout, is_relaxed=True)
        pipeline.pipeline_init_wait(cluster_layout)

        if group == 0:
            if const_expr(self.consumers > 1):
                cute.arch.setmaxregister_decrease(self.registers[0])
            if warp_index == 0:
                self._produce(tma_a, mA, sA, tma_b, mB, sB, cluster_layout, mainloop, order)
        else:
            if const_expr(self.consumers > 1):
                cute.arch.setmaxregister_increase(self.registers[1])
            k_tiles = cute.ceil_div(mA.shape[1], self.tile_shape[2])
            self._consume(
                group - 1,
                *(tiled_mma, sA, sB, k_tiles),
                *(tma_d, mD, sD, d_major),
                *(mainloop, turns, order),
            )

    def _make_mainloop(self, storage, cluster_layout):
        """A stage is full when its bytes have landed, empty when every warp that reads it, in
        every block that it is multicast to, has released it."""
        tile_m, tile_n, tile_k = self.tile_shape
        readers = self.groups_per_tile * 4 * (sum(self.cluster_shape) - 1)
        return pipeline.PipelineTmaAsync.create(
            num_stages=self.stages,
            producer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread),
            consumer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, readers),
            tx_count=(tile_m + tile_n) * tile_k * self.operand_type.width // 8,
            barrier_storage=storage.stages.data_ptr(),
            cta_layout_vmnk=cluster_layout,
            defer_sync=True,
        )

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

    @cute.jit
    def _produce(self, tma_a, mA, sA, tma_b, mB, sB, cluster_layout, mainloop, order):
        """One warp: every stage of every tile of this block, in order."""
        tile_m, tile_n, tile_k = self.tile_shape
        block_m, block_n, cluster = cute.arch.block_idx()
        _, _, clusters = cute.arch.grid_dim()

        gA = cute.local_tile(mA, (tile_m, tile_k), (None, None, None))
        gB = cute.local_tile(mB, (tile_n, tile_k), (None, None, None))
        # Blocks of the cluster that load parts of one tile are told apart by their coordinate.
        tAsA, tAgA = self._partition_load(tma_a, sA, gA, block_n, self.cluster_shape[1])
        tBsB, tBgB = self._partition_load(tma_b, sB, gB, block_m, self.cluster_shape[0])
        a_mask, b_mask = None, None
        coordinate = (0, block_m, block_n, 0)
        if const_expr(self.cluster_shape[1] > 1):
            a_mask = cpasync.create_tma_multicast_mask(cluster_layout, coordinate, mcast_mode=2)
        if const_expr(self.cluster_shape[0] > 1):
            b_mask = cpasync.create_tma_multicast_mask(cluster_layout, coordinate, mcast_mode=1)

        stage = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, self.stages)
        for index in cutlass.range(cluster, order.total, clusters, unroll=1):
            m, n, batch = order.coordinates(index)
            tAgA_k = tAgA[None, m * self.cluster_shape[0] + block_m, None, batch]
            tBgB_k = tBgB[None, n * self.cluster_shape[1] + block_n, None, batch]
            for k in cutlass.range(cute.size(tAgA_k, mode=[1]), unroll=1):
                mainloop.producer_acquire(stage)
                full = mainloop.producer_get_barrier(stage)
                cute.copy(
                    tma_a,
                    tAgA_k[None, k],
                    tAsA[None, stage.index],
                    tma_bar_ptr=full,
                    mcast_mask=a_mask,
                )
                cute.copy(
                    tma_b,
                    tBgB_k[None, k],
                    tBsB[None, stage.index],
                    tma_bar_ptr=full,
                    mcast_mask=b_mask,
                )
                stage.advance()
        # The other block of the cluster still signals this one's barriers: stay until it is done.
        mainloop.producer_tail(stage)

    def _partition_load(self, tma, shared, tiles, coordinate, sharers):
        return cpasync.tma_partition(
            tma,
            coordinate,
            cute.make_layout(sharers),
            cute.group_modes(shared, 0, 2),
            cute.group_modes(tiles, 0, 2),
        )

    @cute.jit
    def _consume(
        self,
        consumer,
        tiled_mma,
        sA,
        sB,
        k_tiles,
        tma_d,
        mD,
        sD,
        d_major: cutlass.Constexpr,
        mainloop,
        turns,
        order,
    ):
        """One group: its rows of all tiles, or all of every other tile (pingpong)."""
        tile_m, tile_n, _ = self.tile_shape
        block_m, block_n, cluster = cute.arch.block_idx()
        _, _, clusters = cute.arch.grid_dim()

        share = 0 if const_expr(self.pingpong) else consumer
        thr_mma = tiled_mma.get_slice(share * GROUP)
        tCrA = tiled_mma.make_fragment_A(thr_mma.partition_A(sA))
        tCrB = tiled_mma.make_fragment_B(thr_mma.partition_B(sB))
        accumulators = cute.make_rmem_tensor(
            tiled_mma.partition_shape_C((tile_m, tile_n)), self.accumulator_type
        )

        stage = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, self.stages)
        first, step = cluster, clusters
        turn = None
        if const_expr(self.pingpong):
            first, step = cluster + consumer * clusters, 2 * clusters
            turn = turns.state
            if consumer == 1:
                stage.advance(k_tiles)
        for index in cutlass.range(first, order.total, step, unroll=1):
            m, n, batch = order.coordinates(index)
            if const_expr(self.pingpong):
                turns.wait(turn)
            stage, last = self._multiply(
                tiled_mma, tCrA, tCrB, accumulators, k_tiles, mainloop, stage
            )
            if const_expr(self.pingpong):
                turn = turns.arrive(turn)
                stage.advance(k_tiles)
            warpgroup.wait_group(0)
            mainloop.consumer_release(last)

            row = (m * self.cluster_shape[0] + block_m) * (tile_m // SUBTILE[0]) + share
            column = (n * self.cluster_shape[1] + block_n) * (tile_n // SUBTILE[1])
            self._epilogue(consumer, accumulators, tma_d, mD, sD, d_major, row, column, batch)
        if const_expr(self.tma_store):
            # Shared memory must outlive the reads of the last stores.
            cute.arch.cp_async_bulk_wait_group(0, read=True)

    @cute.jit
    def _multiply(self, tiled_mma, tCrA, tCrB, accumulators, k_tiles, mainloop, stage):
        """All k tiles of one tile; the last wgmma group is left in flight, its stage not released.

        One group is always in flight while the next is issued, so a stage is released one behind.
        Returns the stage after the tile and the last one of it.
        """
        last = stage.clone()
        tiled_mma.set(warpgroup.Field.ACCUMULATE, False)
        mainloop.consumer_wait(stage)
        self._issue(tiled_mma, tCrA, tCrB, accumulators, stage)
        stage.advance()
        for _ in cutlass.range(1, k_tiles, unroll=1):
            mainloop.consumer_wait(stage)
            self._issue(tiled_mma, tCrA, tCrB, accumulators, stage)
            warpgroup.wait_group(1)
            mainloop.consumer_release(last)
            stage.advance()
            last.advance()
        return stage, last

    @cute.jit
    def _issue(self, tiled_mma, tCrA, tCrB, accumulators, stage):
        warpgroup.fence()
        for k in cutlass.range_constexpr(cute.size(tCrA, mode=[2])):
            a, b = tCrA[None, None, k, stage.index], tCrB[None, None, k, stage.index]
            cute.gemm(tiled_mma, accumulators, a, b, accumulators)
            tiled_mma.set(warpgroup.Field.ACCUMULATE, True)
        warpgroup.commit_group()

    @cute.jit
    def _epilogue(
        self, consumer, accumulators, tma_d, mD, sD, d_major: cutlass.Constexpr, row, column, batch
    ):
        """This consumer's part of a tile, subtile by subtile; row, column: of the first, counted
        in subtiles. Each goes through a ring of buffers in shared memory."""
        tid = cute.arch.thread_idx()[0] % GROUP
        fragment_shape = self._subtile_mma().partition_shape_C(SUBTILE)
        fragment = cute.make_layout(fragment_shape)
        # In the accumulators a subtile is a run of registers: its columns vary faster than rows.
        subtiles = cute.make_tensor(
            accumulators.iterator,
            cute.append(fragment, cute.make_layout(self.subtiles, stride=cute.size(fragment))),
        )
        to_shared = cute.make_tiled_copy_C(self._store_atom(d_major), self._subtile_mma())
        tRS_sD = to_shared.get_slice(tid).partition_D(sD)

        columns = self.tile_shape[1] // SUBTILE[1]
        self._await_ring(consumer, in_flight=0)
        for i in cutlass.range_constexpr(self.subtiles):
            at = (row + i // columns * self.groups_per_tile, column + i % columns, batch)
            buffer = consumer * self.store_buffers + i % self.store_buffers
            tCrD = self._finish(subtiles[None, None, None, i])
            cute.copy(to_shared, to_shared.retile(tCrD), tRS_sD[None, None, None, buffer])
            # Behind this barrier the subtile is complete and the next buffer is free.
            self._await_ring(consumer, in_flight=self.store_buffers - 2)
            sD_i, gD_i = sD[None, None, buffer], cute.local_tile(mD, SUBTILE, at)
            if const_expr(self.tma_store):
                if tid // 32 == 0:
                    self._store_by_tma(tma_d, sD_i, gD_i)
            else:
                self._store_by_threads(tid, sD_i, gD_i, mD.shape, d_major, at)

    def _finish(self, tCrD):
        """Accumulators of a subtile → elements of D."""
        finished = cute.make_rmem_tensor(tCrD.shape, self.output_type)
        finished.store(tCrD.load().to(self.output_type))
        return finished

    def _store_atom(self, d_major):
        if self.output_type.width == 16:
            op = warp.StMatrix8x8x16bOp(d_major.is_m_major_c(), 4)
            return cute.make_copy_atom(op, self.output_type)
        # A thread holds two neighbours of a row.
        bits = self.output_type.width * (2 if d_major.is_n_major_c() else 1)
        return cute.make_copy_atom(
            cute.nvgpu.CopyUniversalOp(), self.output_type, num_bits_per_copy=bits
        )

    def _await_ring(self, consumer, in_flight):
        """All threads of the consumer wait for each other, and until at most `in_flight` TMA
        stores still read the ring. Only the storing thread has any, the barrier tells the rest.

        Stores by threads have read their buffer when the thread arrives here again.
        """
        if self.tma_store:
            cute.arch.fence_view_async_shared()
            cute.arch.cp_async_bulk_wait_group(in_flight, read=True)
        cute.arch.barrier(barrier_id=STORE_BARRIERS + consumer, number_of_threads=GROUP)

    def _store_by_tma(self, tma_d, sD, gD):
        source, destination = cpasync.tma_partition(
            tma_d, 0, cute.make_layout(1), cute.group_modes(sD, 0, 2), cute.group_modes(gD, 0, 2)
        )
        cute.copy(tma_d, source, destination)
        cute.arch.cp_async_bulk_commit_group()

    @cute.jit
    def _store_by_threads(self, tid, sD, gD, shape, d_major: cutlass.Constexpr, at):
        """Element by element within the bounds of D, a warp along the side that is contiguous."""
        threads = cute.make_ordered_layout(
            (4, 32) if d_major.is_n_major_c() else (32, 4),
            order=(1, 0) if d_major.is_n_major_c() else (0, 1),
        )
        atom = cute.make_copy_atom(cute.nvgpu.CopyUniversalOp(), self.output_type)
        copy = cute.make_tiled_copy_tv(atom, threads, cute.make_layout((1, 1))).get_slice(tid)
        cD = cute.local_tile(cute.make_identity_tensor(shape[:2]), SUBTILE, at[:2])
        tDsD, tDgD, tDcD = copy.partition_S(sD), copy.partition_D(gD), copy.partition_S(cD)
        # Not unrolled in full: the addresses would crowd out accumulators still to be stored.
        for i in cutlass.range(cute.size(tDsD), unroll=4):
            if cute.elem_less(tDcD[i], shape[:2]):
                tDgD[i] = tDsD[i]

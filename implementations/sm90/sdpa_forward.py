"""Attention for Hopper, forward."""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
import cutlass.utils.hopper_helpers as sm90
from cutlass import Boolean, Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup
from cutlass.cute.nvgpu.warpgroup import OperandSource
from cutlass.memory import SmemAllocator
from cutlass.tensor_utils import LayoutEnum

from ..common.attention.modes import attention_modes
from ..common.attention.scores import Place, Scores, Tile, rows_and_columns
from ..common.attention.sequences import Range, sequence_of
from ..common.attention.softmax import LOG2_E, softmax_of, update
from ..common.attention.values import Values
from .mma import WGMMA_M
from .plan import SHARED_MEMORY
from .sdpa_output import GROUP, OWN, SdpaOutput
from .sdpa_tiles import Tiles, Work, blocks_of, fetched

TURNS = 1  # named barriers: one per consumer from this one on
TOGETHER = OWN + 3  # of all consumers

_PIECE = 8  # accumulators of 16 columns that a thread has

AHEAD = 2  # tiles that the producer is, at most

_SMALL = 2048  # bytes of shared memory for barriers, and to align what is large

_REGISTERS = {1: None, 2: (24, 240), 3: (32, 160)}  # (producer, each consumer)


class SdpaForward(SdpaOutput):
    """O = softmax(scale · Q · Kᵀ) · V on Hopper: TMA, wgmma, warp-specialised.

    warp group  role      does                                       waits on       signals
    ----------  --------  -----------------------------------------  -------------  -------------
    0           producer  warp 0: fetches tiles; TMA loads of Q,     stage empty    stage full
                          then of K and V, block by block                           (by TMA)
    1 (2, 3)    consumer  64 rows of queries: products, softmax,     stage full,    stage empty,
                          writes O and the log-sum-exp               own turn       next turn

    Blocks are persistent: each fetches tiles until there are none. A tile are `tile[0]` queries of
    a head, which take `tile[1]` keys at a time, from the last that they see to the first. The
    producer is ahead, in the next tile too. Of consecutive blocks of keys, a consumer issues
    Q · Kᵀ of the next one before P · V of this one, and has the softmax of the next one while
    P · V runs. Three consumers take turns at issuing, so that one has the tensor cores while
    another has its softmax. P stays in registers.

    Pipelines: Q (one stage), K and V (`stages` each), numbers of tiles. O has shared memory of its
    own, or that of Q if there is none left.
    Registers: producer 24 and two consumers 240, or 32 and three 160.

    head_dims: Of Q and K, of V: there is room for as many columns; TMA fills up with zeros.
    longest_first: The last queries of a head first: where keys behind a query are hidden, they
        have the most to do.

    Q (B,H,S,D), K, V (B,H_kv,S_kv,D), O like Q, or packed (T,H,D): sizes and strides known at run
    time, that of D is 1; addresses and the other strides are multiples of 16 bytes.
    """

    largest_power = 0.0  # exponent of 2

    def __init__(
        self,
        head_dims: tuple[int, int],
        tile: tuple[int, int],
        stages: int,
        element_type: type[cutlass.Numeric],
        scores: Scores,
        *,
        longest_first: bool,
        output_type: type[cutlass.Numeric] | None = None,
    ):
        self.head_dim, self.head_dim_v = head_dims
        self.tile_m, self.tile_n = tile
        self.stages = stages
        self.element_type = element_type
        self.output_type = output_type or element_type
        self.scores = scores
        self.longest_first = longest_first
        self.consumers = self.tile_m // WGMMA_M
        self.threads = GROUP * (1 + self.consumers)
        self.registers = _REGISTERS[self.consumers]
        self.turns = self.consumers > 2  # two find theirs: measured
        element_bytes, output_bytes = element_type.width // 8, self.output_type.width // 8
        read = self.tile_m * self.head_dim + self.tile_n * stages * sum(head_dims)
        written = self.tile_m * self.head_dim_v * output_bytes
        fits = read * element_bytes + written <= SHARED_MEMORY - _SMALL
        #: Where O is on its way out: ``"apart"``, or ``"queries"``: it has the memory of Q, which
        #: tiles without keys need as well.
        self.output_memory = "apart" if fits else "queries"
        # Rows of V behind the last key of a sequence may hold anything, but not behind the tensor.
        self.keys_end_early = any(n in scores.names for n in ("cu_seqlens_kv", "seq_lens_kv"))

    @cute.jit
    def with_operands(
        self,
        mQ: cute.Tensor,
        mK: cute.Tensor,
        mV: cute.Tensor,
        mO: cute.Tensor,
        operands,
        workspace: Int64,
        multiprocessors: Int32,
        stream: cuda.CUstream,
    ):
        """operands: a tuple of what the scores are called by; workspace: an address, of two
        counters that are zero."""
        values = Values(self.scores.names, operands)
        packed = cute.rank(mQ) == 3
        batches = mQ.shape[0]
        queries = mQ.shape[2]
        if const_expr(packed):
            batches = values["cu_seqlens_q"].shape[0] - 1
            queries = Int32(values["max_seqlen_q"])
        mQ, mK, mV, mO = (attention_modes(tensor) for tensor in (mQ, mK, mV, mO))
        # (S,D,H,B) seen as (D,S,H,B): columns of the second product.
        mVt = cute.make_tensor(mV.iterator, cute.select(mV.layout, mode=[1, 0, 2, 3]))

        q_layout, k_layout, v_layout, _ = layouts = self._shared_layouts()
        tma_q, tQ = tma_load(mQ, q_layout, (self.tile_m, self.head_dim))
        tma_k, tK = tma_load(mK, k_layout, (self.tile_n, self.head_dim))
        tma_v, tV = tma_load(mVt, v_layout, (self.head_dim_v, self.tile_n))
        blocks, heads = cute.ceil_div(queries, self.tile_m), mQ.shape[2]
        tiles = Tiles(blocks, heads, blocks * heads * batches, workspace)
        self._launch(
            *(tma_q, tQ, tma_k, tK, tma_v, tV, mO),
            *(layouts, operands, tiles, multiprocessors, stream),
        )

    def _shared_layouts(self) -> tuple:
        """Of Q, K, V as columns of the second product, and O; the stages are behind."""
        element_type, m, n = self.element_type, self.tile_m, self.tile_n
        rows, columns = LayoutEnum.ROW_MAJOR, LayoutEnum.COL_MAJOR
        return (
            sm90.make_smem_layout_a(rows, (m, n, self.head_dim), element_type, 1),
            sm90.make_smem_layout_b(rows, (m, n, self.head_dim), element_type, self.stages),
            sm90.make_smem_layout_b(columns, (m, self.head_dim_v, n), element_type, self.stages),
            sm90.make_smem_layout_a(rows, (m, n, self.head_dim_v), self.output_type, 1),
        )

    def _launch(
        self,
        tma_q,
        mQ,
        tma_k,
        mK,
        tma_v,
        mV,
        mO,
        layouts,
        operands,
        tiles: Tiles,
        multiprocessors,
        stream,
    ) -> None:
        q_layout, k_layout, v_layout, o_layout = layouts
        staged = cute.cosize(o_layout) if self.output_memory == "apart" else 0

        @cute.struct
        class SharedStorage:
            Q: cute.struct.Align[
                cute.struct.MemRange[self.element_type, cute.cosize(q_layout)], 1024
            ]
            K: cute.struct.Align[
                cute.struct.MemRange[self.element_type, cute.cosize(k_layout)], 1024
            ]
            V: cute.struct.Align[
                cute.struct.MemRange[self.element_type, cute.cosize(v_layout)], 1024
            ]
            output: cute.struct.Align[cute.struct.MemRange[self.output_type, staged], 1024]
            flag: cute.struct.MemRange[Int32, 1]
            tiles: cute.struct.MemRange[Int32, AHEAD]
            tile_stages: cute.struct.MemRange[Int64, 2 * AHEAD]
            q_full: cute.struct.MemRange[Int64, 2]
            k_stages: cute.struct.MemRange[Int64, 2 * self.stages]
            v_stages: cute.struct.MemRange[Int64, 2 * self.stages]

        self.shared_storage = SharedStorage
        self.kernel(
            *(tma_q, mQ, q_layout),
            *(tma_k, mK, k_layout),
            *(tma_v, mV, v_layout),
            *(mO, o_layout),
            operands,
            tiles,
        ).launch(
            grid=(cutlass.min(tiles.total, multiprocessors), 1, 1),
            block=(self.threads, 1, 1),
            min_blocks_per_mp=1,
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(
        self,
        tma_q: cute.CopyAtom | None,
        mQ: cute.Tensor,
        q_layout: cute.ComposedLayout,
        tma_k: cute.CopyAtom,
        mK: cute.Tensor,
        k_layout: cute.ComposedLayout,
        tma_v: cute.CopyAtom,
        mV: cute.Tensor,
        v_layout: cute.ComposedLayout,
        mO: cute.Tensor,
        o_layout: cute.ComposedLayout,
        operands,
        tiles: Tiles,
    ):
        warp_index = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        group = warp_index // 4
        if warp_index == 0:
            for atom in (tma_q, tma_k, tma_v):
                if const_expr(atom is not None):
                    cpasync.prefetch_descriptor(atom)
        storage = SmemAllocator().allocate(self.shared_storage)
        sQ = storage.Q.get_tensor(q_layout.outer, swizzle=q_layout.inner)
        sK = storage.K.get_tensor(k_layout.outer, swizzle=k_layout.inner)
        sV = storage.V.get_tensor(v_layout.outer, swizzle=v_layout.inner)
        sO = self._staged_output(storage, o_layout)
        sTiles = storage.tiles.get_tensor(cute.make_layout(AHEAD))
        pipelines = (
            self._pipeline(storage.q_full, q_layout, 1),
            self._pipeline(storage.k_stages, k_layout, self.stages),
            self._pipeline(storage.v_stages, v_layout, self.stages),
        )
        queue = pipeline.PipelineAsync.create(
            num_stages=AHEAD,
            producer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, 32),
            consumer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, GROUP * self.consumers),
            barrier_storage=storage.tile_stages.data_ptr(),
            defer_sync=True,
        )
        pipeline.pipeline_init_arrive((1, 1), is_relaxed=True)
        pipeline.pipeline_init_wait((1, 1))
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()

        if group == 0:
            if const_expr(self.registers is not None):
                cute.arch.setmaxregister_decrease(self.registers[0])
            if warp_index == 0:
                self._produce(
                    *(tma_q, mQ, sQ, tma_k, mK, sK, tma_v, mV, sV),
                    *(pipelines, queue, sTiles, tiles, operands),
                )
        else:
            if const_expr(self.registers is not None):
                cute.arch.setmaxregister_increase(self.registers[1])
            self._consume(
                *(group - 1, mQ, sQ, mK, sK, sV, sO, mO),
                *(pipelines, queue, sTiles, tiles, operands),
            )

    def _staged_output(self, storage, layout):
        """Where O is, on its way out."""
        memory = storage.output if self.output_memory == "apart" else storage.Q
        return memory.get_tensor(layout.outer, swizzle=layout.inner)

    # An atom has a state, which a loop would have to carry: so each product has one of its own.

    def _mma_qk(self) -> cute.TiledMma:
        return self._mma(self.tile_n, OperandMajorMode.K, OperandSource.SMEM)

    def _mma_pv(self) -> cute.TiledMma:
        return self._mma(self.head_dim_v, OperandMajorMode.MN, OperandSource.RMEM)

    def _mma(self, columns, b_major, a_source) -> cute.TiledMma:
        return sm90.make_trivial_tiled_mma(
            *(self.element_type, self.element_type, OperandMajorMode.K, b_major),
            *(Float32, (self.consumers, 1, 1), (WGMMA_M, columns), a_source),
        )

    def _pipeline(self, barriers, layout, stages):
        """A stage is full when its bytes have landed, empty when every consumer has released it."""
        readers = pipeline.CooperativeGroup(pipeline.Agent.Thread, self.consumers * 4)
        stage = cute.slice_(layout, (None, None, 0))
        return pipeline.PipelineTmaAsync.create(
            num_stages=stages,
            producer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread),
            consumer_group=readers,
            tx_count=cute.size_in_bytes(self.element_type, stage),
            barrier_storage=barriers.data_ptr(),
            cta_layout_vmnk=cute.make_layout((1, 1, 1, 1)),
            defer_sync=True,
        )

    def _work(self, tiles: Tiles, tile: Int32, values: Values, mQ, mK) -> Work:
        place = tiles.place(tile, self.tile_m, self.longest_first)
        sequence = sequence_of(values, place.batch, mQ.shape[0], mK.shape[0])
        return Work(tile, place, sequence, blocks_of(sequence, place, self.tile_m, self.tile_n))

    # Producer ----------------------------------------------------------------------------

    @cute.jit
    def _produce(
        self,
        tma_q,
        mQ,
        sQ,
        tma_k,
        mK,
        sK,
        tma_v,
        mV,
        sV,
        pipelines,
        queue,
        sTiles,
        tiles: Tiles,
        operands,
    ):
        """One warp: fetches tiles, tells the consumers, and loads what they need."""
        values = Values(self.scores.names, operands)
        states = tuple(
            pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, stages)
            for stages in (1, self.stages, self.stages)
        )
        sent = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, AHEAD)
        tile = Int32(cute.arch.block_idx()[0])
        while tile < tiles.total:
            _send(queue, sTiles, sent, tile)
            sent.advance()
            found = tiles.fetch()
            work = self._work(tiles, tile, values, mQ, mK)
            states = self._load_tile(
                *(tma_q, mQ, sQ, tma_k, mK, sK, tma_v, mV, sV),
                *(pipelines, states, work, values),
            )
            tile = fetched(found)
        _send(queue, sTiles, sent, tile)
        tiles.leave()

    @cute.jit
    def _load_tile(
        self,
        tma_q,
        mQ,
        sQ,
        tma_k,
        mK,
        sK,
        tma_v,
        mV,
        sV,
        pipelines,
        states,
        work: Work,
        values,
    ):
        """Q, and the blocks of K and V from the last to the first. V is a block behind, as it is
        used. Returns the states of the pipelines behind them."""
        _, place, sequence, blocks = work
        pipeline_q, pipeline_k, pipeline_v = pipelines
        q_state, k_state, v_state = states
        key_head = place.head // (mQ.shape[2] // mK.shape[2])
        batch = place.batch
        if const_expr("cu_seqlens_q" in self.scores.names):
            batch = Int32(0)
        mQ = cute.domain_offset((sequence.first_query, 0), mQ[None, None, place.head, batch])
        mK = cute.domain_offset((sequence.first_key, 0), mK[None, None, key_head, batch])
        mV = cute.domain_offset((0, sequence.first_key), mV[None, None, key_head, batch])
        gQ = cute.local_tile(mQ, (self.tile_m, self.head_dim), (None, 0))
        gK = cute.local_tile(mK, (self.tile_n, self.head_dim), (None, 0))
        gV = cute.local_tile(mV, (self.head_dim_v, self.tile_n), (0, None))
        if self._takes_queries(blocks):
            self._load(tma_q, gQ, sQ, place.query // self.tile_m, pipeline_q, q_state)
            q_state.advance()
        if blocks.end > blocks.begin:
            last = blocks.end - 1
            self._load(tma_k, gK, sK, last, pipeline_k, k_state)
            k_state.advance()
            for i in cutlass.range(last - blocks.begin, unroll=1):
                self._load(tma_k, gK, sK, last - 1 - i, pipeline_k, k_state)
                self._load(tma_v, gV, sV, last - i, pipeline_v, v_state)
                k_state.advance()
                v_state.advance()
            self._load(tma_v, gV, sV, blocks.begin, pipeline_v, v_state)
            v_state.advance()
        return q_state, k_state, v_state

    def _load(self, tma, tiles, shared, index, stages, state):
        stages.producer_acquire(state)
        destination, source = cpasync.tma_partition(
            tma,
            0,
            cute.make_layout(1),
            cute.group_modes(shared, 0, 2),
            cute.group_modes(tiles, 0, 2),
        )
        cute.copy(
            tma,
            source[None, index],
            destination[None, state.index],
            tma_bar_ptr=stages.producer_get_barrier(state),
        )

    # Consumers ---------------------------------------------------------------------------

    @cute.jit
    def _consume(
        self,
        consumer: Int32,
        mQ,
        sQ,
        mK,
        sK,
        sV,
        sO,
        mO,
        pipelines,
        queue,
        sTiles,
        tiles: Tiles,
        operands,
    ):
        """One group: 64 queries of every tile of this block."""
        values = Values(self.scores.names, operands)
        thread = cute.arch.thread_idx()[0] - GROUP
        mma_qk, mma_pv = self._mma_qk(), self._mma_pv()
        group_qk, group_pv = (mma.get_slice(consumer * GROUP) for mma in (mma_qk, mma_pv))
        tCrQ = mma_qk.make_fragment_A(group_qk.partition_A(sQ))[None, None, None, 0]
        tCrK = mma_qk.make_fragment_B(group_qk.partition_B(sK))
        tCrV = mma_pv.make_fragment_B(group_pv.partition_B(sV))
        tSrS = cute.make_rmem_tensor(mma_qk.partition_shape_C((self.tile_m, self.tile_n)), Float32)
        tOrO = cute.make_rmem_tensor(
            mma_pv.partition_shape_C((self.tile_m, self.head_dim_v)), Float32
        )
        tOrP = cute.make_rmem_tensor(cute.size(tSrS), self.element_type)
        identity = cute.make_identity_tensor((self.tile_m, self.tile_n))
        local = rows_and_columns(mma_qk.get_slice(thread).partition_C(identity))
        states = tuple(
            pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, stages)
            for stages in (1, self.stages, self.stages)
        )
        received = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, AHEAD)
        if const_expr(self.turns):
            self._first_turn(consumer)
        tile = _receive(queue, sTiles, received)
        received.advance()
        while tile < tiles.total:
            work = self._work(tiles, tile, values, mQ, mK)
            states = self._attend(
                *(consumer, thread, (tCrQ, tCrK, tCrV), (tSrS, tOrP, tOrO), local),
                *(mQ, sQ, sV, sO, mO, pipelines, states, work, values, tiles),
            )
            tile = _receive(queue, sTiles, received)
            received.advance()

    @cute.jit
    def _attend(
        self,
        consumer,
        thread,
        fragments,
        registers,
        local,
        mQ,
        sQ,
        sV,
        sO,
        mO,
        pipelines,
        states,
        work: Work,
        values,
        tiles: Tiles,
    ):
        """A tile. Returns the states of the pipelines behind it."""
        (tCrQ, tCrK, tCrV), (tSrS, tOrP, tOrO) = fragments, registers
        _, place, sequence, blocks = work
        pipeline_q, pipeline_k, pipeline_v = pipelines
        q_state, k_state, v_state = states
        scores = rows_and_columns(tSrS)
        tile = Tile(scores, local, place.query, Int32(0), place.batch, place.head)
        softmax = softmax_of(2, self._multiplier(values, place, tiles), self.largest_power)
        tOrO.fill(0.0)
        if self._takes_queries(blocks):
            self._await_queries(thread, mQ, sQ, pipeline_q, q_state, work, tiles)
        if blocks.end > blocks.begin:
            last = blocks.end - 1
            pipeline_k.consumer_wait(k_state)
            _multiply(self._mma_qk(), tSrS, tCrQ, tCrK[None, None, None, k_state.index], fresh=True)
            warpgroup.wait_group(0)
            pipeline_k.consumer_release(k_state)
            k_state.advance()
            self._score(self._of_block(tile, last), sequence, values, tiles, hidden=True)
            update(softmax, scores, None)
            self._store_powers(tOrP, tSrS, self._of_block(tile, last), tiles, values)
            if const_expr(self.keys_end_early):
                self._clear_behind(thread, sV, last, sequence, pipeline_v, v_state)

            of_tile = (
                *(consumer, fragments, registers, tile, softmax),
                *(sequence, values, tiles, pipelines),
            )
            inner = (k_state, v_state)
            if const_expr(self.scores.hides_anywhere):
                inner = self._pass(*of_tile, inner, last, blocks.begin, True)
            else:
                full_begin = cutlass.min(last, blocks.full_begin)
                full_end = cutlass.min(last, blocks.full_end)
                if const_expr(sequence.high is not None):
                    inner = self._pass(*of_tile, inner, last, full_end, True)
                inner = self._pass(*of_tile, inner, full_end, full_begin, False)
                if const_expr(sequence.low is not None):
                    inner = self._pass(*of_tile, inner, full_begin, blocks.begin, True)
            k_state, v_state = inner
            if const_expr(self.output_memory != "queries"):
                self._release_queries(pipeline_q, q_state)
            pipeline_v.consumer_wait(v_state)
            _multiply(
                self._mma_pv(),
                tOrO,
                self._operand(tOrP, tSrS),
                tCrV[None, None, None, v_state.index],
                fresh=False,
            )
            warpgroup.wait_group(0)
            pipeline_v.consumer_release(v_state)
            v_state.advance()
        self._write(consumer, thread, tOrO, sO, mO, softmax, work, values, tiles)
        if const_expr(self.output_memory == "queries"):
            # What was written there, or read, comes before what TMA writes.
            cute.arch.fence_view_async_shared()
            cute.arch.sync_warp()
            self._release_queries(pipeline_q, q_state)
        if self._takes_queries(blocks):
            q_state.advance()
        return q_state, k_state, v_state

    def _multiplier(self, values: Values, place: Place, tiles: Tiles) -> Float32:
        """Of scores, to exponents of 2."""
        return values.number("scale") * LOG2_E if self.scores.plain else Float32(LOG2_E)

    def _await_queries(self, thread, mQ, sQ, pipeline_q, state, work: Work, tiles) -> None:
        pipeline_q.consumer_wait(state)

    def _takes_queries(self, blocks: Range) -> Boolean:
        """Whether a tile has the memory of Q for a while."""
        if self.output_memory == "queries":
            return Boolean(True)
        return blocks.end > blocks.begin

    def _release_queries(self, pipeline_q, state) -> None:
        pipeline_q.consumer_release(state)

    @cute.jit
    def _pass(
        self,
        consumer,
        fragments,
        registers,
        tile,
        softmax,
        sequence,
        values,
        tiles: Tiles,
        pipelines,
        states,
        begin,
        end,
        hidden: cutlass.Constexpr,
    ):
        """Blocks of keys begin - 1, ... end; returns the states of the pipelines behind them.

        hidden: Whether queries may not see all their keys.
        """
        (tCrQ, tCrK, tCrV), (tSrS, tOrP, tOrO) = fragments, registers
        _, pipeline_k, pipeline_v = pipelines
        k_state, v_state = states
        factors = cute.make_rmem_tensor(2, Float32)
        outputs = rows_and_columns(tOrO)
        for i in cutlass.range(begin - end, unroll=1):
            pipeline_k.consumer_wait(k_state)
            self._await_turn(consumer)
            _multiply(self._mma_qk(), tSrS, tCrQ, tCrK[None, None, None, k_state.index], fresh=True)
            pipeline_v.consumer_wait(v_state)
            _multiply(
                self._mma_pv(),
                tOrO,
                self._operand(tOrP, tSrS),
                tCrV[None, None, None, v_state.index],
                fresh=False,
            )
            self._pass_turn(consumer)
            warpgroup.wait_group(1)
            pipeline_k.consumer_release(k_state)
            block = begin - 1 - i
            self._score(self._of_block(tile, block), sequence, values, tiles, hidden)
            update(softmax, tile.values, factors)
            warpgroup.wait_group(0)
            pipeline_v.consumer_release(v_state)
            self._store_powers(tOrP, tSrS, self._of_block(tile, block), tiles, values)
            for row in cutlass.range_constexpr(2):
                for column in cutlass.range_constexpr(cute.size(outputs, mode=[1])):
                    outputs[row, column] = outputs[row, column] * factors[row]
            k_state.advance()
            v_state.advance()
        return k_state, v_state

    def _of_block(self, tile: Tile, block: Int32) -> Tile:
        """Of keys."""
        return tile._replace(first_key=block * self.tile_n)

    def _score(self, tile: Tile, sequence, values: Values, tiles, hidden: bool) -> None:
        """Products with a block of keys into scores."""
        if not self.scores.plain:
            self.scores.change(tile, values)
        if hidden:
            self.scores.hide(tile, sequence, values)

    def _store_powers(self, tOrP, tSrS, tile: Tile, tiles: Tiles, values: Values) -> None:
        """The numerators of probabilities, as the second product reads them."""
        if self.scores.drops:
            self.scores.drop(tile, tiles.heads, values)
        # In pieces of registers that the second product takes: others would be put together anew.
        for first in range(0, cute.size(tSrS), _PIECE):
            powers = cute.make_tensor(tSrS.iterator + first, cute.make_layout(_PIECE))
            rounded = cute.make_tensor(tOrP.iterator + first, cute.make_layout(_PIECE))
            rounded.store(powers.load().to(self.element_type))

    def _operand(self, tOrP: cute.Tensor, tSrS: cute.Tensor) -> cute.Tensor:
        """Accumulators, rounded, as the first operand of the next product: 16 of their columns are
        a k block of it."""
        blocks = cute.size(tSrS) // _PIECE
        layout = cute.make_layout(((2, 2, 2), 1, blocks), stride=((1, 2, 4), 0, _PIECE))
        return cute.make_tensor(tOrP.iterator, layout)

    @cute.jit
    def _clear_behind(self, thread, sV, block, sequence, pipeline_v, v_state):
        """Rows of V behind the last key become 0: their probabilities are 0, but they may hold
        what is not a number."""
        first_behind = sequence.keys - block * self.tile_n
        if first_behind < self.tile_n:
            pipeline_v.consumer_wait(v_state)
            stage = sV[None, None, v_state.index]
            behind = (self.tile_n - first_behind) * self.head_dim_v
            for i in cutlass.range(thread, behind, GROUP * self.consumers, unroll=1):
                row, column = i // self.head_dim_v, i % self.head_dim_v
                stage[column, first_behind + row] = self.element_type(0.0)
            cute.arch.fence_view_async_shared()
            cute.arch.barrier(barrier_id=TOGETHER, number_of_threads=GROUP * self.consumers)

    # Turns: a consumer issues its products while the others have their softmax.

    @cute.jit
    def _first_turn(self, consumer):
        if consumer == self.consumers - 1:
            cute.arch.barrier_arrive(barrier_id=TURNS, number_of_threads=2 * GROUP)

    def _await_turn(self, consumer) -> None:
        if self.turns:
            cute.arch.barrier(barrier_id=TURNS + consumer, number_of_threads=2 * GROUP)

    def _pass_turn(self, consumer) -> None:
        if self.turns:
            following = (consumer + 1) % self.consumers
            cute.arch.barrier_arrive(barrier_id=TURNS + following, number_of_threads=2 * GROUP)


@cute.jit
def _send(queue, sTiles, state, tile):
    """By a whole warp."""
    queue.producer_acquire(state)
    if cute.arch.lane_idx() == 0:
        sTiles[state.index] = tile
    cute.arch.sync_warp()
    queue.producer_commit(state)


@cute.jit
def _receive(queue, sTiles, state):
    queue.consumer_wait(state)
    tile = sTiles[state.index]
    queue.consumer_release(state)
    return tile


def _multiply(tiled_mma, accumulators, tCrA, tCrB, fresh: bool) -> None:
    """One wgmma group. fresh: the accumulators are overwritten."""
    warpgroup.fence()
    for k in range(cute.size(tCrA, mode=[2])):
        tiled_mma.set(warpgroup.Field.ACCUMULATE, not (fresh and k == 0))
        cute.gemm(tiled_mma, accumulators, tCrA[None, None, k], tCrB[None, None, k], accumulators)
    warpgroup.commit_group()


def tma_load(tensor, shared_layout, tiler):
    return cpasync.make_tiled_tma_atom(
        cpasync.CopyBulkTensorTileG2SOp(),
        tensor,
        cute.slice_(shared_layout, (None, None, 0)),
        tiler,
    )

"""Attention for Hopper, forward."""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
import cutlass.utils.hopper_helpers as sm90
from cutlass import Int8, Int32, Int64, const_expr
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator
from cutlass.tensor_utils import LayoutEnum

from ..common.attention.blocks import are_searched
from ..common.attention.entries import are_whole
from ..common.attention.modes import attention_modes
from ..common.attention.scores import Place, Scores
from ..common.attention.values import Values
from ..common.residence import residence
from ..common.threads import GROUP
from .mma import WGMMA_M
from .plan import SHARED_MEMORY
from .sdpa_forward_consumer import ForwardConsumer
from .sdpa_loads import load, tma_load, tma_pipeline
from .sdpa_pages import REGISTERS_FOR_PAGES, PagedKeys
from .sdpa_tiles import AHEAD, Tiles, Work, fetched, heads_together, send

_SMALL = 2048  # bytes of shared memory for barriers, and to align what is large

_SLACK = 8.0  # exponent of 2: powers so large are rounded to 16 bits like others

#: (producer, each consumer), by consumers of a block and blocks of a multiprocessor.
_REGISTERS = {
    (1, 1): None,
    (2, 1): (24, 240),
    (3, 1): (32, 160),
    (1, 2): (40, 216),
    (1, 3): (24, 136),
}


class SdpaForward(ForwardConsumer):
    """O = softmax(scale · Q · Kᵀ) · V on Hopper: TMA, wgmma, warp-specialised.

    warp group  role      does                                       waits on       signals
    ----------  --------  -----------------------------------------  -------------  -------------
    0           producer  warp 0: fetches tiles; TMA loads of Q,     stage empty    stage full
                          then of K and V, block by block                           (by TMA)
    1 (2, 3)    consumer  64 rows of queries: products, softmax,     stage full,    stage empty,
                          writes O and the log-sum-exp               own turn       next turn

    Blocks are persistent: each fetches tiles until there are none. A tile are `tile[0]` queries of
    a head, which take `tile[1]` keys at a time, from the last that they see to the first. The
    producer is ahead, in the next tile too. Blocks of keys that a table hides whole are left out:
    the producer and the consumers each look for the next one that is not. Of consecutive blocks of
    keys, a consumer issues Q · Kᵀ of the next one before P · V of this one, and has the softmax of
    the next one while P · V runs. Three consumers take turns at issuing, so that one has the tensor
    cores while another has its softmax. P stays in registers.

    Pipelines: Q (one stage), K and V (`stages` each), numbers of tiles. O has shared memory of its
    own, or that of Q if there is none left.
    Registers: producer 24 and two consumers 240, or 32 and three 160; where blocks of one consumer
    share a multiprocessor, 40 and 216 of each of two, or 24 and 136 of three.

    head_dims: Of Q and K, of V: there is room for as many columns; TMA fills up with zeros.
    longest_first: The last queries of a head first, and heads take turns: where keys behind a
        query are hidden, they have the most to do, and what is left at the end is short.
    scaling: When O is multiplied with what a larger maximum asks for: "at_once", as soon as that is
        known; "late", while the next Q · Kᵀ runs; "seldom", then, and only if powers are more than
        2 ** 8 times as large: until then the maximum of a row stays.
    resident: Blocks of a multiprocessor: one's consumer has a tile's beginning and end, which
        nothing hides, while those of the others multiply.

    Q (B,H,S,D), K, V (B,H_kv,S_kv,D), O like Q, or packed (T,H,D): sizes and strides known at run
    time, that of D is 1; addresses and the other strides are multiples of 16 bytes.
    """

    largest_power = 0.0  # exponent of 2
    values_in_keys = False  # V is columns of K, in its memory
    with_keys = 0  # bytes of shared memory behind those of keys, for what comes with them
    copied_with_keys = 0  # the bytes of it that come with a stage of keys
    exchanged = 0  # bytes of shared memory that consumers tell each other through
    of_one_head = True  # are the queries of a tile
    asks_ahead = False  # for keys and values, while the kernels before run

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
        scaling: str = "at_once",
        page_size: int | None = None,
        resident: int = 1,
    ):
        self.head_dim, self.head_dim_v = head_dims
        self.tile_m, self.tile_n = tile
        self.stages = stages
        self.element_type = element_type
        self.output_type = output_type or element_type
        self.powers_type = element_type  # as operand of the second product
        self.scores = scores
        self.searches = are_searched(scores.block_shape, tile)
        #: Whether a table may hide some of the scores of a tile that it shows others of.
        self.meets_several = not (self.of_one_head and are_whole(scores.block_shape, tile))
        self.longest_first = longest_first
        self.scaling = scaling
        self.page_size = page_size
        self.resident = resident
        self._slack = _SLACK if scaling == "seldom" else 0.0
        self.consumers = self.tile_m // WGMMA_M
        self.threads = GROUP * (1 + self.consumers)
        self.registers = _REGISTERS[self.consumers, resident]
        self.turns = self.consumers > 2  # two find theirs: measured
        element_bytes, output_bytes = element_type.width // 8, self.output_type.width // 8
        read = self.tile_m * self.head_dim + self.tile_n * stages * sum(head_dims)
        written = self.tile_m * self.head_dim_v * output_bytes
        needed = read * element_bytes + self.with_keys + written
        fits = needed <= SHARED_MEMORY // resident - _SMALL
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
        values = self._values(operands)
        batches, queries = self._sequences(mQ, values)
        mQ, mK, mV, mO = (attention_modes(tensor) for tensor in (mQ, mK, mV, mO))
        q_layout, k_layout, v_layout, _ = layouts = self._shared_layouts()
        tma_q, tQ = tma_load(mQ, q_layout, (self.tile_m, self.head_dim))
        tma_k, tK = self._tma_keys(mK, k_layout)
        tma_v, tV = self._tma_values(mV, v_layout)
        blocks, heads = cute.ceil_div(queries, self.tile_m), mQ.shape[2]
        together = self._together(mK, values, blocks, heads, batches)
        total, group = blocks * heads * batches, heads // mK.shape[2]
        tiles = self._tiles(blocks, heads, total, together, workspace, group)
        self._launch(
            *(tma_q, tQ, tma_k, tK, tma_v, tV, mO),
            *(layouts, operands, tiles, multiprocessors, stream),
        )

    def _tiles(self, *sizes_and_group) -> Tiles:
        """What `Tiles` takes, then the heads of queries that share one of keys."""
        return Tiles(*sizes_and_group[:-1])

    def _tma_keys(self, mK: cute.Tensor, layout) -> tuple:
        return tma_load(mK, layout, (self.tile_n, self.head_dim))

    def _tma_values(self, mV: cute.Tensor, layout) -> tuple:
        # (S,D,H,B) seen as (D,S,H,B): columns of the second product.
        mVt = cute.make_tensor(mV.iterator, cute.select(mV.layout, mode=[1, 0, 2, 3]))
        return tma_load(mVt, layout, (self.head_dim_v, self.tile_n))

    def _sequences(self, mQ, values: Values) -> tuple:
        """(how many, the most queries of one). mQ: (B,H,S,D), or packed (T,H,D)"""
        if cute.rank(mQ) == 3:
            return values["cu_seqlens_q"].shape[0] - 1, values.longest("q", mQ.shape[0])
        return mQ.shape[0], mQ.shape[2]

    def _together(self, mK, values: Values, blocks: Int32, heads: Int32, batches: Int32) -> Int32:
        """Heads that take turns, of all sequences. mK: (S,D,H,B)"""
        if not self.longest_first:
            return Int32(1)
        keys = self._most_keys(mK, values)
        row = (self.head_dim + self.head_dim_v) * self.element_type.width // 8
        read = Int64(keys) * row * mK.shape[2] // heads
        return heads_together(heads * batches, blocks, read)

    def _most_keys(self, mK, values: Values) -> Int32:
        """Of a sequence. mK: (S,D,H,B)"""
        if "cu_seqlens_kv" in values:
            return values.longest("kv", mK.shape[0])
        return self._keys(mK, values)

    def _batch_of_keys(self, place: Place) -> Int32:
        """Of K and V as they lie: packed, they have one."""
        return Int32(0) if "cu_seqlens_kv" in self.scores.names else place.batch

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
        of_keys = cute.cosize(k_layout) + self.with_keys * 8 // self.element_type.width
        of_values = 0 if self.values_in_keys else cute.cosize(v_layout)
        staged = cute.cosize(o_layout) if self.output_memory == "apart" else 0

        @cute.struct
        class SharedStorage:
            Q: cute.struct.Align[
                cute.struct.MemRange[self.element_type, cute.cosize(q_layout)], 1024
            ]
            K: cute.struct.Align[cute.struct.MemRange[self.element_type, of_keys], 1024]
            V: cute.struct.Align[cute.struct.MemRange[self.element_type, of_values], 1024]
            output: cute.struct.Align[cute.struct.MemRange[self.output_type, staged], 1024]
            exchange: cute.struct.Align[cute.struct.MemRange[Int8, self.exchanged], 1024]
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
            grid=(self._blocks(tiles, multiprocessors), 1, 1),
            block=(self.threads, 1, 1),
            stream=stream,
            use_pdl=True,
            **self._residence(tiles),
        )

    def _blocks(self, tiles: Tiles, multiprocessors: Int32) -> Int32:
        """Of a launch."""
        return cutlass.min(tiles.total, multiprocessors * self.resident)

    def _residence(self, tiles: Tiles) -> dict:
        """How a launch says which blocks are on multiprocessors together."""
        return residence(self.resident)

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
        of_values = storage.K if self.values_in_keys else storage.V
        sV = of_values.get_tensor(v_layout.outer, swizzle=v_layout.inner)
        sO = self._staged_output(storage, o_layout)
        sTiles = storage.tiles.get_tensor(cute.make_layout(AHEAD))
        pipelines = self._pipelines(storage, q_layout, k_layout, v_layout)
        queue = pipeline.PipelineAsync.create(
            num_stages=AHEAD,
            producer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, 32),
            consumer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, GROUP * self.consumers),
            barrier_storage=storage.tile_stages.data_ptr(),
            defer_sync=True,
        )
        pipeline.pipeline_init_arrive((1, 1), is_relaxed=True)
        pipeline.pipeline_init_wait((1, 1))
        if const_expr(self.asks_ahead):
            self._ask_ahead(warp_index, tma_k, mK, sK, tma_v, mV, sV, mQ, tiles, operands)
        self._await_launch()
        tiles = self._known(tiles)

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

    def _await_launch(self) -> None:
        """What the kernels before wrote is there, and the next one may start."""
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()

    def _known(self, tiles: Tiles) -> Tiles:
        """The same, with what kernels before have written."""
        return tiles

    def _staged_output(self, storage, layout):
        """Where O is, on its way out."""
        memory = storage.output if self.output_memory == "apart" else storage.Q
        return memory.get_tensor(layout.outer, swizzle=layout.inner)

    def _pipelines(self, storage, q_layout, k_layout, v_layout) -> tuple:
        """Of Q, K and V."""
        return (
            self._pipeline(storage.q_full, q_layout, 1),
            self._pipeline(storage.k_stages, k_layout, self.stages, self.copied_with_keys),
            self._pipeline(storage.v_stages, v_layout, self.stages),
        )

    def _pipeline(self, barriers, layout, stages, more=0):
        """more: Bytes of a stage beside those of its layout."""
        stage = cute.size_in_bytes(self.element_type, cute.slice_(layout, (None, None, 0)))
        return tma_pipeline(barriers, stages, stage + more, self.consumers * GROUP // 32)

    def _values(self, operands, sK: cute.Tensor | None = None) -> Values:
        """sK: In the kernel."""
        return Values(self.scores.names, operands)

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
        values = self._values(operands, sK)
        states = tuple(
            pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, stages)
            for stages in (1, self.stages, self.stages)
        )
        sent = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, AHEAD)
        index = Int32(cute.arch.block_idx()[0])
        while index < tiles.total:
            tile = tiles.at(index) if const_expr(self.longest_first) else index
            send(queue, sTiles, sent, tile)
            sent.advance()
            found = tiles.fetch()
            work = self._work(tiles, tile, values, mQ, mK)
            states = self._load_tile(
                *(tma_q, mQ, sQ, tma_k, mK, sK, tma_v, mV, sV),
                *(pipelines, states, work, values),
            )
            index = fetched(found)
        send(queue, sTiles, sent, index)
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
        place, sequence, blocks = work.place, work.sequence, work.blocks
        pipeline_q, pipeline_k, pipeline_v = pipelines
        q_state, k_state, v_state = states
        key_head = place.head // (mQ.shape[2] // mK.shape[2])
        batch = Int32(0) if const_expr("cu_seqlens_q" in self.scores.names) else place.batch
        mQ = cute.domain_offset((sequence.first_query, 0), mQ[None, None, place.head, batch])
        batch = self._batch_of_keys(place)
        keys = self._keys_to_load(tma_k, mK, sK, key_head, batch, sequence)
        columns = self._values_to_load(tma_v, mV, sV, key_head, batch, work)
        gQ = cute.local_tile(mQ, (self.tile_m, self.head_dim), (None, 0))
        if self._takes_queries(blocks):
            load(tma_q, gQ, place.query // self.tile_m, sQ, pipeline_q, q_state)
            q_state.advance()
        if blocks.end > blocks.begin:
            last = blocks.end - 1
            self._load_keys(keys, last, pipeline_k, k_state, work, values)
            k_state.advance()
            if const_expr(self.searches):
                seen = self._following(work.seen, work, values)
                while seen.block >= blocks.begin:
                    self._load_keys(keys, seen.block, pipeline_k, k_state, work, values)
                    self._load_values(columns, last, pipeline_v, v_state, work, values)
                    k_state.advance()
                    v_state.advance()
                    last = seen.block
                    seen = self._following(seen, work, values)
                self._load_values(columns, last, pipeline_v, v_state, work, values)
            else:
                for i in cutlass.range(last - blocks.begin, unroll=1):
                    self._load_keys(keys, last - 1 - i, pipeline_k, k_state, work, values)
                    self._load_values(columns, last - i, pipeline_v, v_state, work, values)
                    k_state.advance()
                    v_state.advance()
                self._load_values(columns, blocks.begin, pipeline_v, v_state, work, values)
            v_state.advance()
        return q_state, k_state, v_state

    def _keys_to_load(self, tma, mK, sK, head, batch, sequence) -> tuple:
        """What `_load_keys` takes of the keys of a sequence."""
        mK = cute.domain_offset((sequence.first_key, 0), mK[None, None, head, batch])
        return tma, cute.local_tile(mK, (self.tile_n, self.head_dim), (None, 0)), sK

    def _values_to_load(self, tma, mV, sV, head, batch, work: Work) -> tuple:
        """What `_load_values` takes of the values of a sequence."""
        mV = cute.domain_offset((0, self._first_value(work)), mV[None, None, head, batch])
        return tma, cute.local_tile(mV, (self.head_dim_v, self.tile_n), (0, None)), sV

    def _load_keys(self, keys: tuple, block, stages, state, work: Work, values: Values) -> None:
        tma, tiles, shared = keys
        load(tma, tiles, block, shared, stages, state)

    def _load_values(self, columns: tuple, block, stages, state, work: Work, values) -> None:
        tma, tiles, shared = columns
        load(tma, tiles, block, shared, stages, state)

    def _first_value(self, work: Work) -> Int32:
        """Of a sequence, where V begins."""
        return work.sequence.first_key


class SdpaForwardPaged(PagedKeys, SdpaForward):
    """The same of K and V in pages: (pages, H_kv, page_size, D), page `page_table[b, i]` has keys
    i · page_size and following of sequence b."""

    def __init__(self, *design, **options):
        super().__init__(*design, **options)
        if self.consumers == 2:
            self.registers = REGISTERS_FOR_PAGES

    def _tma_values(self, mV: cute.Tensor, layout) -> tuple:
        return self._tma_rows(mV, self.head_dim_v)

    def _values_to_load(self, tma, mV, sV, head, batch, work: Work) -> tuple:
        return tma, *self._partitioned(tma, mV, sV, self.head_dim_v, head)

    def _load_values(self, columns: tuple, block, stages, state, work: Work, values) -> None:
        self._load_rows(columns, block, stages, state, work, values)

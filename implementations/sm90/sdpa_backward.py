"""Gradient of attention for Hopper."""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
from cutlass import Float32, Int32, Int64, Uint8, Uint16, const_expr
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator

from ..common.attention.behind import behind_last, fill_behind
from ..common.attention.modes import attention_modes
from ..common.attention.sequences import queries_seeing, sequence_of
from ..common.attention.values import Values
from ..common.conversion import select
from ..common.threads import GROUP
from ..common.work_split import COUNTER_BYTES
from .sdpa_backward_bias import TiledBiasGradient
from .sdpa_backward_consumer import BackwardConsumer
from .sdpa_backward_drawn import DRAWERS
from .sdpa_backward_keys import KeyGradients
from .sdpa_backward_plan import CONSUMERS, DRAWN, FOUND, tile_layout
from .sdpa_backward_rows import QueryGradients, RowSums, SinkGradients
from .sdpa_backward_shares import Blocks, costs_of, shares_of
from .sdpa_backward_turns import KEEPERS
from .sdpa_backward_work import Search, Work, blocks_that_see, following, search_of
from .sdpa_loads import load, tma_load, tma_pipeline
from .sdpa_parts import choose
from .sdpa_tiles import in_turn

_REGISTERS = (24, 240)  # producer, each consumer
_REGISTERS_SEARCHING = (40, 232)
_REGISTERS_DRAWING = {64: (88, 208), 128: (40, 232)}  # by the room of Q and K
#: Of heads that take turns: blocks for each multiprocessor, heads with so few gain nothing by more;
#: bytes that L2 keeps. Each is what was fastest on an H200.
_BLOCKS_AT_ONCE, _SHORT, _KEPT = 132, 8, 44 << 20


class SdpaBackward(BackwardConsumer):
    """dQ, dK, dV of attention on Hopper: TMA, wgmma, warp-specialised, in three launches.

    Before, `RowSums` makes what is needed of every row of queries; behind, `QueryGradients` rounds
    dQ, which blocks add up in float32; `KeyGradients`, `SinkGradients` and `TiledBiasGradient` have
    launches of their own.

    warp group  role      does                                      waits on       signals
    ----------  --------  ----------------------------------------  -------------  -------------
    0           producer  warp 0: loads of K and V, then, tile of   stage empty    stage full
                          queries by tile, of Q and dO with the                    (by TMA)
                          log-sum-exps and sums of their rows;
                          of a fixed order warps 1, 2: see         dQ added       turns at dQ
                          `TakesTurns`
                          dropout's numbers, warps 1 to 3:         read           drawn
                          see `DrawsAhead`
    1, 2        consumer  S, dP = dO · Vᵀ, dS; adds dQ; keeps dK    stage full     stage empty
                          and dV of its keys or columns

    A block has `tile[1]` keys of a head of keys, and all tiles of `tile[0]` queries that see them,
    of all heads of queries that share the keys: dK and dV need no atomics. Where multiprocessors
    would have no block, or one more than others, or wait for the longest one, several have some of
    these heads each, as if there were more heads of keys, and leave dK and dV in float32 for
    `KeyGradients`, see `shares_of`. Where the first keys have the most queries, heads take turns,
    so that what is left at the end is short. Where all have the same, and add in a fixed order,
    heads do so that fewer blocks of each run at the same time, and wait for each other.

    Pipelines: Q with log-sum-exps, dO with the row sums (`stages` each). dS lies in shared memory
    for dQ = dS · K, `stages[2]` times; dK and dV where K and V were, when all is done.
    Where a table hides tiles whole, the producer searches for those that it does not, and tells
    the consumers with each Q. Registers: producer 24, consumers 240; 40 and 232 where it searches;
    40 and 232, or 88 and 208 of a room of 64 columns, where numbers are drawn.

    head_dims: Of Q and K, of V: there is room for as many columns; TMA fills up with zeros.
    early: What is issued before its turn, so that tensor cores are busy while threads compute:
        "values": dV, before dS is formed; "scores": S of the next queries, behind dK of these.
    staged: Whether dQ goes through shared memory and a bulk copy adds it, or threads do.
    deterministic: Whether blocks add dQ in a fixed order, see `TakesTurns`: each waits for those
        before it, which have started before it.

    Q, out, dO, dQ (B,H,S,D), K, V, dK, dV (B,H_kv,S_kv,D), or packed (T,H,D): sizes and strides
    known at run time, that of D is 1; addresses and the other strides are multiples of 16 bytes.
    """

    @cute.jit
    def with_operands(
        self,
        mQ: cute.Tensor,
        mK: cute.Tensor,
        mV: cute.Tensor,
        mO: cute.Tensor,
        mdO: cute.Tensor,
        mLSE: cute.Tensor,
        mdQ: cute.Tensor,
        mdK: cute.Tensor,
        mdV: cute.Tensor,
        operands,
        workspace: Int64,
        stream: cuda.CUstream,
    ):
        """operands: a tuple of what the scores are called by."""
        values = Values(self.scores.names, operands)
        read = mQ, mK, mV, mdO, mLSE
        batches, queries, keys = mQ.shape[0], mQ.shape[2], mK.shape[2]
        if const_expr(self.packed):
            batches = values["cu_seqlens_q"].shape[0] - 1
            queries, keys = values.longest("q", mQ.shape[0]), values.longest("kv", mK.shape[0])
        mQ, mK, mV, mO, mdO, mdQ, mdK, mdV = (
            attention_modes(tensor) for tensor in (mQ, mK, mV, mO, mdO, mdQ, mdK, mdV)
        )
        start, workspace = workspace, workspace + COUNTER_BYTES
        RowSums(self)(mO, mdO, mLSE, operands, workspace, queries, batches, stream)
        shares = self._shares(mQ, mK, keys, batches)
        scores = self.left_address(self.space(workspace, mQ, values))
        left = scores + self._left_of_scores(mQ, mK)
        self._launch(
            *(mQ, mK, mV, mdO, mdK, mdV, self._with_tiles(operands, mQ, mK, scores)),
            *(workspace, keys, batches, shares, left, stream),
        )
        if const_expr("dSink" in self.scores.names):
            SinkGradients(self)(mdO, operands, workspace, stream)
        QueryGradients(self)(mdQ, operands, workspace, queries, batches, stream)
        if const_expr(self.shares_keys):
            KeyGradients(self)(mdK, mdV, operands, left, shares, stream)
        if const_expr("dBias" in self.scores.names):
            self._bias_gradient(read, operands, start, scores, stream)

    # What scores have beside: nothing comes with the queries -----------------------------

    def _with_tiles(self, operands: tuple, mQ, mK, scores: Int64) -> tuple:
        """With what copies tiles."""
        return operands

    def _left_of_scores(self, mQ, mK) -> Int64:
        """Bytes of what blocks leave of dS. mQ, mK: (S,D,H,B)"""
        return Int64(0)

    def _load_with_queries(self, storage, values: Values, work: Work, head, block, stage, full):
        """Into the stage of a tile of Q."""

    def _bias_gradient(self, read: tuple, operands, start: Int64, scores: Int64, stream) -> None:
        """dBias. scores: Where dS is left, if it is."""
        TiledBiasGradient(self).launch(*read, operands, start, stream)

    # Launch ------------------------------------------------------------------------------

    @property
    def _registers(self) -> tuple[int, int]:
        if self.draws_ahead:
            return _REGISTERS_DRAWING[self.head_dim]
        return _REGISTERS_SEARCHING if self.searches else _REGISTERS

    def _shares(self, mQ, mK, keys: Int32, batches: Int32) -> Int32:
        """Of each block of keys. mQ, mK: (S,D,H,B)"""
        if not self.shares_keys:
            return Int32(1)
        blocks = Blocks(
            cute.ceil_div(keys, self.tile_n) * mK.shape[2] * batches,
            mQ.shape[2] // mK.shape[2],
            cute.ceil_div(mQ.shape[0], self.tile_m),
        )
        tile, head_dims = (self.tile_m, self.tile_n), (self.head_dim, self.head_dim_v)
        costs = costs_of(tile, head_dims, self.scores.names)
        return shares_of(blocks, costs, choose)

    @cute.jit
    def _launch(
        self, mQ, mK, mV, mdO, mdK, mdV, operands, workspace, keys, batches, shares, left, stream
    ):
        m, n, d, e = self.tile_m, self.tile_n, self.head_dim, self.head_dim_v
        one = self.element_type
        layouts = {
            "Q": tile_layout(one, m, d, self.q_stages, self.span(d)),
            "dO": tile_layout(one, m, e, self.do_stages, self.span(e)),
            "K": tile_layout(one, n, d, 1, self.span(d)),
            "V": tile_layout(one, n, e, 1, self.span(e)),
        }
        (tma_q, tQ), (tma_k, tK), (tma_v, tV), (tma_do, tdO) = (
            tma_load(tensor, layouts[name], tiler)
            for name, tensor, tiler in (
                ("Q", mQ, (m, d)), ("K", mK, (n, d)), ("V", mV, (n, e)), ("dO", mdO, (m, e)),
            )
        )  # fmt: skip
        scores = self.ds_stages * m * n

        @cute.struct
        class SharedStorage:
            K: cute.struct.Align[cute.struct.MemRange[one, n * d], 1024]
            V: cute.struct.Align[cute.struct.MemRange[one, n * e], 1024]
            Q: cute.struct.Align[cute.struct.MemRange[one, m * d * self.q_stages], 1024]
            do: cute.struct.Align[cute.struct.MemRange[one, m * e * self.do_stages], 1024]
            P: cute.struct.Align[cute.struct.MemRange[one, 0 if self.transposed else scores], 1024]
            ds: cute.struct.Align[cute.struct.MemRange[one, scores], 1024]
            bias: cute.struct.Align[
                cute.struct.MemRange[Uint8, self.with_queries * self.q_stages], 1024
            ]
            dq: cute.struct.Align[cute.struct.MemRange[Float32, m * d * self.staged], 128]
            lse: cute.struct.Align[cute.struct.MemRange[Float32, m * self.q_stages], 128]
            delta: cute.struct.Align[cute.struct.MemRange[Float32, m * self.do_stages], 128]
            k_full: cute.struct.MemRange[Int64, 2]
            v_full: cute.struct.MemRange[Int64, 2]
            q_full: cute.struct.MemRange[Int64, 2 * self.q_stages]
            found: cute.struct.MemRange[Int32, 2 * FOUND]
            drawn: cute.struct.Align[cute.struct.MemRange[Uint16, self.drawn_bytes // 2], 8]
            drawn_full: cute.struct.MemRange[Int64, DRAWN]
            drawn_read: cute.struct.MemRange[Int64, DRAWN]
            turns: cute.struct.MemRange[Int64, CONSUMERS]
            added: cute.struct.MemRange[Int64, CONSUMERS]
            do_full: cute.struct.MemRange[Int64, 2 * self.do_stages]

        self.shared_storage = SharedStorage
        blocks, heads = cute.ceil_div(keys, n), mK.shape[2] * batches * shares
        together = Int32(1)
        if const_expr(self.takes_turns):
            together = self._together(mQ, operands, blocks, heads)
        self.kernel(
            *(tma_q, tQ, tma_k, tK, tma_v, tV, tma_do, tdO),
            *(mdK, mdV, operands, workspace, blocks, heads, together, shares, left),
        ).launch(
            grid=(blocks * heads, 1, 1),
            block=(self.threads, 1, 1),
            min_blocks_per_mp=1,
            stream=stream,
            use_pdl=True,
        )

    @cute.jit
    def _together(self, mQ, operands, blocks: Int32, heads: Int32) -> Int32:
        """Of heads of keys of all sequences, how many take turns: one or two blocks for each
        multiprocessor, as few as L2 keeps the queries and the gradients of, and the same number
        in every turn if that is not far less. mQ: (S,D,H,B)"""
        values = self._values(operands)
        queries = values.longest("q", mQ.shape[0]) if self.packed else mQ.shape[0]
        elements = (self.head_dim + self.head_dim_v) * self.element_type.width // 8
        row = elements + self.head_dim * Float32.width // 8  # dQ is added to in float32
        bytes_of_head, blocks = Int64(cutlass.max(queries, 1)) * row, cutlass.max(blocks, 1)
        kept = Int32(cutlass.min(_KEPT // bytes_of_head, Int64(heads)))
        least = cute.ceil_div(_BLOCKS_AT_ONCE, blocks)
        most = select(blocks > _SHORT, cute.ceil_div(2 * _BLOCKS_AT_ONCE, blocks), least)
        found = cutlass.min(cutlass.max(cutlass.min(kept, most), least), heads)
        even = cutlass.max(found, 1)
        while heads % even != 0:
            even -= 1
        return select(3 * even >= 2 * found, even, found)

    @cute.kernel
    def kernel(
        self,
        tma_q: cute.CopyAtom,
        mQ: cute.Tensor,
        tma_k: cute.CopyAtom,
        mK: cute.Tensor,
        tma_v: cute.CopyAtom,
        mV: cute.Tensor,
        tma_do: cute.CopyAtom,
        mdO: cute.Tensor,
        mdK: cute.Tensor,
        mdV: cute.Tensor,
        operands,
        workspace,
        blocks: Int32,
        heads: Int32,
        together: Int32,
        shares: Int32,
        left: Int64,
    ):
        """blocks: Of keys, of each of so many heads of keys of all sequences, which are `shares`
        times as many as there are: each has as many times fewer heads of queries. left: Where what
        they leave is."""
        warp_index = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        group = warp_index // 4
        if warp_index == 0:
            for atom in (tma_q, tma_k, tma_v, tma_do):
                cpasync.prefetch_descriptor(atom)
        storage = SmemAllocator().allocate(self.shared_storage)
        element_bytes = self.element_type.width // 8
        m, n, d, e = self.tile_m, self.tile_n, self.head_dim, self.head_dim_v
        readers = CONSUMERS * GROUP // 32
        pipelines = (
            tma_pipeline(storage.k_full, 1, n * d * element_bytes, readers),
            tma_pipeline(storage.v_full, 1, n * e * element_bytes, readers),
            tma_pipeline(
                *(storage.q_full, self.q_stages),
                *(m * (d * element_bytes + 4) + self.with_queries, readers),
            ),
            tma_pipeline(storage.do_full, self.do_stages, m * (e * element_bytes + 4), readers),
        )
        if const_expr(self.deterministic):
            self._prepare_turns(storage, warp_index)
        if const_expr(self.draws_ahead):
            self._prepare_drawing(storage, warp_index)
        pipeline.pipeline_init_arrive((1, 1), is_relaxed=True)
        pipeline.pipeline_init_wait((1, 1))
        # Whatever made K and V had ended before `RowSums` let this launch begin.
        if warp_index != 0:
            cute.arch.griddepcontrol_wait()
            cute.arch.griddepcontrol_launch_dependents()

        values = self._values(operands)
        index, _, _ = cute.arch.block_idx()
        head, block = in_turn(index, blocks, heads, together)
        key_heads = mK.shape[2] * (shares if const_expr(self.shares_keys) else 1)
        own_head, batch = head % key_heads, head // key_heads
        key_head = own_head // shares if const_expr(self.shares_keys) else own_head
        if const_expr(self.last_first):
            block = blocks - 1 - block
        first_key = block * n
        sequence = sequence_of(values, batch, mQ.shape[0], mK.shape[0])
        key_rows = Int32(mK.shape[0])
        if const_expr(self.packed):
            starts = values["cu_seqlens_kv"]
            key_rows = starts[batch + 1] - starts[batch]
        seeing = queries_seeing(sequence, first_key, n, m)
        sharing = mQ.shape[2] // key_heads
        total = Int32(0)
        if first_key < sequence.keys:
            total = sharing * (seeing.end - seeing.begin)
        first, step = seeing.begin, Int32(1)
        if const_expr(self.descends):
            first, step = seeing.end - 1, Int32(-1)
        work = Work(
            *(batch, key_head, own_head * sharing, first_key, key_rows, total),
            *(seeing, first, step),
        )

        registers = self._registers
        if group == 0:
            cute.arch.setmaxregister_decrease(registers[0])
            if warp_index == 0 and total > 0:
                self._produce(
                    *(tma_q, mQ, tma_k, mK, tma_v, mV, tma_do, mdO),
                    *(storage, pipelines, work, sequence, operands, workspace),
                )
            if const_expr(self.deterministic):
                keeper = warp_index - KEEPERS
                if (keeper >= 0) & (keeper < CONSUMERS) & (total > 0):
                    space = self.space(workspace, mQ, values)
                    self._keep_turns(keeper, storage, pipelines, work, sequence, space)
            if const_expr(self.draws_ahead):
                drawer = warp_index - DRAWERS
                if (drawer >= 0) & (total > 0):
                    self._draw(drawer, storage, pipelines, work, operands, mQ.shape[2])
        else:
            cute.arch.setmaxregister_increase(registers[1])
            if first_key < key_rows:
                space = self.space(workspace, mQ, values)
                own = left + Int64(head * blocks + block) * self.share_bytes
                self._consume(
                    *(group - 1, storage, pipelines, mdK, mdV),
                    *(work, sequence, operands, space, shares, own),
                )
            if const_expr(self.packed):
                behind = behind_last(
                    *(values["cu_seqlens_kv"], batch, mK.shape[0], block, blocks),
                    *(cute.arch.thread_idx()[0] - GROUP, CONSUMERS * GROUP),
                )
                for gradient in (mdK, mdV):
                    fill_behind(gradient[None, None, key_head, 0], behind)

    @cute.jit
    def _produce(
        self,
        tma_q,
        mQ,
        tma_k,
        mK,
        tma_v,
        mV,
        tma_do,
        mdO,
        storage,
        pipelines,
        work: Work,
        sequence,
        operands,
        workspace,
    ):
        """One warp: K and V, then what the consumers need of each tile of queries."""
        values = self._values(operands)
        space = self.space(workspace, mQ, values)
        pipeline_k, pipeline_v, pipeline_q, pipeline_do = pipelines
        m, n, d, e = self.tile_m, self.tile_n, self.head_dim, self.head_dim_v
        batch = Int32(0) if const_expr(self.packed) else work.batch
        one = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, 1)
        gK, gV = (
            cute.local_tile(
                cute.domain_offset(
                    (sequence.first_key + work.first_key, 0),
                    tensor[None, None, work.key_head, batch],
                ),
                (n, columns),
                (None, 0),
            )
            for tensor, columns in ((mK, d), (mV, e))
        )
        sK, sV = self._tile(storage.K, n, d), self._tile(storage.V, n, e)
        sQ = self._tile(storage.Q, m, d, self.q_stages)
        sdO = self._tile(storage.do, m, e, self.do_stages)
        q_state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, self.q_stages)
        do_state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, self.do_stages)
        queries = tma_q, sQ, pipeline_q, storage.lse, self.lse_address
        gradients = tma_do, sdO, pipeline_do, storage.delta, self.delta_address
        load(tma_k, gK, 0, sK, pipeline_k, one)
        cute.arch.griddepcontrol_wait()
        if const_expr(self.searches):
            load(tma_v, gV, 0, sV, pipeline_v, one)
            search = self._following(search_of(), work, sequence, values)
            index = search.index
            # Behind the last one comes a tile of Q that tells of none; it may be any.
            while index <= work.total:
                head, block = work.place(cutlass.min(index, work.total - 1))
                self._tell(search, head, block, work, sequence, values, storage, q_state)
                tile = self.tile_index(space, work.batch, head, sequence.first_query, block)
                gQ, gdO = self._rows(mQ, mdO, batch, sequence, head, block)
                self._load_rows(*queries, gQ, space, tile, q_state)
                full = pipeline_q.producer_get_barrier(q_state)
                self._load_with_queries(storage, values, work, head, block, q_state.index, full)
                q_state.advance()
                if index < work.total:
                    self._load_rows(*gradients, gdO, space, tile, do_state)
                    do_state.advance()
                    search = self._following(search, work, sequence, values)
                    index = search.index
                else:
                    index = work.total + 1
        else:
            head, block = work.first_head, work.first
            for i in cutlass.range(work.total, unroll=1):
                tile = self.tile_index(space, work.batch, head, sequence.first_query, block)
                gQ, gdO = self._rows(mQ, mdO, batch, sequence, head, block)
                self._load_rows(*queries, gQ, space, tile, q_state)
                full = pipeline_q.producer_get_barrier(q_state)
                self._load_with_queries(storage, values, work, head, block, q_state.index, full)
                if i == 0:
                    load(tma_v, gV, 0, sV, pipeline_v, one)
                self._load_rows(*gradients, gdO, space, tile, do_state)
                q_state.advance()
                do_state.advance()
                head, block = work.following(head, block)

    def _following(self, search, work: Work, sequence, values):
        tile = self.tile_m, self.tile_n
        of_entries = self.scores.block_shape, tile, self.scores.full
        return following(search, work, sequence, values, *of_entries)

    def _tell(self, search: Search, head, block, work, sequence, values, storage, state) -> None:
        """Which tile is the next one, before its stage of Q is asked for: by every lane, of which
        one then arrives at the barrier of that stage. And how many blocks add to its dQ before, if
        that matters."""
        told = search.index if self.scores.full is None else 2 * search.index + search.is_full
        place = self._place_found(storage, state.count)
        place[0] = told
        if self.deterministic:
            begin, end = self._blocks_before(block, work, sequence)
            of_table = sequence, values, self.scores.block_shape, (self.tile_m, self.tile_n)
            place[1] = blocks_that_see(begin, end, work.batch, head, block, *of_table)

    def _rows(self, mQ, mdO, batch, sequence, head, block) -> tuple:
        """Of Q and of dO: a tile of queries."""
        row = sequence.first_query + block * self.tile_m
        return tuple(
            cute.local_tile(
                cute.domain_offset((row, 0), tensor[None, None, head, batch]),
                (self.tile_m, columns),
                (None, 0),
            )
            for tensor, columns in ((mQ, self.head_dim), (mdO, self.head_dim_v))
        )

    def _load_rows(self, tma, shared, stages, numbers, address_of, rows, space, tile, state):
        """With a number of each."""
        load(tma, rows, 0, shared, stages, state)
        full = stages.producer_get_barrier(state)
        _load_floats(address_of(space, tile), numbers, self.tile_m, state.index, full)


@cute.jit
def _load_floats(address, memory, count: cutlass.Constexpr, stage, full):
    """Numbers of a stage, by a bulk copy that arrives at the same barrier."""
    target = memory.data_ptr().toint() + stage * (count * 4)
    with cute.arch.elect_one():
        cute.arch.inline_ptx(
            "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
            "[{$r0}], [{$r1}], {$r2}, [{$r3}];",
            read_only_args=[Int32(target), address, Int32(count * 4), Int32(full.toint())],
        )

"""What the gradient of attention does with rows of queries before and after its main part."""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import warp
from cutlass.memory import SmemAllocator

from ..common.attention.behind import behind_last, fill_behind
from ..common.attention.sequences import sequence_of
from ..common.attention.softmax import LOG2_E, power_of_two
from ..common.attention.values import Values
from ..common.conversion import select
from ..common.flat_grid import flat_block_idx, flat_grid
from ..common.rows import matrix_row
from ..common.threads import GROUP, WARP
from .sdpa_backward_plan import CONSUMERS, BackwardPlan, Known, floats_at, tile_layout

_PIECE = 4  # float32 numbers that an instruction moves
_AT_ONCE = 16  # rows of queries; each thread has all loads of a tile in flight


class RowSums:
    """Of every row of queries the log-sum-exp in base 2 and the sum of out · dO, and zeros where
    the gradients of queries are added up; rows behind the end of a sequence, too.

    Rows that see nothing, or are behind the end, get a log-sum-exp of +inf: powers are zeros.
    """

    def __init__(self, plan: BackwardPlan):
        self.plan = plan
        vectors = plan.head_dim_v * plan.element_type.width // 128
        self.per_row = min(WARP, 1 << (vectors - 1).bit_length())
        self.threads = _AT_ONCE * self.per_row
        if self.threads < plan.tile_m or plan.tile_m % _AT_ONCE:
            raise ValueError(f"{self.threads} threads for tiles of {plan.tile_m} queries")

    @cute.jit
    def __call__(self, mO, mdO, mLSE, operands, workspace: Int64, queries, batches, stream):
        """mO, mdO: (S,D,H,B); queries: of a sequence, at most."""
        blocks = cute.ceil_div(queries, self.plan.tile_m)
        self.kernel(mO, mdO, mLSE, operands, workspace, blocks).launch(
            grid=flat_grid(blocks, mO.shape[2], batches),
            block=(self.threads, 1, 1),
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(
        self,
        mO: cute.Tensor,
        mdO: cute.Tensor,
        mLSE: cute.Tensor,
        operands,
        workspace,
        blocks: Int32,
    ):
        plan = self.plan
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        values = Values(plan.scores.names, operands)
        block, head, batch = flat_block_idx(blocks, mO.shape[2])
        thread = cute.arch.thread_idx()[0]
        sequence = sequence_of(values, batch, mO.shape[0], Int32(0))
        space = plan.space(workspace, mO, values)
        if block * plan.tile_m < sequence.query_rows:
            tile = plan.tile_index(space, batch, head, sequence.first_query, block)
            place = Int32(0) if const_expr(plan.packed) else batch
            mO_head, mdO_head = (
                cute.domain_offset((sequence.first_query, 0), m[None, None, head, place])
                for m in (mO, mdO)
            )
            first, end = block * plan.tile_m, sequence.queries
            lse = Float32(Float32.inf)
            if (thread < plan.tile_m) & (first + thread < end):
                if const_expr(plan.packed):
                    lse = mLSE[head, sequence.first_query + first + thread]
                else:
                    lse = mLSE[batch, head, first + thread]
            own, column = thread // self.per_row, thread % self.per_row * 8
            rows = [i * _AT_ONCE + own for i in range(plan.tile_m // _AT_ONCE)]
            loaded = [
                tuple(
                    matrix_row(m, first + row, column, end, 8).load(0) for m in (mO_head, mdO_head)
                )
                for row in rows
            ]
            if const_expr(plan.deterministic) and thread < CONSUMERS:
                counter_at(plan.counter_address(space, tile, thread)).store(Int32(0))
            gradients = floats_at(plan.dq_address(space, tile), plan.tile_m * plan.head_dim)
            zeros = cute.make_rmem_tensor(_PIECE, Float32)
            zeros.fill(0.0)
            atom = cute.make_copy_atom(cute.nvgpu.CopyUniversalOp(), Float32, num_bits_per_copy=128)
            pieces = cute.logical_divide(gradients, cute.make_layout(_PIECE))
            for i in cutlass.range(
                thread, plan.tile_m * plan.head_dim // _PIECE, self.threads, unroll=4
            ):
                cute.copy(atom, zeros, pieces[None, i])
            deltas = floats_at(plan.delta_address(space, tile), plan.tile_m)
            for row, (out, gradient) in zip(rows, loaded, strict=True):
                total = Float32(0.0)
                for a, b in zip(out, gradient, strict=True):
                    total = cute.math.fma(a, b, total)
                total = cute.arch.warp_reduction_sum(total, threads_in_group=self.per_row)
                if thread % self.per_row == 0:
                    deltas[row] = total
            if thread < plan.tile_m:
                lse = select(lse == -Float32.inf, Float32(Float32.inf), lse)
                floats_at(plan.lse_address(space, tile), plan.tile_m)[thread] = lse * LOG2_E


class SinkGradients:
    """dSink: of every head, minus the sum of the sink's probabilities times the row sums."""

    threads = 512

    def __init__(self, plan: BackwardPlan):
        self.plan = plan

    @cute.jit
    def __call__(self, mdO, operands, workspace: Int64, stream):
        """mdO: (S,D,H,B)"""
        self.kernel(mdO, operands, workspace).launch(
            grid=(mdO.shape[2], 1, 1), block=(self.threads, 1, 1), stream=stream, use_pdl=True
        )

    @cute.kernel
    def kernel(self, mdO: cute.Tensor, operands, workspace):
        plan = self.plan
        sums = SmemAllocator().allocate_tensor(Float32, cute.make_layout(self.threads // 32))
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        values = Values(plan.scores.names, operands)
        head, _, _ = cute.arch.block_idx()
        thread = cute.arch.thread_idx()[0]
        space = plan.space(workspace, mdO, values)
        sink = Float32(values["sink"][head]) * LOG2_E
        batches = mdO.shape[3]
        if const_expr(plan.packed):
            batches = values["cu_seqlens_q"].shape[0] - 1
        total = Float32(0.0)
        for batch in cutlass.range(batches, unroll=1):
            sequence = sequence_of(values, batch, mdO.shape[0], Int32(0))
            tile = plan.tile_index(space, batch, head, sequence.first_query, Int32(0))
            lses = floats_at(plan.lse_address(space, tile), sequence.query_rows)
            deltas = floats_at(plan.delta_address(space, tile), sequence.query_rows)
            for row in cutlass.range(thread, sequence.query_rows, self.threads, unroll=4):
                total = cute.math.fma(power_of_two(sink - lses[row]), deltas[row], total)
        total = cute.arch.warp_reduction_sum(total)
        if thread % 32 == 0:
            sums[thread // 32] = total
        cute.arch.sync_threads()
        if thread == 0:
            whole = Float32(0.0)
            for i in cutlass.range_constexpr(self.threads // 32):
                whole = whole + sums[i]
            values["dSink"][head] = -whole


class QueryGradients:
    """dQ: the sums in the workspace, scaled and rounded. They lie there as accumulators do: of
    every four of a thread, those of all threads side by side."""

    threads = CONSUMERS * GROUP

    def __init__(self, plan: BackwardPlan):
        self.plan = plan

    @cute.jit
    def __call__(self, mdQ, operands, workspace: Int64, queries, batches, stream):
        """mdQ: (S,D,H,B)"""
        plan = self.plan
        elements = plan.tile_m * plan.head_dim

        @cute.struct
        class SharedStorage:
            dq: cute.struct.Align[cute.struct.MemRange[plan.element_type, elements], 1024]

        self.shared_storage = SharedStorage
        blocks = cute.ceil_div(queries, plan.tile_m)
        self.kernel(mdQ, operands, workspace, blocks).launch(
            grid=flat_grid(blocks, mdQ.shape[2], batches),
            block=(self.threads, 1, 1),
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(self, mdQ: cute.Tensor, operands, workspace, blocks: Int32):
        plan = self.plan
        storage = SmemAllocator().allocate(self.shared_storage)
        shared = RowTile(plan, plan.tile_m, plan.head_dim)
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        values = Values(plan.scores.names, operands)
        block, head, batch = flat_block_idx(blocks, mdQ.shape[2])
        thread = cute.arch.thread_idx()[0]
        sequence = sequence_of(values, batch, mdQ.shape[0], Int32(0))
        space = plan.space(workspace, mdQ, values)
        if block * plan.tile_m < sequence.query_rows:
            tile = plan.tile_index(space, batch, head, sequence.first_query, block)
            sums = plan.dq_product.accumulators(whole=True)
            load_accumulators(sums, plan.dq_address(space, tile), thread)
            shared.put(
                storage.dq, plan.dq_product, sums, values.number("scale"), thread, plan.swaps_dq
            )
            cute.arch.sync_threads()
            place = Int32(0) if const_expr(plan.packed) else batch
            own = cute.domain_offset((sequence.first_query, 0), mdQ[None, None, head, place])
            shared.copy_out(storage.dq, own, block * plan.tile_m, sequence.query_rows, thread)
        if const_expr(plan.packed):
            behind = behind_last(
                *(values["cu_seqlens_q"], batch, mdQ.shape[0], block, blocks),
                *(thread, self.threads),
            )
            fill_behind(mdQ[None, None, head, 0], behind)


def _pieces(sums: cute.Tensor, address: Int64, thread: Int32, parts: int, part: int) -> tuple:
    """(a thread's accumulators, their places in global memory), both (4, pieces)."""
    pieces = cute.size(sums) // _PIECE
    group, lane = thread // GROUP, thread % GROUP
    first = ((group * parts + part) * pieces * GROUP + lane) * (_PIECE * 4)
    pointer = cute.make_ptr(
        Float32, address + Int64(first), cute.AddressSpace.gmem, assumed_align=16
    )
    shape = (_PIECE, pieces)
    flat = cute.make_tensor(sums.iterator, cute.make_layout(shape, stride=(1, _PIECE)))
    return flat, cute.make_tensor(pointer, cute.make_layout(shape, stride=(1, _PIECE * GROUP)))


def load_accumulators(sums: cute.Tensor, address: Int64, thread: Int32) -> None:
    """All that a thread has."""
    own, there = _pieces(sums, address, thread, 1, 0)
    atom = cute.make_copy_atom(cute.nvgpu.CopyUniversalOp(), Float32, num_bits_per_copy=128)
    for i in range(cute.size(own, mode=[1])):
        cute.copy(atom, there[None, i], own[None, i])


def store_accumulators(
    sums: cute.Tensor, address: Int64, condition: Boolean, thread: Int32
) -> None:
    """As `load_accumulators` loads them, if a condition holds."""
    _to_memory("st.global", *_pieces(sums, address, thread, 1, 0), condition)


def add_accumulators(sums, address: Int64, thread: Int32, parts: int, part: int) -> None:
    """To what is there."""
    _to_memory("red.global.add", *_pieces(sums, address, thread, parts, part), None)


def _to_memory(operation: str, own, there, condition: Boolean | None) -> None:
    """Four numbers of a thread at a time."""
    first = there.iterator.toint()
    for i in range(cute.size(own, mode=[1])):
        offset = i * there.stride[1] * 4
        cute.arch.inline_ptx(
            f"{operation}.v4.f32 [{{$r0}} + {offset}], {{{{$r1}}, {{$r2}}, {{$r3}}, {{$r4}}}};",
            read_only_args=[first, *(own[j, i] for j in range(_PIECE))],
            predicate=condition,
        )


def counter_at(address: Int64) -> cute.Pointer:
    return cute.make_ptr(Int32, address, cute.AddressSpace.gmem, assumed_align=4)


@cute.jit
def add_by_copy(sums, address: Int64, memory, thread: Int32, barrier_id: Int32):
    """The same by one bulk copy of each group, through its part of shared memory, which the one
    before has left: see `await_copy`."""
    own, _ = _pieces(sums, address, thread, 1, 0)
    pieces = cute.size(own, mode=[1])
    group_bytes = pieces * GROUP * _PIECE * 4
    group, lane = thread // GROUP, thread % GROUP
    start = memory.data_ptr().toint() + group * group_bytes
    for i in cutlass.range_constexpr(pieces):
        offset = i * GROUP * _PIECE * 4
        cute.arch.inline_ptx(
            f"st.shared.v4.f32 [{{$r0}} + {offset}], {{{{$r1}}, {{$r2}}, {{$r3}}, {{$r4}}}};",
            read_only_args=[
                Int32(start + lane * (_PIECE * 4)),
                *(own[j, i] for j in range(_PIECE)),
            ],
        )
    cute.arch.fence_view_async_shared()
    cute.arch.barrier(barrier_id=barrier_id, number_of_threads=GROUP)
    if _first_warp():
        with cute.arch.elect_one():
            cute.arch.inline_ptx(
                "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 "
                "[{$r0}], [{$r1}], {$r2};",
                read_only_args=[
                    address + Int64(group * group_bytes), Int32(start), Int32(group_bytes)
                ],
            )  # fmt: skip
            cute.arch.cp_async_bulk_commit_group()
        cute.arch.sync_warp()


@cute.jit
def await_copy():
    """Shared memory may be written again, by those who then meet the first warp of the group."""
    if _first_warp():
        with cute.arch.elect_one():
            cute.arch.cp_async_bulk_wait_group(0, read=True)
        cute.arch.sync_warp()


def _first_warp() -> Boolean:
    """Of its group."""
    return cute.arch.make_warp_uniform(cute.arch.warp_idx()) % 4 == 0


class RowTile(Known):
    """A tile in shared memory between accumulators and rows in global memory, of all consumers."""

    def __init__(self, plan: BackwardPlan, rows: int, columns: int):
        self.element_type = plan.element_type
        self.rows, self.columns = rows, columns
        self.span = plan.span(columns)

    def memory_of(self, storage) -> cute.Tensor:
        """(rows, columns) in shared memory."""
        layout = tile_layout(self.element_type, self.rows, self.columns, 1, self.span)
        return storage.get_tensor(layout.outer, swizzle=layout.inner)[None, None, 0]

    def put(self, memory, product, sums, factor, thread, swapped: bool) -> None:
        """Accumulators, multiplied and rounded. swapped: they stand as columns × rows."""
        tile = self.memory_of(memory)
        if swapped:
            tile = cute.make_tensor(tile.iterator, cute.select(tile.layout, mode=[1, 0]))
        rounded = cute.make_rmem_tensor_like(sums, self.element_type)
        rounded.store((sums.load() * factor).to(self.element_type))
        store_matrices(product, rounded, tile, thread, swapped)

    @cute.jit
    def copy_out(self, memory, mX: cute.Tensor, first: Int32, end: Int32, thread: Int32):
        """To rows first, first + 1, ... before `end` of (M, N), in vectors."""
        tile = self.memory_of(memory)
        vector = 128 // self.element_type.width
        across = self.columns // vector
        atom = cute.make_copy_atom(
            cute.nvgpu.CopyUniversalOp(), self.element_type, num_bits_per_copy=128
        )
        at_once = CONSUMERS * GROUP // across  # rows; a remainder of threads has none
        own, column = thread // across, thread % across
        if own >= at_once:
            end = Int32(0)
        for i in cutlass.range(-(-self.rows // at_once), unroll=4):
            row = i * at_once + own
            if self.rows % at_once:
                end = cutlass.min(end, first + self.rows)
            if (first + row < end) & (column * vector < mX.shape[1]):
                fragment = cute.make_rmem_tensor(vector, self.element_type)
                source = cute.local_tile(tile, (1, vector), (row, column))
                cute.copy(atom, cute.group_modes(source, 0, 2), fragment)
                target = cute.make_ptr(
                    self.element_type,
                    mX[first + row, None].iterator.toint() + Int64(column * 16),
                    cute.AddressSpace.gmem,
                    assumed_align=16,
                )
                cute.copy(atom, fragment, cute.make_tensor(target, cute.make_layout(vector)))


def store_matrices(product, rounded, tile, thread, swapped: bool) -> None:
    """Accumulators, rounded, into a tile of the result's shape. swapped: its rows are side by side,
    else its columns."""
    op = warp.StMatrix8x8x16bOp(swapped, 4 if product.columns % 16 == 0 else 2)
    atom = cute.make_copy_atom(op, rounded.element_type)
    copy = cute.make_tiled_copy_C(atom, product.mma())
    place = copy.get_slice(thread).partition_D(tile)
    cute.copy(copy, copy.retile(rounded), place)

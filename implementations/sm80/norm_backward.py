"""Gradients of rows that were divided by their root mean square or their standard deviation."""

import itertools

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute import AddressSpace
from cutlass.memory import SmemAllocator

from ..common.column_sums import ColumnSums
from ..common.residence import residence
from ..common.rows import (
    GlobalRow,
    RowThreads,
    Vector,
    combined,
    matrix_row,
    single_row,
)
from ..common.staged_rows import StagedRows, Turns

SUMS = ("dweight", "dbias")
COUNTERS_BYTES = 65536  # at the start of the workspace, which others need zero


class NormBackward:
    """With x̂ = (x − mean) · rstd and g = dy · weight::

        dx      = rstd · (g − x̂ · mean of g · x̂ − mean of g) + dresidual
        dweight = Σ over rows of dy · x̂,  dbias = Σ over rows of dy

    with the mean of g if `centred`, and dresidual if it is there. As many blocks as are asked for
    stay and take every so many-th row. All warps play the same roles, `rows.per_row` threads on a
    row:

    role     does                                                            waits on
    -------  --------------------------------------------------------------  -------------------
    fetch    cp.async of a row of dy, of x and of dresidual, `stages` - 1    nothing
             ahead; its statistics, one ahead
    measure  sums over the row: lanes by shuffles, warps through shared      own copies; warps of
             memory, two buffers of it in turns                              the row
    write    whole vectors of dx; adds to the thread's sums over rows        nothing
    part     the thread's sums, behind its last row, to the workspace        nothing

    A second kernel adds up the parts, in their order: the sums are the same in every run. Rows that
    are not staged are longer than registers hold sums for: another kernel (`RowSums`) makes parts.

    Shared memory: `stages` rows of dy, x and dresidual, `vectors` vectors per thread, of which
    every thread reads what it has copied itself, and in whose place sums over rows come together
    where a block has several rows at once; two sums of each warp. Registers: sums over rows.
    Without stages, rows are read twice, mostly from L1 or L2, and their length is any.

    dy, x, dx (M, N) of one type, N side by side, whole vectors; the rest is in a tuple, in the
    order of `operands`, of those that are there:

    operand          is
    ---------------  ------------------------------------------------
    rstd, mean       (M,); mean if `centred`
    weight           (N,), side by side; any float
    dweight, dbias   (N,), written
    dresidual        (M, N), N side by side, whole vectors; any float

    The workspace has a part per sum and block, or, without stages, per sum and `RowSums.shares`;
    all are behind its first 65536 bytes.

    resident: blocks of a multiprocessor that registers are shared out to.
    dependent_launch: as in `Norm`, of both kernels.
    """

    def __init__(
        self,
        rows: RowThreads,
        *,
        vectors: int = 0,
        stages: int = 0,
        centred: bool = False,
        resident: int = 1,
        operands: tuple[str, ...] = ("rstd",),
        dependent_launch: bool = False,
    ):
        self.rows = rows
        self.vectors = vectors
        self.stages = stages
        self.centred = centred
        self.resident = resident
        self.operands = operands
        self.dependent_launch = dependent_launch
        if stages < 0 or (stages > 0) != (vectors > 0):
            raise ValueError(
                f"{stages} stages of {vectors} vectors; expected stages if there are vectors in "
                f"them"
            )

    @property
    def threads(self) -> int:
        return self.rows.threads

    @property
    def sums(self) -> tuple[str, ...]:
        return tuple(name for name in SUMS if name in self.operands)

    def operand(self, name: str, operands: tuple):
        """None if it is not there."""
        return operands[self.operands.index(name)] if name in self.operands else None

    @cute.jit
    def with_operands(
        self,
        mDy: cute.Tensor,
        mX: cute.Tensor,
        mDx: cute.Tensor,
        operands,
        workspace: Int64,
        blocks: Int32,
        stream: cuda.CUstream,
    ):
        self.dy = StagedRows(self.rows, self.vectors, self.stages, mDy.element_type)
        self.x = StagedRows(self.rows, self.vectors, self.stages, mX.element_type)
        mR = self.operand("dresidual", operands)
        self.dresidual = None
        if const_expr(mR is not None):
            self.dresidual = StagedRows(self.rows, self.vectors, self.stages, mR.element_type)
        resident = blocks
        blocks = cutlass.min(blocks, cute.ceil_div(mX.shape[0], self.rows.rows))
        mParts = None
        if const_expr(len(self.sums) > 0 and self.vectors > 0):
            mParts = self._parts(workspace, blocks, mX.shape[1])
        self.kernel(mDy, mX, mDx, operands, mParts).launch(
            grid=(blocks, 1, 1),
            block=(self.threads, 1, 1),
            stream=stream,
            use_pdl=self.dependent_launch,
            **residence(self.resident),
        )
        if const_expr(len(self.sums) > 0 and self.vectors == 0):
            apart = RowSums(self)
            mParts = self._parts(workspace, apart.shares(mX, resident), mX.shape[1])
            apart.launch(mDy, mX, operands, mParts, resident, stream)
        if const_expr(self.sums):
            columns = self.vectors * self.rows.step * len(self.sums)
            ColumnSums(columns, self.dependent_launch).launch(
                mParts, tuple(self.operand(name, operands) for name in self.sums), stream
            )

    def _parts(self, workspace: Int64, parts: Int32, N: Int32) -> cute.Tensor:
        """(parts, N, sums) of float32; rows start at multiples of 16 bytes."""
        pointer = cute.make_ptr(
            Float32, workspace + COUNTERS_BYTES, AddressSpace.gmem, assumed_align=16
        )
        pitch = cute.ceil_div(N, 4) * 4
        layout = cute.make_layout(
            (parts, N, len(self.sums)), stride=(Int64(pitch), 1, Int64(parts) * pitch)
        )
        return cute.make_tensor(pointer, layout)

    @cute.kernel
    def kernel(self, mDy, mX, mDx, operands, mParts):
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        blocks, _, _ = cute.arch.grid_dim()
        allocator = SmemAllocator()
        memories = self._memories(allocator)
        sSums = self.rows.partials(allocator, 2 if self.centred else 1)
        first, apart = block * self.rows.rows, blocks * self.rows.rows
        turns = Turns(first + self.rows.slot(thread), apart, mX.shape[0])
        if const_expr(self.dependent_launch):
            cute.arch.griddepcontrol_wait()
            cute.arch.griddepcontrol_launch_dependents()

        for early in cutlass.range_constexpr(self.stages - 1):
            self._fetch(mDy, mX, operands, turns, Int32(early), memories, thread)
        totals = self._zeros()
        mean, rstd = self.statistics(operands, turns, Int32(0))
        for turn in cutlass.range(cute.ceil_div(mX.shape[0] - first, apart), unroll=1):
            ahead = turn + max(self.stages - 1, 0)
            self._fetch(mDy, mX, operands, turns, ahead, memories, thread)
            next_mean, next_rstd = self.statistics(operands, turns, turn + 1)
            self.x.arrived()
            dy = self.dy.row(mDy, turns, turn, memories[0], thread)
            x = self.x.row(mX, turns, turn, memories[1], thread)
            target = self.x.global_row(mDx, turns, turn, thread)
            further = self._further(operands, turns, turn, memories[2], thread)
            means = self._means(dy, x, mX.shape[1], mean, rstd, operands, sSums, turn, thread)
            if const_expr(self.vectors > 0):
                self._write(dy, x, further, target, (mean, rstd, means), operands, totals, thread)
            else:
                rows, terms = (dy, x, further, target), (mean, rstd, means)
                self._write_any(*rows, mX.shape[1], terms, operands, thread)
            mean, rstd = next_mean, next_rstd
        if const_expr(self.vectors > 0 and len(self.sums) > 0):
            self._part(totals, mParts, memories[0], block, thread)

    def _memories(self, allocator: SmemAllocator) -> list[Int32]:
        """Shared memory of the stages of dy, x and dresidual, side by side: those of dy and x are
        no less than a float32 sum of each of their elements takes at the end."""
        sizes = [one.bytes for one in (self.dy, self.x, self.dresidual) if one is not None]
        if not sum(sizes):
            return [Int32(0)] * 3
        memory = Int32(allocator.allocate(sum(sizes), byte_alignment=128).toint())
        return [memory + start for start in itertools.accumulate(sizes[:2], initial=0)]

    @cute.jit
    def _part(self, totals, mParts, memory, block, thread):
        """What the block has of the sums over rows; of several slots, one after the other."""
        rows = self.rows
        if const_expr(rows.rows == 1):
            for i, part in enumerate(self.part_rows(mParts, block, rows.column(thread))):
                for v in cutlass.range_constexpr(self.vectors):
                    part.store(v * rows.step, [totals[e, v, i] for e in range(rows.vector)])
        else:
            room = self.vectors * rows.step
            layout = cute.make_layout((rows.rows, room), stride=(room, 1))
            pointer = cute.make_ptr(Float32, memory, AddressSpace.smem, assumed_align=16)
            sSlots = cute.make_tensor(pointer, layout)
            cute.arch.cp_async_wait_group(0)  # the last copies, of rows that are not there
            cute.arch.sync_threads()
            for i in cutlass.range_constexpr(len(self.sums)):
                for v in cutlass.range_constexpr(self.vectors):
                    for e in cutlass.range_constexpr(rows.vector):
                        column = rows.column(thread) + v * rows.step + e
                        sSlots[rows.slot(thread), column] = totals[e, v, i]
                cute.arch.sync_threads()
                for column in cutlass.range(thread, mParts.shape[1], self.threads, unroll=1):
                    found = combined([sSlots[slot, column] for slot in range(rows.rows)])
                    mParts[block, column, i] = found
                cute.arch.sync_threads()

    def _zeros(self) -> cute.Tensor | None:
        """Sums over rows in registers, (elements, vectors, sums)."""
        if not self.sums or not self.vectors:
            return None
        totals = cute.make_rmem_tensor((self.rows.vector, self.vectors, len(self.sums)), Float32)
        totals.fill(Float32(0))
        return totals

    def part_rows(self, mParts: cute.Tensor, part: Int32, column: Int32) -> list[GlobalRow]:
        """A part of each sum, from a column on."""
        vector = Vector(self.rows.vector, Float32)
        found = []
        for i in range(len(self.sums)):
            offset = Int64(part) * mParts.stride[0] + column + i * mParts.stride[2]
            address = mParts.iterator.toint() + offset * vector.element_bytes
            found.append(GlobalRow(address, mParts.shape[1] - column, vector))
        return found

    def _fetch(
        self, mDy, mX, operands, turns: Turns, turn: Int32, memories: tuple, thread: Int32
    ) -> None:
        self.dy.fetch(mDy, turns, turn, memories[0], thread)
        self.x.fetch(mX, turns, turn, memories[1], thread)
        if self.dresidual is not None:
            mR = self.operand("dresidual", operands)
            self.dresidual.fetch(mR, turns, turn, memories[2], thread)
        self.x.commit()

    def _further(self, operands, turns: Turns, turn: Int32, memory, thread: Int32):
        """What is added to a row of dx; None without."""
        if self.dresidual is None:
            return None
        mR = self.operand("dresidual", operands)
        return self.dresidual.row(mR, turns, turn, memory, thread)

    @cute.jit
    def statistics(self, operands, turns, turn):
        """(mean, rstd) of a row; zeros where there is none."""
        row = turns.row(turn)
        mean = rstd = Float32(0)
        if row < turns.end:
            rstd = self.operand("rstd", operands)[row].to(Float32)
            if const_expr(self.centred):
                mean = self.operand("mean", operands)[row].to(Float32)
        return mean, rstd

    # One row -------------------------------------------------------------------------------

    def _terms(self, dy, x, first: Int32, mean, rstd, operands, thread) -> tuple:
        """(dy, g, x̂) of a vector."""
        gradient = dy.load(first)
        normal = self.normal(x.load(first), mean, rstd)
        mW = self.operand("weight", operands)
        if mW is None:
            return gradient, gradient, normal
        column = self.rows.column(thread) + first
        weight = single_row(mW, column, self.rows.vector).load(Int32(0))
        return gradient, [a * b for a, b in zip(gradient, weight, strict=True)], normal

    @cute.jit
    def _means(self, dy, x, N, mean, rstd, operands, sSums, turn, thread):
        """(mean of g · x̂, mean of g), the same in all threads of the row."""
        product = plain = Float32(0)
        count = self.vectors if const_expr(self.vectors > 0) else cute.ceil_div(N, self.rows.step)
        for v in cutlass.range(count, unroll=2 if self.vectors != 1 else 1):
            _, g, normal = self._terms(dy, x, v * self.rows.step, mean, rstd, operands, thread)
            product += combined([a * b for a, b in zip(g, normal, strict=True)])
            if const_expr(self.centred):
                plain += combined(g)
        values = (product, plain) if const_expr(self.centred) else (product,)
        values = self.rows.across(values, thread, sSums, turn % 2)
        values = tuple(value / Float32(N) for value in values)
        return values if const_expr(self.centred) else (*values, Float32(0))

    @cute.jit
    def _write(self, dy, x, further, target, terms, operands, totals, thread):
        mean, rstd, means = terms
        for v in cutlass.range_constexpr(self.vectors):
            first = v * self.rows.step
            gradient, g, normal = self._terms(dy, x, first, mean, rstd, operands, thread)
            for i, values in enumerate(self.addends(gradient, normal)):
                for e in cutlass.range_constexpr(self.rows.vector):
                    totals[e, v, i] += values[e]
            target.store(first, self._gradient(g, normal, rstd, means, further, first))

    @cute.jit
    def _write_any(self, dy, x, further, target, N, terms, operands, thread):
        """dx of a row of any length."""
        mean, rstd, means = terms
        # Of three rows, two vectors at a time are more than 1024 threads have registers for.
        unroll = 2 if const_expr(further is None) else 1
        for v in cutlass.range(cute.ceil_div(N, self.rows.step), unroll=unroll):
            first = v * self.rows.step
            _, g, normal = self._terms(dy, x, first, mean, rstd, operands, thread)
            target.store(first, self._gradient(g, normal, rstd, means, further, first))

    def _gradient(
        self, g: list, normal: list, rstd: Float32, means: tuple, further, first: Int32
    ) -> list:
        product, plain = means
        found = [a - b * product for a, b in zip(g, normal, strict=True)]
        found = [(a - plain if self.centred else a) * rstd for a in found]
        if further is None:
            return found
        return [a + b for a, b in zip(found, further.load(first), strict=True)]

    def normal(self, x: list, mean: Float32, rstd: Float32) -> list:
        """x̂"""
        return [(value - mean if self.centred else value) * rstd for value in x]

    def addends(self, gradient: list, normal: list) -> list:
        """What a vector adds to each of the sums over rows."""
        products = [a * b for a, b in zip(gradient, normal, strict=True)]
        return [{"dweight": products, "dbias": gradient}[name] for name in self.sums]


class RowSums:
    """Parts of the sums over rows of a `NormBackward`, of rows of any length.

    Each thread has a vector of columns, in a share of the rows, of which it loads several at once.
    What the kernel has read before it reads again, from device memory, as sums that every row is
    added to there take more.
    """

    threads = 256
    at_once = 4  # rows, of which the vectors are on their way together
    fewest = 16  # rows of a share: a part takes as long to write and to add up as two rows to read

    def __init__(self, norm: NormBackward):
        self.norm = norm

    @property
    def columns(self) -> int:
        """Of a block."""
        return self.threads * self.norm.rows.vector

    def shares(self, mX: cute.Tensor, resident: Int32) -> Int32:
        """Shares of the rows, each of which has a part, where so many blocks run at once."""
        return cute.ceil_div(mX.shape[0], self._rows(mX, resident))

    def _rows(self, mX: cute.Tensor, resident: Int32) -> Int32:
        """Of a share."""
        panels = cute.ceil_div(mX.shape[1], self.columns)
        blocks = resident * self.norm.threads // self.threads  # as many threads
        wanted = cute.ceil_div(blocks, panels)
        return cutlass.max(cute.ceil_div(mX.shape[0], wanted), self.fewest)

    def launch(self, mDy, mX, operands, mParts: cute.Tensor, resident: Int32, stream) -> None:
        """mParts (shares, N, sums)."""
        panels = cute.ceil_div(mX.shape[1], self.columns)
        self.kernel(mDy, mX, operands, mParts, self._rows(mX, resident)).launch(
            grid=(panels, mParts.shape[0], 1),
            block=(self.threads, 1, 1),
            min_blocks_per_mp=1,
            stream=stream,
            use_pdl=self.norm.dependent_launch,
        )

    @cute.kernel
    def kernel(self, mDy, mX, operands, mParts: cute.Tensor, rows: Int32):
        thread, _, _ = cute.arch.thread_idx()
        panel, share, _ = cute.arch.block_idx()
        vector, sums = self.norm.rows.vector, self.norm.sums
        column = panel * self.columns + thread * vector
        first = share * rows
        turns = Turns(first, Int32(1), first + cutlass.min(rows, mX.shape[0] - first))
        totals = cute.make_rmem_tensor((vector, len(sums)), Float32)
        totals.fill(Float32(0))
        if const_expr(self.norm.dependent_launch):
            cute.arch.griddepcontrol_wait()
            cute.arch.griddepcontrol_launch_dependents()
        for turn in cutlass.range(0, rows, self.at_once, unroll=1):
            loaded = [
                self._loaded(mDy, mX, operands, turns, turn + i, column)
                for i in range(self.at_once)
            ]
            for dy, x, mean, rstd in loaded:
                addends = self.norm.addends(dy, self.norm.normal(x, mean, rstd))
                for i, values in enumerate(addends):
                    for e in cutlass.range_constexpr(vector):
                        totals[e, i] += values[e]
        for i, part in enumerate(self.norm.part_rows(mParts, share, column)):
            part.store(Int32(0), [totals[e, i] for e in range(vector)])

    def _loaded(self, mDy, mX, operands, turns: Turns, turn: Int32, column: Int32) -> tuple:
        """(dy, x, mean, rstd) of a row; zeros behind the last one."""
        vector = self.norm.rows.vector
        dy, x = (
            matrix_row(one, turns.row(turn), column, turns.end, vector).load(Int32(0))
            for one in (mDy, mX)
        )
        return dy, x, *self.norm.statistics(operands, turns, turn)

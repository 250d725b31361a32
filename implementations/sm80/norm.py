"""Rows of a matrix, or of the sum of two, each divided by its root mean square or its standard
deviation."""

import operator
from dataclasses import dataclass

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.memory import SmemAllocator

from ..common.conversion import select
from ..common.hadamard import BLOCK, hadamard
from ..common.maxima import Maxima, bits_of_magnitude, larger, shares
from ..common.rows import (
    GlobalRow,
    RowThreads,
    SharedRow,
    SummedRow,
    combined,
    single_row,
)
from ..common.staged_rows import StagedRows, Turns
from ..common.threads import WARP

MOST_VECTORS = 4  # at a time, so that registers are left for other blocks
MOST_FACTORS = 32  # of a thread, kept across rows


@dataclass
class Place:
    """Of a thread.

    Attributes:
        row: Of the matrix.
        column: Of its first element.
        N: Columns of the matrix.
        turn: Rows that it has had before.
        thread: Its number.
    """

    row: Int32
    column: Int32
    N: Int32
    turn: Int32
    thread: Int32


class Norm:
    """out = (x − mean) · rstd · weight + bias, per row; then blocks of 16 columns times H16 / 4.

    rstd = 1 / √(mean of (x − mean)² + eps); without `centred`, mean is 0 all over.

    All warps play the same roles, `rows.per_row` threads on a row, up to `turns` rows one after
    the other:

    role     does                                                            waits on
    -------  --------------------------------------------------------------  -------------------
    fetch    cp.async of a row, `stages` - 1 ahead                           nothing
    measure  sums over the row: lanes by shuffles, warps through shared      own copies; warps of
             memory, two buffers of it in turns                              the row
    write    weight, bias and the Hadamard transform (a block of 16 is       lanes of a block
             with one thread or a few neighbours); whole vectors
    keep     the sum with a residual                                         nothing
    largest  the block's largest magnitude, once behind its last row         all warps

    Shared memory: `stages` rows of `vectors` vectors per thread, of which every thread reads what
    it has copied itself, and as many of a residual; a sum of each warp; a magnitude of each warp.
    So x is read once. Without stages, a row of any length is read two to four times, mostly from L1
    or L2.

    x, out (M, N), N side by side, whole vectors; the rest is in a tuple, in the order of
    `operands`, of those that are there:

    operand                    is
    -------------------------  -------------------------------------------------------------
    weight, bias               (N,), side by side; any float
    signs                      (16,); what the columns of a block are multiplied with before H16
    rstd, mean                 (M,), written
    residual                   (M, N), N side by side, whole vectors: x is x + residual, rounded to
                               its type
    residual_out               (M, N), the same; that sum, written. May be the residual
    amax                       (ceil(M / rows_per_block),), written
    global_amax                (), written
    eps                        Float32
    rows_per_block             Int64, with amax or global_amax

    Largest magnitudes are of values before they are rounded, NaN if there is one.

    dependent_launch: blocks start while the kernel before ends, and let those of the next one do
                      so; of Hopper and later.
    """

    def __init__(
        self,
        rows: RowThreads,
        *,
        vectors: int = 0,
        stages: int = 0,
        turns: int = 1,
        centred: bool = False,
        hadamard: bool = False,
        operands: tuple[str, ...] = ("eps",),
        dependent_launch: bool = False,
    ):
        self.rows = rows
        self.vectors = vectors
        self.stages = stages
        self.turns = turns
        self.centred = centred
        self.hadamard = hadamard
        self.operands = operands
        self.dependent_launch = dependent_launch
        if turns < 1 or stages < 0 or (stages > 0) != (vectors > 0):
            raise ValueError(
                f"{turns} turns, {stages} stages of {vectors} vectors; expected turns, and stages "
                f"if there are vectors in them"
            )
        if hadamard and rows.step % BLOCK:
            raise ValueError(f"{rows.step} columns at once are no multiple of {BLOCK}")

    @property
    def threads(self) -> int:
        return self.rows.threads

    @property
    def most_rows(self) -> int:
        """Of a block."""
        return self.rows.rows * self.turns

    @property
    def buffers(self) -> int:
        """Of what warps tell each other."""
        return 2

    @property
    def unroll(self) -> int:
        """Vectors that a thread works on at a time, as far as the compiler likes."""
        return min(max(self.vectors, 1), MOST_VECTORS)

    @property
    def finds_maxima(self) -> bool:
        return "amax" in self.operands or "global_amax" in self.operands

    @property
    def keeps_factors(self) -> bool:
        """Whether a thread has registers for what all rows are multiplied by before they are
        transformed."""
        room = 0 < self.vectors * self.rows.vector <= MOST_FACTORS
        return self.hadamard and "bias" not in self.operands and room

    def operand(self, name: str, operands: tuple):
        """None if it is not there."""
        return operands[self.operands.index(name)] if name in self.operands else None

    @cute.jit
    def with_operands(
        self,
        mX: cute.Tensor,
        mOut: cute.Tensor,
        operands,
        workspace: Int64,
        stream: cuda.CUstream,
    ):
        self.x = StagedRows(self.rows, self.vectors, self.stages, mX.element_type)
        mR = self.operand("residual", operands)
        self.residual = None
        if const_expr(mR is not None):
            how = self.rows, self.vectors, self.stages, mR.element_type
            self.residual = StagedRows(*how, is_written="residual_out" in self.operands)
        size = mX.shape[0]
        blocks = cute.ceil_div(size, self.most_rows)
        maxima = None
        if const_expr(self.finds_maxima):
            rows_per_block = self.operand("rows_per_block", operands)
            rows_per_block = Int32(cutlass.min(rows_per_block, Int64(size)))
            shared = shares(size, rows_per_block, self.most_rows)
            maxima = Maxima(size, rows_per_block, *shared, workspace)
            blocks = maxima.blocks * maxima.parts
        self.kernel(mX, mOut, operands, maxima).launch(
            grid=(blocks, 1, 1),
            block=(self.threads, 1, 1),
            min_blocks_per_mp=1,
            stream=stream,
            use_pdl=self.dependent_launch,
        )

    @cute.kernel
    def kernel(self, mX: cute.Tensor, mOut: cute.Tensor, operands, maxima):
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        allocator = SmemAllocator()
        memory = self.x.allocated(allocator), None
        if const_expr(self.residual is not None):
            memory = memory[0], self.residual.allocated(allocator)
        sSums = self.rows.partials(allocator, 1, self.buffers)
        if const_expr(self.dependent_launch):
            cute.arch.griddepcontrol_wait()
            cute.arch.griddepcontrol_launch_dependents()
        if const_expr(self.finds_maxima):
            first, end = maxima.rows_of(block)
            largest = self.rows_from(first, end, mX, mOut, operands, memory, sSums, thread)
            sLargest = allocator.allocate_tensor(Int32, cute.make_layout(self.threads // WARP))
            mAmax, mGlobal = (self.operand(n, operands) for n in ("amax", "global_amax"))
            maxima.write(largest, mAmax, mGlobal, sLargest, block, thread)
        else:
            first = block * self.most_rows
            end = cutlass.min(first + self.most_rows, mX.shape[0])
            self.rows_from(first, end, mX, mOut, operands, memory, sSums, thread)

    @cute.jit
    def rows_from(self, first, end, mX, mOut, operands, memory, sSums, thread):
        """The rows from `first` to `end`; the bits of the thread's largest magnitude in them."""
        rows, column = self.rows, self.rows.column(thread)
        factors = self._signs(operands, column)
        if const_expr(self.keeps_factors):
            factors = [
                self._factors(operands, column + v * rows.step, factors)
                for v in range(self.vectors)
            ]
        turns = Turns(first + rows.slot(thread), Int32(rows.rows), end)
        for early in cutlass.range_constexpr(self.stages - 1):
            self._fetch(mX, operands, turns, Int32(early), memory, thread)
        largest = Int32(0)
        count = cute.ceil_div(end - first, rows.rows)
        if const_expr(self.turns == 1 and not self.finds_maxima):
            count = 1
        for turn in cutlass.range(count, unroll=1):
            self._fetch(mX, operands, turns, turn + (self.stages - 1), memory, thread)
            self.x.arrived()
            source = self._source(mX, operands, turns, turn, memory, thread)
            target = self.x.global_row(mOut, turns, turn, thread)
            mean, rstd = self._measured(source, target, mX.shape[1], operands, sSums, turn, thread)
            row = turns.row(turn)
            if column == 0 and row < end:
                self._write_statistics(mean, rstd, operands, row)
            place = Place(row, column, mX.shape[1], turn, thread)
            found = self._write(source, target, mean, rstd, operands, factors, place, sSums)
            largest = larger(largest, found)
            self._keep(source, operands, turns, turn, thread)
        return largest

    def _fetch(self, mX, operands, turns: Turns, turn: Int32, memory: tuple, thread: Int32) -> None:
        self.x.fetch(mX, turns, turn, memory[0], thread)
        if self.residual is not None:
            mR = self.operand("residual", operands)
            self.residual.fetch(mR, turns, turn, memory[1], thread)
        self.x.commit()

    def _source(self, mX, operands, turns: Turns, turn: Int32, memory: tuple, thread: Int32):
        """The thread's part of a row that has arrived."""
        row = self.x.row(mX, turns, turn, memory[0], thread)
        if self.residual is None:
            return row
        mR = self.operand("residual", operands)
        return SummedRow(row, self.residual.row(mR, turns, turn, memory[1], thread))

    @cute.jit
    def _keep(self, source, operands, turns, turn, thread):
        """Writes the sum with the residual, whose place that may be: behind all that reads it."""
        mOut = self.operand("residual_out", operands)
        if const_expr(mOut is not None):
            target = self.residual.global_row(mOut, turns, turn, thread)
            for v in cutlass.range(self._vectors(mOut.shape[1]), unroll=self.unroll):
                first = v * self.rows.step
                target.store_words(first, source.words(first))

    def _signs(self, operands: tuple, column: Int32) -> list | None:
        """Of the thread's columns, which are the same ones of a block in each of its vectors."""
        mS = self.operand("signs", operands)
        if mS is None:
            return None
        return [mS[(column + i) % BLOCK].to(Float32) for i in range(self.rows.vector)]

    def _vectors(self, N: Int32) -> int | Int32:
        """Of a thread, of a row; those that are staged are known while tracing."""
        return self.vectors if self.stages > 0 else cute.ceil_div(N, self.rows.step)

    # One row -------------------------------------------------------------------------------

    @cute.jit
    def _measured(self, source, target, N, operands, sSums, turn, thread):
        """(mean, rstd), the same in all threads of the row."""
        mean = Float32(0)
        buffer = turn % 2
        if const_expr(self.centred):
            part = self._sum(source, N)
            (whole,) = self.rows.across((part,), thread, sSums, Int32(0))
            mean = whole / Float32(N)
            buffer = Int32(1)
        part = self._sum_of_squares(source, target, N, mean)
        (whole,) = self.rows.across((part,), thread, sSums, buffer)
        return mean, cute.math.rsqrt(whole / Float32(N) + self.operand("eps", operands))

    @cute.jit
    def _sum(self, source, N) -> Float32:
        """Of what the thread has."""
        whole = Float32(0)
        for v in cutlass.range(self._vectors(N), unroll=self.unroll):
            whole += combined(source.load(v * self.rows.step))
        return whole

    @cute.jit
    def _sum_of_squares(self, source, target, N, mean) -> Float32:
        """The same of squared distances from the mean."""
        whole = Float32(0)
        for v in cutlass.range(self._vectors(N), unroll=self.unroll):
            values = self._distances(source, v, mean)
            found = combined([value * value for value in values])
            if const_expr(self.centred):  # zeros behind the end are not where the mean is
                found = select(target.has(v * self.rows.step), found, Float32(0))
            whole += found
        return whole

    def _distances(self, source: GlobalRow | SharedRow, v: Int32, mean: Float32) -> list:
        values = source.load(v * self.rows.step)
        return [value - mean for value in values] if self.centred else values

    @cute.jit
    def _write(self, source, target, mean, rstd, operands, factors, place, sPartials) -> Int32:
        """Writes the thread's part of out; the bits of the largest magnitude in it."""
        largest, column = Int32(0), place.column
        if const_expr(self.keeps_factors):
            for v in cutlass.range_constexpr(self.vectors):
                values = self._distances(source, v, mean)
                values = hadamard(values, column, factors[v], rstd)
                largest = larger(largest, self._stored(target, v, values))
        else:
            for v in cutlass.range(self._vectors(place.N), unroll=self.unroll):
                values = self._distances(source, v, mean)
                first = column + v * self.rows.step
                if const_expr(self.hadamard and "bias" not in self.operands):
                    values = hadamard(values, column, self._factors(operands, first, factors), rstd)
                else:
                    values = [value * rstd for value in values]
                    values = self._with_factors(values, operands, first)
                    if const_expr(self.hadamard):
                        values = hadamard(values, column, factors)
                largest = larger(largest, self._stored(target, v, values))
        return largest

    def _stored(self, target: GlobalRow, v: Int32 | int, values: list) -> Int32:
        """The bits of the largest magnitude, if it is asked for."""
        target.store(v * self.rows.step, values)
        if not self.finds_maxima:
            return Int32(0)
        return bits_of_magnitude(values) * Int32(target.has(v * self.rows.step))

    def _factors(self, operands: tuple, column: Int32, signs: list | None) -> list | None:
        """Of what is transformed: weight and signs, as they are there."""
        mW = self.operand("weight", operands)
        if mW is None:
            return signs
        given = single_row(mW, column, self.rows.vector).load(Int32(0))
        return given if signs is None else list(map(operator.mul, given, signs))

    def _with_factors(self, values: list, operands: tuple, column: Int32) -> list:
        """Times weight, plus bias, as they are there."""
        for name, operation in (("weight", operator.mul), ("bias", operator.add)):
            mW = self.operand(name, operands)
            if mW is not None:
                given = single_row(mW, column, self.rows.vector).load(Int32(0))
                values = list(map(operation, values, given))
        return values

    def _write_statistics(self, mean: Float32, rstd: Float32, operands: tuple, row: Int32) -> None:
        for name, value in (("mean", mean), ("rstd", rstd)):
            mS = self.operand(name, operands)
            if mS is not None:
                mS[row] = value.to(mS.element_type)

"""Rows of a matrix that an index names: gathered and added up, or scattered."""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from ..common.conversion import select
from ..common.rows import GlobalRow, RowThreads, matrix_row

AT_ONCE = 4  # rows that a thread reads before it adds, or indices before it writes


class IndexedRows:
    """What both directions share.

    All threads play one role: each has one vector of the columns of a row of the index, whose rows
    it reads, or writes, `AT_ONCE` at a time. Blocks go along the columns first.

    x, out (rows, N), N side by side, whole vectors; behind them a tuple:

    operand    is
    ---------  -------------------------------------------------------
    row_index  Int32 (M, k), any strides; no row where it is beyond them
    weight     (M, k), any strides; any float; it may be absent

    dependent_launch: blocks start while the kernel before ends, and let those of the next one do
                      so; of Hopper and later.
    """

    def __init__(self, rows: RowThreads, *, dependent_launch: bool = False):
        self.rows = rows
        self.dependent_launch = dependent_launch

    @property
    def threads(self) -> int:
        return self.rows.threads

    @cute.jit
    def with_operands(
        self,
        mX: cute.Tensor,
        mOut: cute.Tensor,
        operands,
        workspace: Int64,
        stream: cuda.CUstream,
    ):
        mIndex, *weight = operands
        mWeight = weight[0] if const_expr(len(weight) > 0) else None
        along = cute.ceil_div(mX.shape[1], self.rows.step)
        blocks = cute.ceil_div(mIndex.shape[0], self.rows.rows) * along
        self.kernel(mX, mOut, mIndex, mWeight, along).launch(
            grid=(blocks, 1, 1),
            block=(self.threads, 1, 1),
            stream=stream,
            use_pdl=self.dependent_launch,
        )

    @cute.kernel
    def kernel(
        self,
        mX: cute.Tensor,
        mOut: cute.Tensor,
        mIndex: cute.Tensor,
        mWeight: cute.Tensor | None,
        along: Int32,
    ):
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        if const_expr(self.dependent_launch):
            cute.arch.griddepcontrol_wait()
            cute.arch.griddepcontrol_launch_dependents()
        m = block // along * self.rows.rows + self.rows.slot(thread)
        column = block % along * self.rows.step + self.rows.column(thread)
        self.move(mX, mOut, mIndex, mWeight, m, column)

    def named(self, mX: cute.Tensor, mIndex: cute.Tensor, m: Int32, column: Int32, first) -> list:
        """The rows of x that the index names from place `first` on, as many as there are at once;
        nothing is read or written of those that are not there."""
        M, k = mIndex.shape
        found = []
        for place in range(AT_ONCE):
            j = first + place
            # Of threads and places beyond the end: an index that is there.
            index = mIndex[cutlass.min(m, M - 1), cutlass.min(j, k - 1)]
            row = matrix_row(mX, index, column, mX.shape[0], self.rows.vector)
            there = Int32(index >= 0) * Int32(j < k) * Int32(m < M)
            found.append(GlobalRow(row.address, row.left * there, row.vector))
        return found

    def factor(self, mWeight: cute.Tensor, m: Int32, j: Int32, row: GlobalRow) -> Float32:
        """Of a row; 0 where it is not there."""
        M, k = mWeight.shape
        weight = mWeight[cutlass.min(m, M - 1), cutlass.min(j, k - 1)].to(Float32)
        return select(row.has(Int32(0)), weight, Float32(0))


class GatherRows(IndexedRows):
    """out[m] = Σ over j of weight[m, j] · x[row_index[m, j]], in float32, in the order of j."""

    @cute.jit
    def move(self, mX, mOut, mIndex, mWeight, m, column):
        M, k = mIndex.shape
        whole = cute.make_rmem_tensor(self.rows.vector, Float32)
        whole.fill(0.0)
        for first in cutlass.range(0, k, AT_ONCE, unroll=1):
            rows = self.named(mX, mIndex, m, column, first)
            loaded = [row.load(Int32(0)) for row in rows]
            for place in cutlass.range_constexpr(AT_ONCE):
                values = loaded[place]
                if const_expr(mWeight is not None):
                    factor = self.factor(mWeight, m, first + place, rows[place])
                    values = [value * factor for value in values]
                for i in cutlass.range_constexpr(self.rows.vector):
                    whole[i] += values[i]
        target = matrix_row(mOut, m, column, M, self.rows.vector)
        target.store(Int32(0), [whole[i] for i in range(self.rows.vector)])


class ScatterRows(IndexedRows):
    """out[row_index[m, j]] = weight[m, j] · x[m]."""

    @cute.jit
    def move(self, mX, mOut, mIndex, mWeight, m, column):
        M, k = mIndex.shape
        source = matrix_row(mX, m, column, M, self.rows.vector)
        values = source.load(Int32(0))
        for first in cutlass.range(0, k, AT_ONCE, unroll=1):
            rows = self.named(mOut, mIndex, m, column, first)
            for place in cutlass.range_constexpr(AT_ONCE):
                stored = values
                if const_expr(mWeight is not None):
                    factor = self.factor(mWeight, m, first + place, rows[place])
                    stored = [value * factor for value in values]
                rows[place].store(Int32(0), stored)

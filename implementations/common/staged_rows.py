"""Rows on their way through shared memory, several in flight; every thread reads its own copies."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Numeric, const_expr

from .rows import GlobalRow, RowThreads, SharedRow, Vector, matrix_row


@dataclass
class Turns:
    """The rows of a thread, one after the other.

    Attributes:
        first: Of its rows.
        apart: Rows from one turn to the next.
        end: Rows from here on are not there.
    """

    first: Int32
    apart: Int32
    end: Int32

    def row(self, turn: Int32) -> Int32:
        return self.first + turn * self.apart


class StagedRows:
    """`stages` rows of each slot. No barrier is needed: nobody reads what others have copied.

    Args:
        vectors: Of a thread, of a row.
        stages: 0: rows are not staged but read from global memory whenever they are looked at.
        is_written: Whether the kernel may write where they are read from.
    """

    def __init__(
        self,
        rows: RowThreads,
        vectors: int,
        stages: int,
        element_type: type[Numeric],
        is_written: bool = False,
    ):
        self.rows = rows
        self.vectors = vectors
        self.stages = stages
        self.vector = Vector(rows.vector, element_type, is_written)

    @property
    def stage_bytes(self) -> int:
        return self.vectors * self.rows.threads * self.vector.bytes

    @property
    def bytes(self) -> int:
        """Of all stages."""
        return self.stages * self.stage_bytes

    def allocated(self, allocator) -> Int32:
        """The address of shared memory for the stages."""
        if self.stages == 0:
            return Int32(0)
        return Int32(allocator.allocate(self.bytes, byte_alignment=128).toint())

    @cute.jit
    def fetch(self, mX: cute.Tensor, turns: Turns, turn: Int32, memory: Int32, thread: Int32):
        """Starts to copy the thread's part of a row."""
        if const_expr(self.stages > 0):
            source = self.global_row(mX, turns, turn, thread)
            target = self.staged_row(memory, turn, thread)
            for v in cutlass.range(self.vectors, unroll=4):
                source.copy(v * self.rows.step, target)

    def commit(self) -> None:
        """What was fetched since the last time arrives together."""
        if self.stages > 0:
            cute.arch.cp_async_commit_group()

    def arrived(self) -> None:
        """Waits until less than `stages` are on their way."""
        if self.stages > 0:
            cute.arch.cp_async_wait_group(self.stages - 1)

    def row(self, mX, turns: Turns, turn, memory, thread) -> GlobalRow | SharedRow:
        """The thread's part of a row that has arrived."""
        if self.stages == 0:
            return self.global_row(mX, turns, turn, thread)
        return self.staged_row(memory, turn, thread)

    def global_row(self, mX, turns: Turns, turn: Int32, thread: Int32) -> GlobalRow:
        column = self.rows.column(thread)
        vector = self.vector
        return matrix_row(mX, turns.row(turn), column, turns.end, vector.count, vector.is_written)

    def staged_row(self, memory: Int32, turn: Int32, thread: Int32) -> SharedRow:
        """Vectors of a thread are as far apart as in the row."""
        room = self.vectors * self.rows.step
        element = self.rows.slot(thread) * room + self.rows.column(thread)
        stage = memory + turn % self.stages * self.stage_bytes
        return SharedRow(stage + element * self.vector.element_bytes, self.vector)

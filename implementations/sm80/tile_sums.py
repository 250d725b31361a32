"""What a block makes of its tile where rows, columns or all of it are reduced."""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, const_expr
from cutlass.memory import SmemAllocator

from ..common.epilogue import LANES, Epilogue
from ..common.reductions import (
    Reductions,
    added,
    combined,
    floats_at,
    identity,
    reduced_over_lanes,
    with_what_was_lost,
)
from ..common.threads import WARP, WHOLE_BLOCK
from .row_thread import moved

HALVES = 2  # rows of a thread at a time


class TileSums:
    """The first stage of `Reductions` by all warps of a block, which then has one part of a value.

    reduced over   in registers of a thread                 then
    ------------   --------------------------------------   ----------------------------------
    columns        a row of a turn                          lanes of the row, by shuffles
      whole rows   its rows, over all columns               the same, and warps of the row through
                                                            shared memory; they are complete
    rows           its columns, over all turns and steps    lanes by shuffles, then all warps'
                                                            through shared memory, in order
    matrix, all    one number                               the same
    """

    def __init__(
        self,
        epilogue: Epilogue,
        tile: tuple[int, int],
        threads: int,
        row_lanes: int,
        whole_rows: bool = False,
    ):
        self.epilogue = epilogue
        self.whole_rows = whole_rows
        self.outputs = epilogue.reduced
        self.threads = threads
        self.row_lanes = row_lanes
        self.reductions = Reductions(epilogue, tile, rows=tile[0], groups=1, threads=threads)

    def shared(self) -> tuple:
        """Shared memory of each output, (warps, columns of the tile), and a flag."""
        allocator, warps = SmemAllocator(), self.threads // WARP
        memory = []
        for index, output in enumerate(self.outputs):
            columns = self.reductions.columns(index) if output.over == "rows" else HALVES
            layout = cute.make_layout((warps, columns), stride=(columns, 1))
            memory.append(allocator.allocate_tensor(Float32, layout, byte_alignment=16))
        flag = allocator.allocate_tensor(Int32, cute.make_layout(1), byte_alignment=16)
        return tuple(memory), flag.iterator

    def start(self, width: int) -> tuple:
        """Registers for what is kept over turns: columns, or what rows have and then what their
        sums have lost."""
        registers = []
        for index, output in enumerate(self.outputs):
            count = len(self._columns(index, width)) if output.over == "rows" else 2 * HALVES
            tensor = cute.make_rmem_tensor(count, Float32)
            tensor.fill(identity(output.kind))
            registers.append(tensor)
        return tuple(registers)

    def _columns(self, index: int, width: int) -> list[int]:
        """Those of a thread that are reduced in a bundle."""
        number = len(self.epilogue.full) + len(self.epilogue.per_block) + index
        return [column for half, column in self.epilogue.places(number, width) if half == 0]

    def after_turn(
        self, gathered: list, registers: tuple, space, place: tuple, row: tuple, lane: Int32
    ) -> None:
        """Leaves what is complete, the rows; keeps those that go on.

        row: Of the tile, the first of the thread's; with how far the other one is.
        """
        for index, output in enumerate(self.outputs):
            if output.over == "columns" and self.whole_rows:
                for half in sorted(gathered[index]):
                    self._add(index, registers[index], half, gathered[index].pop(half))
            elif output.over == "columns":
                first, apart = row
                part = floats_at(self.reductions.part_of_rows(index, space, *place))
                for half in sorted(gathered[index]):
                    value = gathered[index].pop(half)
                    value = reduced_over_lanes(output.kind, value, self.row_lanes - 1)
                    self._keep(part + (first + half * apart), value, lane % self.row_lanes == 0)

    def after_turns(self, gathered: list, registers: tuple, width: int) -> None:
        """Keeps the rest."""
        for index, output in enumerate(self.outputs):
            if output.over == "columns":
                continue
            own = registers[index]
            keys = self._columns(index, width) if output.over == "rows" else None
            for key, value in sorted(gathered[index].items()):
                if keys is None:
                    self._add(index, own, 0, value)
                else:
                    i = keys.index(key)
                    own[i] = combined(output.kind, own[i], value)

    def _add(self, index: int, registers, half: int, value: Float32) -> None:
        kind, lost = self.outputs[index].kind, registers[HALVES + half]
        registers[half], registers[HALVES + half] = added(kind, registers[half], lost, value)

    def _found(self, index: int, registers, half: int) -> Float32:
        return with_what_was_lost(
            self.outputs[index].kind, registers[half], registers[HALVES + half]
        )

    @cute.jit
    def _keep(self, target: cute.Pointer, value: Float32, mine: Boolean):
        if mine:
            target.store(value)

    @cute.jit
    def finish(self, registers, memory, mR, space, place, extents, thread, flag, turn):
        """Leaves the block's parts, and reduces those of others if it comes last.

        turn: Some `RowThread`, which knows where columns are.
        """
        for i in cutlass.range_constexpr(len(mR)):
            if const_expr(self.whole_rows and self.outputs[i].over == "columns"):
                self._finish_rows(
                    *(i, registers[i], memory[i], mR[i], space, place, extents, thread, turn)
                )
            else:
                self._leave(i, registers[i], memory[i], space, place, thread, turn)
                scratch = memory[i].iterator
                self.reductions.complete(
                    *(i, mR[i], scratch, space, place, extents, thread, flag, Int32(WHOLE_BLOCK))
                )

    @cute.jit
    def _finish_rows(
        self, index: cutlass.Constexpr, registers, memory, mR, space, place, extents, thread, turn
    ):
        """Writes the values of rows of which the block has seen all columns."""
        numbers = (*extents, space.batches)
        self._add_up_rows(index, registers, memory, thread)
        for half in cutlass.range_constexpr(HALVES):
            row, value = turn.row_of(half), registers[half]
            value = self.epilogue.finished(index, value, numbers)
            if (thread % self.row_lanes == 0) & (row < extents[0]):
                mR[row, place[2]] = self.epilogue.conversions.converted(value, mR.element_type)

    @cute.jit
    def _add_up_rows(self, index: cutlass.Constexpr, registers, memory, thread):
        """Over the lanes of each row; its first thread gets it."""
        kind, warp, lanes = self.outputs[index].kind, thread // WARP, min(self.row_lanes, WARP) - 1
        for half in cutlass.range_constexpr(HALVES):
            value = self._found(index, registers, half)
            registers[half] = reduced_over_lanes(kind, value, lanes)
        if const_expr(self.row_lanes > WARP):
            for half in cutlass.range_constexpr(HALVES):
                if thread % WARP == 0:
                    memory[warp, half] = registers[half]
            cute.arch.sync_threads()
            if thread % self.row_lanes == 0:
                for other in cutlass.range_constexpr(1, self.row_lanes // WARP):
                    for half in cutlass.range_constexpr(HALVES):
                        value = memory[warp + other, half]
                        registers[half] = combined(kind, registers[half], value)

    @cute.jit
    def _leave(self, index: cutlass.Constexpr, registers, memory, space, place, thread, turn):
        output, reductions = self.outputs[index], self.reductions
        if const_expr(output.over == "rows"):
            self._share(index, registers, memory, place, thread, turn)
            cute.arch.sync_threads()
            part = floats_at(reductions.part_of_columns(index, space, *place))
            for i in cutlass.range(thread, memory.shape[1], self.threads, unroll=1):
                value = memory[0, i]
                for warp in cutlass.range_constexpr(1, memory.shape[0]):
                    value = combined(output.kind, value, memory[warp, i])
                (part + i).store(value)
        elif const_expr(output.over != "columns"):
            value = reductions.over_group(
                *(output.kind, self._found(index, registers, 0)),
                *(memory.iterator, thread, Int32(WHOLE_BLOCK)),
            )
            part = floats_at(reductions.part_of_matrix(index, space, *place, 0))
            if thread == 0:
                part.store(value)

    def _share(self, index, registers, memory, place, thread, turn) -> None:
        """A warp's columns into shared memory, in the order in which they are looked at."""
        output, width = self.outputs[index], turn.bundle
        lane, warp = thread % WARP, thread // WARP
        quad = lane % self.row_lanes // LANES
        own = int(width * output.columns)  # of a quad
        merged, lane_columns = turn.merged, output.lane_columns
        for i, column in enumerate(self._columns(index, width)):
            value = reduced_over_lanes(output.kind, registers[i], WARP - self.row_lanes)
            at = quad * own + turn.lane * (merged * lane_columns)
            at += moved(column, lane_columns, merged)
            self._keep(
                memory.iterator + (warp * memory.shape[1] + at), value, lane < self.row_lanes
            )

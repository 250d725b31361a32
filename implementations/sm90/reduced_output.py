"""Reduced outputs of a consumer group on Hopper, while and after it writes its part of a tile."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from ..common.epilogue import Epilogue, Thread
from ..common.reductions import (
    ROWS,
    Reductions,
    ReductionSpace,
    combined,
    floats_at,
    identity,
    is_last,
    reduced_over_lanes,
)

GROUP = 128
WARPS = 4
_ROW_LANES, _COLUMN_LANES, _ALL_LANES = 0b00011, 0b11100, 0b11111


class ReducedOutput:
    """The two stages of `Reductions` by a group of 128 threads.

    Per bundle `add` takes the elements of a thread; sums over rows leave the group there, through
    a scratch buffer of 4 warps × columns. `finish` does the rest behind the last bundle of a tile.
    """

    def __init__(self, epilogue: Epilogue, tile: tuple[int, int], groups: int):
        self.epilogue = epilogue
        self.outputs = epilogue.reduced
        self.reductions = Reductions(self.outputs, tile, groups, GROUP)

    def start(self, row_blocks: int) -> tuple:
        """Registers for what is reduced over columns, of two rows of each 64."""
        registers = tuple(cute.make_rmem_tensor((2, row_blocks), Float32) for _ in self.outputs)
        for tensor, output in zip(registers, self.outputs, strict=True):
            tensor.fill(identity(output.kind))
        return registers

    def elements(self, index: int, thread: Thread, bundle: int) -> list:
        """(half, column, value) of a thread, those outside of the matrix changing nothing."""
        output = self.outputs[index]
        lanes = output.lane_columns
        columns = int(bundle * output.columns)
        M, N = thread.extents
        width = N * output.columns.numerator // output.columns.denominator
        found = []
        for first in range(0, columns, 4 * lanes):
            for column in range(first, first + lanes):
                for half in (0, 1):
                    value = self.epilogue.element(
                        len(self.epilogue.full) + index, thread, half, column
                    )
                    inside = (thread.row_of(half) < M) & (
                        thread.column_of(column, lanes, output.columns) < width
                    )
                    value = cutlass.select_(
                        inside, value.ir_value(), Float32(identity(output.kind)).ir_value()
                    )
                    found.append((half, column, Float32(value)))
        return found

    def over_columns(self, index: int, registers: cute.Tensor, row_block: int, elements: list):
        """Adds a bundle to what a thread has of its two rows."""
        kind = self.outputs[index].kind
        for half, _, value in elements:
            registers[half, row_block] = combined(kind, registers[half, row_block], value)

    def over_rows(self, index: int, thread: Thread, elements: list, scratch: cute.Tensor, tid):
        """scratch (warp, column): a bundle, of the rows of each warp."""
        output = self.outputs[index]
        for (_, column, upper), (_, _, lower) in zip(elements[::2], elements[1::2], strict=True):
            value = combined(output.kind, upper, lower)
            value = reduced_over_lanes(output.kind, value, _COLUMN_LANES)
            self._keep(scratch, value, tid, column + thread.lane * output.lane_columns)

    @cute.jit
    def _keep(self, scratch, value, tid, column):
        if tid % 32 < 4:
            scratch[tid // 32, column] = value

    @cute.jit
    def leave_rows(
        self,
        index: cutlass.Constexpr,
        scratch: cute.Tensor,
        space: ReductionSpace,
        first_column: cutlass.Constexpr,
        place: tuple,
        tid: Int32,
    ):
        """Writes the part of a bundle's columns; behind a barrier after `over_rows`."""
        block, tile_n, batch = place
        kind = self.outputs[index].kind
        part = floats_at(self.reductions.part_of_columns(index, space, block, tile_n, batch))
        for column in cutlass.range(tid, scratch.shape[1], GROUP, unroll=1):
            value = scratch[0, column]
            for warp in cutlass.range_constexpr(1, WARPS):
                value = combined(kind, value, scratch[warp, column])
            (part + (first_column + column)).store(value)

    @cute.jit
    def leave_columns(
        self,
        index: cutlass.Constexpr,
        registers: cute.Tensor,
        space: ReductionSpace,
        row_block: cutlass.Constexpr,
        place: tuple,
        tid: Int32,
    ):
        """Writes the part of 64 rows."""
        block, tile_n, batch = place
        part = floats_at(self.reductions.part_of_rows(index, space, block, tile_n, batch))
        for half in cutlass.range_constexpr(2):
            value = registers[half, row_block]
            value = reduced_over_lanes(self.outputs[index].kind, value, _ROW_LANES)
            if tid % 4 == 0:
                (part + (tid // 32 * 16 + tid % 32 // 4 + 8 * half)).store(value)

    @cute.jit
    def leave_matrix(
        self,
        index: cutlass.Constexpr,
        registers: cute.Tensor,
        scratch: cute.Pointer,
        space: ReductionSpace,
        place: tuple,
        group: Int32,
        tid: Int32,
        barrier_id: Int32,
    ):
        """Writes the part of a group in a tile; place: (tile row, tile column, batch)."""
        tile_m, tile_n, batch = place
        kind = self.outputs[index].kind
        value = registers[0]
        for i in cutlass.range_constexpr(1, cute.size(registers)):
            value = combined(kind, value, registers[i])
        value = self._over_group(kind, value, scratch, tid, barrier_id)
        part = self.reductions.part_of_matrix(index, space, tile_m, tile_n, batch, group)
        if tid == 0:
            floats_at(part).store(value)

    @cute.jit
    def _over_group(self, kind: cutlass.Constexpr, value, scratch, tid, barrier_id):
        """Of all threads, in the order of warps; for thread 0."""
        value = reduced_over_lanes(kind, value, _ALL_LANES)
        if tid % 32 == 0:
            (scratch + tid // 32).store(value)
        cute.arch.barrier(barrier_id=barrier_id, number_of_threads=GROUP)
        for warp in cutlass.range_constexpr(1, WARPS):
            if tid == 0:
                value = combined(kind, value, (scratch + warp).load())
        cute.arch.barrier(barrier_id=barrier_id, number_of_threads=GROUP)
        return value

    @cute.jit
    def complete(
        self,
        index: cutlass.Constexpr,
        mR: cute.Tensor,
        scratch: cute.Pointer,
        space: ReductionSpace,
        place: tuple,
        extents: tuple,
        tid: Int32,
        flag: cute.Pointer,
        barrier_id: Int32,
    ):
        """Counts the group's part; the last one reduces all parts and writes the output."""
        block, tile_n, batch = place
        over = self.outputs[index].over
        cute.arch.barrier(barrier_id=barrier_id, number_of_threads=GROUP)
        if tid == 0:
            counter, arrivals = self.reductions.counter(index, space, block, tile_n, batch)
            flag.store(Int32(is_last(counter, arrivals)))
        cute.arch.barrier(barrier_id=barrier_id, number_of_threads=GROUP)
        if flag.load() != 0:
            if const_expr(over == "columns"):
                self._complete_rows(index, mR, space, place, extents, tid)
            elif const_expr(over == "rows"):
                self._complete_columns(index, mR, space, place, extents, tid)
            else:
                self._complete_matrix(index, mR, scratch, space, batch, extents, tid, barrier_id)

    @cute.jit
    def _complete_rows(self, index: cutlass.Constexpr, mR, space, place, extents, tid):
        block, _, batch = place
        first = floats_at(self.reductions.part_of_rows(index, space, block, 0, batch))
        pitch = space.tiles_m * self.reductions.tile[0]
        row = block * ROWS + tid
        if tid < ROWS and row < extents[0]:
            self._reduce(index, mR, first + tid, pitch, space.tiles_n, row, batch, extents, space)

    @cute.jit
    def _complete_columns(self, index: cutlass.Constexpr, mR, space, place, extents, tid):
        _, tile_n, batch = place
        columns = self.reductions.columns(index)
        first = floats_at(self.reductions.part_of_columns(index, space, 0, tile_n, batch))
        pitch = space.tiles_n * columns
        parts = space.tiles_m * (self.reductions.tile[0] // ROWS)
        for column in cutlass.range(tid, columns, GROUP, unroll=1):
            at = tile_n * columns + column
            if at < mR.shape[0]:
                self._reduce(index, mR, first + column, pitch, parts, at, batch, extents, space)

    @cute.jit
    def _reduce(self, index: cutlass.Constexpr, mR, first, pitch, parts, at, batch, extents, space):
        """One value out of its parts, which are `pitch` apart."""
        kind = self.outputs[index].kind
        value = Float32(identity(kind))
        for part in cutlass.range(parts, unroll=8):
            value = combined(kind, value, (first + part * pitch).load())
        value = self.epilogue.finished(index, value, (*extents, space.batches))
        mR[at, batch] = value.to(mR.element_type)

    @cute.jit
    def _complete_matrix(
        self, index: cutlass.Constexpr, mR, scratch, space, batch, extents, tid, barrier_id
    ):
        output = self.outputs[index]
        parts = space.tiles_m * space.tiles_n * self.reductions.groups
        if const_expr(output.over == "all"):
            parts, batch = parts * space.batches, Int32(0)
        first = floats_at(self.reductions.part_of_matrix(index, space, 0, 0, batch, 0))
        value = Float32(identity(output.kind))
        for part in cutlass.range(tid, parts, GROUP, unroll=8):
            value = combined(output.kind, value, (first + part).load())
        value = self._over_group(output.kind, value, scratch, tid, barrier_id)
        if tid == 0:
            value = self.epilogue.finished(index, value, (*extents, space.batches))
            mR[0, batch] = value.to(mR.element_type)

"""Reduced outputs of a consumer group on Hopper, while and after it writes its part of a tile."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from ..common.epilogue import Epilogue, Thread
from ..common.reductions import (
    COLUMN_OF_QUADS,
    OF_MATRIX,
    ROW_OF_QUAD,
    Reductions,
    ReductionSpace,
    combined,
    floats_at,
    identity,
    reduced_over_lanes,
)
from ..common.threads import GROUP, WARP
from .mma import WGMMA_M

WARPS = GROUP // WARP


class ReducedOutput:
    """The first stage of `Reductions` by a group of 128 threads.

    What is reduced over columns gathers in registers, bundle by bundle; what is reduced over rows
    leaves the group after every bundle, through a scratch buffer of 4 warps × columns.

    What is reduced over rows and columns may be carried from tile to tile, and leave the group
    behind the last one of a matrix: then of all these tiles but the last the part is nothing.
    """

    def __init__(self, epilogue: Epilogue, tile: tuple[int, int], groups: int):
        self.outputs = epilogue.reduced
        self.reductions = Reductions(epilogue, tile, WGMMA_M, groups, GROUP)

    def start(self, row_blocks: int, carried: tuple | None) -> tuple:
        """Registers for what is reduced over columns, of two rows of each 64; of what is carried,
        those that `carry` gave, of all rows."""
        registers = []
        for index, output in enumerate(self.outputs):
            if carried is not None and output.over in OF_MATRIX:
                layout = cute.make_layout((2, row_blocks), stride=(1, 0))
                registers.append(cute.make_tensor(carried[index].iterator, layout))
            else:
                registers.append(cute.make_rmem_tensor((2, row_blocks), Float32))
                registers[-1].fill(identity(output.kind))
        return tuple(registers)

    def carry(self) -> tuple | None:
        """Registers for what is carried, of each output, and a last one: how many parts of it have
        not been counted, and the number of the last of them. None: there is nothing to carry."""
        if all(output.over not in OF_MATRIX for output in self.outputs):
            return None
        values = [cute.make_rmem_tensor(2, Float32) for _ in self.outputs]
        for tensor, output in zip(values, self.outputs, strict=True):
            tensor.fill(identity(output.kind))
        state = cute.make_rmem_tensor(2, Int32)
        state.fill(0)
        return (*values, state)

    def over_columns(self, index: int, bundle: dict, registers: cute.Tensor, row_block: int):
        """Adds a bundle to its rows.

        Of a row within the quad at once: what is exchanged has to be complete. Left to itself the
        compiler would leave all sums to the end, and what they are made of in registers until then.
        """
        kind, over = self.outputs[index].kind, self.outputs[index].over
        for half, value in bundle.items():
            if over not in OF_MATRIX:
                value = reduced_over_lanes(kind, value, ROW_OF_QUAD)
            registers[half, row_block] = combined(kind, registers[half, row_block], value)

    def over_rows(self, index: int, thread: Thread, bundle: dict, scratch: cute.Tensor, tid):
        """scratch (warp, column): a bundle, of the rows of each warp."""
        output = self.outputs[index]
        for column, value in bundle.items():
            value = reduced_over_lanes(output.kind, value, COLUMN_OF_QUADS)
            self._keep(scratch, value, tid, column + thread.lane * output.lane_columns)

    @cute.jit
    def _keep(self, scratch, value, tid, column):
        if tid % WARP < 4:
            scratch[tid // WARP, column] = value

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
            if tid % 4 == 0:
                at = tid // WARP * 16 + tid % WARP // 4 + 8 * half
                (part + at).store(registers[half, row_block])

    @cute.jit
    def leave_nothing(self, space: ReductionSpace, carried: tuple, number: Int32, tid: Int32):
        """Writes the part of that number, of a tile beyond which its group carries on."""
        state = carried[-1]
        state[0] += 1
        state[1] = number
        for j in cutlass.range_constexpr(len(self.outputs)):
            if const_expr(self.outputs[j].over in OF_MATRIX):
                part = self.reductions.part_of_number(j, space, state[1])
                if tid == 0:
                    floats_at(part).store(Float32(identity(self.outputs[j].kind)))

    @cute.jit
    def leave_matrix(
        self,
        index: cutlass.Constexpr,
        registers: cute.Tensor,
        scratch: cute.Pointer,
        space: ReductionSpace,
        number: Int32,
        tid: Int32,
        barrier_id: Int32,
    ):
        """Writes the part of that number, of a group's tile or of all that it carries."""
        kind = self.outputs[index].kind
        value = registers[0]
        for i in cutlass.range_constexpr(1, cute.size(registers)):
            value = combined(kind, value, registers[i])
        value = self.reductions.over_group(kind, value, scratch, tid, barrier_id)
        part = self.reductions.part_of_number(index, space, number)
        if tid == 0:
            floats_at(part).store(value)

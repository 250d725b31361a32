"""Reduced outputs of a block on Ampere, while its warps write a tile and after all have."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass.cute import AddressSpace

from ..common.epilogue import Epilogue
from ..common.reductions import (
    COLUMN_OF_QUADS,
    ROW_OF_QUAD,
    Reductions,
    combined,
    floats_at,
    identity,
    reduced_over_lanes,
)
from ..common.threads import WARP, WHOLE_BLOCK

ROWS = 16  # of a warp at a time
_BYTES = Float32.width // 8


class ReducedOutput:
    """The first stage of `Reductions` by all warps of a block, which then has one part of a value.

    reduced over   in registers of a thread           in shared memory
    ------------   --------------------------------   ------------------------------
    columns        two rows of each block of 16       (warps along N, rows of a tile)
    rows           the columns of a bundle            (warps along M, columns of a tile)
    matrix, all    the same as over columns           (warps)

    Attributes:
        bytes: Of shared memory, from `first_byte` on.
    """

    def __init__(
        self,
        epilogue: Epilogue,
        tile: tuple[int, int],
        warps: tuple[int, int],
        *,
        first_byte: int,
    ):
        self.outputs = epilogue.reduced
        self.tile = tile
        self.warps = warps
        self.threads = WARP * warps[0] * warps[1]
        self.reductions = Reductions(epilogue, tile, rows=tile[0], groups=1, threads=self.threads)
        self.first_bytes = [first_byte]
        for shape in map(self._shape, range(len(self.outputs))):
            self.first_bytes.append(self.first_bytes[-1] + shape[0] * shape[1] * _BYTES)
        self.bytes = self.first_bytes[-1] - first_byte

    def _shape(self, index: int) -> tuple[int, int]:
        """(warps, values) that gather in shared memory."""
        over = self.outputs[index].over
        if over == "columns":
            return self.warps[1], self.tile[0]
        if over == "rows":
            return self.warps[0], self.reductions.columns(index)
        return 1, self.threads // WARP

    def _memory(self, index: int, memory: cute.Pointer) -> cute.Tensor:
        pointer = cute.make_ptr(
            Float32,
            memory.toint() + self.first_bytes[index],
            AddressSpace.smem,
            assumed_align=_BYTES,
        )
        shape = self._shape(index)
        return cute.make_tensor(pointer, cute.make_layout(shape, stride=(shape[1], 1)))

    def start(self, row_blocks: int) -> tuple:
        """Registers for what is reduced over columns, of two rows of each 16."""
        registers = tuple(cute.make_rmem_tensor((2, row_blocks), Float32) for _ in self.outputs)
        for tensor, output in zip(registers, self.outputs, strict=True):
            tensor.fill(identity(output.kind))
        return registers

    def over_columns(self, gathered: list, sums: tuple, row_block: int):
        """Moves what a bundle has of rows to where those are added up.

        Within the quad at once: what is exchanged has to be complete. Left to itself the compiler
        would leave all sums to the end, and what they are made of in registers until then.
        """
        for output, bundle, registers in zip(self.outputs, gathered, sums, strict=True):
            if output.over != "rows":
                for half in sorted(bundle):
                    value = reduced_over_lanes(output.kind, bundle.pop(half), ROW_OF_QUAD)
                    found = registers[half, row_block]
                    registers[half, row_block] = combined(output.kind, found, value)

    def over_rows(self, gathered: list, memory: cute.Pointer, bundle: int, width: int, warp, lane):
        """Puts what a bundle has of columns into shared memory."""
        warps_m, warps_n = self.warps
        for index, (output, columns) in enumerate(zip(self.outputs, gathered, strict=True)):
            if output.over != "rows":
                continue
            place = self._memory(index, memory)
            of_warp = self.reductions.columns(index) // warps_n
            first = warp // warps_m * of_warp + int(bundle * width * output.columns)
            for column, value in columns.items():
                value = reduced_over_lanes(output.kind, value, COLUMN_OF_QUADS)
                at = first + column + lane % 4 * output.lane_columns
                self._keep(place, value, warp % warps_m, at, lane < 4)

    @cute.jit
    def _keep(self, place, value, row, column, mine):
        if mine:
            place[row, column] = value

    @cute.jit
    def finish(
        self,
        sums: tuple,
        memory: cute.Pointer,
        mR: tuple,
        space,
        place: tuple,
        extents: tuple,
        thread: Int32,
        flag: cute.Pointer,
    ):
        """Leaves the block's parts, and reduces those of others if it comes last."""
        tile_m, tile_n = self.tile
        tile = (place[0] // tile_m, place[1] // tile_n, place[2])
        for j in cutlass.range_constexpr(len(mR)):
            if const_expr(self.outputs[j].over == "columns"):
                self._keep_rows(j, sums[j], memory, thread)
        cute.arch.sync_threads()
        for j in cutlass.range_constexpr(len(mR)):
            self._leave(j, sums[j], memory, space, tile, thread)
            scratch = self._memory(j, memory).iterator
            self.reductions.complete(
                *(j, mR[j], scratch, space, tile, extents, thread, flag, WHOLE_BLOCK)
            )

    def _keep_rows(self, index, registers, memory, thread):
        place = self._memory(index, memory)
        warp, lane = thread // WARP, thread % WARP
        warps_m, _ = self.warps
        for row_block in range(registers.shape[1]):
            for half in (0, 1):
                row = (row_block * warps_m + warp % warps_m) * ROWS + lane // 4 + 8 * half
                value = registers[half, row_block]
                self._keep(place, value, warp // warps_m, row, lane % 4 == 0)

    @cute.jit
    def _leave(self, index: cutlass.Constexpr, registers, memory, space, tile, thread):
        """Writes the block's part, in the order of its warps."""
        output, reductions = self.outputs[index], self.reductions
        place = self._memory(index, memory)
        if const_expr(output.over in ("matrix", "all")):
            value = registers[0]
            for i in cutlass.range_constexpr(1, cute.size(registers)):
                value = combined(output.kind, value, registers[i])
            value = reductions.over_group(
                output.kind, value, place.iterator, thread, WHOLE_BLOCK, lanes=COLUMN_OF_QUADS
            )
            part = floats_at(reductions.part_of_matrix(index, space, *tile, 0))
            if thread == 0:
                part.store(value)
        else:
            address = reductions.part_of_columns(index, space, *tile)
            if const_expr(output.over == "columns"):
                address = reductions.part_of_rows(index, space, *tile)
            for i in cutlass.range(thread, place.shape[1], self.threads, unroll=1):
                value = place[0, i]
                for warp in cutlass.range_constexpr(1, place.shape[0]):
                    value = combined(output.kind, value, place[warp, i])
                (floats_at(address) + i).store(value)

"""Output tiles on their way from mma.sync's accumulators to global memory, all warps together."""

import itertools

import cutlass
import cutlass.cute as cute
from cutlass import const_expr
from cutlass.cute.nvgpu import CopyUniversalOp

from ..common.epilogue import PAIR, Epilogue, Thread
from ..common.output_tile import OutputTile
from ..common.threads import WARP


class SlicedOutput:
    """How a block writes D, of which every element comes of one accumulator.

    A slice of the tile at a time: all warps put what they have of it into shared memory, then all
    threads store whole vectors of it.
    """

    def __init__(self, D: OutputTile, epilogue: Epilogue, tile: tuple[int, int]):
        self.D = D
        self.epilogue = epilogue
        self.tile = tile

    @property
    def bytes(self) -> int:
        """Of shared memory."""
        return self.D.bytes

    @cute.jit
    def write(
        self,
        tiled_mma: cute.TiledMma,
        accumulators: cute.Tensor,
        memory: cute.Pointer,
        mD: tuple,
        operands: tuple,
        mR: tuple,
        space,
        place: tuple,
        extents: tuple,
        thread: cutlass.Int32,
        flag: cute.Pointer,
    ):
        """A block's tile; see `WarpOutput.write`."""
        (mD,) = mD
        sD = cute.make_tensor(cute.recast_ptr(memory, dtype=self.D.element_type), self.D.layout())
        tCsD = tiled_mma.get_slice(thread).partition_C(sD)
        # Neighbours in a thread are neighbours along N.
        neighbours = 2 if const_expr(self.D.unit_mode == 1) else 1
        copy_atom = cute.make_copy_atom(
            CopyUniversalOp(),
            self.D.element_type,
            num_bits_per_copy=neighbours * self.D.element_type.width,
        )
        for index in cutlass.range_constexpr(self.D.slices):
            tCrC = self.D.slice_of(accumulators, index)
            tCrD = cute.make_rmem_tensor_like(tCsD, self.D.element_type)
            elements = self._elements(tCrC, index, tiled_mma, operands, place, extents, thread)
            tCrD.store(elements.to(self.D.element_type))
            cute.arch.sync_threads()  # operands or the last slice have been read
            cute.copy(copy_atom, tCrD, tCsD)
            cute.arch.sync_threads()
            self.D.store(sD, mD, place[:2], place[2], index, thread)

    def _elements(
        self, tCrC, index: int, tiled_mma, operands, place, extents, thread
    ) -> cute.TensorSSA:
        """What the epilogue makes of the accumulators in a slice."""
        if self.epilogue.is_plain:
            return tCrC.load()
        tile = cute.make_identity_tensor(self.tile)
        warp_m, warp_n = tiled_mma.get_slice(thread // WARP * WARP).partition_C(tile)[0]
        lane = thread % WARP
        # All threads have the same distances between their accumulators; those of thread 0 say.
        distances = self.D.slice_of(tiled_mma.get_slice(0).partition_C(tile), index)
        elements = []
        for first in range(0, cute.size(tCrC), PAIR * 2):  # of an mma.sync: 2 rows, 8 columns
            row, column = distances[first]
            of_thread = Thread(
                cute.make_tensor(tCrC.iterator + tCrC.layout(first), cute.make_layout(PAIR * 2)),
                self.epilogue.kinds,
                operands,
                row=place[0] + warp_m + row + lane // 4,
                first_column=place[1] + warp_n + column,
                lane=lane % 4,
                batch=place[2],
                extents=extents,
            )
            elements += [
                self.epilogue.element(0, of_thread, half, pair)
                for half, pair in itertools.product((0, 1), range(PAIR))
            ]
        found = cute.make_rmem_tensor(tCrC.shape, type(elements[0]))
        for i, element in enumerate(elements):
            found[i] = element
        return found.load()

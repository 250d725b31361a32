"""Subtiles of an output that threads write, on their way from shared to global memory."""

import cutlass
import cutlass.cute as cute
from cutlass import Int64, const_expr
from cutlass.cute import AddressSpace

from ..common.threads import GROUP
from .mma import WGMMA_M

VECTOR_BYTES = 16  # that TMA asks of addresses, strides and rows, and so all operands have


class ThreadStores:
    """The part of `Output` that does without TMA: rows that lie anywhere, and outputs that are not
    aligned."""

    @cute.jit
    def _scatter(self, tid, sD, mD, rows, at, group):
        """In whole vectors, each row of a subtile to where it belongs.

        rows: Numbers of the rows of all groups; group: (first row among those, M, N) of this one.
        """
        first, extent, columns = group
        vector = VECTOR_BYTES * 8 // self.element_types[0].width
        across = self.subtiles[0][1] // vector
        atom = cute.make_copy_atom(
            cute.nvgpu.CopyUniversalOp(), self.element_types[0], num_bits_per_copy=8 * VECTOR_BYTES
        )
        threads = cute.make_ordered_layout((GROUP // across, across), order=(1, 0))
        copy = cute.make_tiled_copy_tv(atom, threads, cute.make_layout((1, vector))).get_slice(tid)
        tDsD = copy.partition_S(sD)
        column = at[1] * self.subtiles[0][1] + tid % across * vector
        for i in cutlass.range_constexpr(WGMMA_M * across // GROUP):
            row = at[0] * WGMMA_M + tid // across + i * (GROUP // across)
            if (row < extent) & (column < columns):
                fragment = cute.make_rmem_tensor(vector, self.element_types[0])
                cute.copy(atom, tDsD[None, i, 0], fragment)
                place = Int64(rows[first + row]) * mD.stride[0] + column
                target = cute.make_ptr(
                    self.element_types[0],
                    mD.iterator.toint() + place * (self.element_types[0].width // 8),
                    AddressSpace.gmem,
                    assumed_align=VECTOR_BYTES,
                )
                cute.copy(atom, fragment, cute.make_tensor(target, cute.make_layout(vector)))
        if const_expr(any(self.tma_stores[1:])):
            # An empty group: the ring counts one for every buffer.
            cute.arch.cp_async_bulk_commit_group()

    @cute.jit
    def _store_by_threads(
        self, j: cutlass.Constexpr, tid, sD, gD, shape, major: cutlass.Constexpr, at
    ):
        """Element by element within the bounds of D, a warp along the side that is contiguous."""
        atom = cute.make_copy_atom(cute.nvgpu.CopyUniversalOp(), self.element_types[j])
        threads = self._store_threads(self.subtiles[j][1], major)
        copy = cute.make_tiled_copy_tv(atom, threads, cute.make_layout((1, 1))).get_slice(tid)
        cD = cute.local_tile(cute.make_identity_tensor(shape[:2]), self.subtiles[j], at[:2])
        tDsD, tDgD, tDcD = copy.partition_S(sD), copy.partition_D(gD), copy.partition_S(cD)
        # Not unrolled in full: the addresses would crowd out accumulators still to be stored.
        for i in cutlass.range(cute.size(tDsD), unroll=4):
            if cute.elem_less(tDcD[i], shape[:2]):
                tDgD[i] = tDsD[i]

    def _store_threads(self, columns, major):
        if major.is_n_major_c():
            along = min(32, columns)
            return cute.make_ordered_layout((GROUP // along, along), order=(1, 0))
        return cute.make_ordered_layout((32, GROUP // 32), order=(0, 1))

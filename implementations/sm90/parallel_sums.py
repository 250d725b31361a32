"""Partial sums of tiles that are cut along K, added up by a kernel of its own."""

from dataclasses import dataclass

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, const_expr

from ..common.epilogue import Epilogue, Thread, places, store_element
from ..common.flat_grid import flat_block_idx, flat_grid
from ..common.threads import GROUP
from ..common.tile_order import TileOrder
from ..common.work_split import PartialSums, WorkSplit
from .mma import WGMMA_M

_COLUMNS = 8  # of a quad of threads, which have a vector of four accumulators each of them


@dataclass(frozen=True)
class ParallelSums:
    """Adds up what `PartialSums.leave` has left in the workspace, and writes the outputs.

    Where many workers share few tiles, the one that comes last to a tile would read for longer than
    it has multiplied. Here every multiprocessor has a share: a block of 128 threads adds up one
    vector per thread, in the order of workers, and applies the epilogue to it.

    Args:
        sums: Of the workers, whose blocks have `consumers` groups each that share a tile: of its
            blocks of 64 rows, every so manieth is one group's.
        element_type: Of accumulators.
        epilogue: Of elements that stand alone.
        tile: Rows and columns of a block.
        cluster: Blocks of a worker along M and N.
        dependent_launch: Whether blocks may start while the products are still formed.
    """

    sums: PartialSums
    element_type: type[cutlass.Numeric]
    epilogue: Epilogue
    tile: tuple[int, int]
    cluster: tuple[int, int]
    consumers: int
    dependent_launch: bool

    def __post_init__(self):
        one = self.epilogue
        together = one.per_block or one.reduced or one.halves or one.heads or one.spans_row
        if together or _COLUMNS % one.bundle or one.row_pairs is not None:
            raise ValueError(
                "a kernel that adds up parts of tiles computes elements that stand alone"
            )

    def launch(
        self,
        mD: tuple,
        operands: tuple,
        extents: tuple,
        order: TileOrder,
        split: WorkSplit,
        stream: cuda.CUstream,
    ):
        """mD: outputs (M,N,L), as they are multiplied; operands: what the epilogue reads; extents:
        (M, N)."""
        self.kernel(mD, operands, extents, order, split).launch(
            grid=flat_grid(self.sums.vectors, self.sums.groups, order.total),
            block=(GROUP, 1, 1),
            stream=stream,
            use_pdl=self.dependent_launch,
        )

    @cute.kernel
    def kernel(
        self, mD: tuple, operands: tuple, extents: tuple, order: TileOrder, split: WorkSplit
    ):
        tid, _, _ = cute.arch.thread_idx()
        vector, group, cluster = flat_block_idx(self.sums.vectors, self.sums.groups)
        row, column, batch = self._place(vector, group, order.coordinates(cluster))
        if const_expr(self.dependent_launch):
            cute.arch.griddepcontrol_wait()
            cute.arch.griddepcontrol_launch_dependents()

        thread = Thread(
            accumulators=self.sums.total(split, cluster, group, tid, vector, self.element_type),
            kinds=self.epilogue.kinds,
            operands=operands,
            row=row + tid // 32 * 16 + tid % 32 // 4,
            first_column=column,
            lane=tid % 4,
            batch=batch,
            extents=extents,
        )
        self.epilogue.fetch(thread, _COLUMNS)
        for i in cutlass.range_constexpr(len(mD)):
            for half, of_quad in places(_COLUMNS):
                value = self.epilogue.element(i, thread, half, of_quad)
                value = self.epilogue.conversions.converted(value, mD[i].element_type)
                at = (thread.row_of(half), thread.column_of(of_quad), batch)
                store_element(mD[i], value, *at, Boolean(True))

    def _place(self, vector: Int32, group: Int32, coordinates: tuple) -> tuple:
        """(row, column, batch) of the first element of a vector of a group's accumulators: those
        of a block of 64 rows lie side by side."""
        (tile_m, tile_n), (cluster_m, cluster_n) = self.tile, self.cluster
        m, n, batch = coordinates
        block, consumer = group // self.consumers, group % self.consumers
        of_rows = tile_n // _COLUMNS
        row_block = consumer + vector // of_rows * self.consumers
        row = (m * cluster_m + block % cluster_m) * tile_m + row_block * WGMMA_M
        column = (n * cluster_n + block // cluster_m) * tile_n + vector % of_rows * _COLUMNS
        return row, column, batch

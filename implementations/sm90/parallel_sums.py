"""Partial sums of tiles that are cut along K, added up by a kernel of its own."""

from dataclasses import dataclass

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import const_expr

from ..common.tile_order import TileOrder
from ..common.work_split import PartialSums, WorkSplit
from .output import GROUP


@dataclass(frozen=True)
class ParallelSums:
    """Adds up what `PartialSums.leave` has left in the workspace, and writes D.

    Where many workers share few tiles, the one that comes last to a tile would read for longer than
    it has multiplied. Here every multiprocessor has a share: a block of 128 threads adds up one
    vector per thread, in the order of workers.

    Args:
        sums: Of the workers, whose blocks have `consumers` groups each that share a tile.
        tile: Rows and columns of a block.
        cluster: Blocks of a worker along M and N.
        dependent_launch: Whether blocks may start while the products are still formed.
    """

    sums: PartialSums
    tile: tuple[int, int]
    cluster: tuple[int, int]
    consumers: int
    dependent_launch: bool

    def launch(
        self,
        tiled_mma: cute.TiledMma,
        mD: cute.Tensor,
        order: TileOrder,
        split: WorkSplit,
        stream: cuda.CUstream,
    ):
        """mD: (M,N,L), as it is multiplied."""
        self.kernel(tiled_mma, mD, order, split).launch(
            grid=(self.sums.vectors, self.sums.groups, order.total),
            block=(GROUP, 1, 1),
            stream=stream,
            use_pdl=self.dependent_launch,
        )

    @cute.kernel
    def kernel(self, tiled_mma: cute.TiledMma, mD: cute.Tensor, order: TileOrder, split: WorkSplit):
        thread, _, _ = cute.arch.thread_idx()
        vector, group, cluster = cute.arch.block_idx()
        (tile_m, tile_n), (cluster_m, cluster_n) = self.tile, self.cluster
        block, consumer = group // self.consumers, group % self.consumers
        m, n, batch = order.coordinates(cluster)
        first_row = (m * cluster_m + block % cluster_m) * tile_m
        first_column = (n * cluster_n + block // cluster_m) * tile_n
        thr_mma = tiled_mma.get_slice(consumer * GROUP + thread)
        tCcD = thr_mma.partition_C(cute.make_identity_tensor((tile_m, tile_n)))
        rows, columns, _ = mD.shape
        if const_expr(self.dependent_launch):
            cute.arch.griddepcontrol_wait()
            cute.arch.griddepcontrol_launch_dependents()

        total = self.sums.total(split, cluster, group, thread, vector, tiled_mma.op.acc_dtype)
        for i in cutlass.range_constexpr(cute.size(total)):
            row, column = tCcD[vector * cute.size(total) + i]
            row, column = first_row + row, first_column + column
            if row < rows and column < columns:
                mD[row, column, batch] = total[i].to(mD.element_type)

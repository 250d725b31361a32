"""Sums over rows of a tall matrix of parts, always in the same order."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass.memory import SmemAllocator

from .conversion import select
from .rows import combined
from .threads import WARP


class ColumnSums:
    """sums[j] = Σ over i of parts[i, j].

    A block has 32 columns, one per lane. Warp g adds up the parts g, g + warps, ..., of which it
    loads several at once; the first warp adds up what the warps have, which is in shared memory.
    Many warps wait for few loads each. But where there are many columns, so few that all blocks
    run at once: they take about as long as a block alone does.

    columns: that there are of all sums together, about; 0: very many.
    dependent_launch: as in `Norm`.
    """

    fewest, most = 8, 32  # warps
    at_once = 8  # parts of a warp on their way together
    resident = 64 * 128  # warps that a GPU has at once

    def __init__(self, columns: int, dependent_launch: bool):
        blocks = -(-columns // WARP)
        fitting = self.resident // blocks if blocks else 0
        self.warps = min(max(fitting // self.fewest * self.fewest, self.fewest), self.most)
        self.dependent_launch = dependent_launch

    @property
    def threads(self) -> int:
        return WARP * self.warps

    def launch(self, mParts: cute.Tensor, sums: tuple, stream) -> None:
        """mParts (parts, N, sums), N side by side; sums: as many of (N,), of any float."""
        columns = cute.ceil_div(mParts.shape[1], WARP)
        self.kernel(mParts, sums).launch(
            grid=(columns, len(sums), 1),
            block=(self.threads, 1, 1),
            min_blocks_per_mp=1,
            stream=stream,
            use_pdl=self.dependent_launch,
        )

    @cute.kernel
    def kernel(self, mParts: cute.Tensor, sums: tuple):
        thread, _, _ = cute.arch.thread_idx()
        block, index, _ = cute.arch.block_idx()
        lane, warp = thread % WARP, thread // WARP
        column = block * WARP + lane
        inside = column < mParts.shape[1]
        layout = cute.make_layout((self.warps, WARP), stride=(WARP, 1))
        sWarps = SmemAllocator().allocate_tensor(Float32, layout, byte_alignment=16)
        found = Float32(0)
        if const_expr(self.dependent_launch):
            cute.arch.griddepcontrol_wait()
            cute.arch.griddepcontrol_launch_dependents()
        if inside:
            for first in cutlass.range(warp, mParts.shape[0], self.warps * self.at_once, unroll=1):
                found += self._loaded(mParts, first, column, index)
        sWarps[warp, lane] = found
        cute.arch.sync_threads()
        if warp == 0 and inside:
            found = combined([sWarps[i, lane] for i in range(self.warps)])
            for i in cutlass.range_constexpr(len(sums)):
                if index == i:
                    sums[i][column] = found.to(sums[i].element_type)

    def _loaded(self, mParts, first: Int32, column: Int32, index: Int32) -> Float32:
        """The sum of a warp's next parts."""
        end = mParts.shape[0]
        parts = [first + i * self.warps for i in range(self.at_once)]
        values = [mParts[cutlass.min(part, end - 1), column, index] for part in parts]
        there = zip(parts, values, strict=True)
        return combined([select(part < end, value, Float32(0)) for part, value in there])

"""Reduced outputs of a grouped product: per row, per column and group, per group.

What is reduced of a group is what would be reduced of a matrix by itself: the group has a piece of
the workspace of its own, and its own view of every output, so `Reductions` need not know of groups.
Counters and parts grow with the row tiles of a group; counters of columns and of whole groups do
not. Pieces follow each other in the order of the groups, and there is room for the most row tiles
that offsets can make (`most_row_tiles`).
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from .grouped_tiles import GroupTile
from .reductions import Reductions, ReductionSpace, identity

_BYTES = 4  # of a counter, and of a part


@dataclass(frozen=True)
class GroupedReductions:
    """The reductions of all groups.

    Args:
        reductions: Those of one; nothing is reduced over all of them.
    """

    reductions: Reductions

    def __post_init__(self):
        if any(output.over == "all" for output in self.reductions.outputs):
            raise ValueError("reductions are per row, per column and group, or per group")

    def sizes(self, row_tiles, tiles_n, groups) -> tuple:
        """(counters, parts) of all outputs, if groups have so many row tiles together."""
        grow, stay = self._counters(tiles_n)
        return grow * row_tiles + stay * groups, self._parts(tiles_n) * row_tiles

    def _counters(self, tiles_n) -> tuple:
        """(for each row tile, for each group)"""
        reductions, grow, stay = self.reductions, 0, 0
        for index, output in enumerate(reductions.outputs):
            counters, _ = reductions.sizes(index, 1, tiles_n, 1)
            if output.over == "columns":
                grow += counters
            else:
                stay += counters
        return grow, stay

    def _parts(self, tiles_n):
        """For each row tile."""
        reductions = self.reductions
        outputs = range(len(reductions.outputs))
        return sum(reductions.sizes(index, 1, tiles_n, 1)[1] for index in outputs)

    def space(self, tile: GroupTile, tiles_n, counters: Int64, parts: Int64) -> ReductionSpace:
        """Of the tile's group, in which its batch is 0.

        counters, parts: Addresses, of all groups.
        """
        grow, stay = self._counters(tiles_n)
        before = grow * tile.first_tile + stay * tile.group
        return ReductionSpace(
            tile.tiles,
            tiles_n,
            Int32(1),
            counters + Int64(before) * _BYTES,
            parts + Int64(tile.first_tile) * (self._parts(tiles_n) * _BYTES),
        )

    def outputs_of(self, group: Int32, first_row: Int32, mR: tuple) -> tuple:
        """Reduced outputs (values, L) as the group alone has them: rows count from its first."""
        found = []
        for tensor, output in zip(mR, self.reductions.outputs, strict=True):
            first = Int64(group) * tensor.stride[1]
            if output.over == "columns":
                first += Int64(first_row) * tensor.stride[0]
            found.append(cute.make_tensor(tensor.iterator + first, tensor.layout))
        return tuple(found)

    @cute.jit
    def write_empty(
        self,
        offsets: cute.Tensor,
        mR: tuple,
        columns: Int32,
        worker: Int32,
        workers: Int32,
        thread: Int32,
    ):
        """Writes what is reduced of groups without rows; a worker, a block of threads, does so for
        one of so many groups.

        columns: Of the accumulators.
        """
        for group in cutlass.range(worker, offsets.shape[0], workers, unroll=1):
            first_row = Int32(0)
            if group > 0:
                first_row = offsets[group - 1]
            if offsets[group] <= first_row:
                outputs = self.outputs_of(group, Int32(0), mR)
                for index in cutlass.range_constexpr(len(outputs)):
                    self._write_nothing(index, outputs[index], columns, thread)

    @cute.jit
    def _write_nothing(self, index: cutlass.Constexpr, mR, columns, thread):
        """What no elements at all are reduced to."""
        reductions, epilogue = self.reductions, self.reductions.epilogue
        output = reductions.outputs[index]
        if const_expr(output.over != "columns"):
            value = epilogue.finished(
                index, Float32(identity(output.kind)), (Int32(0), columns, Int32(1))
            )
            value = epilogue.conversions.converted(value, mR.element_type)
            for at in cutlass.range(thread, mR.shape[0], reductions.threads, unroll=1):
                mR[at, 0] = value

"""Outputs that are one value per row, per column or per matrix: reduced in a fixed order.

Groups of threads write what they have of each into a workspace, as parts; whichever group comes
last for a value reduces its parts in their order. The result does not depend on who that is.

reduced over   parts of a value                 a group that is the last one reduces
------------   ------------------------------   ------------------------------------
columns        one per tile column              64 rows
rows           one per 64 rows                  the columns of a tile
matrix, all    one per group and tile           everything
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64
from cutlass.cute import AddressSpace

from .epilogue import Reduced

ROWS = 64  # of a group at a time
_BYTES = 4  # of a counter, and of a part


@dataclass
class ReductionSpace:
    """Run-time facts: how many tiles there are, whole clusters of them, and where parts go.

    Attributes:
        counters, parts: Addresses, of all reductions.
    """

    tiles_m: Int32
    tiles_n: Int32
    batches: Int32
    counters: Int64
    parts: Int64


@dataclass(frozen=True)
class Reductions:
    """What the reduced outputs of an epilogue need of a workspace, and how they are summed up.

    Args:
        tile: (rows, columns) of accumulators.
        groups: That share a tile.
        threads: Of a group.
    """

    outputs: tuple[Reduced, ...]
    tile: tuple[int, int]
    groups: int
    threads: int

    def sizes(self, index: int, tiles_m, tiles_n, batches) -> tuple:
        """(counters, parts) of one output."""
        over, columns = self.outputs[index].over, self.columns(index)
        row_blocks = tiles_m * (self.tile[0] // ROWS)
        if over == "columns":
            return batches * row_blocks, batches * tiles_n * row_blocks * ROWS
        if over == "rows":
            return batches * tiles_n, batches * row_blocks * tiles_n * columns
        return (batches if over == "matrix" else 1), batches * tiles_m * tiles_n * self.groups

    def columns(self, index: int) -> int:
        """That are reduced, of a tile."""
        return int(self.tile[1] * self.outputs[index].columns)

    def _offsets(self, index: int, space: ReductionSpace) -> tuple:
        """(counters, parts) of the outputs before."""
        counters = parts = Int32(0)
        for before in range(index):
            more = self.sizes(before, space.tiles_m, space.tiles_n, space.batches)
            counters, parts = counters + more[0], parts + more[1]
        return counters, parts

    def output_modes(self, tensors: tuple) -> tuple:
        """Outputs as (values, L)."""
        return tuple(map(_value_modes, tensors, (reduced.over for reduced in self.outputs)))

    def part_of_rows(self, index: int, space: ReductionSpace, block, tile_n, batch) -> Int64:
        """Address of the part of ROWS rows from 64-row block `block`, in a tile column."""
        rows = space.tiles_m * self.tile[0]
        first = (batch * space.tiles_n + tile_n) * rows + block * ROWS
        return self._address(index, space, first)

    def part_of_columns(self, index: int, space: ReductionSpace, block, tile_n, batch) -> Int64:
        """Address of the part of a tile's columns, in 64-row block `block`."""
        blocks = space.tiles_m * (self.tile[0] // ROWS)
        columns = self.columns(index)
        first = (batch * blocks + block) * (space.tiles_n * columns) + tile_n * columns
        return self._address(index, space, first)

    def part_of_matrix(self, index: int, space: ReductionSpace, tile_m, tile_n, batch, group):
        """Address of a group's part."""
        tile = (batch * space.tiles_m + tile_m) * space.tiles_n + tile_n
        return self._address(index, space, tile * self.groups + group)

    def _address(self, index, space, first) -> Int64:
        return space.parts + (Int64(self._offsets(index, space)[1]) + first) * _BYTES

    def counter(self, index: int, space: ReductionSpace, block, tile_n, batch) -> tuple:
        """(pointer, arrivals that make it complete) for what a group has a part of."""
        over = self.outputs[index].over
        blocks = space.tiles_m * (self.tile[0] // ROWS)
        if over == "columns":
            place, arrivals = batch * blocks + block, space.tiles_n
        elif over == "rows":
            place, arrivals = batch * space.tiles_n + tile_n, blocks
        else:
            arrivals = space.tiles_m * space.tiles_n * self.groups
            place = batch
            if over == "all":
                place, arrivals = 0, arrivals * space.batches
        address = space.counters + (self._offsets(index, space)[0] + place) * _BYTES
        return cute.make_ptr(Int32, address, AddressSpace.gmem, assumed_align=4), arrivals


def _value_modes(tensor: cute.Tensor, over: str) -> cute.Tensor:
    modes = "v" if over in ("columns", "rows") else ""
    rank = len(tensor.shape)
    batched = rank > len(modes)
    value = (tensor.shape[-1], tensor.stride[-1]) if modes else (1, 0)
    batch = (tensor.shape[0], tensor.stride[0]) if batched else (1, 0)
    layout = cute.make_layout((value[0], batch[0]), stride=(value[1], batch[1]))
    return cute.make_tensor(tensor.iterator, layout)


def identity(kind: str) -> float:
    """What changes nothing."""
    return {"sum": 0.0, "max": float("-inf"), "min": float("inf")}[kind]


def combined(kind: str, a: Float32, b: Float32) -> Float32:
    """Of two parts; NaN wins."""
    if kind == "sum":
        return a + b
    return (cute.arch.fmax if kind == "max" else cute.arch.fmin)(a, b, nan=True)


@cute.jit
def reduced_over_lanes(kind: cutlass.Constexpr, value: Float32, bits: cutlass.Constexpr) -> Float32:
    """Of the lanes that differ in the given bits; all of them get it."""
    for bit in cutlass.range_constexpr(5):
        if cutlass.const_expr(bits & (1 << bit)):
            other = cute.arch.shuffle_sync_bfly(value, offset=1 << bit)
            value = combined(kind, value, other)
    return value


@cute.jit
def is_last(counter: cute.Pointer, arrivals: Int32) -> Boolean:
    """One thread: counts the arrival of its group, whose writes the threads have done before a
    barrier; True for the last one, which may read what all the others have written."""
    cute.arch.fence_acq_rel_gpu()
    arrived = cute.arch.atomic_add(counter, Int32(1))
    cute.arch.fence_acq_rel_gpu()
    last = arrived == arrivals - 1
    if last:
        counter.store(Int32(0))  # for the next launch
    return last


def floats_at(address: Int64) -> cute.Pointer:
    return cute.make_ptr(Float32, address, AddressSpace.gmem, assumed_align=4)

"""Outputs that are one value per row, per column or per matrix: reduced in a fixed order.

Groups of threads write what they have of each into a workspace, as parts; whichever group comes
last for a value reduces its parts in their order. The result does not depend on who that is.

reduced over   parts of a value                 a group that is the last one reduces
------------   ------------------------------   ------------------------------------
columns        one per tile column              a block of rows
rows           one per block of rows            the columns of a tile
matrix, all    one per group and tile           everything
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, const_expr
from cutlass.cute import AddressSpace

from .conversion import select
from .epilogue import HALF, Epilogue, PerBlock, Reduced, Thread
from .modes import operand_batch_last
from .threads import WARP

OF_MATRIX = ("matrix", "all")  # what is reduced over rows and columns
ROW_OF_QUAD, COLUMN_OF_QUADS, WHOLE_WARP = 0b00011, 0b11100, 0b11111  # bits where lanes differ
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
        rows: Of a block, which a group has parts of at a time.
        groups: That share a tile.
        threads: Of a group.
    """

    epilogue: Epilogue
    tile: tuple[int, int]
    rows: int
    groups: int
    threads: int

    @property
    def outputs(self) -> tuple:
        return self.epilogue.reduced

    def sizes(self, index: int, tiles_m, tiles_n, batches) -> tuple:
        """(counters, parts) of one output."""
        over, columns = self.outputs[index].over, self.columns(index)
        row_blocks = tiles_m * (self.tile[0] // self.rows)
        if over == "columns":
            return batches * row_blocks, batches * tiles_n * row_blocks * self.rows
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
        """Outputs with one value per row and block as (M, blocks, L), then those that are reduced
        as (values, L)."""
        blocks = self.epilogue.per_block
        return (
            *map(_block_modes, tensors[: len(blocks)], blocks),
            *map(_value_modes, tensors[len(blocks) :], self.outputs),
        )

    # Parts -------------------------------------------------------------------------------

    def part_of_rows(self, index: int, space: ReductionSpace, block, tile_n, batch) -> Int64:
        """Address of the part of block `block` of rows, in a tile column."""
        rows = space.tiles_m * self.tile[0]
        first = (batch * space.tiles_n + tile_n) * rows + block * self.rows
        return self._address(index, space, first)

    def part_of_columns(self, index: int, space: ReductionSpace, block, tile_n, batch) -> Int64:
        """Address of the part of a tile's columns, in block `block` of rows."""
        blocks = space.tiles_m * (self.tile[0] // self.rows)
        columns = self.columns(index)
        first = (batch * blocks + block) * (space.tiles_n * columns) + tile_n * columns
        return self._address(index, space, first)

    def part_of_matrix(self, index: int, space: ReductionSpace, tile_m, tile_n, batch, group):
        """Address of a group's part."""
        return self.part_of_number(
            index, space, self.number_of(space, tile_m, tile_n, batch, group)
        )

    def number_of(self, space: ReductionSpace, tile_m, tile_n, batch, group) -> Int32:
        """Of a group's part among those of all tiles."""
        tile = (batch * space.tiles_m + tile_m) * space.tiles_n + tile_n
        return tile * self.groups + group

    def part_of_number(self, index: int, space: ReductionSpace, number: Int32) -> Int64:
        """The address of such a part."""
        return self._address(index, space, number)

    def _address(self, index, space, first) -> Int64:
        return space.parts + (Int64(self._offsets(index, space)[1]) + first) * _BYTES

    def counter(self, index: int, space: ReductionSpace, block, tile_n, batch) -> tuple:
        """(pointer, arrivals that make it complete) for what a group has a part of."""
        over = self.outputs[index].over
        blocks = space.tiles_m * (self.tile[0] // self.rows)
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

    # Sums of parts -----------------------------------------------------------------------

    @cute.jit
    def complete(
        self,
        index: cutlass.Constexpr,
        mR: cute.Tensor,
        scratch: cute.Pointer,
        space: ReductionSpace,
        place: tuple,
        extents: tuple,
        thread: Int32,
        flag: cute.Pointer,
        barrier_id: Int32,
        parts: Int32 | int = 1,
    ):
        """Counts the group's parts; the last one reduces all parts and writes the output.

        Args:
            scratch: Floats in shared memory, one per warp of the group.
            place: (block of rows, tile column, batch) that the parts belong to.
            flag: An Int32 in shared memory, of this group alone, as the barrier is.
            parts: How many the group has written since it counted any.
        """
        block, tile_n, batch = place
        over = self.outputs[index].over
        cute.arch.barrier(barrier_id=barrier_id, number_of_threads=self.threads)
        if thread == 0:
            counter, arrivals = self.counter(index, space, block, tile_n, batch)
            flag.store(Int32(is_last(counter, arrivals, parts)))
        cute.arch.barrier(barrier_id=barrier_id, number_of_threads=self.threads)
        if flag.load() != 0:
            if const_expr(over == "columns"):
                self._complete_rows(index, mR, space, place, extents, thread)
            elif const_expr(over == "rows"):
                self._complete_columns(index, mR, space, place, extents, thread)
            else:
                self._complete_matrix(index, mR, scratch, space, batch, extents, thread, barrier_id)

    @cute.jit
    def _complete_rows(self, index: cutlass.Constexpr, mR, space, place, extents, thread):
        block, _, batch = place
        first = floats_at(self.part_of_rows(index, space, block, 0, batch))
        pitch = space.tiles_m * self.tile[0]
        for row in cutlass.range(thread, self.rows, self.threads, unroll=1):
            at = block * self.rows + row
            if at < extents[0]:
                self._reduce(
                    index, mR, first + row, pitch, space.tiles_n, at, batch, extents, space
                )

    @cute.jit
    def _complete_columns(self, index: cutlass.Constexpr, mR, space, place, extents, thread):
        _, tile_n, batch = place
        columns = self.columns(index)
        first = floats_at(self.part_of_columns(index, space, 0, tile_n, batch))
        pitch = space.tiles_n * columns
        parts = space.tiles_m * (self.tile[0] // self.rows)
        for column in cutlass.range(thread, columns, self.threads, unroll=1):
            at = self._column(index, tile_n * columns + column, mR.shape[0])
            if at < mR.shape[0]:
                self._reduce(index, mR, first + column, pitch, parts, at, batch, extents, space)

    def _column(self, index: int, place: Int32, columns: Int32) -> Int32:
        """Of what tiles have at a place; those of halves take turns."""
        if self.outputs[index].columns not in self.epilogue.halves:
            return place
        block, half, rest = place // (2 * HALF), place // HALF % 2, place % HALF
        beyond = Int32(place >= columns) * columns
        return half * (columns // 2) + block * HALF + rest + beyond

    @cute.jit
    def _reduce(self, index: cutlass.Constexpr, mR, first, pitch, parts, at, batch, extents, space):
        """One value out of its parts, which are `pitch` apart."""
        kind = self.outputs[index].kind
        value, lost = Float32(identity(kind)), Float32(0)
        for part in cutlass.range(parts, unroll=8):
            value, lost = added(kind, value, lost, (first + part * pitch).load())
        value = with_what_was_lost(kind, value, lost)
        self._store(index, mR, value, at, batch, extents, space)

    @cute.jit
    def _complete_matrix(
        self, index: cutlass.Constexpr, mR, scratch, space, batch, extents, thread, barrier_id
    ):
        output = self.outputs[index]
        parts = space.tiles_m * space.tiles_n * self.groups
        if const_expr(output.over == "all"):
            parts, batch = parts * space.batches, Int32(0)
        first = floats_at(self.part_of_matrix(index, space, 0, 0, batch, 0))
        value, lost = Float32(identity(output.kind)), Float32(0)
        for part in cutlass.range(thread, parts, self.threads, unroll=16):
            value, lost = added(output.kind, value, lost, (first + part).load())
        value = with_what_was_lost(output.kind, value, lost)
        value = self.over_group(output.kind, value, scratch, thread, barrier_id)
        if thread == 0:
            self._store(index, mR, value, Int32(0), batch, extents, space)

    def _store(self, index, mR, value, at, batch, extents, space):
        value = self.epilogue.finished(index, value, (*extents, space.batches))
        mR[at, batch] = self.epilogue.conversions.converted(value, mR.element_type)

    @cute.jit
    def over_group(
        self,
        kind: cutlass.Constexpr,
        value,
        scratch,
        thread,
        barrier_id,
        lanes: cutlass.Constexpr = WHOLE_WARP,
    ):
        """Of a group's threads, in the order of its warps; thread 0 gets it.

        lanes: of a warp, in which values may still differ.
        """
        value = reduced_over_lanes(kind, value, lanes)
        if thread % WARP == 0:
            (scratch + thread // WARP).store(value)
        cute.arch.barrier(barrier_id=barrier_id, number_of_threads=self.threads)
        for warp in cutlass.range_constexpr(1, self.threads // WARP):
            if thread == 0:
                value = combined(kind, value, (scratch + warp).load())
        cute.arch.barrier(barrier_id=barrier_id, number_of_threads=self.threads)
        return value

    # Elements ----------------------------------------------------------------------------

    def gather(self, thread: Thread, bundle: list[dict], first: int, count: int) -> None:
        """Adds some elements of a thread to what it has of its bundle: of each output by the half
        of its row, or by its column."""
        for index, output in enumerate(self.outputs):
            places = self._places(index, thread)[first : first + count]
            if thread.is_whole and output.kind != "sum":
                self._gather_whole(index, thread, bundle[index], places)
                continue
            for half, column in places:
                key = column if output.over == "rows" else half
                found = bundle[index].get(key, Float32(identity(output.kind)))
                bundle[index][key] = self._gathered(index, thread, half, column, found)

    def _gather_whole(self, index: int, thread: Thread, bundle: dict, places: list) -> None:
        """As `gather`, all of the bundle being in the matrix: first among these elements, which do
        not wait for what was found before."""
        output, number = self.outputs[index], self._number(index)
        found: dict = {}
        for half, column in places:
            key = column if output.over == "rows" else half
            value = Float32(self.epilogue.element(number, thread, half, column))
            found[key] = combined(output.kind, found[key], value) if key in found else value
        for key, value in found.items():
            bundle[key] = combined(output.kind, bundle[key], value) if key in bundle else value

    def most(self, thread: Thread) -> int:
        """Elements that a thread has of an output in a bundle, of the one with the most."""
        return max((len(self._places(i, thread)) for i in range(len(self.outputs))), default=0)

    def _places(self, index: int, thread: Thread) -> list[tuple[int, int]]:
        return self.epilogue.places(self._number(index), thread.bundle)

    def _number(self, index: int) -> int:
        """Among all outputs."""
        return len(self.epilogue.full) + len(self.epilogue.per_block) + index

    def _gathered(
        self, index: int, thread: Thread, half: int, column: int, found: Float32
    ) -> Float32:
        """`found` with an element of what is reduced, if that lies in the matrix.

        Rows and columns of which nothing is kept may gather anything.
        """
        output, epilogue, number = self.outputs[index], self.epilogue, self._number(index)
        factors = epilogue.factors(number, thread, half, column)
        if factors is not None and output.kind == "sum":
            if thread.is_whole:
                return cute.math.fma(*factors, found)
            inside = self._inside(output, thread, half, column)
            return _product_added_if(inside, found, *factors)
        value = Float32(epilogue.element(number, thread, half, column))
        if thread.is_whole:
            return combined(output.kind, found, value)
        inside = self._inside(output, thread, half, column)
        return _combined_if(inside, output.kind, found, value)

    def _inside(self, output, thread: Thread, half: int, column: int) -> Boolean:
        in_rows = thread.has_row(half)
        if output.over == "rows":
            return in_rows
        in_columns = thread.is_inside(column, output.lane_columns, output.columns)
        return in_columns if output.over == "columns" else in_rows & in_columns


def _block_modes(tensor: cute.Tensor, output: PerBlock) -> cute.Tensor:
    if output.columns:
        return operand_batch_last(tensor)
    layout = cute.make_layout((*tensor.shape, 1), stride=(*tensor.stride, 0))
    return operand_batch_last(cute.make_tensor(tensor.iterator, layout))


def _value_modes(tensor: cute.Tensor, output: Reduced) -> cute.Tensor:
    modes = "v" if output.over in ("columns", "rows") else ""
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


def added(kind: str, value: Float32, lost: Float32, part: Float32) -> tuple[Float32, Float32]:
    """`value` with one more part, and what sums have lost so far by being rounded (Knuth, The Art
    of Computer Programming, section 4.2.2, theorem B): of thousands of parts that is much."""
    found = combined(kind, value, part)
    if kind != "sum":
        return found, lost
    other = found - value
    return found, lost + ((value - (found - other)) + (part - other))


def with_what_was_lost(kind: str, value: Float32, lost: Float32) -> Float32:
    """Of infinite parts that is no number."""
    if kind != "sum":
        return value
    return select(lost == lost, value + lost, value)


_COMBINED = {"sum": "add.f32", "max": "max.NaN.f32", "min": "min.NaN.f32"}


def _combined_if(inside: Boolean, kind: str, found: Float32, value: Float32) -> Float32:
    return _changed_if(inside, f"{_COMBINED[kind]} {{$w0}}, {{$r0}}, {{$r2}};", found, value)


def _product_added_if(inside: Boolean, found: Float32, a: Float32, b: Float32) -> Float32:
    return _changed_if(inside, "fma.rn.f32 {$w0}, {$r2}, {$r3}, {$r0};", found, a, b)


def _changed_if(inside: Boolean, instruction: str, found: Float32, *values: Float32) -> Float32:
    """`found`, or what one instruction makes of it: choosing between the two takes a second one."""
    return cute.arch.inline_ptx(
        "{ .reg .pred inside; setp.ne.s32 inside, {$r1}, 0; mov.f32 {$w0}, {$r0}; "
        f"@inside {instruction} }}",
        write_only_types=[Float32],
        read_only_args=[found, Int32(inside), *values],
    )


def reduced_over_lanes(kind: str, value: Float32, bits: int) -> Float32:
    """Of the lanes that differ in the given bits; all of them get it."""
    for bit in range(5):
        if bits & (1 << bit):
            other = cute.arch.shuffle_sync_bfly(value, offset=1 << bit)
            value = combined(kind, value, other)
    return value


@cute.jit
def is_last(counter: cute.Pointer, arrivals: Int32, count: Int32 | int = 1) -> Boolean:
    """One thread: counts arrivals of its group, whose writes the threads have done before a
    barrier; True for the last one, which may read what all the others have written."""
    cute.arch.fence_acq_rel_gpu()
    arrived = cute.arch.atomic_add(counter, Int32(count))
    cute.arch.fence_acq_rel_gpu()
    last = arrived == arrivals - count
    if last:
        counter.store(Int32(0))  # for the next launch
    return last


def floats_at(address: Int64) -> cute.Pointer:
    return cute.make_ptr(Float32, address, AddressSpace.gmem, assumed_align=4)

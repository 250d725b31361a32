"""An epilogue of a matrix that lies in memory, for every GPU from Ampere on."""

from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from math import gcd

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import (
    BFloat16,
    Boolean,
    Float32,
    Int32,
    Int64,
    Numeric,
    Uint8,
    Uint16,
    Uint32,
    Uint64,
    const_expr,
)
from cutlass.cute import AddressSpace
from cutlass.memory import SmemAllocator

from ..common.conversion import CONVERTED, Conversions, bfloat16_pair
from ..common.epilogue import LANES, PAIR, Epilogue, Thread, store_per_block
from ..common.modes import operand_batch_last
from ..common.reductions import (
    Reductions,
    ReductionSpace,
    combined,
    floats_at,
    identity,
    reduced_over_lanes,
)
from ..common.work_split import COUNTER_BYTES

WARP = 32
WHOLE_WARP = WARP - 1  # bits in which its lanes differ
WHOLE_BLOCK = 0  # the barrier of all threads
HALVES = 2  # rows of a thread at a time
WIDTH = 32  # columns of a quad at a time, at least
MOST_ELEMENTS = 64  # of a thread at a time, so that nothing spills

_VECTOR = {1: "", 2: ".v2", 4: ".v4"}  # by words
_UNSIGNED = {8: Uint8, 16: Uint16, 32: Uint32, 64: Uint64}


class AsItIs(Epilogue):
    """No epilogue: D is the accumulator."""

    def __init__(self, conversions: Conversions):
        self.conversions = conversions

    def element(self, output: int, thread: Thread, half: int, column: int) -> Numeric:
        return thread.accumulator(half, column)


def moved(column: int, lane_columns: int, merged: int) -> int:
    """Where a column of a quad's first thread lies when `merged` groups of its threads' columns
    have changed places, so that those of each thread are neighbours:

    lane    0    1    2    3    0    1    2    3              0          1          2    ...
          [0 1][2 3][4 5][6 7][8 9] ...             →      [0 1 8 9][2 3 10 11][4 5 12 13] ...
    """
    wide = LANES * merged * lane_columns
    if not wide:
        return column
    block, rest = divmod(column, wide)
    group, own = divmod(rest, LANES * lane_columns)
    return block * wide + group * lane_columns + own


@dataclass
class RowThread(Thread):
    """A thread of a quad that reads its accumulators, and everything else in vectors.

    Attributes:
        width: Columns of the bundle.
        rows_apart: From its first row to the other one.
        merged: See `moved`. What the epilogue asks of columns must not see it.
        conversions: To numbers; None: elements of x are handed out as they are.
    """

    width: int = WIDTH
    rows_apart: int = 8
    merged: int = 1
    conversions: Conversions | None = None

    @property
    def bundle(self) -> int:
        return self.width

    def accumulator(self, half: int, column: int) -> Numeric:
        value = self.operand(len(self.kinds) - 1, half, column)
        return value if self.conversions is None else self.conversions.widened(value)

    def row_of(self, half: int) -> Int32:
        return self.row + self.rows_apart * half

    def column_of(self, column: int, lane_columns: int = PAIR, columns: Fraction = Fraction(1)):
        first, distance = self.place_of(column, lane_columns, columns)
        return first + distance

    def place_of(self, column: int, lane_columns: int, columns: Fraction | None) -> tuple:
        """(a column of the thread's, known at run time; from there to the one asked for)"""
        start, distance = self._start(moved(column, lane_columns, self.merged), columns)
        key = ("first", start, lane_columns, columns)
        if key not in self.memory:
            first = self.lane * (self.merged * lane_columns)
            if columns is not None:
                first += super().column_of(start, 0, columns)
            self.memory[key] = first
        return self.memory[key], distance

    def is_inside(self, column: int, lane_columns: int, columns: Fraction) -> Boolean:
        first, distance = self.place_of(column, lane_columns, columns)
        return self.end_of(column, lane_columns, columns) - first > distance

    def start_of(self, column: int, lane_columns: int, columns: Fraction | None) -> int:
        """Which of the columns that others are at a constant distance from."""
        start, _ = self._start(moved(column, lane_columns, self.merged), columns)
        return start

    def end_of(self, column: int, lane_columns: int, columns: Fraction) -> Int32:
        """Of the matrix, or of the half that a column is of."""
        width = self.extents[1] * columns.numerator // columns.denominator
        if columns not in self.halves:
            return width
        right = self.start_of(column, lane_columns, columns) > 0
        return width if right else width // 2

    def _side_by_side(self, index: int) -> bool:
        return loads_vectors(self.operands[index])

    def _element(self, index, half, column, lane_columns, columns) -> Numeric:
        operand, modes = self.operands[index], self.kinds[index]
        m = n = Int32(0)
        if half is not None:
            m = cutlass.min(self.row_of(half), operand.shape[0] - 1)
        if "n" in modes:
            first, distance = self.place_of(column, lane_columns, columns)
            n = cutlass.min(first + distance, operand.shape[1] - 1)
        return operand[m, n, self.batch]

    def _neighbours(self, index, half, column, lane_columns, columns) -> dict:
        operand = self.operands[index]
        chunk = self.merged * lane_columns
        count = vector_of(chunk, self.vector_bytes, operand.element_type)
        place, chunks = moved(column, lane_columns, self.merged), LANES * chunk
        begin = (
            place % chunks // count * count
        )  # of the vector, in what the thread has side by side
        first, distance = self.place_of(column, lane_columns, columns)
        distance -= place % chunks - begin
        key = (index, half, self.start_of(column, lane_columns, columns), lane_columns, columns)
        if key not in self._first:
            self._first[key] = self._row_from(index, half, first)
        values = _load_inside(*self._first[key], distance, count, operand.element_type)
        block = place // chunks * chunks
        found = {}
        for i, value in enumerate(values):
            group, own = divmod(begin + i, lane_columns)
            at = block + group * LANES * lane_columns + own
            found[index, half, at, lane_columns, columns] = value
        return found

    def _row_from(self, index, half, first) -> tuple:
        """(address of a column's element, elements from there to the end of the row)"""
        operand = self.operands[index]
        m = Int32(0)
        if half is not None:
            m = cutlass.min(self.row_of(half), operand.shape[0] - 1)
        offset = Int64(m) * operand.stride[0] + first + Int64(self.batch) * operand.stride[2]
        address = operand.iterator.toint() + offset * (operand.element_type.width // 8)
        return address, operand.shape[1] - first


class TileSums:
    """The first stage of `Reductions` by all warps of a block, which then has one part of a value.

    reduced over   in registers of a thread                 then
    ------------   --------------------------------------   ----------------------------------
    columns        a row of a turn                          lanes of the row, by shuffles
    rows           its columns, over all turns and steps    lanes by shuffles, then all warps'
                                                            through shared memory, in order
    matrix, all    one number                               the same
    """

    def __init__(self, epilogue: Epilogue, tile: tuple[int, int], threads: int, row_lanes: int):
        self.epilogue = epilogue
        self.outputs = epilogue.reduced
        self.threads = threads
        self.row_lanes = row_lanes
        self.reductions = Reductions(epilogue, tile, rows=tile[0], groups=1, threads=threads)

    def shared(self) -> tuple:
        """Shared memory of each output, (warps, columns of the tile), and a flag."""
        allocator, warps = SmemAllocator(), self.threads // WARP
        memory = []
        for index, output in enumerate(self.outputs):
            columns = self.reductions.columns(index) if output.over == "rows" else 1
            layout = cute.make_layout((warps, columns), stride=(columns, 1))
            memory.append(allocator.allocate_tensor(Float32, layout, byte_alignment=16))
        flag = allocator.allocate_tensor(Int32, cute.make_layout(1), byte_alignment=16)
        return tuple(memory), flag.iterator

    def start(self, width: int) -> tuple:
        """Registers for what is kept over turns."""
        registers = []
        for index, output in enumerate(self.outputs):
            count = len(self._columns(index, width)) if output.over == "rows" else 1
            tensor = cute.make_rmem_tensor(count, Float32)
            tensor.fill(identity(output.kind))
            registers.append(tensor)
        return tuple(registers)

    def _columns(self, index: int, width: int) -> list[int]:
        """Those of a thread that are reduced in a bundle."""
        number = len(self.epilogue.full) + len(self.epilogue.per_block) + index
        return [column for half, column in self.epilogue.places(number, width) if half == 0]

    def after_turn(self, gathered: list, space, place: tuple, row: Int32, lane: Int32) -> None:
        """Leaves what is complete, the rows.

        row: Of the tile, the first of the thread's; with how far the other one is.
        """
        for index, output in enumerate(self.outputs):
            if output.over == "columns":
                first, apart = row
                part = floats_at(self.reductions.part_of_rows(index, space, *place))
                for half in sorted(gathered[index]):
                    value = gathered[index].pop(half)
                    value = reduced_over_lanes(output.kind, value, self.row_lanes - 1)
                    self._keep(part + (first + half * apart), value, lane % self.row_lanes == 0)

    def after_turns(self, gathered: list, registers: tuple, width: int) -> None:
        """Keeps the rest."""
        for index, output in enumerate(self.outputs):
            if output.over == "columns":
                continue
            keys = self._columns(index, width) if output.over == "rows" else None
            for key, value in sorted(gathered[index].items()):
                i = keys.index(key) if keys is not None else 0
                registers[index][i] = combined(output.kind, registers[index][i], value)

    @cute.jit
    def _keep(self, target: cute.Pointer, value: Float32, mine: Boolean):
        if mine:
            target.store(value)

    @cute.jit
    def finish(self, registers, memory, mR, space, place, extents, thread, flag, turn):
        """Leaves the block's parts, and reduces those of others if it comes last.

        turn: Some `RowThread`, which knows where columns are.
        """
        for i in cutlass.range_constexpr(len(mR)):
            self._leave(i, registers[i], memory[i], space, place, thread, turn)
            scratch = memory[i].iterator
            self.reductions.complete(
                *(i, mR[i], scratch, space, place, extents, thread, flag, Int32(WHOLE_BLOCK))
            )

    @cute.jit
    def _leave(self, index: cutlass.Constexpr, registers, memory, space, place, thread, turn):
        output, reductions = self.outputs[index], self.reductions
        if const_expr(output.over == "rows"):
            self._share(index, registers, memory, place, thread, turn)
            cute.arch.sync_threads()
            part = floats_at(reductions.part_of_columns(index, space, *place))
            for i in cutlass.range(thread, memory.shape[1], self.threads, unroll=1):
                value = memory[0, i]
                for warp in cutlass.range_constexpr(1, memory.shape[0]):
                    value = combined(output.kind, value, memory[warp, i])
                (part + i).store(value)
        elif const_expr(output.over != "columns"):
            value = reductions.over_group(
                output.kind, registers[0], memory.iterator, thread, Int32(WHOLE_BLOCK)
            )
            part = floats_at(reductions.part_of_matrix(index, space, *place, 0))
            if thread == 0:
                part.store(value)

    def _share(self, index, registers, memory, place, thread, turn) -> None:
        """A warp's columns into shared memory, in the order in which they are looked at."""
        output, width = self.outputs[index], turn.bundle
        lane, warp = thread % WARP, thread // WARP
        quad = lane % self.row_lanes // LANES
        own = int(width * output.columns)  # of a quad
        merged, lane_columns = turn.merged, output.lane_columns
        for i, column in enumerate(self._columns(index, width)):
            value = reduced_over_lanes(output.kind, registers[i], WARP - self.row_lanes)
            at = quad * own + turn.lane * (merged * lane_columns)
            at += moved(column, lane_columns, merged)
            self._keep(
                memory.iterator + (warp * memory.shape[1] + at), value, lane < self.row_lanes
            )


class Elementwise:
    """out = epilogue(x), an element at a time or a bundle of columns.

    All threads play the same roles; a block has a tile of rows and columns:

    role      does                                                         waits on
    --------  -----------------------------------------------------------  ------------------
    read      x and what the epilogue reads, of `turns` × 2 rows at once,  nothing
              in vectors of up to 16 bytes
    compute   the elements of each output, and parts of what is reduced    what it has read;
                                                                           lanes of the quad
    write     vectors of up to 16 bytes, from registers                    nothing
    reduce    behind the last of `steps` times that; see `TileSums`        all warps

    Four neighbouring threads, a quad, have a bundle of columns, `columns` / bundle quads a row,
    so that a warp has 32 · 8 columns of a row or more rows. What the epilogue asks of a quad is
    there: see `Epilogue`. Where it does not ask which column is where within 8 · `merged` columns,
    those of a thread are neighbours.

    No shared memory, but for reductions over rows and of the whole matrix. Without `stores_out`
    the first output is neither computed nor written.

    x (M, N), out and whatever else: any strides, modes of x of stride 0, or the same with a leading
    batch mode; sizes known at run time. What has a static stride of 1 along columns is moved in
    vectors: then all of that has addresses, other strides and rows of multiples of `vector_bytes`.
    Elements of 64 bits and bool are read one by one.
    """

    def __init__(
        self,
        threads: int,
        columns: int,
        turns: int = 1,
        steps: int = 1,
        *,
        merged: int = 1,
        vector_bytes: int = 1,
        epilogue: Epilogue | None = None,
        stores_out: bool = True,
        dependent_launch: bool = False,
    ):
        self.threads = threads
        self.columns = columns
        self.turns = turns
        self.steps = steps
        self.merged = merged
        self.vector_bytes = vector_bytes
        self.epilogue = epilogue or AsItIs(Conversions())
        self.stores_out = stores_out
        self.dependent_launch = dependent_launch
        self.plain = isinstance(self.epilogue, AsItIs)
        self.bundle = bundle_columns(self.epilogue.bundle, self.epilogue.spans_row, columns)
        self._check()
        self.row_quads = columns // self.bundle
        self.rows_apart = threads // LANES // self.row_quads
        self.step_rows = turns * HALVES * self.rows_apart
        self.tile = (steps * self.step_rows, columns)
        self.sums = TileSums(self.epilogue, self.tile, threads, LANES * self.row_quads)

    def _check(self) -> None:
        quads = self.columns // self.bundle
        if self.threads % WARP or self.turns < 1 or self.steps < 1:
            raise ValueError(f"{self.threads} threads, {self.turns} turns, {self.steps} steps")
        if self.columns % self.bundle or quads & (quads - 1) or quads > WARP // LANES:
            raise ValueError(
                f"{self.columns} columns are {quads} bundles of {self.bundle}; a warp has 1, 2, 4 "
                f"or 8"
            )
        if self.bundle // LANES * HALVES * self.turns > MOST_ELEMENTS:
            raise ValueError(
                f"a bundle of {self.bundle} columns, {self.turns} turns: more than {MOST_ELEMENTS} "
                f"elements of a thread"
            )
        if self.merged not in (1, 2, 4):
            raise ValueError(f"1, 2 or 4 groups of columns are merged, not {self.merged}")

    @cute.jit
    def __call__(self, mX: cute.Tensor, mOut: cute.Tensor, stream: cuda.CUstream):
        self.launch(mX, mOut, (), Int64(0), stream)

    @cute.jit
    def with_operands(
        self,
        mX: cute.Tensor,
        mOut: cute.Tensor,
        operands,
        workspace: Int64,
        stream: cuda.CUstream,
    ):
        """operands: a tuple of what the epilogue reads, and its outputs beside out; workspace: an
        address, used if anything is reduced."""
        self.launch(mX, mOut, operands, workspace, stream)

    @cute.jit
    def launch(self, mX, mOut, operands, workspace, stream):
        copies = self.plain and mX.element_type is mOut.element_type
        self.conversions = None if copies else self.epilogue.conversions
        if const_expr(copies):
            mX, mOut = _as_bits(mX), _as_bits(mOut)
        elif const_expr(mX.element_type is Boolean):
            mX = _as_bits(mX)
        read = len(self.epilogue.kinds)
        written = read + len(self.epilogue.full) - 1
        mX = operand_batch_last(mX)
        mD = (mOut, *operands[read:written])
        mD = tuple(operand_batch_last(output) for output in mD)
        self.output_types = tuple(output.element_type for output in mD)
        mR = self.sums.reductions.output_modes(operands[written:])
        operands = (*self.epilogue.operand_modes(operands[:read]), mX)
        tiles_m, tiles_n = (cute.ceil_div(mX.shape[i], self.tile[i]) for i in (0, 1))
        batches = mX.shape[2]
        space = None
        if const_expr(len(self.epilogue.reduced) > 0):
            parts = workspace + COUNTER_BYTES
            space = ReductionSpace(tiles_m, tiles_n, batches, workspace, parts)
        self.kernel(mD, operands, mR, space).launch(
            grid=(tiles_m * tiles_n * batches, 1, 1),
            block=(self.threads, 1, 1),
            min_blocks_per_mp=1,
            stream=stream,
            use_pdl=self.dependent_launch,
        )

    @cute.kernel
    def kernel(self, mD, operands, mR, space):
        thread, _, _ = cute.arch.thread_idx()
        extents = operands[-1].shape[:2]
        place = self._place(extents)
        sums = self.sums.start(self.bundle)
        if const_expr(self.dependent_launch):
            cute.arch.griddepcontrol_wait()
            cute.arch.griddepcontrol_launch_dependents()
        if const_expr(self.steps == 1):
            self._step(Int32(0), mD, operands, mR, sums, space, place, extents, thread)
        else:
            left = cute.ceil_div(extents[0] - place[0] * self.tile[0], self.step_rows)
            for step in cutlass.range(cutlass.min(left, self.steps), unroll=1):
                self._step(step, mD, operands, mR, sums, space, place, extents, thread)
        if const_expr(len(self.epilogue.reduced) > 0):
            memory, flag = self.sums.shared()
            mR = mR[len(self.epilogue.per_block) :]
            turn = self._turn(operands, Int32(0), place, extents, thread, {})
            self.sums.finish(sums, memory, mR, space, place, extents, thread, flag, turn)

    def _place(self, extents: tuple) -> tuple:
        """(tile row, tile column, batch) of this block: those of a row follow each other."""
        block, _, _ = cute.arch.block_idx()
        tiles_m, tiles_n = (cute.ceil_div(extents[i], self.tile[i]) for i in (0, 1))
        rest = block // tiles_n
        return rest % tiles_m, block % tiles_n, rest // tiles_m

    def _step(self, step, mD, operands, mR, sums, space, place, extents, thread) -> None:
        """`turns` rows of each half: all is on its way before the first is computed."""
        of_columns: dict = {}
        gathered: list = [{} for _ in self.epilogue.reduced]
        turns = [
            self._turn(operands, step * self.turns + i, place, extents, thread, of_columns)
            for i in range(self.turns)
        ]
        for turn in turns:
            for half, column in self.epilogue_places(PAIR):
                turn.operand(len(turn.kinds) - 1, half, column)
        for turn in turns:
            self.epilogue.fetch(turn, self.bundle)
        for turn in turns:
            fragments = self._made(turn, gathered)
            for j, fragment in enumerate(fragments):
                if fragment is not None:
                    self._write(j, fragment, mD[j], turn)
            store_per_block(self.epilogue, turn, mR[: len(self.epilogue.per_block)], self.bundle)
            row = turn.row - place[0] * self.tile[0], self.rows_apart
            self.sums.after_turn(gathered, space, place, row, thread % WARP)
        self.sums.after_turns(gathered, sums, self.bundle)

    def epilogue_places(self, lane_columns: int, columns: Fraction = Fraction(1)) -> list:
        """(half, column) of a thread's elements in a bundle, neighbours behind each other."""
        width = int(self.bundle * columns)
        of_row = [
            first + i
            for first in range(0, width, LANES * lane_columns)
            for i in range(lane_columns)
        ]
        of_row.sort(key=partial(moved, lane_columns=lane_columns, merged=self.merged))
        return [(half, column) for half in range(HALVES) for column in of_row]

    def _turn(self, operands, turn, place, extents, thread, of_columns) -> RowThread:
        """The elements of this thread in a bundle."""
        quad = thread // LANES
        row = place[0] * self.tile[0] + quad // self.row_quads
        return RowThread(
            accumulators=None,
            kinds=(*self.epilogue.kinds, "lmn"),
            operands=operands,
            row=row + turn * (HALVES * self.rows_apart),
            first_column=place[1] * self.columns + quad % self.row_quads * self.bundle,
            lane=thread % LANES,
            batch=place[2],
            extents=extents,
            halves=self.epilogue.halves,
            vector_bytes=self.vector_bytes,
            of_columns=of_columns,
            width=self.bundle,
            rows_apart=self.rows_apart,
            merged=self.merged,
            conversions=self.conversions,
        )

    def _made(self, turn: RowThread, gathered: list) -> list:
        """The elements of each output in registers, some of all at a time; None of an out that is
        not stored."""
        places: list = []
        fragments: list = []
        for full, element_type in zip(self.epilogue.full, self.output_types, strict=True):
            if not (self.stores_out or places):
                places.append([])
                fragments.append(None)
                continue
            places.append(self.epilogue_places(full.lane_columns, full.columns))
            fragments.append(cute.make_rmem_tensor(len(places[-1]), element_type))
        reductions = self.sums.reductions
        most = max(*map(len, places), reductions.most(turn))
        for first in range(0, most, CONVERTED):
            for j, fragment in enumerate(fragments):
                some = places[j][first : first + CONVERTED]
                elements = [self.epilogue.element(j, turn, *place) for place in some]
                if elements:
                    layout = cute.make_layout(len(elements))
                    target = cute.make_tensor(fragment.iterator + first, layout)
                    self.epilogue.conversions.put(elements, target)
            reductions.gather(turn, gathered, first, CONVERTED)
        return fragments

    def _write(self, j: int, fragment, mD: cute.Tensor, turn: RowThread) -> None:
        """An output, within its bounds."""
        full, element_type = self.epilogue.full[j], mD.element_type
        beside = is_one(mD.stride[1])
        chunk = self.merged * full.lane_columns
        count = vector_of(chunk, self.vector_bytes, element_type) if beside else 1
        written = self.epilogue_places(full.lane_columns, full.columns)
        rows: dict = {}
        for i in range(0, len(written), count):
            half, column = written[i]
            place = (column, full.lane_columns, full.columns)
            first, distance = turn.place_of(*place)
            key = (half, turn.start_of(*place))
            if key not in rows:
                rows[key] = self._row_of(mD, turn, half, first, turn.end_of(*place))
            address, left, pitch = rows[key]
            at = distance * (element_type.width // 8) if beside else distance * pitch
            words = _words_of(fragment, i, count)
            bits = min(32, count * element_type.width)
            _store_inside(address + at, left, distance + count - 1, words, bits)

    def _row_of(self, mD, turn, half, first, end) -> tuple:
        """(address of a column's element; elements from there to `end`, none behind the last row;
        bytes from one column to the next)"""
        row, bytes_ = turn.row_of(half), mD.element_type.width // 8
        offset = Int64(row) * mD.stride[0] + Int64(turn.batch) * mD.stride[2]
        pitch = Int64(mD.stride[1]) * bytes_
        address = mD.iterator.toint() + offset * bytes_ + Int64(first) * pitch
        return address, (end - first) * Int32(row < mD.shape[0]), pitch


def bundle_columns(needed: int, spans_row: bool, columns: int) -> int:
    """Columns that a quad has of a tile with so many."""
    if spans_row:
        return columns
    return needed * WIDTH // gcd(needed, WIDTH)


# Vectors ---------------------------------------------------------------------------------


def is_one(stride) -> bool:
    """Known to be, while the kernel is traced."""
    return isinstance(stride, int) and stride == 1


def loads_vectors(operand: cute.Tensor) -> bool:
    """Whether its columns are neighbours, of which one instruction may load several."""
    element_type = operand.element_type
    return is_one(operand.stride[1]) and element_type is not Boolean and element_type.width <= 32


def vector_of(chunk: int, vector_bytes: int, element_type: type[Numeric]) -> int:
    """Elements of a thread's neighbours that are moved at once."""
    return gcd(chunk, max(1, vector_bytes * 8 // element_type.width))


def _as_bits(tensor: cute.Tensor) -> cute.Tensor:
    """Numbers as what they are in memory."""
    width = max(8, tensor.element_type.width)
    pointer = cute.make_ptr(
        _UNSIGNED[width], tensor.iterator.toint(), AddressSpace.gmem, assumed_align=width // 8
    )
    return cute.make_tensor(pointer, tensor.layout)


def _braced(names: list[str]) -> str:
    return f"{{{', '.join(names)}}}" if len(names) > 1 else names[0]


def _load_inside(first: Int64, left: Int32, column: int, count: int, element_type) -> list:
    """`count` elements of a row from `column` on, in one load; zeros if fewer are left."""
    bits = count * element_type.width
    word = Uint32 if bits >= 32 else Uint16  # nothing holds less
    words = max(1, bits // 32)
    names = [f"{{$w{i}}}" for i in range(words)]
    zeros = " ".join(f"mov.b{word.width} {name}, 0;" for name in names)
    loaded = cute.arch.inline_ptx(
        f"{{ .reg .pred inside; setp.gt.s32 inside, {{$r1}}, {column + count - 1}; {zeros} "
        f"@inside ld.global.nc{_VECTOR[words]}.b{min(bits, 32)} {_braced(names)}, "
        f"[{{$r0}} + {column * element_type.width // 8}]; }}",
        write_only_types=[word] * words,
        read_only_args=[first, left],
    )
    loaded = loaded if words > 1 else (loaded,)
    return [value for one in loaded for value in _elements(one, count // words, element_type)]


def _elements(word: Uint32 | Uint16, count: int, element_type) -> list:
    """Of a word."""
    width = element_type.width
    if width == 32:
        return [word.bitcast(element_type)]
    if element_type is BFloat16 and count == 2:
        return list(bfloat16_pair(word))
    unsigned = _UNSIGNED[width]
    parts = [unsigned(word >> type(word)(i * width) if i else word) for i in range(count)]
    return [part if element_type is unsigned else part.bitcast(element_type) for part in parts]


def _words_of(fragment: cute.Tensor, first: int, count: int) -> list:
    """Elements in registers as the words that are stored."""
    width = fragment.element_type.width
    if count * width >= 32:
        words = cute.recast_tensor(fragment, Uint32)
        return [words[first * width // 32 + i] for i in range(count * width // 32)]
    if count > 1:
        pair = [Uint16(fragment[first + i].bitcast(Uint8)) for i in range(count)]
        return [pair[0] | (pair[1] << Uint16(8))]
    value = fragment[first].bitcast(_UNSIGNED[width])
    return [Uint16(value) if width == 8 else value]


def _store_inside(address: Int64, left: Int32, last: int, words: list, bits: int) -> None:
    """Words of so many bits, if more elements than `last` are left."""
    names = [f"{{$r{i + 2}}}" for i in range(len(words))]
    cute.arch.inline_ptx(
        f"{{ .reg .pred inside; setp.gt.s32 inside, {{$r1}}, {last}; @inside "
        f"st.global{_VECTOR[len(words)]}.b{bits} [{{$r0}}], {_braced(names)}; }}",
        read_only_args=[address, left, *words],
    )

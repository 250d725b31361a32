"""An epilogue of a matrix that lies in memory, for every GPU from Ampere on."""

from fractions import Fraction
from functools import partial
from math import gcd

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import (
    Boolean,
    Int32,
    Int64,
    Numeric,
    const_expr,
)

from ..common.conversion import CONVERTED, Conversions
from ..common.epilogue import LANES, PAIR, Epilogue, Thread, store_per_block
from ..common.modes import operand_batch_last
from ..common.reductions import (
    ReductionSpace,
)
from ..common.threads import WARP
from ..common.work_split import COUNTER_BYTES
from .row_thread import WIDTH, RowThread, moved
from .row_vectors import as_bits, is_one, store_inside, vector_of, words_of
from .tile_sums import HALVES, TileSums

WHOLE_WARP = WARP - 1  # bits in which its lanes differ
MOST_ELEMENTS = 64  # of a thread at a time, so that nothing spills


class AsItIs(Epilogue):
    """No epilogue: D is the accumulator."""

    def __init__(self, conversions: Conversions):
        self.conversions = conversions

    def element(self, output: int, thread: Thread, half: int, column: int) -> Numeric:
        return thread.accumulator(half, column)


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

    With `whole_rows` a block goes along its rows instead, `turns` × `columns` columns at a time, of
    2 rows of a thread: then no other block has a part of what is reduced over columns.

    Four neighbouring threads, a quad, have a bundle of columns, `columns` / bundle quads a row,
    so that a warp has 32 · 8 columns of a row or more rows; whole rows may be of several warps.
    What the epilogue asks of a quad is there: see `Epilogue`. Where it does not ask which column is
    where within 8 · `merged` columns, those of a thread are neighbours.

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
        whole_rows: bool = False,
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
        self.whole_rows = whole_rows
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
        across, along = (1, turns) if whole_rows else (turns, 1)
        self.step_rows = across * HALVES * self.rows_apart
        self.tile = (steps * self.step_rows, along * columns)
        self.sums = TileSums(self.epilogue, self.tile, threads, LANES * self.row_quads, whole_rows)

    def _check(self) -> None:
        quads = self.columns // self.bundle
        if self.threads % WARP or self.turns < 1 or self.steps < 1:
            raise ValueError(f"{self.threads} threads, {self.turns} turns, {self.steps} steps")
        most = (self.threads if self.whole_rows else WARP) // LANES
        if self.columns % self.bundle or quads & (quads - 1) or quads > most:
            raise ValueError(
                f"{self.columns} columns are {quads} bundles of {self.bundle}; expected a power of "
                f"two, {most} at most"
            )
        if self.bundle // LANES * HALVES * self.turns > MOST_ELEMENTS:
            raise ValueError(
                f"a bundle of {self.bundle} columns, {self.turns} turns: more than {MOST_ELEMENTS} "
                f"elements of a thread"
            )
        if self.merged not in (1, 2, 4):
            raise ValueError(f"1, 2 or 4 groups of columns are merged, not {self.merged}")
        if self.whole_rows and self.steps > 1:
            raise ValueError(f"{self.steps} steps of whole rows: a block takes rows once")

    @cute.jit
    def __call__(self, mX: cute.Tensor, mOut: cute.Tensor, stream: cuda.CUstream):
        self.with_operands(mX, mOut, (), Int64(0), stream)

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
        copies = self.plain and mX.element_type is mOut.element_type
        self.conversions = None if copies else self.epilogue.conversions
        if const_expr(copies):
            mX, mOut = as_bits(mX), as_bits(mOut)
        elif const_expr(mX.element_type is Boolean):
            mX = as_bits(mX)
        read = len(self.epilogue.kinds)
        written = read + len(self.epilogue.full) - 1
        mX = operand_batch_last(mX)
        mD = (mOut, *operands[read:written])
        mD = tuple(operand_batch_last(output) for output in mD)
        self.output_types = tuple(output.element_type for output in mD)
        mR = self.sums.reductions.output_modes(operands[written:])
        operands = (*self.epilogue.operand_modes(operands[:read]), mX)
        tiles_m, tiles_n = self._tiles(mX.shape[:2])
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
        if const_expr(self.whole_rows):
            row, _, batch = place
            for tile_n in cutlass.range(cute.ceil_div(extents[1], self.tile[1]), unroll=1):
                there = (row, tile_n, batch)
                self._step(Int32(0), mD, operands, mR, sums, space, there, extents, thread)
        elif const_expr(self.steps == 1):
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

    def _tiles(self, extents: tuple) -> tuple:
        """Blocks along rows and columns."""
        tiles_m = cute.ceil_div(extents[0], self.tile[0])
        return tiles_m, Int32(1) if self.whole_rows else cute.ceil_div(extents[1], self.tile[1])

    def _place(self, extents: tuple) -> tuple:
        """(tile row, tile column, batch) of this block: those of a row follow each other."""
        block, _, _ = cute.arch.block_idx()
        tiles_m, tiles_n = self._tiles(extents)
        rest = block // tiles_n
        return rest % tiles_m, block % tiles_n, rest // tiles_m

    def _step(self, step, mD, operands, mR, sums, space, place, extents, thread) -> None:
        """All turns: everything is on its way before the first is computed."""
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
            self.sums.after_turn(gathered, sums, space, place, row, thread % WARP)
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
        column = place[1] * self.tile[1] + quad % self.row_quads * self.bundle
        if self.whole_rows:
            column, of_columns = column + turn * self.columns, {}
        else:
            row += turn * (HALVES * self.rows_apart)
        return RowThread(
            accumulators=None,
            kinds=(*self.epilogue.kinds, "lmn"),
            operands=operands,
            row=row,
            first_column=column,
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
            words = words_of(fragment, i, count)
            bits = min(32, count * element_type.width)
            store_inside(address + at, left, distance + count - 1, words, bits)

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

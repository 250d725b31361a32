"""Output tiles of a fused epilogue on their way from mma.sync's accumulators to global memory."""

from math import lcm

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Numeric, Uint8, Uint16, const_expr
from cutlass.cute import AddressSpace

from ..common.conversion import CONVERTED
from ..common.epilogue import HALF, Epilogue, Thread, places, store_per_block
from ..common.output_tile import OutputTile
from ..common.threads import WARP
from .reduced_output import ReducedOutput

ROWS = 16  # of a warp at a time, as of an mma.sync
WIDTH = 32  # columns that a warp writes at most at once


class Subtile(OutputTile):
    """Rows and columns that a warp writes at once."""

    def __init__(
        self, element_type: type[Numeric], columns: int, unit_mode: int, vector_bytes: int
    ):
        bytes_ = ROWS * columns * element_type.width // 8
        super().__init__(
            element_type,
            (ROWS, columns),
            unit_mode,
            granule=1,
            budget_bytes=2 * bytes_,
            threads=WARP,
            vector_bytes=min(vector_bytes, bytes_ // WARP),  # no thread is idle
        )
        self.columns = columns
        # Rows begin on vector boundaries, also those of 8-bit elements.
        self.pitch = self.grid.along + max(self.pitch - self.grid.along, 128 // element_type.width)

    def _load_vector(self, source: cute.Pointer) -> list:
        if self.grid.vector * self.element_type.width > 8:
            return super()._load_vector(source)
        byte = cute.make_ptr(Uint8, source.toint(), AddressSpace.smem, assumed_align=1)
        return [Uint16(byte.load())]

    def _store_vector(self, words: list, target: cute.Pointer, inside) -> None:
        if self.grid.vector * self.element_type.width > 8:
            super()._store_vector(words, target, inside)
            return
        cute.arch.inline_ptx(
            "st.global.b8 [{$r0}], {$r1};",
            read_only_args=[target.toint(), words[0]],
            predicate=inside,
        )


class WarpOutput:
    """How each warp writes what the epilogue makes of its accumulators.

    A warp has blocks of 16 rows, as many warps apart as lie along M, and columns side by side. It
    goes through its columns bundle by bundle, in each of them through its rows; of every bundle it
    makes each full output in registers, puts it into a piece of shared memory of its own, subtile
    by subtile, and writes that in whole vectors. No warp waits for another before all are done
    and what is reduced is added up (`ReducedOutput`).

    Attributes:
        bytes: Of shared memory: a subtile of each warp, then what is reduced.
    """

    def __init__(
        self,
        element_types: tuple[type[Numeric], ...],
        unit_modes: tuple[int, ...],
        epilogue: Epilogue,
        *,
        tile: tuple[int, int],
        warps: tuple[int, int],
        vector_bytes: int,
        reduced: type[ReducedOutput] = ReducedOutput,
    ):
        self.element_types = element_types
        self.epilogue = epilogue
        self.tile = tile
        self.warps = warps
        self.vector_bytes = vector_bytes
        self.columns = tile[1] // warps[1]  # of a warp
        self.row_blocks = tile[0] // (ROWS * warps[0])
        self.bundle = bundle_columns(epilogue.bundle, self.columns)
        if epilogue.spans_row:
            self.bundle = self.columns
        if self.columns % self.bundle:
            raise ValueError(
                f"{self.columns} columns of a warp are no multiple of a bundle of {self.bundle}"
            )
        if len(element_types) != len(epilogue.full):
            raise ValueError(f"{len(element_types)} outputs for {len(epilogue.full)} to write")
        self.widths = tuple(int(self.bundle * full.columns) for full in epilogue.full)
        self.subtiles = tuple(
            Subtile(element_type, min(WIDTH, width), unit_mode, vector_bytes)
            for element_type, width, unit_mode in zip(
                element_types, self.widths, unit_modes, strict=True
            )
        )
        self.warp_bytes = -(-max(subtile.bytes for subtile in self.subtiles) // 16) * 16
        staged = self.warp_bytes * warps[0] * warps[1]
        self.reduced = reduced(epilogue, tile, warps, first_byte=staged)
        self.bytes = staged + self.reduced.bytes

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
        thread: Int32,
        flag: cute.Pointer,
    ):
        """A block's tile.

        Args:
            accumulators: ((2, 2), rows of 16, columns of 8) of a thread.
            memory: Of `bytes`, which nobody writes any more.
            mD: The full outputs, each in the parts that `parts_of` makes.
            mR: The outputs per block of columns and the reduced ones; space: in memory, for these.
            place: First row and column of the tile, and its batch.
            extents: (M, N) of the accumulators.
            flag: An Int32 in shared memory.
        """
        blocks = mR[: len(self.epilogue.per_block)]
        mR = mR[len(self.epilogue.per_block) :]
        warp, lane = thread // WARP, thread % WARP
        staging = memory.toint() + warp * self.warp_bytes
        sums = self.reduced.start(self.row_blocks)
        cute.arch.sync_threads()  # operands have been read
        of_rows: list = [{} for _ in range(self.row_blocks)]
        for bundle in cutlass.range_constexpr(self.columns // self.bundle):
            of_columns: dict = {}
            gathered: list = [{} for _ in self.epilogue.reduced]
            for row_block in cutlass.range_constexpr(self.row_blocks):
                elements = self._elements(
                    accumulators, operands, row_block, bundle, place, extents, warp, lane
                )
                elements.of_columns, elements.of_rows = of_columns, of_rows[row_block]
                self.epilogue.fetch(elements, self.bundle)
                fragments = self._made(elements, gathered)
                store_per_block(self.epilogue, elements, blocks, self.bundle)
                self.reduced.over_columns(gathered, sums, row_block)
                row = elements.row - lane // 4
                for j in cutlass.range_constexpr(len(self.subtiles)):
                    for k in cutlass.range_constexpr(len(fragments[j])):
                        self._put(j, fragments[j][k], staging, lane)
                        cute.arch.sync_warp()
                        self._store(j, k, staging, mD[j], row, elements, lane)
                        cute.arch.sync_warp()
            self.reduced.over_rows(gathered, memory, bundle, self.bundle, warp, lane)
        if const_expr(len(mR) > 0):
            self.reduced.finish(sums, memory, mR, space, place, extents, thread, flag)

    def _elements(self, accumulators, operands, row_block, bundle, place, extents, warp, lane):
        """Those of this thread in a bundle."""
        warps_m, _ = self.warps
        pitch = accumulators.stride[2]  # from 8 columns to the next
        first = accumulators.stride[1] * row_block + pitch * (bundle * self.bundle // 8)
        own = cute.make_layout((4, self.bundle // 8), stride=(1, pitch))
        return Thread(
            accumulators=cute.make_tensor(accumulators.iterator + first, own),
            kinds=self.epilogue.kinds,
            operands=operands,
            row=place[0] + (row_block * warps_m + warp % warps_m) * ROWS + lane // 4,
            first_column=place[1] + warp // warps_m * self.columns + bundle * self.bundle,
            lane=lane % 4,
            batch=place[2],
            extents=extents,
            halves=self.epilogue.halves,
            vector_bytes=self.vector_bytes,
        )

    def _made(self, thread: Thread, gathered: list) -> list:
        """The elements of a bundle, in registers: for each output its subtiles."""
        fragments = [
            [
                cute.make_rmem_tensor(ROWS * subtile.columns // WARP, element_type)
                for _ in range(width // subtile.columns)
            ]
            for subtile, width, element_type in zip(
                self.subtiles, self.widths, self.element_types, strict=True
            )
        ]
        reductions = self.reduced.reductions
        sizes = [cute.size(subtiles[0]) for subtiles in fragments]
        for first in range(0, max(*sizes, reductions.most(thread)), CONVERTED):
            for j, subtiles in enumerate(fragments):
                for k, fragment in enumerate(subtiles):
                    if first < cute.size(fragment):
                        self._make(j, k, first, fragment, thread)
            reductions.gather(thread, gathered, first, CONVERTED)
        return fragments

    def _make(self, j, k, first, fragment, thread):
        """Some elements of a subtile."""
        columns, lane_columns = self.subtiles[j].columns, self.epilogue.full[j].lane_columns
        elements = [
            self.epilogue.element(j, thread, half, k * columns + column)
            for half, column in places(columns, lane_columns)[first : first + CONVERTED]
        ]
        target = cute.make_tensor(fragment.iterator + first, cute.make_layout(len(elements)))
        self.epilogue.conversions.put(elements, target)

    def _put(self, j, fragment, staging, lane):
        """A subtile into shared memory, neighbours of a row at once where they stay neighbours."""
        subtile, element_type = self.subtiles[j], self.element_types[j]
        neighbours = lane_columns = self.epilogue.full[j].lane_columns
        down, right = subtile.pitch, 1
        if subtile.unit_mode == 0:
            neighbours, down, right = 1, 1, subtile.pitch
        bytes_ = element_type.width // 8
        base = staging + (lane // 4 * down + lane % 4 * lane_columns * right) * bytes_
        written = places(subtile.columns, lane_columns)
        for i in range(0, len(written), neighbours):
            half, column = written[i]
            target = cute.make_ptr(
                element_type,
                base + (8 * half * down + column * right) * bytes_,
                AddressSpace.smem,
                assumed_align=min(16, neighbours * bytes_),
            )
            layout = cute.make_layout(neighbours)
            source = cute.make_tensor(fragment.iterator + i, layout)
            cute.autovec_copy(source, cute.make_tensor(target, layout))

    def _store(self, j, k, staging, parts, row, elements, lane):
        """A subtile from shared memory, within the bounds of the output."""
        subtile, columns = self.subtiles[j], self.epilogue.full[j].columns
        source = cute.make_ptr(self.element_types[j], staging, AddressSpace.smem, assumed_align=16)
        first = elements.first_column * columns.numerator // columns.denominator
        part, distance = 0, k * subtile.columns
        if len(parts) > 1:
            part, distance = k % 2, k // 2 * HALF
            first = first // 2
        sD = cute.make_tensor(source, subtile.layout())
        subtile.store(sD, parts[part], (row, first + distance), elements.batch, 0, lane)

    def parts_of(self, mD: tuple) -> tuple:
        """The full outputs (M, N, L), those whose halves take turns as a left and a right one."""
        return tuple(
            _halves(output) if full.columns in self.epilogue.halves else (output,)
            for output, full in zip(mD, self.epilogue.full, strict=True)
        )


def bundle_columns(needed: int, columns: int) -> int:
    """Columns of accumulators that a warp with so many hands out at once."""
    return lcm(needed, min(WIDTH, columns))


def _halves(mD: cute.Tensor) -> tuple[cute.Tensor, cute.Tensor]:
    M, N, L = mD.shape
    layout = cute.make_layout((M, N // 2, L), stride=mD.stride)
    right = mD.iterator + Int64(N // 2) * mD.stride[1]
    return cute.make_tensor(mD.iterator, layout), cute.make_tensor(right, layout)

"""Dense matrix product for every GPU from Ampere on."""

from copy import copy
from dataclasses import dataclass
from fractions import Fraction

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import CopyUniversalOp, warp
from cutlass.memory import SmemAllocator

from ..common.epilogue import HALF, Epilogue, Finish
from ..common.modes import gemm_modes, operand_batch_last
from ..common.operand_tiles import OperandTiles, TileSource
from ..common.output_tile import OutputTile
from ..common.reductions import ReductionSpace
from ..common.threads import WARP, WHOLE_BLOCK
from ..common.work_split import COUNTER_BYTES, EvenSplit, PartialSums
from .mma import MMA_N, check_types, mma_k, mma_operation
from .output import WarpOutput
from .reduced_output import ReducedOutput
from .sliced_output import SlicedOutput

WARP_M, WARP_N = 16, 16  # what a warp multiplies at once: one mma.sync along M, two along N
PLACE = 4  # integers: where a block's tile is, then a flag
MAXIMUM_ACCUMULATORS = 128  # per thread, so that nothing spills
MAXIMUM_ACCUMULATORS_BESIDE = 64  # operands on their way through registers, or sums of others
MINIMUM_K_BLOCKS = 2  # one to multiply while the next one is read


class Gemm:
    """D = epilogue(A · B) with cp.async, ldmatrix and mma.sync.

    All warps, `warps` (along M, along N) of them on one tile of D, play the same four roles:

    role      does                                                         waits on
    --------  -----------------------------------------------------------  -----------------------
    produce   cp.async of a tile of A and one of B, `stages` - 1 ahead     stage read by all warps
    read      ldmatrix of a block of K (32 bytes), one block ahead         stage written by all
    multiply  mma.sync; rounds tf32 operands, which it would truncate      own registers
    epilogue  accumulators → elements → shared memory → vectors of D:      last stage read by all
              all warps a slice of the tile at a time; or, if it is more
              than one number for every accumulator, each warp what it
              has of the tile (`WarpOutput`)

    One barrier per tile along K says both that the next stage is written and that the last one
    is read. Vectors of 1 or 2 bytes are too short for cp.async and go through registers instead.

    Shared memory: `stages` × A, then `stages` × B, swizzled; the epilogue reuses it for parts of
    D; behind it the place of the tile and a flag. See `shared_memory_bytes`.
    Registers per thread: tile M · N / threads accumulators, two blocks of fragments, addresses;
    128 accumulators are the most that never spills.

    split_k: None, a block computes a tile of D. A number: K is cut into so many parts, a block
             computes one of them for a tile. The last block to arrive adds up the parts in a
             fixed order, through a workspace (`PartialSums`), and writes D.

    A (M,K), B (K,N), D (M,N), or the same with a leading batch mode; every mode of a size known
    at run time only, one mode of each operand with a static stride of 1. Base addresses and the
    other strides are multiples of `vector_bytes`. Sizes need not be: edges are predicated, parts
    of vectors included, and nothing outside of an operand is touched. K may be 0. Of a fused
    epilogue all that has columns is a multiple of `output_bytes`: rows, too, that are read.

    A, B                   accumulator    D
    -----------------      -----------    -------------------
    f16 or bf16, alike     f32            f16, bf16, f32
    f32 (as tf32)          f32            f32
    i8, along K            i32            i32, f16, bf16, f32
    """

    place = PLACE
    reduced_output = ReducedOutput

    def __init__(
        self,
        tile_shape: tuple[int, int, int],
        warps: tuple[int, int],
        stages: int,
        accumulator_type: type[cutlass.Numeric] = Float32,
        *,
        vector_bytes: int = 16,
        output_bytes: int = 1,
        raster: int = 8,
        split_k: int | None = None,
        epilogue: Epilogue | None = None,
    ):
        self.tile_shape = tile_shape
        self.warps = warps
        self.stages = stages
        self.accumulator_type = accumulator_type
        self.vector_bytes = vector_bytes
        self.output_bytes = output_bytes
        self.raster = raster  # rows of tiles that are visited together, to share B in L2
        self.split_k = split_k
        self.epilogue = epilogue or Finish()
        self.threads = WARP * warps[0] * warps[1]
        self._check()
        self.partial_sums = PartialSums(
            threads=self.threads, groups=1, values=self.accumulators, slots=1
        )

    @property
    def accumulators(self) -> int:
        """Per thread."""
        return self.tile_shape[0] * self.tile_shape[1] // self.threads

    @property
    def parts(self) -> int:
        """That K is cut into."""
        return self.split_k or 1

    @property
    def fused(self) -> bool:
        """Whether the epilogue is more than one number for every accumulator."""
        return not isinstance(self.epilogue, Finish)

    @property
    def takes_turns(self) -> bool:
        """Whether the halves of B's columns do, 32 at a time."""
        return Fraction(1) in self.epilogue.halves

    def _check(self) -> None:
        tile_m, tile_n, _ = self.tile_shape
        if any(extent & (extent - 1) or extent < 1 for extent in (*self.tile_shape, *self.warps)):
            raise ValueError(f"tile {self.tile_shape} and warps {self.warps} must be powers of two")
        if tile_m % (WARP_M * self.warps[0]) or tile_n % (WARP_N * self.warps[1]):
            raise ValueError(
                f"tile {self.tile_shape} is not a multiple of {WARP_M} × {WARP_N} for each of "
                f"{self.warps} warps"
            )
        if self.split_k is not None and self.split_k < 2:
            raise ValueError(f"K is cut into two parts or more, not {self.split_k}")
        if self.vector_bytes not in (1, 2, 4, 8, 16):
            raise ValueError(f"vectors have 1, 2, 4, 8 or 16 bytes, not {self.vector_bytes}")
        vectors = max(tile_m, tile_n) // max(1, self.vector_bytes // 4)
        if vectors > self.threads:
            raise ValueError(
                f"a side of tile {self.tile_shape} may have {vectors} vectors of "
                f"{self.vector_bytes} bytes, more than {self.threads} threads"
            )
        by_registers = self.vector_bytes < 4
        minimum_stages = 3 if by_registers else 2
        if self.stages < minimum_stages:
            raise ValueError(
                f"vectors of {self.vector_bytes} bytes need {minimum_stages} stages or more, "
                f"not {self.stages}"
            )
        splits = self.split_k is not None
        maximum = MAXIMUM_ACCUMULATORS_BESIDE if by_registers or splits else MAXIMUM_ACCUMULATORS
        if self.accumulators > maximum:
            raise ValueError(
                f"tile {self.tile_shape} with {self.threads} threads has {self.accumulators} "
                f"accumulators per thread; vectors of {self.vector_bytes} bytes"
                f"{' and a split of K' if splits else ''} leave room for {maximum}"
            )

    @cute.jit
    def __call__(self, mA: cute.Tensor, mB: cute.Tensor, mD: cute.Tensor, stream: cuda.CUstream):
        self.with_operands(mA, mB, mD, (), Int64(0), stream)

    @cute.jit
    def with_operands(
        self,
        mA: cute.Tensor,
        mB: cute.Tensor,
        mD: cute.Tensor,
        operands,
        workspace: Int64,
        stream: cuda.CUstream,
    ):
        """operands: a tuple of what the epilogue reads, and its outputs beside D; workspace: an
        address, used if K is split or anything is reduced."""
        mA, mB, mD = gemm_modes(mA, mB, mD)
        read = len(self.epilogue.kinds)
        written = read + len(self.epilogue.full) - 1
        mD = (mD, *(operand_batch_last(operand) for operand in operands[read:written]))
        more, operands = operands[written:], self.epilogue.operand_modes(operands[:read])
        self._plan_for(mA, mB, mD)
        extents, batches = (mA.shape[0], mB.shape[0]), mD[0].shape[2]
        tiles_m, tiles_n = self._tiles(extents)
        tiles = tiles_m * tiles_n * batches
        blocks = tiles * self.parts
        mR, space = (), None
        if const_expr(self.fused):
            mD = self.output.parts_of(mD)
            mR = self.output.reduced.reductions.output_modes(more)
        else:
            extents = None  # those of D
        if const_expr(len(self.epilogue.reduced) > 0):
            space = self._reduction_space(tiles_m, tiles_n, batches, tiles, workspace)
        if const_expr(self.split_k is None):
            workspace = None
        self.kernel(mA, mB, mD, operands, mR, space, extents, workspace).launch(
            grid=(blocks, 1, 1),
            block=(self.threads, 1, 1),
            min_blocks_per_mp=1,  # or ptxas spills a little to fit one more block
            stream=stream,
        )

    def shared_memory_bytes(
        self,
        operand_type: type[cutlass.Numeric],
        output_type: type[cutlass.Numeric],
        output_unit_mode: int = 1,
    ) -> int:
        """Of one block; the output's unit-stride mode is 0 (M) or 1 (N)."""
        planned = copy(self)
        planned._plan(operand_type, output_type, (1, 1, output_unit_mode))
        return planned._tile_bytes() + self.place * Int32.width // 8

    def _tile_bytes(self) -> int:
        return max(self._operand_bytes(), self.output.bytes)

    def _reduction_space(self, tiles_m, tiles_n, batches, tiles, workspace) -> ReductionSpace:
        """Behind what a split needs of the workspace."""
        counters, parts = workspace, workspace + COUNTER_BYTES
        if const_expr(self.split_k is not None):
            counters += Int64(tiles) * (Int32.width // 8)
            parts += Int64(tiles) * (self.split_k * self.partial_sums.bytes_per_worker)
        return ReductionSpace(tiles_m, tiles_n, batches, counters, parts)

    def _operand_bytes(self) -> int:
        parts_of_b = 2 if self.takes_turns else 1
        elements = self.A.elements + parts_of_b * self.B.elements
        return elements * self.operand_type.width // 8

    def _plan_for(self, mA: cute.Tensor, mB: cute.Tensor, mD: tuple) -> None:
        if mA.element_type is not mB.element_type:
            raise ValueError(f"A is {mA.element_type} but B is {mB.element_type}")
        self._plan(
            mA.element_type,
            mD[0].element_type,
            tuple(_unit_mode(mX) for mX in (mA, mB, *mD)),
            tuple(output.element_type for output in mD[1:]),
        )

    def _plan(
        self, operand_type, output_type, unit_modes: tuple[int, ...], more_types: tuple = ()
    ) -> None:
        """Decides all that depends on types and majors: of A, B, D, further outputs."""
        output_types = (output_type, *more_types)
        check_types(operand_type, self.accumulator_type, output_types, fused=self.fused)
        if operand_type.width == 8 and unit_modes[:2] != (1, 1):
            raise ValueError(f"ldmatrix cannot transpose {operand_type}; K is the unit-stride mode")
        if self.vector_bytes * 8 < operand_type.width:
            raise ValueError(f"vectors of {self.vector_bytes} bytes are less than a {operand_type}")
        tile_m, tile_n, tile_k = self.tile_shape
        self.operand_type = operand_type
        self.mma_k = mma_k(operand_type)
        self.k_blocks = tile_k // self.mma_k
        if self.k_blocks < MINIMUM_K_BLOCKS:
            raise ValueError(
                f"tile K {tile_k} of {operand_type} must be {MINIMUM_K_BLOCKS * self.mma_k} or more"
            )
        self.A = self._operand(tile_m, unit_modes[0])
        self.B = self._operand(tile_n // 2 if self.takes_turns else tile_n, unit_modes[1])
        if self.fused:
            self.output = WarpOutput(
                output_types,
                unit_modes[2:],
                self.epilogue,
                tile=(tile_m, tile_n),
                warps=self.warps,
                vector_bytes=self.output_bytes,
                reduced=self.reduced_output,
            )
            return
        self.D = OutputTile(
            output_type,
            (tile_m, tile_n),
            unit_modes[2],
            granule=(WARP_N * self.warps[1], WARP_M * self.warps[0])[unit_modes[2]],
            budget_bytes=self._operand_bytes(),
            threads=self.threads,
            vector_bytes=self.vector_bytes,
        )
        self.output = SlicedOutput(self.D, self.epilogue, (tile_m, tile_n))

    def _operand(self, rows: int, unit_mode: int) -> OperandTiles:
        # ldmatrix reads pieces of 16 bytes. It cannot transpose 32-bit elements; they are read one
        # by one where K is not the unit-stride mode, 8 neighbours along and 4 across at once.
        by_element = self.operand_type.width == 32 and unit_mode == 0
        return OperandTiles(
            self.operand_type,
            (rows, self.tile_shape[2]),
            unit_mode,
            stages=self.stages,
            k_blocks=self.k_blocks,
            threads=self.threads,
            vector_bytes=self.vector_bytes,
            piece_bytes=32 if by_element else 16,
        )

    @cute.kernel
    def kernel(
        self,
        mA: cute.Tensor,
        mB: cute.Tensor,
        mD,
        operands,
        mR,
        space,
        extents,
        workspace: Int64 | None,
    ):
        thread, _, _ = cute.arch.thread_idx()
        if const_expr(extents is None):
            extents = mD[0].shape[:2]
        first_m, first_n, batch = self._first_of_tile(extents)
        memory, sA, sB, s_tile = self._shared_memory()
        if thread == 0:
            s_tile[0], s_tile[1], s_tile[2] = first_m, first_n, batch
        split = None
        if const_expr(self.split_k is not None):
            k_tiles = cute.ceil_div(mA.shape[1], self.tile_shape[2])
            split = EvenSplit(self.split_k, k_tiles, workspace)
            mA, mB = (self._part_of_k(mX, split) for mX in (mA, mB))
        sources = (
            self.A.source(mA, first_m, batch, sA, thread),
            *self._sources_of_b(mB, first_n, batch, sB, thread),
        )
        tiled_mma, accumulators = self._product(sources, sA, sB, mA.shape[1], thread)
        # From shared memory, since registers are needed for other things across the main loop.
        place, flag = (s_tile[0], s_tile[1], s_tile[2]), s_tile.iterator + 3
        destination = memory, mD, operands, mR, space, place, extents, thread, flag
        if const_expr(self.split_k is None):
            self._write(tiled_mma, accumulators, destination)
        else:
            if self._combine(accumulators, split, flag, thread):
                self._write(tiled_mma, accumulators, destination)

    def _product(self, sources, sA, sB, size_k, thread, leading=None) -> tuple:
        """(tiled MMA, accumulators) of a tile; leading: see `_main_loop`."""
        tiled_mma = self._tiled_mma()
        fragments = self._fragments(tiled_mma, sA, sB, thread)
        accumulators = cute.make_rmem_tensor(
            tiled_mma.partition_shape_C(self.tile_shape[:2]), self.accumulator_type
        )
        accumulators.fill(self.accumulator_type(0))
        self._main_loop(tiled_mma, accumulators, sources, fragments, size_k, leading)
        return tiled_mma, accumulators

    def _part_of_k(self, mX: cute.Tensor, split: EvenSplit) -> cute.Tensor:
        """What this block multiplies of an operand (rows, K, L)."""
        block, _, _ = cute.arch.block_idx()
        tile_k = self.tile_shape[2]
        k_tile, count = split.k_range(block, block // self.split_k)
        rows, size_k, batches = mX.shape
        size_k = cutlass.min(size_k - k_tile * tile_k, count * tile_k)
        layout = cute.make_layout((rows, size_k, batches), stride=mX.stride)
        return cute.make_tensor(mX.iterator + Int64(k_tile * tile_k) * mX.stride[1], layout)

    def _combine(self, accumulators, split, flag, thread):
        """Adds up what several blocks computed of a tile; True for the block that has it all."""
        block, _, _ = cute.arch.block_idx()
        return self.partial_sums.combine(
            accumulators,
            split,
            block,
            block // self.split_k,
            group=Int32(0),
            thread=thread,
            flag=flag,
            barrier_id=Int32(WHOLE_BLOCK),
        )

    def _sources_of_b(self, mB, first_n, batch, sB, thread) -> tuple:
        """One, or those of the left and the right half of its columns."""
        if not self.takes_turns:
            return (self.B.source(mB, first_n, batch, sB, thread),)
        sources = []
        rows = mB.shape[0] // 2
        layout = cute.make_layout((rows, *mB.shape[1:]), stride=mB.stride)
        for half in range(2):
            first = mB.iterator + Int64(half * rows) * mB.stride[0]
            part = cute.make_tensor(sB.iterator + half * self.B.elements, self.B.layout())
            mB_half = cute.make_tensor(first, layout)
            sources.append(self.B.source(mB_half, first_n // 2, batch, part, thread))
        return tuple(sources)

    def _tiles(self, extents: tuple) -> tuple:
        return tuple(cute.ceil_div(extents[mode], self.tile_shape[mode]) for mode in (0, 1))

    @cute.jit
    def _first_of_tile(self, extents: tuple) -> tuple:
        """First row and column of this block's tile, and its batch.

        Tiles are visited in bands of `raster` rows, column by column within a band.
        """
        tiles_m, tiles_n = self._tiles(extents)
        index, _, _ = cute.arch.block_idx()
        if const_expr(self.split_k is not None):
            index = index // self.split_k
        batch = index // (tiles_m * tiles_n)
        in_batch = index % (tiles_m * tiles_n)
        band_m = in_batch // (self.raster * tiles_n) * self.raster
        in_band = in_batch % (self.raster * tiles_n)
        band_rows = min(tiles_m - band_m, self.raster)
        tile_m, tile_n = band_m + in_band % band_rows, in_band // band_rows
        return tile_m * self.tile_shape[0], tile_n * self.tile_shape[1], batch

    def _shared_memory(self) -> tuple[cute.Tensor, cute.Tensor, cute.Tensor, cute.Tensor]:
        """All of it, which D gets later; A and B of all stages in it; this block's place."""
        allocator = SmemAllocator()
        memory = allocator.allocate(self._tile_bytes(), byte_alignment=128)
        pointer = cute.recast_ptr(memory, dtype=self.operand_type)
        return (
            memory,
            cute.make_tensor(pointer, self.A.layout()),
            cute.make_tensor(pointer + self.A.elements, self._layout_of_b()),
            allocator.allocate_tensor(Int32, cute.make_layout(self.place), byte_alignment=16),
        )

    def _layout_of_b(self) -> cute.ComposedLayout:
        """As (N, K, stages); of halves that take turns the left one, then the right one."""
        layout = self.B.layout()
        if not self.takes_turns:
            return layout
        (rows, k, stages), (along, across, stage) = layout.outer.shape, layout.outer.stride
        outer = cute.make_layout(
            ((rows, 2), k, stages), stride=((along, self.B.elements), across, stage)
        )
        return cute.make_composed_layout(layout.inner, 0, outer)

    def _tiled_mma(self) -> cute.TiledMma:
        warps_m, warps_n = self.warps
        columns = self._columns_of_warps() if self.fused else warps_n * WARP_N
        return cute.make_tiled_mma(
            mma_operation(self.operand_type),
            (warps_m, warps_n, 1),
            (warps_m * WARP_M, columns, self.mma_k),
        )

    def _columns_of_warps(self) -> cute.Layout:
        """(8 columns of an instruction, warps, instructions) → column of B in shared memory, such
        that those of a warp lie side by side, or those of halves in turn."""
        tile_n, warps_n = self.tile_shape[1], self.warps[1]
        columns = tile_n // warps_n
        if not self.takes_turns:
            return cute.make_layout((MMA_N, warps_n, columns // MMA_N), stride=(1, columns, MMA_N))
        return cute.make_layout(
            (MMA_N, warps_n, (HALF // MMA_N, 2, columns // (2 * HALF))),
            stride=(1, columns // 2, (MMA_N, tile_n // 2, HALF)),
        )

    def _fragments(self, tiled_mma, sA, sB, thread) -> tuple["Fragments", "Fragments"]:
        """The way of each operand from shared memory to the registers that mma.sync reads."""
        thr_mma = tiled_mma.get_slice(thread)
        tCrA = tiled_mma.make_fragment_A(thr_mma.partition_A(sA)[None, None, None, 0])
        tCrB = tiled_mma.make_fragment_B(thr_mma.partition_B(sB)[None, None, None, 0])
        copy_A = cute.make_tiled_copy_A(self._fragment_copy(self.A), tiled_mma)
        copy_B = cute.make_tiled_copy_B(self._fragment_copy(self.B), tiled_mma)
        return (
            Fragments.of(copy_A, copy_A.get_slice(thread).partition_S(sA), tCrA),
            Fragments.of(copy_B, copy_B.get_slice(thread).partition_S(sB), tCrB),
        )

    def _fragment_copy(self, tiles: OperandTiles) -> cute.CopyAtom:
        if const_expr(tiles.piece_bytes == 16):
            operation = warp.LdMatrix8x8x16bOp(transpose=tiles.unit_mode == 0, num_matrices=4)
            return cute.make_copy_atom(operation, tiles.element_type)
        return cute.make_copy_atom(
            CopyUniversalOp(), tiles.element_type, num_bits_per_copy=tiles.element_type.width
        )

    @cute.jit
    def _main_loop(
        self,
        tiled_mma: cute.TiledMma,
        accumulators: cute.Tensor,
        sources: tuple[TileSource, TileSource],
        fragments: tuple["Fragments", "Fragments"],
        size_k: Int32,
        leading=None,
    ):
        """leading: What of the first tile is no part of the product; it is cleared there."""
        ahead, parts = self.stages - 1, self.A.parts
        for stage in cutlass.range(ahead, unroll=1):
            self._produce(sources, stage)
        self._await_next_stage()
        if const_expr(leading is not None):
            leading.clear()
        self._read(fragments, 0, Int32(0))

        reading, writing = Int32(0), Int32(ahead)
        for k_tile in cutlass.range(cute.ceil_div(size_k, self.tile_shape[2]), unroll=1):
            for k in cutlass.range_constexpr(self.k_blocks):
                if const_expr(k == self.k_blocks - 1):
                    self._await_next_stage()
                    reading = reading + 1 if reading < ahead else 0
                if const_expr(k < parts):
                    pending = self._start(sources, k_tile + ahead, writing, k)
                if const_expr(k == self.k_blocks - 2):
                    self._commit()
                self._read(fragments, (k + 1) % self.k_blocks, reading)
                self._multiply(tiled_mma, accumulators, fragments, k)
                if const_expr(k < parts):
                    self._finish(sources, writing, k, pending)
            writing = writing + 1 if writing < ahead else 0

    @cute.jit
    def _produce(self, sources, stage: Int32):
        """Fills a stage for the first time."""
        for part in cutlass.range_constexpr(self.A.parts):
            pending = self._start(sources, stage, stage, part)
            self._finish(sources, stage, part, pending)
        self._commit()

    @cute.jit
    def _start(self, sources, k_tile: Int32, stage: Int32, part: int) -> tuple:
        return tuple(source.start(k_tile, stage, part) for source in sources)

    @cute.jit
    def _finish(self, sources, stage: Int32, part: int, pending: tuple) -> None:
        for source, values in zip(sources, pending, strict=True):
            source.finish(stage, part, values)

    def _commit(self) -> None:
        if self.A.asynchronous:
            cute.arch.cp_async_commit_group()

    def _await_next_stage(self) -> None:
        """The next stage is written, and all warps have read the last one."""
        if self.A.asynchronous:
            cute.arch.cp_async_wait_group(self.stages - 2)
        cute.arch.sync_threads()

    def _read(self, fragments, k: int, stage: Int32) -> None:
        for fragment in fragments:
            fragment.read(k, stage)

    def _multiply(self, tiled_mma, accumulators, fragments, k: int) -> None:
        if self.operand_type is Float32:
            for fragment in fragments:
                fragment.round_to_tf32(k)
        tCrA, tCrB = (fragment.registers[None, None, k] for fragment in fragments)
        cute.gemm(tiled_mma, accumulators, tCrA, tCrB, accumulators)

    def _write(self, tiled_mma: cute.TiledMma, accumulators: cute.Tensor, destination: tuple):
        """Accumulators → elements → shared memory → D.

        destination: memory, outputs, what the epilogue reads, its reduced outputs and their space,
            the tile's first row, column and batch, extents, thread, flag.
        """
        if self.A.asynchronous:
            cute.arch.cp_async_wait_group(0)  # the stages become memory for D
        self.output.write(tiled_mma, accumulators, *destination)


@dataclass
class Fragments:
    """One operand of mma.sync, a tile of it in registers; only two blocks of K are ever alive."""

    tiled_copy: cute.TiledCopy
    shared: cute.Tensor  # (values, rows, K blocks, stages), as the copy sees it
    registers: cute.Tensor  # (values, rows, K blocks), as mma.sync sees it
    copied: cute.Tensor  # the same as the copy sees it

    @classmethod
    def of(cls, tiled_copy: cute.TiledCopy, shared: cute.Tensor, like: cute.Tensor) -> "Fragments":
        """like: a fragment of the tiled MMA's; of what type and shape registers are.

        Both visit rows in the order of the tiled MMA, which may be another one than theirs in the
        tile; `retile` would expect that.
        """
        registers = cute.make_rmem_tensor(like.shape, like.element_type)
        layout = cute.make_layout(shared.shape[:3])
        return cls(tiled_copy, shared, registers, cute.make_tensor(registers.iterator, layout))

    def read(self, k: int, stage: Int32) -> None:
        source = self.shared[None, None, k, stage]
        cute.copy(self.tiled_copy, source, self.copied[None, None, k])

    def round_to_tf32(self, k: int) -> None:
        """To nearest; mma.sync would truncate."""
        bits = self.registers[None, None, k]
        values = cute.recast_tensor(bits, Float32)
        for i in range(cute.size(bits)):
            bits[i] = Int32(cute.arch.cvt_f32_tf32(values[i]))


def _unit_mode(mX: cute.Tensor) -> int:
    """The mode with a static stride of 1 out of the first two."""
    for mode in (1, 0):
        if isinstance(mX.stride[mode], int) and mX.stride[mode] == 1:
            return mode
    raise ValueError(f"one of the strides {mX.stride[:2]} must be a static 1")

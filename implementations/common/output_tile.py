"""An output tile on its way from accumulators through shared to global memory, without TMA.

`along` is the unit-stride mode of the output and `across` the other one, as in operand_tiles.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, Uint16, Uint32, const_expr
from cutlass.cute import AddressSpace

from .thread_grid import ThreadGrid


@dataclass
class ScatteredRows:
    """A matrix (M, N, L) to be written, of which row i is row rows[i] of another one."""

    matrix: cute.Tensor
    rows: cute.Tensor

    @property
    def iterator(self) -> cute.Pointer:
        return self.matrix.iterator

    @property
    def shape(self) -> tuple:
        return self.matrix.shape

    @property
    def stride(self) -> tuple:
        return self.matrix.stride

    @cute.jit
    def row(self, row: Int32) -> Int32:
        """Where it is; of rows behind the last one, which are not written, any."""
        found = Int32(0)
        if row < self.matrix.shape[0]:
            found = self.rows[row]
        return found


class OutputTile:
    """Slices of a tile: warps write their accumulators, then all threads store whole vectors.

    A slice is as much of the tile as fits into `budget_bytes`, cut across, `granule` at least.
    """

    def __init__(
        self,
        element_type: type[cutlass.Numeric],
        shape: tuple[int, int],
        unit_mode: int,
        *,
        granule: int,
        budget_bytes: int,
        threads: int,
        vector_bytes: int,
    ):
        self.element_type = element_type
        self.unit_mode = unit_mode
        along, across = shape[unit_mode], shape[1 - unit_mode]
        # A warp writes 8 × 8 accumulators at once, lane 4·m + n/2 holding (m, n) and (m, n + 1):
        # this padding keeps its lanes in different banks, and rows on vector boundaries.
        self.pitch = along + (8 if unit_mode == 1 else 128 // element_type.width)
        self.slices = 1
        while self._slice_bytes(across) > budget_bytes and across // self.slices > granule:
            self.slices *= 2
        self.grid = ThreadGrid(
            threads, along, across // self.slices, max(1, vector_bytes * 8 // element_type.width)
        )

    def _slice_bytes(self, across: int) -> int:
        return across // self.slices * self.pitch * self.element_type.width // 8

    @property
    def bytes(self) -> int:
        return self._slice_bytes(self.grid.across * self.slices)

    def layout(self) -> cute.Layout:
        """A slice in shared memory as (M, N)."""
        grid, pitch = self.grid, self.pitch
        if self.unit_mode == 1:
            return cute.make_layout((grid.across, grid.along), stride=(pitch, 1))
        return cute.make_layout((grid.along, grid.across), stride=(1, pitch))

    def slice_of(self, accumulators: cute.Tensor, index: int) -> cute.Tensor:
        """(values, M, N) accumulators, or their coordinates: those that make up a slice."""
        mode = 2 - self.unit_mode
        tiler = [None, None, None]
        tiler[mode] = cute.size(accumulators, mode=[mode]) // self.slices
        coordinate = [None, None, None]
        coordinate[mode] = (None, index)
        return cute.logical_divide(accumulators, tuple(tiler))[tuple(coordinate)]

    @cute.jit
    def store(
        self,
        sD: cute.Tensor,
        mD: cute.Tensor | ScatteredRows,
        first: tuple[Int32, Int32],
        batch: Int32,
        index: int,
        thread: Int32,
    ) -> None:
        """Stores slice `index` of the tile that begins at `first` of mD (M, N, L)."""
        grid, mode = self.grid, self.unit_mode
        first_along, first_across = first[mode], first[1 - mode] + index * grid.across
        tile_along_left = mD.shape[mode] - first_along
        tile_across_left = mD.shape[1 - mode] - first_across
        along_pitch, across_pitch = mD.stride[mode], mD.stride[1 - mode]
        scattered = isinstance(mD, ScatteredRows)
        origin = mD.iterator + (Int64(batch) * mD.stride[2] + Int64(first_along) * along_pitch)
        if const_expr(not scattered):
            origin += Int64(first_across) * across_pitch
        along, across = grid.first(thread)
        across_left = min(tile_across_left, grid.across) - across
        if along + grid.vector > tile_along_left:
            across_left = Int32(0)
        source = sD.iterator + (across * self.pitch + along)
        target = origin + along
        if const_expr(not scattered):
            target += Int64(across) * across_pitch
        for i in cutlass.range_constexpr(grid.copies):
            step = i * grid.step
            values = self._load_vector(source + step * self.pitch)
            row = Int64(step)
            if const_expr(scattered):
                row = Int64(mD.row(first_across + across + step))
            self._store_vector(values, target + row * across_pitch, step < across_left)
        if const_expr(grid.vector > 1):
            ragged = tile_along_left % grid.vector
            if tile_along_left < grid.along and ragged > 0:
                along = tile_along_left - ragged
                end = min(tile_across_left, grid.across)
                for across in cutlass.range(thread, end, grid.threads, unroll=1):
                    row = Int64(across)
                    if const_expr(scattered):
                        row = Int64(mD.row(first_across + across))
                    for i in cutlass.range_constexpr(grid.vector - 1):
                        if i < ragged:
                            target = origin + (row * across_pitch + (along + i))
                            target.store((sD.iterator + (across * self.pitch + along + i)).load())

    def _load_vector(self, source: cute.Pointer) -> list:
        """A vector in shared memory, as words."""
        bytes_ = self.grid.vector * self.element_type.width // 8
        word = Uint16 if bytes_ == 2 else Uint32
        source = cute.make_ptr(word, source.toint(), AddressSpace.smem, assumed_align=bytes_)
        words = cute.make_rmem_tensor(max(1, bytes_ // 4), word)
        cute.autovec_copy(cute.make_tensor(source, words.layout), words)
        return [words[i] for i in range(cute.size(words))]

    def _store_vector(self, words: list, target: cute.Pointer, inside: Boolean) -> None:
        """Predicated, not branched over, so that the loads of all vectors overlap."""
        suffix = {1: "", 2: ".v2", 4: ".v4"}[len(words)] + f".b{words[0].width}"
        registers = ", ".join(f"{{$r{i + 1}}}" for i in range(len(words)))
        cute.arch.inline_ptx(
            f"st.global{suffix} [{{$r0}}], {{{registers}}};",
            read_only_args=[target.toint(), *words],
            predicate=inside,
        )

"""Operand tiles on their way from global to shared memory, without TMA.

A tile is (rows, K), rows being M or N. Two names keep both majors in one piece of code: `along` is
the unit-stride mode of the operand, in shared memory as in global memory; `across` is the other.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, Uint16, const_expr

from .thread_grid import ThreadGrid

WAVEFRONT_BYTES = 128  # what shared memory delivers at once


class OperandTiles:
    """The multistage tiles of one operand: their layout in shared memory, and how to fill them.

    vector bytes   way to shared memory                                       parts of a tile
    ------------   --------------------------------------------------------   ---------------
    4, 8, 16       cp.async; its source size fills with zeros what lies       `k_blocks` - 1
                   outside of the operand, be it half a vector
    1, 2           predicated loads of elements to registers, later one       `k_blocks`
                   store of the 4 bytes

    Parts let the copies of one tile spread over the multiplication of another, `k_blocks` long.
    cp.async leaves the last block free: there a block of threads waits for the next tile.
    """

    def __init__(
        self,
        element_type: type[cutlass.Numeric],
        shape: tuple[int, int],
        unit_mode: int,
        *,
        stages: int,
        k_blocks: int,
        threads: int,
        vector_bytes: int,
        piece_bytes: int,
    ):
        self.element_type = element_type
        self.element_bytes = element_type.width // 8
        self.shape = shape
        self.unit_mode = unit_mode
        self.stages = stages
        self.piece_bytes = piece_bytes
        self.vector_bytes = max(4, vector_bytes)  # in shared memory
        self.asynchronous = vector_bytes >= 4
        self.parts = k_blocks - 1 if self.asynchronous else k_blocks
        self.grid = ThreadGrid(
            threads, shape[unit_mode], shape[1 - unit_mode], self.vector_bytes // self.element_bytes
        )

    @property
    def elements(self) -> int:
        """Of all stages."""
        return self.shape[0] * self.shape[1] * self.stages

    @property
    def swizzle(self) -> tuple[int, int, int]:
        """(bits, base, shift) over bytes: pieces change places within a wavefront.

        Readers take one piece from each of several neighbours across at once, so neighbours keep
        the same piece in different banks. Writers fill whole wavefronts, in whatever order.
        """
        pieces_along = _log2(self.grid.along * self.element_bytes // self.piece_bytes)
        pieces_wavefront = _log2(WAVEFRONT_BYTES // self.piece_bytes)
        return (
            min(pieces_along, pieces_wavefront),
            _log2(self.piece_bytes),
            max(pieces_along, pieces_wavefront),
        )

    @property
    def phases(self) -> int:
        """The copies of a thread differ in their swizzle this many times, then it repeats."""
        period = (1 << sum(self.swizzle)) // (self.grid.along * self.element_bytes)
        return max(1, min(self.grid.copies, period // self.grid.step))

    def layout(self) -> cute.ComposedLayout:
        """Shared memory as (rows, K, stages)."""
        bits, base, shift = self.swizzle
        swizzle = cute.make_swizzle(bits, base - _log2(self.element_bytes), shift)
        stride = _as_modes(self.unit_mode, 1, self.grid.along)
        stage = self.elements // self.stages
        outer = cute.make_layout((*self.shape, self.stages), stride=(*stride, stage))
        return cute.make_composed_layout(swizzle, 0, outer)

    @cute.jit
    def source(
        self, mX: cute.Tensor, first_row: Int32, batch: Int32, sX: cute.Tensor, thread: Int32
    ) -> "TileSource":
        """The share of one thread in all tiles that begin at `first_row` of mX (rows, K, L)."""
        along, across = self.grid.first(thread)
        row, k = _as_modes(self.unit_mode, along, across)
        row += first_row
        offset = Int64(row) * mX.stride[0] + Int64(k) * mX.stride[1] + Int64(batch) * mX.stride[2]
        return TileSource(
            pointer=mX.iterator + offset,
            copy_pitch=Int64(self.grid.step) * mX.stride[1 - self.unit_mode],
            **self._share(mX, row, k, sX, along, across),
        )

    @cute.jit
    def gathered_source(
        self, mX: cute.Tensor, rows: cute.Tensor, first_row: Int32, sX: cute.Tensor, thread: Int32
    ) -> "GatheredTileSource":
        """The same where row i is row rows[i] of mX, which lies along K; as many rows as the shape
        of mX says."""
        if const_expr(self.unit_mode == 0):
            raise ValueError("rows that are gathered lie along K")
        along, across = self.grid.first(thread)
        row, k = first_row + across, along
        return GatheredTileSource(
            pointers=[
                mX.iterator
                + (Int64(_row_of(rows, row + i * self.grid.step, mX)) * mX.stride[0] + k)
                for i in range(self.grid.copies)
            ],
            **self._share(mX, row, k, sX, along, across),
        )

    def _share(self, mX, row, k, sX, along, across) -> dict:
        """What does not depend on where rows lie."""
        left = (mX.shape[0] - row, mX.shape[1] - k)
        slots = [
            (*_as_modes(self.unit_mode, along, across + phase * self.grid.step), 0)
            for phase in range(self.phases)
        ]
        return {
            "tiles": self,
            "along_left": left[self.unit_mode],
            "across_left": left[1 - self.unit_mode],
            "tile_pitch": Int64(self.shape[1]) * mX.stride[1],
            "slots": [sX.iterator + sX.layout(slot) for slot in slots],
            "busy": across < self.grid.across if const_expr(self.grid.idle_threads) else None,
        }


@cute.jit
def _row_of(rows: cute.Tensor, row: Int32, mX: cute.Tensor) -> Int32:
    """rows[row]; of rows behind the last one of mX, which are not read, any."""
    found = Int32(0)
    if row < mX.shape[0]:
        found = rows[row]
    return found


@dataclass
class AnySource:
    """What one thread copies of the tiles along K, wherever its rows lie."""

    tiles: OperandTiles
    along_left: Int32  # elements from its first one at K = 0 to the end of the operand
    across_left: Int32
    tile_pitch: Int64  # elements from one tile to the next
    slots: list  # where its first copies go in the first stage, one per phase of the swizzle
    busy: Boolean | None  # None: no thread is idle

    def _limits(self, k_tile: Int32) -> tuple:
        """Elements from its first one in a tile to the end of the operand: along, across."""
        first_k = k_tile * self.tiles.shape[1]
        if self.tiles.unit_mode == 1:
            return self.along_left - first_k, self.across_left
        return self.along_left, self.across_left - first_k

    @cute.jit
    def _copy(self, i: int, vector: cute.Pointer, limits: tuple, stage: Int32) -> list:
        """Starts the i-th copy; what has to go to `finish`."""
        tiles, grid = self.tiles, self.tiles.grid
        along_left, across_left = limits
        pending = []
        if const_expr(tiles.asynchronous):
            vector_bytes = min(max(along_left, 0), grid.vector) * tiles.element_bytes
            inside = vector_bytes if i * grid.step < across_left else 0
            self._copy_async(vector, self._slot(i, stage), inside)
        else:
            inside = along_left if i * grid.step < across_left else 0
            pending.append(_load_each(vector, inside, grid.vector))
        return pending

    @cute.jit
    def finish(self, stage: Int32, part: int, pending: list) -> None:
        """Stores what `start` left in registers."""
        first, _ = self._copies(part)
        count, bits = self.tiles.grid.vector, 8 * self.tiles.element_bytes
        elements = ", ".join(f"{{$r{i + 1}}}" for i in range(count))
        for i in cutlass.range_constexpr(len(pending)):
            cute.arch.inline_ptx(
                f"st.shared.v{count}.b{bits} [{{$r0}}], {{{elements}}};",
                read_only_args=[self._slot(first + i, stage).toint(), *pending[i]],
                predicate=self.busy,
            )

    def _copies(self, part: int) -> tuple[int, int]:
        """The copies that make up a part: from, to."""
        copies, parts = self.tiles.grid.copies, self.tiles.parts
        return part * copies // parts, (part + 1) * copies // parts

    def _slot(self, i: int, stage: Int32) -> cute.Pointer:
        """Copies of the same phase are a constant apart."""
        tiles, phases = self.tiles, self.tiles.phases
        constant = i // phases * phases * tiles.grid.step * tiles.grid.along
        return self.slots[i % phases] + (stage * (tiles.elements // tiles.stages) + constant)

    def _copy_async(self, source: cute.Pointer, target: cute.Pointer, inside: Int32) -> None:
        """Copies the first `inside` bytes and fills with zeros up to a vector."""
        size = self.tiles.vector_bytes
        cache = "cg" if size == 16 else "ca"  # past L1 if possible: blocks share tiles through L2
        cute.arch.inline_ptx(
            f"cp.async.{cache}.shared.global [{{$r0}}], [{{$r1}}], {size}, {{$r2}};",
            read_only_args=[target.toint(), source.toint(), inside],
            predicate=self.busy,
        )


@dataclass
class TileSource(AnySource):
    """Of rows that are a constant apart; made by `OperandTiles.source`."""

    pointer: cute.Pointer  # its first element at K = 0
    copy_pitch: Int64  # elements from one of its copies to the next

    @cute.jit
    def start(self, k_tile: Int32, stage: Int32, part: int) -> list:
        """Starts to copy part of a tile to a stage; what it returns has to go to `finish`.

        A tile beyond the end of K reads nothing and becomes zero.
        """
        limits = self._limits(k_tile)
        first, end = self._copies(part)
        vector = self.pointer + (Int64(k_tile) * self.tile_pitch + Int64(first) * self.copy_pitch)
        pending = []
        for i in cutlass.range_constexpr(first, end):
            pending += self._copy(i, vector, limits, stage)
            vector += self.copy_pitch
        return pending


@dataclass
class GatheredTileSource(AnySource):
    """Of rows that lie anywhere; made by `OperandTiles.gathered_source`."""

    pointers: list  # the first element of each of its copies at K = 0

    @cute.jit
    def start(self, k_tile: Int32, stage: Int32, part: int) -> list:
        """See `TileSource.start`."""
        limits = self._limits(k_tile)
        first, end = self._copies(part)
        pending = []
        for i in cutlass.range_constexpr(first, end):
            vector = self.pointers[i] + Int64(k_tile) * self.tile_pitch
            pending += self._copy(i, vector, limits, stage)
        return pending


def _load_each(source: cute.Pointer, inside: Int32, count: int) -> tuple[Uint16, ...]:
    """Neighbours of 8 or 16 bits, zero from the `inside`-th on."""
    bits = source.dtype.width
    names = [f"inside{i}" for i in range(count)]
    code = [f".reg .pred {', '.join(names)};"]
    code += [f"setp.gt.s32 {name}, {{$r1}}, {i};" for i, name in enumerate(names)]
    code += [f"mov.b16 {{$w{i}}}, 0;" for i in range(count)]
    code += [
        f"@{name} ld.global.b{bits} {{$w{i}}}, [{{$r0}} + {i * bits // 8}];"
        for i, name in enumerate(names)
    ]
    return cute.arch.inline_ptx(
        f"{{ {' '.join(code)} }}",
        write_only_types=[Uint16] * count,
        read_only_args=[source.toint(), inside],
    )


def _as_modes(unit_mode: int, along, across) -> tuple:
    return (along, across) if unit_mode == 0 else (across, along)


def _log2(power_of_two: int) -> int:
    return power_of_two.bit_length() - 1

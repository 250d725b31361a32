"""Output tiles on their way from wgmma's accumulators to global memory, on Hopper."""

from fractions import Fraction
from functools import partial
from math import gcd, lcm

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as sm90
from cutlass import Float16, Float32, Int32, const_expr
from cutlass.cute import AddressSpace
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warp
from cutlass.tensor_utils import LayoutEnum

from ..common.conversion import CONVERTED
from ..common.epilogue import (
    PAIR,
    Epilogue,
    Thread,
    column_in_heads,
    halves_in_turn,
    places,
    store_per_block,
)
from ..common.reductions import OF_MATRIX, identity
from ..common.threads import GROUP
from .mma import WGMMA_M
from .ragged import of_group, stored_by_groups
from .reduced_output import WARPS, ReducedOutput
from .thread_stores import VECTOR_BYTES, ThreadStores

WIDTH = 32  # columns that a group writes at most at once: 64 or 128 bytes, a swizzle
VECTORS_AT_ONCE = 2  # that a thread asks for while one k tile is multiplied


def _request(asked: list[tuple]) -> None:
    for thread, read, _ in asked:
        thread.request(*read)


def subtile_width(tile_n: int) -> int:
    """Columns that a group writes at once: they divide the tile."""
    return gcd(WIDTH, tile_n)


class Output(ThreadStores):
    """How each consumer group writes what the epilogue makes of its accumulators.

    A group goes through its 64-row blocks of the tile, `row_blocks` of them and `row_step` blocks
    apart, bundle by bundle of columns; of every bundle it writes each full output in subtiles. A
    subtile is made in registers and put into a ring of buffers in shared memory, which TMA drains,
    or the group's own threads element by element, for an output that is not aligned.

    Attributes:
        slot_bytes: Of a buffer: up to 32 columns of D, that divide the tile; of wider elements it
            takes fewer columns.
        ragged: The mode of outputs that groups cut, 0 or 1; None: there is one matrix per batch.
        scattered: Whether rows of D, the first output, lie anywhere: `write` gets their numbers.
    """

    ragged: int | None = None
    scattered: bool = False
    subtile_rows = WGMMA_M  # that a block of 64 gives of an output

    def __init__(
        self,
        element_types: tuple[type[cutlass.Numeric], ...],
        epilogue: Epilogue,
        *,
        tile: tuple[int, int],
        row_blocks: int,
        row_step: int,
        tma_stores: tuple[bool, ...],
        first_barrier: int,
    ):
        self.element_types = element_types
        self.epilogue = epilogue
        tile_n = self.tile_n = tile[1]
        self.tile_blocks = tile[0] // WGMMA_M
        self.row_blocks = row_blocks
        self.row_step = row_step
        self.tma_stores = tma_stores
        self.first_barrier = first_barrier  # named barriers: one per consumer from this one on
        self.buffers = 2  # of each consumer; there may be more
        self.bundle = lcm(epilogue.bundle, subtile_width(tile_n))
        if epilogue.spans_row:
            self.bundle = tile_n
        if tile_n % self.bundle:
            raise ValueError(f"a tile N of {tile_n} is no multiple of a bundle of {self.bundle}")
        # Nothing is read before it is needed then, nor kept for another block of rows.
        many = row_blocks * tile_n >= 256 or self.tile_blocks > 2
        self.short_of_registers = epilogue.heads is not None and many
        self.ahead = 0 if self.short_of_registers else self._bundles_ahead()
        if len(element_types) != len(epilogue.full) or len(tma_stores) != len(epilogue.full):
            raise ValueError(f"{len(element_types)} outputs for {len(epilogue.full)} to write")
        self.widths = tuple(self._width(full.columns) for full in epilogue.full)
        slot = min(subtile_width(tile_n), self.widths[0])
        self.slot_bytes = WGMMA_M * slot * element_types[0].width // 8
        self.reduced = ReducedOutput(epilogue, tile, tile[0] // WGMMA_M // row_blocks)
        by_column = [reduced for reduced in epilogue.reduced if reduced.over == "rows"]
        if any(self._scratch_bytes(r.columns) > self.slot_bytes for r in by_column):
            raise ValueError(f"a bundle of {self.bundle} columns is too wide to be reduced")
        self.subtiles = tuple(
            (
                self.subtile_rows,
                min(WIDTH, width, self.slot_bytes * 8 // element_type.width // WGMMA_M),
            )
            for width, element_type in zip(self.widths, element_types, strict=True)
        )

    def _bundles_ahead(self) -> int:
        """Bundles whose operands are on their way while another one is written: if there are
        registers beside the accumulators, that is not for two blocks of rows and not for three
        consumers."""
        if self.row_blocks > 1 or self.tile_blocks > 2:
            return 0
        return 2 if self.epilogue.reads_little else 1

    def _scratch_bytes(self, per_column: Fraction) -> int:
        return int(WARPS * self.bundle * per_column) * Float32.width // 8

    def _width(self, per_column: Fraction) -> int:
        """Columns of an output that a bundle gives."""
        columns = self.bundle * per_column
        if columns.denominator != 1 or columns % min(WIDTH, columns):
            raise ValueError(f"a bundle of {self.bundle} columns gives {columns} of an output")
        return int(columns)

    def operands_of(self, operands: tuple, batch) -> tuple:
        """What the epilogue reads of such a batch."""
        return operands

    def of_parts(self, of_outputs: tuple) -> tuple:
        """What outputs have, for the parts that they are written in: here one each."""
        return of_outputs

    def views(self, mD: tuple) -> tuple:
        """The parts that outputs (M, N, L) are written in, with columns in the order of tiles."""
        return tuple(
            halves_in_turn(output, 1) if full.columns in self.epilogue.halves else output
            for output, full in zip(mD, self.epilogue.full, strict=True)
        )

    def shared_layouts(self, majors: tuple[LayoutEnum, ...], consumers: int) -> tuple:
        """(rows, columns, buffers of all consumers) of each output."""
        return tuple(
            self._shared_layout(*of, consumers * self.buffers)
            for of in zip(self.element_types, majors, self.subtiles, strict=True)
        )

    def _shared_layout(self, element_type, major, subtile, buffers):
        one = sm90.make_smem_layout_epi(element_type, major, subtile, 1)
        slot = self.slot_bytes * 8 // element_type.width
        ring = cute.append(
            cute.select(one.outer, mode=[0, 1]), cute.make_layout(buffers, stride=slot)
        )
        return cute.make_composed_layout(one.inner, 0, ring)

    def tma(self, mD: tuple, shared_layouts: tuple) -> tuple:
        """(atoms, tensors): those of the outputs that TMA stores, None and the tensor itself of
        the others."""
        atoms, tensors = [], []
        for tensor, layout, subtile, by_tma in zip(
            mD, shared_layouts, self.subtiles, self.tma_stores, strict=True
        ):
            atom = None
            if by_tma and not (self.scattered and not atoms):
                if self.ragged is not None:
                    tensor = stored_by_groups(tensor, self.ragged)
                atom, tensor = cpasync.make_tiled_tma_atom(
                    cpasync.CopyBulkTensorTileS2GOp(),
                    tensor,
                    cute.slice_(layout, (None, None, 0)),
                    subtile,
                )
            atoms.append(atom)
            tensors.append(tensor)
        return tuple(atoms), tuple(tensors)

    def of_group(self, mD: tuple, first: Int32, end: Int32) -> tuple:
        """The outputs, as `tma` returned them, that a group alone has; a scattered one is whole."""
        return tuple(
            tensor
            if self.scattered and j == 0
            else of_group(tensor, self.ragged, first, end, by_tma)
            for j, (tensor, by_tma) in enumerate(zip(mD, self.tma_stores, strict=True))
        )

    @cute.jit
    def write(
        self,
        consumer: Int32,
        accumulators: cute.Tensor,
        tma_d: tuple,
        mD: tuple,
        sD: tuple,
        operands: tuple,
        majors: cutlass.Constexpr,
        place: tuple,
        extents: tuple,
        mR: tuple,
        space,
        ring: cute.Pointer,
        flag: cute.Pointer,
        origin: tuple = (0, 0),
        rows: cute.Tensor | None = None,
        carried: tuple | None = None,
        threads: list | None = None,
    ):
        """This consumer's part of a tile.

        Args:
            place: (row, column, batch): of its first 64 rows, counted in those; of the tile.
            extents: (M, N) of the accumulators.
            origin: Of a group: row and column, in what the epilogue reads, of its first element.
                Outputs, place and extents are as the group alone has them; batch is its number.
            rows: Of a scattered D, where those of all groups go.
            mR: The outputs per block of columns and the reduced ones; space: in memory, for these.
            ring: The buffers of all consumers.
            flag: An Int32 in shared memory, of this consumer.
            carried: Of `ReducedOutput.carry`, if `finish` is called behind the last tile of every
                matrix; None: what is reduced leaves with the tile.
            threads: As `read_early` has returned them for the tile.
        """
        blocks = mR[: len(self.epilogue.per_block)]
        mR = mR[len(self.epilogue.per_block) :]
        operands = self.operands_of(operands, place[2])
        sums = self.reduced.start(self.row_blocks, carried)
        outputs = (tma_d, mD, sD, majors, blocks, sums)
        given = (consumer, accumulators, outputs, operands, place, extents)
        given = (*given, space, ring, origin, rows, threads)
        if const_expr(self._tells_whole_tiles()):
            if self._is_whole(place, extents):
                self._write_bundles(*given, is_whole=True)
            else:
                self._write_bundles(*given, is_whole=False)
        else:
            self._write_bundles(*given, is_whole=False)
        if const_expr(len(mR) > 0):
            row, column, batch = place
            place = (row, column, self._stored_batch(batch))
            tid = cute.arch.thread_idx()[0] % GROUP
            if const_expr(carried is not None):
                number = self._number(space, place)
                self.reduced.leave_nothing(space, carried, number, tid)
            leaves = [r.over not in OF_MATRIX or carried is None for r in self.epilogue.reduced]
            if const_expr(any(leaves)):
                self._reduce(leaves, consumer, sums, place, extents, mR, space, ring, flag, tid)

    def read_early(self, accumulators, operands, place, extents, registers: int) -> tuple:
        """(the elements of a tile that is multiplied next, what to call while it is).

        If there are registers for it, what they need of matrices is on its way behind those calls,
        and what the first bundles need of rows and columns behind this one; the elements are None
        if nothing is. What is reduced takes the registers itself.
        """
        if self.row_blocks > 1 or self.tile_blocks != 2:
            return None, []
        if self.short_of_registers or self.epilogue.reduced:
            return None, []
        tid = cute.arch.thread_idx()[0] % GROUP
        operands = self.operands_of(operands, place[2])
        threads = self._threads(accumulators, operands, place, extents, (0, 0), tid)
        of_matrices = self._asked(threads, True, registers)
        registers -= sum(count for *_, count in of_matrices)
        others = self._asked(threads[: self.ahead], False, registers)
        _request(others)
        # All of a matrix at once would keep the tile waiting: L1 has no room for it.
        steps = [
            partial(_request, of_matrices[first : first + VECTORS_AT_ONCE])
            for first in range(0, len(of_matrices), VECTORS_AT_ONCE)
        ]
        return (threads if of_matrices or others else None), steps

    def _asked(self, threads: list, of_matrices: bool, registers: int) -> list:
        """(thread, read, registers) of all that they need, of matrices or of what else there is;
        nothing if it takes more registers."""
        reads = self.epilogue.reads(self.bundle)
        found = [
            (thread, read, count)
            for thread in threads
            for read, count in thread.registers_of(reads, of_matrices).items()
        ]
        return found if sum(count for *_, count in found) <= registers else []

    def _stored_batch(self, batch):
        return batch if self.ragged is None else Int32(0)

    def _tells_whole_tiles(self) -> bool:
        """Whether tiles that lie whole in the matrix have code of their own, so that only those at
        its edges ask of every element that is reduced whether it is inside."""
        return any(reduced.over in OF_MATRIX for reduced in self.epilogue.reduced)

    def _is_whole(self, place, extents):
        """Whether all of this consumer's part of a tile lies in the matrix."""
        row, column, _ = place
        blocks = (self.row_blocks - 1) * self.row_step + 1
        in_rows = (row + blocks) * WGMMA_M <= extents[0]
        return in_rows & ((column + 1) * self.tile_n <= extents[1])

    @cute.jit
    def _write_bundles(
        self,
        consumer: Int32,
        accumulators: cute.Tensor,
        outputs: tuple,
        operands: tuple,
        place: tuple,
        extents: tuple,
        space,
        ring: cute.Pointer,
        origin: tuple,
        rows: cute.Tensor | None,
        threads: list | None,
        is_whole: cutlass.Constexpr,
    ):
        """All bundles of a tile, one after the other; see `write`.

        outputs: What is stored, and registers for what is reduced.
        """
        tma_d, mD, sD, majors, blocks, sums = outputs
        row, column, batch = place
        stored_batch = self._stored_batch(batch)
        tid = cute.arch.thread_idx()[0] % GROUP
        if const_expr(threads is None):
            threads = self._threads(accumulators, operands, place, extents, origin, tid, is_whole)
        for thread in threads[: self.ahead]:
            self.epilogue.fetch(thread, self.bundle)
        self._await_ring(consumer, in_flight=0)
        slot = 0
        for i in cutlass.range_constexpr(len(threads)):
            bundle, row_block = divmod(i, self.row_blocks)
            block = row + row_block * self.row_step
            thread = threads[i]
            if const_expr(not self.short_of_registers):
                self.epilogue.fetch(thread, self.bundle)
            # All of a bundle at once: what an element needs on the way is soon of no more use.
            fragments, gathered = self._made(thread)
            store_per_block(self.epilogue, thread, blocks, self.bundle)
            for j in cutlass.range_constexpr(len(sums)):
                if const_expr(self.epilogue.reduced[j].over != "rows"):
                    self.reduced.over_columns(j, gathered[j], sums[j], row_block)
            if const_expr(0 < self.ahead < len(threads) - i):
                self.epilogue.fetch(threads[i + self.ahead], self.bundle)
            for j in cutlass.range_constexpr(len(self.subtiles)):
                to_shared = self._tiled_store(j, majors[j])
                for k in cutlass.range_constexpr(self.widths[j] // self.subtiles[j][1]):
                    buffer = consumer * self.buffers + slot % self.buffers
                    sD_j = sD[j][None, None, buffer]
                    self._put(j, fragments[j][k], to_shared, sD_j, tid)
                    # Behind this barrier the subtile is complete and the next buffer is free.
                    self._await_ring(consumer, in_flight=self.buffers - 2)
                    across = self.widths[j] // self.subtiles[j][1]
                    first = column * (self.tile_n // self.bundle) + bundle
                    place_across = self._place_of_subtile(j, first * across + k)
                    at = (block, place_across, stored_batch)
                    if const_expr(self.scattered and j == 0):
                        self._scatter(tid, sD_j, mD[0], rows, at, (origin[0], *extents))
                    else:
                        gD_j = cute.local_tile(mD[j], self.subtiles[j], at)
                        if const_expr(self.tma_stores[j]):
                            if tid // 32 == 0:
                                self._store_by_tma(tma_d[j], sD_j, gD_j)
                        else:
                            self._store_by_threads(j, tid, sD_j, gD_j, mD[j].shape, majors[j], at)
                    slot += 1
            for j in cutlass.range_constexpr(len(sums)):
                if const_expr(self.epilogue.reduced[j].over == "rows"):
                    buffer = consumer * self.buffers + slot % self.buffers
                    scratch = self._scratch(ring, buffer, self.epilogue.reduced[j].columns)
                    self.reduced.over_rows(j, thread, gathered[j], scratch, tid)
                    self._await_ring(consumer, in_flight=self.buffers - 2)
                    first = scratch.shape[1] * bundle
                    place_of_part = (block, column, stored_batch)
                    self.reduced.leave_rows(j, scratch, space, first, place_of_part, tid)
                    if const_expr(any(self.tma_stores)):
                        # An empty group: the ring counts one for every buffer.
                        cute.arch.cp_async_bulk_commit_group()
                    slot += 1

    @cute.jit
    def _reduce(
        self, leaves: cutlass.Constexpr, consumer, sums, place, extents, mR, space, ring, flag, tid
    ):
        """What is left to do for the reduced outputs behind the last bundle, of those that leave
        with the tile."""
        row, column, batch = place
        barrier_id = self.first_barrier + consumer
        self._await_ring(consumer, in_flight=0)
        scratch = self._scratch(ring, consumer * self.buffers, Fraction(1)).iterator
        for j in cutlass.range_constexpr(len(mR)):
            over = self.epilogue.reduced[j].over
            if const_expr(not leaves[j]):
                pass
            elif const_expr(over in OF_MATRIX):
                part = (sums[j], self._number(space, place), 1)
                self._leave_matrix(
                    j, part, scratch, batch, extents, mR, space, flag, tid, barrier_id
                )
            else:
                for row_block in cutlass.range_constexpr(self.row_blocks):
                    block = (row + row_block * self.row_step, column, batch)
                    if const_expr(over == "columns"):
                        self.reduced.leave_columns(j, sums[j], space, row_block, block, tid)
                    self.reduced.reductions.complete(
                        j, mR[j], scratch, space, block, extents, tid, flag, barrier_id
                    )

    @cute.jit
    def finish(
        self,
        consumer: Int32,
        carried: tuple,
        batch: Int32,
        extents: tuple,
        mR: tuple,
        space,
        ring: cute.Pointer,
        flag: cute.Pointer,
    ):
        """What this consumer has carried of a matrix, or of all up to it, leaves; arguments as of
        `write`."""
        mR = mR[len(self.epilogue.per_block) :]
        tid = cute.arch.thread_idx()[0] % GROUP
        barrier_id = self.first_barrier + consumer
        state = carried[-1]
        self._await_ring(consumer, in_flight=0)
        scratch = self._scratch(ring, consumer * self.buffers, Fraction(1)).iterator
        for j in cutlass.range_constexpr(len(mR)):
            if const_expr(self.epilogue.reduced[j].over in OF_MATRIX):
                part = (carried[j], state[1], state[0])
                self._leave_matrix(
                    j, part, scratch, batch, extents, mR, space, flag, tid, barrier_id
                )
                carried[j].fill(identity(self.epilogue.reduced[j].kind))
        state[0] = 0

    def _place_of_subtile(self, j, subtile):
        """Across an output, of one that tiles have there."""
        if self.epilogue.heads is None:
            return subtile
        columns = self.subtiles[j][1]
        return column_in_heads(subtile * columns, self.epilogue.heads) // columns

    def _number(self, space, place) -> Int32:
        """Of this consumer's part of a tile, among those of what is reduced over a matrix."""
        row, column, batch = place
        tile = (row // self.tile_blocks, column, batch)
        group = row % self.tile_blocks % self.row_step
        return self.reduced.reductions.number_of(space, *tile, group)

    def _leave_matrix(self, j, part, scratch, batch, extents, mR, space, flag, tid, barrier_id):
        """part: (its registers, its number, parts that are written and not counted)."""
        registers, number, parts = part
        self.reduced.leave_matrix(j, registers, scratch, space, number, tid, barrier_id)
        self.reduced.reductions.complete(
            *(j, mR[j], scratch, space, (Int32(0), Int32(0), batch), extents),
            *(tid, flag, barrier_id, parts),
        )

    def _scratch(self, ring, buffer, per_column):
        """A buffer of the ring as (warps, columns of a bundle)."""
        pointer = cute.make_ptr(
            Float32, ring.toint() + buffer * self.slot_bytes, AddressSpace.smem, assumed_align=16
        )
        columns = int(self.bundle * per_column)
        return cute.make_tensor(pointer, cute.make_ordered_layout((WARPS, columns), order=(1, 0)))

    def drain(self):
        """Shared memory must outlive the reads of the last stores."""
        if any(self.tma_stores):
            cute.arch.cp_async_bulk_wait_group(0, read=True)

    def _threads(self, accumulators, operands, place, extents, origin, tid, is_whole=False) -> list:
        """The elements of this thread by bundle, those of one bundle's row blocks in turn."""
        row, column, batch = place
        extents = (origin[0] + extents[0], origin[1] + extents[1])
        aligned = all(self.tma_stores) and self.ragged != 1
        found = []
        of_rows: list = [{} for _ in range(self.row_blocks)]
        for bundle in range(self.tile_n // self.bundle):
            of_columns: dict = {}
            for row_block in range(self.row_blocks):
                first = row_block * self.tile_n // 2 + bundle * self.bundle // 2
                own = cute.make_tensor(
                    accumulators.iterator + first, cute.make_layout(self.bundle // 2)
                )
                block = row + row_block * self.row_step
                thread = Thread(
                    accumulators=own,
                    kinds=self.epilogue.kinds,
                    operands=operands,
                    row=origin[0] + block * WGMMA_M + tid // 32 * 16 + tid % 32 // 4,
                    first_column=origin[1] + column * self.tile_n + bundle * self.bundle,
                    lane=tid % 4,
                    batch=batch,
                    extents=extents,
                    halves=self.epilogue.halves,
                    heads=self.epilogue.heads,
                    vector_bytes=VECTOR_BYTES if aligned else 1,
                    shares_vectors=True,
                    is_whole=is_whole,
                    of_columns={} if self.short_of_registers else of_columns,
                    of_rows=of_rows[row_block],
                )
                found.append(thread)
        return found

    def _made(self, thread) -> tuple[list, list]:
        """The epilogue's elements of a bundle, in registers: for each output its subtiles, and for
        each that is reduced what `Reductions.gather` has of it."""
        fragments = [
            [
                cute.make_rmem_tensor(self.subtile_rows * columns // GROUP, element_type)
                for _ in range(width // columns)
            ]
            for (_, columns), width, element_type in zip(
                self.subtiles, self.widths, self.element_types, strict=True
            )
        ]
        gathered: list = [{} for _ in self.epilogue.reduced]
        sizes = [cute.size(subtiles[0]) for subtiles in fragments]
        reductions = self.reduced.reductions
        for first in range(0, max(*sizes, reductions.most(thread)), CONVERTED):
            for j, subtiles in enumerate(fragments):
                for k, fragment in enumerate(subtiles):
                    if first < cute.size(fragment):
                        self._make(j, k, first, fragment, thread)
            reductions.gather(thread, gathered, first, CONVERTED)
        return fragments, gathered

    def _make(self, j, k, first, fragment, thread):
        """Some elements of a subtile."""
        columns = self.subtiles[j][1]
        lane_columns = self.epilogue.full[j].lane_columns
        elements = [
            self.epilogue.element(j, thread, half, k * columns + column)
            for half, column in self._places(columns, lane_columns)[first : first + CONVERTED]
        ]
        target = cute.make_tensor(fragment.iterator + first, cute.make_layout(len(elements)))
        self.epilogue.conversions.put(elements, target)

    def _places(self, columns: int, lane_columns: int) -> list:
        """(half, column) of a thread's elements of a subtile, in the order of its fragment."""
        return places(columns, lane_columns)

    def _put(self, j, fragment, to_shared, sD, tid):
        """A subtile into shared memory."""
        if self.epilogue.full[j].lane_columns == PAIR:
            shape = self._mma(self.subtiles[j][1]).partition_shape_C(self.subtiles[j])
            tCrD = cute.make_tensor(fragment.iterator, cute.make_layout(shape))
            tRS_sD = to_shared.get_slice(tid).partition_D(sD)
            cute.copy(to_shared, to_shared.retile(tCrD), tRS_sD)
            return
        row, lane = tid // 32 * 16 + tid % 32 // 4, tid % 4
        lane_columns = self.epilogue.full[j].lane_columns
        for i, (half, column) in enumerate(places(self.subtiles[j][1], lane_columns)):
            sD[row + 8 * half, column + lane * lane_columns] = fragment[i]

    def _tiled_store(self, j, major):
        """Registers → shared memory; of no use for columns that are not in pairs."""
        return cute.make_tiled_copy_C(
            self._store_atom(self.element_types[j], major), self._mma(self.subtiles[j][1])
        )

    def _mma(self, columns):
        """Never issued: the wgmma whose accumulators lie in registers as a subtile does."""
        return sm90.make_trivial_tiled_mma(
            *(Float16, Float16, OperandMajorMode.K, OperandMajorMode.K),
            *(Float32, (1, 1, 1), (WGMMA_M, columns)),
        )

    def _store_atom(self, element_type, major):
        if element_type.width == 16:
            op = warp.StMatrix8x8x16bOp(major.is_m_major_c(), 4)
            return cute.make_copy_atom(op, element_type)
        # A thread holds two neighbours of a row.
        bits = element_type.width * (2 if major.is_n_major_c() else 1)
        return cute.make_copy_atom(
            cute.nvgpu.CopyUniversalOp(), element_type, num_bits_per_copy=bits
        )

    def _await_ring(self, consumer, in_flight):
        """All threads of the consumer wait for each other, and until at most `in_flight` TMA
        stores still read the ring. Only the storing thread has any, the barrier tells the rest.

        Stores by threads have read their buffer when the thread arrives here again.
        """
        if any(self.tma_stores):
            cute.arch.fence_view_async_shared()
            cute.arch.cp_async_bulk_wait_group(in_flight, read=True)
        cute.arch.barrier(barrier_id=self.first_barrier + consumer, number_of_threads=GROUP)

    def _store_by_tma(self, tma_d, sD, gD):
        source, destination = cpasync.tma_partition(
            tma_d, 0, cute.make_layout(1), cute.group_modes(sD, 0, 2), cute.group_modes(gD, 0, 2)
        )
        cute.copy(tma_d, source, destination)
        cute.arch.cp_async_bulk_commit_group()

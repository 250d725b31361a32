"""Grouped matrix products for every GPU from Ampere on."""

from dataclasses import dataclass

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr

from ..common.accumulated import Accumulated
from ..common.epilogue import Epilogue, Finish
from ..common.expert_matrices import ExpertMatrices
from ..common.grouped_reductions import GroupedReductions
from ..common.grouped_tiles import GroupedTiles, GroupTile, most_row_tiles
from ..common.modes import operand_batch_last
from ..common.output_tile import ScatteredRows
from ..common.work_split import COUNTER_BYTES
from .gemm import Gemm
from .reduced_output import ReducedOutput


class GroupReducedOutput(ReducedOutput):
    """Of a group, which is reduced as if it were a matrix by itself."""

    def finish(self, sums, memory, mR, space, place, extents, thread, flag):
        """space: The group's, and its first row."""
        space, first_row = space
        place = (place[0] - first_row, place[1], Int32(0))
        extents = (extents[0] - first_row, extents[1])
        ReducedOutput.finish(self, sums, memory, mR, space, place, extents, thread, flag)


class GroupedGemm(Gemm):
    """D = epilogue(A · B[group]) for groups of rows: each has a matrix B of its own.

    A block computes one tile, as in `Gemm`, whose roles, shared memory and registers it has. There
    are as many blocks as offsets could need at most; each finds its tile (`GroupedTiles`), and
    those that find none are done. Tiles end with their group: what is behind is not written.

    A (R,K), B (E,K,N), D (R',N), offsets (E,): group e has the rows from offsets[e - 1] (0 for the
    first) to offsets[e]. Rows behind the last group are left alone. Vectors lie along K in A and
    along N in D, unless they are one element, because a group may begin at any row.

    gathered: the first further operand is (T,) Int32; row t of the product is that row of A.
    scattered: the next one is, too; row t of the result becomes that row of D. What else an
               epilogue reads and writes by rows has row t.
    experts: B is (E,) Int64, the addresses of matrices; the next two operands are Int64, their
             columns and their stride that is not 1.

    Values with rows have no batch mode, others have one of E: what is reduced over rows is (E,N),
    over rows and columns (E,). Groups without rows have the latter two as well.
    """

    place = 8  # row, column, group and flag; end and first row of the group, tiles before, tiles
    reduced_output = GroupReducedOutput

    def __init__(
        self,
        *args,
        gathered: bool = False,
        scattered: bool = False,
        experts: ExpertMatrices | None = None,
        **keywords,
    ):
        super().__init__(*args, **keywords)
        if self.split_k is not None:
            raise ValueError("K is not cut where rows are")
        self.gathered = gathered
        self.scattered = scattered
        self.experts = experts

    @cute.jit
    def with_operands(
        self,
        mA: cute.Tensor,
        mB: cute.Tensor,
        mD: cute.Tensor,
        offsets: cute.Tensor,
        operands,
        workspace: Int64,
        stream: cuda.CUstream,
    ):
        """operands: a tuple of row indices of A and of D, as there are, and what describes experts;
        then what the epilogue reads, and its outputs beside D; workspace: an address, used if
        anything is reduced."""
        indices, operands = self._indices(operands)
        groups, rows = offsets.shape[0], mD.shape[0]
        mA, mD = operand_batch_last(mA), operand_batch_last(mD)
        if const_expr(self.experts is None):
            mB = operand_batch_last(mB, transposed=True)
            of_any, columns = mB, mB.shape[0]
        else:
            columns, mB, operands = Int32(operands[0]), (mB, operands[1]), operands[2:]
            of_any = self.experts.at(Int64(0), (columns, mA.shape[1]), mB[1])
        read = len(self.epilogue.kinds)
        written = read + len(self.epilogue.full) - 1
        mD = (mD, *(operand_batch_last(operand) for operand in operands[read:written]))
        self._plan_for(mA, of_any, mD)
        mR = ()
        if const_expr(self.fused):
            mR = self.output.reduced.reductions.output_modes(operands[written:])
        operands = self.epilogue.operand_modes(operands[:read])
        tile_m, tile_n, _ = self.tile_shape
        row_tiles = most_row_tiles(rows, groups, tile_m)
        tiles_n = cute.ceil_div(columns, tile_n)
        extents = Int32(columns), Int32(tiles_n)
        self.kernel(mA, mB, mD, offsets, extents, indices, operands, mR, workspace).launch(
            grid=(cutlass.max(row_tiles * tiles_n, 1), 1, 1),
            block=(self.threads, 1, 1),
            min_blocks_per_mp=1,
            stream=stream,
        )

    def _indices(self, operands) -> tuple:
        """((rows of A, rows of D), further operands)"""
        found = []
        for there in (self.gathered, self.scattered):
            found.append(operands[0] if there else None)
            operands = operands[1:] if there else operands
        return tuple(found), operands

    @cute.kernel
    def kernel(
        self,
        mA: cute.Tensor,
        mB,
        mD,
        offsets: cute.Tensor,
        extents,
        indices,
        operands,
        mR,
        workspace: Int64,
    ):
        """extents: columns, and tiles along N."""
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        tile_m, tile_n, _ = self.tile_shape
        shared = self._shared_memory()
        reduced = mR[len(self.epilogue.per_block) :]
        if const_expr(len(reduced) > 0):
            blocks, _, _ = cute.arch.grid_dim()
            self._grouped.write_empty(offsets, reduced, extents[0], block, blocks, thread)
        groups = GroupedTiles(offsets, extents[1], tile_m, self.raster)
        found, tile, _ = groups.find(groups.start_at(block), block)
        if found:
            self._remember(tile, shared[3], thread)
            place = (tile.first_row + tile.m * tile_m, tile.n * tile_n, tile.group)
            own = (_ending_at(mA, tile.end_row), *self._matrix_of(mB, extents[0], mA, tile.group))
            sources = self._sources(*own, indices[0], place, shared, thread)
            product = self._product(sources, shared[1], shared[2], mA.shape[1], thread)
            self._write_group(
                product, shared, mD, extents, indices[1], operands, mR, workspace, thread
            )

    @property
    def _grouped(self) -> GroupedReductions:
        return GroupedReductions(self.output.reduced.reductions)

    @cute.jit
    def _remember(self, tile: GroupTile, s_tile: cute.Tensor, thread: Int32):
        """In shared memory, as registers are needed for other things across the main loop."""
        if thread == 0:
            s_tile[0] = tile.first_row + tile.m * self.tile_shape[0]
            s_tile[1] = tile.n * self.tile_shape[1]
            s_tile[2] = tile.group
            s_tile[4], s_tile[5] = tile.end_row, tile.first_row
            s_tile[6], s_tile[7] = tile.first_tile, tile.tiles

    def _matrix_of(self, mB, columns, mA, group) -> tuple:
        """(B as (N, K, L), the group's batch in it)"""
        if self.experts is None:
            return mB, group
        addresses, pitch = mB
        return self.experts.at(addresses[group], (columns, mA.shape[1]), pitch), Int32(0)

    def _sources(self, mA, mB, batch, row_index, place, shared, thread) -> tuple:
        """batch: Of B. place: first row and column of the tile, and its group."""
        first_m, first_n, group = place
        _, sA, sB, _ = shared
        if self.gathered:
            source = self.A.gathered_source(mA, row_index, first_m, sA, thread)
        else:
            source = self.A.source(mA, first_m, group, sA, thread)
        return (source, *self._sources_of_b(mB, first_n, batch, sB, thread))

    def _write_group(self, product, shared, mD, extents, out_rows, operands, mR, workspace, thread):
        """The tile that `_remember` has kept."""
        memory, _, _, s_tile = shared
        columns, tiles_n = extents
        row, column, group = s_tile[0], s_tile[1], s_tile[2]
        tile = GroupTile(group, s_tile[5], s_tile[4], None, None, s_tile[6], s_tile[7])
        mD = tuple(_ending_at(output, tile.end_row) for output in mD)
        parts = self.output.parts_of(mD) if self.fused else mD
        if self.scattered:
            parts = (_scattered(parts[0], out_rows), *parts[1:])
        blocks = len(self.epilogue.per_block)
        mR, reduced = tuple(_ending_at(one, tile.end_row) for one in mR[:blocks]), mR[blocks:]
        space = None
        if self.epilogue.reduced:
            mR = (*mR, *self._grouped.outputs_of(group, tile.first_row, reduced))
            parts_at = workspace + COUNTER_BYTES
            space = self._grouped.space(tile, tiles_n, workspace, parts_at), tile.first_row
        extents = (tile.end_row, columns)
        place, flag = (row, column, group), s_tile.iterator + 3
        self._write(*product, (memory, parts, operands, mR, space, place, extents, thread, flag))


class GroupedSumGemm(Gemm):
    """D[group] = epilogue(A · B) summed over the group: gradients of weights.

    A block computes one tile of one group, as in `Gemm`. K ends with the group. Where vectors lie
    along K, it begins with a whole vector, and what is in front of the group is cleared in shared
    memory, once it is there.

    A (M,T), B (T,N), D (E,M,N), offsets (E,): group e has the columns of A and rows of B from
    offsets[e - 1] (0 for the first) to offsets[e]; without any, the product is 0.

    accumulate: D is added to, see `Accumulated`.
    experts: D is (E,) Int64, the addresses of matrices; the first further operands are Int64, their
             columns and their stride that is not 1.
    """

    def __init__(
        self,
        *args,
        accumulate: bool = False,
        experts: ExpertMatrices | None = None,
        epilogue: Epilogue | None = None,
        **keywords,
    ):
        self.product = epilogue or Finish()
        super().__init__(
            *args, epilogue=Accumulated(epilogue) if accumulate else epilogue, **keywords
        )
        if self.split_k is not None:
            raise ValueError("K is cut by the offsets alone")
        self.accumulate = accumulate
        self.experts = experts

    @cute.jit
    def with_operands(
        self,
        mA: cute.Tensor,
        mB: cute.Tensor,
        mD: cute.Tensor,
        offsets: cute.Tensor,
        operands,
        workspace: Int64,
        stream: cuda.CUstream,
    ):
        """operands: a tuple of what describes experts, then what the epilogue reads, and its
        outputs beside D; workspace: an address, used if anything is reduced."""
        mA, mB = operand_batch_last(mA), operand_batch_last(mB, transposed=True)
        if const_expr(self.experts is None):
            mD = operand_batch_last(mD)
            of_any = mD
        else:
            mD, operands = (mD, *operands[:2]), operands[2:]
            of_any = self._matrix_of(mD, mA.shape[0], None)
        read = len(self.product.kinds)
        written = read + len(self.epilogue.full) - 1
        others = tuple(operand_batch_last(operand) for operand in operands[read:written])
        self._plan_for(mA, mB, (of_any, *others))
        groups = offsets.shape[0]
        tiles_m, tiles_n = self._tiles((mA.shape[0], mB.shape[0]))
        mR, space = (), None
        if const_expr(self.fused):
            mR = self.output.reduced.reductions.output_modes(operands[written:])
        if const_expr(len(self.epilogue.reduced) > 0):
            space = self._reduction_space(tiles_m, tiles_n, groups, 0, workspace)
        operands = self.product.operand_modes(operands[:read])
        self.kernel(mA, mB, mD, others, offsets, operands, mR, space).launch(
            grid=(tiles_m * tiles_n * groups, 1, 1),
            block=(self.threads, 1, 1),
            min_blocks_per_mp=1,
            stream=stream,
        )

    @cute.kernel
    def kernel(self, mA: cute.Tensor, mB: cute.Tensor, mD, others, offsets, operands, mR, space):
        """others: outputs with rows and columns beside D."""
        thread, _, _ = cute.arch.thread_idx()
        extents = (mA.shape[0], mB.shape[0])
        place = self._first_of_tile(extents)
        memory, sA, sB, s_tile = self._shared_memory()
        if thread == 0:
            s_tile[0], s_tile[1], s_tile[2] = place
        first_k, end_k = _range_of_group(offsets, place[2])
        leading = None
        if const_expr(self._vectors_along_k() > 1):
            ahead = first_k % self._vectors_along_k()
            first_k -= ahead
            leading = Leading((sA, sB), ahead, thread, self.threads)
        mA, mB = (_part_of_k(mX, first_k, end_k) for mX in (mA, mB))
        sources = (
            self.A.source(mA, place[0], Int32(0), sA, thread),
            *self._sources_of_b(mB, place[1], Int32(0), sB, thread),
        )
        product = self._product(sources, sA, sB, mA.shape[1], thread, leading)
        place, flag = (s_tile[0], s_tile[1], s_tile[2]), s_tile.iterator + 3
        D = self._matrix_of(mD, mA.shape[0], place[2])
        if const_expr(self.accumulate):
            operands = (*operands, D)
        outputs = self.output.parts_of((D, *others)) if const_expr(self.fused) else (D, *others)
        self._write(*product, (memory, outputs, operands, mR, space, place, extents, thread, flag))

    def _matrix_of(self, mD, rows, group) -> cute.Tensor:
        """D as (M, N, L), of which the group's batch is read and written; group None: of any."""
        if self.experts is None:
            return mD
        addresses, columns, pitch = mD
        address = Int64(0) if group is None else addresses[group]
        return self.experts.at(address, (rows, Int32(columns)), pitch)

    def _vectors_along_k(self) -> int:
        """Elements of them; 1 if there are none."""
        along_k = any(operand.unit_mode == 1 for operand in (self.A, self.B))
        return self.vector_bytes * 8 // self.operand_type.width if along_k else 1


@dataclass
class Leading:
    """Elements along K that are in the first tile, but in front of the product.

    Attributes:
        shared: Tiles of A and B, (rows, K, stages).
        count: Of the elements; less than a vector has.
        thread: Of `threads`.
    """

    shared: tuple
    count: Int32
    thread: Int32
    threads: int

    @cute.jit
    def clear(self):
        """Makes them 0, behind a barrier after the tile is written."""
        if self.count > 0:
            for sX in self.shared:
                rows = cute.size(sX, mode=[0])
                for i in cutlass.range(self.thread, rows * self.count, self.threads, unroll=1):
                    sX[i % rows, i // rows, 0] = sX.element_type(0)
            cute.arch.sync_threads()


@cute.jit
def _range_of_group(offsets: cute.Tensor, group: Int32) -> tuple:
    """(first, behind the last)"""
    first = Int32(0)
    if group > 0:
        first = offsets[group - 1]
    return first, cutlass.max(offsets[group], first)


def _part_of_k(mX: cute.Tensor, first: Int32, end: Int32) -> cute.Tensor:
    """Of an operand (rows, K, L)."""
    rows, _, batches = mX.shape
    layout = cute.make_layout((rows, end - first, batches), stride=mX.stride)
    return cute.make_tensor(mX.iterator + Int64(first) * mX.stride[1], layout)


def _ending_at(mX: cute.Tensor, end: Int32) -> cute.Tensor:
    """Of a tensor (rows, columns, L) the rows before `end`."""
    layout = cute.make_layout((end, *mX.shape[1:]), stride=mX.stride)
    return cute.make_tensor(mX.iterator, layout)


def _scattered(parts, rows: cute.Tensor):
    """D, or its parts, to be written to other rows."""
    if isinstance(parts, tuple):
        return tuple(ScatteredRows(part, rows) for part in parts)
    return ScatteredRows(parts, rows)

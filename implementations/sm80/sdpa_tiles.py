"""Tiles of the matrices of attention: from global to shared memory, products of them, and back."""

from collections.abc import Callable
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Numeric
from cutlass.cute.nvgpu import warp

from ..common.attention.sequences import keys_in_pages
from ..common.attention.values import Values
from .mma import MMA_M, mma_k, mma_operation

WARPS = 4
THREADS = 32 * WARPS
BLOCK_M = MMA_M * WARPS  # rows that the warps multiply at once
BLOCK_N = 16  # columns
CHUNK = 64  # columns that lie side by side in shared memory: all banks once
VECTOR = 8  # elements of a copy
_VECTOR_BYTES = 16
_ELEMENT_BYTES = _VECTOR_BYTES // VECTOR
_CHUNK_BYTES = CHUNK * _ELEMENT_BYTES
_VECTORS = CHUNK // VECTOR  # of a row of a chunk
_ROWS = THREADS // _VECTORS  # that are copied at once
_UNROLLED = 2  # chunks; loops over more are short code, which is soon compiled


class Extents(NamedTuple):
    """Of a problem; queries and keys: of a sequence, at most."""

    batches: Int32
    heads: Int32
    heads_kv: Int32
    queries: Int32
    keys: Int32


def extents_of(
    mQ: cute.Tensor,
    mK: cute.Tensor,
    values: Values,
    page_size: int | None = None,
) -> Extents:
    """mQ, mK: (B,H,S,D), or packed (T,H,D)"""
    if "cu_seqlens_q" in values:
        batches = values["cu_seqlens_q"].shape[0] - 1
        queries = values.longest("q", mQ.shape[0])
    else:
        batches, queries = mQ.shape[0], mQ.shape[2]
    if "cu_seqlens_kv" in values:
        keys = values.longest("kv", mK.shape[0])
    elif page_size is not None:
        keys = keys_in_pages(values, page_size)
    else:
        keys = mK.shape[2]
    return Extents(batches, mQ.shape[1], mK.shape[1], queries, keys)


class Pages(NamedTuple):
    """Where rows lie that are cut into pages.

    table: Of the pages of the sequence.
    pitch: Bytes from a page to the next.
    size: Rows of a page.
    """

    table: cute.Tensor
    pitch: Int64
    size: int


class Matrix(NamedTuple):
    """Rows of one head in global memory.

    address: Of the first row.
    pitch: Bytes from a row to the next.
    rows, columns: Of it; what is read beyond is 0.
    """

    address: Int64
    pitch: Int64
    rows: Int32
    columns: Int32
    pages: Pages | None = None

    def row(self, index: Int32) -> Int64:
        """Its address, if there is such a row."""
        if self.pages is None:
            return self.address + Int64(index) * self.pitch
        table, pitch, size = self.pages
        index = cutlass.max(cutlass.min(index, self.rows - 1), 0)
        page = Int64(table[index // size]) * pitch
        return self.address + page + Int64(index % size) * self.pitch


def matrix_of(mX: cute.Tensor, batch: Int32, head: Int32, first: Int32, rows: Int32) -> Matrix:
    """(B, H, S, D), or (T, H, D) of sequences that begin at a row `first`."""
    element_bytes = mX.element_type.width // 8
    packed = len(mX.shape) == 3
    outer, pitch = (first, mX.stride[0]) if packed else (batch, mX.stride[2])
    offset = Int64(outer) * mX.stride[0] + Int64(head) * mX.stride[1]
    address = mX.iterator.toint() + offset * element_bytes
    return Matrix(address, Int64(pitch) * element_bytes, rows, mX.shape[-1])


def paged_matrix_of(
    mX: cute.Tensor, values: Values, batch: Int32, head: Int32, rows: Int32, page_size: int
) -> Matrix:
    """(pages, H, page_size, D)."""
    matrix = matrix_of(mX, Int32(0), head, Int32(0), rows)
    table = values["page_table"][batch, None]
    pitch = Int64(mX.stride[0]) * (mX.element_type.width // 8)
    return matrix._replace(pages=Pages(table, pitch, page_size))


class Tiles:
    """(rows, columns) of a matrix in shared memory, swizzled.

    columns: A multiple of 64, at least as many as the matrix has.
    aligned: Rows of the matrix begin at multiples of 16 bytes: they are copied in vectors, by
        cp.async; else element by element, through registers.
    """

    def __init__(
        self, rows: int, columns: int, element_type: type[Numeric], aligned: bool, count: int = 1
    ):
        if rows % _ROWS or columns % CHUNK or element_type.width != 16:
            raise ValueError(f"no tiles of {rows} × {columns} {element_type}")
        self.rows, self.columns, self.count = rows, columns, count
        self.element_type = element_type
        self.aligned = aligned

    def __extract_mlir_values__(self) -> list:
        return []  # all is known while tracing: loops carry nothing of it

    def __new_from_mlir_values__(self, values: list) -> "Tiles":
        return self

    @property
    def tile_bytes(self) -> int:
        return self.rows * self.columns * self.element_type.width // 8

    @property
    def bytes(self) -> int:
        return self.tile_bytes * self.count

    @property
    def chunks(self) -> int:
        return self.columns // CHUNK

    @property
    def unroll(self) -> int:
        """Chunks that loops over them look at together."""
        return self.chunks if self.chunks <= _UNROLLED else 1

    def chunk(self, memory: cute.Pointer, index: Int32 | int, chunk: Int32) -> cute.Tensor:
        """Some columns of a tile, (rows, 64)."""
        elements = self.rows * CHUNK
        offset = cute.assume((index * self.chunks + chunk) * elements, divby=elements)
        return self._tensor(memory, offset, (self.rows, CHUNK), (CHUNK, 1))

    def tensor(self, memory: cute.Pointer) -> cute.Tensor:
        """The first tile, (rows, columns)."""
        shape, stride = (CHUNK, self.chunks), (1, self.rows * CHUNK)
        return self._tensor(memory, 0, (self.rows, shape), (CHUNK, stride))

    def transposed(self, memory: cute.Pointer, index: Int32) -> cute.Tensor:
        """A tile as (columns, rows)."""
        shape, stride = (CHUNK, self.chunks), (1, self.rows * CHUNK)
        elements = self.rows * self.columns
        offset = cute.assume(index * elements, divby=elements)
        return self._tensor(memory, offset, (shape, self.rows), (stride, CHUNK))

    def _tensor(self, memory: cute.Pointer, offset, shape: tuple, stride: tuple) -> cute.Tensor:
        pointer = cute.recast_ptr(memory, dtype=self.element_type) + offset
        outer = cute.make_layout(shape, stride=stride)
        layout = cute.make_composed_layout(cute.make_swizzle(3, 3, 3), 0, outer)
        return cute.make_tensor(pointer, layout)

    @cute.jit
    def fill(
        self,
        matrix: Matrix,
        first: Int32,
        memory: cute.Pointer,
        index: Int32 | int,
        thread: Int32,
    ) -> None:
        """Starts to copy rows from `first` on; zeros where there are none."""
        slot, vector = thread // _VECTORS, thread % _VECTORS
        place = slot * _CHUNK_BYTES + (vector ^ (slot % _VECTORS)) * _VECTOR_BYTES
        target = memory.toint() + index * self.tile_bytes + place
        rows = [first + slot + step * _ROWS for step in range(self.rows // _ROWS)]
        sources = [matrix.row(row) for row in rows]
        for chunk in cutlass.range(self.chunks, unroll=self.unroll):
            column = chunk * CHUNK + vector * VECTOR
            place = target + chunk * (self.rows * _CHUNK_BYTES)
            for step in cutlass.range_constexpr(len(rows)):
                _copy(
                    sources[step] + Int64(column) * _ELEMENT_BYTES,
                    place + step * _ROWS * _CHUNK_BYTES,
                    Int32((rows[step] < matrix.rows) & (column < matrix.columns)),
                    self.aligned,
                )

    @cute.jit
    def write(self, memory: cute.Pointer, matrix: Matrix, first: Int32, thread: Int32) -> None:
        """The tile into rows `first`, first + 1, ... of the matrix, nothing where there are none;
        every warp the rows that it has the accumulators of."""
        warp_index, slot, vector = thread // 32, thread % 32 // _VECTORS, thread % _VECTORS
        at_once = 32 // _VECTORS
        for step in cutlass.range_constexpr(self.rows // WARPS // at_once):
            block, local = divmod(step * at_once, MMA_M)
            local = block * BLOCK_M + warp_index * MMA_M + local + slot
            place = local * _CHUNK_BYTES + (vector ^ (local % _VECTORS)) * _VECTOR_BYTES
            row = first + local
            target = matrix.row(row)
            for chunk in cutlass.range(self.chunks, unroll=self.unroll):
                column = chunk * CHUNK + vector * VECTOR
                _write(
                    memory.toint() + place + chunk * (self.rows * _CHUNK_BYTES),
                    target + Int64(column) * _ELEMENT_BYTES,
                    Int32((row < matrix.rows) & (column < matrix.columns)),
                    self.aligned,
                )


class SharedTile(NamedTuple):
    """One of those in shared memory."""

    tiles: Tiles
    memory: cute.Pointer
    index: Int32 | int = 0

    def chunk(self, chunk: Int32) -> cute.Tensor:
        return self.tiles.chunk(self.memory, self.index, chunk)


def commit() -> None:
    """What was started to copy is a group."""
    cute.arch.cp_async_commit_group()


def arrived(groups: int = 0) -> None:
    """All groups but so many have; and all warps are here."""
    cute.arch.cp_async_wait_group(groups)
    cute.arch.sync_threads()


def _copy(source: Int64, target: Int32, inside: Int32, aligned: bool) -> None:
    """Starts to copy a vector from global to shared memory; zeros unless it is inside."""
    if aligned:
        cute.arch.inline_ptx(
            f"cp.async.cg.shared.global [{{$r0}}], [{{$r1}}], {_VECTOR_BYTES}, {{$r2}};",
            read_only_args=[target, source, inside * _VECTOR_BYTES],
        )
        return
    names = [f"e{i}" for i in range(VECTOR)]
    loads = [f"mov.b16 {name}, 0;" for name in names]
    loads += [f"@inside ld.global.b16 {e}, [{{$r1}} + {2 * i}];" for i, e in enumerate(names)]
    cute.arch.inline_ptx(
        f"{{ .reg .pred inside; .reg .b16 {', '.join(names)}; setp.ne.s32 inside, {{$r2}}, 0; "
        f"{' '.join(loads)} st.shared.v4.b16 [{{$r0}}], {{{', '.join(names[:4])}}}; "
        f"st.shared.v4.b16 [{{$r0}} + 8], {{{', '.join(names[4:])}}}; }}",
        read_only_args=[target, source, inside],
    )


def _write(source: Int32, target: Int64, inside: Int32, aligned: bool) -> None:
    """A vector from shared to global memory, if it is inside."""
    if aligned:
        code = (
            ".reg .b32 w0, w1, w2, w3; ld.shared.v4.b32 {w0, w1, w2, w3}, [{$r0}]; "
            "@inside st.global.v4.b32 [{$r1}], {w0, w1, w2, w3};"
        )
    else:
        names = [f"e{i}" for i in range(VECTOR)]
        stores = [f"@inside st.global.b16 [{{$r1}} + {2 * i}], {e};" for i, e in enumerate(names)]
        code = (
            f".reg .b16 {', '.join(names)}; "
            f"ld.shared.v4.b16 {{{', '.join(names[:4])}}}, [{{$r0}}]; "
            f"ld.shared.v4.b16 {{{', '.join(names[4:])}}}, [{{$r0}} + 8]; {' '.join(stores)}"
        )
    cute.arch.inline_ptx(
        f"{{ .reg .pred inside; setp.ne.s32 inside, {{$r2}}, 0; {code} }}",
        read_only_args=[source, target, inside],
    )


class Products:
    """mma.sync of tiles; each warp has 16 rows of every 64."""

    def __init__(self, element_type: type[Numeric], thread: Int32):
        self.element_type = element_type
        operation = mma_operation(element_type)
        self.tiled = cute.make_tiled_mma(
            operation, (WARPS, 1, 1), (BLOCK_M, BLOCK_N, mma_k(element_type))
        )
        self.share = self.tiled.get_slice(thread)
        self.thread = thread
        plain, transposed = (
            cute.make_copy_atom(warp.LdMatrix8x8x16bOp(transpose=t, num_matrices=4), element_type)
            for t in (False, True)
        )
        self._left = cute.make_tiled_copy_A(plain, self.tiled)
        self._right = cute.make_tiled_copy_B(plain, self.tiled)
        self._transposed = cute.make_tiled_copy_B(transposed, self.tiled)

    def accumulators(self, rows: int, columns: int) -> cute.Tensor:
        """Zeros."""
        found = cute.make_rmem_tensor(self.tiled.partition_shape_C((rows, columns)), Float32)
        found.fill(0.0)
        return found

    def places(self, rows: int, columns: int) -> cute.Tensor:
        """(row, column) of each accumulator."""
        return self.share.partition_C(cute.make_identity_tensor((rows, columns)))

    @cute.jit
    def of_shared(self, accumulators: cute.Tensor, A: SharedTile, B: SharedTile) -> None:
        """Adds A · Bᵀ: (rows, k) and (columns, k)."""
        for chunk in cutlass.range(A.tiles.chunks, unroll=A.tiles.unroll):
            sA, sB = A.chunk(chunk), B.chunk(chunk)
            rA = self.tiled.make_fragment_A(self.share.partition_A(sA))
            rB = self.tiled.make_fragment_B(self.share.partition_B(sB))
            read_A, read_B = self._reader(self._left, sA, rA), self._reader(self._right, sB, rB)
            for k in cutlass.range_constexpr(cute.size(rA, mode=[2])):
                read_A(k)
                read_B(k)
                self._multiply(accumulators, rA, rB, k)

    def of_registers(self, accumulators: cute.Tensor, rA: cute.Tensor, sB: cute.Tensor) -> None:
        """Adds A · Bᵀ, A as `left_operand` gives it; sB: (columns, k) with columns side by side."""
        rB = self.tiled.make_fragment_B(self.share.partition_B(sB))
        read_B = self._reader(self._transposed, sB, rB)
        for k in range(cute.size(rA, mode=[2])):
            read_B(k)
            self._multiply(accumulators, rA, rB, k)

    def left_operand(self, accumulators: cute.Tensor) -> cute.Tensor:
        """Accumulators, rounded, as the left operand of a product."""
        rounded = cute.make_rmem_tensor(accumulators.layout, self.element_type)
        rounded.store(accumulators.load().to(self.element_type))
        (pair, half), m, n = accumulators.layout.shape
        (pair_step, half_step), m_step, n_step = accumulators.layout.stride
        layout = cute.make_layout(
            ((pair, half, 2), m, n // 2),
            stride=((pair_step, half_step, n_step), m_step, 2 * n_step),
        )
        return cute.make_tensor(rounded.iterator, layout)

    def store(self, accumulators: cute.Tensor, sC: cute.Tensor) -> None:
        """Rounded, to shared memory."""
        rounded = cute.make_rmem_tensor(accumulators.layout, self.element_type)
        rounded.store(accumulators.load().to(self.element_type))
        cute.autovec_copy(rounded, self.share.partition_C(sC))

    def _reader(
        self, tiled_copy: cute.TiledCopy, sX: cute.Tensor, rX: cute.Tensor
    ) -> Callable[[int], None]:
        """Reads the k-th part of an operand from shared memory into registers."""
        share = tiled_copy.get_slice(self.thread)
        source, target = share.partition_S(sX), share.retile(rX)
        return lambda k: cute.copy(tiled_copy, source[None, None, k], target[None, None, k])

    def _multiply(self, accumulators, rA: cute.Tensor, rB: cute.Tensor, k: int) -> None:
        cute.gemm(self.tiled, accumulators, rA[None, None, k], rB[None, None, k], accumulators)

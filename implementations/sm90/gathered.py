"""Rows of A that lie anywhere: TMA copies neighbours only, so a group of threads gathers them.

Each row of a tile is 128 bytes of K, eight vectors; eight threads copy one row by cp.async. What
they copied is told to the consumers some stages later, when it is there: whoever writes shared
memory for wgmma makes it visible to the asynchronous proxy itself.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

ROW_BYTES = 128  # of a tile: a swizzle, whose 16-byte vectors change places by row
VECTOR_BYTES = 16
ACROSS = ROW_BYTES // VECTOR_BYTES  # threads of a row
THREADS = 128
STAGES = 4  # of the pipeline, at least


def stages_behind(stages: int) -> int:
    """Whose copies are under way, while another is begun; of so many, consumers keep one, and
    release another behind it."""
    return stages - 2


@dataclass(frozen=True)
class RowGather:
    """Copies tiles of some rows of a K-major matrix to shared memory.

    Args:
        rows: Of a tile, a multiple of 16.
        element_bytes: Of an element.
    """

    rows: int
    element_bytes: int

    @cute.jit
    def sources(self, mA, row_index, first: Int32, end: Int32, thread: Int32) -> cute.Tensor:
        """Addresses of this thread's vector in the rows that it copies.

        first: Place of the tile's first row in `row_index`; rows from `end` on are copies of the
        last one before.
        """
        steps = self.rows * ACROSS // THREADS
        found = cute.make_rmem_tensor(steps, Int64)
        for i in cutlass.range_constexpr(steps):
            place = first + thread // ACROSS + i * (THREADS // ACROSS)
            row = row_index[cutlass.min(place, end - 1)]
            found[i] = mA.iterator.toint() + Int64(row) * mA.stride[0] * self.element_bytes
        return found

    @cute.jit
    def copy(self, sources: cute.Tensor, k: Int32, extent: Int32, stage: Int32, thread: Int32):
        """Starts to copy the k-th tile; elements of K beyond `extent` become zero.

        stage: Address of the tile in shared memory, a multiple of 1024.
        """
        vector = thread % ACROSS
        first = k * ROW_BYTES + vector * VECTOR_BYTES
        inside = cutlass.max(cutlass.min(extent * self.element_bytes - first, VECTOR_BYTES), 0)
        row = thread // ACROSS
        # Rows of a thread are a multiple of 8 apart, so their swizzle is the same.
        target = stage + row * ROW_BYTES + (vector ^ (row % 8)) * VECTOR_BYTES
        offset = Int64(first) if inside > 0 else Int64(0)
        for i in cutlass.range_constexpr(cute.size(sources)):
            cute.arch.inline_ptx(
                f"cp.async.cg.shared.global [{{$r0}}], [{{$r1}}], {VECTOR_BYTES}, {{$r2}};",
                read_only_args=[
                    target + i * (THREADS // ACROSS * ROW_BYTES),
                    sources[i] + offset,
                    inside,
                ],
            )
        cute.arch.cp_async_commit_group()


@cute.jit
def tell(full: cute.Pointer, in_flight: cutlass.Constexpr):
    """Tells the consumers of a stage that this warp's copies are there; `in_flight` later ones need
    not be."""
    cute.arch.cp_async_wait_group(in_flight)
    cute.arch.fence_view_async_shared()
    cute.arch.sync_warp()
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive(full)

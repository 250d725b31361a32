"""Parts of a tile that the blocks of a cluster have, added up through their shared memory."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, const_expr

_VECTOR = 4  # values that a thread reads or writes at once
_VALUE_BYTES = 4


@dataclass(frozen=True)
class ClusterSums:
    """Sums up the accumulators of the blocks of a cluster, each of which has a part of one tile.

    Every block leaves its part in its own shared memory, and adds up a share of the vectors of
    all parts, in the order of ranks: sums do not depend on who came when. They go to the first
    block, in place of its part: who has read a vector there is the only one to write it.

    Args:
        parts: Blocks of a cluster.
        threads: Of a block, that have accumulators.
        values: Float32 or Int32 accumulators per thread, a multiple of 4.
    """

    parts: int
    threads: int
    values: int

    def __post_init__(self):
        if self.values % _VECTOR:
            raise ValueError(f"{self.values} accumulators per thread are no multiple of {_VECTOR}")

    @property
    def bytes(self) -> int:
        """Of a part."""
        return self.threads * self.values * _VALUE_BYTES

    @cute.jit
    def combine(
        self, accumulators: cute.Tensor, memory: cute.Pointer, thread: Int32, barrier_id: Int32
    ) -> Boolean:
        """True for the block that has the tile: its accumulators are the sum then.

        Args:
            memory: Shared, where the part goes: nothing is on its way there any more, and of what
                has been there this thread needs nothing.
            thread: Its number among those that have accumulators.
            barrier_id: A named barrier, of all of these.
        """
        rank = cute.arch.block_idx_in_cluster()
        own = self._vectors(memory)
        # Other threads may still multiply what lay there.
        cute.arch.barrier(barrier_id=barrier_id, number_of_threads=self.threads)
        for i in cutlass.range_constexpr(self.values // _VECTOR):
            cute.autovec_copy(_quad(accumulators, i), own[None, i * self.threads + thread])
        # Warps that have ended, as the producer's have, count as having arrived.
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()
        self._add_up(memory, accumulators.element_type, rank, thread)
        # Behind this one all sums are there, and nobody reads this block's memory any more.
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()
        complete = rank == 0
        if complete:
            for i in cutlass.range_constexpr(self.values // _VECTOR):
                cute.autovec_copy(own[None, i * self.threads + thread], _quad(accumulators, i))
        return complete

    @cute.jit
    def _add_up(self, memory, element_type: cutlass.Constexpr, rank, thread):
        """This block's share of the vectors of all threads, which may be no multiple of them; that
        of the last block may be less."""
        vectors = self.values // _VECTOR * self.threads
        share = -(-vectors // self.parts)
        whole = min(share, vectors - share * (self.parts - 1)) // self.threads
        first = rank * share + thread
        if const_expr(whole > 0):
            self._add_vectors(memory, element_type, first, whole)
        for i in cutlass.range_constexpr(whole, -(-share // self.threads)):
            of_share = thread + i * self.threads
            inside = (of_share < share) & (rank * share + of_share < vectors)
            self._add_rest(memory, element_type, first + i * self.threads, inside)

    @cute.jit
    def _add_rest(self, memory, element_type: cutlass.Constexpr, first, has_one):
        if has_one:
            self._add_vectors(memory, element_type, first, 1)

    def _add_vectors(self, memory, element_type, first, count: int):
        """So many of them, `threads` apart. All are asked for before one is waited for: they take
        as many registers as the accumulators did."""
        of_blocks = [
            self._vectors(cute.arch.map_dsmem_ptr(memory, Int32(rank)))
            for rank in range(self.parts)
        ]
        read = cute.make_rmem_tensor((_VECTOR, count, self.parts), element_type)
        for i in range(count):
            for rank, vectors in enumerate(of_blocks):
                cute.autovec_copy(vectors[None, first + i * self.threads], read[None, i, rank])
        for i in range(count):
            added = cute.make_rmem_tensor(_VECTOR, element_type)
            for j in range(_VECTOR):
                total = read[j, i, 0]
                for rank in range(1, self.parts):
                    total += read[j, i, rank]
                added[j] = total
            cute.autovec_copy(added, of_blocks[0][None, first + i * self.threads])

    def _vectors(self, memory):
        """(values of a vector, vectors): those of all threads side by side."""
        count = self.values // _VECTOR * self.threads
        return cute.make_tensor(memory, cute.make_ordered_layout((_VECTOR, count), order=(0, 1)))


def _quad(accumulators, i):
    return cute.make_tensor(accumulators.iterator + _VECTOR * i, cute.make_layout(_VECTOR))

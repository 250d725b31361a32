"""Parts of a tile that the blocks of a cluster have, added up through their shared memory."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, const_expr
from cutlass.cute import AddressSpace

from ..common.work_split import COUNTER_BYTES, WorkSplit, arrive

_VECTOR = 4  # values that a thread reads or writes at once
_VALUE_BYTES = 4


@dataclass(frozen=True)
class ClusterShare:
    """Which part of a tile a cluster has, where a tile is cut among several of them.

    Attributes:
        split: Of the tiles among clusters, each of which has a part of one tile.
        flag: An Int32 in shared memory, of nobody else until the sums are there.
    """

    split: WorkSplit
    cluster: Int32
    tile: Int32
    flag: cute.Pointer


@dataclass(frozen=True)
class ClusterSums:
    """Sums up the accumulators of the blocks of a cluster, each of which has a part of one tile.

    Every block leaves its part in its own shared memory, and adds up a share of the vectors of
    all parts, in the order of ranks: sums do not depend on who came when. They go to the first
    block, in place of its part: who has read a vector there is the only one to write it.

    Where several clusters have parts of a tile, each leaves its sums in the workspace, and the last
    one to come adds up those of all, block by block as before, in the order of clusters.

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

    @property
    def groups(self) -> int:
        """That sum up a tile, each with a counter of the workspace."""
        return 1

    @property
    def bytes_per_worker(self) -> int:
        """Of the workspace: what a cluster leaves there of a tile that it shares with others."""
        return self.bytes

    @cute.jit
    def combine(
        self,
        accumulators: cute.Tensor,
        memory: cute.Pointer,
        thread: Int32,
        barrier_id: Int32,
        further: ClusterShare | None = None,
    ) -> Boolean:
        """True for the block that has the tile: its accumulators are the sum then.

        Args:
            memory: Shared, where the part goes: nothing is on its way there any more, and of what
                has been there this thread needs nothing.
            thread: Its number among those that have accumulators.
            barrier_id: A named barrier, of all of these.
            further: Of a tile that other clusters have parts of, too.
        """
        rank, element_type = cute.arch.block_idx_in_cluster(), accumulators.element_type
        own = self._vectors(memory)
        # Other threads may still multiply what lay there.
        cute.arch.barrier(barrier_id=barrier_id, number_of_threads=self.threads)
        for i in cutlass.range_constexpr(self.values // _VECTOR):
            cute.autovec_copy(_quad(accumulators, i), own[None, i * self.threads + thread])
        # Warps that have ended, as the producer's have, count as having arrived.
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()
        blocks = [
            self._vectors(cute.arch.map_dsmem_ptr(memory, Int32(other)))
            for other in range(self.parts)
        ]
        sums = blocks[0]
        if const_expr(further is not None):
            sums = self._partial(further, further.cluster, element_type)
        self._add_up(_OfBlocks(blocks), sums, element_type, rank, thread)
        # Behind this one all sums are there, and nobody reads this block's memory any more.
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()
        complete = rank == 0
        if const_expr(further is not None):
            complete = self._combine_clusters(further, blocks[0], element_type, rank, thread)
        if complete:
            for i in cutlass.range_constexpr(self.values // _VECTOR):
                cute.autovec_copy(own[None, i * self.threads + thread], _quad(accumulators, i))
        return complete

    @cute.jit
    def _combine_clusters(
        self, further: ClusterShare, sums, element_type: cutlass.Constexpr, rank, thread
    ) -> Boolean:
        """The cluster that comes last adds up what all have left in the workspace. True for its
        first block, which has the sums then."""
        first, clusters = further.split.workers_on(further.tile)
        if (rank == 0) & (thread == 0):
            arrived = cute.make_rmem_tensor(1, Int32)
            arrived[0] = arrive(further.split.workspace, further.tile, clusters)
            for other in cutlass.range_constexpr(self.parts):
                flag = cute.arch.map_dsmem_ptr(further.flag, Int32(other))
                cute.autovec_copy(arrived, cute.make_tensor(flag, arrived.layout))
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()
        last = further.flag.load() == clusters - 1
        if last:
            partial = self._partial(further, first, element_type)
            values = self.bytes // _VALUE_BYTES
            of_clusters = _OfClusters(partial, values, clusters, at_once=self.parts)
            self._add_up(of_clusters, sums, element_type, rank, thread)
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
        return last & (rank == 0)

    @cute.jit
    def _add_up(self, parts, sums, element_type: cutlass.Constexpr, rank, thread):
        """This block's share of the vectors of all threads, which may be no multiple of them; that
        of the last block may be less."""
        vectors = self.values // _VECTOR * self.threads
        share = -(-vectors // self.parts)
        whole = min(share, vectors - share * (self.parts - 1)) // self.threads
        first = rank * share + thread
        if const_expr(whole > 0):
            self._add_vectors(parts, sums, element_type, first, whole)
        for i in cutlass.range_constexpr(whole, -(-share // self.threads)):
            of_share = thread + i * self.threads
            inside = (of_share < share) & (rank * share + of_share < vectors)
            self._add_rest(parts, sums, element_type, first + i * self.threads, inside)

    @cute.jit
    def _add_rest(self, parts, sums, element_type: cutlass.Constexpr, first, has_one):
        if has_one:
            self._add_vectors(parts, sums, element_type, first, 1)

    def _add_vectors(self, parts, sums, element_type, first, count: int):
        """So many of them, `threads` apart."""
        places = [first + i * self.threads for i in range(count)]
        for place, total in zip(places, parts.totals(places, element_type), strict=True):
            cute.autovec_copy(total, sums[None, place])

    def _partial(self, further: ClusterShare, cluster, element_type):
        """Vectors of the workspace that a cluster leaves its sums in."""
        address = further.split.workspace + COUNTER_BYTES + Int64(cluster) * self.bytes
        return self._vectors(
            cute.make_ptr(element_type, address, AddressSpace.gmem, assumed_align=16)
        )

    def _vectors(self, memory):
        """(values of a vector, vectors): those of all threads side by side."""
        count = self.values // _VECTOR * self.threads
        return cute.make_tensor(memory, cute.make_ordered_layout((_VECTOR, count), order=(0, 1)))


@dataclass(frozen=True)
class _OfBlocks:
    """The vectors of every block of the cluster."""

    vectors: list

    def totals(self, places, element_type):
        """Of these places. All are asked for before one is waited for: they take as many registers
        as the accumulators did."""
        parts = len(self.vectors)
        read = cute.make_rmem_tensor((_VECTOR, len(places), parts), element_type)
        for i, place in enumerate(places):
            for rank, vectors in enumerate(self.vectors):
                cute.autovec_copy(vectors[None, place], read[None, i, rank])
        for i in range(len(places)):
            added = cute.make_rmem_tensor(_VECTOR, element_type)
            for j in range(_VECTOR):
                total = read[j, i, 0]
                for rank in range(1, parts):
                    total += read[j, i, rank]
                added[j] = total
            yield added


@dataclass(frozen=True)
class _OfClusters:
    """The vectors that each of several clusters has left in the workspace.

    Attributes:
        first: Those of the first cluster; the others' follow, so many values apart.
        at_once: Clusters whose vectors are asked for before one is waited for.
    """

    first: cute.Tensor
    values: int
    clusters: Int32
    at_once: int

    def totals(self, places, element_type):
        totals = cute.make_rmem_tensor((_VECTOR, len(places)), element_type)
        for i in range(cute.size(totals)):
            totals[i] = element_type(0)
        self._add_to(totals, places)
        return [totals[None, i] for i in range(len(places))]

    @cute.jit
    def _add_to(self, totals, places):
        shape = (_VECTOR, len(places), self.at_once)
        for begin in cutlass.range(0, self.clusters, self.at_once, unroll=1):
            read = cute.make_rmem_tensor(shape, totals.element_type)
            for turn in cutlass.range_constexpr(self.at_once):
                # Behind the last one, that one once more, which is not added.
                cluster = cutlass.min(begin + turn, self.clusters - 1)
                of_cluster = cute.make_tensor(
                    self.first.iterator + Int64(cluster) * self.values, self.first.layout
                )
                for i in cutlass.range_constexpr(len(places)):
                    cute.autovec_copy(of_cluster[None, places[i]], read[None, i, turn])
            for turn in cutlass.range_constexpr(self.at_once):
                if begin + turn < self.clusters:
                    for i in cutlass.range_constexpr(cute.size(totals)):
                        totals[i] += read[(None, None, turn)][i]


def _quad(accumulators, i):
    return cute.make_tensor(accumulators.iterator + _VECTOR * i, cute.make_layout(_VECTOR))

"""Work cut along K as well, so that all workers have the same amount of it.

A unit is one k tile of one output tile, numbered along K first. Worker w has the units from
w · units / workers to (w + 1) · units / workers: the end of one tile, whole tiles, the start of
another. With as many workers as run at once, none waits (stream-K: Osama et al., Stream-K,
PPoPP 2023); with workers = parts · tiles, every tile is cut into `parts` equal parts (split-K).

What is computed of a tile by several workers is added up in the order of the workers, whoever
comes last: the result does not depend on when they ran.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64
from cutlass.cute import AddressSpace

_VALUES_AT_ONCE = 128  # of partial tiles that a thread asks for before it waits for one
_AT_ONCE = 16  # workers whose parts of a vector are asked for before one is waited for
COUNTER_BYTES = 65536  # at the start of the workspace; zero before and after every launch


@dataclass
class WorkSplit:
    """Run-time facts, made on the host and passed to the kernel.

    The workspace holds a counter for each group of threads that sums up a tile, then the partial
    tiles of each worker.
    """

    k_tiles: Int32
    units: Int32
    workers: Int32
    workspace: Int64  # address

    @cute.jit
    def first_unit(self, worker: Int32) -> Int32:
        return Int32(Int64(worker) * self.units // self.workers)

    @cute.jit
    def worker_of(self, unit: Int32) -> Int32:
        """The inverse: the one worker that has the unit."""
        return Int32(((Int64(unit) + 1) * self.workers - 1) // self.units)

    @cute.jit
    def tiles_of(self, worker: Int32) -> tuple:
        """(first tile, tile behind the last)"""
        first, end = self.first_unit(worker), self.first_unit(worker + 1)
        end_tile = cute.ceil_div(end, self.k_tiles)
        if first == end:
            end_tile = first // self.k_tiles
        return first // self.k_tiles, end_tile

    @cute.jit
    def k_range(self, worker: Int32, tile: Int32) -> tuple:
        """(first k tile, number of them) that the worker has of a tile."""
        before = tile * self.k_tiles
        first = cutlass.max(self.first_unit(worker) - before, 0)
        end = cutlass.min(self.first_unit(worker + 1) - before, self.k_tiles)
        return first, end - first

    @cute.jit
    def workers_on(self, tile: Int32) -> tuple:
        """(first worker, number of them) that share a tile."""
        first = self.worker_of(tile * self.k_tiles)
        return first, self.worker_of((tile + 1) * self.k_tiles - 1) - first + 1


@dataclass
class EvenSplit:
    """The same of workers that have one tile at most, every tile being cut into `parts`.

    Worker w has part w % parts of tile w // parts, be it empty: no division, any number of k tiles.
    """

    parts: int  # known while tracing
    k_tiles: Int32
    workspace: Int64

    def k_range(self, worker: Int32, tile: Int32) -> tuple:
        return share(worker - tile * self.parts, self.parts, self.k_tiles)

    def workers_on(self, tile: Int32) -> tuple:
        return tile * self.parts, Int32(self.parts)


@dataclass(frozen=True)
class PartialSums:
    """Sums up the accumulators of a group of threads over the workers that share a tile.

    Args:
        threads: Of a group.
        groups: Of a worker, its other blocks in the cluster included.
        values: Float32 or Int32 accumulators per thread, a multiple of 4.
        slots: Partial tiles of a worker: 2, the one that it starts in the middle of and its last
            one; 1 if it never has more.
    """

    threads: int
    groups: int
    values: int
    slots: int

    def __post_init__(self):
        if self.values % 4:
            raise ValueError(f"{self.values} accumulators per thread are no multiple of 4")

    @property
    def vectors(self) -> int:
        """Of four accumulators, per thread."""
        return self.values // 4

    @property
    def bytes_per_worker(self) -> int:
        return self.slots * self.groups * self.threads * self.values * 4

    @cute.jit
    def combine(
        self,
        accumulators: cute.Tensor,
        split: WorkSplit | EvenSplit,
        worker: Int32,
        tile: Int32,
        group: Int32,
        thread: Int32,
        flag: cute.Pointer,
        barrier_id: Int32,
    ) -> Boolean:
        """True for the group that completes the tile: its accumulators are the sum then.

        Args:
            flag: An Int32 in shared memory, of this group alone.
            barrier_id: A named barrier, of this group alone.
        """
        first, workers = split.workers_on(tile)
        complete = Boolean(True)
        if workers > 1:
            self._deposit(accumulators, split, worker, worker == first, group, thread)
            cute.arch.barrier(barrier_id=barrier_id, number_of_threads=self.threads)
            if thread == 0:
                flag.store(arrive(split.workspace, tile * self.groups + group, workers))
            cute.arch.barrier(barrier_id=barrier_id, number_of_threads=self.threads)
            complete = flag.load() == workers - 1
            if complete:
                self._sum(accumulators, split, first, workers, group, thread)
        return complete

    @cute.jit
    def leave(self, accumulators, split, worker: Int32, group: Int32, thread: Int32):
        """Only leaves them in the workspace, for `total` in a kernel behind this one: of workers
        that have one tile at most, which they may have to themselves."""
        self._deposit(accumulators, split, worker, False, group, thread)

    @cute.jit
    def total(
        self,
        split: WorkSplit,
        tile: Int32,
        group: Int32,
        thread: Int32,
        vector: Int32,
        element_type: cutlass.Constexpr,
    ) -> cute.Tensor:
        """The sum of all workers of one vector of a thread's accumulators."""
        first, workers = split.workers_on(tile)
        total = cute.make_rmem_tensor(4, element_type)
        for j in cutlass.range_constexpr(4):
            total[j] = element_type(0)
        for begin in cutlass.range(0, workers, _AT_ONCE, unroll=1):
            read = cute.make_rmem_tensor((4, _AT_ONCE), element_type)
            for turn in cutlass.range_constexpr(_AT_ONCE):
                # Behind the last one, that one once more, which is not added.
                place = cutlass.min(begin + turn, workers - 1)
                partial = self._partial(split, first + place, False, group, thread, element_type)
                cute.autovec_copy(partial[None, vector], read[None, turn])
            for turn in cutlass.range_constexpr(_AT_ONCE):
                if begin + turn < workers:
                    for j in cutlass.range_constexpr(4):
                        total[j] += read[j, turn]
        return total

    @cute.jit
    def _deposit(self, accumulators, split, worker, at_start, group, thread):
        partial = self._partial(split, worker, at_start, group, thread, accumulators.element_type)
        for i in cutlass.range_constexpr(self.values // 4):
            cute.autovec_copy(_quad(accumulators, i), partial[None, i])

    @cute.jit
    def _sum(self, accumulators, split, first, workers, group, thread):
        for i in cutlass.range_constexpr(self.values):
            accumulators[i] = accumulators.element_type(0)
        quad = cute.make_rmem_tensor(4, accumulators.element_type)
        at_once = max(_VALUES_AT_ONCE // self.values, 1)
        for worker in cutlass.range(first, first + workers, unroll=at_once):
            partial = self._partial(
                split, worker, worker == first, group, thread, accumulators.element_type
            )
            for i in cutlass.range_constexpr(self.values // 4):
                cute.autovec_copy(partial[None, i], quad)
                for j in cutlass.range_constexpr(4):
                    accumulators[4 * i + j] += quad[j]

    def _partial(self, split, worker, at_start, group, thread, element_type):
        """(4, values / 4) of one thread, the vectors of all threads side by side.

        A worker that has the start of a tile shared with others has it last of all its tiles.
        """
        slot = worker
        if self.slots == 2:
            slot = 2 * worker + Int32(at_start)
        bytes_ = self.threads * self.values * 4
        address = split.workspace + COUNTER_BYTES
        address += (Int64(slot) * self.groups + group) * bytes_ + thread * 16
        pointer = cute.make_ptr(element_type, address, AddressSpace.gmem, assumed_align=16)
        return cute.make_tensor(
            pointer, cute.make_layout((4, self.values // 4), stride=(1, 4 * self.threads))
        )


def share(part: Int32, parts: int, k_tiles: Int32) -> tuple:
    """(first k tile, number of them) of one of so many equal parts."""
    first = part * k_tiles // parts
    return first, (part + 1) * k_tiles // parts - first


@cute.jit
def arrive(workspace: Int64, number: Int32, expected: Int32) -> Int32:
    """How many have come to a counter of the workspace before.

    What a thread has seen written before it comes, the last one of `expected` sees. The counter is
    zero then, for the next launch.
    """
    counter = cute.make_ptr(Int32, workspace + number * 4, AddressSpace.gmem, assumed_align=4)
    cute.arch.fence_acq_rel_gpu()
    arrived = cute.arch.atomic_add(counter.llvm_ptr, Int32(1))
    cute.arch.fence_acq_rel_gpu()
    if arrived == expected - 1:
        counter.store(Int32(0))
    return arrived


def _quad(accumulators, i):
    return cute.make_tensor(accumulators.iterator + 4 * i, cute.make_layout(4))

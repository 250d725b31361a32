"""Tiles that clusters take as they become free, in place of every so many.

A cluster begins with the tile of its own number. The number of each further one it takes from a
counter in the workspace, as soon as the loads of the last one are issued: no tile waits behind a
long one while other clusters are free, and the stages that are loaded by then hide the time that
the counter takes. One warp of the cluster takes numbers, its leader; a ring in the shared memory of
each block brings them to all others that need them.

Every cluster that has a tile takes numbers until one is behind the last tile, so altogether as many
are taken as there are tiles: who took the last one sets the counter to zero for the next launch.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr
from cutlass.cute import AddressSpace

from ..common.work_split import COUNTER_BYTES

# Numbers on their way: even, so that consumers in turn have slots of their own; and no fewer than
# the stages that gathered rows are told of late, which are tiles where K is short.
SLOTS = 4
BARRIERS = 2 * SLOTS
BYTES = BARRIERS * 8 + SLOTS * 4

_NUMBER_BYTES = 4


def counter_of(workspace: Int64) -> Int64:
    """The last of the counters there are; what epilogues reduce has those in front."""
    return workspace + (COUNTER_BYTES - _NUMBER_BYTES)


@dataclass(frozen=True)
class TileQueue:
    """The ring of a cluster; warps call it as a whole.

    Positions are those of numbers in the order in which they are taken, from 0 on. Whoever reads
    the ring counts its own; a slot is empty when `readers` warps have read it.

    Args:
        barriers, numbers: In shared memory, `BARRIERS` of 64 bits and `SLOTS` of 32.
        counter: An address in the workspace.
        clusters: Of the launch.
        blocks: Of a cluster.
        readers: Warps of all blocks of the cluster that read a number.
    """

    barriers: cute.Pointer
    numbers: cute.Pointer
    counter: Int64
    clusters: Int32
    blocks: int
    readers: int

    @cute.jit
    def set_up(self):
        """By the first warp of each block, before the blocks of the cluster meet."""
        if cute.arch.make_warp_uniform(cute.arch.warp_idx()) == 0:
            with cute.arch.elect_one():
                for slot in cutlass.range_constexpr(SLOTS):
                    cute.arch.mbarrier_init(self.barriers + slot, 1)
                    cute.arch.mbarrier_init(self.barriers + SLOTS + slot, self.readers)

    @cute.jit
    def take(self) -> Int32:
        """The number of the next tile of the cluster; by the leader."""
        number = Int32(0)
        if cute.arch.lane_idx() == 0:
            number = self.clusters + cute.arch.atomic_add(self._counter().llvm_ptr, Int32(1))
        return cute.arch.shuffle_sync(number, offset=0)

    @cute.jit
    def put(self, number: Int32, position: Int32):
        """By the leader, for all that read."""
        slot = position % SLOTS
        full, empty = self.barriers + slot, self.barriers + SLOTS + slot
        cute.arch.mbarrier_wait(empty, position // SLOTS % 2 ^ 1)
        lane = cute.arch.lane_idx()
        if const_expr(self.blocks == 1):
            if lane == 0:
                (self.numbers + slot).store(number)
                cute.arch.mbarrier_arrive(full)
        else:
            if lane < self.blocks:
                cute.arch.mbarrier_arrive_and_expect_tx(full, _NUMBER_BYTES, lane)
                cute.arch.store_async_dsmem(self.numbers + slot, number, full, lane)

    @cute.jit
    def read(self, position: Int32) -> Int32:
        slot = position % SLOTS
        cute.arch.mbarrier_wait(self.barriers + slot, position // SLOTS % 2)
        number = (self.numbers + slot).load()
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            leader = None if const_expr(self.blocks == 1) else 0
            cute.arch.mbarrier_arrive(self.barriers + SLOTS + slot, leader)
        return number

    @cute.jit
    def finish(self, number: Int32, tiles: Int32, position: Int32):
        """By the leader, whose last number is behind the last tile; position: of the next one."""
        if (number - self.clusters == tiles - 1) & (cute.arch.lane_idx() == 0):
            self._counter().store(Int32(0))
        if const_expr(self.blocks > 1):
            # The other blocks still signal this one's barriers: stay until they are done.
            for ahead in cutlass.range_constexpr(SLOTS):
                at = position + ahead
                empty = self.barriers + SLOTS + at % SLOTS
                cute.arch.mbarrier_wait(empty, at // SLOTS % 2 ^ 1)

    def _counter(self) -> cute.Pointer:
        return cute.make_ptr(Int32, self.counter, AddressSpace.gmem, assumed_align=4)

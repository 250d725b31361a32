"""Tiles that clusters take as they become free, in place of every so many.

A cluster begins with the tile of its own number. The number of each further one it takes from a
counter in the workspace, close to the end of the last one, so that no tile waits behind a long one
while other clusters are free. The counter answers while the last `EARLY` steps are loaded, unless a
product asks later, as stages of narrow tiles that are loaded by then hide less than it takes. One
warp of the cluster takes numbers, its leader; a ring in the shared memory of each block brings them
to all others that need them.

Nobody tells that a number has been read. The leader puts one behind the loads of the tile before,
so all but the last `stages` tiles have been multiplied, and their numbers read, by every consumer
of the cluster that they were loaded for; the ring has more slots than that.

Every cluster that has a tile takes numbers until one is behind the last tile, so altogether as many
are taken as there are tiles: who took the last one sets the counter to zero for the next launch.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr
from cutlass.cute import AddressSpace

from ..common.work_split import COUNTER_BYTES

SLOTS = 16
#: Of the main loop: each may hold a tile by itself; and consumers in turn are told twice, one
#: position apart, that there is no further tile.
MOST_STAGES = SLOTS - 2
BYTES = SLOTS * (8 + 4)
EARLY = 8

_NUMBER_BYTES = 4


def counter_of(workspace: Int64) -> Int64:
    """The last of the counters there are; what epilogues reduce has those in front."""
    return workspace + (COUNTER_BYTES - _NUMBER_BYTES)


@dataclass(frozen=True)
class TileQueue:
    """The ring of a cluster; warps call it as a whole.

    Positions are those of numbers in the order in which they are taken, from 0 on. Whoever reads
    the ring counts its own.

    Args:
        barriers, numbers: In shared memory, `SLOTS` of 64 and of 32 bits.
        counter: An address in the workspace.
        clusters: Of the launch.
        blocks: Of a cluster.
    """

    barriers: cute.Pointer
    numbers: cute.Pointer
    counter: Int64
    clusters: Int32
    blocks: int

    @cute.jit
    def set_up(self):
        """By the first warp of each block, before the blocks of the cluster meet."""
        if cute.arch.make_warp_uniform(cute.arch.warp_idx()) == 0:
            with cute.arch.elect_one():
                for slot in cutlass.range_constexpr(SLOTS):
                    cute.arch.mbarrier_init(self.barriers + slot, 1)

    @cute.jit
    def ask(self) -> Int32:
        """For the next number, by the leader: the counter's answer, which the first lane has when
        it comes. Nobody waits for it before `taken`.

        ptxas would wait for an addition: it makes one of those of all lanes that are there, and
        hands out shares of the answer. An increment it leaves alone, unless it ends nowhere."""
        answer = Int32(0)
        if cute.arch.lane_idx() == 0:
            answer = cute.arch.inline_ptx(
                "atom.relaxed.gpu.global.inc.u32 {$w0}, [{$r0}], 0x7fffffff;",
                write_only_types=[Int32],
                read_only_args=[self.counter],
            )
        return answer

    @cute.jit
    def taken(self, answer: Int32) -> Int32:
        """The number of the next tile of the cluster."""
        return self.clusters + cute.arch.shuffle_sync(answer, offset=0)

    @cute.jit
    def put(self, number: Int32, position: Int32):
        """By the leader, for all that read."""
        slot = position % SLOTS
        barrier, lane = self.barriers + slot, cute.arch.lane_idx()
        if const_expr(self.blocks == 1):
            if lane == 0:
                (self.numbers + slot).store(number)
                cute.arch.mbarrier_arrive(barrier)
        else:
            if lane < self.blocks:
                cute.arch.mbarrier_arrive_and_expect_tx(barrier, _NUMBER_BYTES, lane)
                cute.arch.store_async_dsmem(self.numbers + slot, number, barrier, lane)

    @cute.jit
    def read(self, position: Int32) -> Int32:
        slot = position % SLOTS
        cute.arch.mbarrier_wait(self.barriers + slot, position // SLOTS % 2)
        return (self.numbers + slot).load()

    @cute.jit
    def finish(self, number: Int32, tiles: Int32):
        """By the leader, whose last number is behind the last tile."""
        if (number - self.clusters == tiles - 1) & (cute.arch.lane_idx() == 0):
            self._counter().store(Int32(0))

    def _counter(self) -> cute.Pointer:
        return cute.make_ptr(Int32, self.counter, AddressSpace.gmem, assumed_align=4)

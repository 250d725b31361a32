"""Which clusters of a launch lie in one GPC, and so read L2 together.

What up to four multiprocessors of a GPC ask L2 for at about the same time it sends once, unless it
is multicast, see docs/benchmarks.md. The hardware deals clusters out to the GPCs in turn, so that
those whose numbers follow each other are in different ones. `Numbers` are others:

    cluster   0 1 2 3   4 5 6 7 8 9 10 11   12 13 ...   36 37 ...
    GPC       - - - -   0 1 2 3 4 5  6  7    0  1 ...    1  2 ...
    number    0 1 2 3   4 8 16 24 ...        5  9 ...   12 20 ...

Blocks that are in no cluster are dealt out GPC by GPC.

Only speed depends on it: where a GPU deals clusters out in another way, another one has the tile.
What a launch has in common is computed on the host: a block needs its number before it loads
anything, and finding all of it there, one operation after the other, takes 0.3 us.
"""

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from ..common.tile_order import BlockedTileOrder

IN_STEP = 4  # tiles of a cluster, one after the other, until its neighbours read at other times

_GPCS = 8
_OTHERS = _GPCS - 1


class Turns(NamedTuple):
    """How an H100 or H200 of 132 multiprocessors deals out the clusters of an empty GPU.

    Attributes:
        alone: The first ones, which go to pairs of multiprocessors that have no such neighbours.
        all_gpcs: Turns in which each GPC has one cluster.
        without_first: Turns behind those, in which all but the first GPC have one.
    """

    alone: int
    all_gpcs: int
    without_first: int


#: Of clusters by the number of their blocks.
_TURNS = {2: Turns(4, 4, 4), 4: Turns(0, 2, 2)}


@dataclass
class Numbers:
    """Of the clusters of a launch, made on the host: those of a GPC follow each other.

    Attributes:
        end: Clusters from this one on keep their number.
        all_gpcs, without_first: Turns that each GPC has in full, of either kind.
        further, further_without_first: GPCs that have one more; in the first turns all count, in
            the others all but the first.
    """

    end: Int32
    all_gpcs: Int32
    further: Int32
    without_first: Int32
    further_without_first: Int32

    @cute.jit
    def of(self, cluster: Int32, blocks: cutlass.Constexpr[int]) -> Int32:
        """The number of a cluster of so many blocks."""
        alone, all_gpcs, _ = _TURNS[blocks]
        behind = alone + _GPCS * all_gpcs
        number = cluster
        if (cluster >= alone) & (cluster < self.end):
            gpc, turn = (cluster - alone) % _GPCS, (cluster - alone) // _GPCS
            if cluster >= behind:
                gpc = (cluster - behind) % _OTHERS + 1
                turn = (cluster - behind) // _OTHERS + all_gpcs
            before = cutlass.max(gpc - 1, 0)  # GPCs with a smaller number, but the first
            number = alone + turn
            number += gpc * self.all_gpcs + cutlass.min(gpc, self.further)
            number += before * self.without_first
            number += cutlass.min(before, self.further_without_first)
        return number


@dataclass
class TileOrderByGpc(BlockedTileOrder):
    """Of tiles that clusters of a GPC share operands of."""

    numbers: Numbers


@cute.jit
def by_gpc(order: BlockedTileOrder, clusters: Int32, blocks: cutlass.Constexpr[int]):
    """The order for so many clusters of so many blocks, with numbers that follow each other in a
    GPC; as it is where a GPU deals them out so (blocks in no cluster), or nothing is known."""
    if cutlass.const_expr(blocks not in _TURNS):
        return order
    alone, all_gpcs, without_first = _TURNS[blocks]
    behind = alone + _GPCS * all_gpcs
    of_all = cutlass.min(cutlass.max(clusters - alone, 0), _GPCS * all_gpcs)
    of_others = cutlass.min(cutlass.max(clusters - behind, 0), _OTHERS * without_first)
    numbers = Numbers(
        end=order.share * (behind + _OTHERS * without_first),
        all_gpcs=of_all // _GPCS,
        further=of_all % _GPCS,
        without_first=of_others // _OTHERS,
        further_without_first=of_others % _OTHERS,
    )
    return TileOrderByGpc(**vars(order), numbers=numbers)

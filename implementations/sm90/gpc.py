"""Which clusters of a launch lie in one GPC, and so read L2 together.

What up to four multiprocessors of a GPC ask L2 for at about the same time it sends once, unless it
is multicast, see docs/benchmarks.md. The hardware deals clusters out to the GPCs in turn, so that
those whose numbers follow each other are in different ones. `by_gpc` numbers them anew:

    cluster   0 1 2 3   4 5 6 7 8 9 10 11   12 13 ...   36 37 ...
    GPC       - - - -   0 1 2 3 4 5  6  7    0  1 ...    1  2 ...
    number    0 1 2 3   4 8 16 24 ...        5  9 ...   12 20 ...

Blocks that are in no cluster are dealt out GPC by GPC.

Only speed depends on it: where a GPU deals clusters out in another way, another one has the tile.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32

IN_STEP = 4  # tiles of a cluster, one after the other, until its neighbours read at other times

_GPCS = 8


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


@cute.jit
def by_gpc(cluster: Int32, clusters: Int32, blocks: cutlass.Constexpr[int]) -> Int32:
    """A number of one of so many clusters of so many blocks: those of a GPC follow each other."""
    if cutlass.const_expr(blocks not in _TURNS):
        return cluster
    alone, all_gpcs, without_first = _TURNS[blocks]
    others = _GPCS - 1
    behind = alone + _GPCS * all_gpcs
    end = behind + others * without_first
    number = cluster
    if (cluster >= alone) & (cluster < end):
        gpc, turn = (cluster - alone) % _GPCS, (cluster - alone) // _GPCS
        if cluster >= behind:
            gpc, turn = (cluster - behind) % others + 1, (cluster - behind) // others + all_gpcs
        of_all = cutlass.min(clusters - alone, _GPCS * all_gpcs)
        of_others = cutlass.min(cutlass.max(clusters - behind, 0), others * without_first)
        before = cutlass.max(gpc - 1, 0)  # GPCs with a smaller number, but the first
        number = alone + turn
        number += gpc * (of_all // _GPCS) + cutlass.min(gpc, of_all % _GPCS)
        number += before * (of_others // others) + cutlass.min(before, of_others % others)
    return number

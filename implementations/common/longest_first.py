"""Groups in the order of their lengths, the longest first: where work is taken from a queue, what
is left for the end is short. Only the device knows the lengths.

Every warp that asks finds the order by itself: each lane has some of the groups, and counts those
that come before each. Groups of equal lengths stay in their order; so do all, if they are too many.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from .threads import WARP

WINDOWS = 4  # groups of a lane: lane, lane + 32, ...
MOST_GROUPS = WINDOWS * WARP


@dataclass(frozen=True)
class LongestFirst:
    """The order of some groups; of a kernel, which a warp of 32 lanes asks as a whole.

    Attributes:
        offsets: (groups,), Int32: where each group ends; the first begins at 0.
    """

    offsets: cute.Tensor

    @property
    def groups(self) -> Int32:
        return self.offsets.shape[0]

    @cute.jit
    def places(self) -> cute.Tensor:
        """Of this lane's groups; -1 for those that there are not, and if there are too many."""
        lane = cute.arch.lane_idx()
        lengths = cute.make_rmem_tensor(WINDOWS, Int32)
        places = cute.make_rmem_tensor(WINDOWS, Int32)
        for window in cutlass.range_constexpr(WINDOWS):
            own = window * WARP + lane
            lengths[window], places[window] = Int32(0), Int32(-1)
            if (own < self.groups) & (self.groups <= MOST_GROUPS):
                lengths[window], places[window] = self._length(own), Int32(0)
        if self.groups <= MOST_GROUPS:
            for other in cutlass.range(self.groups, unroll=4):
                length = self._length(other)
                for window in cutlass.range_constexpr(WINDOWS):
                    earlier = other < window * WARP + lane
                    longer = length > lengths[window]
                    before = longer | (earlier & (length == lengths[window]))
                    if before & (places[window] >= 0):
                        places[window] += 1
        return places

    @cute.jit
    def group_at(self, places: cute.Tensor, place: Int32) -> Int32:
        group = place
        for window in cutlass.range_constexpr(WINDOWS):
            found = cute.arch.vote_ballot_sync(places[window] == place)
            if found != 0:
                group = window * WARP + cute.arch.popc(found - 1)
        return group

    @cute.jit
    def _length(self, group: Int32) -> Int32:
        first = Int32(0)
        if group > 0:
            first = self.offsets[group - 1]
        return cutlass.max(self.offsets[group] - first, 0)

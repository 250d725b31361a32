"""Pairs of a row and one of its choices, sorted by the group that each chooses."""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, const_expr
from cutlass.memory import SmemAllocator

from ..common.conversion import select
from ..common.threads import WARP, summed_through

_AT_ONCE = 4  # reads of the index that are on their way while pairs are counted


class GroupRows:
    """A stable counting sort by one CTA; of any number of pairs.

    Warps have consecutive shares of the pairs; a slot is a group, or behind them what is none.

    step    all warps
    ------  ---------------------------------------------------------------------------
    count   each: pairs of every slot in its own share
    before  a thread per slot: pairs in the shares before, of every warp
    begin   the first warp: where the pairs of every slot begin; writes `offsets`
    place   each: the place of every pair, behind those of its slot that came before

    index (M, k) of Int32 or Int64; offsets (E,), row_index (M, k), place (M · k,) of Int32; any
    strides. Behind them a tuple: nothing, or weight (M, k) and grouped (M · k,) of one float type.

    most_groups: E is this at most.
    dependent_launch: the CTA starts while the kernel before ends, and lets the next one do so; of
                      Hopper and later.
    """

    def __init__(self, threads: int, most_groups: int, *, dependent_launch: bool = False):
        self.threads, self.most_groups = threads, most_groups
        self.dependent_launch = dependent_launch

    @property
    def warps(self) -> int:
        return self.threads // WARP

    @property
    def bits(self) -> int:
        """Of a slot's number."""
        return self.most_groups.bit_length()

    @cute.jit
    def with_operands(
        self,
        mIndex: cute.Tensor,
        mOffsets: cute.Tensor,
        mRowIndex: cute.Tensor,
        mPlace: cute.Tensor,
        operands,
        workspace: Int64,
        stream: cuda.CUstream,
    ):
        self.kernel(mIndex, mOffsets, mRowIndex, mPlace, operands).launch(
            grid=(1, 1, 1),
            block=(self.threads, 1, 1),
            stream=stream,
            use_pdl=self.dependent_launch,
        )

    @cute.kernel
    def kernel(
        self,
        mIndex: cute.Tensor,
        mOffsets: cute.Tensor,
        mRowIndex: cute.Tensor,
        mPlace: cute.Tensor,
        operands,
    ):
        thread, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(thread // WARP)
        groups = mOffsets.shape[0]
        allocator = SmemAllocator()
        slots = cute.make_layout((self.most_groups + 1, self.warps))
        sCounts = allocator.allocate_tensor(Int32, slots)
        sBegin = allocator.allocate_tensor(Int32, cute.make_layout(self.most_groups + 1))
        for slot in cutlass.range(cute.arch.lane_idx(), groups + 1, WARP, unroll=1):
            sCounts[slot, warp] = Int32(0)
        cute.arch.sync_warp()
        if const_expr(self.dependent_launch):
            cute.arch.griddepcontrol_wait()
            cute.arch.griddepcontrol_launch_dependents()

        pairs = mIndex.shape[0] * mIndex.shape[1]
        share = cute.ceil_div(cute.ceil_div(pairs, self.warps), WARP) * WARP
        first = cutlass.min(warp * share, pairs)
        end = cutlass.min(first + share, pairs)
        for start in cutlass.range(first, end, WARP, unroll=_AT_ONCE):
            slot, there = self.slot(mIndex, groups, start, end)
            self.counted(sCounts, slot, there, warp)
        cute.arch.sync_threads()
        self.before(sCounts, sBegin, groups, thread)
        cute.arch.sync_threads()
        if warp == 0:
            self.begin(sBegin, mOffsets, groups)
        cute.arch.sync_threads()
        for start in cutlass.range(first, end, WARP, unroll=_AT_ONCE):
            slot, there = self.slot(mIndex, groups, start, end)
            place = sBegin[slot] + self.counted(sCounts, slot, there, warp)
            if there:
                pair = start + cute.arch.lane_idx()
                m, j = _of_pair(mIndex, pair)
                mRowIndex[m, j] = select(slot < groups, place, Int32(-1))
                mPlace[place] = pair
                if const_expr(len(operands) > 0):
                    mWeight, mGrouped = operands
                    mGrouped[place] = mWeight[m, j]

    @cute.jit
    def slot(self, mIndex: cute.Tensor, groups: Int32, start: Int32, end: Int32) -> tuple:
        """(that of the lane's pair, whether it has one); what has none takes part as the last
        slot."""
        pair = start + cute.arch.lane_idx()
        there = pair < end
        m, j = _of_pair(mIndex, cutlass.min(pair, end - 1))
        chosen = mIndex[m, j]
        named = (chosen >= 0) & (chosen < groups)
        return select(named, Int32(chosen), groups), there

    @cute.jit
    def counted(self, sCounts: cute.Tensor, slot: Int32, there: Boolean, warp: Int32) -> Int32:
        """How many pairs of the slot the warp has counted before that of the lane, which is counted
        with all others of the warp."""
        alike = cute.arch.vote_ballot_sync(there)
        for bit in cutlass.range_constexpr(self.bits):
            is_set = ((slot >> bit) & 1) != 0
            having = cute.arch.vote_ballot_sync(is_set)
            alike = alike & select(is_set, having, ~having)
        lower = cute.arch.popc(alike & ((1 << cute.arch.lane_idx()) - 1))
        count = sCounts[slot, warp]
        cute.arch.sync_warp()
        if there & (lower == 0):
            sCounts[slot, warp] = count + cute.arch.popc(alike)
        cute.arch.sync_warp()
        return count + lower

    @cute.jit
    def before(self, sCounts: cute.Tensor, sBegin: cute.Tensor, groups: Int32, thread: Int32):
        for slot in cutlass.range(thread, groups + 1, self.threads, unroll=1):
            through = Int32(0)
            for warp in cutlass.range(self.warps, unroll=_AT_ONCE):
                count = sCounts[slot, warp]
                sCounts[slot, warp] = through
                through += count
            sBegin[slot] = through

    @cute.jit
    def begin(self, sBegin: cute.Tensor, mOffsets: cute.Tensor, groups: Int32):
        so_far = Int32(0)
        for window in cutlass.range(0, groups + 1, WARP, unroll=1):
            slot = window + cute.arch.lane_idx()
            count = Int32(0)
            if slot <= groups:
                count = sBegin[slot]
            through = so_far + summed_through(count)
            if slot <= groups:
                sBegin[slot] = through - count
            if slot < groups:
                mOffsets[slot] = through
            so_far = cute.arch.shuffle_sync(through, offset=WARP - 1)


def _of_pair(mIndex: cute.Tensor, pair: Int32) -> tuple:
    m = pair // mIndex.shape[1]
    return m, pair - m * mIndex.shape[1]

"""Turns at dQ: where blocks of keys add to it in a fixed order, who waits, and who is told."""

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
from cutlass import Int32, Int64, const_expr

from .sdpa_backward_plan import CONSUMERS, FOUND, BackwardPlan
from .sdpa_backward_work import Work

#: Warps of the producer's group that keep the turns of a consumer each: from this one on.
KEEPERS = 1

_WARPS = 4  # of a consumer


class TakesTurns(BackwardPlan):
    """A counter in global memory for each tile of queries and each consumer says how many blocks
    have added to its dQ. A warp beside each consumer waits for it and counts on, so that neither
    the way there nor a fence takes a consumer's time: they meet at two barriers.

    barrier  waits          arrives  when
    -------  -------------  -------  ------------------------------------------------------------
    turns    consumer       keeper   those before have added: the consumer may
    added    keeper         4 warps  the consumer has
    """

    @cute.jit
    def _keep_turns(self, consumer: Int32, storage, pipelines, work: Work, sequence, space):
        """One warp, for all tiles of a block."""

        def keep(number: Int32, head: Int32, block: Int32) -> None:
            if const_expr(self.searches):
                before = self._place_found(storage, number)[1]
            else:
                begin, end = self._blocks_before(block, work, sequence)
                before = end - begin
            counter = self._counter(consumer, head, block, work, sequence, space)
            self._keep_turn(consumer, storage, counter, before, number)

        self._for_each_tile(storage, pipelines, work, keep)

    @cute.jit
    def _for_each_tile(self, storage, pipelines, work: Work, do: cutlass.Constexpr):
        """One warp of the producer's group beside the one that loads.

        do: Called with a tile's number among those of this block, its head and block of queries.
        """
        if const_expr(self.searches):
            state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, self.q_stages)
            # A tile's place comes with its Q. What `do` has consumers wait for keeps the stage from
            # being written again before.
            pipelines[2].consumer_wait(state)
            index = self._index_found(storage, state.count)
            while index < work.total:
                head, block = work.place(index)
                do(state.count, head, block)
                state.advance()
                pipelines[2].consumer_wait(state)
                index = self._index_found(storage, state.count)
        else:
            head, block = work.first_head, work.first
            for number in cutlass.range(work.total, unroll=1):
                do(number, head, block)
                head, block = work.following(head, block)

    @cute.jit
    def _keep_turn(self, consumer: Int32, storage, counter: Int64, before: Int32, number: Int32):
        """number: Of the tile, among those of this block."""
        arrived = before - 1
        while arrived != before:
            arrived = cute.arch.inline_ptx(
                "ld.acquire.gpu.global.s32 {$w0}, [{$r0}];",
                write_only_types=[Int32],
                read_only_args=[counter],
            )
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(storage.turns.data_ptr() + consumer)
        cute.arch.mbarrier_wait(storage.added.data_ptr() + consumer, number % 2)
        with cute.arch.elect_one():
            cute.arch.inline_ptx(
                "red.release.gpu.global.add.s32 [{$r0}], 1;", read_only_args=[counter]
            )
        cute.arch.sync_warp()

    @cute.jit
    def _prepare_turns(self, storage, warp_index: Int32):
        """In front of everything."""
        if warp_index == 0:
            with cute.arch.elect_one():
                for consumer in cutlass.range_constexpr(CONSUMERS):
                    cute.arch.mbarrier_init(storage.turns.data_ptr() + consumer, 1)
                    cute.arch.mbarrier_init(storage.added.data_ptr() + consumer, _WARPS)

    def _await_turn(self, consumer: Int32, storage, number: Int32) -> None:
        """Of a consumer, to add to the dQ of a tile. number: Among those of this block."""
        if self.deterministic:
            cute.arch.mbarrier_wait(storage.turns.data_ptr() + consumer, number % 2)

    def _tell_added(self, consumer: Int32, storage) -> None:
        if self.deterministic:
            cute.arch.sync_warp()
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive(storage.added.data_ptr() + consumer)

    def _blocks_before(self, block: Int32, work: Work, sequence) -> tuple[Int32, Int32]:
        """(begin, end) of the blocks of keys that add to the same block of queries, by its band."""
        own, n, first = work.first_key // self.tile_n, self.tile_n, block * self.tile_m
        if self.last_first:
            last_seen = first + (self.tile_m - 1) + sequence.high
            return own + 1, cutlass.min(last_seen, sequence.keys - 1) // n + 1
        if sequence.low is None:
            return Int32(0), own
        return cutlass.max(first + sequence.low, 0) // n, own

    def _counter(self, consumer: Int32, head: Int32, block: Int32, work: Work, sequence, space):
        tile = self.tile_index(space, work.batch, head, sequence.first_query, block)
        return self.counter_address(space, tile, consumer)

    # What the producer has found ---------------------------------------------------------

    def _index_found(self, storage, count: Int32) -> Int32:
        """Of the tile that was found behind so many others."""
        return self._index_told(self._place_found(storage, count)[0])

    def _index_told(self, told: Int32) -> Int32:
        """Of a tile, without what functions show of it."""
        return told if self.scores.full is None else told // 2

    def _place_found(self, storage, count: Int32) -> cute.Tensor:
        """For what is told of a tile, see `SdpaBackward._tell`."""
        return storage.found.get_tensor(cute.make_layout((2, FOUND)))[None, count % FOUND]

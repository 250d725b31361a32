"""How blocks of a product for Hopper know which tiles are theirs, and when they know it."""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, const_expr

from .gemm import Gemm
from .tile_queue import EARLY, MOST_STAGES, TileQueue, counter_of

_NO_TILE = (1 << 31) - 1  # a number behind those of all tiles


class ScheduledGemm(Gemm):
    """A product whose tiles are dealt out to clusters by a scheduler.

    scheduler: static: cluster c has tiles c, c + clusters, ... dynamic: it begins with c, and takes
               another one whenever it is free (`TileQueue`), so that clusters with short tiles have
               more of them. It asks for a workspace, of which it uses the last counter.
    """

    cuts_edges = False  # rows behind those of a group are those of the next one
    asks_early = EARLY  # steps of a tile that are left to load when the next one is asked for

    def __init__(self, *args, scheduler: str = "static", **keywords):
        if scheduler not in ("static", "dynamic"):
            raise ValueError(f"scheduler is static or dynamic, not {scheduler!r}")
        self.dynamic = scheduler == "dynamic"
        super().__init__(*args, **keywords)
        # A block across from the leader shares no operand with it, but with blocks that do.
        tiles = self.stages * (2 if min(self.cluster_shape) > 1 else 1)
        if self.dynamic and tiles > MOST_STAGES:
            raise ValueError(
                f"{self.stages} stages may hold {tiles} tiles that others have not read; the ring "
                f"of their numbers is for {MOST_STAGES}"
            )

    def _begin(self, produces, order, split):
        """Not known: groups may be written by the kernel before."""
        return

    def _counter(self, workspace: Int64):
        return counter_of(workspace) if self.dynamic else None

    def _make_queue(self, storage, counter):
        if counter is None:
            return None
        queue = TileQueue(
            *(storage.queue.data_ptr(), storage.numbers.data_ptr(), counter, self._clusters()),
            self.cluster_shape[0] * self.cluster_shape[1],
        )
        queue.set_up()
        return queue

    def _cluster(self) -> Int32:
        """The number of this one."""
        return Int32(cute.arch.block_idx()[2] // self.cluster_k)

    def _clusters(self) -> Int32:
        """Of the launch."""
        return Int32(cute.arch.grid_dim()[2] // self.cluster_k)

    def _following(self, index, turns: int) -> Int32:
        """The tile so many turns later; none where clusters have one each, whatever offsets say."""
        if self.cluster_k > 1:
            return Int32(_NO_TILE)
        return index + turns * self._clusters()

    def _leads(self):
        """Whether this warp of a producer takes tiles for its cluster."""
        block_m, block_n, _ = cute.arch.block_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        return Boolean((warp == 0) & (block_m == 0) & (block_n == 0))

    # What a producer does ------------------------------------------------------------------

    def _first_to_load(self, queue) -> tuple:
        """(number of the tile, position in the queue of the next one)"""
        return self._cluster(), None if queue is None else Int32(0)

    @cute.jit
    def _load_and_ask(self, queue, load, first_k, count, state) -> tuple:
        """The same, and what the counter answers who asks for the next tile."""
        answer = Int32(0)
        if const_expr(queue is None):
            state = load(first_k, count, state)
        else:
            before = cutlass.max(count - self.asks_early, 0)
            state = load(first_k, before, state)
            if self._leads():
                answer = queue.ask()
            state = load(first_k + before, count - before, state)
        return state, answer

    @cute.jit
    def _next_to_load(self, queue, index, position, answer, order=None) -> tuple:
        """The same of the next tile; answer: to who asked for it; order: in which tiles are taken,
        see `_in_order`."""
        if const_expr(queue is None):
            index = self._following(index, 1)
        else:
            if self._leads():
                index = self._in_order(queue.taken(answer), order)
                queue.put(index, position)
            else:
                index = queue.read(position)
            position += 1
        return index, position

    def _in_order(self, number, order):
        """Which tile is the one of that number in the order in which tiles are taken."""
        return number

    @cute.jit
    def _finish_loading(self, queue, index, tiles, position):
        """index: Of the first that is no tile; tiles: how many there are."""
        if self._leads():
            if const_expr(self.pingpong):
                # The other consumer has not been told that there is no further tile.
                queue.put(index, position)
            queue.finish(index, tiles)

    # What a consumer does ------------------------------------------------------------------

    def _carry(self):
        """Nothing: who has which tiles may differ from run to run, and rounding with it."""
        return

    @cute.jit
    def _first_to_multiply(self, queue, consumer, index) -> tuple:
        """(number of the consumer's tile, position in the queue of its next one); index: of the
        first tile of the cluster."""
        position = None
        if const_expr(queue is None):
            if const_expr(self.pingpong):
                index += consumer * self._clusters()
        else:
            position = Int32(0)
            if const_expr(self.pingpong):
                position += 1
                if consumer == 1:
                    index = queue.read(Int32(0))
                    position += 1
        return index, position

    @cute.jit
    def _next_to_multiply(self, queue, index, position) -> tuple:
        """The same of the next tile."""
        taking_turns = 2 if const_expr(self.pingpong) else 1
        if const_expr(queue is None):
            index = self._following(index, taking_turns)
        else:
            index = queue.read(position)
            position += taking_turns
        return index, position

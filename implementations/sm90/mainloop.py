"""How a consumer group multiplies the k tiles of an output tile."""

from dataclasses import dataclass, replace
from itertools import product

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr
from cutlass.cute.nvgpu import warpgroup

from .promotion import BlockScales, promote
from .split_float32 import SMALL_BUFFERS, FloatSplitter

STEPS = 4  # that are promoted in a row, each while the next one is multiplied


@dataclass
class Fragments:
    """What a consumer group reads of shared memory.

    A, B: wgmma's view of the stages, (MMA, M or N, K, stages).
    If float32 is split: the same views of the small parts, (MMA, M or N, K, SMALL_BUFFERS), the
    pointers that `FloatSplitter` takes, and its named barrier.
    """

    A: cute.Tensor
    B: cute.Tensor
    A_small: cute.Tensor | None = None
    B_small: cute.Tensor | None = None
    tiles: tuple = ()
    barrier_id: Int32 | None = None

    def of_rows(self, blocks: int) -> "Fragments":
        """The same of A's first blocks of rows."""
        first = cute.logical_divide(self.A, (None, blocks, None, None))
        return replace(self, A=first[None, (None, 0), None, None])


@dataclass(frozen=True)
class Mainloop:
    """All k tiles of an output tile, from the stages of the pipeline to accumulators.

    way        products of a k tile                        its stage is released
    ---------  ------------------------------------------  ---------------------------------
    plain      added to the accumulators by wgmma          when the next one has been issued
    promoted   formed apart, added by float32 arithmetic   at once
    ahead      the same, while the next ones are formed    when its last products are there

    promoted, with block_scales: each part of a k tile has factors.
    promoted, with a splitter: three products of parts of float32; the groups that share a tile
    make the small parts of every stage together.

    parts: Of a k tile, whose products are promoted one part after the other.
    ahead: Whether registers hold the products of two parts at once: tensor cores form the next
        ones while a group promotes some.
    """

    block_scales: BlockScales | None
    splitter: FloatSplitter | None
    parts: int = 1
    ahead: bool = False

    @cute.jit
    def multiply(
        self,
        tiled_mma,
        fragments,
        accumulators,
        k_tiles,
        pipeline,
        stage,
        meanwhile: cutlass.Constexpr = (),
    ):
        """The last wgmma group is left in flight, its stage not released.

        One group is always in flight while the next is issued, so a stage is released one behind.
        Returns the stage after the tile and the last one of it.

        meanwhile: Called one after the other, each while tensor cores are busy with a k tile of its
            own, as far as there are so many.
        """
        last = stage.clone()
        tiled_mma.set(warpgroup.Field.ACCUMULATE, False)
        pipeline.consumer_wait(stage)
        warpgroup.fence()
        self._issue(tiled_mma, fragments.A, fragments.B, accumulators, stage.index, stage.index)
        warpgroup.commit_group()
        stage.advance()
        following = (tiled_mma, fragments, accumulators, pipeline)
        for i in cutlass.range_constexpr(len(meanwhile)):
            meanwhile[i]()
            end = cutlass.min(i + 2, k_tiles)
            stage, last = self._multiply_more(*following, i + 1, end, stage, last)
        return self._multiply_more(*following, len(meanwhile) + 1, k_tiles, stage, last)

    @cute.jit
    def _multiply_more(self, tiled_mma, fragments, accumulators, pipeline, first, end, stage, last):
        """The k tiles from `first` to `end`; the one before them is in flight, as is the last of
        them behind it."""
        for _ in cutlass.range(first, end, unroll=1):
            pipeline.consumer_wait(stage)
            warpgroup.fence()
            of_stage = (fragments.A, fragments.B, accumulators, stage.index, stage.index)
            self._issue(tiled_mma, *of_stage, accumulates=True)
            warpgroup.commit_group()
            warpgroup.wait_group(1)
            pipeline.consumer_release(last)
            stage.advance()
            last.advance()
        return stage, last

    @cute.jit
    def pass_over(self, k_tiles, pipeline, stage):
        """Releases all k tiles, of which nothing is multiplied. Returns the stage after them."""
        for _ in cutlass.range(k_tiles, unroll=1):
            pipeline.consumer_wait(stage)
            pipeline.consumer_release(stage)
            stage.advance()
        return stage

    @cute.jit
    def multiply_promoted(
        self, tiled_mma, fragments, accumulators, scales, place, first_k, k_tiles, pipeline, stage
    ):
        """Nothing is left in flight. scales: those of A and B per block, or (); place: (row,
        column, batch) where this group's part of the tile begins. Returns the stage after it."""
        scaled = None
        if const_expr(self.block_scales is not None):
            scaled = self.block_scales.registers()
            self.block_scales.read(scaled, scales, place, first_k * self.parts)
        accumulators.fill(0.0)
        work = (tiled_mma, fragments, accumulators, (scaled, scales, place, first_k), pipeline)
        if const_expr(self.ahead):
            return self._promote_ahead(*work, first_k, k_tiles, stage)
        return self._promote_at_once(*work, first_k, k_tiles, stage)

    @cute.jit
    def _promote_at_once(
        self, tiled_mma, fragments, accumulators, scaling, pipeline, first, k_tiles, stage
    ):
        """The k tiles from `first` on: their products are promoted as soon as they are there."""
        blocks = cute.size(fragments.B, mode=[1])
        products = _products(accumulators, blocks)
        for k in cutlass.range(first, first + k_tiles, unroll=1):
            for part in cutlass.range_constexpr(self.parts):
                self._next_scales(scaling, k, part)
                if const_expr(part == 0):
                    pipeline.consumer_wait(stage)
                if const_expr(self.splitter is not None):
                    buffer = stage.count % SMALL_BUFFERS
                    self.splitter.split(fragments.tiles, stage.index, buffer, fragments.barrier_id)
                for block in cutlass.range_constexpr(blocks):
                    self._issue_block(tiled_mma, fragments, products, part, block, stage)
                    if const_expr(block == 0):
                        self._hand_out(scaling, k, part)
                    warpgroup.wait_group(0)
                    if const_expr(part == self.parts - 1 and block == blocks - 1):
                        pipeline.consumer_release(stage)
                    self._promote(accumulators, products, block, scaling)
            stage.advance()
        return stage

    @cute.jit
    def _promote_ahead(
        self, tiled_mma, fragments, accumulators, scaling, pipeline, first, k_tiles, stage
    ):
        """The same while the next ones are formed. Products take turns with two sets of registers.
        Nothing is in flight between rounds: where registers are read in another turn of a loop than
        wgmma was issued in, ptxas lets it run alone. k tiles beside whole rounds come first."""
        blocks = cute.size(fragments.B, mode=[1])
        tiles = max(STEPS // (self.parts * blocks), 1)
        beside = k_tiles % tiles
        if const_expr(tiles > 1):
            work = (tiled_mma, fragments, accumulators, scaling, pipeline)
            stage = self._promote_at_once(*work, first, beside, stage)
        steps = tuple(product(range(tiles), range(self.parts), range(blocks)))
        both = tuple(_products(accumulators, blocks) for _ in range(2))
        multiplied, promoted = (tiled_mma, fragments, pipeline), (accumulators, scaling, pipeline)
        last = stage.clone()
        for k in cutlass.range(first + beside, first + k_tiles, tiles, unroll=1):
            stage = self._begin(*multiplied, both[0], steps, 0, stage)
            for step in cutlass.range_constexpr(len(steps)):
                in_flight = 0
                if const_expr(step + 1 < len(steps)):
                    following = both[(step + 1) % 2]
                    stage = self._begin(*multiplied, following, steps, step + 1, stage)
                    in_flight = 1
                last = self._end(*promoted, both[step % 2], steps, step, k, last, in_flight)
        return stage

    @cute.jit
    def _begin(
        self,
        tiled_mma,
        fragments,
        pipeline,
        products,
        steps: cutlass.Constexpr,
        step: cutlass.Constexpr,
        stage,
    ):
        """Issues what a step multiplies; the stage of the next one."""
        _, part, block = steps[step]
        if const_expr(part == 0 and block == 0):
            pipeline.consumer_wait(stage)
        self._issue_block(tiled_mma, fragments, products, part, block, stage)
        if const_expr(self._ends_tile(steps, step)):
            stage.advance()
        return stage

    @cute.jit
    def _end(
        self,
        accumulators,
        scaling,
        pipeline,
        products,
        steps: cutlass.Constexpr,
        step: cutlass.Constexpr,
        k,
        last,
        in_flight: cutlass.Constexpr,
    ):
        """Promotes what a step has multiplied, of a k tile from k on; the stage of the next one.
        in_flight: Steps that began behind it."""
        tile, part, block = steps[step]
        if const_expr(block == 0):
            self._next_scales(scaling, k + tile, part)
            self._hand_out(scaling, k + tile, part)
        warpgroup.wait_group(in_flight)
        if const_expr(self._ends_tile(steps, step)):
            pipeline.consumer_release(last)
            last.advance()
        self._promote(accumulators, products, block, scaling)
        return last

    def _ends_tile(self, steps: tuple, step: int) -> bool:
        """Whether a step is the last one of its k tile."""
        return step + 1 == len(steps) or steps[step + 1][0] != steps[step][0]

    @cute.jit
    def _next_scales(self, scaling, k, part: cutlass.Constexpr):
        if const_expr(self.block_scales is not None):
            scaled, scales, place, _ = scaling
            turn = self._turn(scaling, k, part)
            self.block_scales.advance(scaled, scales, place, k * self.parts + part, turn)

    @cute.jit
    def _hand_out(self, scaling, k, part: cutlass.Constexpr):
        if const_expr(self.block_scales is not None):
            scaled, _, place, _ = scaling
            self.block_scales.hand_out(scaled, place, self._turn(scaling, k, part))

    @cute.jit
    def _turn(self, scaling, k, part: cutlass.Constexpr):
        """Whose scales a part of a k tile has, of the threads that read them."""
        first_k = scaling[-1]
        return ((k - first_k) * self.parts + part) % self.block_scales.readers

    @cute.jit
    def _promote(self, accumulators, products, block: cutlass.Constexpr, scaling):
        factors = None
        if const_expr(self.block_scales is not None):
            factors = scaling[0][-1]
        promote(accumulators, products, block, self.block_scales, factors)

    @cute.jit
    def _issue_block(
        self,
        tiled_mma,
        fragments,
        products,
        part: cutlass.Constexpr,
        block: cutlass.Constexpr,
        stage,
    ):
        """The products of one part of a k tile with one block of columns, as one wgmma group."""
        tiled_mma = apart(tiled_mma)
        large_A = _of_part(fragments.A, part, self.parts)
        large_B = _columns(_of_part(fragments.B, part, self.parts), block)
        tiled_mma.set(warpgroup.Field.ACCUMULATE, False)
        warpgroup.fence()
        if const_expr(self.splitter is not None):
            # The smallest products first: they are lost least beside each other.
            buffer = stage.count % SMALL_BUFFERS
            small_A, small_B = fragments.A_small, _columns(fragments.B_small, block)
            self._issue(tiled_mma, small_A, large_B, products, buffer, stage.index)
            self._issue(tiled_mma, large_A, small_B, products, stage.index, buffer)
        self._issue(tiled_mma, large_A, large_B, products, stage.index, stage.index)
        warpgroup.commit_group()

    @cute.jit
    def _issue(
        self,
        tiled_mma,
        tCrA,
        tCrB,
        accumulators,
        stage_a,
        stage_b,
        accumulates: cutlass.Constexpr = False,
    ):
        """accumulates: Whether tiled_mma is set to do so: a loop must not set what is used behind
        it."""
        for k in cutlass.range_constexpr(cute.size(tCrA, mode=[2])):
            a, b = tCrA[None, None, k, stage_a], tCrB[None, None, k, stage_b]
            cute.gemm(tiled_mma, accumulators, a, b, accumulators)
            if const_expr(not accumulates):
                tiled_mma.set(warpgroup.Field.ACCUMULATE, True)


def apart(tiled_mma):
    """The same instruction, whose fields may be set in a loop: what is used behind it stays."""
    return cutlass.new_from_mlir_values(tiled_mma, cutlass.extract_mlir_values(tiled_mma))


def _products(accumulators: cute.Tensor, blocks: int) -> cute.Tensor:
    """Registers for those of one block of columns."""
    *modes, columns = accumulators.shape
    return cute.make_rmem_tensor((*modes, columns // blocks), accumulators.element_type)


def _of_part(fragment: cute.Tensor, part: int, parts: int) -> cute.Tensor:
    """What one part of a tile's K is multiplied of."""
    steps = cute.size(fragment, mode=[2]) // parts
    divided = cute.logical_divide(fragment, (None, None, steps, None))
    return divided[None, None, (None, part), None]


def _columns(tCrB: cute.Tensor, block: int) -> cute.Tensor:
    """One wgmma's columns of the tile."""
    return cute.logical_divide(tCrB, (None, 1, None, None))[None, (None, block), None, None]

"""Attention of few queries to keys whose first columns are the values, for Hopper."""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as sm90
from cutlass import Boolean, Float32, Int32, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, warp, warpgroup
from cutlass.cute.nvgpu.warpgroup import OperandSource
from cutlass.tensor_utils import LayoutEnum

from ..common.attention.scores import Tile, rows_and_columns
from ..common.attention.softmax import adopt, softmax_of, sum_of_quad, update
from ..common.conversion import select
from ..common.threads import GROUP
from .mma import WGMMA_M
from .sdpa_decode import SdpaDecode
from .sdpa_forward_consumer import TOGETHER, multiply, scale_rows
from .sdpa_loads import tma_pipeline
from .sdpa_output import OWN
from .sdpa_pages import REGISTERS_FOR_PAGES
from .sdpa_parts import DecodeTiles
from .sdpa_split import Size
from .sdpa_tiles import Work
from .sdpa_workspace import MOST_LATENT_PARTS

_GROUPS = 2  # of consumers
_REGISTERS_FOR_PLACES = (24, 240)  # producer, and each consumer: it has where scores stand
_READY = 1  # named barriers: powers of a block are there, one per group from this one on
_WGMMA_K = 16

#: What takes as long as a row of a part that is written and added up: a block of keys, how a tile
#: begins in blocks of keys, and a round of the sums. Measured on an H100.
_BLOCK, _BEGIN, _ROUND = 1600, 1, 600
_WAVES = 2  # of blocks, at most, that parts are made for

#: Blocks of keys of a part from which on the next one is asked for: of few it takes longer.
_MANY_KEYS = 8


class Exchange(NamedTuple):
    """What the groups tell each other through, in shared memory.

    powers: Of the last block, as operand of the second product.
    maxima: (rows, groups): The largest scores so far, when a group's last block was seen.
    sums: (rows, groups): Of powers.
    """

    powers: cute.Tensor
    maxima: cute.Tensor
    sums: cute.Tensor


class SdpaLatent(SdpaDecode):
    """`SdpaDecode` where V is the first columns of K, as of the latent vectors of multi-head latent
    attention (DeepSeek-V2, arXiv 2405.04434): a block of keys is loaded once, and stays for the
    second product.

    warp group  role      does                                         waits on       signals
    ----------  --------  -------------------------------------------  -------------  ------------
    0           producer  warp 0: fetches tiles; TMA loads of K        stage empty    stage full
                                                                                      (by TMA)
    1           consumer  scores and powers of blocks 0, 2, ... of     stage full,    stage empty,
                          keys; half of the columns of O, of all       powers of the  powers ready
                          blocks                                       other group
    2           consumer  the same of blocks 1, 3, ...                 the same       the same

    There is room for two blocks of keys. Each arrives in two parts, the columns of the values of
    either group: scores begin with the first one, and a part is loaded anew as soon as its group
    has added its values. While a group has the softmax of its block, the other one forms scores of
    the next; P is in registers for its own product, and in shared memory for the other's. The first
    group adds the values of a block that is there already before it waits for its own next one; the
    second one, whose next block comes later, forms scores first.

    A part of a block comes later than it is waited for, as both groups leave its place late. Where
    several tiles read the same keys, and so wait for L2, the first of them has the next block on
    its way there; a tile that is alone with its keys waits for device memory, and gains nothing.

    Parts of a tile are 128 KB each, so a kernel behind adds them up, however few their rows are.
    """

    values_in_keys = True
    most_parts = MOST_LATENT_PARTS

    def __init__(self, *design, **options):
        super().__init__(*design, **options)
        if self.tile_m != WGMMA_M:
            raise ValueError(f"two groups share tiles of {WGMMA_M} rows, not {self.tile_m}")
        self.consumers = _GROUPS
        self.threads = GROUP * (1 + _GROUPS)
        self.registers = REGISTERS_FOR_PAGES
        functions = self.scores.functions
        places = functions.score is not None or functions.visible is not None
        if self.page_size is None and (places or "bias" in self.scores.names):
            self.registers = _REGISTERS_FOR_PLACES
        self.own_columns = self.head_dim_v // _GROUPS

    # What a group has of a tile ----------------------------------------------------------

    def _mma(self, columns, b_major, a_source) -> cute.TiledMma:
        return sm90.make_trivial_tiled_mma(
            *(self.element_type, self.element_type, OperandMajorMode.K, b_major),
            *(Float32, (1, 1, 1), (WGMMA_M, columns), a_source),
        )

    def _mma_pv(self) -> cute.TiledMma:
        return self._mma(self.own_columns, OperandMajorMode.MN, OperandSource.RMEM)

    def _mma_pv_of_other(self) -> cute.TiledMma:
        return self._mma(self.own_columns, OperandMajorMode.MN, OperandSource.SMEM)

    def _parts_of_products(self, consumer, thread, sQ, sK, sV, sO) -> tuple:
        mma_qk, mma_pv = self._mma_qk(), self._mma_pv()
        group_qk, group_pv = mma_qk.get_slice(0), mma_pv.get_slice(0)
        columns = (self.own_columns, self.tile_n, self.stages)
        sV = cute.local_tile(sV, columns, (consumer, 0, 0))
        tCrQ = mma_qk.make_fragment_A(group_qk.partition_A(sQ))[None, None, None, 0]
        tCrK = mma_qk.make_fragment_B(group_qk.partition_B(sK))
        tCrV = mma_pv.make_fragment_B(group_pv.partition_B(sV))
        tSrS = cute.make_rmem_tensor(mma_qk.partition_shape_C((self.tile_m, self.tile_n)), Float32)
        tOrO = cute.make_rmem_tensor(
            mma_pv.partition_shape_C((self.tile_m, self.own_columns)), Float32
        )
        tOrP = cute.make_rmem_tensor(cute.size(tSrS), self.element_type)
        identity = cute.make_identity_tensor((self.tile_m, self.tile_n))
        local = rows_and_columns(mma_qk.get_slice(thread % GROUP).partition_C(identity))
        return (tCrQ, tCrK, tCrV), (tSrS, tOrP, tOrO), local

    def _own_place(self, consumer, thread) -> tuple:
        return _first_row(thread % GROUP), consumer * self.own_columns

    def _tells(self, consumer, thread) -> Boolean:
        return (thread % 4 == 0) & (consumer == 0)

    def _meet(self, consumer) -> None:
        cute.arch.barrier(barrier_id=TOGETHER, number_of_threads=GROUP * _GROUPS)

    # Shared memory -----------------------------------------------------------------------

    def _shared_layouts(self) -> tuple:
        """V has the first slabs of each stage of K."""
        q_layout, k_layout, v_layout, o_layout = super()._shared_layouts()
        stage = cute.cosize(cute.slice_(k_layout.outer, (None, None, 0)))
        rows, columns, _ = v_layout.outer.shape
        of_rows, of_columns, _ = v_layout.outer.stride
        outer = cute.make_layout(
            (rows, columns, (1, self.stages)), stride=(of_rows, of_columns, (0, stage))
        )
        return q_layout, k_layout, cute.make_composed_layout(v_layout.inner, 0, outer), o_layout

    @property
    def exchanged(self) -> int:
        numbers = 2 * _GROUPS * self.tile_m * Float32.width // 8
        return self._powers_bytes + numbers

    @property
    def _powers_bytes(self) -> int:
        return self.tile_m * self.tile_n * self.element_type.width // 8

    def _staged_output(self, storage, layout) -> Exchange:
        """Instead: what the groups tell each other through."""
        tile = (self.tile_m, self.head_dim_v, self.tile_n)
        layout = sm90.make_smem_layout_a(LayoutEnum.ROW_MAJOR, tile, self.element_type, 1)
        pointer = storage.exchange.data_ptr()
        powers = cute.recast_ptr(pointer, swizzle_=layout.inner, dtype=self.element_type)
        numbers = cute.make_layout((self.tile_m, _GROUPS))
        behind = cute.recast_ptr(pointer + self._powers_bytes, dtype=Float32)
        return Exchange(
            cute.make_tensor(powers, layout.outer),
            cute.make_tensor(behind, numbers),
            cute.make_tensor(behind + cute.cosize(numbers), numbers),
        )

    def _pipelines(self, storage, q_layout, k_layout, v_layout) -> tuple:
        """None of Q; of K those of each group's slabs, which that group alone leaves: it has formed
        its part of O when nobody forms scores of the block any more."""
        slab = self.tile_n * self._slab(self.head_dim) * self.element_type.width // 8
        return None, *(
            tma_pipeline(barriers, self.stages, len(slabs) * slab, GROUP // 32)
            for barriers, slabs in zip(
                (storage.k_stages, storage.v_stages), self._slabs, strict=True
            )
        )

    @property
    def _slabs(self) -> tuple[range, range]:
        """Of a block of keys, those that arrive together: a group's columns of V, and behind those
        of the second one what is of K alone."""
        slab = self._slab(self.head_dim)
        own = self.own_columns // slab
        return range(own), range(own, self.head_dim // slab)

    # Loads -------------------------------------------------------------------------------

    def _tma_of_values(self, mV: cute.Tensor) -> tuple:
        return None, mV

    @cute.jit
    def _load_tile(
        self,
        tma_q,
        mQ,
        sQ,
        tma_k,
        mK,
        sK,
        tma_v,
        mV,
        sV,
        pipelines,
        states,
        work: Work,
        values,
    ):
        place, sequence, blocks = work.place, work.sequence, work.blocks
        _, *of_slabs = pipelines
        q_state, k_state, v_state = states
        first_key, batch = self._first_key(sequence), self._batch_of_keys(place)
        tKsK, tKgK = self._partitioned(tma_k, mK, sK, self.head_dim, place.head, first_key)
        pages, pieces = self._no_pages(), self.tile_n // self.rows_at_once
        asks = (place.query == 0) & (blocks.end - blocks.begin >= _MANY_KEYS)
        asks &= sequence.queries * mQ.shape[2] > self.tile_m * mK.shape[2]  # rows of a head of keys
        for i in cutlass.range(blocks.end - blocks.begin, unroll=1):
            block = blocks.end - 1 - i
            pages = self._pages_of(pages, block, place.batch, sequence, values)
            for one, slabs in zip(of_slabs, self._slabs, strict=True):
                one.producer_acquire(k_state)
                for piece in cutlass.range(pieces, unroll=1):
                    row, at = self._piece(block * pieces + piece, piece, pages, batch)
                    for slab in slabs:
                        cute.copy(
                            tma_k,
                            tKgK[None, row, slab, at],
                            tKsK[None, piece, slab, k_state.index],
                            tma_bar_ptr=one.producer_get_barrier(k_state),
                        )
            if asks & (block > blocks.begin):
                pages = self._pages_of(pages, block - 1, place.batch, sequence, values)
                self._ask_for_block(tma_k, tKgK, tKsK, block - 1, pages, batch)
            k_state.advance()
        return q_state, k_state, v_state

    # Consumers ---------------------------------------------------------------------------

    @cute.jit
    def _attend(
        self,
        consumer,
        thread,
        fragments,
        registers,
        local,
        mQ,
        sQ,
        sV,
        exchange: Exchange,
        mO,
        pipelines,
        states,
        work: Work,
        values,
        tiles: DecodeTiles,
    ):
        tSrS, _, tOrO = registers
        place, blocks = work.place, work.blocks
        _, *of_keys = pipelines
        q_state, k_state, v_state = states
        tile = Tile(rows_and_columns(tSrS), local, place.query, Int32(0), place.batch, place.head)
        tile = tile._replace(group=self._group(tiles))
        softmax = softmax_of(2, self._multiplier(values, place, tiles), least=self._least)
        tOrO.fill(0.0)
        if blocks.end > blocks.begin:
            self._await_queries(thread, mQ, sQ, None, q_state, work, tiles, None)
            factors = cute.make_rmem_tensor(2, Float32)
            factors.fill(1.0)
            lane = thread % GROUP
            of_tile = (lane, fragments, registers, tile, softmax, factors, exchange)
            beside = (work, values, tiles, of_keys, k_state)
            if consumer == 0:
                k_state = self._attend_first(*of_tile, sV, *beside)
            else:
                k_state = self._attend_second(*of_tile, *beside)
            self._add_sums(consumer, lane, softmax, exchange)
        self._write(consumer, thread, tOrO, exchange, mO, softmax, work, values, tiles)
        return q_state, k_state, v_state

    @cute.jit
    def _attend_first(
        self,
        lane,
        fragments,
        registers,
        tile,
        softmax,
        factors,
        exchange,
        sV,
        work: Work,
        values,
        tiles,
        pipelines,
        state,
    ):
        """Returns the state of the pipeline behind the tile."""
        _, _, tOrO = registers
        blocks = work.blocks
        last, count = blocks.end - 1, blocks.end - blocks.begin
        self._multiply_keys(fragments, registers, pipelines, state)
        warpgroup.wait_group(0)
        of_block = self._of_block(tile, last)
        self._score_block(of_block, last, work, values, tiles)
        update(softmax, tile.values, None)
        self._round(registers)
        if const_expr(self.keys_end_early):
            self._clear_values(lane, sV[None, None, state.index], last, work.sequence)
        self._publish(0, lane, registers, softmax, exchange)
        for pair in cutlass.range((count - 1) // 2, unroll=1):
            self._add_own(0, fragments, registers, pipelines, state)
            state.advance()
            self._add_others(
                0, lane, fragments, registers, softmax, factors, exchange, pipelines, state
            )
            warpgroup.wait_group(0)
            pipelines[0].consumer_release(state)
            state.advance()
            block = last - 2 - 2 * pair
            self._multiply_keys(fragments, registers, pipelines, state)
            warpgroup.wait_group(0)
            self._score_block(self._of_block(tile, block), block, work, values, tiles)
            update(softmax, tile.values, factors)
            self._round(registers)
            self._publish(0, lane, registers, softmax, exchange)
            self._scale(tOrO, factors)
        self._add_own(0, fragments, registers, pipelines, state)
        state.advance()
        if count % 2 == 0:
            self._add_others(
                0, lane, fragments, registers, softmax, factors, exchange, pipelines, state
            )
            warpgroup.wait_group(0)
            pipelines[0].consumer_release(state)
            state.advance()
        return state

    @cute.jit
    def _attend_second(
        self,
        lane,
        fragments,
        registers,
        tile,
        softmax,
        factors,
        exchange,
        work: Work,
        values,
        tiles,
        pipelines,
        state,
    ):
        """The same of blocks 1, 3, ..."""
        _, _, tOrO = registers
        blocks = work.blocks
        last, count = blocks.end - 1, blocks.end - blocks.begin
        for pair in cutlass.range(count // 2, unroll=1):
            block = last - 1 - 2 * pair
            following = state.clone()
            following.advance()
            self._multiply_keys(fragments, registers, pipelines, following)
            self._add_others(
                1, lane, fragments, registers, softmax, factors, exchange, pipelines, state
            )
            warpgroup.wait_group(1)
            self._score_block(self._of_block(tile, block), block, work, values, tiles)
            update(softmax, tile.values, factors)
            self._round(registers)
            pipelines[1].consumer_wait(following)
            warpgroup.wait_group(0)
            pipelines[1].consumer_release(state)
            state.advance()
            self._publish(1, lane, registers, softmax, exchange)
            self._scale(tOrO, factors)
            self._add_own(1, fragments, registers, pipelines, state)
            state.advance()
        if count % 2 == 1:
            self._add_others(
                1, lane, fragments, registers, softmax, factors, exchange, pipelines, state
            )
            warpgroup.wait_group(0)
            pipelines[1].consumer_release(state)
            state.advance()
        return state

    def _multiply_keys(self, fragments, registers, pipelines, state) -> None:
        (tCrQ, tCrK, _), (tSrS, _, _) = fragments, registers
        mma, step = self._mma_qk(), self._slab(self.head_dim) // _WGMMA_K
        for part, of_part in enumerate(pipelines):
            of_part.consumer_wait(state)
            slabs = self._slabs[part]
            warpgroup.fence()
            for k in range(slabs.start * step, slabs.stop * step):
                mma.set(warpgroup.Field.ACCUMULATE, k > 0)
                tCrB = tCrK[None, None, k, state.index]
                cute.gemm(mma, tSrS, tCrQ[None, None, k], tCrB, tSrS)
            warpgroup.commit_group()

    def _add_own(self, consumer: int, fragments, registers, pipelines, state) -> None:
        """Values of this group's block; its columns are left then."""
        (_, _, tCrV), (tSrS, tOrP, tOrO) = fragments, registers
        powers = self._operand(tOrP, tSrS)
        multiply(self._mma_pv(), tOrO, powers, tCrV[None, None, None, state.index], fresh=False)
        warpgroup.wait_group(0)
        pipelines[consumer].consumer_release(state)

    def _add_others(
        self,
        consumer: int,
        lane,
        fragments,
        registers,
        softmax,
        factors,
        exchange,
        pipelines,
        state,
    ) -> None:
        """Starts to add those of the other group's block."""
        (_, _, tCrV), (_, _, tOrO) = fragments, registers
        other = 1 - consumer
        cute.arch.barrier(barrier_id=_READY + other, number_of_threads=GROUP * _GROUPS)
        first = _first_row(lane)
        adopt(softmax, [exchange.maxima[first + 8 * i, other] for i in range(2)], factors)
        self._scale(tOrO, factors)
        mma = self._mma_pv_of_other()
        powers = mma.make_fragment_A(mma.get_slice(0).partition_A(exchange.powers))
        powers = powers[None, None, None, 0]
        # It is there: the other group has seen it. Its own columns may be left by now.
        pipelines[consumer].consumer_wait(state)
        multiply(mma, tOrO, powers, tCrV[None, None, None, state.index], fresh=False)

    @cute.jit
    def _score_block(self, tile: Tile, block, work: Work, values, tiles):
        blocks = work.blocks
        if const_expr(self.scores.hides_anywhere):
            self._score(tile, work.sequence, values, tiles, True)
        else:
            if not self.scores.plain:
                self.scores.change(tile, values, by_rows=True)
            if (block < blocks.full_begin) | (block >= blocks.full_end):
                self._hide(tile, work.sequence, tiles.group)

    @cute.jit
    def _clear_values(self, lane, stage, block, sequence):
        """Rows of V behind the last key become 0: their probabilities are 0, but they may hold
        what is not a number."""
        first_behind = sequence.keys - block * self.tile_n
        if first_behind < self.tile_n:
            cute.arch.barrier(barrier_id=OWN, number_of_threads=GROUP)  # scores are there
            behind = (self.tile_n - first_behind) * self.head_dim_v
            for i in cutlass.range(lane, behind, GROUP, unroll=1):
                row, column = i // self.head_dim_v, i % self.head_dim_v
                stage[column, first_behind + row] = self.element_type(0.0)
            cute.arch.fence_view_async_shared()
            cute.arch.barrier(barrier_id=OWN, number_of_threads=GROUP)

    def _round(self, registers) -> None:
        """Powers, as the second product reads them. Here: the compiler would do it again, behind
        the fence of that product."""
        tSrS, tOrP, _ = registers
        self._store_powers(tOrP, tSrS, None, None, None)
        words = cute.recast_tensor(tOrP, Int32)
        for i in range(cute.size(words)):
            words[i] = cute.arch.inline_ptx(
                "mov.b32 {$w0}, {$r0};", write_only_types=[Int32], read_only_args=[words[i]]
            )

    @cute.jit
    def _publish(self, consumer: cutlass.Constexpr, lane, registers, softmax, exchange):
        """Powers of a block, and the maxima that they are of."""
        tSrS, tOrP, _ = registers
        atom = cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), self.element_type)
        copy = cute.make_tiled_copy_C(atom, self._mma_qk())
        rounded = cute.make_tensor(tOrP.iterator, tSrS.layout)
        # Other warps of the group may still multiply what lay there.
        cute.arch.barrier(barrier_id=OWN + consumer, number_of_threads=GROUP)
        shared = copy.get_slice(lane).partition_D(exchange.powers[None, None, 0])
        cute.copy(copy, copy.retile(rounded), shared)
        if lane % 4 == 0:
            for i in cutlass.range_constexpr(2):
                exchange.maxima[_first_row(lane) + 8 * i, consumer] = softmax.maxima[i]
        cute.arch.fence_view_async_shared()
        cute.arch.barrier_arrive(barrier_id=_READY + consumer, number_of_threads=GROUP * _GROUPS)

    @cute.jit
    def _add_sums(self, consumer, lane, softmax, exchange):
        """Those of both groups, for both."""
        first = _first_row(lane)
        for i in cutlass.range_constexpr(2):
            own = sum_of_quad(softmax.sums[i])
            if lane % 4 == 0:
                exchange.sums[first + 8 * i, consumer] = own
        self._meet(consumer)
        for i in cutlass.range_constexpr(2):
            both = exchange.sums[first + 8 * i, 0] + exchange.sums[first + 8 * i, 1]
            softmax.sums[i] = select(lane % 4 == 0, both, Float32(0.0))

    @cute.jit
    def _scale(self, tOrO, factors):
        """Mostly the largest score of all rows of a warp stays."""
        if cute.arch.vote_any_sync((factors[0] != 1.0) | (factors[1] != 1.0)):
            scale_rows(rows_and_columns(tOrO), factors)

    # Sums of parts -----------------------------------------------------------------------

    @cute.jit
    def _parts(self, size: Size, rows: Int32) -> Int32:
        """The number that costs least, of all that are blocks of one wave or of few."""
        tiles, _, blocks, multiprocessors = size
        rows = cutlass.min(rows, self.tile_m)
        most = cutlass.min(_WAVES * multiprocessors, Int32(MOST_LATENT_PARTS)) // tiles
        best, least = Int32(1), Int32(2**31 - 1)
        for parts in cutlass.range(1, cutlass.max(cutlass.min(most, blocks), 1) + 1, unroll=1):
            waves = cute.ceil_div(tiles * parts, multiprocessors)
            cost = waves * (cute.ceil_div(blocks, parts) + _BEGIN) * _BLOCK
            if parts > 1:
                cost += tiles * parts * rows + cute.ceil_div(parts, self.sums_at_once) * _ROUND
            if cost < least:
                best, least = parts, cost
        return best

    def _combine(self, thread, exchange, mO, work: Work, values, tiles) -> None:
        """A kernel behind does."""

    def _are_many(self, rows: Int32) -> Boolean:
        return Boolean(True)


def _first_row(lane: Int32) -> Int32:
    """Of the two that a thread has; the other one is 8 behind."""
    return lane // 32 * 16 + lane % 32 // 4

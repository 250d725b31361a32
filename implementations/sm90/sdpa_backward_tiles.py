"""Tiles of a bias of scores, and of its gradient, in the attention gradient for Hopper."""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64
from cutlass.cute.nvgpu import cpasync, warp

from ..common.attention.scores import Tile, rows_and_columns
from ..common.attention.values import Values
from ..common.rows import matrix_row
from ..common.threads import GROUP
from .sdpa_backward import SdpaBackward
from .sdpa_backward_consumer import Context, Turn
from .sdpa_backward_plan import CONSUMERS, tile_layout, transposed_layout
from .sdpa_backward_sums import BiasSums, left_scores
from .sdpa_backward_work import Work
from .sdpa_loads import load_scores, scores_modes, tma_load
from .sdpa_workspace import left_scores_bytes

#: What operands are called that the host adds: atoms that copy tiles, and tensors of coordinates.
_BIAS_TMA, _BIAS_COORDINATES = "bias_tma", "bias_coordinates"
_SCORES_TMA, _SCORES_COORDINATES = "dscores_tma", "dscores_coordinates"

_VECTOR = 8  # elements of 16 bits that threads store at once


class SdpaBackwardBiased(SdpaBackward):
    """`SdpaBackward` of scores that have a bias with a row for each query: a stage of Q has the
    tile of it as well.

    gradient: How dBias is made:
        "again": `TiledBiasGradient` makes scores again.
        "tiles": It is dS: TMA stores it tile by tile, and threads fill in zeros.
        "sums": Tiles of dS are left in the workspace, and `BiasSums` adds them up.

    bias (B or 1, H or 1, S_q, S_kv), of 16 bits: the stride of its last mode is 1; addresses, the
    other strides and S_kv are multiples of 16 bytes. dBias of "tiles" as well, with all modes.
    """

    def __init__(self, *design, bias_type: type[cutlass.Numeric], gradient: str, **options):
        _, (tile_m, tile_n), (_, _, ds_stages), *_ = design
        self.bias_type, self.gradient = bias_type, gradient
        self.with_queries = tile_m * tile_n * bias_type.width // 8
        super().__init__(*design, **options)
        if self.leaves_scores and not self.transposed:
            raise ValueError(f"of {tile_n} keys dS has queries side by side; dBias has keys")
        if self.leaves_scores and ds_stages < 2:
            raise ValueError("dS of one tile leaves while that of the next is formed")

    @property
    def leaves_scores(self) -> bool:
        """Whether dS goes to global memory."""
        return self.gradient != "again"

    # Host --------------------------------------------------------------------------------

    def _values(self, operands: tuple) -> Values:
        names = (*self.scores.names, _BIAS_TMA, _BIAS_COORDINATES)
        if self.leaves_scores:
            names = (*names, _SCORES_TMA, _SCORES_COORDINATES)
        return Values(names, operands)

    def _with_tiles(self, operands: tuple, mQ, mK, scores: Int64) -> tuple:
        values, tile = Values(self.scores.names, operands), (self.tile_m, self.tile_n)
        layout = tile_layout(self.bias_type, *tile, self.q_stages)
        found = (*operands, *tma_load(scores_modes(values["bias"]), layout, tile))
        if not self.leaves_scores:
            return found
        if self.gradient == "tiles":
            target = scores_modes(values["dBias"])
        else:
            target = left_scores(self.element_type, scores, mQ, mK)
        stored = tile_layout(self.element_type, *tile, self.ds_stages)
        return *found, *cpasync.make_tiled_tma_atom(
            cpasync.CopyBulkTensorTileS2GOp(), target, cute.slice_(stored, (None, None, 0)), tile
        )

    def _left_of_scores(self, mQ, mK) -> Int64:
        if self.gradient != "sums":
            return Int64(0)
        return left_scores_bytes(Int64(mQ.shape[3]), mQ.shape[2], mQ.shape[0], mK.shape[0])

    def _bias_gradient(self, read: tuple, operands, start: Int64, scores: Int64, stream) -> None:
        if self.gradient == "again":
            super()._bias_gradient(read, operands, start, scores, stream)
        elif self.gradient == "sums":
            BiasSums(self)(*read[:2], operands, scores, stream)

    # Producer ----------------------------------------------------------------------------

    def _load_with_queries(self, storage, values: Values, work: Work, head, block, stage, full):
        tile = self.tile_m, self.tile_n
        layout = tile_layout(self.bias_type, *tile, self.q_stages)
        load_scores(
            *(values[_BIAS_TMA], values[_BIAS_COORDINATES], tile),
            (work.batch, head, block, work.first_key // self.tile_n),
            *(self._bias_memory(storage, layout), stage, full),
        )

    def _bias_memory(self, storage, layout) -> cute.Tensor:
        pointer = cute.recast_ptr(storage.bias.data_ptr(), layout.inner, dtype=self.bias_type)
        return cute.make_tensor(pointer, layout.outer)

    # Consumers ---------------------------------------------------------------------------

    def _with_bias(self, tile: Tile, turn: Turn, context: Context) -> Tile:
        of = transposed_layout if self.transposed else tile_layout
        layout = of(self.bias_type, self.tile_m, self.tile_n, self.q_stages)
        shared = self._bias_memory(context.storage, layout)[None, None, turn.q.index]
        product = self.score_product
        matrices = 4 if product.columns % 16 == 0 else 2
        atom = cute.make_copy_atom(
            warp.LdMatrix8x8x16bOp(self.transposed, matrices), self.bias_type
        )
        copy = cute.make_tiled_copy_C(atom, product.mma()).get_slice(context.thread)
        shape = product.mma().partition_shape_C(product.shape)
        found = cute.make_rmem_tensor(shape, self.bias_type)
        cute.copy(atom, copy.partition_S(shared), copy.retile(found))
        return tile._replace(bias=rows_and_columns(found))

    def _await_scores(self, context: Context) -> None:
        if self.leaves_scores:
            _await_reads()

    def _write_scores(self, turn: Turn, context: Context) -> None:
        if self.leaves_scores:
            self._store_scores(turn, context)

    @cute.jit
    def _store_scores(self, turn: Turn, context: Context):
        work, values = context.work, context.values
        if _first_warp():
            mScores = values[_SCORES_COORDINATES][None, None, turn.head, work.batch]
            place = turn.block, work.first_key // self.tile_n
            tile = cute.local_tile(mScores, (self.tile_m, self.tile_n), place)
            layout = tile_layout(self.element_type, self.tile_m, self.tile_n, self.ds_stages)
            dS = context.storage.ds.get_tensor(layout.outer, swizzle=layout.inner)
            source, target = cpasync.tma_partition(
                values[_SCORES_TMA],
                0,
                cute.make_layout(1),
                cute.group_modes(dS, 0, 2),
                cute.group_modes(tile, 0, 2),
            )
            cute.copy(values[_SCORES_TMA], source[None, turn.ds], target)
            cute.arch.cp_async_bulk_commit_group()

    def _end_scores(self, context: Context, key_heads: Int32) -> None:
        self._await_scores(context)
        if self.gradient == "tiles":
            self._fill(context, key_heads)

    @cute.jit
    def _fill(self, context: Context, key_heads: Int32):
        """Zeros where no query sees a key of the block."""
        work, mBias = context.work, context.values["dBias"]
        begin, end = work.blocks.begin * self.tile_m, work.blocks.end * self.tile_m
        if work.total == 0:
            begin, end = Int32(0), Int32(0)
        across = self.tile_n // _VECTOR
        down = CONSUMERS * GROUP // across
        column = work.first_key + context.thread % across * _VECTOR
        for i in cutlass.range(context.space.heads // key_heads, unroll=1):
            rows = mBias[work.batch, work.first_head + i, None, None]
            for row in cutlass.range(context.thread // across, rows.shape[0], down, unroll=1):
                if (row < begin) | (row >= end):
                    target = matrix_row(rows, row, column, rows.shape[0], _VECTOR)
                    target.store(0, [Float32(0.0)] * _VECTOR)


@cute.jit
def _await_reads():
    """Of shared memory, by copies that the first warp has begun."""
    if _first_warp():
        cute.arch.cp_async_bulk_wait_group(0, read=True)


def _first_warp() -> Boolean:
    """Of all consumers."""
    return cute.arch.make_warp_uniform(cute.arch.warp_idx()) == GROUP // 32

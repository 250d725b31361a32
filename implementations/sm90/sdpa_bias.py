"""How a bias of scores comes to shared memory on Hopper: with the keys that it is for."""

import math

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as sm90
from cutlass import Int32
from cutlass.cute.nvgpu import warp
from cutlass.tensor_utils import LayoutEnum

from ..common.attention.scores import Tile, rows_and_columns
from ..common.attention.values import Values
from ..common.threads import GROUP
from .sdpa_forward import SdpaForward, SdpaForwardPaged
from .sdpa_loads import load_scores, scores_modes, tma_load
from .sdpa_rows import load_vector

#: What operands are called that the host adds: the atom that copies a tile of the bias, and the
#: tensor of its coordinates; and in the kernel, where it lies in shared memory.
_TMA, _COORDINATES, _SHARED = "bias_tma", "bias_coordinates", "bias_shared"

_BOX_ALIGNMENT = 128  # bytes that TMA asks addresses in shared memory to be multiples of
_SWIZZLED = 1024  # the same where rows are swizzled


class StagedBias:
    """A part of `SdpaForward`, of scores that have a bias: a stage of keys has the tile of it as
    well, in memory behind all stages of keys, and is released when that has been added.

    of_queries: Whether the bias has a row for each query; else it has one for all of them.

    bias (B or 1, H or 1, S_q or 1, S_kv), of 16 bits: the stride of its last mode is 1; addresses,
    the other strides and S_kv are multiples of 16 bytes.
    """

    def __init__(self, *design, bias_type: type[cutlass.Numeric], of_queries: bool, **options):
        _, (tile_m, tile_n), stages, *_ = design
        self.bias_type, self.of_queries = bias_type, of_queries
        whole = _BOX_ALIGNMENT * 8 // bias_type.width
        self._pitch = -(-tile_n // whole) * whole  # of stages of rows
        elements = tile_m * tile_n if of_queries else self._pitch
        self.with_keys = elements * stages * bias_type.width // 8
        super().__init__(*design, **options)

    @cute.jit
    def with_operands(self, mQ, mK, mV, mO, operands, workspace, multiprocessors: Int32, stream):
        mBias = scores_modes(Values(self.scores.names, operands)["bias"])
        tma, coordinates = tma_load(mBias, self._bias_layout(), self._bias_tile)
        SdpaForward.with_operands(
            self,
            *(mQ, mK, mV, mO, (*operands, tma, coordinates)),
            *(workspace, multiprocessors, stream),
        )

    def _values(self, operands, sK: cute.Tensor | None = None) -> Values:
        names = (*self.scores.names, _TMA, _COORDINATES)
        if sK is None:
            return Values(names, operands)
        return Values((*names, _SHARED), (*operands, self._behind_keys(sK)))

    @property
    def copied_with_keys(self) -> int:
        return math.prod(self._bias_tile) * self.bias_type.width // 8

    def _behind_keys(self, sK: cute.Tensor) -> cute.Tensor:
        """(rows, keys, stages) of the bias."""
        keys = cute.cosize(sK) * sK.element_type.width // 8
        assert keys % _SWIZZLED == 0
        address = sK.iterator.toint() + keys
        pointer = cute.make_ptr(
            self.bias_type, address, cute.AddressSpace.smem, assumed_align=_SWIZZLED
        )
        layout = self._bias_layout()
        if not self.of_queries:
            return cute.make_tensor(pointer, layout)
        swizzled = cute.recast_ptr(pointer, layout.inner, dtype=self.bias_type)
        return cute.make_tensor(swizzled, layout.outer)

    @property
    def _bias_tile(self) -> tuple[int, int]:
        return self.tile_m if self.of_queries else 1, self.tile_n

    def _bias_layout(self):
        """(rows, keys, stages)"""
        if not self.of_queries:
            return cute.make_layout((1, self.tile_n, self.stages), stride=(0, 1, self._pitch))
        tile = self.tile_m, self.tile_n, self.tile_n
        return sm90.make_smem_layout_a(LayoutEnum.ROW_MAJOR, tile, self.bias_type, self.stages)

    # Producer ----------------------------------------------------------------------------

    def _load_keys(self, keys: tuple, block, stages, state, work, values: Values) -> None:
        super()._load_keys(keys, block, stages, state, work, values)
        place = work.place
        row = place.query // self.tile_m if self.of_queries else Int32(0)
        load_scores(
            *(values[_TMA], values[_COORDINATES], self._bias_tile),
            *((place.batch, place.head, row, block), values[_SHARED], state.index),
            stages.producer_get_barrier(state),
        )

    # Consumers ---------------------------------------------------------------------------

    def _score_with(self, pipeline_k, k_state, tile: Tile, sequence, values, *others) -> None:
        shared = values[_SHARED][None, None, k_state.index]
        bias = self._bias_of_queries(shared) if self.of_queries else self._bias_of_all(shared, tile)
        self._score(tile._replace(bias=bias), sequence, values, *others)
        # What all lanes have read comes before what TMA writes there: without a fence, loads that
        # nothing has waited for do not.
        cute.arch.fence_view_async_shared()
        cute.arch.sync_warp()
        pipeline_k.consumer_release(k_state)

    def _write_rows(self, consumer, thread, tOrO, sO, mO, softmax, work, values, tiles):
        if work.sequence.low is not None or work.sequence.high is not None:
            # Nothing is added: but places in shared memory are found anew for each tile then. They
            # would be kept, and of several loops over keys some have no registers for them.
            thread = thread + (work.place.query >> 31)
        super()._write_rows(consumer, thread, tOrO, sO, mO, softmax, work, values, tiles)

    def _bias_of_queries(self, shared: cute.Tensor) -> cute.Tensor:
        """Of a thread's scores, (rows, columns)."""
        mma = self._mma_qk()
        atom = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(False, 4), self.bias_type)
        copy = cute.make_tiled_copy_C(atom, mma).get_slice(cute.arch.thread_idx()[0] - GROUP)
        shape = mma.partition_shape_C((self.tile_m, self.tile_n))
        found = cute.make_rmem_tensor(shape, self.bias_type)
        cute.copy(atom, copy.partition_S(shared), copy.retile(found))
        return rows_and_columns(found)

    def _bias_of_all(self, shared: cute.Tensor, tile: Tile) -> cute.Tensor:
        """The same of one row for all queries."""
        _, columns = tile.extents
        (_, first), row = tile.local[0, 0], shared[0, None]
        found = cute.make_rmem_tensor(columns, self.bias_type)
        for column in range(0, columns, 2):
            pair = cute.make_tensor(found.iterator + column, cute.make_layout(2))
            load_vector(row, first + tile.offset(0, column)[1], pair)
        return cute.make_tensor(found.iterator, cute.make_layout((2, columns), stride=(0, 1)))


class SdpaForwardBiased(StagedBias, SdpaForward):
    """See `StagedBias`."""


class SdpaForwardBiasedPaged(StagedBias, SdpaForwardPaged):
    """The same of K and V in pages."""

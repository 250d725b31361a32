"""Attention of 8-bit floats for every GPU from Ampere on."""

import cuda.bindings.driver as cuda
import cutlass.cute as cute
from cutlass import Float32, Int64, const_expr

from ..common.attention.descale import descale, descale_products, descaled
from ..common.attention.scores import Tile
from ..common.attention.values import Values
from ..common.attention.widened import Widened
from ..common.work_split import COUNTER_BYTES
from .sdpa_forward import SdpaForward


class SdpaForwardFp8(SdpaForward):
    """`SdpaForward` of 8-bit floats, which kernels before write to the workspace in the type of the
    output: 16 bits hold them exactly. Queries may have 16 bits.

    keys_in_page: Rows of a page of K and V; None: they have no pages.
    """

    def __init__(self, *design, keys_in_page: int | None, **options):
        super().__init__(*design, **options)
        self.keys_in_page = keys_in_page

    @cute.jit
    def with_operands(
        self,
        mQ: cute.Tensor,
        mK: cute.Tensor,
        mV: cute.Tensor,
        mO: cute.Tensor,
        operands,
        workspace: Int64,
        stream: cuda.CUstream,
    ):
        """workspace: An address, of what others need zero, then of room for operands."""
        element_type, names, in_page = self.element_type, self.scores.names, self.keys_in_page
        of_keys, of_values = (
            Widened(element_type, names, tiles.columns, in_page, hopper=False)
            for tiles in (self.k, self.v)
        )
        address = workspace + COUNTER_BYTES
        sequences = self._extents(mQ, mK, Values(names, operands)).batches
        wK, address = of_keys(mK, operands, address, sequences, stream)
        wV, address = of_values(mV, operands, address, sequences, stream)
        wQ = mQ
        if const_expr(mQ.element_type.width == 8):
            of_queries = Widened(element_type, (), self.q.columns, hopper=False)
            wQ, _ = of_queries(mQ, (), address, sequences, stream)
        # `super` is not known where code is traced.
        SdpaForward.with_operands(self, wQ, wK, wV, mO, operands, workspace, stream)

    def _multiplier(self, values: Values, batch, key_head) -> Float32:
        found = super()._multiplier(values, batch, key_head)
        return descaled(found, values, batch, key_head) if self.scores.plain else found

    def _change(self, tile: Tile, values: Values, key_head) -> None:
        descale_products(tile, values, key_head)
        super()._change(tile, values, key_head)

    def _factor(self, factor: Float32, values: Values, batch, key_head) -> Float32:
        return factor * descale(values, "descale_v", batch, key_head)

"""Attention of queries of 16 bits to keys of 8-bit floats, for Hopper."""

import cuda.bindings.driver as cuda
import cutlass.cute as cute
from cutlass import Int32, Int64

from ..common.attention.values import Values
from ..common.attention.widened import Widened
from ..common.work_split import COUNTER_BYTES
from .sdpa_forward import SdpaForward
from .sdpa_fp8 import Descaled


class SdpaForwardMixed(Descaled, SdpaForward):
    """`SdpaForward` of keys and values of 8-bit floats, which kernels before write to the workspace
    in the type of the queries: it holds them exactly.

    K and V may be pages: (pages, H_kv, page_size, D), page `page_table[b, i]` has keys
    i · page_size and following of sequence b. What is written is not.

    keys_in_page: None, or any number of them.
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
        multiprocessors: Int32,
        stream: cuda.CUstream,
    ):
        """operands: a tuple of what the scores are called by; workspace: an address, of two
        counters that are zero, then of room for K and V."""
        element_type, names, in_page = self.element_type, self.scores.names, self.keys_in_page
        of_keys, of_values = (
            Widened(element_type, names, columns, in_page, hopper=True)
            for columns in (self.head_dim, self.head_dim_v)
        )
        address = workspace + COUNTER_BYTES
        sequences, _ = self._sequences(mQ, Values(names, operands))
        wK, address = of_keys(mK, operands, address, sequences, stream)
        wV, _ = of_values(mV, operands, address, sequences, stream)
        # `super` is not known where code is traced.
        SdpaForward.with_operands(
            self, mQ, wK, wV, mO, operands, workspace, multiprocessors, stream
        )

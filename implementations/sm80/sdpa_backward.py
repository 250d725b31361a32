"""The gradient of scaled dot-product attention for every GPU from Ampere on."""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Numeric, const_expr

from ..common.attention.scores import Scores
from ..common.attention.sequences import sequence_of
from ..common.attention.values import Values
from .sdpa_bias_gradient import BiasGradient
from .sdpa_gradient_pass import GradientPass
from .sdpa_rows import RowSums, SinkGradient, row_statistics
from .sdpa_tiles import THREADS, extents_of

MOST_COLUMNS = 256  # of both sums of a pass, so that nothing spills
MOST_COLUMNS_BESIDE = 128  # what becomes of scores, or is dropped


class SdpaBackward:
    """Gradients of Q, K, V, and of bias and sink if they are asked for.

    kernel          a block has               computes
    --------------  ------------------------  -----------------------------------------------
    rows            64 queries of a head      Δ and the log-sum-exp, to the workspace
    dQ              64 queries of a head      S and dP of the keys that they see; dQ
    dK and dV       64 keys of a head of K    S and dP of the queries that see them, of all heads
                                              of the group; dK and dV. Two kernels of one each if
                                              both are too wide for the registers of one
    dBias           a tile of dBias           S and dP of all that the tile was added to
    dSink           a head                    its sum over rows

    Every number is written once, by one thread, and sums have an order: two runs give the same.

    Operands (B, H, S, D), or packed (T, H, D), in the order of the forward pass, then dO like out,
    lse (B, H, S), or (H, T), dQ, dK, dV. The rest is in a tuple, in the order of `scores.names`;
    dBias and dSink among it are written. The workspace has room for `RowStatistics`.

    Args:
        head_dims: That there is room for, of Q and K, of V; multiples of 64.
        columns: Keys, or queries, that a block visits at once.
        stages: Of them in shared memory.
        aligned: Whether all rows begin at multiples of 16 bytes.
    """

    threads = THREADS

    def __init__(
        self,
        head_dims: tuple[int, int],
        columns: int,
        stages: int,
        element_type: type[Numeric],
        scores: Scores,
        *,
        aligned: bool = True,
    ):
        self.scores = scores
        self.rows = RowSums(head_dims[1], element_type, aligned)
        simple = scores.plain and not (scores.drops or scores.hides_anywhere)
        fused = sum(head_dims) <= (MOST_COLUMNS if simple else MOST_COLUMNS_BESIDE)
        together = (("dQ",), ("dK", "dV")) if fused else (("dQ",), ("dK",), ("dV",))
        tiles = head_dims, columns, stages, element_type, scores
        self.passes = [GradientPass(names, *tiles, aligned=aligned) for names in together]
        self.bias = BiasGradient(head_dims, columns, element_type, scores, aligned)

    @cute.jit
    def with_operands(
        self,
        mQ: cute.Tensor,
        mK: cute.Tensor,
        mV: cute.Tensor,
        mO: cute.Tensor,
        mDo: cute.Tensor,
        mLse: cute.Tensor,
        mDq: cute.Tensor,
        mDk: cute.Tensor,
        mDv: cute.Tensor,
        operands,
        workspace: Int64,
        stream: cuda.CUstream,
    ):
        values = Values(self.scores.names, operands)
        read = mQ, mK, mV, mDo, mLse
        extents = extents_of(mQ, mK, values)
        blocks = cute.ceil_div(extents.queries, self.rows.rows) * extents.heads * extents.batches
        self.rows_kernel(*read, mO, operands, workspace).launch(
            grid=(cutlass.max(blocks, 1), 1, 1), block=(THREADS, 1, 1), stream=stream
        )
        written = {"dQ": mDq, "dK": mDk, "dV": mDv}
        for one in self.passes:
            outputs = tuple(written[name] for name in one.names)
            one.launch(*read, outputs, operands, workspace, stream)
        if const_expr("dBias" in self.scores.names):
            self.bias.launch(*read, operands, workspace, stream)
        if const_expr("dSink" in self.scores.names):
            self.sink_kernel(*read, operands, workspace).launch(
                grid=(extents.heads, 1, 1), block=(THREADS, 1, 1), stream=stream
            )

    @cute.kernel
    def rows_kernel(self, mQ, mK, mV, mDo, mLse, mO, operands, workspace: Int64):
        thread, _, _ = cute.arch.thread_idx()
        index, _, _ = cute.arch.block_idx()
        values = Values(self.scores.names, operands)
        extents = extents_of(mQ, mK, values)
        blocks = cute.ceil_div(extents.queries, self.rows.rows)
        if index < blocks * extents.heads * extents.batches:
            batch, head = index // blocks // extents.heads, index // blocks % extents.heads
            sequence = sequence_of(values, batch, extents.queries, extents.keys)
            first = index % blocks * self.rows.rows
            statistics = row_statistics(workspace, mLse)
            self.rows.write(mO, mDo, mLse, statistics, sequence, batch, head, first, thread)

    @cute.kernel
    def sink_kernel(self, mQ, mK, mV, mDo, mLse, operands, workspace: Int64):
        thread, _, _ = cute.arch.thread_idx()
        values = Values(self.scores.names, operands)
        extents = extents_of(mQ, mK, values)
        statistics = row_statistics(workspace, mLse)
        SinkGradient().write(statistics, values, Int32(extents.batches), thread)

"""The gradient of a bias, added up from what blocks of the attention gradient leave of dS."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from ..common.attention.modes import attention_modes
from ..common.attention.sequences import queries_seeing, sequence_of
from ..common.attention.values import Values
from ..common.conversion import select
from ..common.flat_grid import flat_block_idx, flat_grid
from ..common.rows import matrix_row
from .sdpa_backward_plan import BackwardPlan
from .sdpa_workspace import left_pitch

_VECTOR, _ELEMENT_BYTES = 8, 2  # elements of 16 bits


def left_scores(element_type, address: Int64, mQ, mK) -> cute.Tensor:
    """(S_q,S_kv,H,B) of the workspace. mQ, mK: (S,D,H,B)"""
    queries, _, heads, batches = mQ.shape
    keys = mK.shape[0]
    pitch = left_pitch(keys)
    pointer = cute.make_ptr(element_type, address, cute.AddressSpace.gmem, assumed_align=16)
    strides = pitch, 1, Int64(queries) * pitch, Int64(heads) * queries * pitch
    return cute.make_tensor(
        pointer, cute.make_layout((queries, keys, heads, batches), stride=strides)
    )


class BiasSums:
    """dBias: dS of all batches and heads that it is one for, added up in their order and rounded.

    A block has a tile of it, of the shape that tiles were left in: which of them were is known.
    """

    threads = 256

    def __init__(self, plan: BackwardPlan):
        self.plan = plan
        self.across = plan.tile_n // _VECTOR
        self.at_once = self.threads // self.across  # rows

    @cute.jit
    def __call__(self, mQ, mK, operands, scores: Int64, stream):
        """scores: The address of dS."""
        plan = self.plan
        mQ, mK = attention_modes(mQ), attention_modes(mK)
        batches, heads, rows, columns = Values(plan.scores.names, operands)["dBias"].shape
        down, across = cute.ceil_div(rows, plan.tile_m), cute.ceil_div(columns, plan.tile_n)
        self.kernel(left_scores(plan.element_type, scores, mQ, mK), operands, down, across).launch(
            grid=flat_grid(across, down, heads, batches),
            block=(self.threads, 1, 1),
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(self, mScores: cute.Tensor, operands, down: Int32, across: Int32):
        """mScores: (S_q,S_kv,H,B)"""
        plan = self.plan
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        values = Values(plan.scores.names, operands)
        mBias = values["dBias"]
        block_k, block_q, head, batch = flat_block_idx(across, down, mBias.shape[1])
        thread = cute.arch.thread_idx()[0]
        queries, keys, heads, batches = mScores.shape
        # Of modes of extent 1 it is the sum.
        repeats_h = select(mBias.shape[1] == 1, Int32(heads), Int32(1))
        repeats_b = select(mBias.shape[0] == 1, Int32(batches), Int32(1))
        column = block_k * plan.tile_n + thread % self.across * _VECTOR
        first = block_q * plan.tile_m + thread // self.across
        rows = plan.tile_m // self.at_once
        sums = cute.make_rmem_tensor((rows, _VECTOR), Float32)
        sums.fill(0.0)
        for b in cutlass.range(batch, batch + repeats_b, unroll=1):
            sequence = sequence_of(values, b, Int32(queries), Int32(keys))
            first_key = block_k * plan.tile_n
            seeing = queries_seeing(sequence, first_key, plan.tile_n, plan.tile_m)
            seen = (first_key < sequence.keys) & (block_q >= seeing.begin)
            seen = seen & (block_q < seeing.end)
            for h in cutlass.range(head, head + repeats_h * Int32(seen), unroll=2):
                own = mScores[None, None, h, b]
                for i in cutlass.range_constexpr(rows):
                    row = matrix_row(own, first + i * self.at_once, column, queries, _VECTOR)
                    for j, element in enumerate(row.load(0)):
                        sums[i, j] = sums[i, j] + element
        self._write(sums, mBias[batch, head, None, None], first, column)

    @cute.jit
    def _write(self, sums: cute.Tensor, mBias: cute.Tensor, first: Int32, column: Int32):
        """mBias: (S_q,S_kv); in vectors where they are at multiples of their size."""
        queries, keys = mBias.shape
        pitch, step = (Int64(one) for one in mBias.stride)
        odd = (mBias.iterator.toint() // _ELEMENT_BYTES) | pitch | Int64(keys)
        in_vectors = (odd % _VECTOR == 0) & (step == 1)
        for i in cutlass.range_constexpr(cute.size(sums, mode=[0])):
            row = first + i * self.at_once
            elements = [sums[i, j] for j in range(_VECTOR)]
            if in_vectors:
                matrix_row(mBias, row, column, queries, _VECTOR).store(0, elements)
            else:
                for j in cutlass.range_constexpr(_VECTOR):
                    if (row < queries) & (column + j < keys):
                        mBias[row, column + j] = elements[j].to(mBias.element_type)

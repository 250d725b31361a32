"""Matrix products with what is done to their results, in one kernel; norms of rows; rows that an
index names; attention.

    args = ka.fusions.gemm_swiglu(x, w.t(), out=out, preactivation=preactivation)
    ka.get_kernels(args)[0].run(args)

Every function returns arguments (:class:`~kernel_api.arguments.GemmArguments` for products) for
``get_kernels``, ``explain`` and ``verify``; :mod:`kernel_api.ops` has the same names, and runs
them. Of products: ``acc`` is the product A · B, (M, K) · (K, N), with a batch L in front of every
operand if A has one; its arithmetic is that of :mod:`kernel_api.epilogue`: float32, or float64
where A is.

What is None is not computed. Factors (``alpha``, ``beta``, ``limit``, ``p``, ...) are numbers or
tensors of one number; they are run-time values, also where they are 1: a new number compiles
nothing. Operands and outputs may have any floating type. Outputs are rounded once; sums and
largest values are taken before that, and overwritten, not accumulated. Shapes:

===================  ==============================================================
``bias``             (N,), or (L, N)
``prob``             (M,), or (L, M); (M, 1) as well
``C``, ``upstream``  (M, N)
``preactivation``    (M, N); (M, 2N) where it is read by ``gemm_dglu``
``amax``             (), or (L,): the largest magnitude, NaN if there is one
``dprob``            (M,), or (L, M)
``dbias``            one per column of out: (N,), (2N,) of ``gemm_dglu``; L in front
===================  ==============================================================

Products of groups (:class:`~kernel_api.arguments.GroupedGemmArguments`) take tokens A (T, K) in
groups, experts B (E, K, N), or a list of them, and the ``offsets`` where groups end, int32 (E,).
Of these,

==============================  ===================================================
``bias``                        (E, N), or (N,)
``prob``, ``row_scale``         (T,), or (T, 1)
``alpha``, ``beta``             a number, or (E,)
``preactivation``               (T, N); (T, 2N) where it is read by
                                ``grouped_gemm_dglu``
``amax``                        (E,), 0 without tokens; (E, 2) of
                                ``grouped_gemm_dglu``
``dprob``                       (T,)
``dbias``                       (E, N); (E, 2N) of ``grouped_gemm_dglu``; 0 without
                                tokens
==============================  ===================================================

What has a row per token is written for those that belong to a group.

All raise ArgumentError for operands and options that contradict each other, with both values;
EpilogueError for what only the epilogue knows to be wrong; and what GemmArguments raises.
"""

from kernel_api.fusions._activation import (
    gemm_dactivation,
    gemm_dsrelu,
    gemm_recompute_dactivation,
    gemm_recompute_dsrelu,
    gemm_srelu,
)
from kernel_api.fusions._attention import sdpa, sdpa_backward
from kernel_api.fusions._gates import KINDS
from kernel_api.fusions._glu import (
    gemm_dglu,
    gemm_dswiglu,
    gemm_geglu,
    gemm_glu,
    gemm_recompute_dglu,
    gemm_reglu,
    gemm_swiglu,
)
from kernel_api.fusions._grouped import (
    grouped_gemm,
    grouped_gemm_dglu,
    grouped_gemm_dsrelu,
    grouped_gemm_glu,
    grouped_gemm_glu_hadamard,
    grouped_gemm_quantize,
    grouped_gemm_srelu,
    grouped_gemm_wgrad,
)
from kernel_api.fusions._indexed import gather_rows, group_rows, scatter_rows
from kernel_api.fusions._linear import (
    ACTIVATIONS,
    gemm,
    gemm_amax,
    gemm_bias_activation,
    gemm_residual,
)
from kernel_api.fusions._norm import (
    layernorm,
    layernorm_backward,
    layernorm_quantize,
    rmsnorm,
    rmsnorm_backward,
    rmsnorm_quantize,
    rmsnorm_rht_amax,
)
from kernel_api.fusions._quantize import quantize
from kernel_api.fusions._store import gemm_dropout, gemm_quantize, gemm_rope

#: What ``kind`` of a gated linear unit may be, see :func:`gemm_glu`.
GLU_KINDS = KINDS

__all__ = [
    "ACTIVATIONS",
    "GLU_KINDS",
    "gather_rows",
    "gemm",
    "gemm_amax",
    "gemm_bias_activation",
    "gemm_dactivation",
    "gemm_dglu",
    "gemm_dropout",
    "gemm_dsrelu",
    "gemm_dswiglu",
    "gemm_geglu",
    "gemm_glu",
    "gemm_quantize",
    "gemm_recompute_dactivation",
    "gemm_recompute_dglu",
    "gemm_recompute_dsrelu",
    "gemm_reglu",
    "gemm_residual",
    "gemm_rope",
    "gemm_srelu",
    "gemm_swiglu",
    "group_rows",
    "grouped_gemm",
    "grouped_gemm_dglu",
    "grouped_gemm_dsrelu",
    "grouped_gemm_glu",
    "grouped_gemm_glu_hadamard",
    "grouped_gemm_quantize",
    "grouped_gemm_srelu",
    "grouped_gemm_wgrad",
    "layernorm",
    "layernorm_backward",
    "layernorm_quantize",
    "quantize",
    "rmsnorm",
    "rmsnorm_backward",
    "rmsnorm_quantize",
    "rmsnorm_rht_amax",
    "scatter_rows",
    "sdpa",
    "sdpa_backward",
]


def __dir__() -> list[str]:
    return sorted(__all__)

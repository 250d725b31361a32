"""One-call forms: outputs allocated if absent, the best kernel chosen, the launch remembered.

    out = ka.ops.gemm(x, w.t())
    out, preactivation = ka.ops.gemm_swiglu(x, w.t(), preactivation=True)

The names and operands are those of :mod:`kernel_api.fusions`. If ``out`` is not given, it is
allocated row-major, of ``out_dtype`` or the element type of A, or of B where A alone has whole
numbers; where that has 8 bits, which hold hardly any product, of int32 or bfloat16; where A has
integers and A or B a scale, of bfloat16, or float32 for more than 8 bits; of float8_e4m3fn where
``scale`` is an output. An output that one may do without is allocated if it is True; those that the
operation is for (``amax`` of ``gemm_amax``, ``scale`` of ``gemm_quantize``) always are.
What comes back is ``out``, or a named tuple of all outputs where there are several.

Products of groups take ``offsets`` behind A and B. Where they allocate ``out``, rows of tokens that
belong to no group are not initialised.

All raise what the fusions raise, and NoKernelError, which says why, where no kernel takes the
operands.

A call that looks like an earlier one (element types, sizes, strides, alignment, devices, options)
goes straight to the kernel that was chosen then, with the operands and numbers of its own.
``torch.compile`` and ``torch.export`` see the forms as operators, ``torch.ops.kernel_api.gemm``
and so on; eager calls do not pass through torch's dispatcher.

Of all forms ``sdpa`` has a gradient; :mod:`kernel_api.nn` has others. Where gradients are followed
and an operand needs one, what any other form allocates needs one as well, and a backward pass that
comes to it raises GradientError, in graphs of ``torch.compile`` and programs of ``torch.export``
too. Outputs that are given are memory that is written: gradients end there; so no result that needs
a gradient can be given as one.
What ``quantize`` and norms that quantize make is constant.
"""

from __future__ import annotations

from fractions import Fraction

from kernel_api import fusions
from kernel_api._attention_ops import sdpa, sdpa_backward
from kernel_api._norm_ops import (
    layernorm,
    layernorm_backward,
    rmsnorm,
    rmsnorm_backward,
    rmsnorm_rht_amax,
)
from kernel_api._one_call import FORMS as FORMS
from kernel_api._one_call import GROUPED_FORMS as GROUPED_FORMS
from kernel_api._one_call import one_call, one_call_of_groups
from kernel_api._quantize_ops import Quantized, quantize
from kernel_api._quantized_norm_ops import layernorm_quantize, rmsnorm_quantize
from kernel_api._row_ops import GroupedRows, gather_rows, group_rows, scatter_rows

__all__ = [
    "GroupedRows",
    "Quantized",
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
    "register_operators",
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


def register_operators() -> None:
    """Make every form an operator of torch, ``torch.ops.kernel_api.gemm`` and so on, and what
    layers of :mod:`kernel_api.nn` are. Tracing one does that too; a process that only loads what
    torch.export saved has to."""
    from kernel_api import (  # noqa: F401  (they register)
        _attention_operators,
        _norm_operators,
        _operators,
        _quantized_norm_operators,
        _row_operators,
        _without_gradient,
        nn,
    )


_HALF = Fraction(1, 2)
_GRADIENT = ("dprob", "dbias")

gemm = one_call(fusions.gemm)
gemm_bias_activation = one_call(fusions.gemm_bias_activation, "preactivation")
gemm_residual = one_call(fusions.gemm_residual)
gemm_amax = one_call(fusions.gemm_amax, always=("amax",))
gemm_glu = one_call(fusions.gemm_glu, "preactivation", "scale", width=_HALF)
gemm_swiglu = one_call(fusions.gemm_swiglu, "preactivation", "scale", width=_HALF)
gemm_geglu = one_call(fusions.gemm_geglu, "preactivation", "scale", width=_HALF)
gemm_reglu = one_call(fusions.gemm_reglu, "preactivation", "scale", width=_HALF)
gemm_dglu = one_call(fusions.gemm_dglu, *_GRADIENT, width=2)
gemm_dswiglu = one_call(fusions.gemm_dswiglu, *_GRADIENT, width=2)
gemm_recompute_dglu = one_call(fusions.gemm_recompute_dglu, *_GRADIENT)
gemm_srelu = one_call(fusions.gemm_srelu, "preactivation")
gemm_dsrelu = one_call(fusions.gemm_dsrelu, *_GRADIENT)
gemm_dactivation = one_call(fusions.gemm_dactivation, *_GRADIENT)
gemm_recompute_dsrelu = one_call(fusions.gemm_recompute_dsrelu, *_GRADIENT)
gemm_recompute_dactivation = one_call(fusions.gemm_recompute_dactivation, *_GRADIENT)
gemm_rope = one_call(fusions.gemm_rope)
gemm_quantize = one_call(fusions.gemm_quantize, "amax", always=("scale",), element="float8_e4m3fn")
gemm_dropout = one_call(fusions.gemm_dropout)

_TOKENS = ("preactivation", "amax")

grouped_gemm = one_call_of_groups(fusions.grouped_gemm)
grouped_gemm_glu = one_call_of_groups(fusions.grouped_gemm_glu, *_TOKENS, "scale", width=_HALF)
grouped_gemm_dglu = one_call_of_groups(fusions.grouped_gemm_dglu, *_GRADIENT, "amax", width=2)
grouped_gemm_srelu = one_call_of_groups(fusions.grouped_gemm_srelu, *_TOKENS)
grouped_gemm_dsrelu = one_call_of_groups(fusions.grouped_gemm_dsrelu, *_GRADIENT, "amax")
grouped_gemm_glu_hadamard = one_call_of_groups(
    fusions.grouped_gemm_glu_hadamard, *_TOKENS, width=_HALF
)
grouped_gemm_quantize = one_call_of_groups(
    fusions.grouped_gemm_quantize, "amax", always=("scale",), element="float8_e4m3fn"
)
grouped_gemm_wgrad = one_call_of_groups(fusions.grouped_gemm_wgrad)

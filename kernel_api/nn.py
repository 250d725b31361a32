"""Functions with gradients, whose products run through the registry, forward and backward.

    y = ka.nn.linear_swiglu(x, weight, bias)
    y.sum().backward()

A forward pass of a linear layer is one kernel: the product with bias and activation. It keeps its
operands and nothing else. The backward pass computes the product again; the same kernel multiplies
the gradient with the activation's derivative and sums it up for the bias. Two more products give
the gradients of x and weight, as far as they are asked for. So a training step takes four products
in place of three, and the memory of no intermediate. Two linear layers with an activation between
them (:func:`mlp`) and a layer of experts (:func:`moe`) keep their intermediates and take three, so
they are what trains fastest; :func:`attention` keeps one number per row.

``torch.compile`` and ``torch.export`` see the operators ``torch.ops.kernel_api.linear`` and
``linear_backward``, ``mlp``, ``norm``, ``moe`` and ``sdpa`` with theirs, so what is exported trains
as well; in eager mode the functions call the same code without them. Gradients of gradients are
refused, by GradientError in eager mode, by torch's own errors in compiled graphs.

Under ``torch.autocast`` the operands of products and of attention (x, weights and bias; q, k, v and
bias) are cast as those of torch's own are, in every call anew, and "x's element type" is that of
the cast; where one of them has 8 or 64 bits, all stay as they are. Where x alone has whole numbers,
it is that of the weights. Norms take their operands as
they are, and so do the functions of :mod:`kernel_api.ops`.
"""

from __future__ import annotations

from kernel_api._attention_nn import attention
from kernel_api._linear_nn import linear_activation, linear_glu, linear_swiglu
from kernel_api._mlp_nn import mlp
from kernel_api._moe_nn import moe
from kernel_api._norm_nn import Normalised, layernorm, rmsnorm

__all__ = [
    "Normalised",
    "attention",
    "layernorm",
    "linear_activation",
    "linear_glu",
    "linear_swiglu",
    "mlp",
    "moe",
    "rmsnorm",
]


def __dir__() -> list[str]:
    return sorted(__all__)

"""Results of forms that have no gradient, made of what needs one: they need one as well, as those
of torch's own operators without a derivative do, and a backward pass that comes to them raises.

In a graph of torch an operator raises when the backward pass runs: that pass is traced as soon as
the forward pass is, whether anybody asks for it or not. It comes to all results of the graph, with
zeros to those that nobody uses, whose gradient is zero.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from kernel_api.errors import GradientError
from kernel_api.operands import as_torch

#: What has the gradient that a form has not.
_INSTEAD = {
    "gemm": "torch.matmul",
    "gemm_bias_activation": "kernel_api.nn.linear_activation",
    **dict.fromkeys(("gemm_glu", "gemm_geglu", "gemm_reglu"), "kernel_api.nn.linear_glu"),
    "gemm_swiglu": "kernel_api.nn.linear_swiglu",
    "rmsnorm": "kernel_api.nn.rmsnorm",
    "layernorm": "kernel_api.nn.layernorm",
    **dict.fromkeys(("grouped_gemm", "grouped_gemm_glu"), "kernel_api.nn.moe"),
    **dict.fromkeys(("group_rows", "gather_rows", "scatter_rows"), "kernel_api.nn.moe"),
}


def refusing(name: str, results: Any, given: Iterable[Any]) -> Any:
    """The results of a form, which need a gradient and have none.

    Args:
        name: Of the form.
        results: One tensor, or several values in a named tuple.
        given: All that the call was given. Results that are among it stay as they are: memory that
            is written again and again belongs to no graph.
    """
    several = isinstance(results, tuple)
    values = list(results) if several else [results]
    given = list(given)
    places = [place for place, one in enumerate(values) if _may_need(one, given)]
    if not places:
        return results
    outputs = [values[place] for place in places]
    sources = [one for one in given if isinstance(one, torch.Tensor)]
    made = _Refusing.apply(name, len(outputs), *outputs, *sources)  # type: ignore[no-untyped-call]
    for place, one in zip(places, made, strict=True):
        values[place] = one
    return type(results)(*values) if several else values[0]


def _may_need(value: Any, given: list[Any]) -> bool:
    if not isinstance(value, torch.Tensor) or any(_is_in(value, one) for one in given):
        return False
    return value.is_floating_point() or value.is_complex()


def _is_in(value: torch.Tensor, given: Any) -> bool:
    """Whether a result is what was given, or in the memory of another library's tensor."""
    if isinstance(given, torch.Tensor) or not hasattr(given, "__dlpack__"):
        return value is given
    return bool(value.data_ptr() == as_torch(given, "an output").data_ptr())


class _Refusing(torch.autograd.Function):
    """The first ``count`` tensors as they are, joined to the others."""

    @staticmethod
    def forward(ctx: Any, name: str, count: int, *tensors: Any) -> Any:
        ctx.name, ctx.count = name, count
        ctx.kinds = [(one.shape, one.dtype) for one in tensors[count:]]
        return tuple([one.detach() for one in tensors[:count]])

    @staticmethod
    def backward(ctx: Any, *upstream: Any) -> Any:
        if not torch.compiler.is_compiling():
            raise _refusal(ctx.name)
        refused = _refused([one for one in upstream if one is not None], ctx.name)
        found = [refused.to(element).expand(shape) for shape, element in ctx.kinds]
        return None, None, *(None for _ in range(ctx.count)), *found


@torch.library.custom_op("kernel_api::refused_gradient", mutates_args=())
def _refused(upstream: list[torch.Tensor], name: str) -> torch.Tensor:
    """Zero, where the gradients that it is made of are."""
    if any((one.float() if one.itemsize == 1 else one).any() for one in upstream):
        raise _refusal(name)
    return upstream[0].new_zeros(())


@_refused.register_fake
def _(upstream: list[torch.Tensor], name: str) -> torch.Tensor:
    return upstream[0].new_empty(())


def _refusal(name: str) -> GradientError:
    instead = _INSTEAD.get(name)
    use = "" if instead is None else f"use {instead}, which has one, "
    return GradientError(
        f"kernel_api.ops.{name} has no gradient, and an operand needs one; {use}"
        f"{'or ' if use else ''}pass operands detached, or call within torch.no_grad()"
    )

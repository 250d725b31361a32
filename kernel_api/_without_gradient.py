"""Results of forms that have no gradient, made of what needs one: they need one as well, as those
of torch's own operators without a derivative do, and a backward pass that comes to them raises.

In a graph of torch an operator raises when the backward pass runs: that pass is traced as soon as
the forward pass is, whether anybody asks for it or not. It comes to all results of the graph, with
zeros to those that nobody uses, whose gradient is zero.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from kernel_api._autograd import needs_gradient
from kernel_api.errors import GradientError
from kernel_api.operands import as_torch, becomes_node

_Join = Callable[[str, list[Any], list[Any]], Sequence[Any]]

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


def beside_outputs(name: str, results: Any, given: Sequence[Any]) -> Any:
    """The results in a graph of a call that was given some of them, where operands may need a
    gradient: those that were made for it have none."""
    if not torch.is_grad_enabled():
        return results
    if torch.compiler.is_dynamo_compiling() and not torch.compiler.is_exporting():
        return refusing(name, results, given) if needs_gradient(given) else results
    return refusing(name, results, given, _joined_in_programs)


def refusing(name: str, results: Any, given: Iterable[Any], joined: _Join | None = None) -> Any:
    """The results of a form, which need a gradient and have none.

    Args:
        name: Of the form.
        results: One tensor, or several values in a named tuple.
        given: All that the call was given. Results that are among it stay as they are: memory that
            is written again and again belongs to no graph.
        joined: From the name, results and tensors that they are made of to results that need a
            gradient where the latter do.
    """
    several = isinstance(results, tuple)
    values = list(results) if several else [results]
    given = list(given)
    places = [place for place, one in enumerate(values) if _may_need(one, given)]
    if not places:
        return results
    outputs = [values[place] for place in places]
    sources = [one for one in given if isinstance(one, torch.Tensor)]
    made = (joined or _joined)(name, outputs, sources)
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


def _joined(name: str, outputs: list[Any], sources: list[Any]) -> Sequence[Any]:
    found: tuple[Any, ...] = _Refusing.apply(  # type: ignore[no-untyped-call]
        name, len(outputs), *outputs, *sources
    )
    return found


def _joined_in_programs(name: str, outputs: list[Any], sources: list[Any]) -> Sequence[Any]:
    """The same in what torch.export and make_fx give, which hold operators and nothing of
    autograd."""
    found: list[torch.Tensor] = _without_gradient(outputs, sources, name)
    return found


class _Refusing(torch.autograd.Function):
    """The first ``count`` tensors as they are, joined to the others."""

    @staticmethod
    def forward(ctx: Any, name: str, count: int, *tensors: Any) -> Any:
        ctx.name, ctx.count = name, count
        ctx.kinds = [(one.shape, one.dtype) for one in tensors[count:]]
        return tuple([one.detach() for one in tensors[:count]])

    @staticmethod
    def backward(ctx: Any, *upstream: Any) -> Any:
        zero = _zero(ctx.name, upstream)
        found = [zero.to(element).expand(shape) for shape, element in ctx.kinds]
        return None, None, *(None for _ in range(ctx.count)), *found


def keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    """What :func:`refuse` asks for of an operator's inputs."""
    ctx.kinds = [_kind(one) for one in inputs]


def refuse(name: str, ctx: Any, *upstream: Any) -> tuple[Any, ...]:
    """The gradients of an operator of a form that has none."""
    given = [one for some in upstream for one in (some if isinstance(some, list) else [some])]
    zero = _zero(name, given)
    # Of what is absent at the end torch asks for nothing.
    pairs = zip(ctx.kinds, ctx.needs_input_grad, strict=False)
    return tuple([_like(kind, zero, n) for kind, n in pairs])


@torch.library.custom_op("kernel_api::without_gradient", mutates_args=())
def _without_gradient(
    results: list[torch.Tensor], given: list[torch.Tensor], name: str
) -> list[torch.Tensor]:
    return [one.clone() for one in results]


@_without_gradient.register_fake
def _(results: list[torch.Tensor], given: list[torch.Tensor], name: str) -> list[torch.Tensor]:
    return [torch.empty_like(one) for one in results]


def _keep_name(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    keep(ctx, inputs, output)
    ctx.name = inputs[2]


def _refuse_by_name(ctx: Any, *upstream: Any) -> tuple[Any, ...]:
    return refuse(ctx.name, ctx, *upstream)


_without_gradient.register_autograd(_refuse_by_name, setup_context=_keep_name)


def _kind(value: Any) -> Any:
    """The shape and the type of a tensor, or a list of those; None for anything else."""
    if isinstance(value, torch.Tensor):
        return value.shape, value.dtype
    is_list = isinstance(value, list) and all(isinstance(one, torch.Tensor) for one in value)
    return [_kind(one) for one in value] if is_list else None


def _like(kind: Any, zero: torch.Tensor, needed: Any) -> Any:
    """Zeros of a kind, or of those of a list, where they are needed."""
    if isinstance(kind, list):
        return [_like(one, zero, n) for one, n in zip(kind, needed, strict=True)]
    if kind is None or not needed:
        return None
    shape, element = kind
    return zero.to(element).expand(shape)


def _zero(name: str, upstream: Iterable[Any]) -> torch.Tensor:
    """Zero, of a form's gradients in a graph; raises GradientError in eager mode."""
    given = [one for one in upstream if one is not None]
    if not given or not becomes_node(given[0]):
        raise _refusal(name)
    zero: torch.Tensor = _refused(given, name)
    return zero


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

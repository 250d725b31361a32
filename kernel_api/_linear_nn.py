"""Linear layers with an activation, and their gradients; see :mod:`kernel_api.nn`."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from kernel_api import fusions, ops
from kernel_api._autocast import cast
from kernel_api._autograd import changeable, differentiable_once, zeros
from kernel_api._forms import product_type
from kernel_api._options import Options
from kernel_api.errors import ArgumentError
from kernel_api.fusions._glu import check_halves, checked_pairs
from kernel_api.operands import becomes_node, require_one_device, require_tensors

__all__ = ["linear_activation", "linear_glu", "linear_swiglu"]


def linear_activation(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    activation: str = "gelu",
) -> torch.Tensor:
    """activation(x · weightᵀ + bias), of x's element type; int32 or bfloat16 where that has 8 bits.

    Args:
        x: (..., K).
        weight: (N, K), as that of torch.nn.Linear.
        bias: (N,).
        activation: One of :data:`kernel_api.fusions.ACTIVATIONS`.

    Raises:
        ArgumentError: operands contradict each other, or there is no such activation.
        NoKernelError: no kernel takes the operands; says why.
    """
    if activation not in fusions.ACTIVATIONS:
        names = ", ".join(fusions.ACTIVATIONS)
        raise ArgumentError(f"activation is {activation!r}; expected one of {names}")
    return _linear(x, weight, bias, Function(activation))


def linear_glu(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    kind: str = "swiglu",
    order: str = "up_gate",
    granularity: int | str = 32,
    limit: float | None = None,
    offset: float | None = None,
) -> torch.Tensor:
    """The gated linear unit of x · weightᵀ + bias, (..., N / 2), of x's element type; int32 or
    bfloat16 where that has 8 bits.

    Args:
        x: (..., K).
        weight: (N, K), gate and up paired along N as ``order`` and ``granularity`` say.
        bias: (N,), paired as weight is.
        kind, order, granularity, limit, offset: See :func:`kernel_api.fusions.gemm_glu`.

    Raises:
        ArgumentError: operands or options contradict each other.
        NoKernelError: no kernel takes the operands; says why.
    """
    return _linear(x, weight, bias, Function.of_glu(kind, order, granularity, limit, offset))


_SWIGLU_OPTIONS = Options(linear_glu, ["kind"])


@_SWIGLU_OPTIONS.told
def linear_swiglu(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, **options: Any
) -> torch.Tensor:
    """:func:`linear_glu` of that kind."""
    _SWIGLU_OPTIONS.check("linear_swiglu", options)
    return linear_glu(x, weight, bias, kind="swiglu", **options)


class Function(NamedTuple):
    """What is done to a product, in types that operators of torch take.

    Attributes:
        name: An activation, or a kind of gated linear unit; the others are for the latter.
    """

    name: str
    order: str = "up_gate"
    granularity: str = "32"
    limit: float | None = None
    offset: float | None = None

    @classmethod
    def of_glu(cls, kind: str, order: str, granularity: Any, limit: Any, offset: Any) -> Function:
        """Raises ArgumentError for pairs that make no sense, and numbers that would learn."""
        for name, one in (("limit", limit), ("offset", offset)):
            if isinstance(one, torch.Tensor):
                raise ArgumentError(f"{name} is a tensor; expected a number: it has no gradient")
        return cls(kind, order, str(checked_pairs(kind, order, granularity)), limit, offset)

    @property
    def is_glu(self) -> bool:
        return self.name in fusions.GLU_KINDS

    @property
    def columns(self) -> int | str:
        """The granularity, as fusions take it."""
        return int(self.granularity) if self.granularity.isdecimal() else self.granularity

    @property
    def options(self) -> dict[str, Any]:
        """Of the fusions that compute it."""
        if not self.is_glu:
            return {"activation": self.name}
        return {
            "kind": self.name,
            "order": self.order,
            "granularity": self.columns,
            "limit": self.limit,
            "offset": self.offset,
        }


def _linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, function: Function
) -> torch.Tensor:
    given = {"x": x, "weight": weight, **({} if bias is None else {"bias": bias})}
    require_tensors(**given)
    require_one_device(**given)
    _check(x, weight, bias, function)
    x, weight, bias = cast(x, weight, bias)
    y: torch.Tensor
    if becomes_node(x):
        y = _operator(x, weight, bias, *function)
    else:
        y = _Linear.apply(x, weight, bias, function)  # type: ignore[no-untyped-call]
    return y


def _check(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, function: Function
) -> None:
    if weight.dim() != 2 or not x.dim() or x.shape[-1] != weight.shape[-1]:
        raise ArgumentError(
            f"x has shape {tuple(x.shape)} and weight {tuple(weight.shape)}; expected (..., K) "
            f"and (N, K)"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ArgumentError(
            f"bias has shape {tuple(bias.shape)}; expected ({weight.shape[0]},), the rows of weight"
        )
    if function.is_glu:
        check_halves("weight has N", weight.shape[0], function.columns)


# Forward and backward --------------------------------------------------------------------

_Gradients = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]


def _forward(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, function: Function
) -> torch.Tensor:
    fused = ops.gemm_glu if function.is_glu else ops.gemm_bias_activation
    out: torch.Tensor = fused(as_rows(x), weight.t(), bias=bias, **function.options)
    return out.view(*x.shape[:-1], out.shape[-1])


def _backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    wanted: tuple[bool, ...],
    function: Function,
) -> _Gradients:
    """Gradients of x, weight and bias, those that are wanted."""
    if not weight.shape[0]:  # of nothing: every width of pairs of columns is the same
        found: _Gradients = zeros((x, weight, bias), wanted)
        return found
    fused = ops.gemm_recompute_dglu if function.is_glu else ops.gemm_recompute_dactivation
    rows, upstream = as_rows(x), as_rows(dy)
    computed = fused(
        rows, weight.t(), upstream=upstream, bias=bias, dbias=wanted[2], **function.options
    )
    dz, dbias = computed if wanted[2] else (computed, None)
    dx = ops.gemm(dz, weight, out_dtype=x.dtype).view_as(x) if wanted[0] else None
    dweight = ops.gemm(dz.t(), rows, out_dtype=weight.dtype) if wanted[1] else None
    return dx, dweight, None if dbias is None or bias is None else dbias.to(bias.dtype)


def as_rows(x: torch.Tensor) -> torch.Tensor:
    """(M, K) of (..., K); torch does not tell M by the number of elements where K is 0."""
    return x.flatten(0, -2) if x.dim() > 1 else x.unsqueeze(0)


class _Linear(torch.autograd.Function):
    """In eager mode."""

    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any, bias: Any, function: Function) -> Any:
        ctx.save_for_backward(x, weight, bias)
        ctx.function = function
        return changeable(_forward(x, weight, bias, function))

    @staticmethod
    @differentiable_once("a linear layer")
    def backward(ctx: Any, saved: Any, dy: Any) -> Any:
        wanted = ctx.needs_input_grad[:3]
        x, weight, bias = saved
        return *_backward(dy, x, weight, bias, wanted, ctx.function), None


# Operators of torch ----------------------------------------------------------------------

#: Of operators: what :class:`Function` has.
FUNCTION = "str name, str order, str granularity, float? limit, float? offset"
_FORWARD = f"(Tensor x, Tensor weight, Tensor? bias, {FUNCTION}) -> Tensor"
_BACKWARD = (
    f"(Tensor dy, Tensor x, Tensor weight, Tensor? bias, bool[] wanted, {FUNCTION})"
    f" -> (Tensor, Tensor, Tensor)"
)


@torch.library.custom_op("kernel_api::linear", mutates_args=(), schema=_FORWARD)
def _operator(x: Any, weight: Any, bias: Any, *function: Any) -> torch.Tensor:
    return changeable(_forward(x, weight, bias, Function(*function)))


@_operator.register_fake
def _(x: Any, weight: Any, bias: Any, *function: Any) -> torch.Tensor:
    N = weight.shape[0] // (2 if Function(*function).is_glu else 1)
    element = product_type(x.dtype, weight.dtype)
    return x.new_empty((*x.shape[:-1], N), dtype=element)  # type: ignore[no-any-return]


@torch.library.custom_op("kernel_api::linear_backward", mutates_args=(), schema=_BACKWARD)
def _backward_operator(
    dy: Any, x: Any, weight: Any, bias: Any, wanted: Any, *function: Any
) -> tuple[torch.Tensor, ...]:
    found = _backward(dy, x, weight, bias, tuple(wanted), Function(*function))
    return tuple(x.new_empty(0) if gradient is None else gradient for gradient in found)


@_backward_operator.register_fake
def _(
    dy: Any, x: Any, weight: Any, bias: Any, wanted: Any, *function: Any
) -> tuple[torch.Tensor, ...]:
    given = zip((x, weight, bias), wanted, strict=True)
    return tuple(one.new_empty(one.shape) if asked else x.new_empty(0) for one, asked in given)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(*inputs[:3])
    ctx.function = inputs[3:]


def _operator_backward(ctx: Any, dy: Any) -> Any:
    wanted = list(ctx.needs_input_grad[:3])
    found = _backward_operator(dy, *ctx.saved_tensors, wanted, *ctx.function)
    gradients = [one if asked else None for one, asked in zip(found, wanted, strict=True)]
    return *gradients, *(None for _ in ctx.function)


_operator.register_autograd(_operator_backward, setup_context=_keep)

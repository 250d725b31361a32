"""Two linear layers with an activation between them, see :func:`kernel_api.nn.mlp`."""

from __future__ import annotations

from typing import Any

import torch

from kernel_api import fusions, ops
from kernel_api._autocast import cast
from kernel_api._autograd import changeable, differentiable_once, zeros
from kernel_api._linear_nn import FUNCTION, Function, as_rows
from kernel_api.errors import ArgumentError
from kernel_api.fusions._glu import check_halves
from kernel_api.operands import becomes_node, require_one_device, require_tensors

__all__ = ["mlp"]

Operands = tuple[Any, ...]  # x, w_up, w_down, b_up, b_down


def mlp(
    x: torch.Tensor,
    w_up: torch.Tensor,
    w_down: torch.Tensor,
    b_up: torch.Tensor | None = None,
    b_down: torch.Tensor | None = None,
    *,
    kind: str = "swiglu",
    order: str = "up_gate",
    granularity: int | str = 32,
    limit: float | None = None,
    offset: float | None = None,
) -> torch.Tensor:
    """kind(x · w_upᵀ + b_up) · w_downᵀ + b_down, of x's element type; int32 or bfloat16 where that
    has 8 bits.

    A training step takes three products for each of both matrices; what is between them is
    computed where the products are written, and no pass over memory is left but for the gradient of
    b_down. What is kept for the backward pass is the pre-activation and what it became. A program
    that is exported where gradients are followed keeps them whenever it runs; one that is exported
    under ``torch.no_grad()`` computes them again in its backward pass.

    Args:
        x: (..., K).
        w_up: (2I, K), as that of torch.nn.Linear, with gate and up paired along 2I as ``order`` and
            ``granularity`` say; (I, K) where ``kind`` is an activation.
        w_down: (N, I).
        b_up: (2I,), paired as w_up is, or (I,).
        b_down: (N,).
        kind: A kind of gated linear unit, see :func:`kernel_api.fusions.gemm_glu`, or one of
            :data:`kernel_api.fusions.ACTIVATIONS`, for which the options that follow are not.
        order, granularity, limit, offset: See :func:`kernel_api.fusions.gemm_glu`.

    Raises:
        ArgumentError: operands or options contradict each other.
        NoKernelError: no kernel takes the operands; says why.
    """
    given = x, w_up, w_down, b_up, b_down
    function = _function(kind, order, granularity, limit, offset)
    _check(*given, function)
    given = cast(*given)
    y: torch.Tensor
    learns = torch.is_grad_enabled() and any(one is not None and one.requires_grad for one in given)
    if becomes_node(given[0]):
        y = _operator(*given, *function, learns)[0]
    elif learns:
        y = _Mlp.apply(*given, function)  # type: ignore[no-untyped-call]
    else:
        y = changeable(_forward(given, function, keeps=False)[0])
    return y


def _function(kind: str, order: str, granularity: Any, limit: Any, offset: Any) -> Function:
    if kind in fusions.GLU_KINDS:
        return Function.of_glu(kind, order, granularity, limit, offset)
    if kind not in fusions.ACTIVATIONS:
        names = ", ".join((*fusions.GLU_KINDS, *fusions.ACTIVATIONS))
        raise ArgumentError(f"kind is {kind!r}; expected one of {names}")
    for name, one in (("limit", limit), ("offset", offset)):
        if one is not None:
            raise ArgumentError(f"{name} is {one!r} and kind is {kind!r}, which has none")
    return Function(kind)


def _check(x: Any, w_up: Any, w_down: Any, b_up: Any, b_down: Any, function: Function) -> None:
    biases = {"b_up": b_up, "b_down": b_down}
    given = {name: one for name, one in biases.items() if one is not None}
    given = {"x": x, "w_up": w_up, "w_down": w_down, **given}
    require_tensors(**given)
    require_one_device(**given)
    if w_up.dim() != 2 or not x.dim() or x.shape[-1] != w_up.shape[-1]:
        raise ArgumentError(
            f"x has shape {tuple(x.shape)} and w_up {tuple(w_up.shape)}; expected (..., K) and "
            f"{'(2I, K)' if function.is_glu else '(I, K)'}"
        )
    if function.is_glu:
        check_halves("w_up has 2I", w_up.shape[0], function.columns)
    inner = w_up.shape[0] // (2 if function.is_glu else 1)
    if w_down.dim() != 2 or w_down.shape[1] != inner:
        raise ArgumentError(
            f"w_down has shape {tuple(w_down.shape)}; expected (N, {inner}), because w_up has "
            f"shape {tuple(w_up.shape)}"
        )
    for which, bias, weight in (("up", b_up, w_up), ("down", b_down, w_down)):
        if bias is not None and bias.shape != weight.shape[:1]:
            raise ArgumentError(
                f"b_{which} has shape {tuple(bias.shape)}; expected ({weight.shape[0]},), the rows "
                f"of w_{which}"
            )


# Forward and backward --------------------------------------------------------------------


def _forward(given: Operands, function: Function, keeps: bool) -> list[torch.Tensor]:
    """The result, what is between both products, and the pre-activation if that is to be kept."""
    x, w_up, w_down, b_up, b_down = given
    fused = ops.gemm_glu if function.is_glu else ops.gemm_bias_activation
    made = fused(as_rows(x), w_up.t(), bias=b_up, preactivation=keeps, **function.options)
    hidden, *kept = made if keeps else (made,)
    y = ops.gemm(hidden, w_down.t(), bias=b_down).view(*x.shape[:-1], w_down.shape[0])
    return [y, hidden, *kept]


def _backward(
    dy: Any,
    given: Operands,
    hidden: Any,
    preactivation: Any,
    wanted: tuple[bool, ...],
    function: Function,
) -> tuple[Any, ...]:
    """Gradients of the operands, those that are wanted."""
    x, w_up, w_down, b_up, b_down = given
    rows, upstream = as_rows(x), as_rows(dy)
    wants_x, wants_up, wants_down, wants_b_up, wants_b_down = wanted
    db_down = upstream.sum(0).to(b_down.dtype) if wants_b_down else None
    if not w_down.shape[1]:  # of nothing: every width of pairs of columns is the same
        return *zeros((x, w_up, w_down, b_up), wanted[:4]), db_down
    dx: Any = None
    dw_up: Any = None
    dw_down: Any = None
    db_up: Any = None
    if wants_down:
        dw_down = ops.gemm(upstream.t(), hidden, out_dtype=w_down.dtype)
    if wants_x or wants_up or wants_b_up:
        fused = ops.gemm_dglu if function.is_glu else ops.gemm_dactivation
        made = fused(
            upstream, w_down, preactivation=preactivation, dbias=wants_b_up, **function.options
        )
        dz, db_up = made if wants_b_up else (made, None)
    if wants_b_up:
        db_up = db_up.to(b_up.dtype)
    if wants_x:
        dx = ops.gemm(dz, w_up, out_dtype=x.dtype).view_as(x)
    if wants_up:
        dw_up = ops.gemm(dz.t(), rows, out_dtype=w_up.dtype)
    return dx, dw_up, dw_down, db_up, db_down


class _Mlp(torch.autograd.Function):
    """In eager mode."""

    @staticmethod
    def forward(
        ctx: Any, x: Any, w_up: Any, w_down: Any, b_up: Any, b_down: Any, function: Function
    ) -> Any:
        given = x, w_up, w_down, b_up, b_down
        wants_x, wants_up, wants_down, wants_b_up, _ = ctx.needs_input_grad[:5]
        keeps = wants_x or wants_up or wants_b_up
        y, hidden, *preactivation = _forward(given, function, keeps)
        ctx.save_for_backward(
            *given, hidden if wants_down else None, preactivation[0] if keeps else None
        )
        ctx.function = function
        return changeable(y)

    @staticmethod
    @differentiable_once("an MLP")
    def backward(ctx: Any, saved: Any, dy: Any) -> Any:
        *given, hidden, preactivation = saved
        wanted = ctx.needs_input_grad[:5]
        found = _backward(dy, tuple(given), hidden, preactivation, wanted, ctx.function)
        return *found, None


# Operators of torch ----------------------------------------------------------------------

_OPERANDS = "Tensor x, Tensor w_up, Tensor w_down, Tensor? b_up, Tensor? b_down"
_FORWARD = f"({_OPERANDS}, {FUNCTION}, bool keeps) -> Tensor[]"
_BACKWARD = (
    f"(Tensor dy, {_OPERANDS}, Tensor? hidden, Tensor preactivation, bool[] wanted, {FUNCTION}) "
    f"-> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)


def _make(
    x: Any, w_up: Any, w_down: Any, b_up: Any, b_down: Any, *function_and_keeps: Any
) -> list[torch.Tensor]:
    """What a backward pass asks for comes with the result if that is likely."""
    *function, keeps = function_and_keeps
    y, *kept = _forward((x, w_up, w_down, b_up, b_down), Function(*function), keeps)
    return [changeable(y), *kept] if keeps else [changeable(y)]


_operator = torch.library.custom_op("kernel_api::mlp", _make, mutates_args=(), schema=_FORWARD)
_operator.register_fake(_make)


def _make_gradients(dy: Any, *given: Any) -> tuple[torch.Tensor, ...]:
    operands, (hidden, preactivation, wanted, *function) = given[:5], given[5:]
    found = _backward(dy, operands, hidden, preactivation, tuple(wanted), Function(*function))
    return tuple(dy.new_empty(0) if gradient is None else gradient for gradient in found)


_backward_operator = torch.library.custom_op(
    "kernel_api::mlp_backward", _make_gradients, mutates_args=(), schema=_BACKWARD
)
_backward_operator.register_fake(_make_gradients)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: list[torch.Tensor]) -> None:
    operands, function, kept = inputs[:5], inputs[5:-1], list[Any](output[1:])
    ctx.mark_non_differentiable(*kept)
    if kept and not ctx.needs_input_grad[2]:
        kept[0] = None
    ctx.save_for_backward(*operands, *kept)
    ctx.function = function


def _operator_backward(ctx: Any, upstream: list[Any]) -> Any:
    operands, kept = ctx.saved_tensors[:5], ctx.saved_tensors[5:]
    if not kept:  # a program that was exported without gradients learns
        _, *kept = _operator(*operands, *ctx.function, True)
    wanted = list(ctx.needs_input_grad[:5])
    found = _backward_operator(upstream[0], *operands, *kept, wanted, *ctx.function)
    gradients = [one if asked else None for one, asked in zip(found, wanted, strict=True)]
    return *gradients, *(None for _ in ctx.function), None


_operator.register_autograd(_operator_backward, setup_context=_keep)

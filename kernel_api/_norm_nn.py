"""Norms of rows with gradients, see :mod:`kernel_api.nn`.

A forward pass keeps x, weight and the statistics of rows; one kernel computes all gradients.
Graphs of torch.compile and torch.export hold it as ``torch.ops.kernel_api.norm`` and
``norm_backward``.
"""

from __future__ import annotations

from typing import Any

import torch

from kernel_api import _norm_ops as ops
from kernel_api._autograd import changeable, differentiable_once
from kernel_api._numbers import known_or_wide
from kernel_api._torch_operators import define, register_autograd
from kernel_api.errors import ArgumentError
from kernel_api.operands import becomes_node, require_tensors

__all__ = ["layernorm", "rmsnorm"]


def rmsnorm(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    *,
    eps: float = 1e-6,
) -> torch.Tensor:
    """x / √(mean of x² + eps) · weight + bias over the last mode, of x's element type.

    Args:
        x: (..., N).
        weight, bias: (N,).

    Raises:
        ArgumentError: operands contradict each other.
        NoKernelError: no kernel takes the operands; says why.
    """
    return _norm(x, weight, bias, eps, False)


def layernorm(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    *,
    eps: float = 1e-5,
) -> torch.Tensor:
    """(x − mean) / √(variance + eps) · weight + bias over the last mode, of x's element type.

    Args:
        x: (..., N).
        weight, bias: (N,).

    Raises:
        ArgumentError: operands contradict each other.
        NoKernelError: no kernel takes the operands; says why.
    """
    return _norm(x, weight, bias, eps, True)


def _norm(x: Any, weight: Any, bias: Any, eps: float, centred: bool) -> torch.Tensor:
    columns = {"weight": weight, "bias": bias}
    given = {name: one for name, one in columns.items() if one is not None}
    require_tensors(x=x, **given)
    if not x.dim():
        raise ArgumentError("x has no modes; expected (..., N)")
    found: torch.Tensor
    learns = any(t is not None and t.requires_grad for t in (x, weight, bias))
    learns = learns and torch.is_grad_enabled()
    if becomes_node(x):
        found = _operator(x, weight, bias, known_or_wide(eps), centred, learns)[0]
        return found
    if learns:
        found = _Norm.apply(x, weight, bias, eps, centred)  # type: ignore[no-untyped-call]
        return found
    forward = ops.layernorm if centred else ops.rmsnorm
    rows = x if x.dim() > 1 and x.is_contiguous() else _rows(x)
    found = forward(rows, eps=eps, **given)
    return found if rows is x else found.view(x.shape)


# Forward and backward --------------------------------------------------------------------


def _forward(
    x: Any, weight: Any, bias: Any, eps: float, centred: bool
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """The result, and the statistics of rows: mean, where these are centred, and rstd."""
    given = {"weight": weight, "bias": bias, "eps": eps}
    if centred:
        out, mean, rstd = ops.layernorm(_rows(x), mean=True, rstd=True, **given)
    else:
        mean, (out, rstd) = None, ops.rmsnorm(_rows(x), rstd=True, **given)
    return out.view(x.shape), mean, rstd


def _backward(
    dy: Any, x: Any, weight: Any, bias: Any, mean: Any, rstd: Any, wanted: tuple[bool, ...]
) -> tuple[torch.Tensor | None, ...]:
    """Gradients of x, weight and bias; of the latter two those that are wanted."""
    _, wants_weight, wants_bias = wanted
    asked = {"dweight": weight.dtype if wants_weight else None}
    asked["dbias"] = bias.dtype if wants_bias else None
    given = {"rstd": rstd, "weight": weight, **asked}
    backward = ops.rmsnorm_backward if mean is None else ops.layernorm_backward
    if mean is not None:
        given["mean"] = mean
    found = backward(_rows(dy), _rows(x), **given)
    if isinstance(found, torch.Tensor):
        return found.view(x.shape), None, None
    dweight, dbias = (getattr(found, name, None) for name in asked)
    return found.dx.view(x.shape), dweight, dbias


def _rows(x: torch.Tensor) -> torch.Tensor:
    """(M, N), with N side by side: a gradient may be one number for all."""
    rows = x.flatten(0, -2) if x.dim() > 1 else x.unsqueeze(0)
    return rows if rows.stride(-1) == 1 else rows.contiguous()


class _Norm(torch.autograd.Function):
    """In eager mode."""

    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any, bias: Any, eps: float, centred: bool) -> Any:
        y, mean, rstd = _forward(x, weight, bias, eps, centred)
        ctx.save_for_backward(x, weight, bias, mean, rstd)
        return changeable(y)

    @staticmethod
    @differentiable_once("a norm")
    def backward(ctx: Any, saved: Any, dy: Any) -> Any:
        x, weight, bias, mean, rstd = saved
        wanted = ctx.needs_input_grad[:3]
        return *_backward(dy, x, weight, bias, mean, rstd, wanted), None, None


# Operators of torch ----------------------------------------------------------------------

_NORM = "(Tensor x, Tensor? weight, Tensor? bias, float eps, bool centred, bool keeps) -> Tensor[]"
_NORM_BACKWARD = (
    "(Tensor dy, Tensor x, Tensor? weight, Tensor? bias, Tensor? mean, Tensor rstd, bool[] wanted)"
    " -> (Tensor, Tensor, Tensor)"
)


def _make(
    x: Any, weight: Any, bias: Any, eps: float, centred: bool, keeps: bool
) -> list[torch.Tensor]:
    """The result, with the statistics of rows if a backward pass is likely."""
    if keeps:
        out, *statistics = _forward(x, weight, bias, eps, centred)
        return [changeable(out), *(one for one in statistics if one is not None)]
    form = ops.layernorm if centred else ops.rmsnorm
    return [changeable(form(_rows(x), weight=weight, bias=bias, eps=eps).view(x.shape))]


define("norm", _NORM, _make, _make)
_operator = torch.ops.kernel_api.norm


def _make_gradients(
    dy: Any, x: Any, weight: Any, bias: Any, mean: Any, rstd: Any, wanted: list[bool]
) -> tuple[torch.Tensor, ...]:
    found = _backward(dy, x, weight, bias, mean, rstd, tuple(wanted))
    return tuple(x.new_empty(0) if gradient is None else gradient for gradient in found)


define("norm_backward", _NORM_BACKWARD, _make_gradients, _make_gradients)
_backward_operator = torch.ops.kernel_api.norm_backward


def _keep(ctx: Any, inputs: tuple[Any, ...], output: list[torch.Tensor]) -> None:
    x, weight, bias, *numbers = inputs
    _, *statistics = output
    ctx.save_for_backward(x, weight, bias, *statistics)
    ctx.numbers = numbers
    ctx.mark_non_differentiable(*statistics)


def _operator_backward(ctx: Any, upstream: list[Any]) -> Any:
    x, weight, bias, *statistics = ctx.saved_tensors
    eps, centred, keeps = ctx.numbers
    if not keeps:
        _, *statistics = _operator(x, weight, bias, eps, centred, True)
    mean, rstd = statistics if centred else (None, *statistics)
    wanted = list(ctx.needs_input_grad[:3])
    found = _backward_operator(upstream[0], x, weight, bias, mean, rstd, wanted)
    gradients = [one if asked else None for one, asked in zip(found, wanted, strict=True)]
    return *gradients, None, None, None


register_autograd("norm", _operator_backward, _keep)

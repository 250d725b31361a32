"""Norms of rows with gradients, see :mod:`kernel_api.nn`.

A forward pass keeps what was normalised, weight and the statistics of rows; one kernel computes all
gradients, with that of a residual's sum added. Graphs of torch.compile and torch.export hold it as
``torch.ops.kernel_api.norm`` and ``norm_backward``.
"""

from __future__ import annotations

from typing import Any, NamedTuple, overload

import torch

from kernel_api import _norm_ops as ops
from kernel_api._autograd import changeable, differentiable_once
from kernel_api._numbers import known_or_wide
from kernel_api._results import serialize
from kernel_api._torch_operators import define, register_autograd
from kernel_api.errors import ArgumentError
from kernel_api.operands import becomes_node, require_tensors

__all__ = ["layernorm", "rmsnorm"]


class Normalised(NamedTuple):
    """What a norm with a residual returns.

    Attributes:
        out: The norm of ``residual_out``.
        residual_out: x + residual, which the next layer adds to.
    """

    out: torch.Tensor
    residual_out: torch.Tensor


@overload
def rmsnorm(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    *,
    residual: None = None,
    eps: float = 1e-6,
) -> torch.Tensor: ...
@overload
def rmsnorm(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    *,
    residual: torch.Tensor,
    eps: float = 1e-6,
) -> Normalised: ...
def rmsnorm(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    *,
    residual: torch.Tensor | None = None,
    eps: float = 1e-6,
) -> torch.Tensor | Normalised:
    """x / √(mean of x² + eps) · weight + bias over the last mode, of x's element type.

    With a residual, of x + residual, rounded to the residual's element type: the norm and that sum,
    :class:`Normalised`. One kernel computes both, and one all gradients; but where x has another
    type, as under autocast beside a stream of float32, gradients are converted before and behind.

    Args:
        x: (..., N).
        weight, bias: (N,).
        residual: Of x's shape.

    Raises:
        ArgumentError: operands contradict each other.
        NoKernelError: no kernel takes the operands; says why.
    """
    return _norm(x, weight, bias, residual, eps, False)


@overload
def layernorm(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    *,
    residual: None = None,
    eps: float = 1e-5,
) -> torch.Tensor: ...
@overload
def layernorm(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    *,
    residual: torch.Tensor,
    eps: float = 1e-5,
) -> Normalised: ...
def layernorm(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    *,
    residual: torch.Tensor | None = None,
    eps: float = 1e-5,
) -> torch.Tensor | Normalised:
    """(x − mean) / √(variance + eps) · weight + bias over the last mode, of x's element type.

    With a residual, of x + residual, as :func:`rmsnorm` has it.

    Args:
        x: (..., N).
        weight, bias: (N,).
        residual: Of x's shape.

    Raises:
        ArgumentError: operands contradict each other.
        NoKernelError: no kernel takes the operands; says why.
    """
    return _norm(x, weight, bias, residual, eps, True)


def _norm(
    x: Any, weight: Any, bias: Any, residual: Any, eps: float, centred: bool
) -> torch.Tensor | Normalised:
    named = {"weight": weight, "bias": bias, "residual": residual}
    given = {name: one for name, one in named.items() if one is not None}
    require_tensors(x=x, **given)
    if not x.dim():
        raise ArgumentError("x has no modes; expected (..., N)")
    if residual is not None and residual.shape != x.shape:
        found, expected = tuple(residual.shape), tuple(x.shape)
        raise ArgumentError(f"residual has shape {found}; expected {expected}, that of x")
    operands = x, weight, bias, residual
    learns = any(t is not None and t.requires_grad for t in operands)
    learns = learns and torch.is_grad_enabled()
    if becomes_node(x):
        found = _operator(x, weight, bias, known_or_wide(eps), centred, learns, residual)
        return _returned(*found, is_sum=residual is not None)
    if learns:
        made = _Norm.apply(*operands, eps, centred)  # type: ignore[no-untyped-call]
        return _returned(made) if residual is None else _returned(*made, is_sum=True)
    if x.dim() < 2 or not (x.is_contiguous() and (residual is None or residual.is_contiguous())):
        return _returned(*_computed(*operands, eps, centred), is_sum=residual is not None)
    forward = ops.layernorm if centred else ops.rmsnorm
    if residual is None:
        return forward(x, eps=eps, **given)  # type: ignore[no-any-return]
    return _returned(*forward(x, eps=eps, residual_out=True, **given), is_sum=True)


def _returned(
    out: torch.Tensor, *others: torch.Tensor, is_sum: bool = False
) -> torch.Tensor | Normalised:
    """What a call returns, of what it computed; is_sum: of a residual is what comes next."""
    return Normalised(out, others[0]) if is_sum else out


# Forward and backward --------------------------------------------------------------------


def _computed(
    x: Any, weight: Any, bias: Any, residual: Any, eps: float, centred: bool, keeps: bool = False
) -> list[torch.Tensor]:
    """The result; the sum, of a residual; and the statistics of rows, if they are kept: mean, where
    these are centred, and rstd."""
    given: dict[str, Any] = {"weight": weight, "bias": bias, "eps": eps}
    if keeps:
        given |= {"mean": True, "rstd": True} if centred else {"rstd": True}
    if residual is not None:
        given |= {"residual": _rows(residual), "residual_out": True}
    found = (ops.layernorm if centred else ops.rmsnorm)(_rows(x), **given)
    if isinstance(found, torch.Tensor):
        return [changeable(found.view(x.shape))]
    out, *statistics = found
    made = [out] if residual is None else [out, statistics.pop()]
    return [*(changeable(one.view(x.shape)) for one in made), *statistics]


def _backward(given: Any, wanted: tuple[bool, ...]) -> tuple[torch.Tensor | None, ...]:
    """Gradients of x, weight and bias; of the latter two those that are wanted.

    given: What ``norm_backward`` takes but for what is wanted.
    """
    dy, x, weight, bias, mean, rstd, dresidual = given
    if dy.dtype != x.dtype:  # of a sum in the residual's type
        wide = torch.promote_types(dy.dtype, x.dtype)
        dy, x = dy.to(wide), x.to(wide)
    _, wants_weight, wants_bias = wanted
    asked = {"dweight": weight.dtype if wants_weight else None}
    asked["dbias"] = bias.dtype if wants_bias else None
    beside = {"rstd": rstd, "weight": weight, **asked}
    backward = ops.rmsnorm_backward if mean is None else ops.layernorm_backward
    if mean is not None:
        beside["mean"] = mean
    if dresidual is not None:
        beside["dresidual"] = _rows(dresidual)
    found = backward(_rows(dy), _rows(x), **beside)
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
    def forward(
        ctx: Any, x: Any, weight: Any, bias: Any, residual: Any, eps: float, centred: bool
    ) -> Any:
        y, *kept = _computed(x, weight, bias, residual, eps, centred, keeps=True)
        summed = None if residual is None else kept.pop(0)
        mean = kept.pop(0) if centred else None
        normalised = x if summed is None else summed
        ctx.save_for_backward(normalised, weight, bias, mean, *kept)
        ctx.set_materialize_grads(False)
        ctx.elements = x.dtype, None if residual is None else residual.dtype
        return y if summed is None else (y, summed)

    @staticmethod
    @differentiable_once("a norm")
    def backward(ctx: Any, saved: Any, dy: Any, dresidual: Any = None) -> Any:
        wants_x, wants_weight, wants_bias, wants_residual = ctx.needs_input_grad[:4]
        if dy is None:
            dx, dweight, dbias = _of_sum_alone(dresidual, saved[1:3], (wants_weight, wants_bias))
        else:
            wanted = wants_x, wants_weight, wants_bias
            dx, dweight, dbias = _backward((dy, *saved, dresidual), wanted)
        of_x, of_residual = _of_terms(dx, ctx.elements, (wants_x, wants_residual))
        return of_x, dweight, dbias, of_residual, None, None


def _of_sum_alone(dresidual: Any, sums: Any, wanted: Any) -> list[Any]:
    """Where nothing depends on the norm: nor does it on weight and bias."""
    pairs = zip(sums, wanted, strict=True)
    return [dresidual, *(torch.zeros_like(one) if asked else None for one, asked in pairs)]


def _of_terms(dx: Any, elements: tuple[Any, Any], wanted: tuple[bool, bool]) -> list[Any]:
    """The gradients of x and of a residual: that of their sum, in their types."""
    pairs = zip(elements, wanted, strict=True)
    return [dx.to(one) if asked and dx is not None else None for one, asked in pairs]


# Operators of torch ----------------------------------------------------------------------

_NORM = (
    "(Tensor x, Tensor? weight, Tensor? bias, float eps, bool centred, bool keeps, "
    "Tensor? residual=None) -> Tensor[]"
)
_NORM_BACKWARD = (
    "(Tensor dy, Tensor x, Tensor? weight, Tensor? bias, Tensor? mean, Tensor rstd, bool[] wanted, "
    "Tensor? dresidual=None) -> (Tensor, Tensor, Tensor)"
)


def _make(
    x: Any, weight: Any, bias: Any, eps: float, centred: bool, keeps: bool, residual: Any = None
) -> list[torch.Tensor]:
    """The result, and the sum of a residual; with the statistics of rows if a backward pass is
    likely."""
    return _computed(x, weight, bias, residual, eps, centred, keeps)


define("norm", _NORM, _make, _make)
_operator = torch.ops.kernel_api.norm


def _make_gradients(
    dy: Any,
    x: Any,
    weight: Any,
    bias: Any,
    mean: Any,
    rstd: Any,
    wanted: list[bool],
    dresidual: Any = None,
) -> tuple[torch.Tensor, ...]:
    found = _backward((dy, x, weight, bias, mean, rstd, dresidual), tuple(wanted))
    return tuple(x.new_empty(0) if gradient is None else gradient for gradient in found)


define("norm_backward", _NORM_BACKWARD, _make_gradients, _make_gradients)
_backward_operator = torch.ops.kernel_api.norm_backward


def _keep(ctx: Any, inputs: tuple[Any, ...], output: list[torch.Tensor]) -> None:
    x, weight, bias, *numbers, residual = inputs
    _, *statistics = output
    normalised = x if residual is None else statistics.pop(0)
    ctx.save_for_backward(normalised, weight, bias, *statistics)
    ctx.numbers = numbers
    ctx.elements = x.dtype, None if residual is None else residual.dtype
    ctx.mark_non_differentiable(*statistics)
    ctx.set_materialize_grads(False)


def _operator_backward(ctx: Any, upstream: list[Any]) -> Any:
    x, weight, bias, *statistics = ctx.saved_tensors
    eps, centred, keeps = ctx.numbers
    if not keeps:
        _, *statistics = _operator(x, weight, bias, eps, centred, True, None)
    mean, rstd = statistics if centred else (None, *statistics)
    dy, dresidual = upstream[0], None if ctx.elements[1] is None else upstream[1]
    asked = ctx.needs_input_grad  # of what was given: torch leaves out a residual that is None
    wanted, wants_residual = list(asked[:3]), any(asked[6:])
    if dy is None:
        found = _of_sum_alone(dresidual, (weight, bias), wanted[1:])
    else:
        found = _backward_operator(dy, x, weight, bias, mean, rstd, wanted, dresidual)
    of_x, of_residual = _of_terms(found[0], ctx.elements, (wanted[0], wants_residual))
    sums = (one if w else None for one, w in zip(found[1:], wanted[1:], strict=True))
    return (of_x, *sums, None, None, None, of_residual)[: len(asked)]


register_autograd("norm", _operator_backward, _keep)
serialize(Normalised, "kernel_api.Normalised")

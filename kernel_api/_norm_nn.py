"""Norms of rows with gradients, see :mod:`kernel_api.nn`.

A forward pass keeps x, weight and the statistics of rows; one kernel computes all gradients.
"""

from __future__ import annotations

from typing import Any

import torch

from kernel_api import _norm_ops as ops
from kernel_api._autograd import changeable, differentiable_once
from kernel_api.errors import ArgumentError
from kernel_api.operands import require_tensors

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
    if learns and torch.is_grad_enabled():
        found = _Norm.apply(x, weight, bias, eps, centred)  # type: ignore[no-untyped-call]
        return found
    forward = ops.layernorm if centred else ops.rmsnorm
    rows = x if x.dim() > 1 and x.is_contiguous() else _rows(x)
    found = forward(rows, eps=eps, **given)
    return found if rows is x else found.view(x.shape)


def _rows(x: torch.Tensor) -> torch.Tensor:
    """(M, N), with N side by side: a gradient may be one number for all."""
    rows = x.flatten(0, -2) if x.dim() > 1 else x.unsqueeze(0)
    return rows if rows.stride(-1) == 1 else rows.contiguous()


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any, bias: Any, eps: float, centred: bool) -> Any:
        given = {"weight": weight, "bias": bias, "eps": eps}
        if centred:
            out, mean, rstd = ops.layernorm(_rows(x), mean=True, rstd=True, **given)
        else:
            mean, (out, rstd) = None, ops.rmsnorm(_rows(x), rstd=True, **given)
        ctx.save_for_backward(x, weight, bias, mean, rstd)
        return changeable(out.view(x.shape))

    @staticmethod
    @differentiable_once("a norm")
    def backward(ctx: Any, saved: Any, dy: Any) -> Any:
        x, weight, bias, mean, rstd = saved
        _, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        asked = {"dweight": weight.dtype if wants_weight else None}
        asked["dbias"] = bias.dtype if wants_bias else None
        given = {"rstd": rstd, "weight": weight, **asked}
        backward = ops.rmsnorm_backward if mean is None else ops.layernorm_backward
        if mean is not None:
            given["mean"] = mean
        found = backward(_rows(dy), _rows(x), **given)
        if isinstance(found, torch.Tensor):
            return found.view(x.shape), None, None, None, None
        dweight, dbias = (getattr(found, name, None) for name in asked)
        return found.dx.view(x.shape), dweight, dbias, None, None

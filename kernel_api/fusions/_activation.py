"""Activations with a factor per row, forward and backward."""

from __future__ import annotations

import functools
from typing import Any

from kernel_api import epilogue as ep
from kernel_api._options import Options
from kernel_api.arguments import GemmArguments
from kernel_api.fusions._linear import ACTIVATIONS
from kernel_api.fusions._shared import (
    Function,
    affine,
    fused,
    gradient_arguments,
    matrices,
    one_of,
    per_column,
    per_row,
    point_and_gradient,
    real,
    required,
    rows,
    shaped,
    times,
)


def gemm_srelu(
    A: Any,
    B: Any,
    *,
    out: Any,
    preactivation: Any = None,
    prob: Any = None,
    alpha: Any = 1.0,
) -> GemmArguments:
    """preactivation = alpha · acc, out = max(alpha · acc, 0)² · prob (So et al., Primer)."""
    A, B = matrices(A, B)
    full = (*rows(A), B.shape[-1])
    reads = {"alpha": real("alpha", alpha), "prob": per_row("prob", prob, A)}
    writes = {"preactivation": shaped("preactivation", preactivation, full)}
    return fused(srelu, A, B, shaped("out", out, full), reads=reads, writes=writes)


def srelu(
    accum: Any, alpha: Any = None, bias: Any = None, prob: Any = None, limit: Any = None
) -> dict[str, Any]:
    x = affine(accum, alpha, bias)
    y = ep.squared_relu(x) if limit is None else _bent_squared_relu(x, limit)[0]
    y = y if prob is None else y * prob
    return {"out": y, "preactivation": x, "amax": ep.amax(y, None)}


def _bent_squared_relu(x: Any, limit: Any) -> tuple[Any, Any]:
    """(limit · tanh(max(x, 0) / limit))², and its derivative."""
    bent = ep.tanh(ep.maximum(x, 0.0) / limit)
    below = limit * bent
    return below * below, 2.0 * below * (1.0 - bent * bent)


def gemm_dactivation(
    A: Any,
    B: Any,
    *,
    out: Any,
    preactivation: Any,
    activation: str = "gelu",
    prob: Any = None,
    dprob: Any = None,
    dbias: Any = None,
    alpha: Any = 1.0,
) -> GemmArguments:
    """The gradient of activation(x) · prob with respect to x, the ``preactivation``; the product
    is the gradient of the result. With dy = alpha · acc::

        out   = dy · prob · activation'(preactivation)
        dprob = Σ over columns of dy · activation(preactivation)
        dbias = Σ over rows of out

    Args:
        activation: One of :data:`ACTIVATIONS`.
    """
    A, B = matrices(A, B)
    full = (*rows(A), B.shape[-1])
    one_of("activation", activation, ACTIVATIONS)
    reads = {"preactivation": required("preactivation", preactivation, full)}
    function = dactivation_of(activation)
    return gradient_arguments(function, A, B, out, full[-1], reads, alpha, prob, dprob, dbias)


def gemm_recompute_dactivation(
    A: Any,
    B: Any,
    *,
    out: Any,
    upstream: Any,
    activation: str = "gelu",
    bias: Any = None,
    prob: Any = None,
    dprob: Any = None,
    dbias: Any = None,
    alpha: Any = 1.0,
) -> GemmArguments:
    """As :func:`gemm_dactivation`, but the product recomputes the pre-activation,
    alpha · acc + bias, and ``upstream`` is the gradient of the result, dy."""
    A, B = matrices(A, B)
    N = B.shape[-1]
    one_of("activation", activation, ACTIVATIONS)
    reads = {
        "upstream": required("upstream", upstream, (*rows(A), N)),
        "bias": per_column("bias", bias, A, N),
    }
    function = dactivation_of(activation)
    return gradient_arguments(function, A, B, out, N, reads, alpha, prob, dprob, dbias)


@functools.lru_cache
def dactivation_of(activation: str) -> Function:
    def fn(
        accum: Any,
        preactivation: Any = None,
        upstream: Any = None,
        alpha: Any = None,
        bias: Any = None,
        prob: Any = None,
    ) -> dict[str, Any]:
        x, dy = point_and_gradient(accum, preactivation, upstream, alpha, bias)
        return _gradients(dy, prob, getattr(ep, activation)(x), ep.derivative(activation)(x))

    return fn


def _gradients(dy: Any, prob: Any, y: Any, slope: Any) -> dict[str, Any]:
    """Of a result y · prob, from its gradient dy."""
    D = (dy if prob is None else dy * prob) * slope
    return {
        "out": D,
        "dprob": ep.sum(dy * y, -1),
        "dbias": ep.sum(D, -2),
        "amax": ep.amax(D, None),
    }


def bent_dsrelu(
    accum: Any, preactivation: Any = None, alpha: Any = None, prob: Any = None, limit: Any = None
) -> dict[str, Any]:
    return _gradients(times(alpha, accum), prob, *_bent_squared_relu(preactivation, limit))


_OPTIONS = Options(gemm_dactivation, ["activation"])
_RECOMPUTED_OPTIONS = Options(gemm_recompute_dactivation, ["activation"])


@_OPTIONS.told
def gemm_dsrelu(A: Any, B: Any, *, out: Any, preactivation: Any, **options: Any) -> GemmArguments:
    """:func:`gemm_dactivation` of ``"squared_relu"``: out = 2 · alpha · acc · max(preactivation,
    0) · prob, dprob = Σ over columns of alpha · acc · max(preactivation, 0)²."""
    _OPTIONS.check("gemm_dsrelu", options)
    return gemm_dactivation(
        A, B, out=out, preactivation=preactivation, activation="squared_relu", **options
    )


@_RECOMPUTED_OPTIONS.told
def gemm_recompute_dsrelu(
    A: Any, B: Any, *, out: Any, upstream: Any, **options: Any
) -> GemmArguments:
    """:func:`gemm_recompute_dactivation` of ``"squared_relu"``: with x = alpha · acc, out =
    2 · max(x, 0) · upstream · prob, dprob = Σ over columns of max(x, 0)² · upstream."""
    _RECOMPUTED_OPTIONS.check("gemm_recompute_dsrelu", options)
    return gemm_recompute_dactivation(
        A, B, out=out, upstream=upstream, activation="squared_relu", **options
    )

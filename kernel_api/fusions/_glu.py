"""Gated linear units, forward and backward."""

from __future__ import annotations

import functools
import operator
from typing import Any

from kernel_api import epilogue as ep
from kernel_api._numbers import whole_number
from kernel_api._options import Options
from kernel_api.arguments import GemmArguments
from kernel_api.errors import ArgumentError
from kernel_api.fusions._gates import KINDS, LIMITED, gated
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
from kernel_api.fusions._store import in_blocks, largest_of, scale_of_blocks
from kernel_api.operands import Operand

ORDERS = ("up_gate", "gate_up")


def gemm_glu(
    A: Any,
    B: Any,
    *,
    out: Any,
    kind: str = "swiglu",
    preactivation: Any = None,
    bias: Any = None,
    prob: Any = None,
    alpha: Any = 1.0,
    order: str = "up_gate",
    granularity: int | str = 32,
    limit: Any = None,
    offset: Any = None,
    scale: Any = None,
) -> GemmArguments:
    """out = f(gate) · h(up) · prob, of the column pairs gate and up of alpha · acc + bias.

    Args:
        out: (M, N / 2).
        kind: What f and h are; h(u) = u but for the last two:

            ===================  ================================================================
            ``"glu"``            f(g) = σ(g) (Dauphin et al., Language Modeling with Gated
                                 Convolutional Networks)
            ``"swiglu"``         f(g) = g · σ(g) (Shazeer, GLU Variants Improve Transformer; the
                                 next three too)
            ``"geglu"``          f(g) = g · Φ(g) by erf
            ``"geglu_tanh"``     the same by tanh
            ``"reglu"``          f(g) = max(g, 0)
            ``"geglu_clamped"``  f(g) = g' · σ(1.702 · g') of g' = min(g, limit), h(u) = clamp(u,
                                 −limit, limit) + offset (OpenAI, gpt-oss model card)
            ``"situglu"``        f(g) = 4 · tanh(g / 4) · σ(g), h(u) = 25 · tanh(u / 25)
            ===================  ================================================================

        preactivation: (M, N), alpha · acc + bias, written for :func:`gemm_dglu`; ``out`` is
            computed from what it is before it is rounded or clamped.
        order: Which stands first in a pair. Products of groups, and
            :func:`~kernel_api.epilogue.glu_pair`, have ``"gate_up"`` by default.
        granularity: Blocks of so many columns alternate; ``"halves"``: the first half of the
            columns and the second.
        limit, offset: Of ``"geglu_clamped"``, 7 and 1 by default; a limit is from 0 up.
        scale: (M, N / 256) float32, written: ``out``, of 8 bits, is in units of it, one for each
            128 of its columns, as :func:`gemm_quantize` has them in mode ``"block"``.
    """
    A, B = matrices(A, B)
    N = B.shape[-1]
    granularity = checked_pairs(kind, order, granularity)
    check_halves("B has N", N, granularity)
    reads = {
        "alpha": real("alpha", alpha),
        "bias": per_column("bias", bias, A, N),
        "prob": per_row("prob", prob, A),
        **limits_of(kind, limit, offset),
    }
    writes = {"preactivation": shaped("preactivation", preactivation, (*rows(A), N))}
    out = shaped("out", out, (*rows(A), N // 2))
    writes["scale"], top = of_blocks(scale, out, rows(A), N // 2)
    return fused(glu_of(kind, order, granularity, top), A, B, out, reads=reads, writes=writes)


def of_blocks(
    scale: Any, out: Operand | None, of_rows: tuple[int, ...], columns: int
) -> tuple[Operand | None, float | None]:
    """The scales of ``out``, and the largest value of its type; None and None without any."""
    if scale is None or out is None:
        return None, None
    found = scale_of_blocks(scale, of_rows, columns, f"out has {columns} columns")
    return found, largest_of(out)


@functools.lru_cache
def glu_of(kind: str, order: str, granularity: int | str, top: float | None = None) -> Function:
    """top: The largest value of out's type, where that is quantised in blocks."""

    def fn(
        accum: Any,
        alpha: Any = None,
        bias: Any = None,
        prob: Any = None,
        limit: Any = None,
        offset: Any = None,
    ) -> dict[str, Any]:
        x = affine(accum, alpha, bias)
        gate, up = ep.glu_pair(x, order, granularity)
        y = gated(kind, gate, up, limit, offset).result
        y = y if prob is None else y * prob
        written = {"out": y, "preactivation": x, "amax": ep.amax(y, None)}
        if top is not None:
            written["out"], written["scale"] = in_blocks(y, top)
        return written

    return fn


def gemm_dglu(
    A: Any,
    B: Any,
    *,
    out: Any,
    preactivation: Any,
    kind: str = "swiglu",
    prob: Any = None,
    dprob: Any = None,
    dbias: Any = None,
    alpha: Any = 1.0,
    order: str = "up_gate",
    granularity: int | str = 32,
    limit: Any = None,
    offset: Any = None,
) -> GemmArguments:
    """The gradient of :func:`gemm_glu` with respect to its pre-activation; the product is the
    gradient of its result.

    With dy = alpha · acc, and the names of :func:`gemm_glu`::

        d_gate = dy · prob · f'(gate) · h(up)      dprob = Σ over columns of dy · f(gate) · h(up)
        d_up   = dy · prob · f(gate) · h'(up)      dbias = Σ over rows of out

    Args:
        out: (M, 2N): d_gate and d_up, paired as gate and up in ``preactivation``.
        preactivation: (M, 2N), what :func:`gemm_glu` wrote.
    """
    A, B = matrices(A, B)
    wide = 2 * B.shape[-1]
    granularity = checked_pairs(kind, order, granularity)
    check_halves("preactivation has columns", wide, granularity)
    reads = {
        "preactivation": required("preactivation", preactivation, (*rows(A), wide)),
        **limits_of(kind, limit, offset),
    }
    function = dglu_of(kind, order, granularity)
    return gradient_arguments(function, A, B, out, wide, reads, alpha, prob, dprob, dbias)


def gemm_recompute_dglu(
    A: Any,
    B: Any,
    *,
    out: Any,
    upstream: Any,
    kind: str = "swiglu",
    bias: Any = None,
    prob: Any = None,
    dprob: Any = None,
    dbias: Any = None,
    alpha: Any = 1.0,
    order: str = "up_gate",
    granularity: int | str = 32,
    limit: Any = None,
    offset: Any = None,
) -> GemmArguments:
    """As :func:`gemm_dglu`, but the product recomputes the pre-activation, alpha · acc + bias,
    and ``upstream`` is the gradient of the result. Nothing of the forward pass need be kept.

    Args:
        out: (M, N), paired as the pre-activation is.
        upstream: (M, N / 2).
    """
    A, B = matrices(A, B)
    N = B.shape[-1]
    granularity = checked_pairs(kind, order, granularity)
    check_halves("B has N", N, granularity)
    reads = {
        "upstream": required("upstream", upstream, (*rows(A), N // 2)),
        "bias": per_column("bias", bias, A, N),
        **limits_of(kind, limit, offset),
    }
    function = dglu_of(kind, order, granularity)
    return gradient_arguments(function, A, B, out, N, reads, alpha, prob, dprob, dbias)


@functools.lru_cache
def dglu_of(kind: str, order: str, granularity: int | str, alpha_power: int = 1) -> Function:
    def fn(
        accum: Any,
        preactivation: Any = None,
        upstream: Any = None,
        alpha: Any = None,
        bias: Any = None,
        prob: Any = None,
        limit: Any = None,
        offset: Any = None,
        beta: Any = None,
    ) -> dict[str, Any]:
        if alpha_power == 2 and alpha is not None:
            alpha = alpha * alpha
        x, dy = point_and_gradient(accum, preactivation, upstream, alpha, bias)
        # beta behind the pairs, which are as wide as the accumulator: where that is one column,
        # one number per expert is taken for it.
        gate, up = (times(beta, half) for half in ep.glu_pair(x, order, granularity))
        glu = gated(kind, gate, up, limit, offset)
        d_gate, d_up = glu.gradients(dy if prob is None else dy * prob)
        D = ep.interleave(d_gate, d_up, order, granularity)
        return {
            "out": D,
            "dprob": ep.sum(dy * glu.result, -1),
            "dbias": ep.sum(D, -2),
            "amax_gate": ep.amax(d_gate, None),
            "amax_up": ep.amax(d_up, None),
        }

    return fn


_OPTIONS, _GRADIENT_OPTIONS = Options(gemm_glu, ["kind"]), Options(gemm_dglu, ["kind"])


@_OPTIONS.told
def gemm_swiglu(A: Any, B: Any, *, out: Any, **options: Any) -> GemmArguments:
    """:func:`gemm_glu` of that kind."""
    _OPTIONS.check("gemm_swiglu", options)
    return gemm_glu(A, B, out=out, kind="swiglu", **options)


@_OPTIONS.told
def gemm_geglu(A: Any, B: Any, *, out: Any, **options: Any) -> GemmArguments:
    """:func:`gemm_glu` of that kind."""
    _OPTIONS.check("gemm_geglu", options)
    return gemm_glu(A, B, out=out, kind="geglu", **options)


@_OPTIONS.told
def gemm_reglu(A: Any, B: Any, *, out: Any, **options: Any) -> GemmArguments:
    """:func:`gemm_glu` of that kind."""
    _OPTIONS.check("gemm_reglu", options)
    return gemm_glu(A, B, out=out, kind="reglu", **options)


@_GRADIENT_OPTIONS.told
def gemm_dswiglu(A: Any, B: Any, *, out: Any, preactivation: Any, **options: Any) -> GemmArguments:
    """:func:`gemm_dglu` of that kind."""
    _GRADIENT_OPTIONS.check("gemm_dswiglu", options)
    return gemm_dglu(A, B, out=out, preactivation=preactivation, kind="swiglu", **options)


def checked_pairs(kind: str, order: str, granularity: Any) -> int | str:
    """The granularity, of NumPy's numbers too."""
    one_of("kind", kind, KINDS)
    one_of("order", order, ORDERS)
    if isinstance(granularity, str) and granularity == "halves":
        return granularity
    columns = whole_number(granularity)
    if columns is None or columns < 1:
        raise ArgumentError(
            f"granularity is {granularity!r}; expected a number of columns, or 'halves'"
        )
    return operator.index(columns)  # known, where torch's compiler has it as a symbol


def check_halves(what: str, N: int, granularity: int | str) -> None:
    width = granularity if isinstance(granularity, int) else 1
    of = "halves" if granularity == "halves" else f"pairs of {width} columns"
    if N % (2 * width):
        raise ArgumentError(f"{what} = {N}; {of} need a multiple of {2 * width}")


def limits_of(kind: str, limit: Any, offset: Any) -> dict[str, Any]:
    if kind == LIMITED:
        return {
            "limit": _from_0_up("limit", 7.0 if limit is None else limit),
            "offset": real("offset", 1.0 if offset is None else offset),
        }
    for name, value in (("limit", limit), ("offset", offset)):
        if value is not None:
            raise ArgumentError(f"{name} is {value} and kind is {kind!r}; {LIMITED!r} has one")
    return {}


def _from_0_up(name: str, value: Any) -> Any:
    """A factor; what a tensor holds is not looked at."""
    factor = real(name, value)
    if isinstance(factor, float) and not factor >= 0:
        raise ArgumentError(f"{name} is {value}; expected a number from 0 up")
    return factor

"""Norms of rows and their gradients.

Modes in front of the last one are taken as one, M rows of N columns, which must be a view: the
arguments are those of matrices (M, N), and of statistics (M,).
"""

from __future__ import annotations

from math import prod
from typing import Any

from kernel_api.arguments import (
    EpilogueArguments,
    LayerNormArguments,
    LayerNormBackwardArguments,
    RmsNormArguments,
    RmsNormBackwardArguments,
)
from kernel_api.errors import ArgumentError
from kernel_api.fusions._shared import above_0, epilogue_of, one_of, required, rows
from kernel_api.fusions._store import MODES, quantized, written_scale
from kernel_api.operands import Operand


def rmsnorm(
    x: Any,
    *,
    out: Any,
    weight: Any = None,
    bias: Any = None,
    eps: float = 1e-6,
    rstd: Any = None,
    residual: Any = None,
    residual_out: Any = None,
) -> RmsNormArguments:
    """out = x · rstd · weight + bias with rstd = 1 / √(mean of x² + eps), per row.

    Args:
        x, out: (..., N).
        weight, bias: (N,).
        rstd: (...), written: what :func:`rmsnorm_backward` needs.
        residual: (..., N): x + residual, rounded to its type, is normalised in place of x.
        residual_out: (..., N) of residual's type, written: that sum; may be residual itself.
    """
    return RmsNormArguments(
        as_rows("x", x),
        as_rows("out", out),
        weight,
        bias=bias,
        eps=eps,
        rstd=_flat("rstd", rstd),
        **_sums(x, residual, residual_out),
    )


def layernorm(
    x: Any,
    *,
    out: Any,
    weight: Any = None,
    bias: Any = None,
    eps: float = 1e-5,
    mean: Any = None,
    rstd: Any = None,
    residual: Any = None,
    residual_out: Any = None,
) -> LayerNormArguments:
    """out = (x − mean) · rstd · weight + bias with rstd = 1 / √(variance + eps), per row.

    Args:
        x, out: (..., N).
        weight, bias: (N,).
        mean, rstd: (...), written: what :func:`layernorm_backward` needs.
        residual, residual_out: As :func:`rmsnorm` has them.
    """
    return LayerNormArguments(
        as_rows("x", x),
        as_rows("out", out),
        weight,
        bias=bias,
        eps=eps,
        rstd=_flat("rstd", rstd),
        mean=_flat("mean", mean),
        **_sums(x, residual, residual_out),
    )


def _sums(x: Any, residual: Any, residual_out: Any) -> dict[str, Any]:
    """Those that are there, of x's shape, as matrices."""
    given = {"residual": residual, "residual_out": residual_out}
    return {n: _like("x", x, n, one) for n, one in given.items() if one is not None}


def _like(of: str, x: Any, name: str, value: Any) -> Operand:
    expected = (x if isinstance(x, Operand) else Operand(x, of)).shape
    return as_rows(name, required(name, value, expected))


def rmsnorm_quantize(
    x: Any,
    *,
    out: Any,
    scale: Any,
    mode: str = "block",
    weight: Any = None,
    bias: Any = None,
    eps: float = 1e-6,
    rstd: Any = None,
    residual: Any = None,
    residual_out: Any = None,
) -> RmsNormArguments:
    """out = round(y / scale) of what :func:`rmsnorm` makes y of, so that y ≈ out × scale; it
    saturates. What a product of 8 bits takes, without y in memory.

    Args:
        x: (..., N).
        out: (..., N) of float8_e4m3fn, float8_e5m2 or int8.
        scale, mode: As :func:`gemm_quantize` has them, but that kernels compute ``"row"`` of any
            number of whole vectors of columns (16 bytes): (...) in mode ``"row"``, (..., N / 128)
            in ``"block"``, (..., N / 32) in ``"mx"``; read in ``"tensor"``.
        weight, bias, eps, rstd, residual, residual_out: As :func:`rmsnorm` has them.
    """
    given = {"weight": weight, "bias": bias, "eps": eps, "rstd": _flat("rstd", rstd)}
    sums = _sums(x, residual, residual_out)
    return RmsNormArguments(**_quantized_rows(x, out, scale, mode), **given, **sums)


def layernorm_quantize(
    x: Any,
    *,
    out: Any,
    scale: Any,
    mode: str = "block",
    weight: Any = None,
    bias: Any = None,
    eps: float = 1e-5,
    mean: Any = None,
    rstd: Any = None,
    residual: Any = None,
    residual_out: Any = None,
) -> LayerNormArguments:
    """The same of what :func:`layernorm` makes y of; see :func:`rmsnorm_quantize`."""
    given = {"weight": weight, "bias": bias, "eps": eps, "rstd": _flat("rstd", rstd)}
    given |= {"mean": _flat("mean", mean), **_sums(x, residual, residual_out)}
    return LayerNormArguments(**_quantized_rows(x, out, scale, mode), **given)


def _quantized_rows(x: Any, out: Any, scale: Any, mode: str) -> dict[str, Any]:
    """x and an ``out`` of its shape, as matrices, and what quantises one into the other."""
    x = x if isinstance(x, Operand) else Operand(x, "x")
    x, out = as_rows("x", x), as_rows("out", required("out", out, x.shape))
    return {"x": x, "out": out, "epilogue": _quantization(mode, x, out, scale)}


def _quantization(mode: str, x: Operand, out: Operand, scale: Any) -> EpilogueArguments:
    """Of x (M, N)."""
    one_of("mode", mode, MODES)
    if mode == "tensor":
        if scale is None:
            raise ArgumentError("scale is None; it is read if mode is 'tensor'")
        scale = above_0("scale", scale)
        if isinstance(scale, Operand):
            scale = _viewed("scale", scale, ())
        return epilogue_of(quantized(mode, out), {"scale": scale}, {})
    if scale is not None:
        scale = _flat("scale", scale) if mode == "row" else as_rows("scale", scale)
    found = written_scale(mode, scale, rows(x), x.shape[-1], "x")
    return epilogue_of(quantized(mode, out), {}, {"scale": found})


def rmsnorm_backward(
    dy: Any,
    x: Any,
    *,
    dx: Any,
    rstd: Any,
    weight: Any = None,
    dweight: Any = None,
    dbias: Any = None,
    dresidual: Any = None,
) -> RmsNormBackwardArguments:
    """With x̂ = x · rstd and g = dy · weight: dx = rstd · (g − x̂ · mean of g · x̂) +
    dresidual, dweight = Σ over rows of dy · x̂, dbias = Σ over rows of dy.

    Args:
        dy, x, dx: (..., N).
        rstd: (...), as :func:`rmsnorm` wrote it.
        weight: (N,).
        dweight, dbias: (N,), written.
        dresidual: (..., N), the gradient that x has from elsewhere: of ``residual_out``, where x is
            that sum, whose terms both have dx.
    """
    return RmsNormBackwardArguments(
        as_rows("dy", dy),
        as_rows("x", x),
        as_rows("dx", dx),
        _flat("rstd", rstd),
        weight,
        dweight=dweight,
        dbias=dbias,
        dresidual=None if dresidual is None else _like("x", x, "dresidual", dresidual),
    )


def layernorm_backward(
    dy: Any,
    x: Any,
    *,
    dx: Any,
    mean: Any,
    rstd: Any,
    weight: Any = None,
    dweight: Any = None,
    dbias: Any = None,
    dresidual: Any = None,
) -> LayerNormBackwardArguments:
    """With x̂ = (x − mean) · rstd and g = dy · weight: dx = rstd · (g − x̂ · mean of g · x̂ − mean
    of g) + dresidual, dweight = Σ over rows of dy · x̂, dbias = Σ over rows of dy.

    Args:
        dy, x, dx: (..., N).
        mean, rstd: (...), as :func:`layernorm` wrote them.
        weight: (N,).
        dweight, dbias: (N,), written.
        dresidual: (..., N), the gradient that x has from elsewhere: of ``residual_out``, where x is
            that sum, whose terms both have dx.
    """
    return LayerNormBackwardArguments(
        as_rows("dy", dy),
        as_rows("x", x),
        as_rows("dx", dx),
        _flat("mean", mean),
        _flat("rstd", rstd),
        weight,
        dweight=dweight,
        dbias=dbias,
        dresidual=None if dresidual is None else _like("x", x, "dresidual", dresidual),
    )


def rmsnorm_rht_amax(
    x: Any,
    *,
    out: Any,
    weight: Any,
    amax: Any = None,
    global_amax: Any = None,
    rows_per_block: int | None = None,
    eps: float = 1e-5,
    signs: Any = None,
) -> RmsNormArguments:
    """out = blocks of 16 columns of (x · rstd · weight) times signs, then times H16 / 4: a
    Hadamard transform, randomised by signs; rstd = 1 / √(mean of x² + eps).

    Args:
        x, out: (..., N), N a multiple of 16.
        weight: (N,).
        amax: (ceil(M / rows_per_block),), written: the largest magnitude in each block of rows,
            before values are rounded.
        global_amax: (), written: the same over all rows.
        rows_per_block: By default 8, 4 or 2: the largest that gives 148 blocks, or 2.
        eps: By default that of cuDNN's function, which is not :func:`rmsnorm`'s.
        signs: (16,); absent, they are all 1.
    """
    return RmsNormArguments(
        as_rows("x", x),
        as_rows("out", out),
        weight,
        eps=eps,
        hadamard=True,
        signs=signs,
        amax=amax,
        global_amax=global_amax,
        rows_per_block=rows_per_block,
    )


def as_rows(name: str, value: Any) -> Operand:
    """(..., N) as (M, N)."""
    operand = value if isinstance(value, Operand) else Operand(value, name)
    if operand.rank == 2:
        return operand
    if not operand.rank:
        raise ArgumentError(f"{name} has no modes; expected (..., N)")
    return _viewed(name, operand, (prod(operand.shape[:-1]), operand.shape[-1]))


def _flat(name: str, value: Any) -> Operand | None:
    """(...) as (M,)."""
    if value is None:
        return None
    operand = value if isinstance(value, Operand) else Operand(value, name)
    return operand if operand.rank == 1 else _viewed(name, operand, (prod(operand.shape),))


def _viewed(name: str, operand: Operand, shape: tuple[int, ...]) -> Operand:
    try:
        return operand.viewed(operand.tensor.view(shape), name)
    except RuntimeError:
        raise ArgumentError(
            f"{name} has shape {operand.shape} and strides {operand.stride}, and no view of it "
            f"has shape {shape}; pass a contiguous one"
        ) from None

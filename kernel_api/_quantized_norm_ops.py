"""The one-call forms of norms whose results are quantised, see :mod:`kernel_api.ops`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kernel_api import fusions
from kernel_api._quantize_ops import (
    Quantized,
    checked_mode,
    element_of,
    quantized_like,
    scales_of,
)
from kernel_api.arguments.norm import NormArguments
from kernel_api.errors import ArgumentError
from kernel_api.fusions._norm import as_rows
from kernel_api.operands import becomes_node

__all__ = ["layernorm_quantize", "rmsnorm_quantize"]

_FUSIONS: dict[str, Callable[..., NormArguments]] = {
    "rmsnorm_quantize": fusions.rmsnorm_quantize,
    "layernorm_quantize": fusions.layernorm_quantize,
}


def rmsnorm_quantize(
    x: Any,
    mode: str = "block",
    *,
    weight: Any = None,
    bias: Any = None,
    eps: float = 1e-6,
    residual: Any = None,
    residual_out: Any = None,
    scale: Any = None,
    out: Any = None,
    out_dtype: Any = None,
) -> Quantized:
    """round(y / scale) of what :func:`rmsnorm` makes y of, so that y ≈ out × scale; it saturates.

    See :func:`kernel_api.fusions.rmsnorm_quantize`. One launch; y is not written.

    Args:
        x: (..., N).
        mode: Which elements share a scale, as :func:`quantize` has it.
        weight, bias: (N,).
        residual: (..., N): x + residual, rounded to its type, is normalised in place of x.
        residual_out: (..., N), written if it is given: that sum; may be residual itself.
        scale: Of mode ``"tensor"``: a number or float32 (), what is known from elsewhere.
        out: (..., N) of ``out_dtype``, float8_e4m3fn by default; also float8_e5m2 or int8.
    """
    sums = residual, residual_out
    return _called("rmsnorm_quantize", x, mode, (weight, bias, *sums), eps, scale, out, out_dtype)


def layernorm_quantize(
    x: Any,
    mode: str = "block",
    *,
    weight: Any = None,
    bias: Any = None,
    eps: float = 1e-5,
    residual: Any = None,
    residual_out: Any = None,
    scale: Any = None,
    out: Any = None,
    out_dtype: Any = None,
) -> Quantized:
    """The same of what :func:`layernorm` makes y of; see :func:`rmsnorm_quantize`."""
    sums = residual, residual_out
    return _called("layernorm_quantize", x, mode, (weight, bias, *sums), eps, scale, out, out_dtype)


#: What a norm has beside x, in the order of operators.
Beside = tuple[Any, Any, Any, Any]
_BESIDE = ("weight", "bias", "residual", "residual_out")


def _called(
    name: str,
    x: Any,
    mode: str,
    beside: Beside,
    eps: float,
    scale: Any,
    out: Any,
    out_dtype: Any,
) -> Quantized:
    checked_mode(mode, scale)
    if mode == "tensor" and scale is None:
        raise ArgumentError(
            "scale is None; mode 'tensor' takes one that is known from elsewhere: give it, or "
            "quantize the result of the norm, which finds one"
        )
    if isinstance(beside[-1], bool):
        raise ArgumentError(
            f"residual_out is {beside[-1]}; give a tensor, or residual itself: what is returned "
            f"has no place for it"
        )
    import torch

    from kernel_api._autograd import check_outputs

    if not isinstance(x, torch.Tensor) or x.is_nested or not x.dim():  # of which only the first may
        x = as_rows("x", x).tensor
    is_fresh, is_node = out is None and beside[-1] is None, becomes_node(x)
    if is_node and is_fresh:
        from kernel_api import _quantized_norm_operators as operators

        element = element_of(out_dtype).torch
        return operators.traced(name, x, beside, eps, scale, mode, element)
    check_outputs([("residual_out", beside[-1])])
    out = quantized_like(x, out, out_dtype)
    found = Quantized(out, scales_of(mode, x) if scale is None else scale, mode)
    if is_node:
        from kernel_api import _quantized_norm_operators as operators

        operators.traced_into(name, x, beside, eps, found)
    elif is_fresh and type(eps) is float:
        _run_again(name, as_rows("x", x).tensor if x.dim() != 2 else x, beside, eps, found)
    else:
        from kernel_api._launches import run_best

        run_best(arguments_of(name, x, beside, eps, found))
    return found


def arguments_of(name: str, x: Any, beside: Beside, eps: float, found: Quantized) -> NormArguments:
    """Of a call, with its outputs."""
    given = {**dict(zip(_BESIDE, beside, strict=True)), "eps": eps}
    return _FUSIONS[name](x, out=found.out, scale=found.scale, mode=found.mode, **given)


def _run_again(name: str, rows: Any, beside: Beside, eps: float, found: Quantized) -> None:
    """Into outputs that were made for the call; rows: x as a matrix."""
    from kernel_api import _again

    weight, bias, residual, _ = beside
    if residual is not None:
        residual = as_rows("residual", residual).tensor
    beside = weight, bias, residual, None
    given = {n: one for n, one in zip(_BESIDE, beside, strict=True) if one is not None}
    found, is_number = _of_rows(found, rows), type(found.scale) is float
    how, read = (name, found.mode, found.out.dtype, eps, *given), (rows, *given.values())
    if found.mode == "tensor" and not is_number:
        read += (found.scale,)  # one that is no tensor is not looked at
    key = _again.look(read, *how, is_number)
    values = {**given, "eps": eps, "scale": found.scale}
    if not _again.repeated(key, (rows, found.out), tuple(values.values())):
        _again.run(key, arguments_of(name, rows, beside, eps, found), tuple(values))


def _of_rows(found: Quantized, rows: Any) -> Quantized:
    """The same as a matrix, as launches take it: one scale is ()."""
    import torch

    out, scale, mode = found
    if mode == "tensor":
        is_one = isinstance(scale, torch.Tensor) and scale.numel() == 1
        return Quantized(out.view(rows.shape), scale.view(()) if is_one else scale, mode)
    if out.dim() == 2:
        return found
    return Quantized(
        out.view(rows.shape), scale.view(rows.shape[0], *scale.shape[out.dim() - 1 :]), mode
    )

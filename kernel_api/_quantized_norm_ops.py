"""The one-call forms of norms whose results are quantised, see :mod:`kernel_api.ops`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from kernel_api import fusions
from kernel_api._lazy import module
from kernel_api._quantize_ops import (
    Quantized,
    checked_mode,
    element_of,
    look_of_quantized,
    quantized_like,
    scales_of,
)
from kernel_api.arguments.norm import NormArguments
from kernel_api.errors import ArgumentError
from kernel_api.fusions._norm import as_rows
from kernel_api.operands import Operand, becomes_node

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
_OF_ROWS = ("residual", "residual_out")


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

    if not isinstance(x, torch.Tensor) or x.is_nested:  # of which the latter is refused
        x = Operand(x, "x").tensor
    if not x.dim():
        as_rows("x", x)  # which refuses it
    is_made, is_node = out is None, becomes_node(x)
    if is_node and is_made and beside[-1] is None:
        from kernel_api import _quantized_norm_operators as operators

        element = element_of(out_dtype).torch
        return operators.traced(name, x, beside, eps, scale, mode, element)
    check_outputs([("residual_out", beside[-1])])
    out = quantized_like(x, out, out_dtype)
    found = Quantized(out, scales_of(mode, x) if scale is None else scale, mode)
    if is_node:
        from kernel_api import _quantized_norm_operators as operators

        operators.traced_into(name, x, beside, eps, found)
    else:
        run(name, x, beside, eps, found, () if is_made else ("out",))
    return found


def arguments_of(name: str, x: Any, beside: Beside, eps: float, found: Quantized) -> NormArguments:
    """Of a call, with its outputs."""
    given = {**dict(zip(_BESIDE, beside, strict=True)), "eps": eps}
    return _FUSIONS[name](x, out=found.out, scale=found.scale, mode=found.mode, **given)


def run(name: str, x: Any, beside: Beside, eps: Any, found: Quantized, into: Sequence[str]) -> None:
    """The best kernel, or what is known of such calls.

    Args:
        into: Of ``out`` and ``scale``, what is written that was not made for this call.
    """
    _again = module("_again")

    key, (rows, given, one) = None, _as_launched(x, beside, found)
    into = (*into, "residual_out") if "residual_out" in given else into
    if type(eps) is float and rows is not None:  # launchers take no other numbers
        is_read = found.mode == "tensor"
        key = look_of_quantized(name, one, is_read, into, {"x": rows, **given}, eps)
    values = {**given, "eps": eps, "scale": one.scale}
    if not _again.repeated(key, (rows, one.out), tuple(values.values())):
        _again.run(key, arguments_of(name, x, beside, eps, found), tuple(values), into)


def _as_launched(x: Any, beside: Beside, found: Quantized) -> tuple[Any, dict[str, Any], Quantized]:
    """x as a matrix, what is given beside, and the outputs, as launches take them; no x where that
    cannot be told, as of what arguments refuse."""
    import torch

    given = {name: one for name, one in zip(_BESIDE, beside, strict=True) if one is not None}
    out, scale, mode = found
    try:
        if mode == "tensor" and isinstance(scale, torch.Tensor):
            scale = scale.view(())
        if x.dim() == 2:
            return x, given, Quantized(out, scale, mode)
        leading = x.shape[:-1]
        given |= {name: _matrix(given[name], leading) for name in _OF_ROWS if name in given}
        if mode != "tensor":
            scale = _matrix(scale, leading)
        return _matrix(x, leading), given, Quantized(_matrix(out, leading), scale, mode)
    except (AttributeError, RuntimeError, ValueError):
        return None, given, found


def _matrix(one: Any, leading: Any) -> Any:
    """With the leading modes as one; raises ValueError for others."""
    if one.shape[: len(leading)] != leading:
        raise ValueError
    return one.view(-1, *one.shape[len(leading) :])

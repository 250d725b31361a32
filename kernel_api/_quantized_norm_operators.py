"""Quantised norms as operators of torch, for the graphs of torch.compile and torch.export:
``torch.ops.kernel_api.rmsnorm_quantize(x, weight, bias, given, eps, number, element, by,
residual)`` and so on allocate what they return, ``rmsnorm_quantize.out(x, weight, bias, given, out,
scale, eps, number, by, residual, residual_out)`` and so on write outputs that are there. Nobody
comes here in eager mode."""

from __future__ import annotations

import functools
from typing import Any

import torch

from kernel_api import _quantized_norm_ops
from kernel_api._numbers import known_or_wide
from kernel_api._quantize_ops import Quantized, scales_of
from kernel_api._quantized_norm_ops import Beside, arguments_of, run
from kernel_api._quantized_norm_ops import __all__ as names
from kernel_api._row_operators import first_of, outputs_of, quantized_of, scale_read
from kernel_api._torch_operators import define, define_constant
from kernel_api._transforms import are_known, check_traced

#: As of ``quantize``.
_SCHEMA = (
    "(Tensor x, Tensor? weight, Tensor? bias, Tensor? given, float eps, float? number, "
    "ScalarType element, str by, Tensor? residual=None) -> Tensor[]"
)
_SCHEMA_OUT = (
    "(Tensor x, Tensor? weight, Tensor? bias, Tensor? given, Tensor(a!) out, Tensor(b!)? scale, "
    "float eps, float? number, str by, Tensor? residual=None, Tensor(c!)? residual_out=None) -> ()"
)


def traced(
    name: str, x: Any, beside: Beside, eps: float, scale: Any, mode: str, element: Any
) -> Quantized:
    """The call in a graph; scale: that is given, or None."""
    (weight, bias, residual, _), (given, number) = beside, scale_read(scale)
    _check_read(x, beside, given)
    operator = getattr(torch.ops.kernel_api, name).default
    factors = weight, bias, given
    found = operator(x, *factors, known_or_wide(eps), number, element, mode, residual)
    return quantized_of(found, scale, mode)


def traced_into(name: str, x: Any, beside: Beside, eps: float, found: Quantized) -> None:
    """The same into outputs that are given."""
    is_given = found.mode == "tensor"
    given, number = scale_read(found.scale if is_given else None)
    _check_read(x, beside, given)
    (weight, bias, *sums), written = beside, None if is_given else found.scale
    operator = getattr(torch.ops.kernel_api, name).out
    tensors = weight, bias, given, found.out, written
    operator(x, *tensors, known_or_wide(eps), number, found.mode, *sums)


def _check_read(x: Any, beside: Beside, scale: Any) -> None:
    weight, bias, residual, _ = beside
    check_traced(x=x, weight=weight, bias=bias, residual=residual, scale=scale)


def _make(name: str, x: Any, *others: Any) -> Any:
    weight, bias, given, eps, number, element, by, residual = _with_sums(others, 8)
    scale, form = first_of(given, number), getattr(_quantized_norm_ops, name)
    beside = {"weight": weight, "bias": bias, "residual": residual}
    return outputs_of(form(x, by, scale=scale, out_dtype=element, eps=eps, **beside), scale)


def _make_fake(name: str, x: Any, *others: Any) -> Any:
    weight, bias, given, eps, number, element, by, residual = _with_sums(others, 8)
    scale, out = first_of(given, number), x.new_empty(x.shape, dtype=element)
    found = Quantized(out, scales_of(by, x) if scale is None else scale, by)
    if are_known((x, weight, bias, residual, eps, *found)):
        arguments_of(name, x, (weight, bias, residual, None), eps, found)
    return outputs_of(found, scale)


def _run(name: str, x: Any, *others: Any) -> None:
    beside, eps, found = _into(*others)
    run(name, x, beside, eps, found, ("out",) if found.mode == "tensor" else ("out", "scale"))


def _check(name: str, x: Any, *others: Any) -> None:
    """Raises what the call would, where sizes and numbers are known."""
    if are_known((x, *others)):
        arguments_of(name, x, *_into(*others))


def _into(*given: Any) -> tuple[Beside, float, Quantized]:
    """What an operator is given that writes outputs that are there."""
    weight, bias, read, out, scale, eps, number, by, *sums = _with_sums(given, 10)
    return (weight, bias, *sums), eps, Quantized(out, first_of(read, scale, number), by)


def _with_sums(given: tuple[Any, ...], count: int) -> tuple[Any, ...]:
    """What torch leaves out of a call is None."""
    return (*given, *[None] * (count - len(given)))


for _name in names:
    _parts = [functools.partial(part, _name) for part in (_make, _make_fake, _run, _check)]
    define_constant(_name, _SCHEMA, *_parts[:2])
    define(f"{_name}.out", _SCHEMA_OUT, *_parts[2:])

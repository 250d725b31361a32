"""Quantised norms as operators of torch, for the graphs of torch.compile and torch.export:
``torch.ops.kernel_api.rmsnorm_quantize(x, weight, bias, given, out, scale, eps, number, by)``
and so on. They write outputs that are there; nobody comes here in eager mode."""

from __future__ import annotations

import functools
from typing import Any

import torch

from kernel_api._launches import run_best
from kernel_api._numbers import known_or_wide
from kernel_api._quantize_ops import Quantized
from kernel_api._quantized_norm_ops import __all__ as names
from kernel_api._quantized_norm_ops import arguments_of
from kernel_api._row_operators import scales_by_kind
from kernel_api._transforms import are_known, check_traced
from kernel_api.arguments.norm import NormArguments

#: given, number: the scale that is read; scale: that which is written; by: the mode, which is what
#: torch calls an argument of its own where operators are traced.
_SCHEMA = (
    "(Tensor x, Tensor? weight, Tensor? bias, Tensor? given, Tensor(a!) out, Tensor(b!)? scale, "
    "float eps, float? number, str by) -> ()"
)

_library: Any = torch.library.Library("kernel_api", "FRAGMENT")  # type: ignore[no-untyped-call]


def traced(name: str, x: Any, weight: Any, bias: Any, eps: float, found: Quantized) -> None:
    """The call in a graph."""
    given, number, written = scales_by_kind(found, found.mode == "tensor")
    check_traced(x=x, weight=weight, bias=bias, scale=given)
    getattr(torch.ops.kernel_api, name)(
        x, weight, bias, given, found.out, written, known_or_wide(eps), number, found.mode
    )


def _run(name: str, *given: Any) -> None:
    run_best(_arguments(name, *given))


def _check(name: str, *given: Any) -> None:
    """Raises what the call would, where sizes and numbers are known."""
    if are_known(given):
        _arguments(name, *given)


def _arguments(name: str, x: Any, weight: Any, bias: Any, *others: Any) -> NormArguments:
    given, out, scale, eps, number, by = others
    (scale,) = (one for one in (given, scale, number) if one is not None)
    return arguments_of(name, x, weight, bias, eps, Quantized(out, scale, by))


for _name in names:
    _library.define(f"{_name}{_SCHEMA}")
    _library.impl(_name, functools.partial(_run, _name), "CompositeExplicitAutograd")
    _fake = functools.partial(_check, _name)
    torch.library.register_fake(f"kernel_api::{_name}", _fake, lib=_library)

"""The one-call forms of rows as operators of torch, for the graphs of torch.compile and
torch.export: ``torch.ops.kernel_api.gather_rows(x, row_index, weight, out)``, ``scatter_rows``,
``group_rows(index, weight, offsets, row_index, place, grouped)`` and
``quantize(x, given, out, scale, number, by)``. They write outputs that are there; nobody comes here
in eager mode."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from kernel_api._launches import run_best
from kernel_api._numbers import known_or_wide
from kernel_api._quantize_ops import Quantized
from kernel_api._quantize_ops import run as run_quantize
from kernel_api._row_ops import GroupedRows
from kernel_api._transforms import are_known, check_traced
from kernel_api.arguments import GatherRowsArguments, GroupRowsArguments, ScatterRowsArguments
from kernel_api.arguments.base import Arguments
from kernel_api.arguments.indexed import IndexedRowsArguments
from kernel_api.fusions import quantize

_SCHEMA = "(Tensor x, Tensor row_index, Tensor? weight, Tensor(a!) out) -> ()"

_GROUP_ROWS = (
    "(Tensor index, Tensor? weight, Tensor(a!) offsets, Tensor(b!) row_index, "
    "Tensor(c!) place, Tensor(d!)? grouped) -> ()"
)

#: torch has an argument called mode of its own where operators are traced.
_QUANTIZE = (
    "(Tensor x, Tensor? given, Tensor(a!) out, Tensor(b!)? scale, float? number, str by) -> ()"
)

_library: Any = torch.library.Library("kernel_api", "FRAGMENT")  # type: ignore[no-untyped-call]


def traced(kind: type[IndexedRowsArguments], x: Any, row_index: Any, weight: Any, out: Any) -> None:
    """The call in a graph."""
    check_traced(x=x, row_index=row_index, weight=weight)
    getattr(torch.ops.kernel_api, kind.kind)(x, row_index, weight, out)


def traced_groups(index: Any, weight: Any, found: GroupedRows) -> None:
    """The same of rows that are grouped."""
    check_traced(index=index, weight=weight)
    torch.ops.kernel_api.group_rows(index, weight, *found)


def _groups_of(index: Any, weight: Any, *found: Any) -> GroupRowsArguments:
    offsets, row_index, place, grouped = found
    return GroupRowsArguments(index, offsets, row_index, place, weight, grouped)


def traced_quantize(x: Any, found: Quantized, is_given: bool) -> None:
    """The same of a matrix that is quantised."""
    given, number, written = scales_by_kind(found, is_given)
    check_traced(x=x, scale=given)
    torch.ops.kernel_api.quantize(x, given, found.out, written, number, found.mode)


def scales_by_kind(found: Quantized, is_given: bool) -> tuple[Any, float | None, Any]:
    """The scale as a tensor that is read, as a number, and as a tensor that is written: one of
    them, the others are None."""
    if not is_given:
        return None, None, found.scale
    if isinstance(found.scale, torch.Tensor):
        return found.scale, None, None
    return None, known_or_wide(found.scale), None


def _quantize(x: Any, *others: Any) -> None:
    found, is_given = _quantized(*others)
    run_quantize(x, found, is_given)


def _quantizing(x: Any, *others: Any) -> Any:
    found, _ = _quantized(*others)
    return quantize(x, **found._asdict())


def _quantized(
    given: Any, out: Any, scale: Any, number: float | None, by: str
) -> tuple[Quantized, bool]:
    """The outputs, and whether the scale is given."""
    is_given = scale is None
    (scale,) = (one for one in (given, scale, number) if one is not None)
    return Quantized(out, scale, by), is_given


def _indexed(
    kind: type[IndexedRowsArguments], x: Any, row_index: Any, weight: Any, out: Any
) -> Any:
    return kind(x, out, row_index, weight)


def _run(arguments: Callable[..., Arguments], *given: Any) -> None:
    run_best(arguments(*given))


def _check(arguments: Callable[..., Arguments], *given: Any) -> None:
    """Raises what the call would, where sizes and numbers are known."""
    if are_known(given):
        arguments(*given)


def _register(
    name: str, schema: str, arguments: Callable[..., Any], run: Callable[..., Any] | None = None
) -> None:
    """Make a form an operator.

    Args:
        arguments: Makes them of what the operator gets.
        run: Runs it; by default the best kernel on its arguments.
    """
    run = run or functools.partial(_run, arguments)
    _library.define(f"{name}{schema}")
    _library.impl(name, run, "CompositeExplicitAutograd")
    fake = functools.partial(_check, arguments)
    torch.library.register_fake(f"kernel_api::{name}", fake, lib=_library)


for _kind in (GatherRowsArguments, ScatterRowsArguments):
    _register(_kind.kind, _SCHEMA, functools.partial(_indexed, _kind))
_register("group_rows", _GROUP_ROWS, _groups_of)
_register("quantize", _QUANTIZE, _quantizing, _quantize)

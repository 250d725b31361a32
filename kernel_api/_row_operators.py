"""The one-call forms of rows as operators of torch, for the graphs of torch.compile and
torch.export: ``torch.ops.kernel_api.gather_rows(x, row_index, weight, element)``, ``scatter_rows``,
and ``group_rows(index, weight, groups)`` allocate what they return;
``gather_rows.out(x, row_index, weight, out)``, ``scatter_rows.out`` and
``quantize(x, given, out, scale, number, by)`` write outputs that are there. Nobody comes here in
eager mode."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from kernel_api._launches import run_best
from kernel_api._numbers import known_or_wide
from kernel_api._quantize_ops import Quantized
from kernel_api._quantize_ops import run as run_quantize
from kernel_api._row_ops import (
    GroupedRows,
    gather_rows,
    group_rows,
    groups_of,
    room_for_groups,
    scatter_rows,
)
from kernel_api._torch_operators import define, define_without_gradient
from kernel_api._transforms import are_known, check_traced
from kernel_api.arguments import GatherRowsArguments, ScatterRowsArguments
from kernel_api.arguments.base import Arguments
from kernel_api.arguments.indexed import IndexedRowsArguments
from kernel_api.fusions import quantize

_GATHER = "(Tensor x, Tensor row_index, Tensor? weight, ScalarType element) -> Tensor"
_SCATTER = "(Tensor x, Tensor row_index, Tensor? weight, ScalarType element, SymInt rows) -> Tensor"
_OUT = "(Tensor x, Tensor row_index, Tensor? weight, Tensor(a!) out) -> ()"

_GROUP_ROWS = "(Tensor index, Tensor? weight, SymInt groups) -> Tensor[]"

#: torch has an argument called mode of its own where operators are traced.
_QUANTIZE = (
    "(Tensor x, Tensor? given, Tensor(a!) out, Tensor(b!)? scale, float? number, str by) -> ()"
)


def traced(
    kind: type[IndexedRowsArguments], x: Any, row_index: Any, weight: Any, *made: Any
) -> Any:
    """The call in a graph.

    Args:
        made: The element type of the output, and for rows that are scattered, how many it has.
    """
    check_traced(x=x, row_index=row_index, weight=weight)
    return getattr(torch.ops.kernel_api, kind.kind).default(x, row_index, weight, *made)


def traced_into(
    kind: type[IndexedRowsArguments], x: Any, row_index: Any, weight: Any, out: Any
) -> None:
    """The same into an output that is given."""
    check_traced(x=x, row_index=row_index, weight=weight)
    getattr(torch.ops.kernel_api, kind.kind).out(x, row_index, weight, out)


def traced_groups(index: Any, weight: Any, groups: Any) -> GroupedRows:
    """The same of rows that are grouped."""
    check_traced(index=index, weight=weight)
    found = torch.ops.kernel_api.group_rows.default(index, weight, groups)
    return GroupedRows(*found, *([None] if weight is None else []))


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


def _make_rows(form: Callable[..., Any], x: Any, row_index: Any, *others: Any) -> Any:
    weight, element, *rows = others
    how = dict(zip(("rows",), rows, strict=False))
    return form(x, row_index, weight=weight, out_dtype=element, **how)


def _make_fake_rows(kind: type[IndexedRowsArguments], x: Any, row_index: Any, *others: Any) -> Any:
    weight, element, *rows = others
    count = rows[0] if rows else row_index.shape[0]
    out = x.new_empty((count, *x.shape[1:]), dtype=element)
    _check(functools.partial(_indexed, kind), x, row_index, weight, out)
    return out


def _indexed(
    kind: type[IndexedRowsArguments], x: Any, row_index: Any, weight: Any, out: Any
) -> Any:
    return kind(x, out, row_index, weight)


def _make_groups(index: Any, weight: Any, groups: int) -> list[Any]:
    return _present(group_rows(index, groups, weight=weight))


def _make_fake_groups(index: Any, weight: Any, groups: int) -> list[Any]:
    found = room_for_groups(index, weight, groups)
    _check(groups_of, index, weight, *found)
    return _present(found)


def _present(found: GroupedRows) -> list[Any]:
    return [one for one in found if one is not None]


def _run(arguments: Callable[..., Arguments], *given: Any) -> None:
    run_best(arguments(*given))


def _check(arguments: Callable[..., Arguments], *given: Any) -> None:
    """Raises what the call would, where sizes and numbers are known."""
    if are_known(given):
        arguments(*given)


_ROWS: tuple[tuple[type[IndexedRowsArguments], str, Callable[..., Any]], ...] = (
    (GatherRowsArguments, _GATHER, gather_rows),
    (ScatterRowsArguments, _SCATTER, scatter_rows),
)
for _kind, _schema, _form in _ROWS:
    _make, _fake = functools.partial(_make_rows, _form), functools.partial(_make_fake_rows, _kind)
    define_without_gradient(_kind.kind, _schema, _make, _fake)
    _into = functools.partial(_indexed, _kind)
    _write, _fake = functools.partial(_run, _into), functools.partial(_check, _into)
    define(f"{_kind.kind}.out", _OUT, _write, _fake)
define_without_gradient("group_rows", _GROUP_ROWS, _make_groups, _make_fake_groups)
define("quantize", _QUANTIZE, _quantize, functools.partial(_check, _quantizing))

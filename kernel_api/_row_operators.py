"""The one-call forms of rows as operators of torch, for the graphs of torch.compile and
torch.export: ``torch.ops.kernel_api.gather_rows(x, row_index, weight, element)``, ``scatter_rows``,
``group_rows(index, weight, groups)`` and ``quantize(x, given, number, element, by)`` allocate what
they return; ``gather_rows.out(x, row_index, weight, out)``, ``scatter_rows.out`` and
``quantize.out(x, given, out, scale, number, by)`` write outputs that are there. Nobody comes here
in eager mode."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from kernel_api._numbers import known_or_wide
from kernel_api._quantize_ops import Quantized, quantize, scales_of
from kernel_api._quantize_ops import run as run_quantize
from kernel_api._results import serialize
from kernel_api._row_ops import (
    GroupedRows,
    gather_rows,
    group_rows,
    groups_of,
    room_for_groups,
    scatter_rows,
)
from kernel_api._row_ops import run as run_rows
from kernel_api._torch_operators import define, define_constant, define_without_gradient
from kernel_api._transforms import are_known, check_traced
from kernel_api.arguments import GatherRowsArguments, ScatterRowsArguments
from kernel_api.arguments.base import Arguments
from kernel_api.arguments.indexed import IndexedRowsArguments
from kernel_api.fusions import quantize as arguments_of_quantize

_GATHER = "(Tensor x, Tensor row_index, Tensor? weight, ScalarType element) -> Tensor"
_SCATTER = "(Tensor x, Tensor row_index, Tensor? weight, ScalarType element, SymInt rows) -> Tensor"
_OUT = "(Tensor x, Tensor row_index, Tensor? weight, Tensor(a!) out) -> ()"

_GROUP_ROWS = "(Tensor index, Tensor? weight, SymInt groups) -> Tensor[]"

#: given, number: the scale that is read; scale: that which is written; by: the mode, which is what
#: torch calls an argument of its own where operators are traced.
_QUANTIZE = "(Tensor x, Tensor? given, float? number, ScalarType element, str by) -> Tensor[]"
_QUANTIZE_OUT = (
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


def traced_quantize(x: Any, mode: str, scale: Any, element: Any) -> Quantized:
    """The same of a matrix that is quantised; scale: that is given, or None."""
    given, number = scale_read(scale)
    check_traced(x=x, scale=given)
    found = torch.ops.kernel_api.quantize.default(x, given, number, element, mode)
    return quantized_of(found, scale, mode)


def traced_quantize_into(x: Any, found: Quantized, is_given: bool) -> None:
    """The same into an output that is given."""
    given, number = scale_read(found.scale if is_given else None)
    check_traced(x=x, scale=given)
    written = None if is_given else found.scale
    torch.ops.kernel_api.quantize.out(x, given, found.out, written, number, found.mode)


def scale_read(scale: Any) -> tuple[Any, float | None]:
    """One that is given, or None, as a tensor and as a number."""
    if scale is None or isinstance(scale, torch.Tensor):
        return scale, None
    return None, known_or_wide(scale)


def quantized_of(found: list[Any], scale: Any, mode: str) -> Quantized:
    """What an operator returned; scale: that was given, or None."""
    out, *written = found
    return Quantized(out, written[0] if scale is None else scale, mode)


def outputs_of(found: Quantized, scale: Any) -> list[Any]:
    """What an operator returns, see :func:`quantized_of`."""
    return [found.out] if scale is not None else [found.out, found.scale]


def first_of(*values: Any) -> Any:
    """Of values of which one at most is not None, that."""
    return next((one for one in values if one is not None), None)


def _make_quantized(x: Any, given: Any, number: Any, element: Any, by: str) -> list[Any]:
    scale = first_of(given, number)
    return outputs_of(quantize(x, by, scale=scale, out_dtype=element), scale)


def _make_fake_quantized(x: Any, given: Any, number: Any, element: Any, by: str) -> list[Any]:
    scale = first_of(given, number)
    out = x.new_empty(x.shape, dtype=element)
    found = Quantized(out, scales_of(by, x) if scale is None else scale, by)
    _check(_quantizing, x, *found)
    return outputs_of(found, scale)


def _quantize_into(x: Any, given: Any, out: Any, scale: Any, number: Any, by: str) -> None:
    found, is_read = Quantized(out, first_of(given, scale, number), by), scale is None
    run_quantize(x, found, is_read, ("out",) if is_read else ("out", "scale"))


def _check_into(x: Any, given: Any, out: Any, scale: Any, number: Any, by: str) -> None:
    _check(_quantizing, x, out, first_of(given, scale, number), by)


def _quantizing(x: Any, out: Any, scale: Any, mode: str) -> Arguments:
    return arguments_of_quantize(x, out=out, scale=scale, mode=mode)


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
    _write = functools.partial(run_rows, _kind, is_fresh=False)
    _fake = functools.partial(_check, functools.partial(_indexed, _kind))
    define(f"{_kind.kind}.out", _OUT, _write, _fake)
serialize(GroupedRows, "kernel_api.GroupedRows")
define_without_gradient("group_rows", _GROUP_ROWS, _make_groups, _make_fake_groups)
define_constant("quantize", _QUANTIZE, _make_quantized, _make_fake_quantized)
define("quantize.out", _QUANTIZE_OUT, _quantize_into, _check_into)

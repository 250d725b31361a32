"""The one-call forms of rows as operators of torch, for the graphs of torch.compile and
torch.export: ``torch.ops.kernel_api.gather_rows(x, row_index, weight, out)``, ``scatter_rows``,
``group_rows(index, weight, offsets, row_index, place, grouped)`` and
``quantize(x, given, out, scale, number, by)``. They write outputs that are there; nobody comes here
in eager mode."""

from __future__ import annotations

import functools
from typing import Any

import torch

from kernel_api._launches import run_best
from kernel_api._numbers import known_or_wide
from kernel_api._quantize_ops import Quantized
from kernel_api._quantize_ops import run as run_quantize
from kernel_api._row_ops import GroupedRows, run
from kernel_api._transforms import check_traced
from kernel_api.arguments import GatherRowsArguments, GroupRowsArguments, ScatterRowsArguments
from kernel_api.arguments.indexed import IndexedRowsArguments

_SCHEMA = "(Tensor x, Tensor row_index, Tensor? weight, Tensor(a!) out) -> ()"

_GROUP_ROWS = (
    "group_rows(Tensor index, Tensor? weight, Tensor(a!) offsets, Tensor(b!) row_index, "
    "Tensor(c!) place, Tensor(d!)? grouped) -> ()"
)

#: torch has an argument called mode of its own where operators are traced.
_QUANTIZE = (
    "quantize(Tensor x, Tensor? given, Tensor(a!) out, Tensor(b!)? scale, float? number, str by) "
    "-> ()"
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


def _group_rows(index: Any, weight: Any, *found: Any) -> None:
    offsets, row_index, place, grouped = found
    run_best(GroupRowsArguments(index, offsets, row_index, place, weight, grouped))


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


def _quantize(x: Any, given: Any, out: Any, scale: Any, number: float | None, by: str) -> None:
    is_given = scale is None
    (scale,) = (one for one in (given, scale, number) if one is not None)
    run_quantize(x, Quantized(out, scale, by), is_given)


def _check(*operands: Any) -> None:
    """The output is there; what it holds is not looked at."""


for _kind in (GatherRowsArguments, ScatterRowsArguments):
    _library.define(f"{_kind.kind}{_SCHEMA}")
    _library.impl(_kind.kind, functools.partial(run, _kind), "CompositeExplicitAutograd")
    torch.library.register_fake(f"kernel_api::{_kind.kind}", _check, lib=_library)

for _name, _schema, _implementation in (
    ("group_rows", _GROUP_ROWS, _group_rows),
    ("quantize", _QUANTIZE, _quantize),
):
    _library.define(_schema)
    _library.impl(_name, _implementation, "CompositeExplicitAutograd")
    torch.library.register_fake(f"kernel_api::{_name}", _check, lib=_library)

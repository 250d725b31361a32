"""The one-call forms of rows, grouped, gathered and scattered, see :mod:`kernel_api.ops`."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from kernel_api._lazy import module
from kernel_api._numbers import whole_number
from kernel_api.arguments.grouping import GroupRowsArguments
from kernel_api.arguments.indexed import (
    GatherRowsArguments,
    IndexedRowsArguments,
    ScatterRowsArguments,
)
from kernel_api.dtypes import dtype
from kernel_api.errors import ArgumentError
from kernel_api.operands import Operand, becomes_node

__all__ = ["GroupedRows", "gather_rows", "group_rows", "scatter_rows"]


class GroupedRows(NamedTuple):
    """What :func:`group_rows` returns.

    Attributes:
        offsets: int32 (E,): where the pairs of each group end.
        row_index: int32 (M, k): the place of each pair among the sorted ones; -1 without a group.
        place: int32 (M · k,): of each sorted pair, m · k + j.
        grouped: (M · k,): the weight of each sorted pair; None where none was given.
    """

    offsets: Any
    row_index: Any
    place: Any
    grouped: Any


def group_rows(index: Any, groups: int, *, weight: Any = None) -> GroupedRows:
    """Sort pairs of a row and one of its choices by the group that each chooses; stable.

    See :class:`~kernel_api.arguments.grouping.GroupRowsArguments`. Nothing waits for the device.

    Args:
        index: Integers (M, k). What is no group, such as -1, has no place and comes last.
        groups: How many there are, E.
        weight: (M, k), sorted with the pairs.
    """
    import torch

    from kernel_api._autograd import without_gradient

    count = groups if isinstance(groups, torch.SymInt) else whole_number(groups)
    if count is None or count < 1:
        Operand(index, "index")  # inside torch.jit.trace no size is a number, which this tells
        raise ArgumentError(f"groups is {groups!r}; expected a number of groups, 1 at least")
    if not isinstance(index, torch.Tensor) or index.is_nested:  # of which the latter is refused
        index = Operand(index, "index").tensor
    if becomes_node(index):
        from kernel_api import _row_operators

        return _row_operators.traced_groups(index, weight, count)
    found = room_for_groups(index, weight, count)
    _group(index, weight, found)
    return without_gradient("group_rows", found, (weight,))  # type: ignore[no-any-return]


def room_for_groups(index: Any, weight: Any, count: Any) -> GroupedRows:
    """What a sort writes."""
    import torch

    pairs, new = math.prod(index.shape), index.new_empty
    offsets = new((count,), dtype=torch.int32)
    row_index, place = new(index.shape, dtype=torch.int32), new((pairs,), dtype=torch.int32)
    grouped = None if weight is None else _allocated(weight, (pairs,), None, "weight")
    return GroupedRows(offsets, row_index, place, grouped)


def groups_of(
    index: Any, weight: Any, offsets: Any, row_index: Any, place: Any, grouped: Any
) -> GroupRowsArguments:
    """The arguments of a sort."""
    return GroupRowsArguments(index, offsets, row_index, place, weight, grouped)


def _group(index: Any, weight: Any, found: GroupedRows) -> None:
    _again = module("_again")

    key = _again.look((index, weight), "group_rows", found.offsets.shape)
    operands = (index, *found[:3])
    given = () if weight is None else (weight, found.grouped)
    if not _again.repeated(key, operands, given):
        _again.run(key, groups_of(index, weight, *found), ("weight", "grouped")[: len(given)])


def gather_rows(
    x: Any, row_index: Any, *, weight: Any = None, out: Any = None, out_dtype: Any = None
) -> Any:
    """out[m] = Σ over j of weight[m, j] · x[row_index[m, j]]

    See :class:`~kernel_api.arguments.indexed.GatherRowsArguments`.

    Args:
        x: (rows, N).
        row_index: int32 (M, k). What is no row of x, such as -1, adds nothing.
        weight: (M, k); 1 if it is None.
        out: (M, N), of ``out_dtype`` or the type of x.
    """
    rows = _shape(row_index)[:1]
    return _run(GatherRowsArguments, x, row_index, weight, out, out_dtype, rows)


def scatter_rows(
    x: Any,
    row_index: Any,
    *,
    weight: Any = None,
    out: Any = None,
    out_dtype: Any = None,
    rows: int | None = None,
) -> Any:
    """out[row_index[m, j]] = weight[m, j] · x[m]

    See :class:`~kernel_api.arguments.indexed.ScatterRowsArguments`.

    Args:
        x: (M, N).
        row_index: int32 (M, k), no row twice. What is no row of out, such as -1, is left out.
        weight: (M, k); 1 if it is None.
        out: (rows, N), of ``out_dtype`` or the type of x. Rows that are not named are not written,
            and not initialised where out is allocated.
        rows: Of ``out`` where it is not given; M · k by default.
    """
    if out is not None and rows is not None:
        raise ArgumentError(f"out and rows = {rows} are given; one of them is enough")
    if rows is None:
        count: Any = math.prod(_shape(row_index))
    else:
        count = _count(rows)
    return _run(ScatterRowsArguments, x, row_index, weight, out, out_dtype, (count,))


def _count(rows: Any) -> Any:
    import torch

    if isinstance(rows, torch.SymInt):
        return rows
    count = whole_number(rows)
    if count is None or count < 0:
        raise ArgumentError(f"rows is {rows!r}; expected a number of rows")
    return count


def _shape(row_index: Any, name: str = "row_index") -> Any:
    import torch

    if isinstance(row_index, torch.Tensor) and not row_index.is_nested:
        return row_index.shape
    return Operand(row_index, name).shape


def _run(
    kind: type[IndexedRowsArguments],
    x: Any,
    row_index: Any,
    weight: Any,
    out: Any,
    out_dtype: Any,
    rows: tuple[Any, ...],
) -> Any:
    from kernel_api._autograd import check_outputs, without_gradient
    from kernel_api._launches import check_type

    is_fresh, is_node = out is None, becomes_node(x)
    if is_fresh and is_node:
        return _traced(kind, x, row_index, weight, _element(x, out_dtype), rows)
    if is_fresh:
        out = _allocated(x, (*rows, *_shape(x, "x")[1:]), out_dtype)
    elif out_dtype is not None:
        check_type(out, out_dtype)
    check_outputs([("out", out)])
    if is_node:
        from kernel_api import _row_operators

        _row_operators.traced_into(kind, x, row_index, weight, out)
    else:
        run(kind, x, row_index, weight, out, is_fresh)
    return without_gradient(kind.kind, out, (x, weight)) if is_fresh else out


def _traced(
    kind: type[IndexedRowsArguments],
    x: Any,
    row_index: Any,
    weight: Any,
    element: Any,
    rows: tuple[Any, ...],
) -> Any:
    from kernel_api import _row_operators

    made = (element, *rows) if kind is ScatterRowsArguments else (element,)
    return _row_operators.traced(kind, x, row_index, weight, *made)


def run(
    kind: type[IndexedRowsArguments], x: Any, row_index: Any, weight: Any, out: Any, is_fresh: bool
) -> None:
    """The best kernel, or what is known of such calls; is_fresh: out was made for this one."""
    _again = module("_again")

    given, values = (x, row_index, weight), (row_index,) if weight is None else (row_index, weight)
    if is_fresh:
        key = _again.look(given, kind.kind, out.dtype, out.shape)
    else:
        key = _again.look((*given, out), kind.kind, written=(out,))
    if not _again.repeated(key, (x, out), values):
        names, written = ("row_index", "weight")[: len(values)], () if is_fresh else ("out",)
        _again.run(key, kind(x, out, row_index, weight), names, written)


def _allocated(x: Any, shape: tuple[Any, ...], out_dtype: Any, name: str = "x") -> Any:
    x = _tensor(x, name)
    return x.new_empty(shape, dtype=_element(x, out_dtype))


def _element(x: Any, out_dtype: Any) -> Any:
    return _tensor(x, "x").dtype if out_dtype is None else dtype(out_dtype).torch


def _tensor(x: Any, name: str) -> Any:
    import torch

    if not isinstance(x, torch.Tensor) or x.is_nested:  # of which the latter is refused
        return Operand(x, name).tensor
    return x

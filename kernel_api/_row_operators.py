"""The one-call forms of indexed rows as operators of torch, for the graphs of torch.compile and
torch.export: ``torch.ops.kernel_api.gather_rows(x, row_index, weight, out)`` and
``scatter_rows``. They write an output that is there; nobody comes here in eager mode."""

from __future__ import annotations

import functools
from typing import Any

import torch

from kernel_api._row_ops import run
from kernel_api._transforms import check_traced
from kernel_api.arguments import GatherRowsArguments, ScatterRowsArguments
from kernel_api.arguments.indexed import IndexedRowsArguments

_SCHEMA = "(Tensor x, Tensor row_index, Tensor? weight, Tensor(a!) out) -> ()"

_library: Any = torch.library.Library("kernel_api", "FRAGMENT")  # type: ignore[no-untyped-call]


def traced(kind: type[IndexedRowsArguments], x: Any, row_index: Any, weight: Any, out: Any) -> None:
    """The call in a graph."""
    check_traced(x=x, row_index=row_index, weight=weight)
    getattr(torch.ops.kernel_api, kind.kind)(x, row_index, weight, out)


def _check(*operands: Any) -> None:
    """The output is there; what it holds is not looked at."""


for _kind in (GatherRowsArguments, ScatterRowsArguments):
    _library.define(f"{_kind.kind}{_SCHEMA}")
    _library.impl(_kind.kind, functools.partial(run, _kind), "CompositeExplicitAutograd")
    torch.library.register_fake(f"kernel_api::{_kind.kind}", _check, lib=_library)

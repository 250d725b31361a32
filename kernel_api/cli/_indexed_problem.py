"""Operands of rows that are grouped, or that an index names, made from the options that describe a
problem."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from kernel_api.cli._norm_problem import check_options_of_gemm
from kernel_api.dtypes import dtype
from kernel_api.errors import ArgumentError

if TYPE_CHECKING:
    from kernel_api.arguments import GroupRowsArguments
    from kernel_api.arguments.indexed import IndexedRowsArguments
    from kernel_api.cli._problem import Maker

INDEXED = ("gather_rows", "scatter_rows", "group_rows")

#: k, if it is not given.
PLACES = 2


def indexed_arguments(
    options: argparse.Namespace, maker: Maker, sizes: tuple[int, int, int]
) -> IndexedRowsArguments | GroupRowsArguments:
    """Of a row_index (M, K) of rows of N columns, of which there are M · K, with a weight of each;
    or of (M, K) pairs to be sorted into N groups, with a weight of each.

    Raises:
        ArgumentError: the options contradict each other.
    """
    import torch

    from kernel_api import fusions

    check_options_of_gemm(options, "rows are of row-major matrices and")
    if options.beside:
        raise ArgumentError(
            f"--with {options.beside[0][0]}: {options.operation} has a weight of each row already; "
            f"leave this out"
        )
    M, N, k = sizes
    if options.operation == "group_rows":
        return _grouped(options, maker, sizes)
    element = dtype(options.dtype)
    out_element = dtype(options.out_dtype) if options.out_dtype else element
    gathers = options.operation == "gather_rows"
    rows = (M * k, M) if gathers else (M, M * k)

    def matrix(rows: int, columns: int, of: Any, *, fill: bool = True) -> Any:
        return maker.tensor((rows, columns), of, "t", fill=fill)

    x, out = matrix(rows[0], N, element), matrix(rows[1], N, out_element, fill=False)
    wide = dtype("float64") if element is dtype("float64") else dtype("float32")
    row_index = torch.empty((M, k), dtype=torch.int32, device=maker.device)
    made = getattr(fusions, options.operation)(x, row_index, out=out, weight=matrix(M, k, wide))
    args: IndexedRowsArguments = made
    if maker.random is not None:
        args.draw_indices(maker.random)
    return args


def _grouped(
    options: argparse.Namespace, maker: Maker, sizes: tuple[int, int, int]
) -> GroupRowsArguments:
    import torch

    from kernel_api import fusions

    M, groups, k = sizes

    def integers(*shape: int, element: Any = torch.int32) -> Any:
        return torch.zeros(shape, dtype=element, device=maker.device)

    weight = maker.tensor((M, k), dtype(options.dtype), "t", fill=True)
    args = fusions.group_rows(
        integers(M, k, element=torch.int64),
        offsets=integers(groups),
        row_index=integers(M, k),
        place=integers(M * k),
        weight=weight,
        grouped=weight.new_empty(M * k),
    )
    if maker.random is not None:
        args.draw_indices(maker.random)
    return args

"""Operands of rows that an index names, made from the options that describe a problem."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from kernel_api.cli._norm_problem import check_options_of_gemm
from kernel_api.dtypes import dtype
from kernel_api.errors import ArgumentError

if TYPE_CHECKING:
    from kernel_api.arguments.indexed import IndexedRowsArguments
    from kernel_api.cli._problem import Maker

INDEXED = ("gather_rows", "scatter_rows")

#: k, if it is not given.
PLACES = 2


def indexed_arguments(
    options: argparse.Namespace, maker: Maker, sizes: tuple[int, int, int]
) -> IndexedRowsArguments:
    """Of a row_index (M, K) of rows of N columns, of which there are M · K, with a weight of each.

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

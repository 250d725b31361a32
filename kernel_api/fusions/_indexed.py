"""Rows of tokens on their way to experts, and back."""

from __future__ import annotations

from typing import Any

from kernel_api.arguments import GatherRowsArguments, ScatterRowsArguments


def gather_rows(x: Any, row_index: Any, *, out: Any, weight: Any = None) -> GatherRowsArguments:
    """out[m] = Σ over j of weight[m, j] · x[row_index[m, j]]

    Args:
        x: (rows, N).
        row_index: int32 (M, k). What is no row of x, such as -1, adds nothing.
        out: (M, N).
        weight: (M, k); 1 if it is None.
    """
    return GatherRowsArguments(x, out, row_index, weight)


def scatter_rows(x: Any, row_index: Any, *, out: Any, weight: Any = None) -> ScatterRowsArguments:
    """out[row_index[m, j]] = weight[m, j] · x[m]

    Args:
        x: (M, N).
        row_index: int32 (M, k), no row twice. What is no row of out, such as -1, is left out.
        out: (rows, N); rows that are not named are not written.
        weight: (M, k); 1 if it is None.
    """
    return ScatterRowsArguments(x, out, row_index, weight)

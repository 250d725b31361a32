"""Rows of tokens on their way to experts, and back."""

from __future__ import annotations

from typing import Any

from kernel_api.arguments import GatherRowsArguments, GroupRowsArguments, ScatterRowsArguments


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


def group_rows(
    index: Any,
    *,
    offsets: Any,
    row_index: Any,
    place: Any,
    weight: Any = None,
    grouped: Any = None,
) -> GroupRowsArguments:
    """Pairs of a row and one of its choices, sorted by the group that each chooses.

    Args:
        index: Integers (M, k). What is no group, such as -1, has no place and comes last.
        offsets: int32 (E,): where the pairs of each group end.
        row_index: int32 (M, k): the place of each pair among the sorted ones; -1 without a group.
        place: int32 (M · k,): of each sorted pair, m · k + j.
        weight, grouped: (M, k), and (M · k,) as the pairs are sorted; both, or neither.
    """
    return GroupRowsArguments(index, offsets, row_index, place, weight, grouped)

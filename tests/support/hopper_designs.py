"""Kinds of designs that the Hopper GEMM has, by a word for each."""

from __future__ import annotations

DESIGNS = {
    "cooperative": lambda d: d.schedule == "cooperative" and not d.splits and not d.swap_ab,
    "pingpong": lambda d: d.schedule == "pingpong",
    "clusters": lambda d: d.cluster_size > 1 and not d.splits and not d.swap_ab,
    "split": lambda d: d.split_k > 1 and not d.swap_ab,
    "stream": lambda d: d.stream_k,
    "swapped": lambda d: d.swap_ab and not d.splits,
    "swapped split": lambda d: d.swap_ab and d.splits,
    "stream of few rows": lambda d: d.swap_ab and d.stream_k,
    "meeting": lambda d: d.cluster_shape[2] > 1 and not d.swap_ab,
    "swapped meeting": lambda d: d.cluster_shape[2] > 1 and d.swap_ab,
    "256 columns": lambda d: d.tile_shape[1] == 256 and not d.splits and not d.swap_ab,
    "parallel": lambda d: d.parallel,
}


def smallest(kernels, design):
    """Of the kernels with such a design, the one with the smallest tiles."""
    hopper = [k for k in kernels if k.metadata.targets == ("sm_90a",)]
    fitting = [k for k in hopper if DESIGNS[design](k.metadata.design)]
    assert fitting, f"{design} is not among {len(kernels)} kernels"

    def size(kernel):
        one = kernel.metadata.design
        rows, columns, _ = one.tile_shape
        return one.cluster_size, rows * columns

    return min(fitting, key=size)

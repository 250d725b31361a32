"""Grouped products are right for groups of any size: their PTX runs in the emulator, without GPU.

Outputs are poisoned, and what belongs to no group has to stay. Sizes are no multiples of a tile;
groups begin anywhere; some are empty.
"""

from __future__ import annotations

import os

import pytest
import torch
from support.grouped_cases import (
    BF16,
    F16,
    F32,
    SIZES,
    Case,
    check,
    gradient,
    matrix,
    on_meta,
    scaled,
    swiglu,
)

import kernel_api as ka
from kernel_api.arguments.grouped import GroupedGemmArguments

pytestmark = pytest.mark.compile

BOTH = ("row_index", "out_row_index")

#: Those in front are run every time.
OF_ROWS = [
    Case("swiglu, gathered and scattered", epilogue=swiglu, N=64, indices=BOTH),
    Case("unaligned, gathered", rows=16, alignment=2, indices=("row_index",), N=37, other=19),
    Case("plain"),
    Case("few rows", rows=16, sizes=(1, 0, 3, 1, 1, 17), N=136),
    Case("gathered and scattered", element=F16, indices=BOTH),
    Case("anywhere", discrete=True, epilogue=gradient, rows=32, indices=("row_index",)),
    Case("columns side by side", rows=32, alignment=2, layouts="nnn", pad=1, N=35, out=F32),
    Case("tf32", element=F32, layouts="tnt"),
    Case("swiglu", epilogue=swiglu, N=192),
    Case("gradient", rows=32, epilogue=gradient, N=136),
    Case("no rows at all", sizes=(0, 0, 0), epilogue=gradient),
    Case("one group", sizes=(129,), rows=128),
    Case("halves of a vector", alignment=4, pad=2, N=36, other=20),
    Case("many groups", rows=16, sizes=(1, 0) * 20, N=64),
]

#: The same.
OF_SUMS = [
    Case("along K", layouts="tnt"),
    Case("scaled, added to", layouts="ntn", epilogue=scaled, options={"accumulate": True}),
    Case("along K in A alone", out=F32),
    Case("weights of a layer", layouts="ntt", sizes=(64, 0, 129, 65)),
    Case("added to", layouts="ntt", out=F32, options={"accumulate": True}),
    Case("scaled", layouts="tnt", epilogue=scaled, N=136),
    Case("anywhere", discrete=True, epilogue=scaled, options={"accumulate": True}),
    Case("anywhere, other columns side by side", discrete=True, layouts="ntn", out=F32),
    Case("unaligned", alignment=2, layouts="tnn", pad=1, N=37, options={"accumulate": True}),
    Case("halves of a vector", alignment=4, layouts="tnt", pad=2, N=38, other=22),
    Case("tf32", layouts="tnt", element=F32),
    Case("no tokens at all", layouts="ntt", sizes=(0, 0)),
]


def integers(scaled, epilogue=None):
    """Groups of rows of 8-bit integers; scaled: one factor per row, and per column of a group."""
    case, random = Case("integers", rows=32), torch.Generator().manual_seed(0)
    T, E, N, K = case.T, len(SIZES), 72, 48

    def drawn(*shape):
        return torch.randint(-128, 128, shape, generator=random, dtype=torch.int8)

    A, B = drawn(T, K), drawn(E, N, K).transpose(1, 2)
    if scaled:
        A = ka.ScaledOperand(A, torch.rand(T, generator=random), ka.ScaleMode.PER_ROW)
        B = ka.ScaledOperand(B, torch.rand(E, N, generator=random), ka.ScaleMode.PER_ROW)
    fused, columns = epilogue(T, N, E) if epilogue else (None, N)
    floats = scaled or epilogue
    out = matrix(T, columns, element=BF16) if floats else torch.zeros(T, N, dtype=torch.int32)
    return case, GroupedGemmArguments(A, B, out, case.offsets, epilogue=fused)


EVERY = bool(os.environ.get("KERNEL_API_EMULATE"))
FIRST = 1  # of each list, run every time


def checked(case, args):
    """Of the Ampere kernels that take the arguments, the best aligned one of that size."""
    kernels = ka.get_kernels(on_meta(args), cc=80, providers=["cutedsl"])
    found = [
        kernel
        for kernel in kernels
        if kernel.metadata.targets == ("sm_80",)
        and kernel.metadata.design.tile_shape[0] == case.rows
    ]
    assert found, f"{len(kernels)} kernels, none of {case.rows} rows"
    kernel = max(found, key=lambda one: one.metadata.operands.A.alignment)
    assert kernel.metadata.operands.A.alignment == case.alignment
    check(kernel, args, "sm_80")


def named(cases):
    chosen = cases if EVERY else cases[:FIRST]
    return {"argvalues": chosen, "ids": [case.name for case in chosen]}


@pytest.mark.parametrize("case", **named(OF_ROWS))
def test_groups_of_rows_are_multiplied_with_their_own_matrix(case):
    checked(case, case.of_rows())


@pytest.mark.parametrize("case", **named(OF_SUMS))
def test_groups_are_summed_over(case):
    checked(case, case.of_sums())


if EVERY:

    @pytest.mark.parametrize("epilogue", [None, gradient])
    @pytest.mark.parametrize("scaled", [False, True])
    def test_groups_of_rows_of_integers_are_multiplied(scaled, epilogue):
        checked(*integers(scaled, epilogue))

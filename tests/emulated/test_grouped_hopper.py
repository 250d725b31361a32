"""Grouped products of the Hopper kernels, in the emulator; see `test_grouped_numerics`."""

from __future__ import annotations

import os

import pytest
from support.grouped_cases import F16, F32, Case, check, gradient, on_meta, scaled, swiglu

import kernel_api as ka

pytestmark = pytest.mark.compile

WEIGHTS = "tnt"  # of a layer, along K
BOTH = ("row_index", "out_row_index")
AWAY = (0, 65, 1, 130, 0, 3)

#: (design, problem); those in front are run every time.
OF_ROWS = [
    (
        "128x128x64_cluster1x2_pingpong",
        Case("swiglu", sizes=(0, 65, 1, 0, 7), epilogue=swiglu, N=192, layouts=WEIGHTS),
    ),
    ("16x128x128", Case("few rows", sizes=(1, 0, 3, 17), N=136, layouts=WEIGHTS)),
    ("128x192x64_cluster2x1", Case("picked", indices=BOTH, N=200, other=136, layouts=WEIGHTS)),
    ("128x256x64_cluster1x2", Case("gradient", epilogue=gradient, N=264, sizes=AWAY)),
    ("256x128x64_cluster1x2", Case("wide out", out=F32, sizes=AWAY, N=136)),
    ("64x256x64_cluster1x1_pingpong", Case("one group", sizes=(129,), element=F16)),
    ("128x256x64_cluster1x1", Case("none", sizes=(0, 0), epilogue=gradient)),
    ("64x128x64_cluster1x1_cooperative_stages8_swap", Case("swapped", sizes=AWAY, N=264)),
    ("64x128x64_cluster1x1_pingpong", Case("many groups", sizes=(1, 0) * 20, N=64)),
    ("128x128x64_cluster1x1", Case("scattered", indices=BOTH[1:], sizes=AWAY, epilogue=gradient)),
]
ADDED = {"accumulate": True}
OF_SUMS = [
    ("128x128x64_cluster2x1", Case("of floats", layouts="ntt", N=72, other=136)),
    ("128x256x64_cluster1x2", Case("added to", layouts="ntt", N=264, out=F32, options=ADDED)),
    ("64x128x64", Case("scaled", layouts="ntt", N=136, epilogue=scaled)),
    ("128x128x64_cluster1x1", Case("none", layouts="ntt", sizes=(0, 0), options=ADDED)),
]
EVERY = bool(os.environ.get("KERNEL_API_EMULATE"))


def checked(design, args):
    offered = ka.get_kernels(on_meta(args), cc="sm_90a", providers=["cutedsl"])
    found = [k for k in offered if "sm90_grouped" in k.metadata.kernel_name]
    chosen = [k for k in found if f"_tile{design}" in k.metadata.kernel_name]
    assert chosen, [k.metadata.kernel_name for k in found]
    check(chosen[0], args, "sm_90a")


def named(cases, first):
    chosen = cases if EVERY else cases[:first]
    return {"argvalues": chosen, "ids": [case.name for _, case in chosen]}


@pytest.mark.parametrize(("design", "case"), **named(OF_ROWS, 1))
def test_groups_of_rows_are_multiplied_with_their_own_matrix(design, case):
    checked(design, case.of_rows())


@pytest.mark.parametrize(("design", "case"), **named(OF_SUMS, 1))
def test_groups_are_summed_over(design, case):
    checked(design, case.of_sums())

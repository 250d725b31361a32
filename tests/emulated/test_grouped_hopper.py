"""Grouped products of the Hopper kernels, in the emulator; see `test_grouped_numerics`."""

from __future__ import annotations

import os

import pytest
import support.grouped_descriptors  # noqa: F401  the emulator learns how they are made
from support.grouped_cases import (
    BF16,
    F8,
    F16,
    F32,
    Case,
    check,
    gated,
    gradient,
    halves,
    on_meta,
    scaled,
    spread,
    swiglu,
)
from support.ptx.errors import EmulationError
from support.ptx.kernel import EmulatedKernel

import kernel_api as ka

pytestmark = pytest.mark.compile

WEIGHTS = "tnt"  # of a layer, along K
BOTH = ("row_index", "out_row_index")
AWAY = (0, 65, 1, 130, 0, 3)

FEW = (0, 65, 1, 7)
PACKED = {"discrete": False, "sizes": (1, 0, 7, 33), "other": 144}
EIGHT_BITS = {"element": F8, "out": BF16, "layouts": WEIGHTS, "discrete": True}

#: (design, problem); those in front are run every time.
OF_ROWS = [
    (
        "128x128x64_cluster1x2_pingpong",
        Case("swiglu", sizes=(0, 65, 1, 0, 7), epilogue=swiglu, N=192, layouts=WEIGHTS),
    ),
    (
        "128x128x128_cluster1x1",
        Case(
            "blocks, picked",
            indices=BOTH,
            sizes=FEW,
            N=136,
            other=784,
            scales="blocks",
            **EIGHT_BITS,
        ),
    ),
    ("16x128x128", Case("few rows", sizes=(1, 0, 3, 17), N=136, layouts=WEIGHTS)),
    (
        "128x192x128_cluster1x2",
        Case(
            "blocks, straddled",
            sizes=FEW,
            N=400,
            other=656,
            scales="blocks",
            **{**EIGHT_BITS, "discrete": False},
        ),
    ),
    (
        "64x128x128_cluster1x1",
        Case("blocks, ahead", sizes=FEW, N=136, other=784, scales="blocks", **EIGHT_BITS),
    ),
    (
        "64x128x128_cluster1x1",
        Case("blocks anywhere", sizes=FEW, N=136, other=272, scales="blocks", **EIGHT_BITS),
    ),
    (
        "16x128x128",
        Case("blocks, swapped", sizes=(9, 0, 1), N=264, other=1168, scales="blocks", **EIGHT_BITS),
    ),
    (
        "64x128x64_cluster1x1_pingpong",
        Case("scattered pairs", indices=BOTH[1:], sizes=FEW, epilogue=swiglu, N=192),
    ),
    (
        "16x128x128",
        Case("gated few rows", sizes=(1, 0, 33), epilogue=gated(), N=192, layouts=WEIGHTS),
    ),
    ("128x192x64_cluster2x1", Case("picked", indices=BOTH, N=200, other=136, layouts=WEIGHTS)),
    ("256x128x64_cluster1x2", Case("gradient", epilogue=gradient, N=264, sizes=AWAY)),
    ("256x128x64_cluster1x2", Case("wide out", out=F32, sizes=AWAY, N=136)),
    ("64x256x64_cluster1x1_pingpong", Case("one group", sizes=(129,), element=F16)),
    ("64x128x64_cluster1x1_cooperative", Case("none", sizes=(0, 0), epilogue=gradient)),
    ("80x128x128_cluster1x1", Case("swapped", sizes=(*AWAY, 80, 81), N=264)),
    ("64x128x64_cluster1x1_pingpong", Case("many groups", sizes=(1, 0) * 20, N=64)),
    ("128x128x64_cluster1x1", Case("scattered", indices=BOTH[1:], sizes=AWAY, epilogue=gradient)),
    (
        "128x128x64_cluster1x2_pingpong",
        Case("anywhere", discrete=True, indices=BOTH[1:], sizes=AWAY, epilogue=swiglu, N=192),
    ),
    (
        "128x128x64_cluster1x1",
        Case("scattered, more columns", indices=BOTH[1:], sizes=FEW, epilogue=spread, N=160),
    ),
    (
        "64x128x64_cluster1x1_pingpong",
        Case("halves anywhere", discrete=True, epilogue=halves, N=192, layouts=WEIGHTS),
    ),
    ("48x128x128", Case("anywhere, swapped", discrete=True, sizes=FEW, N=136, layouts=WEIGHTS)),
    (
        "128x256x128_cluster1x2",
        Case("columns anywhere", sizes=AWAY, N=264, other=144, scales="columns", **EIGHT_BITS),
    ),
    (
        "32x128x128",
        Case("blocks, swapped, packed", scales="blocks", **{**EIGHT_BITS, **PACKED}),
    ),
    (
        "128x128x128_cluster1x1",
        Case(
            "blocks, swiglu, picked",
            indices=BOTH[:1],
            sizes=FEW,
            N=192,
            other=400,
            scales="blocks",
            epilogue=swiglu,
            **EIGHT_BITS,
        ),
    ),
    (
        "16x128x128",
        Case(
            "rows, gated few rows anywhere",
            sizes=(1, 0, 33),
            N=192,
            other=144,
            scales="rows",
            epilogue=gated(),
            **EIGHT_BITS,
        ),
    ),
    (
        "32x128x128",
        Case(
            "blocks, gated",
            N=384,
            scales="blocks",
            epilogue=gated(64),
            **{**EIGHT_BITS, "discrete": False, "sizes": (9, 0, 33), "other": 272},
        ),
    ),
    (
        "128x256x128_cluster1x2",
        Case(
            "blocks, gated halves",
            N=768,
            scales="blocks",
            epilogue=halves,
            **{**EIGHT_BITS, "sizes": (65, 0, 3), "other": 272},
        ),
    ),
    (
        "64x128x128_cluster1x1",
        Case(
            "tensors, gradient, scattered",
            indices=BOTH[1:],
            sizes=FEW,
            N=136,
            other=144,
            scales="tensor",
            epilogue=gradient,
            **EIGHT_BITS,
        ),
    ),
    (
        "16x128x128",
        Case("swapped, anywhere", sizes=FEW, N=136, other=144, scales="tokens", **EIGHT_BITS),
    ),
    (
        "128x128x128_cluster1x1",
        Case("tensors anywhere, picked", indices=BOTH, scales="tensor", other=144, **EIGHT_BITS),
    ),
    (
        "16x128x128",
        Case(
            "gated halves, 8 bits anywhere",
            sizes=(0, 7, 33, 0, 1),
            N=448,
            other=144,
            epilogue=gated("halves", "up_gate"),
            **EIGHT_BITS,
        ),
    ),
    (
        "32x128x128",
        Case("gated 8 bits", N=192, epilogue=gated(stores=False), **{**EIGHT_BITS, **PACKED}),
    ),
    (
        "48x128x128",
        Case("gated anywhere", discrete=True, epilogue=gated(), N=192, layouts=WEIGHTS),
    ),
    (
        "48x128x128",
        Case("gated halves", sizes=AWAY, epilogue=gated("halves"), N=448, layouts=WEIGHTS),
    ),
    (
        "64x128x128_cluster1x1",
        Case("8 bits anywhere", sizes=FEW, N=256, other=144, epilogue=swiglu, **EIGHT_BITS),
    ),
]
ADDED = {"accumulate": True}
ANYWHERE = {"discrete": True, "layouts": "ntt"}
OF_SUMS = [
    (
        "128x128x64_cluster2x1",
        Case(
            "scaled, added to anywhere",
            N=72,
            other=136,
            sizes=FEW,
            out=F32,
            epilogue=scaled,
            options=ADDED,
            **ANYWHERE,
        ),
    ),
    ("128x128x64_cluster2x1", Case("of floats", layouts="ntt", N=72, other=136)),
    ("128x256x64_cluster1x2", Case("added to", layouts="ntt", N=264, out=F32, options=ADDED)),
    ("64x128x64", Case("scaled", layouts="ntt", N=136, epilogue=scaled)),
    ("128x128x64_cluster1x1", Case("none", layouts="ntt", sizes=(0, 0), options=ADDED)),
    ("128x256x64_cluster1x2", Case("anywhere", N=264, sizes=AWAY, **ANYWHERE)),
    ("64x128x64", Case("scaled anywhere", N=136, epilogue=scaled, options=ADDED, **ANYWHERE)),
    (
        "128x192x64_cluster2x1",
        Case("other columns anywhere", N=200, sizes=FEW, discrete=True, layouts="ntn", out=F16),
    ),
    ("256x128x64_cluster1x2", Case("no tokens anywhere", sizes=(0, 0), N=136, **ANYWHERE)),
    ("64x128x64", Case("columns in the way", N=66, other=42, pad=6, sizes=FEW, **ANYWHERE)),
]
UNEVEN = (0, 1, 7, 63, 64, 0, 65, 127, 129, 0)
#: Tiles that clusters take as they become free; there are more of them than of clusters.
OF_ROWS_TAKEN = [
    ("128x160x64_cluster1x2_pingpong dynamic", Case("half tiles", sizes=(65, 0, 129, 7), N=328)),
    ("128x128x64_cluster1x1 dynamic", Case("picked", indices=BOTH, sizes=UNEVEN, N=200)),
    (
        "128x128x64_cluster1x2_pingpong dynamic",
        Case("swiglu", sizes=(0, 65, 1, 129, 0, 7), epilogue=swiglu, N=192, layouts=WEIGHTS),
    ),
    ("128x128x64_cluster1x1 dynamic", Case("uneven", sizes=UNEVEN, N=200)),
    ("128x256x64_cluster1x2 dynamic", Case("clusters", sizes=UNEVEN, N=1032)),
    ("256x128x64_cluster1x2 dynamic", Case("gradient", sizes=AWAY, epilogue=gradient, N=520)),
    ("64x256x64_cluster1x1_pingpong dynamic", Case("in turns", sizes=UNEVEN, N=264)),
    (
        "64x256x64_cluster1x1_pingpong dynamic",
        Case("picked in turns", indices=BOTH, sizes=UNEVEN, N=264, other=136, layouts=WEIGHTS),
    ),
    ("128x128x64_cluster1x2_pingpong dynamic", Case("one group", sizes=(129,), element=F16)),
    ("128x128x64_cluster1x1 dynamic", Case("none", sizes=(0, 0), epilogue=gradient)),
    ("16x128x128 dynamic", Case("few rows", sizes=(1, 0, 3, 17), N=392, layouts=WEIGHTS)),
    ("96x128x128 dynamic", Case("swapped", sizes=UNEVEN, N=264, other=392, layouts=WEIGHTS)),
    (
        "128x128x128_cluster1x2 dynamic",
        Case("long steps", sizes=UNEVEN, epilogue=swiglu, N=192, other=392, layouts=WEIGHTS),
    ),
    ("256x128x64_cluster1x2 dynamic", Case("tall", sizes=(*UNEVEN, 193, 257), N=520, out=F32)),
    ("64x256x64_cluster1x1_pingpong dynamic", Case("none in turns", sizes=(0, 0))),
    ("128x256x64_cluster1x2 dynamic", Case("wide out", sizes=UNEVEN, N=136, out=F32)),
    ("64x256x64_cluster1x1_pingpong dynamic", Case("many groups", sizes=(1, 0) * 40, N=64)),
    (
        "128x128x64_cluster1x2_pingpong dynamic",
        Case("anywhere", discrete=True, indices=BOTH[1:], sizes=AWAY, epilogue=swiglu, N=192),
    ),
    (
        "128x256x128_cluster1x2 dynamic",
        Case("rows anywhere", sizes=AWAY, N=264, other=144, scales="rows", **EIGHT_BITS),
    ),
    (
        "128x128x128_cluster1x1 dynamic",
        Case("tensors", indices=BOTH, sizes=UNEVEN, scales="tensor", other=144, **EIGHT_BITS),
    ),
    (
        "64x256x128_cluster1x1 dynamic",
        Case("blocks anywhere", sizes=FEW, N=256, other=272, scales="blocks", **EIGHT_BITS),
    ),
    (
        "16x128x128 dynamic",
        Case(
            "blocks, swapped",
            sizes=(1, 0, 3, 17),
            N=392,
            other=144,
            scales="blocks",
            **EIGHT_BITS,
        ),
    ),
]
OF_SUMS_TAKEN = [
    (
        "128x128x64_cluster1x1 dynamic",
        Case("added to", layouts="ntt", sizes=UNEVEN, N=200, out=F32, options=ADDED),
    ),
    (
        "128x256x64_cluster2x1 dynamic",
        Case("scaled", layouts="ntt", sizes=UNEVEN, N=264, other=136, epilogue=scaled),
    ),
    (
        "128x128x64_cluster1x1 dynamic",
        Case("more groups than are ordered", layouts="ntt", sizes=(1, 0, 3) * 44, N=64),
    ),
    ("256x128x64_cluster1x2 dynamic", Case("anywhere", N=136, sizes=AWAY, **ANYWHERE)),
    ("128x128x64_cluster1x1 dynamic", Case("none", layouts="ntt", sizes=(0, 0), options=ADDED)),
    (
        "128x256x64_cluster2x1 dynamic",
        Case("scaled anywhere", N=136, epilogue=scaled, options=ADDED, **ANYWHERE),
    ),
]
#: Clusters along K, which have the parts of a tile each.
OF_ROWS_CUT = [
    ("64x128x64_cluster1x1x2", Case("uneven", sizes=UNEVEN, N=264, other=392, layouts=WEIGHTS)),
    (
        "16x64x128_cluster1x1x2",
        Case("few rows", sizes=(1, 0, 3, 17), N=392, other=392, layouts=WEIGHTS),
    ),
    (
        "64x128x64_cluster1x1x2",
        Case("swiglu", sizes=FEW, N=192, other=264, epilogue=swiglu, layouts=WEIGHTS),
    ),
    ("128x128x64_cluster1x1x2", Case("picked", indices=BOTH, sizes=FEW, N=136, other=264)),
    ("64x64x128_cluster1x1x2", Case("gradient", sizes=AWAY, other=264, epilogue=gradient)),
    (
        "64x64x128_cluster1x1x2",
        Case("anywhere", discrete=True, sizes=FEW, N=136, other=520, layouts=WEIGHTS),
    ),
    ("64x128x64_cluster1x1x2", Case("none", sizes=(0, 0), other=264, epilogue=gradient)),
    (
        "128x64x64_cluster1x1x2",
        Case("halves", sizes=FEW, N=192, other=136, epilogue=halves, layouts=WEIGHTS),
    ),
    (
        "64x64x128_cluster1x1x2",
        Case("blocks", sizes=FEW, N=136, other=784, scales="blocks", **EIGHT_BITS),
    ),
    (
        "16x64x256_cluster1x1x2",
        Case("blocks, swapped", sizes=(9, 0, 1), N=264, other=784, scales="blocks", **EIGHT_BITS),
    ),
    (
        "128x128x128_cluster1x1x2",
        Case("picked, blocks", indices=BOTH, sizes=FEW, other=784, scales="blocks", **EIGHT_BITS),
    ),
    (
        "128x128x64_cluster1x1x2",
        Case("more steps than stages", indices=BOTH[:1], sizes=(65,), N=136, other=904),
    ),
    (
        "128x64x128_cluster1x1x2",
        Case("rows, swiglu", N=192, other=272, scales="rows", epilogue=swiglu, **EIGHT_BITS),
    ),
]
EVERY = bool(os.environ.get("KERNEL_API_EMULATE"))
SEEDS = 3 if EVERY else 1  # interleavings; what they leave of the workspace is zero


def chosen_of(design, args):
    """The best Hopper kernel of a design, given by the words of its name."""
    offered = ka.get_kernels(on_meta(args), cc="sm_90a", providers=["cutedsl"])
    found = [k for k in offered if "sm90_grouped" in k.metadata.kernel_name]
    words, cut = f"_tile{design}".split(), "cluster1x1x" in design
    found = [k for k in found if (k.metadata.design.split_k > 1) == cut]
    chosen = [k for k in found if all(word in k.metadata.kernel_name for word in words)]
    assert chosen, [k.metadata.kernel_name for k in found]
    return chosen[0]


def checked(design, args):
    check(chosen_of(design, args), args, "sm_90a")


def named(cases, first):
    chosen = cases if EVERY else cases[:first]
    return {"argvalues": chosen, "ids": [case.name for _, case in chosen]}


@pytest.mark.parametrize(("design", "case"), **named(OF_ROWS, 3))
def test_groups_of_rows_are_multiplied_with_their_own_matrix(design, case):
    checked(design, case.of_rows())


@pytest.mark.parametrize(("design", "case"), **named(OF_SUMS, 1))
def test_groups_are_summed_over(design, case):
    checked(design, case.of_sums())


@pytest.mark.parametrize(("design", "case"), **named(OF_ROWS_TAKEN, 1))
def test_tiles_of_groups_are_taken_as_clusters_become_free(design, case):
    for seed in range(SEEDS):
        check(chosen_of(design, args := case.of_rows()), args, "sm_90a", seed)


@pytest.mark.parametrize(("design", "case"), **named(OF_ROWS_CUT, 2))
def test_clusters_add_up_the_parts_of_their_tile(design, case):
    for seed in range(SEEDS):
        check(chosen_of(design, args := case.of_rows()), args, "sm_90a", seed)


@pytest.mark.parametrize(("design", "case"), **named(OF_SUMS_TAKEN, 1))
def test_tiles_of_sums_are_taken_as_clusters_become_free(design, case):
    for seed in range(SEEDS):
        check(chosen_of(design, args := case.of_sums()), args, "sm_90a", seed)


@pytest.mark.parametrize(
    ("fence", "text"),
    [
        ("fence.proxy.tensormap::generic.acquire.gpu", "that it has not acquired"),
        ("fence.proxy.tensormap::generic.release.gpu", "that is not released"),
    ],
)
def test_the_emulator_sees_a_descriptor_that_is_used_too_early(fence, text):
    case = Case("anywhere", N=72, other=64, sizes=(3,), **ANYWHERE)
    args = case.of_sums()
    kernel = chosen_of("64x128x64", args)
    compiled = EmulatedKernel.compile(kernel, args, "sm_90a")
    lines = compiled.text.split("\n")
    assert any(fence in line for line in lines)
    without = compiled.with_text("\n".join(line for line in lines if fence not in line))
    with pytest.raises(EmulationError, match=text):
        without.run(args)

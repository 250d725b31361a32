"""What scores of Hopper's attention are made of, where it is not the same for a whole tile: tables
of blocks, and all options of few queries. The PTX runs in the emulator, without a GPU.

With KERNEL_API_EMULATE in the environment every case runs, else those in front.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from support.ptx.kernel import EmulatedKernel
from support.sdpa import NAN, Draw
from support.sdpa_cases import (
    Case,
    Options,
    biased,
    documents,
    functions,
    nothing,
    on_meta,
    sloped,
    whole_numbers,
)

import kernel_api as ka
from kernel_api import masks
from kernel_api.verification import FACTOR_REORDERED, conduct, judge

pytestmark = pytest.mark.compile

FORWARD, FP8, FEW = "sm90.sdpa_forward", "sm90.sdpa_forward_fp8", "sm90.sdpa_decode"
EVERY = bool(os.environ.get("KERNEL_API_EMULATE"))


def chosen(cases: list[Case], count: int) -> Any:
    return pytest.mark.parametrize(
        "case", cases if EVERY else cases[:count], ids=lambda case: case.name
    )


def offered(args: Any, family: str) -> list[Any]:
    found = ka.get_kernels(on_meta(args), cc="sm_90a", providers=["cutedsl"])
    kernels = [kernel for kernel in found if kernel.family == family]
    assert kernels, ka.explain(on_meta(args), cc="sm_90a")
    return kernels


def check(
    args: Any, family: str, tile: tuple[int, int] | None = None, cluster: int | None = None
) -> EmulatedKernel:
    """The family's first kernel, or the one of a tile or a cluster, and what the reference
    computes."""
    kernels = offered(args, family)
    if tile is not None:
        kernels = [k for k in kernels if k.metadata.design.tile_shape == tile]
    if cluster is not None:
        kernels = [k for k in kernels if k.metadata.design.cluster == cluster]
    compiled = EmulatedKernel.compile(kernels[0], args)
    broken = conduct(args, lambda: compiled.run(args))
    assert broken is None, broken
    verdict = judge(args, FACTOR_REORDERED)
    assert verdict, f"{kernels[0].metadata.kernel_name}: {verdict}"
    return compiled


def table(draw: Draw, shape: tuple[int, int]) -> torch.Tensor:
    """Of blocks. The first head sees nothing, the second one everything, the third one the first
    block of keys alone, the fourth one the last; others see any."""
    rows, columns = (-(-n // size) for n, size in zip((draw.S_q, draw.S_kv), shape, strict=True))
    found = draw.random(draw.B, draw.H, rows, columns, element=torch.float32) > 0
    found[:, :1] = False
    found[:, 1:2] = True
    found[:, 2:4] = False
    found[:, 2:3, :, 0] = True
    found[:, 3:4, :, -1] = True
    return found


def blocks(*shape: int, further: masks.Mask | None = None, options: Options = nothing) -> Options:
    """shape: (queries, keys) of a block."""

    def made(draw: Draw) -> dict[str, Any]:
        found: dict[str, Any] = {**options(draw)}
        mask = masks.BlockSparse(table(draw, shape), shape)
        for other in (further, found.get("mask")):
            mask = mask if other is None else mask & other
        return {**found, "mask": mask}

    return made


CAUSAL, BAND = masks.Causal("bottom_right"), masks.SlidingWindow(90, 3, "bottom_right")

BLOCKS = [
    Case(
        "documents, causal",
        sizes=(1, 2, 1, 390, 390, 64, 64),
        tile=(128, 128),
        options=documents(128, 128, further=masks.Causal()),
    ),
    Case(
        "entries smaller than tiles, causal",
        sizes=(1, 5, 1, 140, 300, 64, 64),
        tile=(128, 128),
        options=blocks(48, 40, further=CAUSAL),
    ),
    Case(
        "entries larger than tiles, padded",
        sizes=(2, 4, 2, 150, 300, 64, 64),
        tile=(128, 128),
        lengths=((150, 60), (270, 129)),
        options=blocks(256, 256),
    ),
    Case(
        "three consumers",
        sizes=(1, 6, 3, 200, 300, 64, 64),
        tile=(192, 128),
        options=blocks(256, 128, further=BAND),
    ),
    Case(
        "tiles of 160 keys",
        sizes=(1, 5, 1, 40, 500, 128, 128),
        tile=(128, 160),
        options=blocks(128, 256),
    ),
    Case(
        "entries that are not searched",
        sizes=(1, 5, 1, 40, 300, 64, 64),
        tile=(128, 128),
        options=blocks(3, 5, further=BAND),
    ),
    Case(
        "a function, too",
        sizes=(1, 5, 1, 40, 300, 64, 64),
        tile=(128, 128),
        options=blocks(64, 128, options=functions),
    ),
    Case(
        "documents, entries of other sizes than tiles",
        sizes=(2, 2, 1, 300, 300, 128, 128),
        tile=(128, 128),
        lengths=((300, 280), (300, 280)),
        options=documents(48, 200, further=BAND),
    ),
    Case(
        "O where Q was",
        sizes=(1, 5, 1, 140, 300, 256, 256),
        tile=(128, 80),
        options=blocks(128, 128, options=sloped),
    ),
]


@chosen(BLOCKS, 1)
def test_a_table_of_blocks_hides_what_it_says(case):
    check(case.arguments(), FORWARD, case.tile)


if EVERY:

    def test_packed_sequences_share_a_table():
        case = Case(
            "packed",
            sizes=(3, 2, 1, 140, 300, 64, 64),
            packed=True,
            lengths=((138, 0, 20), (298, 9, 0)),
            options=blocks(64, 64, further=CAUSAL),
        )
        check(case.arguments(), FORWARD)

    def test_8_bit_floats_have_tables():
        draw = Draw(1, 5, 1, 140, 300, 128, 128, element="float8_e4m3fn")
        mask = blocks(64, 128, further=CAUSAL)(draw)["mask"]
        out = torch.empty(1, 5, 140, 128, dtype=torch.bfloat16)
        check(draw.arguments(out=out, mask=mask, descale_k=torch.tensor(0.7)), FP8)


#: Blocks of keys that are seen of (1, 1, S_q, S_kv): there are more than are searched at once.
FAR_APART = (3, 35, 36)


@pytest.mark.parametrize("family", [FORWARD, FEW])
def test_blocks_that_a_table_hides_are_not_read(family):
    draw = Draw(1, 1, 1, 3, 38 * 128 - 5, 64, 64, element="bfloat16")
    shown = torch.zeros(1, 1, 1, 38, dtype=torch.bool)
    shown[..., FAR_APART] = True
    args = draw.arguments(mask=masks.BlockSparse(shown))
    compiled = check(args, family)
    expected = [output.tensor.clone() for output in args.outputs.values()]
    hidden = ~shown[0, 0, 0].repeat_interleave(128)[: draw.S_kv]
    for name in ("K", "V"):
        getattr(args, name).tensor[:, :, hidden] = NAN
    compiled.run(args)
    for output, before in zip(args.outputs.values(), expected, strict=True):
        assert torch.equal(output.tensor, before)


@pytest.mark.parametrize("family", [FORWARD, FEW] if EVERY else [FEW])
def test_whole_numbers_are_computed_as_such(family):
    case = Case("", sizes=(1, 4, 2, 5, 70, 64, 64), options=whole_numbers)
    check(case.arguments(), family)


# Few queries -----------------------------------------------------------------------------


def everything(draw: Draw) -> dict[str, Any]:
    return blocks(2, 24, further=BAND, options=sloped)(draw) | biased(0, 1, 2, 3)(draw)


def diagonals(draw: Draw) -> dict[str, Any]:
    """The functions; what is visible is not cut at the first keys."""
    given = functions(draw)
    (mask,) = given["mask"].functions
    return {**given, "mask": mask}


FEW_QUERIES = [
    Case(
        "everything in pages",
        sizes=(2, 6, 2, 3, 160, 64, 64),
        page_size=16,
        lengths=((3, 2), (139, 20)),
        options=everything,
    ),
    Case("functions", sizes=(1, 6, 2, 5, 140, 64, 64), options=diagonals),
    Case("a bias", sizes=(2, 8, 4, 3, 400, 64, 64), options=biased(0, 1, 2, 3)),
    Case(
        "a bias of keys", sizes=(2, 3, 1, 3, 150, 64, 64), options=biased(0, 3, element="float32")
    ),
    Case("alibi", sizes=(3, 4, 4, 1, 260, 64, 64), options=sloped),
    Case("blocks", sizes=(1, 12, 2, 20, 600, 64, 64), options=blocks(8, 128)),
    Case("blocks of all heads", sizes=(1, 6, 1, 13, 300, 128, 120), options=blocks(4, 300)),
    Case("blocks that are not searched", sizes=(1, 5, 1, 13, 300, 64, 64), options=blocks(1, 1)),
    Case("documents", sizes=(1, 12, 2, 20, 400, 64, 64), options=documents(8, 128, further=BAND)),
    Case("two groups", sizes=(2, 8, 1, 12, 300, 64, 64), tile=(128, 128), options=everything),
    Case(
        "large pages, functions",
        sizes=(2, 4, 2, 20, 512, 64, 64),
        page_size=256,
        lengths=((20, 5), (300, 30)),
        options=blocks(8, 32, options=diagonals),
    ),
    Case("256 columns", sizes=(1, 4, 1, 3, 150, 256, 256), options=everything),
]


@chosen(FEW_QUERIES, 1)
def test_few_queries_have_every_option(case):
    clusters = (1, 8) if case.sizes[5] <= 128 else (1,)
    for cluster in clusters if EVERY else clusters[-1:]:
        check(case.arguments(), FEW, cluster=cluster)

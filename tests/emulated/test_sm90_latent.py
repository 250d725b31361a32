"""Attention of latent vectors for Hopper is right: its PTX runs in the emulator, without a GPU.

With KERNEL_API_EMULATE in the environment every case runs, else those in front.
"""

from __future__ import annotations

import os

import pytest
from support.ptx.kernel import EmulatedKernel
from support.sass import sass
from support.sdpa_cases import Case, on_meta, sloped

import kernel_api as ka
from kernel_api import masks
from kernel_api.verification import FACTOR_REORDERED, conduct, judge

pytestmark = pytest.mark.compile

FAMILY = "sm90.sdpa_latent"
WITHIN = {"values_in_keys": True}


def sinks(draw):
    return {"sink": draw.wides(draw.H)}


def case(name, sizes, **how):
    """sizes: B, H, S_q, S_kv, D, D_v."""
    B, H, *others = sizes
    keywords = {**WITHIN, **how.pop("keywords", {})}
    return Case(name, sizes=(B, H, 1, *others), keywords=keywords, **how)


IN_PAGES = {
    "sizes": (2, 20, 3, 300, 576, 512),
    "page_size": 16,
    "lengths": ((3, 2), (300, 130)),
    "statistics": True,
}
#: The first with all that takes registers, for what it compiles to.
CASES = [
    case(
        "pages, several queries, statistics, all options",
        **IN_PAGES,
        options=sloped,
        keywords={"mask": masks.SlidingWindow(170, 3, "bottom_right")},
    ),
    # The first tile asks for what both of them read next.
    case(
        "many blocks of two tiles in pages by one multiprocessor",
        (1, 80, 1, 608, 320, 256),
        page_size=16,
        lengths=((1,), (600,)),
    ),
    # A group waits for nothing that the other one has left by then, and that is loaded anew.
    case("many blocks of two tiles by one multiprocessor", (1, 80, 1, 604, 320, 256)),
    case(
        "a causal mask, a sink",
        **IN_PAGES,
        options=sinks,
        keywords={"mask": masks.Causal("bottom_right")},
    ),
    case("two tiles, an odd number of blocks", (1, 80, 1, 190, 576, 512)),
    case("one block", (2, 16, 1, 3, 576, 512)),
    case("fewer columns", (1, 5, 2, 140, 320, 256), keywords={"softcap": 3.0}),
    case(
        "large pages, a window, sequences without keys",
        (3, 8, 3, 300, 576, 512),
        page_size=256,
        lengths=((3, 1, 2), (299, 0, 64)),
        keywords={"mask": masks.SlidingWindow(70, 3, "bottom_right")},
    ),
    case("half precision", (1, 64, 1, 256, 512, 512), element="float16"),
    case(
        "a mask of any kind",
        (1, 16, 1, 200, 576, 512),
        keywords={"mask": masks.MaskMod(lambda b, h, q, kv: (kv + h) % 3 != 0)},
    ),
    case("rounds of sums", (1, 16, 1, 1300, 576, 512)),
]
CHOSEN = CASES if os.environ.get("KERNEL_API_EMULATE") else CASES[:2]


def compiled_for(args):
    offered = ka.get_kernels(on_meta(args), cc="sm_90a", providers=["cutedsl"])
    (kernel,) = [one for one in offered if one.family == FAMILY]
    return EmulatedKernel.compile(kernel, args)


@pytest.mark.parametrize("case", CHOSEN, ids=lambda one: one.name)
def test_latent_vectors_are_attended_to(case):
    args = case.arguments()
    compiled = compiled_for(args)
    # As many blocks as parts, and more tiles than blocks.
    for multiprocessors in (1,) if "by one multiprocessor" in case.name else (24,):
        broken = conduct(args, lambda: compiled.run(args, multiprocessors=multiprocessors))  # noqa: B023
        assert broken is None, broken
        verdict = judge(args, FACTOR_REORDERED)
        assert verdict, f"{multiprocessors} multiprocessors: {verdict}"
    if case in CASES[:3]:
        assert_no_block_is_read_twice(compiled.artifact, case)


def assert_no_block_is_read_twice(artifact, case):
    """It takes long to compile, so this is looked at where it is run."""
    assert artifact.resources.spill_bytes == 0
    (code,) = (part for part in sass(artifact).split(".text.") if "HGMMA" in part)  # no sums
    if case is CASES[2]:  # it is known where keys are
        assert 0 < code.find("UTMAPF") < code.find("ACQBULK")
    assert "HGMMA.64x64x16" in code  # scores
    assert "HGMMA.64x256x16" in code  # half of the values
    assert "UTMALDG" in code

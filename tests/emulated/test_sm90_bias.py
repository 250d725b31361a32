"""A bias that comes to shared memory with the keys that it is for, in Hopper's attention.

With KERNEL_API_EMULATE in the environment every case runs, else those in front.
"""

from __future__ import annotations

import os

import pytest
import torch
from support.ptx.kernel import EmulatedKernel
from support.sdpa import NAN
from support.sdpa_cases import Case, biased, on_meta

import kernel_api as ka
from kernel_api import epilogue, masks
from kernel_api.verification import FACTOR_REORDERED, conduct, judge

pytestmark = pytest.mark.compile

EVERY = bool(os.environ.get("KERNEL_API_EMULATE"))
CAUSAL = {"mask": masks.Causal("bottom_right")}


def strided(*modes):
    """A bias among NaN: rows have room behind them."""

    def options(draw):
        bias = biased(*modes, element=draw.element)(draw)["bias"]
        around = torch.full((*bias.shape[:-1], bias.shape[-1] + 24), NAN, dtype=bias.dtype)
        around[..., 8:-16] = bias
        return {"bias": around[..., 8:-16]}

    return options


def expanded(draw):
    """One row for all heads and queries, which are there by strides of 0."""
    bias = biased(0, 3)(draw)["bias"]
    return {"bias": bias.expand(draw.B, draw.H, draw.S_q, draw.S_kv)}


def hiding(draw):
    """Rows that see nothing, by infinities and by large numbers, and others that see one key."""
    bias = biased(0, 1, 2, 3)(draw)["bias"]
    bias[..., 3, :] = -torch.inf
    bias[..., 5, :] = -(2.0**100)
    bias[..., 7, 1:] = -(2.0**100)
    bias[..., 64, :-1] = -torch.inf
    return {"bias": bias}


def with_others(draw):
    found = biased(1, 2, 3)(draw)
    return {
        **found,
        "alibi": draw.wides(draw.H) / 8,
        "sink": draw.wides(draw.H),
        "score_mod": lambda score, b, h, q, kv: score * epilogue.sigmoid(score),
    }


CASES = [
    (Case("of all", sizes=(1, 2, 1, 70, 200, 64, 64), options=strided(1, 2, 3)), (64, 64)),
    (Case("of keys", sizes=(2, 1, 1, 70, 200, 64, 64), options=strided(0, 3)), (64, 64)),
    (Case("hides", sizes=(1, 1, 1, 70, 136, 128, 128), options=hiding), (128, 128)),
    (
        Case(
            "keys in pages, few",
            sizes=(2, 2, 1, 140, 160, 128, 128),
            page_size=16,
            lengths=((140, 30), (139, 7)),
            options=biased(0, 2, 3),
            keywords=CAUSAL,
        ),
        (128, 128),
    ),
    (
        Case("pages, of keys", sizes=(1, 2, 1, 20, 160, 64, 64), page_size=32,
             lengths=((20,), (139,)), options=biased(3)),
        (192, 128),
    ),
    (Case("float16", element="float16", options=strided(0, 1, 2, 3), keywords=CAUSAL,
          sizes=(2, 2, 2, 200, 264, 64, 64)), (128, 128)),
    (Case("96 columns", sizes=(1, 2, 2, 130, 136, 96, 88), options=strided(2, 3)), (128, 128)),
    (Case("192 columns", sizes=(1, 1, 1, 130, 168, 192, 128), options=strided(0, 1, 2, 3)),
     (128, 96)),
    (Case("192 and 192", sizes=(1, 1, 1, 130, 168, 192, 192), options=strided(2, 3)), (128, 80)),
    (Case("of keys, by strides of 0", sizes=(2, 2, 1, 70, 136, 64, 64), options=expanded),
     (128, 128)),
    (Case("192 columns, of keys", sizes=(1, 2, 1, 130, 168, 192, 128), options=strided(0, 3)),
     (128, 96)),
    (Case("192 and 192, of keys", sizes=(1, 2, 1, 130, 168, 192, 192), options=strided(1, 3)),
     (128, 80)),
    (Case("256 columns, of keys", sizes=(2, 2, 1, 130, 168, 256, 256), options=strided(0, 1, 3)),
     (128, 64)),
    (Case("256 columns", sizes=(1, 1, 1, 130, 168, 256, 256), options=hiding,
          keywords={"mask": masks.SlidingWindow(70, 3)}), (128, 64)),
    (Case("functions as well", sizes=(1, 2, 1, 70, 200, 128, 128), options=with_others,
          keywords=CAUSAL), (128, 128)),
    (
        Case("lengths", sizes=(3, 2, 1, 90, 200, 64, 64), options=strided(0, 1, 2, 3),
             lengths=((90, 0, 5), (3, 200, 0))),
        (128, 128),
    ),
]  # fmt: skip


def check(case, tile):
    args = case.arguments()
    offered = ka.get_kernels(on_meta(args), cc="sm_90a", providers=["cutedsl"])
    kernels = [
        kernel
        for kernel in offered
        if getattr(kernel.metadata.design, "bias", "read") != "read"
        and kernel.metadata.design.tile_shape == tile
    ]
    assert len(kernels) == 1, ka.explain(on_meta(args), cc="sm_90a")
    compiled = EmulatedKernel.compile(kernels[0], args)
    # One block has all tiles, and stages are written again.
    broken = conduct(args, lambda: compiled.run(args, multiprocessors=1))
    assert broken is None, broken
    verdict = judge(args, FACTOR_REORDERED)
    assert verdict, f"{kernels[0].metadata.kernel_name}: {verdict}"


@pytest.mark.parametrize(
    ("case", "tile"), CASES if EVERY else CASES[:2], ids=lambda one: getattr(one, "name", "")
)
def test_a_bias_is_added_to_the_scores_that_it_is_for(case, tile):
    check(case, tile)

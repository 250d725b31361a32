"""How many blocks of keys the performance model of attention counts, and how near rows it is."""

import itertools
import json
import math
import re
import statistics
from pathlib import Path

import pytest
import torch
from support.benchmarks import script

import kernel_api as ka
from kernel_api import masks
from kernel_api.providers.cutedsl.sdpa.model import blocks_seen, seen

ROWS = Path(__file__).parents[1] / "benchmarks" / "results" / "h200" / "sdpa-forward.json"
DATA = Path(__file__).parent / "data"
TILES = [(192, 128), (128, 128), (128, 80), (128, 64), (64, 128)]


def attention(B, H, H_kv, S, D, mask=None):
    def heads(count):
        return torch.empty(B, S, count, D, dtype=torch.bfloat16, device="meta").transpose(1, 2)

    return ka.SdpaArguments(heads(H), heads(H_kv), heads(H_kv), heads(H), mask=mask)


def met(S, queries, keys):
    """Blocks that tiles of queries meet under a causal mask, on average, counted one by one."""
    lasts = [min(first + queries, S) - 1 for first in range(0, S, queries)]
    return statistics.mean(last // keys + 1 for last in lasts)


@pytest.mark.parametrize("S", [256, 512, 1024, 2048, 16384])
@pytest.mark.parametrize("tile", TILES)
def test_blocks_that_a_causal_mask_cuts_are_counted_whole(S, tile):
    found = blocks_seen(attention(1, 1, 1, S, 64, masks.Causal()), *tile)
    assert found == pytest.approx(met(S, *tile), rel=0.08)
    assert blocks_seen(attention(1, 1, 1, S, 64), *tile) == math.ceil(S / tile[1])


def test_a_window_is_as_wide_as_it_is_and_half_a_tile_more_on_both_sides():
    args = attention(1, 1, 1, 65536, 64, masks.SlidingWindow(1023, 0))
    assert blocks_seen(args, 128, 128) == pytest.approx(9, rel=0.01)


BANDS = [
    *(masks.Causal(alignment) for alignment in ("top_left", "bottom_right")),
    *(masks.SlidingWindow(*sides, "bottom_right") for sides in ((5, 0), (5, 3), (0, None))),
    *(masks.SlidingWindow(*sides) for sides in ((5, None), (30, None), (None, 4), (60, 60))),
]


@pytest.mark.parametrize("mask", BANDS, ids=str)
@pytest.mark.parametrize(("S_q", "S_kv"), [(1, 1), (1, 40), (16, 40), (40, 40), (40, 7)])
def test_what_a_band_shows_is_counted(mask, S_q, S_kv):
    Q, K = (torch.empty(1, 1, S, 64, dtype=torch.bfloat16, device="meta") for S in (S_q, S_kv))
    args, last = ka.SdpaArguments(Q, K, K.clone(), Q.clone(), mask=mask), S_kv - S_q
    shown = 0
    for i, j in itertools.product(range(S_q), range(S_kv)):
        sides = {"right": i, "right_end": i + last}, {"left": i, "left_end": i + last}
        before = all(j <= sides[0][n] + b for n, b in mask.bounds.items() if n in sides[0])
        shown += before and all(
            j >= sides[1][n] - b for n, b in mask.bounds.items() if n in sides[1]
        )
    assert seen(args) == pytest.approx(shown / (S_q * S_kv))


def test_the_model_is_near_what_was_measured():
    ratios = {}
    for row in json.loads(ROWS.read_text()):
        B, heads, S, D = re.match(r"(\d+)x([\d/]+)x(\d+)x(\d+) ", row["problem"]).groups()
        H, _, H_kv = heads.partition("/")
        mask = masks.Causal() if "causal" in row["problem"] else None
        args = attention(int(B), int(H), int(H_kv or H), int(S), int(D), mask)
        named = {k.metadata.kernel_name: k for k in ka.get_kernels(args, cc=90)}
        if row["subject"] in named:
            seconds = named[row["subject"]].predict(args)
            ratios[row["problem"]] = 1e6 * seconds / row["subject_us"]
    assert len(ratios) > 60
    assert 0.9 < statistics.geometric_mean(ratios.values()) < 1.05
    assert all(0.75 < one < 1.15 for one in ratios.values()), ratios


def short(problem):
    """Of `sdpa_short`: a problem as rows of an H100 call it."""
    B, heads, S_q, S_kv, D = re.match(r"(\d+)x([\d/]+)x(\d+):(\d+)x(\d+) ", problem).groups()
    H, _, H_kv = heads.partition("/")

    def lying(count, S):
        shape = (int(B), int(S), int(count), int(D))
        return torch.empty(shape, dtype=torch.bfloat16, device="meta").transpose(1, 2)

    mask = masks.Causal("bottom_right") if problem.endswith("causal") else None
    Q, K, V, out = map(lying, (H, H_kv or H, H_kv or H, H), (S_q, S_kv, S_kv, S_q))
    return ka.SdpaArguments(Q, K, V, out, mask=mask)


def short_backward(problem):
    """Of `sdpa_short_backward`, in the same way."""
    B, heads, S, D = re.match(r"(\d+)x([\d/]+)x(\d+)x(\d+) ", problem).groups()
    forward = short(f"{B}x{heads}x{S}:{S}x{D} {problem.rpartition(' ')[2]}")
    Q, K, V, out = forward.tensors
    lse = torch.empty(Q.shape[:3], dtype=torch.float32, device="meta")
    mask = masks.Causal() if problem.endswith("causal") else None
    return ka.SdpaBackwardArguments(Q, K, V, out, out, lse, Q, K, V, mask=mask)


def packed(problem):
    """Of `sdpa_packed`."""
    return of_suite("sdpa_packed", problem)


def decode(problem):
    """Of `sdpa_decode`."""
    return of_suite("sdpa_decode", problem)


def of_suite(name, problem):
    known = {one.label: one for one in script(name).SUITE.problems}
    return known[problem].arguments("meta")


@pytest.mark.parametrize(
    ("measured", "arguments", "count", "mean"),
    [
        ("sdpa_short_h100", short, 113, 1.015),
        ("sdpa_short_backward_h100", short_backward, 22, 1.03),
        ("sdpa_packed_h100", packed, 40, 1.02),
        ("sdpa_short_h200", short, 39, 1.015),
        ("sdpa_short_backward_h200", short_backward, 24, 1.015),
        ("sdpa_decode_h200", decode, 25, 1.01),
    ],
)
def test_the_first_choice_of_short_sequences_is_near_the_best(measured, arguments, count, mean):
    """Of all candidates that `benchmarks/sdpa_short.py --all` has timed on an H100, and of further
    sizes; the same backward, and of packed sequences, whose lengths the model does not know. Of 14
    candidates that `autotune` has timed on an H200."""
    over = {}
    for problem, times in json.loads((DATA / f"{measured}.json").read_text()).items():
        offered = ka.get_kernels(arguments(problem), cc=90, providers=["cutedsl"])
        first = next(times[name] for name in map(short_name, offered) if name in times)
        over[problem] = first / min(times.values())
    assert len(over) == count
    assert statistics.geometric_mean(over.values()) < mean
    assert max(over.values()) < 1.21, over


def short_name(kernel):
    """Without types, which are all the same."""
    design = kernel.metadata.kernel_name.partition("tttt_")[2].partition("_align")[0]
    return f"{kernel.family.removeprefix('sm90.sdpa_')}_{design}"

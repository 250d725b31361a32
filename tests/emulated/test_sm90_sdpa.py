"""Attention for Hopper is right: its PTX runs in the emulator, without a GPU.

With KERNEL_API_EMULATE in the environment every case runs, else those in front.
"""

from __future__ import annotations

import os

import pytest
import torch
from support.ptx.kernel import EmulatedKernel
from support.sdpa import NAN, Draw
from support.sdpa_cases import BF16, FORWARD, Case, biased, dropped, hidden_by, on_meta
from support.sdpa_fp8 import (
    fp8_arguments,
    keys_of,
    packed_fp8_arguments,
    paged_fp8_arguments,
    pages_of,
)

import kernel_api as ka
from kernel_api import masks
from kernel_api.verification import FACTOR_REORDERED, conduct, judge

pytestmark = pytest.mark.compile

FAMILY = "sm90.sdpa_forward"
EVERY = bool(os.environ.get("KERNEL_API_EMULATE"))

#: TMA wants whole vectors, and extents.
CASES = [
    Case("dropout, two blocks", sizes=(1, 1, 1, 40, 150, 64, 64), options=dropped),
    Case(
        "tiles without keys, O where Q was",
        sizes=(1, 1, 1, 500, 1, 256, 256),
        keywords={"mask": masks.SlidingWindow(200, 100)},
    ),
    *(c for c in FORWARD if c.aligned and c.page_size is None and c.sizes[4]),
]


FEW = "sm90.sdpa_decode"
MEASURED = "statistics, rows that see nothing"


def sinks(draw):
    return {"sink": draw.wides(draw.H)}


BAND = masks.SlidingWindow(70, 3, "bottom_right")
#: The rows of 8 or more heads are one tile; with few tiles there are parts.
FEW_QUERIES = [
    Case("decode", sizes=(2, 8, 1, 3, 400, 64, 64), options=sinks),
    Case(
        "pages",
        sizes=(1, 4, 1, 1, 150, 64, 64),
        page_size=16,
        lengths=((1,), (139,)),
        keywords={"softcap": 3.0},
    ),
    Case(
        "large pages",
        sizes=(3, 4, 2, 40, 300, 64, 64),
        page_size=256,
        lengths=((40, 0, 5), (300, 30, 0)),
        keywords={"mask": BAND},
    ),
    Case("128 columns", sizes=(1, 16, 2, 5, 150, 128, 120), keywords={"mask": BAND}),
    Case(
        "many rows, two groups",
        sizes=(2, 8, 1, 12, 1000, 64, 64),
        lengths=((12, 9), (1000, 77)),
        options=sinks,
        statistics=True,
        keywords={"mask": BAND},
    ),
    Case("256 columns", sizes=(1, 2, 1, 1, 150, 256, 256)),
    Case("several tiles of a block", sizes=(2, 8, 4, 3, 400, 64, 64)),
    Case(
        "statistics of parts",
        sizes=(2, 8, 2, 3, 400, 64, 64),
        lengths=((3, 1), (391, 0)),
        options=sinks,
        statistics=True,
    ),
    Case(
        "statistics of parts, no sink",
        sizes=(2, 4, 2, 4, 300, 128, 128),
        lengths=((4, 3), (300, 2)),
        statistics=True,
        keywords={"mask": masks.Causal("bottom_right")},
    ),
    Case("statistics of one part", sizes=(1, 2, 1, 3, 40, 64, 64), statistics=True),
]


def check(args, family, scaling="at_once", tile=None, cluster=None, **where):
    offered = ka.get_kernels(on_meta(args), cc="sm_90a", providers=["cutedsl"])
    kernels = [
        kernel
        for kernel in offered
        if kernel.family == family
        and getattr(kernel.metadata.design, "scaling", scaling) == scaling
        and tile in (None, kernel.metadata.design.tile_shape)
        and getattr(kernel.metadata.design, "cluster", cluster) in (None, cluster)
    ]
    assert kernels, ka.explain(on_meta(args), cc="sm_90a")
    compiled = EmulatedKernel.compile(kernels[0], args)
    broken = conduct(args, lambda: compiled.run(args, **where))
    assert broken is None, broken
    verdict = judge(args, FACTOR_REORDERED)
    assert verdict, f"{kernels[0].metadata.kernel_name}: {verdict}"
    return compiled


@pytest.mark.parametrize("family", [FAMILY, FEW] if EVERY else [FAMILY])
def test_rows_that_a_large_negative_bias_hides_see_nothing(family):
    sizes = (1, 2, 1, 70, 100, 64, 64) if family == FAMILY else (1, 8, 1, 4, 150, 64, 64)
    case = Case("hidden", sizes=sizes, options=hidden_by(-1e10), statistics=True)
    args = case.arguments()
    check(args, family, cluster=None if family == FAMILY else 1)
    assert args.out.tensor[:, :, :3].count_nonzero() == 0


CHOSEN = CASES if EVERY else [*CASES[:2], CASES[3]]


@pytest.mark.parametrize("case", CHOSEN, ids=lambda case: case.name)
def test_attention_is_right(case):
    check(case.arguments(), FAMILY)


#: They change scores in two ways, or by tables of small blocks.
UNSHARED = (
    "everything, padded", "softcap, alibi, sink", "blocks", "functions", "functions of 8 bits",
)  # fmt: skip
OF_64 = [case for case in CASES if max(case.sizes[5:]) <= 64 and case.name not in UNSHARED]
SHARED = OF_64 if EVERY else [case for case in OF_64 if case.name == MEASURED]


@pytest.mark.parametrize("case", SHARED, ids=lambda case: case.name)
def test_blocks_that_share_a_multiprocessor_are_right(case):
    check(case.arguments(), FAMILY, tile=(64, 64))


@pytest.mark.parametrize("scaling", ["at_once", "seldom"] if EVERY else ["seldom"])
def test_blocks_of_128_columns_that_share_a_multiprocessor_are_right(scaling):
    (wide,) = [case for case in CASES if case.name == "128"]
    check(wide.arguments(), FAMILY, scaling, tile=(64, 64))


@pytest.mark.parametrize("scaling", ["at_once", "seldom"] if EVERY else ["seldom"])
def test_blocks_of_96_keys_that_share_a_multiprocessor_are_right(scaling):
    (plain,) = [case for case in OF_64 if case.name == "plain"]
    check(plain.arguments(), FAMILY, scaling, tile=(64, 96))


GROWING = Case("growing", sizes=(1, 2, 1, 70, 384, 64, 64))
PLAIN = ("tiles without keys, O where Q was", "packed, causal", "plain", "128", "256")
SCALED = [GROWING, *(case for case in CASES if case.name in PLAIN)]
LATE = [case for case in CASES if case.statistics and "softcap" not in case.keywords]


@pytest.mark.parametrize("scaling", ["late", "seldom"])
@pytest.mark.parametrize("case", SCALED if EVERY else SCALED[:1], ids=lambda case: case.name)
def test_sums_are_scaled_late(case, scaling):
    """Keys are seen from the last to the first: of three blocks, scores grow by less than the
    slack and then by more, of every other query they fall."""
    args = case.arguments()
    if case is GROWING:
        signs = torch.where(torch.arange(70) % 2 == 0, 0.5, -0.5)
        growth = torch.tensor([4.0, 1.0, 0.0]).repeat_interleave(128)
        args.Q.tensor.mul_(0.1).add_(signs[:, None])
        args.K.tensor.mul_(0.1).add_(growth[:, None])
    check(args, FAMILY, scaling)


@pytest.mark.parametrize("case", LATE if EVERY else LATE[:1], ids=lambda case: case.name)
def test_the_largest_score_is_kept_where_sums_are_scaled_late(case):
    check(case.arguments(), FAMILY, "late")


#: Else clusters read pages, and blocks that are in none read many of them.
ADDED_UP_BEHIND = [case for case in FEW_QUERIES if case.name == "many rows, two groups"]


@pytest.mark.parametrize(
    "case", FEW_QUERIES if EVERY else ADDED_UP_BEHIND, ids=lambda case: case.name
)
def test_few_queries_are_right(case):
    check(case.arguments(), FEW, cluster=1, multiprocessors=16)


# A multiprocessor has two blocks of a cluster, so rows are no wider.
NARROW = [case for case in FEW_QUERIES if max(case.sizes[-2:]) <= 128]


@pytest.mark.parametrize("case", NARROW if EVERY else NARROW[1:2], ids=lambda case: case.name)
def test_parts_of_few_queries_meet_in_clusters(case):
    check(case.arguments(), FEW, cluster=8, multiprocessors=16)


MEETING = [
    Case("several clusters", sizes=(1, 4, 1, 2, 3700, 64, 64), options=sinks, statistics=True),
    Case("16 blocks", sizes=(1, 8, 1, 1, 1020, 128, 128)),
    Case("one block of keys", sizes=(2, 8, 2, 1, 60, 64, 64), options=sinks),
    Case(
        "parts without keys, and a sequence",
        sizes=(3, 8, 1, 2, 1000, 64, 64),
        lengths=((2, 1, 0), (70, 0, 1000)),
        statistics=True,
    ),
    Case("all rows", sizes=(1, 16, 1, 13, 500, 64, 64), keywords={"mask": BAND}),
]


@pytest.mark.parametrize("case", MEETING if EVERY else MEETING[:1], ids=lambda case: case.name)
def test_parts_meet_wherever_they_are(case):
    cluster = 16 if case.name == "16 blocks" else 8
    check(case.arguments(), FEW, cluster=cluster, multiprocessors=16)


def test_numbers_of_pages_are_read_again_and_again():
    """A warp holds those of 4 blocks; each of 3 blocks of a launch reads 7 or 8 blocks of keys."""
    case = Case(
        "many pages",
        sizes=(1, 4, 1, 1, 2900, 64, 64),
        lengths=((1,), (2900,)),
        page_size=16,
    )
    check(case.arguments(), FEW, tile=(64, 128), cluster=1, multiprocessors=3)


@pytest.mark.parametrize("cluster", (1, 8) if EVERY else (8,))
def test_an_infinite_value_stays_infinite(cluster):
    """In the last of few parts, where more would be added up at once."""
    draw = Draw(1, 8, 1, 1, 256, 64, 64, element="bfloat16")
    args = draw.arguments()
    args.V.tensor[..., -1, 0] = float("inf")
    check(args, FEW, cluster=cluster, multiprocessors=16)
    assert args.out.tensor[..., 0].isinf().all()
    assert args.out.tensor[..., 1:].isfinite().all()


@pytest.mark.parametrize("cluster", (1, 8) if EVERY else (8,))
def test_rows_that_are_no_numbers_have_no_statistics_either(cluster):
    args = Draw(1, 8, 1, 1, 256, 64, 64, element="bfloat16").arguments()
    args.Q.tensor[:, 0, :, 0] = NAN
    check(args, FEW, cluster=cluster, multiprocessors=16)
    assert args.lse.tensor[:, 0].isnan().all()


@pytest.mark.parametrize("cluster", (1, 8) if EVERY else (8,))
def test_parts_are_added_up_in_one_order(cluster):
    """Whoever comes last: of several clusters, and in each of them."""
    args = MEETING[0].arguments()
    compiled = check(args, FEW, cluster=cluster, multiprocessors=16)
    expected = [output.tensor.clone() for output in args.outputs.values()]
    for seed in (1, 2) if EVERY else (2,):
        compiled.run(args, multiprocessors=16, seed=seed)
        for output, before in zip(args.outputs.values(), expected, strict=True):
            assert torch.equal(output.tensor, before)


FP8 = [
    {"sizes": (2, 2, 1, 40, 150, 64), "lengths": (130, 7), "mask": masks.Causal("bottom_right")},
    {"sizes": (1, 2, 1, 200, 300, 128)},
    {"sizes": (1, 2, 2, 40, 100, 256), "mask": masks.Causal(), "softcap": 5.0},
    {
        "sizes": (1, 2, 1, 150, 70, 64),
        "mask": masks.Causal("bottom_right"),
        "statistics": ("score_max", "score_sum_exp"),
    },
]


@pytest.mark.parametrize("given", FP8 if EVERY else FP8[:1], ids=lambda given: str(given["sizes"]))
def test_8_bit_floats_are_right(given):
    check(fp8_arguments(**given), "sm90.sdpa_forward_fp8")


def test_keys_that_are_multiplied_with_0_count_alike():
    """As they do where all of them were 0 before they were scaled."""
    args = fp8_arguments(**FP8[0])
    args.further["descale_k"].tensor[0] = 0.0
    check(args, "sm90.sdpa_forward_fp8")


END = masks.Causal("bottom_right")
FP8_PACKED = {
    "a neighbour of NaN": {
        "sizes": (2, 1, 64),
        "lengths": ((40, 0, 33), (70, 50, 150)),
        "mask": END,
    },
    "an empty one, 224 keys": {
        "sizes": (4, 2, 128),
        "lengths": ((70, 0, 129), (33, 0, 200)),
        "mask": END,
        "tile": (128, 224),
    },
    "several tiles of 160 keys": {
        "sizes": (2, 2, 128),
        "lengths": ((1, 65, 0, 3, 1), (300, 160, 33, 0, 1)),
        "tile": (128, 160),
    },
    "192 keys": {
        "sizes": (3, 1, 128),
        "lengths": ((65, 0, 130), (190, 3, 290)),
        "mask": masks.SlidingWindow(70, 3, "bottom_right"),
        "softcap": 5.0,
        "tile": (128, 192),
    },
    "96 keys of 256 columns": {
        "sizes": (2, 1, 256),
        "lengths": ((40, 0, 33), (97, 20, 30)),
        "mask": masks.Causal(),
        "tile": (128, 96),
    },
    "a table": {
        "sizes": (2, 1, 64),
        "lengths": ((130, 0, 70), (300, 60, 129)),
        "mask": END
        & masks.BlockSparse(
            torch.tensor([[[[True, False, True], [False, True, True]]]]), block_shape=(128, 128)
        ),
    },
}


@pytest.mark.parametrize("name", FP8_PACKED if EVERY else [*FP8_PACKED][:1])
def test_packed_8_bit_floats_are_right(name):
    given = dict(FP8_PACKED[name])
    tile = given.pop("tile", None)
    check(packed_fp8_arguments(**given), "sm90.sdpa_forward_fp8", tile=tile)


FP8_PAGED = {
    "16 keys": {"sizes": (3, 2, 1, 40, 64), "lengths": (150, 7, 0), "size": 16, "mask": END},
    "256 keys of 256 columns": {"sizes": (2, 2, 1, 40, 256), "lengths": (300, 20), "size": 256},
    "64 of 192 keys, 80 columns": {
        "sizes": (2, 2, 2, 130, 80),
        "lengths": (300, 65),
        "size": 64,
        "seq_lens_q": torch.tensor([130, 3], dtype=torch.int32),
        "mask": masks.SlidingWindow(70, 3, "bottom_right"),
        "tile": (128, 192),
    },
    "32 of 160 keys, statistics": {
        "sizes": (2, 4, 2, 33, 128),
        "lengths": (240, 160),
        "size": 32,
        "softcap": 5.0,
        "statistics": ("lse", "score_max", "score_sum_exp"),
        "tile": (128, 160),
    },
    "8 of 96 keys": {
        "sizes": (1, 1, 1, 20, 256),
        "lengths": (97,),
        "size": 8,
        "mask": masks.Causal("bottom_right"),
        "tile": (128, 96),
    },
    "a table of blocks": {
        "sizes": (2, 2, 1, 150, 64),
        "lengths": (301, 128),
        "size": 128,
        "mask": masks.BlockSparse(
            torch.tensor([[[[True, False, True, True], [False, True, True, False]]]]),
            block_shape=(128, 128),
        ),
    },
}


@pytest.mark.parametrize("name", FP8_PAGED if EVERY else [*FP8_PAGED][:1])
def test_8_bit_floats_in_pages_are_right(name):
    given = dict(FP8_PAGED[name])
    tile = given.pop("tile", None)
    check(paged_fp8_arguments(**given), "sm90.sdpa_forward_fp8", tile=tile)


def paged_arguments(sizes, lengths, size, statistics=("lse",), make=None, **options):
    """The same of 16 bits. make: from the draw to further options."""
    B, H, H_kv, S_q, D, D_v = sizes
    draw = Draw(B, H, H_kv, S_q, keys_of(lengths, size), D, D_v, element=BF16, pad=8)
    return draw.arguments(
        **pages_of(draw, lengths, size),
        **{name: draw.lse() for name in statistics},
        **(make(draw) if make else {}),
        **options,
    )


PAGED = {
    "16 keys": {"sizes": (3, 2, 1, 41, 64, 64), "lengths": (150, 1, 0), "size": 16, "mask": END},
    "64 keys of 128 columns": {
        "sizes": (2, 4, 2, 131, 128, 128),
        "lengths": (300, 65),
        "size": 64,
        "mask": END,
    },
    "256 keys of 256 columns, a sink": {
        "sizes": (2, 2, 1, 41, 256, 256),
        "lengths": (300, 20),
        "size": 256,
        "make": lambda d: {"sink": d.wides(d.H)},
        "tile": (128, 64),
    },
    "8 keys of 192 and 128 columns, a window": {
        "sizes": (2, 2, 2, 130, 192, 128),
        "lengths": (210, 65),
        "size": 8,
        "seq_lens_q": torch.tensor([130, 3], dtype=torch.int32),
        "mask": masks.SlidingWindow(70, 3, "bottom_right"),
    },
    "16 of 80 keys, 248 columns, late": {
        "sizes": (1, 2, 1, 33, 256, 248),
        "lengths": (177,),
        "size": 16,
        "mask": END,
        "tile": (128, 80),
        "scaling": "late",
    },
    "three groups, 256 keys, statistics": {
        "sizes": (2, 2, 1, 201, 64, 64),
        "lengths": (300, 129),
        "size": 256,
        "softcap": 5.0,
        "statistics": ("lse", "score_max", "score_sum_exp"),
        "tile": (192, 128),
    },
    "32 of 96 keys, 72 of 96 columns": {
        "sizes": (2, 2, 1, 200, 96, 72),
        "lengths": (130, 96),
        "size": 32,
        "tile": (192, 96),
    },
    "16 of 160 keys, 80 columns": {
        "sizes": (2, 2, 1, 40, 128, 80),
        "lengths": (321, 160),
        "size": 16,
        "mask": END,
        "tile": (128, 160),
    },
    "a bias": {
        "sizes": (2, 2, 1, 70, 80, 96),
        "lengths": (300, 65),
        "size": 32,
        "make": biased(0, 1, 2, 3),
        "mask": END,
    },
    "a table of blocks": {
        "sizes": (2, 2, 1, 150, 64, 64),
        "lengths": (301, 128),
        "size": 128,
        "mask": masks.BlockSparse(
            torch.tensor([[[[True, False, True, True], [False, True, True, False]]]]),
            block_shape=(128, 128),
        ),
    },
}


@pytest.mark.parametrize("name", PAGED if EVERY else [*PAGED][:1])
def test_pages_are_right(name):
    given = dict(PAGED[name])
    chosen = {word: given.pop(word) for word in ("tile", "scaling") if word in given}
    check(paged_arguments(**given), FAMILY, **chosen)

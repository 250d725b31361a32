"""Packed queries, with packed keys or with keys in pages, on Hopper: PTX runs in the emulator.

With KERNEL_API_EMULATE in the environment every case runs, else those in front.
"""

from __future__ import annotations

import pytest
import torch
from support.ptx.kernel import EmulatedKernel
from support.sampling import some
from support.sdpa_cases import Case, on_meta
from support.sdpa_fp8 import check as check_8_bits
from support.sdpa_fp8 import paged_fp8_arguments

import kernel_api as ka
from kernel_api import masks
from kernel_api.arguments import Dropout
from kernel_api.verification import FACTOR_REORDERED, conduct, judge

pytestmark = pytest.mark.compile

FEW, MANY, LATENT = "sm90.sdpa_decode", "sm90.sdpa_forward", "sm90.sdpa_latent"
END = masks.Causal("bottom_right")
BAND = masks.SlidingWindow(70, 3, "bottom_right")

#: More than a warp looks at together, most of them of one query, two of several tiles.
MIXED = (*(1,) * 17, 0, 0, 50, 3, *(1,) * 18, 70)
KEYS = (*(40,) * 38, 90, 75)


def sinks(draw):
    return {"sink": draw.wides(draw.H)}


def in_a_table(draw):
    table = draw.random(draw.B, draw.H, 1, 2) > -0.5
    return {"mask": END & masks.BlockSparse(table, block_shape=(64, 128))}


def case(family, B, heads, columns, lengths, how=None, **given):
    """heads: (H, H_kv); columns: (D, D_v); how: the kernel's design, and how it runs."""
    most = max(lengths[1]) + 2
    sizes = (B, *heads, 1, most, *columns)
    return family, Case("", sizes=sizes, packed=True, lengths=lengths, **given), how or {}


#: Multiprocessors are 16 unless `how` says so.
CASES = {
    "a list, pages": case(
        FEW, 6, (4, 2), (64, 64), ((1, 0, 50, 3, 1, 70), (40, 40, 90, 10, 290, 75)),
        {"tile": (64, 128), "cluster": 1},
        page_size=16, options=sinks, statistics=True, keywords={"mask": END},
    ),
    "a list of more than a warp, pages": case(
        *(FEW, 40, (4, 2), (64, 64), (MIXED, KEYS), {"tile": (64, 128), "cluster": 1}),
        page_size=16, options=sinks, statistics=True, keywords={"mask": END},
    ),
    "one query each, pages": case(
        *(FEW, 5, (8, 1), (64, 64), ((1, 1, 0, 1, 1), (300, 20, 30, 0, 131)), {"cluster": 1}),
        page_size=64,
    ),
    "a list in clusters": case(
        *(FEW, 3, (8, 2), (64, 64), ((30, 1, 2), (290, 31, 400)), {"cluster": 8}),
        options=sinks, statistics=True, keywords={"mask": BAND},
    ),
    "clusters, pages": case(
        *(FEW, 3, (8, 2), (64, 64), ((1, 0, 2), (290, 31, 400)), {"cluster": 8}),
        page_size=16, keywords={"mask": END},
    ),
    "clusters ask ahead, pages": case(
        *(FEW, 40, (4, 2), (64, 64), (MIXED, KEYS), {"tile": (64, 64), "cluster": 8}),
        page_size=16,
    ),
    "clusters ask ahead": case(
        *(FEW, 3, (8, 2), (64, 64), ((30, 1, 2), (290, 31, 400)), {"cluster": 8})
    ),
    "sums by a kernel behind": case(
        *(FEW, 2, (8, 1), (128, 128), ((12, 9), (1000, 77)), {"cluster": 1}),
        options=sinks, statistics=True, keywords={"mask": BAND},
    ),
    "sums of a list by a kernel behind, pages": case(
        *(FEW, 3, (8, 1), (128, 128), ((12, 1, 9), (1000, 0, 77)), {"tile": (64, 128)}),
        page_size=32, options=sinks, keywords={"mask": BAND},
    ),
    "more sequences than the schedule has threads": case(
        *(FEW, 530, (2, 1), (64, 64), ((*(1,) * 528, 40, 1), (*(3,) * 527, 600, 30, 9))),
        {"tile": (64, 128)}, page_size=64,
    ),
    "one part": case(
        *(FEW, 3, (4, 2), (64, 64), ((30, 1, 2), (70, 31, 90))),
        {"cluster": 1, "multiprocessors": 2}, options=sinks, statistics=True,
    ),
    "256 columns, pages": case(
        FEW, 2, (4, 2), (256, 256), ((40, 1), (150, 31)), page_size=64, keywords={"mask": END}
    ),
    "a table, pages": case(
        FEW, 2, (4, 2), (64, 64), ((50, 1), (150, 31)), page_size=64, options=in_a_table
    ),
    "many queries, pages": case(
        *(MANY, 4, (2, 1), (64, 64), ((150, 1, 0, 30), (300, 77, 40, 0))),
        page_size=16, statistics=True, keywords={"mask": END},
    ),
    "many queries, dropout, pages": case(
        *(MANY, 2, (2, 1), (64, 64), ((70, 3), (100, 77))),
        page_size=128, keywords={"dropout": Dropout(0.3, torch.tensor(0x1234_5678), 5)},
    ),
    "blocks that share a multiprocessor, pages": case(
        *(MANY, 4, (2, 1), (128, 128), ((150, 1, 0, 30), (300, 77, 40, 0)), {"tile": (64, 64)}),
        page_size=16, statistics=True, keywords={"mask": END},
    ),
    "blocks of 96 columns that share a multiprocessor": case(
        *(MANY, 3, (2, 1), (96, 80), ((70, 1, 30), (300, 77, 40)), {"tile": (64, 64)}),
        keywords={"mask": BAND},
    ),
    "blocks of 192 columns that share a multiprocessor, pages": case(
        *(MANY, 3, (2, 1), (192, 128), ((70, 1, 30), (150, 77, 40)), {"tile": (64, 64)}),
        page_size=64, keywords={"mask": END},
    ),
    "latent, pages": case(
        *(LATENT, 3, (20, 1), (576, 512), ((5, 1, 0), (300, 70, 9))),
        page_size=16, options=sinks, keywords={"mask": END, "values_in_keys": True},
    ),
    "latent": case(
        *(LATENT, 3, (20, 1), (320, 256), ((1, 0, 7), (150, 70, 300))),
        statistics=True, keywords={"mask": END, "values_in_keys": True},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", some(CASES, 1))
def test_packed_sequences_are_attended_to(name):
    family, problem, how = CASES[name]
    how = {"multiprocessors": 16, **how}
    args = problem.arguments()
    offered = ka.get_kernels(on_meta(args), cc="sm_90a", providers=["cutedsl"])
    kernels = [
        kernel
        for kernel in offered
        if kernel.family == family
        and how.get("tile") in (None, kernel.metadata.design.tile_shape)
        and getattr(kernel.metadata.design, "cluster", 1) == how.get("cluster", 1)
    ]
    assert kernels, ka.explain(on_meta(args), cc="sm_90a")
    compiled = EmulatedKernel.compile(kernels[0], args)
    assert compiled.artifact.resources.spill_bytes == 0
    run = {"multiprocessors": how["multiprocessors"]}
    broken = conduct(args, lambda: compiled.run(args, **run))
    assert broken is None, broken
    verdict = judge(args, FACTOR_REORDERED)
    assert verdict, f"{kernels[0].metadata.kernel_name}: {verdict}"


#: Of `paged_fp8_arguments`, beside the family.
OF_8_BITS = {
    "few": {
        "family": "sm90.sdpa_decode_fp8", "sizes": (3, 8, 2, 3, 64), "rows": (1, 0, 5),
        "lengths": (300, 130, 20), "size": 64,
    },
    "few, bfloat16 queries": {
        "family": "sm90.sdpa_decode_fp8", "sizes": (3, 8, 2, 3, 128), "rows": (1, 30, 2),
        "lengths": (300, 130, 2), "size": 16, "queries": torch.bfloat16, "mask": END,
    },
    "many": {
        "family": "sm90.sdpa_forward_fp8", "sizes": (3, 2, 1, 3, 64), "rows": (150, 0, 5),
        "lengths": (300, 130, 20), "size": 64, "mask": END,
    },
    "many, float16 queries": {
        "family": "sm90.sdpa_forward_mixed", "sizes": (3, 2, 1, 3, 64), "rows": (70, 0, 5),
        "lengths": (150, 130, 20), "size": 24, "queries": torch.float16, "mask": END,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", some(OF_8_BITS, 1))
def test_packed_sequences_attend_to_8_bits(name):
    given = dict(OF_8_BITS[name])
    check_8_bits(
        paged_fp8_arguments(**{k: v for k, v in given.items() if k != "family"}),
        given["family"],
        every=True,
        multiprocessors=12,
    )

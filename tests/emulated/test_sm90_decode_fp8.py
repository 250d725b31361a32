"""Attention of few queries to 8-bit floats for Hopper is right: its PTX runs in the emulator.

With KERNEL_API_EMULATE in the environment every case runs, else those in front.
"""

from __future__ import annotations

import pytest
import torch
from support.sampling import some
from support.sdpa_fp8 import arguments_of, check

from kernel_api import masks

pytestmark = pytest.mark.compile

FAMILY = "sm90.sdpa_decode_fp8"
END = masks.Causal("bottom_right")
EVERY = ("lse", "score_max", "score_sum_exp")

#: Of `arguments_of`.
CASES = {
    "bfloat16 queries, pages": {
        "sizes": (2, 8, 2, 3, 96), "lengths": (300, 130), "size": 16, "queries": torch.bfloat16,
    },
    "pages, several queries": {
        "sizes": (2, 8, 2, 3, 128), "lengths": (300, 130), "size": 16, "mask": END,
    },
    "padded, all statistics": {
        "sizes": (2, 8, 1, 2, 400, 64), "lengths": (391, 0), "statistics": EVERY,
    },
    "one block": {"sizes": (1, 16, 2, 1, 30, 128)},
    "two tiles": {"sizes": (1, 40, 1, 2, 200, 128), "softcap": 5.0},
    "256 columns": {"sizes": (2, 4, 2, 1, 300, 256), "lengths": (300, 77)},
    "80 of 128 columns": {"sizes": (1, 8, 2, 1, 260, 80), "mask": masks.SlidingWindow(90, 0)},
    "large pages, no keys": {"sizes": (3, 8, 2, 1, 64), "lengths": (300, 0, 64), "size": 256},
    "no descales of one": {"sizes": (2, 8, 2, 1, 70, 64), "descale_q": None},
    "bfloat16 queries": {"sizes": (2, 8, 2, 3, 300, 128), "queries": torch.bfloat16, "mask": END},
    "float16 queries": {
        "sizes": (2, 8, 1, 2, 400, 64), "lengths": (391, 0), "queries": torch.float16,
        "statistics": EVERY, "softcap": 5.0,
    },
    "float16 queries, 256 columns": {
        "sizes": (2, 4, 2, 1, 300, 256), "queries": torch.float16, "descale_k": None,
    },
    "bfloat16 queries, 64 columns": {"sizes": (2, 8, 2, 3, 300, 64), "queries": torch.bfloat16},
    "float16 queries, 80 of 128 columns": {
        "sizes": (1, 40, 1, 2, 200, 80), "queries": torch.float16,
    },
}  # fmt: skip


def few(args):
    check(args, FAMILY, every=True, multiprocessors=12)


@pytest.mark.parametrize("name", some(CASES, 1))
def test_few_queries_attend_to_8_bits(name):
    few(arguments_of(CASES[name]))


@pytest.mark.parametrize("number", some(["inf", "nan", "-inf"], 1))
def test_what_is_no_number_stays_in_its_row(number):
    args = arguments_of(CASES["bfloat16 queries, pages"])
    Q, out = args.Q.tensor, args.out.tensor
    Q[1, 3, 1, 7] = float(number)
    few(args)
    rows = out.isnan().any(-1)
    assert rows[1, 3, 1]
    assert rows.sum() == 1

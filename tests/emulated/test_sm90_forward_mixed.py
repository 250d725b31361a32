"""Attention of many 16-bit queries to 8-bit floats is right: its PTX runs in the emulator.

With KERNEL_API_EMULATE in the environment every case runs, else those in front.
"""

from __future__ import annotations

import pytest
import torch
from support.sampling import some
from support.sdpa_fp8 import arguments_of, check

from kernel_api import masks

pytestmark = pytest.mark.compile

FAMILY = "sm90.sdpa_forward_mixed"
END = masks.Causal("bottom_right")
EVERY = ("lse", "score_max", "score_sum_exp")

#: Of `arguments_of`.
CASES = {
    "pages that divide no tile": {
        "sizes": (2, 4, 2, 100, 64), "lengths": (130, 70), "size": 24, "mask": END,
        "queries": torch.bfloat16,
    },
    "packed, a neighbour of NaN": {
        "sizes": (2, 1, 64), "lengths": ((40, 0, 33), (70, 50, 150)), "queries": torch.float16,
    },
    "128 columns": {"sizes": (2, 4, 2, 150, 200, 128), "mask": END, "queries": torch.bfloat16},
    "padded, 80 of 96 columns": {
        "sizes": (2, 4, 2, 70, 200, 80), "lengths": (190, 0), "queries": torch.float16,
        "softcap": 5.0, "statistics": EVERY,
    },
    "192 columns": {"sizes": (1, 4, 2, 70, 100, 192), "queries": torch.bfloat16},
    "256 columns, large pages": {
        "sizes": (2, 2, 1, 40, 256), "lengths": (300, 0), "size": 256, "queries": torch.bfloat16,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", some(CASES, 1))
def test_many_queries_attend_to_8_bits(name):
    check(arguments_of(CASES[name]), FAMILY)

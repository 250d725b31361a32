"""Attention of 8-bit floats for Ampere is right: its PTX runs in the emulator, without a GPU.

With KERNEL_API_EMULATE in the environment every case runs, else those in front.
"""

from __future__ import annotations

import pytest
import torch
from support.sampling import some
from support.sdpa_fp8 import arguments_of, check, fp8_arguments

import kernel_api as ka
from kernel_api import masks

pytestmark = pytest.mark.compile

FAMILY = "sm80.sdpa_forward_fp8"
END = masks.Causal("bottom_right")
EVERY = ("lse", "score_max", "score_sum_exp")

#: Of `arguments_of`.
CASES = {
    "packed, a neighbour of NaN": {
        "sizes": (2, 1, 64), "lengths": ((40, 0, 33), (70, 50, 150)), "mask": END,
    },
    "16-bit queries, pages": {
        "sizes": (2, 4, 2, 40, 64), "lengths": (130, 70), "size": 24, "queries": torch.bfloat16,
    },
    "padded": {"sizes": (2, 4, 2, 70, 100, 64), "lengths": (90, 0), "mask": END},
    "16-bit queries, 80 columns": {
        "sizes": (1, 4, 2, 70, 100, 80), "queries": torch.float16, "softcap": 5.0,
        "statistics": EVERY,
    },
    "128 columns, a window": {
        "sizes": (1, 4, 2, 70, 200, 128), "mask": masks.SlidingWindow(40, 3), "descale_v": None,
    },
    "packed 16-bit queries, pages": {
        "sizes": (3, 4, 2, 1, 64), "rows": (40, 0, 3), "lengths": (130, 70, 20), "size": 24,
        "queries": torch.bfloat16, "mask": END,
    },
    "packed, pages": {
        "sizes": (3, 4, 2, 1, 64), "rows": (40, 0, 3), "lengths": (130, 70, 20), "size": 24,
    },
    "256 columns, large pages": {"sizes": (2, 2, 1, 40, 256), "lengths": (300, 0), "size": 256},
}  # fmt: skip


@pytest.mark.parametrize("name", some(CASES, 1))
def test_8_bit_floats_are_attended_to(name):
    check(arguments_of(CASES[name]), FAMILY, "sm_80")


def test_floats_of_a_wider_range_are_attended_to():
    args = fp8_arguments((1, 2, 1, 20, 40, 64))
    Q, K, V, out = args.tensors
    options = {name: args.launch_values[name] for name in ("descale_q", "descale_k", "descale_v")}
    wide = [one.to(torch.float8_e5m2) for one in (Q, K, V)]
    check(ka.SdpaArguments(*wide, out, **options), FAMILY, "sm_80")

"""Attention of 8-bit floats for Ampere is right: its PTX runs in the emulator, without a GPU.

With KERNEL_API_EMULATE in the environment every case runs, else those in front.
"""

from __future__ import annotations

import pytest
import torch
from support.ptx.kernel import EmulatedKernel
from support.sampling import some
from support.sdpa_cases import on_meta
from support.sdpa_fp8 import fp8_arguments, packed_fp8_arguments, paged_fp8_arguments

import kernel_api as ka
from kernel_api import masks
from kernel_api.verification import FACTOR_REORDERED, conduct, judge

pytestmark = pytest.mark.compile

FAMILY = "sm80.sdpa_forward_fp8"
END = masks.Causal("bottom_right")
EVERY = ("lse", "score_max", "score_sum_exp")

#: As of test_sm90_forward_mixed.py.
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
    "256 columns, large pages": {"sizes": (2, 2, 1, 40, 256), "lengths": (300, 0), "size": 256},
}  # fmt: skip


def arguments(name):
    given = dict(CASES[name])
    if "size" in given:
        return paged_fp8_arguments(**given)
    if len(given["sizes"]) == 3:
        return packed_fp8_arguments(**given)
    return fp8_arguments(**given)


def check(args):
    offered = ka.get_kernels(on_meta(args), cc="sm_80", providers=["cutedsl"])
    kernel = next(one for one in offered if one.family == FAMILY)
    compiled = EmulatedKernel.compile(kernel, args, "sm_80")
    assert compiled.artifact.resources.spill_bytes == 0
    broken = conduct(args, lambda: compiled.run(args))
    assert broken is None, broken
    verdict = judge(args, FACTOR_REORDERED)
    assert verdict, f"{kernel.metadata.kernel_name}: {verdict}"


@pytest.mark.parametrize("name", some(CASES, 2))
def test_8_bit_floats_are_attended_to(name):
    check(arguments(name))


def test_floats_of_a_wider_range_are_attended_to():
    args = fp8_arguments((1, 2, 1, 20, 40, 64))
    Q, K, V, out = args.tensors
    options = {name: args.launch_values[name] for name in ("descale_q", "descale_k", "descale_v")}
    wide = [one.to(torch.float8_e5m2) for one in (Q, K, V)]
    check(ka.SdpaArguments(*wide, out, **options))

"""Attention drops what its definition says, in tiles that begin anywhere in a group of 32 keys: PTX
runs in the emulator, without a GPU.

With KERNEL_API_EMULATE in the environment every case runs, else those in front.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from support.ptx.kernel import EmulatedKernel
from support.sampling import some
from support.sdpa import Draw, backward_of, run, uniform
from support.sdpa_cases import F16, Case, documents, dropped, in_order, on_meta
from support.sdpa_fp8 import fp8_arguments

import kernel_api as ka
from kernel_api import masks
from kernel_api.arguments import Dropout
from kernel_api.verification import FACTOR_REORDERED, conduct, judge

pytestmark = pytest.mark.compile

FORWARD, FORWARD_FP8, BACKWARD = "sm90.sdpa_forward", "sm90.sdpa_forward_fp8", "sm90.sdpa_backward"
OLDER_FORWARD, OLDER_BACKWARD = "sm80.sdpa_forward", "sm80.sdpa_backward"
END = {"mask": masks.Causal("bottom_right")}


def compiled(args: Any, family: str, tile: tuple[int, int]) -> EmulatedKernel:
    cc = "sm_80" if family.startswith("sm80") else "sm_90a"
    offered = ka.get_kernels(on_meta(args), cc=cc, providers=["cutedsl"])
    kernels = [one for one in offered if one.family == family]
    found = [one for one in kernels if one.metadata.design.tile_shape == tile]
    assert found, ka.explain(on_meta(args), cc=cc)
    return EmulatedKernel.compile(found[0], args, cc)


def problem(family: str, sizes: tuple[int, ...], **given: Any) -> Any:
    case = Case("", sizes, **{"options": dropped, **given})
    return case.backward() if family.endswith("backward") else case.arguments()


def of_documents(draw: Draw) -> dict[str, Any]:
    return {**dropped(draw), **documents(128, 128, further=masks.Causal())(draw)}


PACKED = {"packed": True, "lengths": ((33, 0, 20), (150, 9, 70)), "keywords": END}
PROBLEMS = {
    "128 keys, drawn ahead": (
        BACKWARD, (64, 128), lambda name: problem(name, (1, 4, 2, 130, 150, 128, 120)),
    ),
    "48 keys, of two groups": (
        BACKWARD, (64, 48), lambda name: problem(name, (1, 1, 1, 66, 150, 256, 248)),
    ),
    "80 keys": (FORWARD, (128, 80), lambda name: problem(name, (1, 2, 1, 70, 250, 192, 192))),
    "16 keys": (OLDER_FORWARD, (64, 16), lambda name: problem(name, (1, 2, 1, 66, 75, 256, 200))),
    "16 keys, the gradient": (
        OLDER_BACKWARD, (64, 16), lambda name: problem(name, (1, 2, 1, 66, 75, 128, 120)),
    ),
    "112 keys": (FORWARD, (128, 112), lambda name: problem(name, (1, 1, 1, 70, 250, 192, 128))),
    "96 keys": (
        FORWARD, (128, 96), lambda name: problem(name, (1, 1, 1, 70, 250, 192, 192), element=F16),
    ),
    "96 keys of 8 bits": (
        FORWARD_FP8, (128, 96),
        lambda name: fp8_arguments(sizes=(1, 2, 1, 40, 150, 256), dropout=Dropout(0.3, 5, 6)),
    ),
    "packed": (FORWARD, (128, 128), lambda name: problem(name, (3, 2, 1, 1, 1, 64, 64), **PACKED)),
    "packed, 80 keys": (
        FORWARD, (128, 80), lambda name: problem(name, (3, 2, 1, 1, 1, 192, 192), **PACKED),
    ),
    "packed, 16 keys": (
        OLDER_FORWARD, (64, 16), lambda name: problem(name, (3, 2, 1, 1, 1, 192, 192), **PACKED),
    ),
    "packed, the gradient": (
        BACKWARD, (64, 64), lambda name: problem(name, (3, 2, 1, 1, 1, 64, 64), **PACKED),
    ),
    "packed, the gradient, drawn ahead": (
        BACKWARD, (64, 128), lambda name: problem(name, (3, 2, 1, 1, 1, 64, 64), **PACKED),
    ),
    "in order": (
        BACKWARD, (64, 64),
        lambda name: problem(
            name, (2, 2, 2, 200, 300, 64, 64), gradient=in_order, keywords=END,
            lengths=((200, 70), (300, 130)),
        ),
    ),
    "documents, drawn ahead": (
        BACKWARD, (64, 128),
        lambda name: problem(name, (1, 2, 1, 390, 390, 64, 56), options=of_documents),
    ),
    "documents in order": (
        BACKWARD, (64, 64),
        lambda name: problem(
            name, (2, 2, 1, 390, 390, 64, 64), gradient=in_order, options=of_documents,
        ),
    ),
    "packed, 48 keys": (
        BACKWARD, (64, 48), lambda name: problem(name, (3, 2, 1, 1, 1, 256, 256), **PACKED),
    ),
    "packed, 16 keys, the gradient": (
        OLDER_BACKWARD, (64, 16), lambda name: problem(name, (3, 2, 1, 1, 1, 64, 64), **PACKED),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", some(PROBLEMS, 2))
def test_zeros_are_those_of_the_reference(name):
    family, tile, made = PROBLEMS[name]
    args = made(family)
    kernel = compiled(args, family, tile)
    broken = conduct(args, lambda: kernel.run(args))
    assert broken is None, broken
    verdict = judge(args, FACTOR_REORDERED)
    assert verdict, f"{kernel.kernel.metadata.kernel_name}: {verdict}"


# Probabilities ---------------------------------------------------------------------------

S, S_KV, SEED, OFFSET = 33, 40, 71, 5
#: Of one head: numbers of which one is the least that there is, and one the largest.
DRAWN = torch.tensor([[uniform(i, j, OFFSET, SEED) for j in range(S_KV)] for i in range(S)])
STEP = 2.0**-16
MIDDLE = float(DRAWN[7, 13])
PROBABILITIES = [
    MIDDLE, MIDDLE + 2.0**-24, 1 - STEP, 1 - STEP / 2, 0.0, STEP / 2,
    1 - 2.0**-24, 1 - 2.0**-40,
]  # fmt: skip


def dropping(p: float) -> tuple[Any, Any]:
    """Both passes: with all scores 0 and V = 1, out is what was kept of 1 / N, and so is the
    transpose of dV with dO = 1."""
    q, k = (torch.zeros(1, 1, n, 64, dtype=torch.float16) for n in (S, S_KV))
    v, dO = (torch.eye(n, 64, dtype=torch.float16).expand(1, 1, n, 64) for n in (S_KV, S))
    out, lse = torch.empty_like(q), torch.full((1, 1, S), math.log(S_KV))
    dropout = Dropout(p, torch.tensor(SEED, dtype=torch.int32), torch.tensor(OFFSET))
    args = ka.SdpaArguments(q, k, v.contiguous(), out, lse, dropout=dropout)
    return args, backward_of(args, dO.contiguous())


@pytest.mark.parametrize(
    ("forward", "backward"),
    some(
        [
            ((FORWARD, (128, 128)), (BACKWARD, (64, 128))),
            ((FORWARD, (128, 128)), (BACKWARD, (64, 64))),
            ((OLDER_FORWARD, (64, 32)), (OLDER_BACKWARD, (64, 16))),
        ],
        1,
    ),
)
def test_kept_is_what_is_not_below_the_probability(forward, backward):
    for p in PROBABILITIES:
        kept = DRAWN.ge(torch.tensor(p, dtype=torch.float32))
        args, gradient = dropping(p)
        run(args)
        assert torch.equal(args.out.tensor[0, 0, :, :S_KV] > 0, kept), p
        for one, (family, tile) in ((args, forward), (gradient, backward)):
            compiled(one, family, tile).run(one)
        for found in (args.out.tensor, gradient.outputs["dV"].tensor.mT):
            assert torch.equal(found[0, 0, :S, :S_KV] > 0, kept), p
            assert torch.isfinite(found).all()

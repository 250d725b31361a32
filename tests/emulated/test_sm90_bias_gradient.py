"""A bias that comes to shared memory with the queries in Hopper's attention gradient, and its own
gradient, which is made of what blocks have.

With KERNEL_API_EMULATE in the environment every case runs, else those in front.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from support.ptx.kernel import EmulatedKernel
from support.sdpa import NAN, Draw
from support.sdpa_cases import F16, Case, on_meta

import kernel_api as ka
from kernel_api import masks
from kernel_api.dtypes import dtype
from kernel_api.verification import FACTOR_REORDERED, conduct, judge

pytestmark = pytest.mark.compile

EVERY = bool(os.environ.get("KERNEL_API_EMULATE"))
CAUSAL = {"mask": masks.Causal("bottom_right")}
ALL = 0, 1, 2, 3


def around(draw: Draw, modes: tuple[int, ...], room: int) -> torch.Tensor:
    """Of scores that have these modes; rows lie among NaN, with so many columns behind."""
    full = (draw.B, draw.H, draw.S_q, draw.S_kv)
    shape = [n if mode in modes else 1 for mode, n in enumerate(full)]
    found = torch.full((*shape[:-1], shape[-1] + room), NAN, dtype=dtype(draw.element).torch)
    return found[..., : shape[-1]]


def biased(*modes: int, room: int = 24, **further: Any) -> Any:
    def options(draw: Draw) -> dict[str, Any]:
        bias = around(draw, modes, room)
        bias.copy_(draw.random(*bias.shape))
        return {"bias": bias, **further}

    return options


def of_bias(*modes: int, room: int = 8) -> Any:
    return lambda draw: {"dBias": around(draw, modes, room)}


def expanded(draw: Draw) -> dict[str, Any]:
    """The same for all heads by a stride of 0, of which each has a gradient."""
    return {"bias": biased(0, 2, 3)(draw)["bias"].expand(draw.B, draw.H, draw.S_q, draw.S_kv)}


def with_others(draw: Draw) -> dict[str, Any]:
    return {**biased(*ALL)(draw), "alibi": draw.wides(draw.H) / 8, "sink": draw.wides(draw.H)}


def hiding(draw: Draw) -> dict[str, Any]:
    """Rows that see nothing, or one key."""
    bias = biased(*ALL)(draw)["bias"]
    bias[..., 3, :] = -torch.inf
    bias[..., 64, :-1] = -torch.inf
    return {"bias": bias}


def in_order(*modes: int) -> Any:
    return lambda draw: {**of_bias(*modes)(draw), "deterministic": True}


#: Cases, and what becomes of dBias; those in front are run every time.
CASES = [
    (Case("stored, causal", (1, 2, 1, 150, 264, 64, 64), options=biased(*ALL), keywords=CAUSAL,
          gradient=of_bias(*ALL)), "tiles"),
    (Case("added up, padded", (2, 4, 2, 150, 168, 64, 64), options=biased(2, 3),
          gradient=of_bias(2, 3), lengths=((150, 70), (30, 168))), "sums"),
    (Case("no gradient, 128", (1, 2, 1, 130, 136, 128, 128), options=biased(1, 2, 3)), "again"),
    (Case("stored, 128, in order", (2, 2, 2, 130, 264, 128, 120), options=biased(*ALL),
          gradient=in_order(*ALL)), "tiles"),
    (Case("stored, padded", (3, 2, 1, 150, 264, 64, 64), options=biased(*ALL),
          lengths=((150, 0, 70), (30, 200, 0)), gradient=of_bias(*ALL)), "tiles"),
    (Case("stored, a window", (1, 1, 1, 330, 392, 64, 64), options=biased(*ALL),
          keywords={"mask": masks.SlidingWindow(50, 9)}, gradient=of_bias(*ALL)), "tiles"),
    (Case("stored, shares", (1, 4, 2, 70, 152, 128, 128), options=biased(*ALL), keywords=CAUSAL,
          gradient=of_bias(*ALL)), "tiles"),
    (Case("stored, more queries than keys", (1, 1, 1, 330, 136, 64, 64), options=biased(*ALL),
          keywords=CAUSAL, gradient=of_bias(*ALL)), "tiles"),
    (Case("stored, others", (2, 2, 1, 70, 136, 64, 64), options=with_others,
          gradient=of_bias(*ALL)), "tiles"),
    (Case("stored, hides", (1, 1, 1, 70, 136, 128, 128), options=hiding,
          gradient=of_bias(*ALL)), "tiles"),
    (Case("stored, strides of 0", (1, 3, 1, 70, 136, 64, 64), options=expanded,
          gradient=of_bias(*ALL)), "tiles"),
    (Case("stored, float16", (1, 2, 1, 130, 136, 64, 64), options=biased(*ALL), element=F16,
          gradient=of_bias(*ALL)), "tiles"),
    (Case("added up, all modes", (1, 2, 1, 130, 136, 64, 64), options=biased(*ALL),
          gradient=of_bias(*ALL, room=3)), "sums"),
    (Case("added up, of batches", (2, 2, 1, 130, 264, 128, 128), options=biased(0, 2, 3),
          keywords=CAUSAL, gradient=of_bias(0, 2, 3)), "sums"),
    (Case("added up, of heads, shares", (1, 4, 2, 70, 152, 128, 128), options=biased(1, 2, 3),
          gradient=in_order(1, 2, 3)), "sums"),
    (Case("added up, float16", (3, 2, 1, 70, 136, 64, 64), options=biased(1, 2, 3), element=F16,
          keywords={"mask": masks.SlidingWindow(30, None)}, gradient=of_bias(1, 2, 3)), "sums"),
    (Case("softcap", (1, 2, 1, 70, 136, 64, 64), options=biased(*ALL, softcap=3.0),
          gradient=of_bias(*ALL)), "again"),
    (Case("again, lengths", (2, 2, 1, 70, 136, 128, 128), options=biased(2, 3),
          lengths=((70, 10), (30, 136)), gradient=of_bias(2, 3)), "again"),
    (Case("float16, no gradient", (1, 2, 1, 70, 136, 64, 64), options=biased(2, 3), element=F16,
          keywords=CAUSAL), "again"),
]  # fmt: skip


def kernel_of(args: Any, gradient: str) -> Any:
    offered = ka.get_kernels(on_meta(args), cc="sm_90a", providers=["cutedsl"])
    designs = [k for k in offered if getattr(k.metadata.design, "bias", "") == "tiles"]
    found = [k for k in designs if k.metadata.design.bias_gradient == gradient]
    assert found, ka.explain(on_meta(args), cc="sm_90a")
    return found[0]


@pytest.mark.parametrize(
    ("case", "gradient"), CASES if EVERY else CASES[:1], ids=lambda one: getattr(one, "name", "")
)
def test_gradients_are_right(case, gradient):
    args = case.backward()
    compiled = EmulatedKernel.compile(kernel_of(args, gradient), args)
    assert not compiled.artifact.resources.spill_bytes
    broken = conduct(args, lambda: compiled.run(args))
    assert broken is None, broken
    verdict = judge(args, FACTOR_REORDERED)
    assert verdict, verdict
    if args.deterministic:
        before = {name: output.tensor.clone() for name, output in args.outputs.items()}
        compiled.run(args, seed=1)
        assert all(torch.equal(before[n], one.tensor) for n, one in args.outputs.items())

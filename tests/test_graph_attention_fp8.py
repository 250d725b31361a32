"""Attention of 8-bit floats in graphs: what kernels compute, and what they do not, and why."""

from __future__ import annotations

import pytest
import torch
from support.graph_attention_fp8 import (
    BF16,
    E4M3,
    E5M2,
    FLOAT,
    HALF,
    SCALES,
    exact,
    executed,
    written,
)

from kernel_api.verification import compare


def launched(plan):
    return [step.title.split("_e4m3")[0].split("_f32")[0] for step in plan.steps]


@pytest.mark.parametrize("options", [{"sm_version": 80}, {"sm_version": 90, "element": E5M2}])
def test_other_gpus_and_other_floats_of_8_bits_have_the_portable_kernel(options):
    plan = written(**options).plans[0]
    assert [step.kind for step in plan.steps] == ["kernel", "kernel"]
    assert plan.steps[-1].title.startswith("sm80_sdpa_forward_fp8")
    assert not plan.refusals


@pytest.mark.parametrize("beside", [(), ("stats",)], ids=str)
@pytest.mark.parametrize("out", [HALF, BF16], ids=str)
def test_it_is_the_kernel_of_8_bit_floats_behind_the_product_of_scales(out, beside):
    plan = written(90, out=out, beside=beside).plans[0]
    assert launched(plan) == ["sm80_elementwise", "sm90_sdpa_forward_fp8"]
    assert not plan.refusals


KNOWN = {
    "tensors": {},
    "descale_q": {"known": ("descale_q",)},
    "scale of P": {"known": ("descale_s", "scale_s")},
    "host": {"of_host": ("scale_o",)},
}


@pytest.mark.parametrize("name", KNOWN)
def test_it_computes_what_is_written(name):
    g = written(beside=("stats",), **KNOWN[name])
    found = []
    for plan in (0, 1):
        data, outputs = executed(g, plan)
        found.append(outputs)
    assert g.plans[0].steps[-1].kind == "kernel" and g.plans[1].steps[0].kind == "torch"
    expected = exact(data)
    for one, plain in zip(*(outputs.values() for outputs in found), strict=True):
        assert not one.isnan().any() and not plain.isnan().any()
    by_kernel, by_torch = found
    assert compare(by_kernel["o"], expected["o"], by_torch["o"], factor=2.0)
    assert compare(by_kernel["stats"], expected["stats"], expected["stats"].float(), factor=3.0)


def test_scales_that_are_known_and_cancel_need_no_kernel():
    values = {**SCALES, "descale_v": 1.0, "descale_s": 1 / 64, "scale_s": 64.0, "scale_o": 1.0}
    g = written(90, known=tuple(values), values=values)
    assert launched(g.plans[0]) == ["sm90_sdpa_forward_fp8"]
    g = written(known=tuple(values), values=values)
    data, outputs = executed(g, 0, values)
    _, plain = executed(g, 1, values)
    assert compare(outputs["o"], exact(data, values)["o"], plain["o"], factor=2.0)


LEFT = {
    "amax_S": ({"beside": ("amax_S",)}, "kernels do not write Amax_S"),
    "both": ({"beside": ("amax_S", "amax_O")}, "kernels do not write Amax_S and Amax_O"),
    "O of 8 bits": ({"out": E4M3}, "kernels write O in 16 bits, not as FP8_E4M3"),
    "O of 32 bits": ({"out": FLOAT}, "sm90.sdpa_forward_fp8: out is float32"),
    "descale_k of the host": ({"of_host": ("descale_k",)}, "descale_k: numbers of the host"),
    "all of the host": (
        {"of_host": ("descale_v", "scale_s"), "known": ("descale_s", "scale_o")},
        "all that V is multiplied with: numbers of the host",
    ),
}


@pytest.mark.parametrize("name", LEFT)
def test_what_kernels_do_not_compute_is_left_to_torch_and_explained(name):
    options, why = LEFT[name]
    g = written(**{"sm_version": 90, **options})
    plan = g.plans[0]
    assert launched(plan) == ["torch: sdpa_fp8"]
    (refusal,) = plan.refusals
    assert refusal.node is g.nodes[0] and why in str(g.explain())


@pytest.mark.parametrize("name", ["both", "all of the host"])
def test_what_is_left_to_torch_is_what_torch_computes(name):
    g = written(**LEFT[name][0])
    found = [executed(g, plan)[1] for plan in (0, len(g.plans) - 1)]
    for one, other in zip(*(outputs.values() for outputs in found), strict=True):
        assert torch.equal(one, other)

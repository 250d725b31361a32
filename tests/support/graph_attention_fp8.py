"""Attention of 8-bit floats as a graph, what to give it, and what it should compute."""

from __future__ import annotations

import math

import torch

import kernel_api.graph as cudnn

FLOAT, HALF, BF16 = cudnn.data_type.FLOAT, cudnn.data_type.HALF, cudnn.data_type.BFLOAT16
E4M3, E5M2 = cudnn.data_type.FP8_E4M3, cudnn.data_type.FP8_E5M2

B, H, H_KV, S, T, D = 2, 4, 2, 37, 53, 32
SHAPES = {"q": (B, H, S, D), "k": (B, H_KV, T, D), "v": (B, H_KV, T, D)}
SCALE = 0.2
SCALES = {
    "descale_q": 0.7,
    "descale_k": 0.31,
    "descale_v": 1.9,
    "descale_s": 0.004,
    "scale_s": 251.0,
    "scale_o": 0.83,
}


def written(
    sm_version=None,
    element=E4M3,
    out=HALF,
    beside=(),
    known=(),
    of_host=(),
    values=SCALES,
    device="cpu",
):
    """A graph that is planned.

    Args:
        beside: Which of Stats, amax_S and amax_O are outputs, too.
        known, of_host: Scales that are known when the graph is made, and those that the host gives.
    """
    handle = cudnn.create_handle(device)
    g = cudnn.pygraph("", element, FLOAT, FLOAT, handle=handle, sm_version=sm_version)
    tensors = [g.tensor(shape, name=name) for name, shape in SHAPES.items()]
    for name, value in values.items():
        if name in known:
            tensors.append(g.tensor_scalar(value, FLOAT))
        else:
            by_value = {"is_pass_by_value": name in of_host, "data_type": FLOAT}
            tensors.append(g.tensor((1, 1, 1, 1), name=name, **by_value))
    results = g.sdpa_fp8(
        *tensors, attn_scale=SCALE, use_causal_mask=True, generate_stats=True, name="fp8"
    )
    for name, tensor in zip(("o", "stats", "amax_S", "amax_O"), results, strict=True):
        if name == "o" or name in beside:
            tensor.set_output(True).set_name(name).set_data_type(out if name == "o" else FLOAT)
    g.validate()
    g.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
    return g


def given_to(g, values=SCALES, device="cpu"):
    """What to execute it with, and its outputs."""
    generator = torch.Generator().manual_seed(0)
    data = {
        name: torch.randn(shape, generator=generator).to(torch.float8_e4m3fn)
        for name, shape in SHAPES.items()
    }
    for name, value in values.items():
        data[name] = torch.full((1, 1, 1, 1), value)
    names = {tensor.name: tensor for tensor in g.tensors}
    data = {name: one for name, one in data.items() if name in names}
    by_value = {name for name in data if names[name].is_pass_by_value}
    data |= {name: float(data[name]) for name in by_value}
    outputs = {
        t.name: torch.full(t.dim, float("nan"), dtype=getattr(torch, t.data_type.value))
        for t in g.outputs
    }
    data = {name: one if name in by_value else one.to(device) for name, one in data.items()}
    return data, {name: one.to(device) for name, one in outputs.items()}


def executed(g, plan, values=SCALES, device="cpu"):
    """The same behind the execution of a plan, on the CPU."""
    g.build_plan_at_index(plan)
    data, outputs = given_to(g, values, device)
    g.execute({**data, **outputs})
    on_cpu = ({n: one.cpu() for n, one in found.items()} for found in (data, outputs))
    return tuple(on_cpu) if device != "cpu" else (data, outputs)


def exact(data, values=SCALES):
    """In float64."""
    s, v, factor = _scores(data, values)
    return {"o": s.softmax(-1) @ v * factor, "stats": s.logsumexp(-1, keepdim=True)}


def allowance(data, values=SCALES):
    """What accumulators of tensor cores cut off, which have 14 bits behind products of 8 bits: of
    scores, and so of their exponentials."""
    s, v, factor = _scores(data, values)
    off = 2.0**-10 * (1 + s.masked_fill(s.isinf(), 0.0).abs().amax(-1, keepdim=True))
    return {"o": off * (s.softmax(-1) @ v.abs()) * abs(factor), "stats": off}


def _scores(data, values):
    """Scores, values of each head of queries, and what their sums are multiplied with."""
    q, k, v = (data[name].double() for name in "qkv")
    k, v = (x.repeat_interleave(H // H_KV, 1) for x in (k, v))
    s = SCALE * values["descale_q"] * values["descale_k"] * q @ k.mT
    s = s.masked_fill(torch.ones(S, T).triu(1).bool(), -math.inf)
    return s, v, math.prod(values[n] for n in ("descale_v", "descale_s", "scale_s", "scale_o"))

"""Attention written as products, masks and a softmax, and what torch computes of the same."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

import kernel_api.graph as cudnn
from kernel_api.providers.reference.philox import halves_apart
from kernel_api.verification import compare

HALF, BF16, FLOAT = cudnn.data_type.HALF, cudnn.data_type.BFLOAT16, cudnn.data_type.FLOAT
INT32 = cudnn.data_type.INT32
ADD, MAX = cudnn.reduction_mode.ADD, cudnn.reduction_mode.MAX
INFINITY = float("inf")
#: What kernels of attention for Hopper are called: of few queries, or keys, another one is faster.
ATTENTION = ("sm90_sdpa_forward", "sm90_sdpa_decode")

B, H, H_KV, S, T, D, D_V = 2, 4, 2, 37, 53, 40, 24
SCALE = 0.2137


@dataclass
class Written:
    """A graph, what to give it, and what it should compute.

    Attributes:
        data: By name of the tensor.
        heads: What of it is q, k and v as (B, H, S, D), where tensors have other modes.
        outputs: Names and tensors.
    """

    graph: cudnn.pygraph
    element: torch.dtype = torch.bfloat16
    data: dict = field(default_factory=dict)
    heads: dict = field(default_factory=dict)
    outputs: list = field(default_factory=list)

    def given(self, name, *shape, kind=None, like=None, stride=None, values=None):
        """An input with random numbers, or these."""
        if values is None:
            generator = torch.Generator().manual_seed(len(self.data) + 7)
            values = torch.randn(shape, generator=generator).to(kind or self.element)
        if stride is not None:
            size = 1 + sum((n - 1) * s for n, s in zip(values.shape, stride, strict=True))
            memory = torch.zeros(size, dtype=values.dtype)
            values = memory.as_strided(values.shape, stride).copy_(values)
        self.data[name] = values
        return self.graph.tensor(values.shape, values.stride(), values.dtype, name=name)

    def output(self, name, tensor, kind=None):
        tensor.set_output(True).set_name(name)
        tensor.set_data_type(self.element if kind is None else kind)
        self.outputs.append((name, tensor))

    def planned(self):
        self.graph.validate()
        self.graph.create_execution_plans([cudnn.heur_mode.A])
        return [step.title for step in self.graph.plans[0].steps if step.kind != "view"]

    def run(self):
        """What the outputs hold, by name."""
        self.graph.build([cudnn.heur_mode.A])
        found = {
            name: torch.full(t.dim, float("nan"), dtype=getattr(torch, t.data_type.value))
            for name, t in self.outputs
        }
        self.graph.execute({**self.data, **found})
        return found

    def nodes(self):
        """Operations of the plan's nodes."""
        return [node.op for step in self.graph.plans[0].steps for node in step.nodes]


def new(sm_version=90, element=torch.bfloat16, **options):
    types = {"io_data_type": element, "intermediate_data_type": FLOAT, "compute_data_type": FLOAT}
    options.setdefault("handle", cudnn.create_handle("cpu"))
    graph = cudnn.pygraph(sm_version=sm_version, **{**types, **options})
    return Written(graph, element)


# Writing it, as users do -----------------------------------------------------------------


def keys(w, form="transpose", heads=H_KV):
    """(B, H_kv, D, T)."""
    if form == "transpose":
        return w.graph.transpose(w.given("k", B, heads, T, D), [0, 1, 3, 2])
    values = torch.randn((B, heads, T, D), generator=torch.Generator().manual_seed(3))
    w.heads["k"] = values.to(w.element)
    return w.given("kt", values=w.heads["k"].mT)


def softmax(g, p, form="quotient"):
    if form != "no maximum":
        p = g.sub(p, g.reduction(p, MAX, axis=-1))
    e = g.exp(p)
    total = g.reduction(e, ADD, axis=3)
    return g.mul(g.reciprocal(total), e) if form == "reciprocal" else g.div(e, total)


def scale_of(w, form):
    """What multiplies, as a number or a tensor."""
    if form == "tensor":
        return w.given("scale", values=torch.full((1, 1, 1, 1), SCALE))
    if form == "by value":
        w.data["scale"] = SCALE
        return w.graph.tensor((1, 1, 1, 1), data_type=FLOAT, is_pass_by_value=True, name="scale")
    return SCALE


def scores(w, form="number", at="product", k="transpose", kv_heads=H_KV, queries=S):
    g = w.graph
    q, kt, scale = w.given("q", B, H, queries, D), keys(w, k, kv_heads), scale_of(w, form)
    q = g.mul(q, scale) if at == "q" else q
    kt = g.scale(kt, scale) if at == "k" else kt
    p = g.matmul(q, kt)
    return g.scale(p, scale) if at == "product" else p


def attend(w, p, v=None):
    w.output("o", w.graph.matmul(p, v or w.given("v", B, H_KV, T, D_V)))


def indices(g, p):
    return g.gen_index(p, axis=2), g.gen_index(p, axis=3)


# In torch --------------------------------------------------------------------------------


def exact(w, **options):
    return in_torch(w, torch.float64, **options)


def baseline(w, **options):
    """In the type of the tensors, as eager torch computes it."""
    return in_torch(w, w.element, **options)


def in_torch(w, kind, bias=None, seen=None, kept=None):
    """Outputs by name. kept: What probabilities are multiplied with."""
    q, k, v = ({**w.data, **w.heads}[name].to(kind) for name in "qkv")
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    x = q @ k.mT * SCALE
    if bias is not None:
        x = x + w.data[bias].to(kind)
    if seen is not None:
        x = x.masked_fill(~seen, -INFINITY)
    p = x.softmax(-1).nan_to_num(0.0)
    return {"p": p, "o": (p if kept is None else (p * kept).to(kind)) @ v}


def agrees(w, found, **options):
    ref, base = exact(w, **options), baseline(w, **options)
    for name, values in found.items():
        verdict = compare(values, ref[name], base[name].to(values.dtype), factor=3.0)
        assert verdict, f"{name}: {verdict}"


def assert_product(w, found, probabilities):
    """That of probabilities, as a function of scores, and values."""
    results = []
    for kind in (torch.float64, w.element):
        q, k, v = (w.data[name].to(kind) for name in "qkv")
        k, v = (x.repeat_interleave(2, 1) for x in (k, v))
        results.append(probabilities(q @ k.mT * SCALE).to(kind) @ v)
    assert compare(found, *results, factor=3.0)


def band(above=None, below=None, diagonal=0):
    """Where j − i − diagonal is at most, and at least, these."""
    i, j = torch.arange(S)[:, None] + diagonal, torch.arange(T)
    seen = torch.ones(S, T, dtype=torch.bool)
    seen = seen if above is None else seen & (j - i <= above)
    return seen if below is None else seen & (j - i >= below)


LENGTHS_Q, LENGTHS_KV = torch.tensor([S, 20]), torch.tensor([31, T])


def padded(q=False):
    """(B, 1, S, T)."""
    seen = torch.arange(T) < LENGTHS_KV.view(B, 1, 1, 1)
    seen = seen.expand(B, 1, S, T)
    return seen & (torch.arange(S)[:, None] < LENGTHS_Q.view(B, 1, 1, 1)) if q else seen


def lengths(w, name):
    values = LENGTHS_Q if name == "lens_q" else LENGTHS_KV
    return w.given(name, values=values.to(torch.int32).view(B, 1, 1, 1))


# Masks of indices i and j ----------------------------------------------------------------


def select(w, p, mask, fill=-INFINITY):
    return w.graph.binary_select(p, fill, mask)


def window(w, i, j):
    g = w.graph
    return g.logical_and(g.cmp_ge(i, j), g.cmp_lt(g.sub(i, j), 9))


def both_lengths(w, i, j):
    g = w.graph
    rows = g.cmp_gt(lengths(w, "lens_q"), i)
    return g.logical_and(g.cmp_lt(j, lengths(w, "lens_kv")), rows)


CAUSAL = {
    "i ≥ j": lambda w, i, j: w.graph.cmp_ge(i, j),
    "j ≤ i": lambda w, i, j: w.graph.cmp_le(j, i),
    "j < i + 1": lambda w, i, j: w.graph.cmp_lt(j, w.graph.add(i, 1)),
    "i + 1 > j": lambda w, i, j: w.graph.cmp_gt(w.graph.add(1, i), j),
    "i − j ≥ 0": lambda w, i, j: w.graph.cmp_ge(w.graph.sub(i, j), 0),
}


def kept_by_dropout(p, seed, offset):
    drawn = halves_apart(seed, offset, (B * H, torch.arange(S), T), "cpu")
    return (drawn >= p).reshape(B, H, S, T)

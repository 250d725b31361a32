"""What graphs keep beside attention that is written as products and a softmax: probabilities, and
multiples of Q and K in types of their own."""

from __future__ import annotations

import pytest
import torch
from support.composite_attention import (
    ATTENTION,
    CAUSAL,
    D_V,
    FLOAT,
    H_KV,
    INFINITY,
    SCALE,
    B,
    D,
    H,
    S,
    T,
    agrees,
    attend,
    band,
    baseline,
    exact,
    indices,
    kept_by_dropout,
    new,
    scores,
    select,
    softmax,
)

from kernel_api.verification import compare


def kept(w, bias=None, mask=None, fill=-INFINITY, cap=None):
    g, heads = w.graph, H
    p = scores(w, kv_heads=heads)
    if cap:
        p = g.mul(g.tanh(g.div(p, cap)), cap)
    if bias:
        p = g.add(p, w.given("bias", *bias))
    if mask is not None:
        p = select(w, p, mask(w, *indices(g, p)), fill)
    p = softmax(g, p)
    w.output("p", p)
    attend(w, p, w.given("v", B, heads, T, D_V))


def test_probabilities_that_are_kept_are_one_more_kernel():
    w = new()
    kept(w, (B, H, S, T))
    first, second = w.planned()
    assert first.startswith(ATTENTION) and second.startswith("sm90_gemm")


@pytest.mark.parametrize("bias", [None, (1, 1, 1, T), (B, H, S, T)])
def test_probabilities_that_are_kept_are_right(bias):
    w = new(None)
    kept(w, bias)
    found = w.run()
    assert "sdpa" in w.nodes() and "reduction" not in w.nodes()
    agrees(w, found, bias="bias" if bias else None)


@pytest.mark.parametrize("fill", [-INFINITY, -1e9])
def test_masked_probabilities_that_are_kept_are_computed_as_written(fill):
    w = new(None)
    kept(w, mask=CAUSAL["i ≥ j"], fill=fill)
    found = w.run()
    assert "sdpa" in w.nodes() and "reduction" in w.nodes()
    agrees(w, found, seen=band(0))


@pytest.mark.parametrize("which", ["before dropout", "behind dropout"])
def test_probabilities_are_kept_beside_dropout(which):
    w = new(None)
    g = w.graph
    p = softmax(g, scores(w, kv_heads=H))
    drawn = g.rng((B, H, S, T), seed=3, offset=5, bernoulli_probability=0.7)
    dropped = g.scale(g.mul(p, drawn), 1 / 0.7)
    w.output("p", p if which == "before dropout" else dropped)
    attend(w, dropped, w.given("v", B, H, T, D_V))
    found = w.run()
    assert "sdpa" in w.nodes() and "reduction" not in w.nodes()
    kept = kept_by_dropout(0.3, 3, 5) / 0.7
    ref, base = exact(w, kept=kept), baseline(w, kept=kept)
    if which == "behind dropout":
        ref["p"], base["p"] = ref["p"] * kept, base["p"] * kept
    for name, values in found.items():
        assert compare(values, ref[name], base[name].to(values.dtype), factor=3.0), name


def test_probabilities_of_a_function_of_scores_are_kept():
    w = new(None)
    kept(w, cap=3.0)
    found = w.run()
    assert "sdpa" in w.nodes() and "reduction" not in w.nodes()
    results = []
    for kind in (torch.float64, w.element):
        q, k, v = (w.data[name].to(kind) for name in "qkv")
        p = (3 * (q @ k.mT * SCALE / 3).tanh()).softmax(-1)
        results.append({"p": p, "o": p @ v})
    for name, values in found.items():
        assert compare(values, results[0][name], results[1][name], factor=3.0), name


def capped(w, p):
    return w.graph.mul(w.graph.tanh(w.graph.div(p, 3.0)), 3.0)


def biased(w, p):
    return w.graph.add(p, w.given("bias", 1, 1, 1, T))


def probabilities(w, kind, options, change):
    """In torch, of scores in a type."""
    q, k = (w.heads.get(name, w.data.get(name)).to(kind) for name in "qk")
    x = q @ k.repeat_interleave(H // k.shape[1], 1).mT
    x = x if options.get("at") == "none" else x * SCALE
    x = x + w.data["bias"].to(kind) if change is biased else x
    return (3 * (x / 3).tanh() if change is capped else x).softmax(-1)


@pytest.mark.parametrize(
    ("options", "change"),
    [
        ({}, None),
        ({"kv_heads": H_KV}, biased),
        ({"form": "tensor"}, biased),
        ({}, capped),
        ({"at": "q"}, None),
        ({"at": "k", "form": "by value"}, capped),
        ({"at": "none"}, None),
    ],
    ids=lambda one: getattr(one, "__name__", str(one)),
)
@pytest.mark.parametrize("kept_as", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_probabilities_are_those_of_scores_in_float32(options, change, kept_as):
    """Attention gives the log-sum-exp of scores that are not rounded to what the graph keeps."""
    planned = []
    for target in (90, None):
        w = new(target, intermediate_data_type=kept_as)
        p = scores(w, **{"kv_heads": H, **options})
        p = softmax(w.graph, p if change is None else change(w, p))
        w.output("p", p, FLOAT)
        attend(w, p, w.given("v", B, options.get("kv_heads", H), T, D_V))
        planned.append(w.planned() if target else w.run()["p"])
    kernels, found = planned
    if "kv_heads" not in options:  # no product shares keys
        first, second = kernels
        assert first.startswith(ATTENTION) and second.startswith("sm90_gemm")
    assert "sdpa" in w.nodes() and "reduction" not in w.nodes()
    exact, single = (
        probabilities(w, kind, options, change) for kind in (torch.float64, torch.float32)
    )
    verdict = compare(found, exact, single, factor=3.0)
    assert verdict, verdict


def test_two_products_share_probabilities():
    w = new(None)
    p = softmax(w.graph, scores(w))
    attend(w, p)
    w.heads["v"] = other = torch.randn(B, H_KV, T, D).to(w.element)
    w.output("second", w.graph.matmul(p, w.given("other", values=other)))
    found = w.run()
    assert w.nodes().count("sdpa") == 2 and "exp" not in w.nodes()
    ref, base = exact(w)["o"], baseline(w)["o"]
    assert compare(found["second"], ref, base, factor=3.0)


@pytest.mark.parametrize("keeps", [False, True])
def test_values_may_be_computed_of_the_probabilities(keeps):
    w = new(None)
    g = w.graph
    q, k = (w.given(name, B, H, S, D) for name in "qk")
    p = softmax(g, g.scale(g.matmul(q, g.transpose(k, [0, 1, 3, 2])), SCALE))
    if keeps:
        w.output("p", p)
    attend(w, p, g.matmul(p, w.given("v", B, H, S, D_V)))
    found = w.run()
    assert w.nodes().count("sdpa") == 2 and "reduction" not in w.nodes()
    ref, base = exact(w), baseline(w)
    assert compare(found["o"], ref["p"] @ ref["o"], base["p"] @ base["o"], factor=3.0)


#: Types of Q, of its multiple, and whether a kernel of attention multiplies Q itself.
MULTIPLES = [
    (torch.bfloat16, torch.float32, True),
    (torch.float16, torch.float16, True),
    (torch.float16, torch.bfloat16, False),
    (torch.float32, torch.bfloat16, False),
    (torch.float32, torch.float8_e4m3fn, False),
    (torch.float32, torch.int8, False),
    (torch.int8, torch.float16, False),
]


@pytest.mark.parametrize(("given", "kept_as", "is_passed"), MULTIPLES, ids=str)
@pytest.mark.parametrize("factor", ["q", "k"])
def test_a_multiple_is_rounded_where_its_type_is_narrower(factor, given, kept_as, is_passed):
    multiplied = kept_as in (torch.float16, torch.bfloat16, torch.float32)
    w = new(None, given if is_passed else kept_as if multiplied else torch.float32)
    g = w.graph
    kinds = {"q": w.element, "k": w.element, factor: given}
    values = {"q": 2 * torch.randn(B, H, S, D), "k": 2 * torch.randn(B, H_KV, T, D)}
    read = {name: w.given(name, values=x.to(kinds[name])) for name, x in values.items()}
    read[factor] = g.mul(read[factor], 3.0).set_data_type(kept_as)
    p = g.matmul(read["q"], g.transpose(read["k"], [0, 1, 3, 2]))
    attend(w, softmax(g, g.mul(p, 0.02)))
    found = w.run()["o"]
    assert ("sdpa" in w.nodes()) is multiplied and ("mul" in w.nodes()) is not is_passed
    data = {name: x.double() for name, x in w.data.items()}
    multiple = data[factor] * 3
    multiple = multiple if kept_as.is_floating_point else multiple.round()
    data[factor] = multiple.to(kept_as).double()

    def attention(kind):
        q, k, v = (data[name].to(kind) for name in "qkv")
        k, v = (x.repeat_interleave(H // H_KV, 1) for x in (k, v))
        return (q @ k.mT * 0.02).softmax(-1) @ v

    verdict = compare(found, attention(torch.float64), attention(found.dtype), factor=3.0)
    assert verdict, verdict

"""The gradient of attention, written as products, becomes kernels of attention."""

from __future__ import annotations

import logging

import pytest
import torch
from support.composite_attention import (
    ADD,
    ATTENTION,
    CAUSAL,
    D_V,
    FLOAT,
    SCALE,
    B,
    D,
    H,
    S,
    T,
    band,
    both_lengths,
    in_torch,
    indices,
    new,
    padded,
    scale_of,
    select,
    softmax,
    window,
)

import kernel_api.graph as cudnn
from kernel_api.providers.reference.philox import halves_apart
from kernel_api.verification import compare


def gradient(
    w,
    bias=None,
    mask=None,
    o=None,
    scaled="dS",
    form="number",
    dBias=None,
    only=None,
    keeps=False,
    kv_heads=H,
    sums=None,
):
    """Of attention whose probabilities are computed again.

    Args:
        o: Whether Σ dO · O is taken of O as it is "given", or as it is "computed" here; else
            Σ dP · P.
        scaled: What the scale multiplies: dS, dQ and dK, or K and Q; or nothing.
        dBias: Extents of it.
        only: Which gradients; all by default.
        keeps: Whether the caller gets probabilities as well.
        sums: How gradients of heads that share keys are summed, see :data:`SUMS`.
    """
    g = w.graph
    q, k, v, dO = (
        w.given(name, B, heads, n, d)
        for name, heads, n, d in (
            ("q", H, S, D),
            ("k", kv_heads, T, D),
            ("v", kv_heads, T, D_V),
            ("dO", H, S, D_V),
        )
    )
    scale, turn = scale_of(w, form), [0, 1, 3, 2]
    p = g.scale(g.matmul(q, g.transpose(k, turn)), scale)
    if bias:
        p = g.add(p, w.given("bias", *bias))
    if mask is not None:
        p = select(w, p, mask(w, *indices(g, p)))
    p = softmax(g, p)
    if keeps:
        w.output("p", p)
    dP = g.matmul(dO, g.transpose(v, turn))
    if o == "computed":
        out = g.matmul(p, v)
        w.output("o", out)
        product = g.mul(dO, out)
    elif o == "given":
        product = g.mul(w.given("o", values=in_torch(w, torch.float32)["o"].to(w.element)), dO)
    else:
        product = g.mul(dP, p)
    dS = g.mul(p, g.sub(dP, g.reduction(product, ADD, axis=3)))
    if dBias == (B, H, S, T):
        w.output("dBias", dS, FLOAT)
    elif dBias:
        w.output("dBias", g.reduction(dS, ADD).set_dim(dBias), FLOAT)
    ds = g.scale(dS, scale) if scaled == "dS" else dS
    if scaled == "operands":
        q, k = g.mul(q, scale), g.mul(k, scale)
    dQ, dK = g.matmul(ds, k), g.matmul(g.transpose(ds, turn), q)
    dV = g.matmul(g.transpose(p, turn), dO)
    if sums:
        dK, dV = (SUMS[sums](g, one, kv_heads, d) for one, d in ((dK, D), (dV, D_V)))
    if scaled == "results":
        dQ, dK = g.mul(dQ, scale), g.mul(dK, scale)
    found = {"dQ": dQ, "dK": dK, "dV": dV}
    for name in only or found:
        w.output(name, found[name])


def of_groups(g, x, heads, d):
    x = g.reduction(g.reshape(x, shape=(B, heads, H // heads, T, d)), ADD, axis=2)
    return g.reshape(x, shape=(B, heads, T, d))


def of_copied_groups(g, x, heads, d):
    x = g.reshape(x, cudnn.reshape_mode.LOGICAL, shape=(B, heads, H // heads, T, d))
    x = g.reduction(g.identity(x), ADD, axis=2)
    return g.reshape(x, cudnn.reshape_mode.LOGICAL, shape=(B, heads, T, d))


def of_all(g, x, heads, d):
    return g.identity(g.reduction(g.identity(x), ADD, axis=1))


def of_others(g, x, heads, d):
    """Every second head, not neighbours."""
    x = g.reduction(g.reshape(x, shape=(B, H // heads, heads, T, d)), ADD, axis=1)
    return g.reshape(x, shape=(B, heads, T, d))


SUMS = {one.__name__: one for one in (of_groups, of_copied_groups, of_all, of_others)}


def gradients_in_torch(w, kind, bias=None, seen=None, dBias=None, sums=None):
    q, k, v, dO = (w.data[name].to(kind) for name in ("q", "k", "v", "dO"))
    k, v = (x.repeat_interleave(H // x.shape[1], 1) for x in (k, v))
    found = in_torch(w, kind, bias, seen)
    p = found["p"]
    dP = dO @ v.mT
    dS = p * (dP - (dP * p).sum(-1, keepdim=True))
    modes = [] if dBias is None else [i for i, n in enumerate(dBias) if n == 1 and dS.shape[i] != 1]

    def summed(gradient):
        if not sums:
            return gradient
        heads = w.data["k"].shape[1]
        if sums == "of_others":
            return gradient.unflatten(1, (H // heads, heads)).sum(1)
        return gradient.unflatten(1, (heads, H // heads)).sum(2)

    return {
        **found,
        "dQ": dS @ k * SCALE,
        "dK": summed(dS.mT @ q * SCALE),
        "dV": summed(p.mT @ dO),
        "dBias": dS.sum(modes, keepdim=True) if modes else dS,
    }


GRADIENTS = {
    "plain": {},
    "of a given O": {"o": "given"},
    "with the forward pass": {"o": "computed"},
    "results are scaled": {"scaled": "results"},
    "operands are scaled": {"scaled": "operands"},
    "scale is a tensor": {"form": "tensor"},
    "causal": {"mask": CAUSAL["i ≥ j"]},
    "lengths": {"mask": both_lengths},
    "bias": {"bias": (1, H, S, T)},
    "dBias": {"bias": (B, H, S, T), "dBias": (B, H, S, T)},
    "dBias of heads": {"bias": (1, H, S, T), "dBias": (1, H, S, T), "mask": window},
    "dQ and dV": {"only": ("dQ", "dV")},
    "dK and O": {"only": ("dK",), "o": "computed"},
    "groups": {"kv_heads": 2, "sums": "of_groups", "mask": CAUSAL["i ≥ j"], "o": "computed"},
    "groups, results are scaled": {"kv_heads": 2, "sums": "of_groups", "scaled": "results"},
    "copied groups": {"kv_heads": 2, "sums": "of_copied_groups"},
    "one group": {"kv_heads": 1, "sums": "of_all", "bias": (1, H, S, T)},
    "one group of many modes": {"kv_heads": 1, "sums": "of_groups", "form": "tensor"},
}


def every_second(w, i, j):
    return w.graph.cmp_ge(w.graph.add(i, i), j)


SEEN = {
    both_lengths: padded(q=True),
    window: band(0, -8),
    CAUSAL["i ≥ j"]: band(0),
    every_second: torch.arange(T) <= 2 * torch.arange(S)[:, None],
}


@pytest.mark.parametrize("name", GRADIENTS)
def test_the_gradient_is_two_kernels_on_hopper(name):
    w = new()
    gradient(w, **GRADIENTS[name])
    first, second = w.planned()
    assert first.startswith(ATTENTION)
    assert second.startswith(("sm90_sdpa_backward", "sm80_sdpa_backward"))


@pytest.mark.parametrize("name", GRADIENTS)
def test_the_gradient_is_right(name):
    w, options = new(None), GRADIENTS[name]
    gradient(w, **options)
    found = w.run()
    assert sorted(op for op in w.nodes() if op != "transpose") == ["sdpa", "sdpa_backward"]
    assert_gradients(w, found, options)


def assert_gradients(w, found, options):
    given = {
        "bias": "bias" if options.get("bias") else None,
        "seen": SEEN.get(options.get("mask")),
        "dBias": options.get("dBias"),
        "sums": options.get("sums"),
    }
    ref, base = (gradients_in_torch(w, kind, **given) for kind in (torch.float64, w.element))
    for name, values in found.items():
        unscaled = options.get("scaled") == "nothing" and name in ("dQ", "dK")
        exactly, nearly = (one[name] / SCALE if unscaled else one[name] for one in (ref, base))
        verdict = compare(values, exactly, nearly.to(values.dtype), factor=3.0)
        assert verdict, f"{name}: {verdict}"


OTHER_GRADIENTS = {
    "not scaled": ({"scaled": "nothing"}, "another number than the scores"),
    "dS is given out": ({"dBias": (B, H, S, T)}, "needed besides"),
    "P is given out": ({"keeps": True}, "needed besides"),
    "of heads that share keys": ({"kv_heads": 2}, "heads that share one of 2"),
    "of sums over other heads": (
        {"kv_heads": 2, "sums": "of_others"},
        "heads that share one of 2",
    ),
    "of a function of scores": ({"mask": every_second}, "otherwise than they are written"),
}


@pytest.mark.parametrize("name", OTHER_GRADIENTS)
def test_what_is_nearly_the_gradient_stays_as_it_is(name, caplog):
    options, why = OTHER_GRADIENTS[name]
    w = new(None)
    with caplog.at_level(logging.DEBUG, "kernel_api.graph"):
        gradient(w, **options)
        found = w.run()
    assert "sdpa_backward" not in w.nodes()
    assert why in caplog.text and why in str(w.graph.explain())
    assert_gradients(w, found, options)


def stored(w, queries, keys):
    """The gradient of probabilities that an earlier graph stored."""
    g, turn = w.graph, [0, 1, 3, 2]
    q, k, v, dO = (
        w.given(name, B, H, n, d)
        for name, n, d in (
            ("q", queries, 64),
            ("k", keys, 64),
            ("v", keys, 64),
            ("dO", queries, 64),
        )
    )
    values = torch.randn(B, H, queries, keys, generator=torch.Generator().manual_seed(1))
    p = w.given("p", values=values.softmax(-1).to(w.element))
    dP = g.matmul(dO, g.transpose(v, turn))
    dS = g.mul(p, g.sub(dP, g.reduction(g.mul(dP, p), ADD, axis=3)))
    dS = g.scale(dS, SCALE)
    w.output("dQ", g.matmul(dS, k))
    w.output("dK", g.matmul(g.transpose(dS, turn), q))
    w.output("dV", g.matmul(g.transpose(p, turn), dO))


def test_the_gradient_of_stored_probabilities_is_products_with_epilogues():
    w = new()
    stored(w, 256, 256)
    kernels = w.planned()
    assert len(kernels) == 4 and all(name.startswith("sm90_gemm") for name in kernels)


def test_the_gradient_of_stored_probabilities_is_right():
    w = new(None)
    stored(w, S, T)
    found = w.run()
    results = []
    for kind in (torch.float64, w.element):
        p, q, k, v, dO = (w.data[name].to(kind) for name in ("p", "q", "k", "v", "dO"))
        dP = dO @ v.mT
        dS = p * (dP - (dP * p).sum(-1, keepdim=True)) * SCALE
        results.append({"dQ": dS @ k, "dK": dS.mT @ q, "dV": p.mT @ dO})
    for name, values in found.items():
        assert compare(values, results[0][name], results[1][name], factor=3.0), name


@pytest.mark.parametrize("order", ["numbers are divided", "results are divided"])
@pytest.mark.parametrize("form", ["with O", "without O", "mask is not shared"])
def test_the_gradient_behind_dropout_is_one_of_attention(order, form):
    w = new(None)
    g = w.graph
    q, k = w.given("q", B, H, S, D), w.given("k", B, H, T, D)
    v, dO = w.given("v", B, H, T, D_V), w.given("dO", B, H, S, D_V)
    turn, factor = [0, 1, 3, 2], 1 / 0.7
    p = softmax(g, g.scale(g.matmul(q, g.transpose(k, turn)), SCALE))
    drawn = [
        g.rng((B, H, S, T), seed=3, offset=offset, bernoulli_probability=0.7) for offset in (5, 8)
    ]

    def drop(x, drawn):
        if order == "numbers are divided":
            return g.mul(x, g.scale(drawn, factor))
        return g.scale(g.mul(x, drawn), factor)

    dropped = drop(p, drawn[0])
    if form == "with O":
        w.output("o", g.matmul(dropped, v))
    dP = drop(g.matmul(dO, g.transpose(v, turn)), drawn[form == "mask is not shared"])
    dS = g.mul(p, g.sub(dP, g.reduction(g.mul(dP, p), ADD, axis=3)))
    w.output("dQ", g.matmul(g.scale(dS, SCALE), k))
    w.output("dK", g.matmul(g.transpose(g.scale(dS, SCALE), turn), q))
    w.output("dV", g.matmul(g.transpose(dropped, turn), dO))
    found = w.run()
    masks = [
        (halves_apart(3, offset, (B * H, torch.arange(S), T), "cpu") >= 0.3).view(B, H, S, T)
        * factor
        for offset in (5, 8 if form == "mask is not shared" else 5)
    ]
    if form != "mask is not shared":
        assert w.nodes().count("sdpa_backward") == w.nodes().count("sdpa") == 1
        assert "softmax" not in w.nodes() and "rng" not in w.nodes()
    expected = []
    for kind in (torch.float64, w.element):
        q, k, v, dO = (w.data[name].to(kind) for name in ("q", "k", "v", "dO"))
        p = (q @ k.mT * SCALE).softmax(-1)
        dropped, dP = (p * masks[0]).to(kind), ((dO @ v.mT) * masks[1]).to(kind)
        dS = p * (dP - (dP * p).sum(-1, keepdim=True))
        gradients = {"dQ": dS @ k * SCALE, "dK": dS.mT @ q * SCALE, "dV": dropped.mT @ dO}
        expected.append({"o": dropped @ v, **gradients})
    for name, values in found.items():
        ref, base = (one[name] for one in expected)
        assert compare(values, ref, base.to(values.dtype), factor=3.0), name

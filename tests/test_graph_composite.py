"""Attention that is written as products, masks and a softmax becomes kernels of attention."""

from __future__ import annotations

import logging
import math

import pytest
import torch
from support.composite_attention import (
    ADD,
    ATTENTION,
    BF16,
    CAUSAL,
    D_V,
    FLOAT,
    H_KV,
    INFINITY,
    LENGTHS_KV,
    LENGTHS_Q,
    MAX,
    SCALE,
    B,
    D,
    H,
    S,
    T,
    agrees,
    assert_product,
    attend,
    band,
    baseline,
    both_lengths,
    exact,
    indices,
    kept_by_dropout,
    lengths,
    new,
    padded,
    scores,
    select,
    softmax,
    window,
)

from kernel_api.providers.reference.philox import uniform_apart
from kernel_api.verification import compare

# What becomes one kernel -----------------------------------------------------------------


def plain(w, **options):
    attend(w, softmax(w.graph, scores(w, **options)))
    return {}


def reciprocal(w):
    attend(w, softmax(w.graph, scores(w), "reciprocal"))
    return {}


def no_maximum(w):
    attend(w, softmax(w.graph, scores(w), "no maximum"))
    return {}


def converted(w):
    """Probabilities are converted by an operation of their own."""
    p = softmax(w.graph, scores(w))
    attend(w, w.graph.identity(p).set_data_type(w.element))
    return {}


def divided(w):
    g = w.graph
    attend(w, softmax(g, g.div(scores(w, at="none"), 1 / SCALE)))
    return {}


def scaled_twice(w):
    g = w.graph
    p = scores(w, at="none")
    attend(w, softmax(g, g.mul(g.mul(4.0, p), SCALE / 4)))
    return {}


def rows_of_tokens(w):
    """Tensors (B, S, H, D), seen with other modes."""
    g = w.graph
    q, k = (
        g.transpose(w.given(name, B, n, h, D), order)
        for name, n, h, order in (("q", S, H, [0, 2, 1, 3]), ("k", T, H_KV, [0, 2, 3, 1]))
    )
    v = g.transpose(w.given("v", B, T, H_KV, D_V), [0, 2, 1, 3])
    attend(w, softmax(g, g.scale(g.matmul(q, k), SCALE)), v)
    w.heads = {name: w.data[name].transpose(1, 2) for name in "qkv"}
    return {}


def with_dropout(order, masked=False):
    """Random zeros, and the factor: before them, behind, or of them."""

    def write(w):
        g = w.graph
        p = scores(w)
        if masked:
            p = select(w, p, g.cmp_ge(*indices(g, p)), -INFINITY)
        p = softmax(g, p)
        kept = g.rng((B, H, S, T), seed=3, offset=5, bernoulli_probability=0.7)
        if order == "of them":
            attend(w, g.mul(g.mul(kept, 1 / 0.7), p))
        elif order == "before":
            attend(w, g.mul(g.mul(p, 1 / 0.7), kept))
        else:
            attend(w, g.scale(g.mul(p, kept), 1 / 0.7))
        found = {"kept": kept_by_dropout(0.3, 3, 5) / 0.7}
        return {**found, "seen": band(0)} if masked else found

    return write


def with_bias(dim, kind=None, first=False):
    def write(w):
        p, bias = scores(w), w.given("bias", *dim, kind=kind)
        attend(w, softmax(w.graph, w.graph.add(bias, p) if first else w.graph.bias(p, bias)))
        return {"bias": "bias"}

    return write


def masked(mask, seen, fill=-INFINITY, inverse=False, bias=False):
    """Scores where ``mask(w, i, j)`` holds; or where it does not, if inverse."""

    def write(w):
        g = w.graph
        p = scores(w)
        if bias:
            p = g.add(p, w.given("bias", 1, H, S, T))
        hidden = mask(w, *indices(g, p))
        p = g.binary_select(fill, p, hidden) if inverse else g.binary_select(p, fill, hidden)
        attend(w, softmax(g, p))
        return {"seen": seen, **({"bias": "bias"} if bias else {})}

    return write


def window_and_lengths(w, i, j):
    return w.graph.logical_and(window(w, i, j), w.graph.cmp_lt(j, lengths(w, "lens_kv")))


def outside(w, i, j):
    """Hidden: a key behind, or one too far in front."""
    g = w.graph
    return g.logical_or(g.cmp_gt(j, g.add(i, 5)), g.logical_not(g.cmp_le(i, g.add(j, 8))))


def causal_at_the_ends(w, i, j):
    """Of each sequence."""
    g = w.graph
    rows, columns = lengths(w, "lens_q"), lengths(w, "lens_kv")
    inside = g.logical_and(g.cmp_lt(j, columns), g.cmp_lt(i, rows))
    diagonal = g.cmp_le(g.add(j, rows), g.add(i, columns))
    return g.logical_and(inside, diagonal)


def seen_at_the_ends():
    i, j = torch.arange(S)[:, None], torch.arange(T)
    rows, columns = LENGTHS_Q.view(B, 1, 1, 1), LENGTHS_KV.view(B, 1, 1, 1)
    return padded(q=True) & (j + rows <= i + columns)


def two_masks(w):
    """One behind the other, and a bias before."""
    g = w.graph
    p = g.add(scores(w), w.given("bias", B, 1, 1, T))
    i, j = indices(g, p)
    p = select(w, p, g.cmp_lt(j, lengths(w, "lens_kv")))
    attend(w, softmax(g, select(w, p, g.cmp_ge(i, j))))
    return {"bias": "bias", "seen": padded() & band(0)}


ONE_KERNEL = {
    "plain": plain,
    "reciprocal": reciprocal,
    "no maximum": no_maximum,
    "converted": converted,
    "divided": divided,
    "scaled twice": scaled_twice,
    "rows of tokens": rows_of_tokens,
    "strides of k": lambda w: plain(w, k="strides"),
    "scale of q": lambda w: plain(w, at="q"),
    "scale of k": lambda w: plain(w, at="k"),
    "scale by value": lambda w: plain(w, form="by value"),
    "scale of q by value": lambda w: plain(w, form="by value", at="q"),
    "scale is a tensor": lambda w: plain(w, form="tensor"),
    "scale of k is a tensor": lambda w: plain(w, form="tensor", at="k"),
    "bias": with_bias((B, H, S, T)),
    "bias of heads": with_bias((1, H, S, T), first=True),
    "bias of keys": with_bias((B, 1, 1, T), torch.float32),
    **{name: masked(mask, band(0)) for name, mask in CAUSAL.items()},
    "causal, finite": masked(CAUSAL["i ≥ j"], band(0), fill=-1e9),
    "causal with bias": masked(CAUSAL["i ≥ j"], band(0), bias=True),
    "causal, inverse": masked(lambda w, i, j: w.graph.cmp_gt(j, i), band(0), inverse=True),
    "causal at the end": masked(
        lambda w, i, j: w.graph.cmp_ge(w.graph.add(i, T - S), j), band(0, diagonal=T - S), -1e30
    ),
    "causal from another key": masked(
        lambda w, i, j: w.graph.cmp_ge(w.graph.add(i, 5), j), band(5), -65504.0
    ),
    "window": masked(window, band(0, -8)),
    "window, inverse": masked(outside, band(5, -8), inverse=True),
    "lengths of keys": masked(lambda w, i, j: w.graph.cmp_lt(j, lengths(w, "lens_kv")), padded()),
    "both lengths": masked(both_lengths, padded(q=True)),
    "window and lengths": masked(window_and_lengths, padded() & band(0, -8), bias=True),
    "causal at the ends": masked(causal_at_the_ends, seen_at_the_ends()),
    "two masks": two_masks,
    "dropout": with_dropout("behind"),
    "dropout, divided before": with_dropout("before"),
    "dropout, numbers divided": with_dropout("of them"),
    "causal with dropout": with_dropout("behind", masked=True),
}


@pytest.mark.parametrize("name", ONE_KERNEL)
def test_one_kernel_on_hopper(name):
    w = new()
    ONE_KERNEL[name](w)
    (kernel,) = w.planned()
    assert kernel.startswith(ATTENTION)
    assert w.graph.plans[0].workspace_size == 0


@pytest.mark.parametrize("element", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ONE_KERNEL)
def test_the_kernel_computes_what_is_written(name, element):
    w = new(None, element)
    options = ONE_KERNEL[name](w)
    found = w.run()
    assert w.nodes().count("sdpa") == 1
    agrees(w, found, **options)


def test_a_number_of_the_host_may_change():
    w = new(None)
    plain(w, form="by value")
    w.run()
    out = torch.empty(B, H, S, D_V, dtype=w.element)
    w.graph.execute({**w.data, "scale": 2, "o": out})
    w.heads["q"] = w.data["q"].double() * (2 / SCALE)
    assert compare(out, exact(w)["o"], baseline(w)["o"].to(w.element), factor=3.0)


def test_two_layers_share_a_mask():
    w = new()
    g = w.graph
    first = scores(w)
    mask = g.cmp_ge(*indices(g, first))
    q = g.matmul(softmax(g, select(w, first, mask)), w.given("v", B, H_KV, T, D))
    second = g.scale(g.matmul(q, g.transpose(w.given("k2", B, H_KV, T, D), [0, 1, 3, 2])), 0.3)
    p = softmax(g, select(w, second, mask))
    w.output("o", g.matmul(p, w.given("v2", B, H_KV, T, D_V)))
    kernels = w.planned()
    assert len(kernels) == 2 and all(name.startswith(ATTENTION) for name in kernels)


# What is not replaced --------------------------------------------------------------------


def mask_after_the_softmax(w):
    g = w.graph
    p = softmax(g, scores(w))
    attend(w, g.binary_select(p, 0.0, g.cmp_ge(*indices(g, p))))
    return "binary_select", lambda x: x.softmax(-1).where(band(0), 0.0)


def softmax_over_queries(w):
    g = w.graph
    p = scores(w)
    p = g.sub(p, g.reduction(p, MAX).set_dim([B, H, 1, T]))
    e = g.exp(p)
    attend(w, g.div(e, g.reduction(e, ADD).set_dim([B, H, 1, T])))
    return "over keys", lambda x: x.softmax(-2)


def softmax_over_queries_in(dim):
    def write(w):
        g = w.graph
        e = g.exp(scores(w))
        attend(w, g.div(e, g.reduction(e, ADD).set_dim(dim)))
        modes = [mode for mode, one in enumerate(dim) if one == 1]
        return "over keys", lambda x: x.exp() / x.exp().sum(modes, keepdim=True)

    return write


def largest_of_something_else(w):
    g = w.graph
    p = scores(w)
    largest = g.reduction(g.neg(p), MAX).set_dim([B, H, S, 1])
    e = g.exp(g.sub(p, largest))
    attend(w, g.div(e, g.reduction(e, ADD).set_dim([B, H, S, 1])))
    return "subtracted from", lambda x: x.softmax(-1)


def sum_of_something_else(w):
    g = w.graph
    p = scores(w)
    e = g.exp(p)
    attend(w, g.div(e, g.reduction(g.exp(g.neg(p)), ADD).set_dim([B, H, S, 1])))
    return "", lambda x: x.exp() / (-x).exp().sum(-1, keepdim=True)


def scores_that_are_needed(w):
    p = scores(w)
    w.output("x", p, FLOAT)
    attend(w, softmax(w.graph, p))
    return "needed besides", lambda x: x.softmax(-1)


def scores_that_are_read(w):
    p = scores(w)
    w.output("x", w.graph.mul(p, 1.0), FLOAT)
    attend(w, softmax(w.graph, p))
    return "needed besides", lambda x: x.softmax(-1)


def exponentials_that_are_needed(w):
    g = w.graph
    p = scores(w)
    e = g.exp(p)
    w.output("e", e, FLOAT)
    attend(w, g.div(e, g.reduction(e, ADD).set_dim([B, H, S, 1])))
    return "needed besides", lambda x: x.softmax(-1)


def scaled_after_the_softmax(w):
    g = w.graph
    attend(w, g.mul(softmax(g, scores(w)), 1.7))
    return "after the softmax", lambda x: x.softmax(-1) * 1.7


def hidden_rows(w):
    """A window ends before the last queries."""
    g = w.graph
    p = scores(w, queries=70)
    i, j = indices(g, p)
    attend(w, softmax(g, select(w, p, g.cmp_lt(i, g.add(j, 9)), -1e9)))
    seen = torch.arange(70)[:, None] < torch.arange(T) + 9
    return "as −∞ says", lambda x: x.masked_fill(~seen, -1e9).softmax(-1)


def finite_padding(w):
    g = w.graph
    p = scores(w)
    p = select(w, p, g.cmp_lt(g.gen_index(p, 3), lengths(w, "lens_kv")), -1e9)
    attend(w, softmax(g, p))
    return "as −∞ says", lambda x: x.masked_fill(~padded(), -1e9).softmax(-1)


def strictly_below(w):
    g = w.graph
    p = scores(w)
    i, j = indices(g, p)
    attend(w, softmax(g, select(w, p, g.cmp_gt(g.add(i, 1), g.add(j, 2)), -1e9)))
    return "diagonal", lambda x: x.masked_fill(~band(-2), -1e9).softmax(-1)


def rounded_indices(w):
    """Indices in bfloat16 are whole numbers up to 256 only."""
    g = w.graph
    p = scores(w)
    i, j = (g.identity(one).set_data_type(BF16) for one in indices(g, p))
    far = g.add(j, 300).set_data_type(BF16)
    attend(w, softmax(g, select(w, p, g.cmp_ge(g.add(i, 330).set_data_type(BF16), far), -1e9)))
    i, j = (torch.arange(n).bfloat16() for n in (S, T))
    seen = (i + 330)[:, None] >= j + 300
    return "exactly", lambda x: x.masked_fill(~seen, -1e9).softmax(-1)


def negative_scale(w):
    """On an operand; on the product it would be part of a function of scores."""
    g = w.graph
    q = g.mul(w.given("q", B, H, S, D), -SCALE)
    k = g.transpose(w.given("k", B, H_KV, T, D), [0, 1, 3, 2])
    attend(w, softmax(g, g.matmul(q, k)))
    return "positive scales", lambda x: (-x).softmax(-1)


def dropped_and_rounded(w):
    g = w.graph
    kept = g.rng((B, H, S, T), seed=3, offset=5, bernoulli_probability=0.7)
    dropped = g.mul(g.mul(softmax(g, scores(w)), 1 / 0.7), kept)
    attend(w, dropped.set_data_type(torch.float8_e4m3fn))
    mask = kept_by_dropout(0.3, 3, 5)

    def rounded(x):
        return (x.softmax(-1) / 0.7 * mask).to(torch.float8_e4m3fn).to(x.dtype)

    return "is kept as FP8_E4M3", rounded


def values_are_scaled(w):
    v = w.graph.mul(w.given("v", B, H_KV, T, D_V), 1.3)
    attend(w, softmax(w.graph, scores(w)), v)
    return "V is scaled", lambda x: x.softmax(-1) * 1.3


def no_softmax(w):
    attend(w, scores(w))
    return "", lambda x: x


def dropped_in_another_proportion(w):
    g = w.graph
    kept = g.rng((B, H, S, T), seed=3, offset=5, bernoulli_probability=0.8)
    attend(w, g.mul(g.mul(softmax(g, scores(w)), kept), 1.5))
    mask = kept_by_dropout(0.2, 3, 5)
    return "keeps 0.8 and what is kept is multiplied by 1.5", lambda x: x.softmax(-1) * mask * 1.5


def times_other_numbers(w):
    g = w.graph
    drawn = g.rng((B, H, S, T), distribution="UNIFORM", seed=3, offset=5)
    attend(w, g.mul(softmax(g, scores(w)), drawn))
    u = uniform_apart(3, 5, (B * H, S, T), "cpu").reshape(B, H, S, T)
    return "is UNIFORM", lambda x: x.softmax(-1) * u


def dropped_by_a_mask(w):
    g, kept = w.graph, torch.rand(B, H, S, T, generator=torch.Generator().manual_seed(2)) < 0.8
    mask = w.given("kept", values=kept.to(w.element))
    attend(w, g.mul(g.mul(softmax(g, scores(w)), mask), 1 / 0.8))
    return "but no mask", lambda x: x.softmax(-1) * kept / 0.8


LEFT = [
    mask_after_the_softmax,
    softmax_over_queries,
    softmax_over_queries_in((B, H, 1, T)),
    softmax_over_queries_in((B, 1, S, 1)),
    largest_of_something_else,
    sum_of_something_else,
    scores_that_are_needed,
    scores_that_are_read,
    exponentials_that_are_needed,
    scaled_after_the_softmax,
    hidden_rows,
    finite_padding,
    strictly_below,
    rounded_indices,
    negative_scale,
    values_are_scaled,
    dropped_and_rounded,
    no_softmax,
    dropped_in_another_proportion,
    times_other_numbers,
    dropped_by_a_mask,
]


@pytest.mark.parametrize("write", LEFT, ids=lambda write: write.__qualname__)
def test_what_is_nearly_attention_stays_as_it_is(write, caplog):
    w = new(None)
    with caplog.at_level(logging.DEBUG, "kernel_api.graph"):
        why, probabilities = write(w)
        found = w.run()["o"]
    assert "sdpa" not in w.nodes()
    assert why in caplog.text and why in str(w.graph.explain())
    assert_product(w, found, probabilities)


def test_a_mask_of_nan_hides_nothing():
    """It is a function of scores, of which NaN comes."""
    w = new(None)
    g = w.graph
    p = scores(w)
    p = select(w, p, g.cmp_lt(g.gen_index(p, 3), lengths(w, "lens_kv")), math.nan)
    attend(w, softmax(g, p))
    found = w.run()["o"]
    assert found.isnan().any()
    assert_product(w, found, lambda x: x.masked_fill(~padded(), math.nan).softmax(-1))


@pytest.mark.parametrize("element", [torch.float32, torch.bfloat16], ids=str)
def test_attention_takes_the_place_where_a_kernel_takes_it(element):
    from kernel_api.graph._planning.composite import composite_attention
    from kernel_api.graph._planning.steps import Prober

    class Nothing(Prober):
        def kernels(self, args):
            return []

    w = new(None, element)
    plain(w)
    w.graph.validate()
    nodes = w.graph._validated()
    for device, cc in (("cpu", None), ("cuda", 90)):
        found = composite_attention(nodes, Prober(torch.device(device), cc))
        assert [node.op for node in found.nodes].count("sdpa") == 1 and not found.refusals
        left = composite_attention(nodes, Nothing(torch.device(device), cc))
        assert left.nodes == nodes and len(left.refusals) == 1

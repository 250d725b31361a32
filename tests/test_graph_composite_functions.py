"""What is pointwise between a product and a softmax becomes a function of attention's scores."""

from __future__ import annotations

import pytest
import torch
from support.composite_attention import (
    ATTENTION,
    INFINITY,
    SCALE,
    B,
    H,
    S,
    T,
    assert_product,
    attend,
    band,
    indices,
    lengths,
    new,
    padded,
    scores,
    select,
    softmax,
)


def bias_before_the_scale(w):
    g = w.graph
    p = g.add(scores(w, at="none"), w.given("bias", B, H, S, T))
    attend(w, softmax(g, g.mul(p, SCALE)))
    return lambda x: (x + w.data["bias"].to(x.dtype) * SCALE).softmax(-1)


def bias_behind_the_mask(w):
    g = w.graph
    p = scores(w)
    p = select(w, p, g.cmp_ge(*indices(g, p)))
    attend(w, softmax(g, g.add(p, w.given("bias", B, H, S, T))))
    hidden = ~band(0)
    return lambda x: (x + w.data["bias"].to(x.dtype)).masked_fill(hidden, -INFINITY).softmax(-1)


def small_fill(w):
    g = w.graph
    p = scores(w)
    attend(w, softmax(g, select(w, p, g.cmp_ge(*indices(g, p)), -3.0)))
    return lambda x: x.masked_fill(~band(0), -3.0).softmax(-1)


def every_other_key(w):
    g = w.graph
    p = scores(w)
    i, j = indices(g, p)
    attend(w, softmax(g, select(w, p, g.cmp_ge(g.add(i, i), j))))
    even = torch.arange(T) <= 2 * torch.arange(S)[:, None]
    return lambda x: x.masked_fill(~even, -INFINITY).softmax(-1)


def either_mask(w):
    g = w.graph
    p = scores(w)
    i, j = indices(g, p)
    seen = g.logical_or(g.cmp_ge(i, j), g.cmp_lt(j, 7))
    attend(w, softmax(g, select(w, p, seen)))
    full = band(0) | (torch.arange(T) < 7)
    return lambda x: x.masked_fill(~full, -INFINITY).softmax(-1)


def infinite_window(w):
    g = w.graph
    p = scores(w)
    i, j = indices(g, p)
    seen = g.logical_and(g.cmp_ge(i, j), g.cmp_lt(g.sub(i, j), INFINITY))
    attend(w, softmax(g, select(w, p, seen)))
    return lambda x: x.masked_fill(~band(0), -INFINITY).softmax(-1)


def mask_of_the_caller(w):
    g = w.graph
    mask = torch.rand(B, 1, S, T, generator=torch.Generator().manual_seed(5)) < 0.7
    p = select(w, scores(w), w.given("mask", values=mask.to(torch.uint8)))
    attend(w, softmax(g, p))
    return lambda x: x.masked_fill(~mask, -INFINITY).softmax(-1)


def finite_lengths(w):
    """A number that float16 has hides keys; a query whose keys are all hidden sees all alike."""
    g = w.graph
    p = scores(w)
    i, j = indices(g, p)
    seen = g.logical_and(g.cmp_lt(j, lengths(w, "lens_kv")), g.cmp_gt(g.add(j, 1), i))
    attend(w, softmax(g, select(w, p, seen, -65504.0)))
    return lambda x: x.masked_fill(~(padded() & band(None, 0)), -65504.0).softmax(-1)


def capped(w):
    g = w.graph
    p = g.mul(g.tanh(g.div(scores(w), 3.0)), 3.0)
    attend(w, softmax(g, g.add(p, w.given("bias", B, H, 1, T))))
    return lambda x: (3 * (x / 3).tanh() + w.data["bias"].to(x.dtype)).softmax(-1)


def negative(w):
    g = w.graph
    p = g.mul(scores(w), -1.3)
    attend(w, softmax(g, select(w, p, g.cmp_ge(*indices(g, p)))))
    return lambda x: (-1.3 * x).masked_fill(~band(0), -INFINITY).softmax(-1)


def sloped(w):
    """ALiBi, with slopes of the caller's."""
    g = w.graph
    p = scores(w)
    i, j = indices(g, p)
    slopes = w.given("slopes", 1, H, 1, 1, kind=torch.float32)
    p = g.add(p, g.mul(slopes, g.sub(j, i)))
    attend(w, softmax(g, select(w, p, g.cmp_ge(i, j))))
    far = torch.arange(T) - torch.arange(S)[:, None]
    return lambda x: (
        (x + w.data["slopes"].to(x.dtype) * far).masked_fill(~band(0), -INFINITY).softmax(-1)
    )


COMPUTED = [
    bias_before_the_scale,
    bias_behind_the_mask,
    small_fill,
    every_other_key,
    either_mask,
    infinite_window,
    mask_of_the_caller,
    finite_lengths,
    capped,
    negative,
    sloped,
]


@pytest.mark.parametrize("write", COMPUTED, ids=lambda write: write.__name__)
def test_a_function_of_scores_is_part_of_one_kernel(write):
    w = new()
    write(w)
    (kernel,) = w.planned()
    assert kernel.startswith(ATTENTION)


@pytest.mark.parametrize("write", COMPUTED, ids=lambda write: write.__name__)
def test_a_function_of_scores_is_right(write):
    w = new(None)
    probabilities = write(w)
    found = w.run()["o"]
    assert w.nodes().count("sdpa") == 1
    assert_product(w, found, probabilities)

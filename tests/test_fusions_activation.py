"""Squared ReLU and the gradients of activations with a factor per row, against torch."""

import pytest
import torch
from support.fusions import ACTIVATIONS, SETTINGS, Draw, close, computed, gradient

import kernel_api as ka

ALPHA = 0.7
NAMES = [name for name in ACTIVATIONS if name is not None]


@pytest.fixture(params=SETTINGS.values(), ids=list(SETTINGS))
def draw(request):
    return Draw(7, 13, 5, *request.param)


def test_srelu_is_its_formula(draw):
    A, B, prob = draw.A, draw.B, draw.rows()
    args = ka.fusions.gemm_srelu(
        A, B, out=draw.written(), preactivation=draw.written(), prob=prob, alpha=ALPHA
    )
    x = ALPHA * (A @ B)
    found = computed(args)
    close(found["preactivation"], x)
    close(found["out"], torch.relu(x) ** 2 * prob.unsqueeze(-1))


def test_dsrelu_is_its_formula(draw):
    A, B, pre, prob = draw.A, draw.B, draw.matrix(), draw.rows()
    args = ka.fusions.gemm_dsrelu(
        A,
        B,
        out=draw.written(),
        preactivation=pre,
        prob=prob,
        dprob=draw.reduced(*prob.shape),
        dbias=draw.reduced(*draw.batches, draw.N),
        alpha=ALPHA,
    )
    dy, above = ALPHA * (A @ B), torch.relu(pre)
    D = 2 * dy * above * prob.unsqueeze(-1)
    found = computed(args)
    close(found["out"], D)
    close(found["dprob"], (dy * above**2).sum(-1))
    close(found["dbias"], D.sum(-2))


def test_recompute_dsrelu_is_its_formula(draw):
    A, B, upstream, prob = draw.A, draw.B, draw.matrix(), draw.rows()
    args = ka.fusions.gemm_recompute_dsrelu(
        A,
        B,
        out=draw.written(),
        upstream=upstream,
        prob=prob,
        dprob=draw.reduced(*prob.shape),
        alpha=ALPHA,
    )
    above = torch.relu(ALPHA * (A @ B))
    found = computed(args)
    close(found["out"], 2 * above * upstream * prob.unsqueeze(-1))
    close(found["dprob"], (above**2 * upstream).sum(-1))


def check_gradients(found, activation, x, prob, dy):
    x, prob = x.clone().requires_grad_(), prob.clone().requires_grad_()
    result = ACTIVATIONS[activation](x) * prob.unsqueeze(-1)
    dx = gradient(result, x, dy)
    close(found["out"], dx)
    close(found["dprob"], gradient(result, prob, dy))
    close(found["dbias"], dx.sum(-2))


@pytest.mark.parametrize("activation", NAMES)
def test_the_gradient_of_an_activation_is_what_autograd_gives(activation, draw):
    A, B, pre, prob = draw.A, draw.B, draw.matrix(), draw.rows()
    args = ka.fusions.gemm_dactivation(
        A,
        B,
        out=draw.written(),
        preactivation=pre,
        activation=activation,
        prob=prob,
        dprob=draw.reduced(*prob.shape),
        dbias=draw.reduced(*draw.batches, draw.N),
        alpha=ALPHA,
    )
    check_gradients(computed(args), activation, pre, prob, ALPHA * (A @ B))


@pytest.mark.parametrize("activation", NAMES)
def test_the_gradient_at_a_recomputed_point_is_what_autograd_gives(activation, draw):
    A, B, bias, prob, dy = draw.A, draw.B, draw.columns(), draw.rows(), draw.matrix()
    args = ka.fusions.gemm_recompute_dactivation(
        A,
        B,
        out=draw.written(),
        upstream=dy,
        activation=activation,
        bias=bias,
        prob=prob,
        dprob=draw.reduced(*prob.shape),
        dbias=draw.reduced(*bias.shape),
        alpha=ALPHA,
    )
    x = ALPHA * (A @ B) + bias.unsqueeze(-2)
    check_gradients(computed(args), activation, x, prob, dy)


def test_the_activations_are_those_of_the_tests():
    assert set(ka.fusions.ACTIVATIONS) == set(NAMES)

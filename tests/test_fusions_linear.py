"""Products with factors, sums, activations and their largest magnitude, against torch."""

import pytest
import torch
from support.fusions import ACTIVATIONS, SETTINGS, Draw, close, computed

import kernel_api as ka

ALPHA, BETA = 0.7, -1.3


@pytest.fixture(params=SETTINGS.values(), ids=list(SETTINGS))
def draw(request):
    return Draw(7, 13, 5, *request.param)


def test_gemm_of_nothing_else_is_the_product_alone(draw):
    A, B, out = draw.A, draw.B, draw.written()
    args = ka.fusions.gemm(A, B, out=out)
    assert args.epilogue is None
    close(computed(args)["out"], A @ B)


@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("with_c", [False, True])
def test_gemm_adds_what_is_given(draw, with_c, with_bias, activation):
    A, B, C, bias = draw.A, draw.B, draw.matrix(), draw.columns()
    given = {"C": C, "beta": BETA} if with_c else {}
    given |= {"bias": bias} if with_bias else {}
    args = ka.fusions.gemm(A, B, out=draw.written(), alpha=ALPHA, activation=activation, **given)
    x = ALPHA * (A @ B) + BETA * C * with_c + bias.unsqueeze(-2) * with_bias
    close(computed(args)["out"], ACTIVATIONS[activation](x))
    assert set(args.epilogue.operands) == {"alpha", *given}


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gemm_bias_activation_keeps_the_preactivation(draw, activation):
    A, B, bias = draw.A, draw.B, draw.columns(draw.N)
    args = ka.fusions.gemm_bias_activation(
        A,
        B,
        out=draw.written(),
        bias=bias,
        activation=activation,
        preactivation=draw.written(),
        alpha=ALPHA,
    )
    x = ALPHA * (A @ B) + bias.unsqueeze(-2)
    found = computed(args)
    close(found["preactivation"], x)
    close(found["out"], ACTIVATIONS[activation](x))


def test_gemm_bias_activation_is_gelu_without_bias_by_default(draw):
    A, B = draw.A, draw.B
    args = ka.fusions.gemm_bias_activation(A, B, out=draw.written())
    close(computed(args)["out"], torch.nn.functional.gelu(A @ B))


def test_a_bias_is_one_for_all_batches_or_one_for_each():
    draw = Draw(4, 4, 4, batch=4)
    A, B = draw.A, draw.B
    for bias in (draw.random(4), draw.random(4, 4)):
        args = ka.fusions.gemm_bias_activation(A, B, out=draw.written(), bias=bias, activation=None)
        close(computed(args)["out"], A @ B + (bias if bias.dim() == 1 else bias[:, None]))


@pytest.mark.parametrize("activation", [None, "relu"])
def test_gemm_residual_adds_c(draw, activation):
    A, B, C, bias = draw.A, draw.B, draw.matrix(), draw.columns()
    args = ka.fusions.gemm_residual(
        A, B, out=draw.written(), C=C, alpha=ALPHA, beta=BETA, bias=bias, activation=activation
    )
    x = ALPHA * (A @ B) + BETA * C + bias.unsqueeze(-2)
    close(computed(args)["out"], ACTIVATIONS[activation](x))


def test_gemm_amax_is_of_the_values_before_they_are_rounded(draw):
    A, B = draw.A, draw.B
    args = ka.fusions.gemm_amax(
        A, B, out=draw.written(element=torch.float16), amax=draw.reduced(), alpha=-ALPHA
    )
    found = computed(args)
    close(found["amax"], (ALPHA * (A @ B)).abs().max())
    close(found["out"], (-ALPHA * (A @ B)).half())


def test_gemm_amax_may_be_one_per_batch():
    draw = Draw(7, 13, 5, batch=3)
    A, B = draw.A, draw.B
    args = ka.fusions.gemm_amax(A, B, out=draw.written(), amax=draw.reduced(3), alpha=ALPHA)
    close(computed(args)["amax"], (ALPHA * (A @ B)).abs().amax((1, 2)))


def test_factors_may_be_tensors(draw):
    A, B, C = draw.A, draw.B, draw.matrix()
    alpha, beta = torch.tensor(ALPHA), torch.tensor(BETA)
    args = ka.fusions.gemm(A, B, out=draw.written(), alpha=alpha, C=C, beta=beta)
    close(computed(args)["out"], alpha.double() * (A @ B) + beta.double() * C)

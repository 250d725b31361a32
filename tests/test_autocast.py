"""Layers under torch.autocast, which casts their operands as it does those of torch's own."""

import pytest
import torch

import kernel_api as ka

HALF = torch.bfloat16


def drawn(*shape, element=torch.float32):
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator).to(element).requires_grad_()


def linear(x, weight, bias):
    return ka.nn.linear_activation(x, weight, bias, activation="gelu")


def experts(x, weight, w_up, w_down):
    index = torch.arange(12).view(6, 2) % 4
    return ka.nn.moe(x, index, weight, w_up, w_down)


LAYERS = {
    "linear": (linear, [drawn(6, 16), drawn(64, 16), drawn(64)], (0, 1, 2)),
    "glu": (ka.nn.linear_swiglu, [drawn(6, 16), drawn(64, 16), drawn(64)], (0, 1, 2)),
    "moe": (
        experts,
        [drawn(6, 16), drawn(6, 2), drawn(4, 16, 64), drawn(4, 32, 16)],
        (0, 2, 3),  # weights of pairs are no operands of a product
    ),
    "attention": (ka.nn.attention, [drawn(2, 4, 8, 16) for _ in range(3)], (0, 1, 2)),
    "attention with a bias": (
        lambda q, k, v, bias: ka.nn.attention(q, k, v, bias=bias),
        [*(drawn(2, 4, 8, 16) for _ in range(3)), drawn(1, 4, 8, 8)],
        (0, 1, 2, 3),
    ),
}


def with_gradients(layer, operands, cast=(), enabled=False):
    leaves = [one.detach().requires_grad_() for one in operands]
    given = [one.to(HALF) if i in cast else one for i, one in enumerate(leaves)]
    with torch.autocast("cpu", dtype=HALF, enabled=enabled):
        y = layer(*given)
    return y, torch.autograd.grad(y.float().square().sum(), leaves)


@pytest.mark.parametrize("name", LAYERS)
def test_operands_are_cast_and_gradients_keep_their_types(name):
    layer, operands, cast = LAYERS[name]
    y, gradients = with_gradients(layer, operands, enabled=True)
    expected, wanted = with_gradients(layer, operands, cast)
    assert y.dtype is HALF
    torch.testing.assert_close(y, expected, rtol=0, atol=0)
    assert all(one.dtype is torch.float32 for one in gradients)
    for one, other in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


@pytest.mark.parametrize("name", LAYERS)
def test_operands_of_several_types_are_cast_to_one(name):
    """As they come: activations of what ran before, and parameters."""
    layer, operands, _ = LAYERS[name]
    x, *others = operands
    y, gradients = with_gradients(layer, [x.detach().to(HALF), *others], enabled=True)
    assert y.dtype is gradients[0].dtype is HALF
    assert {one.dtype for one in gradients[1:]} == {torch.float32}


@pytest.mark.parametrize("element", [torch.float64, torch.float16])
def test_what_torch_casts_is_cast(element):
    """Its products leave float64 alone."""
    operands = [drawn(6, 16, element=element), drawn(64, 16, element=element)]
    with torch.autocast("cpu", dtype=HALF):
        found = ka.nn.linear_activation(*operands, activation="relu")
        assert found.dtype is torch.nn.functional.linear(*operands).dtype


def test_operands_of_eight_bits_stay_as_they_are():
    x, weight = (torch.ones(16, 16).to(torch.float8_e4m3fn) for _ in range(2))
    outside = ka.nn.linear_activation(x, weight, activation="relu")
    with torch.autocast("cpu", dtype=torch.float16):
        assert ka.nn.linear_activation(x, weight, activation="relu").dtype is outside.dtype


def test_autocast_of_another_device_casts_nothing():
    torch.set_autocast_enabled("cuda", True)
    try:
        assert linear(drawn(6, 16), drawn(64, 16), drawn(64)).dtype is torch.float32
    finally:
        torch.set_autocast_enabled("cuda", False)


def test_operators_take_operands_as_they_are():
    """Their types say what is computed."""
    A, B = torch.randn(6, 16), torch.randn(16, 8)
    with torch.autocast("cpu", dtype=HALF):
        found = ka.ops.gemm(A, B)
    assert found.dtype is torch.float32
    torch.testing.assert_close(found, A @ B)


def test_torch_compile_sees_it():
    operands = drawn(6, 16), drawn(64, 16), drawn(64)

    def layer(*given):
        with torch.autocast("cpu", dtype=HALF):
            return linear(*given)

    found = torch.compile(layer, backend="aot_eager", fullgraph=True)(*operands)
    torch.testing.assert_close(found, layer(*operands), rtol=0, atol=0)

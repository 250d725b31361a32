"""Layers under torch.autocast, which casts their operands as it does those of torch's own."""

import pytest
import torch

import kernel_api as ka
import kernel_api.graph as cudnn
from kernel_api.errors import DeviceError

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
    "mlp": (ka.nn.mlp, [drawn(6, 16), drawn(64, 16), drawn(8, 32), drawn(64)], (0, 1, 2, 3)),
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


@pytest.mark.parametrize("bits", [8, 64])
def test_products_of_8_and_64_bits_stay_as_they_are_with_all_that_comes_with_them(bits):
    element = torch.int8 if bits == 8 else torch.float64
    x, weight = torch.ones(4, 16, dtype=element), torch.ones(8, 16, dtype=element)
    bias = torch.full((8,), 1001.0, dtype=torch.float64 if bits == 64 else torch.float32)
    with torch.autocast("cpu", dtype=HALF):
        found = ka.nn.linear_activation(x, weight, bias, activation="relu")
    assert torch.equal(found, torch.full_like(found, 1017))


def test_meta_tensors_are_refused_as_elsewhere():
    x, weight = torch.empty(4, 16, device="meta"), torch.empty(64, 16, device="meta")
    with pytest.raises(DeviceError, match="is a meta or fake tensor"):
        ka.nn.linear_swiglu(x, weight)
    compiled = torch.compile(ka.nn.linear_swiglu, backend="aot_eager", fullgraph=True)
    assert compiled(x, weight).shape == (4, 32)


# Where types are said, autocast has no say -----------------------------------------------


def test_a_wrong_kernel_is_wrong_under_autocast_too(monkeypatch):
    A, B = torch.randn(64, 128), torch.randn(128, 64)
    args = ka.GemmArguments(A, B, torch.empty(64, 64))
    (kernel,) = ka.get_kernels(args, providers=["torch"])
    real = torch.mm

    def rounding(a, b, out=None):
        found = real(a.half().float(), b.half().float())
        return found if out is None else out.copy_(found)

    monkeypatch.setattr(torch, "mm", rounding)
    with torch.autocast("cpu", dtype=HALF):
        assert not ka.verify(kernel, args)


def test_attention_by_products_of_matrices_is_computed_in_its_own_type():
    """Which serves grouped heads on the CPU; float16 holds no such value."""
    q, k = torch.randn(1, 4, 16, 16), torch.randn(1, 2, 16, 16)
    v = torch.full_like(k, 1e5)
    with torch.autocast("cpu", dtype=torch.float16):
        assert ka.ops.sdpa(q, k, v).isfinite().all()


def test_graphs_compute_in_their_own_types():
    element = cudnn.data_type.FLOAT
    graph = cudnn.pygraph(io_data_type=element, compute_data_type=element)
    x, weight, out = torch.full((4, 8), 300.0), torch.full((8, 4), 300.0), torch.empty(4, 4)
    X, W = graph.tensor_like(x), graph.tensor_like(weight)
    Y = graph.matmul(X, W)
    Y.set_output(True)
    graph.build([cudnn.heur_mode.FALLBACK])
    workspace = torch.empty(max(graph.get_workspace_size(), 1), dtype=torch.uint8)
    with torch.autocast("cpu", dtype=torch.float16):
        graph.execute({X: x, W: weight, Y: out}, workspace)
    assert torch.equal(out, x @ weight)


def test_torch_compile_sees_it():
    operands = drawn(6, 16), drawn(64, 16), drawn(64)

    def layer(*given):
        with torch.autocast("cpu", dtype=HALF):
            return linear(*given)

    found = torch.compile(layer, backend="aot_eager", fullgraph=True)(*operands)
    torch.testing.assert_close(found, layer(*operands), rtol=0, atol=0)

"""Attention with its gradients on this GPU, beside torch's: through autograd, torch's compiler, and
in a CUDA graph."""

import pytest
import torch

import kernel_api as ka
from kernel_api import masks

pytestmark = [pytest.mark.gpu, pytest.mark.compile, pytest.mark.timeout(900)]

#: Of the norm of a gradient: operands and results are rounded to bfloat16.
ERROR_ALLOWED = 0.02


def leaves(S=300, D=64, H_kv=4):
    generator = torch.Generator("cuda").manual_seed(0)
    shapes = ((2, S, 4, D), (2, S, H_kv, D), (2, S, H_kv, D))
    drawn = (torch.randn(shape, generator=generator, device="cuda") for shape in shapes)
    return [one.bfloat16().transpose(1, 2).requires_grad_() for one in drawn]


def upstream(out):
    generator = torch.Generator("cuda").manual_seed(1)
    return torch.randn(out.shape, generator=generator, device="cuda").to(out.dtype)


def results(function, operands):
    out = function(*operands)
    return [out.detach(), *torch.autograd.grad(out, operands, upstream(out))]


def of_torch(is_causal, H_kv):
    """The same in float32."""

    def function(q, k, v):
        return torch.nn.functional.scaled_dot_product_attention(
            q.float(), k.float(), v.float(), is_causal=is_causal, enable_gqa=H_kv != 4
        )

    return function


def check_alike(found, expected):
    for one, other in zip(found, expected, strict=True):
        error = (one.float() - other.float()).norm() / other.float().norm()
        assert error <= ERROR_ALLOWED, float(error)


@pytest.mark.parametrize("H_kv", [4, 1])
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("deterministic", [False, True], ids=["any order", "deterministic"])
def test_gradients_are_those_of_torch(is_causal, H_kv, deterministic):
    mask = masks.Causal() if is_causal else None

    def ours(q, k, v):
        return ka.ops.sdpa(q, k, v, mask=mask)

    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(deterministic)
    try:
        found = results(ours, leaves(H_kv=H_kv))
    finally:
        torch.use_deterministic_algorithms(before)
    check_alike(found, results(of_torch(is_causal, H_kv), leaves(H_kv=H_kv)))


def test_torch_compiles_a_layer_with_its_gradients():
    def layer(q, k, v):
        out = ka.nn.attention(q * 1.5, k, v, mask=masks.Causal())
        return torch.nn.functional.silu(out)

    torch._dynamo.reset()
    found = results(torch.compile(layer, fullgraph=True), leaves())
    check_alike(found, results(layer, leaves()))


def test_a_graph_holds_both_passes():
    operands = leaves()

    def both():
        return results(lambda q, k, v: ka.ops.sdpa(q, k, v, mask=masks.Causal()), operands)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        both()
    torch.cuda.current_stream().wait_stream(side)
    dO = upstream(operands[0])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = ka.ops.sdpa(*operands, mask=masks.Causal())
        found = [out, *torch.autograd.grad(out, operands, dO)]
    with torch.no_grad():
        for operand in operands:
            operand.mul_(-0.5)
    graph.replay()
    torch.cuda.synchronize()
    expected = of_torch(True, 4)(*operands)
    gradients = torch.autograd.grad(expected, operands, dO.float())
    check_alike([one.detach() for one in found], [expected.detach(), *gradients])

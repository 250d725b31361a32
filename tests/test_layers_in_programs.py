"""Layers of kernel_api.nn in programs that torch.export and make_fx give: they train as in eager
mode, whatever needed a gradient when they were traced."""

import pytest
import torch
from support.programs import TRACERS

import kernel_api as ka

#: Layers, and the shapes of what may need a gradient.
LAYERS = {
    "rmsnorm": (lambda x, w: ka.nn.rmsnorm(x, w), [(2, 3, 16), (16,)]),
    "rmsnorm of x alone": (lambda x: ka.nn.rmsnorm(x, eps=1e-3), [(4, 16)]),
    "layernorm": (lambda x, w, b: ka.nn.layernorm(x, w, b), [(4, 16), (16,), (16,)]),
    "linear_swiglu": (lambda x, w, b: ka.nn.linear_swiglu(x, w, b), [(4, 16), (64, 16), (64,)]),
    "attention": (lambda q, k: ka.nn.attention(q, k, k), [(1, 4, 5, 16), (1, 2, 5, 16)]),
}


def leaves(shapes):
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    return [one.requires_grad_() for one in drawn]


def gradients(call, given):
    y = call(*given)
    upstream = torch.linspace(-1, 1, steps=y.numel(), dtype=y.dtype).view(y.shape)
    return [y.detach(), *torch.autograd.grad(y, given, upstream)]


@pytest.mark.parametrize(
    ("name", "tracer"),
    [
        *(("rmsnorm", tracer) for tracer in TRACERS),
        *((name, "export") for name in LAYERS if name != "rmsnorm"),
    ],
)
def test_programs_train(name, tracer):
    layer, shapes = LAYERS[name]

    def block(x, *weights):
        return x.mean() + layer(x, *weights)

    given = leaves(shapes)
    program = TRACERS[tracer](block, given)
    expected = gradients(block, given)
    torch._dynamo.reset()
    for one in (program, torch.compile(program, backend="aot_eager")):
        torch.testing.assert_close(gradients(one, given), expected)

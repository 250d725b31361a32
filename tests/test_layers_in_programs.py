"""Layers of kernel_api.nn in programs that torch.export and make_fx give: they train as in eager
mode, whatever needed a gradient when they were traced."""

import itertools

import pytest
import torch
from support.programs import TRACERS
from support.sampling import some

import kernel_api as ka

ROUTING = torch.tensor([[0, 1], [3, 1], [2, 0], [1, -1]])

#: Layers, and the shapes of what may need a gradient.
LAYERS = {
    "rmsnorm": (lambda x, w: ka.nn.rmsnorm(x, w), [(2, 3, 16), (16,)]),
    "rmsnorm of a sum": (
        lambda x, residual: ka.nn.rmsnorm(x, residual=residual, eps=1e-3).out,
        [(4, 16), (4, 16)],
    ),
    "rmsnorm of x alone": (lambda x: ka.nn.rmsnorm(x, eps=1e-3), [(4, 16)]),
    "layernorm": (lambda x, w, b: ka.nn.layernorm(x, w, b), [(4, 16), (16,), (16,)]),
    "moe": (
        lambda x, p, u, d: ka.nn.moe(x, ROUTING, p, u, d, kind="geglu"),
        [(4, 16), (4, 2), (4, 16, 64), (4, 32, 16)],
    ),
    "linear_swiglu": (lambda x, w, b: ka.nn.linear_swiglu(x, w, b), [(4, 16), (64, 16), (64,)]),
    "mlp": (lambda x, u, d: ka.nn.mlp(x, u, d), [(4, 16), (64, 16), (16, 32)]),
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


@pytest.mark.parametrize(("name", "tracer"), some(itertools.product(LAYERS, TRACERS), 16))
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


@pytest.mark.parametrize("name", ["rmsnorm", "layernorm", "linear_swiglu", "mlp", "moe"])
@pytest.mark.parametrize("tracer", TRACERS)
def test_results_of_layers_in_programs_may_be_changed_in_place(name, tracer):
    layer, shapes = LAYERS[name]

    def block(x, *weights):
        return layer(x, *weights).add_(1)

    given = leaves(shapes)
    program = TRACERS[tracer](block, given)
    torch.testing.assert_close(gradients(program, given), gradients(block, given))


@pytest.mark.parametrize("name", ["rmsnorm", "moe"])
@pytest.mark.parametrize("region", ["cond", "nested_compile_region"])
def test_layers_train_in_what_may_not_write(name, region):
    layer, shapes = LAYERS[name]
    nested = torch.compiler.nested_compile_region(layer)

    def function(*given):
        if region == "cond":
            return torch.cond(given[0].sum() > 0, lambda *g: layer(*g), lambda *g: g[0] * 2, given)
        return nested(*given) + nested(*given)

    def expected(*given):
        return layer(*given) if region == "cond" else layer(*given) * 2

    given = leaves(shapes)
    given[0].data.abs_()
    torch._dynamo.reset()
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(gradients(compiled, given), gradients(expected, given))

"""Norms of graphs, and their gradients."""

import re

import pytest
import torch
from support.graph_operations import Nodes, apart, close, random

from kernel_api.errors import GraphError
from kernel_api.graph._enums import data_type, norm_forward_phase

DOUBLE = torch.float64
TRAINING, INFERENCE = norm_forward_phase.TRAINING, norm_forward_phase.INFERENCE
EPSILON = 0.037

#: Dim of the input, of scale, and the modes that are normalised.
CASES = {
    "layernorm": [
        ((3, 5, 7), (7,), (2,)),
        ((6, 9, 1, 1), (1, 9, 1, 1), (1,)),
        ((3, 4, 5, 2), (1, 4, 5, 2), (1, 2, 3)),
        ((5, 1), (1,), (1,)),
    ],
    "rmsnorm": [((3, 5, 7), (7,), (2,)), ((6, 9, 1, 1), (1, 9, 1, 1), (1,))],
    "adalayernorm": [((3, 5, 7), (3, 1, 7), (2,)), ((3, 5, 2, 7), (3, 1, 1, 7), (3,))],
    "instancenorm": [((3, 4, 5, 7), (1, 4, 1, 1), (2, 3)), ((3, 4, 9), (4,), (2,))],
    "batchnorm": [((3, 4, 5, 7), (1, 4, 1, 1), (0, 2, 3)), ((11, 4), (4,), (0,))],
}
EVERY = [(op, *case) for op, cases in CASES.items() for case in cases]
IDS = [f"{op}-{'x'.join(map(str, dim))}" for op, dim, *_ in EVERY]


def as_input(op, scale, rank):
    """Scale in the modes of the input."""
    if scale.dim() == 1 and op in ("batchnorm", "instancenorm"):
        return scale.view(1, -1, *(1 for _ in range(rank - 2)))
    return scale


def formula(op, x, scale, bias, modes, zero_centered=False):
    """(Y, mean, inverse deviation)."""
    mean = 0 * x.mean(modes, True) if op == "rmsnorm" else x.mean(modes, True)
    variance = ((x - mean) ** 2).mean(modes, True)
    inverse = 1 / torch.sqrt(variance + EPSILON)
    y = (x - mean) * inverse * (as_input(op, scale, x.dim()) + float(zero_centered))
    return (y if bias is None else y + as_input(op, bias, x.dim())), mean, inverse


def drawn(dim, parameters):
    x = apart(*dim) + 0.5 if len(dim) > 2 else random(*dim) + 0.5
    return x, random(*parameters, seed=1), random(*parameters, seed=2)


@pytest.mark.parametrize(("op", "dim", "parameters", "modes"), EVERY, ids=IDS)
def test_norms_and_their_statistics(op, dim, parameters, modes):
    x, scale, bias = drawn(dim, parameters)
    g = Nodes()
    given = {"input": g.given(x), "scale": g.given(scale), "bias": g.given(bias)}
    results = getattr(g, op)(**given, epsilon=g.passed(EPSILON))
    y, statistics = results[0], results[1:3] if op != "rmsnorm" else (None, results[1])
    g.run()
    exact = formula(op, x.double(), scale.double(), bias.double(), modes)
    same = formula(op, x, scale, bias, modes)
    close(g.value(y), exact[0], same[0])
    assert y.stride == tuple(x.stride())
    for tensor, one, other in zip(statistics, exact[1:], same[1:], strict=True):
        if tensor is not None:
            close(g.value(tensor), one, other)
            assert tensor.data_type is data_type.FLOAT
            assert tensor.dim == tuple(1 if m in modes else n for m, n in enumerate(dim))


@pytest.mark.parametrize("op", CASES)
@pytest.mark.parametrize("kind", [torch.int32, torch.bool], ids=str)
def test_norms_of_whole_numbers_are_those_of_their_values(op, kind):
    dim, parameters, _ = CASES[op][0]
    x, scale, bias = (one.mul(3).to(kind) for one in drawn(dim, parameters))
    found = []
    for values in (x, x.float()):
        g = Nodes()
        given = {"input": g.given(values), "scale": g.given(scale.float())}
        y, *_ = getattr(g, op)(**given, bias=g.given(bias.float()), epsilon=g.passed(EPSILON))
        grad = g.given(random(*dim, seed=3))
        backward = getattr(g, f"{op}_backward")(grad, **given, epsilon=g.passed(EPSILON))
        g.run()
        found.append([g.value(one).float() for one in (y, *backward) if one is not None])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other.to(one.dtype))


@pytest.mark.parametrize(("op", "dim", "parameters", "modes"), EVERY, ids=IDS)
@pytest.mark.parametrize("saved", [True, False], ids=["saved", "computed"])
def test_gradients_of_norms_are_those_of_autograd(op, dim, parameters, modes, saved):
    x, scale, bias = drawn(dim, parameters)
    grad = random(*dim, seed=3)
    leaves = [one.double().requires_grad_() for one in (x, scale, bias)]
    y, mean, inverse = formula(op, *leaves, modes)
    exact = torch.autograd.grad(y, leaves, grad.double())
    g = Nodes()
    how = {"epsilon": EPSILON}
    if saved:
        how = {"inv_variance": g.given(inverse.detach().float())}
        if op != "rmsnorm":
            how["mean"] = g.given(mean.detach().float())
    if op == "rmsnorm":
        how["has_dbias"] = True
    results = getattr(g, f"{op}_backward")(g.given(grad), g.given(x), g.given(scale), **how)
    found = g.compute(*results)
    for tensor, value, one in zip(results, found, exact, strict=True):
        assert value.shape == one.shape
        # Terms of sums cancel; float32 is off by what the largest of them is.
        floor = 64 * torch.finfo(torch.float32).eps * float(grad.abs().sum())
        assert float((value.double() - one).abs().max()) <= floor, tensor
    assert results[0].stride == tuple(x.stride())


@pytest.mark.parametrize("op", ["layernorm", "rmsnorm"])
def test_gains_around_zero(op):
    x, scale, bias = drawn((3, 5, 7), (7,))
    g = Nodes()
    how = {"bias": g.given(bias), "epsilon": EPSILON, "zero_centered_gamma": True}
    found = g.compute(getattr(g, op)(g.given(x), g.given(scale), **how)[0])
    exact = formula(op, x.double(), scale.double(), bias.double(), (2,), True)[0]
    close(found, exact, formula(op, x, scale, bias, (2,), True)[0])
    grad = random(3, 5, 7, seed=5)
    g = Nodes()
    dx, _, _ = getattr(g, f"{op}_backward")(
        g.given(grad), g.given(x), g.given(scale), epsilon=EPSILON, zero_centered_gamma=True
    )
    leaf = x.double().requires_grad_()
    y = formula(op, leaf, scale.double(), None, (2,), True)[0]
    one = torch.autograd.grad(y, leaf, grad.double())[0]
    assert float((g.compute(dx).double() - one).abs().max()) < 1e-5


@pytest.mark.parametrize("op", ["layernorm", "rmsnorm", "adalayernorm", "instancenorm"])
def test_statistics_are_given_unless_for_inference(op):
    def results(**how):
        g = Nodes()
        x, scale = g.unknown((3, 5, 7)), g.unknown((1, 1, 7) if "ada" not in op else (3, 1, 7))
        scale = g.unknown((5,)) if op == "instancenorm" else scale
        found = getattr(g, op)(input=x, scale=scale, bias=scale, epsilon=g.passed(1e-3), **how)
        g.infer()
        return found

    count = 2 if op == "rmsnorm" else 3
    for how in ({}, {"norm_forward_phase": TRAINING}):
        assert len(results(**how)) == count and None not in results(**how)
    found = results(norm_forward_phase=INFERENCE)
    assert len(found) == count and found[0] is not None and set(found[1:]) == {None}


def test_forms_of_the_reference_document():
    g = Nodes()
    x, gamma = g.given(random(2, 3, 8)), g.given(random(8, seed=1))
    y, inverse = g.rmsnorm(x, gamma, epsilon=1e-5)
    z, _, _ = g.layernorm(x, gamma, gamma, 1e-5, False, "norm")
    g.infer()
    assert y.dim == z.dim == (2, 3, 8) and inverse.dim == (2, 3, 1)
    assert g.nodes[1].name == "norm"


def test_running_statistics():
    x, scale, bias = drawn((3, 4, 5, 7), (1, 4, 1, 1))
    running = [random(1, 4, 1, 1, seed=5), random(1, 4, 1, 1, seed=6).abs()]
    g = Nodes()
    results = g.batchnorm(
        g.given(x), g.given(scale), g.given(bias), *map(g.given, running),
        epsilon=EPSILON, momentum=0.3,
    )  # fmt: skip
    found = g.compute(*results)
    module = torch.nn.BatchNorm2d(4, eps=EPSILON, momentum=0.3, dtype=DOUBLE)
    state = (scale, bias, *running)
    names = ("weight", "bias", "running_mean", "running_var")
    for name, value in zip(names, state, strict=True):
        getattr(module, name).data.copy_(value.flatten())
    exact = module(x.double()).detach()
    close(found[0], exact)
    close(found[3].flatten(), module.running_mean)
    close(found[4].flatten(), module.running_var)


def test_batchnorm_without_running_statistics_gives_none():
    g = Nodes()
    x, scale = g.unknown((3, 4, 5)), g.unknown((4,))
    assert g.batchnorm(x, scale, scale)[3:] == (None, None)
    g.infer()
    with pytest.raises(GraphError, match="peer_stats; statistics of other GPUs"):
        g.batchnorm(x, scale, scale, peer_stats=[x])


def test_batchnorm_for_inference():
    x, scale, bias = drawn((3, 4, 5, 7), (1, 4, 1, 1))
    mean, inverse = random(1, 4, 1, 1, seed=5), random(4, seed=6).abs()
    g = Nodes()
    y = g.batchnorm_inference(*map(g.given, (x, mean, inverse, scale, bias)))

    def exact(kind):
        r = inverse.to(kind).view(1, 4, 1, 1)
        return (x.to(kind) - mean.to(kind)) * r * scale.to(kind) + bias.to(kind)

    close(g.compute(y), exact(DOUBLE), exact(torch.float32))


def test_norms_say_what_does_not_fit():
    g = Nodes()
    x, scale = g.unknown((3, 5, 7)), g.unknown((6,))
    g.layernorm(x, scale, scale)
    with pytest.raises(GraphError, match=r"dim \[6\], which does not broadcast to its input"):
        g.infer()
    with pytest.raises(GraphError, match="pass it by name, norm_forward_phase="):
        g.layernorm(TRAINING, x, scale, scale)
    with pytest.raises(GraphError, match="neither inv_variance nor epsilon"):
        g.layernorm_backward(x, x, scale)
    g = Nodes()
    g.rmsnorm_backward(g.unknown((3, 5)), g.unknown((3, 7)), g.unknown((7,)), epsilon=0.1)
    with pytest.raises(GraphError, match=r"grad of dim \[3, 5\] but an input of dim \[3, 7\]"):
        g.infer()


def test_statistics_of_doubles_are_doubles():
    g = Nodes()
    x = g.given(random(3, 7, element=DOUBLE))
    y, inverse = g.rmsnorm(x, g.given(random(7, element=DOUBLE)), EPSILON)
    found, _ = g.compute(y, inverse)
    assert found.dtype is DOUBLE and inverse.data_type is data_type.DOUBLE


@pytest.mark.parametrize(
    ("op", "dim", "words"),
    [
        ("instancenorm", (8, 5), r"dim \[8, 5\]; expected \(N, C, spatial...\)"),
        ("batchnorm", (5,), r"dim \[5\]; expected \(N, C, ...\)"),
        ("adalayernorm", (5,), r"dim \[5\]; expected \(N, ..., D\)"),
    ],
)
def test_inputs_lack_the_modes_that_a_norm_is_about(op, dim, words):
    for backward in (False, True):
        g = Nodes()
        x, scale = g.unknown(dim), g.unknown((5,))
        if backward:
            getattr(g, f"{op}_backward")(x, x, scale, epsilon=EPSILON)
        else:
            getattr(g, op)(input=x, scale=scale, bias=scale, epsilon=EPSILON)
        with pytest.raises(GraphError, match=words):
            g.infer()


@pytest.mark.parametrize("dim", [(1,), (1, 1, 1), (1, 1, 5)])
def test_running_statistics_have_a_number_for_each_channel(dim):
    g = Nodes()
    x, scale = g.unknown((3, 4, 5)), g.unknown((4,))
    running = g.unknown(dim)
    g.batchnorm(
        input=x, scale=scale, bias=scale, epsilon=EPSILON, momentum=0.1, in_running_mean=running,
        in_running_var=running,
    )  # fmt: skip
    words = f"of dim {list(dim)}; expected [1, 4, 1], a number for each channel"
    with pytest.raises(GraphError, match=re.escape(words)):
        g.infer()


def test_batchnorm_for_inference_needs_channels():
    g = Nodes()
    one = g.unknown((5,))
    g.batchnorm_inference(one, one, one, one, one)
    with pytest.raises(GraphError, match=r"expected \(N, C, ...\)"):
        g.infer()

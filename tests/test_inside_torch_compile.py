"""What torch's compiler makes no node of is called between its graphs, and is right."""

import importlib.util

import pytest
import torch
from support.cute_on_cpu import formula, registered

import kernel_api as ka
import kernel_api.graph as cudnn

X, W = torch.randn(4, 8), torch.randn(8, 6)


def compiled(function, *given):
    torch._dynamo.reset()
    return torch.compile(function, backend="eager")(*given)


def close(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_a_graph_with_its_tensors():
    with cudnn.Graph() as graph:
        graph.relu(graph.matmul(X, W)).set_output(True)
    found = compiled(lambda x, w: graph(x * 2, w) + 1, X, W)
    close(found, (2 * X @ W).relu() + 1)


def test_a_graph_with_a_variant_pack():
    graph, out = cudnn.pygraph(), torch.full((4, 6), float("nan"))
    x, w = graph.tensor_like(X), graph.tensor_like(W)
    y = graph.matmul(x, w).set_output(True)
    graph.build([cudnn.heur_mode.A])

    def function(given, weight):
        graph.execute({x: given * 2, w: weight, y: out})
        return out + 1

    close(compiled(function, X, W), 2 * X @ W + 1)


@pytest.mark.parametrize("provider", ["reference", "torch", "cutedsl"])
def test_a_prepared_launch(provider, registry, monkeypatch):
    if provider == "cutedsl":
        registered(registry, monkeypatch)
    out = torch.full((4, 6), float("nan"))
    args = ka.GemmArguments(X, W, out)
    given = {} if provider == "cutedsl" else {"providers": [provider]}
    launch = ka.get_kernels(args, **given)[0].prepare(args)

    def function(x, w):
        launch(x * 2, w, out)
        return out + 1

    close(compiled(function, X, W), 2 * X @ W + 1)


@pytest.mark.parametrize("provider", ["reference", "cutedsl"])
def test_a_prepared_launch_with_an_epilogue(provider, registry, monkeypatch):
    if provider == "cutedsl":
        registered(registry, monkeypatch)
    out, pre, bias = torch.full((4, 6), float("nan")), torch.empty(4, 6), torch.randn(6)
    epilogue = ka.EpilogueArguments(formula, bias=bias, alpha=0.75, pre=pre)
    args = ka.GemmArguments(X, W, out, epilogue=epilogue)
    given = {} if provider == "cutedsl" else {"providers": [provider]}
    launch = ka.get_kernels(args, **given)[0].prepare(args)

    def function(x, w, bias):
        launch(x * 2, w, out, bias=bias, alpha=0.5)
        return out + 1

    close(compiled(function, X, W, -bias), (X @ W - bias).relu() + 1)


def plain(x, w, out):
    return ka.GemmArguments(x * 2, w, out)


def with_epilogue(x, w, out):
    epilogue = ka.EpilogueArguments(lambda accumulator, b: accumulator + b, b=x.new_zeros(6))
    return ka.GemmArguments(x * 2, w, out, epilogue=epilogue)


def with_an_operand_of_any_name(x, w, out):
    epilogue = ka.EpilogueArguments(lambda acc, function: acc + function, function=x.new_zeros(6))
    return ka.GemmArguments(x * 2, w, out, epilogue=epilogue)


def with_scales(x, w, out):
    scales = (torch.full((), factor, dtype=torch.float32) for factor in (2.0, 1.0))
    operands = map(ka.ScaledOperand, (x, w), scales, [ka.ScaleMode.PER_TENSOR] * 2)
    return ka.GemmArguments(*operands, out)


@pytest.mark.filterwarnings("error:Dynamo does not know")
@pytest.mark.parametrize("make", [plain, with_epilogue, with_an_operand_of_any_name, with_scales])
def test_a_kernel_that_is_run(make):
    out = torch.full((4, 6), float("nan"))

    def function(x, w):
        args = make(x, w, out)
        ka.get_kernels(args)[0].run(args)
        assert ka.explain(args).accepted
        return out + 1

    torch._dynamo.utils.counters.clear()
    close(compiled(function, X, W), 2 * X @ W + 1)
    # Neither what arguments remember of others like them nor what is behind a query is read.
    assert torch._dynamo.utils.counters["frames"]["total"] < 20


def test_a_launch_is_prepared():
    out = torch.full((4, 6), float("nan"))

    def function(x, w):
        args = ka.GemmArguments(x, w, out)
        ka.get_kernels(args)[0].prepare(args)(x * 2, w, out)
        return out + 1

    close(compiled(function, X, W), 2 * X @ W + 1)


def test_whether_a_compiler_reads_is_asked_without_a_look_at_all_modules():
    """It would make a variable of each, whenever it reads that."""
    utils = importlib.util.find_spec("kernel_api.utils")
    module = importlib.util.module_from_spec(utils)
    utils.loader.exec_module(module)  # torch is there by now
    module.sys = None
    assert not module.is_traced()
    assert not module.is_watched()

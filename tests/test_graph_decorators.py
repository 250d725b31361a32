"""``graph``, ``jit`` and ``graph_cache``: graphs that functions make, built and kept."""

import math
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy
import pytest
import torch

import kernel_api.graph as cudnn
from kernel_api.errors import ArgumentError
from kernel_api.graph._decorators import default_key


def biased_product(a, b, bias, slope=0.3):
    """A graph of leaky_relu(a @ b + bias)."""
    with cudnn.graph(None, io_data_type="float32") as (g, _):
        a, b, bias = (g.tensor_like(t) for t in (a, b, bias))
        out = g.leaky_relu(g.bias(g.matmul(a, b), bias), negative_slope=slope)
        out.set_output(True)
    return g, [a, b, bias, out]


@dataclass
class Settings:
    number: float
    inputs: list
    title: str = field(default="", compare=False)


class OtherSettings(Settings):
    pass


def tensors(m=5, k=7, n=9):
    return torch.randn(m, k), torch.randn(k, n), torch.randn(n)


def run(made, *inputs):
    g, uids = made
    out = torch.empty(inputs[0].shape[0], inputs[1].shape[1])
    g.execute(dict(zip(uids, (*inputs, out), strict=True)))
    return out


def counted(function):
    """The function, with its calls in ``calls``."""

    def call(*args, **named):
        call.calls += 1
        return function(*args, **named)

    call.calls = 0
    return call


# graph ---------------------------------------------------------------------------------------


def test_a_block_yields_a_graph_with_the_types_of_cudnn():
    handle = cudnn.create_handle("cpu")
    with cudnn.graph(handle, "mine") as (g, nothing):
        assert isinstance(g, cudnn.pygraph)
    assert nothing == []
    assert (g.handle, g.name) == (handle, "mine")
    assert g.io_data_type is cudnn.data_type.HALF
    assert g.intermediate_data_type is cudnn.data_type.FLOAT
    assert g.compute_data_type is cudnn.data_type.FLOAT
    assert g.get_execution_plan_count() == 0


def test_an_exception_in_a_block_is_the_users():
    with pytest.raises(ZeroDivisionError), cudnn.graph() as (g, _):
        g.relu(g.tensor(dim=(1 // 0,)))


# jit -----------------------------------------------------------------------------------------


def test_jit_builds_what_a_function_returns_and_gives_uids():
    inputs = tensors()
    g, uids = cudnn.jit(heur_modes=[cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])(biased_product)(
        *inputs
    )
    assert g.selected is not None
    assert all(isinstance(uid, int) for uid in uids)
    assert len(set(uids)) == 4
    a, b, bias = inputs
    expected = torch.nn.functional.leaky_relu(a @ b + bias, 0.3)
    torch.testing.assert_close(run((g, uids), *inputs), expected)


@pytest.mark.parametrize(
    ("modes", "found"),
    [
        (cudnn.heur_mode.FALLBACK, {"FALLBACK"}),
        ([cudnn.heur_mode.FALLBACK], {"FALLBACK"}),
        ("FALLBACK", {"FALLBACK"}),
        ([cudnn.heur_mode.FALLBACK, cudnn.heur_mode.A], {"FALLBACK", "A"}),
    ],
)
def test_modes_are_one_or_several(modes, found):
    g, _ = cudnn.jit(heur_modes=modes)(biased_product)(*tensors())
    assert {plan.mode.name for plan in g.plans} == found
    assert g.selected.mode is cudnn.heur_mode.FALLBACK


def test_jit_needs_no_parentheses_and_keeps_the_functions_name():
    made = cudnn.jit(biased_product)
    assert made.__name__ == "biased_product"
    assert made.__doc__ == biased_product.__doc__
    g, _ = made(*tensors())
    assert g.selected is not None


def test_what_was_planned_before_is_built():
    def planned(*inputs):
        g, made = biased_product(*inputs)
        g.create_execution_plans([cudnn.heur_mode.FALLBACK])
        return g, made

    g, _ = cudnn.jit(heur_modes=cudnn.heur_mode.A)(planned)(*tensors())
    assert g.selected.mode is cudnn.heur_mode.FALLBACK


def test_a_wrapped_graph_may_be_returned():
    def wrapped(x):
        with cudnn.Graph() as graph:
            y = graph.relu(x).set_output(True)
        return graph, (y, 99)

    x = torch.randn(3, 4)
    graph, uids = cudnn.jit(wrapped)(x)
    assert uids == [1, 99]
    assert torch.equal(graph(x), torch.relu(x))


@pytest.mark.parametrize(
    ("made", "what"),
    [
        (None, "a NoneType"),
        (3, "a int"),
        ((cudnn.Tensor, []), "(type, list)"),
        ((cudnn.pygraph(), 3), "(pygraph, int)"),
        ((cudnn.pygraph(), [], []), "(pygraph, list, list)"),
    ],
)
def test_another_result_is_an_error_that_names_the_function(made, what):
    def odd():
        return made

    with pytest.raises(cudnn.GraphError) as error:
        cudnn.jit(odd)()
    assert str(error.value) == f"odd returned {what}; expected a graph and a list of its tensors"


def test_an_error_while_building_comes_again_at_the_next_call():
    def never(x):
        with cudnn.graph() as (g, _):
            out = g.matmul(g.tensor_like(x), g.tensor_like(x)).set_output(True)
        return g, [out]

    made = cudnn.jit(cudnn.graph_cache()(never))
    for _ in range(2):
        with pytest.raises(cudnn.GraphError, match="matmul"):
            made(torch.randn(3, 4))


# graph_cache ---------------------------------------------------------------------------------


def test_a_cached_graph_is_built_once():
    function = counted(biased_product)
    made = cudnn.jit(cudnn.graph_cache()(function))
    first, uids = made(*tensors())
    builds = []
    first.build = lambda modes: builds.append(modes)
    again, same = made(*tensors())
    assert again is first
    assert same == uids
    assert function.calls == 1
    assert builds == []
    inputs = tensors()
    a, b, bias = inputs
    expected = torch.nn.functional.leaky_relu(a @ b + bias, 0.3)
    torch.testing.assert_close(run((again, same), *inputs), expected)


def test_by_default_the_key_is_all_that_a_graph_depends_on():
    function = counted(lambda *args, **named: (cudnn.pygraph(), []))
    cached = cudnn.graph_cache()(function)
    handle, other = cudnn.create_handle("cpu"), cudnn.create_handle("cpu")
    a = torch.randn(4, 6)
    different = [
        lambda: cached(a),
        lambda: cached(torch.randn(4, 5)),
        lambda: cached(torch.randn(6, 4).T),
        lambda: cached(torch.randn(4, 12)[:, ::2]),
        lambda: cached(a.double()),
        lambda: cached(a.to("meta")),
        lambda: cached(a, 1),
        lambda: cached(a, 1.0),
        lambda: cached(a, True),
        lambda: cached(a, "1"),
        lambda: cached(a, None),
        lambda: cached(x=a),
        lambda: cached(y=a),
        lambda: cached(a, handle),
        lambda: cached(a, other),
        lambda: cached([a, a]),
        lambda: cached((a, a)),
        lambda: cached(a, a),
        lambda: cached({"a": a}),
        lambda: cached({"b": a}),
        lambda: cached({"b": [a, (1, torch.float32)]}),
        lambda: cached({"b": [a, (1, torch.float16)]}),
        lambda: cached(),
        lambda: cached(0.0),
        lambda: cached(-0.0),
        lambda: cached([numpy.float32(0.0)]),
        lambda: cached([numpy.float32(-0.0)]),
        lambda: cached(math.nan),
        lambda: cached({1: a}),
        lambda: cached({1.0: a}),
        lambda: cached({1, 2}),
        lambda: cached({1.0, 2}),
        lambda: cached(Settings(1, [a])),
        lambda: cached(Settings(1.0, [a])),
        lambda: cached(Settings(1, [a, a])),
        lambda: cached(OtherSettings(1, [a])),
    ]
    for count, call in enumerate(different, 1):
        call()
        assert function.calls == count
    for call in different:
        call()
    assert function.calls == len(different)
    # What the elements are does not matter, nor the order of keywords.
    cached(torch.zeros(4, 6))
    cached(float("nan"))
    cached(Settings(1, [torch.zeros(4, 6)], title="another"))
    cached(x=a, y=a)
    cached(y=a, x=a)
    assert function.calls == len(different) + 1
    assert cached.cache_info() == (len(different) + 4, len(different) + 1, 256, len(different) + 1)


@pytest.mark.parametrize("numbers", [(0.0, -0.0), (-0.0, 0.0)])
def test_graphs_of_both_zeros(numbers):
    @cudnn.jit
    @cudnn.graph_cache()
    def quotient(a, number):
        with cudnn.graph(None, io_data_type="float32") as (g, _):
            a = g.tensor_like(a)
            out = g.div(a, number).set_output(True)
        return g, [a, out]

    a = torch.ones(2, 2)
    for number in numbers:
        graph, (given, found) = quotient(a, number)
        out = torch.empty(2, 2)
        graph.execute({given: a, found: out})
        assert torch.equal(out, a / number)


def test_a_tensor_that_is_given_twice_is_one_tensor_of_the_graph():
    handle = cudnn.create_handle("cpu")

    @cudnn.graph_cache()
    def total(handle, *terms, last):
        with cudnn.Graph(handle=handle) as g:
            sum_of_all = g.add(g.add(*terms), last)
            sum_of_all.set_output(True)
        return g

    x, y, z = (torch.randn(3, 4) for _ in "xyz")
    graphs = {}
    for given in ((x, x, x), (x, y, x), (x, x, y), (x, y, y), (x, y, z)):
        graph = total(handle, *given[:2], last=given[2])
        different = list({id(one): one for one in given}.values())
        torch.testing.assert_close(graph(*different), sum(given))
        graphs[id(graph)] = graph
    assert len(graphs) == 5
    assert total(handle, y, z, last=y) in graphs.values()


def test_what_has_no_hash_asks_for_a_key_of_ones_own():
    class Odd:
        __hash__ = None

    cached = cudnn.graph_cache()(lambda *args: (cudnn.pygraph(), []))
    with pytest.raises(
        ArgumentError, match=r"argument 0\[1\] is a Odd, .* give graph_cache a key_fn"
    ):
        cached([1, Odd()])
    assert cudnn.graph_cache(key_fn=len)(lambda odd: odd)([Odd()]) is not None


def test_a_default_key_holds_no_tensor():
    key = default_key(torch.randn(1000), x=[torch.randn(3)])
    assert not any(isinstance(one, torch.Tensor) for one in flat(key))


def flat(key):
    if isinstance(key, tuple):
        for one in key:
            yield from flat(one)
    else:
        yield key


def test_a_key_of_ones_own_gets_the_arguments():
    seen = []

    def key(a, b, *, scale):
        seen.append((a, b, scale))
        return a

    function = counted(lambda a, b, *, scale: (cudnn.pygraph(), [a, b, scale]))
    cached = cudnn.graph_cache(key_fn=key)(function)
    first = cached(1, 2, scale=3)
    assert cached(1, 20, scale=30) is first
    assert cached(2, 2, scale=3) is not first
    assert seen == [(1, 2, 3), (1, 20, 30), (2, 2, 3)]
    assert function.calls == 2


def test_the_oldest_goes_where_there_is_no_room():
    function = counted(lambda key: (cudnn.pygraph(), [key]))
    cached = cudnn.graph_cache(key_fn=lambda key: key, maxsize=2)(function)
    for key in (1, 2, 1, 3):
        cached(key)
    assert function.calls == 3
    assert cached.cache_info().currsize == 2
    cached(2)
    assert function.calls == 3
    cached(1)  # first in, first out, although it was used in between
    assert function.calls == 4


def test_the_cache_can_be_cleared():
    function = counted(lambda: (cudnn.pygraph(), []))
    cached = cudnn.graph_cache()(function)
    cached()
    cached.cache_clear()
    assert cached.cache_info() == (0, 0, 256, 0)
    cached()
    assert function.calls == 2


@pytest.mark.parametrize("maxsize", [0, -1])
def test_a_cache_has_room_for_one_at_least(maxsize):
    with pytest.raises(ArgumentError, match=f"maxsize is {maxsize}; expected 1 or more"):
        cudnn.graph_cache(maxsize=maxsize)(biased_product)


def test_a_key_is_made_by_a_function():
    with pytest.raises(ArgumentError, match="key_fn is a str; expected a function or None"):
        cudnn.graph_cache("shape")


def test_an_error_is_not_kept():
    answers = iter([ValueError("first"), (cudnn.pygraph(), [])])

    def function():
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    cached = cudnn.graph_cache()(function)
    with pytest.raises(ValueError, match="first"):
        cached()
    assert cached()[1] == []


# Threads -------------------------------------------------------------------------------------


def test_threads_that_ask_for_the_same_graph_share_one_that_is_made_and_built_once():
    builds = []

    def slow(*inputs):
        time.sleep(0.05)
        g, made = biased_product(*inputs)
        build = g.build

        def counting(modes):
            builds.append(threading.get_ident())
            time.sleep(0.05)
            build(modes)

        g.build = counting
        return g, made

    function = counted(slow)
    made = cudnn.jit(cudnn.graph_cache()(function))
    start = threading.Barrier(8)

    def call(_):
        start.wait()
        g, uids = made(*tensors())
        inputs = tensors()
        return g, run((g, uids), *inputs), inputs

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(call, range(8)))
    assert function.calls == 1
    assert len(builds) == 1
    assert len({id(g) for g, _, _ in found}) == 1
    for _, out, (a, b, bias) in found:
        torch.testing.assert_close(out, torch.nn.functional.leaky_relu(a @ b + bias, 0.3))


def test_threads_with_different_keys_do_not_wait_for_each_other():
    both_inside = threading.Barrier(2, timeout=30)

    def function(key):
        both_inside.wait()
        return cudnn.pygraph(), [key]

    cached = cudnn.graph_cache()(function)
    with ThreadPoolExecutor(2) as pool:
        assert [made[1] for made in pool.map(cached, (1, 2))] == [[1], [2]]


def test_a_function_may_call_itself():
    @cudnn.graph_cache()
    def function(depth):
        return function(depth - 1) if depth else (cudnn.pygraph(), [])

    assert function(3) is function(0)


# The module ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", cudnn.__all__)
def test_every_public_name_of_the_module_is_there(name):
    assert getattr(cudnn, name) is not None
    assert name in dir(cudnn)


def test_cudnns_name_of_the_error_is_the_same_class():
    assert cudnn.cudnnGraphNotSupportedError is cudnn.GraphNotSupportedError


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match=r"'kernel_api\.graph' has no attribute 'Grraph'"):
        _ = cudnn.Grraph


def test_the_version_is_this_librarys():
    major, minor, patch = map(int, cudnn.backend_version_string().split("."))
    assert cudnn.backend_version() == major * 10000 + minor * 100 + patch


def test_handles_have_a_device_and_a_stream():
    handle = cudnn.create_handle("cpu")
    assert handle.device.type == "cpu"
    assert cudnn.get_stream(handle) is None
    cudnn.set_stream(handle, 7)
    assert cudnn.get_stream(handle) == 7
    cudnn.destroy_handle(handle)
    for use in (cudnn.get_stream, cudnn.destroy_handle, lambda h: cudnn.set_stream(h, None)):
        with pytest.raises(cudnn.GraphError, match="destroyed; create_handle"):
            use(handle)
    with pytest.raises(cudnn.GraphError, match="expected a handle of create_handle"):
        cudnn.get_stream(3)

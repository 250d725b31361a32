"""Launches of graphs read what each execution gives, whatever the first one gave."""

import itertools

import pytest
import torch

import kernel_api.graph as cudnn
from kernel_api.graph import _execution

FLOAT, A = cudnn.data_type.FLOAT, cudnn.heur_mode.A
SHAPE = (2, 2, 8, 16)
Q, K, V = (torch.randn(SHAPE) for _ in range(3))


@pytest.fixture(autouse=True)
def fast(monkeypatch):
    """No launch makes its arguments anew, which would hide where they come from."""

    def rebuilding(self, step, kernel):
        raise AssertionError(f"the arguments of {kernel} are made at every launch")

    monkeypatch.setattr(_execution.Execution, "_rebuilding", rebuilding)


def new_graph():
    return cudnn.pygraph("", FLOAT, FLOAT, FLOAT, handle=cudnn.create_handle("cpu"))


def built(graph, output, name):
    output.set_output(True).set_name(name)
    graph.build([A])
    return graph


def attention(numbers=(), **options):
    graph = new_graph()
    q, k, v = (graph.tensor(SHAPE, name=name) for name in "qkv")
    of = {"scale": FLOAT, "seed": cudnn.data_type.INT64, "offset": cudnn.data_type.INT64}
    made = {
        name: graph.tensor((1, 1, 1, 1), name=name, data_type=of[name]).set_is_pass_by_value(True)
        for name in numbers
    }
    if "scale" in made:
        options["attn_scale"] = made["scale"]
    if "seed" in made:
        options["dropout"] = 0.5, made["seed"], made["offset"]
    if options.get("use_padding_mask"):
        int32 = cudnn.data_type.INT32
        for name in ("seq_len_q", "seq_len_kv"):
            options[name] = graph.tensor((2, 1, 1, 1), name=name, data_type=int32)
    out, _ = graph.sdpa(q, k, v, is_inference=True, **options)
    return built(graph, out.set_dim(SHAPE).set_stride(Q.stride()), "o")


def executed(graph, q=Q, k=K, v=V, **others):
    out = torch.empty(SHAPE)
    graph.execute({"q": q, "k": k, "v": v, "o": out, **others})
    return out


def same_as_alone(make, packs):
    """Every execution of one graph is what it is as the first of a graph of its own."""
    graph = make()
    for pack in packs:
        assert torch.equal(executed(graph, **pack), executed(make(), **pack)), pack


@pytest.mark.parametrize("first", [*itertools.product((0, 1, 2), repeat=3)], ids=str)
def test_one_tensor_given_under_several_names_is_several_the_next_time(first):
    given = torch.randn(3, 8, 8)

    def product(graph, a, b, c):
        out = torch.empty(8, 8)
        graph.execute({"a": a, "b": b, "c": c, "y": out})
        torch.testing.assert_close(out, a @ b + c)

    graph = new_graph()
    a, b, c = (graph.tensor((8, 8), name=name) for name in "abc")
    graph = built(graph, graph.add(graph.matmul(a, b), c), "y")
    product(graph, *(given[place] for place in first))
    for order in itertools.permutations(given):
        product(graph, *order)


@pytest.mark.parametrize("first", [(Q, K, K), (Q, Q, Q), (Q, Q, V), (Q, K, K.view(SHAPE))])
def test_attention_to_itself_is_followed_by_attention_to_others(first):
    packs = [dict(zip("qkv", given, strict=True)) for given in (first, (Q, K, V), (V, K, Q))]
    same_as_alone(lambda: attention(attn_scale=0.25), packs)


@pytest.mark.parametrize("share", ["a tensor", "memory", "nothing"])
def test_lengths_that_were_one_are_two_the_next_time(share):
    def lengths(*numbers):
        return torch.tensor(numbers, dtype=torch.int32).view(2, 1, 1, 1)

    first = lengths(8, 5)
    others = {"a tensor": first, "memory": first.view(2, 1, 1, 1), "nothing": lengths(8, 5)}
    pairs = [(first, others[share]), (lengths(8, 8), lengths(3, 4)), (lengths(2, 8), lengths(8, 8))]
    packs = [{"seq_len_q": one, "seq_len_kv": other} for one, other in pairs]
    same_as_alone(lambda: attention(use_padding_mask=True, attn_scale=0.25), packs)


@pytest.mark.parametrize("first", [1, 0.25, torch.tensor(1.0), -0.5, 0])
def test_a_scale_by_value_is_that_of_each_execution(first):
    scales = (first, 0.5, 2, 1, torch.tensor(0.7))
    same_as_alone(lambda: attention(["scale"]), [{"scale": scale} for scale in scales])


@pytest.mark.parametrize(
    "band", [{}, {"diagonal_band_left_bound": 3, "diagonal_band_right_bound": 0}]
)
def test_equal_numbers_are_told_apart(band):
    pairs = [(0, 0), (7, 3), (3, 0), (5, 0), (0, 9)]
    packs = [{"seed": seed, "offset": offset} for seed, offset in pairs]
    same_as_alone(lambda: attention(["seed", "offset"], **band), packs)

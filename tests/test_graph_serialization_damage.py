"""Serialised graphs with one thing changed and the right checksum: refused, or graphs."""

import contextlib
import copy
import random
import re

import pytest
import torch
from support.sampling import EVERY, some

import kernel_api.graph as cudnn
from kernel_api.errors import GraphNotSupportedError, KernelApiError, SerializedGraphError
from kernel_api.graph._enums import element_type
from kernel_api.graph._planning.plan import size_of
from kernel_api.graph._serialization import pack, unpack

A, FALLBACK = cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK

#: Values that are put in the place of each.
STRANGE = (
    None, True, "x", -1, 0, 1, 2, 3, 7, 2**40, 2**62, 10**30, 10**400, [], {}, [1], [None], [[0]],
    {"float": "0x1.8p+0"}, {"float": "nan"}, {"float": "0x1p+99999"}, {"float": 1}, {"tuple": []},
    {"dict": []}, "HALF", "BOOLEAN", "INT64", "FP8_E4M3", "cuda", "meta",
)  # fmt: skip


# Graphs ----------------------------------------------------------------------------------


def given(graph, *dim, kind=torch.float32, name=""):
    return graph.tensor_like(torch.empty(dim, dtype=kind), name)


def elements(g):
    x = given(g, 3, 4, name="x")
    y = g.bias(g.matmul(x, given(g, 4, 5)), given(g, 1, 5))
    y = g.mul(g.leaky_relu(g.relu(y, negative_slope=0.3, upper_clip=6.0), 0.2), 1.7)
    g.where = g.gen_index(y, axis=1).set_output(True)
    return g.add(y, g.tensor((1,), is_pass_by_value=True, name="number"))


def layouts(g):
    x = given(g, 4, 6)
    y = g.reshape(g.transpose(x, [1, 0]), cudnn.reshape_mode.LOGICAL, shape=[2, 12])
    z = g.reshape(g.slice(y, [slice(0, 2), slice(1, 9, 2)])).set_dim([2, 1, 4])
    return g.concatenate([z, given(g, 2, 1, 3)], axis=-1)


def sums(g):
    x = given(g, 2, 3, 4)
    g.reduction(x, cudnn.reduction_mode.NORM2, axis=-1).set_output(True)
    kept = g.rng([2, 3, 4], seed=3, offset=given(g, 1, kind=torch.int64), bernoulli_probability=0.5)
    g.rng([3], distribution="UNIFORM", uniform_min=-1.0).set_output(True)
    for one in g.genstats(x):
        one.set_output(True)
    return g.reduction(g.mul(x, kept), cudnn.reduction_mode.MAX).set_dim([2, 1, 1])


def norms(g):
    x, gamma = given(g, 5, 8), given(g, 8)
    y, mean, deviation = g.layernorm(
        x, gamma, gamma, 1e-5, norm_forward_phase=cudnn.norm_forward_phase.TRAINING
    )
    for one in (mean, deviation):
        one.set_output(True)
    for one in g.rmsnorm_backward(y, x, gamma, epsilon=1e-4)[:2]:
        one.set_output(True)
    image, channels, running = given(g, 2, 3, 4, 4), given(g, 3), given(g, 1, 3, 1, 1)
    for one in g.batchnorm(image, channels, channels, running, running):
        one.set_output(True)
    z = g.batchnorm_inference(image, running, running, channels, channels)
    return g.instancenorm(z, channels, channels, 1e-5)[0]


def convolutions(g):
    image, weight = given(g, 2, 4, 5, 5), given(g, 6, 2, 3, 3)
    y = g.conv_fprop(image, weight, padding=1, stride=[2, 1])
    g.conv_wgrad(image, y, padding=1, stride=[2, 1]).set_dim([6, 2, 3, 3]).set_output(True)
    dx = g.conv_dgrad(y, weight, padding=1, stride=[2, 1]).set_dim([2, 4, 5, 5])
    y.set_output(True)
    return dx


def blocks(g):
    data, scale = g.block_scale_quantize(given(g, 4, 10), 4)
    back = g.block_scale_dequantize(data, scale, 4)
    angles = given(g, 4, 2)
    gate, up = g.glu_pair(g.rope(back, angles, angles, 5, start=1, width=4), granularity="halves")
    token = g.reshape(g.mul(gate, up), shape=[1, 4, 5])
    starts, index = given(g, 2, 1, 1, kind=torch.int32), given(g, 6, kind=torch.int32)
    return g.moe_grouped_matmul(token, given(g, 2, 5, 3), starts, index, None, "GATHER", 2)


def attention(g):
    B, H, S, D = 2, 2, 6, 8
    q, k, v = (given(g, B, H, S, D) for _ in range(3))
    lengths = {f"seq_len_{one}": given(g, B, 1, 1, 1, kind=torch.int32) for one in ("q", "kv")}
    bias = given(g, 1, H, S, S)
    o, stats = g.sdpa(
        q, k, v, 0.5, use_padding_mask=True, generate_stats=True, use_alibi_mask=True,
        dropout=(0.25, given(g, 1, kind=torch.int64), 7), bias=bias, diagonal_band_left_bound=3,
        sink_token=given(g, 1, H, 1, 1), diagonal_band_right_bound=0, **lengths,
    )  # fmt: skip
    stats.set_output(True)
    factor = given(g, 1, H, 1, 1)
    more, _ = g.sdpa(
        o, k, v, attn_scale=given(g, 1, 1, 1, 1), use_causal_mask=True,
        score_mod=lambda g, s: g.add(g.mul(g.tanh(s), 4.5), g.mul(g.gen_index(s, 3), factor)),
    )  # fmt: skip
    for one in g.sdpa_backward(q, k, v, more, o, stats, bias=bias):
        one.set_output(True)
    return more


def pages(g):
    B, H, S, D = 2, 2, 3, 8
    q, k, v = given(g, B, H, S, D), given(g, 5, H, 4, D), given(g, 5, H, 4, D)
    table, lengths = (given(g, B, 1, n, 1, kind=torch.int32) for n in (2, 1))
    return g.sdpa(
        q, k, v, paged_attention_k_table=table, paged_attention_v_table=table,
        paged_attention_max_seq_len_kv=7, use_padding_mask=True, seq_len_kv=lengths,
        seq_len_q=given(g, B, 1, 1, 1, kind=torch.int32),
    )[0]  # fmt: skip


def ragged(g):
    B, H, S, D = 2, 2, 6, 8
    q, k, v = (g.tensor((B, H, S, D), (S * H * D, D, H * D, 1)) for _ in range(3))
    starts = given(g, B + 1, 1, 1, 1, kind=torch.int32)
    for one in (q, k, v):
        one.set_ragged_offset(starts)
    lengths = {f"seq_len_{one}": given(g, B, 1, 1, 1, kind=torch.int32) for one in ("q", "kv")}
    return g.sdpa(q, k, v, 0.5, use_padding_mask=True, **lengths)[0].set_ragged_offset(starts)


def bytes_of_attention(g):
    q, k, v = (given(g, 1, 2, 6, 16, kind=torch.float8_e4m3fn) for _ in range(3))
    scales = [given(g, 1, 1, 1, 1) for _ in range(5)]
    o, _, amax_s, amax_o = g.sdpa_fp8(q, k, v, *scales, 1.0, attn_scale=0.25)
    for one in (amax_s, amax_o):
        one.set_output(True)
    return o.set_data_type("bfloat16")


GRAPHS = (
    elements, layouts, sums, norms, convolutions, blocks, attention, pages, ragged,
    bytes_of_attention,
)  # fmt: skip


def content_of(make, mode):
    graph = cudnn.pygraph(
        io_data_type="float32", intermediate_data_type="float32", handle=cudnn.create_handle("cpu")
    )
    make(graph).set_output(True)
    graph.build([mode])
    return unpack(graph.serialize(as_bytes=True))


# Damage ----------------------------------------------------------------------------------


def places(value, path=()):
    """The paths to everything in lists and dicts."""
    items = enumerate(value) if isinstance(value, list) else ()
    items = value.items() if isinstance(value, dict) else items
    for key, inner in items:
        yield (*path, key)
        yield from places(inner, (*path, key))


def changed(content, path, change):
    content = copy.deepcopy(content)
    parent = content
    for key in path[:-1]:
        parent = parent[key]
    if change == "remove":
        del parent[path[-1]]
    elif change == "repeat" and isinstance(parent, list):
        parent.insert(path[-1], copy.deepcopy(parent[path[-1]]))
    else:
        parent[path[-1]] = copy.deepcopy(change)
    return content


def deserialised(content):
    """The graph; None where it is refused as it should be."""
    graph = cudnn.pygraph(handle=cudnn.create_handle("cpu"))
    try:
        return graph.deserialize(pack(content))
    except SerializedGraphError as error:
        assert "damaged" in str(error)
        assert not graph.nodes
    except GraphNotSupportedError:
        pass
    return None


def execute(graph):
    """Run on zeros; what the library refuses is refused by an error of its own."""
    tensors = [*graph.inputs, *graph.outputs]
    if any(size_of(tensor) > 2**20 for tensor in tensors):
        return
    pack = {}
    for tensor in tensors:
        memory = torch.zeros(size_of(tensor), dtype=torch.uint8)
        seen = memory.view(element_type(tensor.data_type).torch)
        pack[tensor] = 0 if tensor.is_pass_by_value else seen.as_strided(tensor.dim, tensor.stride)
    with contextlib.suppress(KernelApiError):
        graph.execute(pack)


CASES = {f"{make.__name__} {mode.name}": (make, mode) for make in GRAPHS for mode in (A, FALLBACK)}


@pytest.fixture(scope="module", params=CASES.values(), ids=CASES)
def content(request):
    return content_of(*request.param)


def test_graphs_that_are_not_damaged_come_back(content):
    graph = deserialised(content)
    assert graph is not None
    execute(graph)


def test_every_damage_of_a_node_is_found_or_gives_a_graph(content):
    """Then the graph is executed, for it may be found as late as that."""
    nodes = list(places(content["graph"]["nodes"], ("graph", "nodes")))
    draw = random.Random(0)
    for path in some(nodes, 20):
        for change in ("remove", "repeat", *draw.sample(STRANGE, 6)):
            graph = deserialised(changed(content, path, change))
            if graph is not None:
                execute(graph)


def test_damage_of_everything_else_is_found_or_gives_a_graph(content):
    others = [path for path in places(content) if path[:2] != ("graph", "nodes")]
    draw = random.Random(1)
    for path in draw.sample(others, min(len(others), 150 if EVERY else 100)):
        for change in ("remove", *draw.sample(STRANGE, 2)):
            graph = deserialised(changed(content, path, change))
            assert graph is None or graph.selected is not None


def test_damage_of_the_names_of_a_block_is_found():
    x, w = torch.empty(3, 4), torch.empty(4, 5)
    with cudnn.Graph(handle=cudnn.create_handle("cpu")) as graph:
        graph.relu(graph.matmul(x, w, name="mm")).set_output(True)
    content = unpack(graph.serialize(as_bytes=True))
    for path in places(content["interface"], ("interface",)):
        for change in ("remove", "repeat", *STRANGE):
            try:
                again = cudnn.Graph.deserialize(pack(changed(content, path, change)))
            except SerializedGraphError:
                continue
            assert again(torch.zeros(3, 4), torch.zeros(4, 5)).shape == (3, 5)


# What is said ----------------------------------------------------------------------------


def node_of(content, op):
    return next(one for one in content["graph"]["nodes"] if one["op"] == op)


def put(op, part, key, value):
    """Another attribute, input or result of a node; without a value none."""

    def change(content):
        node = node_of(content, op)
        kept = [[name, one] for name, one in node[part] if name != key]
        node[part] = kept if value is None else [*kept, [key, value]]

    return change


def of_tensor(key, value):
    def change(content):
        content["graph"]["tensors"][0][key] = value

    return change


SAID = {
    "a text for a number": (
        elements, put("relu", "attributes", "slope", "0.3"), "slope = '0.3'; expected a number",
    ),
    "no slope": (elements, put("leaky_relu", "attributes", "slope", None), "slope = None; exp"),
    "an attribute of others": (
        elements, put("relu", "attributes", "beta", 1), "attribute 'beta', which is none of relu",
    ),
    "no result": (elements, put("relu", "outputs", "OUT_0", None), "damaged"),
    "an index out of modes": (elements, put("gen_index", "attributes", "axis", 2), "has axis 2"),
    "no seed": (attention, put("sdpa", "inputs", "dropout_seed", None), "dropout_seed is not"),
    "a band that is a number": (attention, put("sdpa", "attributes", "band", -1), "band = -1; exp"),
    "a probability of 2": (attention, put("sdpa", "attributes", "dropout", 2), "dropout = 2; exp"),
    "a stride that reaches too far": (elements, of_tensor("stride", [10**30, 1]), "a whole number"),
    "elements without addresses": (elements, of_tensor("stride", [2**62, 1]), "less than 2**58"),
    "a number where memory is": (elements, of_tensor("is_pass_by_value", True), "one element"),
    "a padding below 0": (
        convolutions, put("conv_fprop", "attributes", "pre_padding", -1), "pre_padding = -1; exp",
    ),
    "a stride that is a text": (
        convolutions, put("conv_wgrad", "attributes", "stride", ["2"]), "stride = ['2']; expected",
    ),
    "a distribution that is none": (
        sums, put("rng", "attributes", "distribution", "EVEN"), "distribution = 'EVEN'; expected",
    ),
    "one limit": (sums, put("rng", "attributes", "uniform", [0]), "uniform = [0]; expected a list"),
    "an operation of planning": (
        ragged, lambda content: node_of(content, "sdpa").update(op="unpack"), "of graphs",
    ),
    "results of a function in the graph": (
        attention, lambda content: content["graph"].update(own_tensors=4), "tensors of the graph",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("make", "change", "words"), SAID.values(), ids=SAID)
def test_what_is_damaged_is_said(make, change, words):
    content = content_of(make, FALLBACK)
    change(content)
    with pytest.raises(SerializedGraphError, match=re.escape(words)):
        cudnn.pygraph().deserialize(pack(content))


def test_whatever_planning_raises_of_data_is_chained(monkeypatch):
    from kernel_api.graph._planning import listing

    def fails(*args):
        raise ZeroDivisionError("by 0")

    content = content_of(elements, A)
    monkeypatch.setattr(listing, "partition", fails)
    with pytest.raises(SerializedGraphError, match="damaged: ZeroDivisionError: by 0") as caught:
        cudnn.pygraph().deserialize(pack(content))
    assert isinstance(caught.value.__cause__, ZeroDivisionError)

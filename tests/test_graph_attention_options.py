"""Attention of graphs: options to masks and arguments, and what is refused."""

import pytest
import torch
from support.graph_attention import (
    BIAS,
    BLOCKS,
    BOTTOM,
    CASES,
    D_V,
    DOUBLE,
    H_KV,
    S_KV,
    S_Q,
    SCALE,
    SINK,
    B,
    D,
    H,
    attention,
    padded,
    tensors,
)
from support.graph_operations import Nodes, close, random

import kernel_api as ka
from kernel_api.errors import EpilogueError, GraphError, GraphNotSupportedError
from kernel_api.graph._enums import (
    attention_implementation,
    data_type,
    element_type,
)
from kernel_api.graph._operations import attention_arguments
from kernel_api.graph._operations._attention_arguments import alibi_slopes
from kernel_api.graph._operations.attention import block_table
from kernel_api.providers.reference import epilogue

# Options ---------------------------------------------------------------------------------


def attributes(**options):
    g = Nodes()
    q, k, v = (g.given(one) for one in tensors())
    g.sdpa(q, k, v, **options)
    return g.nodes[0].attributes


@pytest.mark.parametrize(
    ("options", "left", "right", "alignment"),
    [({"use_causal_mask": True}, None, 0, "top_left"),
     ({"use_causal_mask_bottom_right": True}, None, 0, "bottom_right"),
     ({"sliding_window_length": 1}, 0, None, "top_left"),
     ({"diagonal_band_left_bound": 5, "diagonal_band_right_bound": 3}, 4, 3, "top_left"),
     ({"diagonal_band_right_bound": 0, "diagonal_alignment": BOTTOM}, None, 0, "bottom_right"),
     ({"use_causal_mask_bottom_right": True, "sliding_window_length": 7}, 6, 0, "bottom_right")],
)  # fmt: skip
def test_bands_in_one_convention(options, left, right, alignment):
    expected = {"left": left, "right": right, "alignment": alignment}
    assert attributes(**options)["band"] == expected


def test_without_options_there_is_no_mask_and_a_scale_of_one():
    found = attributes(diagonal_alignment=BOTTOM, dropout=0.0)
    assert found["band"] is None and found["scale"] == 1.0 and found["dropout"] is None
    assert attributes(implementation=attention_implementation.AUTO)["alibi"] is False


@pytest.mark.parametrize(
    ("options", "given"),
    [({}, False), ({"is_inference": True}, False), ({"is_inference": False}, True),
     ({"generate_stats": True}, True), ({"generate_stats": True, "is_inference": True}, True)],
)  # fmt: skip
def test_stats_are_given_where_they_are_asked_for(options, given):
    g = Nodes()
    o, stats = g.sdpa(*(g.given(one) for one in tensors()), **options)
    assert o is not None and (stats is not None) == given


@pytest.mark.parametrize(
    ("options", "words"),
    [({"use_causal_mask": True, "use_causal_mask_bottom_right": True}, "both set"),
     ({"sliding_window_length": 0}, "expected 1 or more, because it counts the diagonal"),
     ({"sliding_window_length": 3, "diagonal_band_left_bound": 3}, "which are the same"),
     ({"diagonal_band_right_bound": -1}, "expected 0 or more"),
     ({"use_causal_mask": True, "diagonal_band_right_bound": 2}, "expected 0"),
     ({"use_causal_mask": True, "diagonal_alignment": BOTTOM}, "aligned TOP_LEFT"),
     ({"use_causal_mask_bottom_right": True, "diagonal_alignment": "TOP_LEFT"}, "is TOP_LEFT"),
     ({"use_alibi_mask": True}, "without a causal mask"),
     ({"use_padding_mask": True}, "needs seq_len_q and seq_len_kv"),
     ({"dropout": 1.0, "dropout_seed": 3}, "which would leave nothing to scale"),
     ({"dropout": 0.1}, "needs a seed"),
     ({"dropout": (0.1, 2)}, r"expected a probability, or \(probability, seed, offset\)"),
     ({"score_mod": 3}, "score_mod is a int; expected a function"),
     ({"score_mod": lambda g, s: None}, "score_mod returns None"),
     ({"score_mod": lambda g, s: g.reduction(s, "ADD")}, "expected pointwise operations only"),
     ({"paged_attention_max_seq_len_kv": 9}, "there are no page tables")],
)  # fmt: skip
def test_options_that_contradict_each_other(options, words):
    g = Nodes()
    q, k, v = (g.given(one) for one in tensors())
    with pytest.raises(GraphError, match=words):
        g.sdpa(q, k, v, **options)
    assert not g.nodes


def test_inputs_that_contradict_each_other():
    def words_of(q=(B, H, S_Q, D), k=(B, H_KV, S_KV, D), v=(B, H_KV, S_KV, D_V), **options):
        g = Nodes()
        given = {name: g.unknown(dim) for name, dim in options.items()}
        g.sdpa(g.unknown(q), g.unknown(k), g.unknown(v), **given)
        with pytest.raises(GraphError) as caught:
            g.infer()
        return str(caught.value)

    assert "expected (B, H, S, D)" in words_of(q=(B, S_Q, D))
    assert "q with D = 24 but k with D = 8" in words_of(q=(B, H, S_Q, 24))
    assert "q with 3 heads and k with 2; for grouped-query" in words_of(q=(B, 3, S_Q, D))
    assert "k with 2 heads but v with 1" in words_of(v=(B, 1, S_KV, D_V))
    assert "q with B = 2 but k with B = 3" in words_of(k=(3, H_KV, S_KV, D))
    assert "k with S_kv = 13 but v with S_kv = 12" in words_of(v=(B, H_KV, 12, D_V))
    assert "bias of dim [2, 4, 9, 5]" in words_of(bias=(B, H, S_Q, 5))
    assert "expected 4 elements" in words_of(sink_token=(1, 3, 1, 1))


def test_a_score_modification_stands_in_no_list():
    g = Nodes()
    q, k, v = (g.given(one) for one in tensors())
    table = g.given(random(S_Q, S_KV, seed=4))
    before = len(g.tensors)

    def changed(graph, score):
        graph.exp(score)  # which nothing needs
        return graph.add(graph.mul(score, 2.0), table)

    g.sdpa(q, k, v, score_mod=changed)
    (node,) = g.nodes
    assert [inner.op for inner in node.body.nodes] == ["mul", "add"]
    assert node.inputs["score_operands"] == (table,)
    assert len(g.tensors) == before + 1  # O
    g.infer()
    assert node.body.argument.dim == node.body.result.dim == (B, H, S_Q, S_KV)


def test_scores_of_operations_that_kernels_do_not_have():
    def arguments(score_mod):
        g = Nodes()
        q, k, v = (g.given(one) for one in tensors())
        g.sdpa(q, k, v, score_mod=score_mod)
        g.infer()
        given = {name: g.values[id(one)] for name, one in g.nodes[0].inputs.items()}
        return attention_arguments(g.nodes[0], given, {"O": torch.empty(B, H, S_Q, D_V)})

    with pytest.raises(GraphNotSupportedError, match="which kernels have no function for"):
        arguments(lambda g, s: g.sin(s))
    with pytest.raises(EpilogueError, match=r"the exponent is 17"):
        arguments(lambda g, s: g.pow(g.abs(s), 17.0))
    assert arguments(lambda g, s: g.relu(s)).score is not None


@pytest.mark.parametrize("sway", [False, True])
@pytest.mark.parametrize("kind", ["INT32", "UINT8", "FP8_E4M3", "BOOLEAN", "HALF"])
def test_scores_are_kept_in_the_types_that_are_set_but_for_floats_of_16_bits(kind, sway):
    q, k, v = tensors()

    def modified(g, score):
        kept = g.mul(score, 3.0).set_data_type(data_type[kind])
        return g.cos(kept) if sway else g.mul(kept, 1.5)

    g = Nodes()
    o, _ = g.sdpa(*map(g.given, (q, k, v)), SCALE, score_mod=modified)
    found = g.compute(o)

    def modify(s):
        if kind != "HALF":
            s = epilogue.rounded(3 * s, element_type(data_type[kind])).to(s) / 3
        return torch.cos(3 * s) if sway else 4.5 * s

    exact, same = (attention(*(x.to(t) for x in (q, k, v)), modify=modify)[0] for t in (
        DOUBLE, torch.float32
    ))  # fmt: skip
    close(found, exact, same)


# To arguments ----------------------------------------------------------------------------


@pytest.mark.parametrize("element", [torch.int32, torch.int64])
def test_arguments_are_made_of_tensors_without_data(element):
    g = Nodes()
    q, k, v = tensors()
    options = {
        **padded(g), "bias": g.given(BIAS), "use_alibi_mask": True, "use_causal_mask": True,
        "sink_token": g.given(SINK.view(1, H, 1, 1)),
        "attn_scale": g.given(torch.tensor([[[[SCALE]]]])),
        "dropout": (0.2, 5, g.given(torch.tensor([[[[7]]]], dtype=element))),
        "score_mod": CASES["softcap"][0](g)["score_mod"],
    }  # fmt: skip
    g.sdpa(*map(g.given, (q, k, v)), generate_stats=True, **options)
    g.infer()
    (node,) = g.nodes

    def meta(tensor):
        return tensor.value if tensor.is_constant else g.values[id(tensor)].to("meta")

    given = {name: meta(one) for name, one in node.inputs.items()}
    outputs = {
        "O": torch.empty(B, H, S_Q, D_V, device="meta"),
        "Stats": torch.empty(B, H, S_Q, 1, device="meta"),
    }
    arguments = attention_arguments(node, given, outputs)
    assert isinstance(arguments, ka.SdpaArguments)
    assert arguments.scale == 1.0 and arguments.bounds == {"right": 0}
    assert set(arguments.score.operands) == {"attn_scale"}
    assert arguments.dropout.p == 0.2 and arguments.dropout.seed == 5
    assert set(arguments.further) >= {"bias", "sink", "alibi", "seq_lens_q", "seq_lens_kv", "lse"}
    assert arguments.alibi.shape == (H,) and arguments.device.type == "meta"
    assert ka.get_kernels(arguments, providers=("reference",)) is not None


def test_bits_of_blocks_are_not_for_kernels():
    g = Nodes()
    q, k, v = (g.given(one) for one in tensors())
    g.sdpa(q, k, v, block_mask=g.given(BLOCKS))
    node = g.nodes[0]
    given = {name: g.values[id(one)] for name, one in node.inputs.items()}
    outputs = {"O": torch.empty(B, H, S_Q, D_V)}
    with pytest.raises(GraphNotSupportedError, match="whose bits kernels do not read"):
        attention_arguments(node, given, outputs)
    given["block_table"] = block_table(BLOCKS, S_KV).view(1, H, 1, 1)
    assert attention_arguments(node, given, outputs).block_shape == (128, 128)


def test_bits_of_blocks_start_with_the_lowest():
    bits = torch.tensor([0b00000101, 0b10], dtype=torch.uint8).view(1, 1, 1, 2)
    found = block_table(bits, 128 * 9 + 5)
    assert found.flatten().tolist() == [True, False, True] + [False] * 6 + [True]


@pytest.mark.parametrize(
    ("heads", "expected"),
    [(4, [2**-2, 2**-4, 2**-6, 2**-8]), (1, [2**-8]),
     (6, [2**-2, 2**-4, 2**-6, 2**-8, 2**-1, 2**-3])],
)  # fmt: skip
def test_slopes_of_alibi(heads, expected):
    assert alibi_slopes(heads) == expected

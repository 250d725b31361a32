"""Options of graphs: which are refused, with which words, and which spellings say the same."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import kernel_api.graph as cudnn
from kernel_api.errors import GraphError

NAN, INF = math.nan, math.inf
ADD = cudnn.reduction_mode.ADD


class Given:
    """An open graph with tensors of the ranks that its operations take."""

    def __init__(self):
        self.graph = cudnn.pygraph(handle=cudnn.create_handle("cpu"))
        self.x = self.graph.tensor((4, 64), data_type="float32", name="x")
        self.image = self.graph.tensor((2, 3, 8, 8), data_type="float32", name="image")
        self.weight = self.graph.tensor((5, 3, 3, 3), data_type="float32", name="weight")
        self.gain = self.graph.tensor((1, 64), data_type="float32", name="gain")
        self.channel = self.graph.tensor((1, 3, 1, 1), data_type="float32", name="channel")
        self.q, self.k, self.v = (
            self.graph.tensor((2, 2, 8, 16), data_type="float32", name=name) for name in "qkv"
        )

    # With the tensors that an operation reads, and the options that it has to have.

    def tensor(self, **options):
        return self.graph.tensor(**{"dim": (4, 8), **options})

    def scalar(self, value):
        return self.graph.tensor_scalar(value)

    def setter(self, **options):
        ((name, value),) = options.items()
        return getattr(self.x, f"set_{name}")(value)

    def pygraph(self, **options):
        return cudnn.pygraph(**options)

    def reduction(self, **options):
        return self.graph.reduction(self.x, ADD, **options)

    def conv_fprop(self, **options):
        return self.graph.conv_fprop(self.image, self.weight, **options)

    def conv_dgrad(self, **options):
        return self.graph.conv_dgrad(self.image, self.weight, **options)

    def conv_wgrad(self, **options):
        return self.graph.conv_wgrad(self.image, self.image, **options)

    def concatenate(self, **options):
        return self.graph.concatenate(**{"inputs": [self.x, self.x], "axis": 0, **options})

    def rope(self, **options):
        return self.graph.rope(self.x, self.x, self.x, **{"head_dim": 4, **options})

    def rng(self, **options):
        how = {"dim": (4, 8), "bernoulli_probability": 0.5, **options}
        return self.graph.rng(**how)

    def sdpa(self, **options):
        return self.graph.sdpa(self.q, self.k, self.v, **options)

    def sdpa_backward(self, **options):
        return self.graph.sdpa_backward(
            *(self.q, self.k, self.v, self.q, self.q, self.q), **options
        )

    def batchnorm(self, **options):
        return self.graph.batchnorm(self.image, self.channel, self.channel, **options)

    def layernorm(self, **options):
        return self.graph.layernorm(self.x, self.gain, self.gain, **options)

    def rmsnorm(self, **options):
        return self.graph.rmsnorm(self.x, self.gain, **options)

    def instancenorm_backward(self, **options):
        return self.graph.instancenorm_backward(self.image, self.image, self.channel, **options)

    def moe_grouped_matmul(self, **options):
        return self.graph.moe_grouped_matmul(self.q, self.k, self.v, **options)

    def relu_backward(self, **options):
        return self.graph.relu_backward(self.x, self.x, **options)

    def block_scale_dequantize(self, **options):
        return self.graph.block_scale_dequantize(self.x, self.x, **options)

    def __getattr__(self, name):
        return lambda **options: getattr(self.graph, name)(self.x, **options)


WHOLE, WHOLES = "expected a whole number", "expected whole numbers"
NUMBER, FINITE = "expected a number", "expected a finite number"
NOT_NEGATIVE = "expected a number that is not negative"

REFUSED = [
    ("tensor", {"dim": "48"}, f"tensor has dim = '48'; {WHOLES}"),
    ("tensor", {"dim": b"48"}, WHOLES),
    ("tensor", {"dim": (4.9, 8.2), "name": "a"}, f"tensor 'a' has dim = [4.9, 8.2]; {WHOLES}"),
    ("tensor", {"dim": 4}, f"tensor has dim = 4; {WHOLES}"),
    ("tensor", {"dim": None}, f"tensor has dim = None; {WHOLES}"),
    ("tensor", {"dim": (4, None)}, f"has dim = [4, None]; {WHOLES}"),
    ("tensor", {"dim": (True, 8)}, f"has dim = [True, 8]; {WHOLES}"),
    ("tensor", {"stride": (8.5, 1)}, f"tensor has stride = [8.5, 1]; {WHOLES}"),
    ("tensor", {"stride": "81"}, f"tensor has stride = '81'; {WHOLES}"),
    ("tensor", {"dim": (-4, 8)}, "tensor has dim = [-4, 8]; expected numbers of 0 or more"),
    ("tensor", {"stride": (-8, 1)}, "tensor has stride = [-8, 1]; expected numbers of 0 or more"),
    ("tensor", {"name": [1]}, "tensor has name = [1]; expected text"),
    ("tensor", {"name": 7}, "tensor has name = 7; expected text"),
    ("tensor", {"uid": 1.5}, f"tensor has uid = 1.5; {WHOLE}"),
    ("tensor", {"uid": "1"}, f"tensor has uid = '1'; {WHOLE}"),
    ("setter", {"uid": 1.5}, f"x has uid = 1.5; {WHOLE}"),
    ("setter", {"uid": None}, f"x has uid = None; {WHOLE}"),
    ("setter", {"uid": True}, f"x has uid = True; {WHOLE}"),
    ("setter", {"dim": (4.5, 8)}, f"x has dim = [4.5, 8]; {WHOLES}"),
    ("setter", {"dim": 4}, f"x has dim = 4; {WHOLES}"),
    ("setter", {"dim": (-4, 8)}, "dim of x is (-4, 8); expected numbers of 0 or more"),
    ("setter", {"stride": "81"}, f"x has stride = '81'; {WHOLES}"),
    ("setter", {"name": ["y"]}, "x has name = ['y']; expected text"),
    ("pygraph", {"name": 5}, "pygraph has name = 5; expected text"),
    ("scalar", {"value": "0.5"}, f"tensor_scalar has value = '0.5'; {NUMBER}"),
    ("scalar", {"value": None}, f"tensor_scalar has value = None; {NUMBER}"),
    ("scalar", {"value": torch.ones(2)}, "tensor_scalar has value = tensor([1., 1.])"),
    ("relu", {"name": [1]}, "relu has name = [1]; expected text"),
    ("relu", {"name": 3}, "relu has name = 3; expected text"),
    ("reduction", {"axis": "12"}, f"reduction has axis = '12'; {WHOLES}"),
    ("reduction", {"axis": [0.9]}, f"reduction has axis = [0.9]; {WHOLES}"),
    ("reduction", {"axis": 0.9}, f"reduction has axis = 0.9; {WHOLES}"),
    ("reduction", {"axis": True}, f"reduction has axis = True; {WHOLES}"),
    ("reduction", {"axis": [np.True_]}, WHOLES),
    ("reduction", {"axis": torch.tensor(True)}, WHOLES),
    ("reduction", {"axis": torch.tensor(1.0)}, WHOLES),
    ("reduction", {"axis": [None]}, f"reduction has axis = [None]; {WHOLES}"),
    ("concatenate", {"axis": 0.9}, f"concatenate has axis = 0.9; {WHOLE}"),
    ("concatenate", {"axis": None}, f"concatenate has axis = None; {WHOLE}"),
    ("concatenate", {"inputs": 3}, "concatenate has inputs = 3; expected tensors"),
    ("conv_fprop", {"padding": [0.9, 0.9]}, f"conv_fprop has padding = [0.9, 0.9]; {WHOLES}"),
    ("conv_fprop", {"padding": 0.5}, f"conv_fprop has padding = 0.5; {WHOLES}"),
    ("conv_fprop", {"padding": "11"}, f"conv_fprop has padding = '11'; {WHOLES}"),
    ("conv_fprop", {"pre_padding": True}, f"conv_fprop has pre_padding = True; {WHOLES}"),
    ("conv_dgrad", {"post_padding": [None]}, f"conv_dgrad has post_padding = [None]; {WHOLES}"),
    ("conv_dgrad", {"stride": 1.5}, f"conv_dgrad has stride = 1.5; {WHOLES}"),
    ("conv_wgrad", {"dilation": [1, 1.5]}, f"conv_wgrad has dilation = [1, 1.5]; {WHOLES}"),
    ("reshape", {"shape": [8.7, 4]}, f"reshape has shape = [8.7, 4]; {WHOLES}"),
    ("reshape", {"shape": 32}, f"reshape has shape = 32; {WHOLES}"),
    ("transpose", {"permutation": [1.5, 0]}, f"transpose has permutation = [1.5, 0]; {WHOLES}"),
    ("transpose", {"permutation": "10"}, f"transpose has permutation = '10'; {WHOLES}"),
    ("transpose", {"permutation": None}, f"transpose has permutation = None; {WHOLES}"),
    ("slice", {"slices": [1]}, "slice has slices = [1]; expected a slice for each mode"),
    ("slice", {"slices": slice(2)}, "slice has slices = slice(None, 2, None); expected a slice"),
    ("slice", {"slices": [slice(0.5)]}, f"slice has stop = 0.5; {WHOLE}"),
    ("slice", {"slices": [slice(0, 4, "2")]}, f"slice has step = '2'; {WHOLE}"),
    ("slice", {"start": 0, "limit": (2, 2)}, "slice has start = 0; expected a whole number for"),
    ("slice", {"start": (0,), "limit": (2, 2)}, "start = [0] and limit = [2, 2]; expected as many"),
    ("slice", {"start": "00", "limit": (2, 2)}, "slice has start = '00'"),
    ("slice", {"start": (0, 0.5), "limit": (2, 2)}, f"slice has start = 0.5; {WHOLE}"),
    ("rope", {"head_dim": 4.9}, f"rope has head_dim = 4.9; {WHOLE}"),
    ("rope", {"head_dim": None}, f"rope has head_dim = None; {WHOLE}"),
    ("rope", {"start": "0"}, f"rope has start = '0'; {WHOLE}"),
    ("rope", {"width": 2.5}, f"rope has width = 2.5; {WHOLE}"),
    ("rope", {"heads": 1.5}, f"rope has heads = 1.5; {WHOLE}"),
    ("glu_pair", {"granularity": True}, "granularity True; expected a number of columns"),
    ("glu_pair", {"granularity": 4.0}, "granularity 4.0; expected a number of columns"),
    ("glu_pair", {"granularity": 0}, "granularity 0; expected a number of columns"),
    ("moe_grouped_matmul", {"top_k": 1.5}, f"moe_grouped_matmul has top_k = 1.5; {WHOLE}"),
    ("block_scale_quantize", {"block_size": 32.9}, f"block_size = 32.9; {WHOLE}"),
    ("block_scale_quantize", {"block_size": None}, f"block_size = None; {WHOLE}"),
    ("block_scale_quantize", {"block_size": 0}, "block_size = 0; expected 1 or more"),
    ("block_scale_quantize", {"block_size": 32, "axis": 0.5}, f"axis = 0.5; {WHOLE}"),
    ("block_scale_dequantize", {"block_size": 32.9}, f"block_size = 32.9; {WHOLES}"),
    ("block_scale_dequantize", {"block_size": "32"}, f"block_size = '32'; {WHOLES}"),
    ("block_scale_dequantize", {"block_size": [1, 8.5]}, f"block_size = [1, 8.5]; {WHOLES}"),
    ("block_scale_dequantize", {"axis": "0"}, f"block_scale_dequantize has axis = '0'; {WHOLE}"),
    ("rng", {"dim": "48"}, f"rng has dim = '48'; {WHOLES}"),
    ("rng", {"stride": (8.5, 1)}, f"rng has stride = [8.5, 1]; {WHOLES}"),
    ("rng", {"seed": 1.9}, f"rng has seed = 1.9; {WHOLE}"),
    ("rng", {"seed": None}, f"rng has seed = None; {WHOLE}"),
    ("rng", {"offset": "3"}, f"rng has offset = '3'; {WHOLE}"),
    ("rng", {"bernoulli_probability": "0.5"}, f"rng has bernoulli_probability = '0.5'; {NUMBER}"),
    ("rng", {"bernoulli_probability": 1.5}, "expected a number from 0 to 1"),
    ("rng", {"uniform_min": "0"}, f"rng has uniform_min = '0'; {NUMBER}"),
    ("rng", {"uniform_max": INF}, f"rng has uniform_max = inf; {FINITE}"),
    ("rng", {"normal_mean": NAN}, f"rng has normal_mean = nan; {FINITE}"),
    ("rng", {"normal_std": None}, f"rng has normal_std = None; {NUMBER}"),
    ("rng", {"distribution": "NORMAL", "normal_std": -1.0}, f"normal_std = -1.0; {NOT_NEGATIVE}"),
    (
        "rng",
        {"distribution": "UNIFORM", "uniform_min": 2.0, "uniform_max": 1.0},
        "rng has uniform_min = 2.0 and uniform_max = 1.0; expected a min that is not above max",
    ),
    ("gen_index", {"axis": 0.5}, f"gen_index has axis = 0.5; {WHOLE}"),
    ("gen_index", {"axis": None}, f"gen_index has axis = None; {WHOLE}"),
    ("relu", {"negative_slope": "0.1"}, f"relu has negative_slope = '0.1'; {NUMBER}"),
    ("relu", {"negative_slope": NAN}, f"relu has negative_slope = nan; {FINITE}"),
    ("relu", {"lower_clip": [0]}, f"relu has lower_clip = [0]; {NUMBER}"),
    ("relu", {"upper_clip": NAN}, f"relu has upper_clip = nan; {NUMBER}"),
    ("relu", {"upper_clip": True}, f"relu has upper_clip = True; {NUMBER}"),
    ("relu", {"upper_clip": 10**400}, NUMBER),
    ("relu", {"upper_clip": 1j}, NUMBER),
    ("relu", {"upper_clip": np.complex64(1)}, NUMBER),
    ("relu_backward", {"upper_clip": "6"}, f"relu_backward has upper_clip = '6'; {NUMBER}"),
    ("leaky_relu", {"negative_slope": None}, f"leaky_relu has negative_slope = None; {NUMBER}"),
    ("swish", {"swish_beta": INF}, f"swish has swish_beta = inf; {FINITE}"),
    ("elu", {"elu_alpha": "1"}, f"elu has elu_alpha = '1'; {NUMBER}"),
    ("sdpa", {"attn_scale": "x"}, f"sdpa has attn_scale = 'x'; {NUMBER}"),
    ("sdpa", {"attn_scale": NAN}, f"sdpa has attn_scale = nan; {FINITE}"),
    ("sdpa", {"dropout": []}, "expected a probability, or (probability, seed, offset)"),
    ("sdpa", {"dropout": ()}, "expected a probability, or (probability, seed, offset)"),
    ("sdpa", {"dropout": "0.1"}, "dropout is '0.1'; expected a probability"),
    ("sdpa", {"dropout": NAN, "dropout_seed": 1}, "dropout is nan; expected a probability"),
    ("sdpa", {"dropout": torch.ones(2)}, "expected a probability"),
    ("sdpa", {"dropout": (0.1, 1.5, 0)}, f"sdpa has dropout_seed = 1.5; {WHOLE}"),
    (
        "sdpa",
        {"dropout": 0.1, "dropout_seed": 1, "dropout_offset": "0"},
        f"sdpa has dropout_offset = '0'; {WHOLE}",
    ),
    ("sdpa", {"diagonal_band_left_bound": 2.9}, f"(sliding_window_length) = 2.9; {WHOLE}"),
    ("sdpa", {"sliding_window_length": "3"}, f"(sliding_window_length) = '3'; {WHOLE}"),
    ("sdpa", {"diagonal_band_left_bound": 0}, "is 0; expected 1 or more"),
    ("sdpa", {"diagonal_band_right_bound": 0.5}, f"diagonal_band_right_bound = 0.5; {WHOLE}"),
    ("sdpa", {"paged_attention_max_seq_len_kv": 0.5}, f"max_seq_len_kv = 0.5; {WHOLE}"),
    ("sdpa_backward", {"attn_scale": "x"}, f"sdpa_backward has attn_scale = 'x'; {NUMBER}"),
    ("sdpa_backward", {"max_total_seq_len_q": "8"}, f"has max_total_seq_len_q = '8'; {WHOLE}"),
    ("layernorm", {"epsilon": -1.0}, f"layernorm has epsilon = -1.0; {NOT_NEGATIVE}"),
    ("layernorm", {"epsilon": NAN}, f"layernorm has epsilon = nan; {FINITE}"),
    ("rmsnorm", {"epsilon": True}, f"rmsnorm has epsilon = True; {NUMBER}"),
    ("rmsnorm", {"epsilon": INF}, f"rmsnorm has epsilon = inf; {FINITE}"),
    ("rmsnorm", {"epsilon": "1"}, "epsilon is a str; expected a tensor of this graph or a number"),
    ("batchnorm", {"epsilon": -1e-5}, f"batchnorm has epsilon = -1e-05; {NOT_NEGATIVE}"),
    ("batchnorm", {"momentum": NAN}, f"batchnorm has momentum = nan; {FINITE}"),
    (
        "instancenorm_backward",
        {"epsilon": -1},
        f"instancenorm_backward has epsilon = -1; {NOT_NEGATIVE}",
    ),
]


@pytest.mark.parametrize(("op", "options", "words"), REFUSED)
def test_what_an_option_cannot_be(op, options, words):
    given = Given()
    before = len(given.graph.nodes), len(given.graph.inputs)
    with pytest.raises(GraphError) as caught:
        getattr(given, op)(**options)
    assert words in str(caught.value)
    assert (len(given.graph.nodes), len(given.graph.inputs)) == before


def test_a_probability_that_is_a_mask():
    given = Given()
    with pytest.raises(GraphError, match=r"dropout is .*; expected a probability"):
        given.sdpa(dropout=given.q, dropout_seed=1)


def test_extents_of_an_execution():
    graph = cudnn.pygraph(handle=cudnn.create_handle("cpu"), io_data_type="float32")
    x = graph.tensor((4, 8), name="x")
    y = graph.relu(x).set_output(True)
    graph.build()
    pack = {x: torch.ones(4, 8), y: torch.ones(4, 8)}
    with pytest.raises(
        GraphError, match=r"override_shapes has \(4\.9, 8\); expected whole numbers"
    ):
        graph.execute(pack, override_uids=[x.uid], override_shapes=[(4.9, 8)])
    with pytest.raises(GraphError, match="has size = 'all'; expected a number"):
        graph.deselect_workspace_greater_than("all")
    assert graph.deselect_workspace_greater_than(1e6) is graph


# Spellings of one value, of which the first is plain: (operation, options, option, values).
SAME = [
    ("reduction", {}, "axis", [1, np.int64(1), torch.tensor(1), [1], (1,), {1}, np.array([1])]),
    ("reduction", {}, "axis", [[0, 1], (0, 1), range(2), iter([0, 1]), torch.tensor([0, 1])]),
    ("reduction", {}, "axis", [-1, np.int8(-1)]),
    ("concatenate", {}, "axis", [1, np.uint8(1), torch.tensor(1)]),
    ("conv_fprop", {}, "padding", [1, np.int32(1), torch.tensor(1)]),
    ("conv_fprop", {}, "padding", [[1, 2], (1, 2), np.array([1, 2]), iter((1, 2))]),
    ("conv_fprop", {}, "padding", [None, 0, []]),
    ("conv_fprop", {}, "stride", [None, 1, []]),
    ("conv_wgrad", {}, "dilation", [[1], (np.int64(1),)]),
    ("reshape", {}, "shape", [[8, 32], torch.Size([8, 32]), np.array([8, 32])]),
    ("reshape", {}, "shape", [None]),
    ("transpose", {}, "permutation", [[1, 0], (1, 0), iter([1, 0]), np.array([1, 0])]),
    ("slice", {}, "slices", [[slice(1, 3)], (slice(np.int64(1), torch.tensor(3)),)]),
    ("slice", {"start": (0, 1)}, "limit", [[2, 2], (2, 2), np.array([2, 2])]),
    ("rope", {}, "head_dim", [8, np.int64(8)]),
    ("rope", {"head_dim": 8}, "width", [None, 8]),
    ("rope", {}, "heads", [None]),
    ("glu_pair", {}, "granularity", ["halves"]),
    ("glu_pair", {}, "granularity", [8, np.int64(8)]),
    ("block_scale_quantize", {}, "block_size", [32, np.int64(32)]),
    ("block_scale_quantize", {"block_size": 32}, "axis", [None, -1, np.int64(-1)]),
    ("block_scale_dequantize", {}, "block_size", [32, [32], np.int64(32)]),
    ("rng", {}, "seed", [3, np.int64(3), torch.tensor(3)]),
    ("rng", {}, "bernoulli_probability", [0.5, np.float32(0.5), torch.tensor(0.5)]),
    ("rng", {"distribution": "UNIFORM"}, "uniform_min", [1, 1.0, np.float64(1)]),
    ("rng", {"uniform_min": 2.0}, "uniform_max", [1, 1.0]),
    ("rng", {"distribution": "BERNOULLI"}, "normal_std", [-1, -1.0]),
    ("gen_index", {}, "axis", [1, np.int64(1)]),
    ("relu", {}, "negative_slope", [None]),
    ("relu", {}, "negative_slope", [0.5, np.float16(0.5), torch.tensor(0.5)]),
    ("relu", {}, "upper_clip", [6, 6.0, np.int64(6), torch.tensor(6), torch.tensor([6.0])]),
    ("relu", {}, "upper_clip", [INF, np.float32(INF)]),
    ("relu", {}, "lower_clip", [-INF]),
    ("swish", {}, "swish_beta", [None]),
    ("sdpa", {}, "attn_scale", [None, 1, 1.0, np.float32(1), torch.tensor(1.0)]),
    ("sdpa", {}, "dropout", [None, 0, 0.0, False, (0.0, 1, 2), np.float32(0)]),
    ("sdpa", {"dropout_seed": 1}, "dropout", [0.5, np.float32(0.5), (0.5, 1, 0), [0.5, 1, 0]]),
    ("sdpa", {}, "diagonal_band_left_bound", [None]),
    ("sdpa", {}, "diagonal_band_left_bound", [3, np.int64(3), torch.tensor(3)]),
    ("sdpa", {"use_causal_mask": True}, "diagonal_band_right_bound", [None, 0, np.int64(0)]),
    ("sdpa_backward", {}, "max_total_seq_len_q", [8, np.int64(8)]),
    ("layernorm", {}, "epsilon", [0.5, np.float64(0.5)]),
    ("layernorm", {}, "epsilon", [0, np.int64(0)]),
    ("rmsnorm", {}, "epsilon", [None]),
    ("batchnorm", {}, "momentum", [0.5, np.float32(0.5)]),
]


@pytest.mark.parametrize(("op", "options", "option", "values"), SAME)
def test_spellings_of_one_value(op, options, option, values):
    made = []
    for value in values:
        given = Given()
        getattr(given, op)(**options, **{option: value})
        (node,) = given.graph.nodes
        known = {key: one.value for key, one in node.inputs.items() if hasattr(one, "value")}
        made.append(repr((node.attributes, known)))
    assert made == made[:1] * len(values)


@pytest.mark.parametrize(
    "dim", [(4, 8), [4, 8], torch.Size([4, 8]), np.array([4, 8]), (np.int64(4), torch.tensor(8))]
)
def test_spellings_of_extents(dim):
    given = Given()
    made = given.tensor(dim=dim, stride=dim, uid=np.int64(7), name=None)
    assert (made.dim, made.stride, made.uid, made.name) == ((4, 8), (4, 8), 7, "")
    assert all(type(one) is int for one in (*made.dim, *made.stride, made.uid))
    assert made.set_dim(dim).set_stride(iter(dim)).get_stride() == [4, 8]
    assert given.tensor(dim=iter([4, 8])).stride == (8, 1)
    assert given.tensor(dim=()).dim == ()


@pytest.mark.parametrize(
    ("value", "kept", "element"),
    [
        (0.1, 0.1, "FLOAT"),
        (INF, INF, "FLOAT"),
        (np.float32(0.5), 0.5, "FLOAT"),
        (torch.tensor(0.5), 0.5, "FLOAT"),
        (3, 3, "INT32"),
        (np.int64(2**53 + 1), 2**53 + 1, "INT32"),
        (True, True, "BOOLEAN"),
        (np.True_, True, "BOOLEAN"),
    ],
)
def test_numbers_that_are_known(value, kept, element):
    made = Given().graph.tensor_scalar(value)
    assert (type(made.value), made.value) == (type(kept), kept)
    assert made.data_type is cudnn.data_type[element]


@pytest.mark.parametrize(
    ("value", "kind", "kept"),
    [(2.0, "INT32", 2), (2, "BOOLEAN", True), (0.0, "BOOLEAN", False), (3, "DOUBLE", 3)],
)
def test_a_number_of_a_type_is_one_of_that_type(value, kind, kept):
    made = Given().graph.tensor_scalar(value, cudnn.data_type[kind])
    assert (type(made.value), made.value) == (type(kept), kept)


@pytest.mark.parametrize(
    ("value", "kind"),
    [(2.5, "INT32"), (2**31, "INT32"), (300, "UINT8"), (-1, "UINT8"), (NAN, "INT32")],
)
def test_a_number_that_its_type_does_not_hold_is_refused(value, kind):
    with pytest.raises(GraphError, match=rf"value = {value}; torch.{kind.lower()} holds whole num"):
        Given().graph.tensor_scalar(value, cudnn.data_type[kind])


def test_names():
    given = Given()
    given.graph.relu(given.x, name="once")
    given.graph.relu(given.x, name=None)
    given.graph.relu(given.x, name="")
    assert [node.name for node in given.graph.nodes] == ["once", "relu.0", "relu.1"]
    assert cudnn.pygraph(name=None).name == ""


def test_epsilons_that_are_tensors_stay_as_they_are():
    given = Given()
    passed = given.graph.tensor((1, 1), data_type="float32", is_pass_by_value=True)
    given.layernorm(epsilon=passed)
    given.rmsnorm(epsilon=given.graph.tensor_scalar(-1.0))
    assert given.graph.nodes[0].inputs["epsilon"] is passed

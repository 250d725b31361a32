"""Attention in graphs of torch.compile and torch.export."""

import itertools

import numpy as np
import pytest
import torch
from support.sampling import some
from support.sdpa import Draw
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing import assert_close

import kernel_api as ka
from kernel_api import masks
from kernel_api.arguments import Dropout
from kernel_api.errors import ArgumentError

DRAW = Draw(S_q=5, S_kv=6, seed=2)
Q, K, V, DO = DRAW.queries(), DRAW.keys(), DRAW.values(), DRAW.results()
BIAS, SINK, ALIBI = DRAW.random(1, 4, 5, 6), DRAW.wides(4), DRAW.wides(4)
BLOCKS = masks.BlockSparse(torch.tensor([[[[True, False, True], [True, True, False]]]]), (3, 2))


@pytest.fixture(autouse=True)
def nothing_compiled():
    torch._dynamo.reset()


def leaves(*tensors):
    return [tensor.detach().clone().requires_grad_() for tensor in tensors]


def compiled(function, backend="aot_eager", **how):
    return torch.compile(function, backend=backend, **how)


# In one graph ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["plain", "options", "blocks"])
def test_torch_compiles_functions_with_gradients_in_one_graph(name):
    lens = torch.tensor([3, 5], dtype=torch.int32)

    def function(q, k, v, bias, sink):
        if name == "plain":
            return ka.nn.attention(q, k, v, mask=masks.Causal())
        mask = masks.SlidingWindow(3, 1) & masks.Causal("bottom_right")
        if name == "blocks":
            return ka.ops.sdpa(q, k, v, mask=BLOCKS & mask, alibi=ALIBI)
        mask = mask & masks.Padding()
        more = {"seq_lens_q": lens, "seq_lens_kv": lens, "dropout": Dropout(0.25, 3, 4)}
        return ka.nn.attention(q, k, v, mask=mask, bias=bias, sink=sink, softcap=3, **more)

    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    results = []
    for one in (function, compiled):
        given = leaves(Q, K, V, BIAS, SINK)
        y = one(*given)
        y.square().sum().backward()
        results.append([y.detach(), *(leaf.grad for leaf in given if leaf.grad is not None)])
    assert len(results[1]) == (6 if name == "options" else 4)
    for eager, found in zip(*results, strict=True):
        assert_close(found, eager)


def test_torch_compiles_calls_without_gradients_and_with_outputs():
    def function(q, k, v, out):
        lse = ka.ops.sdpa(q, k, v, return_lse=True).lse
        return ka.ops.sdpa(q, k, v, out=out), lse

    out = torch.empty_like(DO)
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    found, lse = compiled(Q, K, V, out)
    assert_close(out, ka.ops.sdpa(Q, K, V))
    assert_close(found, out)

    def backward(q, k, v, out, lse):
        return ka.ops.sdpa_backward(q, k, v, out, DO, lse, sink=SINK, dSink=True)

    compiled = torch.compile(backward, backend="aot_eager", fullgraph=True)
    found, expected = compiled(Q, K, V, out, lse), backward(Q, K, V, out, lse)
    assert type(found) is type(expected)
    for one, other in zip(found, expected, strict=True):
        assert_close(one, other)


def test_a_function_of_scores_breaks_the_graph_where_that_may_be():
    def function(q, k, v):
        return ka.ops.sdpa(q * 2, k, v, score_mod=lambda s, b, h, q, kv: s - 0.5 * kv) + 1

    given, again = leaves(Q, K, V), leaves(Q, K, V)
    eager = function(*given)
    found = torch.compile(function, backend="aot_eager")(*again)
    assert_close(found, eager)
    eager.backward(DO)
    found.backward(DO)
    for one, other in zip(given, again, strict=True):
        assert_close(one.grad, other.grad)


def test_torch_exports_a_module():
    class Module(torch.nn.Module):
        def forward(self, q, k, v):
            return ka.ops.sdpa(q, k, v, mask=masks.Causal())

    exported = torch.export.export(Module(), (Q, K, V))
    assert "kernel_api.sdpa" in str(exported.graph)
    assert_close(exported.module()(Q, K, V), ka.ops.sdpa(Q, K, V, mask=masks.Causal()))


@pytest.mark.parametrize("strict", [True, False])
def test_numbers_that_depend_on_sizes_stay_open_in_what_is_exported(strict):
    class Module(torch.nn.Module):
        def forward(self, q, k, v, table):
            S = q.shape[2]
            mask = masks.SlidingWindow(S // 2, 0) & masks.SlidingWindow(S, S - 2, "bottom_right")
            mask = mask & masks.BlockSparse(table, (S, S))
            return ka.ops.sdpa(q, k, v, mask=mask, dropout=Dropout(0.3, S, 3 * S))

    table = torch.ones(1, 1, 1, 1, dtype=torch.bool)
    length = {2: torch.export.Dim("S", min=3, max=64)}
    exported = torch.export.export(
        Module(), (Q, Q, Q, table), dynamic_shapes=(*[length] * 3, {}), strict=strict
    )
    longer = torch.randn(2, 4, 9, 8, dtype=Q.dtype)
    for q in (Q, longer):
        assert_close(exported.module()(q, q, q, table), Module()(q, q, q, table))


def test_operators_pass_the_checks_of_torch():
    from kernel_api import _attention_operators as operators

    options = {"mask": masks.Causal() & masks.Padding(), "scale": 2, "bias": BIAS}
    options["seq_lens_q"] = options["seq_lens_kv"] = torch.tensor([3, 5], dtype=torch.int32)
    packed = operators._packed(options)
    again = operators._unpacked(tuple(packed))
    assert again["mask"].bounds == {"right": 0}
    assert again["mask"].is_padding
    given = leaves(Q, K, V)
    torch.library.opcheck(operators._operator, (*given, *packed))
    torch.library.opcheck(operators._state_of_now, (torch.tensor(3),))
    out, lse = ka.ops.sdpa(Q, K, V, return_lse=True, **options)
    checks = ("test_schema", "test_faketensor")
    call = (Q, K, V, out, DO, lse, False, True, False, *packed)
    torch.library.opcheck(operators._backward_operator, call, test_utils=checks)


# What a graph cannot hold ----------------------------------------------------------------


def test_statistics_break_a_graph_of_torch():
    def function(q, k, v):
        found = ka.ops.sdpa(q * 2, k, v, return_statistics=True)
        return found.out + 1, found.score_max, found.score_sum_exp

    eager, found = function(Q, K, V), torch.compile(function, backend="aot_eager")(Q, K, V)
    for one, other in zip(found, eager, strict=True):
        assert_close(one, other)
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="no score_max or score_sum_exp"):
        torch.compile(function, backend="aot_eager", fullgraph=True)(Q, K, V)


def relative(score, b, h, q, kv):
    return score - 0.5 * kv


OUTSIDE = [
    {"score_mod": relative},
    {"score_mod": lambda s, b, h, q, kv, t: s * t[h], "score_operands": {"t": ALIBI}},
    {"mask": masks.Causal() & masks.MaskMod(lambda b, h, q, kv: q - kv < 2)},
]
CALL = (Q, K, V, DO, DO, DRAW.wides(2, 4, 5))


@pytest.mark.parametrize("options", OUTSIDE)
def test_a_function_breaks_the_graph_of_a_backward_pass_where_that_may_be(options):
    out, lse = ka.ops.sdpa(Q, K, V, return_lse=True, **options)

    def function(q, k, v):
        found = ka.ops.sdpa_backward(q * 1, k, v, out, DO, lse, **options)
        return found.dQ + 1, found.dK, found.dV

    for one, other in zip(compiled(function)(Q, K, V), function(Q, K, V), strict=True):
        assert_close(one, other)
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="no function of scores or indices"):
        compiled(function, fullgraph=True)(Q, K, V)


@pytest.mark.parametrize("options", OUTSIDE)
def test_a_function_is_never_left_out_of_what_an_operator_takes(options):
    from kernel_api import _attention_operators as operators

    words = r"no function of scores or indices.* outside of torch\.export"
    with pytest.raises(ArgumentError, match=words):
        operators._packed(options)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = [mode.from_tensor(one) for one in CALL]
        with pytest.raises(ArgumentError, match=words):
            ka.ops.sdpa(*fake[:3], **options)
        with pytest.raises(ArgumentError, match=words):
            ka.ops.sdpa_backward(*fake, **options)
    with pytest.raises(ArgumentError, match=words):
        make_fx(lambda *given: ka.ops.sdpa(*given, **options))(*CALL[:3])


def test_operands_of_a_function_that_is_not_there_are_refused_in_graphs_too():
    function = compiled(lambda q: ka.ops.sdpa(q, K, V, score_operands={"t": ALIBI}))
    with pytest.raises(ArgumentError, match="score_operands are given and score_mod is not"):
        function(Q)


@pytest.mark.parametrize("options", [{"mask": "causal"}, {"mask": masks.Causal}, {"dropout": 0.1}])
@pytest.mark.parametrize("is_backward", [False, True])
def test_a_mask_or_dropout_that_is_none_is_refused_in_graphs_too(options, is_backward):
    def function(q):
        if is_backward:
            return ka.ops.sdpa_backward(q, K, V, DO, DO, LSE, **options)
        return ka.ops.sdpa(q, K, V, **options)

    name = next(iter(options))
    for call in (function, compiled(function)):
        with pytest.raises(ArgumentError, match=f"{name} is .*; expected (a|one)"):
            call(Q)


@pytest.mark.parametrize("options", [{"scale": 1 / np.sqrt(7)}, {"softcap": np.float64(2)}])
def test_numbers_of_numpy_are_taken_in_graphs_too(options):
    def function(q):
        return ka.ops.sdpa(q, K, V, **options)

    assert_close(compiled(function, fullgraph=True)(Q), function(Q))


@pytest.mark.parametrize("what", some(["scale", "mask", "block_shape", "dropout", "p"], 3))
def test_numbers_of_numpy_that_graphs_do_not_know_are_read_between_two(what):
    half, three = np.float32(0.5), np.int64(3)

    def function(q, table):
        options = {
            "scale": lambda: {"scale": half},
            "mask": lambda: {"mask": masks.SlidingWindow(three, 0)},
            "block_shape": lambda: {"mask": masks.BlockSparse(table, (three, 2))},
            "dropout": lambda: {"dropout": Dropout(0.5, three, three)},
            "p": lambda: {"dropout": Dropout(half, 3, 3)},
        }
        return ka.ops.sdpa(q, K, V, **options[what]())

    given = Q, BLOCKS.table.tensor
    assert_close(compiled(function)(*given), function(*given))
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="a number of NumPy is an array"):
        compiled(function, fullgraph=True)(*given)


IN_BACKWARD_GRAPHS = {
    "numbers": ({"mask": masks.SlidingWindow(3, 1), "dropout": Dropout(0.4, 3, 1)}, True),
    "tensors": ({"mask": BLOCKS, "dropout": Dropout(0.4, torch.tensor(3), 1)}, False),
    "a function": ({"score_mod": lambda score, b, h, i, j: score * (i - j)}, False),
}


@pytest.mark.parametrize(
    ("options", "is_one"), IN_BACKWARD_GRAPHS.values(), ids=[*IN_BACKWARD_GRAPHS]
)
def test_compiled_autograd_takes_the_gradients(options, is_one):
    """In one graph, but for what is kept beside the operands."""
    compiler = torch.compile(backend="aot_eager", fullgraph=is_one)
    eager, given = leaves(Q, K, V, BIAS, SINK), leaves(Q, K, V, BIAS, SINK)
    ka.nn.attention(*eager[:3], bias=eager[3], sink=eager[4], **options).backward(DO)
    out = ka.nn.attention(*given[:3], bias=given[3], sink=given[4], **options)
    with torch._dynamo.compiled_autograd._enable(compiler):
        out.backward(DO)
    for one, leaf in zip(given, eager, strict=True):
        assert_close(one.grad, leaf.grad)


# Dropout and blocks ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("backend", "inside"),
    # Of what changes inside of a graph inductor makes C++, which takes seconds to compile.
    some(itertools.product(["aot_eager", "inductor"], [False, True]), 3),
)
def test_zeros_of_dropout_stay_those_of_the_forward_pass(backend, inside):
    seed = torch.tensor(3)
    dropout = Dropout(0.4, seed, 1)

    def function(q, k, v):
        out = ka.ops.sdpa(q, k, v, dropout=dropout)
        if inside:
            seed.add_(1)
        return out

    given, again = leaves(Q, K, V), leaves(Q, K, V)
    out = compiled(function, backend, fullgraph=True)(*given)
    if not inside:
        seed.add_(1)
    assert seed == 4
    out.backward(DO)
    ka.ops.sdpa(*again, dropout=Dropout(0.4, 3, 1)).backward(DO)
    for one, leaf in zip(given, again, strict=True):
        assert_close(one.grad, leaf.grad)


@pytest.mark.parametrize("shape", [(), (1,)])
def test_dropout_is_made_inside_a_graph(shape):
    def function(q, k, v, seed):
        return ka.ops.sdpa(q, k, v, dropout=Dropout(0.4, seed, 1))

    seed = torch.full(shape, 3)
    found = compiled(function, fullgraph=True)(Q, K, V, seed)
    assert_close(found, function(Q, K, V, seed))


def test_a_mask_of_blocks_is_made_inside_a_graph():
    def function(q, k, v, table):
        return ka.ops.sdpa(q, k, v, mask=masks.BlockSparse(table, (3, 2)) & masks.Causal())

    table = BLOCKS.table.tensor
    found = compiled(function, fullgraph=True)(Q, K, V, table)
    assert_close(found, function(Q, K, V, table))


@pytest.mark.filterwarnings("error:Dynamo")
@pytest.mark.parametrize("form", [ka.ops.sdpa, ka.nn.attention])
def test_a_mask_of_a_function_is_made_between_graphs(form):
    reach = torch.tensor([1, 2, 3, 4])

    def function(q, k, v):
        near = masks.MaskMod(lambda b, h, q, kv, reach: q - kv < reach[h], reach=reach)
        return form(q * 2, k, v, mask=masks.Causal() & near) + 1

    found = compiled(function)(Q, K, V)
    assert_close(found, function(Q, K, V))
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="does this between graphs of torch"):
        compiled(function, fullgraph=True)(Q, K, V)


# Outputs that are given ------------------------------------------------------------------

OUT, LSE = torch.empty_like(DO), DRAW.wides(2, 4, 5)
WHOLE = torch.empty_like(Q)


def in_both_modes(cases, count):
    """All of the cases in eager mode, so many of them compiled."""
    return [
        *(("eager", *case) for case in cases),
        *(("compiled", *case) for case in some(cases, count)),
    ]


REFUSED = [
    ({"out": OUT.int()}, "out is (torch.)?int32; expected a floating type"),
    ({"out": OUT.new_empty(3, *OUT.shape)}, r"out has shape \(3, 2, 4, 5, 16\); expected"),
    ({"out": "out"}, "out is a str; expected a torch tensor"),
    ({"out": Q}, "(out and Q are one tensor|out shares memory with Q)"),
    ({"lse": LSE.int()}, "lse is (torch.)?int32; expected (torch.)?float64"),
    ({"lse": LSE.float()}, "lse is (torch.)?float32; expected (torch.)?float64"),
    ({"lse": LSE[0]}, r"lse has shape \(4, 5\); expected"),
    ({"out": OUT.to("meta")}, "out is on meta"),
    ({"dQ": WHOLE.int()}, "dQ is (torch.)?int32; expected a floating type"),
    ({"dQ": WHOLE.new_empty(5, *WHOLE.shape[1:])}, r"dQ has shape \(5, 4, 5, 8\); expected"),
    ({"dK": K.clone(), "dV": 3}, "dV is a int; expected a torch tensor"),
    ({"dSink": SINK.float(), "sink": SINK}, "dSink is (torch.)?float32; expected"),
    ({"dBias": BIAS[:, :2], "bias": BIAS}, r"dBias has shape \(1, 2, 5, 6\); expected"),
    ({"dQ": False}, "dQ is False; dQ, dK and dV are always computed"),
    ({"dV": False}, "dV is False; dQ, dK and dV are always computed"),
]


@pytest.mark.parametrize(("how", "given", "words"), in_both_modes(REFUSED, 4))
def test_outputs_are_checked_in_graphs_as_they_are_in_eager_mode(how, given, words):
    backward = any(name.startswith("d") for name in given)
    v = V[..., :8] if given.get("out") is Q else V

    def function(q):
        if backward:
            return ka.ops.sdpa_backward(q, K, v, DO, DO, LSE, **given)
        return ka.ops.sdpa(q, K, v, **given)

    with pytest.raises(ArgumentError, match=words):
        (compiled(function) if how == "compiled" else function)(Q)


@pytest.mark.parametrize("how", ["eager", "compiled"])
def test_one_tensor_is_not_taken_for_two_outputs(how):
    def function(d):
        return ka.ops.sdpa_backward(Q, K, K, Q, Q, LSE, dK=d, dV=d)

    with pytest.raises(ArgumentError, match=r"dK (and dV are one tensor|shares memory with dV)"):
        (compiled(function) if how == "compiled" else function)(torch.empty_like(K))


OUTPUTS = [("out",), ("lse",), ("score_max",), ("score_sum_exp",), ("dQ",), ("dV",), ("dSink",)]


@pytest.mark.parametrize(("how", "name"), in_both_modes(OUTPUTS, 4))
def test_outputs_that_need_a_gradient_are_refused(how, name):
    shape = {"out": OUT, "dQ": Q, "dV": V, "dSink": SINK}.get(name, LSE)
    leaf = torch.zeros_like(shape).requires_grad_()

    def function(q, given):
        if name.startswith("d"):
            return ka.ops.sdpa_backward(q, K, V, DO, DO, LSE, sink=SINK, **{name: given})
        return ka.ops.sdpa(q, K, V, sink=SINK, **{name: given})

    for given in (leaf, leaf * 2):
        call = compiled(function) if how == "compiled" else function
        with pytest.raises(ArgumentError, match=f"{name} is given and needs a gradient"):
            call(Q, given)
        with torch.no_grad():
            call(Q, given)


@pytest.mark.parametrize("shape", [(1, 4, 5, 6), (4, 5, 6)])
def test_gradients_are_written_to_tensors_that_are_given(shape):
    out, lse = ka.ops.sdpa(Q, K, V, bias=BIAS, sink=SINK, return_lse=True)
    options = {"bias": BIAS, "sink": SINK}
    expected = ka.ops.sdpa_backward(Q, K, V, out, DO, lse, dBias=True, dSink=True, **options)
    given = {"dQ": torch.empty_like(Q).bfloat16(), "dSink": torch.empty_like(SINK)}
    given["dBias"] = BIAS.new_empty(shape)

    def function(q, dQ, dBias, dSink):
        written = {"dQ": dQ, "dBias": dBias, "dSink": dSink}
        return ka.ops.sdpa_backward(q, K, V, out, DO, lse, **written, **options)

    found = compiled(function, fullgraph=True)(Q, **given)
    assert found._fields == expected._fields
    for name, one in given.items():
        wanted = getattr(expected, name).to(one.dtype).view(one.shape)
        assert_close(one, wanted)
        assert_close(getattr(found, name), wanted)


@pytest.mark.parametrize("name", ["alibi", "descale_q", "descale_k", "descale_v"])
@pytest.mark.parametrize("how", ["eager", "compiled"])
def test_operands_without_a_gradient_are_refused_where_they_need_one(how, name):
    draw = Draw(S_q=5, S_kv=6, D=16, D_v=16, element="float8_e4m3fn")
    value = torch.ones(4 if name == "alibi" else ()).requires_grad_()
    q, k, v = draw.queries(), draw.keys(), draw.values()

    def function(value):
        return ka.ops.sdpa(q, k, v, **{name: value})

    with pytest.raises(ArgumentError, match=f"{name} needs a gradient, and there is none"):
        (compiled(function) if how == "compiled" else function)(value)

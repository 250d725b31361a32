"""Functions of attention scores: what is traced, refused, and their derivatives."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.sdpa import Draw, run
from torch.nn import functional
from torch.testing import assert_close

import kernel_api as ka
from kernel_api import epilogue as ep
from kernel_api import masks
from kernel_api._score import ScoreFunction, conjunction, derivative_of
from kernel_api.epilogue.functions import _DERIVATIVES
from kernel_api.epilogue.graph import Graph
from kernel_api.errors import ArgumentError, EpilogueError

TABLE = torch.arange(20.0).view(4, 5)


def traced(fn, **operands):
    return ScoreFunction(fn, True, operands).graph


# Graphs ----------------------------------------------------------------------------------


def test_the_graph_has_scores_indices_and_lookups():
    graph = traced(lambda score, b, h, q, kv, table: score + table[h, kv // 2 % 5], table=TABLE)
    assert [node.op for node in graph.nodes] == [
        "score", "index", "index", "floordiv", "remainder", "lookup", "add",
    ]  # fmt: skip
    assert graph.nodes[3]["divisor"] == 2
    assert graph.nodes[5].attributes == (("name", "table"), ("type", "real"))
    assert list(graph.leaves) == ["table"]


def test_indices_are_divided_as_in_python():
    def by_divmod(score, b, h, q, kv):
        quotient, rest = divmod(q, 3)
        return score + quotient - rest

    def in_place(score, b, h, q, kv):
        quotient, rest = q + 0, q + 0
        quotient //= 3
        rest %= 3
        return score + quotient - rest

    plain = traced(lambda score, b, h, q, kv: score + q // 3 - q % 3)
    assert traced(by_divmod) == plain
    divided = [node.op for node in traced(in_place).nodes]
    assert divided.count("floordiv") == divided.count("remainder") == 1


def test_a_plus_sign_changes_nothing():
    plain = traced(lambda score, b, h, q, kv, table: score + table[h, q // 2 % 5], table=TABLE)
    signed = traced(
        lambda score, b, h, q, kv, table: +score + table[+h, (+q) // 2 % 5], table=TABLE
    )
    assert signed == plain
    with pytest.raises(EpilogueError, match="// is for whole numbers, and the score is none"):
        traced(lambda score, b, h, q, kv: (+score) // 2)


def test_steps_and_powers_are_traced_and_steps_have_no_slope():
    graph = traced(lambda score, b, h, q, kv: 2 ** -(q / 9) * score + math.floor(score / 0.3))
    assert [n.op for n in graph.nodes if n.op in ("exp", "floor")] == ["exp", "floor"]
    assert not [n.op for n in derivative_of(graph).nodes if n.op == "floor"]


def test_graphs_are_the_same_where_functions_compute_the_same():
    def one(score, b, h, q, kv, gain):
        return gain * score - q

    def other(s, batch, head, query, key, gain=2.0):
        x = gain * s
        x -= query
        return x

    assert traced(one, gain=0.5) == traced(other, gain=1.5)
    assert traced(one, gain=0.5) != traced(one, gain=1)
    assert traced(one, gain=0.5) != traced(lambda s, b, h, q, kv, gain: gain * s - kv, gain=1.5)


@pytest.mark.parametrize("has_score", [True, False])
def test_graphs_come_back_from_their_text(has_score):
    if has_score:
        graph = traced(lambda s, b, h, q, kv, t: ep.tanh(s) * t[h, 0], t=TABLE)
    else:
        graph = ScoreFunction(lambda b, h, q, kv, n: ~(q % 4 == n), False, {"n": 3}).graph
    again = Graph.from_json(graph.to_json())
    assert again == graph
    assert again.identity == graph.identity
    assert again.nodes == graph.nodes


def test_operands_are_kept_and_replaced():
    function = ScoreFunction(
        lambda s, b, h, q, kv, t, n: s * t[h] + n, True, {"t": TABLE[0], "n": 1}
    )
    moved = function.with_operands({"n": 7})
    assert moved.graph is function.graph
    assert moved.operands["n"] == 7
    assert moved.operands["t"] is function.operands["t"]
    assert repr(function).startswith("<function of scores ")


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("n", 2.5, "n is a real number, and the function was traced with a whole number; expected"),
        ("n", torch.tensor(3), "n is a tensor of whole numbers with 0 modes, and the function was"),
        ("t", torch.arange(5), "t is a tensor of whole numbers with 1 mode, and the function was t"
         "raced with a tensor of real numbers with 1 mode"),
        ("t", TABLE, "t is a tensor of real numbers with 2 modes, and"),
        ("t", TABLE[0] > 0, "t is a tensor of bool with 1 mode, and"),
        ("m", 3, "the function has no operand m; it has t, n, x"),
    ],
)  # fmt: skip
def test_an_operand_of_another_kind_is_refused(name, value, words):
    operands = {"t": TABLE[0], "n": 1, "x": 2.0}
    function = ScoreFunction(lambda s, b, h, q, kv, t, n, x: s * t[h] + n * x, True, operands)
    with pytest.raises(ArgumentError, match=words):
        function.with_operands({name: value})
    moved = function.with_operands({"x": 3, "t": TABLE[1].half()})
    assert repr(moved.operands["x"]) == "3.0"


@pytest.mark.parametrize("others", [{"mask_n": 2.5}, {"score_g": 0.5}])
def test_arguments_are_not_rebuilt_with_operands_of_another_kind(others):
    draw = Draw(1, 2, 2, 4, 8)
    mask = masks.MaskMod(lambda b, h, q, kv, n: kv * 2 < n, n=3)
    args = draw.arguments(
        mask=mask, score_mod=lambda s, b, h, q, kv, g: s + g * kv, score_operands={"g": 1}
    )
    with pytest.raises(ArgumentError, match="is a real number, and the function was traced with a"):
        args.rebuilt(*args.tensors, **others)


# Refused ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fn", "operands", "words"),
    [
        (lambda s, b, h, q, kv: s if q > kv else -s, {}, "no if can depend on it"),
        (lambda s, b, h, q, kv: math.tanh(s), {}, "functions of math cannot have it"),
        (lambda s, b, h, q, kv: torch.tanh(s), {}, "torch's tanh cannot be applied to the score"),
        (lambda s, b, h, q, kv: s + TABLE[h, 0], {}, "a Tensor of shape .* is used that fn does n"
         r"ot take; pass it by the name of a parameter of fn, as in score_operands={'name': ...}"),
        (lambda s, b, h, q, kv: s + [1, 2][h], {}, "it can index tensors that are passed as opera"),
        (lambda s, b, h, q, kv: s[h], {}, "the score cannot be indexed; only operands"),
        (lambda s, b, h, q, kv, t: s + t[h], {"t": TABLE}, "t has 2 modes and is indexed with 1"),
        (lambda s, b, h, q, kv, t: s + t[h, s], {"t": TABLE}, "t is indexed with the score; expec"),
        (lambda s, b, h, q, kv, t: s + t[h, q / 2], {"t": TABLE}, "expected whole numbers"),
        (lambda s, b, h, q, kv, t: s + t[h, 0.5], {"t": TABLE}, "expected whole numbers"),
        (lambda s, b, h, q, kv, t: s + t, {"t": TABLE}, r"is used as one number; index it, as in"),
        (lambda s, b, h, q, kv, t: s + t[0], {"t": 2.0}, "t cannot be indexed"),
        (lambda s, b, h, q, kv: s // 2, {}, "// is for whole numbers, and the score is none"),
        (lambda s, b, h, q, kv: s + q // 0, {}, "q // 0: expected a whole number from 1 to 2"),
        (lambda s, b, h, q, kv: s + q % kv, {}, "expected a whole number from 1 to"),
        (lambda s, b, h, q, kv: s + q % 2.0, {}, "q % 2.0: expected a whole number from 1 to"),
        (lambda s, b, h, q, kv: s + 5 % q, {}, "q is a divisor of // or %; expected a whole num"),
        (lambda s, b, h, q, kv: s + 5 // kv, {}, "kv is a divisor of // or %; expected a whole"),
        (lambda s, b, h, q, kv: s + divmod(5, q)[0], {}, "q is a divisor of // or %; expected a w"),
        (lambda s, b, h, q, kv: s + (q >> 1), {}, ">> cannot be traced for q; use // by a power o"),
        (lambda s, b, h, q, kv: ep.sum(s, -1), {}, "it has no columns to reduce"),
        (lambda s, b, h, q, kv: 1.0, {}, "fn returns 1.0; expected a value computed from the scor"),
        (lambda s, b, h, q, kv: None, {}, "fn returns None"),
        (lambda s, q, kv: s, {}, r"fn takes s, q, kv; expected \(score, b, h, q, kv\)"),
        (lambda s, b, h, q, kv, t: s, {}, "fn takes t; pass it by name"),
        (lambda s, b, h, q, kv: s, {"t": 1.0}, "t is passed, and fn has no parameter of the name"),
        (lambda s, b, h, q, kv, t: s, {"t": 1.0}, "t is passed, but what fn returns does not need"),
        (lambda s, *indices: s, {}, "name every operand as a parameter"),
        (lambda s, b, h, q, kv: s + {}[1], {}, "fn raised KeyError while it was traced"),
    ],
)  # fmt: skip
def test_what_cannot_be_traced_is_refused_with_the_line(fn, operands, words):
    with pytest.raises(EpilogueError, match=words) as raised:
        traced(fn, **operands)
    assert "test_sdpa_score.py:" in str(raised.value)


def test_operands_are_real_numbers_or_truth_values():
    with pytest.raises(ArgumentError, match="t is complex64; expected real numbers or bool"):
        traced(lambda s, b, h, q, kv, t: s * t[h], t=torch.zeros(4, dtype=torch.complex64))
    with pytest.raises(ArgumentError, match="t is True; functions are traced once"):
        traced(lambda s, b, h, q, kv, t: s, t=True)


# Values ----------------------------------------------------------------------------------


def computed(fn, scores, operands):
    """What a function gives, seen as the row sums of one-hot products: through the reference."""
    H, S_q, S_kv = scores.shape
    draw = Draw(1, H, H, S_q, S_kv, S_kv, S_kv)
    keys = torch.eye(S_kv, dtype=torch.float64).expand(1, H, S_kv, S_kv).contiguous()
    found = []
    for j in range(S_kv):  # with key j alone, lse is the score
        args = draw.arguments(
            Q=scores.unsqueeze(0), K=keys, V=keys, scale=1.0, score_mod=fn, score_operands=operands,
            mask=_only(j),
        )  # fmt: skip
        found.append(run(args)["lse"][0])
    return torch.stack(found, -1)


def _only(j):
    from kernel_api.masks import MaskMod

    return MaskMod(lambda b, h, q, kv: kv == j)


def test_lookups_divisions_and_casts_are_computed():
    scores = Draw(seed=4).random(2, 3, 8)
    table, flags = Draw(seed=5).random(2, 4), torch.tensor([True, False, True])

    def fn(score, b, h, q, kv, table, flags, one):
        bent = ep.where(flags[q], score, -score) + table[h, kv // 3 - q]  # below 0 it is the first
        return bent + ep.cast(q % 2, "int32") * table[1, 2 * kv + 1] + one

    found = computed(fn, scores, {"table": table, "flags": flags, "one": torch.tensor(1.0)})
    for h in range(2):
        for q in range(3):
            for kv in range(8):
                expected = scores[h, q, kv] * (1 if flags[q] else -1)
                expected = expected + table[h, max(kv // 3 - q, 0)] + 1
                expected = expected + (q % 2) * table[1, min(2 * kv + 1, 3)]
                assert_close(found[h, q, kv], expected)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            lambda w: {
                "score_mod": lambda s, b, h, q, kv, w: s + w[kv],
                "score_operands": {"w": w},
            },
            r"w has shape \(0,\); score_mod reads it",
        ),
        (
            lambda w: {"mask": masks.MaskMod(lambda b, h, q, kv, w: w[kv] < 1, w=w)},
            r"w has shape \(0,\); the mask reads it",
        ),
    ],
)
def test_an_operand_without_an_element_is_not_read(options, words):
    q, empty = torch.randn(1, 2, 6, 16), torch.zeros(0)
    with pytest.raises(ArgumentError, match=words):
        ka.ops.sdpa(q, q, q, **options(empty))
    assert ka.ops.sdpa(q, q, q, **options(torch.zeros(1))).isfinite().all()
    for lacking in (q[:, :, :0], q[:0]):
        keys = q[: lacking.shape[0]]
        assert ka.ops.sdpa(lacking, keys, keys, **options(empty)).numel() == 0
        if lacking.shape[0]:
            assert ka.ops.sdpa(q, lacking, lacking, **options(empty)).eq(0).all()


def test_masks_are_joined():
    graphs = [
        ScoreFunction(fn, False, {}).graph
        for fn in (lambda b, h, q, kv: q >= kv, lambda b, h, q, kv: kv % 2 == 0)
    ]
    assert conjunction(graphs[:1]) == graphs[0]
    assert [node.op for node in conjunction(graphs).nodes].count("and") == 1


# Derivatives -----------------------------------------------------------------------------

UNARY = {
    "neg": lambda s: -s,
    "abs": ep.abs,
    "exp": lambda s: ep.exp(0.3 * s),
    "expm1": ep.elu,
    "log": lambda s: ep.log(2.5 + ep.tanh(s)),
    "log1p": ep.softplus,
    "sqrt": lambda s: ep.sqrt(s * s + 1.0),
    "rsqrt": lambda s: ep.rsqrt(s * s + 1.0),
    "tanh": lambda s: 2.0 * ep.tanh(s / 2.0),
    "sigmoid": ep.sigmoid,
    "erf": ep.erf,
    "div": lambda s: (s + 1.0) / (2.0 + s * s),
    "div by": lambda s: 1.0 / (2.0 + s * s),
    "minimum": lambda s: ep.minimum(s, 0.1),
    "maximum": lambda s: ep.maximum(0.5 - s, s),
    "where": lambda s: ep.where(s > 0.2, s * s, 3.0),
    "sub": lambda s: 1.0 - s * 0.5,
    "cast": lambda s: ep.cast(s, "float32"),
    "power": lambda s: s**3,
    "gelu": ep.gelu,
}


@pytest.mark.parametrize("name", UNARY)
def test_derivatives_are_what_differences_say(name):
    fn = UNARY[name]
    check_derivative(lambda score, b, h, q, kv: fn(score) + 0.1 * q * score)


COMPOSED = {
    "mish": lambda s: s * ep.tanh(ep.softplus(s)),
    "logsigmoid": lambda s: -ep.softplus(-s),
}


@pytest.mark.parametrize("name", [*_DERIVATIVES, *COMPOSED])
def test_derivatives_of_activations_are_theirs_at_0_and_where_they_bend(name):
    parameters = {"cap": 4.0} if name == "softcap" else {}
    activation = COMPOSED.get(name) or getattr(ep, name)
    scores = torch.arange(-30.0, 30.0, 0.5, dtype=torch.float64).view(2, 4, 15)
    if name in COMPOSED:
        x = scores.clone().requires_grad_()
        getattr(functional, name)(x).sum().backward()
        expected = x.grad
    else:
        slope = ep.derivative(name)
        expected = computed_graph(traced(lambda s, b, h, q, kv: slope(s, **parameters)), scores)
    graph = traced(lambda s, b, h, q, kv: activation(s, **parameters))
    assert_close(computed_graph(derivative_of(graph), scores), expected, rtol=1e-9, atol=1e-12)


def test_what_is_looked_up_by_a_score_is_constant_around_it():
    def fn(score, b, h, q, kv, t):
        return 3.0 * score + t[ep.cast(score, "int32")]

    found = ScoreFunction(fn, True, {"t": torch.arange(4.0)}).derivative
    assert {node.op for node in found.nodes} == {"constant", "mul"}  # 3 · 1


@settings(max_examples=25)
@given(st.lists(st.sampled_from(sorted(set(UNARY) - {"cast"})), min_size=2, max_size=4))
def test_derivatives_of_chains_are_what_differences_say(names):
    def fn(score, b, h, q, kv):
        for name in names:
            score = ep.tanh(UNARY[name](score)) * 1.5 + 0.01 * kv
        return score

    check_derivative(fn)


def check_derivative(fn):
    graph = traced(fn)
    scores = torch.linspace(-1.93, 2.07, 24, dtype=torch.float64).view(2, 3, 4)
    found = computed_graph(derivative_of(graph), scores)
    step = 1e-6
    above, below = (computed_graph(graph, scores + s) for s in (step, -step))
    tolerance = 1e-5 if any(node.op == "cast" for node in graph.nodes) else 1e-6
    if tolerance == 1e-5:  # rounded values differ in steps
        above, below = (computed_graph(graph, scores + s) for s in (0.05, -0.05))
        step, tolerance = 0.05, 1e-4
    assert_close(found, (above - below) / (2 * step), rtol=tolerance, atol=tolerance)


def computed_graph(graph, scores):
    from kernel_api.providers.reference.sdpa_scores import Attention, Rows

    H, S_q, S_kv = scores.shape
    args = Draw(1, H, H, S_q, S_kv).arguments(score_mod=lambda s, b, h, q, kv: s)
    return Attention(args, torch.float64).function(
        graph, "score", Rows(0, 0, S_q, S_q, S_kv), scores
    )


def test_what_does_not_depend_on_the_score_is_constant():
    graph = derivative_of(traced(lambda s, b, h, q, kv: 0.5 * q))
    assert [node.op for node in graph.nodes] == ["constant"]
    graph = derivative_of(traced(lambda s, b, h, q, kv, t: s + t[h, q], t=TABLE))
    assert [node.op for node in graph.nodes] == ["constant"]

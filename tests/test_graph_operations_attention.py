"""Attention of graphs: options to masks and arguments, values and gradients without a kernel."""

import json
import math

import pytest
import torch
from support.graph_operations import Nodes, close, random
from support.sdpa import kept

import kernel_api as ka
from kernel_api.errors import EpilogueError, GraphError, GraphNotSupportedError
from kernel_api.graph._enums import (
    attention_implementation,
    data_type,
    diagonal_alignment,
    element_type,
)
from kernel_api.graph._operations import attention_arguments
from kernel_api.graph._operations._attention_arguments import alibi_slopes
from kernel_api.graph._operations.attention import block_table
from kernel_api.providers.reference import epilogue

DOUBLE = torch.float64
B, H, H_KV, S_Q, S_KV, D, D_V = 2, 4, 2, 9, 13, 8, 16
SCALE = 0.43
BOTTOM = diagonal_alignment.BOTTOM_RIGHT


# In torch --------------------------------------------------------------------------------


def attention(
    q, k, v, *, scale=SCALE, bias=None, slopes=None, visible=None, modify=None, sink=None,
    keep=None, lens_q=None, lens_kv=None,
):  # fmt: skip
    """(O, the logarithm of sums, the largest scores, sums) in the type of q."""
    groups = q.shape[1] // k.shape[1]
    k, v = (one.repeat_interleave(groups, 1) for one in (k, v))
    i, j = torch.arange(q.shape[2]).view(-1, 1), torch.arange(k.shape[2])
    s = scale * q @ k.transpose(2, 3)
    s = s if modify is None else modify(s)
    s = s if bias is None else s + bias
    s = s if slopes is None else s + slopes.view(-1, 1, 1) * (j - i)
    seen = torch.ones(s.shape, dtype=torch.bool)
    if visible is not None:
        seen = seen & visible
    if lens_kv is not None:
        seen = seen & (j < lens_kv.view(-1, 1, 1, 1))
    if lens_q is not None:
        seen = seen & (i < lens_q.view(-1, 1, 1, 1))
    s = s.masked_fill(~seen, -math.inf)
    largest = s.amax(-1, keepdim=True)
    if sink is not None:
        largest = torch.maximum(largest, sink.view(1, -1, 1, 1).to(s).expand_as(largest))
    shift = torch.where(largest == -math.inf, 0.0, largest).detach()
    e = torch.exp(s - shift)
    total = e.sum(-1, keepdim=True)
    if sink is not None:
        total = total + torch.exp(sink.view(1, -1, 1, 1) - shift)
    p = e / torch.where(total == 0, 1.0, total)
    p = p if keep is None else p * keep.to(p)
    live = torch.ones(q.shape[0], 1, q.shape[2], 1, dtype=torch.bool)
    if lens_q is not None:
        live = (i < lens_q.view(-1, 1, 1, 1)).view(q.shape[0], 1, -1, 1)
    lse = torch.where(live, torch.log(total) + shift, -math.inf)
    return torch.where(live, p @ v, 0.0), lse, largest, total


def band(left=None, right=None, bottom_right=False, lens=None):
    """Visible keys; a bound to the left counts the diagonal."""
    i, j = torch.arange(S_Q).view(-1, 1), torch.arange(S_KV)
    beyond = torch.zeros(1, 1, 1, 1, dtype=torch.long)
    if bottom_right:
        lens_q, lens_kv = lens or (torch.tensor([S_Q]), torch.tensor([S_KV]))
        beyond = (lens_kv - lens_q).view(-1, 1, 1, 1)
    found = torch.ones(1, 1, S_Q, S_KV, dtype=torch.bool)
    if left is not None:
        found = found & (j > i + beyond - left)
    if right is not None:
        found = found & (j <= i + beyond + right)
    return found


# Cases -----------------------------------------------------------------------------------


def tensors():
    """q, k, v in memory (B, S, H, D), with rows apart."""
    shapes = ((H, S_Q, D), (H_KV, S_KV, D), (H_KV, S_KV, D_V))
    return [
        random(B, S, heads, width + 8, seed=place).transpose(1, 2)[..., :width]
        for place, (heads, S, width) in enumerate(shapes)
    ]


LENS_Q, LENS_KV = torch.tensor([6, 9]), torch.tensor([13, 7])
BIAS = random(1, H, S_Q, S_KV, seed=5)
SINK = random(H, seed=6)
SLOPES = torch.tensor([2.0 ** (-8 * (h + 1) / H) for h in range(H)])
BLOCKS = torch.tensor([[[[5]], [[255]], [[1]], [[3]]]], dtype=torch.uint8)


def padded(g):
    return {
        "use_padding_mask": True,
        "seq_len_q": g.given(LENS_Q.int().view(B, 1, 1, 1)),
        "seq_len_kv": g.given(LENS_KV.int().view(B, 1, 1, 1)),
    }


LENS = {"lens_q": LENS_Q, "lens_kv": LENS_KV}

#: Options of a graph, made on it; and of the function above.
CASES = {
    "plain": (lambda g: {}, {}),
    "causal": (lambda g: {"use_causal_mask": True}, {"visible": band(right=0)}),
    "causal-bottom-right": (
        lambda g: {"use_causal_mask_bottom_right": True},
        {"visible": band(right=0, bottom_right=True)},
    ),
    "window": (
        lambda g: {"use_causal_mask": True, "sliding_window_length": 3},
        {"visible": band(3, 0)},
    ),
    "band": (
        lambda g: {
            "diagonal_band_left_bound": 4, "diagonal_band_right_bound": 2,
            "diagonal_alignment": BOTTOM,
        },
        {"visible": band(4, 2, True)},
    ),
    "padding": (padded, LENS),
    "padded-band": (
        lambda g: {
            **padded(g), "diagonal_band_right_bound": 0, "diagonal_band_left_bound": 5,
            "diagonal_alignment": "BOTTOM_RIGHT",
        },
        {**LENS, "visible": band(5, 0, True, (LENS_Q, LENS_KV))},
    ),
    "bias": (lambda g: {"attn_bias": g.given(BIAS)}, {"bias": BIAS}),
    "alibi": (
        lambda g: {"use_alibi_mask": True, "use_causal_mask": True},
        {"slopes": SLOPES, "visible": band(right=0)},
    ),
    "sink": (lambda g: {"sink_token": g.given(SINK.view(1, H, 1, 1))}, {"sink": SINK}),
    "dropout": (
        lambda g: {"dropout": 0.3, "dropout_seed": 77, "dropout_offset": 12},
        {"keep": kept(B, H, S_Q, S_KV, 0.3, 77, 12)},
    ),
    "dropout-of-tensors": (
        lambda g: {
            "dropout": (0.3, g.given(torch.full((1, 1, 1, 1), 77, dtype=torch.int32)),
                        g.given(torch.full((1, 1, 1, 1), 12))),
        },
        {"keep": kept(B, H, S_Q, S_KV, 0.3, 77, 12)},
    ),
    "scale-of-a-tensor": (lambda g: {"attn_scale": g.given(torch.tensor([[[[SCALE]]]]))}, {}),
    "blocks": (
        lambda g: {"block_mask": g.given(BLOCKS)},
        {"visible": (BLOCKS & 1).bool().expand(1, H, S_Q, S_KV)},
    ),
    "softcap": (
        lambda g: {"score_mod": lambda g, s: g.mul(g.tanh(g.div(s, 1.7)), 1.7)},
        {"modify": lambda s: 1.7 * torch.tanh(s / 1.7)},
    ),
}  # fmt: skip


def mask_by_index(g, score):
    """Keys that are no more than two ahead, by a score modification."""
    ahead = g.cmp_le(g.gen_index(score, axis=3), g.add(g.gen_index(score, axis=-2), 2))
    return g.binary_select(g.mul(score, 0.9), -math.inf, ahead)


CASES["score-by-index"] = (
    lambda g: {"score_mod": mask_by_index},
    {"modify": lambda s: (0.9 * s).masked_fill(~band(right=2), -math.inf)},
)


def operand(g):
    table, gain = g.given(random(1, H, 1, S_KV, seed=8)), g.passed(0.6)
    return {"score_mod": lambda g, s: g.add(g.mul(s, gain), g.mul(table, s))}


CASES["score-with-operands"] = (
    operand, {"modify": lambda s: s * 0.6 + random(1, H, 1, S_KV, seed=8).to(s) * s}
)  # fmt: skip


def with_remainder(g):
    def modulated(g, score):
        apart = g.sub(g.gen_index(score, 3), g.gen_index(score, 2))
        return g.add(score, g.mul(g.mod(apart, 3), 0.2))

    return {"score_mod": modulated}


J_MINUS_I = torch.arange(S_KV) - torch.arange(S_Q).view(-1, 1)
CASES["score-with-remainder"] = (
    with_remainder, {"modify": lambda s: s + 0.2 * torch.fmod(J_MINUS_I, 3)}
)  # fmt: skip


def in_buckets(sway):
    """Keys of four neighbours have one number, rounded to even, and the third key another gain."""

    def modified(g, score):
        j = g.gen_index(score, 3)
        bucket = g.mul(j, 0.25).set_data_type(data_type.INT32)
        other = g.sub(j, 2).set_data_type(data_type.BOOLEAN)
        bucket = g.sin(bucket) if sway else bucket
        return g.add(score, g.mul(bucket, g.binary_select(0.3, 0.7, other)))

    return lambda g: {"score_mod": modified}


BUCKETS = (torch.arange(S_KV) / 4).round()
GAINS = torch.where(torch.arange(S_KV) == 2, 0.7, 0.3)
CASES["score-by-buckets"] = in_buckets(False), {"modify": lambda s: s + BUCKETS * GAINS}
CASES["score-by-buckets-that-kernels-do-not-have"] = (
    in_buckets(True), {"modify": lambda s: s + torch.sin(BUCKETS.to(s)) * GAINS}
)  # fmt: skip


def swayed(g):
    """A function that kernels do not have, with a mask and operands."""
    table = g.given(random(1, H, S_Q, 1, seed=9))

    def modified(g, score):
        seen = g.cmp_le(g.gen_index(score, 3), 11.0)
        changed = g.add(g.sin(g.mul(score, table)), g.pow(g.abs(score), 1.3))
        return g.binary_select(changed, -math.inf, seen)

    return {**padded(g), "score_mod": modified, "attn_bias": g.given(BIAS)}


CASES["score-that-kernels-do-not-have-alone"] = (
    lambda g: {"score_mod": lambda g, s: g.mul(g.cos(s), 0.8)},
    {"modify": lambda s: 0.8 * torch.cos(s)},
)


def swayed_scores(s):
    changed = torch.sin(s * random(1, H, S_Q, 1, seed=9).to(s)) + s.abs() ** 1.3
    return changed.masked_fill(torch.arange(S_KV) > 11, -math.inf)


CASES["score-that-kernels-do-not-have"] = (
    swayed, {**LENS, "modify": swayed_scores, "bias": BIAS}
)  # fmt: skip


def exact_of(options, kind=DOUBLE, leaves=None):
    def converted(one):
        floating = isinstance(one, torch.Tensor) and one.is_floating_point()
        return one.to(kind) if floating else one

    given = {name: converted(one) for name, one in options.items()}
    given.update(leaves or {})
    return given


@pytest.mark.parametrize("case", CASES)
def test_attention_in_every_option(case):
    options, told = CASES[case]
    q, k, v = tensors()
    g = Nodes()
    how = {"attn_scale": SCALE, "generate_stats": True, **options(g)}
    o, stats = g.sdpa(*map(g.given, (q, k, v)), **how)
    found, lse = g.compute(o, stats)
    exact = attention(q.double(), k.double(), v.double(), **exact_of(told))
    same = attention(q, k, v, **exact_of(told, torch.float32))
    close(found, exact[0], same[0])
    finite = exact[1].isfinite()
    assert torch.equal(finite, lse.isfinite())
    close(lse[finite].view(1, -1), exact[1][finite].view(1, -1), same[1][finite].view(1, -1))
    assert o.dim == (B, H, S_Q, D_V) and stats.dim == (B, H, S_Q, 1)
    # Packed, in the memory order of q: (B, S, H, D).
    assert o.stride == (S_Q * H * D_V, D_V, H * D_V, 1)
    assert stats.data_type is data_type.FLOAT
    (node,) = g.nodes
    json.dumps(node.attributes)


@pytest.mark.parametrize("case", CASES)
def test_gradients_are_those_of_autograd(case):
    options, told = CASES[case]
    leaves = [one.double().requires_grad_() for one in tensors()]
    beside = {n: told[n].double().requires_grad_() for n in ("bias", "sink") if n in told}
    out, lse, *_ = attention(*leaves, **exact_of(told, leaves=beside))
    dO = random(*out.shape, seed=11).double()
    if "lens_q" in told:
        dead = torch.arange(S_Q).view(-1, 1) >= LENS_Q.view(-1, 1, 1, 1)
        dO = dO.masked_fill(dead, 0.0)
    exact = torch.autograd.grad(out, [*leaves, *beside.values()], dO)
    g = Nodes()
    how = {"attn_scale": SCALE, **options(g), "use_deterministic_algorithm": True}
    written = []
    for name, keyword in (("bias", "dBias"), ("sink", "dSink_token")):
        if name in beside:
            dim = BIAS.shape if name == "bias" else (1, H, 1, 1)
            how[keyword] = g.written(dim)
            written.append(how[keyword])
    saved = [one.detach().float() for one in (*leaves, out, dO, lse)]
    gradients = g.sdpa_backward(*map(g.given, saved), **how)
    found = g.compute(*gradients, *written)
    for value, one in zip(found, exact, strict=True):
        one = one.view(value.shape)
        floor = 128 * torch.finfo(torch.float32).eps * (1 + float(one.abs().max()))
        assert float((value.double() - one).abs().max()) < floor
    assert [g.dim for g in gradients] == [tuple(one.shape) for one in leaves]


def test_what_is_written_beside():
    q, k, v = tensors()
    g = Nodes()
    largest, total, dump = (g.written((B, H, S_Q, n)) for n in (1, 1, S_KV))
    how = {
        "dropout": 0.25, "dropout_seed": 5, "sink_token": g.given(SINK.view(1, H, 1, 1)),
        **padded(g),
    }  # fmt: skip
    o, stats = g.sdpa(
        *map(g.given, (q, k, v)),
        SCALE,
        score_max=largest,
        score_sum_exp=total,
        rng_dump=dump,
        **how,
    )
    assert stats is None
    g.run()
    keep = kept(B, H, S_Q, S_KV, 0.25, 5, 0)
    exact = attention(q.double(), k.double(), v.double(), sink=SINK.double(), keep=keep, **LENS)
    close(g.value(o), exact[0])
    for b in range(B):
        rows = slice(int(LENS_Q[b]))
        close(g.value(largest)[b, :, rows], exact[2][b, :, rows])
        close(g.value(total)[b, :, rows], exact[3][b, :, rows])
        seen = (b, slice(None), rows, slice(int(LENS_KV[b])))
        assert torch.equal(g.value(dump)[seen], (keep[seen] > 0).double())


@pytest.mark.parametrize("shared", [True, False])
def test_pages(shared):
    size, pages, blocks = 4, 4, 9
    generator = torch.Generator().manual_seed(3)
    table_k = torch.randperm(blocks, generator=generator)[: B * pages].view(B, 1, pages, 1).int()
    table_v = table_k if shared else table_k.flip(2).contiguous()
    q, _, _ = tensors()
    K, V = random(blocks, H_KV, size, D, seed=1), random(blocks, H_KV, size, D_V, seed=2)
    g = Nodes()
    tables = [g.given(table_k)] * 2 if shared else [g.given(table_k), g.given(table_v)]
    o, _ = g.sdpa(
        *map(g.given, (q, K, V)), SCALE, **padded(g), paged_attention_k_table=tables[0],
        paged_attention_v_table=tables[1], paged_attention_max_seq_len_kv=S_KV,
    )  # fmt: skip
    dense = [
        one[table.flatten(1).long()].transpose(1, 2).flatten(2, 3)[:, :, :S_KV]
        for one, table in ((K, table_k), (V, table_v))
    ]
    exact = attention(q.double(), *(one.double() for one in dense), **LENS)[0]
    close(g.compute(o), exact, attention(q, *dense, **LENS)[0])
    # Kernels read pages as they are, if there is one table.
    (node,) = g.nodes
    given = {name: g.values[id(one)] for name, one in node.inputs.items()}
    given = {
        n: one.to("meta") if isinstance(one, torch.Tensor) else one for n, one in given.items()
    }
    outputs = {"O": torch.empty(B, H, S_Q, D_V, device="meta")}
    if shared:
        arguments = attention_arguments(node, given, outputs)
        assert arguments.is_paged and arguments.S_kv == size * pages
    else:
        with pytest.raises(GraphNotSupportedError, match="not the same tensor"):
            attention_arguments(node, given, outputs)


def test_ragged_batches_are_no_arguments_of_kernels():
    """Planning brings their sequences to equal distances before."""
    g = Nodes()
    q, k, v = (g.given(one) for one in tensors())
    q.set_ragged_offset(g.unknown((B + 1, 1, 1, 1), data_type.INT32))
    g.sdpa(q, k, v, **padded(g))
    with pytest.raises(GraphNotSupportedError, match="is ragged"):
        attention_arguments(g.nodes[0], dict.fromkeys("qkv"), {})


def test_ragged_batches_need_lengths():
    g = Nodes()
    q, k, v = (g.given(one) for one in tensors())
    q.set_ragged_offset(g.unknown((B + 1, 1, 1, 1), data_type.INT32))
    g.sdpa(q, k, v)
    with pytest.raises(GraphError, match="ragged q and no padding mask"):
        g.infer()


def rounded(x, scale=1.0):
    return (x * scale).to(torch.float8_e4m3fn)


def test_attention_between_8_bit_floats():
    dq, dk, dv, ds, scale_s, scale_o = 0.7, 0.31, 1.9, 0.004, 251.0, 0.83
    q, k, v = (rounded(one) for one in tensors())
    g = Nodes()
    scales = [g.given(torch.full((1, 1, 1, 1), n)) for n in (dq, dk, dv, ds, scale_s, scale_o)]
    o, stats, amax_S, amax_O = g.sdpa_fp8(
        *map(g.given, (q, k, v)), *scales, attn_scale=SCALE, use_causal_mask=True,
        generate_stats=True,
    )  # fmt: skip
    g.infer()
    o.set_data_type(data_type.HALF)
    found = g.compute(o, stats, amax_S, amax_O)
    wide = [one.double() for one in (q, k, v)]
    s = SCALE * dq * dk * wide[0] @ wide[1].repeat_interleave(2, 1).transpose(2, 3)
    s = s.masked_fill(~band(right=0), -math.inf)
    p = torch.softmax(s, -1)
    exact = rounded(p, scale_s).double() @ wide[2].repeat_interleave(2, 1) * dv * ds
    # A probability near the middle of two 8-bit floats may be rounded either way.
    assert float((found[0].double() - exact * scale_o).norm() / exact.norm()) < 5e-3
    close(found[1], torch.logsumexp(s, -1, keepdim=True))
    assert float(found[2]) == pytest.approx(float(p.max()), rel=1e-6)
    assert float(found[3]) == pytest.approx(float(exact.abs().max()), rel=2e-2)
    assert amax_S.dim == amax_O.dim == (1, 1, 1, 1)
    results = g.sdpa_fp8(*map(g.given, (q, k, v)), *scales)
    assert results[1] is None and results[0] is not None


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
    with pytest.raises(EpilogueError, match=r"the exponent is 1\.3"):
        arguments(lambda g, s: g.pow(g.abs(s), 1.3))
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


def test_arguments_are_made_of_tensors_without_data():
    g = Nodes()
    q, k, v = tensors()
    options = {
        **padded(g), "bias": g.given(BIAS), "use_alibi_mask": True, "use_causal_mask": True,
        "sink_token": g.given(SINK.view(1, H, 1, 1)),
        "attn_scale": g.given(torch.tensor([[[[SCALE]]]])),
        "dropout": (0.2, 5, g.given(torch.tensor([[[[7]]]]))),
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

"""What the reference computes of attention, beside loops over single scores; what ``verify`` lets
pass."""

import math

import pytest
import torch
from support.sdpa import NAN, SDPA, Draw, attention, backward_of, kept, run
from torch.testing import assert_close

import kernel_api as ka
from kernel_api import epilogue as ep
from kernel_api import masks
from kernel_api.arguments import Dropout
from kernel_api.errors import EpilogueError
from kernel_api.verification import judge, prepare

ALIBI = torch.tensor([0.5, 0.25, 0.125, 0.0625], dtype=torch.float64)
SINK = torch.tensor([0.3, -2.0, 1.5, 0.0], dtype=torch.float64)
DO = Draw(seed=8).results()
TABLE = Draw(seed=9).random(4, 11)
DOCUMENT = torch.tensor([[0, 0, 1, 1, 1, 2, 2], [0, 1, 1, 1, 2, 2, 2]])
BLOCKS = torch.rand(1, 4, 3, 2, generator=torch.Generator().manual_seed(1)) < 0.6


def document(b, h, q, kv, ids):
    return ids[b, q] == ids[b, kv]


#: Beyond 2²⁴, where float32 holds every second whole number, and beyond 2³¹.
MARKS = torch.tensor([[0, 1, 2, 2, 3, 4, 4], [5, 6, 6, 7, 7, 8, 9]], dtype=torch.int32) + 2**24
TIMES = 3 * torch.arange(7) + 2**40
SINCE = 2**40 + 7


def marked(b, h, q, kv, marks, times, since):
    own = marks[b, q] - 2**24 == ep.maximum(marks[b, kv], -marks[b, q]) - 2**24
    return own | (ep.where(kv < 3, times[kv] + 1, times[kv]) // 2 > since // 2) | (q == kv)


def is_marked(b, h, i, j):
    later = (int(TIMES[j]) + (j < 3)) // 2 > SINCE // 2
    return bool(MARKS[b, i] == MARKS[b, j]) or later or i == j


def relative(score, b, h, q, kv, table, gain):
    return gain * score + table[h, kv - q + 4] - ep.where(kv // 2 == q % 3, 0.25, 0.0)


#: Options of the arguments, and the same of the loops.
OPTIONS = {
    "plain": ({}, {}),
    "scale": ({"scale": -0.7}, {"scale": -0.7}),
    "causal": ({"mask": masks.Causal()}, {"visible": lambda b, h, i, j: j <= i}),
    "causal, bottom right": (
        {"mask": masks.Causal("bottom_right")},
        {"visible": lambda b, h, i, j: j <= i + 2},
    ),
    "window": (
        {"mask": masks.SlidingWindow(2, 1)},
        {"visible": lambda b, h, i, j: i - 2 <= j <= i + 1},
    ),
    "window, bottom right": (
        {"mask": masks.SlidingWindow(1, None, "bottom_right") & masks.Causal("bottom_right")},
        {"visible": lambda b, h, i, j: i + 1 <= j <= i + 2},
    ),
    "blocks": (
        {"mask": masks.BlockSparse(BLOCKS, (2, 4))},
        {"visible": lambda b, h, i, j: bool(BLOCKS[0, h, i // 2, j // 4])},
    ),
    "function": (
        {"mask": masks.MaskMod(document, ids=DOCUMENT) & masks.Causal()},
        {"visible": lambda b, h, i, j: bool(DOCUMENT[b, i] == DOCUMENT[b, j]) and j <= i},
    ),
    "whole numbers": (
        {"mask": masks.MaskMod(marked, marks=MARKS, times=TIMES, since=SINCE)},
        {"visible": is_marked},
    ),
    "softcap": ({"softcap": 0.5}, {"softcap": 0.5}),
    "alibi": ({"alibi": ALIBI}, {"alibi": ALIBI}),
    "sink": (
        {"sink": SINK, "mask": masks.SlidingWindow(None, 0)},
        {"sink": SINK, "visible": lambda b, h, i, j: j <= i},
    ),
    "score": (
        {"score_mod": relative, "score_operands": {"table": TABLE, "gain": 1.5}},
        {
            "modify": lambda s, b, h, i, j: (
                1.5 * s + TABLE[h, j - i + 4] - (0.25 if j // 2 == i % 3 else 0.0)
            )
        },
    ),
    "dropout": (
        {"dropout": Dropout(0.4, 2**40 + 5, 2**32 - 3)},
        {"keep": kept(2, 4, 5, 7, 0.4, 2**40 + 5, 2**32 - 3)},
    ),
}
every_option = pytest.mark.parametrize(("options", "loops"), OPTIONS.values(), ids=OPTIONS.keys())


def exact(args, **loops):
    tensors = (getattr(args, name).tensor.double() for name in "QKV")
    out, lse = attention(*tensors, **loops)
    return {"out": out, "lse": lse}


# Forward ---------------------------------------------------------------------------------


@every_option
def test_attention_is_that_of_loops_over_scores(options, loops):
    args = Draw(pad=8).arguments(**options)
    found = run(args)
    for name, one in exact(args, **loops).items():
        assert_close(found[name], one, rtol=1e-12, atol=1e-12)


#: The least that 32 bits hold, and more: rounded down, what is on the way must not wrap around.
LEAST = torch.arange(7, dtype=torch.int32) - 2**31


def far(score, b, h, q, kv, least):
    third = least[kv] // 3 + least[kv] % (2**31 + 5) / 2**31
    hidden = ep.where(kv < 1e30, 0.0, -1e30) - abs(q - kv) * 1e9
    return score + third / 1e9 + hidden + ep.cast(2.7, "int32") * (kv % 2)


def of_loops(s, b, h, i, j):
    least = int(LEAST[j])
    third = least // 3 + least % (2**31 + 5) / 2**31
    return s + third / 1e9 - abs(i - j) * 1e9 + 3 * (j % 2)


def test_numbers_with_a_point_are_no_whole_numbers():
    args = Draw(element="float32").arguments(score_mod=far, score_operands={"least": LEAST})
    assert_close(
        run(args)["out"].double(), exact(args, modify=of_loops)["out"], rtol=1e-3, atol=1e-3
    )


@pytest.mark.parametrize("number", [2**53 + 1, -(2**60), 10**400])
def test_whole_numbers_that_float64_does_not_hold_are_refused(number):
    with pytest.raises(EpilogueError, match=f"{number} is beyond 2\\*\\*53; pass it as an operand"):
        masks.MaskMod(lambda b, h, q, kv: kv == number)


FAR = torch.arange(7) + 2**40


@pytest.mark.parametrize(
    ("fn", "loops"),
    [
        (lambda s, b, h, q, kv, t: s + (t[kv] + (kv > 3) - t[0]), lambda j: j + (j > 3)),
        (lambda s, b, h, q, kv, t: s + (kv + 2.0) // 3 + 0 * t[0], lambda j: (j + 2) // 3),
        (lambda s, b, h, q, kv, t: s + (t[kv * 1e10] - t[0]), lambda j: 6 if j else 0),
        (lambda s, b, h, q, kv, t: s + (t[ep.minimum(kv, 2.0)] - t[0.0]), lambda j: min(j, 2)),
        (lambda s, b, h, q, kv, t: s + (t[kv * 1e20] - t[0]), lambda j: 6 if j else 0),
        (lambda s, b, h, q, kv, t: s + (t[kv > 3] - t[0]), lambda j: j > 3),
        (lambda s, b, h, q, kv, t: s + (t[1e15] - t[-1e15]) + 0 * kv, lambda j: 6),
        (lambda s, b, h, q, kv, t: s + ep.cast(2.0**24 + 1, "int32") % 2 + 0 * t[0], lambda j: 0),
        (lambda s, b, h, q, kv, t: s - (ep.cast(1e300, "int32") // 2**30 + 0 * t[0]), lambda j: -1),
    ],
)  # fmt: skip
def test_what_is_whole_by_its_value_is_computed_as_such(fn, loops):
    args = Draw(element="float32").arguments(score_mod=fn, score_operands={"t": FAR})
    expected = exact(args, modify=lambda s, b, h, i, j: s + loops(j))["out"]
    assert_close(run(args)["out"].double(), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("element", ["float32", "bfloat16"])
def test_whole_numbers_are_exact_whatever_the_queries_are(element):
    options, loops = OPTIONS["whole numbers"]
    args = Draw(element=element).arguments(**options)
    assert_close(run(args)["out"].double(), exact(args, **loops)["out"], rtol=0.02, atol=0.02)


SEEN = torch.arange(7) <= torch.arange(5).view(5, 1) - 2


@pytest.mark.parametrize("sink", [None, SINK], ids=["no sink", "sink"])
def test_statistics_are_the_largest_score_and_the_sum_relative_to_it(sink):
    """Of which the first two queries see nothing, and the last of the second sequence is none."""
    draw, mask = (
        Draw(pad=8),
        masks.SlidingWindow(None, 0) & masks.MaskMod(lambda b, h, q, kv: kv <= q - 2),
    )
    lens = {"seq_lens_q": torch.tensor([5, 4], dtype=torch.int32)}
    statistics = {name: draw.lse() for name in ("score_max", "score_sum_exp")}
    args = draw.arguments(mask=mask, softcap=0.5, bias=draw.random(2, 4, 5, 7), sink=sink,
                          dropout=Dropout(0.4, 1, 2), **lens, **statistics)  # fmt: skip
    found = run(args)
    q, k = args.Q.tensor, args.K.tensor.repeat_interleave(2, 1)
    scores = 0.5 * torch.tanh(q @ k.mT / math.sqrt(8) / 0.5) + args.bias.tensor
    scores = torch.where(SEEN, scores, -math.inf)
    if sink is not None:
        scores = torch.cat((scores, sink.view(1, 4, 1, 1).expand(2, 4, 5, 1)), dim=3)
    largest = scores.amax(3)
    total = (scores - largest.nan_to_num(neginf=0.0).unsqueeze(3)).exp().sum(3)
    largest[1, :, 4], total[1, :, 4] = -math.inf, 0.0
    assert largest[0, :, 0].isinf().all() == (sink is None)
    assert_close(found["score_max"], largest, rtol=1e-12, atol=1e-12)
    assert_close(found["score_sum_exp"], total, rtol=1e-12, atol=1e-12)
    assert_close(found["lse"], largest + total.log(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("element", ["float32", "float64"])
def test_keys_that_a_large_negative_bias_hides_are_not_seen(element):
    """In float64, which has digits left, scores are what they are."""
    bias = torch.zeros(5, 7)
    bias[1], bias[2, 3:] = -1e9, -1e9
    found = run(Draw(element=element).arguments(bias=bias))
    alone = found["lse"][:, :, 1].isinf() & (found["out"][:, :, 1] == 0).all(-1)
    assert alone.all() if element == "float32" else not alone.any()
    partly = torch.zeros(5, 7).masked_fill(bias < 0, -math.inf)
    exact = run(Draw(element=element).arguments(bias=partly))
    assert_close(found["out"][:, :, 2], exact["out"][:, :, 2])


@pytest.mark.parametrize("score", [math.nan, math.inf])
def test_rows_with_a_score_that_is_no_number_or_infinite_have_no_statistics(score):
    draw = Draw()
    bias = torch.zeros(5, 7)
    bias[3, 2] = score
    statistics = {name: draw.lse() for name in ("score_max", "score_sum_exp")}
    found = run(draw.arguments(bias=bias, **statistics))
    for name in ("out", "lse", "score_max", "score_sum_exp"):
        assert found[name][:, :, 3].isnan().all()
        assert found[name][:, :, :3].isfinite().all()


def test_all_options_together_keep_their_order():
    draw = Draw(seed=3)
    bias = draw.random(2, 1, 5, 7)
    options, loops = {}, {}
    for name in ("softcap", "score", "alibi", "dropout", "sink"):
        options |= OPTIONS[name][0]
        loops |= OPTIONS[name][1]
    args = draw.arguments(**options, bias=bias, scale=1.25)
    found = run(args)
    for name, one in exact(args, **loops, bias=bias, scale=1.25).items():
        assert_close(found[name], one, rtol=1e-12, atol=1e-12)


def test_results_do_not_depend_on_how_many_rows_are_computed_at_once(monkeypatch):
    from kernel_api.providers.reference import sdpa_scores

    draw = Draw(seed=3)
    options = {"mask": masks.Causal("bottom_right"), "dropout": Dropout(0.3, 5, 6)}
    bias = draw.random(1, 4, 5, 1)
    args = draw.arguments(**options, bias=bias, sink=SINK)
    more = {"dBias": torch.full_like(bias, NAN), "dSink": torch.full_like(SINK, NAN)}
    results = []
    for elements in (1 << 24, 60):  # of which a row has 28
        monkeypatch.setattr(sdpa_scores, "_ELEMENTS", elements)
        found = {name: one.clone() for name, one in run(args).items()}
        results.append({**found, **run(backward_of(args, DO, **more))})
    assert_close(results[1], results[0])


@pytest.mark.parametrize("shape", [(2, 4, 5, 7), (1, 4, 1, 7), (2, 1, 5, 1), (1, 1, 1, 1)])
def test_a_bias_is_broadcast(shape):
    draw = Draw()
    bias = draw.random(*shape)
    args = draw.arguments(bias=bias)
    assert_close(run(args)["out"], exact(args, bias=bias)["out"])


@pytest.mark.parametrize("mask", [None, masks.Causal(), masks.Causal("bottom_right")])
def test_lengths_hide_what_is_behind_them_even_nan(mask):
    draw = Draw(B=3)
    lens_q, lens_kv = [5, 0, 2], [3, 4, 0]
    args = draw.arguments(
        mask=masks.Padding() if mask is None else mask & masks.Padding(),
        seq_lens_q=torch.tensor(lens_q, dtype=torch.int32),
        seq_lens_kv=torch.tensor(lens_kv, dtype=torch.int32),
    )
    beyond = [k - q for q, k in zip(lens_q, lens_kv, strict=True)]
    for b in range(3):
        args.Q.tensor[b, :, lens_q[b] :] = NAN
        args.K.tensor[b, :, lens_kv[b] :] = NAN
        args.V.tensor[b, :, lens_kv[b] :] = NAN
    sees = {
        None: None,
        masks.Causal(): lambda b, h, i, j: j <= i,
        masks.Causal("bottom_right"): lambda b, h, i, j: j <= i + beyond[b],
    }[mask]
    found = run(args)
    for name, one in exact(args, visible=sees, lens_q=lens_q, lens_kv=lens_kv).items():
        assert_close(found[name], one)
    assert found["out"][1].eq(0).all()
    assert found["lse"][2].eq(-math.inf).all()


@pytest.mark.parametrize("name", ["plain", "causal", "causal, bottom right", "score"])
def test_packed_sequences_are_those_that_are_padded(name):
    draw = Draw(B=4)
    lens_q, lens_kv = [5, 0, 2, 1], [3, 4, 0, 7]
    options = dict(OPTIONS[name][0])
    lengths = {"seq_lens_q": lens_q, "seq_lens_kv": lens_kv}
    lengths = {n: torch.tensor(one, dtype=torch.int32) for n, one in lengths.items()}
    padded = draw.arguments(**options, **lengths)
    found = run(padded)

    def packed(tensor, lens):
        return torch.cat([tensor[b, :, :n].transpose(0, 1) for b, n in enumerate(lens)])

    ends = {n: torch.tensor([0, *one]).cumsum(0).int() for n, one in
            (("cu_seqlens_q", lens_q), ("cu_seqlens_kv", lens_kv))}  # fmt: skip
    q, k, v = (getattr(padded, n).tensor for n in "QKV")
    args = SDPA(
        packed(q, lens_q),
        packed(k, lens_kv),
        packed(v, lens_kv),
        torch.empty(8, 4, 16, dtype=torch.float64),
        torch.empty(4, 8, dtype=torch.float64),
        max_seqlen_q=5,
        max_seqlen_kv=7,
        **ends,
        **options,
    )
    again = run(args)
    assert_close(again["out"], packed(found["out"], lens_q))
    lse = torch.cat([found["lse"][b, :, :n] for b, n in enumerate(lens_q)], dim=1)
    assert_close(again["lse"], lse)
    dO = draw.results()
    gradients = run(backward_of(padded, dO))
    packed_gradients = run(backward_of(args, packed(dO, lens_q)))
    for n, lens in (("dQ", lens_q), ("dK", lens_kv), ("dV", lens_kv)):
        assert_close(packed_gradients[n], packed(gradients[n], lens))


@pytest.mark.parametrize("element", ["float64", "float8_e4m3fn"])
def test_pages_are_gathered_by_the_table(element):
    draw = Draw(B=2, S_kv=7, D=16, element=element)
    lens = torch.tensor([7, 4], dtype=torch.int32)
    dense = draw.arguments(seq_lens_kv=lens, **({} if element == "float64" else
                           {"out": torch.empty(2, 4, 5, 16, dtype=torch.bfloat16)}))  # fmt: skip
    table = torch.tensor([[4, 1, 0], [2, 3, -1]], dtype=torch.int32)
    pages = []
    for tensor in (dense.K.tensor, dense.V.tensor):
        made = torch.full((5, 2, 3, 16), NAN, dtype=tensor.dtype)
        for b in range(2):
            for j in range(int(lens[b])):
                made[table[b, j // 3], :, j % 3] = tensor[b, :, j]
        pages.append(made)
    out = torch.empty_like(dense.out.tensor)
    paged = SDPA(dense.Q.tensor, *pages, out, page_table=table, seq_lens_kv=lens)
    assert (paged.S_kv, paged.page_size) == (9, 3)
    assert_close(run(paged)["out"], run(dense)["out"])


def test_a_row_that_sees_nothing_gives_zeros_or_the_sink():
    nothing = masks.MaskMod(lambda b, h, q, kv: (kv < 0) | (q != 2))
    args = Draw().arguments(mask=nothing)
    found = run(args)
    assert found["out"][:, :, 2].eq(0).all()
    assert found["lse"][:, :, 2].eq(-math.inf).all()
    assert found["lse"][:, :, 1].isfinite().all()
    found = run(Draw().arguments(mask=nothing, sink=SINK))
    assert found["out"][:, :, 2].eq(0).all()
    assert_close(found["lse"][0, :, 2], SINK)
    gradients = run(backward_of(args, Draw().results()))
    assert all(one.isfinite().all() for one in gradients.values())
    assert gradients["dQ"][:, :, 2].eq(0).all()


@pytest.mark.parametrize(("S_q", "S_kv"), [(0, 7), (5, 0)])
def test_no_queries_and_no_keys(S_q, S_kv):
    args = Draw(S_q=S_q, S_kv=S_kv).arguments()
    found = run(args)
    assert found["out"].eq(0).all()
    assert found["lse"].eq(-math.inf).all()
    gradients = run(backward_of(args, Draw(S_q=S_q, S_kv=S_kv).results()))
    assert all(one.eq(0).all() for one in gradients.values())


def test_no_heads_of_queries():
    args = Draw(H=0).arguments()
    assert run(args)["out"].shape == (2, 0, 5, 16)
    gradients = run(backward_of(args, Draw(H=0).results()))
    assert gradients["dK"].shape == (2, 2, 7, 8)
    assert all(one.eq(0).all() for one in gradients.values())


@pytest.mark.parametrize("element", ["float32", "bfloat16", "float16"])
def test_results_are_torchs_rounded_once(element):
    draw = Draw(S_q=33, S_kv=65, D=16, element=element, pad=8)
    args = draw.arguments(mask=masks.Causal())
    q, k, v = (one.tensor.double() for one in (args.Q, args.K, args.V))
    expected = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, is_causal=True, enable_gqa=True
    )
    assert torch.equal(run(args)["out"], expected.to(args.out.tensor.dtype))


def test_8_bit_operands_are_multiplied_with_their_scales():
    draw = Draw(D=16, element="float8_e4m3fn")
    q_scale, v_scale = torch.tensor(0.25), torch.tensor([[0.5, 2.0], [1.0, 3.0]])
    out = torch.empty(2, 4, 5, 16, dtype=torch.float16)
    args = draw.arguments(out=out, descale_q=q_scale, descale_v=v_scale)
    values = args.V.tensor.double() * v_scale[:, :, None, None]
    expected, _ = attention(args.Q.tensor.double() * 0.25, args.K.tensor.double(), values)
    assert torch.equal(run(args)["out"], expected.half())


# Backward --------------------------------------------------------------------------------


@every_option
def test_gradients_are_those_of_the_loops(options, loops):
    draw = Draw()
    bias = draw.random(1, 4, 5, 1)
    args = draw.arguments(**options, bias=bias)
    run(args)
    dO = draw.results()
    more = {"dBias": torch.full_like(bias, NAN)}
    sink = None
    if "sink" in options:
        sink = SINK.clone().requires_grad_()
        more["dSink"] = torch.full_like(SINK, NAN)
        loops = {**loops, "sink": sink}
    leaves = [getattr(args, n).tensor.clone().requires_grad_() for n in "QKV"]
    b = bias.clone().requires_grad_()
    out, _ = attention(*leaves, **loops, bias=b)
    out.backward(dO)
    found = run(backward_of(args, dO, **more))
    for name, leaf in (*zip(("dQ", "dK", "dV"), leaves, strict=True), ("dBias", b)):
        assert_close(found[name], leaf.grad, rtol=1e-10, atol=1e-10)
    if sink is not None:
        assert_close(found["dSink"], sink.grad, rtol=1e-10, atol=1e-10)


def test_rows_behind_a_length_have_no_gradient():
    draw = Draw(B=3)
    lens_q, lens_kv = [5, 0, 2], [3, 4, 0]
    args = draw.arguments(
        seq_lens_q=torch.tensor(lens_q, dtype=torch.int32),
        seq_lens_kv=torch.tensor(lens_kv, dtype=torch.int32),
    )
    run(args)
    dO = draw.results()
    leaves = [getattr(args, n).tensor.clone().requires_grad_() for n in "QKV"]
    out, _ = attention(*leaves, lens_q=lens_q, lens_kv=lens_kv)
    out.backward(dO)
    for b in range(3):
        args.V.tensor[b, :, lens_kv[b] :] = NAN
        dO[b, :, lens_q[b] :] = NAN
    found = run(backward_of(args, dO))
    for name, leaf in zip(("dQ", "dK", "dV"), leaves, strict=True):
        assert_close(found[name], leaf.grad)


def test_a_function_that_ignores_the_score_has_no_gradient():
    args = Draw().arguments(score_mod=lambda score, b, h, q, kv: 0.5 * kv - q)
    run(args)
    found = run(backward_of(args, Draw().results()))
    assert found["dQ"].eq(0).all()
    assert found["dV"].ne(0).any()


# verify ----------------------------------------------------------------------------------


@pytest.mark.parametrize("element", ["float64", "bfloat16", "float16"])
@pytest.mark.parametrize("name", ["causal", "softcap", "dropout"])
def test_the_reference_verifies_and_a_small_change_does_not(element, name):
    draw = Draw(S_q=40, S_kv=40, D=16, element=element)
    args = draw.arguments(**OPTIONS[name][0])
    (kernel,) = ka.get_kernels(args, providers=["reference"])
    assert ka.verify(kernel, args)
    args.out.tensor[0, 1, 3] *= 1.05
    verdict = judge(args)
    assert not verdict
    assert verdict.reason.startswith("out: ")
    run(args)
    args.lse.tensor[0, 1, 3] += 0.001
    assert judge(args).reason.startswith("lse: ")
    run(args)
    backward = backward_of(args, draw.results())
    (kernel,) = ka.get_kernels(backward, providers=["reference"])
    assert ka.verify(kernel, backward)
    backward.dK.tensor[0, 1, 3] *= 1.1
    assert judge(backward).reason.startswith("dK: ")


def test_probabilities_may_be_rounded_before_they_are_multiplied():
    draw = Draw(S_q=64, S_kv=128, D=32, D_v=32, element="bfloat16")
    args = draw.arguments()
    prepare(args)
    q, k, v = (one.tensor.float() for one in (args.Q, args.K, args.V))
    k, v = (one.repeat_interleave(2, 1) for one in (k, v))
    s = q @ k.mT / math.sqrt(32)
    p = torch.exp(s - s.amax(-1, keepdim=True))
    args.lse.tensor.copy_(torch.logsumexp(s, -1))
    args.out.tensor.copy_((p.bfloat16().float() @ v) / p.sum(-1, keepdim=True))
    assert judge(args)
    args.out.tensor.copy_((p.to(torch.float8_e4m3fn).float() @ v) / p.sum(-1, keepdim=True))
    assert not judge(args)


SMALLEST = 2.0**-126


def falling(rows: int, keys: int) -> tuple[Draw, dict]:
    """Far below a sink of 0, so that probabilities are about the smallest normal number."""
    draw = Draw(1, 1, 1, rows, keys, 32, 32, element="bfloat16")
    bias = torch.linspace(-75.0, -95.0, max(rows, keys)).view(1, 1, rows, keys)
    return draw, {"bias": bias, "sink": torch.zeros(1)}


def probabilities(args):
    q, k = (one.tensor.double() for one in (args.Q, args.K))
    return torch.exp(q @ k.mT / math.sqrt(32) + args.bias.tensor - args.lse.tensor.unsqueeze(-1))


@pytest.mark.parametrize(("limit", "passes"), [(SMALLEST, True), (100 * SMALLEST, False)])
@pytest.mark.parametrize("dropped", [None, 0.5, 0.9])
def test_what_is_no_normal_number_may_be_zero(limit, passes, dropped):
    more = {} if dropped is None else {"dropout": Dropout(dropped, 3, 5)}
    draw, options = falling(64, 1)
    args = draw.arguments(**options, **more)
    run(args)
    args.out.tensor[(probabilities(args) < limit).expand_as(args.out.tensor)] = 0.0
    assert bool(judge(args)) == passes

    draw, options = falling(1, 64)
    args = draw.arguments(**options, **more)
    run(args)
    backward = backward_of(args, draw.results())
    run(backward)
    p = probabilities(args)
    dP = backward.dO.tensor.double() @ args.V.tensor.double().mT
    dS = p * (dP - (backward.dO.tensor.double() * args.out.tensor.double()).sum(-1, keepdim=True))
    of_keys = [(backward.dV.tensor, p)]
    if dropped is None:  # else dP, too, is of what was kept
        of_keys.append((backward.dK.tensor, dS))
    for gradient, factor in of_keys:
        right = gradient.clone()
        gradient[(factor.abs().mT < limit).expand_as(gradient)] = 0.0
        assert bool(judge(backward)) == passes
        gradient.copy_(right)


@pytest.mark.parametrize(("sink", "passes"), [(-70.0, False), (-93.0, True), (-100.0, True)])
def test_a_sink_whose_share_is_no_normal_number_may_have_no_gradient(sink, passes):
    draw = Draw(1, 2, 2, 8, 8, 32, 32, element="bfloat16")
    args = draw.arguments(sink=torch.full((2,), sink) + 3 * math.log(2))
    run(args)
    backward = backward_of(args, draw.results(), dSink=torch.full((2,), NAN))
    run(backward)
    assert judge(backward)
    backward.further["dSink"].tensor.zero_()
    assert bool(judge(backward)) == passes


def test_a_softcap_allows_three_times_the_error_of_the_baseline():
    assert Draw().arguments(softcap=2.0).least_factor == 3.0
    assert Draw().arguments().least_factor == 0.0


@pytest.mark.parametrize(
    ("ends", "longest", "words"),
    [
        ([0, 3, 8], 4, "sequence 1 has 5 tokens by cu_seqlens_q, and max_seqlen_q is 4"),
        ([1, 3, 8], 5, "cu_seqlens_q begins with 1; expected 0"),
    ],
)
def test_packed_sequences_begin_at_0_and_are_no_longer_than_is_said(ends, longest, words):
    x, ends = torch.randn(8, 2, 8), torch.tensor(ends, dtype=torch.int32)
    with pytest.raises(ka.errors.ArgumentError, match=words):
        ka.ops.sdpa(
            *(x, x, x),
            cu_seqlens_q=ends,
            cu_seqlens_kv=ends,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
        )

"""Attention in one call, and with gradients: ka.fusions, ka.ops and ka.nn."""

import inspect
import pickle

import numpy as np
import pytest
import torch
from support.sdpa import NAN, Draw, attention, kept
from torch.testing import assert_close

import kernel_api as ka
from kernel_api import _attention_launches, masks
from kernel_api.arguments import Dropout, SdpaArguments, SdpaBackwardArguments
from kernel_api.errors import ArgumentError, NoKernelError

DRAW = Draw(S_q=5, S_kv=6, seed=2)
Q, K, V, DO = DRAW.queries(), DRAW.keys(), DRAW.values(), DRAW.results()
BIAS, SINK, ALIBI = DRAW.random(1, 4, 5, 6), DRAW.wides(4), DRAW.wides(4)


@pytest.fixture(params=["reference", "all"])
def provided(request, monkeypatch):
    if request.param == "reference":
        monkeypatch.setenv("KERNEL_API_PROVIDERS", "reference")


@pytest.fixture
def launched(monkeypatch):
    """How many calls were looked at anew, and not repeated."""
    first, found = _attention_launches._first, []

    def counted(*call):
        found.append(call)
        return first(*call)

    monkeypatch.setattr(_attention_launches, "_first", counted)
    _attention_launches._launches.clear()
    return found


def leaves(*tensors):
    return [tensor.detach().clone().requires_grad_() for tensor in tensors]


# fusions ---------------------------------------------------------------------------------


def test_fusions_give_the_arguments():
    out, lse = torch.empty_like(DO), DRAW.lse()
    args = ka.fusions.sdpa(Q, K, V, out=out, lse=lse, softcap=2.0)
    assert type(args) is SdpaArguments
    assert args.softcap == 2.0
    written = {f"d{n}": torch.empty_like(t) for n, t in (("Q", Q), ("K", K), ("V", V))}
    args = ka.fusions.sdpa_backward(Q, K, V, out, DO, lse, deterministic=True, **written)
    assert type(args) is SdpaBackwardArguments
    assert args.deterministic
    for name in ("sdpa", "sdpa_backward"):
        form = getattr(ka.ops, name)
        own = inspect.signature(getattr(ka.fusions, name)).parameters
        returned = {"return_lse", "return_statistics"}
        assert set(inspect.signature(form).parameters) - returned == set(own)
        assert form.__name__ in ka.fusions.__all__


# ops -------------------------------------------------------------------------------------


def test_out_is_allocated_and_lse_comes_back_where_it_is_asked_for(provided):
    expected, expected_lse = attention(Q, K, V, visible=lambda b, h, i, j: j <= i)
    out = ka.ops.sdpa(Q, K, V, mask=masks.Causal())
    assert_close(out, expected)
    found = ka.ops.sdpa(Q, K, V, mask=masks.Causal(), return_lse=True)
    assert found._fields == ("out", "lse")
    assert_close(found.out, expected)
    assert_close(found.lse, expected_lse)
    asked = ka.ops.sdpa(Q, K, V, mask=masks.Causal(), lse=True)
    assert asked._fields == ("out", "lse")
    assert_close(asked.lse, expected_lse)
    given, lse = torch.full_like(DO, NAN), DRAW.lse()
    assert ka.ops.sdpa(Q, K, V, out=given, lse=lse, mask=masks.Causal()) is given
    assert_close(given, expected)
    assert_close(lse, expected_lse)


def test_statistics_come_back_where_they_are_asked_for(provided):
    options = {"mask": masks.Causal(), "sink": SINK}
    expected, lse = ka.ops.sdpa(Q, K, V, return_lse=True, **options)
    found = ka.ops.sdpa(Q, K, V, return_statistics=True, **options)
    assert found._fields == ("out", "lse", "score_max", "score_sum_exp")
    assert_close(found.out, expected)
    assert_close(found.lse, lse)
    assert_close(found.score_max + found.score_sum_exp.log(), lse)
    given = torch.full_like(lse, NAN)
    again = ka.ops.sdpa(Q, K, V, score_max=given, return_statistics=True, **options)
    assert again.score_max is given
    assert torch.equal(given, found.score_max)
    alone = torch.full_like(lse, NAN)
    assert torch.equal(ka.ops.sdpa(Q, K, V, score_sum_exp=alone, **options), found.out)
    assert torch.equal(alone, found.score_sum_exp)


def test_statistics_have_no_gradient_and_take_none_away():
    options = {"mask": masks.Causal(), "sink": SINK}
    given, again = leaves(Q, K, V), leaves(Q, K, V)
    found = ka.ops.sdpa(*given, return_statistics=True, **options)
    assert found.out.requires_grad
    assert not any(one.requires_grad for one in found[1:])
    ka.ops.sdpa(*again, **options).backward(DO)
    found.out.backward(DO)
    for one, other in zip(given, again, strict=True):
        assert_close(one.grad, other.grad)


def test_results_lie_in_memory_as_queries_do():
    assert Q.transpose(1, 2).is_contiguous()
    assert ka.ops.sdpa(Q, K, V).transpose(1, 2).is_contiguous()
    assert ka.ops.sdpa(Q.contiguous(), K, V).is_contiguous()
    rows = DRAW.random(2, 5, 3, 4, 8)
    q, k, v = (rows[:, :, part].transpose(1, 2) for part in range(3))
    assert ka.ops.sdpa(q, k, v).transpose(1, 2).is_contiguous()
    e4m3 = Draw(D=16, element="float8_e4m3fn")
    out = ka.ops.sdpa(e4m3.queries(), e4m3.keys(), e4m3.values(), descale_q=torch.tensor(0.5))
    assert out.dtype is torch.bfloat16


def test_gradients_come_back_with_those_that_are_asked_for(provided):
    options = {"bias": BIAS, "sink": SINK, "mask": masks.Causal()}
    out, lse = ka.ops.sdpa(Q, K, V, return_lse=True, **options)
    q, k, v, bias, sink = leaves(Q, K, V, BIAS, SINK)
    loops = {"bias": bias, "sink": sink, "visible": lambda b, h, i, j: j <= i}
    attention(q, k, v, **loops)[0].backward(DO)
    found = ka.ops.sdpa_backward(Q, K, V, out, DO, lse, **options)
    assert found._fields == ("dQ", "dK", "dV")
    assert_close(found.dQ, q.grad)
    found = ka.ops.sdpa_backward(Q, K, V, out, DO, lse, dBias=True, dSink=True, **options)
    assert found._fields == ("dQ", "dK", "dV", "dBias", "dSink")
    for one, leaf in zip(found, (q, k, v, bias, sink), strict=True):
        assert_close(one, leaf.grad)
    dK = torch.full_like(K, NAN)
    found = ka.ops.sdpa_backward(Q, K, V, out, DO, lse, dK=dK, dSink=True, **options)
    assert found._fields == ("dQ", "dK", "dV", "dSink")
    assert found.dK is dK
    assert_close(dK, k.grad)


def test_other_operands_are_taken():
    ends = torch.tensor([0, 2, 5], dtype=torch.int32)
    q, k = DRAW.random(5, 4, 8), DRAW.random(5, 2, 8)
    more = {"cu_seqlens_q": ends, "cu_seqlens_kv": ends, "max_seqlen_q": 3, "max_seqlen_kv": 3}
    out, lse = ka.ops.sdpa(q, k, k, return_lse=True, **more)
    assert out.shape == (5, 4, 8)
    assert lse.shape == (4, 5)
    assert_close(ka.ops.sdpa(Q.numpy(), K.numpy(), V.numpy()), ka.ops.sdpa(Q, K, V))


# Calls that look like earlier ones ---------------------------------------------------------


def test_a_call_that_looks_like_an_earlier_one_goes_straight_to_the_kernel(launched, monkeypatch):
    monkeypatch.setenv("KERNEL_API_PROVIDERS", "reference")
    lens = torch.tensor([3, 5], dtype=torch.int32)

    def call(scale, p, seed, lens_q, mask):
        dropout = Dropout(p, seed, 3)
        more = {"dropout": dropout, "seq_lens_q": lens_q, "mask": mask, "alibi": ALIBI}
        return ka.ops.sdpa(Q, K, V, scale=scale, softcap=4, return_lse=True, **more)

    call(0.5, 0.25, 1, lens, masks.Causal())
    launched.clear()
    for scale, p, seed in ((0.5, 0.25, 1), (2, 0.5, 7)):
        for lengths in ([3, 5], [4, 0]):
            lens_q = lens.copy_(torch.tensor(lengths))
            out, lse = call(scale, p, seed, lens_q, masks.Causal())
            loops = {"scale": scale, "softcap": 4, "alibi": ALIBI, "lens_q": lengths}
            loops |= {"keep": kept(2, 4, 5, 6, p, seed, 3), "visible": lambda b, h, i, j: j <= i}
            for found, expected in zip((out, lse), attention(Q, K, V, **loops), strict=True):
                assert_close(found, expected)
    assert launched == []
    call(0.5, 0.25, 1, lens, masks.SlidingWindow(1, 0))
    call(0.5, 0.25, torch.tensor(1), lens, masks.Causal())
    assert len(launched) == 2


def test_launchers_take_the_form_that_kernels_are_compiled_for(launched, monkeypatch):
    taken = []
    monkeypatch.setenv("KERNEL_API_PROVIDERS", "reference")

    def launcher(kernel, args, artifact):
        names = tuple(kernel._launch_operands(args))
        return lambda tensors, values: taken.append(dict(zip(names, values, strict=True)))

    monkeypatch.setattr(ka.Kernel, "_launcher_in_order", launcher)
    for _ in range(2):
        ka.ops.sdpa(Q, K, V, bias=BIAS[0, 0], scale=1)
    q, ends = DRAW.random(5, 4, 8), torch.tensor([0, 2, 5], dtype=torch.int32)
    longest = {"max_seqlen_q": np.int64(3), "max_seqlen_kv": np.int32(3)}
    for _ in range(2):
        ka.ops.sdpa(q, q, q, cu_seqlens_q=ends, cu_seqlens_kv=ends, **longest)
    assert len(launched) == len(taken) == 2
    assert taken[0]["bias"].shape == (1, 1, 5, 6)
    assert type(taken[0]["scale"]) is float
    assert {type(taken[1][name]) for name in longest} == {int}


@pytest.mark.parametrize(
    "change",
    [
        {"Q": Q.contiguous()},
        {"K": DRAW.random(2, 2, 3, 8), "V": DRAW.random(2, 2, 3, 16)},
        {"return_lse": True},
        {"out": torch.empty_like(DO)},
        {"bias": BIAS},
        {"mask": masks.Causal("bottom_right")},
        {"mask": masks.Causal() & masks.SlidingWindow(2, 0)},
        {"softcap": 3.0},
        {"sink": SINK},
    ],
)
def test_a_call_that_looks_otherwise_is_looked_at(launched, change):
    given = {"Q": Q, "K": K, "V": V, "mask": masks.Causal()}
    ka.ops.sdpa(**given)
    ka.ops.sdpa(**given)  # providers are loaded by now
    launched.clear()
    ka.ops.sdpa(**given)
    assert launched == []
    ka.ops.sdpa(**{**given, **change})
    assert len(launched) == 1


def test_operands_of_functions_are_new_at_every_call(launched, monkeypatch):
    monkeypatch.setenv("KERNEL_API_PROVIDERS", "reference")
    table = torch.ones(1, 1, 3, 3, dtype=torch.bool)

    def shifted(score, b, h, q, kv, slope, shift):
        return score + slope[h] * (kv - q) + shift

    def call(slope, shift, width, ends, table):
        mask = masks.MaskMod(
            lambda b, h, q, kv, width, ends: (kv - q <= width) & (kv < ends[b]),
            width=width,
            ends=ends,
        ) & masks.BlockSparse(table, (2, 2))
        operands = {"slope": slope, "shift": shift}
        return ka.ops.sdpa(Q, K, V, mask=mask, score_mod=shifted, score_operands=operands)

    def expected(slope, shift, width, ends, table):
        def visible(b, h, i, j):
            return j - i <= width and j < int(ends[b]) and bool(table[0, 0, i // 2, j // 2])

        def modify(score, b, h, i, j):
            return score + slope[h] * (j - i) + shift

        return attention(Q, K, V, visible=visible, modify=modify)[0]

    slopes, lengths = torch.empty(4), torch.empty(2, dtype=torch.int64)

    def given(seed):  # in the same memory: how it is aligned is part of how a call looks
        one = torch.Generator().manual_seed(seed)
        slopes.normal_(generator=one)
        lengths.random_(3, 7, generator=one)
        table.copy_(torch.rand(1, 1, 3, 3, generator=one) < 0.8)
        return slopes, 0.25 * seed, seed, lengths, table

    call(*given(1))
    launched.clear()
    for seed in (1, 2, 3):
        assert_close(call(*given(seed)), expected(*given(seed)))
    assert launched == []
    slope, shift, width, ends, table = given(2)
    call(slope.double(), shift, width, ends, table)
    call(slope, 1, width, ends, table)
    call(slope, shift, float(width), ends, table)
    call(slope, shift, width, ends.int(), table)
    assert len(launched) == 4


def test_a_function_that_reads_what_changes_is_traced_at_every_call(launched):
    gain = 1.0

    def scaled(score, b, h, q, kv):
        return gain * score

    found = []
    for gain in (1.0, 0.5):  # noqa: B007 (the function reads it)
        found.append(ka.ops.sdpa(Q, K, V, score_mod=scaled))
    assert_close(found[1], ka.ops.sdpa(Q, K, V, scale=0.5 * 8**-0.5))
    assert not torch.equal(*found)


def test_memory_is_told_apart_in_every_call(launched):
    buffer = DRAW.random(2 * 4 * 5 * 8 * 2)
    q, apart = (buffer[n * 320 :][:320].view(2, 4, 5, 8) for n in range(2))
    for _ in range(2):
        ka.ops.sdpa(q, K, V[..., :8], out=apart)
    with pytest.raises(ArgumentError, match="out shares memory with Q"):
        ka.ops.sdpa(q, K, V[..., :8], out=buffer[8:][:320].view(2, 4, 5, 8))
    one, other = buffer[:80].view(2, 2, 4, 5)
    for _ in range(3):
        ka.ops.sdpa(Q, K, V, score_max=one, score_sum_exp=other)
    assert len(launched) == 3
    with pytest.raises(ArgumentError, match="score_max shares memory with score_sum"):
        ka.ops.sdpa(Q, K, V, score_max=one, score_sum_exp=buffer[8:][:40].view(2, 4, 5))


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: ka.ops.sdpa(Q, K, V[:, :, :4]), ArgumentError, "K has S_kv = 6 but V has S_kv ="),
        (lambda: ka.ops.sdpa(Q[0], K[0], V[0]), ArgumentError, r"expected \(B, H, S_q, D\)"),
        (lambda: ka.ops.sdpa(Q[0, 0], K, V, return_lse=True), ArgumentError, r"Q has shape \(5,"),
        (lambda: ka.ops.sdpa("q", K, V), ArgumentError, "Q is a str; expected a torch tensor"),
        (lambda: ka.ops.sdpa(Q, K, V, colour=3), TypeError, "unexpected keyword argument 'colour'"),
        (lambda: ka.ops.sdpa(Q, K, V, score_operands=ALIBI), ArgumentError,
         "score_operands is a Tensor; expected a dict of operands by name"),
        (lambda: ka.ops.sdpa(Q, K, V, score_mod=lambda s, b, h, q, kv: s, score_operands=[ALIBI]),
         ArgumentError, "score_operands is a list; expected a dict of operands by name"),
        (lambda: ka.ops.sdpa(Q, K, V, scale=float("inf")), ArgumentError, "scale is inf"),
        (lambda: ka.ops.sdpa_backward(Q, K, V, DO, DO, None), ArgumentError, "lse is None; the"),
        (lambda: ka.ops.sdpa_backward(Q, K, V, DO, DO, DRAW.lse(), dSink=True), ArgumentError,
         "dSink is asked for and sink is None"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(call, error, words):
    for _ in range(2):
        with pytest.raises(error, match=words):
            call()


def test_where_no_kernel_takes_the_operands_the_reasons_are_told(monkeypatch):
    monkeypatch.setenv("KERNEL_API_PROVIDERS", "torch")
    with pytest.raises(NoKernelError, match=r"no softcap, score_mod, alibi or sink; softcap is"):
        ka.ops.sdpa(Q, K, V, softcap=3.0)


# Gradients -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["plain", "bias", "sink", "all"])
def test_gradients_are_those_that_differences_say(name, provided):
    call = ka.ops.sdpa if name in ("plain", "all") else ka.nn.attention
    q, k, v = leaves(Q[:1, :2, :2], K[:1, :1, :3], V[:1, :1, :3, :8])
    more = leaves(BIAS[:, :2, :2, :1], SINK[:2])
    names = {"plain": (), "bias": ("bias",), "sink": ("sink",), "all": ("bias", "sink")}[name]
    given = [one for one, n in zip(more, ("bias", "sink"), strict=True) if n in names]
    options = {"mask": masks.Causal()}
    if name == "all":
        options = {"softcap": 2.0, "dropout": Dropout(0.3, 4, 5), "alibi": ALIBI[:2]}
        options["score_mod"] = lambda score, b, h, q, kv: score * (1.0 + 0.1 * q) - 0.2 * kv

    def function(q, k, v, *others):
        return call(q, k, v, **dict(zip(names, others, strict=True)), **options)

    assert torch.autograd.gradcheck(function, [q, k, v, *given])


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("shape", [(), (6,), (5, 6), (5, 1), (4, 5, 6), (1, 1, 6), (2, 1, 5, 6)])
def test_a_bias_broadcasts_as_torch_does_and_so_does_its_gradient(shape, compiled):
    (bias,) = leaves(DRAW.random(*shape))
    whole = bias.expand(2, 4, 5, 6)
    expected = ka.nn.attention(Q, K, V, bias=whole)
    (gradient,) = torch.autograd.grad(expected, bias, DO)
    function = ka.nn.attention
    if compiled:
        torch._dynamo.reset()
        function = torch.compile(function, backend="aot_eager", fullgraph=True)
    for _ in range(3):  # anew, and as calls that look like earlier ones
        found = function(Q, K, V, bias=bias)
        (found_gradient,) = torch.autograd.grad(found, bias, DO)
        assert_close(found, expected)
        assert_close(found_gradient, gradient)


def test_a_gradient_of_a_bias_is_allocated_and_written_in_its_shape(provided):
    bias = BIAS[0, 0]
    out, lse = ka.ops.sdpa(Q, K, V, bias=bias, return_lse=True)
    whole = ka.ops.sdpa_backward(Q, K, V, out, DO, lse, bias=bias[None, None], dBias=True).dBias
    given = torch.full_like(bias, NAN)
    for dBias in (True, given):
        found = ka.ops.sdpa_backward(Q, K, V, out, DO, lse, bias=bias, dBias=dBias).dBias
        assert_close(found, whole[0, 0])
    assert found is given


def test_only_what_needs_a_gradient_gets_one():
    q, k, v = Q.bfloat16(), K.bfloat16().requires_grad_(), V.bfloat16()
    out, lse = ka.ops.sdpa(q, k, v, return_lse=True)
    assert out.requires_grad
    assert not lse.requires_grad
    out.sum().backward()  # one number for all
    assert k.grad.dtype is torch.bfloat16
    assert q.grad is None
    assert not ka.ops.sdpa(q, k.detach(), v).requires_grad
    with torch.no_grad():
        assert not ka.ops.sdpa(q, k, v, out=torch.empty_like(out)).requires_grad


def test_slices_of_a_projection_are_taken_and_have_gradients():
    rows = DRAW.random(2, 5, 3, 4, 8).requires_grad_()
    plain = rows.detach().clone().requires_grad_()
    for one, call in ((rows, ka.nn.attention), (plain, attention)):
        q, k, v = (one[:, :, part].transpose(1, 2) for part in range(3))
        found = call(q, k, v)
        found = found if torch.is_tensor(found) else found[0]
        found.square().sum().backward()
    assert_close(rows.grad, plain.grad)
    turned = DRAW.random(2, 4, 8, 5).mT.requires_grad_()
    assert ka.nn.attention(turned, K, V).shape == (2, 4, 5, 16)


@pytest.mark.parametrize("element", [torch.int32, torch.int64])
def test_zeros_of_dropout_stay_those_of_the_forward_pass(element):
    seed = torch.tensor(3, dtype=element)
    q, k, v = leaves(Q, K, V)
    dropout = Dropout(0.4, seed, 1)
    out = ka.ops.sdpa(q, k, v, dropout=dropout)
    seed.add_(1)  # for the next step
    out.backward(DO)
    other = leaves(Q, K, V)
    attention(*other, keep=kept(2, 4, 5, 6, 0.4, 3, 1))[0].backward(DO)
    for one, leaf in zip((q, k, v), other, strict=True):
        assert_close(one.grad, leaf.grad)


def test_a_sink_of_16_bits_is_taken_and_learns():
    q, k, v = (t.bfloat16() for t in (Q, K, V))
    sink = SINK.bfloat16().requires_grad_()
    ka.nn.attention(q, k, v, sink=sink).sum().backward()
    assert sink.grad.dtype is torch.bfloat16
    assert sink.grad.isfinite().all()


LOST = [
    ({"out": torch.empty_like(DO)}, "out is given and an operand needs a gradient"),
    ({"lse": DRAW.lse()}, "lse is given and an operand needs a gradient"),
    ({"alibi": ALIBI.clone().requires_grad_()}, "alibi needs a gradient, and there is none"),
    (
        {
            "score_mod": lambda s, b, h, q, kv, t: s * t[h],
            "score_operands": {"t": ALIBI.clone().requires_grad_()},
        },
        "the operand t of score_mod needs a gradient, and there is none; pass it detached",
    ),
]


@pytest.mark.parametrize(("options", "words"), LOST)
def test_a_gradient_that_would_be_lost_is_refused(options, words):
    q, k, v = leaves(Q, K, V)
    with pytest.raises(ArgumentError, match=words):
        ka.ops.sdpa(q, k, v, **options)


@pytest.mark.parametrize("options", [case[0] for case in LOST[2:]], ids=["alibi", "score"])
def test_a_gradient_is_not_lost_either_where_no_other_is_asked_for(options):
    with pytest.raises(ArgumentError, match="needs a gradient, and there is none"):
        ka.nn.attention(Q, K, V, **options)
    with torch.no_grad():
        assert ka.nn.attention(Q, K, V, **options).isfinite().all()


def test_torch_sees_that_a_result_that_is_needed_again_was_changed():
    q, k, v = leaves(Q, K, V)
    out = ka.nn.attention(q, k, v)
    out += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_the_reference_checks_pages_and_ends_of_sequences():
    def whole(*values):
        return torch.tensor(values, dtype=torch.int32)

    q, pages = torch.randn(1, 2, 1, 8), torch.randn(3, 2, 4, 8)
    for table, there in ((whole(7, 1), "page_table[0, 0] is 7"), (whole(2, -1), "[0, 1] is -1")):
        with pytest.raises(ArgumentError) as caught:
            ka.ops.sdpa(q, pages, pages, page_table=table.view(1, 2), seq_lens_kv=whole(5))
        assert there in str(caught.value) and "expected one of the 3 pages" in str(caught.value)
    # What no key lies in may be anything.
    ka.ops.sdpa(q, pages, pages, page_table=whole(2, -1).view(1, 2), seq_lens_kv=whole(4))

    packed, most = torch.randn(5, 2, 8), {"max_seqlen_q": 5, "max_seqlen_kv": 5}
    for ends, there in (
        (whole(0, 3, 9), "is 9"),
        (whole(0, 4, 3), "is 3"),
        (whole(-1, 2, 5), "-1"),
    ):
        with pytest.raises(ArgumentError) as caught:
            ka.ops.sdpa(
                packed, packed, packed, cu_seqlens_q=ends, cu_seqlens_kv=whole(0, 3, 5), **most
            )
        assert f"cu_seqlens_q[{int(ends[0] == 0)}]" in str(caught.value)
        assert there in str(caught.value)


@pytest.mark.parametrize("name", ["scale", "softcap"])
def test_calls_of_another_sign_look_different(name):
    Q, K, V = (torch.empty(1, 2, 8, 16) for _ in range(3))
    looks = [
        _attention_launches._look(Q, K, V, None, None, False, {name: value})[0]
        for value in (0.5, 2.0, -0.5, 0.0)
    ]
    assert looks[0] == looks[1] != looks[2] == looks[3]


def test_gradients_by_name_are_pickled():
    q = torch.randn(1, 2, 4, 8)
    out, lse = ka.ops.sdpa(q, q, q, return_lse=True)
    found = ka.ops.sdpa_backward(q, q, q, out, q, lse)
    again = pickle.loads(pickle.dumps(found))
    assert type(again) is type(found) and again._fields == ("dQ", "dK", "dV")
    assert all(torch.equal(one, other) for one, other in zip(again, found, strict=True))

"""What the arguments of attention take, refuse and tell apart."""

import json
import math

import numpy as np
import pytest
import torch
from support.sdpa import BACKWARD, SDPA, Draw, backward_of

import kernel_api as ka
from kernel_api import masks
from kernel_api._description import described, rebuilt
from kernel_api.arguments import Dropout
from kernel_api.errors import ArgumentError, EpilogueError
from kernel_api.tuning._data import random_arguments
from kernel_api.tuning._problem import Problem

B, H, H_KV, S, T, D, E = 2, 4, 2, 6, 10, 16, 8

# One of every option; what they are tells the names and the order of launch values.
TABLE = torch.ones(1, H, 1, 1, dtype=torch.bool)


def x(*shape, element=torch.bfloat16):
    return torch.zeros(shape, dtype=element)


def e(*shape):
    return x(*shape, element=torch.float8_e4m3fn)


def i(*shape):
    return torch.zeros(shape, dtype=torch.int32)


def f(*shape):
    return torch.zeros(shape)


def operands():
    return {"Q": x(B, H, S, D), "K": x(B, H_KV, T, D), "V": x(B, H_KV, T, E), "out": x(B, H, S, E)}


def make(**options):
    return SDPA(**{**operands(), **options})


def packed(**options):
    given = {"Q": x(9, H, D), "K": x(11, H_KV, D), "V": x(11, H_KV, E), "out": x(9, H, E)}
    given |= {"cu_seqlens_q": i(3), "cu_seqlens_kv": i(3), "max_seqlen_q": 5, "max_seqlen_kv": 7}
    return SDPA(**{**given, **options})


def paged(**options):
    given = {"K": x(7, H_KV, 16, D), "V": x(7, H_KV, 16, E)}
    return make(**{**given, "page_table": i(B, 3), "seq_lens_kv": i(B), **options})


def packed_paged(**options):
    """Packed queries of keys in pages."""
    given = {"cu_seqlens_kv": None, "max_seqlen_kv": None, "page_table": i(2, 3)}
    given |= {"K": x(7, H_KV, 16, D), "V": x(7, H_KV, 16, E), "seq_lens_kv": i(2)}
    return packed(**{**given, **options})


def backward(**options):
    given = {**operands(), "dO": x(B, H, S, E), "lse": f(B, H, S)}
    given |= {"dQ": x(B, H, S, D), "dK": x(B, H_KV, T, D), "dV": x(B, H_KV, T, E)}
    return BACKWARD(**{**given, **options})


def mask_function(b, h, q, kv, ids):
    return ids[b, q] == ids[b, kv]


def score_function(score, b, h, q, kv, slopes, gain):
    return gain * score + slopes[h]


def every(**options):
    function = masks.MaskMod(mask_function, ids=i(B, T))
    mask = masks.SlidingWindow(5, 1) & masks.SlidingWindow(4, 2, "bottom_right")
    given = {
        "lse": f(B, H, S),
        "score_max": f(B, H, S),
        "score_sum_exp": f(B, H, S),
        "mask": mask & masks.BlockSparse(TABLE) & function & masks.Padding(),
        "bias": x(1, H, 1, T),
        "alibi": f(H),
        "sink": f(H),
        "softcap": 30,
        "score_mod": score_function,
        "score_operands": {"slopes": f(H), "gain": 2.0},
        "dropout": Dropout(0.1, torch.tensor(7), 11),
        "seq_lens_q": i(B),
        "seq_lens_kv": i(B),
    }
    return make(**{**given, **options})


ALL_NAMES = [
    "lse", "score_max", "score_sum_exp", "bias", "alibi", "sink", "seq_lens_q", "seq_lens_kv",
    "blocks", "mask_ids", "score_slopes", "score_gain", "scale", "softcap", "left", "right",
    "left_end", "right_end", "dropout_p", "dropout_seed", "dropout_offset",
]  # fmt: skip


# Fields ----------------------------------------------------------------------------------


def test_sizes_are_read_from_the_operands():
    args = make()
    assert args.sizes == {"B": B, "H": H, "H_kv": H_KV, "S_q": S, "S_kv": T, "D": D, "D_v": E}
    assert (args.is_packed, args.is_paged, args.is_padded, args.page_size) == (False,) * 3 + (None,)
    args = packed()
    assert args.is_packed
    assert (args.B, args.S_q, args.S_kv) == (2, 5, 7)
    args = paged()
    assert args.is_paged
    assert args.is_padded
    assert (args.B, args.S_q, args.S_kv, args.page_size) == (B, S, 48, 16)
    args = packed_paged()
    assert args.is_packed
    assert args.is_paged
    assert (args.B, args.S_q, args.S_kv, args.page_size) == (2, 5, 48, 16)


def test_rows_of_packed_tensors_are_sizes():
    """Which the longest sequence does not tell: of a batch, most may decode one token."""
    of_all = {"B": 2, "H": H, "H_kv": H_KV, "S_q": 5, "D": D, "D_v": E}
    assert packed().sizes == {**of_all, "S_kv": 7, "T": 9, "T_kv": 11}
    assert packed_paged().sizes == {**of_all, "S_kv": 48, "T": 9}
    more = packed_paged(Q=x(18, H, D), out=x(18, H, E))
    assert Problem.of(packed_paged()).distance(Problem.of(more)) == (1.0, 1.0)


def test_the_scale_is_one_over_the_root_of_the_head_dimension():
    assert make().scale == 1 / math.sqrt(D)
    assert make(scale=2).scale == 2.0
    assert make().launch_values == {"scale": 0.25}


def test_statistics_are_float32_or_float64_where_the_operands_are():
    assert make().accumulator_type.name == "float32"
    assert Draw().arguments().accumulator_type.name == "float64"


def test_launch_values_are_what_is_there_in_one_order():
    args = every()
    assert list(args.launch_values) == ALL_NAMES
    numbers = {n: v for n, v in args.launch_values.items() if isinstance(v, (int, float))}
    assert numbers == {
        "score_gain": 2.0, "scale": 0.25, "softcap": 30.0, "left": 5, "right": 1, "left_end": 4,
        "right_end": 2, "dropout_p": 0.1, "dropout_offset": 11,
    }  # fmt: skip
    assert list(packed(lse=f(H, 9)).launch_values) == [
        "lse", "cu_seqlens_q", "cu_seqlens_kv", "scale", "max_seqlen_q", "max_seqlen_kv",
    ]  # fmt: skip
    assert list(paged().launch_values) == ["seq_lens_kv", "page_table", "scale"]
    assert list(packed_paged(lse=f(H, 9)).launch_values) == [
        "lse", "seq_lens_kv", "cu_seqlens_q", "page_table", "scale", "max_seqlen_q",
    ]  # fmt: skip
    assert packed_paged().launch_values["max_seqlen_q"] == 5
    more = {"bias": f(1, 1, 1, 1), "dBias": f(1, 1, 1, 1), "sink": f(H), "dSink": f(H)}
    names = list(backward(**more, mask=masks.Causal()).launch_values)
    assert names == ["bias", "sink", "dBias", "dSink", "scale", "right"]


def test_operands_and_what_is_beside_them_have_names():
    args = every()
    names = [name for name in ALL_NAMES if name not in args._numbers() and name != "score_gain"]
    assert list(args.named_operands) == ["Q", "K", "V", "out", *names, "dropout_seed"]
    assert list(args.outputs) == ["out", "lse", "score_max", "score_sum_exp"]
    assert list(make().outputs) == ["out"]
    assert args.bias is args.further["bias"]
    assert make().bias is None
    with pytest.raises(AttributeError, match="SdpaArguments has no attribute 'colour'"):
        _ = args.colour
    assert list(backward().outputs) == ["dQ", "dK", "dV"]


def test_text_says_what_is_computed():
    assert repr(make(mask=masks.Causal())) == (
        "SdpaArguments(2x4/2x6x10 (B x H x S_q x S_kv), D = 16/8, bf16 -> bf16, "
        "Causal(alignment='top_left'), on cpu)"
    )
    text = repr(every())
    for word in ("softcap", "score_mod", "dropout", "bias", "alibi", "sink"):
        assert f", {word}" in text
    assert "(packed 2x4/2x5x7" in repr(packed())
    assert "(paged 2x4/2x6x48" in repr(paged())
    assert "(packed paged 2x4/2x5x48" in repr(packed_paged())
    assert ", deterministic, on cpu)" in repr(backward(deterministic=True))


def test_slices_of_a_packed_projection_need_no_copy():
    rows, gradient = x(B, S, 3, H, D), x(B, S, 3, H, D)
    q, k, v = (rows[:, :, part].transpose(1, 2) for part in range(3))
    gradients = [gradient[:, :, part].transpose(1, 2) for part in range(3)]
    out = x(B, S, H, D).transpose(1, 2)
    args = SDPA(q, k, v, out)
    assert args.Q.stride == (3 * S * H * D, D, 3 * H * D, 1)
    BACKWARD(q, k, v, out, out.clone(), f(B, H, S), *gradients)
    with pytest.raises(ArgumentError, match="dK shares memory with dV"):
        BACKWARD(q, k, v, out, out.clone(), f(B, H, S), *gradients[:2], gradients[1])


SCALED = ka.ScaledOperand(x(B, H, S, D), f(), ka.ScaleMode.PER_TENSOR)


@pytest.mark.parametrize("shape", [(), (T,), (S, 1), (H, S, T), (1, 1, S, T)])
def test_a_bias_and_its_gradient_may_lack_modes_in_front(shape):
    bias, dBias = f(*shape), f(*shape)
    args = backward(bias=bias, dBias=dBias)
    whole = (*(1,) * (4 - len(shape)), *shape)
    assert args.bias.shape == args.dBias.shape == whole
    assert args.bias.address == bias.data_ptr()
    assert args.dBias.address == dBias.data_ptr()
    assert args.signature == backward(bias=f(*whole), dBias=f(*whole)).signature
    assert make(bias=bias).rebuilt(*make().tensors, bias=f(*shape)).bias.shape == whole
    assert args.rebuilt(*args.tensors, bias=f(*shape)).bias.shape == whole


def test_the_longest_may_be_a_number_of_numpy():
    args = packed(max_seqlen_q=np.int64(5), max_seqlen_kv=np.int32(7))
    assert (args.S_q, args.S_kv) == (5, 7)
    assert {type(args.launch_values[n]) for n in ("max_seqlen_q", "max_seqlen_kv")} == {int}


# Refused ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "words"),
    [
        # Operands.
        (lambda: make(V=x(B, H_KV, 9, E)), r"K has S_kv = 10 but V has S_kv = 9 \(K \(B, H_kv, S"),
        (lambda: make(K=x(B, 3, T, D), V=x(B, 3, T, E)), "Q has H = 4 heads and K has H_kv = 3; for"
         " grouped-query attention, H must be a multiple of H_kv"),
        (lambda: make(V=x(B, 1, T, E)), "K has H_kv = 2 but V has H_kv = 1"),
        (lambda: make(K=x(B, H_KV, T, 24)), r"Q has D = 16 but K has D = 24 \(Q \(B, H, S_q, D\)"),
        (lambda: make(K=x(1, H_KV, T, D), V=x(1, H_KV, T, E)), "Q has B = 2 but K has B = 1"),
        (lambda: make(V=x(1, H_KV, T, E)), "K has B = 2 but V has B = 1"),
        (lambda: make(out=x(B, H, S, D)), r"out has shape \(2, 4, 6, 16\); expected \(B, H, S_q, D_"
         r"v\) = \(2, 4, 6, 8\)"),
        (lambda: make(Q=x(S, H, D)), r"Q has shape \(6, 4, 16\); expected \(B, H, S_q, D\); of pa"),
        (lambda: make(Q=x(B, H, S, 12), K=x(B, H_KV, T, 12)), "Q has D = 12; expected a multiple of"
         " 8 for bfloat16: pad the last mode with zeros"),
        (lambda: make(V=x(B, H_KV, T, 4), out=x(B, H, S, 4)), "V has D_v = 4; expected a multiple"),
        (lambda: make(Q=x(B, H, D, S).mT), r"Q has strides \(384, 96, 1, 6\); the last one must be "
         r"1: pass Q.contiguous\(\)"),
        (lambda: make(out=x(B, H, E, S).mT), "out has strides .* the last one must be 1"),
        (lambda: make(K=f(B, H_KV, T, D)), "K is float32 but Q is bfloat16; expected the same, or "
         "8-bit keys of 16-bit queries"),
        (lambda: make(V=f(B, H_KV, T, E)), "V is float32 but K is bfloat16"),
        (lambda: make(Q=f(B, H, S, D), K=e(B, H_KV, T, D), V=e(B, H_KV, T, D)),
         "K is float8_e4m3fn but Q is float32; expected the same, or 8-bit keys of 16-bit que"),
        (lambda: make(K=e(B, H_KV, T, D), V=e(B, H_KV, T, E)),
         "V has D_v = 8; expected a multiple of 16 for float8_e4m3fn"),
        (lambda: make(K=e(B, H_KV, T, D), V=e(B, H_KV, T, D), out=x(B, H, S, D),
                      descale_q=torch.ones(())), "descale_q is given and Q is bfloat16"),
        (lambda: make(Q=i(B, H, S, D)), "Q is int32; expected a floating type"),
        (lambda: make(out=i(B, H, S, E)), "out is int32; expected a floating type"),
        (lambda: make(Q="q"), "Q is a str; expected a torch tensor"),
        (lambda: make(V=x(B, H_KV, T, E).to("meta")), "V is on meta but Q is on cpu"),
        (lambda: make(lse=f(B, H, S).to("meta")), "lse is on meta but Q is on cpu"),
        (lambda: make(lse=x(B, H, S)), "lse is bfloat16; expected float32"),
        (lambda: make(lse=f(B, H, S, 1)), r"lse has shape .*; expected \(B, H, S_q\) = \(2, 4, 6"),
        (lambda: make(score_max=x(B, H, S)), "score_max is bfloat16; expected float32"),
        (lambda: make(score_sum_exp=f(B, S, H)), r"score_sum_exp has shape \(2, 6, 4\); expected "
         r"\(B, H, S_q\) = \(2, 4, 6\)"),
        (lambda: packed(score_max=f(9, H)), r"score_max has shape .*; expected \(H, T\) = \(4, 9"),
        (lambda: packed(lse=f(9, H)), r"lse has shape \(9, 4\); expected \(H, T\) = \(4, 9\)"),
        (lambda: make(Q=SCALED), "Q is a ScaledOperand; attention takes plain"),
        # Numbers.
        (lambda: make(scale=math.inf), "scale is inf; expected a finite number"),
        (lambda: make(scale="1"), "scale is '1'; expected a finite number, or None for 1/√D"),
        (lambda: make(scale=True), "scale is True; expected a finite number"),
        (lambda: make(softcap=0), "softcap is 0; expected a positive number, or None"),
        (lambda: make(softcap=-30.0), "softcap is -30.0; expected a positive number"),
        (lambda: make(softcap=math.nan), "softcap is nan; expected a positive number"),
        (lambda: make(softcap="30"), "softcap is '30'; expected a positive number"),
        # Masks.
        (lambda: make(mask="causal"), "mask is a str; expected a Mask of kernel_api.masks"),
        (lambda: make(mask=masks.Causal), r"mask is the class Causal; expected one, Causal\(\)"),
        (lambda: make(mask=masks.SlidingWindow(-1, 0)), "left is -1; expected how far a query see"),
        (lambda: make(mask=masks.SlidingWindow(4, -1)), "right is -1; expected how far a query se"),
        (lambda: make(mask=masks.Padding()), r"the mask has Padding\(\) and seq_lens_q is None; it "
         "needs seq_lens_q and seq_lens_kv"),
        (lambda: make(mask=masks.Padding(), seq_lens_q=i(B)), "seq_lens_kv is None"),
        (lambda: packed(mask=masks.Padding()), "cu_seqlens alone say it of packed sequences"),
        (lambda: make(mask=masks.BlockSparse(x(1, 1, 2, 1).bool())), r"table of BlockSparse has "
         r"shape \(1, 1, 2, 1\); expected .*\(2 or 1, 4 or 1, 1, 1\)"),
        # Lengths.
        (lambda: make(seq_lens_q=i(B).long()), "seq_lens_q is int64; expected int32"),
        (lambda: make(seq_lens_kv=i(3)), r"seq_lens_kv has shape \(3,\); expected \(B,\) = \(2,\)"),
        (lambda: make(seq_lens_q=i(4)[::2]), "seq_lens_q has stride 2; expected 1, without gaps"),
        (lambda: packed(cu_seqlens_kv=None), "cu_seqlens_q is given and cu_seqlens_kv is None; pa"),
        (lambda: packed(cu_seqlens_q=None), "cu_seqlens_kv is given and cu_seqlens_q is None"),
        (lambda: packed(cu_seqlens_q=i(3).long()), "cu_seqlens_q is int64; expected int32"),
        (lambda: packed(cu_seqlens_kv=i(4)), r"cu_seqlens_kv has shape \(4,\); expected \(B \+ 1,"),
        (lambda: packed(cu_seqlens_q=i(0), cu_seqlens_kv=i(0)), "cu_seqlens_q is empty; expected"),
        (lambda: packed(cu_seqlens_q=i(1, 3)), r"cu_seqlens_q has shape \(1, 3\)"),
        (lambda: packed(max_seqlen_q=None), "max_seqlen_q is None; packed sequences need the leng"),
        (lambda: packed(max_seqlen_kv=7.0), "max_seqlen_kv is 7.0; expected a whole number"),
        (lambda: packed(max_seqlen_kv=-1), "max_seqlen_kv is -1; expected a whole number"),
        (lambda: packed(max_seqlen_q=True), "max_seqlen_q is True; expected a whole number"),
        (lambda: packed(max_seqlen_q=np.float32(5)), "max_seqlen_q is .*5.*; expected a whole num"),
        (lambda: make(max_seqlen_q=4), "max_seqlen_q is 4 and there are no cu_seqlens"),
        (lambda: packed(seq_lens_q=i(2)), "seq_lens_q and cu_seqlens are given"),
        (lambda: packed(bias=f(2, H, 5, 7)), "bias and cu_seqlens are given; a bias .* score_mod"),
        (lambda: packed(V=x(12, H_KV, E)), "K has T_kv = 11 but V has T_kv = 12"),
        (lambda: packed(Q=x(1, H, 9, D)), r"Q has shape .*; expected \(T, H, D\)"),
        (lambda: packed(seq_lens_kv=i(2)), "seq_lens_kv and cu_seqlens are given; packed sequence"),
        # Pages.
        (lambda: paged(page_table=i(B, 3).long()), "page_table is int64; expected int32"),
        (lambda: paged(page_table=i(3, 3)), r"page_table has shape \(3, 3\); expected \(B, max_pa"),
        (lambda: paged(page_table=i(B)), r"page_table has shape \(2,\); expected \(B, max_pages\)"),
        (lambda: paged(page_table=i(3, B).t()), r"page_table has strides \(1, 2\); the pages of a"),
        (lambda: paged(seq_lens_kv=None), "page_table is given and seq_lens_kv is None"),
        (lambda: paged(V=x(7, H_KV, 8, E)), "K has page_size = 16 but V has page_size = 8"),
        (lambda: paged(V=x(8, H_KV, 16, E)), "K has pages = 7 but V has pages = 8"),
        (lambda: paged(K=x(7, 2, 0, D), V=x(7, 2, 0, E)), "K has page_size = 0; expected a key at"),
        (lambda: paged(K=x(9, H_KV, D)), r"K has shape .*; expected \(pages, H_kv, page_size, D.$"),
        (lambda: paged(max_seqlen_kv=48), "max_seqlen_kv is 48 and page_table is given; page_ta"),
        (lambda: packed(page_table=i(2, 3)), "cu_seqlens_kv and page_table are given"),
        (lambda: paged(cu_seqlens_kv=i(3)), "cu_seqlens_kv and page_table are given"),
        # Beside the operands.
        (lambda: make(alibi=f(H_KV)), r"alibi has shape \(2,\); expected \(H,\) = \(4,\)"),
        (lambda: make(alibi=x(H)), "alibi is bfloat16; expected float32"),
        (lambda: make(bias=0.5), "bias is a float; expected a torch tensor"),
        (lambda: make(lse=True), "lse is a bool; expected a torch tensor"),
        (lambda: make(alibi=SCALED), "alibi is a ScaledOperand; attention takes plain tensors"),
        (lambda: make(sink=f(H, 1)), r"sink has shape \(4, 1\); expected \(H,\)"),
        (lambda: make(sink=x(H)), "sink is bfloat16; expected float32"),
        (lambda: make(bias=f(T, S)), r"bias has shape \(10, 6\); expected one that broadcasts to "
         r"\(B, H, S_q, S_kv\) = \(2, 4, 6, 10\)"),
        (lambda: make(bias=f(B, H_KV, S, T)), r"bias has shape \(2, 2, 6, 10\); expected one"),
        (lambda: make(bias=f(1, 1, 1, S, T)), r"bias has shape \(1, 1, 1, 6, 10\); expected one"),
        (lambda: make(bias=x(1, 1, S, T).bool()), "bias is bool; expected a floating type .a mask"),
        (lambda: make(descale_q=f()), "descale_q is given and Q is bfloat16; it is for 8-bit floa"),
        (lambda: make(score_mod=3), "fn is a int; expected a function"),
        (lambda: make(score_operands={"t": f(H)}), "score_operands are given and score_mod is not"),
        (lambda: make(score_mod=lambda s, b, h, q, kv: s, score_operands=[1]), "score_operands is a"
         " list; expected a dict"),
        (lambda: make(dropout=0.1), "dropout is a float; expected a Dropout of kernel_api.argumen"),
        (lambda: Dropout(1.0, 0, 0), "p of Dropout is 1.0; expected a probability from 0 up to 1"),
        (lambda: Dropout(-0.1, 0, 0), "p of Dropout is -0.1; expected a probability"),
        (lambda: Dropout(0.1, -1, 0), "seed of Dropout is -1; expected from 0 up to 2"),
        (lambda: Dropout(0.1, 0.5, 0), "seed of Dropout is 0.5; expected a whole number"),
        (lambda: Dropout(0.1, i().short(), 0), "seed of Dropout is int16; expected int32 or int64"),
        (lambda: Dropout(0.1, 0, i(2).long()), r"offset of Dropout has shape \(2,\); expected one"),
        # Backward.
        (lambda: backward(lse=None), "lse is None; the backward pass needs the log-sum-exp that t"),
        (lambda: backward(lse=f(B, H, T)), r"lse has shape \(2, 4, 10\); expected \(B, H, S_q\)"),
        (lambda: backward(dQ=x(B, H, S, E)), "dQ has shape .*; expected that of Q"),
        (lambda: backward(dO=x(B, H, T, E)), "dO has shape .*; expected that of out"),
        (lambda: backward(dBias=f(1, 1, S, T)), "dBias is given and bias is None; it is the gradi"),
        (lambda: backward(bias=f(1, 1, S, T), dBias=f(1, H, S, T)), "dBias has shape .* that of b"),
        (lambda: backward(bias=f(S, T), dBias=f(1, T)), r"dBias has shape \(1, 10\); .*\(6, 10\)"),
        (lambda: backward(dSink=f(H)), "dSink is given and sink is None"),
        (lambda: backward(sink=f(H), dSink=f(1)), r"dSink has shape \(1,\); expected"),
        (lambda: backward(page_table=i(B, 3), seq_lens_kv=i(B)), "pages and 8-bit operands have n"),
        (lambda: backward(cu_seqlens_q=i(3)), "and cu_seqlens_kv is None; packed .* need both$"),
        (lambda: backward(deterministic="no"), "deterministic is 'no'; expected True or False"),
        (lambda: backward(dK=x(B, H_KV, D, T).mT), "dK has strides .* the last one must be 1"),
    ],
)  # fmt: skip
def test_misuse_is_refused_with_both_values(call, words):
    with pytest.raises(ArgumentError, match=words):
        call()


def eight_bits(**options):
    e4m3 = torch.float8_e4m3fn
    given = {"Q": x(B, H, S, D).to(e4m3), "K": x(B, H_KV, T, D).to(e4m3)}
    return make(**{**given, "V": x(B, H_KV, T, 16).to(e4m3), "out": x(B, H, S, 16), **options})


def test_8_bit_operands_have_scales_and_wider_results():
    args = eight_bits(descale_q=f(), descale_k=f(B, H_KV), descale_v=f())
    assert list(args.further) == ["descale_q", "descale_k", "descale_v"]
    e4m3 = torch.float8_e4m3fn
    for given, words in (
        ({"out": x(B, H, S, 16).to(e4m3)}, "out is float8_e4m3fn; expected 16 bits or more"),
        ({"descale_q": x()}, "descale_q is bfloat16; expected float32"),
        (
            {"descale_v": f(H)},
            r"descale_v has shape \(4,\); expected \(\), or \(B, H_kv\) = \(2, 2\)",
        ),
        (
            {"V": x(B, H_KV, T, 8).to(e4m3), "out": x(B, H, S, 8)},
            "V has D_v = 8; .* multiple of 16",
        ),
    ):
        with pytest.raises(ArgumentError, match=words):
            eight_bits(**given)
    e = {n: o.tensor for n, o in zip("QKV", args.operands, strict=False)}
    out = x(B, H, S, 16)
    with pytest.raises(ArgumentError, match="Q is float8_e4m3fn; gradients are of 16-bit types"):
        BACKWARD(*e.values(), out, out.clone(), f(B, H, S), *(t.clone() for t in e.values()))


@pytest.mark.parametrize("more", [{}, {"alibi": f(H)}], ids=["plain", "alibi"])
def test_memory_that_is_written_is_nobody_elses(more):
    given = {"V": x(B, H, S, D), "K": x(B, H, S, D), "out": x(B, H, S, D), **more}
    make(**given)
    query, buffer = x(B, H, S, D), f(B * H * S * D)
    lse, overlapping = buffer[: B * H * S].view(B, H, S), buffer.view(torch.bfloat16)
    for _ in range(2):
        with pytest.raises(ArgumentError, match="out shares memory with Q"):
            make(**{**given, "Q": query, "out": query})
        with pytest.raises(ArgumentError, match="several of its elements are one in memory"):
            make(**{**given, "out": x(1, H, S, D).expand(B, H, S, D)})
        with pytest.raises(ArgumentError, match="lse shares memory with Q"):
            make(**{**given, "lse": lse, "Q": overlapping[: B * H * S * D].view(B, H, S, D)})
        with pytest.raises(ArgumentError, match="score_max shares memory with score_sum_exp"):
            make(**given, score_max=lse, score_sum_exp=lse)


def test_a_function_that_cannot_be_traced_is_refused_with_its_line():
    def branches(score, b, h, q, kv):
        return score if q > kv else -score

    with pytest.raises(
        EpilogueError, match=r"test_sdpa_arguments.py:\d+ in branches: .* no if can"
    ):
        make(score_mod=branches)


@pytest.mark.parametrize("name", ["max", "sum_exp"])
@pytest.mark.parametrize("make", [make, backward])
def test_an_operand_of_a_function_is_called_like_no_statistic(make, name):
    functions = {"max": lambda s, b, h, q, kv, max: s * max[h]}
    functions["sum_exp"] = lambda s, b, h, q, kv, sum_exp: s * sum_exp[h]
    read = torch.ones(H)
    options = {"score_mod": functions[name], "score_operands": {name: read}}
    with pytest.raises(EpilogueError, match=f"called {name}; launches take it as score_{name}"):
        make(**options)
    with pytest.raises(EpilogueError, match=f"called {name}; launches take it as score_{name}"):
        ka.ops.sdpa(*(torch.randn(B, H, S, D) for _ in "QKV"), **options)
    assert read.eq(1).all()


# What tells two problems apart -----------------------------------------------------------


def test_sizes_and_numbers_are_no_part_of_the_signature():
    one = every()
    more = {"softcap": 3.0, "scale": 1.0, "dropout": Dropout(0.5, torch.tensor(1), 3)}
    mask = masks.SlidingWindow(1, 2) & masks.SlidingWindow(3, 4, "bottom_right")
    mask &= masks.BlockSparse(TABLE) & masks.MaskMod(mask_function, ids=i(B, T))
    other = every(**more, mask=mask, score_operands={"slopes": f(H), "gain": 7.0})
    assert one.signature == other.signature
    assert hash(one.signature) == hash(other.signature)
    assert one.key != other.key  # a window decides how much there is to do
    assert make().signature == make(Q=x(B, 8, 3, D), out=x(B, 8, 3, E)).signature
    assert make(scale=1.0).key == make(scale=2.0).key


@pytest.mark.parametrize(
    "change",
    [
        {"lse": None},
        {"score_max": None},
        {"bias": None},
        {"bias": f(1, H, 1, T)},
        {"softcap": None},
        {"sink": None},
        {"seq_lens_q": None, "mask": masks.Causal()},
        {"mask": masks.Causal()},
        {"mask": masks.Causal("bottom_right")},
        {"mask": None},
        {"dropout": None},
        {"dropout": Dropout(0.1, 7, 11)},
        {"score_mod": None, "score_operands": None},
        {"score_mod": lambda s, b, h, q, kv, slopes, gain: s + gain * slopes[h]},
        {"score_operands": {"slopes": f(H), "gain": 2}},
        {"score_operands": {"slopes": f(H).double(), "gain": 2.0}},
    ],
)
def test_what_compiled_code_depends_on_is_in_the_signature(change):
    assert every(**change).signature != every().signature


def test_forms_and_modes_of_the_gradient_are_in_the_signature():
    assert backward().signature != backward(deterministic=True).signature
    assert paged().signature != paged(K=x(7, H_KV, 8, D), V=x(7, H_KV, 8, E)).signature
    assert len({make().signature for make in (packed, paged, packed_paged)}) == 3
    tables = [x(1, 1, 1, 1).bool(), x(1, 1, 1, 1).bool()]
    one, other = (
        make(mask=masks.BlockSparse(table, shape))
        for table, shape in zip(tables, ((128, 128), (64, 128)), strict=True)
    )
    assert one.signature != other.signature


# Made again ------------------------------------------------------------------------------

ARGUMENTS = {
    "plain": make,
    "every": every,
    "packed": packed,
    "paged": paged,
    "packed paged": packed_paged,
    "backward": lambda: backward(mask=masks.Causal(), deterministic=True),
    "backward with sums": lambda: backward(
        bias=f(1, 1, S, T), dBias=f(1, 1, S, T), sink=f(H), dSink=f(H)
    ),
}
each = pytest.mark.parametrize("kind", ARGUMENTS)


@each
def test_arguments_are_described_to_another_process_and_come_back(kind):
    args = ARGUMENTS[kind]()
    again = rebuilt(json.loads(json.dumps(described(args))))
    assert type(again) is type(args)
    assert again.signature == args.signature
    assert list(again.launch_values) == list(args.launch_values)
    assert again.sizes == args.sizes
    assert again.device.type == "meta"
    problem = Problem.of(args)
    assert Problem.from_dict(problem.to_dict()) == problem
    assert problem.sizes == args.sizes


@each
def test_random_data_makes_sense_and_can_be_computed(kind):
    args = random_arguments(described(ARGUMENTS[kind]()), "cpu", 0)
    (kernel,) = ka.get_kernels(args, providers=["reference"])
    kernel.run(args)
    if kind == "every":
        assert args.seq_lens_kv.tensor.tolist() == [T, T]
    if args.is_packed:
        assert args.cu_seqlens_q.tensor.tolist() == [0, 4, 9]
    if args.is_paged:
        assert args.page_table.tensor.tolist() == [[0, 1, 2], [3, 4, 5]]
        assert args.seq_lens_kv.tensor.tolist() == [48, 48]
    for output in args.outputs.values():
        assert output.tensor.isfinite().any()


@each
def test_the_same_problem_on_other_tensors(kind):
    args = ARGUMENTS[kind]()
    others = [operand.tensor.clone() for operand in args.operands]
    moved = args.rebuilt(*others)
    assert moved.Q.tensor is others[0]
    assert moved.signature == args.signature
    assert moved.key == args.key
    assert list(moved.launch_values) == list(args.launch_values)
    made = args.blueprint()(*others, **args.launch_values)
    assert made.signature == args.signature
    if args.score is not None:
        assert list(made.score.operands) == list(args.score.operands)  # and no statistics


def test_launch_values_are_given_anew_by_name():
    args = every()
    ids, lse = i(B, T), f(B, H, S)
    values = {"left": 3, "scale": 2.0, "mask_ids": ids, "score_gain": 5.0, "dropout_p": 0.25}
    moved = args.rebuilt(*args.tensors, lse, **values)
    found = moved.launch_values
    assert {name: found[name] for name in values} == values
    assert found["lse"] is lse
    assert found["right"] == 1
    with pytest.raises(ArgumentError, match="these SdpaArguments take no colour; they take lse"):
        args.rebuilt(*args.tensors, colour=1)


def test_lengths_are_drawn_that_are_no_longer_than_is_said():
    ends, rows = i(5), torch.empty(100, 2, 16)
    longest = {"max_seqlen_q": 10, "max_seqlen_kv": 40}
    args = ka.SdpaArguments(
        *(rows, rows, rows, rows.clone()), cu_seqlens_q=ends, cu_seqlens_kv=ends.clone(), **longest
    )
    args.draw_indices(None)
    assert args.cu_seqlens_q.tensor.tolist() == [0, 10, 20, 30, 40]
    assert args.cu_seqlens_kv.tensor.tolist() == [0, 25, 50, 75, 100]
    (kernel,) = ka.get_kernels(args, providers=["reference"])
    kernel.run(args)


def test_gradients_take_the_options_of_the_forward_pass():
    args = Draw().arguments(mask=masks.Causal(), softcap=3.0, dropout=Dropout(0.1, 2, 3))
    found = backward_of(args, Draw().results())
    assert found.launch_values.items() >= {"right": 0, "softcap": 3.0, "dropout_seed": 2}.items()


def test_a_query_tells_scales_that_kernels_do_not_take_from_others():
    def queried(scale):
        q = torch.empty(1, 2, 77, 64, dtype=torch.bfloat16, device="meta")
        args = ka.SdpaArguments(q, q, q, torch.empty_like(q), scale=scale)
        return ka.get_kernels(args, cc=90, providers=["cutedsl"])

    assert queried(0.3)
    assert queried(-0.3) == []
    assert queried(0.3)

"""Attention of graphs, its options and functions of scores, and what torch makes of them."""

import math

import torch

from kernel_api.graph._enums import (
    data_type,
    diagonal_alignment,
)
from support.graph_operations import random
from support.sdpa import kept

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

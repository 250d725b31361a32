"""Calls that look alike: one-call forms of norms, rows and quantisation, each with outputs that
are made for it or given, and backward passes of attention."""

import torch

import kernel_api as ka
from kernel_api import _again, masks
from kernel_api.arguments import Dropout

BF16, F32, F64, E4M3 = torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn

#: Where tensors are, and the elements of attention's.
DEVICE, OF_ATTENTION = "cpu", F64


def drawn(seed, *shape, element=BF16):
    found = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=F64)
    return found.to(element).to(DEVICE)


def places(seed, M=7, k=2):
    """No row twice; one is none."""
    found = torch.randperm(M * k, generator=torch.Generator().manual_seed(seed)).int()
    found[seed % (M * k)] = -1
    return found.view(M, k).to(DEVICE)


def weights(seed):
    return drawn(seed + 50, 7, 2, element=F32)


def number(value):
    """That a tensor holds."""
    return torch.tensor(value, device=DEVICE)


def room(*shape, element=BF16):
    """For what is written: what is not is NaN."""
    return torch.full(shape, torch.nan, device=DEVICE).to(element)


def into_residual(call, seed, *shape):
    """What a call returns, and the residual that it adds to."""
    residual = drawn(seed + 9, *shape)
    found = call(residual)
    return (*(found if isinstance(found, tuple) else (found,)), residual)


CALLS = {
    "gather_rows": lambda s: ka.ops.gather_rows(drawn(s, 14, 24), places(s)),
    "gather_rows, weighted": lambda s: ka.ops.gather_rows(
        drawn(s, 14, 24), places(s), weight=weights(s)
    ),
    "scatter_rows": lambda s: ka.ops.scatter_rows(drawn(s, 7, 24), places(s))[
        places(s).flatten().long().clamp(min=0).sort().values[2:]
    ],
    "group_rows": lambda s: ka.ops.group_rows(places(s), 5)[:3],
    "group_rows, weighted": lambda s: ka.ops.group_rows(places(s), 5, weight=weights(s)),
    "rmsnorm": lambda s: ka.ops.rmsnorm(drawn(s, 9, 128), weight=drawn(s + 9, 128), rstd=True),
    "layernorm": lambda s: ka.ops.layernorm(drawn(s, 3, 2, 64), bias=drawn(s + 9, 64), mean=True),
    "rmsnorm of a sum": lambda s: ka.ops.rmsnorm(
        drawn(s, 3, 3, 128), residual=drawn(s + 9, 3, 3, 128), residual_out=True
    ),
    "rmsnorm_backward, of a sum": lambda s: ka.ops.rmsnorm_backward(
        drawn(s, 9, 64),
        drawn(s + 1, 9, 64),
        rstd=weights(s)[:, :1].abs().new_ones(9),
        dresidual=drawn(s + 2, 9, 64),
    ),
    "rmsnorm_quantize of a sum": lambda s: ka.ops.rmsnorm_quantize(
        drawn(s, 2, 4, 128), residual=drawn(s + 9, 2, 4, 128)
    )[:2],
    "rmsnorm_backward": lambda s: ka.ops.rmsnorm_backward(
        drawn(s, 9, 64), drawn(s + 1, 9, 64), rstd=weights(s)[:, :1].abs().new_ones(9), dweight=True
    ),
    "layernorm_backward": lambda s: ka.ops.layernorm_backward(
        drawn(s, 7, 64),
        drawn(s + 1, 7, 64),
        mean=weights(s)[:, 0].clone(),
        rstd=weights(s)[:, 1].abs(),
        weight=drawn(s + 2, 64),
        dbias=True,
    ),
    "rmsnorm_quantize": lambda s: ka.ops.rmsnorm_quantize(
        drawn(s, 2, 4, 128), weight=drawn(s + 9, 128)
    )[:2],
    "layernorm_quantize": lambda s: ka.ops.layernorm_quantize(
        drawn(s, 9, 64), "row", bias=drawn(s + 9, 64)
    )[:2],
    "rmsnorm_quantize by a scale": lambda s: (
        ka.ops.rmsnorm_quantize(drawn(s, 9, 64), "tensor", scale=number(0.01 + s)).out
    ),
    "rmsnorm_quantize by a number": lambda s: (
        ka.ops.rmsnorm_quantize(drawn(s, 9, 64), "tensor", scale=0.01 + s).out
    ),
    "rmsnorm into": lambda s: ka.ops.rmsnorm(
        drawn(s, 9, 128), weight=drawn(s + 9, 128), out=room(9, 128), rstd=room(9, element=F32)
    ),
    "layernorm into": lambda s: ka.ops.layernorm(
        drawn(s, 3, 2, 64), bias=drawn(s + 9, 64), mean=True, out=room(3, 2, 64)
    ),
    "rmsnorm of a sum in place": lambda s: into_residual(
        lambda r: ka.ops.rmsnorm(drawn(s, 3, 3, 128), residual=r, residual_out=r), s, 3, 3, 128
    ),
    "layernorm of a sum into": lambda s: ka.ops.layernorm(
        drawn(s, 9, 128), residual=drawn(s + 9, 9, 128), residual_out=room(9, 128)
    ),
    "rmsnorm_backward into": lambda s: ka.ops.rmsnorm_backward(
        drawn(s, 9, 64),
        drawn(s + 1, 9, 64),
        rstd=weights(s)[:, :1].abs().new_ones(9),
        dx=room(9, 64),
        dweight=room(64, element=F32),
    ),
    "rmsnorm_quantize into": lambda s: ka.ops.rmsnorm_quantize(
        drawn(s, 2, 4, 128), weight=drawn(s + 9, 128), out=room(2, 4, 128, element=E4M3)
    )[:2],
    "rmsnorm_quantize of a sum in place": lambda s: into_residual(
        lambda r: ka.ops.rmsnorm_quantize(drawn(s, 2, 4, 128), residual=r, residual_out=r)[:2],
        s,
        2,
        4,
        128,
    ),
    "layernorm_quantize by a number, into": lambda s: (
        ka.ops.layernorm_quantize(
            drawn(s, 9, 64), "tensor", scale=0.01 + s, out=room(9, 64, element=E4M3)
        ).out
    ),
    "gather_rows into": lambda s: ka.ops.gather_rows(
        drawn(s, 14, 24), places(s), weight=weights(s), out=room(7, 24)
    ),
    "scatter_rows into": lambda s: ka.ops.scatter_rows(
        drawn(s, 7, 24), places(s), out=room(20, 24).zero_()
    ),
    "quantize into": lambda s: ka.ops.quantize(drawn(s, 9, 256), out=room(9, 256, element=E4M3))[
        :2
    ],
    "quantize, rows, into": lambda s: ka.ops.quantize(
        drawn(s, 2, 9, 256), "row", out=room(2, 9, 256, element=E4M3)
    )[:2],
    "quantize by a scale": lambda s: (
        ka.ops.quantize(drawn(s, 9, 256), "tensor", scale=number(0.01 + s).view(1)).out
    ),
    "quantize by a number": lambda s: (
        ka.ops.quantize(drawn(s, 9, 256), "tensor", scale=0.01 + s, out_dtype="int8").out
    ),
    "quantize by a number, into": lambda s: (
        ka.ops.quantize(
            drawn(s, 9, 256), "tensor", scale=0.01 + s, out=room(9, 256, element=E4M3)
        ).out
    ),
    "quantize, rows": lambda s: ka.ops.quantize(drawn(s, 2, 9, 256), "row")[:2],
    "quantize": lambda s: ka.ops.quantize(drawn(s, 9, 256))[:2],
    "quantize, mx": lambda s: ka.ops.quantize(drawn(s, 9, 256), "mx", out_dtype="int8")[:2],
}


def bits(found):
    tensors = found if isinstance(found, tuple) else (found,)
    return [one.float() for one in tensors if one is not None]


def forget():
    _again._launchers.clear()
    _again._calls.clear()


def remembered():
    return [*_again._launchers, *_again._calls]


# Attention -------------------------------------------------------------------------------


def passes(seed, H=4, H_kv=2, S_q=5, S_kv=6, D=8, packed=False, **options):
    """(Q, K, V, out, dO, lse) of a forward pass."""
    shape = (lambda H, S: (S, H, D)) if packed else (lambda H, S: (2, H, S, D))
    q, k, v = scores(seed, *shape(H, S_q)), *(scores(seed + n, *shape(H_kv, S_kv)) for n in (1, 2))
    out, lse = ka.ops.sdpa(q, k, v, return_lse=True, **options)
    return q, k, v, out, scores(seed + 3, *out.shape), lse


def added(score, b, h, q, kv, slope):
    return score + slope[h] * (q - kv)


def ends(*lengths):
    return torch.tensor(lengths, dtype=torch.int32, device=DEVICE)


def scores(seed, *shape):
    return drawn(seed, *shape, element=OF_ATTENTION)


def wide(seed, *shape):
    """In the type of the arithmetic."""
    return drawn(seed, *shape, element=F64 if OF_ATTENTION is F64 else F32)


#: From a seed to options of both passes, and what is asked for of the gradients.
BACKWARD = {
    "plain": lambda s: ({}, {}),
    "causal": lambda s: ({"mask": masks.Causal(), "scale": 0.3 + s}, {}),
    "window": lambda s: ({"mask": masks.SlidingWindow(2, 1), "softcap": 3.0 + s}, {}),
    "bias": lambda s: ({"bias": scores(s, 4, 5, 6)}, {"dBias": True}),
    "bias alone": lambda s: ({"bias": scores(s, 2, 1, 5, 6)}, {"dBias": False}),
    "sink": lambda s: ({"sink": wide(s, 4)}, {"dSink": True}),
    "alibi": lambda s: ({"alibi": wide(s, 4)}, {}),
    "function": lambda s: ({"score_mod": added, "score_operands": {"slope": scores(s, 4)}}, {}),
    "mask of a table": lambda s: (
        {"mask": masks.MaskMod(lambda b, h, q, kv, ends: kv < ends[b], ends=ends(6, 1 + s))}, {},
    ),
    "blocks": lambda s: (
        {"mask": masks.BlockSparse(scores(s, 1, 1, 3, 3) > -0.5, (2, 2)) & masks.Causal()}, {},
    ),
    "dropout": lambda s: ({"dropout": Dropout(0.3, 7 + s, 9)}, {}),
    "dropout of tensors": lambda s: (
        {"dropout": Dropout(0.3, number(7 + s), number(9))}, {},
    ),
    "lengths": lambda s: ({"seq_lens_q": ends(5, 2 + s), "seq_lens_kv": ends(1 + s, 6)}, {}),
    "packed": lambda s: (
        {"packed": True, "S_q": 9, "S_kv": 9, "cu_seqlens_q": ends(0, 4 + s, 9),
         "cu_seqlens_kv": ends(0, 4, 9), "max_seqlen_q": 9, "max_seqlen_kv": 9},
        {},
    ),
    "into what is given": lambda s: (
        {"bias": scores(s, 4, 5, 6)},
        {"dQ": scores(0, 2, 4, 5, 8) * torch.nan, "dV": scores(0, 2, 2, 6, 8) * torch.nan,
         "dBias": scores(0, 4, 5, 6) * torch.nan},
    ),
}  # fmt: skip
SIZES = ("packed", "S_q", "S_kv")


def gradients(name, seed, **more):
    options, written = BACKWARD[name](seed)
    operands = passes(seed, **options)
    options = {key: one for key, one in options.items() if key not in SIZES}
    found = ka.ops.sdpa_backward(*operands, **written, **options, **more)
    for key, one in written.items():
        assert not isinstance(one, torch.Tensor) or getattr(found, key) is one
    return found

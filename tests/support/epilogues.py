"""Epilogues computed twice: by the reference kernel, and by torch as anybody would write it."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch.nn import functional

import kernel_api as ka


def reference_kernel(args: ka.GemmArguments) -> ka.Kernel:
    (kernel,) = ka.get_kernels(args, providers=["reference"])
    return kernel


def with_accumulator(
    accumulator: torch.Tensor, fn: Callable[..., Any], out: torch.Tensor | None = None, **operands
) -> ka.GemmArguments:
    """Arguments whose product is ``accumulator``: it times the identity.

    Exact, but for -0; what is not finite needs a matrix of one column, because 0 · ∞ is NaN.
    """
    N = accumulator.shape[-1]
    identity = torch.eye(N, dtype=accumulator.dtype).expand(*accumulator.shape[:-2], N, N)
    out = torch.empty_like(accumulator) if out is None else out
    epilogue = ka.EpilogueArguments(fn, **operands)
    return ka.GemmArguments(accumulator, identity, out, epilogue=epilogue)


def computed(
    accumulator: torch.Tensor, fn: Callable[..., Any], out: torch.Tensor | None = None, **operands
) -> torch.Tensor:
    """``out`` as the reference kernel writes it; other outputs stand in the operands."""
    args = with_accumulator(accumulator, fn, out, **operands)
    reference_kernel(args).run(args)
    return args.out.tensor


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


# The functions of kernel_api.epilogue on torch tensors, written from their formulas -------


def _relu(x, slope=0.0, lower=0.0, upper=None):
    y = torch.where(x > lower, x, lower + slope * (x - lower))
    return y if upper is None else y.clamp(max=upper)


def _derivative(name):
    """By torch's autograd through the functions below."""

    def derived(x, *parameters, **named):
        leaf = x.detach().clone().requires_grad_()
        activation = getattr(torch_functions, name)
        (gradient,) = torch.autograd.grad(activation(leaf, *parameters, **named).sum(), leaf)
        return gradient

    return derived


def _glu_pair(x, order="gate_up", granularity=32):
    columns = torch.arange(x.shape[-1])
    width = x.shape[-1] // 2 if granularity == "halves" else granularity
    is_first = (columns // max(width, 1)) % 2 == 0
    first, second = x[..., is_first], x[..., ~is_first]
    return (first, second) if order == "gate_up" else (second, first)


def _interleave(gate, up, order="gate_up", granularity=32):
    joined = gate.new_empty(*gate.shape[:-1], 2 * gate.shape[-1])
    columns = torch.arange(joined.shape[-1])
    width = gate.shape[-1] if granularity == "halves" else granularity
    is_first = (columns // max(width, 1)) % 2 == 0
    first, second = (gate, up) if order == "gate_up" else (up, gate)
    joined[..., is_first], joined[..., ~is_first] = first, second
    return joined


def _rotate(x, cos, sin, head_dim, start=0, width=None, style="half"):
    width = head_dim - start if width is None else width
    y = x.clone()
    for head in range(x.shape[-1] // head_dim):
        for pair in range(width // 2):
            first = head * head_dim + start
            if style == "half":
                i, j = first + pair, first + pair + width // 2
            else:
                i, j = first + 2 * pair, first + 2 * pair + 1
            c, s = cos[..., pair], sin[..., pair]
            y[..., i] = x[..., i] * c - x[..., j] * s
            y[..., j] = x[..., j] * c + x[..., i] * s
    return y


def _hadamard(x, normalised=True, signs=None):
    # H[i, j] = (-1) to the number of bits that i and j share.
    bits = [[bin(i & j).count("1") for j in range(16)] for i in range(16)]
    matrix = (-1.0) ** torch.tensor(bits, dtype=x.dtype)
    blocks = x.reshape(*x.shape[:-1], -1, 16)
    if signs is not None:
        blocks = blocks * signs
    y = torch.einsum("...j,ij->...i", blocks, matrix).reshape(x.shape)
    return y / 4 if normalised else y


def _dropout(x, p, seed, offset):
    state = (int(one) % 2**64 for one in (seed, offset))
    return torch.where(kept(x.shape, p, *state), x / (1 - p), 0.0)


def _amax(x, axis, block=None):
    if block is None:
        return _reduction(lambda y, modes: y.abs().amax(modes, keepdim=True))(x, axis)
    return x.abs().unflatten(-1, (-1, block)).amax(-1)


def _reduction(reduce):
    def reduction(x, axis):
        if axis is not None:
            return reduce(x, axis)
        return reduce(x, (-2, -1))

    return reduction


def _cast(x, dtype):
    if dtype.is_floating_point:
        limits = torch.finfo(dtype)
        kept = x.clamp(limits.min, limits.max) if limits.bits == 8 else x
        return kept.to(dtype).to(x.dtype)
    limits = torch.iinfo(dtype)
    return x.round().clamp(limits.min, limits.max).to(dtype).to(x.dtype)


torch_functions = SimpleNamespace(
    relu=_relu,
    leaky_relu=lambda x, slope=0.01: functional.leaky_relu(x, slope),
    sigmoid=lambda x: 1 / (1 + torch.exp(-x)),
    tanh=torch.tanh,
    silu=lambda x, beta=1.0: x / (1 + torch.exp(-beta * x)),
    gelu=lambda x: functional.gelu(x),
    gelu_tanh=lambda x: functional.gelu(x, approximate="tanh"),
    softplus=lambda x: functional.softplus(x, threshold=1000),
    elu=lambda x, alpha=1.0: functional.elu(x, alpha),
    hardswish=functional.hardswish,
    squared_relu=lambda x: functional.relu(x) ** 2,
    softcap=lambda x, cap: cap * torch.tanh(x / cap),
    exp=torch.exp,
    log=torch.log,
    sqrt=torch.sqrt,
    rsqrt=lambda x: 1 / torch.sqrt(x),
    reciprocal=lambda x: 1 / x,
    erf=torch.erf,
    abs=abs,
    floor=torch.floor,
    ceil=torch.ceil,
    minimum=lambda a, b: torch.minimum(*_tensors(a, b)),
    maximum=lambda a, b: torch.maximum(*_tensors(a, b)),
    clamp=lambda x, low=None, high=None: torch.clamp(x, low, high),
    where=lambda c, a, b: torch.where(c, *_tensors(a, b)),
    cast=_cast,
    quantize=lambda x, dtype, scale: _cast(x / scale, dtype),
    derivative=_derivative,
    sum=_reduction(lambda x, axis: x.sum(axis, keepdim=True)),
    max=_reduction(lambda x, axis: x.amax(axis, keepdim=True)),
    min=_reduction(lambda x, axis: x.amin(axis, keepdim=True)),
    amax=_amax,
    repeat=lambda x, times: x.repeat_interleave(times, -1),
    mean_square=_reduction(lambda x, axis: (x**2).mean(axis, keepdim=True)),
    glu_pair=_glu_pair,
    interleave=_interleave,
    rotate=_rotate,
    hadamard=_hadamard,
    dropout=_dropout,
)


def _tensors(a, b):
    return [x if torch.is_tensor(x) else torch.tensor(x, dtype=torch.float64) for x in (a, b)]


# Philox4x32-10 with Python's own integers --------------------------------------------------


def philox(counter, key):
    """Four words from four and two, as the paper writes it."""
    c, k = list(counter), list(key)
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(p1 >> 32) ^ c[1] ^ k[0], p1 % 2**32, (p0 >> 32) ^ c[3] ^ k[1], p0 % 2**32]
        k = [(k[0] + 0x9E3779B9) % 2**32, (k[1] + 0xBB67AE85) % 2**32]
    return c


def kept(shape, p, seed, offset):
    """Which elements dropout keeps, one after the other."""
    *batch, rows, columns = shape
    mask = torch.zeros(math.prod(batch) * rows, columns, dtype=torch.bool)
    for row in range(len(mask)):
        for n in range(columns):
            counter = (n // 4, row, offset % 2**32, offset >> 32)
            word = philox(counter, (seed % 2**32, seed >> 32))[n % 4]
            mask[row, n] = (word >> 8) / 2**24 >= p
    return mask.reshape(shape)

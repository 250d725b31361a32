"""A Llama layer by fused kernels: prompts, decoding over a cache, and training; beside torch's.

    python examples/llama_layer.py

Seven kernels where torch has ten and more: queries and keys are rotated, gates multiplied and
residuals added where products are written. For training the functions of ``kernel_api.nn`` stand
among torch's, and all of it may be compiled.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional
from transformer_graph import EPS, PAIRED, SMALL, Sizes, operands, paired, rotated

import kernel_api as ka

#: From rows of queries, keys and values side by side to those of what is attended to.
Attend = Callable[[torch.Tensor], torch.Tensor]
Weights = Mapping[str, torch.Tensor]

#: Of the norm of the result.
ERROR_ALLOWED = 0.02


@dataclass(frozen=True)
class Cache:
    """Keys and values of the tokens before, (2, B, H, S, D).

    Attributes:
        position: Where the next token's go.
    """

    stored: torch.Tensor
    position: int

    def extended(self, rows: torch.Tensor, sizes: Sizes) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values with those of the next token, (B, projected)."""
        own = rows[:, sizes.heads * sizes.head_dim :].unflatten(1, (2, sizes.kv_heads, -1))
        self.stored[:, :, :, self.position] = own.transpose(0, 1)
        keys, values = self.stored[:, :, :, : self.position + 1]
        return keys, values


def cache_of(sizes: Sizes, batch: int, length: int, device: str) -> Cache:
    """Random, with room for one token more."""
    shape = (2, batch, sizes.kv_heads, length + 1, sizes.head_dim)
    return Cache(torch.randn(shape, device=device).bfloat16(), length)


def heads(
    rows: torch.Tensor, sizes: Sizes, batch: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries, keys and values (B, H, S, D) out of rows of them side by side; no copies."""
    split = rows.view(batch, -1, sizes.heads + 2 * sizes.kv_heads, sizes.head_dim).transpose(1, 2)
    q, k, v = split.split([sizes.heads, sizes.kv_heads, sizes.kv_heads], dim=1)
    return q, k, v


# By fused kernels ------------------------------------------------------------------------


def fused(x: torch.Tensor, own: Weights, sizes: Sizes, attend: Attend) -> torch.Tensor:
    """The layer of x (T, width); gate and up are paired in its weights."""
    hidden = ka.ops.rmsnorm(x, weight=own["attention_norm"], eps=EPS)
    rotation = {"cos": own["cos"], "sin": own["sin"], "head_dim": sizes.head_dim}
    turned = sizes.heads + sizes.kv_heads
    rows = ka.ops.gemm_rope(hidden, own["qkv"].t(), **rotation, heads=turned)
    x = ka.ops.gemm_residual(attend(rows), own["project"].t(), C=x)
    hidden = ka.ops.rmsnorm(x, weight=own["layer_norm"], eps=EPS)
    pairs = {"order": "gate_up", "granularity": PAIRED}
    hidden = ka.ops.gemm_swiglu(hidden, own["gate_up"].t(), **pairs)
    return ka.ops.gemm_residual(hidden, own["down"].t(), C=x)


def fused_prompt(x: torch.Tensor, own: Weights, sizes: Sizes, batch: int) -> torch.Tensor:
    def attend(rows: torch.Tensor) -> torch.Tensor:
        q, k, v = heads(rows, sizes, batch)
        out = rows.new_empty(batch, q.shape[2], sizes.heads, sizes.head_dim)
        ka.ops.sdpa(q, k, v, out=out.transpose(1, 2), mask=ka.masks.Causal())
        return out.flatten(2).flatten(0, 1)

    return fused(x, own, sizes, attend)


def fused_step(x: torch.Tensor, own: Weights, sizes: Sizes, cache: Cache) -> torch.Tensor:
    def attend(rows: torch.Tensor) -> torch.Tensor:
        keys, values = cache.extended(rows, sizes)
        q, _, _ = heads(rows, sizes, len(rows))
        return ka.ops.sdpa(q, keys, values).flatten(1)

    return fused(x, own, sizes, attend)


def learning(x: torch.Tensor, own: Weights, sizes: Sizes, batch: int) -> torch.Tensor:
    """With gradients; gate and up are paired in its weights."""
    hidden = ka.nn.rmsnorm(x, own["attention_norm"], eps=EPS)
    q, k, v = heads(functional.linear(hidden, own["qkv"]), sizes, batch)
    q, k = (turned(t, own) for t in (q, k))
    out = ka.nn.attention(q, k, v, mask=ka.masks.Causal())
    out = functional.linear(out.transpose(1, 2).flatten(2).flatten(0, 1), own["project"])
    hidden, x = ka.nn.rmsnorm(out, own["layer_norm"], residual=x, eps=EPS)
    pairs = {"order": "gate_up", "granularity": PAIRED}
    return ka.nn.mlp(hidden, own["gate_up"], own["down"], **pairs) + x


# By torch --------------------------------------------------------------------------------


def plain(x: torch.Tensor, own: Weights, sizes: Sizes, attend: Attend) -> torch.Tensor:
    """The layer of x (T, width); gates stand before what they multiply."""
    hidden = functional.rms_norm(x, (sizes.width,), own["attention_norm"], EPS)
    x = functional.linear(attend(functional.linear(hidden, own["qkv"])), own["project"]) + x
    hidden = functional.rms_norm(x, (sizes.width,), own["layer_norm"], EPS)
    gate, up = functional.linear(hidden, own["gate_up"]).chunk(2, dim=-1)
    return functional.linear(functional.silu(gate) * up, own["down"]) + x


def plain_prompt(x: torch.Tensor, own: Weights, sizes: Sizes, batch: int) -> torch.Tensor:
    def attend(rows: torch.Tensor) -> torch.Tensor:
        q, k, v = heads(rows, sizes, batch)
        q, k = (turned(t, own) for t in (q, k))
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return out.transpose(1, 2).flatten(2).flatten(0, 1)

    return plain(x, own, sizes, attend)


def plain_step(x: torch.Tensor, own: Weights, sizes: Sizes, cache: Cache) -> torch.Tensor:
    def attend(rows: torch.Tensor) -> torch.Tensor:
        q, k, v = heads(rows, sizes, len(rows))
        q, k = (turned(t, own) for t in (q, k))
        joined = torch.cat([q, k, v], dim=1).flatten(1)
        keys, values = cache.extended(joined, sizes)
        out = functional.scaled_dot_product_attention(q, keys, values, enable_gqa=True)
        return out.flatten(1)

    return plain(x, own, sizes, attend)


def turned(t: torch.Tensor, own: Weights) -> torch.Tensor:
    """Heads (B, H, S, D) rotated by angles of rows (B · S, D / 2)."""
    cos, sin = (own[name].view(len(t), 1, t.shape[2], -1) for name in ("cos", "sin"))
    return rotated(t, cos, sin).to(t.dtype)


# Compared --------------------------------------------------------------------------------


def of_prompts(given: Weights, batch: int) -> dict[str, torch.Tensor]:
    """Operands of one prompt for several of them: every one has the angles from 0 on."""
    each = len(given["cos"]) // batch
    angles = {name: given[name][:each].repeat(batch, 1) for name in ("cos", "sin")}
    return {**given, **angles}


def of_steps(given: Weights, batch: int) -> dict[str, torch.Tensor]:
    """All sequences are as long, so that one row of angles serves."""
    angles = {name: given[name][-1:].repeat(batch, 1) for name in ("cos", "sin")}
    return {**given, "x": given["x"][:batch], **angles}


def with_pairs(given: Weights) -> dict[str, torch.Tensor]:
    return {**given, "gate_up": paired(given["gate_up"])}


def in_float32(given: Weights) -> dict[str, torch.Tensor]:
    return {name: one.float() for name, one in given.items()}


def error(found: torch.Tensor, exact: torch.Tensor) -> float:
    """Of the norm."""
    return float((found.float() - exact.float()).norm() / exact.float().norm())


def main() -> int:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    sizes = Sizes() if device == "cuda" else SMALL
    given, batch, errors = operands(sizes, 512, device), 4, {}

    own = of_prompts(given, batch)
    exact = plain_prompt(given["x"].float(), in_float32(own), sizes, batch)
    errors["prompts"] = error(fused_prompt(given["x"], with_pairs(own), sizes, batch), exact)

    own, cache = of_steps(given, batch), cache_of(sizes, batch, 511, device)
    wide = Cache(cache.stored.float(), cache.position)
    exact = plain_step(own["x"].float(), in_float32(own), sizes, wide)
    errors["decoding"] = error(fused_step(own["x"], with_pairs(own), sizes, cache), exact)

    errors |= {f"gradient of {n}": e for n, e in errors_of_gradients(given, sizes, batch).items()}
    for name, one in errors.items():
        print(f"{name:<28} off by {one:.2e} of the norm")
    return 0 if all(one <= ERROR_ALLOWED for one in errors.values()) else 1


def errors_of_gradients(given: Weights, sizes: Sizes, batch: int) -> dict[str, float]:
    own = of_prompts(given, batch)
    dy = torch.randn_like(own["x"])
    exact = gradients(plain_prompt, in_float32(own), sizes, batch, dy.float())
    exact["gate_up"] = paired(exact["gate_up"])
    found = gradients(learning, with_pairs(own), sizes, batch, dy)
    return {name: error(found[name], one) for name, one in exact.items()}


def gradients(
    layer: Callable[..., torch.Tensor], own: Weights, sizes: Sizes, batch: int, dy: torch.Tensor
) -> dict[str, Any]:
    """Of x and all weights."""
    fixed = {name: own[name] for name in ("cos", "sin")}
    leaves = {n: one.detach().requires_grad_() for n, one in own.items() if n not in fixed}
    y = layer(leaves["x"], {**leaves, **fixed}, sizes, batch)
    return dict(zip(leaves, torch.autograd.grad(y, list(leaves.values()), dy), strict=True))


if __name__ == "__main__":
    sys.exit(main())

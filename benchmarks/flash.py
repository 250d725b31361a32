"""FlashAttention's kernels in CuTe DSL as a peer, where ``flash-attn-4`` is installed."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import torch

NAME = "FlashAttention, CuTe DSL"


def is_here() -> bool:
    # The names are those of older packages, too, which have no such module.
    return (
        importlib.util.find_spec("flash_attn") is not None
        and importlib.util.find_spec("flash_attn.cute") is not None
    )


def forward(args: Any) -> Callable[[], torch.Tensor]:
    """Takes and gives (B, S, H, D)."""
    from flash_attn.cute import flash_attn_func

    operands = [one.transpose(1, 2) for one in args.tensors[:3]]
    how = {"softmax_scale": args.scale, "causal": bool(args.bounds)}

    def call() -> torch.Tensor:
        with torch.no_grad():
            return _first(flash_attn_func(*operands, **how)).transpose(1, 2)

    return call


def backward(args: Any) -> Callable[[], Any]:
    """Of a forward pass of its own, by torch's autograd; gives (B, H, S, D)."""
    from flash_attn.cute import flash_attn_func

    leaves = [one.detach().transpose(1, 2).requires_grad_() for one in args.tensors[:3]]
    out = _first(flash_attn_func(*leaves, softmax_scale=args.scale, causal=bool(args.bounds)))
    dO = args.dO.tensor.transpose(1, 2)

    def call() -> list[torch.Tensor]:
        found = torch.autograd.grad(out, leaves, dO, retain_graph=True)
        return [one.transpose(1, 2) for one in found]

    return call


def _first(found: Any) -> torch.Tensor:
    """The result, which may stand before a log-sum-exp."""
    return found[0] if isinstance(found, tuple) else found

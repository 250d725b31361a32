"""Operands of fusions, and what the fusions compute, written in torch from the formulas."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn import functional

import kernel_api as ka
from support.data import strided_empty
from support.epilogues import reference_kernel
from support.ptx.gemm import storage_bytes

#: (batches, layout of what is written, its padding)
SETTINGS = {
    "plain": (None, "t", 0),
    "padded columns": (None, "n", 3),
    "batches": (3, "t", 0),
    "padded batches": (2, "n", 1),
}


@dataclass
class Draw:
    """Random operands of one product, in float64 unless said otherwise.

    Attributes:
        batch: How many products; None: no such mode.
        layout, pad: Of matrices that are written.
    """

    M: int
    N: int
    K: int
    batch: int | None = None
    layout: str = "t"
    pad: int = 0
    seed: int = 0
    element: torch.dtype = torch.float64
    drawn: torch.Generator = field(init=False)

    def __post_init__(self) -> None:
        self.drawn = torch.Generator().manual_seed(self.seed)

    def random(self, *shape: int, element: torch.dtype | None = None) -> torch.Tensor:
        values = torch.randn(shape, generator=self.drawn, dtype=torch.float64)
        return values.to(element or self.element)

    @property
    def batches(self) -> tuple[int, ...]:
        return () if self.batch is None else (self.batch,)

    @property
    def A(self) -> torch.Tensor:
        return self.random(*self.batches, self.M, self.K)

    @property
    def B(self) -> torch.Tensor:
        """K-major, as the weights of torch.nn.Linear are."""
        return self.random(*self.batches, self.N, self.K).transpose(-1, -2) / self.K**0.5

    def matrix(self, columns: int | None = None, element: torch.dtype | None = None):
        """To be read, (M, columns); N by default."""
        return self.random(*self.batches, self.M, columns or self.N, element=element)

    def rows(self) -> torch.Tensor:
        return self.random(*self.batches, self.M)

    def columns(self, N: int | None = None) -> torch.Tensor:
        return self.random(*self.batches, N or self.N)

    def written(self, columns: int | None = None, element: torch.dtype | None = None):
        """A matrix of NaN, (M, columns)."""
        shape = (*self.batches, self.M, columns or self.N)
        found = strided_empty(shape, element or self.element, self.layout, pad=self.pad)
        storage_bytes(found)[:] = 0xFF
        return found

    def reduced(self, *shape: int, element: torch.dtype | None = None) -> torch.Tensor:
        """NaN."""
        found = torch.empty(shape, dtype=element or self.element)
        storage_bytes(found)[:] = 0xFF
        return found


def computed(args: ka.GemmArguments) -> dict[str, torch.Tensor]:
    """Every output as the reference kernel writes it; it passes its own verification."""
    kernel = reference_kernel(args)
    kernel.run(args)
    return {name: operand.tensor for name, operand in args.outputs.items()}


def close(found: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-12) -> None:
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance, check_dtype=False)


# Formulas --------------------------------------------------------------------------------

ACTIVATIONS: dict[str | None, Any] = {
    None: lambda x: x,
    "relu": functional.relu,
    "leaky_relu": functional.leaky_relu,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "softplus": lambda x: functional.softplus(x, threshold=1000),
    "elu": functional.elu,
    "hardswish": functional.hardswish,
    "squared_relu": lambda x: functional.relu(x) ** 2,
}


def pairs(x: torch.Tensor, order: str, granularity: int | str):
    """(gate, up)"""
    width = x.shape[-1] // 2 if granularity == "halves" else granularity
    blocks = x.unflatten(-1, (-1, 2, width))
    first, second = blocks.select(-2, 0).flatten(-2), blocks.select(-2, 1).flatten(-2)
    return (first, second) if order == "gate_up" else (second, first)


GLU: dict[str, Any] = {
    "glu": lambda g, u: u * torch.sigmoid(g),
    "swiglu": lambda g, u: u * functional.silu(g),
    "geglu": lambda g, u: u * functional.gelu(g),
    "geglu_tanh": lambda g, u: u * functional.gelu(g, approximate="tanh"),
    "reglu": lambda g, u: u * functional.relu(g),
    "geglu_clamped": lambda g, u, limit=7.0, offset=1.0: (
        (u.clamp(-limit, limit) + offset)
        * g.clamp(max=limit)
        * torch.sigmoid(1.702 * g.clamp(max=limit))
    ),
    "situglu": lambda g, u: 4 * torch.tanh(g / 4) * torch.sigmoid(g) * 25 * torch.tanh(u / 25),
}


def gradient(result: torch.Tensor, of: torch.Tensor, upstream: torch.Tensor) -> torch.Tensor:
    (found,) = torch.autograd.grad(result, of, upstream, retain_graph=True)
    return found

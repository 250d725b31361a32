"""Problems, and random operands for them: where nothing else is said, A row-major, B stored (N, K)
as linear layers do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

import kernel_api as ka
from kernel_api.dtypes import dtype

BLOCK = 128


@dataclass(frozen=True)
class Problem:
    """out (M, N) = A (M, K) · B (K, N).

    Attributes:
        element: Type of A and B, in any spelling; float32 is multiplied as tf32.
        out: Type of out; that of A and B by default.
        scales: ``per_tensor``, ``per_row``, ``blocks`` (1x128 of A, 128x128 of B), or none.
        origin: The layer that it comes from, if any.
        layout: How A and B are stored, as BLAS, which counts columns first, has it: T A is (M, K),
            N (K, M); N B is (N, K), T (K, N).
    """

    M: int
    N: int
    K: int
    element: str = "bfloat16"
    out: str = ""
    scales: str = ""
    origin: str = ""
    layout: str = "TN"

    @property
    def label(self) -> str:
        """What rows call it."""
        types = {"f32": "tf32"}.get(short := dtype(self.element).short, short)
        if self.scales:
            types += f" {self.scales.replace('_', ' ')}"
        if self.out and dtype(self.out) is not dtype(self.element):
            types += f" -> {dtype(self.out).short}"
        return f"{self.M}x{self.N}x{self.K} (M x N x K) {self.layout} {types}"

    @property
    def operations(self) -> int:
        return 2 * self.M * self.N * self.K

    @property
    def bytes(self) -> int:
        """What must move at least: each element once."""
        size = dtype(self.element).itemsize
        out_size = dtype(self.out or self.element).itemsize
        return (self.M + self.N) * self.K * size + self.M * self.N * out_size

    def arguments(self, device: str) -> ka.GemmArguments:
        """The problem on new random operands."""
        A, B = (
            _random(rows if letter == "T" else rows[::-1], self.element, device)
            for rows, letter in zip(((self.M, self.K), (self.K, self.N)), self.layout, strict=True)
        )
        A, B = (
            one if letter == "T" else one.t()
            for one, letter in zip((A, B), self.layout, strict=True)
        )
        out_type = dtype(self.out or self.element).torch
        out = torch.empty(self.M, self.N, dtype=out_type, device=device)
        if self.scales:
            return ka.GemmArguments(*_scaled(A, B, self.scales), out)
        precision = "tf32" if A.dtype is torch.float32 else None
        return ka.GemmArguments(A, B, out, fp32_precision=precision)


def _random(shape: tuple[int, int], element: str, device: str) -> torch.Tensor:
    asked = dtype(element)
    if asked.is_integer:
        return torch.randint(-128, 128, shape, device=device, dtype=asked.torch)
    if asked.bits >= 16:
        return torch.randn(shape, device=device, dtype=asked.torch)
    return torch.randn(shape, device=device, dtype=torch.bfloat16).to(asked.torch)


def _scaled(A: torch.Tensor, B: torch.Tensor, scales: str) -> tuple[Any, Any]:
    def scale(*shape: int) -> torch.Tensor:
        return torch.rand(shape, device=A.device) + 0.5

    if scales == "per_tensor":
        mode = ka.ScaleMode.PER_TENSOR
        return ka.ScaledOperand(A, scale(), mode), ka.ScaledOperand(B, scale(), mode)
    (m, k), n = A.shape, B.shape[1]
    if scales == "per_row":
        mode = ka.ScaleMode.PER_ROW
        return ka.ScaledOperand(A, scale(m), mode), ka.ScaledOperand(B, scale(n), mode)
    blocks_k, blocks_n = -(-k // BLOCK), -(-n // BLOCK)
    return (
        ka.ScaledOperand(A, scale(m, blocks_k), ka.ScaleMode.BLOCK_1x128),
        ka.ScaledOperand(B, scale(blocks_k, blocks_n), ka.ScaleMode.BLOCK_128x128),
    )

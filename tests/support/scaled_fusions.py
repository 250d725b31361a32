"""Fusions of products whose operands carry scales."""

from __future__ import annotations

from dataclasses import dataclass

import torch

import kernel_api as ka
from kernel_api.arguments.scaled import BLOCK
from support.data import strided_empty
from support.fusion_cases import BF16, E4M3, Case
from support.fusions import Draw

MODES = {
    "tensors": (ka.ScaleMode.PER_TENSOR, ka.ScaleMode.PER_TENSOR),
    "rows": (ka.ScaleMode.PER_ROW, ka.ScaleMode.PER_ROW),
    "rows of A": (ka.ScaleMode.PER_ROW, ka.ScaleMode.PER_TENSOR),
    "rows of B": (ka.ScaleMode.PER_TENSOR, ka.ScaleMode.PER_ROW),
    "blocks": (ka.ScaleMode.BLOCK_1x128, ka.ScaleMode.BLOCK_128x128),
}


@dataclass
class ScaledDraw(Draw):
    """A and B of 8 bits in units of scales that are far from 1; what is beside them as of `Draw`.

    Attributes:
        scales: One of :data:`MODES`.
        of_A, of_B: Element types.
    """

    scales: str = "rows"
    of_A: torch.dtype = E4M3
    of_B: torch.dtype = E4M3

    @property
    def A(self) -> ka.ScaledOperand:
        mode, _ = MODES[self.scales]
        scale = self._scale(*_shape_of_scale(mode, self.M, (self.M, -(-self.K // BLOCK))))
        return ka.ScaledOperand(self._stored(self.of_A, self.M, self.K), scale, mode)

    @property
    def B(self) -> ka.ScaledOperand:
        _, mode = MODES[self.scales]
        shape = _shape_of_scale(mode, self.N, (-(-self.K // BLOCK), -(-self.N // BLOCK)))
        stored = self._stored(self.of_B, self.N, self.K).mT
        return ka.ScaledOperand(stored, self._scale(*shape) / self.K**0.5, mode)

    def _stored(self, element: torch.dtype, rows: int, columns: int) -> torch.Tensor:
        spread = 64 if element is torch.int8 else 1
        values = self.random(*self.batches, rows, columns, element=torch.float32) * spread
        limit = 127 if element is torch.int8 else torch.finfo(element).max
        return values.clamp(-limit, limit).to(element)

    def _scale(self, *shape: int) -> torch.Tensor:
        """Of one for all batches where it is one per tensor; smaller of integers, which are not."""
        batches = self.batches if shape else ()
        drawn = self.random(*batches, *shape, element=torch.float32).abs() + 0.25
        return drawn / 64 if torch.int8 in (self.of_A, self.of_B) else drawn


def _shape_of_scale(mode: ka.ScaleMode, rows: int, blocks: tuple[int, int]) -> tuple[int, ...]:
    whole = {ka.ScaleMode.PER_TENSOR: (), ka.ScaleMode.PER_ROW: (rows,)}
    return whole.get(mode, blocks)


class Described(ScaledDraw):
    """Without data, of any size."""

    def random(self, *shape: int, element: torch.dtype | None = None) -> torch.Tensor:
        return torch.empty(shape, dtype=element or self.element, device="meta")

    def written(self, columns: int | None = None, element: torch.dtype | None = None):
        shape = (*self.batches, self.M, columns or self.N)
        return strided_empty(
            shape, element or self.element, self.layout, pad=self.pad, device="meta"
        )

    def reduced(self, *shape: int, element: torch.dtype | None = None) -> torch.Tensor:
        return self.random(*shape, element=element)


class ScaledCase(Case):
    """A fusion of operands with scales."""

    draws, K = ScaledDraw, 144

    def described(self) -> ka.GemmArguments:
        """Without data."""
        return self.make(Described(**{"element": BF16, **self.how}))

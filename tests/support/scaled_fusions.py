"""Fusions of products whose operands carry scales."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

import kernel_api as ka
from kernel_api.arguments.scaled import BLOCK
from support.data import strided_empty
from support.fusion_cases import BF16, E4M3
from support.fusions import Draw

MODES = {
    "tensors": (ka.ScaleMode.PER_TENSOR, ka.ScaleMode.PER_TENSOR),
    "rows": (ka.ScaleMode.PER_ROW, ka.ScaleMode.PER_ROW),
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
        blocks = -(-self.K // BLOCK)
        shape = {"tensors": (), "rows": (self.M,), "blocks": (self.M, blocks)}[self.scales]
        stored = self._stored(self.of_A, self.M, self.K)
        return ka.ScaledOperand(stored, self._scale(*shape), MODES[self.scales][0])

    @property
    def B(self) -> ka.ScaledOperand:
        blocks = -(-self.K // BLOCK), -(-self.N // BLOCK)
        shape = {"tensors": (), "rows": (self.N,), "blocks": blocks}[self.scales]
        stored = self._stored(self.of_B, self.N, self.K).mT
        scale = self._scale(*shape) / self.K**0.5
        return ka.ScaledOperand(stored, scale, MODES[self.scales][1])

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


@dataclass(frozen=True)
class ScaledCase:
    """A fusion of `fusion_cases`, of operands with scales.

    Attributes:
        design: Word for the kind of design that runs it, or a part of a kernel's name.
    """

    name: str
    make: Callable[[Any], ka.GemmArguments]
    design: str = "plain"
    how: dict[str, Any] = field(default_factory=dict)

    def drawn(self, turn: int) -> ka.GemmArguments:
        """Every other output is not aligned to 16 bytes."""
        how = {"K": 144, "element": BF16, "pad": 8 if turn % 2 else 3, "seed": turn, **self.how}
        return self.make(ScaledDraw(**how))

    def described(self) -> ka.GemmArguments:
        return self.make(Described(**{"element": BF16, **self.how}))


def on_device(args: ka.GemmArguments, device: str) -> ka.GemmArguments:
    """The same with all tensors elsewhere, scales as well; strides are kept."""

    def moved(tensor: torch.Tensor) -> torch.Tensor:
        found = torch.empty_strided(
            tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device
        )
        return found if device == "meta" else found.copy_(tensor)

    def operand(one: Any) -> Any:
        if one.mode is None:
            return moved(one.tensor)
        return ka.ScaledOperand(moved(one.tensor), moved(one.scale.tensor), one.mode)

    others = {name: moved(one.tensor) for name, one in args.epilogue.tensors.items()}
    epilogue = args.epilogue.with_operands(**others)
    return ka.GemmArguments(*map(operand, args.operands), epilogue=epilogue)

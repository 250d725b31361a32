"""Operands with scales: real value = stored value × scale."""

from __future__ import annotations

import enum
from typing import Any

from kernel_api.errors import ArgumentError
from kernel_api.operands import Operand


class ScaleMode(enum.Enum):
    """Which stored elements share a scale.

    PER_TENSOR    scale (): all of them
    PER_ROW       one per index that is not contracted: A (M,), B (N,)
    BLOCK_1x128   A (M, ceil(K/128))
    BLOCK_128x128 B (ceil(K/128), ceil(N/128))

    Batched operands put L in front.
    """

    PER_TENSOR = "per_tensor"
    PER_ROW = "per_row"
    BLOCK_1x128 = "block_1x128"
    BLOCK_128x128 = "block_128x128"


class ScaledOperand(Operand):
    """A tensor stored in units of a scale: real value = ``tensor`` × ``scale``."""

    __slots__ = ("mode", "scale")

    def __init__(self, tensor: Any, scale: Any, mode: ScaleMode) -> None:
        super().__init__(tensor)
        if not isinstance(mode, ScaleMode):
            raise ArgumentError(f"mode is {mode!r}; expected one of {[str(m) for m in ScaleMode]}")
        self.scale = Operand(scale, "scale")
        self.mode = mode

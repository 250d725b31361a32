"""Random zeros among the probabilities of attention."""

from __future__ import annotations

import numbers
from dataclasses import dataclass
from typing import Any

from kernel_api._described import Described
from kernel_api._numbers import known_number, size_or_whole_number
from kernel_api.dtypes import dtype
from kernel_api.errors import ArgumentError
from kernel_api.operands import Operand

_LARGEST = (1 << 63) - 1


@dataclass(frozen=True, eq=False)
class Dropout(Described):
    """A probability P of attention becomes P / (1 − p) with probability 1 − p, else 0.

    Kept is what has u ≥ p, for u = half · 2⁻¹⁶ of Philox4x32-10 under key ``seed`` and a counter of
    32, 32 and 64 bits

        (4 · (j // 32) + (j mod 8) // 2, i, offset + b · H + h)

    of which query i and key j (by their indices within sequence b) of query head h take word
    (j mod 32) // 8: its lower half for even j, its upper half for odd j. So the probability of a
    zero is p rounded up to a multiple of 2⁻¹⁶; what is kept is divided by 1 − p all the same. The
    same three numbers give the backward pass the same zeros.

    Args:
        p: From 0 up to, not including, 1.
        seed, offset: Whole numbers from 0, or int32 or int64 tensors () or (1,) on the device,
            which are kept as ().
    """

    p: float
    seed: Any
    offset: Any

    def __post_init__(self) -> None:
        p = known_number(self.p)
        if isinstance(p, bool) or not isinstance(p, numbers.Real) or not 0 <= float(p) < 1:
            raise ArgumentError(
                f"p of Dropout is {p!r}; expected a probability from 0 up to 1, which would leave "
                f"nothing to scale"
            )
        object.__setattr__(self, "p", float(p))
        for name in ("seed", "offset"):
            object.__setattr__(self, name, _state(name, getattr(self, name)))

    @property
    def tensors(self) -> dict[str, Operand]:
        """What of the state is a tensor."""
        state = {"dropout_seed": self.seed, "dropout_offset": self.offset}
        return {name: one for name, one in state.items() if isinstance(one, Operand)}

    @property
    def values(self) -> dict[str, Any]:
        """What a launch takes."""
        state = {"dropout_seed": self.seed, "dropout_offset": self.offset}
        return {"dropout_p": self.p, **{n: getattr(one, "tensor", one) for n, one in state.items()}}

    def description(self) -> dict[str, Any]:
        # Another process computes nothing that depends on the state.
        state = {"seed": self.seed, "offset": self.offset}
        return {
            "p": self.p,
            **{n: one if isinstance(one, Operand) else 0 for n, one in state.items()},
        }


def _state(name: str, value: Any) -> Operand | int:
    whole = size_or_whole_number(value)
    if whole is not None:
        if not 0 <= whole <= _LARGEST:
            raise ArgumentError(f"{name} of Dropout is {value}; expected from 0 up to 2 ** 63 - 1")
        return whole
    if isinstance(value, (bool, float)):
        raise ArgumentError(f"{name} of Dropout is {value!r}; expected a whole number")
    operand = value if isinstance(value, Operand) else Operand(value, f"{name} of Dropout")
    if operand.dtype not in (dtype("int32"), dtype("int64")):
        raise ArgumentError(f"{name} of Dropout is {operand.dtype}; expected int32 or int64")
    if operand.shape == ():
        return operand
    if operand.shape != (1,):
        raise ArgumentError(f"{name} of Dropout has shape {operand.shape}; expected one number")
    return Operand(one_number(operand.tensor), f"{name} of Dropout")


def one_number(tensor: Any) -> Any:
    """A tensor () or (1,) in the one form that kernels are compiled for, ()."""
    return tensor.view(()) if tensor.dim() else tensor

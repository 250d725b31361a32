"""The layer of experts of 8 bits, see :func:`kernel_api.nn.moe`: without gradients.

Tokens are quantised in blocks of 128 columns, once each, and copied with their scales to where
their groups lie, as words of four elements. The first product quantises what it writes in the same
way, for the second.
"""

from __future__ import annotations

from typing import Any

import torch

from kernel_api import ops
from kernel_api._moe_routing import Routing
from kernel_api.arguments import ScaledOperand, ScaleMode
from kernel_api.arguments.scaled import BLOCK
from kernel_api.errors import ArgumentError, GradientError

_BLOCKS = ScaleMode.BLOCK_128x128
#: Types that tokens may have.
_TOKENS = (torch.float16, torch.bfloat16, torch.float32)


def both_of_8_bits(w_up: Any, w_down: Any) -> tuple[ScaledOperand, ScaledOperand]:
    """Experts in units of scales; raises ArgumentError where one of the two is not."""
    if isinstance(w_up, ScaledOperand) and isinstance(w_down, ScaledOperand):
        return w_up, w_down
    one, other = ("w_up", "w_down") if isinstance(w_up, ScaledOperand) else ("w_down", "w_up")
    raise ArgumentError(f"{one} is a ScaledOperand and {other} is none; both are, or none")


def moe(
    x: torch.Tensor,
    expert_index: torch.Tensor,
    expert_weight: torch.Tensor,
    w_up: ScaledOperand,
    w_down: ScaledOperand,
    **function: Any,
) -> torch.Tensor:
    """The layer of checked operands; function: ``kind``, ``order`` and ``granularity``."""
    _check(x, w_up, w_down)
    learning = [one for one in (x, expert_weight) if one.requires_grad]
    if learning and torch.is_grad_enabled():
        raise GradientError(
            "experts of 8 bits have no gradients; call the layer within torch.no_grad(), or pass "
            "weights of 16 bits"
        )
    routing = Routing.of(expert_index, expert_weight, w_up.shape[0])
    tokens = ops.quantize(x)
    hidden = ops.grouped_gemm_glu(
        ScaledOperand(
            routing.scattered(tokens.out.view(torch.float32)).view(tokens.out.dtype),
            routing.scattered(tokens.scale),
            ScaleMode.BLOCK_1x128,
        ),
        w_up,
        routing.offsets,
        prob=routing.weight,
        scale=True,
        **function,
    )
    A = ScaledOperand(hidden.out, hidden.scale, ScaleMode.BLOCK_1x128)
    rows = x.new_empty(A.shape[0], w_down.shape[-1])
    ops.grouped_gemm(A, w_down, routing.offsets, out=rows)
    return routing.gathered(rows)


def _check(x: torch.Tensor, w_up: ScaledOperand, w_down: ScaledOperand) -> None:
    if x.dtype not in _TOKENS:
        expected = ", ".join(map(str, _TOKENS))
        raise ArgumentError(f"x is {x.dtype}; beside experts of 8 bits expected one of {expected}")
    for name, one in (("w_up", w_up), ("w_down", w_down)):
        if not one.tensor.dtype.is_floating_point or one.tensor.dtype.itemsize != 1:
            raise ArgumentError(f"{name} is {one.tensor.dtype}; expected 8-bit floats")
        if one.mode is not _BLOCKS:
            raise ArgumentError(
                f"{name} carries a {one.mode.value} scale; expected {_BLOCKS.value}, because what "
                f"it is multiplied with is quantised in blocks"
            )
    for letter, extent, multiple in (("K", w_up.shape[1], BLOCK), ("2I", w_up.shape[2], 2 * BLOCK)):
        if extent % multiple:
            raise ArgumentError(
                f"w_up has {letter} = {extent}; expected a multiple of {multiple}, whole blocks of "
                f"128 columns"
            )

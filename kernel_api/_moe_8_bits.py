"""The layer of experts of 8 bits, see :func:`kernel_api.nn.moe`: without gradients.

Tokens are quantised once each, as the experts they are multiplied with ask, and copied with their
scales to where their groups lie. What the first product makes of them is quantised for the second:
blocks of columns by its own epilogue, whole rows by a launch behind it.
"""

from __future__ import annotations

from typing import Any

import torch

from kernel_api import ops
from kernel_api._moe_routing import Routing
from kernel_api._quantize_ops import operand_of
from kernel_api.arguments import ScaledOperand, ScaleMode
from kernel_api.arguments.scaled import BLOCK, check_scale
from kernel_api.errors import ArgumentError

_BLOCKS = ScaleMode.BLOCK_128x128
#: Types that tokens may have.
_TOKENS = (torch.float16, torch.bfloat16, torch.float32)
_WORD = 4  # bytes of what is moved at once


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
    routing = Routing.of(expert_index, expert_weight, w_up.shape[0])
    hidden = _hidden(_scattered(_quantized(x, w_up), routing), w_up, w_down, routing, function)
    rows = ops.grouped_gemm(hidden, w_down, routing.offsets, out_dtype=x.dtype)
    return routing.gathered(rows)


def _quantized(rows: torch.Tensor, experts: ScaledOperand) -> ScaledOperand:
    """Rows as what they are multiplied with asks: with scales of blocks of columns, or whole."""
    mode = "block" if experts.mode is _BLOCKS else "row"
    element = torch.int8 if experts.tensor.dtype is torch.int8 else torch.float8_e4m3fn
    return operand_of(ops.quantize(rows, mode, out_dtype=element))


def _scattered(tokens: ScaledOperand, routing: Routing) -> ScaledOperand:
    """Rows and scales of tokens, one per pair."""
    stored, scale = tokens.tensor, tokens.scale.tensor
    if stored.shape[1] % _WORD or not stored.shape[1]:
        rows = routing.scattered(stored.view(torch.uint8))
    else:
        rows = routing.scattered(stored.view(torch.float32))
    if tokens.mode is ScaleMode.PER_ROW:
        scales = routing.scattered(scale.unsqueeze(1)).squeeze(1)
    else:
        scales = routing.scattered(scale)
    return ScaledOperand.unread(rows.view(stored.dtype), scales, tokens.mode)


def _hidden(
    tokens: ScaledOperand,
    w_up: ScaledOperand,
    w_down: ScaledOperand,
    routing: Routing,
    function: dict[str, Any],
) -> ScaledOperand:
    """Per pair, its weight times the gated linear unit, as ``w_down`` asks."""
    how = {"prob": routing.weight, **function}
    if w_down.mode is _BLOCKS:
        found = ops.grouped_gemm_glu(tokens, w_up, routing.offsets, scale=True, **how)
        return ScaledOperand.unread(found.out, found.scale, ScaleMode.BLOCK_1x128)
    return _quantized(ops.grouped_gemm_glu(tokens, w_up, routing.offsets, **how), w_down)


def check(x: torch.Tensor, w_up: ScaledOperand, w_down: ScaledOperand) -> None:
    """What 8 bits ask beside what every layer asks; raises ArgumentError."""
    if x.dtype not in _TOKENS:
        expected = ", ".join(map(str, _TOKENS))
        raise ArgumentError(f"x is {x.dtype}; beside experts of 8 bits expected one of {expected}")
    for name, one in (("w_up", w_up), ("w_down", w_down)):
        element = one.tensor.dtype
        if element is not torch.int8 and not (element.is_floating_point and element.itemsize == 1):
            raise ArgumentError(f"{name} is {element}; expected 8-bit floats or int8")
        if element is torch.int8 and one.mode is _BLOCKS:
            raise ArgumentError(
                f"{name} is int8 with a {one.mode.value} scale; expected one per_row or per_tensor"
            )
        check_scale(name, one, "KN", "K")
    if w_up.mode is _BLOCKS:
        _check_blocks("w_up has K", w_up.shape[1], BLOCK)
    if w_down.mode is _BLOCKS:
        _check_blocks("w_up has 2I", w_up.shape[2], 2 * BLOCK)


def _check_blocks(what: str, extent: int, multiple: int) -> None:
    if extent % multiple:
        raise ArgumentError(
            f"{what} = {extent}; expected a multiple of {multiple}, whole blocks of 128 columns"
        )

"""What ``torch.autocast`` makes of the operands of a layer."""

from __future__ import annotations

from typing import Any

import torch

#: Types that are cast to the one that autocast asks for, as torch's own products do; those of 8
#: bits have a product of their own, and float64 is asked for by who has it.
_CAST = (torch.float32, torch.float16, torch.bfloat16)


def cast(*operands: Any) -> tuple[Any, ...]:
    """The operands of a product as they are, or in the type of the autocast that is on for the
    device of the first one; None stays None. Their gradients have the type that they had."""
    device = operands[0].device.type
    if not torch.is_autocast_enabled(device):
        return operands
    wanted = torch.get_autocast_dtype(device)
    return tuple([_cast(one, device, wanted) for one in operands])


def _cast(operand: Any, device: str, wanted: torch.dtype) -> Any:
    if operand is None or operand.dtype not in _CAST or operand.device.type != device:
        return operand
    return operand.to(wanted)

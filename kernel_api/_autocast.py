"""What ``torch.autocast`` makes of the operands of a layer, and where it has no say."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch

#: Types that are cast to the one that autocast asks for, as torch's own products do; those of 8
#: bits have a product of their own, and float64 is asked for by who has it.
_CAST = (torch.float32, torch.float16, torch.bfloat16)


def cast(*operands: Any) -> tuple[Any, ...]:
    """The operands of a product in the type of the autocast that is on for the device of the first
    one; as they are if one of them is of another type than these. None stays None. Their gradients
    have the type that they had. Unlike torch, which keeps what it has made of a parameter until
    autocast ends, every call casts."""
    device = operands[0].device.type
    # torch.amp.is_autocast_available says it of every device, but not every Dynamo traces it.
    if device == "meta" or not torch.is_autocast_enabled(device):
        return operands
    if any(one is not None and one.dtype not in _CAST for one in operands):
        return operands
    wanted = torch.get_autocast_dtype(device)
    return tuple([one if one is None else one.to(wanted) for one in operands])


def off() -> AbstractContextManager[Any]:
    """Within it, torch computes in the types that it is given: for what says its types itself."""
    found: AbstractContextManager[Any] = torch._C._DisableAutocast()
    return found

"""Where groups of tokens end, as :class:`~kernel_api.arguments.GroupedGemmArguments` take it, of
what else says it; and a check for when results are odd.

Nothing here but the check waits for the device.
"""

from __future__ import annotations

import os
from typing import Any

from kernel_api.errors import ArgumentError
from kernel_api.operands import Operand

#: Set to 1, every run of a product of groups checks its offsets before, which waits for the device.
VARIABLE = "KERNEL_API_CHECK_OFFSETS"


def offsets_from_counts(counts: Any) -> Any:
    """int32 (E,): the ends of groups of so many tokens.

    Args:
        counts: Integers (E,).
    """
    import torch

    return _integers("counts", counts).cumsum(0, dtype=torch.int32)


def offsets_from_starts(starts: Any, T: Any) -> Any:
    """int32 (E,): the ends of groups that begin there, the first at 0.

    Args:
        starts: Integers (E,).
        T: Where the last group ends: an integer, or a tensor of one.
    """
    import torch

    found = _integers("starts", starts).to(torch.int32).roll(-1)
    found[-1:] = T
    return found


def offsets_from_boundaries(boundaries: Any) -> Any:
    """int32 (E,): the ends of groups, of 0 and these.

    Args:
        boundaries: Integers (E + 1,), the first of them 0.
    """
    import torch

    return _integers("boundaries", boundaries)[1:].to(torch.int32, copy=True)


def check_offsets(offsets: Any, T: int) -> None:
    """Raise ArgumentError, with the first bad place, unless offsets never decrease and lie between
    0 and T. It waits for the device."""
    before = 0
    for place, end in enumerate(_integers("offsets", offsets).tolist()):
        if end < before:
            said = f"offsets[{place - 1}] is {before}" if place else "the first group begins at 0"
            raise ArgumentError(f"offsets[{place}] is {end} and {said}; they may not decrease")
        if end > T:
            raise ArgumentError(f"offsets[{place}] is {end}; there are T = {T} tokens")
        before = end


def check_is_asked() -> bool:
    return os.environ.get(VARIABLE) == "1"


def check_if_asked(offsets: Operand, T: int) -> None:
    """:func:`check_offsets` where that is asked, and no CUDA graph is captured."""
    if not check_is_asked():
        return
    import torch

    if offsets.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return
    check_offsets(offsets.tensor, T)


def _integers(name: str, value: Any) -> Any:
    operand = Operand(value, name)
    if operand.dtype.kind not in ("int", "uint") or operand.rank != 1 or not operand.shape[0]:
        raise ArgumentError(f"{name} is {operand!r}; expected integers in one mode")
    return operand.tensor

"""Calls that torch's compiler leaves as they are, between two graphs of its own.

Importing this imports that compiler, so only what it traces does so::

    if torch.compiler.is_compiling():
        from kernel_api._outside import outside

        return outside(self.execute, *given)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

#: What torch says where it was to make one graph of all (``fullgraph=True``).
_WHY = "kernel_api does this between graphs of torch, which hold no such thing"
_NUMBER = (
    "to torch's compiler a number of NumPy is an array, whose value no graph knows; pass int(x) or "
    "float(x), made outside of what is compiled"
)


@torch.compiler.disable(reason=_WHY)  # type: ignore[no-untyped-call,untyped-decorator]
def outside(function: Callable[..., Any], /, *given: Any, **named: Any) -> Any:
    return function(*given, **named)


@torch.compiler.disable(reason=_NUMBER)  # type: ignore[no-untyped-call,untyped-decorator]
def item(number: Any) -> Any:
    """A number of NumPy as Python has it."""
    return number.item()

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


@torch.compiler.disable  # type: ignore[untyped-decorator]
def outside(function: Callable[..., Any], *given: Any, **named: Any) -> Any:
    return function(*given, **named)

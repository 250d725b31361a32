"""Telling torch what kernels have written, as its own operators do: backward then refuses tensors
that were kept for it and have been overwritten since."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable
from typing import Any


def tell_autograd(tensors: Iterable[Any]) -> None:
    """Of tensors that have been written; without torch there is nobody to tell."""
    if "torch" in sys.modules:
        teller()(tensors)


@functools.cache
def teller() -> Callable[[Iterable[Any]], None]:
    """What tells it. Torch's own function takes one tensor or several, and asks which."""
    import torch

    public: Callable[[Iterable[Any]], None] = torch.autograd.graph.increment_version
    behind = getattr(torch._C, "_increment_version", None)
    try:
        behind(())  # type: ignore[misc]
    except TypeError:
        return public
    return behind  # type: ignore[return-value]

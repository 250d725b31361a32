"""Telling torch what kernels have written, as its own operators do: backward then refuses tensors
that were kept for it and have been overwritten since."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any


def tell_autograd(tensors: Iterable[Any]) -> None:
    """Of tensors that have been written; without torch there is nobody to tell."""
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.autograd.graph.increment_version(tensors)

"""How torch multiplies float32, for the length of a call."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def float32_multiplication(precision: str | None) -> Iterator[None]:
    """Within it, torch multiplies float32 as ``"ieee"`` or ``"tf32"`` says; None: as set."""
    before = torch.get_float32_matmul_precision()
    if precision is None or (precision == "ieee") == (before == "highest"):
        yield
        return
    torch.set_float32_matmul_precision("highest" if precision == "ieee" else "high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)

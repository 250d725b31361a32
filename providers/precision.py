"""How torch multiplies float32, for the length of a call."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def float32_multiplication(precision: str | None) -> Iterator[None]:
    """Within it, torch multiplies float32 at least as precisely as asked; None: as set."""
    before = torch.get_float32_matmul_precision()
    if precision is None or (precision != "tf32") == (before == "highest"):
        yield
        return
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)

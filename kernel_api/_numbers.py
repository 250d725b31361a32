"""Numbers as callers give them."""

from __future__ import annotations

import numbers
from typing import Any


def whole_number(value: Any) -> int | None:
    """As an int, one of NumPy too; None for what is no whole number, as True and 2.0 are none."""
    if type(value) is int:
        return value
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        return None
    return int(value)

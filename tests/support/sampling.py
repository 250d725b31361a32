"""How many of the cases that take seconds are run: a sample, or all if the environment asks."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import TypeVar

#: KERNEL_API_EMULATE is for kernels that are emulated, the other for those that are compiled.
EVERY = bool(os.environ.get("KERNEL_API_EMULATE")) or (
    os.environ.get("KERNEL_API_TEST_EVERY_KERNEL") == "1"
)

T = TypeVar("T")


def some(cases: Iterable[T], count: int) -> list[T]:
    """So many of the cases, as far apart as they can be; the first is always one of them."""
    found = list(cases)
    if EVERY or count >= len(found):
        return found
    return [found[index * len(found) // count] for index in range(count)]

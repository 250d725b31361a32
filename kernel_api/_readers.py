"""Reading several values at once, which a launch does more cheaply than one by one."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

Reader = Callable[[Any], Sequence[Any]]


def reader_of(keys: Sequence[Any]) -> Reader:
    """What reads the values of keys; of one, ``itemgetter`` gives no tuple."""
    if len(keys) > 1:
        return operator.itemgetter(*keys)
    if not keys:
        return lambda values: ()
    key = keys[0]
    return lambda values: (values[key],)

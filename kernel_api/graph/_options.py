"""Options of operations and tensors as callers give them, in the form that nodes keep.

Each raises GraphError that names who has which option: ``int()`` would make 0 of 0.9 and
[4, 8] of "48", and raise errors that name nothing.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator
from typing import Any

from kernel_api._numbers import real_number
from kernel_api.errors import GraphError

#: What scalars and iterables of other libraries raise where they are not what they may be.
_REFUSALS = (TypeError, ValueError, RuntimeError, OverflowError)


def one_whole(what: str, option: str, value: Any) -> int:
    """As an int: a whole number of Python, NumPy or torch. A bool is none, and 2.0 is none."""
    found = as_whole(value)
    if found is None:
        raise refused(what, option, value, "a whole number")
    return found


def optional_whole(what: str, option: str, value: Any) -> int | None:
    """As ``one_whole``; None stays None."""
    return None if value is None else one_whole(what, option, value)


def wholes(what: str, option: str, value: Any) -> list[int]:
    """As ints: an iterable of whole numbers, which no text is."""
    given = listed(what, option, value, "whole numbers")
    found = [one for one in map(as_whole, given) if one is not None]
    if len(found) != len(given):
        raise refused(what, option, given, "whole numbers")
    return found


def whole_or_wholes(what: str, option: str, value: Any) -> int | list[int]:
    """As an int or as ints: one number, or an iterable of them."""
    if _iterated(value) is not None:
        return wholes(what, option, value)
    found = as_whole(value)
    if found is None:
        raise refused(what, option, value, "whole numbers")
    return found


def number(what: str, option: str, value: Any, *, infinite: bool = False) -> float:
    """As a float: a number of Python, NumPy or torch. A bool is none, nor is NaN.

    Args:
        infinite: Whether infinities are taken.
    """
    found = as_number(value)
    if found is None:
        raise refused(what, option, value, "a number")
    if math.isnan(found) or (math.isinf(found) and not infinite):
        raise refused(what, option, value, "a number" if infinite else "a finite number")
    return found


def optional_number(what: str, option: str, value: Any, *, infinite: bool = False) -> float | None:
    """As ``number``; None stays None."""
    return None if value is None else number(what, option, value, infinite=infinite)


def as_whole(value: Any) -> int | None:
    """As an int; None for what is no whole number, as True and 2.0 are none."""
    try:
        value = _plain(value)
        return None if isinstance(value, bool) else operator.index(value)
    except _REFUSALS:
        return None


def as_number(value: Any) -> float | None:
    """As a float, NaN and infinities too; None for what is no number, as True and "1" are none."""
    try:
        value = _plain(value)
        if isinstance(value, bool) or not hasattr(type(value), "__float__"):
            return None
        return float(value)
    except _REFUSALS:
        return None


def as_held(what: str, value: Any, element: Any) -> int | float | None:
    """A number as a type of torch holds it, 0 or 1 for what is true or not; None for one that is
    none of a type of whole numbers. Floating types round when they are computed with."""
    import torch

    if element is torch.bool:
        return int(bool(value))
    if element.is_floating_point:
        return real_number(what, value)
    limits = torch.iinfo(element)
    fits = value == value and limits.min <= value <= limits.max and value == int(value)
    return int(value) if fits else None


def what_holds(element: Any) -> str:
    """The whole numbers of a type, for messages."""
    import torch

    limits = torch.iinfo(element)
    return f"{element} holds whole numbers from {limits.min} to {limits.max}"


def text(what: str, option: str, value: Any) -> str:
    """As a str; None is none, the empty one."""
    if value is not None and not isinstance(value, str):
        raise refused(what, option, value, "text")
    return value or ""


def listed(what: str, option: str, value: Any, expected: str) -> list[Any]:
    """What an iterable has; text is none."""
    items = _iterated(value)
    if items is None:
        raise refused(what, option, value, expected)
    return list(items)


def refused(what: str, option: str, value: Any, expected: str) -> GraphError:
    """The error for a value that an option cannot have."""
    return GraphError(f"{what} has {option} = {value!r}; expected {expected}")


def _plain(value: Any) -> Any:
    """The number of Python's in a scalar of NumPy or torch: there, truth values have an index and
    complex numbers a float."""
    return value.item() if hasattr(value, "item") else value


def _iterated(value: Any) -> Iterator[Any] | None:
    """None for what is no iterable, and for text."""
    if isinstance(value, (str, bytes, bytearray)):
        return None
    try:
        found: Iterator[Any] = iter(value)
    except TypeError:
        return None
    return found

"""Numbers, truth values and names as callers give them."""

from __future__ import annotations

import numbers
from typing import Any

from kernel_api.errors import ArgumentError
from kernel_api.utils import is_traced

_BEYOND = 2**64  # what 64 bits hold, with a sign or without


def python_number(value: Any) -> Any:
    """A number of NumPy as Python has it, for graphs of torch: to its compiler it is an array."""
    return value.item() if type(value).__module__ == "numpy" else value


def known_number(value: Any) -> Any:
    """The same where its value has to be known, which no graph knows: it is read between two."""
    if is_traced() and type(value).__module__ == "numpy" and value.ndim == 0:
        from kernel_api._outside import item

        return item(value)
    return value


def known_or_wide(value: Any) -> Any:
    """The same of a real number, which graphs hold as a constant: that they know of float64.

    Raises ArgumentError for a bool, of which an operator of torch would make a number.
    """
    if isinstance(value, bool):
        raise ArgumentError(f"{value} is given for a number; expected one")
    is_wide = type(value).__module__ == "numpy" and value.itemsize >= 8
    return python_number(value) if is_wide else known_number(value)


def whole_number(value: Any) -> int | None:
    """As an int, one of NumPy too; None for what is no whole number, as True and 2.0 are none."""
    if type(value) is int:
        return value
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        return None
    return int(value)


def size_or_whole_number(value: Any) -> int | None:
    """The same in graphs of torch, too, where what depends on sizes may stay open."""
    value = known_number(value)
    is_open = type(value).__module__ == "torch" and type(value).__name__ == "SymInt"
    return value if is_open else whole_number(value)


def of_64_bits(name: str, value: Any, signed: bool = False) -> int:
    """A whole number as an int that 64 bits hold, with a sign or, unless `signed`, without; raises
    ArgumentError beyond those."""
    if not -_BEYOND // 2 <= value < (_BEYOND // 2 if signed else _BEYOND):
        end = "; with a sign they end at 2**63 - 1" if value > 0 and signed else ""
        raise ArgumentError(f"{name} is beyond all whole numbers of 64 bits; pass a float{end}")
    return int(value)


def real_number(name: str, value: Any) -> float:
    """A real number as a float; raises ArgumentError where there is none."""
    try:
        return float(value)
    except OverflowError as error:
        raise ArgumentError(f"{name} is beyond all numbers of float64") from error


def truth(value: Any) -> bool | None:
    """As a bool, one of NumPy too; None for what is no bool, as None, 1 and "yes" are none."""
    if value is True or value is False:
        return bool(value)
    of_numpy = type(value).__module__ == "numpy" and type(value).__name__ in ("bool", "bool_")
    return bool(value) if of_numpy else None


def whether(name: str, value: Any) -> bool:
    """What :func:`truth` gives; raises ArgumentError where that is None."""
    found = truth(value)
    if found is None:
        raise ArgumentError(f"{name} is {value!r}; expected True or False")
    return found


def are_names(given: Any) -> bool:
    """Whether it is a tuple of names, or a list: a name alone is none, though it is a sequence."""
    return isinstance(given, (tuple, list)) and all(isinstance(name, str) for name in given)

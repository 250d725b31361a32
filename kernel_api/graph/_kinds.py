"""Kinds of values that attributes of nodes have, as they are kept and serialised."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

#: One more than torch counts.
_LIMIT = 2**63


class Kind(NamedTuple):
    """Values of one kind.

    Attributes:
        what: In words, behind "expected".
        holds: Whether a value is of it.
    """

    what: str
    holds: Callable[[Any], bool]


def _is_whole(value: Any) -> bool:
    return type(value) is int and -_LIMIT <= value < _LIMIT


def whole(least: int, most: int = _LIMIT - 1) -> Kind:
    """Whole numbers from one on, as far as torch counts, or up to another."""
    what = f"a whole number of {least}" + (" or more" if most == _LIMIT - 1 else f" to {most}")
    return Kind(what, lambda value: _is_whole(value) and least <= value <= most)


def one_of(names: Iterable[str]) -> Kind:
    known = tuple(names)
    return Kind(f"one of {known}", lambda value: isinstance(value, str) and value in known)


def optional(kind: Kind) -> Kind:
    return Kind(f"{kind.what}, or None", lambda value: value is None or kind.holds(value))


def either(kind: Kind, other: Kind) -> Kind:
    return Kind(f"{kind.what}, or {other.what}", lambda v: kind.holds(v) or other.holds(v))


def list_of(kind: Kind, count: int | None = None) -> Kind:
    """Lists, of any length without a ``count``."""

    def holds(value: Any) -> bool:
        fits = isinstance(value, list) and count in (None, len(value))
        return fits and all(map(kind.holds, value))

    return Kind(f"a list, each {kind.what}" + (f"; {count} of them" if count else ""), holds)


def record(**kinds: Kind) -> Kind:
    """Dicts of these keys."""

    def holds(value: Any) -> bool:
        fits = isinstance(value, dict) and set(value) == set(kinds)
        return fits and all(kind.holds(value[key]) for key, kind in kinds.items())

    shown = ", ".join(f"{key}: {kind.what}" for key, kind in kinds.items())
    return Kind(f"a dict of {shown}", holds)


WHOLE = Kind("a whole number of 64 bits", _is_whole)
NUMBER = Kind("a number", lambda value: isinstance(value, float) or _is_whole(value))
TRUTH = Kind("True or False", lambda value: isinstance(value, bool))

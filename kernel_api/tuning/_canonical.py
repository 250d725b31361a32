"""Values as JSON text that is the same in every process, and what is read back from it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from kernel_api.errors import ArgumentError

#: Hexadecimal digits of a hash; what has one is compared in full as well.
DIGITS = 20


def canonical(value: Any) -> str:
    """JSON without spaces, keys in order; raises ValueError for numbers that are not finite."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def digest(text: str) -> str:
    """A short hash of a text."""
    return hashlib.sha256(text.encode()).hexdigest()[:DIGITS]


def parsed(data: bytes | str) -> Any:
    """The values of a JSON text; raises ArgumentError for what is none."""
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:  # text that is no UTF-8 is a ValueError as well
        raise ArgumentError(f"this is not JSON: {error}") from error


def taken(data: Mapping[str, Any], name: str, *kinds: type) -> Any:
    """A field of what was read; raises ArgumentError if it is not there, or of no such type."""
    if name not in data:
        raise ArgumentError(f"there is no {name}")
    value = data[name]
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        expected = " or ".join("null" if kind is type(None) else kind.__name__ for kind in kinds)
        raise ArgumentError(f"{name} is {value!r}; expected {expected}")
    return value


def as_object(value: Any, what: str) -> Mapping[str, Any]:
    """Raises ArgumentError for what is no JSON object."""
    if not isinstance(value, dict):
        raise ArgumentError(f"{what} is a {type(value).__name__}; expected an object")
    return value


def as_texts(value: Any, what: str) -> dict[str, str]:
    """Raises ArgumentError for what is no JSON object of texts."""
    found = as_object(value, what)
    if not all(isinstance(one, str) for one in found.values()):
        raise ArgumentError(f"{what} has a value that is no text: {dict(found)!r}")
    return dict(found)

"""Named tuples of outputs, which can be pickled and copied though no module has them by name."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Iterable
from typing import Any

_types: dict[tuple[str, tuple[str, ...]], Any] = {}


def results_type(function: str, fields: tuple[str, ...]) -> Any:
    """That of a function's outputs; the same for the same ones."""
    found = _types.get((function, fields))
    if found is None:
        title = "".join(word.capitalize() for word in function.split("_"))
        found = _types.setdefault((function, fields), namedtuple(title, fields))
        found.__reduce__ = lambda results: (_of, (function, fields, tuple(results)))
    return found


def _of(function: str, fields: tuple[str, ...], values: Iterable[Any]) -> Any:
    return results_type(function, fields)(*values)

"""Named tuples of outputs, which can be pickled and copied though no module has them by name."""

from __future__ import annotations

import itertools
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


_serialized: set[Any] = set()


def serialize(kind: Any, name: str) -> None:
    """Let torch.export.save take programs that return such a named tuple."""
    from torch.utils import _pytree

    if kind not in _serialized:
        _serialized.add(kind)
        _pytree._register_namedtuple(kind, serialized_type_name=name)


def serialize_all() -> None:
    """The same of all that are made."""
    for (function, fields), found in list(_types.items()):
        serialize(found, f"kernel_api.{function}({', '.join(fields)})")


class ResultsTypes:
    """Those of a function's first output with others, made when they are first asked for."""

    def __init__(self, function: str, first: str) -> None:
        self._function, self._first = function, first
        self._made: dict[tuple[str, ...], Any] = {}

    def of(self, others: tuple[str, ...]) -> Any:
        if others not in self._made:
            self._made[others] = results_type(self._function, (self._first, *others))
        return self._made[others]

    def make_all(self, others: tuple[str, ...]) -> None:
        """For a tracer, which can read them, but make none."""
        for count in range(1, len(others) + 1):
            for some in itertools.combinations(others, count):
                self.of(some)


def _of(function: str, fields: tuple[str, ...], values: Iterable[Any]) -> Any:
    return results_type(function, fields)(*values)

"""Options that a function passes on: written where they are read, told and checked where they are
given."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

_Function = TypeVar("_Function", bound=Callable[..., Any])


class Options:
    """What is passed on.

    Args:
        reader: The function or class that has them as parameters of names.
        fixed: Those of them that are set by who passes on the others.
        instead: What is written for names that other libraries have.
    """

    def __init__(
        self,
        reader: Callable[..., Any],
        fixed: Iterable[str] = (),
        instead: Mapping[str, str] | None = None,
    ) -> None:
        taken = inspect.signature(reader).parameters.values()
        named = [one for one in taken if one.kind is one.KEYWORD_ONLY]
        self._parameters = {one.name: one for one in named if one.name not in (*fixed,)}
        self._instead = dict(instead or {})

    def told(self, function: _Function) -> _Function:
        """The function, whose signature has them in place of ``**options``."""
        signature = inspect.signature(function)
        own = [one for one in signature.parameters.values() if one.kind is not one.VAR_KEYWORD]
        names = {one.name for one in own}
        passed_on = [one for name, one in self._parameters.items() if name not in names]
        told: Any = function
        told.__signature__ = signature.replace(parameters=[*own, *passed_on])
        return function

    def check(self, function: str, given: Iterable[str]) -> None:
        """Raise TypeError, as Python does for the function itself, for what is none of them."""
        for name in given:
            if name not in self._parameters:
                instead = f"; pass {self._instead[name]}" if name in self._instead else ""
                raise TypeError(
                    f"{function}() got an unexpected keyword argument {name!r}{instead}"
                )

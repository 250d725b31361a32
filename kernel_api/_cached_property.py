"""``cached_property`` without a lock, as that of :mod:`functools` is from Python 3.12 on.

Before, all instances of a class share one lock: threads wait for each other, and a forked child for
a thread that only its parent has.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar, overload

T = TypeVar("T")


class cached_property(Generic[T]):  # noqa: N801  (it stands for that of functools)
    """Computed when it is first asked for, by two threads at once maybe twice. What computes it may
    ask a base class for its own."""

    def __init__(self, compute: Callable[[Any], T]) -> None:
        self._compute, self.__doc__ = compute, compute.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    @overload
    def __get__(self, instance: None, owner: type) -> cached_property[T]: ...

    @overload
    def __get__(self, instance: object, owner: type) -> T: ...

    def __get__(self, instance: object, owner: type) -> Any:
        if instance is None:
            return self
        found = instance.__dict__[self._name] = self._compute(instance)
        return found

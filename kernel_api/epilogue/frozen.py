"""Whether a function that was traced would be traced to the same again.

What a function computes of traced values depends on its code and on what it finds outside of its
parameters: values that its closure holds, defaults, and names of its module. Where all of these are
numbers, strings, other such functions, or what this package and ``math`` define, they say together
what it will do; so a trace can be kept, and is found again by them. Of anything else, such as an
object with attributes or a list, it cannot be told, and the function is traced every time.
"""

from __future__ import annotations

import builtins
import dis
import functools
import math
import sys
from collections.abc import Callable, Hashable
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple, TypeVar

from kernel_api import _locks

_T = TypeVar("_T")

_OWN = __name__.partition(".")[0]
_CONSTANTS = (bool, int, float, str, type(None))
#: Those of Python that give the same for the same.
_BUILTINS = (
    abs, bool, divmod, enumerate, float, int, isinstance, len, list, max, min, pow, range, reversed,
    round, sorted, sum, tuple, zip,
)  # fmt: skip
#: Instructions that reach what is not looked at here: modules that are loaded, names that change.
_REACHING = frozenset(("IMPORT_NAME", "STORE_GLOBAL", "DELETE_GLOBAL", "LOAD_BUILD_CLASS"))
_CHANGING = frozenset(("STORE_DEREF", "DELETE_DEREF"))  # of a closure
_DEEPEST = 8  # of functions that call each other, and of modules in modules
_CODES_KEPT = 512
_FUNCTIONS_KEPT = 256
_TRACES_KEPT = 32  # of a function

_kept: dict[Hashable, dict[Any, Any]] = {}
_lock = _locks.lock()


def kept(fn: Any, look: Hashable, trace: Callable[[], _T]) -> _T:
    """What ``trace`` makes of a function, or has made of one that does the same.

    look: What a trace depends on beside the function.
    """
    key = frozen(fn)
    if key is None:
        return trace()
    with _lock:
        of_function = _kept.get(key)
        if of_function is not None and look in of_function:
            _kept[key] = _kept.pop(key)  # which was asked for longest ago is forgotten first
            found: _T = of_function[look]
            return found
    made = trace()
    if frozen(fn) != key:  # what it finds outside has changed meanwhile
        return made
    with _lock:
        of_function = _kept.pop(key, {})
        if len(of_function) >= _TRACES_KEPT:
            of_function = {}
        if len(_kept) >= _FUNCTIONS_KEPT:
            del _kept[next(iter(_kept))]
        of_function[look] = made
        _kept[key] = of_function
    return made


class _Reads(NamedTuple):
    """What code finds by name: of its module, of Python, or of what it has got so far.

    known: Whether it reaches nothing else.
    """

    known: bool
    names: tuple[str, ...]


def frozen(fn: Any) -> Hashable | None:
    """What tells functions apart that are traced to different graphs; None if nothing does."""
    try:
        return _Look().function(fn, _DEEPEST)
    except (_UnknownError, ValueError):  # an empty cell of a closure
        return None


class _UnknownError(Exception):
    """Something that may be another the next time, though it looks the same."""


class _Look:
    """At a function and all that it finds."""

    def __init__(self) -> None:
        self._seen: dict[int, Hashable] = {}

    def function(self, fn: Any, depth: int) -> Hashable:
        if type(fn) is not FunctionType or fn.__dict__ or not depth:
            raise _UnknownError
        found = self._seen.get(id(fn))
        if found is None:
            found = fn if _is_own(fn) else self._user_function(fn, depth)
            self._seen[id(fn)] = found
        return found

    def _user_function(self, fn: FunctionType, depth: int) -> Hashable:
        reads = _reads(fn.__code__)
        if not reads.known or _builtins_of(fn) is not builtins.__dict__:
            raise _UnknownError
        beside = (
            fn.__defaults__,
            *(fn.__kwdefaults__ or {}).items(),
            *(cell.cell_contents for cell in fn.__closure__ or ()),
        )
        outside, found = fn.__globals__, []
        for name in reads.names:
            if name in outside:
                found.append((name, self._value(outside[name], reads.names, depth)))
            elif hasattr(builtins, name):
                value = getattr(builtins, name)
                if not any(value is one for one in _BUILTINS):
                    raise _UnknownError
        code = fn.__code__
        values = tuple([self._value(one, reads.names, depth) for one in beside])
        return code, code.co_filename, values, tuple(found)

    def _value(self, value: Any, names: tuple[str, ...], depth: int) -> Hashable:
        """names: By which attributes may be read of it."""
        kind = type(value)
        if kind in _CONSTANTS:
            return kind, repr(value)  # which tells 1, 1.0 and True apart, and 0.0 and -0.0
        if kind is tuple:
            return kind, tuple([self._value(one, names, depth) for one in value])
        if kind is FunctionType:
            return self.function(value, depth - 1)
        if kind is ModuleType and _is_steady(value) and depth:
            return kind, id(value), self._attributes(value, names, depth - 1)
        raise _UnknownError

    def _attributes(self, module: ModuleType, names: tuple[str, ...], depth: int) -> Hashable:
        """Those that code may read: somebody may have put others in their place."""
        found: list[Hashable] = []
        for name in names:
            value = module.__dict__.get(name, _ABSENT)
            if type(value) is BuiltinFunctionType or (isinstance(value, type) and _is_own(value)):
                found.append((name, value))
            elif value is not _ABSENT:
                found.append((name, self._value(value, names, depth)))
        return tuple(found)


_ABSENT = object()


def _is_own(defined: Any) -> bool:
    """Whether this package defines a function, out of nothing else; or a class."""
    module = sys.modules.get(defined.__module__ or "")
    if module is None or not _is_steady(module):
        return False
    if isinstance(defined, type):
        return True
    return defined.__globals__ is module.__dict__ and defined.__closure__ is None


def _builtins_of(fn: Any) -> Any:
    return fn.__builtins__


def _is_steady(module: ModuleType) -> bool:
    return module is math or module.__name__.partition(".")[0] == _OWN


@functools.lru_cache(maxsize=_CODES_KEPT)
def _reads(code: CodeType) -> _Reads:
    names = dict.fromkeys(code.co_names)
    known = not any(name.startswith("__") for name in names)  # attributes of functions
    for one in dis.get_instructions(code):
        changes = one.opname in _CHANGING and one.argval in code.co_freevars
        if one.opname in _REACHING or changes:
            known = False
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            found = _reads(inner)
            names.update(dict.fromkeys(found.names))
            known = known and found.known
    return _Reads(known, tuple(names))

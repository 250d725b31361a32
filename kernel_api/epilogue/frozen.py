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
import threading
from collections.abc import Hashable, Iterator
from types import CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple

_OWN = __name__.partition(".")[0]
_CONSTANTS = (bool, int, float, str, type(None))
#: Those of Python that give the same for the same.
_BUILTINS = frozenset((
    abs, bool, divmod, enumerate, float, int, isinstance, len, list, max, min, pow, range, reversed,
    round, sorted, sum, tuple, zip,
))  # fmt: skip
#: Instructions that reach what is not looked at here: modules that are loaded, globals that change.
_REACHING = frozenset(("IMPORT_NAME", "STORE_GLOBAL", "DELETE_GLOBAL", "LOAD_BUILD_CLASS"))
_DEEPEST = 8  # of functions that call each other
_CODES_KEPT = 512


_FUNCTIONS_KEPT = 256
_TRACES_KEPT = 32  # of a function

_kept: dict[Hashable, dict[Any, Any]] = {}
_lock = threading.Lock()


def traces_of(fn: Any) -> dict[Any, Any]:
    """What is kept of a function and of all that do the same, by whatever else a trace depends on;
    new where that cannot be told. Asked for when a trace is needed: what the function finds outside
    may have changed since the last time."""
    key = frozen(fn)
    if key is None:
        return {}
    with _lock:
        found = _kept.pop(key, None)
        if found is None or len(found) >= _TRACES_KEPT:
            found = {}
        if len(_kept) >= _FUNCTIONS_KEPT:
            del _kept[next(iter(_kept))]  # which was asked for longest ago
        _kept[key] = found
    return found


class _Reads(NamedTuple):
    """What code finds by name: of its module or of Python, if it is there.

    known: Whether it reaches nothing else.
    """

    known: bool
    names: tuple[str, ...]


def frozen(fn: Any) -> Hashable | None:
    """What tells functions apart that are traced to different graphs; None if nothing does."""
    try:
        return _frozen(fn, _DEEPEST)
    except (_UnknownError, ValueError):  # an empty cell of a closure
        return None


class _UnknownError(Exception):
    """Something that may be another the next time, though it looks the same."""


def _frozen(fn: Any, depth: int) -> Hashable:
    if type(fn) is not FunctionType or not depth:
        raise _UnknownError
    if fn.__module__ is not None and fn.__module__.partition(".")[0] == _OWN:
        return fn
    reads = _reads(fn.__code__)
    if not reads.known:
        raise _UnknownError
    given = [*(fn.__defaults__ or ()), *(fn.__kwdefaults__ or {}).items()]
    cells = [cell.cell_contents for cell in fn.__closure__ or ()]
    found = [_value(one, depth) for one in (*_flat(given), *cells)]
    outside = fn.__globals__
    for name in reads.names:
        if name in outside:
            found.append(_value(outside[name], depth))
        elif getattr(builtins, name, abs) not in _BUILTINS:
            raise _UnknownError
    return fn.__code__, fn.__code__.co_filename, len(given), tuple(found)


def _flat(values: list[Any]) -> Iterator[Any]:
    for value in values:
        yield from value if type(value) is tuple else (value,)


def _value(value: Any, depth: int) -> Hashable:
    kind = type(value)
    if kind in _CONSTANTS:
        return kind, repr(value)  # which tells 1, 1.0 and True apart, and 0.0 and -0.0
    if kind is FunctionType:
        return _frozen(value, depth - 1)
    if kind is ModuleType and (value is math or value.__name__.partition(".")[0] == _OWN):
        return kind, id(value)
    raise _UnknownError


@functools.lru_cache(maxsize=_CODES_KEPT)
def _reads(code: CodeType) -> _Reads:
    names = dict.fromkeys(code.co_names)
    known = not any(one.opname in _REACHING for one in dis.get_instructions(code))
    for one in code.co_consts:
        if isinstance(one, CodeType):
            inner = _reads(one)
            names.update(dict.fromkeys(inner.names))
            known = known and inner.known
    return _Reads(known, tuple(names))

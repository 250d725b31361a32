"""Functions that make graphs: built when they return, and kept for arguments that are alike."""

from __future__ import annotations

import dataclasses
import functools
import threading
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from numbers import Number
from typing import TYPE_CHECKING, Any, NamedTuple

from kernel_api import _locks
from kernel_api.errors import ArgumentError, GraphError
from kernel_api.graph._enums import data_type, heur_mode
from kernel_api.graph._handle import Handle
from kernel_api.graph._options import listed
from kernel_api.graph._tensor import Tensor

if TYPE_CHECKING:
    from kernel_api.graph._graph import pygraph


@contextmanager
def graph(
    handle: Handle | None = None,
    name: str = "",
    io_data_type: Any = data_type.HALF,
    intermediate_data_type: Any = data_type.FLOAT,
    compute_data_type: Any = data_type.FLOAT,
) -> Iterator[tuple[pygraph, list[Any]]]:
    """A new graph, for the length of a block: ``with graph(handle) as (g, _)``.

    Yields the graph and an empty list, as cuDNN's frontend does. The graph is not built.
    """
    from kernel_api.graph._graph import pygraph

    yield (
        pygraph(
            name=name,
            io_data_type=io_data_type,
            intermediate_data_type=intermediate_data_type,
            compute_data_type=compute_data_type,
            handle=handle,
        ),
        [],
    )


def jit(
    function: Callable[..., Any] | None = None,
    *,
    heur_modes: heur_mode | Iterable[heur_mode] = heur_mode.A,
) -> Any:
    """Build the graph that a function returns.

    The function returns the graph and its tensors, in a list or tuple; the decorated one returns
    the graph, built, and their uids. A graph that is built already, as by ``graph_cache``, is not
    built again. Threads that get the same graph wait for the one that builds it.

    Args:
        heur_modes: One mode or several, in which plans are looked for in this order.

    Raises GraphError, when called, if the function returns something else.
    """
    one = isinstance(heur_modes, heur_mode | str)
    modes: list[Any] = [heur_modes] if one else listed("jit", "heur_modes", heur_modes, "modes")
    if function is None:
        return functools.partial(jit, heur_modes=modes)
    return _wrapped(function, functools.partial(_built, function, modes))


def _built(function: Callable[..., Any], modes: list[Any], given: Any, named: Any) -> Any:
    from kernel_api.graph._graph import pygraph

    made, tensors = _graph_and_tensors(function, function(*given, **named))
    if isinstance(made, pygraph):
        with made._lock:
            if made.selected is None:
                made.build(modes)
    return made, [one.get_uid() if isinstance(one, Tensor) else one for one in tensors]


class CacheInfo(NamedTuple):
    """Of a function decorated with ``graph_cache``, as of ``functools.lru_cache``."""

    hits: int
    misses: int
    maxsize: int
    currsize: int


def graph_cache(
    key_fn: Callable[..., Hashable] | None = None, maxsize: int = 256
) -> Callable[[Callable[..., Any]], Any]:
    """Keep what a function returns, for calls with the same key.

    Where ``maxsize`` results are kept, the oldest goes. Threads with the same key wait for the one
    that calls the function; if it raises, the next one calls it. The decorated function has
    ``cache_info()`` and ``cache_clear()``.

    Args:
        key_fn: Makes the key of the arguments. By default it is the shapes, strides, types and
            devices of tensors and which of them are one, whatever else of the arguments by its type
            and value, handles by identity. A key of one's own has to hold all that the graph
            depends on.

    Raises ArgumentError, when called, if an argument that is no tensor cannot be part of a key.
    """
    if callable(key_fn) or key_fn is None:
        return lambda function: _Cache(function, key_fn or default_key, maxsize).decorated
    raise ArgumentError(f"key_fn is a {type(key_fn).__name__}; expected a function or None")


_NOTHING = object()


class _Cache:
    """Results by key, the oldest first, and the locks of those that are being made."""

    def __init__(
        self, function: Callable[..., Any], key_of: Callable[..., Hashable], maxsize: int
    ) -> None:
        if maxsize < 1:
            raise ArgumentError(f"maxsize is {maxsize}; expected 1 or more")
        self._function, self._key_of, self._maxsize = function, key_of, maxsize
        self._kept: dict[Hashable, Any] = {}
        self._making: dict[Hashable, threading.RLock] = {}
        self._lock = _locks.lock()
        self._hits = self._misses = 0
        self.decorated: Any = _wrapped(function, self._get)
        self.decorated.cache_info = self._info
        self.decorated.cache_clear = self._clear

    def _get(self, given: Any, named: Any) -> Any:
        key = self._key_of(*given, **named)
        found = self._found(key)
        if found is not _NOTHING:
            return found
        with self._lock:
            making = self._making.setdefault(key, _locks.rlock())
        with making:
            found = self._found(key)
            if found is not _NOTHING:
                return found
            try:
                made = self._function(*given, **named)
                self._keep(key, made)
            finally:
                with self._lock:
                    self._making.pop(key, None)
        return made

    def _found(self, key: Hashable) -> Any:
        with self._lock:
            found = self._kept.get(key, _NOTHING)
            self._hits += found is not _NOTHING
        return found

    def _keep(self, key: Hashable, made: Any) -> None:
        with self._lock:
            self._misses += 1
            while len(self._kept) >= self._maxsize:
                del self._kept[next(iter(self._kept))]
            self._kept[key] = made

    def _info(self) -> CacheInfo:
        return CacheInfo(self._hits, self._misses, self._maxsize, len(self._kept))

    def _clear(self) -> None:
        with self._lock:
            self._kept.clear()
            self._hits = self._misses = 0


def default_key(*given: Any, **named: Any) -> Hashable:
    """All of the arguments, of tensors what graphs depend on: everything but their elements, and
    which of them are one object, which is one tensor of the graph.

    Raises ArgumentError for what has no hash.
    """
    places: dict[int, int] = {}
    return (
        tuple(_key_of(value, f"argument {i}", places) for i, value in enumerate(given)),
        tuple((name, _key_of(named[name], name, places)) for name in sorted(named)),
    )


def _key_of(value: Any, what: str, places: dict[int, int]) -> Hashable:
    """The part of a key that one value is.

    Args:
        places: Of tensors by id: how many others came before.
    """
    kind = type(value)
    if isinstance(value, (list, tuple)):
        return (kind, *(_key_of(one, f"{what}[{i}]", places) for i, one in enumerate(value)))
    if isinstance(value, Mapping):
        return (
            kind,
            *(
                (_key_of(key, f"a key of {what}", places), _key_of(one, f"{what}[{key!r}]", places))
                for key, one in value.items()
            ),
        )
    if isinstance(value, (set, frozenset)):
        return (kind, frozenset(_key_of(one, f"an element of {what}", places) for one in value))
    if hasattr(type(value), "__dlpack__"):
        from kernel_api.operands import Operand

        operand = Operand(value.detach() if hasattr(value, "detach") else value, what)
        place = places.setdefault(id(value), len(places))
        layout = operand.shape, operand.stride, operand.dtype.name
        return (Operand, place, *layout, str(operand.device))
    dataclass = getattr(kind, "__dataclass_params__", None)
    if dataclass is not None and dataclass.eq:  # compared by its fields
        names = [one.name for one in dataclasses.fields(kind) if one.compare]
        return (kind, *(_key_of(getattr(value, name), f"{what}.{name}", places) for name in names))
    try:
        hash(value)
    except TypeError:
        raise ArgumentError(
            f"{what} is a {type(value).__name__}, which cannot be part of a key; give "
            f"graph_cache a key_fn"
        ) from None
    if isinstance(value, Number):
        # 1, 1.0 and True are equal, 0.0 and -0.0 are, and graphs made of them are not; NaN is NaN.
        return (kind, repr(value), value if value == value else None)
    return (kind, value)


def _graph_and_tensors(function: Callable[..., Any], made: Any) -> tuple[Any, list[Any]]:
    """What a function that makes graphs has to return."""
    from kernel_api.graph._graph import pygraph
    from kernel_api.graph._wrapper import Graph

    if (
        not isinstance(made, (tuple, list))
        or len(made) != 2
        or not isinstance(made[0], (pygraph, Graph))
        or not isinstance(made[1], (tuple, list))
    ):
        raise GraphError(
            f"{getattr(function, '__name__', function)} returned {_shape_of(made)}; expected a "
            f"graph and a list of its tensors"
        )
    return made[0], list(made[1])


def _shape_of(made: Any) -> str:
    if isinstance(made, (tuple, list)):
        return f"({', '.join(type(one).__name__ for one in made)})"
    return f"a {type(made).__name__}"


def _wrapped(function: Callable[..., Any], call: Callable[[Any, Any], Any]) -> Any:
    @functools.wraps(function)
    def wrapper(*given: Any, **named: Any) -> Any:
        return call(given, named)

    return wrapper

"""Artifacts in memory: one per kernel, signature and target, compiled once even by many threads.
Those are forgotten first that were not used for the longest time; who holds one may go on using it.

Behind the memory stands the cache on disk (:mod:`kernel_api._disk_cache`). This module also knows
which compilation the current thread is in, so that helpers called from a kernel's
``compile`` (``cute_compile``) can take the arguments and the target from it.
"""

from __future__ import annotations

import contextvars
import itertools
import threading
import time
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any, NamedTuple

from kernel_api import _locks

if TYPE_CHECKING:
    from kernel_api.arguments import Arguments
    from kernel_api.artifact import CompiledArtifact
    from kernel_api.kernel import Kernel
    from kernel_api.targets import Target

_Key = tuple[Hashable, ...]


#: Before any kernel class was imported. A source that changed later may not be what runs here.
STARTED = time.time()


class Compilation(NamedTuple):
    """The compilation that runs in this context."""

    kernel: Any
    args: Any
    target: Target | None


_running: contextvars.ContextVar[Compilation | None] = contextvars.ContextVar(
    "kernel_api_compilation", default=None
)
#: Artifacts that are kept; a program needs far fewer, unless its functions hold ever new numbers.
_KEPT = 4096


class _Entry:
    """An artifact, and when it was used last."""

    __slots__ = ("artifact", "used")

    def __init__(self, artifact: CompiledArtifact) -> None:
        self.artifact, self.used = artifact, next(_clock)


_clock = itertools.count()
_artifacts: dict[_Key, _Entry] = {}
_flights: dict[_Key, threading.Lock] = {}
_lock = _locks.lock()
#: Changes whenever the artifacts are forgotten; launches that remember some read it each time.
_era = 0


def running() -> Compilation | None:
    """The compilation of this context, if one runs."""
    return _running.get()


def compiling(kernel: Kernel) -> bool:
    """Whether this context is inside a compilation of the kernel."""
    current = _running.get()
    return current is not None and current.kernel is kernel


def get(
    kernel: Kernel, signature: tuple[Hashable, ...], target: Target | None
) -> CompiledArtifact | None:
    return _used((kernel, signature, target))


def get_or_build(
    kernel: Kernel,
    args: Arguments,
    target: Target | None,
    build: Callable[[], CompiledArtifact],
) -> CompiledArtifact:
    """The artifact in memory or on disk; else ``build()``, by one thread while the others wait."""
    key = (kernel, args.signature, target)
    found = _used(key)
    if found is not None:
        return found
    with _lock:
        flight = _flights.setdefault(key, _locks.lock())
    with flight:
        found = _used(key)
        if found is not None:
            return found
        from kernel_api import _disk_cache

        token = _running.set(Compilation(kernel, args, target))
        try:
            return _kept(key, _disk_cache.artifact_for(kernel, args.signature, target, build))
        finally:
            _running.reset(token)
            with _lock:
                _flights.pop(key, None)


def put(
    kernel: Kernel, signature: tuple[Hashable, ...], artifact: CompiledArtifact
) -> CompiledArtifact:
    """Add an artifact that was made elsewhere; returns the one that is kept."""
    return _kept((kernel, signature, artifact.target), artifact)


def _used(key: _Key) -> CompiledArtifact | None:
    entry = _artifacts.get(key)
    if entry is None:
        return None
    entry.used = next(_clock)
    return entry.artifact


def _kept(key: _Key, artifact: CompiledArtifact) -> CompiledArtifact:
    """The one that is kept."""
    with _lock:
        if key not in _artifacts and len(_artifacts) >= _KEPT:
            oldest = sorted(_artifacts, key=lambda one: _artifacts[one].used)
            for one in oldest[: max(_KEPT // 4, 1)]:
                del _artifacts[one]
        return _artifacts.setdefault(key, _Entry(artifact)).artifact


def clear() -> None:
    """Forget every artifact."""
    global _era
    with _lock:
        _era += 1
        _artifacts.clear()
        _flights.clear()

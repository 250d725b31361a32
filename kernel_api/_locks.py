"""Locks of threads, and of processes.

Those of threads are free in a child which this process forks. A thread that holds one at that
moment is not in the child, which would wait for it for ever.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_made: weakref.WeakSet[Any] = weakref.WeakSet()


def lock() -> threading.Lock:
    """As ``threading.Lock()``."""
    made = threading.Lock()
    _made.add(made)
    return made


def rlock() -> threading.RLock:
    """As ``threading.RLock()``; whoever forks while holding it, holds it in the child as well."""
    made = threading.RLock()
    _made.add(made)
    return made


def _free_in_child() -> None:
    for one in list(_made):
        if not getattr(one, "_is_owned", bool)():
            one._at_fork_reinit()  # as the locks of Python's own modules


os.register_at_fork(after_in_child=_free_in_child)


@contextlib.contextmanager
def alone_at(path: Path) -> Iterator[None]:
    """One thread of one process at a time, of all that ask for the file or folder; all at once
    where the system cannot lock it. Raises OSError where nothing is there."""
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        with alone_with(file):
            yield
    finally:
        os.close(file)


@contextlib.contextmanager
def alone_with(file: int) -> Iterator[None]:
    """The same, of all that have opened the file themselves."""
    with contextlib.suppress(OSError):
        fcntl.flock(file, fcntl.LOCK_EX)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_UN)  # children that were forked meanwhile have it open

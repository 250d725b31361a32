"""How torch is set to multiply float32: what is set, and other precisions for the length of a call.

torch has two interfaces. The first is ``set_float32_matmul_precision`` for products, ``allow_tf32``
of cuDNN for convolutions; the second ``fp32_precision`` of its backends, which inherit it from one
another. The first raises where it is read after the second was written; the second has what both
have set.

Settings are those of the process. While a kernel of torch's runs that was asked for another
precision, readers outside of this module see that one.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from kernel_api import _locks
from kernel_api._cached_property import cached_property

_BACKENDS = ("cuda", "mkldnn")
_OF_THEIR_OWN = (("cuda", "conv"), ("cuda", "rnn"))  # others inherit by default
_EXACT = frozenset(("none", "ieee"))  # "none": nothing is set, and the default is exact


class _Matmuls:
    """The first interface to products.

    Attributes:
        sets: What it sets of the second beside the operation itself.
        tf32, exact: What is written for them.
    """

    sets: tuple[tuple[str, str], ...] = ()
    tf32, exact = "high", "highest"

    def read(self) -> Any:
        """None where torch refuses to say, because the second interface was used."""
        with contextlib.suppress(RuntimeError):
            return sys.modules["torch"].get_float32_matmul_precision()

    def write(self, value: Any) -> None:
        sys.modules["torch"].set_float32_matmul_precision(value)


class _Cudnn:
    """That to convolutions, and with them to recurrent networks."""

    sets: tuple[tuple[str, str], ...] = (("cuda", "rnn"),)
    tf32, exact = True, False

    def read(self) -> Any:
        with contextlib.suppress(RuntimeError):
            return sys.modules["torch"]._C._get_cudnn_allow_tf32()

    def write(self, value: Any) -> None:
        sys.modules["torch"]._C._set_cudnn_allow_tf32(value)


def _get(backend: str, operation: str) -> str:
    found: str = sys.modules["torch"]._C._get_fp32_precision_getter(backend, operation)
    return found


def _set(backend: str, operation: str, precision: str) -> None:
    sys.modules["torch"]._C._set_fp32_precision_setter(backend, operation, precision)


def _fits(backend: str, setting: str, tf32: bool) -> bool:
    """Whether a backend multiplies no less precisely, and CUDA as tf32 where that is asked for."""
    if not tf32:
        return setting in _EXACT
    return setting == "tf32" if backend == "cuda" else setting != "bf16"


class _Operation:
    """An operation's settings, of CUDA and of the CPU."""

    def __init__(self, name: str, first: _Matmuls | _Cudnn) -> None:
        self.name, self._first = name, first
        self.exact, self.as_tf32 = _Calls(self, False), _Calls(self, True)
        #: Odd while another precision than the user's is set.
        self._changes = 0
        self._users = "none"
        self._entrance, self._lock = _locks.lock(), _locks.lock()
        self._idle = threading.Condition(self._lock)
        self._of_calls: bool | None = None
        self._calls = 0
        self._undo: Callable[[], None] | None = None
        self._nested: dict[int, int] = {}  # calls within one another, of each thread

    def setting(self) -> str:
        """What the user has set for CUDA: "tf32", or what means that products are exact."""
        changes, found = self._changes, self._readers[0]()
        if changes & 1 or changes != self._changes:
            with self._lock:
                return self._users if self._changes & 1 else self._readers[0]()
        return found

    @cached_property
    def _readers(self) -> list[Callable[[], str]]:
        """One per backend."""
        read: Any = sys.modules["torch"]._C._get_fp32_precision_getter  # what launches call
        return [functools.partial(read, backend, self.name) for backend in _BACKENDS]

    def enter(self, tf32: bool) -> None:
        """Wait until the setting is this one. What this thread has entered before holds: nobody
        asks for more than the call that it is part of."""
        thread = threading.get_ident()
        if thread in self._nested:
            self._nested[thread] += 1
            return
        # Who waits keeps those out that come later, so that nobody waits for ever.
        with self._entrance, self._lock:
            while self._calls and self._of_calls is not tf32:
                self._idle.wait()
            if not self._calls:
                self._of_calls, self._undo = tf32, self._changed(tf32)
            self._calls += 1
            self._nested[thread] = 1

    def leave(self) -> None:
        thread = threading.get_ident()
        self._nested[thread] -= 1
        if self._nested[thread]:
            return
        with self._lock:
            del self._nested[thread]
            self._calls -= 1
            if not self._calls:
                if self._undo is not None:
                    self._undo()
                self._idle.notify_all()

    def forget_in_child(self) -> None:
        """Of threads that the process which was forked had, only this one is left."""
        self._idle = threading.Condition(self._lock)
        thread = threading.get_ident()
        self._nested = {one: n for one, n in self._nested.items() if one == thread}
        if self._calls and not self._nested and self._undo is not None:
            self._undo()
        self._calls = len(self._nested)

    def _changed(self, tf32: bool) -> Callable[[], None] | None:
        """Make the setting this one; returns what undoes it, None where it is."""
        values = [read() for read in self._readers]
        if all(map(_fits, _BACKENDS, values, (tf32, tf32))):
            return None
        before = self._first.read()
        named = [*((backend, self.name) for backend in _BACKENDS), *self._first.sets]
        settings = {one: _get(*one) for one in named}
        self._users = values[0]
        self._changes += 1
        if before is not None:
            self._first.write(self._first.tf32 if tf32 else self._first.exact)
        for backend, read in zip(_BACKENDS, self._readers, strict=True):
            if not _fits(backend, read(), tf32):
                _set(backend, self.name, "tf32" if tf32 else "ieee")

        def undo() -> None:
            if before is not None:
                self._first.write(before)
            for one, value in settings.items():
                if one not in _OF_THEIR_OWN:
                    _set(*one, "none")
                if _get(*one) != value:  # else it may have been inherited
                    _set(*one, value)
            self._changes += 1

        return undo


class _Calls:
    """Within it, an operation multiplies float32 as tf32, or exactly.

    Calls that ask for the same share one change; others wait until it is undone.
    """

    def __init__(self, operation: _Operation, tf32: bool) -> None:
        self._operation, self._tf32 = operation, tf32

    def __enter__(self) -> None:
        self._operation.enter(self._tf32)

    def __exit__(self, *_: object) -> None:
        self._operation.leave()


_MATMUL = _Operation("matmul", _Matmuls())
_CONV = _Operation("conv", _Cudnn())
_AS_SET: AbstractContextManager[None] = contextlib.nullcontext()

for _one in (_MATMUL, _CONV):
    os.register_at_fork(after_in_child=_one.forget_in_child)

setting = _MATMUL.setting


def products(precision: str | None) -> AbstractContextManager[None]:
    """Within it, torch multiplies float32 at least as precisely as asked; None: as set.

    Waits for calls of other threads that asked for another precision.
    """
    if precision is None:
        return _AS_SET
    return _MATMUL.as_tf32 if precision == "tf32" else _MATMUL.exact


def exact_convolutions() -> AbstractContextManager[None]:
    """Within it, torch's convolutions do not round float32."""
    return _CONV.exact

"""The problems that a program runs, appended to the file that ``KERNEL_API_RECORD`` names.

Each stands there once, as a line of JSON that :func:`kernel_api._description.rebuilt` reads. Before
a process appends one, it looks at what others have, one process at a time.
Recording never raises: a problem that cannot be kept is a line in the log, a file that cannot be
written is a CacheWarning, once.
"""

from __future__ import annotations

import json
import os
import warnings
from typing import TYPE_CHECKING, Any

from kernel_api import _locks, _log
from kernel_api.errors import CacheWarning

if TYPE_CHECKING:
    from kernel_api.arguments import Arguments

logger = _log.logger(__name__)

VARIABLE = "KERNEL_API_RECORD"

#: Arguments that were looked at; when there are so many, they are looked at again.
_KEPT = 4096


def record(args: Arguments) -> None:
    """Keep a problem that is about to run; nothing if nobody asked for that."""
    if _recorder is not None:
        _recorder.record(args)


class _Recorder:
    """Appends to a file what is not there yet."""

    def __init__(self, path: str) -> None:
        self._path = os.path.abspath(path)  # a program may change its folder
        self._known: set[str] = set()
        self._end = 0  # of what was looked at in the file
        self._seen: set[Any] = set()
        self._lock = _locks.lock()

    def record(self, args: Arguments) -> None:
        try:
            key = type(args), args.key
            if key not in self._seen:
                with self._lock:
                    self._add(key, args)
        except OSError as error:
            _stop(f"{VARIABLE}: {self._path} cannot be written, nothing more is recorded: {error}")
        except Exception as error:  # the program that runs comes first
            logger.warning("%r is not recorded in %s: %s", args, self._path, error)

    def _add(self, key: Any, args: Arguments) -> None:
        from kernel_api._description import described
        from kernel_api.tuning import Problem

        if len(self._seen) >= _KEPT:
            self._seen.clear()
        self._seen.add(key)  # also if it cannot be kept: that is said once
        digest = Problem.of(args).digest
        if digest in self._known:
            return
        self._known.add(digest)
        line = json.dumps({"problem": digest, **described(args)}, allow_nan=False)
        self._append(digest, f"{line}\n".encode())

    def _append(self, digest: str, line: bytes) -> None:
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        file = os.open(self._path, flags, 0o666)
        try:
            with _locks.alone_with(file):
                others = self._added(file)
                if digest not in others:
                    _write(file, line)
        finally:
            os.close(file)
        self._known |= others

    def _added(self, file: int) -> set[str]:
        """The problems that have come to the file since the last time."""
        text = self._rest()
        self._end += len(text)
        if text and not text.endswith(b"\n"):
            _write(file, b"\n")  # a writer was killed; what follows is a line of its own
        return set(filter(None, map(_digest, text.splitlines())))

    def _rest(self) -> bytes:
        try:
            if not os.path.isfile(self._path):
                return b""
            with open(self._path, "rb") as file:
                file.seek(self._end)
                return file.read()
        except OSError as error:
            logger.warning("%s cannot be read: %s", self._path, error)
            return b""


class _FirstUse:
    """Stands for the recorder until something runs: the variable may be set until then."""

    def record(self, args: Arguments) -> None:
        path = os.environ.get(VARIABLE)
        try:
            self._give_way(path)
        except OSError as error:  # the folder that a relative path is in
            _stop(f"{VARIABLE}: {path} cannot be found, nothing is recorded: {error}")
        record(args)

    def _give_way(self, path: str | None) -> None:
        global _recorder
        with _lock:
            if _recorder is self:
                _recorder = _Recorder(path) if path else None


_recorder: _FirstUse | _Recorder | None = _FirstUse()
_lock = _locks.lock()


def _stop(why: str) -> None:
    """Record nothing more, and say so; where warnings are errors, in the log."""
    global _recorder
    with _lock:
        is_first, _recorder = _recorder is not None, None
    if is_first:
        try:
            warnings.warn(why, CacheWarning, stacklevel=4)
        except CacheWarning:
            logger.warning(why)


def _digest(line: bytes) -> str | None:
    """Of the problem in a line; None for whatever else is there."""
    try:
        return str(json.loads(line)["problem"])
    except (ValueError, LookupError, TypeError, RecursionError):
        return None


def _write(file: int, data: bytes) -> None:
    """All of it, or OSError."""
    written = os.write(file, data)
    if written != len(data):
        raise OSError(f"only {written} of {len(data)} bytes could be written")

"""Candidates of one problem, run in a process of their own that may die of them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from typing import Any

from kernel_api import _fork_server, _locks, _log
from kernel_api._recording import VARIABLE as RECORD
from kernel_api.errors import BenchError
from kernel_api.kernel import Kernel
from kernel_api.tuning._measurement import Status
from kernel_api.tuning._policy import Policy
from kernel_api.tuning._worker import Outcome

logger = _log.logger(__name__)

#: What workers have imported when they start: neither a compiler, nor what looks for a GPU.
_IMPORTED = ("torch", "kernel_api.verification", "kernel_api.tuning._worker")

#: Workers that are lost before they have shown anything, in a row, until it is an error.
_STARTS = 3

#: Data and reference may take so many times as long as a candidate may, and a process to start.
_OPEN_TIMES, _START_SECONDS = 6.0, 60.0


class HaltedError(Exception):
    """Another thread has ended the measurement."""


class Halt:
    """Ends what other threads measure."""

    def __init__(self) -> None:
        self._lock = _locks.lock()
        self._is_set = False
        self._children: set[_fork_server.Child] = set()

    def set(self) -> None:
        """Whoever measures, or waits to, raises HaltedError soon; its process dies."""
        with self._lock:
            self._is_set = True
            children = list(self._children)
        for child in children:
            child.kill_soon()

    def check(self) -> None:
        """Raises HaltedError if it is set."""
        if self._is_set:
            raise HaltedError("the measurement was ended by another thread")

    def watch(self, child: _fork_server.Child) -> None:
        with self._lock:
            self.check()
            self._children.add(child)

    def leave(self, child: _fork_server.Child) -> None:
        with self._lock:
            self._children.discard(child)


class Bench:
    """Runs candidates of one problem on one device, whatever they do.

    Args:
        description: The problem, as :func:`kernel_api._description.described` gives it.
        device: ``"cpu"``, or ``"cuda:0"`` and so on, as this process counts.
        timeout_s: No step of a candidate takes longer.
        environment: Variables that the worker has beside those of this process.
        halt: By which another thread may end it.
        verify: Whether a candidate is right if it computes what the reference does, else if it
            runs.

    A worker that died, or that a candidate made useless, is replaced when it is asked again, and
    told anew what it has to know. Of one that somebody else killed, what it was at is asked again.
    """

    def __init__(
        self,
        description: dict[str, Any],
        device: str,
        policy: Policy,
        timeout_s: float,
        environment: dict[str, str],
        halt: Halt | None = None,
        *,
        verify: bool = True,
    ) -> None:
        kind, _, index = device.partition(":")
        visible = "" if kind == "cpu" else _visible(int(index or 0))
        self._seat = {**os.environ, **environment, "CUDA_VISIBLE_DEVICES": visible}
        self._seat.pop(RECORD, None)  # what is measured is not what a program asks for
        self._opening = {
            "do": "open",
            "arguments": description,
            "device": kind,
            "policy": policy.to_dict(),
            "verify": verify,
        }
        self._timeout_s, self._rest = timeout_s, policy.rest
        self._known: dict[int, Kernel] = {}
        self._broken: dict[int, Outcome] = {}  # were right once, and not again
        self._killed: set[int] = set()  # when they were checked anew, once
        self._halt = halt or Halt()
        self._child: _fork_server.Child | None = None

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, *exception: Any) -> None:
        """The worker stays, for the next problem, if all went well."""
        child = self._left()
        if child is None:
            return
        if exception[0] is None:
            with contextlib.suppress(EOFError, OSError, TimeoutError):
                child.send({"do": "close"})
                child.receive(self._timeout_s)
                _workers.give_back(self._seat, child)
                return
        child.kill()

    def open(self) -> None:
        """Start the worker and have it make the data, so that it is there when it is asked.

        Raises BenchError.
        """
        self._opened()

    def check(self, index: int, kernel: Kernel) -> Outcome:
        """Whether a candidate computes what it should; it is known by the index from then on.

        Raises BenchError.
        """
        self._broken.pop(index, None)
        found = self._asked(_check(index, kernel), self._timeout_s)
        if found.status is Status.PASSED:
            self._known[index] = kernel
        return found

    def time(
        self,
        indices: Sequence[int],
        rounds: int,
        *,
        warm_s: float = 0.0,
        least_s: float = 0.0,
        expected_s: float = 0.0,
    ) -> Outcome:
        """Time candidates in turn.

        Args:
            warm_s: Before, they run so long without being timed.
            least_s: They are timed at least so long, up to five times as many rounds.
            expected_s: How long all of it should take, without rests; more than three times that,
                and the timeout of a candidate, is too long.

        Raises BenchError.
        """
        expected_s *= 1 + self._rest
        limit = self._timeout_s + warm_s + least_s + 3 * expected_s
        message = {"do": "time", "indices": list(indices), "rounds": rounds}
        return self._asked({**message, "warm_s": warm_s, "least_s": least_s}, limit)

    def forget(self, indices: Sequence[int]) -> None:
        """What is known of candidates that are timed no more."""
        for index in indices:
            self._known.pop(index, None)
            self._broken.pop(index, None)
        if self._child is not None:
            self._asked({"do": "forget", "indices": list(indices)}, self._timeout_s)

    def restart(self) -> None:
        """Go on in another process."""
        child = self._left()
        if child is not None:
            child.kill()

    def _left(self) -> _fork_server.Child | None:
        """The worker, which is this one's no more."""
        child, self._child = self._child, None
        if child is not None:
            self._halt.leave(child)
        return child

    def _asked(self, message: dict[str, Any], timeout_s: float) -> Outcome:
        """What a worker answers, or what became of it."""
        for _ in range(2):  # if it is killed again, that may well be the candidate's doing
            child = self._opened()
            for index in message.get("indices", ()):
                if index in self._broken:
                    return self._broken[index]
            found = self._answer(child, message, timeout_s)
            if found is not None:
                return found
        return _death_of(child)

    def _answer(
        self, child: _fork_server.Child, message: dict[str, Any], timeout_s: float
    ) -> Outcome | None:
        """None if somebody killed the worker."""
        try:
            child.send(message)
            found = _outcome(child.receive(timeout_s))
        except TimeoutError:
            self.restart()
            return Outcome(Status.TIMEOUT, f"it took more than {timeout_s:g} s", is_over=True)
        except (EOFError, OSError):
            self._left()
            self._halt.check()
            if not child.was_killed():
                return _death_of(child)
            logger.warning("the process that measures died %s", child.cause_of_death())
            return None
        if found.is_over:
            self.restart()
        return found

    def _opened(self) -> _fork_server.Child:
        """A worker that knows the problem and its candidates."""
        starts = 0
        while self._child is None:
            starts += 1
            child = self._child = _workers.take(self._seat)
            try:
                self._halt.watch(child)
                self._open(child)
                starts = 0
                self._repeat_checks(child)
            except BaseException as error:
                self._left()
                child.kill()
                if not isinstance(error, (EOFError, OSError)):
                    raise
                self._halt.check()
                if starts == _STARTS:
                    cause = child.cause_of_death()
                    text = f"the process that measures died ({cause}) before any candidate"
                    raise BenchError(text) from None
        return self._child

    def _open(self, child: _fork_server.Child) -> None:
        """Raises BenchError; EOFError or OSError if the worker is dead."""
        try:
            child.send(self._opening)
            found = _outcome(child.receive(_START_SECONDS + _OPEN_TIMES * self._timeout_s))
        except TimeoutError:
            raise BenchError("making the data and the reference takes too long") from None
        if found.status is not Status.PASSED:
            raise BenchError(f"the data or the reference cannot be made: {found.message}")

    def _repeat_checks(self, child: _fork_server.Child) -> None:
        """Tell a new worker what the last one knew. One that is not right again, or takes the
        worker with it, is broken, and known no more."""
        for index, kernel in list(self._known.items()):
            found = self._answer(child, _check(index, kernel), self._timeout_s)
            if found is None and index not in self._killed:
                self._killed.add(index)
                return
            found = found or _death_of(child)
            if found.status is not Status.PASSED:
                logger.warning("%s passed once, then not: %s", kernel, found.message)
                self._broken[index] = found
                del self._known[index]
            if found.is_over:
                return


def _check(index: int, kernel: Kernel) -> dict[str, Any]:
    return {"do": "check", "index": index, "kernel": kernel.metadata.to_dict()}


def _death_of(child: _fork_server.Child) -> Outcome:
    cause = f"its process died ({child.cause_of_death()})"
    return Outcome(Status.RUNTIME_ERROR, cause, is_over=True)


def _outcome(answer: dict[str, Any]) -> Outcome:
    mhz: Any = tuple(answer.pop("mhz"))
    return Outcome(status=Status(answer.pop("status")), mhz=mhz, **answer)


def _visible(index: int) -> str:
    """The name that the driver knows a device of this process by."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return named.split(",")[index].strip() if named is not None else str(index)


class _Workers:
    """Workers that wait for the next problem: one for each environment."""

    def __init__(self) -> None:
        self._lock = _locks.lock()
        self._idle: dict[tuple[tuple[str, str], ...], _fork_server.Child] = {}

    def take(self, environment: dict[str, str]) -> _fork_server.Child:
        with self._lock:
            child = self._idle.pop(_key(environment), None)
        if child is not None and child.is_alive():
            return child
        logger.info("a process to measure in is started")
        return _fork_server.start(_IMPORTED, "kernel_api.tuning._worker:work", environment)

    def give_back(self, environment: dict[str, str], child: _fork_server.Child) -> None:
        with self._lock:
            before = self._idle.pop(_key(environment), None)
            self._idle[_key(environment)] = child
        if before is not None:
            before.close()

    def close(self) -> None:
        """Let all that wait end."""
        with self._lock:
            children = list(self._idle.values())
            self._idle.clear()
        for child in children:
            child.close()


def _key(environment: dict[str, str]) -> tuple[tuple[str, str], ...]:
    return tuple(sorted(environment.items()))


_workers = _Workers()


def _forget_in_child() -> None:
    """The workers of the process that was forked are not this one's."""
    global _workers
    _workers = _Workers()


os.register_at_fork(after_in_child=_forget_in_child)

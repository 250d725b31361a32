"""Candidates of one problem, run in a process of their own that may die of them."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Sequence
from typing import Any

from kernel_api import _fork_server, _log
from kernel_api._recording import VARIABLE as RECORD
from kernel_api.errors import KernelApiError
from kernel_api.kernel import Kernel
from kernel_api.tuning._measurement import Status
from kernel_api.tuning._policy import Policy
from kernel_api.tuning._worker import Outcome

logger = _log.logger(__name__)

#: What workers have imported when they start: neither a compiler, nor what looks for a GPU.
_IMPORTED = ("torch", "kernel_api.verification", "kernel_api.tuning._worker")

#: Data and reference may take so many times as long as a candidate may, and a process to start.
_OPEN_TIMES, _START_SECONDS = 6.0, 60.0


class BenchError(KernelApiError):
    """Nothing can be measured: the data or the reference cannot be made."""


class Bench:
    """Runs candidates of one problem on one device, whatever they do.

    Args:
        description: The problem, as :func:`kernel_api._description.described` gives it.
        device: ``"cpu"``, or ``"cuda:0"`` and so on, as this process counts.
        timeout_s: No step of a candidate takes longer.
        environment: Variables that the worker has beside those of this process.

    A worker that died, or that a candidate made useless, is replaced when it is asked again, and
    told anew what it has to know.
    """

    def __init__(
        self,
        description: dict[str, Any],
        device: str,
        policy: Policy,
        timeout_s: float,
        environment: dict[str, str],
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
        }
        self._timeout_s = timeout_s
        self._known: dict[int, Kernel] = {}
        self._child: _fork_server.Child | None = None

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, *exception: Any) -> None:
        """The worker stays, for the next problem, if all went well."""
        child, self._child = self._child, None
        if child is None:
            return
        if exception[0] is None:
            with contextlib.suppress(EOFError, OSError, TimeoutError):
                child.send({"do": "close"})
                child.receive(self._timeout_s)
                _workers.give_back(self._seat, child)
                return
        child.kill()

    def check(self, index: int, kernel: Kernel) -> Outcome:
        """Whether a candidate computes what it should; it is known by the index from then on.

        Raises BenchError.
        """
        message = {"do": "check", "index": index, "kernel": kernel.metadata.to_dict()}
        found = self._asked(message, self._timeout_s)
        if found.status is Status.PASSED:
            self._known[index] = kernel
        return found

    def time(self, indices: Sequence[int], rounds: int, expected_s: float = 0.0) -> Outcome:
        """Time candidates in turn.

        Args:
            expected_s: How long all of it should take; more than three times that, and the
                timeout of a candidate, is too long.

        Raises BenchError.
        """
        limit = self._timeout_s + 3 * expected_s
        return self._asked({"do": "time", "indices": list(indices), "rounds": rounds}, limit)

    def forget(self, indices: Sequence[int]) -> None:
        """What is known of candidates that are timed no more."""
        for index in indices:
            self._known.pop(index, None)
        if self._child is not None:
            self._asked({"do": "forget", "indices": list(indices)}, self._timeout_s)

    def restart(self) -> None:
        """Go on in another process."""
        if self._child is not None:
            self._child.kill()
            self._child = None

    def _asked(self, message: dict[str, Any], timeout_s: float) -> Outcome:
        child = self._opened()
        try:
            child.send(message)
            found = _outcome(child.receive(timeout_s))
        except TimeoutError:
            self.restart()
            return Outcome(Status.TIMEOUT, f"it took more than {timeout_s:g} s", is_over=True)
        except (EOFError, OSError):
            self._child = None
            cause = f"its process died ({child.cause_of_death()})"
            return Outcome(Status.RUNTIME_ERROR, cause, is_over=True)
        if found.is_over:
            self.restart()
        return found

    def _opened(self) -> _fork_server.Child:
        """A worker that knows the problem and its candidates."""
        if self._child is not None:
            return self._child
        child = _workers.take(self._seat)
        try:
            child.send(self._opening)
            found = _outcome(child.receive(_START_SECONDS + _OPEN_TIMES * self._timeout_s))
            if found.status is not Status.PASSED:
                raise BenchError(f"the data or the reference cannot be made: {found.message}")
            for index, kernel in self._known.items():
                metadata = kernel.metadata.to_dict()
                child.send({"do": "check", "index": index, "kernel": metadata})
                found = _outcome(child.receive(self._timeout_s))
                if found.status is not Status.PASSED:
                    raise BenchError(f"{kernel} passed once, then not: {found.message}")
        except BenchError:
            child.kill()
            raise
        except TimeoutError:
            child.kill()
            raise BenchError("making the data and the reference takes too long") from None
        except (EOFError, OSError):
            raise BenchError(
                f"the process that measures died ({child.cause_of_death()}) before any candidate"
            ) from None
        self._child = child
        return child


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
        self._lock = threading.Lock()
        self._idle: dict[tuple[tuple[str, str], ...], _fork_server.Child] = {}

    def take(self, environment: dict[str, str]) -> _fork_server.Child:
        with self._lock:
            child = self._idle.pop(_key(environment), None)
        if child is not None and child.exit_code(timeout_s=0.0) is None:
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

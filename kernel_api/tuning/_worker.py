"""A process that runs the candidates of one problem: checks each, then times those that are right.

It is asked by a :class:`~kernel_api.tuning._bench.Bench`. What a candidate does to the process,
or to the GPU's context, it does to this one only.
"""

from __future__ import annotations

import functools
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from kernel_api._fork_server import answer, messages
from kernel_api.arguments import Arguments
from kernel_api.errors import CompileError
from kernel_api.kernel import Kernel
from kernel_api.metadata import KernelMetadata
from kernel_api.tuning._data import random_arguments
from kernel_api.tuning._measurement import Status
from kernel_api.tuning._policy import Policy
from kernel_api.tuning._timing import (
    Batch,
    CpuTimer,
    GpuTimer,
    clocks,
    flush_buffer,
    operand_sets,
)
from kernel_api.verification import Expected, conduct, factor_of


def work(channel: socket.socket) -> None:
    """Until the channel ends, or nothing is asked for minutes: the context of a GPU is large."""
    seat = _Seat()
    for message in messages(channel, lambda: seat.is_free):
        answer(channel, _attempted(functools.partial(seat.do, **message)))


class _Seat:
    """What the process is at: one problem at a time."""

    def __init__(self) -> None:
        self._session: _Session | None = None

    @property
    def is_free(self) -> bool:
        """Whether it is at no problem."""
        return self._session is None

    def do(self, do: str, **message: Any) -> Outcome:
        if do in ("open", "close"):
            self._session = None  # its memory is free before that of the next is taken
            _release()
            if do == "open":
                self._session = _Session(**message)
            return Outcome(Status.PASSED)
        assert self._session is not None
        found: Outcome = getattr(self._session, do)(**message)
        return found


@dataclass(frozen=True)
class Outcome:
    """What came of a request.

    Attributes:
        status: PASSED if it did what it was asked.
        message: Why not.
        error_ratio: Of a check.
        times_us: Of each kernel that was timed, one of each round: microseconds per launch.
        launches: Of each kernel that was timed, how many a round has.
        mhz: Clocks of multiprocessors and memory after that.
        is_over: Whether nothing works any more in this process.
    """

    status: Status
    message: str = ""
    error_ratio: float | None = None
    times_us: list[list[float]] | None = None
    launches: list[int] | None = None
    mhz: tuple[int | None, int | None] = (None, None)
    is_over: bool = False


def _attempted(request: Callable[[], Outcome]) -> dict[str, Any]:
    try:
        found = request()
    except Exception as error:
        found = Outcome(_status_of(error), f"{type(error).__name__}: {error}")
    if not _gpu_answers():
        status = Status.RUNTIME_ERROR if found.status is Status.PASSED else found.status
        message = found.message or "the GPU answers nothing any more"
        found = replace(found, status=status, message=message, is_over=True)
    return asdict(found)


#: Of the rounds that are asked for, at most so many times as many where these are soon over.
_MOST_TIMES = 5

#: In the texts of errors that say so and no more; the last two are of the driver and of cuBLAS.
_NO_MEMORY = (
    "out of memory",
    "allocate memory",
    "can't allocate",
    "CUDA_ERROR_OUT_OF_MEMORY",
    "STATUS_ALLOC_FAILED",
)


def _status_of(error: Exception) -> Status:
    import torch

    if isinstance(error, CompileError):
        return Status.COMPILE_ERROR
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return Status.OOM
    is_memory = any(words in str(error) for words in _NO_MEMORY)
    return Status.OOM if is_memory else Status.RUNTIME_ERROR


def _gpu_answers() -> bool:
    """False after errors that end a context."""
    import torch

    initialized: Any = torch.cuda.is_initialized
    try:
        if initialized():
            torch.cuda.synchronize()
    except Exception:
        return False
    return True


def _release() -> None:
    import torch

    from kernel_api import _compile_cache

    _compile_cache.clear()
    flush_buffer.cache_clear()
    initialized: Any = torch.cuda.is_initialized
    if initialized():
        torch.cuda.empty_cache()


class _Session:
    """One problem: its operands, and what the reference makes of the first set of them, if results
    are to be compared with that."""

    def __init__(
        self, arguments: dict[str, Any], device: str, policy: dict[str, Any], verify: bool
    ) -> None:
        self._device = device
        self._policy = Policy.from_dict(policy)
        self._arguments = arguments
        self._args: list[Arguments] = []
        (args,) = self._sets_of(1)
        self._expected = Expected(args) if verify else None
        self._set_bytes = sum(one.span for one in args.named_operands.values())
        self._sets = operand_sets(self._policy, self._set_bytes, device)
        self._kernels: dict[int, Kernel] = {}
        self._batches: dict[int, Batch] = {}
        self._timer = self._new_timer()

    def _new_timer(self) -> CpuTimer | GpuTimer:
        if self._device == "cpu":
            return CpuTimer()
        return GpuTimer(self._policy, self._set_bytes, self._sets)

    def check(self, index: int, kernel: Mapping[str, Any]) -> Outcome:
        """Whether a candidate is right; from then on it is known by the index."""
        self._kernels[index] = made = KernelMetadata.from_dict(dict(kernel)).rebuild()
        if self._batches:  # any of those that were timed may have changed what others read
            self._drop_sets()
        (args,) = self._sets_of(1)
        if self._expected is None:
            made.run(args)
            return Outcome(Status.PASSED)
        first = self._judged(made, args, self._expected)
        return self._judged(made, args, self._expected) if first.status is Status.PASSED else first

    def _judged(self, kernel: Kernel, args: Arguments, expected: Expected) -> Outcome:
        try:
            broken = conduct(args, lambda: kernel.run(args))
        except Exception:
            self._drop_sets()
            raise
        if broken is not None:
            self._drop_sets()
            return Outcome(Status.WRONG, broken)
        found = expected.judge(args, factor_of(kernel))
        if not found:
            return Outcome(Status.WRONG, f"{found.reason}", found.error_ratio)
        return Outcome(Status.PASSED, error_ratio=found.error_ratio)

    def time(self, indices: list[int], rounds: int, warm_s: float, least_s: float) -> Outcome:
        """Time candidates that were checked, in turn: see :meth:`Bench.time`."""
        for index in indices:
            if index not in self._batches:
                self._batches[index] = self._timer.batch(self._launches(self._kernels[index]))
        batches = [self._batches[index] for index in indices]
        if self._device == "cpu" or self._policy.rest:  # at clocks that do not sink
            warm_s = least_s = 0.0
        until = time.monotonic() + warm_s
        while time.monotonic() < until:
            self._timer.rounds(batches, 1)
        until = time.monotonic() + least_s
        times = self._timer.rounds(batches, rounds)
        while time.monotonic() < until and len(times[0]) < _MOST_TIMES * rounds:
            for one, more in zip(times, self._timer.rounds(batches, rounds), strict=True):
                one += more
        mhz = (None, None) if self._device == "cpu" else clocks()
        launches = [one.launches for one in batches]
        return Outcome(Status.PASSED, times_us=times, launches=launches, mhz=mhz)

    def forget(self, indices: list[int]) -> Outcome:
        """Of those that are timed no more."""
        for index in indices:
            self._batches.pop(index, None)
        return Outcome(Status.PASSED)

    def _launches(self, kernel: Kernel) -> list[Callable[[], Any]]:
        """One for each set of operands."""
        sets = self._sets_of(self._sets)
        return [functools.partial(kernel.prepare(args), *args.tensors) for args in sets]

    def _sets_of(self, count: int) -> list[Arguments]:
        """The first operands, which are made when they are asked for."""
        while len(self._args) < count:
            seed = self._policy.seed + len(self._args)
            self._args.append(random_arguments(self._arguments, self._device, seed))
        return self._args[:count]

    def _drop_sets(self) -> None:
        """After kernels that may have changed anything, inputs as well."""
        self._args.clear()
        self._batches.clear()

"""Time several callables fairly.

One round calls each of them once, in turn, every round starting with another one; medians over
the rounds. Before each call a buffer larger than L2 is read, so that caches are cold (and hold
nothing that must be written back), and the host runs ahead, so that its cost is not in the times.
Before the first round all run for a while: a GPU that was idle is faster than it stays. Or it rests
after every call (`rest_after_calls`), and is as fast as it can be.

Short calls are timed by CUDA graphs of several of them, each on operands of its own: either these
are together several times as large as L2, or each is used once after the buffer was read. Data
must be random: zeros draw less power and run faster.
"""

from __future__ import annotations

import faulthandler
import functools
import importlib.metadata
import math
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

DEVICE = "cuda"
FLUSH_BYTES = 512 << 20
#: Calls shorter than this (microseconds) are timed by CUDA graphs.
SHORT_US = 50.0
#: So long everything runs in turn before it is timed.
WARM_SECONDS = 0.15
#: A graph of calls takes about this long (microseconds) where its operands allow it.
GRAPH_US = 300.0

#: A callable per set of operands; all sets have the same sizes.
Calls = Sequence[Callable[[], Any]]

_rest = 0.0


def rest_after_calls(times: float) -> None:
    """From now on the GPU rests after a launch, of a call or of a graph of several, so many times
    as long as that took.

    Large products one after the other draw as much power as the GPU may, and it slows down: what is
    compared then is how much each of them needs. Where it rests they run as fast as they do among
    work that draws less: an H200 begins large products at about 1.6 GHz of its 1.98, smaller ones
    at 1.73, and sinks to 1.4 under those that do not end. The host is ahead by no more than what
    makes caches cold: what a call costs there beyond that is in its time.
    """
    global _rest
    _rest = times


def rests() -> bool:
    """Whether the GPU rests after calls."""
    return _rest > 0


class Timing:
    """Microseconds of one callable: ``median``, and ``spread`` (middle half over median)."""

    def __init__(self, microseconds: list[float]) -> None:
        self.median = statistics.median(microseconds)
        quarters = statistics.quantiles(microseconds, n=4)
        self.spread = (quarters[2] - quarters[0]) / self.median


def operand_sets(set_bytes: int, most: int = 32) -> int:
    """How many sets of operands make sure that none is in L2 when its turn comes again."""
    return max(2, min(most, 1 + math.ceil(3 * l2_bytes() / max(set_bytes, 1))))


def interleaved(
    calls: Mapping[str, Calls], set_bytes: int, policy: str = "auto", rounds: int = 20
) -> tuple[dict[str, Timing], str]:
    """Time every callable in the same run, and say in words how it was done.

    Args:
        set_bytes: What one call reads and writes.
        policy: ``graph``, ``eager``, or ``auto``: a graph if one call takes less than SHORT_US.
    """
    for one in calls.values():
        for call in one:
            call()
    estimate = {n: t.median for n, t in _eager(calls, 3).items()} if policy != "eager" else {}
    words = f"cold L2, interleaved, random data, median of {rounds}"
    if rests():
        words += f", each launch followed by a rest {_rest:g} times as long"
    note = ""
    if policy == "graph" or (policy == "auto" and min(estimate.values()) < SHORT_US):
        sets = max(map(len, calls.values()))
        copies = _copies(sets, set_bytes, min(estimate.values()))
        try:
            found = _graphs(calls, copies, rounds)
            return found, f"CUDA graph of {copies} calls on {sets} operand sets, {words}"
        except Exception as error:  # a library that cannot be captured
            synchronize()
            note = f" (no graph: {type(error).__name__})"
    return _eager(calls, rounds), f"eager{note}, {words}"


def _copies(sets: int, set_bytes: int, call_us: float) -> int:
    """Calls in a graph: each set once, or several times where they do not fit in L2 together."""
    if sets * set_bytes < 3 * l2_bytes():
        return sets
    return sets * max(1, math.ceil(GRAPH_US / max(call_us, 1.0) / sets))


def _eager(calls: Mapping[str, Calls], rounds: int) -> dict[str, Timing]:
    def launch(name: str, turn: int) -> None:
        one = calls[name]
        one[turn % len(one)]()

    return _timed(list(calls), launch, rounds)


def _graphs(calls: Mapping[str, Calls], copies: int, rounds: int) -> dict[str, Timing]:
    graphs = {}
    for name, one in calls.items():
        graph = graphs[name] = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for copy in range(copies):
                one[copy % len(one)]()
    for graph in graphs.values():
        graph.replay()
    return _timed(list(calls), lambda name, _: graphs[name].replay(), rounds, copies)


def _timed(
    names: list[str], launch: Callable[[str, int], None], rounds: int, calls_each: int = 1
) -> dict[str, Timing]:
    """Events around every launch; ``launch(name, turn)`` makes ``calls_each`` calls."""
    flush = _flush_buffer()
    if not rests():
        _warm_up(names, launch, flush)
    events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {n: [] for n in names}
    for turn in range(rounds):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            flush.sum()
            start.record()
            launch(name, turn)
            end.record()
            events[name].append((start, end))
            if rests():
                synchronize()
                time.sleep(1e-3 * _rest * start.elapsed_time(end))
    synchronize()
    return {
        name: Timing([1e3 * start.elapsed_time(end) / calls_each for start, end in pairs])
        for name, pairs in events.items()
    }


def _warm_up(names: list[str], launch: Callable[[str, int], None], flush: torch.Tensor) -> None:
    """Until a GPU that is limited by power runs at the clocks that it keeps."""
    until = time.monotonic() + WARM_SECONDS
    while time.monotonic() < until:
        for name in names:
            flush.sum()
            launch(name, 0)
        synchronize()


@functools.lru_cache(maxsize=1)
def _flush_buffer() -> torch.Tensor:
    return torch.ones(FLUSH_BYTES // 4, dtype=torch.float32, device=DEVICE)


# The machine -----------------------------------------------------------------------------

#: Of `matmul`.
MATMUL_OPERATIONS = 2 * 8192**3


@functools.lru_cache(maxsize=1)
def matmul() -> Callable[[], Any]:
    """torch's product of two bfloat16 matrices of 8192 x 8192: timed beside others, it says at what
    clocks they ran. GPUs of one name differ in those that they keep under load."""
    a, b = (torch.randn(8192, 8192, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    return functools.partial(torch.mm, a, b)


#: How the copy is called that tells how fast memory is moved.
COPY = "copy"
COPIED_BYTES = 1 << 30


@functools.lru_cache(maxsize=1)
def copy() -> Calls:
    """An element-wise kernel that copies a large tensor, which is faster than the driver's copy."""
    source = torch.randn(COPIED_BYTES // 4, device=DEVICE)
    return [functools.partial(torch.mul, source, 1.0, out=torch.empty_like(source))]


def beside_copy(moved: int, microseconds: float, copy_us: float) -> dict[str, float]:
    """What a row says of the rate at which bytes are moved, and of the copy's, which reads and
    writes."""
    ceiling, reached = 2 * COPIED_BYTES / copy_us, moved / microseconds
    return {
        "ceiling_tb_s": round(1e-6 * ceiling, 3),
        "tb_s": round(1e-6 * reached, 3),
        "of_ceiling": round(reached / ceiling, 4),
    }


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def alive() -> bool:
    """Whether the GPU still answers; after some errors nothing in this process works any more."""
    try:
        synchronize()
    except Exception:
        return False
    return True


def l2_bytes() -> int:
    """Of the GPU; where there is none, of an H200."""
    if not torch.cuda.is_available():
        return 60 << 20
    return int(torch.cuda.get_device_properties(0).L2_cache_size)


def gpu_folder() -> str:
    """The GPU's name as results are filed under it: of its words, the first one with a digit."""
    words = torch.cuda.get_device_name().lower().split()
    return next((word for word in words if any(map(str.isdigit, word))), words[-1])


@functools.lru_cache(maxsize=1)
def environment() -> dict[str, Any]:
    """What a row depends on beside the code."""
    packages = [
        "torch",
        "nvidia-cutlass-dsl",
        "nvidia-cutlass-dsl-libs-cu12",
        "nvidia-cutlass-dsl-libs-cu13",
        "apache-tvm-ffi",
        "quack-kernels",
    ]
    versions = {}
    for name in packages:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "gpu": torch.cuda.get_device_name(),
        "multiprocessors": torch.cuda.get_device_properties(0).multi_processor_count,
        "cuda": torch.version.cuda,
        **versions,
    }


# Time that is left -----------------------------------------------------------------------


class Budget:
    """Seconds that a script may take, counted from its start; None: as long as it likes."""

    def __init__(self, seconds: float | None) -> None:
        self._until = None if seconds is None else time.monotonic() + seconds
        self._recent: deque[float] = deque(maxlen=4)

    def allows_another(self) -> bool:
        """Whether another step fits, if it takes as long as the longest of the last ones."""
        if self._until is None:
            return True
        return time.monotonic() + 1.2 * max(self._recent, default=0.0) < self._until

    @contextmanager
    def step(self) -> Iterator[None]:
        started = time.monotonic()
        yield
        self._recent.append(time.monotonic() - started)


@contextmanager
def watchdog(seconds: float) -> Iterator[None]:
    """End the process, with a traceback, if the block takes longer.

    A kernel that hangs cannot be stopped from within its process. What was written to disk stays.
    """
    if seconds > 0:
        faulthandler.dump_traceback_later(seconds, exit=True, file=sys.__stderr__)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()

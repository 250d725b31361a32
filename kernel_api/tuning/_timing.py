"""Time launches as a policy says, in the process that launches them.

What is timed is a batch: several launches between two events, or in one CUDA graph, each on the
next set of operands. Where all sets together are not several times as large as the L2 cache, a
cold launch needs a buffer to be read before, and no set is used twice in a batch.
"""

from __future__ import annotations

import functools
import importlib
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kernel_api.tuning._policy import Policy

#: A batch takes about so long, in microseconds, and has at most so many launches.
_BATCH_US = 300.0
_MOST_LAUNCHES = 256

#: Sets of operands that are together so many times as large as the L2 cache leave nothing in it.
_L2_TIMES = 3
_MOST_SETS = 32

_FLUSH_BYTES = 512 << 20

Launch = Callable[[], Any]


def operand_sets(policy: Policy, set_bytes: int, device: str) -> int:
    """How many sets of operands launches use in turn."""
    if policy.operand_sets is not None:
        return policy.operand_sets
    if policy.l2 == "warm" or device == "cpu":
        return 1
    return max(2, min(_MOST_SETS, 1 + math.ceil(_L2_TIMES * l2_bytes() / max(set_bytes, 1))))


@dataclass(frozen=True)
class Batch:
    """Launches that are timed together.

    Attributes:
        run: Makes them.
        launches: Their number.
    """

    run: Launch
    launches: int


class CpuTimer:
    """Wall-clock time, of what is done when it returns."""

    @staticmethod
    def now() -> float:
        """Seconds, of a clock that only goes forward."""
        return time.perf_counter()

    def batch(self, launches: Sequence[Launch]) -> Batch:
        """Several of a launch, as many as take about a millisecond."""
        started = self.now()
        launches[0]()
        spent_us = 1e6 * (self.now() - started)
        count = _count(len(launches), spent_us, repeats=True)
        return _in_turn(launches, count)

    def rounds(self, batches: Sequence[Batch], rounds: int) -> list[list[float]]:
        """Microseconds per launch: of each batch, one of each round."""
        found: list[list[float]] = [[] for _ in batches]
        for turn in range(rounds):
            for index in _order(len(batches), turn):
                one = batches[index]
                started = self.now()
                one.run()
                found[index].append(1e6 * (self.now() - started) / one.launches)
        return found


class GpuTimer:
    """Time on the GPU's clock, on the current stream.

    Args:
        set_bytes: What one launch reads and writes.
        sets: How many sets of operands there are.
    """

    def __init__(self, policy: Policy, set_bytes: int, sets: int) -> None:
        self._policy = policy
        self._is_cold = policy.l2 == "cold"
        self._repeats = not self._is_cold or sets * set_bytes >= _L2_TIMES * l2_bytes()

    def batch(self, launches: Sequence[Launch]) -> Batch:
        """One graph, or launches one by one; each was run once before, and is again."""
        import torch

        for launch in launches:
            launch()
        count = self._policy.launches_per_graph
        if count is None:
            count = _count(len(launches), self._once_us(launches), self._repeats)
        one = _in_turn(launches, count)
        if self._policy.launches == "eager":
            return one
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            one.run()
        graph.replay()
        return Batch(graph.replay, count)

    def rounds(self, batches: Sequence[Batch], rounds: int) -> list[list[float]]:
        """Microseconds per launch: of each batch, one of each round. Every round starts with
        another one."""
        import torch

        events: list[list[tuple[Any, Any]]] = [[] for _ in batches]
        for turn in range(rounds):
            for index in _order(len(batches), turn):
                start, end = _event(), _event()
                self._prepare()
                start.record()
                batches[index].run()
                end.record()
                events[index].append((start, end))
                if self._policy.rest:
                    torch.cuda.synchronize()
                    time.sleep(1e-3 * self._policy.rest * start.elapsed_time(end))
        torch.cuda.synchronize()
        return [
            [1e3 * start.elapsed_time(end) / one.launches for start, end in pairs]
            for one, pairs in zip(batches, events, strict=True)
        ]

    def _prepare(self) -> None:
        """The cache, and the queue: launches one by one are as late as the host makes them, those
        of a graph are not to wait for it."""
        import torch

        if self._is_cold:
            flush_buffer().sum()
        if self._policy.launches == "eager":
            torch.cuda.synchronize()

    def _once_us(self, launches: Sequence[Launch]) -> float:
        import torch

        start, end = _event(), _event()
        flush_buffer().sum()
        start.record()
        for one in launches:
            one()
        end.record()
        torch.cuda.synchronize()
        return 1e3 * float(start.elapsed_time(end)) / len(launches)


def _event() -> Any:
    import torch

    event: Any = torch.cuda.Event
    return event(enable_timing=True)


def _count(sets: int, launch_us: float, repeats: bool) -> int:
    """Launches of a batch: every set once, or several times."""
    if not repeats:
        return sets
    times = math.ceil(_BATCH_US / max(launch_us, 1.0) / sets)
    return sets * max(1, min(times, _MOST_LAUNCHES // sets))


def _in_turn(launches: Sequence[Launch], count: int) -> Batch:
    def run() -> None:
        for turn in range(count):
            launches[turn % len(launches)]()

    return Batch(run, count)


def _order(count: int, turn: int) -> list[int]:
    return [(turn + index) % count for index in range(count)]


@functools.lru_cache(maxsize=1)
def flush_buffer() -> Any:
    """More than any L2 cache holds; reading it leaves nothing that must be written back."""
    import torch

    return torch.ones(_FLUSH_BYTES // 4, dtype=torch.float32, device="cuda")


def l2_bytes() -> int:
    """Of the current GPU."""
    import torch

    return int(torch.cuda.get_device_properties().L2_cache_size)


# Clocks --------------------------------------------------------------------------------------


def clocks() -> tuple[int | None, int | None]:
    """MHz of the current GPU's multiprocessors and memory; None where NVML is not there."""
    import torch

    try:
        pynvml: Any = importlib.import_module("pynvml")
        pynvml.nvmlInit()
        uuid = str(torch.cuda.get_device_properties().uuid)
        handle = pynvml.nvmlDeviceGetHandleByUUID(uuid if "-" in uuid[:4] else f"GPU-{uuid}")
        return (
            int(pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM)),
            int(pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_MEM)),
        )
    except Exception:  # not installed, no permission, another version: NVML's errors are its own
        return None, None

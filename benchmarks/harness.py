"""Time several callables fairly, and keep what was measured.

One round calls each of them once, in turn, after writing a buffer larger than L2; medians over
the rounds. The buffer's writing keeps the GPU busy while the host runs ahead, so that host cost
is not in the times. Data must be random: zeros draw less power and run faster.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import statistics
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

L2_FLUSH_BYTES = 256 << 20
RESULTS = Path(__file__).parent / "results"


class Timing:
    """Microseconds of one callable: ``median``, and ``spread`` (middle half over median)."""

    def __init__(self, microseconds: list[float]) -> None:
        self.median = statistics.median(microseconds)
        quarters = statistics.quantiles(microseconds, n=4)
        self.spread = (quarters[2] - quarters[0]) / self.median


def interleaved(
    calls: Mapping[str, Callable[[], Any]], rounds: int = 20, warmup: int = 3
) -> dict[str, Timing]:
    """Time every callable in the same run; see the module for how."""
    flush = torch.empty(L2_FLUSH_BYTES // 4, dtype=torch.int32, device="cuda")
    for _ in range(warmup):
        for call in calls.values():
            call()
    events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {n: [] for n in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            flush.zero_()
            start.record()
            call()
            end.record()
            events[name].append((start, end))
    torch.cuda.synchronize()
    return {n: Timing([1e3 * s.elapsed_time(e) for s, e in pairs]) for n, pairs in events.items()}


def environment() -> dict[str, Any]:
    """What a row depends on beside the code."""
    packages = [
        "torch",
        "nvidia-cutlass-dsl",
        "nvidia-cutlass-dsl-libs-cu12",
        "nvidia-cutlass-dsl-libs-cu13",
        "apache-tvm-ffi",
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


def row(
    suite: str,
    problem: str,
    subject: tuple[str, Timing],
    peer: tuple[str, Timing],
    verified: bool,
    **extra: Any,
) -> dict[str, Any]:
    """One measured line."""
    return {
        "suite": suite,
        "problem": problem,
        "subject": subject[0],
        "peer": peer[0],
        "subject_us": round(subject[1].median, 2),
        "peer_us": round(peer[1].median, 2),
        "ratio": round(peer[1].median / subject[1].median, 4),
        "spread": round(max(subject[1].spread, peer[1].spread), 4),
        "verified": verified,
        "policy": "eager, cold L2, interleaved, random data, median",
        "env": environment(),
        "date": datetime.date.today().isoformat(),
        **extra,
    }


def write(suite: str, rows: list[dict[str, Any]], folder: Path | None = None) -> Path:
    """Keep the rows of a suite; the GPU's name is the folder."""
    gpu = torch.cuda.get_device_name().split()[-1].lower()
    path = (folder or RESULTS / gpu) / f"{suite}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(rows, indent=1) + "\n")
    return path

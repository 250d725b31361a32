"""Times that the performance model is fitted to: of all candidates, and of tuned problems.

``load`` reads gemm-candidates.json, and of what a tuner timed in fewer rounds how many these were.
``tuned`` reads what a tuner left: a table of ``kernel_api/tuning/tables``, which has the fastest
kernels of a problem, or tuning.json, which has all that were candidates. ``merged`` puts them
together; what is newer wins.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gemm_models
from suite import known_of

import kernel_api as ka
from kernel_api._description import rebuilt
from kernel_api.errors import KernelApiError
from kernel_api.kernel import Kernel
from kernel_api.provider import providers
from kernel_api.providers.cutedsl.gemm import model
from kernel_api.tuning._row import Row

#: Rounds that weigh half as much as very many do.
_HALF = 5
#: What a time weighs that was shifted to what newer ones say.
_SHIFTED = 0.5
#: Times of a family that both have, at least, to say what a launch takes more or less.
_FEWEST = 8


@dataclass(frozen=True)
class Time:
    """One candidate on one problem.

    Attributes:
        seconds: Without the kernel's own factor.
        weight: How much it counts, at most 1.
        is_tuned: Whether it was a candidate of a tuner.
    """

    kernel: str
    family: str
    candidate: model.Candidate
    factor: float
    seconds: float
    weight: float = 1.0
    is_tuned: bool = False

    @property
    def measured(self) -> float:
        return self.factor * self.seconds


@dataclass(frozen=True)
class Measured:
    """A problem with the times of its candidates.

    Attributes:
        peer: Seconds of the fastest peer, if it was measured.
        has_fastest: Whether these are the fastest of a tuner's candidates, and no others.
    """

    label: str
    sizes: model.Problem
    times: tuple[Time, ...]
    peer: float | None = None
    has_fastest: bool = False

    @property
    def best(self) -> float:
        return min(t.measured for t in self.times)


def load(path: Path) -> tuple[str, list[Measured]]:
    """The GPU's name and the problems, without kernels that the model does not know."""
    found = json.loads(path.read_text())
    kernels = {name: k for name, k in found["kernels"].items() if "candidate" in k}
    known = {name: _candidate(k["candidate"]) for name, k in kernels.items()}
    problems = []
    for row in found["problems"]:
        rounds = row.get("rounds", {})
        times = tuple(
            Time(
                name,
                kernels[name]["family"],
                known[name],
                kernels[name]["factor"],
                1e-6 * microseconds / kernels[name]["factor"],
                _weight(rounds[name]) if name in rounds else 1.0,
            )
            for name, microseconds in row["times_us"].items()
            if name in known
        )
        if len(times) > 1:
            peer = 1e-6 * row["peer_us"] if "peer_us" in row else None
            problems.append(Measured(row["problem"], model.Problem(**row["sizes"]), times, peer))
    return found["problems"][0]["env"]["gpu"], problems


def joined(problems: Iterable[Measured]) -> list[Measured]:
    """One for each of problems that were measured several times: of every kernel, the median."""
    found: dict[model.Problem, list[Measured]] = {}
    for problem in problems:
        found.setdefault(problem.sizes, []).append(problem)
    return [_joined(several) for several in found.values()]


def _joined(several: Sequence[Measured]) -> Measured:
    times: defaultdict[str, list[Time]] = defaultdict(list)
    for problem in several:
        for time in problem.times:
            times[time.kernel].append(time)
    kept = tuple(
        dataclasses.replace(found[0], seconds=statistics.median(time.seconds for time in found))
        for found in times.values()
    )
    peers = [problem.peer for problem in several if problem.peer is not None]
    peer = statistics.median(peers) if peers else None
    return dataclasses.replace(several[0], times=kept, peer=peer)


def _candidate(fields: dict[str, Any]) -> model.Candidate:
    return model.Candidate(
        **{name: tuple(v) if isinstance(v, list) else v for name, v in fields.items()}
    )


# Tuned problems --------------------------------------------------------------------------

#: Of a kernel: microseconds and rounds.
Found = Mapping[str, tuple[float, int]]


def tuned(path: Path) -> list[Measured]:
    """The problems of a tuning table, or of the first runs of the suite tuning."""
    found = json.loads(path.read_text())
    if isinstance(found, list):
        return list(_of_suite(found))
    likenesses = ([*problems.values()] for problems in found.values())
    problems = (_of_table([*rows.values()]) for each in likenesses for rows in each)
    return [problem for problem in problems if problem is not None]


def _of_table(texts: Sequence[str]) -> Measured | None:
    """A problem's rows; None for what is no dense product, or has no kernel that is known."""
    providers()  # those that come with us are registered when they are asked for
    rows = [Row.from_dict(json.loads(text)).measurement for text in texts]
    args = rebuilt(rows[0].problem.to_dict()["arguments"])
    if not isinstance(args, ka.GemmArguments):
        return None
    kernels = []
    for row in rows:
        try:
            kernels.append(row.kernel.rebuild())
        except KernelApiError:
            continue  # its class is not here any more
    times = {row.kernel.name: (row.median_us, row.rounds) for row in rows}
    one = _measured(f"{args.M}x{args.N}x{args.K}", args, kernels, times)
    return dataclasses.replace(one, has_fastest=True) if one.times else None


def _of_suite(rows: Iterable[Mapping[str, Any]]) -> Iterator[Measured]:
    known = {problem.label: problem for problem in gemm_models.SUITE.problems}
    for row in rows:
        args = known[row["problem"]].arguments("meta")
        times = {n: (t[0], t[1]) for n, t in row["runs"][0].items() if isinstance(t, list)}
        yield _measured(row["problem"], args, ka.get_kernels(args, cc="90"), times)


def _measured(
    label: str, args: ka.GemmArguments, kernels: Iterable[Kernel], found: Found
) -> Measured:
    sizes = model.Problem.of(args)
    times = []
    for kernel in kernels:
        name = kernel.metadata.kernel_name
        known = known_of(kernel, args, sizes)
        if name not in found or "candidate" not in known:
            continue
        (microseconds, rounds), factor = found[name], known["factor"]
        candidate, seconds = _candidate(known["candidate"]), 1e-6 * microseconds / factor
        weight = _weight(rounds)
        times.append(Time(name, known["family"], candidate, factor, seconds, weight, True))
    peers = [microseconds for name, (microseconds, _) in found.items() if name.startswith("torch")]
    return Measured(label, sizes, tuple(times), 1e-6 * min(peers) if peers else None)


def _weight(rounds: int) -> float:
    return rounds / (rounds + _HALF)


# Together --------------------------------------------------------------------------------


def merged(older: Sequence[Measured], newer: Sequence[Measured]) -> list[Measured]:
    """All problems, with the newer times where both have a kernel.

    Older times are shifted to what the newer ones say: by what a launch of a family takes more or
    less, then, per problem, by the ratio of clocks.
    """
    changes = _launch_changes(older, newer)
    by_sizes = {problem.sizes: problem for problem in newer}
    found = []
    for problem in older:
        fresh = by_sizes.pop(problem.sizes, None)
        found.append(problem if fresh is None else _together(problem, fresh, changes))
    return [*found, *(one for one in by_sizes.values() if len(one.times) > 1)]


def _launch_changes(older: Sequence[Measured], newer: Sequence[Measured]) -> dict[str, float]:
    """By family, seconds that a launch takes more now: as the shorter half of all that both
    have says, where clocks matter little."""
    before = {(p.sizes, t.kernel): t.measured for p in older for t in p.times}
    pairs: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
    for problem in newer:
        for time in problem.times:
            if (known := before.get((problem.sizes, time.kernel))) is not None:
                pairs[time.family].append((time.measured, time.measured - known))
    return {
        family: statistics.median(change for _, change in sorted(found)[: len(found) // 2])
        for family, found in pairs.items()
        if len(found) >= _FEWEST
    }


def _together(older: Measured, newer: Measured, changes: Mapping[str, float]) -> Measured:
    fresh = {t.kernel: t.measured for t in newer.times}
    shifted = {
        t.kernel: max(t.measured + changes.get(t.family, 0.0), t.measured / 2) for t in older.times
    }
    both = [fresh[name] / shifted[name] for name in fresh if name in shifted]
    ratio = statistics.median(both) if both else 1.0
    slowest = max(fresh.values()) if newer.has_fastest else 0.0
    kept = []
    for time in older.times:
        if time.kernel not in fresh:
            # What the tuner did not keep was not faster than what it kept.
            least = slowest if time.is_tuned else 0.0
            seconds = max(ratio * shifted[time.kernel], least) / time.factor
            weight = _SHIFTED * time.weight
            kept.append(dataclasses.replace(time, seconds=seconds, weight=weight))
    peer = newer.peer
    if peer is None and older.peer is not None:
        peer = ratio * older.peer
    return dataclasses.replace(older, times=(*newer.times, *kept), peer=peer)

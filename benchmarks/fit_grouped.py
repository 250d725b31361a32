"""Fit the constants of products of groups of rows to measured times of all candidates.

    python benchmarks/grouped_candidates.py        (on the GPU: writes grouped-candidates.json)
    python benchmarks/fit_grouped.py [--family NAME] [--steps N] [--seed N] [--write]

A random search from what model.json says: constants are moved, a few at a time, and what makes
first choices faster is kept. Counted are what a choice costs, softened so that nearly equal
estimates count both; the choice itself; the worst of them; and a little the error of estimates of
designs that are near the best. Printed is how far first choices are from the best candidates.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import random
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grouped_candidates

import kernel_api as ka
from kernel_api.providers.cutedsl.gemm import machine, model
from kernel_api.providers.cutedsl.grouped_gemm.base import dense_problem

ROWS = Path(__file__).parent / "results" / "h200" / f"{grouped_candidates.SUITE}.json"
GPU = "NVIDIA H200"
#: Constants that such products say something about, by how far a step moves them. What device
#: memory gives and a launch costs is known: other families are compared with these.
MOVED = {
    "rate": 0.3, "share": 0.2, "sustained": 0.3, "spared": 0.2, "l2_bandwidth": 1.0,
    "latency": 1.0, "step": 1.0, "feed": 1.0, "load": 1.0, "store": 1.0, "sharpness": 1.0,
    "in_turn": 0.1, "held": 1.0,
}  # fmt: skip
MOST = {"in_turn": 1.05, "held": 3.0}
FARTHEST = 3.0
#: Relative difference of estimates below which both are counted.
SOFTNESS = 0.006
#: Of the best, what the error of an estimate still counts for.
NEAR = 1.4


@dataclass(frozen=True)
class Measured:
    """A problem: of every candidate (kernel, what the model takes, seconds)."""

    label: str
    args: Any
    times: tuple[tuple[Any, model.Problem, float], ...]

    @property
    def best(self) -> float:
        return min(seconds for *_, seconds in self.times)


def load(path: Path, family: str) -> list[Measured]:
    """Those of a family, without designs that may be no first choice: see ``alone``."""
    found = []
    for row in json.loads(path.read_text())["problems"]:
        args = grouped_candidates.of_row(row).arguments("meta")
        offered = {one.metadata.kernel_name: one for one in ka.get_kernels(args, cc=90)}
        times = []
        for name, microseconds in row["times_us"].items():
            kernel: Any = offered.get(name) or offered[_begun_later(name)]
            if kernel.modelled_as == family and kernel.metadata.design.dependent_launch:
                dense = dense_problem(args, kernel.row_tiles)
                times.append((kernel, dense, 1e-6 * microseconds))
        if times:
            found.append(Measured(row["problem"], args, tuple(times)))
    if not found:
        raise SystemExit(f"{path} has no times of {family}")
    return found


def _begun_later(name: str) -> str:
    """The name of a kernel that was timed when it still began before the one in front had ended,
    which makes no difference to what was timed."""
    return name.replace("_align", "_independent_align")


def estimates(problem: Measured, constants: machine.Constants) -> list[float]:
    return [
        model.seconds(dense, kernel.candidate, constants) * kernel.factor(problem.args, constants)
        for kernel, dense, _ in problem.times
    ]


def regret(problem: Measured, constants: machine.Constants) -> float:
    """Of the first choice over the best."""
    found = estimates(problem, constants)
    return problem.times[found.index(min(found))][-1] / problem.best


def cost(problems: Sequence[Measured], constants: machine.Constants) -> float:
    softened, choices, errors = [], [], []
    for problem in problems:
        found, seconds = estimates(problem, constants), [one[-1] for one in problem.times]
        least = min(found)
        weights = [math.exp((1 - one / least) / SOFTNESS) for one in found]
        regrets = [math.log(one / problem.best) for one in seconds]
        softened.append(sum(map(float.__mul__, weights, regrets)) / sum(weights))
        choices.append(regrets[found.index(least)])
        near = [(f, s) for f, s in zip(found, seconds, strict=True) if s < NEAR * problem.best]
        errors.append(statistics.fmean(math.log(f / s) ** 2 for f, s in near))
    mean = statistics.fmean
    return mean(softened) + 0.3 * mean(choices) + 0.08 * max(choices) + 0.15 * mean(errors) ** 0.5


def moved(
    constants: machine.Constants,
    start: machine.Constants,
    asked: frozenset[str],
    chance: random.Random,
    far: float,
) -> machine.Constants:
    """A few of them, within :data:`FARTHEST` of where the search began; of those by kind and by
    schedule what the problems ask for."""
    values: dict[str, Any] = {}
    for name in chance.sample(sorted(MOVED), chance.choice((1, 1, 2, 3))):
        old, step = getattr(constants, name), MOVED[name] * far
        first = getattr(start, name)
        if isinstance(old, dict):
            for key in sorted(asked & old.keys()):
                moved_to = _scaled(old[key], first[key], chance.gauss(0, step))
                values[name] = {**values.get(name, old), key: moved_to}
        elif name in MOST:
            values[name] = min(max(old + chance.gauss(0, step), 0.0), MOST[name])
        else:
            values[name] = _scaled(old, first, chance.gauss(0, step))
    return dataclasses.replace(constants, **values)


def _scaled(value: float, first: float, power: float) -> float:
    return min(max(value * math.exp(power), first / FARTHEST), first * FARTHEST)


def search(
    problems: Sequence[Measured], constants: machine.Constants, steps: int, seed: int
) -> machine.Constants:
    """Constants with which first choices are faster, if any are found."""
    chance, start, best = random.Random(seed), constants, cost(problems, constants)
    times = [one for problem in problems for one in problem.times]
    asked = frozenset(dense.kind for _, dense, _ in times)
    asked |= {kernel.candidate.schedule for kernel, *_ in times}
    for step in range(steps):
        there = moved(constants, start, asked, chance, 0.02 + 0.15 * (1 - step / steps))
        found = cost(problems, there)
        if found < best:
            constants, best = there, found
    return constants


def report(problems: Sequence[Measured], constants: machine.Constants) -> str:
    found = sorted((regret(one, constants), one.label) for one in problems)
    mean = math.exp(statistics.fmean(math.log(one) for one, _ in found))
    worst, where = found[-1]
    return f"{len(found)} problems: geometric mean {mean:.4f}, worst {worst:.3f}, {where}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--family", default="sm90.grouped_gemm", help="(default: %(default)s)")
    parser.add_argument("--steps", type=int, default=2000, metavar="N", help="(default: 2000)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="(default: 0)")
    parser.add_argument("--write", action="store_true", help="change model.json")
    options = parser.parse_args(arguments)
    problems = load(ROWS, options.family)
    tables = json.loads(machine.CONSTANTS.read_text())
    constants = machine.Constants.of(machine.table_of(tables, GPU), options.family)
    print("before:", report(problems, constants))
    constants = search(problems, constants, options.steps, options.seed)
    print("after: ", report(problems, constants))
    if options.write:
        own = tables[GPU]["families"][options.family]
        own.update({name: _rounded(getattr(constants, name)) for name in MOVED})
        machine.CONSTANTS.write_text(json.dumps(tables, indent=2) + "\n")
    return 0


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(one) for key, one in value.items()}
    return float(f"{value:.4g}")


if __name__ == "__main__":
    sys.exit(main())

"""Fit the performance model's constants to measured times of all candidates.

    python benchmarks/gemm_models.py --all        (on the GPU: writes gemm-candidates.json)
    python benchmarks/fit_model.py [--rows FILE]... [--table FILE]... [--polish] [--write]

``--table`` takes what a tuner left, a table of kernel_api/tuning/tables or a tuning.json. Of both
there may be several, older ones first: what is newer wins, and older times are shifted to it (see
``fit_rows``).

Problems are ordered by size, and every other one is held out. The rest is fitted by least squares
of the logarithms, each constant starting from (and drawn towards) what model.json says: rows that
are far off count less, and so do candidates that are far from a problem's best or were timed in few
rounds. ``--polish`` then moves the constants one by one to where the model's first choices are
faster. Printed is how far the first choice is from the best candidate, and from the fastest peer,
over the problems that were held out.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import statistics
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from fit_rows import Measured, Time, joined, load, merged, tuned
from tables import geometric_mean

from kernel_api.providers.cutedsl.gemm import machine, model

RESULTS = Path(__file__).parent / "results" / "h200"
ROWS = tuple(RESULTS / f"gemm-candidates{which}.json" for which in ("", "-later", "-tuned", "-hot"))

#: What the GPU says of itself, where the model jumps, and what rows of plain products leave open.
NOT_FITTED = ("multiprocessors", "l2_bytes", "arrival", "late", "pieces", "alone")
#: Relative error that is expected of the model, and by how much a constant may be wrong (in
#: logarithms): together they say how strongly a constant is drawn towards what it was.
NOISE, PRIOR = 0.05, 1.0
#: Relative difference of estimates below which polishing takes two candidates for equal.
SOFTNESS = 0.02

Path_ = tuple[str, ...]
Table = dict[str, Any]


@dataclass(frozen=True)
class Choice:
    """The model's first choice for a problem.

    Attributes:
        regret: Its time over that of the best candidate.
        ratio: The time of the fastest peer over its own, if there is one.
    """

    regret: float
    label: str
    chosen: str
    best: str
    ratio: float | None = None


def split(problems: Iterable[Measured]) -> tuple[list[Measured], list[Measured]]:
    """Those to fit and those held out: alternately, by type and number of operations."""
    ordered = sorted(problems, key=lambda p: (p.sizes.kind, p.sizes.facts[-1], p.label))
    return ordered[::2], ordered[1::2]


class Parameters:
    """The constants that the rows say something about, as a vector of logarithms."""

    def __init__(self, table: Table, problems: Sequence[Measured]) -> None:
        self.table = table
        self.families = sorted({t.family for p in problems for t in p.times})
        kinds = {p.sizes.kind for p in problems}
        schedules = {t.candidate.schedule for p in problems for t in p.times}
        self._members = kinds | schedules
        splits = any(
            t.candidate.split_k > 1 or t.candidate.stream_k for p in problems for t in p.times
        )
        meets = any(t.candidate.meets for p in problems for t in p.times)
        self._left_out = NOT_FITTED if splits else (*NOT_FITTED, "handover", "seam")
        if not meets:
            self._left_out = (*self._left_out, "meeting", "crowd")
        if not any(t.candidate.parallel for p in problems for t in p.times):
            self._left_out = (*self._left_out, "behind", "summed")
        for family in set(table["families"]) - set(self.families):
            _keep(table, family)
        self.paths: list[Path_] = list(self._paths(("machine",)))
        for family in self.families:
            if family not in table["families"]:
                values = machine.Constants.of(table, family)
                own = {n: getattr(values, n) for n in vars(values) if n not in table["machine"]}
                table["families"][family] = copy.deepcopy(own)
            self.paths += self._paths(("families", family))
        self.start = np.log([float(_at(table, path)) for path in self.paths])

    def _paths(self, prefix: Path_) -> Iterable[Path_]:
        for name, value in _at(self.table, prefix).items():
            if name in self._left_out or value == 0:
                continue
            if isinstance(value, dict):
                yield from ((*prefix, name, key) for key in value if key in self._members)
            else:
                yield (*prefix, name)

    def touches(self, number: int, family: str) -> bool:
        path = self.paths[number]
        return path[0] == "machine" or path[1] == family

    def table_at(self, point: np.ndarray) -> Table:
        """The table with these values, rounded as the file has them."""
        table = copy.deepcopy(self.table)
        for path, value in zip(self.paths, np.exp(point), strict=True):
            _at(table, path[:-1])[path[-1]] = float(f"{value:.4g}")
        return table

    def constants_at(self, point: np.ndarray) -> dict[str, machine.Constants]:
        table = copy.deepcopy(self.table)
        for path, value in zip(self.paths, np.exp(point), strict=True):
            _at(table, path[:-1])[path[-1]] = float(value)
        return {family: machine.Constants.of(table, family) for family in self.families}


def _keep(table: Table, family: str) -> None:
    """Give a family its own constants of the machine: no rows say how a change moves its order."""
    shared = {n: v for n, v in table["machine"].items() if n not in NOT_FITTED}
    table["families"][family] = {**copy.deepcopy(shared), **table["families"][family]}


def _at(table: Table, path: Path_) -> Any:
    for name in path:
        table = table[name]
    return table


class Fit:
    """Weighted, robust least squares by Levenberg and Marquardt, with a prior."""

    def __init__(self, parameters: Parameters, problems: Sequence[Measured]) -> None:
        self.parameters = parameters
        self.problems = problems
        self._rows = [(p.sizes, t) for p in problems for t in p.times]
        self._times = np.log([t.seconds for _, t in self._rows])
        # The best of a problem counts fully; what takes twice as long, half.
        near = [t.weight * p.best / t.measured for p in problems for t in p.times]
        self._weights = np.sqrt(np.array(near))
        self._families = np.array([t.family for _, t in self._rows])

    def run(self, iterations: int = 40, tolerance: float = 1e-5) -> np.ndarray:
        point = self.parameters.start.copy()
        errors = self._errors(point)
        damping = 1e-2
        for _ in range(iterations):
            robust = self._robust(errors)
            jacobian = self._jacobian(point, errors) * robust[:, None] / NOISE
            prior = (point - self.parameters.start) / PRIOR
            gradient = jacobian.T @ (robust * errors / NOISE) + prior / PRIOR
            curvature = jacobian.T @ jacobian + np.eye(len(point)) / PRIOR**2
            before = self._loss(point, errors)
            while damping < 1e8:
                step = np.linalg.solve(curvature + damping * np.diag(np.diag(curvature)), -gradient)
                there = point + np.clip(step, -0.7, 0.7)
                found = self._errors(there)
                after = self._loss(there, found)
                if after < before:
                    break
                damping *= 4
            else:
                break
            point, errors, damping = there, found, damping / 5
            if before - after < tolerance * before:
                break
        return point

    def polish(self, point: np.ndarray, sweeps: int = 4) -> np.ndarray:
        """Move one constant at a time while the first choices become faster: they never become
        slower."""
        start, best, step = point, self._cost(point), 0.2
        for _ in range(sweeps):
            for number in range(len(point)):
                for sign in (step, -step):
                    there = point.copy()
                    there[number] += sign
                    cost = self._cost(there)
                    if cost < best:
                        point, best = there, cost
                        break
            step /= 1.6
        return point if self._regret(point) <= self._regret(start) else start

    def _regret(self, point: np.ndarray) -> float:
        """Of the first choices themselves, which a cost has softened."""
        return geometric_mean(
            [choice.regret for choice in choices(self.problems, self.parameters.table_at(point))]
        )

    def _cost(self, point: np.ndarray) -> float:
        """What a choice costs, softened, and a little of the fit's loss to stay near it."""
        constants = self.parameters.constants_at(point)
        costs = []
        for problem in self.problems:
            estimates = [_estimate(problem, t, constants) for t in problem.times]
            least = min(estimates)
            weights = [math.exp(-(math.log(e / least)) / SOFTNESS) for e in estimates]
            regrets = [math.log(t.measured / problem.best) for t in problem.times]
            costs.append(sum(map(float.__mul__, weights, regrets)) / sum(weights))
        errors = self._errors(point)
        return statistics.fmean(costs) + 0.02 * float(np.mean(np.abs(errors)) / NOISE)

    def _errors(self, point: np.ndarray) -> np.ndarray:
        constants = self.parameters.constants_at(point)
        predicted = [model.seconds(p, t.candidate, constants[t.family]) for p, t in self._rows]
        return np.log(predicted) - self._times

    def _robust(self, errors: np.ndarray) -> np.ndarray:
        """Square roots of the weights: those of Huber, times the nearness to the best."""
        far = np.maximum(np.abs(errors) / (3 * NOISE), 1.0)
        return self._weights / np.sqrt(far)

    def _loss(self, point: np.ndarray, errors: np.ndarray) -> float:
        scaled = np.abs(errors) / (3 * NOISE)
        huber = np.where(scaled < 1, 0.5 * scaled**2, scaled - 0.5) * 9
        prior = 0.5 * np.sum(((point - self.parameters.start) / PRIOR) ** 2)
        return float(np.sum(self._weights**2 * huber) + prior)

    def _jacobian(self, point: np.ndarray, errors: np.ndarray, step: float = 1e-4) -> np.ndarray:
        columns = []
        for number in range(len(point)):
            there = point.copy()
            there[number] += step
            constants = self.parameters.constants_at(there)
            column = np.zeros(len(errors))
            for row, (problem, time) in enumerate(self._rows):
                if self.parameters.touches(number, time.family):
                    seconds = model.seconds(problem, time.candidate, constants[time.family])
                    column[row] = math.log(seconds) - self._times[row] - errors[row]
            columns.append(column / step)
        return np.stack(columns, axis=1)


def _estimate(problem: Measured, time: Time, constants: dict[str, machine.Constants]) -> float:
    return time.factor * model.seconds(problem.sizes, time.candidate, constants[time.family])


def constants_of(table: Table, problems: Iterable[Measured]) -> dict[str, machine.Constants]:
    families = {t.family for p in problems for t in p.times}
    return {family: machine.Constants.of(table, family) for family in families}


def choices(problems: Sequence[Measured], table: Table) -> list[Choice]:
    """What the model would have chosen, worst first."""
    constants = constants_of(table, problems)
    found = []
    for problem in problems:
        chosen = min(problem.times, key=lambda t: _estimate(problem, t, constants))
        best = min(problem.times, key=lambda t: t.measured)
        ratio = problem.peer / chosen.measured if problem.peer is not None else None
        regret = chosen.measured / problem.best
        found.append(Choice(regret, problem.label, chosen.kernel, best.kernel, ratio))
    return sorted(found, key=lambda choice: -choice.regret)


def report(name: str, problems: Sequence[Measured], table: Table) -> str:
    """How far the first choices are from the best candidates."""
    if not problems:
        return f"{name}: no problems"
    found, constants = choices(problems, table), constants_of(table, problems)
    errors = [
        abs(math.log(_estimate(p, t, constants) / t.measured)) for p in problems for t in p.times
    ]
    mean = geometric_mean([choice.regret for choice in found])
    return (
        f"{name}: {len(found)} problems; first choice over best: geometric mean {mean:.4f}, "
        f"worst {found[0].regret:.3f} ({found[0].label}); "
        f"median error of an estimate {100 * statistics.median(errors):.1f} %"
        f"{_beside_peers(found)}"
    )


def _beside_peers(found: Sequence[Choice]) -> str:
    ratios = [choice.ratio for choice in found if choice.ratio is not None]
    if not ratios:
        return ""
    mean, slow = geometric_mean(ratios), sum(ratio < 0.85 for ratio in ratios)
    return (
        f"; peer over first choice: geometric mean {mean:.4f}, worst {min(ratios):.3f}, "
        f"{slow} of {len(ratios)} below 0.85"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=Path, action="append", metavar="FILE")
    parser.add_argument("--table", type=Path, action="append", default=[], metavar="FILE")
    parser.add_argument("--constants", type=Path, default=machine.CONSTANTS, metavar="FILE")
    parser.add_argument("--polish", action="store_true", help="see above")
    parser.add_argument("--everything", action="store_true", help="hold nothing out")
    parser.add_argument("--write", action="store_true", help="change the file of constants")
    options = parser.parse_args(arguments)

    first, *later = options.rows or ROWS
    gpu, problems = load(first)
    for path in later:
        other, found = load(path)
        if other != gpu:
            raise SystemExit(f"{path} has times of {other}, {first} of {gpu}")
        problems = merged(problems, joined(found))
    for path in options.table:
        problems = merged(problems, tuned(path))
    tables = json.loads(options.constants.read_text())
    before = copy.deepcopy(machine.table_of(tables, gpu))
    fitted, held_out = (problems, []) if options.everything else split(problems)
    parameters = Parameters(before, fitted)
    print(report("before, fitted on", fitted, parameters.table))
    print(report("before, held out ", held_out, parameters.table))
    fit = Fit(parameters, fitted)
    point = fit.run()
    if options.polish:
        point = fit.polish(point)
    table = parameters.table_at(point)
    for path, start in zip(parameters.paths, np.exp(parameters.start), strict=True):
        print(f"  {'.'.join(path[-3:]):45} {start:10.4g} -> {_at(table, path):10.4g}")
    print(report("after, fitted on ", fitted, table))
    print(report("after, held out  ", held_out, table))
    for choice in choices(held_out or fitted, table)[:10]:
        print(f"  {choice.regret:.3f} {choice.label}: {choice.chosen} instead of {choice.best}")
    if options.write:
        tables[gpu] = table
        options.constants.write_text(json.dumps(tables, indent=2) + "\n")
        print(f"wrote {options.constants}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

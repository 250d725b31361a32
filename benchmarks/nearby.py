"""How good the choice is for sizes that were not tuned, by what was tuned of others.

    python benchmarks/nearby.py [--rows FILE]

Of the products in gemm-candidates-tuned.json, which has times of all that a tuner took for
candidates on an H200, each is left out in turn: what ``kernel_api.tuned`` would take for it by the
nearest of the others, what was fastest there, and what the performance model would choose, over the
best of its own candidates. Needs no GPU.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import gemm_extremes
import gemm_few_columns
import gemm_fp8_layers
import gemm_layouts
import gemm_models
from tables import geometric_mean

import kernel_api as ka
from kernel_api.arguments import Arguments
from kernel_api.kernel import Kernel
from kernel_api.metadata import KernelMetadata
from kernel_api.tuning._nearby import FASTEST, expected_fastest
from kernel_api.tuning._problem import Problem

ROWS = Path(__file__).parent / "results" / "h200" / "gemm-candidates-tuned.json"
SUITES = (gemm_models, gemm_layouts, gemm_extremes, gemm_few_columns, gemm_fp8_layers)
CC = 90


class Tuned(NamedTuple):
    """A product, its kernels in the model's order, and microseconds of those that were timed."""

    args: Arguments
    problem: Problem
    kernels: dict[str, Kernel]
    times: dict[str, float]


def load(path: Path) -> list[Tuned]:
    known = {one.label: one for suite in SUITES for one in suite.SUITE.problems}
    found = []
    for row in json.loads(path.read_text())["problems"]:
        args = known[row["problem"]].arguments("meta")
        offered = ka.get_kernels(args, _has_a_share, cc=CC)
        kernels = {kernel.metadata.kernel_name: kernel for kernel in offered}
        times = {name: us for name, us in row["times_us"].items() if name in kernels}
        found.append(Tuned(args, Problem.of(args), kernels, times))
    return found


def _has_a_share(metadata: KernelMetadata) -> bool:
    """Designs that take their tiles were not there yet; alone they are as fast as their twins."""
    return not getattr(metadata.design, "takes_tiles", False)


def _row(one: Tuned, name: str) -> Any:
    """As a table has it."""
    kernel = SimpleNamespace(name=name)
    return SimpleNamespace(
        problem=one.problem, kernel=kernel, median_us=one.times[name], passed=True
    )


def choices(problems: Sequence[Tuned]) -> Iterator[tuple[str, dict[str, float]]]:
    """Of each that has another nearby: its name, and what choices take over the best."""
    known = {one.problem: one for one in problems}
    for one in problems:
        near = one.problem.near(known.keys() - {one.problem})
        if not near:
            continue
        other = known[near[0]]
        there = sorted(other.times, key=other.times.__getitem__)[:FASTEST]
        table = [_row(other, name) for name in there]
        taken = {
            one.kernels[row.kernel.name]: row for row in table if row.kernel.name in one.kernels
        }
        choice = next(iter(one.kernels.values()))
        expected = expected_fastest(one.args, table, taken, choice) if taken else choice
        chosen = {
            "by what is nearby": expected.metadata.kernel_name,
            "the fastest nearby": there[0],
            "by the model": choice.metadata.kernel_name,
        }
        best = min(one.times.values())
        yield (
            str(one.args),
            {how: one.times.get(name, float("nan")) / best for how, name in chosen.items()},
        )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=Path, default=ROWS, metavar="FILE")
    found = list(choices(load(parser.parse_args(arguments).rows)))
    for how in found[0][1]:
        timed = [(of[how], name) for name, of in found if of[how] == of[how]]
        ratios = [ratio for ratio, _ in timed]
        print(
            f"{how}: {len(found)} products, {len(found) - len(timed)} of which without a time; "
            f"over the best: geometric mean {geometric_mean(ratios):.4f}, worst "
            f"{max(timed)[0]:.3f} ({max(timed)[1]}), {sum(r > 1.08 for r in ratios)} above 1.08"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())

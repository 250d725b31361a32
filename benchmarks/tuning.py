"""Suite tuning: the 120 shapes of gemm-models tuned twice, from nothing, and how far that agrees.

    python benchmarks/tuning.py [--only TEXT] [--limit N] [--candidates N] [--out DIR]

Writes a row per problem: the tuned kernel beside the best of ``torch`` in the same heats, and the
times of all candidates in both runs. Prints: the ratio to the peer; the model's regret (its first
choice over the best) and top-1 rate; how often the second run chose another kernel, and what the
first run's choice costs by the second's times; and for every fourth problem the choice measured
again, in graphs and eagerly, over the stored time. The table of the first run, beside the rows
in ``--out``, is what goes into ``kernel_api/tuning/tables``.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gemm_models
import harness
import rows
from problems import Problem
from tuning_figures import figures

import kernel_api as ka
from kernel_api._disk_cache import directory
from kernel_api.tuning import Policy, TuningResult
from kernel_api.tuning._files import RowFiles
from kernel_api.tuning._table import write as write_tables

SUITE = "tuning"
#: Problems of which the choice is measured again.
REPLAYED = 4
#: Other numbers of rounds than those stored: other policies, so that nothing is looked up.
REPLAYS = {"graph": {"rounds": 21}, "eager": {"launches": "eager", "rounds": 21}}


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options().parse_args(arguments)
    problems = [p for p in gemm_models.SUITE.problems if options.only in f"{p.origin} {p.label}"]
    problems = problems[: options.limit]
    first, second = (_tuned(problems, run, options) for run in (1, 2))
    found = [
        _row(problem, one, again, options.candidates)
        for problem, one, again in zip(problems, first, second, strict=True)
    ]
    for number, (problem, one) in enumerate(zip(problems, first, strict=True)):
        if number % REPLAYED == 0:
            found[number]["replays"] = _replays(problem, one)
            print(problem.label, found[number]["replays"], flush=True)
    rows.write(rows.path_of(SUITE, options.out), found)
    print("\n".join(figures(found)))
    return 0


def _options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="problems whose origin or label has this text")
    parser.add_argument("--limit", type=int, help="so many problems")
    parser.add_argument("--candidates", type=int, default=24)
    parser.add_argument("--rest", type=int, default=Policy().rest, help="as a Policy has it")
    parser.add_argument("--out", type=Path, help="a folder for the rows and the table to ship")
    return parser


def _tuned(
    problems: Sequence[Problem], run: int, options: argparse.Namespace
) -> list[TuningResult]:
    """From an empty store, which is left aside."""
    started = time.monotonic()
    args = [problem.arguments("meta") for problem in problems]
    found = ka.autotune(
        args,
        policy=Policy(rest=options.rest),
        max_candidates=options.candidates,
        progress=sys.stderr.isatty(),
    )
    for problem, one in zip(problems, found, strict=True):
        if isinstance(one, Exception):
            raise SystemExit(f"{problem.label}: {one}")
    store = directory() / "tuning"
    if options.out is not None and run == 1:
        write_tables(RowFiles(store).rows(), options.out)
    store.rename(store.with_name(f"tuning-run{run}-{time.time_ns()}"))
    spent = time.monotonic() - started
    print(f"run {run}: {len(problems)} problems in {spent:.1f} s", flush=True)
    return found


def _row(problem: Problem, one: TuningResult, again: TuningResult, candidates: int) -> rows.Row:
    peer = min((row for row in one.rows if _is_torch(row)), key=lambda row: row.median_us)
    best, policy = one.rows[0], one.environment.policy
    return {
        "suite": SUITE,
        "problem": problem.label,
        "subject": best.kernel.name,
        "peer": peer.kernel.name,
        "subject_us": round(best.median_us, 2),
        "peer_us": round(peer.median_us, 2),
        "ratio": round(peer.median_us / best.median_us, 4),
        "spread": round(max(row.spread_us / row.median_us for row in (best, peer)), 4),
        "verified": best.passed,
        "policy": f"{policy.launches}, {policy.l2} L2, rest {policy.rest}, "
        f"heats of {candidates} candidates, median of {policy.rounds} rounds",
        "env": harness.environment(),
        "date": rows.today(),
        "first": _first_of_model(problem, one),
        "runs": [_candidates(result) for result in (one, again)],
    }


def _is_torch(row: Any) -> bool:
    return row.passed and row.kernel.name.startswith("torch")


def _first_of_model(problem: Problem, result: TuningResult) -> str:
    """The name of what is chosen without tuning."""
    first = ka.get_kernels(problem.arguments("meta"))[0].metadata.kernel_name
    assert any(row.kernel.name == first for row in result.rows)
    return first


def _candidates(result: TuningResult) -> dict[str, Any]:
    """Of every candidate: median in us and rounds, or status; the choice first."""
    return {
        row.kernel.name: [round(row.median_us, 3), row.rounds] if row.passed else row.status.value
        for row in result.rows
    }


def _replays(problem: Problem, result: TuningResult) -> dict[str, float]:
    """The choice measured again, over the stored time."""
    wanted = result.kernel.metadata
    args = problem.arguments("meta")
    found = {}
    for name, changes in REPLAYS.items():
        policy = dataclasses.replace(result.environment.policy, **changes)
        again = ka.autotune(
            args, lambda metadata: metadata == wanted, policy=policy, max_candidates=None
        )
        found[name] = round(again.rows[0].median_us / result.rows[0].median_us, 4)
    return found


if __name__ == "__main__":
    sys.exit(main())

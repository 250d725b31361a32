"""The way through the problems of a suite: a dry run lists them, else they are measured in turn.

Rows are on disk before the next problem begins. What raises or is wrong costs its own row only;
what hangs or breaks the GPU ends the process (exit code 1), and ``--resume`` goes on behind it.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import harness
import rows
import torch

DONE, DIED, FAILURES = 0, 1, 2

Found = TypeVar("Found")


class GpuLostError(Exception):
    """The GPU does not answer any more."""


@dataclass
class Run:
    """A way through a suite: what it was asked, its rows, and what became of the rest."""

    options: argparse.Namespace
    journal: rows.Journal
    skipped: list[str] = field(default_factory=list)
    unserved: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    died: bool = False

    def guarded(
        self, problem: str, what: str, prepare: Callable[[], Found], essential: bool = True
    ) -> Found | None:
        """What is prepared, or None if it cannot be had; a lost GPU raises."""
        if self.journal.lost(problem, what):
            return None
        try:
            with self.journal.attempt(problem, what, self.options.patience):
                return prepare()
        except Exception as error:
            if not harness.alive():
                raise GpuLostError(f"{what}: {_reason(error)}") from error
            reason = f"{problem}: {what}: {_reason(error)}"
            if essential:
                self.failures.append(reason)
            else:
                print(f"left out: {reason}", file=sys.stderr, flush=True)
            return None


def drive(
    suite: Any,
    options: argparse.Namespace,
    described: Callable[[Any], Iterable[str]],
    measure: Callable[[Any, Run], list[rows.Row]],
    line: Callable[[rows.Row], str],
    ahead: Callable[[Sequence[Any]], None] = lambda problems: None,
) -> int:
    """Measure, or list, the suite; returns the exit code.

    Args:
        suite: Has a name, problems, and a report of all rows.
        described: What a dry run says of a problem.
        measure: Gives the rows of a problem.
        line: What is printed of a row.
        ahead: Takes all problems, before the first of them is measured.
    """
    harness.rest_after_calls(options.rest)
    problems = [one for one in suite.problems if not options.only or options.only in _text(one)]
    problems = problems[: options.limit]
    if options.dry_run:
        for problem in problems:
            print("\n".join(described(problem)))
        print(f"{suite.name}: {len(problems)} problems")
        return DONE
    if harness.DEVICE == "cuda" and not torch.cuda.is_available():
        print("there is no GPU here; --dry-run lists what would be timed", file=sys.stderr)
        return FAILURES
    torch.manual_seed(options.seed)
    gc.freeze()  # or every capture of a graph would look through all that was imported
    ahead(problems)
    run = Run(options, rows.Journal(rows.path_of(suite.name, options.out), options.resume))
    _through(problems, suite.name, run, measure, line)
    return _summarised(suite.report, run)


def _text(problem: Any) -> str:
    """What ``--only`` looks through."""
    return f"{problem.label} {getattr(problem, 'origin', '')}"


def _through(
    problems: Sequence[Any],
    name: str,
    run: Run,
    measure: Callable[[Any, Run], list[rows.Row]],
    line: Callable[[rows.Row], str],
) -> None:
    """Problem by problem, as long as the budget and the GPU last."""
    budget = harness.Budget(run.options.seconds)
    for problem in progress(problems, name):
        if run.journal.has(problem.label):
            continue
        if run.died or not budget.allows_another():
            run.skipped.append(problem.label)
            continue
        try:
            with budget.step():
                found = measure(problem, run)
        except Exception as error:
            run.failures.append(f"{problem.label}: {_reason(error)}")
            run.died = isinstance(error, GpuLostError) or not harness.alive()
            continue
        if found:
            run.journal.add(found)
        for row in found:
            print(line(row), flush=True)


def _summarised(report: Callable[[list[rows.Row]], list[str]], run: Run) -> int:
    """Say what was measured and what was not; returns the exit code."""
    for said in report(run.journal.rows):
        print(said)
    for problem in run.unserved:
        print(f"nothing but torch is offered: {problem}")
    for failure in run.failures:
        print(f"FAILED {failure}")
    for problem, what in run.journal.never_returned:
        print(f"never returned, left out: {what} on {problem}")
    if run.skipped:
        print(f"skipped {len(run.skipped)}: {'; '.join(run.skipped)}")
    print(f"{len(run.journal.rows)} rows in {run.journal.path}", flush=True)
    if run.died:
        return DIED
    return FAILURES if run.failures else DONE


def progress(items: Sequence[Any], doing: str) -> Iterator[Any]:
    """The items one by one; a bar on stderr if rich is here and someone watches, else lines."""
    if sys.stderr.isatty():
        try:
            from rich.console import Console
            from rich.progress import track
        except ImportError:
            pass
        else:
            yield from track(items, doing, console=Console(stderr=True), transient=True)
            return
    started = time.monotonic()
    for number, item in enumerate(items, 1):
        spent = time.monotonic() - started
        print(
            f"[{spent:6.1f} s] {doing} {number}/{len(items)} {item.label}",
            file=sys.stderr,
            flush=True,
        )
        yield item


def _reason(error: Exception) -> str:
    text = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {text[0][:300]}"


def rest_option(parser: Any) -> None:
    """What is given to `harness.rest_after_calls`."""
    parser.add_argument(
        "--rest",
        type=float,
        default=0.0,
        metavar="N",
        help="let the GPU rest after each call, N times as long; rows go to files named -rested",
    )


# Suites whose problems have one subject --------------------------------------------------


def few_options(description: str | None, rounds: int) -> argparse.ArgumentParser:
    """The options of a suite without candidates and journal, for `in_turn`."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--only", default="", metavar="TEXT", help="problems whose label has TEXT")
    parser.add_argument(
        "--rounds", type=int, default=rounds, metavar="N", help=f"(default: {rounds})"
    )
    rest_option(parser)
    parser.add_argument("--seconds", type=float, metavar="S", help="stop before S seconds are over")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="for the rows")
    return parser


def in_turn(
    name: str,
    problems: Sequence[Any],
    options: argparse.Namespace,
    measure: Callable[[Any, int], rows.Row],
    line: Callable[[rows.Row], str],
    report: Callable[[list[rows.Row]], Iterable[str]],
) -> int:
    """Measure the problems, or list them where there is no GPU; returns the exit code.

    Args:
        measure: Gives the row of a problem, from so many rounds.
        line: What is printed of a row.
        report: Lines that are printed at the end, from all rows.
    """
    harness.rest_after_calls(options.rest)
    chosen = [problem for problem in problems if options.only in problem.label]
    if not torch.cuda.is_available():
        print("there is no GPU here; these would be timed:", file=sys.stderr)
        print("\n".join(problem.label for problem in chosen))
        return FAILURES
    torch.manual_seed(0)
    found: list[rows.Row] = []
    budget = harness.Budget(options.seconds)
    for problem in progress(chosen, name):
        if not budget.allows_another():
            print(f"skipped {problem.label}", file=sys.stderr)
            continue
        try:
            with budget.step():
                found.append(measure(problem, options.rounds))
        except torch.OutOfMemoryError as error:
            print(f"left out: {problem.label}: {_reason(error)}", file=sys.stderr, flush=True)
            gc.collect()
            torch.cuda.empty_cache()
            continue
        rows.write(rows.path_of(name, options.out), found)
        print(line(found[-1]), flush=True)
    print("\n".join(report(found)))
    return DONE

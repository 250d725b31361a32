"""Measure the kernels for problems, and keep what was measured.

``tune FILE...`` tunes the problems of lists in YAML, JSON or CSV, or of what a program recorded
with KERNEL_API_RECORD; without a file, the one that the options describe. What an entry of a list
does not say is as on the command line, but for the sizes.

``tune show [FILE...]`` tells what is known, ``tune export FILE`` and ``tune import FILE`` move it
(and say what was here already, and what is damaged),
``tune prune`` removes what is old or of elsewhere, ``tune verify`` looks for damaged files.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kernel_api.cli._candidates import add_candidate_options, metadata_filter, seconds
from kernel_api.cli._measured import COLUMNS, cells, label, summary
from kernel_api.cli._problem import add_problem_options, on_cpu, problem_arguments
from kernel_api.cli._problem_list import problems
from kernel_api.cli._query import at_least
from kernel_api.cli._render import Output, Table
from kernel_api.cli._tuned import (
    ACTIONS,
    add_policy_options,
    add_store_options,
    policy,
)
from kernel_api.errors import ArgumentError, BenchError, KernelApiError

if TYPE_CHECKING:
    from kernel_api.arguments import Arguments
    from kernel_api.tuning import Problem
    from kernel_api.tuning._choice import Order

HELP = "find the fastest kernels by measuring them; show and move what was measured"


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "what",
        nargs="*",
        metavar="FILE",
        help=f"lists of problems; or {', '.join(ACTIONS)}, and its file",
    )
    add_problem_options(parser, devices=("cuda", "cpu"), device=None)
    group = parser.add_argument_group("candidates")
    add_candidate_options(group)
    group.add_argument(
        "--limit",
        type=at_least(1),
        metavar="COUNT",
        help="the first COUNT of the order, and the first of every provider (default: 24; --all: "
        "all of them)",
    )
    group.add_argument(
        "--budget",
        type=seconds,
        metavar="SECONDS",
        help="for a problem; then no more candidates are begun (default: none)",
    )
    group.add_argument(
        "--order",
        choices=("model", "heuristics"),
        default="model",
        help="in which they are begun, and of which --limit takes the first: that of the "
        "performance model, or of nvMatmulHeuristics (the extra heuristics) (default: model)",
    )
    add_policy_options(parser)
    add_store_options(parser)


def run(options: argparse.Namespace, output: Output) -> int:
    """0, or 1 if a problem has no kernel that passed, nothing is known, or a file is damaged."""
    action, *others = options.what or [""]
    if action in ACTIONS:
        return ACTIONS[action](others, options, output)
    return _tune(list(map(Path, options.what)), options, output)


def _tune(files: Sequence[Path], options: argparse.Namespace, output: Output) -> int:
    from kernel_api import tuning

    listed = _listed(files, options)
    asked, without_room = _placed(listed, options)
    limit = {"max_candidates": options.limit} if options.limit is not None else {}
    tuned = tuning.autotune(
        list(asked.values()),
        metadata_filter(options),
        cc=options.cc,
        providers=options.providers,
        budget_s=options.budget,
        timeout_s=options.timeout,
        policy=policy(options),
        order=_order(options.order),
        progress=output.for_reader,
        **({"max_candidates": None} if options.all else limit),
    )
    found = {**without_room, **dict(zip(asked, tuned, strict=True))}
    rows = [_row(problem, found[problem]) for problem in listed]
    failed = [row for row in rows if row["reason"] is not None]
    output.show(
        {"passed": not failed, "problems": rows},
        Table(COLUMNS, [cells(row) for row in rows]),
        *(f"{row['problem']}: {row['reason']}" for row in failed),
        f"{len(rows) - len(failed)} of {len(rows)} tuned, "
        f"{sum(row['measured'] for row in rows)} candidates measured now",
    )
    return 1 if failed else 0


def _order(name: str) -> Order | None:
    """None for that of the performance model; raises ArgumentError for one that is not here."""
    from kernel_api.tuning import heuristics

    if name == "model":
        return None
    if not heuristics.is_installed():
        raise ArgumentError(
            "--order heuristics needs nvidia-matmul-heuristics, which is not installed; "
            "pip install 'kernel-api[heuristics]', or leave it out"
        )
    return heuristics.ranked


def _listed(files: Sequence[Path], options: argparse.Namespace) -> dict[Problem, Arguments]:
    """The problems of the files, or of the options, without data: the tuner makes its own."""
    from kernel_api.tuning import Problem

    on_meta = argparse.Namespace(**{**vars(options), "device": "meta"})
    if not files:
        args = problem_arguments(on_meta)
        return {Problem.of(args): args}
    listed = [args for path in files for args in problems(path, on_meta)]
    return {Problem.of(args): args for args in listed}


def _placed(
    listed: dict[Problem, Arguments], options: argparse.Namespace
) -> tuple[dict[Problem, Arguments], dict[Problem, BenchError]]:
    """The problems where they are asked for, and those that have no room there."""
    if options.device != "cpu":
        return listed, {}
    asked: dict[Problem, Arguments] = {}
    without_room: dict[Problem, BenchError] = {}
    for problem, args in listed.items():  # what lies nowhere is for the GPUs, if there are any
        try:
            asked[problem] = on_cpu(args)
        except ArgumentError as error:
            without_room[problem] = BenchError(f"OOM, {error}")
    return asked, without_room


def _row(problem: Problem, found: Any) -> dict[str, Any]:
    """What came of a problem, as JSON."""
    known = {"problem": label(problem), "digest": problem.digest, "sizes": problem.sizes}
    if isinstance(found, KernelApiError):
        reason = f"{type(found).__name__}: {found}"
        return {**known, **summary(()), "measured": 0, "reason": reason}
    return {**known, **summary(found.rows), "measured": found.measured, "reason": None}

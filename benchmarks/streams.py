"""What suites of kernels share that do little but move bytes: a problem's kernels beside its peers
and beside a copy, in the same run.

The ceiling is what an element-wise kernel moves that copies a large tensor, bytes read and written;
``of_ceiling`` of a row is the kernel's share of it. ``peer`` is the fastest of the peers.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import driver
import harness
import rows
import suite
from tables import geometric_mean

import kernel_api as ka
from kernel_api.kernel import Kernel


class Problem(Protocol):
    """What a suite is of.

    Attributes:
        operation: Rows are summarised by it.
        label: What rows call it.
        bytes: What must move at least.
    """

    @property
    def operation(self) -> str: ...

    @property
    def label(self) -> str: ...

    @property
    def bytes(self) -> int: ...

    def arguments(self, device: str) -> Any:
        """The problem on new random operands."""


@dataclass(frozen=True)
class Suite:
    """A suite of them.

    Attributes:
        peers_of: Of a problem and its arguments, calls by name.
    """

    name: str
    problems: Sequence[Problem]
    peers_of: Callable[[Any, Any], dict[str, Callable[[], Any]]]

    def report(self, measured: list[rows.Row]) -> list[str]:
        """Of the best ranked kernels, by operation."""
        found = []
        for operation in dict.fromkeys(problem.operation for problem in self.problems):
            labels = {p.label for p in self.problems if p.operation == operation}
            chosen = [r for r in measured if r["problem"] in labels and not r["rank"]]
            if chosen:
                ratio = geometric_mean([row["ratio"] for row in chosen])
                share = [row["of_ceiling"] for row in chosen]
                found.append(
                    f"{operation}: {ratio:.2f} of torch (geometric mean), {100 * min(share):.1f} "
                    f"to {100 * max(share):.1f} % of the copy, {len(chosen)} problems"
                )
        return found


def main(of: Suite, description: str | None, arguments: Sequence[str] | None = None) -> int:
    """Measure the problems that the arguments of the command line say."""
    options = suite.options(of.name, description).parse_args(arguments)
    return driver.drive(
        of,
        options,
        described=lambda problem: _described(of, problem, options),
        measure=lambda problem, run: _measure(of, problem, run),
        line=_line,
    )


def _described(of: Suite, problem: Problem, options: argparse.Namespace) -> Iterator[str]:
    """What a dry run says of a problem."""
    args = problem.arguments("meta")
    yield f"{problem.label}  peers: {', '.join(of.peers_of(problem, args))}"
    for rank, kernel in enumerate(suite.candidates(args, options)):
        seconds = kernel.predict(args) or 0.0
        yield f"    {rank:2} {kernel.metadata.kernel_name}  {1e6 * seconds:9.1f} us expected"


def _measure(of: Suite, problem: Problem, run: driver.Run) -> list[rows.Row]:
    """The rows of a problem: of its best ranked kernels, or of all."""
    options = run.options
    count = min(harness.operand_sets(problem.bytes), max(2, suite.MOST_BYTES // problem.bytes))
    sets = [problem.arguments(harness.DEVICE) for _ in range(count)]
    subjects: dict[Kernel, harness.Calls] = {}
    offered = suite.candidates(sets[0], options)
    if not offered:
        run.unserved.append(f"{problem.label} ({'; '.join(suite.refusals(sets[0], None))})")
        return []
    for kernel in offered:
        own = functools.partial(_prepared, kernel, sets)
        launches = run.guarded(problem.label, kernel.metadata.kernel_name, own)
        if launches is not None:
            subjects[kernel] = launches
    if not subjects:
        return []
    beside = [of.peers_of(problem, args) for args in sets]
    peers = {name: [one[name] for one in beside] for name in beside[0]}
    calls = {
        **peers,
        **{kernel.metadata.kernel_name: own for kernel, own in subjects.items()},
        harness.COPY: harness.copy(),
    }
    with run.journal.attempt(problem.label, "timing", options.patience):
        found, policy = harness.interleaved(calls, problem.bytes, options.policy, options.rounds)
    ranks = {kernel: rank for rank, kernel in enumerate(offered)}
    return [
        _row(of.name, problem, kernel, ranks[kernel], sets[0], list(peers), found, policy)
        for kernel in subjects
    ]


def _row(
    of: str,
    problem: Problem,
    kernel: Kernel,
    rank: int,
    args: Any,
    peers: Sequence[str],
    found: Any,
    policy: str,
) -> rows.Row:
    name = kernel.metadata.kernel_name
    peer = min(peers, key=lambda one: found[one].median)
    extra = {
        "family": kernel.family_name(),
        "rank": rank,
        "bytes": problem.bytes,
        "peers_us": {one: round(found[one].median, 2) for one in peers},
        **harness.beside_copy(problem.bytes, found[name].median, found[harness.COPY].median),
        "predicted_us": round(1e6 * (kernel.predict(args) or 0.0), 2),
    }
    subject, beside = (name, found[name]), (peer, found[peer])
    return rows.row(of, problem.label, subject, beside, True, policy, **extra)


def _prepared(kernel: Kernel, sets: Sequence[Any]) -> harness.Calls:
    """Verified, and a launch for each set."""
    verdict = ka.verify(kernel, sets[0])
    if not verdict:
        raise RuntimeError(f"WRONG: {verdict.reason}")
    return [functools.partial(kernel.prepare(args), *args.tensors) for args in sets]


def _line(row: rows.Row) -> str:
    """A row for the reader."""
    return (
        f"{row['problem']:44} {row['ratio']:6.3f} of {row['peer']:26} {row['subject_us']:9.2f} us "
        f"{row['tb_s']:5.2f} TB/s {100 * row['of_ceiling']:5.1f} % of the copy's "
        f"{row['ceiling_tb_s']:.2f} +-{100 * row['spread']:.1f} % {row['subject']}"
    )

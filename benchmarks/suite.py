"""What the scripts of the GEMM suites share: their options, and how a problem is measured.

Of every problem: the kernels that are offered, best first; each verified, then all of them timed
beside the peers in one run.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import driver
import harness
import rows
import torch
from peers import Peer, peers_of
from problems import Problem
from tables import geometric_mean

import kernel_api as ka
from kernel_api.kernel import Kernel
from kernel_api.providers.cutedsl.gemm import machine, model
from kernel_api.verification import FACTOR, FACTOR_REORDERED, Expected, judge, poison, prepare

#: Providers of what the user already has: peers, not subjects.
NOT_OURS = ("torch", "reference")
#: Memory that the operand sets of a problem may take.
MOST_BYTES = 24 << 30

#: Further callables timed in the same run, neither subject nor peer: by name, with the bytes
#: that they move if that is what they are about.
Beside = Callable[[Problem, Sequence[ka.GemmArguments]], Mapping[str, harness.Calls]]
#: What a row says beyond time and ratio, from the problem and all medians in microseconds.
Extra = Callable[[Problem, float, Mapping[str, float]], Mapping[str, Any]]
Peers = Callable[[Problem], Mapping[str, Peer]]
#: What is wrong with what a peer computed, if anything.
Wrong = Callable[[ka.GemmArguments], str | None]


def not_this_product(args: ka.GemmArguments) -> str | None:
    """By the rule of our own kernels, with more room."""
    verdict = judge(args, factor=3.0)
    return None if verdict else verdict.reason


@dataclass(frozen=True)
class Suite:
    """A list of problems, each timed beside its peers.

    Attributes:
        name: Of the file of rows.
        problems: In the order in which they are measured.
        peers: What each is timed beside.
        wrong: Says whether a peer computes something else.
        beside: What else is timed in the same run.
        extra: What a row says beside.
        report: Lines that are printed at the end, from all rows.
    """

    name: str
    problems: tuple[Problem, ...]
    peers: Peers = lambda problem: peers_of(problem)
    wrong: Wrong = lambda args: not_this_product(args)
    beside: Beside = lambda problem, args: {}
    extra: Extra = lambda problem, microseconds, medians: {}
    report: Callable[[list[rows.Row]], list[str]] = lambda all_rows: []


def options(suite: str, description: str | None) -> argparse.ArgumentParser:
    """The options that every suite has."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    what = parser.add_argument_group("what is measured")
    what.add_argument("--only", metavar="TEXT", help="problems whose label or origin has TEXT")
    what.add_argument("--limit", type=int, metavar="N", help="at most N problems")
    what.add_argument("--candidates", type=int, default=1, metavar="N", help="the N best ranked")
    what.add_argument(
        "--all",
        action="store_true",
        help=f"time every candidate; keep the times of dense products in "
        f"{rows.Candidates.SUITE}.json, and others as rows",
    )
    what.add_argument("--filter", default="", metavar="TEXT", help="kernels whose name has TEXT")
    what.add_argument("--skip", action="append", default=[], metavar="TEXT", help="but not TEXT")
    how = parser.add_argument_group("how")
    how.add_argument("--rounds", type=int, default=20, metavar="N", help="(default: 20)")
    driver.rest_option(how)
    how.add_argument("--policy", choices=("auto", "graph", "eager"), default="auto")
    how.add_argument("--seconds", type=float, metavar="S", help="stop before S seconds are over")
    how.add_argument(
        "--patience", type=float, default=90.0, metavar="S", help="of one kernel (default: 90)"
    )
    how.add_argument(
        "--resume", action="store_true", help=f"keep the rows of {suite}.json, measure the rest"
    )
    how.add_argument("--out", type=Path, metavar="FOLDER", help="for the rows")
    how.add_argument("--seed", type=int, default=0, help="of the random operands (default: 0)")
    how.add_argument(
        "--dry-run", action="store_true", help="list problems, candidates and peers; time nothing"
    )
    how.add_argument("--cc", default="90", help="architecture of a dry run (default: 90)")
    return parser


def run(suite: Suite, options: argparse.Namespace) -> int:
    """Measure, or list, the suite; returns the exit code."""
    return driver.drive(
        suite,
        options,
        described=lambda problem: described(problem, options, suite.peers),
        measure=lambda problem, run: Measurement(suite, problem, run).rows(),
        line=line,
    )


# One problem -----------------------------------------------------------------------------


class Measurement:
    """One problem: its kernels verified, then timed together with its peers."""

    def __init__(self, suite: Suite, problem: Problem, run: driver.Run) -> None:
        self.suite, self.problem, self.run, self.options = suite, problem, run, run.options
        most = max(1, MOST_BYTES // max(problem.bytes, 1))
        sets = min(harness.operand_sets(problem.bytes), most)
        self.sets = [problem.arguments(harness.DEVICE) for _ in range(sets)]

    def rows(self) -> list[rows.Row]:
        """The rows of the best ranked kernels. Times of all kernels of dense products go to the
        candidates' file; of others they are rows."""
        problem, options = self.problem, self.options
        offered = candidates(self.sets[0], options)
        if not offered:
            why = "; ".join(refusals(self.sets[0], None))
            self.run.unserved.append(f"{problem.label} ({why or 'filtered out'})")
            return []
        subjects: dict[Kernel, harness.Calls] = {}
        for rank, kernel in enumerate(offered):
            own = functools.partial(self._own, kernel, whole=rank < options.candidates)
            calls = self.run.guarded(problem.label, kernel.metadata.kernel_name, own)
            if calls is not None:
                subjects[kernel] = calls
        if not subjects:
            return []
        peers = {}
        for name, peer in self.suite.peers(problem).items():
            taken = functools.partial(self._peer, peer)
            calls = self.run.guarded(problem.label, name, taken, essential=False)
            if calls is not None:
                peers[name] = calls
        if not peers:
            raise RuntimeError("no peer takes the problem")
        return self._timed(offered, subjects, peers)

    def _timed(
        self,
        offered: list[Kernel],
        subjects: dict[Kernel, harness.Calls],
        peers: dict[str, harness.Calls],
    ) -> list[rows.Row]:
        problem, options = self.problem, self.options
        named = {kernel.metadata.kernel_name: calls for kernel, calls in subjects.items()}
        beside = self.suite.beside(problem, self.sets)
        everything = {**peers, **named, **beside}
        if self.run.journal.lost(problem.label, "timing"):
            self.run.failures.append(f"{problem.label}: timing ended a process before")
            return []
        with self.run.journal.attempt(problem.label, "timing", options.patience):
            found, policy = harness.interleaved(
                everything, problem.bytes, options.policy, options.rounds
            )
        medians = {name: timing.median for name, timing in found.items()}
        peer = min(peers, key=lambda name: medians[name])
        told = options.candidates
        if options.all and type(self.sets[0]) is ka.GemmArguments:
            self._keep_candidates(subjects, medians, peer, policy)
        elif options.all:
            told = len(offered)
        measured = []
        for rank, kernel in enumerate(offered[:told]):
            name = kernel.metadata.kernel_name
            if kernel not in subjects:
                continue
            extra = {
                "family": kernel.family_name(),
                "rank": rank,
                "operations": problem.operations,
                "bytes": problem.bytes,
                "tflops": round(1e-6 * problem.operations / medians[name], 1),
                "peers_us": {n: round(medians[n], 2) for n in peers},
                **({"origin": problem.origin} if problem.origin else {}),
                **self.suite.extra(problem, medians[name], medians),
            }
            subject, best_peer = (name, found[name]), (peer, found[peer])
            measured.append(
                rows.row(self.suite.name, problem.label, subject, best_peer, True, policy, **extra)
            )
        return measured

    def _own(self, kernel: Kernel, whole: bool) -> harness.Calls:
        """Verified and prepared. Where it is one of many candidates, only what it computes is
        compared, with a reference that all of them share."""
        if whole:
            verdict = ka.verify(kernel, self.sets[0])
        else:
            args = self.sets[0]
            prepare(args)
            kernel.run(args)
            factor = FACTOR_REORDERED if kernel.reorders_accumulation else FACTOR
            verdict = self._expected.judge(args, factor)
        if not verdict:
            raise RuntimeError(f"WRONG: {verdict.reason}")
        return [functools.partial(kernel.prepare(args), *args.tensors) for args in self.sets]

    @functools.cached_property
    def _expected(self) -> Expected:
        return Expected(self.sets[0])

    def _peer(self, peer: Peer) -> harness.Calls:
        calls = [peer(args) for args in self.sets]
        out = self.sets[0].out.tensor
        poison(out)
        returned = calls[0]()
        if isinstance(returned, torch.Tensor) and returned.data_ptr() != out.data_ptr():
            out.copy_(returned)
        wrong = self.suite.wrong(self.sets[0])
        if wrong is not None:
            raise RuntimeError(f"its result is not this product: {wrong}")
        return calls

    def _keep_candidates(
        self,
        subjects: Mapping[Kernel, harness.Calls],
        medians: Mapping[str, float],
        peer: str,
        policy: str,
    ) -> None:
        args = self.sets[0]
        sizes = model.Problem.of(args)
        path = rows.path_of(rows.Candidates.SUITE, self.options.out)
        rows.Candidates(path).add(
            {k.metadata.kernel_name: known_of(k, args, sizes) for k in subjects},
            {
                "problem": self.problem.label,
                "sizes": dataclasses.asdict(sizes),
                "times_us": {
                    k.metadata.kernel_name: round(medians[k.metadata.kernel_name], 2)
                    for k in subjects
                },
                "peer": peer,
                "peer_us": round(medians[peer], 2),
                "policy": policy,
                "env": harness.environment(),
                "date": rows.today(),
            },
        )


def candidates(args: ka.GemmArguments, options: argparse.Namespace) -> list[Kernel]:
    """What is timed: the best ranked of what is offered, or all of it."""
    asked = options.cc if args.device.type == "meta" else None
    offered = [
        kernel
        for kernel in ka.get_kernels(args, cc=asked)
        if kernel.metadata.provider not in NOT_OURS
        and options.filter in kernel.metadata.kernel_name
        and not any(text in kernel.metadata.kernel_name for text in options.skip)
    ]
    widest: dict[Any, Kernel] = {}
    for kernel in offered:
        known = widest.setdefault((type(kernel), kernel.metadata.design), kernel)
        if _alignment(kernel) > _alignment(known):
            widest[type(kernel), kernel.metadata.design] = kernel
    # A design's variants for operands that are aligned to less are the same with slower copies.
    chosen = [kernel for kernel in offered if kernel in widest.values()]
    return chosen if options.all else chosen[: options.candidates]


def _alignment(kernel: Kernel) -> int:
    return sum(tensor.alignment for tensor in kernel.metadata.operands.tensors.values())


def known_of(kernel: Any, args: ka.GemmArguments, sizes: model.Problem) -> rows.Row:
    """What the model knows of a kernel, and the factor that the kernel puts on its estimate."""
    candidate = getattr(kernel, "candidate", None)
    known: rows.Row = {"family": kernel.family_name()}
    if candidate is not None:
        estimate = model.seconds(
            sizes, candidate, machine.constants_on(args.device, kernel.family_name())
        )
        known["candidate"] = dataclasses.asdict(candidate)
        known["factor"] = round(kernel.predict(args) / estimate, 6)
    return known


def described(
    problem: Problem, options: argparse.Namespace, peers_of: Peers = peers_of
) -> Iterator[str]:
    """What a dry run says of a problem."""
    args = problem.arguments("meta")
    offered = candidates(args, options)
    peers = ", ".join(peers_of(problem))
    origin = f"  [{problem.origin}]" if problem.origin else ""
    yield f"{problem.label}{origin}  peers: {peers}"
    if not offered:
        yield "    nothing but torch is offered"
        yield from (f"       {reason}" for reason in refusals(args, options.cc))
    for rank, kernel in enumerate(offered):
        seconds = kernel.predict(args)
        expected = "" if seconds is None else f"  {1e6 * seconds:9.1f} us expected"
        yield f"    {rank:2} {kernel.metadata.kernel_name}{expected}"


def refusals(args: ka.GemmArguments, cc: str | None) -> list[str]:
    """Why our families do not take the arguments."""
    rejected = ka.explain(args, cc=cc).rejected
    return [f"{r.family}: {r.reason}" for r in rejected if r.provider not in NOT_OURS]


# What is written -------------------------------------------------------------------------


def line(row: rows.Row) -> str:
    """A row for the reader."""
    return (
        f"{row['problem']:44} {row['ratio']:6.3f} of {row['peer']:17} {row['peer_us']:9.2f} us "
        f"{row['subject_us']:9.2f} us {row['tflops']:7.1f} TF +-{100 * row['spread']:.1f} % "
        f"{row['subject']}"
    )


def mean_ratio(measured: list[rows.Row]) -> list[str]:
    """Of the best ranked kernels."""
    ratios = [row["ratio"] for row in measured if not row["rank"]]
    if not ratios:
        return []
    mean, worst = geometric_mean(ratios), min(ratios)
    return [f"geometric mean {mean:.3f} of {len(ratios)} problems, worst {worst:.3f}"]


def mean_and_ten_worst(measured: list[rows.Row]) -> list[str]:
    first = sorted((row for row in measured if not row["rank"]), key=lambda row: row["ratio"])
    worst = [f"  {line(row)}  {row.get('origin', '')}" for row in first[:10]]
    return [*mean_ratio(measured), "the worst:", *worst] if first else []

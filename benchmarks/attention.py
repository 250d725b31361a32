"""What the suites of attention share: problems, what results are compared with, the way through.

Operands are random bf16, (B, H, S, D) in memory (B, S, H, D). Of every problem the first choice of
``get_kernels``, or several kernels, and the first peer that takes it are timed in one run, beside
other libraries where they are installed (``peers_us``). A result is ``verified`` where it is right
by the rule of ``kernel_api.verify``, in one head of the first sequence and one of the last,
computed in float64; and where no row, of all heads, is farther from the peer's than SHARE of its
norm. A reference of all heads would not fit.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import driver
import harness
import rows
import suite
import torch
from tables import geometric_mean

import kernel_api as ka
from kernel_api.kernel import Kernel
from kernel_api.verification import FACTOR_REORDERED, judge, poison

BF16 = torch.bfloat16
#: How the product is called that tells at which clocks the GPU ran.
MATMUL = "8192^3"
#: Of the norm of a row: both results are rounded, and so are probabilities.
SHARE = 4 * torch.finfo(BF16).eps

#: What a peer computed; None: it is not to be compared with.
Result = torch.Tensor | None
#: Computes on the operands of some arguments, and returns its results, in the order of theirs.
Peer = Callable[[Any], Callable[[], Any]]


@dataclass(frozen=True)
class Problem:
    """Attention of S queries to S keys.

    Attributes:
        H_kv: Heads of keys and values; each is for H / H_kv heads of queries.
        D: Elements of a row of a head.
    """

    B: int
    H: int
    H_kv: int
    S: int
    D: int
    causal: bool = False

    #: Whether all peers are timed, and the fastest is what rows compare with; or the first alone.
    every_peer: ClassVar[bool] = False

    @property
    def label(self) -> str:
        """What rows call it."""
        heads = f"{self.H}" if self.H_kv == self.H else f"{self.H}/{self.H_kv}"
        return f"{self.B}x{heads}x{self.S}x{self.D} (B x H x S x D) {self.masked}"

    @property
    def masked(self) -> str:
        return "causal" if self.causal else "full"

    @property
    def origin(self) -> str:
        """What plots colour alike."""
        return f"D{self.D},{self.masked}"

    @property
    def operations(self) -> int:
        """Of both products, as far as scores are seen."""
        return 4 * self.B * self.H * self.S**2 * self.D // (2 if self.causal else 1)

    @property
    def bytes(self) -> int:
        """What must move at least: each element of Q, K, V and out once."""
        return 4 * self.B * self.S * self.D * (self.H + self.H_kv)

    @property
    def sets(self) -> int:
        """Of operands, so that none of them is in L2 when its turn comes again."""
        return harness.operand_sets(self.bytes)

    def arguments(self, device: str) -> Any:
        """The problem on new random operands."""
        raise NotImplementedError

    def peers(self) -> dict[str, Peer]:
        """By name; those that do not take the problem are left out."""
        raise NotImplementedError

    def libraries(self) -> dict[str, Peer]:
        """Further peers by name, of packages that are here; all that take the problem are timed."""
        return {}

    def compared(self, args: Any) -> list[torch.Tensor]:
        """What a peer's results are compared with."""
        raise NotImplementedError

    def parts(self, args: Any) -> Iterator[Any]:
        """Arguments of the heads that are computed in float64, on the same memory."""
        raise NotImplementedError

    def beside(self, sets: Sequence[Any]) -> Mapping[str, harness.Calls]:
        """What else is timed in the same run."""
        return {}

    def extra(self, microseconds: float, medians: Mapping[str, float]) -> Mapping[str, Any]:
        """What a row says beside."""
        return {}

    # Parts -------------------------------------------------------------------------------

    def queries(self, device: str) -> torch.Tensor:
        return self.heads(self.H, device)

    def keys(self, device: str) -> torch.Tensor:
        return self.heads(self.H_kv, device)

    def heads(self, count: int, device: str) -> torch.Tensor:
        drawn = torch.randn(self.B, self.S, count, self.D, device=device, dtype=BF16)
        return drawn.transpose(1, 2)

    @property
    def options(self) -> dict[str, Any]:
        return {"mask": ka.masks.Causal()} if self.causal else {}

    def ends(self, heads: int) -> list[tuple[slice, int]]:
        """The first sequence with the first of some heads, and the last with the last."""
        found = [(slice(0, 1), 0), (slice(self.B - 1, self.B), heads - 1)]
        return found[: self.B * heads]


@dataclass(frozen=True)
class Suite:
    """A list of problems.

    Attributes:
        name: Of the file of rows.
        problems: In the order in which they are measured.
        quick: Those that ``--quick`` measures.
        report: Lines that are printed at the end, from all rows.
        policy: How they are timed unless the options say.
    """

    name: str
    problems: tuple[Any, ...]
    quick: tuple[Any, ...]
    report: Callable[[list[rows.Row]], list[str]] = field(default=lambda found: means(found))
    policy: str = "auto"


# One problem -----------------------------------------------------------------------------


class Measurement:
    """One problem: its kernels verified, then timed together with a peer."""

    def __init__(self, of: Suite, problem: Problem, run: driver.Run) -> None:
        self.suite, self.problem, self.run, self.options = of, problem, run, run.options
        self.sets = [problem.arguments(harness.DEVICE) for _ in range(problem.sets)]

    def rows(self) -> list[rows.Row]:
        problem = self.problem
        offered = suite.candidates(self.sets[0], self.options)
        if not offered:
            why = "; ".join(suite.refusals(self.sets[0], None))
            self.run.unserved.append(f"{problem.label} ({why or 'filtered out'})")
            return []
        peers, expected = self._peers()
        libraries = self._libraries(expected)
        subjects: dict[Kernel, harness.Calls] = {}
        for kernel in offered:
            own = functools.partial(self._own, kernel, expected)
            calls = self.run.guarded(problem.label, kernel.metadata.kernel_name, own)
            if calls is not None:
                subjects[kernel] = calls
        return self._timed(offered, subjects, peers, libraries) if subjects else []

    def _timed(
        self,
        offered: list[Kernel],
        subjects: dict[Kernel, harness.Calls],
        peers: dict[str, harness.Calls],
        libraries: dict[str, harness.Calls],
    ) -> list[rows.Row]:
        problem, options = self.problem, self.options
        named = {kernel.metadata.kernel_name: calls for kernel, calls in subjects.items()}
        beside = dict(problem.beside(self.sets))
        if not peers and not beside:
            raise RuntimeError("no peer takes the problem")
        if self.run.journal.lost(problem.label, "timing"):
            raise RuntimeError("timing ended a process before")
        policy = self.suite.policy if options.policy == "auto" else options.policy
        with self.run.journal.attempt(problem.label, "timing", options.patience):
            calls = {**peers, **libraries, **named, **beside, **self._clocks()}
            found, how = harness.interleaved(calls, problem.bytes, policy, options.rounds)
            if policy == "graph" and peers and beside and how.startswith("eager"):
                peers, calls = {}, {**named, **beside}  # a peer that cannot be captured
                found, how = harness.interleaved(calls, problem.bytes, policy, options.rounds)
        medians = {name: timing.median for name, timing in found.items()}
        peer = min(peers or beside, key=lambda name: medians[name])
        measured = []
        for rank, kernel in enumerate(offered):
            name = kernel.metadata.kernel_name
            if kernel not in subjects:
                continue
            extra = {
                "family": kernel.family_name(),
                "rank": rank,
                "operations": problem.operations,
                "bytes": problem.bytes,
                "S": problem.S,
                "origin": problem.origin,
                "tflops": round(1e-6 * problem.operations / medians[name], 1),
                "predicted_us": round(1e6 * (kernel.predict(self.sets[0]) or 0.0), 2),
                **problem.extra(medians[name], medians),
            }
            if len(peers) + len(libraries) > 1:
                extra["peers_us"] = {n: round(medians[n], 2) for n in (*peers, *libraries)}
            if not beside:
                extra["peer_tflops"] = round(1e-6 * problem.operations / medians[peer], 1)
            if MATMUL in medians:
                rate = harness.MATMUL_OPERATIONS / medians[MATMUL]
                extra["matmul_tflops"] = round(1e-6 * rate, 1)
            subject, best = (name, found[name]), (peer, found[peer])
            measured.append(
                rows.row(self.suite.name, problem.label, subject, best, True, how, **extra)
            )
        return measured

    def _clocks(self) -> dict[str, harness.Calls]:
        """What tells at which clocks a problem ran that is not much shorter."""
        enough = harness.MATMUL_OPERATIONS / 5
        long = harness.DEVICE == "cuda" and self.problem.operations > enough
        return {MATMUL: [harness.matmul()]} if long else {}

    def _peers(self) -> tuple[dict[str, harness.Calls], list[Result] | None]:
        """Those that are timed by their names, and what the first of them computes, which others
        have to be near to."""
        taken: dict[str, harness.Calls] = {}
        expected = None
        for name, peer in self.problem.peers().items():
            called = functools.partial(self._compared, name, peer, expected)
            found = self.run.guarded(self.problem.label, name, called, essential=False)
            if found is None:
                continue
            taken[name] = found[0]
            expected = expected or found[1]
            if not self.problem.every_peer:
                break
        return taken, expected

    def _libraries(self, expected: list[Result] | None) -> dict[str, harness.Calls]:
        """Those that take the problem, and are as near to the peer as ours have to be."""
        found = {}
        for name, peer in self.problem.libraries().items():
            prepare = functools.partial(self._compared, name, peer, expected)
            taken = self.run.guarded(self.problem.label, name, prepare, essential=False)
            if taken is not None:
                found[name] = taken[0]
        return found

    def _compared(
        self, name: str, peer: Peer, expected: list[Result] | None
    ) -> tuple[harness.Calls, list[Result] | None]:
        calls, results = self._called(peer)
        for found, other in zip(results or (), expected or (), strict=False):
            if found is None or other is None:
                continue
            if not (apart := distance(found, other)) <= 1:
                raise RuntimeError(f"{name} is {apart:.3g} of what is allowed off the peer")
        return calls, results

    def _called(self, peer: Peer) -> tuple[harness.Calls, list[Result] | None]:
        calls = [peer(args) for args in self.sets]
        returned = calls[0]()
        harness.synchronize()
        results = [returned] if isinstance(returned, torch.Tensor) else list(returned)
        comparable = getattr(peer, "comparable", True)
        return calls, results if comparable else None

    def _own(self, kernel: Kernel, expected: list[Result] | None) -> harness.Calls:
        """Compared, and a launch for each set."""
        args = self.sets[0]
        calls = [functools.partial(kernel.prepare(one), *one.tensors) for one in self.sets]
        for output in args.outputs.values():
            poison(output.tensor)
        calls[0]()
        harness.synchronize()
        for part in self.problem.parts(args):
            verdict = judge(part, FACTOR_REORDERED)
            if not verdict:
                raise RuntimeError(f"WRONG: {verdict.reason} in {part}")
        names = list(args.outputs)
        for name, found, other in zip(
            names, self.problem.compared(args), expected or (), strict=False
        ):
            if other is None:
                continue
            apart = distance(found, other)
            if not apart <= 1:
                raise RuntimeError(f"WRONG: {name} is {apart:.3g} of what is allowed off the peer")
        return calls


def distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest of a row to what is allowed: SHARE of its norm, or of that of most rows."""
    norm = functools.partial(torch.linalg.vector_norm, dim=-1)
    size = norm(expected.float())
    allowed = SHARE * torch.maximum(size, size.median())
    return float((norm(found.float() - expected.float()) / allowed).max())


# All of them -----------------------------------------------------------------------------


def run(of: Suite, description: str | None, arguments: Sequence[str] | None) -> int:
    """Measure, or list, the suite; returns the exit code."""
    parser = suite.options(of.name, description)
    parser.set_defaults(rounds=11)
    parser.add_argument("--quick", action="store_true", help="a few problems")
    options = parser.parse_args(arguments)
    return driver.drive(
        dataclasses.replace(of, problems=of.quick) if options.quick else of,
        options,
        described=lambda problem: described(problem, options),
        measure=lambda problem, run: Measurement(of, problem, run).rows(),
        line=line,
        ahead=lambda problems: compile_ahead(problems, options),
    )


def compile_ahead(problems: Sequence[Problem], options: argparse.Namespace) -> None:
    """All kernels at once, by several processes; what fails, fails again where it is used."""
    needed: dict[Any, tuple[Kernel, Any]] = {}
    for problem in problems:
        args = problem.arguments("meta")
        for kernel in suite.candidates(args, _for_this_gpu(options)):
            needed.setdefault((kernel, args.signature), (kernel, args))
    if needed and harness.DEVICE == "cuda":
        kernels, each = zip(*needed.values(), strict=True)
        ka.compile_all(kernels, each)


def _for_this_gpu(options: argparse.Namespace) -> argparse.Namespace:
    if not torch.cuda.is_available():
        return options
    major, minor = torch.cuda.get_device_capability()
    return argparse.Namespace(**{**vars(options), "cc": f"{major}.{minor}"})


def described(problem: Problem, options: argparse.Namespace) -> Iterator[str]:
    """What a dry run says of a problem."""
    args = problem.arguments("meta")
    offered = suite.candidates(args, options)
    yield f"{problem.label}  peers: {', '.join(problem.peers())}"
    if not offered:
        yield "    nothing but torch is offered"
        yield from (f"       {reason}" for reason in suite.refusals(args, options.cc))
    for rank, kernel in enumerate(offered):
        seconds = kernel.predict(args)
        expected = "" if seconds is None else f"  {1e6 * seconds:9.1f} us expected"
        yield f"    {rank:2} {kernel.metadata.kernel_name}{expected}"


# What is written -------------------------------------------------------------------------


def line(row: rows.Row) -> str:
    """A row for the reader."""
    if "of_ceiling" in row:
        rate = f"{row['tb_s']:5.2f} TB/s, {100 * row['of_ceiling']:5.1f} % of the copy"
    else:
        rate = f"{row['tflops']:6.1f} TFLOP/s, the peer's {row['peer_tflops']:6.1f}"
    return (
        f"{row['problem']:54} {row['ratio']:6.3f} of {row['peer']:14} {row['subject_us']:9.2f} us "
        f"{rate} +-{100 * row['spread']:.1f} % {row['subject']}"
    )


def means(measured: list[rows.Row]) -> list[str]:
    """Geometric means of the best ranked kernels, by what plots colour alike, and of all."""
    first = [row for row in measured if not row["rank"]]
    found = []
    for origin in dict.fromkeys(row["origin"] for row in first):
        ratios = [row["ratio"] for row in first if row["origin"] == origin]
        found.append(f"{origin}: {geometric_mean(ratios):.3f} of {len(ratios)} problems")
    return found + suite.mean_ratio(measured)

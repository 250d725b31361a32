"""Suite elementwise: chains of element-wise operations beside torch's, and beside a copy in the
same run.

    python benchmarks/elementwise.py [--only swiglu] [--candidates N | --all] [--seconds S]

A chain can only be as fast as its matrices are moved. The ceiling is what an element-wise kernel
moves that copies a large tensor, bytes read and written; ``of_ceiling`` is the kernel's share of
it. Peers are the same chain by torch, operator by operator and by torch.compile; ``peer`` is the
faster one. ``--all`` gives rows of all designs for the problem's alignment, best ranked first.
"""

from __future__ import annotations

import argparse
import functools
import gc
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import harness
import rows
import suite
import torch
from gemm_decode import COPIED_BYTES, COPY, _copy
from tables import geometric_mean

import kernel_api as ka
from kernel_api import epilogue as ep
from kernel_api.kernel import Kernel

NAME = "elementwise"
ALPHA = 0.7
BF16, F32 = torch.bfloat16, torch.float32

Chain = Callable[..., Any]


def _swiglu(accum: Any) -> Any:
    up, gate = ep.glu_pair(accum, granularity="halves")
    return ep.silu(gate) * up


#: What is computed, as an epilogue and by torch; both of x and of the operands by name.
EPILOGUES: dict[str, Chain | None] = {
    "add": lambda accum, b: accum + b,
    "bias gelu": lambda accum, bias: ep.gelu(accum + bias),
    "scale residual": lambda accum, residual, alpha: alpha * accum + residual,
    "swiglu": _swiglu,
    "cast": None,
    "row sum": lambda accum: (accum, ep.sum(accum, -1)),
}
FUNCTIONS: dict[str, Chain] = {
    "add": lambda x, b: x + b,
    "bias gelu": lambda x, bias: torch.nn.functional.gelu(x + bias),
    "scale residual": lambda x, residual, alpha: alpha * x + residual,
    "swiglu": lambda x: torch.nn.functional.silu(x.chunk(2, -1)[1]) * x.chunk(2, -1)[0],
    "cast": lambda x: x.to(BF16),
    "row sum": lambda x: (x.clone(), x.sum(-1, dtype=F32)),
}


@dataclass(frozen=True)
class Problem:
    """A chain on x, whose result is (M, N); x of swiglu is (M, 2N), that of a cast is float32."""

    operation: str
    M: int
    N: int

    @property
    def label(self) -> str:
        """What rows call it."""
        types = "f32 -> bf16" if self.operation == "cast" else "bf16"
        return f"{self.operation} {self.M}x{self.N} (M x N) {types}"

    @property
    def origin(self) -> str:
        return ""

    @property
    def bytes(self) -> int:
        """What must move at least: each element of a matrix once."""
        matrices = {"add": 3, "scale residual": 3, "swiglu": 3, "cast": 3}.get(self.operation, 2)
        return matrices * self.M * self.N * BF16.itemsize

    def operands(self, device: str) -> tuple[torch.Tensor, dict[str, Any]]:
        """x, and what is read beside it by name: new and random."""
        M, N = self.M, self.N

        def drawn(*shape: int, element: torch.dtype = BF16) -> torch.Tensor:
            return torch.randn(shape, device=device, dtype=element)

        wide = 2 * N if self.operation == "swiglu" else N
        x = drawn(M, wide, element=F32 if self.operation == "cast" else BF16)
        beside = {
            "add": lambda: {"b": drawn(M, N)},
            "bias gelu": lambda: {"bias": drawn(N)},
            "scale residual": lambda: {"residual": drawn(M, N), "alpha": ALPHA},
        }
        return x, beside.get(self.operation, dict)()

    def arguments(self, device: str) -> ka.ElementwiseArguments:
        """The problem on new operands."""
        x, read = self.operands(device)
        out = torch.empty((self.M, self.N), device=device, dtype=BF16)
        chain = EPILOGUES[self.operation]
        if chain is None:
            return ka.ElementwiseArguments(x, out)
        written = {}
        if self.operation == "row sum":
            written = {"sums": torch.empty(self.M, device=device, dtype=F32)}
        epilogue = ka.EpilogueArguments(chain, **read, **written)
        return ka.ElementwiseArguments(x, out, epilogue=epilogue)


SIZES = ((8192, 4096), (8192, 8192), (8192, 14336))

PROBLEMS = tuple(Problem(operation, M, N) for M, N in SIZES for operation in EPILOGUES)


# Peers -----------------------------------------------------------------------------------


def peers_of(problem: Problem, args: Any) -> dict[str, Callable[[], Any]]:
    """What torch has, by name, on the operands of the arguments."""
    function = FUNCTIONS[problem.operation]
    read = {}
    if args.epilogue is not None:
        tensors = {name: one.tensor for name, one in args.epilogue.inputs.items()}
        read = {**tensors, **args.epilogue.scalars}
    x = args.x.tensor
    return {
        "torch": functools.partial(function, x, **read),
        "torch.compile": functools.partial(_compiled(problem.operation), x, **read),
    }


@functools.cache
def _compiled(operation: str) -> Chain:
    compiled: Chain = torch.compile(FUNCTIONS[operation])
    return compiled


# Measured --------------------------------------------------------------------------------


def measure(
    problem: Problem, options: argparse.Namespace, journal: rows.Journal, outcome: suite.Outcome
) -> list[rows.Row]:
    """The rows of a problem: of its best ranked kernels, or of all."""
    count = min(harness.operand_sets(problem.bytes), max(2, suite.MOST_BYTES // problem.bytes))
    sets = [problem.arguments(harness.DEVICE) for _ in range(count)]
    subjects: dict[Kernel, harness.Calls] = {}
    offered = suite.candidates(sets[0], options)
    if not offered:
        outcome.unserved.append(f"{problem.label} ({'; '.join(suite.refusals(sets[0], None))})")
        return []
    for kernel in offered:
        name = kernel.metadata.kernel_name
        if journal.lost(problem.label, name):
            continue
        try:
            with journal.attempt(problem.label, name, options.patience):
                subjects[kernel] = _prepared(kernel, sets)
        except Exception as error:
            outcome.failures.append(f"{problem.label}: {name}: {error}")
            if not harness.alive():
                raise suite.GpuLostError(name) from error
    if not subjects:
        return []
    beside = [peers_of(problem, args) for args in sets]
    peers = {name: [one[name] for one in beside] for name in beside[0]}
    calls = {
        **peers,
        **{kernel.metadata.kernel_name: own for kernel, own in subjects.items()},
        COPY: _copy(),
    }
    with journal.attempt(problem.label, "timing", options.patience):
        found, policy = harness.interleaved(calls, problem.bytes, options.policy, options.rounds)
    ranks = {kernel: rank for rank, kernel in enumerate(offered)}
    return [
        _row(problem, kernel, ranks[kernel], sets[0], list(peers), found, policy)
        for kernel in subjects
    ]


def _row(
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
    ceiling = 2 * COPIED_BYTES / found[COPY].median
    reached = problem.bytes / found[name].median
    extra = {
        "family": kernel.family_name(),
        "rank": rank,
        "bytes": problem.bytes,
        "peers_us": {one: round(found[one].median, 2) for one in peers},
        "ceiling_tb_s": round(1e-6 * ceiling, 3),
        "tb_s": round(1e-6 * reached, 3),
        "of_ceiling": round(reached / ceiling, 4),
        "predicted_us": round(1e6 * (kernel.predict(args) or 0.0), 2),
    }
    subject, beside = (name, found[name]), (peer, found[peer])
    return rows.row(NAME, problem.label, subject, beside, True, policy, **extra)


def _prepared(kernel: Kernel, sets: Sequence[Any]) -> harness.Calls:
    """Verified, and a launch for each set."""
    verdict = ka.verify(kernel, sets[0])
    if not verdict:
        raise RuntimeError(f"WRONG: {verdict.reason}")
    return [functools.partial(kernel.prepare(args), *args.tensors) for args in sets]


def line(row: rows.Row) -> str:
    """A row for the reader."""
    return (
        f"{row['problem']:44} {row['ratio']:6.3f} of {row['peer']:14} {row['subject_us']:9.2f} us "
        f"{row['tb_s']:5.2f} TB/s {100 * row['of_ceiling']:5.1f} % of the copy's "
        f"{row['ceiling_tb_s']:.2f} +-{100 * row['spread']:.1f} % {row['subject']}"
    )


def report(measured: list[rows.Row]) -> list[str]:
    """Of the best ranked kernels, by operation."""
    found = []
    for operation in EPILOGUES:
        labels = {problem.label for problem in PROBLEMS if problem.operation == operation}
        chosen = [r for r in measured if r["problem"] in labels and not r["rank"]]
        if chosen:
            ratio = geometric_mean([row["ratio"] for row in chosen])
            share = [row["of_ceiling"] for row in chosen]
            found.append(
                f"{operation}: {ratio:.2f} of torch (geometric mean), {100 * min(share):.1f} to "
                f"{100 * max(share):.1f} % of the copy, {len(chosen)} problems"
            )
    return found


SUITE = suite.Suite(NAME, PROBLEMS, report=report)  # type: ignore[arg-type]


def described(problem: Problem, options: argparse.Namespace) -> Iterator[str]:
    """What a dry run says of a problem."""
    args = problem.arguments("meta")
    yield f"{problem.label}  peers: torch, torch.compile"
    for rank, kernel in enumerate(suite.candidates(args, options)):
        seconds = kernel.predict(args) or 0.0
        yield f"    {rank:2} {kernel.metadata.kernel_name}  {1e6 * seconds:9.1f} us expected"


def main(arguments: Sequence[str] | None = None) -> int:
    options = suite.options(NAME, __doc__).parse_args(arguments)
    problems = [p for p in PROBLEMS if not options.only or options.only in p.label][: options.limit]
    if options.dry_run:
        for problem in problems:
            print("\n".join(described(problem, options)))
        print(f"{NAME}: {len(problems)} problems")
        return suite.DONE
    if harness.DEVICE == "cuda" and not torch.cuda.is_available():
        print("there is no GPU here; --dry-run lists what would be timed", file=sys.stderr)
        return suite.FAILURES
    torch.manual_seed(options.seed)
    gc.freeze()
    journal = rows.Journal(rows.path_of(NAME, options.out), options.resume)
    outcome, budget = suite.Outcome(), harness.Budget(options.seconds)
    for problem in suite.progress(problems, NAME):  # type: ignore[arg-type]
        if journal.has(problem.label):
            continue
        if outcome.died or not budget.allows_another():
            outcome.skipped.append(problem.label)
            continue
        try:
            with budget.step():
                found = measure(problem, options, journal, outcome)
        except Exception as error:
            outcome.failures.append(f"{problem.label}: {type(error).__name__}: {error}")
            outcome.died = not harness.alive()
            continue
        if found:
            journal.add(found)
        for row in found:
            print(line(row), flush=True)
    return suite.summarise(SUITE, journal, outcome)


if __name__ == "__main__":
    sys.exit(main())

"""Suite norm: norms of rows and their gradients beside torch's, and beside a copy in the same run.

    python benchmarks/norm.py [--only rmsnorm] [--candidates N | --all] [--seconds S]

A norm can only be as fast as its matrices are moved. The ceiling is what an element-wise kernel
moves that copies a large tensor, bytes read and written; ``of_ceiling`` is the kernel's share of
it. Peers are torch's operators, which allocate what they return; that of ``rmsnorm_rht_amax`` is
three of them. ``--all`` gives rows of all designs for the problem's alignment, best ranked first.
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
from kernel_api.arguments.norm import NormArguments, default_rows_per_block
from kernel_api.dtypes import dtype
from kernel_api.kernel import Kernel

NAME = "norm"
EPS = 1e-5

KINDS = {
    "rmsnorm": ka.RmsNormArguments,
    "rmsnorm_rht_amax": ka.RmsNormArguments,
    "layernorm": ka.LayerNormArguments,
    "rmsnorm_backward": ka.RmsNormBackwardArguments,
    "layernorm_backward": ka.LayerNormBackwardArguments,
}


@dataclass(frozen=True)
class Problem:
    """Rows of x (M, N), with a weight, and a bias of a layer norm; gradients with their sums.

    Attributes:
        element: Type of all that is no statistic.
    """

    operation: str
    M: int
    N: int
    element: str = "bfloat16"

    @property
    def label(self) -> str:
        """What rows call it."""
        return f"{self.operation} {self.M}x{self.N} (M x N) {dtype(self.element).short}"

    @property
    def origin(self) -> str:
        return ""

    @property
    def bytes(self) -> int:
        """What must move at least: each element of a matrix once."""
        matrices = 3 if "backward" in self.operation else 2
        return matrices * self.M * self.N * dtype(self.element).itemsize

    def arguments(self, device: str) -> NormArguments:
        """The problem on new random operands."""
        M, N, kind = self.M, self.N, KINDS[self.operation]
        element = dtype(self.element).torch

        def drawn(*shape: int) -> torch.Tensor:
            return torch.randn(shape, device=device, dtype=element)

        def written(*shape: int, wide: bool = True) -> torch.Tensor:
            return torch.empty(shape, device=device, dtype=torch.float32 if wide else element)

        statistics = {"rstd": written(M)}
        if "layer" in self.operation:
            statistics["mean"] = written(M)
        if "backward" in self.operation:
            for one in statistics.values():
                one.normal_().abs_()
            sums = {"dweight": written(N, wide=False)}
            if "layer" in self.operation:
                sums["dbias"] = written(N, wide=False)
            matrices = {"dy": drawn(M, N), "x": drawn(M, N), "dx": written(M, N, wide=False)}
            return kind(**matrices, **statistics, weight=drawn(N), **sums)
        out = written(M, N, wide=False)
        given: dict[str, Any] = {"weight": drawn(N), "eps": EPS}
        if self.operation == "rmsnorm_rht_amax":
            blocks = -(-M // default_rows_per_block(M))
            return kind(
                drawn(M, N), out, **given, hadamard=True, amax=written(blocks),
                global_amax=written(), signs=torch.ones(16, device=device),
            )  # fmt: skip
        if self.operation == "layernorm":
            given["bias"] = drawn(N)
        return kind(drawn(M, N), out, **given, **statistics)


SIZES = ((8192, 8192), (16384, 4096), (4096, 5120), (32768, 1024), (262144, 128), (4096, 16384))

PROBLEMS = (
    *(Problem(operation, M, N) for M, N in SIZES for operation in KINDS),
    Problem("rmsnorm", 1024, 8192),
    Problem("rmsnorm", 64, 8192),
    Problem("rmsnorm", 8192, 65536),
    Problem("rmsnorm", 8192, 8192, "float32"),
    Problem("layernorm", 8192, 8192, "float32"),
    Problem("layernorm_backward", 8192, 8192, "float32"),
)


# Peers -----------------------------------------------------------------------------------


def peer_of(problem: Problem, args: Any) -> tuple[str, Callable[[], Any]]:
    """What torch has, by name, on the operands of the arguments."""
    functional, aten = torch.nn.functional, torch.ops.aten
    extent, x = [problem.N], args.x.tensor
    weight = args.weight.tensor
    if problem.operation == "rmsnorm":
        return "torch.rms_norm", functools.partial(functional.rms_norm, x, extent, weight, EPS)
    if problem.operation == "layernorm":
        bias = args.bias.tensor
        layer_norm = functools.partial(functional.layer_norm, x, extent, weight, bias, EPS)
        return "torch.layer_norm", layer_norm
    if problem.operation == "rmsnorm_rht_amax":
        return "torch, 3 operators", functools.partial(_transformed, x, weight, args.rows_per_block)
    statistics = [
        getattr(args, n).tensor.unsqueeze(1) for n in ("mean", "rstd") if n in args.further
    ]
    given = (args.dy.tensor, x, extent, *statistics, weight)
    if problem.operation == "rmsnorm_backward":
        backward = functools.partial(aten._fused_rms_norm_backward, *given, [True, True])
        return "torch.rms_norm backward", backward
    backward = functools.partial(aten.native_layer_norm_backward, *given, weight, [True] * 3)
    return "torch.layer_norm backward", backward


def _transformed(x: torch.Tensor, weight: torch.Tensor, rows_per_block: int) -> Any:
    y = torch.nn.functional.rms_norm(x, x.shape[1:], weight, EPS)
    h = y.view(-1, 16) @ _hadamard(x.device, x.dtype)
    return h, h.view(-1, rows_per_block * x.shape[1]).abs().amax(1)


@functools.lru_cache(maxsize=4)
def _hadamard(device: Any, element: Any) -> torch.Tensor:
    matrix = torch.ones(1, 1)
    for _ in range(4):
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return (matrix / 4).to(device, element)


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
    peers = [peer_of(problem, args) for args in sets]
    peer = peers[0][0]
    calls = {
        peer: [call for _, call in peers],
        **{kernel.metadata.kernel_name: own for kernel, own in subjects.items()},
        COPY: _copy(),
    }
    with journal.attempt(problem.label, "timing", options.patience):
        found, policy = harness.interleaved(calls, problem.bytes, options.policy, options.rounds)
    ceiling = 2 * COPIED_BYTES / found[COPY].median
    measured = []
    for rank, kernel in enumerate(offered):
        if kernel not in subjects:
            continue
        name = kernel.metadata.kernel_name
        reached = problem.bytes / found[name].median
        extra = {
            "family": kernel.family_name(),
            "rank": rank,
            "bytes": problem.bytes,
            "ceiling_tb_s": round(1e-6 * ceiling, 3),
            "tb_s": round(1e-6 * reached, 3),
            "of_ceiling": round(reached / ceiling, 4),
            "predicted_us": round(1e6 * (kernel.predict(sets[0]) or 0.0), 2),
        }
        subject, beside = (name, found[name]), (peer, found[peer])
        measured.append(rows.row(NAME, problem.label, subject, beside, True, policy, **extra))
    return measured


def _prepared(kernel: Kernel, sets: Sequence[Any]) -> harness.Calls:
    """Verified, and a launch for each set."""
    verdict = ka.verify(kernel, sets[0])
    if not verdict:
        raise RuntimeError(f"WRONG: {verdict.reason}")
    return [functools.partial(kernel.prepare(args), *args.tensors) for args in sets]


def line(row: rows.Row) -> str:
    """A row for the reader."""
    return (
        f"{row['problem']:44} {row['ratio']:6.3f} of {row['peer']:26} {row['subject_us']:9.2f} us "
        f"{row['tb_s']:5.2f} TB/s {100 * row['of_ceiling']:5.1f} % of the copy's "
        f"{row['ceiling_tb_s']:.2f} +-{100 * row['spread']:.1f} % {row['subject']}"
    )


def report(measured: list[rows.Row]) -> list[str]:
    """Of the best ranked kernels, by operation."""
    found = []
    for operation in KINDS:
        chosen = [r for r in measured if r["problem"].split()[0] == operation and not r["rank"]]
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
    yield f"{problem.label}  peer: {peer_of(problem, args)[0]}"
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

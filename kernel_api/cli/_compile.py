"""Compile the kernels offered for a problem, for any architecture; a GPU is not needed."""

from __future__ import annotations

import argparse
import dataclasses
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kernel_api.cli._problem import add_problem_options, gemm_arguments
from kernel_api.cli._query import add_limit_option, add_provider_options, query
from kernel_api.cli._render import Output, Table

if TYPE_CHECKING:
    from kernel_api.arguments import GemmArguments
    from kernel_api.artifact import Resources
    from kernel_api.kernel import Kernel

HELP = "compile kernels and read what they take of a multiprocessor"


@dataclass(frozen=True)
class Outcome:
    """What became of one kernel for one architecture."""

    kernel: str
    target: str
    verdict: str
    resources: Resources | None
    seconds: float
    reason: str | None


def add_options(parser: argparse.ArgumentParser) -> None:
    add_problem_options(parser, devices=("cuda", "meta"), device="meta")
    parser.add_argument(
        "--target",
        action="append",
        help="architecture to compile for, such as sm_80 or sm_90a; may be repeated "
        "(default: --cc, else the GPU here)",
    )
    add_provider_options(parser)
    add_limit_option(parser)


def run(options: argparse.Namespace, output: Output) -> int:
    """0 if all kernels compile without spills, 1 if one does not or there is none."""
    import kernel_api as ka
    from kernel_api.devices import query_target
    from kernel_api.errors import ArgumentError
    from kernel_api.targets import target

    args = gemm_arguments(options)
    here = query_target(None, options.cc)
    targets = [target(t) for t in options.target or []] or ([here] if here else [])
    if not targets:
        raise ArgumentError("there is no GPU here to compile for; name one, as --target sm_90a")
    work: list[tuple[Kernel, str]] = []
    unserved: list[str] = []
    for one in targets:
        offered = ka.get_kernels(args, **query(options, cc=one))
        kernels = [k for k in offered if "cpu" not in k.devices][: options.limit]
        work += [(kernel, str(one)) for kernel in kernels]
        if not kernels:
            unserved.append(str(one))
    outcomes = [_compiled(kernel, args, to) for kernel, to in output.track(work, "compiling")]
    bad = [o for o in outcomes if o.verdict != "ok"]
    data = {
        "passed": not bad and not unserved,
        "outcomes": [dataclasses.asdict(o) for o in outcomes],
        "without_kernel": unserved,
    }
    blocks = [_table(outcomes)] if outcomes else []
    reasons = [f"{o.kernel} for {o.target}: {o.reason}" for o in bad if o.reason]
    nothing = [f"{one}: nothing to compile; kernel-api explain says why" for one in unserved]
    output.show(
        data, *blocks, *reasons, *nothing, f"{len(outcomes) - len(bad)} of {len(outcomes)} ok"
    )
    return 0 if data["passed"] else 1


def _compiled(kernel: Kernel, args: GemmArguments, to: str) -> Outcome:
    name = kernel.metadata.kernel_name
    started = time.perf_counter()
    try:
        artifact = kernel.compile(args, cc=to)
        spent = time.perf_counter() - started
        resources = artifact.resources
    except Exception as error:
        spent = time.perf_counter() - started
        return Outcome(name, to, "failed", None, spent, f"{type(error).__name__}: {error}")
    spills = resources is not None and resources.spill_bytes > 0
    reason = "registers are spilled" if spills else None
    return Outcome(name, to, "spills" if spills else "ok", resources, spent, reason)


def _table(outcomes: list[Outcome]) -> Table:
    columns = ("kernel", "target", "verdict", "registers", "smem", "spills", "threads", "seconds")
    return Table(columns, [_row(o) for o in outcomes])


def _row(outcome: Outcome) -> tuple[str, ...]:
    found = outcome.resources
    numbers = ("-",) * 4
    if found is not None:
        values = (found.registers, found.shared_memory_bytes, found.spill_bytes, found.threads)
        numbers = tuple(map(str, values))  # type: ignore[assignment]
    seconds = f"{outcome.seconds:.2f}"
    return (outcome.kernel, outcome.target, outcome.verdict, *numbers, seconds)

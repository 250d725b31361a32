"""Compile the kernels offered for a problem, for any architecture; a GPU is not needed.

With --out, each becomes a shared library that runs without the compiler. A file of signatures is a
list of objects whose keys are the options that describe a problem: [{"dtype": "float16", "layout":
"tn"}, {"m": 1}]; or a CSV file with such columns, or what KERNEL_API_RECORD wrote. What an entry
does not say is as on the command line.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kernel_api.cli._problem import add_problem_options, problem_arguments
from kernel_api.cli._problem_list import problems
from kernel_api.cli._query import add_limit_option, add_provider_options, at_least, query
from kernel_api.cli._render import Output, Table

if TYPE_CHECKING:
    from kernel_api.arguments import Arguments
    from kernel_api.artifact import CompiledArtifact, Resources
    from kernel_api.kernel import Kernel
    from kernel_api.targets import Target

    Work = tuple[Kernel, Arguments, str]

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
    file: str | None = None


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
    parser.add_argument(
        "--signatures", metavar="FILE", help="compile for the problems in a JSON, YAML or CSV file"
    )
    parser.add_argument("--out", metavar="DIR", help="write a shared library for each kernel")
    parser.add_argument(
        "--workers", type=at_least(1), metavar="COUNT", help="compile in that many processes"
    )


def run(options: argparse.Namespace, output: Output) -> int:
    """0 if all kernels compile without spills, 1 if one does not, or if no target has a kernel for
    a problem."""
    from kernel_api.devices import query_target
    from kernel_api.errors import ArgumentError
    from kernel_api.targets import target

    if options.signatures is None:
        listed = [problem_arguments(options)]
    else:
        listed = problems(Path(options.signatures), options, with_sizes=False)
    here = query_target(None, options.cc)
    named = dict.fromkeys(map(target, options.target or []))
    targets = list(named) or ([here] if here else [])
    if not targets:
        raise ArgumentError("there is no GPU here to compile for; name one, as --target sm_90a")
    work: list[Work] = []
    unserved: list[str] = []
    all_served = True
    for args in listed:
        found = {one: _kernels(args, one, options) for one in targets}
        work += [(kernel, args, str(one)) for one in targets for kernel in found[one]]
        lacking = [one for one in targets if not found[one]]
        unserved += [
            str(one) if options.signatures is None else f"{one}, {args}" for one in lacking
        ]
        all_served &= lacking != targets
    if options.out is not None:
        _make_folder(options.out)
    if options.workers is not None:
        _compile_ahead(work, options.workers, progress=output.for_reader)
    outcomes = [_compiled(*one, options.out) for one in output.track(work, "compiling")]
    bad = [o for o in outcomes if o.verdict != "ok"]
    data = {
        "passed": not bad and all_served,
        "outcomes": [dataclasses.asdict(o) for o in outcomes],
        "without_kernel": unserved,
    }
    blocks = [_table(outcomes)] if outcomes else []
    reasons = [f"{o.kernel} for {o.target}: {o.reason}" for o in bad if o.reason]
    nothing = [f"{one}: no kernel; kernel-api explain says why" for one in unserved]
    output.show(
        data, *blocks, *reasons, *nothing, f"{len(outcomes) - len(bad)} of {len(outcomes)} ok"
    )
    return 0 if data["passed"] else 1


def _kernels(args: Arguments, to: Target, options: argparse.Namespace) -> list[Kernel]:
    import kernel_api as ka

    offered = ka.get_kernels(args, **query(options, cc=to))
    return [kernel for kernel in offered if "cpu" not in kernel.devices][: options.limit]


def _make_folder(path: str) -> None:
    from kernel_api.errors import ArgumentError

    try:
        Path(path).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ArgumentError(f"{path} cannot be made: {error.strerror}") from error


def _compile_ahead(work: list[Work], workers: int, *, progress: bool) -> None:
    """Fill the caches; what fails is met again, and told, when it is its turn."""
    import kernel_api as ka

    for one in dict.fromkeys(to for _, _, to in work):
        chosen = [(kernel, args) for kernel, args, to in work if to == one]
        kernels, problems = zip(*chosen, strict=True)
        ka.compile_all(kernels, problems, cc=one, workers=workers, progress=progress)


def _exported(artifact: CompiledArtifact, folder: str) -> str:
    from kernel_api.bundle import name_of

    return str(artifact.export(Path(folder) / name_of(artifact)))


def _compiled(kernel: Kernel, args: Arguments, to: str, out: str | None) -> Outcome:
    name = kernel.metadata.kernel_name
    started = time.perf_counter()
    file = None
    try:
        artifact = kernel.compile(args, cc=to)
        spent = time.perf_counter() - started
        resources = artifact.resources
        if out is not None:
            file = _exported(artifact, out)
    except Exception as error:
        spent = time.perf_counter() - started
        return Outcome(name, to, "failed", None, spent, f"{type(error).__name__}: {error}")
    spills = resources is not None and resources.spill_bytes > 0
    reason = "registers are spilled" if spills else None
    return Outcome(name, to, "spills" if spills else "ok", resources, spent, reason, file)


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

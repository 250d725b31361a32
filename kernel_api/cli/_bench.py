"""Time kernels of a problem beside each other, and keep nothing.

The first of the performance model's order, the first of every provider, and those that are named
take turns, round by round, as candidates of kernel-api tune do; results are compared with the
reference before.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from kernel_api.cli._candidates import add_candidate_options, metadata_filter
from kernel_api.cli._measured import label, provider
from kernel_api.cli._problem import add_problem_options, on_cpu, problem_arguments
from kernel_api.cli._query import at_least
from kernel_api.cli._render import Output, Table
from kernel_api.cli._tuned import add_policy_options, device_of, policy
from kernel_api.errors import ArgumentError, BenchError, NoKernelError

if TYPE_CHECKING:
    from kernel_api.arguments import Arguments
    from kernel_api.kernel import Kernel
    from kernel_api.tuning import Measurement, Problem
    from kernel_api.tuning._choice import Choice

HELP = "time kernels of a problem beside each other; keep nothing"


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("names", nargs="*", metavar="KERNEL", help="also these, by their names")
    add_problem_options(parser, devices=("cuda", "cpu"), device=None)
    group = parser.add_argument_group("which are timed")
    group.add_argument(
        "--top",
        type=at_least(0),
        default=5,
        metavar="COUNT",
        help="the first COUNT of the performance model's order, and the first of every provider; "
        "0: only those that are named (default: 5)",
    )
    add_candidate_options(group)
    group.add_argument(
        "--no-verify",
        dest="verify",
        action="store_false",
        help="do not compare results with the reference before",
    )
    add_policy_options(parser)


def run(options: argparse.Namespace, output: Output) -> int:
    """0, or 1 if a kernel did not pass, or none takes the problem."""
    from kernel_api.tuning import Environment, Problem
    from kernel_api.tuning._autotune import devices_here
    from kernel_api.tuning._choice import Choice
    from kernel_api.tuning._comparison import compared

    device = "cpu" if device_of(options) == "cpu" else devices_here()[0]
    args = problem_arguments(argparse.Namespace(**{**vars(options), "device": "meta"}))
    if device == "cpu":  # what lies nowhere is for GPUs as well
        args = on_cpu(args)
    choice = Choice(
        metadata_filter(options),
        options.cc,
        options.providers,
        max_candidates=options.top or None,
        timeout_s=options.timeout,
        policy=policy(options),
    )
    problem, environment = Problem.of(args), Environment.of(device, choice.policy_on(device))
    rows: list[Measurement] = []
    reason = None
    try:
        kernels = _kernels(args, choice, device, options)
        how = {"verify": options.verify, "progress": output.for_reader}
        rows = compared(args, kernels, environment, device, choice, **how)
    except (NoKernelError, BenchError) as error:
        reason = f"{type(error).__name__}: {error}"
    data = {
        "passed": reason is None and all(row.passed for row in rows),
        "problem": label(problem),
        "sizes": problem.sizes,
        "environment": environment.to_dict(),
        "verified": options.verify,
        "kernels": _timed(rows, problem),
        "reason": reason,
    }
    output.show(data, f"{label(problem)} on {environment}", *_blocks(data))
    return 0 if data["passed"] else 1


def _kernels(
    args: Arguments, choice: Choice, device: str, options: argparse.Namespace
) -> list[Kernel]:
    """The first ones, then those that are named.

    Raises NoKernelError; ArgumentError for a name that no kernel has which takes the problem.
    """
    if not options.top and not options.names:
        raise ArgumentError("--top is 0 and no kernel is named; name one, or raise --top")
    named = [_named(name, args, options.cc, device) for name in options.names]
    first = choice.candidates(args, device).kernels if options.top else ()
    return list(dict.fromkeys([*first, *named]))


def _named(name: str, args: Arguments, cc: Any, device: str) -> Kernel:
    import kernel_api as ka

    kind = device.partition(":")[0]
    for kernel in ka.get_kernels(args, cc=cc):
        if kernel.metadata.kernel_name == name and kind in kernel.devices:
            return kernel
    raise ArgumentError(
        f"no kernel called {name} takes the problem on {kind}; kernel-api list has the names, and "
        f"kernel-api explain says why a family does not"
    )


def _timed(rows: Sequence[Measurement], problem: Problem) -> list[dict[str, Any]]:
    """As JSON, in their order; ``ratio`` is a kernel's speed over that of the first."""
    from kernel_api.tuning._work import work_of

    work = work_of(problem)
    operations = None if work is None else work.operations
    size = None if work is None else work.bytes
    return [
        {
            "kernel": one.kernel.name,
            "provider": provider(one),
            "status": str(one.status),
            "message": one.message,
            "us": one.median_us if one.passed else None,
            "spread_us": one.spread_us if one.passed else None,
            "rounds": one.rounds,
            "tflops": operations / one.median_us * 1e-6 if operations and one.passed else None,
            "gbs": size / one.median_us * 1e-3 if size and one.passed else None,
            "ratio": rows[0].median_us / one.median_us if one.passed else None,
            "error_ratio": one.error_ratio,
        }
        for one in rows
    ]


def _blocks(data: dict[str, Any]) -> Iterator[str | Table]:
    """The answer for a reader."""
    if data["reason"] is not None:
        yield data["reason"]
        return
    found = data["kernels"]
    failed = [one for one in found if one["status"] != "PASSED"]
    yield _table(found)
    yield from (f"{one['kernel']}: {one['message']}" for one in failed)
    unseen = "" if data["verified"] else "; results were not compared with the reference"
    yield f"{len(found) - len(failed)} of {len(found)} passed{unseen}"


def _table(found: Sequence[dict[str, Any]]) -> Table:
    """With operations per second where these are what counts, else bytes."""
    rate, title = "gbs", "GB/s"
    if any(one["tflops"] is not None for one in found):
        rate, title = "tflops", "TFLOP/s"
    columns = ("kernel", "status", "us", "spread", title, "of first")
    rows = [
        (
            one["kernel"],
            one["status"],
            _number(one["us"], ".2f"),
            _number(one["spread_us"], ".2f"),
            _number(one[rate], ".4g"),
            _number(one["ratio"], ".3f", "x"),
        )
        for one in found
    ]
    return Table(columns, rows)


def _number(value: float | None, form: str, unit: str = "") -> str:
    return "-" if value is None else f"{value:{form}}{unit}"

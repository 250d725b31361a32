"""Run kernels on random operands and compare with the reference, by the error-ratio rule."""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kernel_api.cli._attention_problem import ATTENTION
from kernel_api.cli._indexed_problem import INDEXED
from kernel_api.cli._norm_problem import NORMS
from kernel_api.cli._problem import add_problem_options, problem_arguments, sizes_of
from kernel_api.cli._query import add_limit_option, add_provider_options, query
from kernel_api.cli._render import Output, Table

if TYPE_CHECKING:
    from kernel_api.arguments import Arguments
    from kernel_api.kernel import Kernel

HELP = "run kernels and compare with the reference"

#: Sizes (M, N, K) that are no multiples of any tile: smaller than one, and just beside several.
SHAPES = {
    "odd": (
        (1, 1, 1),
        (1, 8, 7),
        (3, 5, 257),
        (17, 33, 65),
        (127, 129, 31),
        (129, 255, 64),
        (257, 120, 1000),
        (512, 8, 96),
    )
}

#: Whose N is a half of the columns that are pairs.
_GRADIENTS_OF_PAIRS = ("gemm_dglu", "gemm_dswiglu", "grouped_gemm_dglu")

#: In place of K, of rows that an index names.
_PLACES = (1, 2, 3, 4, 5, 7, 8, 9)

#: In place of K, of attention: a row of a head takes a multiple of 16 bytes in any type.
_HEAD_DIMENSIONS = (16, 32, 48, 64, 80, 128, 192, 96)


@dataclass(frozen=True)
class Outcome:
    """What became of one kernel on one problem."""

    problem: str
    kernel: str
    verdict: str
    error_ratio: float | None
    max_abs_error: float | None
    seconds: float
    reason: str | None


def add_options(parser: argparse.ArgumentParser) -> None:
    add_problem_options(parser, devices=("cpu", "cuda"), device=None)
    parser.add_argument(
        "--shapes", choices=tuple(SHAPES), help="a set of sizes in place of --m, --n and --k"
    )
    add_provider_options(parser)
    add_limit_option(parser)


def run(options: argparse.Namespace, output: Output) -> int:
    """0 if every kernel passed, 1 if one did not or a problem has no kernel."""
    outcomes: list[Outcome] = []
    unserved: list[str] = []
    for one in _sizes(options):
        found = list(_outcomes(options, one, output))
        outcomes += found
        if not found:
            unserved.append(_label(options, one))
    failed = [o for o in outcomes if o.verdict != "passed"]
    data = {
        "passed": not failed and not unserved,
        "outcomes": [dataclasses.asdict(o) for o in outcomes],
        "without_kernel": unserved,
    }
    blocks = [_table(outcomes)] if outcomes else []
    reasons = [f"{o.kernel} on {o.problem}: {o.reason}" for o in failed]
    nothing = [f"{label}: no kernel; kernel-api explain says why" for label in unserved]
    summary = f"{len(outcomes) - len(failed)} of {len(outcomes)} passed"
    output.show(data, *blocks, *reasons, *nothing, summary)
    return 0 if data["passed"] else 1


def _sizes(options: argparse.Namespace) -> tuple[tuple[int, int, int], ...]:
    if options.shapes is None:
        return (sizes_of(options),)
    shapes = SHAPES[options.shapes]
    if options.operation in ATTENTION:
        return tuple((M, N, D) for (M, N, _), D in zip(shapes, _HEAD_DIMENSIONS, strict=True))
    if options.operation in INDEXED:
        return tuple((M, N, k) for (M, N, _), k in zip(shapes, _PLACES, strict=True))
    together = _columns_taken_together(options)
    return tuple((M, -(-N // together) * together, K) for M, N, K in shapes)


def _columns_taken_together(options: argparse.Namespace) -> int:
    """What N is a multiple of."""
    from kernel_api.epilogue.graph import HADAMARD_BLOCK
    from kernel_api.fusions import gemm_glu
    from kernel_api.fusions._store import WIDTHS

    operation, given = options.operation, dict(options.beside or ())
    if operation == "gemm_rope":
        return _positive(given.get("head_dim"))
    if operation == "rmsnorm_rht_amax":
        return HADAMARD_BLOCK
    if operation.endswith("quantize"):
        mode = given.get("mode", "block" if operation in NORMS else "tensor")
        return WIDTHS.get(str(mode), 1)
    if "glu" not in operation:
        return 1
    usual = inspect.signature(gemm_glu).parameters["granularity"].default
    width = _positive(given.get("granularity", usual))
    if operation in _GRADIENTS_OF_PAIRS:
        return width
    if given.get("scale"):
        return math.lcm(2 * width, 2 * WIDTHS["block"])
    return math.lcm(2 * width, 2 * HADAMARD_BLOCK) if "hadamard" in operation else 2 * width


def _positive(given: object) -> int:
    """1 for what says no number of columns: the operation has the reason."""
    return given if isinstance(given, int) and given > 0 else 1


def _outcomes(
    options: argparse.Namespace, sizes: tuple[int, int, int], output: Output
) -> Iterator[Outcome]:
    import kernel_api as ka

    args = problem_arguments(options, sizes)
    kernels = ka.get_kernels(args, **query(options))[: options.limit]
    label = _label(options, sizes)
    for kernel in output.track(kernels, f"verifying {label}"):
        yield _verified(kernel, args, label)


def _verified(kernel: Kernel, args: Arguments, problem: str) -> Outcome:
    import kernel_api as ka

    name = kernel.metadata.kernel_name
    started = time.perf_counter()
    try:
        found = ka.verify(kernel, args)
    except Exception as error:
        spent = time.perf_counter() - started
        return Outcome(
            problem, name, "error", None, None, spent, f"{type(error).__name__}: {error}"
        )
    spent = time.perf_counter() - started
    verdict = "passed" if found else "failed"
    ratio, largest = found.error_ratio, found.max_abs_error
    return Outcome(problem, name, verdict, ratio, largest, spent, found.reason)


def _label(options: argparse.Namespace, sizes: tuple[int, int, int]) -> str:
    return "x".join(map(str, sizes[:2] if options.operation in NORMS else sizes))


def _table(outcomes: list[Outcome]) -> Table:
    columns = ("problem", "kernel", "verdict", "error ratio", "max error", "seconds")
    rows = [
        (
            o.problem,
            o.kernel,
            o.verdict,
            "-" if o.error_ratio is None else f"{o.error_ratio:.2f}",
            "-" if o.max_abs_error is None else f"{o.max_abs_error:.3g}",
            f"{o.seconds:.2f}",
        )
        for o in outcomes
    ]
    return Table(columns, rows)

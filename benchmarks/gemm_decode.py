"""Suite gemm-decode: a few rows times the weights of a layer, beside a copy in the same run.

    python benchmarks/gemm_decode.py [--candidates N | --all] [--seconds S]

Such a product can only be as fast as its weights are read. The ceiling is what an element-wise
kernel moves that copies a large tensor, bytes read and written (it is faster than the driver's
own copy); ``of_ceiling`` is the kernel's share of it.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import harness
import rows
import suite
from problems import Problem

import kernel_api as ka

ROWS = (16, 1, 4, 8, 32, 64)
N = K = 8192


def beside(problem: Problem, args: Sequence[ka.GemmArguments]) -> Mapping[str, harness.Calls]:
    return {harness.COPY: harness.copy()}


def extra(problem: Problem, microseconds: float, medians: Mapping[str, float]) -> Mapping[str, Any]:
    return harness.beside_copy(problem.bytes, microseconds, medians[harness.COPY])


def report(measured: list[rows.Row]) -> list[str]:
    return [
        f"{row['problem']}: {row['tb_s']:.2f} TB/s, {100 * row['of_ceiling']:.1f} % of the copy's "
        f"{row['ceiling_tb_s']:.2f}"
        for row in measured
    ] + suite.mean_ratio(measured)


SUITE = suite.Suite(
    "gemm-decode",
    tuple(Problem(m, N, K) for m in ROWS),
    beside=beside,
    extra=extra,
    report=report,
)


def main(arguments: Sequence[str] | None = None) -> int:
    return suite.run(SUITE, suite.options(SUITE.name, __doc__).parse_args(arguments))


if __name__ == "__main__":
    sys.exit(main())

"""Suite gemm-decode: a few rows times the weights of a layer, beside a copy in the same run.

    python benchmarks/gemm_decode.py [--candidates N | --all] [--seconds S]

Such a product can only be as fast as its weights are read. The ceiling is what an element-wise
kernel moves that copies a large tensor, bytes read and written (it is faster than the driver's
own copy); ``of_ceiling`` is the kernel's share of it.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import harness
import rows
import suite
import torch
from problems import Problem

import kernel_api as ka

ROWS = (16, 1, 4, 8, 32, 64)
N = K = 8192
COPY = "copy"
COPIED_BYTES = 1 << 30


@functools.lru_cache(maxsize=1)
def _copy() -> harness.Calls:
    source = torch.randn(COPIED_BYTES // 4, device=harness.DEVICE)
    return [functools.partial(torch.mul, source, 1.0, out=torch.empty_like(source))]


def beside(problem: Problem, args: Sequence[ka.GemmArguments]) -> Mapping[str, harness.Calls]:
    return {COPY: _copy()}


def extra(problem: Problem, microseconds: float, medians: Mapping[str, float]) -> Mapping[str, Any]:
    ceiling = 2 * COPIED_BYTES / medians[COPY]
    reached = problem.bytes / microseconds
    return {
        "ceiling_tb_s": round(1e-6 * ceiling, 3),
        "tb_s": round(1e-6 * reached, 3),
        "of_ceiling": round(reached / ceiling, 4),
    }


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

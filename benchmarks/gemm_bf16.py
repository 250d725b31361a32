"""Suite gemm-bf16: six shapes, beside cuBLAS and quack.

    python benchmarks/gemm_bf16.py [--dtype float16] [--candidates N | --all] [--seconds S]

With another ``--dtype`` the rows go to a file of its own, such as gemm-f16.json.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import suite
from problems import Problem

from kernel_api.dtypes import dtype

SHAPES = (
    (8192, 8192, 8192),
    (4096, 4096, 4096),
    (2048, 2048, 2048),
    (8192, 2048, 8192),
    (1024, 28672, 8192),
    (16, 8192, 8192),
)


def suite_of(element: str) -> suite.Suite:
    short = dtype(element).short
    problems = tuple(Problem(*shape, element=element) for shape in SHAPES)
    return suite.Suite(f"gemm-{short}", problems, report=suite.mean_ratio)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = suite.options("gemm-bf16", __doc__)
    parser.add_argument("--dtype", choices=("bfloat16", "float16"), default="bfloat16")
    chosen = parser.parse_args(arguments)
    return suite.run(suite_of(chosen.dtype), chosen)


if __name__ == "__main__":
    sys.exit(main())

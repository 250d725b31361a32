"""Suite gemm-other: int8 beside torch._int_mm, and float32 as tf32 beside torch with tf32 on.

python benchmarks/gemm_other.py [--only i8] [--candidates N | --all] [--seconds S]
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import suite
from problems import Problem

SHAPES = ((8192, 8192, 8192), (4096, 4096, 4096), (2048, 2048, 2048), (128, 8192, 8192))

SUITE = suite.Suite(
    "gemm-other",
    tuple(
        Problem(*shape, element=element, out=out)
        for element, out in (("int8", "int32"), ("float32", "float32"))
        for shape in SHAPES
    ),
    report=suite.mean_ratio,
)


def main(arguments: Sequence[str] | None = None) -> int:
    return suite.run(SUITE, suite.options(SUITE.name, __doc__).parse_args(arguments))


if __name__ == "__main__":
    sys.exit(main())

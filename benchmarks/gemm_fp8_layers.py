"""Suite gemm-fp8-layers: layers of DeepSeek-V3 and Llama-3-8B in e4m3, for 16 to 1024 rows.

    python benchmarks/gemm_fp8_layers.py [--only "blocks"] [--candidates N | --all] [--seconds S]

The peer is torch._scaled_mm with the same scales: one per tensor, one per row and column, or one
per 128 elements of a row of A and per 128x128 of B.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence

import suite
from gemm_fp8 import SCALES
from problems import Problem

ROWS = (16, 64, 128, 256, 512, 1024)
#: (N, K) of weights.
LAYERS = (
    *((2112, 7168), (24576, 1536), (7168, 16384), (4096, 7168), (7168, 2048), (18432, 7168)),
    *((6144, 4096), (4096, 14336), (28672, 4096)),
)

PROBLEMS = tuple(
    Problem(M, N, K, element="float8_e4m3fn", out="bfloat16", scales=scales)
    for scales, M, (N, K) in itertools.product(SCALES, ROWS, LAYERS)
)
SUITE = suite.Suite("gemm-fp8-layers", PROBLEMS, report=suite.mean_ratio)


def main(arguments: Sequence[str] | None = None) -> int:
    return suite.run(SUITE, suite.options(SUITE.name, __doc__).parse_args(arguments))


if __name__ == "__main__":
    sys.exit(main())

"""Suite gemm-unaligned: products whose rows begin anywhere in memory, beside cuBLAS.

    python benchmarks/gemm_unaligned.py [--only NT] [--candidates N | --all] [--seconds S]

TMA takes leading dimensions in multiples of 16 bytes. Sizes that are no multiples of 8 elements,
along what lies side by side, go by kernels that copy an operand first, or that load piece by piece.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence

import suite
from problems import Problem

#: (M, N, K) by the layout of A and B.
SIZES = {
    "TN": ((4095, 4095, 4095), (777, 777, 5003), (700, 700, 12345), (100, 100, 100001)),
    "NT": (
        *((2047, 2047, 2047), (1001, 1001, 16384), (300, 300, 50000), (50, 50, 200000)),
        (15, 4096, 16384),
    ),
    "NN": ((500, 700, 30001),),
    "TT": ((4001, 4001, 1001), (333, 2001, 8192)),
}


def _problems() -> Iterator[Problem]:
    for layout, sizes in SIZES.items():
        for M, N, K in sizes:
            yield Problem(M, N, K, origin="unaligned", layout=layout)


SUITE = suite.Suite("gemm-unaligned", tuple(_problems()), report=suite.mean_ratio)


def main(arguments: Sequence[str] | None = None) -> int:
    return suite.run(SUITE, suite.options(SUITE.name, __doc__).parse_args(arguments))


if __name__ == "__main__":
    sys.exit(main())

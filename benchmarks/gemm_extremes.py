"""Suite gemm-extremes: products far from square, beside cuBLAS.

    python benchmarks/gemm_extremes.py [--only Gram] [--candidates N | --all] [--seconds S]

Sums over many more elements than there are outputs: Gram matrices and covariances Xᵀ · X of many
samples, gradients of adapters (LoRA) and of routers over many tokens, inner products of a few long
vectors. And the reverse: many rows of few columns, from few elements.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence

import suite
from problems import Problem

#: (features, samples) of Xᵀ · X.
GRAM = (
    *((16, 65536), (64, 16384), (64, 262144), (96, 100000), (128, 131072), (200, 30000)),
    *((256, 65536), (300, 50000), (384, 16384), (512, 8192), (512, 32768), (640, 20000)),
    (1024, 65536),
)
#: (vectors, length) whose inner products are wanted.
VECTORS = ((16, 65536), (64, 65536), (128, 16384), (256, 131072), (64, 1048576), (400, 40000))
#: (M, N, tokens) of gradients.
ADAPTERS = ((16, 4096, 4096), (4096, 16, 16384), (64, 8192, 16384))
#: (out, in, tokens) of weights of small models.
SMALL_MODELS = ((768, 768, 16384), (768, 768, 65536), (1024, 1024, 16384), (512, 2048, 32768))
ROUTERS = ((8, 4096, 16384), (256, 7168, 4096))
#: (M, N, K).
FLAT = ((100000, 16, 16), (1000000, 8, 64), (65536, 64, 64), (262144, 32, 256))


def _problems() -> Iterator[Problem]:
    for features, samples in GRAM:
        yield Problem(features, features, samples, origin="Gram matrix", layout="NT")
    for count, length in VECTORS:
        yield Problem(count, count, length, origin="inner products")
    for M, N, tokens in ADAPTERS:
        yield Problem(M, N, tokens, origin="adapter, of weights", layout="NT")
    for M, N, tokens in SMALL_MODELS:
        yield Problem(M, N, tokens, origin="small model, of weights", layout="NT")
    for M, N, tokens in ROUTERS:
        yield Problem(M, N, tokens, origin="router, of weights", layout="NT")
    for M, N, K in FLAT:
        yield Problem(M, N, K, origin="few columns")


SUITE = suite.Suite("gemm-extremes", tuple(_problems()), report=suite.mean_ratio)


def main(arguments: Sequence[str] | None = None) -> int:
    return suite.run(SUITE, suite.options(SUITE.name, __doc__).parse_args(arguments))


if __name__ == "__main__":
    sys.exit(main())

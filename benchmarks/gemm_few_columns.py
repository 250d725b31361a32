"""Suite gemm-few-columns: products with narrow weights, beside cuBLAS.

    python benchmarks/gemm_few_columns.py [--only router] [--candidates N | --all] [--seconds S]

Routers, which give every token a number per expert, and adapters (LoRA), whose first matrix has as
many columns as its rank: the tokens are read once, and little is computed with them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence

import suite
from problems import Problem

#: (experts, hidden) of models.
ROUTERS = {
    "Mixtral-8x7B": (8, 4096),
    "GPT-OSS-20B": (32, 2880),
    "GPT-OSS-120B": (128, 2880),
    "Qwen3-30B-A3B": (128, 2048),
    "Qwen3-235B-A22B": (128, 4096),
    "DeepSeek-V3": (256, 7168),
    "Kimi-K2": (384, 7168),
}
ROUTED = (1, 16, 128, 1024, 8192)
#: (rank, in) of adapters.
ADAPTERS = ((16, 4096), (64, 4096), (16, 14336), (64, 14336))
ADAPTED = (64, 512, 4096, 16384)
TRAINED = 16384


def _problems() -> Iterator[Problem]:
    for model, (experts, hidden) in ROUTERS.items():
        for tokens in ROUTED:
            yield Problem(tokens, experts, hidden, origin=f"router of {model}")
    for rank, inner in ADAPTERS:
        for tokens in ADAPTED:
            yield Problem(tokens, rank, inner, origin="adapter")
        yield Problem(TRAINED, rank, inner, origin="adapter, of rows", layout="TT")
        yield Problem(inner, rank, TRAINED, origin="adapter, of weights", layout="NT")


SUITE = suite.Suite("gemm-few-columns", tuple(_problems()), report=suite.mean_ratio)


def main(arguments: Sequence[str] | None = None) -> int:
    return suite.run(SUITE, suite.options(SUITE.name, __doc__).parse_args(arguments))


if __name__ == "__main__":
    sys.exit(main())

"""Suite gemm-layouts: products of linear layers in training, whose operands lie along M or N,
beside cuBLAS.

    python benchmarks/gemm_layouts.py [--only weights] [--candidates N | --all] [--seconds S]

With Y = X · Wᵀ of X (tokens, in) and W (out, in), the gradient of X is dY · W, whose W is
contiguous along N, and that of W is dYᵀ · X, both of whose operands are along M and N. The layers
are GPT-2's, Llama-3-8B's and Qwen2.5-32B's.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence

import suite
from problems import Problem

#: (out, in) of layers.
LAYERS = {
    "GPT-2 qkv": (2304, 768),
    "GPT-2 up": (3072, 768),
    "GPT-2 down": (768, 3072),
    "Llama-3-8B qkv": (6144, 4096),
    "Llama-3-8B gate_up": (28672, 4096),
    "Llama-3-8B down": (4096, 14336),
    "Qwen2.5-32B o": (5120, 5120),
}
TOKENS = (1024, 4096, 16384)


def _problems() -> Iterator[Problem]:
    for name, (out, inner) in LAYERS.items():
        for tokens in TOKENS:
            yield Problem(tokens, inner, out, origin=f"{name}, of rows", layout="TT")
            yield Problem(out, inner, tokens, origin=f"{name}, of weights", layout="NT")


SUITE = suite.Suite("gemm-layouts", tuple(_problems()), report=suite.mean_ratio)


def main(arguments: Sequence[str] | None = None) -> int:
    return suite.run(SUITE, suite.options(SUITE.name, __doc__).parse_args(arguments))


if __name__ == "__main__":
    sys.exit(main())

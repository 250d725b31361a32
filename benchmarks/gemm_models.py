"""Suite gemm-models: 120 shapes, beside cuBLAS and quack, in bfloat16.

    python benchmarks/gemm_models.py [--only Llama] [--candidates N | --all] [--seconds S]

The linear layers of Llama-3-8B and 70B, Qwen2.5-32B and the dense ones of DeepSeek-V3, each with
five numbers of tokens from 1 to 8192; and sizes that are no multiples of a tile or of a vector.
Prints the geometric mean of the ratios and the ten worst.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence

import suite
from problems import Problem

#: Per model and layer: (N, K), the features that it makes and those that it takes.
LAYERS = {
    "Llama-3-8B": {
        "qkv": (6144, 4096),
        "o": (4096, 4096),
        "gate_up": (28672, 4096),
        "down": (4096, 14336),
    },
    "Llama-3-70B": {
        "qkv": (10240, 8192),
        "o": (8192, 8192),
        "gate_up": (57344, 8192),
        "down": (8192, 28672),
    },
    "Qwen2.5-32B": {
        "qkv": (7168, 5120),
        "o": (5120, 5120),
        "gate_up": (55296, 5120),
        "down": (5120, 27648),
    },
    "DeepSeek-V3": {
        "q_a": (1536, 7168),
        "q_b": (24576, 1536),
        "kv_a": (576, 7168),
        "kv_b": (32768, 512),
        "o": (7168, 16384),
        "gate_up": (36864, 7168),
        "down": (7168, 18432),
    },
}
TOKENS = (
    *(1, 4, 8, 16, 32, 64, 128, 192, 256, 384),
    *(512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192),
)
TOKENS_PER_LAYER = 5

#: No multiples of a tile; the last ones not even of 16 bytes.
ODD = (
    (1, 1000, 4096),
    (7, 4096, 4096),
    (17, 4096, 4096),
    (33, 11008, 4096),
    (100, 4096, 4096),
    (129, 8192, 4096),
    (257, 5120, 5120),
    (300, 3000, 3000),
    (511, 520, 8192),
    (777, 2304, 768),
    (1000, 1000, 1000),
    (1023, 4096, 4096),
    (1025, 4096, 4096),
    (1500, 1504, 1496),
    (1576, 3072, 768),
    (2000, 2000, 2000),
    (2056, 2040, 2048),
    (3000, 5000, 1000),
    (4104, 4088, 4096),
    (5000, 5000, 5000),
    (8191, 1024, 4096),
    (1024, 50257, 768),
    (2047, 2049, 2048),
    (512, 512, 1001),
    (1024, 1024, 2002),
)


def problems() -> Iterator[Problem]:
    """Every layer has five numbers of tokens; together the layers have all of them."""
    layers = [(f"{m} {n}", sizes) for m, ls in LAYERS.items() for n, sizes in ls.items()]
    for number, (origin, (n, k)) in enumerate(layers):
        for turn in range(TOKENS_PER_LAYER):
            tokens = TOKENS[(number + turn * len(TOKENS) // TOKENS_PER_LAYER) % len(TOKENS)]
            yield Problem(tokens, n, k, origin=origin)
    for shape in ODD:
        yield Problem(*shape, origin="odd")


SUITE = suite.Suite("gemm-models", tuple(problems()), report=suite.mean_and_ten_worst)


def main(arguments: Sequence[str] | None = None) -> int:
    return suite.run(SUITE, suite.options(SUITE.name, __doc__).parse_args(arguments))


if __name__ == "__main__":
    sys.exit(main())

"""Suite sdpa-short-backward: gradients of attention of few or short sequences, beside cuDNN's.

    python benchmarks/sdpa_short_backward.py [--quick] [--candidates N | --all] [--seconds S]

Problems are of the kind of the suite sdpa-backward, of 64 to 4096 queries: short ones, and single
sequences of which blocks of keys hardly fill a GPU. Everything is timed by
CUDA graphs of several launches.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import attention
import sdpa_backward

#: (B, H, H_kv, S, D, causal)
SIZES = (
    *((1, 32, 8, S, 128, True) for S in (64, 128, 256)),
    *((8, 32, 8, S, 128, True) for S in (128, 256)),
    (2, 16, 16, 512, 128, True),
    (1, 16, 16, 1024, 128, True),
    (2, 8, 8, 2048, 128, True),
    (16, 16, 16, 64, 128, False),
    *((4, 16, 16, S, 64, True) for S in (64, 128, 256)),
    *((B, 12, 12, 197, 64, False) for B in (1, 32, 128)),
    *((B, 12, 12, 77, 64, True) for B in (1, 32)),
    (8, 16, 16, 384, 64, False),
    (1, 8, 8, 2048, 64, True),
    *((1, 16, 4, S, 256, True) for S in (64, 256)),
    (4, 8, 8, 256, 256, True),
    (1, 32, 8, 2048, 128, True),
    (1, 16, 1, 4096, 256, True),
)

SUITE = attention.Suite(
    "sdpa-short-backward",
    problems=tuple(sdpa_backward.Problem(*sizes) for sizes in SIZES),
    quick=tuple(sdpa_backward.Problem(*sizes) for sizes in SIZES[:3]),
    policy="graph",
)


def main(arguments: Sequence[str] | None = None) -> int:
    return attention.run(SUITE, __doc__, arguments)


if __name__ == "__main__":
    sys.exit(main())

"""Suite moe-layer-8-bits: layers of experts of 8 bits, beside torch's.

    python benchmarks/moe_layer_8_bits.py [--only TEXT] [--rounds N] [--seconds S] [--out FOLDER]

As the suite moe-layer, with weights of 8 bits: with a scale per column, beside the same of
torch._scaled_grouped_mm and what torch compiles around it; and in blocks of 128 x 128, for which
torch has no product of groups, so that its layer, compiled, has the weights in bfloat16.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence

import driver
import moe_layer
import suite

NAME = "moe-layer-8-bits"
#: Tokens of which layers are in CUDA graphs, too.
FEW = 256


def problems() -> list[moe_layer.Problem]:
    layers = moe_layer.example().LAYERS
    return [
        moe_layer.Problem(layer, tokens, scales=scales, policy=policy)
        for scales in ("blocks", "rows")
        for layer in layers
        for tokens in moe_layer.TOKENS
        for policy in (("eager", "graph") if tokens <= FEW else ("eager",))
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    options = driver.few_options(__doc__, rounds=12).parse_args(arguments)
    measure = functools.partial(moe_layer.measure, name=NAME)
    return driver.in_turn(NAME, problems(), options, measure, suite.line, suite.mean_ratio)


if __name__ == "__main__":
    sys.exit(main())

"""How long a GEMM design is expected to take: waves of tiles against the bytes to move.

    time = overhead + max(waves · tile time, compulsory bytes / bandwidth)

A tile's time is its arithmetic over the rate that a multiprocessor reaches with that tile; small
tiles reach less, because they read more operand bytes per product. Constants are per GPU and
family in ``model.json``.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from kernel_api.arguments import GemmArguments


@dataclass(frozen=True)
class Constants:
    """Of one kernel family on one GPU.

    Attributes:
        multiprocessors: Of the GPU.
        bandwidth: Bytes per second of device memory.
        overhead: Seconds of a launch that does nothing.
        rate: Products and sums per second and multiprocessor with a very large tile, by bits of
            an operand element.
        half_tile: Tile extent at which the rate is half of that.
        prologue: Elements along K that filling and draining the pipeline of a tile is worth.
    """

    multiprocessors: int
    bandwidth: float
    overhead: float
    rate: dict[int, float]
    half_tile: float
    prologue: float


@lru_cache(maxsize=8)
def constants(family: str) -> Constants:
    """The constants of a kernel family."""
    table = json.loads(Path(__file__).with_name("model.json").read_text())
    values = {**table["gpu"], **table["families"][family]}
    values["rate"] = {int(bits): rate for bits, rate in values["rate"].items()}
    return Constants(**values)


def predict(
    args: GemmArguments, tile_shape: tuple[int, int, int], blocks_per_sm: int, model: Constants
) -> float:
    """Seconds for one design, given how many of its CTAs share a multiprocessor."""
    tile_m, tile_n, tile_k = tile_shape
    tiles = -(-args.M // tile_m) * -(-args.N // tile_n) * args.L
    steps = -(-args.K // tile_k) * tile_k + model.prologue
    harmonic = 2 * tile_m * tile_n / (tile_m + tile_n)
    rate = model.rate[args.A.dtype.bits] * harmonic / (harmonic + model.half_tile)
    waves = -(-tiles // (model.multiprocessors * blocks_per_sm))
    arithmetic = waves * blocks_per_sm * 2 * tile_m * tile_n * steps / rate
    return model.overhead + max(arithmetic, _bytes(args) / model.bandwidth)


def _bytes(args: Any) -> int:
    """What must move at least once: every operand that is not broadcast."""
    return sum(
        operand.span if 0 in operand.stride else operand.tensor.numel() * operand.dtype.itemsize
        for operand in args.operands
    )

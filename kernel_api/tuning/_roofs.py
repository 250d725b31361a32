"""What a GPU can do at most, by its name; data sheets, without sparsity."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kernel_api.tuning._work import Work


@dataclass(frozen=True)
class Roofs:
    """Ceilings of one GPU.

    Attributes:
        bandwidth: Bytes per second of its memory.
        rates: Operations per second by the kind of arithmetic.
    """

    bandwidth: float
    rates: Mapping[str, float]

    def seconds(self, work: Work) -> float | None:
        """The least time that the work takes; None where its arithmetic has no known peak."""
        if work.operations is None:
            return work.bytes / self.bandwidth
        rate = self.rates.get(work.kind or "")
        return None if rate is None else max(work.operations / rate, work.bytes / self.bandwidth)


_HOPPER = {
    "float64": 67e12,
    "tfloat32": 494.7e12,
    "float16": 989.4e12,
    "float8": 1978.9e12,
    "int8": 1978.9e12,
}
_AMPERE = {"float64": 19.5e12, "tfloat32": 156e12, "float16": 312e12, "int8": 624e12}

_ROOFS = {
    "NVIDIA H200": Roofs(4.8e12, _HOPPER),
    "NVIDIA H100 80GB HBM3": Roofs(3.35e12, _HOPPER),
    "NVIDIA A100-SXM4-80GB": Roofs(2.039e12, _AMPERE),
    "NVIDIA A100-SXM4-40GB": Roofs(1.555e12, _AMPERE),
    "NVIDIA B200": Roofs(8e12, {"float16": 2.25e15, "float8": 4.5e15, "int8": 4.5e15}),
}


def roofs_of(gpu: str) -> Roofs | None:
    """None for a GPU that the table lacks."""
    return _ROOFS.get(gpu)

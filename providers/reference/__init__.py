"""Plain torch in higher precision: the oracle, and what runs where there is no GPU."""

from __future__ import annotations

from typing import ClassVar

from kernel_api.provider import Provider


class ReferenceProvider(Provider):
    """Every argument type in float64 (integers in int64), on the CPU or a GPU; slow and right."""

    name: ClassVar[str] = "reference"
    rank: ClassVar[int] = 200
    distributions: ClassVar[tuple[str, ...]] = ("torch",)


from kernel_api.providers.reference import (  # noqa: E402  (they register)
    gemm,
    grouped,
    norm,
    sdpa,
)

# isort: split
# Behind products, which are what most questions are about.
from kernel_api.providers.reference import elementwise, grouping, indexed  # noqa: E402

__all__ = [
    "ReferenceProvider",
    "elementwise",
    "gemm",
    "grouped",
    "grouping",
    "indexed",
    "norm",
    "sdpa",
]

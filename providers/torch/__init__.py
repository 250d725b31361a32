"""The vendor libraries through torch: what the user already has, as candidates."""

from __future__ import annotations

from typing import ClassVar

from kernel_api.provider import Provider


class TorchProvider(Provider):
    """cuBLAS on a GPU, oneDNN or BLAS on the CPU."""

    name: ClassVar[str] = "torch"
    rank: ClassVar[int] = 100
    distributions: ClassVar[tuple[str, ...]] = ("torch",)


from kernel_api.providers.torch import (  # noqa: E402  (they register)
    gemm,
    grouped,
    norm,
    sdpa,
    sdpa_flex,
)

# isort: split
# Behind products, which are what most questions are about.
from kernel_api.providers.torch import elementwise, grouping, indexed  # noqa: E402

__all__ = [
    "TorchProvider",
    "elementwise",
    "gemm",
    "grouped",
    "grouping",
    "indexed",
    "norm",
    "sdpa",
    "sdpa_flex",
]

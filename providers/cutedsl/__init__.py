"""Kernels written in CuTe DSL. Importing this loads no DSL: that waits for a compilation."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from functools import lru_cache
from typing import Any, ClassVar

from kernel_api.kernel import Kernel
from kernel_api.provider import Provider
from kernel_api.providers.cutedsl import kernel
from kernel_api.providers.cutedsl.kernel import CuteDslKernel
from kernel_api.status import Status


class CuTeDSLProvider(Provider):
    """Kernel classes derived from :class:`~kernel_api.providers.cutedsl.kernel.CuteDslKernel`."""

    name: ClassVar[str] = "cutedsl"
    architectures: ClassVar[tuple[int, ...] | None] = (
        *(80, 86, 87, 89, 90),
        *(100, 101, 103, 107, 110, 120, 121),
    )

    @classmethod
    def available(cls) -> Status:
        return _dsl_is_here()

    @classmethod
    def missing_from(cls, kernel_class: Any) -> Iterable[str]:
        yield from super().missing_from(kernel_class)
        if not isinstance(kernel_class, type) or not issubclass(kernel_class, Kernel):
            return
        if not issubclass(kernel_class, CuteDslKernel):
            yield "it must derive from kernel_api.providers.cutedsl.kernel.CuteDslKernel"
            return
        implements = kernel_class.implementation is not CuteDslKernel.implementation
        compiles = "compile" in _defined_above(kernel_class, CuteDslKernel) or (
            kernel_class._compile is not CuteDslKernel._compile
        )
        if not implements and not compiles:
            yield "it needs compile, or implementation"
        if compiles and not implements and kernel_class._run is CuteDslKernel._run:
            yield "it needs _run, because it compiles itself"


def _defined_above(cls: type, base: type) -> set[str]:
    own = cls.__mro__[: cls.__mro__.index(base)]
    return {name for c in own for name in vars(c)}


@lru_cache(maxsize=1)
def _dsl_is_here() -> Status:
    try:
        found = importlib.util.find_spec("cutlass")
    except (ImportError, ValueError):  # something on the import path refuses to look
        found = None
    if found is None:
        return Status.fail(
            "nvidia-cutlass-dsl is not installed",
            rule="the compiler is installed",
            nearest="would match after pip install nvidia-cutlass-dsl",
        )
    return Status.success()


from kernel_api.providers.cutedsl import (  # noqa: E402  (they register)
    gemm,
    grouped_gemm,
    norm,
    sdpa,
)

# isort: split
# Behind products, which are what most questions are about.
from kernel_api.providers.cutedsl import elementwise, grouping, indexed  # noqa: E402

__all__ = [
    "CuTeDSLProvider",
    "CuteDslKernel",
    "elementwise",
    "gemm",
    "grouped_gemm",
    "grouping",
    "indexed",
    "kernel",
    "norm",
    "sdpa",
]

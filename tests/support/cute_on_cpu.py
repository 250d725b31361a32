"""A CuTe DSL kernel class whose compiled code is a Python function, so that the way of a launch
(operands, further values, workspace, scalars) is seen and works on the CPU."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch

import kernel_api as ka
from kernel_api._workspaces import Buffer
from kernel_api.metadata import DesignMetadata
from kernel_api.providers.cutedsl import kernel as cutedsl_kernel
from kernel_api.providers.cutedsl.gemm.base import CuteDslGemm
from kernel_api.space import Operands, Space

MULTIPROCESSORS = 7


def formula(accum: Any, bias: Any, alpha: Any) -> Any:
    """What the kernel computes: out, and what stands before the activation."""
    x = alpha * accum + bias
    return ka.epilogue.relu(x), x


class CuteOnCpu(CuteDslGemm):
    """The product, or :func:`formula` of it with outputs ``out`` and ``pre``."""

    devices = ("cpu",)
    operands = (Operands(A="f32", B="f32", out="f32", accumulator="f32", majors="strided"),)
    space = Space()
    design = DesignMetadata
    fuses = True
    #: The arguments of every launch.
    launches: ClassVar[list[tuple[Any, ...]]] = []

    def scalars(self, multiprocessors: int) -> tuple[int, ...]:
        return (multiprocessors,)

    @property
    def takes_more(self) -> bool:
        return self.metadata.epilogue is not None

    def more_values(self, args: Any) -> dict[str, Any]:
        """In another order than the epilogue's."""
        if args.epilogue is None:
            return {}
        operands = args.epilogue.operands
        return {n: getattr(operands[n], "tensor", operands[n]) for n in ("alpha", "pre", "bias")}

    def compile(self, args: Any, cc: Any = None) -> ka.CompiledArtifact:
        return ka.CompiledArtifact(self._code(args.epilogue is not None), self)

    def _code(self, fused: bool) -> Any:
        launches = self.launches

        def plain(A: Any, B: Any, out: Any, multiprocessors: int) -> None:
            launches.append((multiprocessors,))
            out.copy_(A @ B)

        def with_more(
            A: Any, B: Any, out: Any, more: Any, address: int, multiprocessors: int
        ) -> None:
            launches.append((more, address, multiprocessors))
            alpha, pre, bias = more
            pre.copy_(alpha * (A @ B) + bias)
            out.copy_(pre.relu())

        return with_more if fused else plain


def registered(registry: Any, monkeypatch: pytest.MonkeyPatch) -> type[CuteOnCpu]:
    """The class, registered before all others; a fresh one, for which nothing is compiled."""
    monkeypatch.setattr(cutedsl_kernel, "sm_count", lambda index: MULTIPROCESSORS)
    fresh = type(CuteOnCpu)("Fresh", (CuteOnCpu,), {"launches": []})
    registry.provider(rank=-5).register(fresh)
    return fresh


def operands(M: int = 5, N: int = 6, K: int = 4, seed: int = 0) -> tuple[torch.Tensor, ...]:
    """A, B, out, bias and pre; outputs are NaN."""
    generator = torch.Generator().manual_seed(seed)
    A, B = torch.randn(M, K, generator=generator), torch.randn(K, N, generator=generator)
    bias = torch.randn(N, generator=generator)
    out, pre = torch.full((M, N), torch.nan), torch.full((M, N), torch.nan)
    return A, B, out, bias, pre


#: What `lender` lends.
LENT = 1 << 20


def lender(sizes):
    """In place of `_workspaces.lender`: notes the sizes that are asked for."""
    return lambda index: lambda size: sizes.append(size) or Buffer(None, size, LENT)

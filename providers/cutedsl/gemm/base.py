"""What the dense GEMM families share: problems without rows, columns or products."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kernel_api.arguments import GemmArguments
from kernel_api.artifact import CompiledArtifact
from kernel_api.providers.cutedsl.kernel import CuteDslKernel
from kernel_api.providers.streams import on_stream


class CuteDslGemm(CuteDslKernel):
    """A dense GEMM. Kernels see at least one row, column and product; the rest is done here."""

    arguments = GemmArguments

    def _launcher(self, args: GemmArguments, artifact: CompiledArtifact) -> Callable[..., None]:
        launch = super()._launcher(args, artifact)

        def launch_unless_empty(
            A: Any, B: Any, out: Any, *, stream: Any = None, **others: Any
        ) -> None:
            if A.numel() and B.numel():
                launch(A, B, out, stream=stream, **others)
            elif out.numel():
                with on_stream(stream):
                    out.zero_()

        return launch_unless_empty

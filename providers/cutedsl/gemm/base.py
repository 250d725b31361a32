"""What the dense GEMM families share: problems without rows, columns or products."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from kernel_api.arguments import Arguments, GemmArguments
from kernel_api.artifact import CompiledArtifact
from kernel_api.providers.cutedsl.kernel import BareWhereSizesAreKnown
from kernel_api.providers.streams import on_stream
from kernel_api.space import Miss, rule

#: Of a mode: twice its columns, those of a tile behind it, the bytes of a row of float32 and as
#: many times its tiles as K has parts are within 32 bits.
_MOST = 1 << 29


class CuteDslGemm(BareWhereSizesAreKnown):
    """A dense GEMM. Kernels see at least one row, column and product; the rest is done here."""

    arguments: ClassVar[type[Arguments] | None] = GemmArguments

    @rule("rows, columns, products and batches are counted in 32 bits, fewer than 2²⁹")
    def _(args: Any) -> bool | Miss:
        operands = args.operands if args.epilogue is None else args.named_operands.values()
        most = max([max(operand.shape, default=0) for operand in operands])
        return most < _MOST or Miss(f"one mode has {most}")

    def _launcher(self, args: GemmArguments, artifact: CompiledArtifact) -> Callable[..., None]:
        launch = super()._launcher(args, artifact)

        def launch_unless_empty(
            A: Any, B: Any, out: Any, *, stream: Any = None, **others: Any
        ) -> None:
            if not (A.numel() and B.numel()):
                if out.numel():
                    with on_stream(stream, A.device.index):
                        out.zero_()
            elif stream is None and not others:
                launch(A, B, out)  # without keywords, which take their time
            else:
                launch(A, B, out, stream=stream, **others)

        return launch_unless_empty

"""The dense matrix product by torch.mm and torch.bmm."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from kernel_api.arguments import GemmArguments
from kernel_api.artifact import CompiledArtifact
from kernel_api.kernel import Kernel
from kernel_api.metadata import DesignMetadata
from kernel_api.providers.precision import float32_multiplication
from kernel_api.providers.streams import on_stream
from kernel_api.providers.torch import TorchProvider
from kernel_api.space import Operands, Space, rule


@TorchProvider.register
class TorchGemm(Kernel):
    """out = A · B by torch.mm, or torch.bmm for a batch."""

    family: ClassVar[str] = "torch.mm"
    arguments = GemmArguments
    devices = ("cpu", "cuda")
    operands = (
        Operands(
            A="f16 | bf16 | f32", B="like A", out="like A", accumulator="f32", majors="strided"
        ),
        Operands(A="f16 | bf16", B="like A", out="f32", accumulator="f32", majors="strided"),
        Operands(A="f64", B="f64", out="f64", accumulator="f64", majors="strided"),
    )
    space = Space()
    design = DesignMetadata

    @rule("torch widens 16-bit products to float32 on a GPU only")
    def _(operands: Any, args: Any) -> bool:
        widens = operands.out.dtype is not operands.A.dtype
        return not widens or args.device.type != "cpu"

    def _run(
        self, args: Any, artifact: CompiledArtifact, stream: Any, workspace: Any = None
    ) -> None:
        with on_stream(stream):
            multiply_into(args.A.tensor, args.B.tensor, args.out.tensor, args.fp32_precision)


def multiply_into(A: Any, B: Any, out: Any, fp32_precision: str | None = None) -> None:
    """out = A · B, with float32 multiplied as asked whatever torch's own setting is."""
    multiply = torch.bmm if A.dim() == 3 else torch.mm
    with torch.no_grad(), float32_multiplication(fp32_precision):
        if out.dtype is A.dtype:
            multiply(A, B, out=out)
        else:
            multiply(A, B, out_dtype=out.dtype, out=out)

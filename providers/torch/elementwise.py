"""A matrix as it is, by torch's copy: a conversion, or a change of layout."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from kernel_api.arguments import ElementwiseArguments
from kernel_api.artifact import CompiledArtifact
from kernel_api.kernel import Kernel
from kernel_api.metadata import DesignMetadata, NormOperandsMetadata
from kernel_api.providers.streams import on_stream
from kernel_api.providers.torch import TorchProvider
from kernel_api.space import Miss, Operands, Space, rule


@TorchProvider.register
class TorchElementwise(Kernel):
    """out = x by torch.Tensor.copy_."""

    family: ClassVar[str] = "torch.copy"
    arguments = ElementwiseArguments
    devices: ClassVar[tuple[str, ...]] = ("cpu", "cuda")
    operands = (Operands(x="any", out="any", accumulator="any", majors="strided"),)
    operands_metadata = NormOperandsMetadata
    space = Space()
    design = DesignMetadata

    @rule("torch rounds to nearest where out is a float of 16 bits or more, or has x's type")
    def _(args: ElementwiseArguments) -> bool | Miss:
        x, out = args.x.dtype, args.out.dtype
        # Through the accumulator, as other kernels do: out has no digits that it lacks.
        rounds = out.is_float and 16 <= out.bits <= args.accumulator_type.bits
        return x is out or rounds or Miss(f"x is {x}, out is {out}")

    def _run(
        self, args: Any, artifact: CompiledArtifact, stream: Any, workspace: Any = None
    ) -> None:
        with torch.no_grad(), on_stream(stream, args.device.index):
            args.out.tensor.copy_(args.x.tensor)

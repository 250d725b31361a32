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
from kernel_api.space import Operands, Space

#: What is converted through float32. torch rounds to nearest where out is a float of 16 bits or
#: more; integers it cuts off, and of 8-bit floats it makes NaN what is too large.
_FLOATS = "f32 | f16 | bf16"
_OTHERS = "e4m3 | e5m2 | e8m0 | i64 | i32 | i16 | i8 | u64 | u32 | u16 | u8 | bool"


@TorchProvider.register
class TorchElementwise(Kernel):
    """out = x by torch.Tensor.copy_."""

    family: ClassVar[str] = "torch.copy"
    arguments = ElementwiseArguments
    devices: ClassVar[tuple[str, ...]] = ("cpu", "cuda")
    operands = (
        Operands(x=f"{_OTHERS} | {_FLOATS}", out=_FLOATS, accumulator="f32", majors="strided"),
        Operands(x=_OTHERS, out="like x", accumulator="f32", majors="strided"),
        Operands(x="f64", out="f64 | f32 | f16 | bf16", accumulator="f64", majors="strided"),
    )
    operands_metadata = NormOperandsMetadata
    space = Space()
    design = DesignMetadata

    def _run(
        self, args: Any, artifact: CompiledArtifact, stream: Any, workspace: Any = None
    ) -> None:
        with torch.no_grad(), on_stream(stream, args.device.index):
            args.out.tensor.copy_(args.x.tensor)

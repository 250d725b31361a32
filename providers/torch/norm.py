"""Norms of rows and their gradients by torch's own operators."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from kernel_api.arguments import (
    LayerNormArguments,
    LayerNormBackwardArguments,
    RmsNormArguments,
    RmsNormBackwardArguments,
)
from kernel_api.artifact import CompiledArtifact
from kernel_api.kernel import Kernel
from kernel_api.metadata import (
    DesignMetadata,
    NormBackwardOperandsMetadata,
    NormOperandsMetadata,
)
from kernel_api.providers.streams import on_stream
from kernel_api.providers.torch import TorchProvider
from kernel_api.space import Miss, Operands, Space, rule


class TorchNorm(Kernel):
    """An operator that allocates what it returns, which is copied to where it belongs."""

    devices: ClassVar[tuple[str, ...]] = ("cpu", "cuda")
    space = Space()
    design = DesignMetadata

    @rule("torch takes weight and bias of x's type")
    def _(args: Any) -> bool | Miss:
        for name in ("weight", "bias"):
            operand = args.further.get(name)
            if operand is not None and operand.dtype is not args.x.dtype:
                return Miss(
                    f"{name} is {operand.dtype}, x is {args.x.dtype}",
                    f"would match with {name} of {args.x.dtype}",
                )
        return True

    def _run(
        self, args: Any, artifact: CompiledArtifact, stream: Any, workspace: Any = None
    ) -> None:
        with torch.no_grad(), on_stream(stream, args.device.index):
            for name, values in self._computed(args).items():
                if name in args.outputs:
                    target = args.outputs[name].tensor
                    target.copy_(values.view(target.shape))

    def _computed(self, args: Any) -> dict[str, Any]:
        """Outputs by name; others are left out later."""
        raise NotImplementedError


on_the_cpu = rule("torch has the statistics of a layer norm in x's type on the CPU")


def _keeps_statistics(args: Any) -> bool:
    """Whether torch has them in the type that the arguments do."""
    return args.device.type != "cpu" or args.x.dtype is args.accumulator_type


def _tensor(args: Any, name: str) -> Any:
    operand = args.further.get(name)
    return None if operand is None else operand.tensor


def _statistics(args: Any, *names: str) -> list[Any]:
    """(M, 1) each, side by side: torch's gradients do not look at their strides."""
    return [getattr(args, name).tensor.contiguous().unsqueeze(-1) for name in names]


_FLOATS = (("f16 | bf16 | f32", "f32"), ("f64", "f64"))


class _Forward(TorchNorm):
    operands = tuple(
        Operands(x=types, out="like x", accumulator=accumulator, majors="strided")
        for types, accumulator in _FLOATS
    )
    operands_metadata = NormOperandsMetadata

    @rule("torch takes a residual of x's type")
    def _(args: Any) -> bool | Miss:
        residual = args.residual
        if residual is None or residual.dtype is args.x.dtype:
            return True
        return Miss(f"residual is {residual.dtype}, x is {args.x.dtype}")

    @staticmethod
    def _summed(args: Any) -> Any:
        """What is normalised."""
        residual = _tensor(args, "residual")
        return args.x.tensor if residual is None else args.x.tensor + residual


class _Backward(TorchNorm):
    operands = tuple(
        Operands(dy=types, x="like dy", dx="like dy", accumulator=accumulator, majors="strided")
        for types, accumulator in _FLOATS
    )
    operands_metadata = NormBackwardOperandsMetadata

    @rule("torch rounds a gradient before another one is added")
    def _(args: Any) -> bool | Miss:
        return args.dresidual is None or Miss("dresidual is given")


@TorchProvider.register
class TorchRmsNorm(_Forward):
    """Rows over their root mean square by torch._fused_rms_norm."""

    family: ClassVar[str] = "torch.rms_norm"
    arguments = RmsNormArguments

    @rule("torch's RMS norm adds no bias")
    def _(args: RmsNormArguments) -> bool:
        return args.bias is None

    @rule("torch's RMS norm has no Hadamard transform and finds no largest magnitude")
    def _(args: RmsNormArguments) -> bool:
        return not (args.hadamard or args.finds_maxima)

    def _computed(self, args: Any) -> dict[str, Any]:
        weight = _tensor(args, "weight")
        x = self._summed(args)
        out, rstd = torch._fused_rms_norm(x, [args.N], weight, args.eps)
        return {"out": out, "rstd": rstd, "residual_out": x}


@TorchProvider.register
class TorchLayerNorm(_Forward):
    """Rows less their mean, over their standard deviation, by torch.native_layer_norm."""

    family: ClassVar[str] = "torch.layer_norm"
    arguments = LayerNormArguments

    @on_the_cpu
    def _(args: LayerNormArguments) -> bool:
        return _keeps_statistics(args) or (args.mean is None and args.rstd is None)

    def _computed(self, args: Any) -> dict[str, Any]:
        factors = _tensor(args, "weight"), _tensor(args, "bias")
        x = self._summed(args)
        found = torch.native_layer_norm(x, [args.N], *factors, args.eps)
        return dict(zip(("out", "mean", "rstd", "residual_out"), (*found, x), strict=True))


@TorchProvider.register
class TorchRmsNormBackward(_Backward):
    """The gradient of torch.rms_norm, which has an operator of its own on a GPU only."""

    family: ClassVar[str] = "torch.rms_norm_backward"
    arguments = RmsNormBackwardArguments
    devices = ("cuda",)

    @rule("torch's RMS norm has no bias, and no gradient of one")
    def _(args: RmsNormBackwardArguments) -> bool:
        return args.dbias is None

    @rule("torch computes dweight where there is a weight")
    def _(args: RmsNormBackwardArguments) -> bool:
        return args.dweight is None or args.weight is not None

    def _computed(self, args: Any) -> dict[str, Any]:
        dy, x, _ = args.tensors
        wanted = [True, args.dweight is not None]
        dx, dweight = torch.ops.aten._fused_rms_norm_backward(
            dy, x, [args.N], *_statistics(args, "rstd"), _tensor(args, "weight"), wanted
        )
        return {"dx": dx, "dweight": dweight}


@TorchProvider.register
class TorchLayerNormBackward(_Backward):
    """The gradient of torch.layer_norm."""

    family: ClassVar[str] = "torch.layer_norm_backward"
    arguments = LayerNormBackwardArguments

    @rule("torch computes dweight and dbias where there is a weight")
    def _(args: LayerNormBackwardArguments) -> bool:
        return args.weight is not None or (args.dweight is None and args.dbias is None)

    @on_the_cpu
    def _(args: LayerNormBackwardArguments) -> bool:
        return _keeps_statistics(args)

    def _computed(self, args: Any) -> dict[str, Any]:
        dy, x, _ = args.tensors
        weight = _tensor(args, "weight")
        statistics = _statistics(args, "mean", "rstd")
        wanted = [True, args.dweight is not None, args.dbias is not None]
        found = torch.ops.aten.native_layer_norm_backward(
            dy, x, [args.N], *statistics, weight, weight, wanted
        )
        return dict(zip(("dx", "dweight", "dbias"), found, strict=True))

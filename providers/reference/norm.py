"""Norms of rows and their gradients in float64."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from kernel_api.arguments import (
    LayerNormArguments,
    LayerNormBackwardArguments,
    RmsNormArguments,
    RmsNormBackwardArguments,
)
from kernel_api.arguments.norm import NormArguments
from kernel_api.artifact import CompiledArtifact
from kernel_api.epilogue.graph import HADAMARD_BLOCK
from kernel_api.epilogue.tracing import RESULT
from kernel_api.kernel import Kernel
from kernel_api.metadata import (
    DesignMetadata,
    NormBackwardOperandsMetadata,
    NormOperandsMetadata,
)
from kernel_api.providers.reference import ReferenceProvider
from kernel_api.providers.reference.allowance import changes
from kernel_api.providers.reference.epilogue import evaluate, held, put, rounded, saturated
from kernel_api.providers.streams import on_stream
from kernel_api.space import Operands, Space

Values = dict[str, Any]


class ReferenceRows(Kernel):
    """Computed in float64 and rounded once; any float types, any strides. Values are those of the
    rows that are written."""

    devices = ("cpu", "cuda")
    space = Space()
    design = DesignMetadata

    def _run(
        self, args: Any, artifact: CompiledArtifact, stream: Any, workspace: Any = None
    ) -> None:
        with torch.no_grad(), on_stream(stream, args.device.index):
            rows = args.rows_written()
            for name, values in self.exact(args).items():
                written = args.outputs[name]
                put(written.tensor, rows.get(name, ...), rounded(values, written.dtype))

    @classmethod
    def exact(cls, args: Any) -> Values:
        """The oracle of ``verify``: what is stored, before it is rounded, in float64."""
        found = cls.values(args, torch.float64)
        return {n: saturated(found[n], o.dtype).double() for n, o in args.outputs.items()}

    @classmethod
    def same_dtype(cls, args: Any) -> Values:
        """Outputs as torch computes them in the type of the arithmetic, rounded once."""
        found = cls.values(args, args.accumulator_type.torch)
        return {name: held(found[name], o.dtype) for name, o in args.outputs.items()}

    @classmethod
    def values(cls, args: Any, wide: torch.dtype) -> Values:
        """Every output in a type, in the shape that it is stored with."""
        raise NotImplementedError


class _Forward(ReferenceRows):
    any_epilogue = True
    operands = (Operands(x="any", out="any", accumulator="any", majors="strided"),)
    operands_metadata = NormOperandsMetadata

    @classmethod
    def values(cls, args: Any, wide: torch.dtype) -> Values:
        found = _normalised(args, wide)
        return found if args.epilogue is None else {**found, **_fused(args, found["out"], wide)}

    @staticmethod
    def allowance(args: Any) -> Values:
        """What one rounding costs at the scale of the data, u · max|x| · rstd · max|weight| per
        row; 4 times that behind a Hadamard transform, which adds up 16 of a quarter. In float64 N
        times that, as there is nothing wider to compare with.

        Of an epilogue's outputs: what they change by where the result is off by as much.
        """
        unit = _unit(args, args.N)
        x = _summed(args).to(torch.float64)
        found = _normalised(args, torch.float64)
        largest = x.abs().amax(-1) if args.M else x.sum(-1)
        weight = 1.0 if args.weight is None else _wide(args, "weight", torch.float64).abs().max()
        scale = 4.0 if getattr(args, "hadamard", False) else 1.0
        row = unit * scale * largest * found["rstd"] * weight
        allowed = {
            "out": row.unsqueeze(-1),
            "rstd": unit * found["rstd"],
            "mean": unit * x.abs().mean(-1),
            "residual_out": torch.zeros((), dtype=torch.float64, device=x.device),  # exact
            **(_maxima(args, row) if isinstance(args, RmsNormArguments) else {}),
        }
        if args.epilogue is not None:
            allowed.update(_fused_allowance(args, found["out"], row.unsqueeze(-1)))
        return {n: torch.nan_to_num(v) for n, v in allowed.items() if n in args.outputs}


@ReferenceProvider.register
class ReferenceRmsNorm(_Forward):
    """Rows over their root mean square, with any transform, maxima or epilogue behind."""

    family: ClassVar[str] = "reference.rmsnorm"
    arguments = RmsNormArguments


@ReferenceProvider.register
class ReferenceLayerNorm(_Forward):
    """Rows less their mean, over their standard deviation, with any epilogue behind."""

    family: ClassVar[str] = "reference.layernorm"
    arguments = LayerNormArguments


class _Backward(ReferenceRows):
    operands = (Operands(dy="any", x="any", dx="any", accumulator="any", majors="strided"),)
    operands_metadata = NormBackwardOperandsMetadata

    @classmethod
    def values(cls, args: Any, wide: torch.dtype) -> Values:
        dy, g, normal, rstd = _terms(args, wide)
        found = g - normal * (g * normal).mean(-1, keepdim=True)
        if isinstance(args, LayerNormBackwardArguments):
            found = found - g.mean(-1, keepdim=True)
        found = found * rstd
        if args.dresidual is not None:
            found = found + _wide(args, "dresidual", wide)
        return {"dx": found, "dweight": (dy * normal).sum(0), "dbias": dy.sum(0)}

    @staticmethod
    def allowance(args: Any) -> Values:
        """What one rounding costs at the scale of the data: of dx, per row u times the largest of
        what is added up; of sums over rows, u times the norms of what is multiplied."""
        dy, g, normal, rstd = _terms(args, torch.float64)
        x = _wide(args, "x", torch.float64) * rstd
        products = (g * normal).abs().mean(-1, keepdim=True)
        largest = (g.abs() + x.abs() * products).amax(-1, keepdim=True) if args.M else products
        largest = rstd.abs() * largest
        if args.dresidual is not None and args.M:
            further = _wide(args, "dresidual", torch.float64).abs().amax(-1, keepdim=True)
            largest = largest + further
        columns = torch.linalg.vector_norm(dy, dim=0)
        factors = torch.linalg.vector_norm(normal.abs() + x.abs(), dim=0)
        unit, of_sums = _unit(args, args.N), _unit(args, max(args.M, 1))
        allowed = {
            "dx": unit * largest,
            "dweight": of_sums * columns * factors,
            "dbias": of_sums * columns * max(args.M, 1) ** 0.5,
        }
        return {n: torch.nan_to_num(v) for n, v in allowed.items() if n in args.outputs}


@ReferenceProvider.register
class ReferenceRmsNormBackward(_Backward):
    """The gradient of an RMS norm."""

    family: ClassVar[str] = "reference.rmsnorm_backward"
    arguments = RmsNormBackwardArguments


@ReferenceProvider.register
class ReferenceLayerNormBackward(_Backward):
    """The gradient of a layer norm."""

    family: ClassVar[str] = "reference.layernorm_backward"
    arguments = LayerNormBackwardArguments


# Formulas --------------------------------------------------------------------------------


def _wide(args: NormArguments, name: str, wide: torch.dtype) -> Any:
    """An operand in the type of the arithmetic, or wider."""
    tensor = getattr(args, name).tensor
    return tensor.to(args.accumulator_type.torch).to(wide)


def _unit(args: NormArguments, summed: int) -> float:
    return summed * 2.0**-52 if args.accumulator_type.bits == 64 else 2.0**-23


def _summed(args: Any) -> Any:
    """What is normalised, in the type of the arithmetic: x, or its sum with the residual, rounded
    as it is stored."""
    x = _wide(args, "x", args.accumulator_type.torch)
    if args.residual is None:
        return x
    summed = x + _wide(args, "residual", args.accumulator_type.torch)
    return summed.to(args.residual.dtype.torch).to(args.accumulator_type.torch)


def _normalised(args: Any, wide: torch.dtype) -> Values:
    x = _summed(args).to(wide)
    found: Values = {"residual_out": x}
    if isinstance(args, LayerNormArguments):
        found["mean"] = x.mean(-1)
        x = x - found["mean"].unsqueeze(-1)
    eps = torch.tensor(args.eps, dtype=args.accumulator_type.torch, device=x.device).to(wide)
    found["rstd"] = torch.rsqrt(x.square().mean(-1) + eps)
    y = x * found["rstd"].unsqueeze(-1)
    if args.weight is not None:
        y = y * _wide(args, "weight", wide)
    if args.bias is not None:
        y = y + _wide(args, "bias", wide)
    if isinstance(args, RmsNormArguments):
        if args.hadamard:
            y = _transformed(args, y)
        largest = y.abs().amax(-1) if args.M else y.sum(-1)
        found.update(_maxima(args, largest))
    return {**found, "out": y}


def _transformed(args: RmsNormArguments, y: Any) -> Any:
    blocks = y.unflatten(-1, (-1, HADAMARD_BLOCK))
    if args.signs is not None:
        blocks = blocks * _wide(args, "signs", y.dtype)
    return (blocks @ _hadamard_matrix(y)).flatten(-2)


def _hadamard_matrix(like: Any) -> Any:
    """(−1) ** (ones that the numbers of row and column share) / 4."""
    common = [[bin(i & j).count("1") for j in range(HADAMARD_BLOCK)] for i in range(HADAMARD_BLOCK)]
    signs = 1 - 2 * (torch.tensor(common, device=like.device) % 2)
    return signs.to(like.dtype) / HADAMARD_BLOCK**0.5


def _maxima(args: RmsNormArguments, of_rows: Any) -> Values:
    """The largest per block of rows, and of all; NaN if there is one."""
    rows = args.rows_per_block
    blocks = -(-args.M // rows)
    padded = torch.nn.functional.pad(of_rows, (0, blocks * rows - args.M)).view(blocks, rows)
    return {
        "amax": padded.amax(-1) if blocks else padded.sum(-1),
        "global_amax": of_rows.amax() if args.M else of_rows.sum(),
    }


def _terms(args: Any, wide: torch.dtype) -> tuple[Any, Any, Any, Any]:
    """(dy, g = dy · weight, x̂, rstd)"""
    dy, x = _wide(args, "dy", wide), _wide(args, "x", wide)
    rstd = _wide(args, "rstd", wide).unsqueeze(-1)
    if isinstance(args, LayerNormBackwardArguments):
        x = x - _wide(args, "mean", wide).unsqueeze(-1)
    g = dy if args.weight is None else dy * _wide(args, "weight", wide)
    return dy, g, x * rstd, rstd


# Epilogues -------------------------------------------------------------------------------


def _fused(args: Any, result: Any, wide: torch.dtype) -> Values:
    """Every output of the epilogue."""
    graph, operands = args.epilogue.graph, args.epilogue.operands
    double = args.accumulator_type.bits == 64
    found = evaluate(graph, result, operands, wide=wide is torch.float64, double=double)
    found = {"out": found.pop(RESULT), **found}
    written = {"out": args.out, **args.epilogue.outputs}
    return {name: found[name].reshape(o.shape) for name, o in written.items()}


def _fused_allowance(args: Any, result: Any, error: Any) -> Values:
    """Change of the epilogue's outputs where the result is off; half a unit of integers."""

    def evaluated(value: Any) -> Values:
        return {name: one.double() for name, one in _fused(args, value, torch.float64).items()}

    exact = evaluated(result)
    least = {n: 0.0 if args.outputs[n].dtype.is_float else 0.5 for n in exact}
    return changes(result, error, exact, least, args.epilogue.graph, evaluated)

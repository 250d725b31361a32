"""What the families of norms offer whose results are quantised."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from kernel_api._estimated_sizes import told_apart
from kernel_api.arguments import ElementwiseArguments, LayerNormArguments, RmsNormArguments
from kernel_api.artifact import CompiledArtifact
from kernel_api.epilogue import Graph
from kernel_api.fusions._store import WIDTHS, Quantization, quantization_of
from kernel_api.metadata import NormOperandsMetadata
from kernel_api.providers.cutedsl import CuTeDSLProvider, compiler
from kernel_api.providers.cutedsl.elementwise.sm80 import CONVERTS_8_BITS
from kernel_api.providers.cutedsl.epilogue.operands import epilogue_values
from kernel_api.providers.cutedsl.h200 import L2_BANDWIDTH
from kernel_api.providers.cutedsl.kernel import unless_empty
from kernel_api.providers.cutedsl.norm import model
from kernel_api.providers.cutedsl.norm.base import (
    WHY_ALIGNED,
    RowKernel,
    few_registers,
    few_vectors,
    rows_fit,
    vector_of,
)
from kernel_api.providers.cutedsl.norm.forward import (
    SPACE,
    NormDesign,
    NormForward,
    neither_transform_nor_maxima,
)
from kernel_api.space import Miss, Operands, rule

_LANES = 32
#: Of the time of a norm that takes several rows after each other, where results are quantised.
_QUANTIZED_TURNS_COST = 1.06

#: Whole vectors: columns that share a scale are with few threads.
_OPERANDS = tuple(
    Operands(
        x=x,
        out="e4m3 | e5m2 | i8",
        accumulator="f32",
        majors="x:n out:n",
        alignments=({"x": 16, "out": vector},),
        why_aligned=WHY_ALIGNED,
    )
    for x, vector in (("f16 | bf16", 8), ("f32", 4))
)


class QuantizedRows(RowKernel):
    """What all share: out has 8 bits, and an epilogue is a quantisation."""

    fuses = True
    operands = _OPERANDS
    design = NormDesign
    _design: NormDesign

    @rule("scales are float32, or powers of two of float8_e8m0fnu in mode mx")
    def _(args: Any) -> bool | Miss:
        asked = _asked(args)
        if asked is None or asked.mode == "tensor":
            return True
        element = args.epilogue.outputs["scale"].dtype
        expected = "float8_e8m0fnu" if asked.mode == "mx" else "float32"
        return element.name == expected or Miss(f"they are {element}")

    @rule("columns that share a scale are with the threads of a row at once, in one warp")
    def _(design: NormDesign, operands: NormOperandsMetadata, args: Any) -> bool | Miss:
        asked = _asked(args)
        columns = None if asked is None else WIDTHS.get(asked.mode)
        if columns is None:
            return True
        vector = vector_of(operands)
        fits = design.threads_per_row * vector % columns == 0 and columns <= _LANES * vector
        return fits or Miss(f"{columns} do")

    def more_values(self, args: Any) -> dict[str, Any]:
        values = super().more_values(args)
        return values if args.epilogue is None else {**values, **epilogue_values(args.epilogue)}

    def implementation(self) -> Callable[..., None]:
        return self._quantized(("eps",), None)

    def implementation_for(self, args: Any) -> Callable[..., None]:
        return self._quantized(tuple(self.more_values(args)), _asked(args))

    def _quantized(
        self, operands: tuple[str, ...], asked: Quantization | None
    ) -> Callable[..., None]:
        from kernel_api.implementations.common.conversion import Conversions
        from kernel_api.implementations.sm80 import quantized_norm as implemented

        scales = None
        if asked is not None and asked.mode != "tensor":
            columns = WIDTHS.get(asked.mode)
            scales = implemented.FoundScales(columns, asked.top, powers=asked.mode == "mx")
        found: Callable[..., None] = implemented.QuantizedNorm(
            **self._launched(),
            turns=self._design.turns,
            centred=self.arguments is LayerNormArguments,
            normalises=self.arguments is not ElementwiseArguments,
            operands=operands,
            scales=scales,
            conversions=Conversions(compiler.target_cc() >= CONVERTS_8_BITS),
        )
        return found

    def predict(self, args: Any) -> float:
        design, asked = self._design, _asked(args)
        mode = None if asked is None else asked.mode
        seconds = model.forward(
            args, design, self.metadata.operands, design.turns, exchanges=mode in WIDTHS
        )
        if design.turns > 1:
            seconds *= _QUANTIZED_TURNS_COST
        if not design.elements and mode == "row" and self.arguments is not ElementwiseArguments:
            read = told_apart(args.M) * args.N * args.x.dtype.itemsize
            seconds += read / L2_BANDWIDTH  # looked at once more
        return seconds


class QuantizedNorm(QuantizedRows, NormForward):
    """Of the results of a norm."""

    @rule("an epilogue is a quantisation of the result, and nothing else")
    def _(args: Any) -> bool:
        return args.epilogue is None or _asked(args) is not None

    @classmethod
    def kernels_for(cls, operands: Any, epilogue: Graph | None = None) -> list[Any]:
        """Whole numbers are in units of scales."""
        if epilogue is None and operands.out.dtype.kind != "float":
            return []
        kernels: list[Any] = super().kernels_for(operands, epilogue)
        return kernels


def _asked(args: Any) -> Quantization | None:
    return None if args.epilogue is None else quantization_of(args.epilogue.graph)


@CuTeDSLProvider.register
class Sm80QuantizedRmsNorm(QuantizedNorm):
    """Rows over their root mean square, in 8 bits, for every GPU from Ampere on."""

    family: ClassVar[str] = "sm80.rmsnorm_quantize"
    arguments = RmsNormArguments
    has_neither = neither_transform_nor_maxima


@CuTeDSLProvider.register
class Sm80QuantizedLayerNorm(QuantizedNorm):
    """Rows less their mean, over their standard deviation, in 8 bits, for every GPU from Ampere
    on."""

    family: ClassVar[str] = "sm80.layernorm_quantize"
    arguments = LayerNormArguments


@CuTeDSLProvider.register
class Sm80QuantizeRows(QuantizedRows):
    """Rows in units of their largest magnitudes, in 8 bits, for every GPU from Ampere on."""

    family: ClassVar[str] = "sm80.quantize_rows"
    arguments = ElementwiseArguments
    operands_metadata = NormOperandsMetadata
    space = SPACE
    rows_fit = rows_fit
    has_few_vectors = few_vectors
    has_few_registers = few_registers

    @rule("an epilogue is a quantisation by rows, and nothing else")
    def _(args: ElementwiseArguments) -> bool:
        asked = _asked(args)
        return args.epilogue is None or (asked is not None and asked.mode == "row")

    @rule("there is one matrix, with columns, and one that is stored")
    def _(args: ElementwiseArguments) -> bool | Miss:
        if args.x.rank != 2:
            return Miss(f"x has rank {args.x.rank}", "would match with x.flatten(0, 1)")
        if not args.N:
            return Miss(f"x has shape {args.x.shape}")
        return args.stores_out or Miss("out is None")

    def implementation(self) -> Callable[..., None]:
        return self._quantized((), None)

    def _launcher(
        self, args: ElementwiseArguments, artifact: CompiledArtifact
    ) -> Callable[..., None]:
        return unless_empty(super()._launcher(args, artifact))

"""What the families of norms offer whose results are quantised."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from kernel_api.arguments import ElementwiseArguments, LayerNormArguments, RmsNormArguments
from kernel_api.arguments.scaled import BLOCK
from kernel_api.artifact import CompiledArtifact
from kernel_api.epilogue import Graph
from kernel_api.fusions._store import MX_BLOCK, Quantization, quantization_of
from kernel_api.metadata import NormOperandsMetadata, OperandsMetadata
from kernel_api.providers.cutedsl import CuTeDSLProvider, compiler
from kernel_api.providers.cutedsl.elementwise.sm80 import CONVERTS_8_BITS
from kernel_api.providers.cutedsl.epilogue.operands import epilogue_values
from kernel_api.providers.cutedsl.h200 import L2_BANDWIDTH
from kernel_api.providers.cutedsl.norm import model
from kernel_api.providers.cutedsl.norm.base import (
    WHY_ALIGNED,
    RowKernel,
    few_registers,
    few_vectors,
    rows_fit,
    vector_of,
)
from kernel_api.providers.cutedsl.norm.forward import SPACE, NormDesign, NormForward
from kernel_api.space import Miss, Operands, rule

#: Columns that share a scale, of the modes in which not all of a row do.
_COLUMNS = {"block": BLOCK, "mx": MX_BLOCK}
_LANES = 32
#: Of the time of a norm, where a CTA takes several rows after each other.
_TURNS_COST = 1.06


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


class QuantizedNorm(NormForward):
    """What they share: out has 8 bits, and the epilogue is a quantisation."""

    fuses = True
    operands = _OPERANDS

    @rule("an epilogue is a quantisation of the result, and nothing else")
    def _(args: Any) -> bool:
        return args.epilogue is None or quantization_of(args.epilogue.graph) is not None

    @rule("columns that share a scale are with the threads of a row at once, in one warp")
    def _(design: NormDesign, operands: NormOperandsMetadata, args: Any) -> bool | Miss:
        asked = _asked(args)
        columns = None if asked is None else _COLUMNS.get(asked.mode)
        if columns is None:
            return True
        vector = vector_of(operands)
        fits = design.threads_per_row * vector % columns == 0 and columns <= _LANES * vector
        return fits or Miss(f"{columns} do")

    @classmethod
    def kernels_for(cls, operands: Any, epilogue: Graph | None = None) -> list[Any]:
        """Whole numbers are in units of scales."""
        if epilogue is None and operands.out.dtype.kind != "float":
            return []
        kernels: list[Any] = super().kernels_for(operands, epilogue)
        return kernels

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
        centred = self.arguments is LayerNormArguments
        launched = {**self._launched(), "turns": self._design.turns, "centred": centred}
        return _implementation(asked, operands=operands, **launched)

    def predict(self, args: Any) -> float:
        return _seconds(args, self._design, self.metadata.operands)


def _asked(args: Any) -> Quantization | None:
    return None if args.epilogue is None else quantization_of(args.epilogue.graph)


def _implementation(asked: Quantization | None, **options: Any) -> Callable[..., None]:
    from kernel_api.implementations.common.conversion import Conversions
    from kernel_api.implementations.sm80 import quantized_norm as implemented

    scales = None
    if asked is not None and asked.mode != "tensor":
        columns = _COLUMNS.get(asked.mode)
        scales = implemented.FoundScales(columns, asked.top, powers=asked.mode == "mx")
    conversions = Conversions(compiler.target_cc() >= CONVERTS_8_BITS)
    found: Callable[..., None] = implemented.QuantizedNorm(
        scales=scales, conversions=conversions, **options
    )
    return found


def _seconds(args: Any, design: NormDesign, operands: OperandsMetadata) -> float:
    asked = _asked(args)
    of_blocks = asked is not None and asked.mode in _COLUMNS
    seconds = model.forward(args, design, operands, design.turns, exchanges=of_blocks)
    if design.turns > 1:
        seconds *= _TURNS_COST
    if not design.elements and asked is not None and asked.mode == "row":  # looked at once more
        seconds += args.M * args.N * args.x.dtype.itemsize / L2_BANDWIDTH
    return seconds


@CuTeDSLProvider.register
class Sm80QuantizedRmsNorm(QuantizedNorm):
    """Rows over their root mean square, in 8 bits, for every GPU from Ampere on."""

    family: ClassVar[str] = "sm80.rmsnorm_quantize"
    arguments = RmsNormArguments


@CuTeDSLProvider.register
class Sm80QuantizedLayerNorm(QuantizedNorm):
    """Rows less their mean, over their standard deviation, in 8 bits, for every GPU from Ampere
    on."""

    family: ClassVar[str] = "sm80.layernorm_quantize"
    arguments = LayerNormArguments


@CuTeDSLProvider.register
class Sm80QuantizeRows(RowKernel):
    """Rows in units of their largest magnitudes, in 8 bits, for every GPU from Ampere on."""

    family: ClassVar[str] = "sm80.quantize_rows"
    arguments = ElementwiseArguments
    fuses = True
    operands = _OPERANDS
    operands_metadata = NormOperandsMetadata
    design = NormDesign
    _design: NormDesign
    space = SPACE
    rows_fit = rows_fit
    has_few_vectors = few_vectors
    has_few_registers = few_registers

    @rule("an epilogue is a quantisation by rows, and nothing else")
    def _(args: ElementwiseArguments) -> bool:
        asked = _asked(args)
        return args.epilogue is None or (asked is not None and asked.mode == "row")

    @rule("there is one matrix, and one that is stored")
    def _(args: ElementwiseArguments) -> bool | Miss:
        if args.x.rank == 2:
            return args.stores_out or Miss("out is None")
        return Miss(f"x has rank {args.x.rank}", "would match with x.flatten(0, 1)")

    def more_values(self, args: ElementwiseArguments) -> dict[str, Any]:
        return {} if args.epilogue is None else epilogue_values(args.epilogue)

    def implementation(self) -> Callable[..., None]:
        return self._quantized((), None)

    def implementation_for(self, args: ElementwiseArguments) -> Callable[..., None]:
        return self._quantized(tuple(self.more_values(args)), _asked(args))

    def _quantized(
        self, operands: tuple[str, ...], asked: Quantization | None
    ) -> Callable[..., None]:
        launched = {**self._launched(), "turns": self._design.turns, "normalises": False}
        return _implementation(asked, operands=operands, **launched)

    def _launcher(
        self, args: ElementwiseArguments, artifact: CompiledArtifact
    ) -> Callable[..., None]:
        launch = super()._launcher(args, artifact)

        def launch_unless_empty(x: Any, out: Any, **others: Any) -> None:
            if x.numel():
                launch(x, out, **others)

        return launch_unless_empty

    def predict(self, args: ElementwiseArguments) -> float:
        return _seconds(args, self._design, self.metadata.operands)

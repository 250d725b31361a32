"""What the forward norm families offer."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from kernel_api._workspaces import ZEROED
from kernel_api.arguments import LayerNormArguments, RmsNormArguments
from kernel_api.epilogue.graph import HADAMARD_BLOCK
from kernel_api.metadata import NormOperandsMetadata
from kernel_api.providers.cutedsl import CuTeDSLProvider
from kernel_api.providers.cutedsl.norm import model
from kernel_api.providers.cutedsl.norm.base import (
    NormKernel,
    RowDesign,
    all_rows_fit,
    few_registers,
    few_vectors,
    row_operands,
    rows_fit,
    vector_of,
)
from kernel_api.space import Miss, Operands, Space, rule


@dataclass(frozen=True)
class NormDesign(RowDesign):
    """Rows on threads, for a while.

    Attributes:
        turns: Times that a CTA takes new rows.
    """

    turns: int

    def label(self) -> str:
        return f"{super().label()}_turns{self.turns}"


#: (threads, threads per row, elements per thread)
_STAGED = (
    (128, 8, 8),
    (128, 8, 16),
    (128, 16, 16),
    (128, 32, 16),
    (128, 32, 24),
    (128, 32, 32),
    (128, 32, 40),
    (128, 64, 24),
    (128, 64, 32),
    (128, 128, 8),
    (128, 128, 16),
    (256, 256, 8),
    (96, 96, 32),
    (128, 128, 32),
    (256, 256, 16),
    (160, 160, 32),
    (192, 192, 32),
    (224, 224, 32),
    (256, 256, 32),
    (512, 512, 16),
    (128, 128, 64),
    (1024, 1024, 8),
    (320, 320, 32),
    (256, 256, 48),
    (384, 384, 32),
    (448, 448, 32),
    (512, 512, 32),
    (256, 256, 64),
    (512, 512, 64),
)
#: (stages, turns)
_FLIGHTS = ((2, 4), (3, 8), (1, 1))
_STREAMED = ((128, 32), (256, 256), (1024, 1024))

SPACE = Space(
    *(
        NormDesign(*threads, stages, turns)
        for threads, (stages, turns) in itertools.product(_STAGED, _FLIGHTS)
    ),
    *(NormDesign(*threads, 0, 0, 1) for threads in _STREAMED),
)


@rule("a Hadamard transform and largest magnitudes are of sm80.rmsnorm_rht_amax")
def neither_transform_nor_maxima(args: RmsNormArguments) -> bool:
    return not (args.hadamard or args.finds_maxima)


class NormForward(NormKernel):
    """What the forward families share."""

    operands: ClassVar[tuple[Operands, ...]] = (
        row_operands("f16 | bf16", "like x", (16, 16), (4, 4)),
        row_operands("f16 | bf16", "f32", (16, 16), (4, 8)),
        row_operands("f32", "f32", (16, 16)),
        row_operands("f32", "f16 | bf16", (16, 8)),
    )
    operands_metadata = NormOperandsMetadata
    design = NormDesign
    space = SPACE

    rows_fit = rows_fit
    all_rows_fit = all_rows_fit
    has_few_vectors = few_vectors
    has_few_registers = few_registers

    def implementation(self) -> Callable[..., None]:
        return self._implementation(("eps",))

    def implementation_for(self, args: Any) -> Callable[..., None]:
        hadamard = getattr(args, "hadamard", False)
        return self._implementation(tuple(self.more_values(args)), hadamard)

    def _implementation(
        self, operands: tuple[str, ...], hadamard: bool = False
    ) -> Callable[..., None]:
        from kernel_api.implementations.sm80.norm import Norm

        found: Callable[..., None] = Norm(
            **self._launched(),
            turns=self._design.turns,
            centred=self.arguments is LayerNormArguments,
            hadamard=hadamard,
            operands=operands,
        )
        return found

    def predict(self, args: Any) -> float:
        design = self._design
        return model.forward(args, design, self.metadata.operands, design.turns)


@CuTeDSLProvider.register
class Sm80RmsNorm(NormForward):
    """Rows over their root mean square, for every GPU from Ampere on: cp.async and vectors."""

    family: ClassVar[str] = "sm80.rmsnorm"
    arguments = RmsNormArguments

    has_neither = neither_transform_nor_maxima


@CuTeDSLProvider.register
class Sm80RmsNormRhtAmax(NormForward):
    """The same with a Hadamard transform behind, largest magnitudes, or both."""

    family: ClassVar[str] = "sm80.rmsnorm_rht_amax"
    arguments = RmsNormArguments

    @rule("a block of 16 columns is with the threads of a row at once")
    def _(design: NormDesign, operands: NormOperandsMetadata) -> bool:
        return design.threads_per_row * vector_of(operands) % HADAMARD_BLOCK == 0

    @rule("a Hadamard transform or largest magnitudes are asked for")
    def _(args: RmsNormArguments) -> bool | Miss:
        if args.hadamard or args.finds_maxima:
            return True
        return Miss("neither is", "would match with hadamard=True, amax or global_amax")

    def workspace_for(self, *tensors: Any) -> int:
        return ZEROED

    def get_workspace_size(self, args: Any) -> int:
        return ZEROED


@CuTeDSLProvider.register
class Sm80LayerNorm(NormForward):
    """Rows less their mean, over their standard deviation, for every GPU from Ampere on."""

    family: ClassVar[str] = "sm80.layernorm"
    arguments = LayerNormArguments

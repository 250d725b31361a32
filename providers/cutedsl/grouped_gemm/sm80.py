"""What the Ampere grouped GEMM families offer, and how they are compiled."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, ClassVar

from kernel_api.metadata import GemmOperandsMetadata
from kernel_api.providers.cutedsl import CuTeDSLProvider
from kernel_api.providers.cutedsl.gemm import machine
from kernel_api.providers.cutedsl.gemm.fusing import output_types
from kernel_api.providers.cutedsl.gemm.sm80 import (
    DESIGNS,
    Sm80Gemm,
    Sm80GemmDesign,
    Sm80GemmFamily,
    Sm80Int8Gemm,
)
from kernel_api.providers.cutedsl.grouped_gemm.base import (
    ExpertPointersGemm,
    RaggedRowsGemm,
    RaggedSumGemm,
    RowTiles,
    predict,
)
from kernel_api.space import Operands, Space, rule

#: Than the model of dense products has them, where a weight matrix is read as fast as it comes; the
#: Hopper family is not. Measured on an H200.
_SLOWER = 1.05
#: (rows, columns) of tiles, and warps: few rows for small groups, one row of warps for epilogues
#: that look at 128 columns.
_OF_ROWS = (
    ((128, 128), (2, 2)),
    ((64, 64), (2, 2)),
    ((64, 128), (4, 1)),
    ((32, 128), (2, 2)),
    ((16, 128), (1, 4)),
    ((16, 64), (1, 4)),
)
_OF_SUMS = (
    ((128, 128), (2, 2)),
    ((64, 64), (2, 2)),
    ((64, 128), (4, 1)),
)


def _space(chosen: tuple[tuple[tuple[int, int], tuple[int, int]], ...]) -> Space:
    """Those of the dense designs, for operands of any width."""
    return Space(
        *dict.fromkeys(
            design
            for design in itertools.chain.from_iterable(DESIGNS.values())
            if (design.tile_shape[:2], design.warps) in chosen and not design.splits
        )
    )


def _with_offsets(row: Operands) -> Operands:
    """What is multiplied by groups is what a dense product is made of."""
    types: Any = {**row.types, "offsets": "i32"}
    return Operands(
        **types,
        accumulator=row.accumulator,
        multiplication=row.multiplication,
        majors=row.majors,
        scales=row.scales,
        alignments=row.alignments,
        why_aligned=row.why_aligned,
    )


class Sm80GroupedGemmFamily(Sm80GemmFamily):
    """What the families share; they differ in which mode is cut into groups."""

    @rule("128 accumulators leave no registers for vectors of less than 16 bytes beside groups")
    def _(design: Sm80GemmDesign, operands: GemmOperandsMetadata) -> bool:
        return operands.A.alignment >= 16 or design.accumulators <= 64

    operands = tuple(map(_with_offsets, Sm80Gemm.operands))

    def predict(self, args: Any) -> float:
        candidate, constants = self.candidate, machine.constants_on(args.device, self.family)
        rows = candidate.tile_shape[0]
        seconds = predict(args, RowTiles(rows, rows), candidate, constants)
        return _SLOWER * seconds


class Sm80ExpertPointers(ExpertPointersGemm, Sm80GroupedGemmFamily):
    """Families of which the implementation knows what matrices that lie anywhere have in common."""

    def _built(
        self, gemm: Any, more_outputs: tuple[Any, ...], others: tuple[Any, ...], **options: Any
    ) -> Callable[..., None]:
        found = self._expert_matrices()
        return super()._built(gemm, more_outputs, others, experts=found, **options)


@CuTeDSLProvider.register
class Sm80GroupedGemm(RaggedRowsGemm, Sm80GroupedGemmFamily):
    """Grouped GEMM of floats for every GPU from Ampere on: tiles end with their group of rows."""

    family: ClassVar[str] = "sm80.grouped_gemm"
    space = _space(_OF_ROWS)

    def _implementation(
        self, more_outputs: tuple[Any, ...] = (), others: tuple[Any, ...] = (), **options: Any
    ) -> Callable[..., None]:
        from kernel_api.implementations.sm80.grouped_gemm import GroupedGemm

        return self._built(GroupedGemm, more_outputs, others, **options)

    def implementation_for(self, args: Any) -> Callable[..., None]:
        return self._implementation(
            *output_types(args.epilogue),
            gathered=args.row_index is not None,
            scattered=args.out_row_index is not None,
        )


@CuTeDSLProvider.register
class Sm80GroupedPointerGemm(Sm80ExpertPointers, Sm80GroupedGemm):
    """The same of matrices B that lie anywhere."""

    family: ClassVar[str] = "sm80.grouped_gemm_pointers"


@CuTeDSLProvider.register
class Sm80GroupedInt8Gemm(Sm80GroupedGemm):
    """The same of 8-bit integers, exact in int32, then scaled if asked."""

    family: ClassVar[str] = "sm80.grouped_gemm_int8"
    operands = tuple(map(_with_offsets, Sm80Int8Gemm.operands))


@CuTeDSLProvider.register
class Sm80GroupedSumGemm(RaggedSumGemm, Sm80GroupedGemmFamily):
    """Grouped GEMM of floats that sums over the groups, for every GPU from Ampere on."""

    family: ClassVar[str] = "sm80.grouped_gemm_sum"
    space = _space(_OF_SUMS)

    def _implementation(
        self, more_outputs: tuple[Any, ...] = (), others: tuple[Any, ...] = (), **options: Any
    ) -> Callable[..., None]:
        from kernel_api.implementations.sm80.grouped_gemm import GroupedSumGemm

        return self._built(GroupedSumGemm, more_outputs, others, **options)

    def implementation_for(self, args: Any) -> Callable[..., None]:
        return self._implementation(*output_types(args.epilogue), accumulate=args.accumulate)


@CuTeDSLProvider.register
class Sm80GroupedPointerSumGemm(Sm80ExpertPointers, Sm80GroupedSumGemm):
    """The same of matrices out that lie anywhere."""

    family: ClassVar[str] = "sm80.grouped_gemm_sum_pointers"
    anywhere: ClassVar[str] = "out"

"""What the Hopper grouped GEMM families offer, and how they are compiled."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

from kernel_api._cached_property import cached_property
from kernel_api._estimated_sizes import told_apart
from kernel_api._workspaces import ZEROED
from kernel_api.arguments.grouped import GroupedGemmArguments
from kernel_api.epilogue import Graph
from kernel_api.metadata import GroupedGemmOperandsMetadata
from kernel_api.providers.cutedsl import CuTeDSLProvider
from kernel_api.providers.cutedsl.epilogue.operands import TMA_PIECE, sums_both_ways
from kernel_api.providers.cutedsl.gemm import machine, model
from kernel_api.providers.cutedsl.gemm.fusing import output_types
from kernel_api.providers.cutedsl.gemm.scaling import OF_SUMS, scaled_by_blocks
from kernel_api.providers.cutedsl.gemm.sm90 import (
    ALIGNMENTS,
    MOST_COLUMNS,
    PROMOTED_COLUMNS,
    WHY_ALIGNED,
    Sm90Fp8Gemm,
    Sm90GemmFamily,
)
from kernel_api.providers.cutedsl.gemm.sm90_design import ROW_BYTES
from kernel_api.providers.cutedsl.gemm.sm90_registers import matrices_read
from kernel_api.providers.cutedsl.grouped_gemm import sm90_design
from kernel_api.providers.cutedsl.grouped_gemm.base import (
    ExpertPointersGemm,
    RaggedRowsGemm,
    RaggedSumGemm,
    RowTiles,
    out_in_halves,
    predict,
)
from kernel_api.providers.cutedsl.grouped_gemm.sm90_design import Sm90GroupedGemmDesign
from kernel_api.space import Miss, Operands, Space, rule

_DESCRIPTOR_BYTES = 128
#: Rows that are gathered are complete two stages after they were begun.
_GATHER_STAGES = 4
# Factors on the time that the model of dense products has, measured on an H200.
#: Where blocks in no cluster take tiles: nothing is loaded for several of them.
_ALONE = 1.03
#: The same of tiles of so many rows and columns, if groups have less than so many rows: clusters of
#: narrower ones load no less then, and read more of shared memory.
_WIDE, _FEW_ROWS, _ALONE_IN_FEW = (128, 256), 384, 0.96
#: Tiles of a group beside one, on average, that are many to read the same columns of B.
_MANY_OTHERS = 3
#: Of tiles of so many columns, where consumers take turns and wait for loads alone: one stage fewer
#: fits than beside 128.
_TURN_COLUMNS, _TURNS = 160, 1.028
#: Of clusters along K, where several read the same columns of B.
_SEVERAL = 1.1
#: Of a static share of tiles that wait for what their epilogues read, in groups of many rows.
_APART = 1.12
#: Of sums over many rows, where a cluster's tile is as high as wide and loads the least.
_SQUARE = 0.97
#: Of tiles of :data:`PROMOTED_COLUMNS`; this one was measured on an H100.
_PROMOTED_AT_ONCE = 1.04
#: Rows that are multiplied together.
_BLOCK_ROWS = 64
#: Rows of a group, on average.
_LARGE_ROWS, _MANY_ROWS = 512, 1024


class Sm90GroupedGemmFamily(Sm90GemmFamily):
    """What the families share; they differ in which mode is cut into groups, and element types."""

    design = Sm90GroupedGemmDesign
    _design: Sm90GroupedGemmDesign
    #: Whose constants the performance model takes.
    modelled_as: ClassVar[str] = "sm90.grouped_gemm"

    @rule(
        "rows of A are gathered 128 bytes of K at a time, by each CTA, as rows of the instruction"
    )
    def _(design: Sm90GroupedGemmDesign, args: GroupedGemmArguments) -> bool | Miss:
        if "row_index" not in args.indices:
            return True
        row_bytes = design.tile_shape[2] * args.A.dtype.itemsize
        alone = design.cluster_shape[1] == 1 and not design.swap_ab
        return alone and row_bytes == ROW_BYTES and design.stages >= _GATHER_STAGES

    @rule("rows of out are scattered in whole vectors, as rows of the instruction")
    def _(
        design: Sm90GroupedGemmDesign,
        operands: GroupedGemmOperandsMetadata,
        args: GroupedGemmArguments,
    ) -> bool:
        fits = operands.out.alignment >= TMA_PIECE and not design.swap_ab
        return fits or "out_row_index" not in args.indices

    @rule("of groups, tiles of 256 columns take sums over rows or over columns")
    def _(design: Sm90GroupedGemmDesign, graph: Graph | None) -> bool:
        return design.kernel_tile[1] < MOST_COLUMNS or not sums_both_ways(graph)

    @rule("columns of out that are dealt out in halves are in rows that lie side by side")
    def _(args: GroupedGemmArguments) -> bool:
        return not ("out_row_index" in args.indices and out_in_halves(args.epilogue))

    @rule("no mode is empty: TMA describes none that is")
    def _(args: GroupedGemmArguments) -> bool | Miss:
        empty = [name for name in ("T", "M", "N", "K") if getattr(args, name) == 0]
        return Miss(f"{empty[0]} is 0") if empty else True

    def _built(
        self, gemm: Any, more_outputs: tuple[Any, ...], others: tuple[Any, ...], **options: Any
    ) -> Callable[..., None]:
        return super()._built(
            gemm, more_outputs, others, scheduler=self._design.scheduler, **options
        )

    def _reads_early(self) -> bool:
        return False

    @cached_property
    def candidate(self) -> model.Candidate:
        """What taking tiles saves is another factor here, see :meth:`factor`."""
        return replace(super().candidate, taken=False)

    @cached_property
    def row_tiles(self) -> RowTiles:
        design, rows = self._design, self._design.rows_per_tile
        passes_over = design.takes_tiles and not design.swap_ab
        return RowTiles(rows, _BLOCK_ROWS if passes_over else rows)

    def predict(self, args: Any) -> float:
        constants = machine.constants_on(args.device, self.modelled_as)
        seconds = predict(args, self.row_tiles, self.candidate, constants)
        return seconds * self.factor(args, constants)

    def factor(self, args: Any, constants: machine.Constants) -> float:
        """On what the model has of dense products."""
        factor, waits = 1.0, _waits(args.epilogue)
        if self._design.takes_tiles:
            factor = model.TAKEN
        elif waits and _has_groups_of(_MANY_ROWS, args):
            factor = _APART
        if self._design.tile_shape[1] == _TURN_COLUMNS and not waits:
            factor *= _TURNS
        if self.candidate.meets and _has_groups_of(self._design.rows_per_tile + 1, args):
            factor *= _SEVERAL
        if math.prod(self._design.cluster_shape) == 1:
            factor *= self._alone(args, waits, constants.alone)
        return factor

    def _alone(self, args: Any, waits: bool, most: float) -> float:
        """Of blocks that wait for no cluster, and load what those beside them load, too.

        most: Where many read the same columns of B: at one time on an empty GPU alone.
        """
        design, rows = self._design, self._design.rows_per_tile
        if not design.takes_tiles or design.swap_ab:
            others: float = told_apart(args.T) / (args.L * rows) - 1
            return 1 + (most - 1) * min(max(others, 0.0) / _MANY_OTHERS, 1.0)
        if not _has_groups_of(rows, args):
            return 1.0
        few = design.tile_shape[:2] == _WIDE and not _has_groups_of(_FEW_ROWS, args)
        return _ALONE_IN_FEW if few and not waits else _ALONE


def _waits(epilogue: Any) -> bool:
    """Whether each tile waits for what its epilogue reads."""
    return epilogue is not None and matrices_read(epilogue.graph) > 0


def _has_groups_of(rows: int, args: Any) -> bool:
    """Whether groups have so many rows, on average, as far as estimates know."""
    return bool(rows * args.L <= told_apart(args.T))


@CuTeDSLProvider.register
class Sm90GroupedGemm(RaggedRowsGemm, Sm90GroupedGemmFamily):
    """Grouped GEMM of 16-bit floats for Hopper: TMA loads, wgmma, tiles that end with their group
    of rows."""

    family: ClassVar[str] = "sm90.grouped_gemm"
    operands = tuple(
        Operands(
            A="f16 | bf16",
            B="like A",
            out=out,
            offsets="i32",
            accumulator="f32",
            majors="A:k out:n",
            alignments=ALIGNMENTS,
            why_aligned=WHY_ALIGNED,
        )
        for out in ("f16 | bf16 | f32", "e4m3 | e5m2")
    )
    space = Space(*sm90_design.points(sm90_design.OF_ROWS, operand_bytes=2))

    def _implementation(
        self, more_outputs: tuple[Any, ...] = (), others: tuple[Any, ...] = (), **options: Any
    ) -> Callable[..., None]:
        from kernel_api.implementations.sm90.grouped_gemm import GroupedGemm

        blocks = scaled_by_blocks(self.metadata.operands)
        return self._built(GroupedGemm, more_outputs, others, block_scales=blocks, **options)

    def implementation_for(self, args: GroupedGemmArguments) -> Callable[..., None]:
        return self._implementation(
            *output_types(args.epilogue),
            gathered=args.row_index is not None,
            scattered=args.out_row_index is not None,
        )


class Sm90ExpertPointers(ExpertPointersGemm, Sm90GroupedGemmFamily):
    """Families of matrices that lie anywhere: a small kernel describes them to TMA before."""

    def workspace_for(self, *tensors: Any) -> int:
        return self._described(super().workspace_for(*tensors), tensors[-1].shape[0])

    def get_workspace_size(self, args: GroupedGemmArguments) -> int:
        return self._described(super().get_workspace_size(args), args.L)

    def _described(self, size: int, experts: int) -> int:
        """With a descriptor of each matrix."""
        return max(size, ZEROED) + _DESCRIPTOR_BYTES * experts

    def _built(
        self, gemm: Any, more_outputs: tuple[Any, ...], others: tuple[Any, ...], **options: Any
    ) -> Callable[..., None]:
        found = self._expert_matrices()
        return super()._built(gemm, more_outputs, others, experts=found, **options)


@CuTeDSLProvider.register
class Sm90GroupedPointerGemm(Sm90ExpertPointers, Sm90GroupedGemm):
    """The same of matrices B that lie anywhere."""

    family: ClassVar[str] = "sm90.grouped_gemm_pointers"


@CuTeDSLProvider.register
class Sm90Fp8GroupedGemm(Sm90GroupedGemm):
    """Grouped GEMM of 8-bit floats for Hopper, with scales per tensor, per token and column of an
    expert, or per block of 128; accumulated in float32 outside of the tensor cores."""

    family: ClassVar[str] = "sm90.grouped_gemm_fp8"
    modelled_as = "sm90.grouped_gemm_fp8"
    promoted = True
    operands = tuple(
        Operands(
            A="e4m3 | e5m2",
            B="e4m3 | e5m2",
            out=out,
            offsets="i32",
            accumulator="f32",
            majors="A:k B:k out:n",
            scales=scales,
            alignments=ALIGNMENTS,
            why_aligned=WHY_ALIGNED,
        )
        for scales, out in (
            ({}, "f16 | bf16 | f32 | e4m3 | e5m2"),
            *((scales, "f16 | bf16 | f32 | e4m3 | e5m2") for scales in OF_SUMS),
            ({"A": "block_1x128", "B": "block_128x128"}, "f16 | bf16 | f32 | e4m3 | e5m2"),
        )
    )
    space = Space(*sm90_design.points(sm90_design.PROMOTED_OF_ROWS, operand_bytes=1))

    scales_of_rows = Sm90Fp8Gemm.scales_of_rows
    columns_of_blocks = Sm90Fp8Gemm.columns_of_blocks

    def factor(self, args: Any, constants: machine.Constants) -> float:
        wide = self._design.tile_shape[1] == PROMOTED_COLUMNS
        return super().factor(args, constants) * (_PROMOTED_AT_ONCE if wide else 1.0)


@CuTeDSLProvider.register
class Sm90Fp8GroupedPointerGemm(Sm90ExpertPointers, Sm90Fp8GroupedGemm):
    """The same of matrices B that lie anywhere; their scales are one tensor."""

    family: ClassVar[str] = "sm90.grouped_gemm_fp8_pointers"

    @rule("192 columns that are promoted at once leave no registers for descriptors")
    def _(design: Sm90GroupedGemmDesign) -> bool:
        return design.tile_shape[1] != PROMOTED_COLUMNS

    @rule("clusters that take tiles of 256 columns leave no registers for scales of blocks")
    def _(design: Sm90GroupedGemmDesign, operands: GroupedGemmOperandsMetadata) -> bool:
        alone = math.prod(design.cluster_shape) == 1 or not design.takes_tiles
        return alone or not scaled_by_blocks(operands)


@CuTeDSLProvider.register
class Sm90GroupedSumGemm(RaggedSumGemm, Sm90GroupedGemmFamily):
    """Grouped GEMM of 16-bit floats for Hopper that sums over the groups."""

    family: ClassVar[str] = "sm90.grouped_gemm_sum"
    modelled_as = "sm90.grouped_gemm_sum"
    operands = (
        Operands(
            A="f16 | bf16",
            B="like A",
            out="f16 | bf16 | f32",
            offsets="i32",
            accumulator="f32",
            majors="A:m B:n",
            alignments=ALIGNMENTS,
            why_aligned=WHY_ALIGNED,
        ),
    )
    space = Space(*sm90_design.points(sm90_design.OF_SUMS, operand_bytes=2))

    def factor(self, args: Any, constants: machine.Constants) -> float:
        (tile_m, tile_n, _), (cluster_m, cluster_n, *_) = (
            self._design.tile_shape,
            self._design.cluster_shape,
        )
        factor = 1.0
        if self._design.takes_tiles and self._gains_by_taking(args):
            factor *= model.TAKEN
        square = tile_m * cluster_m == tile_n * cluster_n
        if square and args.epilogue is None and _has_groups_of(_MANY_ROWS, args):
            factor *= _SQUARE
        return factor

    def _gains_by_taking(self, args: Any) -> bool:
        """Whether clusters that take their tiles are faster than those that have a share."""
        if args.epilogue is not None:
            return not _has_groups_of(_MANY_ROWS, args)
        return _has_groups_of(_LARGE_ROWS, args)

    def _implementation(
        self,
        more_outputs: tuple[Any, ...] = (),
        others: tuple[Any, ...] = (),
        **options: Any,
    ) -> Callable[..., None]:
        from kernel_api.implementations.sm90.grouped_sum_gemm import GroupedSumGemm

        return self._built(GroupedSumGemm, more_outputs, others, **options)

    def implementation_for(self, args: GroupedGemmArguments) -> Callable[..., None]:
        return self._implementation(*output_types(args.epilogue), accumulate=args.accumulate)


@CuTeDSLProvider.register
class Sm90GroupedPointerSumGemm(Sm90ExpertPointers, Sm90GroupedSumGemm):
    """The same of matrices out that lie anywhere."""

    family: ClassVar[str] = "sm90.grouped_gemm_sum_pointers"
    anywhere: ClassVar[str] = "out"

    @rule("columns of out are dealt out in halves where it is one tensor")
    def _(args: GroupedGemmArguments) -> bool:
        return not out_in_halves(args.epilogue)

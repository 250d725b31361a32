"""What the Hopper GEMM families offer, and how they are compiled."""

from __future__ import annotations

from collections.abc import Callable
from math import gcd
from typing import Any, ClassVar

from kernel_api._cached_property import cached_property
from kernel_api._workspaces import ZEROED
from kernel_api.arguments import GemmArguments
from kernel_api.arguments.scaled import BLOCK
from kernel_api.devices import multiprocessors_of
from kernel_api.dtypes import TF32X3
from kernel_api.epilogue import Graph
from kernel_api.metadata import GemmOperandsMetadata
from kernel_api.providers.cutedsl import CuTeDSLProvider
from kernel_api.providers.cutedsl.epilogue.operands import (
    SUBTILE,
    TMA_PIECE,
    Tiling,
    fits_subtile,
    fits_tile,
    halves_fit_shares,
    heads_of,
    in_halves,
    row_pairs,
    spans_rows,
    sums_both_ways,
    whole_pieces,
)
from kernel_api.providers.cutedsl.epilogue.plan import QUAD, Plan, plan
from kernel_api.providers.cutedsl.gemm import model, sm90_design
from kernel_api.providers.cutedsl.gemm.fusing import (
    columns_that_matter,
    lowered,
    operands_rule,
    types_rule,
)
from kernel_api.providers.cutedsl.gemm.modelled import ModelledGemm
from kernel_api.providers.cutedsl.gemm.scaling import (
    OF_SUMS,
    alignments_of_scales,
    scale_kinds,
    scaled_by_blocks,
    scaling,
)
from kernel_api.providers.cutedsl.gemm.sm90_design import Sm90GemmDesign
from kernel_api.providers.cutedsl.gemm.sm90_registers import (
    FEW_OPERATIONS,
    fits_taken,
    is_light,
    is_short,
    matrices_read,
)
from kernel_api.space import Miss, Operands, Rule, Space, rule

#: That are multiplied at once where products are promoted.
PROMOTED_COLUMNS = 192
#: Of a tile that two groups share, each with one block of them.
_SHARED_ROWS = 128
#: Registers for accumulators and the products of two steps, where one group of threads multiplies.
_MOST_AHEAD = 192
#: Rows of A that have block scales of their own in a tile, as columns of the instruction.
_MOST_SCALED_COLUMNS = 32
#: Rows of a transposed tile, beside whose scales there are no registers for what is read.
_MANY_SCALED_ROWS = 192

WHY_ALIGNED = "TMA needs addresses and leading dimensions in multiples of 16 bytes"
LOADS_ALIGNED = {"A": 16, "B": 16}
ALIGNMENTS: tuple[dict[str, int], ...] = ({**LOADS_ALIGNED, "out": 16}, LOADS_ALIGNED)


#: What an epilogue may write matrices of.
_STORED = ("float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int32")
#: Of a tile, whose elements are put into shared memory one by one where its rows are pairs.
_COLUMNS_OF_PAIRS = 64
#: CTAs of a cluster along K, as every GPU takes.
MOST_ALONG_K = 8
#: Of a tile, beside whose tables registers are left for more than to rotate.
_COLUMNS_OF_ANY_HEADS = 192
#: Of a tile; beside so many there are registers for sums in one direction.
MOST_COLUMNS = 256
#: Columns, per byte of an element of out, of which a buffer holds what is reduced.
_BUFFERED_PER_BYTE = 128


class Sm90GemmFamily(ModelledGemm):
    """What the families share; they differ in element types, and so in designs."""

    targets = ("sm_90a",)
    design = Sm90GemmDesign
    _design: Sm90GemmDesign
    #: Whether products are added up outside of the tensor cores, see the implementation.
    promoted: ClassVar[bool] = False

    @rule("all of shared memory is used for stages")
    def _(design: Sm90GemmDesign, operands: GemmOperandsMetadata) -> bool:
        assert operands.A.dtype is not None and operands.out.dtype is not None
        itemsizes = operands.A.dtype.itemsize, operands.out.dtype.itemsize
        contiguous = _columns_contiguous(design, operands)
        return design.stages == design.most_stages(*itemsizes, _small_parts(operands), contiguous)

    @rule("TMA writes 16 bytes at once: rows of out are multiples of that, or threads write them")
    def _(operands: GemmOperandsMetadata, args: Any) -> bool | Miss:
        if operands.out.alignment < TMA_PIECE or whole_pieces(args.out):
            return True
        return Miss(f"out has shape {args.out.shape}")

    @rule("tiles cut anywhere along K are for at most 2 tiles per resident cluster")
    def _(design: Sm90GemmDesign, args: GemmArguments) -> bool | Miss:
        if not design.stream_k:
            return True
        return _are_at_most(2.0, design, args)

    @rule("a kernel that adds up parts of tiles computes elements that stand alone")
    def _(design: Sm90GemmDesign, graph: Graph | None) -> bool:
        if not design.parallel or graph is None:
            return True
        planned = plan(graph)
        return isinstance(planned, Plan) and planned.alone and not planned.per_block

    @rule("tiles that are cut for all resident clusters are at most half as many as these")
    def _(design: Sm90GemmDesign, args: GemmArguments) -> bool | Miss:
        if not design.even_k:
            return True
        return _are_at_most(0.5, design, args)

    @rule("tiles are cut anywhere, evenly, or into so many parts; a kernel adds up even parts")
    def _(design: Sm90GemmDesign, graph: Graph | None) -> bool:
        parts_of_cluster = design.cluster_shape[2]
        if design.even_k and (design.stream_k or design.split_k != parts_of_cluster):
            return False
        return not design.parallel or (design.even_k and parts_of_cluster == 1)

    @rule("a cluster along K has the parts of one tile or of a part of it, up to 8, and no other")
    def _(design: Sm90GemmDesign, graph: Graph | None) -> bool | Miss:
        *others, parts = design.cluster_shape
        if parts == 1 or (others == [1, 1] and parts == design.split_k <= MOST_ALONG_K):
            return True
        return Miss(f"the cluster is {design.cluster_shape}, of {design.split_k} parts")

    aligned_operands = operands_rule(TMA_PIECE)
    stored_types = types_rule(_STORED)

    @rule(
        "a tile holds whole bundles of the columns that the epilogue looks at together",
        by=columns_that_matter,
    )
    def _(design: Sm90GemmDesign, operands: GemmOperandsMetadata, args: Any) -> bool | Miss:
        if args.epilogue is None:
            return True
        assert operands.out.dtype is not None
        buffered = _BUFFERED_PER_BYTE * operands.out.dtype.itemsize
        columns = design.kernel_tile[1]
        by_heads = _deals_heads(design, operands, args)
        return fits_tile(args.epilogue.graph, columns, design.swap_ab, buffered, by_heads)

    @rule("what is written beside out has at least 8 columns in as many bytes as out at once")
    def _(design: Sm90GemmDesign, args: Any) -> bool | Miss:
        if args.epilogue is None:
            return True
        return fits_subtile(args.epilogue, args.out, design.kernel_tile[1], design.swap_ab)

    @rule("what is computed from whole rows needs a tile that holds them")
    def _(design: Sm90GemmDesign, args: Any) -> bool | Miss:
        if args.epilogue is None:
            return True
        return spans_rows(args.epilogue.graph, args.N, design.kernel_tile[1])

    @rule("whole rows are written in subtiles of 32 columns")
    def _(design: Sm90GemmDesign, graph: Graph | None) -> bool | Miss:
        planned = plan(graph) if graph is not None else None
        if not isinstance(planned, Plan) or not planned.spans_row:
            return True
        columns = design.kernel_tile[1]
        return columns % min(SUBTILE, columns) == 0 or Miss(f"a tile has {columns}")

    @rule(
        "accumulators of up to 160 registers leave room for columns that are looked at together, "
        "of up to 192 for one output of few operations that reads no matrix"
    )
    def _(
        design: Sm90GemmDesign, operands: GemmOperandsMetadata, graph: Graph | None
    ) -> bool | Miss:
        if graph is None or design.accumulators <= 160:
            return True
        planned = plan(graph)
        if isinstance(planned, str) or planned.bundle == 1:
            return True
        light = len(planned.names) == 1 and is_light(graph, operands, planned)
        return (light and design.accumulators <= 192) or Miss(f"they take {design.accumulators}")

    @rule("tiles of 256 columns that groups have in turns take sums over rows or over columns")
    def _(design: Sm90GemmDesign, graph: Graph | None) -> bool:
        narrow = design.kernel_tile[1] < MOST_COLUMNS
        return narrow or design.schedule != "pingpong" or not sums_both_ways(graph)

    @rule("of tiles of more than 192 columns all heads are rotated, and nothing else is computed")
    def _(design: Sm90GemmDesign, graph: Graph | None) -> bool | Miss:
        columns = design.kernel_tile[1]
        if graph is None or columns <= _COLUMNS_OF_ANY_HEADS:
            return True
        crowded = any("heads" in dict(node.attributes) for node in graph.nodes)
        planned = plan(graph)
        if isinstance(planned, Plan) and planned.heads is not None:
            crowded = model.operations(graph) > FEW_OPERATIONS
        return not crowded or Miss(f"a tile has {columns}")

    @rule("blocks that share B each load whole pairs of what lies in its halves, or one of a pair")
    def _(design: Sm90GemmDesign, graph: Graph | None) -> bool | Miss:
        if graph is None or design.swap_ab:
            return True
        return halves_fit_shares(graph, design.kernel_tile[1] // design.kernel_cluster[0])

    @rule("B is K-major where its halves are taken in turns: a swizzle is wider than 32 columns")
    def _(operands: GemmOperandsMetadata, args: Any) -> bool:
        return args.epilogue is None or operands.B.unit_mode == -2 or not in_halves(args.epilogue)

    @rule("columns that share a scale of blocks lie side by side, or in halves of whole blocks")
    def _(design: Sm90GemmDesign, operands: GemmOperandsMetadata, args: Any) -> bool | Miss:
        if args.epilogue is None or not scaled_by_blocks(operands):
            return True
        if in_halves(args.epilogue):
            return _halves_share_scales(design, args.N)
        pairs = row_pairs(args.epilogue.graph) if design.swap_ab else None
        return not isinstance(pairs, int) or 2 * pairs <= BLOCK

    @rule("a tile of the transposed product has at most 64 columns where its rows are pairs")
    def _(design: Sm90GemmDesign, graph: Graph | None) -> bool | Miss:
        columns = design.kernel_tile[1]
        if not design.swap_ab or columns <= _COLUMNS_OF_PAIRS or row_pairs(graph) is None:
            return True
        return Miss(f"it has {columns}")

    @rule("rows of a transposed tile are whole blocks of pairs, or blocks whole tiles")
    def _(design: Sm90GemmDesign, graph: Graph | None) -> bool | Miss:
        granularity = row_pairs(graph) if design.swap_ab else None
        if granularity in (None, QUAD, "halves"):
            return True
        rows, block = design.kernel_tile[0], 2 * int(granularity)
        fits = rows % block == 0 or block % rows == 0
        return fits or Miss(f"it has {rows}, blocks have {block}")

    @rule("B is K-major where transposed tiles take pairs: a swizzle has 8 of their rows")
    def _(design: Sm90GemmDesign, operands: GemmOperandsMetadata, graph: Graph | None) -> bool:
        dealt_out = design.swap_ab and row_pairs(graph) not in (None, QUAD)
        return operands.B.unit_mode == -2 or not dealt_out

    @property
    def counters(self) -> int:
        """Tiles are taken from the last one."""
        return super().counters - (1 if self._design.takes_tiles else 0)

    def _with_reductions(self, size: int, M: int, N: int, L: int) -> int:
        """And with the counter that tiles are taken from."""
        counted = ZEROED if self._design.takes_tiles else 0
        return super()._with_reductions(max(size, counted), M, N, L)

    @cached_property
    def repacked(self) -> tuple[bool, bool]:
        """Whether A and B are copied to where TMA can read them."""
        return False, False

    def _implementation(
        self, more_outputs: tuple[Any, ...] = (), others: tuple[Any, ...] = ()
    ) -> Callable[..., None]:
        from kernel_api.implementations.sm90.dynamic_gemm import DynamicGemm
        from kernel_api.implementations.sm90.gemm import Gemm

        design, operands = self._design, self.metadata.operands
        return self._built(
            DynamicGemm if design.takes_tiles else Gemm,
            more_outputs,
            others,
            parallel=design.parallel,
            block_scales=scaled_by_blocks(operands),
            split_float32=_small_parts(operands),
            repacked=self.repacked,
            loaded_columns=design.loaded_columns(_columns_contiguous(design, operands)),
        )

    def _built(
        self, gemm: Any, more_outputs: tuple[Any, ...], others: tuple[Any, ...], **options: Any
    ) -> Callable[..., None]:
        """An implementation of that class, with options beside those that all take."""
        design, operands = self._design, self.metadata.operands
        types: Any = {name: tensor.dtype for name, tensor in operands.tensors.items()}
        accumulator: Any = getattr(operands, "accumulator_type", None)
        output_types = (types["out"].cutlass, *more_outputs)
        found: Callable[..., None] = gemm(
            design.kernel_tile,
            design.kernel_cluster,
            design.schedule,
            a_type=types["A"].cutlass,
            b_type=types["B"].cutlass,
            output_types=output_types,
            accumulator_type=accumulator.cutlass,
            stages=design.stages,
            tma_stores=(self._has_tma_stores,) * len(output_types),
            swap_ab=design.swap_ab,
            split_k=_split(design),
            cluster_k=design.cluster_shape[2],
            promoted=self.promoted,
            dependent_launch=design.dependent_launch,
            epilogue=self._lowered((*output_types, *others)) or scaling(operands),
            **options,
        )
        return found

    def aligned_values(self, args: Any) -> dict[str, int]:
        return alignments_of_scales(args)

    def _lowered(self, output_types: tuple[Any, ...]) -> Any:
        graph, columns = self.metadata.epilogue, self._design.kernel_tile[1]
        scales = scale_kinds(self.metadata.operands)
        by_heads = heads_of(graph, columns) is not None
        return lowered(graph, output_types, scales=scales, by_heads=by_heads)

    @property
    def _has_tma_stores(self) -> bool:
        return self.metadata.operands.tensors["out"].alignment >= TMA_PIECE

    def tiling(self, M: int, N: int) -> Tiling:
        design = self._design
        tile_m, tile_n, _ = design.tile_shape
        cluster_m, cluster_n, _ = design.cluster_shape
        tiles = (
            -(-M // (tile_m * cluster_m)) * cluster_m,
            -(-N // (tile_n * cluster_n)) * cluster_n,
        )
        groups = 1 if design.schedule == "pingpong" else design.consumers
        return Tiling((tile_m, tile_n), 64, groups, tiles)

    def scalars(self, multiprocessors: int) -> tuple[int, ...]:
        """The clusters that are resident at once: the persistent grid."""
        return (self._design.resident(multiprocessors),)

    @cached_property
    def candidate(self) -> model.Candidate:
        """The design as the performance model sees it."""
        design = self._design
        return model.Candidate(
            design.kernel_tile,
            (*design.kernel_cluster, design.cluster_shape[2]),
            design.schedule,
            design.stages,
            split_k=design.split_k,
            stream_k=design.stream_k,
            even_k=design.even_k,
            parallel=design.parallel,
            swap_ab=design.swap_ab,
            column_blocks=self._column_blocks(),
            ahead=self._promotes_ahead(),
            in_pieces=self._writes_pieces(),
            reads_early=self._reads_early(),
            taken=design.takes_tiles,
        )

    def _reads_early(self) -> bool:
        """Whether two groups that share a tile have registers for what an epilogue reads; see the
        implementation. With two blocks of rows each, or of a transposed product, they wait for it
        as others do."""
        design = self._design
        cut = design.split_k > 1 or design.stream_k or design.even_k
        shared = design.schedule == "cooperative" and design.kernel_tile[0] == _SHARED_ROWS
        return shared and not (cut or design.swap_ab or self.promoted)

    def _writes_pieces(self) -> bool:
        """Whether threads write out along the columns of their tile, 32 of which are there at once;
        of its rows 64 are, which costs nothing that was seen."""
        along_columns = (
            self.metadata.operands.tensors["out"].unit_mode == -1
        ) != self._design.swap_ab
        return along_columns and not self._has_tma_stores

    def _column_blocks(self) -> int:
        """Of a promoted tile; see the implementation."""
        if not self.promoted:
            return 1
        columns = self._design.kernel_tile[1]
        share = scaled_by_blocks(self.metadata.operands) and columns % BLOCK == 0
        return -(-columns // (BLOCK if share else PROMOTED_COLUMNS))

    def _promotes_ahead(self) -> bool:
        """Whether registers hold the products of two steps; see the implementation."""
        design, columns = self._design, self._design.kernel_tile[1] // self._column_blocks()
        return (
            self.promoted
            and not _small_parts(self.metadata.operands)
            and design.consumers == 1
            and design.accumulators + 2 * (columns // 2) <= _MOST_AHEAD
        )


def _fits_blocks(columns: int) -> bool:
    """Whether tiles of so many columns are of whole blocks of scales, or of two at most."""
    return columns % BLOCK == 0 or columns - gcd(columns, BLOCK) <= BLOCK


def _halves_share_scales(design: Sm90GemmDesign, N: int) -> bool | Miss:
    """Whether what a tile has of each half of the columns lies in one block of scales."""
    if N % (2 * BLOCK):
        blocks = "whole blocks of 128 columns in each half"
        return Miss(f"N is {N}", f"would match with {blocks}, or pairs of 32 columns")
    if design.swap_ab:
        return Miss("rows of the transposed product are of both halves in turns")
    return 2 * BLOCK % design.tile_shape[1] == 0 or Miss(f"a tile has {design.tile_shape[1]}")


def _are_at_most(each: float, design: Sm90GemmDesign, args: GemmArguments) -> bool | Miss:
    """Whether there are at most so many tiles per resident cluster, in units of a cluster's."""
    tiles = design.clusters(args.M, args.N, args.L)
    resident = design.resident(multiprocessors_of(args.device))
    return tiles <= each * resident or Miss(f"there are {tiles} for {resident}")


def _split(design: Sm90GemmDesign) -> int | str | None:
    """As the implementation has it."""
    if design.stream_k:
        return "stream"
    if design.even_k:
        return "even"
    return design.split_k if design.splits else None


def _deals_heads(design: Sm90GemmDesign, operands: Any, args: Any) -> bool:
    """Whether blocks of columns of heads may be loaded one by one, see `heads_of`."""
    graph = args.epilogue.graph
    heads = heads_of(graph, design.kernel_tile[1])
    if heads is None or not isinstance(args, GemmArguments) or args.N % heads:
        return False
    if scaled_by_blocks(operands):
        return False
    if not is_short(graph):
        return False
    columns = design.kernel_tile[1] // design.kernel_cluster[0]
    return operands.B.unit_mode == -2 and not _small_parts(operands) and columns % SUBTILE == 0


def _columns_contiguous(design: Sm90GemmDesign, operands: Any) -> bool:
    """Whether the operand of the columns that are multiplied lies along them, in 16 bits: others
    are K-major then."""
    columns, along = (operands.A, -2) if design.swap_ab else (operands.B, -1)
    return bool(columns.unit_mode == along and columns.dtype.bits == 16)


def _small_parts(operands: Any) -> bool:
    """Whether float32 is split, which takes room beside the stages."""
    return getattr(operands, "multiplication_type", None) is TF32X3


@CuTeDSLProvider.register
class Sm90Gemm(Sm90GemmFamily):
    """Dense GEMM of 16-bit floats for Hopper: TMA loads, wgmma, warp-specialised."""

    family: ClassVar[str] = "sm90.gemm"
    operands = tuple(
        Operands(
            A="f16 | bf16",
            B="like A",
            out=out,
            accumulator="f32",
            alignments=ALIGNMENTS,
            why_aligned=WHY_ALIGNED,
        )
        for out in ("f16 | bf16 | f32", "e4m3 | e5m2")
    )
    space = Space(*sm90_design.points((*sm90_design.ALL, *sm90_design.TAKEN), operand_bytes=2))

    fuses_taken = Rule(
        "clusters that take tiles reduce nothing, and have no registers to draw random numbers, "
        "nor, with 160 accumulators, to read or write two matrices",
        fits_taken,
    )


@CuTeDSLProvider.register
class Sm90Tf32Gemm(Sm90GemmFamily):
    """Dense GEMM of float32 for Hopper, multiplied as tfloat32."""

    family: ClassVar[str] = "sm90.gemm_tf32"
    operands = (
        Operands(
            A="f32",
            B="f32",
            out="f32",
            accumulator="f32",
            multiplication="tf32",
            majors="A:k B:k",
            alignments=ALIGNMENTS,
            why_aligned=WHY_ALIGNED,
        ),
    )
    space = Space(*sm90_design.points(sm90_design.TF32, operand_bytes=4))


@CuTeDSLProvider.register
class Sm90SplitFloat32Gemm(Sm90GemmFamily):
    """Dense GEMM of float32 for Hopper, multiplied as a sum of two tfloat32: nearly as precise as
    float32 itself."""

    family: ClassVar[str] = "sm90.gemm_tf32x3"
    promoted = True
    operands = (
        Operands(
            A="f32",
            B="f32",
            out="f32",
            accumulator="f32",
            multiplication="tf32x3",
            majors="A:k B:k",
            alignments=ALIGNMENTS,
            why_aligned=WHY_ALIGNED,
        ),
    )
    space = Space(*sm90_design.points(sm90_design.SPLIT_FLOAT32, operand_bytes=4, small_parts=True))

    def predict(self, args: GemmArguments) -> float:
        """Three products instead of one."""
        return 3 * super().predict(args)


@CuTeDSLProvider.register
class Sm90Fp8Gemm(Sm90GemmFamily):
    """Dense GEMM of 8-bit floats for Hopper, with scales per tensor, per row and column, or per
    block of 128; accumulated in float32 outside of the tensor cores."""

    family: ClassVar[str] = "sm90.gemm_fp8"
    promoted = True
    operands = tuple(
        Operands(
            A="e4m3 | e5m2",
            B="e4m3 | e5m2",
            out=out,
            accumulator="f32",
            majors="A:k B:k",
            scales=scales,
            alignments=ALIGNMENTS,
            why_aligned=WHY_ALIGNED,
        )
        for scales, out in (
            ({}, "f16 | bf16 | f32 | e4m3 | e5m2"),
            *((scales, "f16 | bf16 | f32 | e4m3 | e5m2") for scales in OF_SUMS),
            ({"A": "block_1x128", "B": "block_128x128"}, "f16 | bf16 | f32 | e4m3 | e5m2"),
            *(({**scales, "out": "per_tensor"}, "e4m3 | e5m2") for scales in OF_SUMS),
        )
    )
    space = Space(
        *sm90_design.points((*sm90_design.PROMOTED, *sm90_design.PROMOTED_TAKEN), operand_bytes=1)
    )

    fuses_taken = Sm90Gemm.fuses_taken
    scales_of_rows = Rule(
        "scales per block of more than 32 rows of A, as columns of the instruction, take longer "
        "than their products",
        lambda design, operands: (
            not (
                design.swap_ab
                and scaled_by_blocks(operands)
                and design.tile_shape[0] > _MOST_SCALED_COLUMNS
            )
        ),
    )
    columns_of_blocks = Rule(
        "columns of a tile are of two blocks of scales at most, wherever it begins",
        lambda design, operands: (
            not scaled_by_blocks(operands) or design.swap_ab or _fits_blocks(design.tile_shape[1])
        ),
    )


@CuTeDSLProvider.register
class Sm90Int8Gemm(Sm90GemmFamily):
    """Dense GEMM of 8-bit integers for Hopper, exact in int32, then scaled if asked."""

    family: ClassVar[str] = "sm90.gemm_int8"
    operands = tuple(
        Operands(
            A="i8",
            B="i8",
            out=out,
            accumulator="i32",
            majors="A:k B:k",
            scales=scales,
            alignments=ALIGNMENTS,
            why_aligned=WHY_ALIGNED,
        )
        for scales, out in (
            ({}, "i32 | f16 | bf16 | f32"),
            *((scales, "f16 | bf16 | f32") for scales in OF_SUMS),
        )
    )
    space = Space(*sm90_design.points(sm90_design.ALL, operand_bytes=1))

    @rule("transposed tiles of 192 rows and more have no registers for scales beside a matrix")
    def _(design: Sm90GemmDesign, args: Any) -> bool:
        if args.epilogue is None or not args.scaled or design.tile_shape[0] < _MANY_SCALED_ROWS:
            return True
        return not (design.swap_ab and matrices_read(args.epilogue.graph))

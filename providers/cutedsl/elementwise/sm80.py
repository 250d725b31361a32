"""What the element-wise family offers, and how it is compiled."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, ClassVar

from kernel_api._cached_property import cached_property
from kernel_api._estimated_sizes import told_apart
from kernel_api._workspaces import PART_BYTES, ZEROED
from kernel_api.arguments import ElementwiseArguments
from kernel_api.artifact import CompiledArtifact
from kernel_api.epilogue import Graph
from kernel_api.metadata import (
    DesignMetadata,
    KernelMetadata,
    NormOperandsMetadata,
    TensorAttributes,
)
from kernel_api.providers.cutedsl import CuTeDSLProvider, compiler
from kernel_api.providers.cutedsl.elementwise import model
from kernel_api.providers.cutedsl.elementwise.columns import bundles, merged_groups
from kernel_api.providers.cutedsl.epilogue.operands import (
    MOST_PARTS,
    Tiling,
    epilogue_values,
    fits_tile,
    flat_reductions,
    full_outputs,
    known_epilogue,
    operands_fit,
    reduction_sizes,
    reductions_fit,
    signed_operands,
    spans_rows,
    whole_halves,
    whole_pieces,
)
from kernel_api.providers.cutedsl.epilogue.plan import LANES, Plan, plan
from kernel_api.providers.cutedsl.extents import counted_in_32_bits
from kernel_api.providers.cutedsl.gemm.fusing import alignment_of, lowered, output_types, types_rule
from kernel_api.providers.cutedsl.kernel import BareWhereSizesAreKnown, unless_empty
from kernel_api.space import Miss, Operands, Space, rule
from kernel_api.status import Status

#: Elements of a thread at a time, and quads of a warp.
_MOST_ELEMENTS, _QUADS = 64, 8

#: Rows of a thread at a time.
_HALVES = 2

#: Parts of reductions that a workspace has room for, whatever x is.
_FEW_PARTS = 2**24

#: Types of x and out; what epilogues write.
_FLOATS, _OTHERS = "f32 | f16 | bf16", "e4m3 | e5m2 | i32 | i16 | i8"
_STORED = (
    "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu",
    "int32", "int16", "int8",
)  # fmt: skip

#: The first compute capability that converts 8-bit floats.
CONVERTS_8_BITS = 89

_WHY_ALIGNED = "rows are moved in vectors, whose addresses and row pitches are multiples of them"


@dataclass(frozen=True)
class ElementwiseDesign(DesignMetadata):
    """How the elements of a matrix lie on the threads of a CTA.

    Attributes:
        threads: Of a CTA.
        columns: Of x, that a tile has.
        turns: Pairs of rows that a thread has on their way at a time.
        steps: Times that a CTA takes new rows.
        whole_rows: A CTA goes along its rows to their end: ``turns`` are of columns.
    """

    threads: int
    columns: int
    turns: int
    steps: int
    whole_rows: bool = False

    def rows(self, bundle: int) -> int:
        """Of a tile, if a quad has so many columns together, of the tile's."""
        quads = self.threads // LANES // max(self.columns // bundle, 1)
        return quads * _HALVES * (1 if self.whole_rows else self.turns * self.steps)

    @property
    def columns_at_once(self) -> int:
        """Columns that a CTA has on their way at a time."""
        return self.columns * (self.turns if self.whole_rows else 1)

    def tiles(self, bundle: int, M: int, N: int) -> tuple[int, int]:
        """Along M and N, one for each CTA."""
        return -(-M // self.rows(bundle)), 1 if self.whole_rows else -(-N // self.columns)

    def elements(self, bundle: int) -> int:
        """Of a thread at a time."""
        return bundle // LANES * _HALVES * self.turns

    def label(self) -> str:
        found = f"threads{self.threads}_columns{self.columns}_turns{self.turns}_steps{self.steps}"
        return f"{found}_whole_rows" if self.whole_rows else found


#: Whole rows of a warp; the same with fewer registers; for reductions over many rows; for few
#: columns, and for epilogues that look at many together. Those behind are for reductions over
#: columns: rows of one warp, of four and of eight.
DESIGNS = (
    ElementwiseDesign(128, 256, 2, 1),
    ElementwiseDesign(128, 256, 1, 1),
    ElementwiseDesign(256, 256, 2, 16),
    ElementwiseDesign(128, 128, 1, 1),
    ElementwiseDesign(128, 64, 2, 1),
    ElementwiseDesign(256, 64, 1, 16),
    ElementwiseDesign(128, 256, 2, 1, whole_rows=True),
    ElementwiseDesign(128, 1024, 2, 1, whole_rows=True),
    ElementwiseDesign(256, 2048, 2, 1, whole_rows=True),
)

#: Those that do without vectors: one for each width, for sums over rows, and over columns.
_BY_ELEMENT = (DESIGNS[1], DESIGNS[3], DESIGNS[5], DESIGNS[6])


def _vectors(x: str, out: str, *alignments: int) -> Operands:
    """Rows side by side, moved at so many bytes at once."""
    return Operands(
        x=x,
        out=out,
        accumulator="f32",
        majors="x:n out:n",
        alignments=tuple({"x": a, "out": a} for a in alignments),
        why_aligned=_WHY_ALIGNED,
    )


def _elements(x: str, out: str) -> Operands:
    """Any strides, one by one."""
    return Operands(x=x, out=out, accumulator="f32", majors="strided", why_aligned=_WHY_ALIGNED)


@CuTeDSLProvider.register
class Sm80Elementwise(BareWhereSizesAreKnown):
    """An epilogue of a matrix in memory, for every GPU from Ampere on, moved in vectors."""

    family: ClassVar[str] = "sm80.elementwise"
    arguments = ElementwiseArguments
    targets: ClassVar[tuple[str, ...]] = ("sm_80",)
    fuses = True
    operands = (
        _vectors("f16 | bf16", "f16 | bf16", 16, 4),
        _vectors("f16 | bf16", "f32", 16),
        _vectors("f32", "f32 | f16 | bf16", 16),
        _vectors("f32 | f16 | bf16", "e4m3 | e5m2 | i8", 16),
        _vectors("e4m3 | e5m2 | i8", "f32 | f16 | bf16", 16),
        _vectors("e4m3 | e5m2 | i8 | u8 | i32", "like x", 16),
        _elements(f"{_FLOATS} | {_OTHERS} | i64 | bool", f"{_FLOATS} | {_OTHERS} | e8m0"),
        _elements("i64 | bool", "like x"),
    )
    operands_metadata = NormOperandsMetadata
    design = ElementwiseDesign
    _design: ElementwiseDesign
    space = Space(*DESIGNS)

    def __init__(self, metadata: KernelMetadata) -> None:
        super().__init__(metadata)
        graph = metadata.epilogue
        nodes = graph.nodes if isinstance(graph, Graph) else ()
        self.reorders_accumulation = any(node.op == "reduce" for node in nodes)

    # What it takes -----------------------------------------------------------------------

    @rule("elements are moved one by one by half of the designs")
    def _(design: ElementwiseDesign, operands: NormOperandsMetadata) -> bool:
        return _vector_bytes(operands) > 1 or design in _BY_ELEMENT

    @rule(f"out is one of {', '.join(_STORED)}, or has the type of x and is x as it is")
    def _(args: ElementwiseArguments) -> bool | Miss:
        copied = args.epilogue is None and args.x.dtype is args.out.dtype
        return copied or args.out.dtype.name in _STORED or Miss(f"it is {args.out.dtype}")

    counts_in_32_bits = counted_in_32_bits

    @rule("rows of x and out are whole vectors")
    def _(operands: NormOperandsMetadata, args: ElementwiseArguments) -> bool | Miss:
        for name, operand in zip(args.operand_names, args.operands, strict=True):
            piece = _vector_bytes(operands)
            if piece > 1 and not whole_pieces(operand, piece):
                columns = operand.shape[-1]
                vector = piece // operand.dtype.itemsize
                padded = -(-columns // vector) * vector
                return Miss(f"{name} has {columns} columns", f"would match with {padded}")
        return True

    @rule("an epilogue takes at least one row, column and batch")
    def _(args: ElementwiseArguments) -> bool | Miss:
        empty = [name for name in ("M", "N", "L") if getattr(args, name) == 0]
        return args.epilogue is None or not empty or Miss(f"{empty[0]} is 0")

    is_known = known_epilogue
    has_whole_halves = whole_halves

    @rule("what an epilogue reads and writes by columns is as aligned as out")
    def _(operands: NormOperandsMetadata, args: ElementwiseArguments) -> bool | Miss:
        alignment = _vector_bytes(operands)
        if args.epilogue is None or alignment == 1:
            return True
        return operands_fit(args.epilogue, alignment, alignment)

    has_flat_reductions = flat_reductions
    reads_signed = signed_operands
    stored_types = types_rule(_STORED)

    @rule("a tile has whole bundles of the columns that the epilogue looks at together")
    def _(design: ElementwiseDesign, args: ElementwiseArguments) -> bool | Miss:
        return args.epilogue is None or fits_tile(args.epilogue.graph, design.columns)

    @rule("a warp has 1, 2, 4 or 8 bundles of columns, and threads registers for theirs")
    def _(design: ElementwiseDesign, args: ElementwiseArguments) -> bool | Miss:
        bundle = _bundle(design, args.epilogue.graph if args.epilogue is not None else None)
        count, elements = design.columns // bundle, design.elements(bundle)
        most = design.threads // LANES if design.whole_rows else _QUADS
        if count > most or count & (count - 1):
            return Miss(f"{design.columns} columns are {count} bundles")
        return elements <= _MOST_ELEMENTS or Miss(f"a thread would have {elements} elements")

    @rule("what is computed from whole rows needs a tile that holds them")
    def _(design: ElementwiseDesign, args: ElementwiseArguments) -> bool | Miss:
        if args.epilogue is None:
            return True
        return spans_rows(args.epilogue.graph, args.N, design.columns)

    @rule("CTAs go along whole rows for reductions over columns, without those over rows")
    def _(design: ElementwiseDesign, args: ElementwiseArguments) -> bool | Miss:
        graph = args.epilogue.graph if args.epilogue is not None else None
        if not design.whole_rows or _along_rows(graph):
            return True
        return Miss("it has one over rows" if "rows" in _reduced_over(graph) else "it has none")

    @rule("a launch has less than 2³¹ tiles")
    def _(design: ElementwiseDesign, args: ElementwiseArguments) -> bool | Miss:
        tiles = math.prod(design.tiles(_bundle(design, None), args.M, args.N)) * args.L
        return tiles < 2**31 or Miss(f"there would be {tiles}")

    def _supports(self, args: ElementwiseArguments) -> Status:
        """Reductions leave no more parts than there are elements, unless that is few: tall tiles
        have parts for rows that are not there."""
        counters, parts = self._reductions(args.M, args.N, args.L)
        elements = max(args.M * args.N * args.L, _FEW_PARTS)
        return reductions_fit(counters, parts, most=min(elements, MOST_PARTS))

    @classmethod
    def kernels_for(cls, operands: Any, epilogue: Graph | None = None) -> list[Any]:
        """Without those that no arguments with this epilogue can match."""
        kernels: list[Any] = super().kernels_for(operands, epilogue)
        if _along_rows(epilogue):
            return kernels
        return [kernel for kernel in kernels if not kernel._design.whole_rows]

    # How it is built ---------------------------------------------------------------------

    @property
    def _graph(self) -> Graph | None:
        graph = self.metadata.epilogue
        return graph if isinstance(graph, Graph) else None

    @cached_property
    def _over(self) -> set[str]:
        return _reduced_over(self._graph)

    def implementation(self) -> Callable[..., None]:
        operands = self.metadata.operands.tensors
        types = [t.dtype.itemsize for t in operands.values() if t.dtype is not None]
        return self._implementation(max(types, default=1), (), stores_out=True)

    def implementation_for(self, args: ElementwiseArguments) -> Callable[..., None]:
        full, others = output_types(args.epilogue)
        widest = max(operand.dtype.itemsize for operand in args.operands)
        types = () if args.epilogue is None else (args.out.dtype.cutlass, *full, *others)
        return self._implementation(widest, types, stores_out=args.stores_out)

    def _implementation(
        self, widest: int, types: tuple[Any, ...], *, stores_out: bool
    ) -> Callable[..., None]:
        """widest: bytes of an element; types: of the outputs."""
        from kernel_api.implementations.common.conversion import Conversions
        from kernel_api.implementations.sm80.elementwise import AsItIs, Elementwise

        design, cc = self._design, compiler.target_cc()
        float8 = cc >= CONVERTS_8_BITS
        vector_bytes = _vector_bytes(self.metadata.operands)
        epilogue = lowered(self._graph, types, float8=float8) or AsItIs(Conversions(float8))
        found: Callable[..., None] = Elementwise(
            design.threads,
            design.columns,
            design.turns,
            design.steps,
            whole_rows=design.whole_rows,
            merged=merged_groups(self._graph, 2 * widest, vector_bytes),
            vector_bytes=vector_bytes,
            epilogue=epilogue,
            stores_out=stores_out,
            dependent_launch=cc >= compiler.DEPENDENT_LAUNCH,
        )
        return found

    @cached_property
    def takes_more(self) -> bool:
        return self.metadata.epilogue is not None

    def more_values(self, args: ElementwiseArguments) -> dict[str, Any]:
        return {} if args.epilogue is None else epilogue_values(args.epilogue)

    def more_placeholders(self, args: ElementwiseArguments) -> tuple[Any, ...]:
        """By what is known of the modes of stride 1; matrices that are written are aligned."""
        epilogue = args.epilogue
        if epilogue is None:
            return ()
        full, inputs = full_outputs(epilogue), epilogue.inputs
        return tuple(
            self._stored(full[name])
            if name in full
            else compiler.fake_tensor(inputs[name], None)
            if name in inputs and inputs[name].unit_mode is not None
            else compiler.placeholder(value)
            for name, value in self.more_values(args).items()
        )

    def _stored(self, operand: Any) -> Any:
        divisibility = max(1, _vector_bytes(self.metadata.operands) // operand.dtype.itemsize)
        return compiler.fake_tensor(operand, TensorAttributes(operand.dtype, None, divisibility))

    # How it is launched ------------------------------------------------------------------

    def tiling(self, M: int, N: int) -> Tiling:
        """How the elements are dealt out, where they are reduced."""
        design = self._design
        bundle = _bundle(design, self._graph)
        rows = design.rows(bundle)
        return Tiling((rows, design.columns_at_once), rows, 1, design.tiles(bundle, M, N))

    def workspace_for(self, *tensors: Any) -> int:
        *batch, M, N = tensors[0].shape
        return self._workspace_bytes(M, N, batch[0] if batch else 1)

    def get_workspace_size(self, args: ElementwiseArguments) -> int:
        return self._workspace_bytes(args.M, args.N, args.L)

    def _workspace_bytes(self, M: int, N: int, L: int) -> int:
        counters, parts = self._reductions(M, N, L)
        return ZEROED + PART_BYTES * parts if counters else 0

    def _reductions(self, M: int, N: int, L: int) -> tuple[int, int]:
        """(counters, parts)"""
        graph = self._graph
        if graph is None or (self._design.whole_rows and self._over == {"columns"}):
            return 0, 0
        return reduction_sizes(graph, self.tiling(M, N), L)

    def _parts_of_a_value(self, M: int, N: int) -> int:
        """That one thread adds, of the reduction with the most."""
        tiles_m, tiles_n = self.tiling(M, N).tiles
        found = {"columns": 0 if self._design.whole_rows else tiles_n, "rows": tiles_m}
        of_matrix = -(-tiles_m * tiles_n // self._design.threads)
        return max((found.get(axis, of_matrix) for axis in self._over), default=0)

    def _launcher(
        self, args: ElementwiseArguments, artifact: CompiledArtifact
    ) -> Callable[..., None]:
        return unless_empty(super()._launcher(args, artifact))

    def predict(self, args: ElementwiseArguments) -> float:
        design, vector = self._design, _vector_bytes(self.metadata.operands)
        bundle, rows = _bundle(design, self._graph), told_apart(args.M)
        widest = max(operand.dtype.itemsize for operand in args.operands)
        merged = merged_groups(self._graph, 2 * widest, vector)
        along = -(-args.N // design.columns_at_once) if design.whole_rows else 1
        shape = model.Shape(
            design.threads,
            (design.rows(bundle), design.columns_at_once * along),
            design.elements(bundle),
            design.steps,
            along,
            max(1, min(vector, 2 * merged * widest)),
            PART_BYTES * self._reductions(rows, args.N, args.L)[1],
            self._parts_of_a_value(rows, args.N),
            "columns" in self._over and not design.whole_rows,
        )
        return model.seconds(args, shape)

    @classmethod
    def estimated_by(cls, args: Any) -> Hashable | None:
        return model.estimated_by(args)


def _vector_bytes(operands: Any) -> int:
    """Of what is moved at once; 1: an element."""
    return alignment_of(operands)


def _reduced_over(graph: Graph | None) -> set[str]:
    """What the epilogue reduces over, those blocks of columns aside that each thread has whole."""
    planned = plan(graph) if graph is not None else None
    if graph is None or not isinstance(planned, Plan):
        return set()
    return {str(graph.nodes[index]["axis"]) for _, index in planned.reduced}


def _along_rows(graph: Graph | None) -> bool:
    """Whether CTAs may go along whole rows, and save something."""
    over = _reduced_over(graph)
    return "columns" in over and "rows" not in over


def _bundle(design: ElementwiseDesign, graph: Graph | None) -> int:
    return bundles(graph).of_tile(design.columns)

"""What the families of indexed rows offer, and how they are compiled."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from kernel_api.arguments import GatherRowsArguments, ScatterRowsArguments
from kernel_api.arguments.indexed import IndexedRowsArguments
from kernel_api.artifact import CompiledArtifact
from kernel_api.metadata import DesignMetadata, NormOperandsMetadata, OperandsMetadata
from kernel_api.providers.cutedsl import CuTeDSLProvider, compiler
from kernel_api.providers.cutedsl.extents import counted_in_32_bits
from kernel_api.providers.cutedsl.h200 import BANDWIDTH
from kernel_api.providers.cutedsl.kernel import BareWhereSizesAreKnown, by_place
from kernel_api.providers.cutedsl.norm.base import (
    FLOATS,
    PIECE,
    row_operands,
    vector_of,
    whole_vectors,
)
from kernel_api.space import Miss, Space, rule

#: Seconds of a launch, and blocks of 128 threads per second that are started.
_OVERHEAD, _BLOCKS = 2.5e-6, 6e8
#: Of the time: vectors that are shorter take more instructions.
_VECTOR_COST = {16: 1.0, 8: 1.1, 4: 1.4, 2: 2.5}


@dataclass(frozen=True)
class IndexedRowsDesign(DesignMetadata):
    """How rows lie on the threads of a CTA, a vector each.

    Attributes:
        threads: Of a CTA.
        threads_per_row: That share a row at a time; a CTA has several rows if it has more.
    """

    threads: int
    threads_per_row: int

    @property
    def rows(self) -> int:
        """Of a CTA."""
        return self.threads // self.threads_per_row

    def label(self) -> str:
        return f"threads{self.threads}_row{self.threads_per_row}"


@rule("weight is float32, float16 or bfloat16")
def weight_is_float(args: Any) -> bool | Miss:
    weight = args.weight
    return weight is None or weight.dtype.name in FLOATS or Miss(f"it is {weight.dtype}")


class IndexedRowsKernel(BareWhereSizesAreKnown):
    """Rows named by an index, for every GPU from Ampere on, moved in vectors."""

    targets: ClassVar[tuple[str, ...]] = ("sm_80",)
    takes_more = True
    faster_if_aligned = False  # short rows have more threads at work with narrow vectors
    operands = (
        row_operands("f16 | bf16", "f16 | bf16", (16, 16), (4, 4)),
        row_operands("f16 | bf16", "f32", (8, 16)),
        row_operands("f32", "f32", (16, 16)),
        row_operands("f32", "f16 | bf16", (16, 8)),
    )
    operands_metadata = NormOperandsMetadata
    design = IndexedRowsDesign
    space = Space(*(IndexedRowsDesign(128, per_row) for per_row in (128, 32, 8)))

    @rule("a row takes more than a quarter of its threads, or has the fewest")
    def _(
        design: IndexedRowsDesign, operands: OperandsMetadata, args: IndexedRowsArguments
    ) -> bool | Miss:
        room = design.threads_per_row * vector_of(operands)
        if design.threads_per_row == 8 or room < 4 * args.N:
            return True
        return Miss(f"N is {args.N}", f"would match with N of {room // 4 + 1} or more")

    counts_in_32_bits = counted_in_32_bits
    has_whole_vectors = whole_vectors

    @rule("a launch has less than 2³¹ CTAs")
    def _(
        design: IndexedRowsDesign, operands: OperandsMetadata, args: IndexedRowsArguments
    ) -> bool | Miss:
        ctas = _ctas(design, operands, args)
        return ctas < 2**31 or Miss(f"there would be {ctas}")

    weight_is_float = weight_is_float

    def more_values(self, args: Any) -> dict[str, Any]:
        values: dict[str, Any] = args.launch_values
        return values

    # How it is built and launched --------------------------------------------------------

    def _built(self, implementation: Callable[..., Any]) -> Callable[..., None]:
        from kernel_api.implementations.common.rows import RowThreads

        design = self._design
        vector = vector_of(self.metadata.operands)
        found: Callable[..., None] = implementation(
            RowThreads(design.threads, design.threads_per_row, vector),
            dependent_launch=compiler.target_cc() >= compiler.DEPENDENT_LAUNCH,
        )
        return found

    def _launcher(self, args: Any, artifact: CompiledArtifact) -> Callable[..., None]:
        launch = super()._launcher(args, artifact)

        def launch_unless_empty(x: Any, out: Any, **others: Any) -> None:
            if 0 not in out.shape and others["row_index"].shape[0]:
                launch(x, out, **others)

        return by_place(launch_unless_empty, args)

    def predict(self, args: IndexedRowsArguments) -> float:
        design = self._design
        operands = self.metadata.operands
        vector = vector_of(operands)
        ctas = _ctas(design, operands, args)
        moved = sum(o.dtype.itemsize * (args.k if o is args.indexed else 1) for o in args.operands)
        seconds = args.M * args.N * moved / BANDWIDTH
        seconds *= _VECTOR_COST[min(vector * args.x.dtype.itemsize, PIECE)]
        # Threads behind the ends of rows ask for nothing.
        used = args.M * args.N / vector / (ctas * design.threads) if ctas else 1.0
        return _OVERHEAD + float(max(seconds, ctas / _BLOCKS) / used**0.5)


@CuTeDSLProvider.register
class Sm80GatherRows(IndexedRowsKernel):
    """Rows that an index names, added up."""

    family: ClassVar[str] = "sm80.gather_rows"
    arguments = GatherRowsArguments

    def implementation(self) -> Callable[..., None]:
        from kernel_api.implementations.sm80.indexed_rows import GatherRows

        return self._built(GatherRows)


@CuTeDSLProvider.register
class Sm80ScatterRows(IndexedRowsKernel):
    """Rows put to where an index says."""

    family: ClassVar[str] = "sm80.scatter_rows"
    arguments = ScatterRowsArguments

    def implementation(self) -> Callable[..., None]:
        from kernel_api.implementations.sm80.indexed_rows import ScatterRows

        return self._built(ScatterRows)


def _ctas(design: Any, operands: OperandsMetadata, args: IndexedRowsArguments) -> int:
    along = -(-args.N // (design.threads_per_row * vector_of(operands)))
    return int(-(-args.M // design.rows) * along)

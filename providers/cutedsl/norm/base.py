"""What the norm families share: how rows lie on threads, and what comes beside the matrices."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, ClassVar

from kernel_api._estimated_sizes import told_apart
from kernel_api.arguments.norm import NormArguments
from kernel_api.artifact import CompiledArtifact
from kernel_api.metadata import DesignMetadata, OperandsMetadata
from kernel_api.providers.cutedsl import compiler
from kernel_api.providers.cutedsl.extents import counted_in_32_bits
from kernel_api.providers.cutedsl.kernel import BareWhereSizesAreKnown, by_place
from kernel_api.providers.streams import on_stream
from kernel_api.space import Miss, Operands, rule

#: Shared memory of a CTA on the smallest multiprocessor that the families run on (8.6, 8.9); what
#: is left of it holds a few sums.
SHARED_MEMORY_BYTES = 98 * 1024

#: Bytes of the longest copies, and of the shortest that cp.async makes.
PIECE, LEAST_PIECE = 16, 4

#: Elements of the shortest row that there is a design for; those that are shorter are in it, too.
SMALLEST_ROOM = 64

FLOATS = ("float32", "float16", "bfloat16")
WHY_ALIGNED = "rows are copied in vectors, whose addresses and row pitches are multiples of them"


@dataclass(frozen=True)
class RowDesign(DesignMetadata):
    """How the rows of a matrix lie on the threads of a CTA.

    Attributes:
        threads: Of a CTA.
        threads_per_row: That share a row; a CTA has several rows at once if it has more.
        elements: Of a row that a thread has at most; 0: as many as there are, but the row is not
            kept in shared memory between the times that it is looked at.
        stages: Rows that each of the CTA's rows at once has in shared memory, one at least of them
            in use; 0 without ``elements``.
    """

    threads: int
    threads_per_row: int
    elements: int
    stages: int

    @property
    def rows(self) -> int:
        """At once."""
        return self.threads // self.threads_per_row

    @property
    def room(self) -> int:
        """Elements of a row that there is room for; 0: for any."""
        return self.threads_per_row * self.elements

    def label(self) -> str:
        held = f"x{self.elements}_stages{self.stages}" if self.elements else "_streamed"
        return f"threads{self.threads}_row{self.threads_per_row}{held}"


def vector_of(operands: OperandsMetadata) -> int:
    """Elements that a thread reads of a row at once: as many as the alignment of x allows."""
    x = operands.tensors["x"]
    assert x.dtype is not None
    return max(1, min(x.alignment, PIECE) // x.dtype.itemsize)


def row_operands(x: str, out: str, *alignments: tuple[int, int]) -> Operands:
    """x and out whose rows lie side by side, moved at so many bytes at once, or one by one."""
    return Operands(
        x=x,
        out=out,
        accumulator="f32",
        majors="x:n out:n",
        alignments=(*({"x": a, "out": b} for a, b in alignments), {}),
        why_aligned=WHY_ALIGNED,
    )


def staged_bytes(design: RowDesign, operands: OperandsMetadata, args: Any = None) -> int:
    """Of shared memory, for what is read of each matrix; without arguments, for the least."""
    read = [t for name, t in operands.tensors.items() if name in ("x", "dy")]
    element_bytes: int = sum(t.dtype.itemsize for t in read if t.dtype is not None)
    element_bytes += sum(one.dtype.itemsize for one in further_rows(args).values())
    return design.stages * design.threads * design.elements * element_bytes


#: Matrices that may be there beside those that a design is for: that are read, and written.
_READ_BESIDE, _WRITTEN_BESIDE = ("residual", "dresidual"), ("residual_out",)


def further_rows(args: Any, *, written: bool = False) -> dict[str, Any]:
    """The matrices that are read in vectors beside those that a design is for; written: and those
    that are written."""
    further = getattr(args, "further", {})
    names = (*_READ_BESIDE, *_WRITTEN_BESIDE) if written else _READ_BESIDE
    return {name: further[name] for name in names if name in further}


@rule("rows are whole vectors")
def whole_vectors(operands: OperandsMetadata, args: Any) -> bool | Miss:
    vector = vector_of(operands)
    padded = -(-args.N // vector) * vector
    return padded == args.N or Miss(f"N is {args.N}", f"would match with N padded to {padded}")


@rule("the rows in flight fit in shared memory")
def rows_fit(design: RowDesign, operands: OperandsMetadata) -> bool:
    return staged_bytes(design, operands) <= SHARED_MEMORY_BYTES


@rule("the rows in flight fit in shared memory, with those of a residual")
def all_rows_fit(design: RowDesign, operands: OperandsMetadata, args: Any) -> bool | Miss:
    needed = staged_bytes(design, operands, args)
    return needed <= SHARED_MEMORY_BYTES or Miss(f"they take {needed} bytes")


@rule("a thread has 16 vectors of a row at most")
def few_vectors(design: RowDesign, operands: OperandsMetadata) -> bool:
    return design.elements <= 16 * vector_of(operands)


@rule("one of 1024 threads has registers for one vector of a row")
def few_registers(design: RowDesign, operands: OperandsMetadata) -> bool:
    return design.threads < 1024 or design.elements <= vector_of(operands)


def elements_of_row(args: Any) -> int:
    return int(args.N)


class RowKernel(BareWhereSizesAreKnown):
    """Of rows that are looked at several times: how they lie on threads."""

    targets: ClassVar[tuple[str, ...]] = ("sm_80",)
    takes_more = True

    @rule("a thread has whole vectors of a row")
    def _(design: RowDesign, operands: OperandsMetadata) -> bool:
        return design.elements % vector_of(operands) == 0

    @rule("cp.async copies 4 bytes or more")
    def _(design: RowDesign, operands: OperandsMetadata) -> bool:
        return not design.elements or operands.tensors["x"].alignment >= LEAST_PIECE

    counts_in_32_bits = counted_in_32_bits
    has_whole_vectors = whole_vectors

    @rule("a row has room in its threads", by=elements_of_row)
    def _(design: RowDesign, args: Any) -> bool | Miss:
        if not design.elements or design.room >= args.N:
            return True
        return Miss(f"N is {args.N}", f"would match with N of {design.room} or less")

    @rule("a row takes more than half of the room", by=elements_of_row)
    def _(design: RowDesign, args: Any) -> bool | Miss:
        if not design.elements or design.room < 2 * args.N or design.room == SMALLEST_ROOM:
            return True
        return Miss(f"N is {args.N}", f"would match with N of {design.room // 2 + 1} or more")

    @classmethod
    def estimated_by(cls, args: Any) -> Hashable | None:
        return told_apart(args.M), args.N, args.signature

    def _launched(self) -> dict[str, Any]:
        """How the implementation's rows lie on threads and how it is launched, as its constructor
        takes it."""
        from kernel_api.implementations.common.rows import RowThreads

        design, vector = self._design, vector_of(self.metadata.operands)
        return {
            "rows": RowThreads(design.threads, design.threads_per_row, vector),
            "vectors": design.elements // vector,
            "stages": design.stages,
            "dependent_launch": compiler.target_cc() >= compiler.DEPENDENT_LAUNCH,
        }


class NormKernel(RowKernel):
    """A norm of rows: sums along rows, and over them, are formed in parts."""

    reorders_accumulation = True

    # What comes beside the matrices ------------------------------------------------------

    @rule("what is beside the matrices is float32, float16 or bfloat16")
    def _(args: NormArguments) -> bool | Miss:
        for name, operand in args.further.items():
            if operand.dtype.name not in FLOATS:
                return Miss(f"{name} is {operand.dtype}")
        return True

    @rule("rows of a residual lie side by side, in the vectors of x")
    def _(operands: OperandsMetadata, args: NormArguments) -> bool | Miss:
        for name, operand in further_rows(args, written=True).items():
            needed = _vector_alignment(operand.dtype.itemsize, operands)
            if operand.unit_mode != -1 and args.N > 1:
                return Miss(
                    f"{name} has strides {operand.stride}",
                    f"would match with {name}.contiguous()",
                )
            if operand.alignment % needed:
                return Miss(
                    f"{name} has rows at multiples of {operand.alignment} bytes",
                    f"would match if they were at multiples of {needed}",
                )
        return True

    @rule("cp.async copies 4 bytes of a residual or more")
    def _(design: RowDesign, operands: OperandsMetadata, args: NormArguments) -> bool | Miss:
        for name, operand in further_rows(args).items():
            copied = vector_of(operands) * operand.dtype.itemsize
            if design.elements and copied < LEAST_PIECE:
                return Miss(f"{copied} of {name} are side by side")
        return True

    @rule("weight and bias lie side by side")
    def _(args: NormArguments) -> bool | Miss:
        for name, operand in columns_of(args).items():
            if operand.unit_mode is None:
                return Miss(
                    f"{name} has stride {operand.stride[0]}",
                    f"would match with {name}.contiguous()",
                )
        return True

    @rule("weight and bias start at a multiple of their vectors")
    def _(operands: OperandsMetadata, args: NormArguments) -> bool | Miss:
        for name, operand in columns_of(args).items():
            needed = _vector_alignment(operand.dtype.itemsize, operands)
            if operand.alignment % needed:
                return Miss(
                    f"{name} starts at a multiple of {operand.alignment} bytes",
                    f"would match if it started at a multiple of {needed}",
                )
        return True

    def more_values(self, args: Any) -> dict[str, Any]:
        values: dict[str, Any] = args.launch_values
        return values

    def more_placeholders(self, args: Any) -> tuple[Any, ...]:
        columns = columns_of(args)
        return tuple(
            self._vectors(columns[name]) if name in columns else compiler.placeholder(value)
            for name, value in self.more_values(args).items()
        )

    def _vectors(self, operand: Any) -> Any:
        """For an (N,) that is read in vectors."""
        import cutlass.cute as cute

        alignment = _vector_alignment(operand.dtype.itemsize, self.metadata.operands)
        return cute.runtime.make_fake_tensor(
            operand.dtype.cutlass, (cute.sym_int(),), (1,), assumed_align=alignment
        )

    # How it is launched ------------------------------------------------------------------

    def _launcher(self, args: Any, artifact: CompiledArtifact) -> Callable[..., None]:
        launch = super()._launcher(args, artifact)
        sums = tuple(n for n in ("dweight", "dbias", "global_amax") if n in args.further)

        def launch_unless_empty(*matrices: Any, stream: Any = None, **others: Any) -> None:
            if matrices[0].numel():
                launch(*matrices, stream=stream, **others)
                return
            with on_stream(stream, matrices[0].device.index):
                for name in sums:  # of no rows
                    others[name].zero_()

        return by_place(launch_unless_empty, args)


def columns_of(args: Any) -> dict[str, Any]:
    """What is read in vectors beside the matrices."""
    return {name: args.further[name] for name in ("weight", "bias") if name in args.further}


def _vector_alignment(itemsize: int, operands: OperandsMetadata) -> int:
    return min(PIECE, vector_of(operands) * itemsize)

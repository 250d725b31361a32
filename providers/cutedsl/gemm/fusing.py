"""What the GEMM families share that compute an epilogue as they write their tiles."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from kernel_api._cached_property import cached_property
from kernel_api._workspaces import PART_BYTES, ZEROED
from kernel_api.arguments import EpilogueArguments, GemmArguments
from kernel_api.dtypes import DType, dtype
from kernel_api.epilogue import Graph
from kernel_api.kernel import Kernel
from kernel_api.matching import BEHIND_OPERANDS
from kernel_api.metadata import GemmOperandsMetadata, OperandsMetadata, TensorAttributes
from kernel_api.operands import Operand
from kernel_api.providers.cutedsl import compiler
from kernel_api.providers.cutedsl.epilogue.operands import (
    COUNTERS,
    Tiling,
    epilogue_values,
    flat_reductions,
    full_outputs,
    known_epilogue,
    operands_fit,
    reduction_sizes,
    reductions_fit,
    signed_operands,
    types_fit,
    whole_halves,
    written,
)
from kernel_api.providers.cutedsl.epilogue.plan import Plan, plan
from kernel_api.providers.cutedsl.epilogue.scales import scaled
from kernel_api.providers.cutedsl.gemm.splitting import SplitGemm
from kernel_api.space import Miss, Rule, rule
from kernel_api.status import Status
from kernel_api.targets import Target

_EIGHT_BITS = "8 bits are written in units of a scale, or as an epilogue says"
_UNITS_OF_OUT = "out is written in units of a scale where A and B are in units of theirs, be it 1"
_WHOLE_SUMS = "sums of integers become floats by scales of A and B, or by an epilogue"


class FusedGemm(SplitGemm):
    """A family whose kernels exist with an epilogue as well; the rules say with which."""

    fuses = True

    @rule("an epilogue takes at least one row, column and product")
    def _(args: Any) -> bool | Miss:
        if args.epilogue is None:
            return True
        empty = [name for name in ("M", "N", "K") if getattr(args, name) == 0]
        return Miss(f"{empty[0]} is 0") if empty else True

    is_known = known_epilogue
    has_flat_reductions = flat_reductions
    reads_signed = signed_operands
    has_whole_halves = whole_halves

    @classmethod
    def class_status(
        cls, args: Any, target: Target | None = None, *, compiled: bool = False
    ) -> Status:
        status = super().class_status(args, target, compiled=compiled)
        if not status or args.epilogue is not None or not cls._multiplies(args.A.dtype):
            return status
        in_units = any("out" in row.scales for row in cls.operands)
        if in_units and args.scaled == ("out",):
            return Status.fail(
                f"{_UNITS_OF_OUT}; out alone has a {args.out.mode.value} scale",
                rule=_UNITS_OF_OUT,
                operand="out",
                nearest="would match with per_tensor scales of A and B",
                progress=BEHIND_OPERANDS,
            )
        text = _unsaid(args.A.dtype, args.A.mode, args.out.dtype, args.out.mode)
        if text is None:
            return status
        fused = "the epilogue of gemm_quantize" if args.out.dtype.bits == 8 else "an epilogue"
        if in_units and args.out.dtype.bits == 8:
            fused += ", or with per_tensor scales of A, B and out"
        return Status.fail(
            f"{text}; out is {args.out.dtype}, and there is neither",
            rule=text,
            operand="out",
            nearest=f"would match with {fused}" if cls._writes(args.out.dtype) else None,
            progress=BEHIND_OPERANDS,
        )

    @classmethod
    def _writes(cls, element: DType) -> bool:
        return element in _types_in(tuple(row.types["out"] for row in cls.operands))

    @classmethod
    def _multiplies(cls, element: DType) -> bool:
        return element in _types_in(tuple(row.types["A"] for row in cls.operands))

    @classmethod
    def kernels_for(cls, operands: OperandsMetadata, epilogue: Graph | None = None) -> list[Kernel]:
        A, out = operands.tensors["A"], operands.tensors["out"]
        if epilogue is None and _unsaid(A.dtype, A.scale, out.dtype, out.scale):
            return []
        return super().kernels_for(operands, epilogue)

    def _supports(self, args: GemmArguments) -> Status:
        """A workspace has room for so many counters, those of a split included."""
        counters, parts = self._reductions(args.M, args.N, args.L)
        if counters and self._design.meets_in_workspace:
            tiles = self._design.clusters(args.M, args.N, args.L) * self._design.cluster_size
            counters += tiles * self._design.summing_groups
        return reductions_fit(counters, parts, self.counters)

    @property
    def counters(self) -> int:
        """That a workspace has room for, beside others that the kernel uses."""
        return COUNTERS

    # Built with an epilogue --------------------------------------------------------------

    def implementation(self) -> Callable[..., None]:
        return self._implementation()

    def implementation_for(self, args: Any) -> Callable[..., None]:
        return self._implementation(*output_types(args.epilogue))

    def _implementation(
        self, more_outputs: tuple[Any, ...] = (), others: tuple[Any, ...] = ()
    ) -> Callable[..., None]:
        """Types of the outputs beside out: those with rows and columns, and the others."""
        raise NotImplementedError

    @property
    def alignment_asked(self) -> int:
        """Bytes that addresses and strides of what an epilogue reads and writes by columns are
        multiples of, as out's; 1: of nothing."""
        return alignment_of(self.metadata.operands)

    @cached_property
    def takes_more(self) -> bool:
        return super().takes_more or self.metadata.epilogue is not None

    def more_values(self, args: Any) -> dict[str, Any]:
        scales = super().more_values(args)
        return scales if args.epilogue is None else {**scales, **epilogue_values(args.epilogue)}

    def more_placeholders(self, args: Any) -> tuple[Any, ...]:
        """Outputs are stored as out is: by what is known of its mode of stride 1 and alignment.

        Of what is read, only columns are known to lie side by side. Rows are columns of a product
        that is transposed, and nothing has asked how they are aligned.
        """
        aligned, epilogue = self.aligned_values(args), args.epilogue
        full = full_outputs(epilogue) if epilogue is not None else {}
        inputs = epilogue.inputs if epilogue is not None else {}
        return tuple(
            self._stored(full[name])
            if name in full
            else compiler.fake_tensor(inputs[name], None)
            if name in inputs and inputs[name].unit_mode == -1
            else compiler.placeholder(value, aligned.get(name))
            for name, value in self.more_values(args).items()
        )

    def _stored(self, operand: Operand) -> Any:
        divisibility = max(1, self.alignment_asked // operand.dtype.itemsize)
        return compiler.fake_tensor(operand, TensorAttributes(operand.dtype, None, divisibility))

    # Workspace ---------------------------------------------------------------------------

    def tiling(self, M: int, N: int) -> Tiling:
        """How the accumulators are dealt out, where they are reduced."""
        raise NotImplementedError

    def workspace_for(self, *tensors: Any) -> int:
        size = super().workspace_for(*tensors)
        A, B, _ = (tensor.shape for tensor in tensors)
        return self._with_reductions(size, A[-2], B[-1], A[0] if len(A) == 3 else 1)

    def get_workspace_size(self, args: Any) -> int:
        size = super().get_workspace_size(args)
        return self._with_reductions(size, args.M, args.N, args.L)

    def _with_reductions(self, size: int, M: int, N: int, L: int) -> int:
        """With the parts of what an epilogue reduces, behind what else is taken."""
        parts = self._reductions(M, N, L)[1]
        return max(size, ZEROED) + PART_BYTES * parts if parts else size

    def _reductions(self, M: int, N: int, L: int) -> tuple[int, int]:
        """(counters, parts)"""
        graph = self.metadata.epilogue
        return reduction_sizes(graph, self.tiling(M, N), L) if isinstance(graph, Graph) else (0, 0)


def _unsaid(A: DType | None, A_scale: Any, out: DType | None, out_scale: Any) -> str | None:
    """The rule that a product without an epilogue breaks where nothing says how sums become what
    is written; None: something does."""
    if A is None or out is None:
        return None
    if out_scale is None and out.bits == 8:
        return _EIGHT_BITS
    return _WHOLE_SUMS if A_scale is None and A.is_integer and out.is_float else None


def output_types(epilogue: EpilogueArguments | None) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Of the outputs beside out, as the DSL has them: those with rows and columns, the others."""
    if epilogue is None:
        return (), ()
    outputs = epilogue.outputs
    types = {name: outputs[name].dtype.cutlass for name in written(epilogue.graph)}
    full = tuple(types.pop(name) for name in full_outputs(epilogue))
    return full, tuple(types.values())


def alignment_of(operands: OperandsMetadata) -> int:
    """In bytes, of what is written; 1 if nothing is asked."""
    out = operands.tensors["out"]
    return out.alignment if out.divisibility > 1 else 1


@functools.lru_cache(maxsize=256)
def _types_in(rows: tuple[str, ...]) -> frozenset[DType]:
    """That some rows declare."""
    return frozenset(dtype(one.strip()) for row in rows for one in row.split("|"))


def columns_that_matter(args: Any) -> tuple[type, int] | None:
    """What arguments say of whether tiles hold what an epilogue looks at together: heads may be
    columns of B that are loaded one by one."""
    planned = None if args.epilogue is None else plan(args.epilogue.graph)
    has_heads = isinstance(planned, Plan) and planned.heads is not None
    return (type(args), args.N) if has_heads else None


def operands_rule(piece: int = 1) -> Rule:
    """Rows that are written are whole pieces of so many bytes."""

    def fits(operands: GemmOperandsMetadata, args: Any) -> bool | Miss:
        return args.epilogue is None or operands_fit(args.epilogue, alignment_of(operands), piece)

    return Rule("what an epilogue reads and writes by columns is as aligned as out", fits)


def types_rule(matrices: tuple[str, ...]) -> Rule:
    """An epilogue may write matrices of these types."""
    shown = ", ".join(matrices)

    def fits(args: Any) -> bool | Miss:
        return args.epilogue is None or types_fit(args.epilogue, matrices)

    return Rule(
        f"an epilogue writes matrices of {shown}, and else signed numbers of 8 to 32 bits", fits
    )


def lowered(
    graph: Any,
    output_types: tuple[Any, ...],
    *,
    scales: Mapping[str, str] | None = None,
    float8: bool = True,
    by_heads: bool = False,
) -> Any:
    """The epilogue that is traced with a kernel; None for no graph.

    Args:
        scales: As `scaled` takes them; None: there are none.
        float8: Whether the hardware converts 8-bit floats.
        by_heads: Whether columns of heads are dealt out to tiles 32 of each half in turns.
    """
    if not isinstance(graph, Graph):
        return None
    from kernel_api.implementations.common.conversion import Conversions
    from kernel_api.providers.cutedsl.epilogue.lower import GraphEpilogue

    graph = scaled(graph, scales or {})
    planned = plan(graph)
    assert isinstance(planned, Plan), planned
    return GraphEpilogue(graph, planned, output_types, Conversions(float8), by_heads)

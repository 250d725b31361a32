"""For which epilogues a Hopper GEMM has registers beside its accumulators."""

from __future__ import annotations

from typing import Any

from kernel_api.epilogue import Graph
from kernel_api.providers.cutedsl.epilogue.plan import Plan
from kernel_api.providers.cutedsl.gemm import model
from kernel_api.providers.cutedsl.gemm.sm90_design import Sm90GemmDesign

#: As the performance model counts them.
FEW_OPERATIONS = 5
#: The same where heads are rotated, whose tables are not read ahead.
_FEW_OF_HEADS = 6
#: Beside which clusters that take tiles have registers for one matrix that is read, and one output.
_MANY_ACCUMULATORS = 160


def matrices_read(graph: Graph) -> int:
    """How many it reads, beside tables."""
    leaves = graph.leaves.values()
    return sum(bool(leaf.shape.rows and leaf.shape.columns) for leaf in leaves)


def is_short(graph: Graph) -> bool:
    """Whether there are registers for all of it where tiles have parts of heads."""
    written = sum(graph.nodes[index].op != "reduce" for _, index in graph.outputs)
    return written == 1 and not matrices_read(graph) and model.operations(graph) <= _FEW_OF_HEADS


def is_light(graph: Graph, operands: Any, planned: Plan) -> bool:
    """Whether an epilogue needs few registers beside accumulators."""
    leaves = graph.leaves.values()
    few = FEW_OPERATIONS
    if planned.heads is not None and operands.out.dtype.bits == 16:
        by_row = any(leaf.shape.rows and leaf.op != "table" for leaf in leaves)
        by_batch = any(leaf.shape.batch for leaf in leaves)
        few = FEW_OPERATIONS if by_row or by_batch else _FEW_OF_HEADS
    return not matrices_read(graph) and model.operations(graph) <= few


def fits_taken(design: Sm90GemmDesign, graph: Graph | None) -> bool:
    """Whether clusters that take tiles compute it as those do that have a share of them."""
    if graph is None or not design.takes_tiles:
        return True
    if any(node.op in ("reduce", "uniform") for node in graph.nodes):
        return False
    most = max(matrices_read(graph), len(graph.outputs))
    return design.accumulators < _MANY_ACCUMULATORS or most == 1

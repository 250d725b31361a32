"""Operands of an epilogue: what kernels take of them, and when they fit."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from math import gcd, lcm
from typing import Any

from kernel_api._workspaces import COUNTER_BYTES, ZEROED
from kernel_api.arguments import EpilogueArguments
from kernel_api.epilogue import Graph, Node
from kernel_api.operands import Operand
from kernel_api.providers.cutedsl.epilogue.plan import HALF, QUAD, Plan, plan
from kernel_api.space import Miss, rule
from kernel_api.status import Status

#: Columns that a kernel writes at once, and so the narrowest bundle.
SUBTILE = 32

#: Bytes that TMA writes at once.
TMA_PIECE = 16

#: Counters that a workspace has room for, and parts that kernels count in 32 bits.
COUNTERS, MOST_PARTS = ZEROED // COUNTER_BYTES, 2**31 - 1


def epilogue_values(epilogue: EpilogueArguments) -> dict[str, Any]:
    """What a kernel takes, by name: what is read, in the order of the graph's leaves; then the
    outputs beside out, first those with rows and columns."""
    values = {
        name: _number(leaf, epilogue.scalars[name])
        if leaf.op == "scalar"
        else epilogue.inputs[name].tensor
        for name, leaf in epilogue.graph.leaves.items()
    }
    return {**values, **{name: epilogue.outputs[name].tensor for name in written(epilogue.graph)}}


def _number(leaf: Node, value: float) -> float:
    """As the type that kernels take it in: 2 is as good a factor as 2.0, and whole numbers are the
    64 bits of a state, which launches pass with a sign."""
    if leaf["type"] == "real":
        return float(value)
    return (int(value) + 2**63) % 2**64 - 2**63


def written(graph: Graph) -> tuple[str, ...]:
    """Outputs beside out: those with rows and columns, those per block, those that are reduced."""
    planned = plan(graph)
    assert isinstance(planned, Plan), planned
    return planned.names[1:]


def full_outputs(epilogue: EpilogueArguments) -> dict[str, Operand]:
    """Outputs beside out that have rows and columns."""
    planned = plan(epilogue.graph)
    if isinstance(planned, str):
        return {}
    return {name: epilogue.outputs[name] for name, _ in planned.full[1:]}


@dataclass(frozen=True)
class Tiling:
    """How accumulators are dealt out.

    Attributes:
        tile: Rows and columns.
        rows: Of a block, which is reduced together.
        groups: Of threads that share a tile and are reduced each for itself.
        tiles: Along M and N, whole clusters of them.
    """

    tile: tuple[int, int]
    rows: int
    groups: int
    tiles: tuple[int, int]


def sums_both_ways(graph: Graph | None) -> bool:
    """Whether something is reduced over rows, and something over columns of several tiles."""
    planned = plan(graph) if graph is not None else None
    if graph is None or not isinstance(planned, Plan):
        return False
    axes = {graph.nodes[index]["axis"] for _, index in planned.reduced}
    return {"rows", "columns"} <= axes


def reduction_sizes(graph: Graph, tiling: Tiling, L: int) -> tuple[int, int]:
    """(counters, parts) in a workspace."""
    planned = plan(graph)
    assert isinstance(planned, Plan), planned
    counters = parts = 0
    tiles_m, tiles_n = tiling.tiles
    row_blocks = tiles_m * tiling.tile[0] // tiling.rows
    for _, index in planned.reduced:
        node = graph.nodes[index]
        columns = int(tiling.tile[1] * graph.nodes[node.inputs[0]].shape.columns)
        if node["axis"] == "columns":
            counters += L * row_blocks
            parts += L * tiles_n * row_blocks * tiling.rows
        elif node["axis"] == "rows":
            counters += L * tiles_n
            parts += L * row_blocks * tiles_n * columns
        else:
            counters += L if node["axis"] == "matrix" else 1
            parts += L * tiles_m * tiles_n * tiling.groups
    return counters, parts


def reductions_fit(
    counters: int, parts: int, room: int = COUNTERS, most: int = MOST_PARTS
) -> Status:
    """Whether a workspace has room for what reductions count and leave; most: parts."""
    if counters > room:
        return Status.fail(
            f"the epilogue's reductions take {counters} counters of {room}",
            rule="a workspace has room for the counters of reductions",
        )
    if parts > most:
        return Status.fail(
            f"the epilogue's reductions leave {parts} parts of {most}",
            rule="a workspace has room for the parts of reductions",
        )
    return Status.success()


def halves_fit(graph: Graph, N: int) -> bool | Miss:
    """Whether halves of columns can be dealt out to tiles."""
    planned = plan(graph)
    for columns in () if isinstance(planned, str) else planned.halves:
        if N * columns % (2 * HALF):
            return Miss(f"{N * columns} columns", f"would match with a multiple of {2 * HALF}")
    return True


def in_halves(epilogue: EpilogueArguments) -> bool:
    """Whether columns of the product are computed in turns, some of the left half, some of the
    right one."""
    planned = plan(epilogue.graph)
    return not isinstance(planned, str) and 1 in planned.halves


def row_pairs(graph: Graph | None) -> int | str | None:
    """As `Plan.row_pairs` says; None without an epilogue."""
    planned = plan(graph) if graph is not None else None
    return planned.row_pairs if isinstance(planned, Plan) else None


def halves_fit_shares(graph: Graph, columns: int) -> bool | Miss:
    """Whether blocks that load so many columns of B each for all of a cluster cut pairs of 32
    columns nowhere but in the middle."""
    planned, pair = plan(graph), 2 * HALF
    if isinstance(planned, str) or 1 not in planned.halves or pair % columns == 0:
        return True
    return columns % pair == 0 or Miss(f"each loads {columns} columns")


def heads_of(graph: Any, columns: int) -> int | None:
    """Columns of heads that are dealt out to tiles of so many columns 32 of each half in turns, as
    those do not hold whole heads; None: they do, or there are none."""
    planned = plan(graph) if isinstance(graph, Graph) else None
    if not isinstance(planned, Plan) or planned.heads is None or columns % (2 * HALF):
        return None
    return planned.heads if columns % planned.bundle else None


def spans_rows(graph: Graph, N: int, columns: int) -> bool | Miss:
    """Whether tiles of so many columns hold whole rows, if anything is computed from those."""
    planned = plan(graph)
    if isinstance(planned, str) or not planned.spans_row or columns >= N:
        return True
    return Miss(
        f"N is {N}, and {columns} columns are together",
        f"would match with N of {columns} or less; or let a second kernel do what needs the row, "
        f"or reduce blocks of columns, as gemm_quantize does with mode='mx'",
        limit=columns,
    )


def _reductions_are_flat(args: Any) -> bool | Miss:
    kept = args.epilogue.kept if args.epilogue is not None else ()
    names = [name for name in kept if name not in full_outputs(args.epilogue)]
    if not names:
        return True
    operand = args.epilogue.outputs[names[0]]
    shown = f"{names[0]} has shape {operand.shape}"
    return Miss(shown, f"would match with {names[0]}.view(...) without them")


#: Of every family that computes epilogues.
flat_reductions = rule("a reduction has no modes of extent 1 in place of those that it has lost")(
    _reductions_are_flat
)


def _operands_are_signed(args: Any) -> bool | Miss:
    if args.epilogue is None:
        return True
    leaves = args.epilogue.graph.leaves
    for name, operand in args.epilogue.inputs.items():
        element = operand.dtype
        if element.kind == "uint" and (leaves[name]["type"] == "real" or element.bits < 64):
            return Miss(f"{name} is {element}", f"would match with {name} of a signed type")
    return True


#: Compiled code knows the width of integers, and takes them for signed ones; of 64 bits that are a
#: state, all are the same.
signed_operands = rule("an epilogue reads no unsigned integers but 64 bits of a state")(
    _operands_are_signed
)


@rule("the epilogue is one that kernels compute as they write their tiles")
def known_epilogue(args: Any) -> bool | Miss:
    planned = plan(args.epilogue.graph) if args.epilogue is not None else None
    return Miss(planned) if isinstance(planned, str) else True


@rule("halves of columns are dealt out to tiles 32 at a time")
def whole_halves(args: Any) -> bool | Miss:
    return args.epilogue is None or halves_fit(args.epilogue.graph, args.N)


def fits_tile(
    graph: Graph,
    columns: int,
    swapped: bool = False,
    buffered: int | None = None,
    by_heads: bool = False,
) -> bool | Miss:
    """Whether so many columns together will do, and the transposed product if it is swapped.

    Args:
        buffered: Columns of a bundle that can be reduced over rows at once; None: any.
        by_heads: Whether a tile may have a part of a head, see `heads_of`.
    """
    planned = plan(graph)
    if isinstance(planned, str):
        return False
    if swapped and not planned.alone and planned.row_pairs is None:
        return Miss(
            "it looks at other columns, which are rows of the transposed product",
            "would match with pairs that are 8, a multiple of 32 or half of the columns apart",
        )
    bundle = _bundle(planned, columns, swapped)
    if columns % bundle and not (by_heads and heads_of(graph, columns)):
        return Miss(f"they are {bundle}, and there are {columns}")
    for _, index in planned.reduced:
        node = graph.nodes[index]
        reduced = bundle * graph.nodes[node.inputs[0]].shape.columns
        if buffered is not None and node["axis"] == "rows" and reduced > buffered:
            return Miss(f"they are {bundle}, too many to be reduced")
    return True


def _bundle(planned: Plan, columns: int, swapped: bool) -> int:
    """Columns of a tile that are handed out at once."""
    if swapped:
        return gcd(SUBTILE, columns)
    return columns if planned.spans_row else lcm(planned.bundle, gcd(SUBTILE, columns))


def fits_subtile(
    epilogue: EpilogueArguments, out: Operand, columns: int, swapped: bool
) -> bool | Miss:
    """Whether in as many bytes as out has in a buffer, a matrix beside it has columns enough."""
    planned = plan(epilogue.graph)
    if isinstance(planned, str):
        return False
    bundle, shape = _bundle(planned, columns, swapped), epilogue.graph.output_shape("D")
    most = bundle if swapped else int(bundle * shape.columns)
    row = min(gcd(SUBTILE, columns), most) * out.dtype.itemsize
    for name, operand in full_outputs(epilogue).items():
        found = row // operand.dtype.itemsize
        if found < QUAD:
            return Miss(f"{name} has {found}")
    return True


def whole_pieces(operand: Operand, piece: int = TMA_PIECE) -> bool:
    """Whether its rows are multiples of what is moved at once, so that nothing else is hit."""
    extent = operand.shape[operand.unit_mode] if operand.unit_mode is not None else 1
    return extent * operand.dtype.itemsize % piece == 0


def operands_fit(epilogue: EpilogueArguments, alignment: int, piece: int = 1) -> bool | Miss:
    """Whether every matrix that is written has a mode of stride 1, and all that has columns side
    by side is aligned.

    Args:
        alignment: In bytes, of addresses, strides and rows that are read; 1: none.
        piece: Bytes that rows that are written are multiples of.
    """
    full = full_outputs(epilogue)
    for name, operand in full.items():
        if operand.unit_mode is None:
            return Miss(f"{name} has strides {operand.stride}", "would match with one of 1")
    if alignment == 1:
        return True
    leaves = epilogue.graph.leaves
    read = {
        name: operand
        for name, operand in epilogue.inputs.items()
        if operand.unit_mode == -1 and (leaves[name].shape.columns or leaves[name].op == "table")
    }
    for operands, multiple in ((full, piece), (read, alignment)):
        for name, operand in operands.items():
            if operand.alignment % alignment or not whole_pieces(operand, multiple):
                return Miss(f"{name} has shape {operand.shape} and strides {operand.stride}")
    return True


def types_fit(epilogue: EpilogueArguments, matrices: Collection[str]) -> bool | Miss:
    """Whether matrices have one of these types, and what else is written a signed one of 8 to 32
    bits: compiled code takes integers for signed ones."""
    full = full_outputs(epilogue)
    for name, operand in epilogue.outputs.items():
        element = operand.dtype
        if name in full and element.name not in matrices:
            return Miss(f"{name} is {element}")
        if element.kind == "uint":
            return Miss(f"{name} is {element}", f"would match with {name} of a signed type")
        if element.kind not in ("float", "int") or not 8 <= element.bits <= 32:
            return Miss(f"{name} is {element}")
    return True

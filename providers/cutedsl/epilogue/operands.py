"""Operands of an epilogue: what kernels take of them, and when they fit."""

from __future__ import annotations

from math import gcd, lcm
from typing import Any

from kernel_api.arguments import EpilogueArguments
from kernel_api.epilogue import Graph
from kernel_api.operands import Operand
from kernel_api.providers.cutedsl.epilogue.plan import HALF, Plan, plan
from kernel_api.space import Miss

#: Columns that a kernel writes at once, and so the narrowest bundle.
_WIDTH = 32

#: Bytes that TMA writes at once.
TMA_PIECE = 16

#: That are reduced together.
_ROWS = 64

#: Columns of the widest bundle that is reduced over rows.
_WIDEST_REDUCED = 128


def epilogue_values(epilogue: EpilogueArguments) -> dict[str, Any]:
    """What a kernel takes, by name: what is read, in the order of the graph's leaves; then the
    outputs beside out, first those with rows and columns."""
    values = {
        name: epilogue.scalars[name] if name in epilogue.scalars else epilogue.inputs[name].tensor
        for name in epilogue.graph.leaves
    }
    return {**values, **{name: epilogue.outputs[name].tensor for name in written(epilogue.graph)}}


def written(graph: Graph) -> tuple[str, ...]:
    """Outputs beside out: first those with rows and columns, then those that are reduced."""
    planned = plan(graph)
    assert isinstance(planned, Plan), planned
    return tuple(name for name, _ in (*planned.full[1:], *planned.reduced))


def full_outputs(epilogue: EpilogueArguments) -> dict[str, Operand]:
    """Outputs beside out that have rows and columns."""
    planned = plan(epilogue.graph)
    if isinstance(planned, str):
        return {}
    return {name: epilogue.outputs[name] for name, _ in planned.full[1:]}


def reduction_sizes(
    graph: Graph, tile: tuple[int, int], groups: int, tiles: tuple[int, int], L: int
) -> tuple[int, int]:
    """(counters, parts) in a workspace.

    Args:
        tile: Rows and columns.
        groups: That share a tile.
        tiles: Along M and N, whole clusters of them.
    """
    planned = plan(graph)
    assert isinstance(planned, Plan), planned
    counters = parts = 0
    row_blocks = tiles[0] * tile[0] // _ROWS
    for _, index in planned.reduced:
        node = graph.nodes[index]
        columns = int(tile[1] * graph.nodes[node.inputs[0]].shape.columns)
        if node["axis"] == "columns":
            counters += L * row_blocks
            parts += L * tiles[1] * row_blocks * _ROWS
        elif node["axis"] == "rows":
            counters += L * tiles[1]
            parts += L * row_blocks * tiles[1] * columns
        else:
            counters += L if node["axis"] == "matrix" else 1
            parts += L * tiles[0] * tiles[1] * groups
    return counters, parts


def halves_fit(graph: Graph, N: int) -> bool | Miss:
    """Whether halves of columns can be dealt out to tiles."""
    planned = plan(graph)
    for columns in () if isinstance(planned, str) else planned.halves:
        if N * columns % (2 * HALF):
            return Miss(f"{N * columns} columns", f"would match with a multiple of {2 * HALF}")
    return True


def fits_tile(graph: Graph, tile_n: int, swapped: bool) -> bool | Miss:
    """Whether tiles of ``tile_n`` columns will do, and the transposed product if it is swapped."""
    planned = plan(graph)
    if isinstance(planned, str):
        return False
    if swapped and not planned.alone:
        return Miss("it looks at other columns, which are rows of the transposed product")
    bundle = lcm(planned.bundle, gcd(_WIDTH, tile_n))
    if tile_n % bundle:
        return Miss(f"they are {bundle}, the tile has {tile_n}")
    if planned.reduced and bundle > _WIDEST_REDUCED:
        return Miss(f"they are {bundle}, too many to be reduced")
    return True


def whole_pieces(operand: Operand) -> bool:
    """Whether its rows are multiples of what TMA writes at once, so that nothing else is hit."""
    extent = operand.shape[operand.unit_mode] if operand.unit_mode is not None else 1
    return extent * operand.dtype.itemsize % TMA_PIECE == 0


def outputs_fit(epilogue: EpilogueArguments, alignment: int) -> bool | Miss:
    """Whether every output has a mode of stride 1 and the alignment in bytes."""
    for name, operand in full_outputs(epilogue).items():
        if operand.unit_mode is None:
            return Miss(f"{name} has strides {operand.stride}", "would match with one of 1")
        if alignment < TMA_PIECE:
            continue
        if operand.alignment % TMA_PIECE or not whole_pieces(operand):
            return Miss(f"{name} has shape {operand.shape} and strides {operand.stride}")
    return True

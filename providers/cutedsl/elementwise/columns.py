"""How the columns of an epilogue lie on threads that read a matrix from memory.

Epilogues are planned for quads of threads of which each has 2 columns in every 8. What a thread
reads of several such groups is side by side in memory if groups of columns change places, which
an epilogue does not see as long as it asks for columns in whole blocks of them.
"""

from __future__ import annotations

from functools import lru_cache
from math import lcm
from typing import NamedTuple

from kernel_api.epilogue import Graph, Node
from kernel_api.providers.cutedsl.epilogue.plan import LANES, PAIR, QUAD, Plan, block_columns, plan

#: Columns of a quad at a time, at least.
WIDTH = 32

#: Groups of columns whose columns of a thread become neighbours, most first.
_MERGED = (4, 2)

#: Operations of which lanes exchange something that depends on which columns they have.
_BETWEEN_LANES = ("hadamard", "uniform")


class Bundles(NamedTuple):
    """What an epilogue asks of the columns of a quad.

    Attributes:
        columns: Together; a multiple.
        spans_row: Whether they are all that the matrix has.
    """

    columns: int = WIDTH
    spans_row: bool = False

    def of_tile(self, columns: int) -> int:
        """Of a quad, in a tile with so many."""
        return columns if self.spans_row else self.columns


def bundles(graph: Graph | None) -> Bundles:
    """Of an epilogue, or of none."""
    planned = plan(graph) if graph is not None else None
    if not isinstance(planned, Plan):
        return Bundles()
    return Bundles(lcm(planned.bundle, WIDTH), planned.spans_row)


@lru_cache(maxsize=512)
def merged_groups(graph: Graph | None, pair_bytes: int, vector_bytes: int) -> int:
    """Groups of columns whose columns of a thread become neighbours.

    Args:
        pair_bytes: Of two neighbours, of the widest type that is moved.
        vector_bytes: Of what is moved at once.
    """
    found = (m for m in _MERGED if m * pair_bytes <= vector_bytes and _may_merge(graph, m))
    return next(found, 1)


def _may_merge(graph: Graph | None, merged: int) -> bool:
    planned = plan(graph) if graph is not None else None
    if graph is None or not isinstance(planned, Plan):
        return True
    return all(
        _is_whole(graph, planned, index, merged) and _keeps(graph, planned, index, merged)
        for index in range(len(graph.nodes))
    )


def _block(planned: Plan, index: int, merged: int) -> int:
    """Columns of a node within which they change places."""
    return LANES * merged * (planned.lanes[index] or PAIR)


def _is_whole(graph: Graph, planned: Plan, index: int, merged: int) -> bool:
    """Whether a bundle has whole blocks of a node."""
    columns = bundles(graph).columns * graph.nodes[index].shape.columns
    return index in planned.blocks or columns % _block(planned, index, merged) == 0


def _keeps(graph: Graph, planned: Plan, index: int, merged: int) -> bool:
    """Whether a node asks for columns in whole blocks."""
    node = graph.nodes[index]
    if node.op in _BETWEEN_LANES:
        return False
    if node.op in ("split", "interleave"):
        return node["granularity"] == 1 or block_columns(node) % _block(planned, index, merged) == 0
    if node.op == "repeat" and node.inputs[0] in planned.blocks:
        return int(node["times"]) % _block(planned, index, merged) == 0
    if node.op == "rotate":
        return _keeps_rotation(node, merged)
    if node.op == "reduce" and node["axis"] == "block":
        return int(node["block"]) % _block(planned, node.inputs[0], merged) == 0
    return True


def _keeps_rotation(node: Node, merged: int) -> bool:
    apart = int(node["width"]) // 2 if node["style"] == "half" else int(node["width"])
    places = (int(node["head_dim"]), int(node["start"]), apart)
    return all(place % (QUAD * merged) == 0 for place in places)

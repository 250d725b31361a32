"""Which epilogues a kernel can compute as it writes its tiles, and how wide a view they need.

Tensor cores leave every 8 columns of a row with the four threads of a quad, two neighbours each.
What an element needs of other columns is in the same thread if those are a multiple of 8 away, or
its neighbour.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from math import lcm

from kernel_api.epilogue.graph import HADAMARD_BLOCK, Graph, Node
from kernel_api.epilogue.shape import Shape

PAIR = 2  # neighbouring columns of a thread
QUAD = 8  # columns of a quad
HALF = 32  # columns that halves take turns in, in a tile

#: Operations that rows and columns mean different things to.
_PLACED = ("split", "interleave", "rotate", "hadamard", "uniform", "reduce")

#: Types that a cast, or an output, may have.
_FLOATS = ("float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")


@dataclass(frozen=True)
class Plan:
    """How a graph is computed.

    Attributes:
        lanes: Per node, columns from those of a thread to those of the next one in its quad.
        bundle: Columns of accumulators that an element's inputs may lie in.
        full: Outputs that have rows and columns, D first: name and node.
        reduced: Outputs that are reduced: name and node.
        halves: Columns, in units of N, of matrices whose halves are looked at together.
        alone: Whether every element stands alone, so that the transposed product serves as well.
    """

    lanes: tuple[int, ...]
    bundle: int
    full: tuple[tuple[str, int], ...]
    reduced: tuple[tuple[str, int], ...]
    halves: frozenset[Fraction]
    alone: bool


@lru_cache(maxsize=256)
def plan(graph: Graph) -> Plan | str:
    """The plan, or the reason why there is none."""
    return next(_refusals(graph), None) or _plan(graph)


def _plan(graph: Graph) -> Plan | str:
    lanes: list[int] = []
    for node in graph.nodes:
        found = _lane_columns(node, [lanes[i] for i in node.inputs if graph.nodes[i].shape.columns])
        if found is None:
            return f"{node.op} meets columns that lie with other threads"
        lanes.append(found)
    spans = [_span(graph, node) for node in graph.nodes]
    alone = all(node.op not in _PLACED for node in graph.nodes)
    reduced = tuple(o for o in graph.outputs if graph.nodes[o[1]].op == "reduce")
    full = tuple(o for o in graph.outputs if o not in reduced)
    halves = frozenset(
        _paired(graph, node).columns for node in graph.nodes if _granularity(node) == "halves"
    )
    if any(_mixes_orders(graph, node, halves) for node in graph.nodes):
        return "pairs of halves beside something else that looks at columns of the same matrix"
    return Plan(tuple(lanes), lcm(*spans), full, reduced, halves, alone)


def _refusals(graph: Graph) -> Iterator[str]:
    for name, index in graph.outputs:
        node = graph.nodes[index]
        if node.op != "reduce" and not (node.shape.rows and node.shape.columns):
            yield f"{name} is {node.shape}, and neither a matrix nor a reduction of one"
        if node.is_boolean:
            yield f"{name} is bool; numbers are written"
    for node in graph.nodes:
        if node.op == "cast" and node["to"] not in _FLOATS:
            yield f"a cast to {node['to']}; casts are to {', '.join(_FLOATS)}"
        granularity = _granularity(node)
        if granularity not in (None, "halves", 1) and int(granularity) % QUAD:
            yield f"pairs of {granularity} columns; 1 and multiples of {QUAD} are with one thread"
        if node.op == "rotate":
            yield from _refused_rotation(node)
        if any(graph.nodes[i].op == "reduce" for i in node.inputs):
            yield f"{node.op} of a {graph.nodes[node.inputs[0]]['kind']}, known when all tiles are"
        if node.op == "repeat" or (node.op == "reduce" and node["axis"] == "block"):
            yield f"{node.op} of blocks of columns"
        elif node.op == "reduce" and not _reducible(graph.nodes[node.inputs[0]].shape):
            yield f"a {node['kind']} of {graph.nodes[node.inputs[0]].shape}, which is no matrix"


def _reducible(shape: Shape) -> bool:
    return shape.rows and shape.columns > 0


def _granularity(node: Node) -> int | str | None:
    if node.op not in ("split", "interleave"):
        return None
    granularity: int | str = node["granularity"]
    return granularity


def block_columns(node: Node) -> int:
    """Columns of one of a pair's blocks; halves are dealt out to tiles in blocks."""
    return HALF if node["granularity"] == "halves" else int(node["granularity"])


def _paired(graph: Graph, node: Node) -> Shape:
    """Shape of the matrix that holds both of a pair."""
    return graph.nodes[node.inputs[0]].shape if node.op == "split" else node.shape


def _mixes_orders(graph: Graph, node: Node, halves: frozenset[Fraction]) -> bool:
    """Whether a node takes columns of such a matrix for what they are not."""
    if node.op in ("split", "interleave"):
        return node["granularity"] != "halves" and _paired(graph, node).columns in halves
    if node.op == "reduce":
        return node["axis"] == "rows" and graph.nodes[node.inputs[0]].shape.columns in halves
    return node.op in ("rotate", "hadamard", "uniform") and node.shape.columns in halves


def _refused_rotation(node: Node) -> Iterator[str]:
    start, width = int(node["start"]), int(node["width"])
    apart = width // 2 if node["style"] == "half" else width
    if start % QUAD or apart % QUAD:
        yield (
            f"a rotation of {width} columns from {start}; a pair is with one thread if they are "
            f"multiples of {QUAD}"
        )


def _lane_columns(node: Node, inputs: list[int]) -> int | None:
    """Of a node, from those of its inputs with columns; 0 if any will do."""
    known = {lane for lane in inputs if lane}
    if node.op == "reduce":
        return (known or {PAIR}).pop()
    if node.op in ("accumulator", "uniform"):
        return PAIR
    if len(known) > 1:
        return None
    lane = known.pop() if known else 0
    if node.op in ("rotate", "hadamard"):
        return lane if lane in (0, PAIR) else None
    if lane and node.op in ("split", "interleave"):
        if node["granularity"] == 1:
            return lane // 2 if node.op == "split" else lane * 2
        return None if block_columns(node) % (4 * lane) else lane
    return lane


def _span(graph: Graph, node: Node) -> int:
    """Columns of accumulators that hold a whole block of what the node looks at."""
    if node.op == "split":
        return _accumulator_columns(2 * block_columns(node), graph.nodes[node.inputs[0]].shape)
    if node.op == "interleave":
        return _accumulator_columns(2 * block_columns(node), node.shape)
    if node.op == "rotate":
        return _accumulator_columns(int(node["head_dim"]), node.shape)
    if node.op == "hadamard":
        return _accumulator_columns(HADAMARD_BLOCK, node.shape)
    if node.op == "reduce":
        return _accumulator_columns(1, graph.nodes[node.inputs[0]].shape)
    return _accumulator_columns(1, node.shape)


def _accumulator_columns(columns: int, shape: Shape) -> int:
    return (Fraction(columns) / (shape.columns or 1)).numerator


def kind_of(shape: Shape) -> str:
    """Modes of an operand, as kernels name them."""
    letters = (("l", shape.batch), ("m", shape.rows), ("n", shape.columns))
    return "".join(letter for letter, there in letters if there)

"""Which epilogues a kernel can compute as it writes its tiles, and how wide a view they need.

Tensor cores leave every 8 columns of a row with the four threads of a quad, two neighbours each.
What an element needs of other columns is in the same thread if those are a multiple of 8 away, or
its neighbour. A value per block of columns, or per row of a tile that spans the matrix, is reduced
within the quad; all of its threads have it.
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
LANES = 4  # threads of a quad
QUAD = PAIR * LANES  # columns of a quad
HALF = 32  # columns that halves take turns in, in a tile

#: Operations that rows and columns mean different things to.
_PLACED = ("split", "interleave", "repeat", "rotate", "hadamard", "uniform", "reduce")
#: Of those, the ones that deal with columns one by one.
_BY_COLUMN = ("split", "interleave", "rotate", "hadamard", "uniform")
#: Of a reduction, that everything goes into alike.
_WHOLE = ("matrix", "all")


@dataclass(frozen=True)
class Plan:
    """How a graph is computed.

    Attributes:
        lanes: Per node, columns from those of a thread to those of the next one in its quad; of
            what all threads of a quad have, those of what it was reduced from.
        blocks: Nodes with one value per block of columns.
        bundle: Columns of accumulators that an element's inputs may lie in.
        full: Outputs that have rows and columns, D first: name and node.
        per_block: Outputs that have one value per row, or per row and block of columns.
        reduced: Outputs that are reduced: name and node.
        halves: Columns, in units of N, of matrices whose halves are looked at together.
        heads: Columns of heads whose halves are looked at together, if nothing else is: tiles
            hold 32 columns of each half in turns, or whole heads. None: there are none.
        alone: Whether every element stands alone, so that the transposed product serves as well.
        row_pairs: The granularity of pairs that the transposed product serves as well, as pairs of
            rows that are both with one thread; None: there are none, or others, or more.
        spans_row: Whether elements depend on whole rows, which a tile has to hold then.
    """

    lanes: tuple[int, ...]
    blocks: frozenset[int]
    bundle: int
    full: tuple[tuple[str, int], ...]
    per_block: tuple[tuple[str, int], ...]
    reduced: tuple[tuple[str, int], ...]
    halves: frozenset[Fraction]
    heads: int | None
    alone: bool
    row_pairs: int | str | None
    spans_row: bool

    @property
    def names(self) -> tuple[str, ...]:
        """Of the outputs, in the order in which kernels take them; D is the first."""
        return tuple(name for name, _ in (*self.full, *self.per_block, *self.reduced))


@lru_cache(maxsize=256)
def plan(graph: Graph) -> Plan | str:
    """The plan, or the reason why there is none."""
    blocks = _blocks(graph)
    return next(_refusals(graph, blocks), None) or _plan(graph, blocks)


def _plan(graph: Graph, blocks: frozenset[int]) -> Plan | str:
    lanes: list[int] = []
    for node in graph.nodes:
        found = _lane_columns(graph, node, blocks, lanes)
        if found is None:
            return f"{node.op} meets columns that lie with other threads"
        lanes.append(found)
    halves = frozenset(
        _paired(graph, node).columns for node in graph.nodes if _granularity(node) == "halves"
    )
    if any(_mixes_orders(graph, node, halves) for node in graph.nodes):
        return "pairs of halves beside something else that looks at columns of the same matrix"
    reduced = tuple(o for o in graph.outputs if _is_reduction(graph.nodes[o[1]]))
    others = [o for o in graph.outputs if o not in reduced]
    per_block = tuple(o for o in others if o[1] in blocks or not graph.nodes[o[1]].shape.columns)
    return Plan(
        lanes=tuple(lanes),
        blocks=blocks,
        bundle=lcm(*(_span(graph, node) for node in graph.nodes)),
        full=tuple(o for o in others if o not in per_block),
        per_block=per_block,
        reduced=reduced,
        halves=halves,
        heads=_heads(graph),
        alone=all(node.op not in _PLACED for node in graph.nodes),
        row_pairs=_row_pairs(graph),
        spans_row=any(_is_reduction(graph.nodes[i]) for node in graph.nodes for i in node.inputs),
    )


# What there is no plan for ---------------------------------------------------------------


def _refusals(graph: Graph, blocks: frozenset[int]) -> Iterator[str]:
    for name, index in graph.outputs:
        yield from _refused_output(name, graph.nodes[index], index in blocks)
    for node in graph.nodes:
        granularity = _granularity(node)
        if granularity not in (None, "halves", 1) and int(granularity) % QUAD:
            yield f"pairs of {granularity} columns; 1 and multiples of {QUAD} are with one thread"
        if node.op == "rotate":
            yield from _refused_rotation(node)
        if node.op == "reduce":
            yield from _refused_reduction(node, graph.nodes[node.inputs[0]], blocks)
        if node.op in _BY_COLUMN and any(i in blocks for i in node.inputs):
            yield f"{node.op} of one value per block of columns"
        for i in node.inputs:
            given = graph.nodes[i]
            if _is_reduction(given) and given["axis"] != "columns":
                yield f"{node.op} of a {given['kind']}, known when all tiles are"
            if node.op == "reduce" and i in blocks:
                yield f"a {node['kind']} of one value per block of columns"


def _refused_output(name: str, node: Node, per_block: bool) -> Iterator[str]:
    if node.is_boolean:
        yield f"{name} is bool; numbers are written"
    if name == "D" and per_block:
        yield "D is one value per block of columns; return that behind D"
    if not _is_reduction(node) and not node.shape.rows:
        yield f"{name} is {node.shape}, and neither a matrix nor a reduction of one"


def _refused_rotation(node: Node) -> Iterator[str]:
    start, width = int(node["start"]), int(node["width"])
    apart = width // 2 if node["style"] == "half" else width
    if start % QUAD or apart % QUAD:
        yield (
            f"a rotation of {width} columns from {start}; a pair is with one thread if they are "
            f"multiples of {QUAD}"
        )


def _refused_reduction(node: Node, given: Node, blocks: frozenset[int]) -> Iterator[str]:
    if not (given.shape.rows and given.shape.columns):
        yield f"a {node['kind']} of {given.shape}, which is no matrix"
    elif not _is_reduction(node) and int(node["block"]) % QUAD:
        yield f"blocks of {node['block']} columns; multiples of {QUAD} are with one quad"


def _is_reduction(node: Node) -> bool:
    """To one value per row, column or matrix."""
    return node.op == "reduce" and node["axis"] != "block"


# Columns ---------------------------------------------------------------------------------


def _blocks(graph: Graph) -> frozenset[int]:
    """Nodes with one value per block of columns: such reductions, and what is made of them."""
    found: set[int] = set()
    for index, node in enumerate(graph.nodes):
        by_block = node.op == "reduce" and node["axis"] == "block"
        made_of_them = node.op not in _PLACED and any(i in found for i in node.inputs)
        if by_block or made_of_them:
            found.add(index)
    return frozenset(found)


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
        by_block = node["axis"] == "block"
        return by_block and graph.nodes[node.inputs[0]].shape.columns in halves
    return node.op in ("repeat", "rotate", "hadamard", "uniform") and node.shape.columns in halves


def _heads(graph: Graph) -> int | None:
    """As `Plan.heads` says."""
    sums = [node for node in graph.nodes if node.op == "reduce"]
    placed = [node for node in graph.nodes if node.op in _PLACED and node not in sums]
    if not placed or any(node.op != "rotate" or node["style"] != "half" for node in placed):
        return None
    heads = {int(node["head_dim"]) for node in placed}
    rotated = {int(node["width"]) for node in placed}
    if len(heads) > 1 or rotated != heads or any(node["axis"] not in _WHOLE for node in sums):
        return None
    return None if heads == {HALF * 2} or max(heads) % (2 * HALF) else max(heads)


def _row_pairs(graph: Graph) -> int | str | None:
    """As `Plan.row_pairs` says."""
    sums = [node for node in graph.nodes if node.op == "reduce"]
    placed = [node for node in graph.nodes if node.op in _PLACED and node not in sums]
    granularities = {_granularity(node) for node in placed}
    if len(granularities) != 1 or any(node["axis"] not in _WHOLE for node in sums):
        return None
    (granularity,) = granularities
    if granularity is None or any(_paired(graph, node).columns != 1 for node in placed):
        return None
    if granularity not in (QUAD, "halves") and int(granularity) % HALF:
        return None
    nodes = [graph.nodes[index] for _, index in graph.outputs]
    written = [node.shape.columns for node in nodes if not _is_reduction(node)]
    if not all(written) or (granularity == QUAD and 1 in written):
        return None  # of a pair of 8 columns both lie in one swizzle of what is written
    return granularity


def _lane_columns(graph: Graph, node: Node, blocks: frozenset[int], lanes: list[int]) -> int | None:
    """Of a node, from those of its inputs with columns; 0 if any will do."""
    known = {lanes[i] for i in node.inputs if graph.nodes[i].shape.columns and lanes[i]}
    if node.op in ("accumulator", "uniform"):
        return PAIR
    if len(known) > 1:
        return None
    lane = known.pop() if known else 0
    if node.op == "reduce":
        return _of_reduction(node, lane or PAIR)
    if node.op == "repeat":
        times = int(node["times"])
        if node.inputs[0] not in blocks:
            return (lane or PAIR) * times
        return None if times % (LANES * lane) else lane
    if node.op in ("rotate", "hadamard"):
        return PAIR if lane in (0, PAIR) else None
    if node.op in ("split", "interleave"):
        return _of_pairs(node, lane)
    return lane


def _of_pairs(node: Node, lane: int) -> int | None:
    if node["granularity"] != 1:
        lane = lane or PAIR
        return None if block_columns(node) % (LANES * lane) else lane
    if node.op == "interleave":
        return 2 * lane or PAIR
    return None if lane % 2 else lane // 2


def _of_reduction(node: Node, lane: int) -> int | None:
    if _is_reduction(node):
        return lane
    return None if int(node["block"]) % (LANES * lane) else lane


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
    if node.op == "repeat":
        return _accumulator_columns(int(node["times"]), node.shape)
    if node.op == "reduce":
        block = 1 if _is_reduction(node) else int(node["block"])
        return _accumulator_columns(block, graph.nodes[node.inputs[0]].shape)
    return _accumulator_columns(1, node.shape)


def _accumulator_columns(columns: int, shape: Shape) -> int:
    return (Fraction(columns) / (shape.columns or 1)).numerator


def kind_of(shape: Shape) -> str:
    """Modes of an operand, as kernels name them."""
    letters = (("l", shape.batch), ("m", shape.rows), ("n", shape.columns))
    return "".join(letter for letter, there in letters if there)

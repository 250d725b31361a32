"""Scales of operands, as a part of what an epilogue computes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from fractions import Fraction

from kernel_api.epilogue.graph import Graph, Node
from kernel_api.epilogue.shape import Shape, broadcast
from kernel_api.epilogue.tracing import RESULT


def scaled(graph: Graph, kinds: Mapping[str, str]) -> Graph:
    """The graph of accumulators that are still to be multiplied with scales of A and B, whose D is
    in units of the scale of out.

    Args:
        kinds: By operand, which of the modes ``lmn`` its scale varies in. Scales become the first
            leaves, in this order; no operand of an epilogue has their names.
    """
    if not kinds:
        return graph
    nodes = [_leaf(name, kind) for name, kind in kinds.items()]
    leaves = {name: index for index, name in enumerate(kinds)}
    (accumulator,) = (n for n in graph.nodes if n.op == "accumulator")
    nodes.append(accumulator)
    product = len(nodes) - 1
    for name in kinds:
        if name != "out":
            product = _append(nodes, "mul", product, leaves[name])
    moved: list[int] = []
    for node in graph.nodes:
        if node.op == "accumulator":
            moved.append(product)
            continue
        nodes.append(replace(node, inputs=tuple(moved[i] for i in node.inputs)))
        moved.append(len(nodes) - 1)
    outputs = {name: moved[index] for name, index in graph.outputs}
    if "out" in leaves:
        nodes.append(Node("constant", attributes=(("value", (1.0).hex()),)))
        inverse = _append(nodes, "div", len(nodes) - 1, leaves["out"])
        outputs[RESULT] = _append(nodes, "mul", outputs[RESULT], inverse)
    return Graph(tuple(nodes), tuple(outputs.items()))


def _leaf(name: str, kind: str) -> Node:
    shape = Shape("l" in kind, "m" in kind, Fraction("n" in kind))
    return Node("operand", (), shape, (("name", f"scale of {name}"), ("type", "real")))


def _append(nodes: list[Node], op: str, first: int, second: int) -> int:
    shape = broadcast(nodes[first].shape, nodes[second].shape)
    assert shape is not None
    nodes.append(Node(op, (first, second), shape))
    return len(nodes) - 1

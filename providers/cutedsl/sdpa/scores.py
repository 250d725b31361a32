"""Graphs of scores and masks as functions that kernels trace, see :mod:`kernel_api._score`."""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Boolean, Float16, Float32, Int32

from kernel_api.dtypes import dtype
from kernel_api.epilogue.graph import Graph, Node
from kernel_api.implementations.common.attention.scores import Place, ScoreFunctions
from kernel_api.implementations.common.conversion import Conversions
from kernel_api.implementations.common.functions import functions_for

_Value = Any  # Float32 or Boolean
_INDICES = {"b": "batch", "h": "head", "q": "query", "kv": "key"}


def functions_of(args: Any) -> ScoreFunctions:
    """What the arguments' functions say, and the derivative of the score's."""
    mask, score = args.mask_graph, args.score_graph
    if score is None:
        visible = None if mask is None else _Function(mask).without_score
        return ScoreFunctions(visible=visible)
    return ScoreFunctions(
        score=_Function(score),
        slope=_Function(args.score.derivative),
        visible=None if mask is None else _Function(mask).without_score,
    )


class _Function:
    """A graph of one value per score."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._functions, _ = functions_for((Float16,), (Float16,))
        self._conversions = Conversions()

    def __call__(self, score: _Value, place: Place, operands: dict[str, Any]) -> _Value:
        values: list[_Value] = []
        for node in self._graph.nodes:
            inputs = [values[i] for i in node.inputs]
            values.append(self._value(node, inputs, score, place, operands))
        return values[self._graph.outputs[0][1]]

    def without_score(self, place: Place, operands: dict[str, Any]) -> _Value:
        return self(None, place, operands)

    def _value(
        self, node: Node, inputs: list[_Value], score: _Value, place: Place, operands: Any
    ) -> _Value:
        if node.op in self._functions:
            return self._functions[node.op](*inputs)
        if node.op == "score":
            return score
        if node.op == "index":
            return Float32(getattr(place, _INDICES[node["name"]]))
        if node.op == "constant":
            return Float32(float.fromhex(node["value"]))
        if node.op in ("floordiv", "remainder"):
            return _whole(node.op, inputs[0], node["divisor"])
        if node.op == "cast":
            return self._conversions.rounded(inputs[0], dtype(node["to"]).cutlass)
        assert node.op in ("operand", "scalar", "lookup"), node.op
        return _element(node, operands[node["name"]], inputs)


def _whole(op: str, value: _Value, divisor: int) -> _Value:
    """Rounded down, also of negative numbers."""
    number, by = Int32(value), Int32(divisor)
    remainder = (number % by + by) % by
    return Float32(remainder if op == "remainder" else (number - remainder) // by)


def _element(node: Node, operand: Any, indices: list[_Value]) -> _Value:
    """A number, or an element of a tensor; an index beyond an end is that end."""
    if node.op == "lookup":
        bounded = [
            cutlass.max(cutlass.min(Int32(index), Int32(extent) - 1), Int32(0))
            for index, extent in zip(indices, operand.shape, strict=True)
        ]
        operand = operand[tuple(bounded)]
    elif node.op == "operand":
        operand = operand[()]
    return Boolean(operand != 0) if node["type"] == "bool" else Float32(operand)

"""Graphs of scores and masks as functions that kernels trace, see :mod:`kernel_api._score`."""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Boolean, Float8E8M0FNU, Float16, Float32, Int32, Int64

from kernel_api._score import among_whole_numbers
from kernel_api.dtypes import DType, dtype
from kernel_api.epilogue.graph import Graph, Node
from kernel_api.implementations.common.attention.scores import Place, ScoreFunctions
from kernel_api.implementations.common.conversion import FLOAT8, Conversions, select
from kernel_api.implementations.common.functions import Functions, functions_for
from kernel_api.providers.cutedsl import compiler

_Value = Any  # Float32, Int32, Int64 or Boolean; of a constant int or float
_INDICES = {"b": "batch", "h": "head", "q": "query", "kv": "key"}
#: The first compute capability that converts 8-bit floats.
_CONVERTS_8_BITS = 89
_OF_8_BITS = (*FLOAT8, Float8E8M0FNU)
#: Whole numbers of 32 bits.
_MOST, _LEAST = 2**31 - 1, -(2**31)


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
        self._as_integers = among_whole_numbers(graph.nodes)
        self._functions, _ = functions_for((Float16,), (Float16,), graph.has_steps)
        self._conversions = Conversions(compiler.target_cc() >= _CONVERTS_8_BITS)

    def __call__(self, score: _Value, place: Place, operands: dict[str, Any]) -> _Value:
        values: list[_Value] = []
        for index, node in enumerate(self._graph.nodes):
            inputs = [values[i] for i in node.inputs]
            values.append(self._value(index, node, inputs, score, place, operands))
        return _real(values[self._graph.outputs[0][1]])

    def without_score(self, place: Place, operands: dict[str, Any]) -> _Value:
        return self(None, place, operands)

    def _value(
        self,
        index: int,
        node: Node,
        inputs: list[_Value],
        score: _Value,
        place: Place,
        operands: Any,
    ) -> _Value:
        if node.op == "score":
            return score
        if node.op == "index":
            return Int32(getattr(place, _INDICES[node["name"]]))
        if node.op == "constant":
            number = float.fromhex(node["value"])
            return int(number) if self._as_integers[index] else number
        if node.op in ("operand", "scalar", "lookup"):
            return self._element(node, operands[node["name"]], inputs)
        if node.op == "cast":
            return self._cast(inputs[0], dtype(node["to"]))
        if self._as_integers[index]:
            return _of_integers(node, self._functions, inputs)
        return self._functions[node.op](*map(_real, inputs))

    def _element(self, node: Node, operand: Any, indices: list[_Value]) -> _Value:
        """A number, or an element of a tensor; an index beyond an end is that end."""
        if node.op == "lookup":
            numbers = (_integer(index) for index in indices)
            bounded = [
                cutlass.max(cutlass.min(number, type(number)(extent) - 1), type(number)(0))
                for number, extent in zip(numbers, operand.shape, strict=True)
            ]
            operand = operand[tuple(bounded)]
        elif node.op == "operand":
            operand = operand[()]
        if node["type"] == "bool":
            return Boolean(operand != 0)
        if node["type"] == "integer":
            return _integer(operand)
        if type(operand) in _OF_8_BITS:
            return self._conversions.widened(operand)
        return Float32(operand)

    def _cast(self, value: _Value, to: DType) -> _Value:
        if not to.is_integer:
            return self._conversions.rounded(_real(value), to.cutlass)
        if isinstance(value, (float, Float32)):
            value = Int64(self._conversions.rounded(_real(value), to.cutlass))
        return _saturated(_integer(value), to)


def _real(value: _Value) -> _Value:
    """Beside numbers that are not whole."""
    return Float32(value) if isinstance(value, (int, float, Int32, Int64)) else value


def _integer(value: _Value) -> _Value:
    """A whole number of whatever type, in 32 bits if they hold all of that type."""
    if isinstance(value, (Int32, Int64)):
        return value
    if isinstance(value, Float32):
        return Int32(value)
    if isinstance(value, (int, float)):
        return Int32(int(value)) if _LEAST <= value <= _MOST else Int64(int(value))
    return Int32(value) if value.width < Int32.width else Int64(value)


def _saturated(value: _Value, to: DType) -> _Value:
    """Within the range of a type, and in 32 bits if they hold all of it."""
    least, most = (-(2 ** (to.bits - 1)), 2 ** (to.bits - 1) - 1)
    if to.kind == "uint":
        least, most = 0, 2**to.bits - 1
    wide = Int64(value)
    if least > -(2**63):
        wide = cutlass.max(cutlass.min(wide, Int64(most)), Int64(least))
    return Int32(wide) if least >= _LEAST and most <= _MOST else wide


def _of_integers(node: Node, functions: Functions, inputs: list[_Value]) -> _Value:
    if node.op in ("floordiv", "remainder"):
        inputs = [inputs[0], int(node["divisor"])]
    numbers = [one if isinstance(one, Boolean) else _integer(one) for one in inputs]
    if any(isinstance(one, Int64) for one in numbers):
        numbers = [Int64(one) if isinstance(one, Int32) else one for one in numbers]
    if node.op in ("floordiv", "remainder"):
        return _divided(node.op, *numbers)
    return {**functions, **_INTEGERS}[node.op](*numbers)


_INTEGERS: Functions = {
    "abs": lambda a: cutlass.max(a, -a),
    "floor": lambda a: a,
    "minimum": cutlass.min,
    "maximum": cutlass.max,
}


def _divided(op: str, number: _Value, by: _Value) -> _Value:
    """Rounded down, also of negative numbers; nothing on the way is larger than they are."""
    zero = type(number)(0)
    rest = number % by
    # Of the sign of the number, whichever the DSL's has.
    rest = select((number < zero) & (rest > zero), rest - by, rest)
    below = rest < zero
    if op == "remainder":
        return select(below, rest + by, rest)
    quotient = (number - rest) // by
    return select(below, quotient - type(number)(1), quotient)

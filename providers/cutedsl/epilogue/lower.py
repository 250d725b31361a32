"""An epilogue graph as code for the elements of one thread; traced with the kernel around it."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Boolean, Float32, Int32, Uint32, Uint64

from kernel_api.dtypes import dtype
from kernel_api.epilogue.graph import Graph, Node
from kernel_api.implementations.common.epilogue import (
    NUMBER,
    Epilogue,
    Full,
    Reduced,
    Thread,
)
from kernel_api.providers.cutedsl.epilogue.plan import PAIR, Plan, block_columns, kind_of

_Value = Any  # Float32 or Boolean


class GraphEpilogue(Epilogue):  # type: ignore[misc]
    """What a graph says.

    Args:
        plan: Of the graph.
        output_types: Of the outputs, first those with rows and columns: the narrower they are,
            the less of a function's precision they show.
    """

    def __init__(self, graph: Graph, plan: Plan, output_types: tuple[Any, ...]) -> None:
        self._graph = graph
        self._plan = plan
        self._names = tuple(graph.leaves)
        self.kinds = tuple(_kind(leaf) for leaf in graph.leaves.values())
        self.full = tuple(
            Full(graph.nodes[index].shape.columns, plan.lanes[index] or PAIR)
            for _, index in plan.full
        )
        self.reduced = tuple(self._reduced(index) for _, index in plan.reduced)
        self.bundle = plan.bundle
        self.halves = plan.halves
        self._functions = _functions(
            short=all(t.width <= 16 for t in output_types[: len(plan.full)]),
            shortest=all(t is BFloat16 or t.width <= 8 for t in output_types),
        )

    def transposed(self) -> GraphEpilogue:
        if not self._plan.alone:
            raise ValueError("the epilogue looks at rows and columns differently")
        swapped = object.__new__(GraphEpilogue)
        swapped.__dict__.update(self.__dict__)
        swap = str.maketrans("mn", "nm")
        swapped.kinds = tuple(k if k == NUMBER else k.translate(swap) for k in self.kinds)
        return swapped

    def element(self, output: int, thread: Thread, half: int, column: int) -> _Value:
        if output < len(self.full):
            index = self._plan.full[output][1]
            return self._value(index, thread, half, column, self.full[output].lane_columns)
        output -= len(self.full)
        node = self._graph.nodes[self._plan.reduced[output][1]]
        lane = self.reduced[output].lane_columns
        value = self._value(node.inputs[0], thread, half, column, lane)
        return cute.math.abs(value) if node["kind"] == "amax" else value

    def finished(self, output: int, value: _Value, extents: tuple[_Value, ...]) -> _Value:
        node = self._graph.nodes[self._plan.reduced[output][1]]
        if node["kind"] != "mean":
            return value
        M, N, L = extents
        columns = self.reduced[output].columns
        count = Float32(N) * Float32(float(columns))
        if node["axis"] != "columns":
            count = Float32(M) if node["axis"] == "rows" else count * Float32(M)
        if node["axis"] == "all":
            count = count * Float32(L)
        return value / count

    def _reduced(self, index: int) -> Reduced:
        node = self._graph.nodes[index]
        kind = {"amax": "max", "mean": "sum"}.get(node["kind"], node["kind"])
        columns = self._graph.nodes[node.inputs[0]].shape.columns
        return Reduced(kind, node["axis"], columns, self._plan.lanes[index])

    def _value(self, index: int, thread: Thread, half: int, column: int, lane: int) -> _Value:
        """Of a node, for one element; each is computed once per bundle."""
        key = (index, half, column, lane)
        if key not in thread.memory:
            node = self._graph.nodes[index]
            special = _SPECIAL.get(node.op)
            if special is not None:
                value = special(self, node, index, thread, half, column, lane)
            else:
                inputs = [self._value(i, thread, half, column, lane) for i in node.inputs]
                value = self._functions[node.op](*inputs)
            thread.memory[key] = value
        return thread.memory[key]

    # Leaves ------------------------------------------------------------------------------

    def _accumulator(self, node: Node, index: int, thread: Thread, *place: int) -> _Value:
        half, column, _ = place
        return thread.accumulator(half, column).to(Float32)

    def _constant(self, node: Node, *_: Any) -> _Value:
        return Float32(float.fromhex(node["value"]))

    def _operand(
        self, node: Node, index: int, thread: Thread, half: int, column: int, lane: int
    ) -> _Value:
        position = self._names.index(node["name"])
        value = thread.operand(position, half, column, lane, node.shape.columns or Fraction(1))
        if node["type"] == "real":
            return value.to(Float32)
        return value != type(value)(0) if node["type"] == "bool" else value

    # Of one element, with attributes -----------------------------------------------------

    def _cast(self, node: Node, index: int, thread: Thread, *place: int) -> _Value:
        value = self._value(node.inputs[0], thread, *place)
        value = Float32(value) if isinstance(value, Boolean) else value
        return _rounded(value, dtype(node["to"]).cutlass)

    # Of other columns --------------------------------------------------------------------

    def _split(
        self, node: Node, index: int, thread: Thread, half: int, column: int, lane: int
    ) -> _Value:
        part, granularity = int(node["part"]), block_columns(node)
        if granularity == 1:
            return self._value(node.inputs[0], thread, half, 2 * column + part, 2 * lane)
        block, rest = divmod(column, granularity)
        source = (2 * block + part) * granularity + rest
        return self._value(node.inputs[0], thread, half, source, lane)

    def _interleave(
        self, node: Node, index: int, thread: Thread, half: int, column: int, lane: int
    ) -> _Value:
        granularity = block_columns(node)
        block, rest = divmod(column, granularity)
        source, part = (block // 2) * granularity + rest, block % 2
        lane = lane // 2 if granularity == 1 else lane
        return self._value(node.inputs[part], thread, half, source, lane)

    def _rotate(
        self, node: Node, index: int, thread: Thread, half: int, column: int, lane: int
    ) -> _Value:
        x, cos, sin = node.inputs
        own = self._value(x, thread, half, column, lane)
        width, place = int(node["width"]), column % int(node["head_dim"]) - int(node["start"])
        if not 0 <= place < width:
            return own
        if node["style"] == "half":
            apart, pair, second = width // 2, place % (width // 2), place >= width // 2
            pair_lane = lane
        else:
            apart, pair, second = 1, place // 2, place % 2 == 1
            pair_lane = lane // 2
        other = self._value(x, thread, half, column - apart if second else column + apart, lane)
        angle = [
            thread.operand(
                self._names.index(self._graph.nodes[table]["name"]), half, pair, pair_lane, None
            ).to(Float32)
            for table in (cos, sin)
        ]
        return own * angle[0] + other * angle[1] if second else own * angle[0] - other * angle[1]

    def _hadamard(
        self, node: Node, index: int, thread: Thread, half: int, column: int, lane: int
    ) -> _Value:
        """Bits of a column: 0 in the thread, 1 and 2 in the quad, 3 in the thread again."""
        first = column // 16 * 16
        places = [first + high + low for high in (0, 8) for low in (0, 1)]
        values = [self._value(node.inputs[0], thread, half, place, lane) for place in places]
        if len(node.inputs) > 1:
            name = self._graph.nodes[node.inputs[1]]["name"]
            signs = [
                thread.operand(self._names.index(name), half, place - first, lane, None)
                for place in places
            ]
            values = [value * sign.to(Float32) for value, sign in zip(values, signs, strict=True)]
        a, b, c, d = values
        a, b, c, d = a + b, a - b, c + d, c - d
        values = [a + c, b + d, a - c, b - d]
        for bit in (1, 2):
            negative = thread.lane & bit
            others = [cute.arch.shuffle_sync_bfly(value, offset=bit) for value in values]
            values = [
                other + _select(negative != 0, -value, value)
                for value, other in zip(values, others, strict=True)
            ]
        for place, value in zip(places, values, strict=True):
            thread.memory[(index, half, place, lane)] = value
        return thread.memory[(index, half, column, lane)]

    def _uniform(
        self, node: Node, index: int, thread: Thread, half: int, column: int, lane: int
    ) -> _Value:
        """Philox4x32-10; a call gives the words of 4 columns, of which a thread has 2."""
        seed, offset = (self._value(i, thread, half, 0, lane) for i in node.inputs)
        n = thread.column_of(column - column % 2, lane)
        row = thread.batch * thread.extents[0] + thread.row_of(half)
        words = _philox(n // 4, row, Uint64(offset), Uint64(seed))
        upper = n % 4 >= 2
        for i in range(2):
            word = _select(upper, words[2 + i], words[i])
            value = Float32(Int32(word >> 8)) * Float32(2.0**-24)
            thread.memory[(index, half, column - column % 2 + i, lane)] = value
        return thread.memory[(index, half, column, lane)]


def _kind(leaf: Node) -> str:
    if leaf.op == "scalar":
        return str(NUMBER)
    return kind_of(leaf.shape) + ("n" if leaf.op == "table" else "")


_SPECIAL: dict[str, Callable[..., _Value]] = {
    "accumulator": GraphEpilogue._accumulator,
    "constant": GraphEpilogue._constant,
    "operand": GraphEpilogue._operand,
    "scalar": GraphEpilogue._operand,
    "cast": GraphEpilogue._cast,
    "split": GraphEpilogue._split,
    "interleave": GraphEpilogue._interleave,
    "rotate": GraphEpilogue._rotate,
    "hadamard": GraphEpilogue._hadamard,
    "uniform": GraphEpilogue._uniform,
}


def _functions(short: bool, shortest: bool) -> dict[str, Callable[..., _Value]]:
    """Of numbers. short: 16 bits are enough for all that comes of them; shortest: 8 are."""
    math = cute.math

    def exp(x: _Value) -> _Value:
        return math.exp(x, fastmath=short)

    def tanh(x: _Value) -> _Value:
        if shortest:
            return math.tanh(x, approx=True)
        return math.tanh(x) if not short else 1.0 - 2.0 * math.rcp(1.0 + exp(2.0 * x), approx=True)

    def sigmoid(x: _Value) -> _Value:
        if shortest:
            return 0.5 * tanh(0.5 * x) + 0.5
        below = 1.0 + exp(-x)
        return math.rcp(below, approx=True) if short else 1.0 / below

    return {
        "neg": lambda x: -x,
        "abs": math.abs,
        "exp": exp,
        "expm1": math.expm1,
        "log": lambda x: math.log(x, fastmath=short),
        "log1p": math.log1p,
        "sqrt": math.sqrt,
        "rsqrt": math.rsqrt,
        "tanh": tanh,
        "sigmoid": sigmoid,
        "erf": math.erf,
        "add": lambda a, b: a + b,
        "sub": lambda a, b: a - b,
        "mul": lambda a, b: a * b,
        "div": lambda a, b: a * math.rcp(b, approx=True) if short else a / b,
        "minimum": lambda a, b: cute.arch.fmin(a, b, nan=True),
        "maximum": lambda a, b: cute.arch.fmax(a, b, nan=True),
        "lt": lambda a, b: a < b,
        "le": lambda a, b: a <= b,
        "gt": lambda a, b: a > b,
        "ge": lambda a, b: a >= b,
        "eq": lambda a, b: a == b,
        "ne": lambda a, b: a != b,
        "and": lambda a, b: a & b,
        "or": lambda a, b: a | b,
        "not": lambda a: a == Boolean(False),
        "where": _select,
    }


def _select(condition: _Value, a: _Value, b: _Value) -> _Value:
    return type(a)(cutlass.select_(condition, a.ir_value(), b.ir_value()))


def _rounded(value: _Value, element_type: Any) -> _Value:
    """As a value of a narrower type, and back."""
    if element_type is Float32:
        return value
    one = cute.make_rmem_tensor(4, Float32)  # conversions to 8 bits come in vectors
    one.fill(0.0)
    one[0] = value
    return one.load().to(element_type).to(Float32)[0]


_PHILOX_FACTORS = (0xD2511F53, 0xCD9E8D57)
_PHILOX_KEYS = (0x9E3779B9, 0xBB67AE85)


def _philox(n: _Value, row: _Value, offset: _Value, seed: _Value) -> list[_Value]:
    """Ten rounds; Salmon et al., Parallel Random Numbers: As Easy as 1, 2, 3, 2011."""
    counter = [Uint32(n), Uint32(row), *_halves(offset)]
    key = _halves(seed)
    for _ in range(10):
        products = [
            Uint64(counter[i]) * Uint64(factor)
            for i, factor in zip((0, 2), _PHILOX_FACTORS, strict=True)
        ]
        (low0, high0), (low1, high1) = map(_halves, products)
        counter = [high1 ^ counter[1] ^ key[0], low1, high0 ^ counter[3] ^ key[1], low0]
        key = [k + Uint32(step) for k, step in zip(key, _PHILOX_KEYS, strict=True)]
    return counter


def _halves(value: _Value) -> list[_Value]:
    """Of 64 bits, the lower one first."""
    return [Uint32(value), Uint32(value >> Uint64(32))]

"""An epilogue graph as code for the elements of one thread; traced with the kernel around it."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any, NamedTuple

import cutlass.cute as cute
from cutlass import Boolean, Float32

from kernel_api.dtypes import dtype
from kernel_api.epilogue.graph import HADAMARD_BLOCK, Graph, Node, rotated_columns
from kernel_api.implementations.common.conversion import (
    Conversions,
    reciprocal_of_power,
    select,
)
from kernel_api.implementations.common.epilogue import (
    NUMBER,
    Epilogue,
    Full,
    PerBlock,
    Reduced,
    Thread,
    places,
)
from kernel_api.implementations.common.functions import exact_functions, functions_for
from kernel_api.implementations.common.paired_rows import PairedRows
from kernel_api.implementations.common.philox import uniform_of_pairs
from kernel_api.implementations.common.reductions import (
    ROW_OF_QUAD,
    combined,
    identity,
    reduced_over_lanes,
)
from kernel_api.implementations.common.row_pairs import RowPairs
from kernel_api.providers.cutedsl.epilogue.plan import HALF, PAIR, Plan, block_columns, kind_of

_Value = Any  # Float32 or Boolean

_POWERS_OF_TWO = "float8_e8m0fnu"


class Place(NamedTuple):
    """Which of a thread's elements, see `Thread`; 0 for modes that a node does not have."""

    half: int
    column: int
    lane: int


class GraphEpilogue(Epilogue):  # type: ignore[misc]
    """What a graph says.

    Args:
        plan: Of the graph.
        output_types: Of the outputs in the order of the plan: the narrower they are, the less of
            a function's precision they show.
        conversions: To and from the types of operands and outputs.
        by_heads: Whether columns of heads come in the order of `Epilogue.heads`.
    """

    def __init__(
        self,
        graph: Graph,
        plan: Plan,
        output_types: tuple[Any, ...],
        conversions: Conversions | None = None,
        by_heads: bool = False,
    ) -> None:
        self._graph, self._plan, self._nodes = graph, plan, graph.nodes
        self._names = tuple(graph.leaves)
        self._uses = _uses(graph)
        #: Whether the values of a node differ between rows, and between columns.
        self._varies = [
            (node.shape.rows, node.shape.columns > 0 or node.op == "table") for node in graph.nodes
        ]
        self.conversions = conversions or Conversions()
        self.kinds = tuple(_kind(leaf) for leaf in graph.leaves.values())
        self.full = tuple(
            Full(self._columns(index), plan.lanes[index] or PAIR) for _, index in plan.full
        )
        self.per_block = tuple(PerBlock(self._columns(index)) for _, index in plan.per_block)
        self.reduced = tuple(self._reduced(index) for _, index in plan.reduced)
        self.bundle = plan.bundle
        self.halves = plan.halves
        if by_heads:
            self.heads, self.bundle = plan.heads, 2 * HALF
        self.spans_row = plan.spans_row
        self._functions, self._short = functions_for(
            output_types[: len(plan.full)], output_types, graph.has_steps
        )
        self._exact = exact_functions()
        self._reads: dict[int, list[tuple[Any, ...]]] = {}
        self._pairs_are_rows = False

    def _columns(self, index: int) -> Fraction:
        return self._nodes[index].shape.columns

    def _reduced(self, index: int) -> Reduced:
        node = self._nodes[index]
        return Reduced(
            _kind_of_parts(node),
            node["axis"],
            self._columns(node.inputs[0]),
            self._plan.lanes[index],
        )

    def transposed(self) -> Epilogue:
        granularity = self._plan.row_pairs
        if not self._plan.alone and granularity is None:
            raise ValueError("the epilogue looks at rows and columns differently")
        swapped = object.__new__(GraphEpilogue)
        swapped.__dict__.update(self.__dict__)
        swap = str.maketrans("mn", "nm")
        swapped.kinds = tuple(k if k == NUMBER else k.translate(swap) for k in self.kinds)
        swapped._varies = [varies[::-1] for varies in self._varies]
        swapped._reads = {}
        return swapped if granularity is None else swapped._of_row_pairs(granularity)

    def _of_row_pairs(self, granularity: int | str) -> Epilogue:
        """Both of a pair are with one thread, in its two rows. What is made of them has a row per
        pair, which is the same for both."""
        per_pair = [node.shape.columns not in (0, 1) for node in self._nodes]
        self._varies = [
            (by_row and not one, by_column)
            for (by_row, by_column), one in zip(self._varies, per_pair, strict=True)
        ]
        self._pairs_are_rows = True
        self.full = (Full(),) * len(self._plan.full)
        self.reduced = tuple(Reduced(one.kind, one.over) for one in self.reduced)
        self.bundle, self.halves = 1, frozenset()
        outputs = range(len(self.full) + len(self.reduced))
        of_outputs = tuple(per_pair[self._written(output)[0]] for output in outputs)
        return PairedRows(self, RowPairs(granularity), of_outputs)

    # What kernels ask --------------------------------------------------------------------

    def element(self, output: int, thread: Thread, half: int, column: int) -> _Value:
        index, lane = self._written(output)
        value = self._value(index, thread, Place(half, column, lane))
        return cute.math.abs(value) if self._kind_of_output(output) == "amax" else value

    def factors(
        self, output: int, thread: Thread, half: int, column: int
    ) -> tuple[_Value, ...] | None:
        index, lane = self._written(output)
        if self._nodes[index].op != "mul" or self._kind_of_output(output) == "amax":
            return None
        return tuple(self._inputs(index, thread, self._place(index, Place(half, column, lane))))

    def reads(self, bundle: int) -> list[tuple[Any, ...]]:
        if bundle not in self._reads:
            self._reads[bundle] = list(self._operands_of(bundle))
        return self._reads[bundle]

    def finished(self, output: int, value: _Value, extents: tuple[_Value, ...]) -> _Value:
        node = self._nodes[self._plan.reduced[output][1]]
        if node["kind"] == "amax":
            return combined("max", value, Float32(0.0))  # the largest magnitude of nothing
        if node["kind"] != "mean":
            return value
        M, N, L = extents
        count = self._row_length(node, N)
        if node["axis"] != "columns":
            count = Float32(M) if node["axis"] == "rows" else count * Float32(M)
        if node["axis"] == "all":
            count = count * Float32(L)
        return value / count

    def _row_length(self, node: Node, N: _Value) -> _Value:
        return Float32(N) * Float32(float(self._columns(node.inputs[0])))

    def _written(self, output: int) -> tuple[int, int]:
        """(node, columns from one lane to the next) of an output, or of what is reduced."""
        outputs = (*self._plan.full, *self._plan.per_block, *self._plan.reduced)
        index = outputs[output][1]
        if output < len(self.full):
            return index, self.full[output].lane_columns
        output -= len(self.full)
        if output < len(self.per_block):
            return index, 0
        return self._nodes[index].inputs[0], self.reduced[output - len(self.per_block)].lane_columns

    def _kind_of_output(self, output: int) -> str | None:
        output -= len(self.full) + len(self.per_block)
        if output < 0:
            return None
        kind: str = self._nodes[self._plan.reduced[output][1]]["kind"]
        return kind

    # Where values come from --------------------------------------------------------------

    def _place(self, index: int, place: Place) -> Place:
        """Without the modes that a node does not have."""
        by_row, by_column = self._varies[index]
        half = place.half if by_row else 0
        if not by_column:
            return Place(half, 0, 0)
        return Place(half, place.column, 0 if index in self._plan.blocks else place.lane)

    def _sources(self, index: int, place: Place, bundle: int) -> list[tuple[int, Place]]:
        """The elements that one is computed from: of which nodes, and where."""
        node = self._nodes[index]
        if node.op in _SOURCES:
            return _SOURCES[node.op](self, node, place, bundle)
        return [(i, place) for i in node.inputs]

    def _of_split(self, node: Node, place: Place, bundle: int) -> list[tuple[int, Place]]:
        part, granularity = int(node["part"]), block_columns(node)
        if self._pairs_are_rows:
            return [(node.inputs[0], place._replace(half=part))]
        lane = place.lane
        if granularity == 1:
            column, lane = 2 * place.column + part, 2 * lane
        else:
            block, rest = divmod(place.column, granularity)
            column = (2 * block + part) * granularity + rest
        return [(node.inputs[0], Place(place.half, column, lane))]

    def _of_interleave(self, node: Node, place: Place, bundle: int) -> list[tuple[int, Place]]:
        if self._pairs_are_rows:
            return [(node.inputs[place.half], place)]
        granularity = block_columns(node)
        block, rest = divmod(place.column, granularity)
        column, part = (block // 2) * granularity + rest, block % 2
        lane = place.lane // 2 if granularity == 1 else place.lane
        return [(node.inputs[part], Place(place.half, column, lane))]

    def _of_repeat(self, node: Node, place: Place, bundle: int) -> list[tuple[int, Place]]:
        times = int(node["times"])
        return [(node.inputs[0], Place(place.half, place.column // times, place.lane // times))]

    def _of_rotate(self, node: Node, place: Place, bundle: int) -> list[tuple[int, Place]]:
        """Itself; and if it is turned, the other of its pair, cos and sin of the pair."""
        x, cos, sin = node.inputs
        if self.heads is not None:
            other = place.column + (-HALF if self._is_second(node, place.column) else HALF)
            angle = place._replace(column=place.column % HALF)
            return [(x, place), (x, place._replace(column=other)), (cos, angle), (sin, angle)]
        width, column = int(node["width"]), place.column
        at = column % int(node["head_dim"]) - int(node["start"])
        if not 0 <= at < width:
            return [(x, place)]
        if node["style"] == "half":
            apart, pair, lane = width // 2, at % (width // 2), place.lane
        else:
            apart, pair, lane = 1, at // 2, place.lane // 2
        other = column - apart if self._is_second(node, column) else column + apart
        angle = Place(place.half, pair, lane)
        return [(x, place), (x, place._replace(column=other)), (cos, angle), (sin, angle)]

    def _is_second(self, node: Node, column: int) -> bool:
        """Whether an element that is turned is the second of its pair."""
        if self.heads is not None:
            return column // HALF % 2 == 1
        at = column % int(node["head_dim"]) - int(node["start"])
        return at >= int(node["width"]) // 2 if node["style"] == "half" else at % 2 == 1

    def _of_hadamard(self, node: Node, place: Place, bundle: int) -> list[tuple[int, Place]]:
        """A thread's 4 of 16 columns, then their signs."""
        own = [high + low for high in (0, 8) for low in (0, 1)]
        first = place.column - place.column % HADAMARD_BLOCK
        found = [(node.inputs[0], place._replace(column=first + column)) for column in own]
        signs = node.inputs[1:]
        return found + [(i, place._replace(column=column)) for i in signs for column in own]

    def _of_reduce(self, node: Node, place: Place, bundle: int) -> list[tuple[int, Place]]:
        """A thread's elements of a block of columns, or of a row of the tile."""
        x = node.inputs[0]
        if node["axis"] == "block":
            columns = int(node["block"])
            first = place.column * columns
        else:
            columns, first = int(bundle * self._columns(x)), 0
        lane = self._plan.lanes[x] or PAIR
        return [
            (x, Place(place.half, first + column, lane))
            for half, column in places(columns, lane)
            if half == 0
        ]

    def _operands_of(self, bundle: int) -> list[tuple[Any, ...]]:
        """What `Thread.operand` is asked for in a bundle, each once."""
        found: dict[tuple[int, Place], None] = {}
        outputs = range(len(self.full) + len(self.per_block) + len(self.reduced))
        for output in outputs:
            index, lane = self._written(output)
            for half, column in self.places(output, bundle):
                self._visit(index, Place(half, column, lane), bundle, found)
        read = ("operand", "table")
        return [self._read(*one) for one in found if self._nodes[one[0]].op in read]

    def _visit(
        self, index: int, place: Place, bundle: int, found: dict[tuple[int, Place], None]
    ) -> None:
        place = self._place(index, place)
        if (index, place) not in found:
            found[index, place] = None
            for source in self._sources(index, place, bundle):
                self._visit(*source, bundle, found)

    def _read(self, index: int, place: Place) -> tuple[Any, ...]:
        """As arguments of `Thread.operand`; the columns of a table are its own."""
        node = self._nodes[index]
        columns = None if node.op == "table" else node.shape.columns or Fraction(1)
        return (self._names.index(node["name"]), *place, columns)

    # Values ------------------------------------------------------------------------------

    def _value(self, index: int, thread: Thread, place: Place) -> _Value:
        """Of a node, for one element; each is computed once per bundle."""
        place = self._place(index, place)
        key = (index, place)
        if key not in thread.memory:
            computed = _VALUES.get(self._nodes[index].op)
            if computed is None:
                computed = GraphEpilogue._elementwise
            thread.memory[key] = computed(self, index, thread, place)
        return thread.memory[key]

    def _inputs(self, index: int, thread: Thread, place: Place) -> list[_Value]:
        sources = self._sources(index, place, thread.bundle)
        return [self._value(source, thread, at) for source, at in sources]

    def _accumulator(self, index: int, thread: Thread, place: Place) -> _Value:
        return thread.accumulator(place.half, place.column).to(Float32)

    def _constant(self, index: int, thread: Thread, place: Place) -> _Value:
        return Float32(float.fromhex(self._nodes[index]["value"]))

    def _operand(self, index: int, thread: Thread, place: Place) -> _Value:
        node = self._nodes[index]
        if node.op == "scalar":
            value = thread.operand(self._names.index(node["name"]), 0, 0)
        else:
            value = thread.operand(*self._read(index, place))
        if node.op == "table" or node["type"] == "real":
            return self.conversions.widened(value)
        return value != type(value)(0) if node["type"] == "bool" else value

    def _elementwise(self, index: int, thread: Thread, place: Place) -> _Value:
        node = self._nodes[index]
        if node.op in ("add", "sub"):
            return self._sum(index, thread, place)
        if node.op == "div":
            return self._quotient(index, thread, place)
        functions = self._exact if self._is_shared(index) else self._functions
        return functions[node.op](*self._inputs(index, thread, place))

    def _is_shared(self, index: int) -> bool:
        """Whether a value serves many elements, so that it may take its time."""
        return index in self._plan.blocks or not self._varies[index][1]

    def _sum(self, index: int, thread: Thread, place: Place) -> _Value:
        """With a product that nothing else needs in one instruction."""
        node = self._nodes[index]
        signs = (1, -1 if node.op == "sub" else 1)
        if self._short and not self._is_shared(index):
            erf = self._erf_of_one_plus(node)
            if erf is not None:
                return self._functions["one_plus_erf"](*self._inputs(erf, thread, place))
        for i, other in ((1, 0), (0, 1)):
            product = self._nodes[node.inputs[i]]
            if product.op == "mul" and self._uses[node.inputs[i]] == 1:
                a, b = self._inputs(node.inputs[i], thread, place)
                c = self._value(node.inputs[other], thread, place)
                a, c = (-a if signs[i] < 0 else a), (-c if signs[other] < 0 else c)
                return cute.math.fma(a, b, c)
        return self._functions[node.op](*self._inputs(index, thread, place))

    def _erf_of_one_plus(self, node: Node) -> int | None:
        """The node erf(x) of a node 1 + erf(x)."""
        for one, other in (node.inputs, node.inputs[::-1]):
            first, second = self._nodes[one], self._nodes[other]
            is_one = first.op == "constant" and float.fromhex(first["value"]) == 1.0
            if node.op == "add" and is_one and second.op == "erf":
                return other
        return None

    def _quotient(self, index: int, thread: Thread, place: Place) -> _Value:
        """Short ones as a multiplication with a reciprocal, which is found once."""
        a, b = self._nodes[index].inputs
        dividend = self._value(a, thread, place)
        source, at = self._shared_source(b, self._place(b, place))
        power = self._nodes[source].op == "cast" and self._nodes[source]["to"] == _POWERS_OF_TWO
        if not power and (not self._short or self._is_shared(index)):
            return dividend / self._value(b, thread, place)
        key = ("reciprocal", source, at)
        if key not in thread.memory:
            thread.memory[key] = self._reciprocal(source, thread, at, power)
        return dividend * thread.memory[key]

    def _shared_source(self, index: int, place: Place) -> tuple[int, Place]:
        """Of a value that is repeated, the one that is."""
        while self._nodes[index].op == "repeat":
            ((index, place),) = self._sources(index, place, 0)
            place = self._place(index, place)
        return index, place

    def _reciprocal(self, index: int, thread: Thread, place: Place, power: bool) -> _Value:
        value = self._value(index, thread, place)
        if power:
            return reciprocal_of_power(value)
        return 1.0 / value if self._is_shared(index) else cute.math.rcp(value, approx=True)

    def _cast(self, index: int, thread: Thread, place: Place) -> _Value:
        (value,) = self._inputs(index, thread, place)
        value = Float32(value) if isinstance(value, Boolean) else value
        return self.conversions.rounded(value, dtype(self._nodes[index]["to"]).cutlass)

    # Of other columns --------------------------------------------------------------------

    def _moved(self, index: int, thread: Thread, place: Place) -> _Value:
        (value,) = self._inputs(index, thread, place)
        return value

    def _rotate(self, index: int, thread: Thread, place: Place) -> _Value:
        own, *turned = self._inputs(index, thread, place)
        if not turned:
            return own
        other, cos, sin = turned
        node = self._nodes[index]
        second = self._is_second(node, place.column)
        value = cute.math.fma(other, sin if second else -sin, own * cos)
        end = rotated_columns(node)
        if end is None:
            return value
        return select(self._is_before(end, index, thread, place), value, own)

    def _is_before(self, end: int, index: int, thread: Thread, place: Place) -> Boolean:
        """Whether its head is: the same for all of a head, which lies in one bundle or is all of
        what that has."""
        node = self._nodes[index]
        head = 0 if self.heads is not None else place.column // int(node["head_dim"])
        key = ("rotated", index, head)
        if key not in thread.memory:
            column = thread.column_of(place.column, place.lane, node.shape.columns)
            thread.memory[key] = column < end
        return thread.memory[key]

    def _hadamard(self, index: int, thread: Thread, place: Place) -> _Value:
        """Bits of a column: 0 in the thread, 1 and 2 in the quad, 3 in the thread again."""
        values = self._inputs(index, thread, place)
        if len(values) > 4:
            values = [value * sign for value, sign in zip(values[:4], values[4:], strict=True)]
        a, b, c, d = values
        a, b, c, d = a + b, a - b, c + d, c - d
        values = [a + c, b + d, a - c, b - d]
        for bit in (1, 2):
            sign = select((thread.lane & bit) != 0, Float32(-1.0), Float32(1.0))
            others = [cute.arch.shuffle_sync_bfly(value, offset=bit) for value in values]
            values = [
                cute.math.fma(value, sign, other)
                for value, other in zip(values, others, strict=True)
            ]
        columns = [at.column for _, at in self._of_hadamard(self._nodes[index], place, 0)[:4]]
        for column, value in zip(columns, values, strict=True):
            thread.memory[index, place._replace(column=column)] = value
        return thread.memory[index, place]

    def _uniform(self, index: int, thread: Thread, place: Place) -> _Value:
        """Of a pair of columns, in both rows."""
        seed, offset = self._inputs(index, thread, place)
        shape = self._nodes[index].shape
        first = place.column - place.column % PAIR
        n = thread.column_of(first, place.lane, shape.columns)
        above = thread.batch * thread.extents[0] if shape.batch else 0
        rows = tuple(above + thread.row_of(half) for half in (0, 1))
        for half, pair in enumerate(uniform_of_pairs(n, rows, offset, seed, thread.lane)):
            for i, value in enumerate(pair):
                thread.memory[index, Place(half, first + i, place.lane)] = value
        return thread.memory[index, place]

    def _reduce(self, index: int, thread: Thread, place: Place) -> _Value:
        """Within the quad, which has a block of columns, or all of a row, between its threads."""
        node = self._nodes[index]
        kind = _kind_of_parts(node)
        found = Float32(identity(kind))
        for (source, at), value in zip(
            self._sources(index, place, thread.bundle),
            self._inputs(index, thread, place),
            strict=True,
        ):
            value = cute.math.abs(value) if node["kind"] == "amax" else value
            if node["axis"] == "columns":
                value = self._inside(source, thread, at, value, kind)
            found = combined(kind, found, value)
        found = reduced_over_lanes(kind, found, ROW_OF_QUAD)
        return (
            found / self._row_length(node, thread.extents[1]) if node["kind"] == "mean" else found
        )

    def _inside(self, index: int, thread: Thread, place: Place, value: _Value, kind: str) -> _Value:
        """What changes nothing, for a column behind the last one."""
        inside = thread.is_inside(place.column, place.lane, self._columns(index))
        return select(inside, value, Float32(identity(kind)))


def _kind(leaf: Node) -> str:
    if leaf.op == "scalar":
        return str(NUMBER)
    return kind_of(leaf.shape) + ("n" if leaf.op == "table" else "")


def _kind_of_parts(node: Node) -> str:
    """What is done to the parts of a reduction."""
    kind: str = node["kind"]
    return {"amax": "max", "mean": "sum"}.get(kind, kind)


def _uses(graph: Graph) -> list[int]:
    """How often each node is used, by others and as an output."""
    used = [i for node in graph.nodes for i in node.inputs] + [i for _, i in graph.outputs]
    return [used.count(index) for index in range(len(graph.nodes))]


_SOURCES: dict[str, Callable[..., list[tuple[int, Place]]]] = {
    "split": GraphEpilogue._of_split,
    "interleave": GraphEpilogue._of_interleave,
    "repeat": GraphEpilogue._of_repeat,
    "rotate": GraphEpilogue._of_rotate,
    "hadamard": GraphEpilogue._of_hadamard,
    "reduce": GraphEpilogue._of_reduce,
}

_VALUES: dict[str, Callable[..., _Value]] = {
    "accumulator": GraphEpilogue._accumulator,
    "constant": GraphEpilogue._constant,
    "operand": GraphEpilogue._operand,
    "scalar": GraphEpilogue._operand,
    "table": GraphEpilogue._operand,
    "cast": GraphEpilogue._cast,
    "split": GraphEpilogue._moved,
    "interleave": GraphEpilogue._moved,
    "repeat": GraphEpilogue._moved,
    "rotate": GraphEpilogue._rotate,
    "hadamard": GraphEpilogue._hadamard,
    "uniform": GraphEpilogue._uniform,
    "reduce": GraphEpilogue._reduce,
}

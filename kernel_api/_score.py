"""Functions of attention scores: traced like epilogues, into the same kind of graph.

    def relative(score, b, h, q, kv, table):
        return score + table[h, kv - q + 128]

    ScoreFunction(relative, True, {"table": table})

A score function takes the score and the indices of batch, query head, query and key; a mask
function takes the indices alone, and returns a comparison. Indices are those within a sequence.
Further parameters are operands: Python numbers and tensors (), or tensors that are indexed. The
functions of :mod:`kernel_api.epilogue` work on all of them. Beyond its nodes the graph has

==============================  ================================================================
``score``                       the scaled (and capped) product of query and key
``index`` name                  ``b``, ``h``, ``q`` or ``kv``
``lookup`` name, type           an element of an operand, of as many indices as it has modes; an
                                index beyond an end is taken as that end
``floordiv`` divisor            rounded down, by a positive whole number
``remainder`` divisor           x − divisor · floordiv, not negative
==============================  ================================================================

Every node is one value per score; shapes play no part. Whole numbers (indices, integers of
operands, constants that are written without a point, and what `_KEEP_WHOLE` makes of them) are
computed and compared as such: in 32 bits, or in 64 where one of them has 64, as Python's numbers
have that are operands; what a result is that these do not hold is not defined. Beside other numbers
they are taken as float32.
"""

from __future__ import annotations

import numbers
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn

from kernel_api._cached_property import cached_property
from kernel_api._described import Described
from kernel_api._numbers import of_64_bits, real_number
from kernel_api.dtypes import dtype
from kernel_api.epilogue.frozen import kept
from kernel_api.epilogue.graph import (
    BINARY,
    COMPARISONS,
    LOGICAL,
    SCORE_LEAVES,
    UNARY,
    WHOLE,
    Graph,
    Node,
    canonical,
)
from kernel_api.epilogue.shape import SCALAR
from kernel_api.epilogue.tracing import RESULT, Parameters, line_of, parameters_of, place_of
from kernel_api.epilogue.value import (
    Input,
    Tracer,
    Value,
    fail,
    inside,
    numeric,
    trace_apart,
)
from kernel_api.errors import ArgumentError, EpilogueError
from kernel_api.operands import Operand

INDICES = ("b", "h", "q", "kv")

_KINDS = {"float": "real", "int": "integer", "uint": "integer", "bool": "bool"}
_ELEMENTWISE = frozenset((*UNARY, *BINARY, *COMPARISONS, *LOGICAL, *WHOLE))
_OTHERS = frozenset((*SCORE_LEAVES, "constant", "operand", "scalar", "lookup", "where", "cast"))
_EXACT = 2**53  # so far float64 has all whole numbers
_BEYOND = 2**63  # what 64 bits hold
#: Of whole numbers these give whole numbers.
_KEEP_WHOLE = ("neg", "abs", "floor", "add", "sub", "mul", "minimum", "maximum")
_CONSTANT_BETWEEN_STEPS = (*WHOLE, "lookup", "floor")


class ScoreFunction(Described):
    """A traced function of scores, or of indices alone, with its operands.

    Attributes:
        graph: What it computes.
        operands: By name: tensors as Operand, Python numbers as they are.
    """

    def __init__(
        self, fn: Callable[..., Any], has_score: bool, operands: Mapping[str, Any]
    ) -> None:
        """Raises ArgumentError where ``fn`` is no function; EpilogueError, which starts with the
        line, where it cannot be traced or its operands do not fit."""
        if not callable(fn):
            raise ArgumentError(f"fn is a {type(fn).__name__}; expected a function")
        self.operands = {name: _operand(name, value) for name, value in operands.items()}
        look = _looks(has_score, self.operands)
        self.graph = kept(fn, look, lambda: _trace(fn, has_score, self.operands))

    def with_operands(self, operands: Mapping[str, Any]) -> ScoreFunction:
        """The same on other operands, of the kinds that it was traced with; those that are not
        given stay.

        Raises ArgumentError for one that it does not have, or of another kind.
        """
        given = {name: self._replacing(name, value) for name, value in operands.items()}
        return self._of(self.graph, {**self.operands, **given})

    def _replacing(self, name: str, value: Any) -> Operand | float:
        if name not in self.operands:
            names = ", ".join(self.operands) or "none"
            raise ArgumentError(f"the function has no operand {name}; it has {names}")
        before, operand = self.operands[name], _operand(name, value)
        if isinstance(before, float) and isinstance(operand, int):
            operand = real_number(name, operand)  # 2 is as good as 2.0
        given, traced = _input(name, operand), _input(name, before)
        if given != traced:
            raise ArgumentError(
                f"{name} is {_kind_of(given)}, and the function was traced with "
                f"{_kind_of(traced)}; expected another of that kind, or a function of its own"
            )
        return operand

    @classmethod
    def _of(cls, graph: Graph, operands: dict[str, Any]) -> ScoreFunction:
        made = cls.__new__(cls)
        made.graph, made.operands = graph, operands
        return made

    @cached_property
    def derivative(self) -> Graph:
        """Of the result by the score."""
        return derivative_of(self.graph)

    def description(self) -> dict[str, Any]:
        return {"function": self.graph, "operands": self.operands}

    @classmethod
    def from_description(cls, fields: dict[str, Any]) -> ScoreFunction:
        operands = {name: _operand(name, value) for name, value in fields["operands"].items()}
        return cls._of(fields["function"], operands)

    def __repr__(self) -> str:
        return f"<function of scores {self.graph.identity[:8]}>"


def _looks(has_score: bool, operands: Mapping[str, Operand | float]) -> tuple[Any, ...]:
    """What a trace depends on beside the function."""
    return has_score, *map(_input, operands, operands.values())


def _operand(name: str, value: Any) -> Operand | float:
    if isinstance(value, bool):
        raise ArgumentError(
            f"{name} is {value}; functions are traced once, so a flag cannot decide anything "
            f"later: let the function take it from outside, or pass 0 or 1"
        )
    if isinstance(value, numbers.Integral):
        return of_64_bits(name, value, signed=True)
    if isinstance(value, numbers.Real):
        return real_number(name, value)
    operand = value if isinstance(value, Operand) else Operand(value, name)
    if operand.dtype.kind not in _KINDS:
        raise ArgumentError(f"{name} is {operand.dtype}; expected real numbers or bool")
    return operand


# Traced values ---------------------------------------------------------------------------


class ScoreValue(Value):
    """What the function sees. Operands can be indexed; indices divided with remainder."""

    __slots__ = ()

    def __getitem__(self, key: object) -> Value:  # type: ignore[override]
        given = self.input
        if given is None or given.is_number or not given.columns:
            fail(f"{self} cannot be indexed; only operands that are tensors with modes can")
        keys = key if isinstance(key, tuple) else (key,)
        if len(keys) != given.columns:
            fail(f"{given.name} has {given.columns} modes and is indexed with {len(keys)}")
        self.check()
        tracer = self.tracer
        indices = [numeric(one) for one in keys]
        for index in indices:
            if not _is_whole(tracer.nodes, index.node):
                fail(f"{given.name} is indexed with {index}; expected whole numbers")
        wholes = [_as_whole(index) for index in indices]
        return tracer.node("lookup", *wholes, shape=SCALAR, name=given.name, type=given.kind)

    def __floordiv__(self, divisor: Any) -> Value:
        return self._divided("floordiv", "//", divisor)

    def __mod__(self, divisor: Any) -> Value:
        return self._divided("remainder", "%", divisor)

    def __divmod__(self, divisor: Any) -> tuple[Value, Value]:
        return self // divisor, self % divisor

    def __ifloordiv__(self, divisor: Any) -> Value:
        return self._replaced_by(self // divisor)

    def __imod__(self, divisor: Any) -> Value:
        return self._replaced_by(self % divisor)

    def __rfloordiv__(self, dividend: Any) -> NoReturn:
        self._refuse_as_divisor()

    def __rmod__(self, dividend: Any) -> NoReturn:
        self._refuse_as_divisor()

    def __rdivmod__(self, dividend: Any) -> NoReturn:
        self._refuse_as_divisor()

    def _refuse_as_divisor(self) -> NoReturn:
        fail(f"{self} is a divisor of // or %; expected a whole number, known while fn is traced")

    def __rshift__(self, bits: Any) -> NoReturn:
        fail(f">> cannot be traced for {self}; use // by a power of two, as in q // 2")

    def _divided(self, op: str, symbol: str, divisor: Any) -> Value:
        whole = isinstance(divisor, numbers.Integral) and not isinstance(divisor, bool)
        if not whole or not 1 <= divisor < _BEYOND:
            fail(f"{self} {symbol} {divisor!r}: expected a whole number from 1 to 2**63 - 1")
        value = numeric(self)
        if not _is_whole(self.tracer.nodes, value.node):
            fail(f"{symbol} is for whole numbers, and {self} is none; use division")
        return self.tracer.node(op, _as_whole(value), shape=SCALAR, divisor=int(divisor))

    def __index__(self) -> NoReturn:
        fail(
            f"{self} has no value while the function is traced; it can index tensors that are "
            f"passed as operands, by the name of a parameter"
        )


def _is_whole(nodes: list[Node], index: int) -> bool:
    """Whether a value is a whole number, though it may not be computed as one: 2.0 is not."""
    return whole_numbers(nodes[: index + 1], by_value=True)[index]


def _as_whole(value: Value) -> Value:
    """Of what is a whole number by its value: as such."""
    nodes = value.tracer.nodes
    node = nodes[value.node]
    if node.op == "constant":
        return value.tracer.constant(int(float.fromhex(node["value"])))
    if whole_numbers(nodes[: value.node + 1])[value.node]:
        return value
    return value.tracer.node("cast", value, shape=SCALAR, to="int64")


def whole_numbers(nodes: Sequence[Node], by_value: bool = False) -> list[bool]:
    """Which nodes are whole numbers, by what they are made of."""
    found: list[bool] = []
    for node in nodes:
        found.append(_whole(node, [found[i] for i in node.inputs], by_value))
    return found


def _whole(node: Node, inputs: list[bool], by_value: bool) -> bool:
    if node.op == "constant":
        if by_value:
            return float.fromhex(node["value"]).is_integer()
        return dict(node.attributes).get("type") == "integer"
    if node.op in ("operand", "scalar", "lookup"):
        return bool(node["type"] == "integer")
    if node.op == "cast":
        return bool(dtype(node["to"]).is_integer)
    if node.op == "where":
        return all(inputs[1:])
    if node.op in ("index", *WHOLE):
        return True
    return node.op in _KEEP_WHOLE and all(inputs)


def among_whole_numbers(nodes: Sequence[Node]) -> list[bool]:
    """Which nodes are computed of whole numbers as such: what is whole itself, and comparisons."""
    whole = whole_numbers(nodes)
    return [
        whole[index] or (node.op in COMPARISONS and all(whole[i] for i in node.inputs))
        for index, node in enumerate(nodes)
    ]


class ScoreTracer(Tracer):
    """Collects the nodes of one call."""

    def __init__(
        self, operands: Mapping[str, Operand | float], has_score: bool, place: str
    ) -> None:
        form = "score_operands={'name': ...}" if has_score else "MaskMod(fn, name=...)"
        self.how_to_pass = f"pass it by the name of a parameter of fn, as in {form}"
        self.nodes: list[Node] = []
        self.lines: list[str] = []
        self.outside: str | None = place
        self._index: dict[Node, int] = {}
        self._extents = {n: str(o.shape) for n, o in operands.items() if isinstance(o, Operand)}
        self.failure: EpilogueError | None = None
        self.score = ScoreValue(self, self._add("score"))
        self.indices = {n: ScoreValue(self, self._add("index", name=n)) for n in INDICES}
        inputs = [_input(name, operand) for name, operand in operands.items()]
        self.inputs: dict[str, Value] = {i.name: ScoreValue(self, None, i) for i in inputs}

    def node(self, op: str, *inputs: Value, shape: Any, **attributes: Any) -> Value:
        return ScoreValue(self, self._add(op, tuple(v.node for v in inputs), **attributes))

    def constant(self, number: numbers.Real | float) -> Value:
        """One that is written without a point is a whole number."""
        if isinstance(number, bool) or not isinstance(number, numbers.Integral):
            return ScoreValue(self, self._add("constant", value=float(number).hex()))
        if abs(int(number)) > _EXACT:
            fail(f"{number} is beyond 2**53; pass it as an operand")
        value = float(number).hex()
        return ScoreValue(self, self._add("constant", value=value, type="integer"))

    def leaf(self, given: Input, kind: str) -> int:
        if given.columns:
            indices = ", ".join(INDICES[1 : 1 + given.columns])
            fail(
                f"{given.name} has shape {self._extents[given.name]} and is used as one number; "
                f"index it, as in {given.name}[{indices}]"
            )
        op = "scalar" if given.is_number else "operand"
        return self._add(op, name=given.name, type=given.kind)

    def names_of(self, index: int) -> list[str]:
        found: set[str] = set()
        needed = {index}
        for one in range(index, -1, -1):
            if one not in needed:
                continue
            node = self.nodes[one]
            needed.update(node.inputs)
            if node.op == "score":
                found.add("the score")
            elif node.op in ("index", "operand", "scalar", "lookup"):
                found.add(node["name"])
        return sorted(found)


def _input(name: str, operand: Operand | float) -> Input:
    """Its columns are how many modes it has."""
    if not isinstance(operand, Operand):
        return Input(name, "integer" if isinstance(operand, int) else "real", True, SCALAR, None, 0)
    return Input(name, _KINDS[operand.dtype.kind], False, SCALAR, None, operand.rank)


def _kind_of(given: Input) -> str:
    """For messages."""
    kind = {"real": "real", "integer": "whole", "bool": "bool"}[given.kind]
    if given.is_number:
        return f"a {kind} number"
    values = kind if given.kind == "bool" else f"{kind} numbers"
    return f"a tensor of {values} with {given.columns} mode{'' if given.columns == 1 else 's'}"


# Tracing ---------------------------------------------------------------------------------


def _trace(
    fn: Callable[..., Any], has_score: bool, operands: Mapping[str, Operand | float]
) -> Graph:
    leading = ("score", *INDICES) if has_score else INDICES
    parameters, place = parameters_of(fn), place_of(fn)
    _check_parameters(parameters, leading, operands, place)
    with trace_apart() as run:
        tracer = ScoreTracer(operands, has_score, place)
        run(tracer)
        root = _root(tracer, _called(fn, leading, tracer, place), has_score, place)
    graph, kept = canonical(tracer.nodes, [(RESULT, root)])
    for index, node in enumerate(graph.nodes):
        if node.op not in _ELEMENTWISE | _OTHERS:
            raise EpilogueError(f"{tracer.lines[kept[index]]}: {node.op} is not for scores")
    for name in operands:
        if name not in graph.leaves:
            raise EpilogueError(f"{place}: {name} is passed, but what fn returns does not need it")
    return graph


def _check_parameters(
    parameters: Parameters, leading: tuple[str, ...], operands: Mapping[str, Any], place: str
) -> None:
    names = (parameters.accumulator, *parameters.names)
    taken, own = len(leading), names[len(leading) :]
    if len(names) < taken:
        raise EpilogueError(
            f"{place}: fn takes {', '.join(names)}; expected ({', '.join(leading)}), then operands"
        )
    missing = [name for name in own if name in parameters.required and name not in operands]
    if missing:
        raise EpilogueError(f"{place}: fn takes {', '.join(missing)}; pass it by name")
    unknown = [name for name in operands if name not in own]
    if unknown:
        raise EpilogueError(f"{place}: {unknown[0]} is passed, and fn has no parameter of the name")


def _called(
    fn: Callable[..., Any], leading: tuple[str, ...], tracer: ScoreTracer, place: str
) -> Any:
    values = [tracer.score if name == "score" else tracer.indices[name] for name in leading]
    try:
        with inside(tracer):
            returned = fn(*values, **tracer.inputs)
    except EpilogueError:
        raise
    except Exception as error:
        where, name = line_of(error, fn) or place, type(error).__name__
        raise EpilogueError(f"{where}: fn raised {name} while it was traced: {error}") from error
    if tracer.failure is not None:
        raise tracer.failure
    return returned


def _root(tracer: ScoreTracer, returned: Any, has_score: bool, place: str) -> int:
    if not isinstance(returned, Value):
        expected = "a value computed from the score" if has_score else "a comparison of indices"
        raise EpilogueError(f"{place}: fn returns {returned!r}; expected {expected}")
    if not has_score:
        if not returned.is_boolean:
            raise EpilogueError(f"{place}: fn returns {returned}; expected a comparison")
        return returned.node
    return numeric(returned).node


# Graphs ----------------------------------------------------------------------------------


def conjunction(graphs: Iterable[Graph]) -> Graph:
    """The mask that holds where all do."""
    nodes = _Nodes()
    roots = [nodes.copied(graph)[graph.outputs[0][1]] for graph in graphs]
    whole = roots[0]
    for root in roots[1:]:
        whole = nodes.add("and", whole, root)
    return canonical(nodes.nodes, [(RESULT, whole)])[0]


def derivative_of(graph: Graph) -> Graph:
    """What the result of a score function changes by per change of the score.

    At a kink of ``maximum`` and ``minimum`` it is that of the second; a cast is taken as it were
    none, and whatever only indices decide as constant.
    """
    nodes = _Nodes()
    values = nodes.copied(graph)
    slopes: list[int | None] = []
    for index, node in enumerate(graph.nodes):
        inputs = [values[i] for i in node.inputs]
        slopes.append(_slope(nodes, node, values[index], inputs, [slopes[i] for i in node.inputs]))
    root = slopes[graph.outputs[0][1]]
    return canonical(nodes.nodes, [(RESULT, nodes.number(0.0) if root is None else root)])[0]


class _Nodes:
    """Nodes as they are made; equal ones are one."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self._known: dict[Node, int] = {}

    def copied(self, graph: Graph) -> list[int]:
        """What became of each node of a graph."""
        found: list[int] = []
        for node in graph.nodes:
            inputs = tuple(found[i] for i in node.inputs)
            found.append(self._put(Node(node.op, inputs, node.shape, node.attributes)))
        return found

    def _put(self, node: Node) -> int:
        if node not in self._known:
            self._known[node] = len(self.nodes)
            self.nodes.append(node)
        return self._known[node]

    def add(self, op: str, *inputs: int) -> int:
        return self._put(Node(op, inputs))

    def number(self, value: float) -> int:
        return self._put(Node("constant", attributes=(("value", float(value).hex()),)))


_ROOT_OF_PI = 1.7724538509055159


def _slope(n: _Nodes, node: Node, y: int, x: list[int], dx: list[int | None]) -> int | None:
    """The derivative of a node; None: it is constant.

    Args:
        y: The node itself.
        x, dx: Its inputs and their derivatives.
    """
    if node.op == "score":
        return n.number(1.0)
    if all(one is None for one in dx) or node.is_boolean or node.op in _CONSTANT_BETWEEN_STEPS:
        return None
    if node.op in ("where", "minimum", "maximum", "add", "sub", "mul", "div"):
        return _slope_of_two(n, node.op, y, x, dx)
    (d,) = dx
    assert d is not None
    if node.op == "neg":
        return n.add("neg", d)
    if node.op == "cast":
        return d
    return n.add("mul", _factor(n, node.op, y, x[0]), d)


def _factor(n: _Nodes, op: str, y: int, x: int) -> int:
    """The derivative of a function y of one x."""
    one = n.number(1.0)
    if op == "abs":
        zero = n.number(0.0)
        below = n.add("where", n.add("lt", x, zero), n.number(-1.0), zero)
        return n.add("where", n.add("gt", x, zero), one, below)
    if op in ("exp", "expm1"):
        return n.add("exp", x)
    if op == "log":
        return n.add("div", one, x)
    if op == "log1p":
        return n.add("div", one, n.add("add", one, x))
    if op == "sqrt":
        return n.add("div", n.number(0.5), y)
    if op == "rsqrt":
        return n.add("mul", n.number(-0.5), n.add("mul", y, n.add("mul", y, y)))
    if op == "tanh":
        return n.add("sub", one, n.add("mul", y, y))
    if op == "sigmoid":
        return n.add("mul", y, n.add("sub", one, y))
    assert op == "erf", op
    density = n.add("exp", n.add("neg", n.add("mul", x, x)))
    return n.add("mul", n.number(2.0 / _ROOT_OF_PI), density)


def _slope_of_two(n: _Nodes, op: str, y: int, x: list[int], dx: list[int | None]) -> int | None:
    def zero(d: int | None) -> int:
        return n.number(0.0) if d is None else d

    if op == "where":
        return n.add("where", x[0], zero(dx[1]), zero(dx[2]))
    if op in ("minimum", "maximum"):
        first = n.add("lt" if op == "minimum" else "gt", *x)
        return n.add("where", first, zero(dx[0]), zero(dx[1]))
    (a, b), (da, db) = x, dx
    if op in ("add", "sub"):
        if db is None:
            return da
        if da is None:
            return n.add("neg", db) if op == "sub" else db
        return n.add(op, da, db)
    if op == "mul":
        left = None if da is None else n.add("mul", da, b)
        right = None if db is None else n.add("mul", a, db)
        if left is None or right is None:
            return right if left is None else left
        return n.add("add", left, right)
    numerator = zero(da) if db is None else n.add("sub", zero(da), n.add("mul", y, db))
    return n.add("div", numerator, b)

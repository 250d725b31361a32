"""The expression graph: small nodes in topological order, and an identity."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from kernel_api._cached_property import cached_property
from kernel_api.epilogue.shape import SCALAR, Problem, Shape
from kernel_api.errors import ArgumentError

LEAVES = ("accumulator", "constant", "operand", "scalar", "table")
UNARY = (
    "neg", "abs", "floor", "exp", "expm1", "log", "log1p", "sqrt", "rsqrt", "tanh", "sigmoid", "erf"
)  # fmt: skip
BINARY = ("add", "sub", "mul", "div", "floor_divide", "modulo", "minimum", "maximum")
#: Of UNARY and BINARY, those whose results are whole, or begin anew.
STEPS = ("floor", "floor_divide", "modulo")
COMPARISONS = ("lt", "le", "gt", "ge", "eq", "ne")
LOGICAL = ("and", "or", "not")
STRUCTURAL = ("split", "interleave", "repeat", "rotate", "hadamard", "reduce")

#: What functions of attention scores have besides, see :mod:`kernel_api._score`.
SCORE_LEAVES = ("score", "index")
WHOLE = ("floordiv", "remainder")

#: Every operation with how many inputs it takes.
ARITY: dict[str, tuple[int, ...]] = {
    **dict.fromkeys(LEAVES, (0,)),
    **dict.fromkeys((*UNARY, "not", "cast", "split", "repeat", "reduce"), (1,)),
    **dict.fromkeys((*BINARY, *COMPARISONS, "and", "or", "uniform", "interleave"), (2,)),
    **dict.fromkeys(("where", "rotate"), (3,)),
    "hadamard": (1, 2),
    **dict.fromkeys(SCORE_LEAVES, (0,)),
    **dict.fromkeys(WHOLE, (1,)),
    "lookup": tuple(range(1, 9)),
}

HADAMARD_BLOCK = 16


@dataclass(frozen=True)
class Node:
    """One operation.

    Attributes:
        op: Its name; see the package for what each does.
        inputs: Indices of earlier nodes.
        shape: The modes of its value.
        attributes: What else it needs, as pairs of name and value; ``node["name"]`` reads one.
    """

    op: str
    inputs: tuple[int, ...] = ()
    shape: Shape = SCALAR
    attributes: tuple[tuple[str, Any], ...] = ()

    def __getitem__(self, name: str) -> Any:
        return dict(self.attributes)[name]

    @property
    def is_boolean(self) -> bool:
        """Whether its value is a truth value; all others are numbers."""
        if self.op in ("operand", "scalar", "lookup"):
            return bool(self["type"] == "bool")
        return self.op in COMPARISONS or self.op in LOGICAL

    def to_dict(self) -> dict[str, Any]:
        data = {"op": self.op, "inputs": list(self.inputs), "shape": self.shape.to_list()}
        return {**data, "attributes": dict(self.attributes)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Node:
        attributes = tuple(sorted(data["attributes"].items()))
        return cls(data["op"], tuple(data["inputs"]), Shape.from_list(data["shape"]), attributes)


@dataclass(frozen=True, eq=False)
class Graph:
    """What an epilogue computes. Frozen, hashable; equal if it computes the same in the same way.

    Attributes:
        nodes: In topological order: a node's inputs stand before it. None is without use.
        outputs: Name and node of each output; the first is ``D``, which goes to ``out``.
    """

    nodes: tuple[Node, ...]
    outputs: tuple[tuple[str, int], ...]

    @cached_property
    def identity(self) -> str:
        """SHA-256 of the canonical JSON text: the same in every process."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    @cached_property
    def leaves(self) -> dict[str, Node]:
        """The operands, tables and scalars that are read, by name, in the order of the nodes."""
        named = ("operand", "scalar", "table", "lookup")
        return {node["name"]: node for node in self.nodes if node.op in named}

    @cached_property
    def is_elementwise(self) -> bool:
        """Whether what is computed in a place depends on what is read there, or at all places."""
        return not any(node.op in STRUCTURAL for node in self.nodes)

    @cached_property
    def has_steps(self) -> bool:
        return any(node.op in STEPS for node in self.nodes)

    def output_shape(self, name: str) -> Shape:
        return self.nodes[dict(self.outputs)[name]].shape

    def indivisible(self, N: int) -> Iterator[tuple[int, str]]:
        """Nodes whose columns do not divide as they need to, with what they need."""
        for index, node in enumerate(self.nodes):
            if node.op not in STRUCTURAL:
                continue
            columns = self.nodes[node.inputs[0]].shape.columns * N
            multiple = _column_multiple(node)
            if columns % multiple:
                yield index, f"needs columns in multiples of {multiple}, and there are {columns}"
            elif node.op == "rotate" and (rotated_columns(node) or 0) > columns:
                yield index, f"is of {node['heads']} heads, and there are {columns // multiple}"

    def to_dict(self) -> dict[str, Any]:
        outputs = [[name, index] for name, index in self.outputs]
        return {"nodes": [node.to_dict() for node in self.nodes], "outputs": outputs}

    def to_json(self) -> str:
        """Canonical: equal graphs give equal texts."""
        return json.dumps(self.to_dict(), sort_keys=True, separators=(",", ":"))

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Graph:
        """Inverse of ``to_dict``; raises ArgumentError for what describes no graph."""
        try:
            nodes = tuple(Node.from_dict(node) for node in data["nodes"])
            outputs = tuple((str(name), int(index)) for name, index in data["outputs"])
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ArgumentError(f"this describes no epilogue graph: {error!r}") from error
        for index, node in enumerate(nodes):
            if len(node.inputs) not in ARITY.get(node.op, ()):
                raise ArgumentError(
                    f"node {index} of the epilogue graph is {node.op!r} of {len(node.inputs)} "
                    f"inputs, which is no operation"
                )
            if any(not 0 <= i < index for i in node.inputs):
                raise ArgumentError(f"node {index} of the epilogue graph stands before its inputs")
        if any(not 0 <= index < len(nodes) for _, index in outputs):
            raise ArgumentError("an output of the epilogue graph names no node")
        return cls(nodes, outputs)

    @classmethod
    def from_json(cls, text: str) -> Graph:
        try:
            data = json.loads(text)
        except ValueError as error:
            raise ArgumentError(f"this is not JSON: {error}") from error
        return cls.from_dict(data)

    @property
    def listing(self) -> str:
        """One line per node, to read."""
        lines = [f"%{i} {n.shape} = {_call(n)}" for i, n in enumerate(self.nodes)]
        return "\n".join([*lines, *(f"{name} = %{index}" for name, index in self.outputs)])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Graph) and self.identity == other.identity

    def __hash__(self) -> int:
        return hash(self.identity)

    def __str__(self) -> str:
        outputs = ", ".join(name for name, _ in self.outputs)
        return f"epilogue {self.identity[:8]} ({outputs} of {', '.join(['accum', *self.leaves])})"

    def __repr__(self) -> str:
        return f"<{self}>"


def canonical(nodes: list[Node], outputs: list[tuple[str, int]]) -> tuple[Graph, list[int]]:
    """The graph of the nodes that the outputs need, in an order that depends on nothing else.

    Also returns which of the given nodes became each node of the graph.
    """
    order: dict[int, int] = {}
    for _, root in outputs:
        stack = [root]
        while stack:
            index = stack[-1]
            waiting = [i for i in reversed(nodes[index].inputs) if i not in order]
            if waiting:
                stack += waiting
                continue
            stack.pop()
            order.setdefault(index, len(order))
    renumbered = tuple(
        Node(
            nodes[old].op,
            tuple(order[i] for i in nodes[old].inputs),
            nodes[old].shape,
            nodes[old].attributes,
        )
        for old in order
    )
    return Graph(renumbered, tuple((name, order[i]) for name, i in outputs)), list(order)


def rotated_columns(node: Node) -> int | None:
    """Of a rotation: the columns of the heads that it is about, which come first; None: all."""
    heads = dict(node.attributes).get("heads")
    return None if heads is None else int(heads * node["head_dim"])


def _column_multiple(node: Node) -> int:
    """What the columns of its first input must be a multiple of."""
    if node.op == "rotate":
        return int(node["head_dim"])
    if node.op == "hadamard":
        return HADAMARD_BLOCK
    if node.op == "reduce":
        return int(dict(node.attributes).get("block", 1))
    if node.op == "repeat":
        return 1
    granularity = node["granularity"]
    pair = 2 if node.op == "split" else 1
    return pair * (1 if granularity == "halves" else int(granularity))


def _call(node: Node) -> str:
    inputs = [f"%{i}" for i in node.inputs]
    return f"{node.op}({', '.join(inputs + [f'{k}={v}' for k, v in node.attributes])})"


__all__ = ["ARITY", "Graph", "Node", "Problem", "Shape"]

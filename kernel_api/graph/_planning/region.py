"""Nodes that become one kernel: an anchor and what is folded into its epilogue."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from kernel_api.graph._enums import data_type
from kernel_api.graph._node import Node
from kernel_api.graph._planning.fold import STATIC_INPUTS, TABLES, Folded, folded, rounded
from kernel_api.graph._planning.frame import Frame, Layout
from kernel_api.graph._tensor import Tensor


@dataclass
class Region:
    """One kernel's nodes.

    Attributes:
        anchor: What makes the accumulator; None where that is loaded.
        accumulator: The tensor that the epilogue starts from.
        frame: How tensors are seen as matrices.
        nodes: Folded ones, in order; without the anchor.
        stored: Tensors that are written, in the order of ``nodes``.
    """

    anchor: Node | None
    accumulator: Tensor
    frame: Frame
    nodes: list[Node] = field(default_factory=list)
    stored: list[Tensor] = field(default_factory=list)

    @property
    def covered(self) -> tuple[Node, ...]:
        return (*([self.anchor] if self.anchor else []), *self.nodes)

    @property
    def inner(self) -> set[int]:
        """Ids of the tensors that are values of the epilogue."""
        own = {id(t) for node in self.nodes for t in node.writes}
        return own | {id(self.accumulator)}

    @property
    def in_double(self) -> bool:
        """Whether the kernel computes in float64."""
        first = self.accumulator if self.anchor is None else next(self.anchor.reads)
        return first.data_type is data_type.DOUBLE

    @property
    def is_plain(self) -> bool:
        """Whether all that is stored is the accumulator as it is."""
        return not self.nodes and len(self.stored) == 1

    def operands(self) -> dict[str, Operand]:
        """What the epilogue reads beside the accumulator, by name."""
        found: dict[str, Operand] = {}
        inner = self.inner
        names: dict[tuple[int, bool], str] = {}
        for node in self.nodes:
            for argument, given in node.inputs.items():
                if not isinstance(given, Tensor) or id(given) in inner:
                    continue
                if argument in STATIC_INPUTS.get(node.op, ()) and given.is_constant:
                    continue
                is_table = argument in TABLES.get(node.op, ())
                key = (id(given), is_table)
                if key not in names:
                    names[key] = f"{'s' if given.is_pass_by_value else 'i'}{len(names)}"
                    found[names[key]] = Operand(given, self._layout(given, is_table), is_table)
        return found

    def _layout(self, tensor: Tensor, is_table: bool) -> Layout | None:
        if tensor.is_pass_by_value:
            return (), ()
        if is_table:
            return _table_layout(tensor)
        return self.frame.of(tensor)

    def function(self, main: Tensor, others: list[Tensor]) -> Callable[..., Any]:
        """A function of the accumulator, as :class:`EpilogueArguments` takes it.

        Args:
            main: What becomes D.
            others: What is stored beside it.
        """
        operands = self.operands()
        steps = [(node, _fold_of(node, self.frame)) for node in self.nodes]
        names = {(id(o.tensor), o.is_table): name for name, o in operands.items()}
        reread = {id(t) for node in self.nodes for t in node.reads}
        in_double = self.in_double

        def epilogue(accumulator: Any, **given: Any) -> Any:
            values: dict[int, Any] = {}

            def keep(tensor: Tensor, value: Any) -> None:
                # What is stored and not read here is rounded when it is stored.
                is_read = id(tensor) in reread
                values[id(tensor)] = rounded(value, tensor, in_double) if is_read else value

            if self.anchor is None:
                values[id(self.accumulator)] = accumulator  # it was loaded as it is
            else:
                keep(self.accumulator, accumulator)
            for node, fold in steps:
                found = fold(_inputs(node, values, given, names))
                for result, tensor in node.outputs.items():
                    keep(tensor, found[result])
            stored = [values[id(tensor)] for tensor in (main, *others)]
            return tuple(stored) if others else stored[0]

        kinds = inspect.Parameter
        parameters = [kinds("accumulator", kinds.POSITIONAL_OR_KEYWORD)]
        parameters += [kinds(name, kinds.KEYWORD_ONLY) for name in operands]
        epilogue.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        return epilogue


@dataclass(frozen=True)
class Operand:
    """What an epilogue reads.

    Attributes:
        layout: Shape and strides as the frame sees it; None if it cannot.
        is_table: Whether it is read as a table.
    """

    tensor: Tensor
    layout: Layout | None
    is_table: bool = False


def _fold_of(node: Node, frame: Frame) -> Folded:
    fold = folded(node, frame)
    assert callable(fold), fold
    return fold


def _inputs(
    node: Node,
    values: Mapping[int, Any],
    given: Mapping[str, Any],
    names: Mapping[tuple[int, bool], str],
) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for argument, tensor in node.inputs.items():
        assert isinstance(tensor, Tensor)
        if id(tensor) in values:
            found[argument] = values[id(tensor)]
        elif argument in STATIC_INPUTS.get(node.op, ()) and tensor.is_constant:
            found[argument] = tensor.value
        else:
            found[argument] = given[names[id(tensor), argument in TABLES.get(node.op, ())]]
    return found


def _table_layout(tensor: Tensor) -> Layout | None:
    """A table (M, columns): leading modes of extent 1 go."""
    dim, stride = list(tensor.dim), list(tensor.stride)
    while len(dim) > 2 and dim[0] == 1:
        dim.pop(0), stride.pop(0)
    return (tuple(dim), tuple(stride)) if len(dim) == 2 else None


class Units:
    """Which nodes are one kernel so far, and what depends on what."""

    def __init__(self, nodes: Iterable[Node]) -> None:
        self.nodes = list(nodes)
        self.producer = {id(t): n for n in self.nodes for t in n.writes}
        self.consumers: dict[int, list[Node]] = {}
        for node in self.nodes:
            for tensor in node.reads:
                self.consumers.setdefault(id(tensor), []).append(node)
        self._unit = {id(node): number for number, node in enumerate(self.nodes)}
        self.taken: set[int] = set()

    def merge(self, nodes: Iterable[Node]) -> None:
        """Make them one unit, which nothing joins any more."""
        listed = list(nodes)
        number = self._unit[id(listed[0])]
        for node in listed:
            self._unit[id(node)] = number
            self.taken.add(id(node))

    def is_free(self, node: Node) -> bool:
        return id(node) not in self.taken

    def behind(self, members: Iterable[Node]) -> set[int]:
        """Ids of the nodes that can only run when these have."""
        own = {id(node) for node in members}
        pending = [node for node in self.nodes if id(node) in own]
        found: set[int] = set()
        while pending:
            node = pending.pop()
            following = [c for t in node.writes for c in self.consumers.get(id(t), ())]
            units = {self._unit[id(c)] for c in following if id(c) not in own}
            for other in self.nodes:
                if self._unit[id(other)] in units and id(other) not in found | own:
                    found.add(id(other))
                    pending.append(other)
        return found

    def leaves(self, tensor: Tensor, members: set[int]) -> bool:
        """Whether a tensor is needed outside of some nodes."""
        readers = self.consumers.get(id(tensor), ())
        return not tensor.is_virtual or any(id(node) not in members for node in readers)

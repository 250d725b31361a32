"""What all operations of a graph are added with."""

from __future__ import annotations

import numbers
from collections.abc import Iterable, Mapping
from typing import Any

from kernel_api._numbers import truth, whole_number
from kernel_api.errors import GraphError
from kernel_api.graph._copies import Uncopied
from kernel_api.graph._enums import as_data_type, data_type, element_type
from kernel_api.graph._node import Body, Node, operation
from kernel_api.graph._options import as_held, as_number, refused, text, what_holds
from kernel_api.graph._tensor import Tensor

#: Of numbers that are known when the graph is made.
_ELEMENTS = {bool: data_type.BOOLEAN, int: data_type.INT32, float: data_type.FLOAT}


class Builder(Uncopied):
    """Base of the classes that have a graph's operations as methods.

    Attributes:
        nodes: In the order that they were added.
        tensors: Every tensor, those that are numbers too.
    """

    nodes: list[Node]
    tensors: list[Tensor]

    def check_open(self, what: str) -> None:
        """Raise GraphStateError if the graph may not be changed any more."""
        raise NotImplementedError

    def _add(
        self,
        op: str,
        inputs: Mapping[str, Any],
        *,
        name: str | None = None,
        compute: Any = None,
        results: Iterable[str] | None = None,
        given_results: Mapping[str, Tensor | None] | None = None,
        body: Body | None = None,
        **attributes: Any,
    ) -> Any:
        """A node with tensors for what it writes.

        Args:
            op: Name of the operation.
            inputs: By argument name: tensors, numbers, tuples of tensors, or None.
            name: Of the node; made of the operation otherwise.
            compute: Type of the arithmetic; the graph's by default.
            results: Those of the operation's results that are wanted; all by default.
            given_results: Results that are written to tensors which the user made before.
            attributes: As JSON can hold them.

        Returns:
            The one result, or a tuple with a place for every result of the operation; None in the
            places of those that are not wanted.
        """
        self.check_open(f"{op} cannot be added")
        label = self._node_name(op, name)
        node = Node(
            op,
            label,
            {key: self._given(value, label, key) for key, value in inputs.items()},
            attributes,
            as_data_type(compute),
            body,
        )
        names = operation(op).result
        wanted = names if results is None else tuple(results)
        for result in names:
            given = (given_results or {}).get(result)
            if given is not None:
                node.outputs[result] = self._written_by(node, given)
            elif result in wanted:
                made = self._new_tensor(name=f"{label}::{result}", is_virtual=True, producer=node)
                node.outputs[result] = made
        self.nodes.append(node)
        found = tuple(node.outputs.get(result) for result in names)
        return found[0] if len(found) == 1 else found

    def _new_tensor(self, **fields: Any) -> Tensor:
        tensor = Tensor(self, **fields)
        self.tensors.append(tensor)
        return tensor

    def _node_name(self, op: str, name: str | None) -> str:
        taken = {node.name for node in self.nodes}
        name = text(op, "name", name)
        if name:
            if name in taken:
                raise GraphError(
                    f"Node name {name} already used; nodes of a graph have names of their own"
                )
            return name
        return next(
            label
            for label in (f"{op}.{i}" for i in range(len(self.nodes) + 1))
            if label not in taken
        )

    def _given(self, value: Any, node: str, argument: str) -> Any:
        if value is None:
            return None
        if isinstance(value, (tuple, list)):
            return tuple(
                self._tensor_of(one, f"{node}::{argument}::{i}") for i, one in enumerate(value)
            )
        return self._tensor_of(value, f"{node}::{argument}")

    def _tensor_of(self, value: Any, name: str) -> Tensor:
        """The tensor of this graph that a value stands for."""
        if isinstance(value, Tensor):
            if value._owner is not self:
                raise GraphError(f"{name} is {value}, a tensor of another graph")
            return value
        if isinstance(value, numbers.Real):
            return self._constant(value, name)
        raise GraphError(
            f"{name} is a {type(value).__name__}; expected a tensor of this graph or a number"
        )

    def _constant(self, value: Any, name: str, element: Any = None) -> Tensor:
        """A number that is known now.

        Raises GraphError for what is none, or none of the type that is asked for.
        """
        what = name or "tensor_scalar"
        known: bool | int | float | None = truth(value)
        if known is None:
            known = whole_number(value)
        if known is None:
            known = as_number(value)
        if known is None:
            raise refused(what, "value", value, "a number")
        kind = _ELEMENTS[type(known)] if element is None else as_data_type(element)
        if element is not None and kind is not data_type.NOT_SET:
            known = _held(what, known, kind)
        made = self._new_tensor(name=name, dim=(1,), stride=(1,), element=kind)
        made.is_pass_by_value = True
        made.value = known
        return made

    def _written_by(self, node: Node, tensor: Tensor) -> Tensor:
        if not isinstance(tensor, Tensor) or tensor._owner is not self:
            raise GraphError(f"{node} can write to tensors of its own graph only")
        if tensor.producer is not None:
            raise GraphError(f"{tensor} is written by {tensor.producer} and by {node}")
        tensor.producer = node
        return tensor


def _held(what: str, value: bool | int | float, kind: data_type) -> bool | int | float:
    """A number as a type of whole numbers holds it, and others as they are; raises GraphError where
    it does not."""
    element = element_type(kind).torch
    if element.is_floating_point:
        return value
    found = as_held(what, value, element)
    if found is None:
        raise GraphError(f"{what} has value = {value!r}; {what_holds(element)}")
    return bool(found) if kind is data_type.BOOLEAN else found

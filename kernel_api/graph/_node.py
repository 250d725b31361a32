"""Nodes of a graph, and what the library knows of each operation."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, NamedTuple

from kernel_api.errors import GraphError
from kernel_api.graph._copies import Uncopied
from kernel_api.graph._enums import data_type, element_type
from kernel_api.graph._kinds import WHOLE, Kind
from kernel_api.graph._tensor import Tensor, packed_strides
from kernel_api.operands import repeats

#: What an operation is given: a tensor, several, or none.
Given = Tensor | tuple[Tensor, ...] | None

_OPERATIONS: dict[str, Operation] = {}


class Operation:
    """What there is to know of one kind of node. Subclasses register themselves by ``name``.

    Attributes:
        name: As the method of the graph is called.
        result: Names of what it writes, in order: suffixes of default tensor names.
        inputs: Names of what it reads.
        optional: Those of ``result`` and of ``inputs`` that a node may lack.
        numbers: Those of ``inputs`` that may be passed by value.
        several: Those of ``inputs`` that are tuples of tensors.
        attributes: Names of everything else, with the kinds of their values.
        has_body: Whether a node may have a :class:`Body`.
        keeps_types: Whether it moves elements alone, which then come as they are.
    """

    name: ClassVar[str] = ""
    result: ClassVar[tuple[str, ...]] = ()
    inputs: ClassVar[tuple[str, ...]] = ()
    optional: ClassVar[tuple[str, ...]] = ()
    numbers: ClassVar[tuple[str, ...]] = ()
    several: ClassVar[tuple[str, ...]] = ()
    attributes: ClassVar[Mapping[str, Kind]] = {}
    has_body: ClassVar[bool] = False
    keeps_types: ClassVar[bool] = False

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if cls.name:
            _OPERATIONS[cls.name] = cls()

    def check(self, node: Node) -> None:
        """Raise GraphError where a node that has what is declared contradicts itself."""

    def infer(self, node: Node) -> None:
        """Give the outputs the dim, stride and data type that they do not have yet.

        Inputs have all three. What the user set stays, if it fits.

        Raises:
            GraphError: the inputs contradict each other or the outputs, or nothing can be inferred.
        """
        raise NotImplementedError

    def free_dims(self, node: Node) -> bool:
        """Let the extents of the outputs follow from those of the inputs, which are about to
        change: where they say what is computed, attributes say it from now on.

        Returns False where they cannot follow; then they stay.
        """
        return True

    def evaluate(self, node: Node, given: Mapping[str, Any]) -> dict[str, Any]:
        """The outputs by name, computed by torch on any device.

        Args:
            given: For each input that is there, a torch tensor of its dim (a number for what is
                passed by value, a tuple for several). Floating ones come in ``node.arithmetic``,
                the type of the computation, unless ``keeps_types``; others as they are.

        Results are converted to the data types of the outputs, and copied to their strides, by the
        caller.
        """
        raise NotImplementedError


class Body(NamedTuple):
    """Pointwise nodes that are a function of one tensor: those of a modified attention score.

    They stand in no list of the graph's nodes. What they read beside ``argument``, and constants,
    is in the inputs of the node that they belong to.
    """

    nodes: tuple[Node, ...]
    argument: Tensor
    result: Tensor


class Node(Uncopied):
    """One operation of a graph on its tensors.

    Attributes:
        op: Name of the operation.
        name: Of this node, its own within the graph.
        inputs: Tensors by argument name, those that are given; several in a tuple.
        outputs: Tensors by result name, those that are asked for.
        attributes: Everything else, as JSON can hold it.
        compute: Type of the arithmetic.
        body: What a function among its arguments is made of; see :class:`Body`.
    """

    __slots__ = ("attributes", "body", "compute", "inputs", "name", "op", "outputs")

    def __init__(
        self,
        op: str,
        name: str,
        inputs: Mapping[str, Given],
        attributes: Mapping[str, Any],
        compute: data_type = data_type.NOT_SET,
        body: Body | None = None,
    ) -> None:
        self.op = op
        self.name = name
        self.inputs: dict[str, Tensor | tuple[Tensor, ...]] = {
            key: value for key, value in inputs.items() if value is not None
        }
        self.attributes = dict(attributes)
        self.compute = compute
        self.body = body
        self.outputs: dict[str, Tensor] = {}

    def copy(self) -> Node:
        """Another node of the same tensors, which may be changed."""
        made = Node(self.op, self.name, self.inputs, self.attributes, self.compute, self.body)
        made.outputs = dict(self.outputs)
        return made

    @property
    def operation(self) -> Operation:
        return operation(self.op)

    @property
    def arithmetic(self) -> Any:
        """The torch type that floating inputs are computed in: float32, or float64 if the type of
        the arithmetic or an input is."""
        import torch

        kinds = {self.compute, *(tensor.data_type for tensor in self.reads)}
        return torch.float64 if data_type.DOUBLE in kinds else torch.float32

    def __getitem__(self, name: str) -> Any:
        """An attribute; None if it is not there."""
        return self.attributes.get(name)

    def input(self, name: str) -> Tensor:
        """An input that must be there."""
        found = self.inputs.get(name)
        if not isinstance(found, Tensor):
            raise GraphError(f"{self} needs {name}, which is not given")
        return found

    def optional(self, name: str) -> Tensor | None:
        found = self.inputs.get(name)
        return found if isinstance(found, Tensor) else None

    @property
    def reads(self) -> Iterator[Tensor]:
        """Every tensor that it reads, offsets of ragged ones too."""
        for given in self.inputs.values():
            for tensor in given if isinstance(given, tuple) else (given,):
                yield tensor
                if tensor.ragged_offset is not None:
                    yield tensor.ragged_offset
        for tensor in self.outputs.values():
            if tensor.ragged_offset is not None:
                yield tensor.ragged_offset

    @property
    def writes(self) -> Iterator[Tensor]:
        yield from self.outputs.values()

    def __str__(self) -> str:
        return f"{self.op} {self.name!r}"

    def __repr__(self) -> str:
        reads = ", ".join(f"{name}={value}" for name, value in self.inputs.items())
        writes = ", ".join(map(str, self.outputs.values()))
        return f"<{writes} = {self.op}({reads}) {self.name!r}>"


def operation(name: str) -> Operation:
    """Raises GraphError for what is no operation."""
    import kernel_api.graph._operations  # noqa: F401  (fills the table)

    if name not in _OPERATIONS:
        raise GraphError(f"there is no operation {name!r}; there are {', '.join(_OPERATIONS)}")
    return _OPERATIONS[name]


# What operations need to infer ---------------------------------------------------------------


def settle(
    node: Node,
    tensor: Tensor | None,
    dim: tuple[int, ...],
    stride: tuple[int, ...] | None = None,
    element: data_type = data_type.NOT_SET,
) -> None:
    """Give an output what it lacks; raise GraphError where the user's dim is another.

    Args:
        tensor: Of ``node.outputs``; None is passed over.
        dim: What it has to be.
        stride: Row-major by default.
        element: What it is unless the user, or the graph's default, says otherwise.
    """
    if tensor is None:
        return
    if tensor.dim and tensor.dim != tuple(dim):
        raise GraphError(
            f"{tensor}, which {node} writes, has dim {list(tensor.dim)}; its inputs give it "
            f"{list(dim)}"
        )
    tensor.dim = tuple(dim)
    if not tensor.stride:
        tensor.stride = tuple(stride) if stride is not None else packed_strides(dim)
    elif len(tensor.stride) != len(tensor.dim):
        raise GraphError(
            f"{tensor} has dim {list(tensor.dim)} and stride {list(tensor.stride)}; they need one "
            f"number for each mode"
        )
    if tensor.data_type is data_type.NOT_SET:
        tensor.data_type = element


def strides_of(*tensors: Tensor) -> tuple[int, ...] | None:
    """Of the first that can be written as it lies; None, which is row-major, if none can."""
    return next((one.stride for one in tensors if not repeats(one.dim, one.stride)), None)


def check_single(node: Node, *names: str) -> None:
    """Raise GraphError where an input that is a number has several elements."""
    for name in names:
        one = node.optional(name)
        if one is not None and math.prod(one.dim) != 1:
            raise GraphError(f"{node} has {name} of dim {list(one.dim)}; expected one number")


def check_whole(node: Node, *names: str) -> None:
    """Raise GraphError where an input is of a floating type, or known now and no whole number of
    64 bits."""
    for name in names:
        one = node.optional(name)
        if one is not None and one.value is not None and not WHOLE.holds(one.value):
            raise GraphError(f"{node} has {name} = {one.value!r}; expected {WHOLE.what}")
        if one is not None and not element_type(one.data_type).is_integer:
            raise GraphError(
                f"{node} has {name} of {one.data_type.name}; expected INT64, or other integers"
            )


def broadcast_dim(node: Node, *dims: tuple[int, ...]) -> tuple[int, ...]:
    """What extents become together, as NumPy broadcasts; raises GraphError if they do not."""
    rank = max(map(len, dims), default=0)
    padded = [(1,) * (rank - len(dim)) + tuple(dim) for dim in dims]
    result = []
    for extents in zip(*padded, strict=True):
        other = {extent for extent in extents if extent != 1}
        if len(other) > 1:
            shown = " and ".join(str(list(dim)) for dim in dims)
            raise GraphError(f"the inputs of {node} have dims {shown}, which do not broadcast")
        result.append(other.pop() if other else 1)
    return tuple(result)

"""Tensors of a graph: descriptions, not data."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from kernel_api.errors import GraphError
from kernel_api.graph._copies import Uncopied
from kernel_api.graph._enums import as_data_type, data_type, member_of, tensor_reordering
from kernel_api.graph._options import one_whole, text, wholes

if TYPE_CHECKING:
    from kernel_api.graph._node import Node


class Tensor(Uncopied):
    """One tensor of a graph. Setters return it, so that they can be chained.

    A tensor is *virtual* if it lives inside the graph only: results of operations are, until
    ``set_output(True)``; those made by ``tensor`` and ``tensor_like`` are not.

    Attributes:
        name: Of the user's choice, else made of the node that writes it.
        uid: A number that is its own within the graph; those that are not set are given when the
            graph is validated.
        dim: Extents; empty until they are set or inferred.
        stride: In elements; empty until they are set or inferred.
        data_type: Of the elements; NOT_SET until it is set or inferred.
        is_virtual: Whether it has no memory of the caller's.
        is_pass_by_value: Whether it is a number that the host gives.
        value: That number, if it is known when the graph is made; else None.
        device: Of the tensor that it was made like; None otherwise.
        producer: The node that writes it; None for inputs.
        ragged_offset: Tensor of the offsets, in elements, at which its batches start.
    """

    __slots__ = (
        "_owner",
        "data_type",
        "device",
        "dim",
        "is_pass_by_value",
        "is_virtual",
        "name",
        "producer",
        "ragged_offset",
        "reordering",
        "stride",
        "uid",
        "value",
    )

    def __init__(
        self,
        owner: Any,
        *,
        name: str = "",
        dim: Iterable[int] = (),
        stride: Iterable[int] = (),
        element: data_type = data_type.NOT_SET,
        is_virtual: bool = False,
        producer: Node | None = None,
    ) -> None:
        self._owner = owner
        self.name = name
        self.uid: int | None = None
        self.dim: tuple[int, ...] = tuple(dim)
        self.stride: tuple[int, ...] = tuple(stride)
        self.data_type = element
        self.is_virtual = is_virtual
        self.is_pass_by_value = False
        self.value: float | int | bool | None = None
        self.device: Any = None
        self.producer = producer
        self.ragged_offset: Tensor | None = None
        self.reordering = tensor_reordering.NONE

    # Setters -----------------------------------------------------------------------------

    def set_name(self, name: str) -> Tensor:
        self._change()
        self.name = text(str(self), "name", name)
        return self

    def set_uid(self, uid: int) -> Tensor:
        """Raises GraphError if another tensor of the graph has the number."""
        self._change()
        self._owner.claim_uid(self, one_whole(str(self), "uid", uid))
        return self

    def set_data_type(self, element: Any) -> Tensor:
        """Takes a ``data_type``, a type of torch, NumPy or CuTe, or a name."""
        self._change()
        self.data_type = as_data_type(element)
        return self

    def set_dim(self, dim: Iterable[int]) -> Tensor:
        self._change()
        self.dim = _whole_numbers(self, "dim", dim, 0)
        return self

    def set_stride(self, stride: Iterable[int]) -> Tensor:
        self._change()
        self.stride = _whole_numbers(self, "stride", stride, 0)
        return self

    def set_output(self, is_output: bool = True) -> Tensor:
        """Whether the caller gets it: then it is not virtual."""
        return self.set_is_virtual(not is_output)

    def set_is_virtual(self, is_virtual: bool) -> Tensor:
        self._change()
        if is_virtual and self.producer is None:
            raise GraphError(f"{self} is written by no operation, so it cannot be virtual")
        self.is_virtual = bool(is_virtual)
        return self

    def set_is_pass_by_value(self, is_pass_by_value: bool) -> Tensor:
        self._change()
        if is_pass_by_value and self.producer is not None:
            raise GraphError(f"{self} is written by an operation, so it is no number of the host's")
        self.is_pass_by_value = bool(is_pass_by_value)
        return self

    def set_ragged_offset(self, offset: Tensor) -> Tensor:
        self._change()
        if not isinstance(offset, Tensor):
            raise GraphError(
                f"the ragged offset of {self} is a {type(offset).__name__}; expected a tensor of "
                f"the graph"
            )
        self.ragged_offset = offset
        return self

    def set_reordering_type(self, reordering: Any) -> Tensor:
        """F16x16 is taken for the scores that the composite attention graph stores: they are kept
        in a layout of this library's own, that only its backward graph reads."""
        self._change()
        self.reordering = member_of(tensor_reordering, reordering)
        return self

    # Getters -----------------------------------------------------------------------------

    def get_name(self) -> str:
        return self.name

    def get_uid(self) -> int | None:
        return self.uid

    def get_data_type(self) -> data_type:
        return self.data_type

    def get_dim(self) -> list[int]:
        return list(self.dim)

    def get_stride(self) -> list[int]:
        return list(self.stride)

    def get_is_virtual(self) -> bool:
        return self.is_virtual

    def get_is_pass_by_value(self) -> bool:
        return self.is_pass_by_value

    def get_ragged_offset(self) -> Tensor | None:
        return self.ragged_offset

    def get_reordering_type(self) -> tensor_reordering:
        return self.reordering

    @property
    def rank(self) -> int:
        return len(self.dim)

    @property
    def is_input(self) -> bool:
        """Whether no operation writes it."""
        return self.producer is None

    @property
    def is_constant(self) -> bool:
        """Whether it is a number that is known when the graph is made."""
        return self.value is not None

    def _change(self) -> None:
        self._owner.check_open(f"{self} cannot be changed")

    def __str__(self) -> str:
        return self.name or (f"tensor {self.uid}" if self.uid is not None else "a tensor")

    def __repr__(self) -> str:
        kind = "virtual " if self.is_virtual else ""
        element = self.data_type.name
        return f"<{kind}{self} {element}{list(self.dim)}:{list(self.stride)} uid={self.uid}>"


def constant(name: str, value: float) -> Tensor:
    """A number that planning knows."""
    made = Tensor(None, name=name, dim=(1,), stride=(1,), element=data_type.FLOAT)
    made.is_pass_by_value, made.value = True, value
    return made


def with_a_mode(numbers: Iterable[int]) -> tuple[int, ...]:
    """Extents or strides of data as a graph has them, in which no dim is one that is not known."""
    return tuple(numbers) or (1,)


def packed_strides(dim: Iterable[int], order: Iterable[int] | None = None) -> tuple[int, ...]:
    """Strides of a tensor without gaps.

    Args:
        dim: Extents.
        order: Modes from the slowest to the fastest; as they come (row-major) by default.
    """
    extents = tuple(dim)
    strides, step = [0] * len(extents), 1
    for mode in reversed(tuple(range(len(extents)) if order is None else order)):
        strides[mode] = step
        step *= max(extents[mode], 1)
    return tuple(strides)


def memory_order(dim: Iterable[int], stride: Iterable[int]) -> tuple[int, ...]:
    """Modes from the slowest to the fastest in memory; of equal strides as they come."""
    pairs = list(zip(dim, stride, strict=True))
    return tuple(sorted(range(len(pairs)), key=lambda mode: -pairs[mode][1]))


def _whole_numbers(tensor: Tensor, what: str, given: Iterable[int], least: int) -> tuple[int, ...]:
    numbers = tuple(wholes(str(tensor), what, given))
    if any(number < least for number in numbers):
        raise GraphError(f"{what} of {tensor} is {numbers}; expected numbers of {least} or more")
    return numbers

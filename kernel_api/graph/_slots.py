"""What the caller of an execution has to give, and whether it lies as it may."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from kernel_api.errors import DeviceError, VariantPackError
from kernel_api.graph._options import as_held, what_holds
from kernel_api.graph._planning.plan import size_of
from kernel_api.graph._tensor import Tensor

#: Addresses have 64 bits.
_END_OF_MEMORY = 2**64

#: Index of a device that no tensor is on.
NOWHERE = -2


class Slot(NamedTuple):
    """What the caller has to give.

    Attributes:
        element, device: Of torch.
        place: Index of the GPU, -1 for the CPU, as tensors give it; for numbers, another one.
        size: Bytes from the first element to behind the last. Of a ragged tensor those of the first
            one: where the others lie is known on the device alone.
    """

    tensor: Tensor
    element: Any
    device: Any
    place: int
    dim: tuple[int, ...]
    stride: tuple[int, ...]
    size: int

    def __str__(self) -> str:
        return f"{self.tensor} (uid {self.tensor.uid})"


def check_apart(slots: list[Slot], placed: Mapping[int, int], values: list[Any]) -> None:
    """Raise VariantPackError where memory is shared that is written.

    Args:
        placed: Addresses by number of the slot, of those that are in memory.
        values: What was given, by number.
    """
    placed = {number: start for number, start in placed.items() if slots[number].size}
    for number, start in placed.items():
        if slots[number].tensor.is_input:
            continue
        end = start + slots[number].size
        for other, other_start in placed.items():
            meets = start < other_start + slots[other].size and other_start < end
            if meets and other != number and _meet(values[number], values[other]):
                raise _shared(slots[number], slots[other])


def _shared(written: Slot, other: Slot) -> VariantPackError:
    what = "reads" if other.tensor.is_input else "writes, too"
    return VariantPackError(
        f"{written}, which the graph writes, shares memory with {other}, which it {what}; give "
        f"{written.tensor} memory of its own"
    )


def _meet(one: Any, other: Any) -> bool:
    """Whether two tensors share memory; rows side by side do not."""
    from kernel_api.operands import Operand, overlap

    return overlap(Operand(one), Operand(other))


def check_readable(value: Any, slot: Slot) -> None:
    """Raise VariantPackError for a tensor that torch tells no strides or no address of."""
    import torch

    if not isinstance(value, torch.Tensor):
        return
    if value.layout is not torch.strided or value.is_nested:
        kind = "nested" if value.is_nested else value.layout
        raise VariantPackError(f"{slot} is a {kind} tensor; expected a strided one")
    if torch._C._functorch.is_functorch_wrapped_tensor(value):
        raise VariantPackError(
            f"{slot} has no memory of its own, as inside torch.func's vmap, grad and jvp, which "
            f"graphs cannot follow; execute it outside of them"
        )


def number_for(value: Any, slot: Slot) -> int | float:
    """A number of the host's as kernels take it: 0 or 1 for what is true or not.

    Raises VariantPackError for what is none, or cannot be of the slot's type.
    """
    if hasattr(value, "item"):
        extents = tuple(getattr(value, "shape", ()))
        if math.prod(extents) != 1:
            raise VariantPackError(
                f"{slot.tensor} is a number of the host's; a tensor of {list(extents)} was given"
            )
        value = value.item()
    if not isinstance(value, (int, float)):
        raise VariantPackError(
            f"{slot.tensor} is a number of the host's; a {type(value).__name__} was given"
        )
    found = as_held(str(slot.tensor), value, slot.element)
    if found is None:
        raise VariantPackError(
            f"{slot.tensor} is a number of the host's; {value!r} was given and "
            f"{what_holds(slot.element)}"
        )
    return found


def at_address(address: int, slot: Slot) -> Any:
    """Memory that the caller gives by its address, as a torch tensor.

    Raises VariantPackError for what is no address of such elements.
    """
    import torch

    size = size_of(slot.tensor)
    if size and (not 0 < address < _END_OF_MEMORY or address % slot.element.itemsize):
        raise VariantPackError(
            f"{slot} was given as the address {address}; expected that of its first element, a "
            f"multiple of {slot.element.itemsize}"
        )
    if not size:
        return torch.empty(slot.dim, dtype=slot.element, device=slot.device)

    class Memory:
        def __init__(self) -> None:
            field = "__cuda_array_interface__" if slot.device.type == "cuda" else None
            described = {"shape": (size,), "typestr": "|u1", "data": (address, False), "version": 3}
            setattr(self, field or "__array_interface__", described)

    if slot.device.type == "cuda":
        memory = torch.as_tensor(Memory(), device=slot.device)
    elif slot.device.type == "cpu":
        import numpy

        memory = torch.from_numpy(numpy.asarray(Memory()))
    else:
        raise DeviceError(f"an address was given for {slot.tensor}, which is on {slot.device}")
    return memory.view(slot.element).as_strided(slot.dim, slot.stride)


def shown(dim: Any, element: Any, device: Any) -> str:
    return f"{str(element).removeprefix('torch.')}{list(dim)} on {device}"

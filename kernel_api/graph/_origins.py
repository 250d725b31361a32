"""Where a launch finds what it takes, told by stand-ins for what the caller gives.

Arguments are made twice more of stand-ins, each of which is one of its kind: what the caller gives
under two names may be one tensor, or equal numbers, and the next time two.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from kernel_api.graph._enums import element_type
from kernel_api.graph._planning.frame import Layout
from kernel_api.graph._planning.steps import KernelStep, origin_of
from kernel_api.graph._tensor import Tensor
from kernel_api.kernel import Kernel

#: Numbers of the host's that stand in: each is met once, and all are between 0 and 1 or so large
#: that nothing else is.
_STEP, _FIRST = 2.0**-20, 1 << 20
_ROUNDS = 2  # numbers made of others differ between them
_MOST = 1 << 10  # stand-ins of a launch


class Ref(NamedTuple):
    """Where a tensor is found: in a slot, or as a view of what is there.

    Attributes:
        layout: Shape and strides of the view; None for what is in the slot, as it is.
        offset: Elements in front of its first.
    """

    slot: int
    layout: Layout | None = None
    offset: int = 0

    def read(self, slots: list[Any]) -> Any:
        found = slots[self.slot]
        if self.layout is None:
            return found
        return found.as_strided(*self.layout, found.storage_offset() + self.offset)


class Origins(NamedTuple):
    """Of what a launch takes.

    Attributes:
        fields: Of the tensors, in order.
        values: By name; None: it is the same whatever the caller gives.
    """

    fields: list[Ref]
    values: dict[str, Ref | None]


def origins(
    step: KernelStep, kernel: Kernel, ref: Callable[[Tensor, Layout | None], Ref]
) -> Origins | None:
    """None where it cannot be told: what is taken depends on what is given in another way.

    ref: Where a tensor of the graph is found, as a tensor of a layout.
    """
    try:
        one, other = (_Look(step, kernel, ref, salt) for salt in range(_ROUNDS))
    except Exception:  # stand-ins are no data; arguments may need some
        return None
    if one.origins is None or one.origins != other.origins or one.constants != other.constants:
        return None
    return one.origins


class _Look:
    """One of the times that arguments are made."""

    def __init__(self, step: KernelStep, kernel: Kernel, ref: Any, salt: int) -> None:
        self._ref, self._salt = ref, salt
        self._tensors: dict[int, tuple[Ref, Any]] = {}
        self._numbers: dict[Any, Ref] = {}
        self._alive: list[Any] = []
        self._is_told = True
        args = step.build(self._take)
        fields = [self._origin(tensor) for tensor in args.tensors]
        values = kernel._launch_operands(args)
        found = {name: self._origin(value) for name, value in values.items()}
        #: Numbers that are made of no number that is given, or of several.
        self.constants = {
            name: value
            for name, value in values.items()
            if found[name] is None and isinstance(value, (int, float))
        }
        told = [one for one in fields if one is not None]
        self.origins = Origins(told, found) if self._is_told and len(told) == len(fields) else None

    def _take(self, tensor: Tensor, layout: Layout | None = None, name: str = "") -> Any:
        if tensor.is_constant:
            return tensor.value
        if tensor.is_pass_by_value:
            return self._number(tensor)
        import torch

        ref: Ref = self._ref(tensor, layout)
        source, _ = origin_of(tensor)
        shape, stride = ref.layout or (source.dim, source.stride)
        element = element_type(tensor.data_type).torch
        made = torch.empty_strided(shape, stride, dtype=element, device="meta")
        self._tensors[made.untyped_storage()._cdata] = ref, made
        return made

    def _number(self, tensor: Tensor) -> Any:
        ref = self._ref(tensor, None)
        place = len(self._numbers) + self._salt * _MOST
        element = element_type(tensor.data_type)
        if element.kind == "float":
            made: Any = 0.5 + place * _STEP
        elif element.kind in ("int", "uint") and element.itemsize >= 4:
            made = _FIRST + place
        else:
            self._is_told = False
            return True
        self._numbers[made] = ref
        return made

    def _origin(self, value: Any) -> Ref | None:
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return self._numbers.get(value)
        if not hasattr(value, "untyped_storage"):
            return None
        found = self._tensors.get(value.untyped_storage()._cdata)
        if found is None:
            return None
        ref, own = found
        if value.dtype is not own.dtype:
            self._is_told = False
        offset = value.storage_offset()
        if (value.shape, value.stride(), offset) == (own.shape, own.stride(), 0):
            return ref
        return Ref(ref.slot, (tuple(value.shape), tuple(value.stride())), ref.offset + offset)

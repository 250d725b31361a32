"""One matrix for each group, wherever they lie in memory: what stands for a tensor (E, K, N)."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

from kernel_api._cached_property import cached_property
from kernel_api._numbers import whole_number
from kernel_api.arguments.scaled import ScaleMode
from kernel_api.dtypes import dtype
from kernel_api.errors import ArgumentError
from kernel_api.operands import MAX_ALIGNMENT, Layout, Operand

_FLOAT32, _INT64 = dtype("float32"), dtype("int64")

#: Bytes that addresses on a device are multiples of if nothing else is said.
_ALIGNMENT = 16

#: Which elements share a scale, by its rank: (), (E,), (E, N), (E, ceil(K/128), ceil(N/128)).
_MODES = (
    ScaleMode.PER_TENSOR,
    ScaleMode.PER_TENSOR,
    ScaleMode.PER_ROW,
    ScaleMode.BLOCK_128x128,
)

_layouts: dict[tuple[Any, ...], Layout] = {}
_LAYOUTS_KEPT = 4096


class Experts(Operand):
    """Matrices of one layout that lie anywhere. Kernels take ``tensor``, the addresses of all.

    Attributes:
        shape: (E, K, N); of an ``out`` (E, M, N).
        stride: Of one matrix, behind a 0 for the mode of groups.
        mode: Which elements share a scale; None: they carry none.
        scale: One tensor for all, as that of a tensor (E, K, N).
    """

    __slots__ = ("mode", "scale")

    discrete = True
    mode: ScaleMode | None
    scale: Operand | None

    #: A copy is of the same matrices.
    __reduce__ = object.__reduce__

    def _describe(self, count: int, shape: Any, stride: Any, element: Any, device: Any) -> None:
        look = (count, tuple(shape), tuple(stride), element, device)
        if look not in _layouts:
            if len(_layouts) >= _LAYOUTS_KEPT:
                _layouts.clear()
            count, shape, stride, element, device = look
            _layouts[look] = Layout((count, *shape), (0, *stride), element, device)
        self.layout = layout = _layouts[look]
        self.shape, self.stride = layout.shape, layout.stride
        self.dtype, self.device = layout.dtype, layout.device
        self.mode = self.scale = None

    def scaled(self, scale: Any) -> Experts:
        """The same in units of a scale, whose rank tells which elements share one.

        Raises:
            ArgumentError: it is not float32, or has a rank of none.
        """
        given = scale if isinstance(scale, Operand) else Operand(scale, "B_scale")
        if given.dtype is not _FLOAT32:
            raise ArgumentError(f"B_scale is {given.dtype}; expected float32")
        if given.rank >= len(_MODES):
            raise ArgumentError(
                f"B_scale has shape {given.shape}; expected (), (E,), (E, N) or "
                f"(E, ceil(K/128), ceil(N/128))"
            )
        made = copy.copy(self)
        made.scale, made.mode = given, _MODES[given.rank]
        return made

    def maker(self) -> Callable[[Any], Any]:
        """Of the addresses of other matrices, without a scale; anything else is taken as it is."""
        layout: dict[str, Any] = {"shape": self.shape[1:], "stride": self.stride[1:]}
        element, alignment = self.dtype, self.alignment

        def make(value: Any) -> Any:
            if getattr(value, "ndim", None) != 1:
                return value
            return ExpertPointers(value, **layout, dtype=element, alignment=alignment)

        return make

    def _align(self, addresses: int) -> None:
        """Of addresses that were joined by or."""
        bits = self.layout.stride_bits | addresses
        self._alignment = min(bits & -bits, MAX_ALIGNMENT)


class ExpertTensors(Experts):
    """A tensor for each group.

    Args:
        tensors: Matrices of one element type, one layout and on one device.
        name: What errors call them.

    Raises:
        ArgumentError: there are none, or one is unlike the first.
    """

    __slots__ = ("__dict__", "memory")

    memory: tuple[Operand, ...]

    def __init__(self, tensors: Sequence[Any], name: str = "B") -> None:
        if not tensors:
            raise ArgumentError(f"{name} is an empty list; expected a tensor for each group")
        self.memory = parts = tuple(
            one if isinstance(one, Operand) else Operand(one, f"{name}[{place}]")
            for place, one in enumerate(tensors)
        )
        first = parts[0]
        for place, part in enumerate(parts):
            if part.rank != 2:
                raise ArgumentError(f"{name}[{place}] has shape {part.shape}; expected a matrix")
            if part.layout is not first.layout:
                raise ArgumentError(
                    f"{name}[{place}] is {part!r}, unlike {name}[0], {first!r}; expected one "
                    f"element type, shape, strides and device for all"
                )
        self._describe(len(parts), first.shape, first.stride, first.dtype, first.device)
        self._address = first.address
        joined = 0
        for part in parts:
            joined |= part.alignment
        self._align(joined)

    @cached_property
    def tensor(self) -> Any:
        """int64 (E,): where each of them begins. It is copied to the device once."""
        import torch

        addresses = [part.address for part in self.memory]
        return torch.tensor(addresses, dtype=torch.int64, device="cpu").to(self.device)

    @property
    def has_data(self) -> bool:
        return self.memory[0].has_data


class ExpertPointers(Experts):
    """The addresses of a matrix for each group.

    Args:
        pointers: int64 (E,), contiguous, on the device of the matrices: so they may change
            between replays of a CUDA graph.
        shape: Of every matrix.
        stride: Of every matrix, in elements.
        dtype: Element type, in any spelling.
        alignment: Bytes that divide every address; a promise, as the addresses are not read.

    Raises:
        ArgumentError: pointers, shape or stride are no such thing.
    """

    __slots__ = ("memory",)

    def __init__(
        self,
        pointers: Any,
        *,
        shape: Sequence[int],
        stride: Sequence[int],
        dtype: Any,
        alignment: int = _ALIGNMENT,
    ) -> None:
        given = pointers if isinstance(pointers, Operand) else Operand(pointers, "pointers")
        if given.dtype is not _INT64 or given.rank != 1 or given.stride != (1,):
            raise ArgumentError(f"pointers are {given!r}; expected int64 (E,), contiguous")
        extents, steps = _of_a_matrix("shape", shape), _of_a_matrix("stride", stride)
        whole = whole_number(alignment)
        if whole is None or whole < 1 or whole & (whole - 1):
            raise ArgumentError(f"alignment is {alignment!r}; expected a power of two, in bytes")
        self.memory = (given,)
        self.tensor = given.tensor
        self._address = None
        self._describe(given.shape[0], extents, steps, _canonical(dtype), given.device)
        self._align(whole)


def _of_a_matrix(name: str, values: Any) -> tuple[int, ...]:
    """Two extents or strides; of torch and NumPy too."""
    given = tuple(values) if isinstance(values, (list, tuple)) else ()
    found = tuple(one for one in map(whole_number, given) if one is not None and one >= 0)
    if len(found) != 2 or len(given) != 2:
        shown = given or values
        raise ArgumentError(
            f"{name} is {shown!r}; expected that of one matrix, two whole numbers from 0 up"
        )
    return found


def _canonical(element: Any) -> Any:
    return dtype(element)


def experts(value: Any, name: str = "B") -> Operand:
    """A tensor as it is; a list or tuple of tensors as one operand."""
    if isinstance(value, Operand):
        return value
    return ExpertTensors(value, name) if isinstance(value, (list, tuple)) else Operand(value, name)


def memory_of(operand: Operand) -> tuple[Operand, ...]:
    """Every tensor that is known to be behind an operand."""
    return operand.memory if isinstance(operand, (ExpertTensors, ExpertPointers)) else (operand,)


def tensors_of(operand: Operand) -> list[Any]:
    """Those that have its elements, as far as they are known: none behind addresses."""
    if isinstance(operand, ExpertPointers):
        return []
    return [one.tensor for one in memory_of(operand)]

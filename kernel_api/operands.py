"""Operands: tensors as the registry sees them, whatever library made them."""

from __future__ import annotations

import sys
from typing import Any

from kernel_api.dtypes import DType, dtype
from kernel_api.errors import ArgumentError

#: Alignment is counted up to this many bytes; no kernel asks for more.
MAX_ALIGNMENT = 128


class Operand:
    """A tensor with its shape, strides, element type and device read once.

    Attributes:
        tensor: The torch tensor (other DLPack tensors are viewed as one, without a copy).
        shape: Extents in elements.
        stride: Strides in elements.
        dtype: The canonical :class:`~kernel_api.dtypes.DType`.
        device: The torch device.
    """

    __slots__ = ("_address", "_alignment", "device", "dtype", "shape", "stride", "tensor")

    #: Which elements share a scale; of a ScaledOperand.
    mode: Any = None
    _address: int | None

    def __init__(self, tensor: Any, name: str = "operand") -> None:
        torch = sys.modules.get("torch")
        if torch is None or not isinstance(tensor, torch.Tensor):
            tensor = _as_torch(tensor, name)
            torch = sys.modules["torch"]
        if tensor.layout is not torch.strided:
            raise ArgumentError(f"{name} is a {tensor.layout} tensor; expected a strided one")
        self.tensor = tensor
        self.shape: tuple[int, ...] = tuple(tensor.shape)
        self.stride: tuple[int, ...] = tensor.stride()
        self.dtype: DType = dtype(tensor.dtype)
        self.device = tensor.device
        self._alignment: int | None = None
        # Others than plain tensors may be without memory; those on meta tell their offset.
        plain = type(tensor) is torch.Tensor and not tensor.is_meta
        self._address = tensor.data_ptr() if plain else None

    @property
    def rank(self) -> int:
        return len(self.shape)

    @property
    def unit_mode(self) -> int | None:
        """Which of the last two modes has stride 1: -1, -2, or None if neither has."""
        stride = self.stride
        if not stride:
            return None
        if stride[-1] == 1:
            return -1
        return -2 if len(stride) > 1 and stride[-2] == 1 else None

    @property
    def has_data(self) -> bool:
        """False for meta and fake tensors: they can be compiled for, not run on."""
        return not (self.tensor.is_meta or _is_fake(self.tensor))

    @property
    def alignment(self) -> int:
        """Bytes, a power of two, that divide the address and every stride but the unit one.

        Meta and fake tensors have no address: their storage offset stands for it.
        """
        if self._alignment is None:
            itemsize, stride = self.dtype.itemsize, self.stride
            unit = self.unit_mode
            if unit == -1:
                stride = stride[:-1]
            elif unit == -2:
                stride = (*stride[:-2], stride[-1])
            bits = MAX_ALIGNMENT | (self.address or self.tensor.storage_offset() * itemsize)
            for one in stride:
                bits |= one * itemsize
            self._alignment = bits & -bits
        return self._alignment

    @property
    def address(self) -> int:
        """Of the first element; 0 for what has no memory (meta, fake and empty tensors)."""
        if self._address is None:
            self._address = self.tensor.data_ptr() if self.has_data else 0
        return self._address

    @property
    def span(self) -> int:
        """Bytes from the first element to behind the last."""
        shape, stride = self.shape, self.stride
        if 0 in shape:
            return 0
        itemsize = self.dtype.itemsize
        if len(shape) < 2:
            return (sum((e - 1) * s for e, s in zip(shape, stride, strict=True)) + 1) * itemsize
        reach = (shape[-1] - 1) * stride[-1] + (shape[-2] - 1) * stride[-2] + 1
        for mode in range(len(shape) - 2):
            reach += (shape[mode] - 1) * stride[mode]
        return reach * itemsize

    def __repr__(self) -> str:
        return f"{self.dtype.name}{list(self.shape)}:{list(self.stride)} on {self.device}"


def _as_torch(value: Any, name: str) -> Any:
    if isinstance(value, Operand):
        return value.tensor
    if not hasattr(value, "__dlpack__"):
        raise ArgumentError(
            f"{name} is a {type(value).__name__}; expected a torch tensor or one with __dlpack__"
        )
    import torch

    if isinstance(value, torch.Tensor):
        return value
    try:
        return torch.utils.dlpack.from_dlpack(value)
    except Exception as error:
        raise ArgumentError(f"{name} could not be viewed through DLPack: {error}") from error


def _is_fake(tensor: Any) -> bool:
    # A failed hasattr costs more than all else that is asked of a tensor.
    torch = sys.modules["torch"]
    return type(tensor) is not torch.Tensor and hasattr(tensor, "fake_mode")


def overlap(a: Operand, b: Operand) -> bool:
    """Whether two operands share memory. Never False for those that do.

    Slices of one buffer side by side (columns of a packed projection) are told apart when all
    their strides but the unit one are multiples of one row pitch.
    """
    start_a, start_b = a.address, b.address
    if start_a < start_b:
        if start_a + a.span <= start_b:
            return False
    elif start_b + b.span <= start_a:
        return False
    if not start_a or not start_b or a.device != b.device:
        return False
    pitch = _common_pitch(a, b)
    if pitch is None:
        return True
    offset = (start_b - start_a) % pitch
    return offset < _row_bytes(a) or offset + _row_bytes(b) > pitch


def _common_pitch(a: Operand, b: Operand) -> int | None:
    from math import gcd

    pitch = 0
    for operand in (a, b):
        unit = operand.unit_mode
        if unit is None:
            return None
        for mode, (extent, stride) in enumerate(zip(operand.shape, operand.stride, strict=True)):
            if mode != operand.rank + unit and extent > 1:
                pitch = gcd(pitch, stride * operand.dtype.itemsize)
    return pitch or None


def _row_bytes(operand: Operand) -> int:
    assert operand.unit_mode is not None
    return operand.shape[operand.unit_mode] * operand.dtype.itemsize


def self_overlapping(operand: Operand) -> bool:
    """Whether two indices of the operand are the same element (a broadcast, a window)."""
    shape, stride = operand.shape, operand.stride
    if 0 in shape:
        return False
    if len(shape) == 2 and stride[1] == 1 and stride[0] >= shape[1]:
        return False
    reach = 0
    modes = sorted(
        (stride, extent) for extent, stride in zip(shape, stride, strict=True) if extent > 1
    )
    for step, extent in modes:
        if step <= reach:
            return True
        reach += (extent - 1) * step
    return False

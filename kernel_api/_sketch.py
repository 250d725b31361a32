"""What stands for a tensor where kernels are compiled and torch is not imported."""

from __future__ import annotations

from dataclasses import dataclass

from kernel_api.dtypes import DType


@dataclass(frozen=True)
class SketchDevice:
    """As much of a torch device as arguments ask for."""

    type: str = "meta"
    index: int | None = None

    def __str__(self) -> str:
        return self.type


_META = SketchDevice()


@dataclass(frozen=True)
class Sketch:
    """As much of a meta tensor as operands and placeholders of kernels ask for.

    Attributes:
        shape: Extents in elements.
        strides: In elements.
        offset: In elements, of the first one in its memory: it says how that is aligned.
    """

    dtype: DType
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    device: SketchDevice = _META
    is_meta: bool = True

    def stride(self) -> tuple[int, ...]:
        return self.strides

    def dim(self) -> int:
        return len(self.shape)

    def storage_offset(self) -> int:
        return self.offset

"""Matrices of one layout that lie anywhere: a kernel has their addresses."""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64
from cutlass.cute import AddressSpace


@dataclass(frozen=True)
class ExpertMatrices:
    """What is known of them while a kernel is traced.

    Attributes:
        unit_mode: The one of a matrix's two modes with a stride of 1.
        alignment: Of addresses, in bytes.
    """

    element_type: type[cutlass.Numeric]
    unit_mode: int
    alignment: int

    def at(self, address: Int64, shape: tuple[Int32, Int32], pitch: Int64) -> cute.Tensor:
        """The one at an address, with one batch behind its modes; pitch: its other stride."""
        pointer = cute.make_ptr(
            self.element_type, address, AddressSpace.gmem, assumed_align=self.alignment
        )
        stride = (1, pitch, 0) if self.unit_mode == 0 else (pitch, 1, 0)
        return cute.make_tensor(pointer, cute.make_layout((*shape, 1), stride=stride))

"""What Hopper offers for many queries of 16 bits to keys of 8, and how it is compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from kernel_api.providers.cutedsl import CuTeDSLProvider
from kernel_api.providers.cutedsl.sdpa import model
from kernel_api.providers.cutedsl.sdpa.sm90 import OPERANDS_MIXED, Sm90SdpaOf16Bits
from kernel_api.providers.cutedsl.sdpa.widened import WideOperands


@CuTeDSLProvider.register
class Sm90SdpaForwardMixed(WideOperands, Sm90SdpaOf16Bits):
    """Attention of 16-bit floats to keys and values of 8-bit ones for Hopper: kernels before write
    these in 16 bits."""

    family: ClassVar[str] = "sm90.sdpa_forward_mixed"
    operands = (OPERANDS_MIXED,)
    multiplied: ClassVar[str] = "Q"

    def _built(
        self, scores: Any, *, longest_first: bool = False, page_size: int | None = None
    ) -> Callable[..., None]:
        from kernel_api.implementations.sm90.sdpa_forward_mixed import SdpaForwardMixed

        design = self._design
        found: Callable[..., None] = SdpaForwardMixed(
            *self._design_values(scores),
            longest_first=longest_first,
            scaling=design.scaling,
            keys_in_page=page_size,
            resident=design.resident,
        )
        return found

    def _estimate(self, args: Any) -> float:
        return model.seconds(args, self._design) + model.widening_seconds(args)

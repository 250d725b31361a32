"""What Hopper offers for many queries of 16 bits to keys of 8, and how it is compiled."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar

from kernel_api._workspaces import ZEROED
from kernel_api.arguments import SdpaArguments
from kernel_api.providers.cutedsl import CuTeDSLProvider
from kernel_api.providers.cutedsl.kernel import WorkspaceFinder
from kernel_api.providers.cutedsl.sdpa import model
from kernel_api.providers.cutedsl.sdpa.sm90 import OPERANDS_MIXED, Sm90SdpaOf16Bits, some_keys

_ITEM_BYTES = 2  # of an element of the workspace


@CuTeDSLProvider.register
class Sm90SdpaForwardMixed(Sm90SdpaOf16Bits):
    """Attention of 16-bit floats to keys and values of 8-bit ones for Hopper: kernels before write
    these in 16 bits."""

    family: ClassVar[str] = "sm90.sdpa_forward_mixed"
    operands = (OPERANDS_MIXED,)
    multiplied: ClassVar[str] = "Q"
    has_some_keys = some_keys

    def workspace_for(self, *tensors: Any) -> int:
        _, K, V, _ = tensors
        return self._bytes_of(K.shape, V.shape[-1])

    def get_workspace_size(self, args: SdpaArguments) -> int:
        keys = args.K.shape
        if args.is_paged:
            keys = (args.B, args.H_kv, args.S_kv, args.D)
        return self._bytes_of(keys, args.D_v)

    def _bytes_of(self, keys: tuple[int, ...], columns: int) -> int:
        """Counters, and room for K of this shape, not in pages, and V of so many columns."""
        *rows, own = keys
        return int(ZEROED + math.prod(rows) * (own + columns) * _ITEM_BYTES)

    def _workspace_finder(self, names: tuple[str, ...]) -> WorkspaceFinder:
        if "page_table" not in names:
            return super()._workspace_finder(names)

        def find(tensors: Any, others: Any) -> int:
            _, K, V, _ = tensors
            _, heads, size, own = K.shape
            sequences, most = others["page_table"].shape
            return self._bytes_of((sequences, heads, most * size, own), V.shape[-1])

        return find

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

    def predict(self, args: SdpaArguments) -> float:
        return model.seconds(args, self._design) + model.widening_seconds(args)

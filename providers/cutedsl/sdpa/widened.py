"""What the attention families share before which other kernels write 8-bit operands in 16 bits."""

from __future__ import annotations

import math
from typing import Any

from kernel_api._workspaces import ZEROED
from kernel_api.arguments import SdpaArguments
from kernel_api.providers.cutedsl.kernel import WorkspaceFinder
from kernel_api.providers.cutedsl.sdpa.base import AttentionKernel
from kernel_api.space import Miss, rule

_ITEM_BYTES = 2  # of an element of the workspace


@rule("what is written for keys or values has some: no kernel is launched for none")
def some_keys(args: SdpaArguments) -> bool | Miss:
    return args.S_kv > 0 or Miss("the page table has no place for one")


class WideOperands(AttentionKernel):
    """Its workspace has room for K and V, and for Q where that has 8 bits."""

    has_some_keys = some_keys

    def workspace_for(self, *tensors: Any) -> int:
        Q, K, V, _ = tensors
        return self._bytes_of(Q.shape, K.shape, V.shape[-1])

    def get_workspace_size(self, args: SdpaArguments) -> int:
        keys = args.K.shape
        if args.is_paged:
            keys = (args.B, args.H_kv, args.S_kv, args.D)
        return self._bytes_of(args.Q.shape, keys, args.D_v)

    def _bytes_of(self, queries: tuple[int, ...], keys: tuple[int, ...], columns: int) -> int:
        """Of Q and K of these shapes, not in pages, and V of so many columns."""
        *rows, own = keys
        elements = math.prod(rows) * (own + columns)
        Q = self.metadata.operands.tensors["Q"]
        assert Q.dtype is not None
        if Q.dtype.bits == 8:
            elements += math.prod(queries)
        return int(ZEROED + elements * _ITEM_BYTES)

    def _workspace_finder(self, names: tuple[str, ...]) -> WorkspaceFinder:
        if "page_table" not in names:
            return super()._workspace_finder(names)

        def find(tensors: Any, others: Any) -> int:
            Q, K, V, _ = tensors
            _, heads, size, own = K.shape
            sequences, most = others["page_table"].shape
            return self._bytes_of(Q.shape, (sequences, heads, most * size, own), V.shape[-1])

        return find

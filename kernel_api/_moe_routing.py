"""Where pairs of a token and one of its experts go, and how rows get there and back."""

from __future__ import annotations

from typing import NamedTuple

import torch

from kernel_api import ops

#: Types of rows that kernels move.
_MOVED = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class Routing(NamedTuple):
    """Pairs of a token and one of its choices, sorted by expert; those without one come last.

    Attributes:
        offsets: int32 (E,): where the pairs of each expert end.
        place: int32 (T · k,): of each sorted pair, token · k + choice.
        rank: int32 (T, k): of each pair, its place among those sorted; -1 without an expert.
        weight: (T · k,): of each sorted pair.
    """

    offsets: torch.Tensor
    place: torch.Tensor
    rank: torch.Tensor
    weight: torch.Tensor

    @classmethod
    def of(cls, expert_index: torch.Tensor, expert_weight: torch.Tensor, E: int) -> Routing:
        weight = expert_weight if expert_weight.is_floating_point() else expert_weight.float()
        found = ops.group_rows(expert_index, E, weight=weight)
        return cls(found.offsets, found.place, found.row_index, found.grouped)

    def unsorted(self, values: torch.Tensor, element: torch.dtype) -> torch.Tensor:
        """(T, k) of an element type, of one value per pair; zeros where the pair has no expert,
        whatever was there."""
        if element in _MOVED and values.dtype in _MOVED:
            columns = values.unsqueeze(1), self.rank.reshape(-1, 1)
            found: torch.Tensor = ops.gather_rows(*columns, out_dtype=element)
            return found.view(self.rank.shape)
        found = values.index_select(0, self.rank.flatten().clamp(min=0)).view(self.rank.shape)
        return found.masked_fill(self.rank < 0, 0).to(element)

    def scattered(self, x: torch.Tensor) -> torch.Tensor:
        """Rows of tokens, one per pair; what is behind all experts is not initialised."""
        if x.dtype in _MOVED:
            if x.stride(1) != 1:  # as the gradient of a sum, which is one number all over
                x = x.contiguous()
            rows: torch.Tensor = ops.scatter_rows(x, self.rank)
            return rows
        return x.index_select(0, self.place // self.rank.shape[1])

    def gathered(self, rows: torch.Tensor) -> torch.Tensor:
        """Per token, the sum of the rows of its pairs."""
        if rows.dtype in _MOVED:
            found: torch.Tensor = ops.gather_rows(rows, self.rank)
            return found
        chosen = rows.index_select(0, self.rank.flatten().clamp(min=0))
        chosen = chosen.view(*self.rank.shape, rows.shape[1])
        chosen = chosen.masked_fill_(self.rank.unsqueeze(-1) < 0, 0)
        return chosen.sum(1, dtype=rows.dtype)

    def summed(self, A: torch.Tensor, B: torch.Tensor) -> torch.Tensor:
        """Per token, the sum of what A, which has a row per pair, gives with the experts' B."""
        rows = A.new_empty(A.shape[0], B.shape[-1])
        ops.grouped_gemm(A, B, self.offsets, out=rows)
        return self.gathered(rows)

    def gradient_of(self, weight: torch.Tensor, A: torch.Tensor, B: torch.Tensor) -> torch.Tensor:
        """Aᵀ · B of the pairs of each expert, laid out as its weight is."""
        found: torch.Tensor
        if weight.stride(-1) == 1:
            found = ops.grouped_gemm_wgrad(A.t(), B, self.offsets, out_dtype=weight.dtype)
            return found
        found = ops.grouped_gemm_wgrad(B.t(), A, self.offsets, out_dtype=weight.dtype)
        return found.mT

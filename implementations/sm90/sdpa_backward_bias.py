"""The gradient of a bias, from what the Hopper attention gradient has of every row of queries."""

from typing import NamedTuple

import cutlass.cute as cute
from cutlass import Int32

from ..common.attention.modes import attention_modes
from ..common.attention.sequences import Sequence
from ..sm80.sdpa_bias_gradient import BiasGradient
from .sdpa_backward_plan import BackwardPlan, Space, floats_at

#: Keys at once that registers suffice for; where each score is looked at by itself.
_KEYS, _KEYS_LOOKED_AT = 32, 16


class TiledStatistics(NamedTuple):
    """What `RowSums` left, see `Space`; it stands for the `RowStatistics` of other GPUs."""

    plan: BackwardPlan
    space: Space

    def first(self, batch: Int32, head: Int32, sequence: Sequence) -> Int32:
        """The tile of the first query."""
        return self.plan.tile_index(self.space, batch, head, sequence.first_query, Int32(0))

    def tensors(self, first: Int32, rows: Int32) -> tuple[cute.Tensor, cute.Tensor]:
        """Log-sum-exps and row sums from a tile on."""
        plan, space = self.plan, self.space
        addresses = plan.lse_address(space, first), plan.delta_address(space, first)
        return tuple(floats_at(address, rows) for address in addresses)


class TiledBiasGradient(BiasGradient):
    """dBias by mma.sync, in a launch of its own, which adds up in one order only."""

    def __init__(self, plan: BackwardPlan):
        looked_at = plan.scores.drops or plan.scores.hides_anywhere
        looked_at = looked_at or plan.scores.functions.score is not None
        columns = _KEYS_LOOKED_AT if looked_at else _KEYS
        head_dims = plan.head_dim, plan.head_dim_v
        super().__init__(head_dims, columns, plan.element_type, plan.scores, aligned=True)
        self.plan = plan

    def _add(self, read, values, extents, statistics, *others):
        space = self.plan.space(statistics.lse, attention_modes(read[0]), values)
        super()._add(read, values, extents, TiledStatistics(self.plan, space), *others)

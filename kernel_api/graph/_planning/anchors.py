"""Operations that have kernels of their own."""

from __future__ import annotations

from collections.abc import Callable

from kernel_api.graph._node import Node
from kernel_api.graph._planning.attention import attention
from kernel_api.graph._planning.builds import Anchored, Needed
from kernel_api.graph._planning.grouped import grouped
from kernel_api.graph._planning.norms import norm_backward, norm_forward
from kernel_api.graph._planning.products import gemm

#: By operation: how its nodes become arguments.
ANCHORS: dict[str, Callable[[Node, Needed], Anchored]] = {
    "matmul": gemm,
    "moe_grouped_matmul": grouped,
    "sdpa": attention,
    "sdpa_backward": attention,
    "sdpa_fp8": attention,
    "rmsnorm": norm_forward,
    "layernorm": norm_forward,
    "rmsnorm_backward": norm_backward,
    "layernorm_backward": norm_backward,
}

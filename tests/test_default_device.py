"""Operands say where to compute; torch's default device has no say."""

import pytest
import torch

import kernel_api as ka

Q, X, EXPERTS = torch.randn(1, 2, 8, 16), torch.randn(8, 32), torch.randn(2, 32, 64)
HEADS, ENDS = torch.randn(2), torch.tensor([3, 8], dtype=torch.int32)


def blocks_of(fn):
    mask = ka.masks.with_blocks(ka.masks.MaskMod(fn), 8, 8, block_shape=(2, 3), device="cpu")
    return mask.blocks.table.tensor


CALLS = {
    "softcap": lambda: ka.ops.sdpa(Q, Q, Q, softcap=3.0),
    "sink": lambda: ka.ops.sdpa(Q, Q, Q, sink=HEADS),
    "alibi": lambda: ka.ops.sdpa(Q, Q, Q, alibi=HEADS),
    "window": lambda: ka.ops.sdpa(Q, Q, Q, mask=ka.masks.SlidingWindow(2, 0)),
    "function": lambda: ka.ops.sdpa(Q, Q, Q, mask=ka.masks.MaskMod(lambda b, h, i, j: i >= j)),
    "blocks": lambda: blocks_of(lambda b, h, i, j: (i - j) * 0.5 >= 1.0),
    "gemm": lambda: ka.ops.gemm(X, EXPERTS[0]),
    "grouped_gemm": lambda: ka.ops.grouped_gemm(X, EXPERTS, ENDS),
    "a factor per expert": lambda: ka.ops.grouped_gemm(X, EXPERTS, ENDS, alpha=HEADS),
    "experts anywhere": lambda: ka.ops.grouped_gemm(X, list(EXPERTS.unbind(0)), ENDS),
    "grouped_gemm_wgrad": lambda: ka.ops.grouped_gemm_wgrad(X.t(), X, ENDS),
    "grouped_gemm_glu": lambda: ka.ops.grouped_gemm_glu(X, EXPERTS, ENDS),
    "rmsnorm": lambda: ka.ops.rmsnorm(X),
}


@pytest.mark.parametrize("name", CALLS)
def test_another_default_device_changes_nothing(name):
    expected = CALLS[name]()
    with torch.device("meta"):
        found = CALLS[name]()
    torch.testing.assert_close(found, expected, rtol=0, atol=0)

"""Epilogues with sums over rows and over columns, as gradients of pairs with dprob and dbias have:
kernels of the widest tiles that take them spill nothing."""

import pytest
import torch
from support.sampling import some

import kernel_api as ka

pytestmark = pytest.mark.compile

BF16, F32 = torch.bfloat16, torch.float32
SIZE, GROUPS = 4096, 8


def meta(*shape, element=BF16):
    return torch.empty(shape, dtype=element, device="meta")


def gradients(grouped):
    A, out, preactivation = meta(SIZE, SIZE), meta(SIZE, 2 * SIZE), meta(SIZE, 2 * SIZE)
    how = {"out": out, "preactivation": preactivation, "prob": meta(SIZE, element=F32)}
    how["dprob"] = meta(SIZE, element=F32)
    if not grouped:
        dbias = meta(2 * SIZE, element=F32)
        return ka.fusions.gemm_dglu(A, meta(SIZE, SIZE).t(), dbias=dbias, **how)
    B, ends = meta(GROUPS, SIZE, SIZE).mT, meta(GROUPS, element=torch.int32)
    dbias = meta(GROUPS, 2 * SIZE, element=F32)
    return ka.fusions.grouped_gemm_dglu(A, B, ends, dbias=dbias, **how)


@pytest.mark.parametrize("grouped", [False, True])
def test_the_first_choices_spill_nothing(grouped):
    args = gradients(grouped)
    offered = ka.get_kernels(args, cc=90, providers=["cutedsl"])[:8]
    for kernel in some([offered[0], *filter(widest, offered)], 1):
        assert kernel.compile(args, cc="sm_90a").resources.spill_bytes == 0, kernel


def widest(kernel):
    return max(kernel.metadata.design.tile_shape[:2]) == 256

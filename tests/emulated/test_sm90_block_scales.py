"""Scales per block of K, which threads that share them read of several k tiles at a time, in the
emulator."""

import pytest
import torch
from support.ptx.gemm import storage_bytes
from support.ptx.kernel import EmulatedKernel
from support.sampling import some

import kernel_api as ka
from kernel_api.arguments.scaled import BLOCK
from kernel_api.verification import FACTOR_REORDERED, judge

pytestmark = pytest.mark.compile


def scaled_by_blocks(M, N, K, *, batch=None, along="K", device="cpu"):
    drawn = torch.Generator().manual_seed(0)
    L = () if batch is None else (batch,)
    A, B = (torch.randn((*L, n, K), generator=drawn).to(torch.float8_e4m3fn) for n in (M, N))
    blocks = -(-K // BLOCK)
    # From block to block very different: one that is taken for its neighbour is seen.
    scale_a, scale_b = (
        torch.rand((*L, *shape), generator=drawn)
        * 4 ** torch.randint(-3, 3, shape, generator=drawn)
        for shape in ((M, blocks), (blocks, -(-N // BLOCK)))
    )
    if along == "M":
        scale_a = scale_a.mT.contiguous().mT
    out = torch.empty((*L, M, N), dtype=torch.bfloat16)
    storage_bytes(out)[:] = 0xFF
    A, B, scale_a, scale_b, out = (t.to(device) for t in (A, B.mT, scale_a, scale_b, out))
    return ka.GemmArguments(
        ka.ScaledOperand(A, scale_a, ka.ScaleMode.BLOCK_1x128),
        ka.ScaledOperand(B, scale_b, ka.ScaleMode.BLOCK_128x128),
        out,
    )


def kernel_named(part, how):
    args = scaled_by_blocks(**how, device="meta")
    for kernel in ka.get_kernels(args, cc=90, providers=["cutedsl"]):
        if part in kernel.metadata.kernel_name:
            return kernel
    raise AssertionError(f"no kernel is called {part}")


CASES = {
    # k tiles: one more than four readers have; fewer; not a multiple of them
    "two columns of scales": ("128x256x128_cluster2x1", {"M": 140, "N": 270, "K": 5 * BLOCK}),
    "few k tiles": ("128x128x128_cluster1x1_cooperative", {"M": 70, "N": 130, "K": 2 * BLOCK + 16}),
    "a part of K": ("cooperative_stages6_split4", {"M": 70, "N": 136, "K": 22 * BLOCK + 64}),
    "within one column": ("64x64x128_cluster1x1", {"M": 9, "N": 200, "K": 10 * BLOCK - 48}),
    "parts that meet": ("64x128x128_cluster1x1x4", {"M": 33, "N": 130, "K": 21 * BLOCK + 16}),
    "three consumers": ("192x128", {"M": 200, "N": 200, "K": 7 * BLOCK, "along": "M"}),
    "cut anywhere": (
        "64x128x128_cluster1x1_cooperative_stages9_stream",
        {"M": 70, "N": 264, "K": 13 * BLOCK},
    ),
    "swapped": (
        "16x64x128_cluster1x1_cooperative_stages22_swap_stream",
        {"M": 9, "N": 200, "K": 11 * BLOCK - 32},
    ),
    "swapped, cut anywhere": (
        "32x128x128_cluster1x1_cooperative_stages10_swap_stream",
        {"M": 19, "N": 392, "K": 13 * BLOCK + 16},
    ),
    "swapped, parts that meet": (
        "16x64x128_cluster1x1x4",
        {"M": 16, "N": 130, "K": 37 * BLOCK + 16},
    ),
    "deep": ("64x64x256_cluster1x1", {"M": 9, "N": 200, "K": 11 * BLOCK - 32}),
    "deep, swapped": ("16x64x256_cluster1x1", {"M": 9, "N": 200, "K": 11 * BLOCK - 32}),
    "deep, parts that meet": (
        "64x128x256_cluster1x1x2",
        {"M": 70, "N": 264, "K": 13 * BLOCK},
    ),
    "swapped, batches": (
        "16x128x128_cluster1x1_cooperative_stages12_swap_stream",
        {"M": 11, "N": 140, "K": 3 * BLOCK, "batch": 3, "along": "M"},
    ),
    "batches": ("64x128x128_cluster2x2", {"M": 70, "N": 140, "K": 6 * BLOCK, "batch": 3}),
    # Columns that begin in the middle of a block of scales, and end in the next.
    "straddling, two thirds": ("128x192x128_cluster2x1", {"M": 70, "N": 400, "K": 5 * BLOCK + 16}),
    "straddling, four fifths": ("128x160x128_cluster2x1", {"M": 70, "N": 330, "K": 3 * BLOCK}),
    "straddling, one group": ("64x96x128_cluster2x1", {"M": 70, "N": 300, "K": 6 * BLOCK + 48}),
    "straddling, deep": ("128x80x256_cluster1x2", {"M": 70, "N": 330, "K": 3 * BLOCK + 64}),
}


@pytest.mark.parametrize("name", some(CASES, 2))
def test_products_of_blocks_are_right(name):
    part, how = CASES[name]
    args = scaled_by_blocks(**how)
    compiled = EmulatedKernel.compile(kernel_named(part, how), args)
    assert not compiled.artifact.resources.spill_bytes
    compiled.run(args, multiprocessors=4, seed=1)
    verdict = judge(args, FACTOR_REORDERED)
    assert verdict, f"{compiled.kernel.metadata.kernel_name}: {verdict}"

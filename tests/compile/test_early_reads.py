"""What an epilogue reads is on its way while its tile is multiplied, in cooperative tiles."""

import re

import pytest
import torch
from support.sampling import some
from support.sass import sass

import kernel_api as ka
from kernel_api import fusions

pytestmark = pytest.mark.compile

M, N, K = 512, 1024, 256
F32, FP8 = torch.float32, torch.float8_e4m3fn


def empty(*shape, element=torch.bfloat16):
    return torch.empty(shape, dtype=element, device="meta")


def scaled(tensor, *shape):
    return ka.ScaledOperand(tensor, empty(*shape, element=F32), ka.ScaleMode.PER_ROW)


def biased(element):
    A, B = empty(M, K), empty(N, K).t()
    return fusions.gemm_bias_activation(
        A, B, out=empty(M, N), bias=empty(N, element=element), activation="relu"
    )


def residual():
    return fusions.gemm_residual(empty(M, K), empty(N, K).t(), out=empty(M, N), C=empty(M, N))


def by_rows():
    A, B = empty(M, K, element=FP8), empty(N, K, element=FP8).t()
    return ka.GemmArguments(scaled(A, M), scaled(B, N), empty(M, N))


def by_blocks():
    A, B = empty(M, K, element=FP8), empty(N, K, element=FP8).t()
    return ka.GemmArguments(
        ka.ScaledOperand(A, empty(M, 2, element=F32), ka.ScaleMode.BLOCK_1x128),
        ka.ScaledOperand(B, empty(2, N // 128, element=F32), ka.ScaleMode.BLOCK_128x128),
        empty(M, N),
    )


def reads_and_products(args, tile, schedule="cooperative"):
    """The loads of global memory of such a kernel (L) and its wgmma (P) in the order of its machine
    code, up to the last of these."""
    for kernel in ka.get_kernels(args, cc=90, providers=["cutedsl"]):
        design = kernel.metadata.design
        if design.tile_shape[:2] == tile and design.schedule == schedule:
            artifact = kernel.compile(args, "90a")
            assert not artifact.resources.spill_bytes
            found = re.findall(r" LDG\.|GMMA\.64x", sass(artifact))
            return "".join("L" if "LDG" in one else "P" for one in found).rpartition("P")[0]
    raise AssertionError(f"no {schedule} kernel of {tile}")


READ_IN_FRONT = {
    # of a bundle of 32 columns a thread has 4 pairs
    "bias": (lambda: biased(F32), (128, 256), 4),
    "bias of 16 bits": (lambda: biased(torch.bfloat16), (128, 256), 4),
    # scales of two rows, and pairs of those of the columns of two bundles
    "scales": (by_rows, (128, 256), 2 + 8),
    # of two rows and of two blocks of columns, both of the first k tiles and of the next ones
    "blocks": (by_blocks, (128, 256), 2 * (2 + 2)),
}


@pytest.mark.parametrize("name", some(READ_IN_FRONT, 2))
def test_vectors_are_read_before_products_are_formed(name):
    make, tile, loads = READ_IN_FRONT[name]
    assert reads_and_products(make(), tile).index("P") == loads


def test_matrices_are_read_while_the_first_products_are_formed():
    # All of a thread's 128 elements, in vectors of 8; many at once would wait for each other, and
    # the next products for them.
    found = reads_and_products(residual(), (128, 256))
    assert found.startswith("P") and found.count("L") == 16
    assert max(map(len, found.split("P"))) == 2


def test_consumers_that_take_turns_hide_what_they_read():
    assert "L" not in reads_and_products(residual(), (128, 128), "pingpong")

"""What an epilogue reads is on its way before its tile is multiplied, in cooperative tiles."""

import pytest
import torch
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


def reads_in_front(args, tile, schedule="cooperative"):
    """(loads of global memory in front of the first wgmma, of such a kernel's machine code)"""
    for kernel in ka.get_kernels(args, cc=90, providers=["cutedsl"]):
        design = kernel.metadata.design
        if design.tile_shape[:2] == tile and design.schedule == schedule:
            artifact = kernel.compile(args, "90a")
            assert not artifact.resources.spill_bytes
            lines = sass(artifact).splitlines()
            first = next(i for i, line in enumerate(lines) if "GMMA.64x" in line)
            return sum(" LDG." in line for line in lines[:first])
    raise AssertionError(f"no {schedule} kernel of {tile}")


READ = {
    # a matrix: all of a thread's 128 elements, in vectors of 8
    "residual": (residual, (128, 256), 16),
    # of a bundle of 32 columns a thread has 4 pairs
    "bias": (lambda: biased(F32), (128, 256), 4),
    "bias of 16 bits": (lambda: biased(torch.bfloat16), (128, 256), 4),
    # scales of two rows, and pairs of those of the columns of two bundles
    "scales": (by_rows, (128, 256), 2 + 8),
    # of two rows and of two blocks of columns, both of the first k tiles and of the next ones
    "blocks": (by_blocks, (128, 256), 2 * (2 + 2)),
}


@pytest.mark.parametrize("name", READ)
def test_operands_are_read_before_products_are_formed(name):
    make, tile, loads = READ[name]
    assert reads_in_front(make(), tile) == loads


def test_consumers_that_take_turns_hide_what_they_read():
    assert reads_in_front(residual(), (128, 128), "pingpong") == 0

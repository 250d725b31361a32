"""Operands that are contiguous along the columns of a tile come in whole panels of 64 of them, with
what is beside the tile: of Hopper designs of every such width, the PTX runs in the emulator."""

import pytest
import torch
from support.kernels import generated_by
from support.ptx.kernel import EmulatedKernel
from support.ptx.problems import awkward_arguments
from support.sampling import some

from kernel_api import provider

pytestmark = pytest.mark.compile

(CUTEDSL,) = provider.providers(["cutedsl"])
(GEMM,) = (one for one in CUTEDSL.families() if one.family == "sm90.gemm")


def in_panels(kernel):
    """What is next to the columns of a tile is loaded with them."""
    design, operands = kernel.metadata.design, kernel.metadata.operands
    columns, along = (operands.A, -2) if design.swap_ab else (operands.B, -1)
    if columns.unit_mode != along:
        return False
    return design.loaded_columns(contiguous=True) > design.kernel_tile[1]


def kinds():
    """By what of a design decides how panels are loaded and multiplied, the first kernel of it."""
    chosen = {}
    for kernel in filter(in_panels, generated_by(GEMM)):
        design = kernel.metadata.design
        shared = design.kernel_cluster[0] > 1
        kind = design.kernel_tile[1], shared, design.schedule == "pingpong"
        chosen.setdefault(kind, kernel)
    return list(chosen.values())


@pytest.mark.parametrize("kernel", some(kinds(), 2), ids=lambda one: one.metadata.design.label())
def test_columns_of_panels_beside_a_tile_are_not_multiplied(kernel):
    """The last tile has its last column in the middle of a panel; the one before reads of it."""
    tile_m, tile_n, tile_k = kernel.metadata.design.tile_shape
    K = (kernel.metadata.design.stages + 1) * tile_k - 8
    args = awkward_arguments(kernel, tile_m + 5, tile_n + 7, K, values="integers", seed=tile_n)
    EmulatedKernel.compile(kernel, args).run(args, multiprocessors=4, seed=tile_n)
    product = args.A.tensor.double() @ args.B.tensor.double()
    assert torch.equal(args.out.tensor, product.to(args.out.tensor.dtype))

"""Which products are promoted while the next ones are formed, and which tiles have block scales."""

import pytest
import torch
from cutlass import BFloat16, Float8E4M3FN

import kernel_api as ka
from kernel_api.arguments.scaled import BLOCK
from kernel_api.implementations.sm90.gemm import Gemm

E4M3 = torch.float8_e4m3fn
TYPES = {"a_type": Float8E4M3FN, "b_type": Float8E4M3FN, "output_types": (BFloat16,)}
MODES = {
    "nothing": None,
    "tensors": (ka.ScaleMode.PER_TENSOR, (), ka.ScaleMode.PER_TENSOR, ()),
    "tokens": (ka.ScaleMode.PER_ROW, (64,), ka.ScaleMode.PER_TENSOR, ()),
    "blocks": (ka.ScaleMode.BLOCK_1x128, (64, 5), ka.ScaleMode.BLOCK_128x128, (5, 3)),
}


def arguments(mode, element=E4M3, **how):
    def empty(*shape, dtype=element):
        return torch.empty(shape, dtype=dtype, device="meta")

    A, B = empty(64, 5 * BLOCK), empty(3 * BLOCK, 5 * BLOCK).t()
    if mode is not None:
        mode_a, shape_a, mode_b, shape_b = mode
        scale_a, scale_b = (empty(*shape, dtype=torch.float32) for shape in (shape_a, shape_b))
        A, B = ka.ScaledOperand(A, scale_a, mode_a), ka.ScaledOperand(B, scale_b, mode_b)
    out = torch.float32 if element is torch.float32 else torch.bfloat16
    return ka.GemmArguments(A, B, empty(64, 3 * BLOCK, dtype=out), **how)


def offered(args):
    found = ka.get_kernels(args, cc="90a", providers=["cutedsl"])
    return [one for one in found if one.metadata.targets == ("sm_90a",)]


@pytest.mark.parametrize("scaled", MODES)
def test_the_model_sees_what_is_built(scaled):
    args = arguments(MODES[scaled])
    built = [(one.implementation_for(args), one.candidate) for one in offered(args)]
    for gemm, candidate in built:
        assert gemm.promoted
        assert candidate.ahead == gemm.ahead == gemm.mainloop.ahead
        assert candidate.column_blocks == gemm.tile_shape[1] // gemm.columns
    # Of one group of threads all but the widest, of several none.
    assert {gemm.consumers for gemm, _ in built if gemm.ahead} == {1}
    alone = [gemm for gemm, _ in built if gemm.consumers == 1]
    assert max(gemm.tile_shape[1] for gemm in alone if gemm.ahead) == 128
    assert min(gemm.tile_shape[1] for gemm in alone if not gemm.ahead) > 128


def test_small_parts_of_float32_leave_no_room():
    args = arguments(None, torch.float32, fp32_precision="tf32x3")
    kernels = [one for one in offered(args) if one.family == "sm90.gemm_tf32x3"]
    assert kernels
    for one in kernels:
        gemm = one.implementation_for(args)
        assert gemm.promoted
        assert not gemm.ahead
        assert not one.candidate.ahead


@pytest.mark.parametrize("columns", range(16, 257, 16))
def test_a_tile_has_columns_of_two_blocks_of_scales_at_most(columns):
    """Wherever it begins."""
    blocks = max(
        -(-(first + columns) // BLOCK) - first // BLOCK
        for first in range(0, BLOCK * columns, columns)
    )
    if blocks <= 2:
        gemm = Gemm((64, columns, 128), block_scales=True, **TYPES)
        assert gemm.mainloop.block_scales.of_b == blocks
    else:
        reason = f"a tile N of {columns} straddles {blocks} blocks of scales, at most 2"
        with pytest.raises(ValueError, match=reason):
            Gemm((64, columns, 128), block_scales=True, **TYPES)


def test_others_are_not_offered():
    def widths(mode):
        designs = (one.metadata.design for one in offered(arguments(MODES[mode])))
        return {one.tile_shape[1] for one in designs if not one.swap_ab}

    assert {176, 224} == widths("tensors") - widths("blocks")
    assert {80, 96, 112, 144, 160, 192} <= widths("blocks")

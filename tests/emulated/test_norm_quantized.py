"""Norms with quantised results are right: their PTX runs in the emulator, without a GPU.

With KERNEL_API_EMULATE in the environment every case runs, else a sample of them.
"""

import itertools

import pytest
import torch
from support.ptx.kernel import EmulatedKernel
from support.quantized_norms import MODES, STORED, check, drawn
from support.sampling import some

import kernel_api as ka

pytestmark = pytest.mark.compile

#: With the family of each.
FAMILIES = {
    "rmsnorm_quantize": "sm80.rmsnorm_quantize",
    "layernorm_quantize": "sm80.layernorm_quantize",
    "quantize": "sm80.quantize_rows",
}
#: One to a row, of which several are in a block; more threads; rows that are streamed.
COLUMNS = (128, 256, 512, 1152)
CASES = [
    (name, mode, N, index)
    for index, (N, mode, name) in enumerate(itertools.product(COLUMNS, MODES, FAMILIES))
    if name != "quantize" or mode == "row"
]


def kernels_for(name, args):
    offered = ka.get_kernels(args, cc="sm_80", providers=["cutedsl"])
    return [kernel for kernel in offered if kernel.family == FAMILIES[name]]


@pytest.mark.parametrize(("name", "mode", "N", "index"), some(CASES, 5))
def test_rows_in_units_of_scales_are_right(name, mode, N, index):
    element = (torch.bfloat16, torch.float32, torch.float16)[index % 3]
    stored = list(STORED)[index % 4 % 3]
    args = drawn(name, mode, 8, N, element, stored, seed=index, device="meta")
    offered = kernels_for(name, args)
    streamed = [kernel for kernel in offered if not kernel.metadata.design.elements]
    chosen = streamed if index % 5 == 4 else offered
    kernel = chosen[index % len(chosen)]
    compiled = None
    for M in (3 + index % 5, 1 + 2 * kernel.metadata.design.rows):
        args = drawn(name, mode, M, N, element, stored, seed=index)
        compiled = compiled or EmulatedKernel.compile(kernel, args, ("sm_80", "sm_90")[index % 2])
        compiled.run(args, multiprocessors=2, seed=index)
        check(args, mode)


@pytest.mark.parametrize("mode", some(["row", "block"], 1))
def test_what_is_no_number_makes_its_scale_none(mode):
    args = drawn("rmsnorm_quantize", mode, 5, 256)
    args.x.tensor[3, 77] = float("nan")
    on_meta = drawn("rmsnorm_quantize", mode, 5, 256, device="meta")
    kernel = kernels_for("rmsnorm_quantize", on_meta)[0]
    EmulatedKernel.compile(kernel, args, "sm_90").run(args)
    scale = args.epilogue.outputs["scale"].tensor
    assert scale.view(5, -1).isnan().all(1).tolist() == [False, False, False, True, False]
    assert args.out.tensor.float().isnan().all(1).tolist() == [False, False, False, True, False]


@pytest.mark.parametrize("name", FAMILIES)
def test_warps_of_a_row_do_not_overtake_each_other_from_turn_to_turn(name):
    def several(design):
        return design.threads_per_row > 32 and design.turns > 1 and design.stages > 1

    on_meta = drawn(name, "row", 7, 1024, device="meta")
    kernel = next(k for k in kernels_for(name, on_meta) if several(k.metadata.design))
    args = drawn(name, "row", 2 * kernel.metadata.design.turns - 1, 1024)
    compiled = EmulatedKernel.compile(kernel, args)
    for seed in range(2):
        compiled.run(args, multiprocessors=1, seed=seed)
        check(args, "row")

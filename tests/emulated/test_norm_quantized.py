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

NAMES = ("rmsnorm_quantize", "layernorm_quantize")
#: One to a row, of which several are in a block; more threads; rows that are streamed.
COLUMNS = (128, 256, 512, 1152)
CASES = [
    (name, mode, N, index)
    for index, (N, mode, name) in enumerate(itertools.product(COLUMNS, MODES, NAMES))
]


def kernels_for(args):
    return ka.get_kernels(args, cc="sm_80", providers=["cutedsl"])


@pytest.mark.parametrize(("name", "mode", "N", "index"), some(CASES, 5))
def test_rows_in_units_of_scales_are_right(name, mode, N, index):
    element = (torch.bfloat16, torch.float32, torch.float16)[index % 3]
    stored = list(STORED)[index % 4 % 3]
    offered = kernels_for(drawn(name, mode, 8, N, element, stored, seed=index, device="meta"))
    assert {kernel.family for kernel in offered} == {f"sm80.{name}"}
    streamed = [kernel for kernel in offered if not kernel.metadata.design.elements]
    kernel = (streamed if index % 5 == 4 else offered)[index % (2 if index % 5 == 4 else 5)]
    compiled = None
    for M in (3 + index % 5, 1 + 2 * kernel.metadata.design.rows):
        args = drawn(name, mode, M, N, element, stored, seed=index)
        compiled = compiled or EmulatedKernel.compile(kernel, args, ("sm_80", "sm_90")[index % 2])
        compiled.run(args, multiprocessors=2, seed=index)
        check(args, mode)


@pytest.mark.parametrize("mode", ["row"])
def test_what_is_no_number_makes_its_scale_none(mode):
    args = drawn("rmsnorm_quantize", mode, 5, 256)
    args.x.tensor[3, 77] = float("nan")
    kernel = kernels_for(drawn("rmsnorm_quantize", mode, 5, 256, device="meta"))[0]
    EmulatedKernel.compile(kernel, args, "sm_90").run(args)
    scale = args.epilogue.outputs["scale"].tensor
    assert scale.isnan().tolist() == [False, False, False, True, False]
    assert args.out.tensor[3].float().isnan().all()

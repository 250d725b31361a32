"""The family that sorts rows by group: its PTX runs in the emulator, which refuses every access
outside of an operand, and every race between warps."""

import pytest
import torch
from support.grouping import arguments, check
from support.ptx.kernel import EmulatedKernel, poison

import kernel_api as ka

pytestmark = pytest.mark.compile


def run(args, seed=0):
    meta = [None if one is None else one.tensor.to("meta") for one in args.named_operands.values()]
    kernel = ka.get_kernels(ka.GroupRowsArguments(*meta), cc=80, providers=["cutedsl"])[0]
    for operand in args.outputs.values():
        poison(operand.tensor)
    EmulatedKernel.compile(kernel, args, "sm_80").run(args, multiprocessors=1, seed=seed)
    check(args)


@pytest.mark.parametrize(
    ("M", "k", "E", "how"),
    [
        (37, 2, 8, {}),
        (150, 8, 255, {"element": torch.int32, "weight": torch.bfloat16}),
        (70, 3, 300, {"weight": None}),
        (9, 4, 1000, {"weight": torch.float16}),
        (1, 1, 1, {}),
    ],
)
def test_pairs_are_sorted_by_group(M, k, E, how):
    run(arguments(M, k, E, **how), seed=M)


@pytest.mark.parametrize("chosen", [-1, 0, 6])
def test_all_pairs_may_choose_one_group_or_none(chosen):
    run(arguments(45, 3, 7, index=torch.full((45, 3), chosen)))

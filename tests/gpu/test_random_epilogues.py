"""Random epilogues in the GEMM kernels of this GPU, against the reference.

The kernels of a family take turns: a design, split or not, swapped or not, for every epilogue. With
KERNEL_API_TEST_EVERY_KERNEL=1 all 300 epilogues are run, else 60.
"""

import os

import pytest
import torch
from support.fusion_cases import check_twice
from support.random_epilogues import arguments_for_kernels, enlarged, example

import kernel_api as ka
from kernel_api.providers.cutedsl.epilogue.plan import plan

pytestmark = [pytest.mark.gpu, pytest.mark.compile, pytest.mark.timeout(600)]

COUNT = 300 if os.environ.get("KERNEL_API_TEST_EVERY_KERNEL") == "1" else 60
ELEMENTS = (torch.bfloat16, torch.float16)


def kernels_by_family(args):
    """Of CuTe DSL, that are offered for this GPU."""
    found = {}
    for kernel in ka.get_kernels(args, providers=["cutedsl"]):
        found.setdefault(kernel.family_name(), []).append(kernel)
    return found


@pytest.mark.parametrize("turn", range(COUNT))
def test_a_random_epilogue_is_what_the_reference_computes(turn):
    case = enlarged(example(turn))
    args = arguments_for_kernels(case, ELEMENTS[turn % 2], "cuda", K=64 + 8 * (turn % 60))
    families = kernels_by_family(args)
    if not isinstance(plan(args.epilogue.graph), str):
        assert families, str(ka.explain(args))
    for kernels in families.values():
        kernel = kernels[turn % len(kernels)]
        check_twice(kernel, args)


@pytest.mark.parametrize("turn", range(0, COUNT, 6))
def test_tf32_products_take_random_epilogues(turn):
    case = enlarged(example(turn))
    plain = arguments_for_kernels(case, torch.float32, "cuda")
    args = ka.GemmArguments(*plain.tensors, epilogue=plain.epilogue, fp32_precision="tf32")
    for kernels in kernels_by_family(args).values():
        kernel = kernels[turn % len(kernels)]
        verdict = ka.verify(kernel, args)
        assert verdict, f"{kernel.metadata.kernel_name}: {verdict}"

"""Every design of every CuTe DSL family computes what it says, on odd shapes.

The kernels are those that the registry offers for this GPU; a new family is tested by being
registered. Of every class they are a sample that has each design, each combination of element
types, of alignments, of majors and of scales. ``KERNEL_API_TEST_EVERY_KERNEL=1`` takes every
kernel: compilation is most of the time, so add ``-n 8``.
"""

import os
import random

import pytest
import torch
from support.data import TOO_MANY_PARTS, arguments_for, supported_sizes
from support.shapes import problems

import kernel_api as ka
from kernel_api.providers.reference.gemm import product
from kernel_api.verification import poison

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

EVERY_KERNEL = os.environ.get("KERNEL_API_TEST_EVERY_KERNEL") == "1"


def facets(kernel):
    """What each value of is to be seen with every class of kernels."""
    metadata = kernel.metadata
    tensors = tuple(metadata.operands.tensors.values())
    return {
        (type(kernel), "design", metadata.design),
        *(
            (type(kernel), name, tuple(getattr(tensor, name) for tensor in tensors))
            for name in ("dtype", "divisibility", "stride", "scale")
        ),
    }


def sample(kernels):
    """Those that show something which none before them has shown, in an order without a pattern."""
    seen = set()
    for kernel in random.Random(0).sample(kernels, len(kernels)):
        if not facets(kernel) <= seen:
            seen |= facets(kernel)
            yield kernel


def registered():
    """(kernel, place in the sample), for what this GPU runs; without one, none."""
    if not torch.cuda.is_available():
        return []  # to list them takes seconds
    major, minor = torch.cuda.get_device_capability()
    offered = ka.get_kernels(cc=f"{major}.{minor}", providers=["cutedsl"])
    kernels = [kernel for kernel in offered if kernel.arguments is ka.GemmArguments]
    return [
        pytest.param(kernel, place, id=kernel.metadata.kernel_name)
        for place, kernel in enumerate(kernels if EVERY_KERNEL else sample(kernels))
    ]


every_kernel = pytest.mark.parametrize(("kernel", "place"), registered())


def bits(tensor):
    whole = tensor.contiguous()
    return whole.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[
        whole.element_size()
    ])  # fmt: skip


@every_kernel
def test_a_kernel_is_right_repeatable_and_exact_for_integers(kernel, place):
    for seed, (M, N, K, L) in enumerate(problems(place)):
        M, N, K = supported_sizes(kernel, M, N, K)
        what = f"M={M} N={N} K={K} L={L}"
        args = arguments_for(kernel, M, N, K, L, device="cuda", seed=seed)
        status = kernel.supports(args)
        if status.rule in TOO_MANY_PARTS:
            continue
        assert status, f"{what}: {status}"

        found = ka.verify(kernel, args)
        assert found, f"{what}: {found}"

        first = args.out.tensor.clone()
        poison(args.out.tensor)
        kernel.run(args)
        assert torch.equal(bits(args.out.tensor), bits(first)), f"{what}: differs when repeated"

        if args.scaled:
            continue
        whole = arguments_for(kernel, M, N, K, L, device="cuda", values="integers", seed=seed)
        poison(whole.out.tensor)
        kernel.run(whole)
        A, B, out = whole.tensors
        assert torch.equal(out, product(A, B).to(out.dtype)), f"{what}: integers are not exact"


@every_kernel
def test_a_kernel_that_supports_arguments_is_offered_for_them(kernel, place):
    for M, N, K, L in problems(place):
        args = arguments_for(kernel, *supported_sizes(kernel, M, N, K), L, device="cuda")
        supported = bool(kernel.supports(args))
        assert (kernel in ka.get_kernels(args, providers=["cutedsl"])) == supported


@every_kernel
def test_an_empty_sum_is_zero_and_an_empty_out_is_nothing_to_do(kernel, place):
    args = arguments_for(kernel, 65, 129, 0, 1, device="cuda")
    if kernel.supports(args):
        poison(args.out.tensor)
        kernel.run(args)
        assert (args.out.tensor == 0).all()
    for M, N in ((0, 65), (65, 0)):
        args = arguments_for(kernel, M, N, 64, 1, device="cuda")
        if kernel.supports(args):
            kernel.run(args)
            torch.cuda.synchronize()
            assert args.out.tensor.numel() == 0

"""Dense products whose clusters take their tiles, alone and beside another kernel: every design, on
as many tiles as each cluster has several of."""

import pytest
import torch

import kernel_api as ka

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

M, N, K, RUNS = 4104, 5032, 1296, 20


def whole(element, *shape):
    """Small whole numbers: their sums are exact in any order."""
    return torch.randint(-2, 3, shape, device="cuda").to(element)


def problem(element):
    """(arguments, the result)"""
    A, B = whole(element, M, K), whole(element, N, K).mT
    out = torch.full((M, N), float("nan"), device="cuda", dtype=torch.bfloat16)
    return ka.GemmArguments(A, B, out), (A.float() @ B.float()).bfloat16()


def taking(args):
    """One kernel of each design."""
    found = ka.get_kernels(args, lambda m: getattr(m.design, "takes_tiles", False))
    return list({kernel.metadata.design: kernel for kernel in reversed(found)}.values())


@pytest.fixture(params=[torch.bfloat16, torch.float8_e4m3fn], ids=["16 bits", "8 bits"])
def taken(request):
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("dense products take tiles on Hopper alone")
    args, expected = problem(request.param)
    kernels = taking(args)
    assert len(kernels) >= 3
    ka.compile_all(kernels, args)
    return args, expected, kernels


def test_runs_are_right_one_after_the_other(taken):
    args, expected, kernels = taken
    for kernel in kernels:
        launch = kernel.prepare(args)
        for _ in range(RUNS):
            args.out.tensor.fill_(float("nan"))
            launch(*args.tensors)
            assert torch.equal(args.out.tensor, expected), kernel.metadata.kernel_name


def test_runs_are_right_beside_another_kernel(taken):
    """Which has some of the multiprocessors for a part of the time."""
    args, expected, kernels = taken
    other, side = whole(torch.bfloat16, 1024, 8192), torch.cuda.Stream()
    for kernel in kernels:
        launch = kernel.prepare(args)
        for _ in range(RUNS):
            args.out.tensor.fill_(float("nan"))
            torch.cuda.synchronize()
            with torch.cuda.stream(side):
                other @ other.mT
            launch(*args.tensors)
            torch.cuda.synchronize()
            assert torch.equal(args.out.tensor, expected), kernel.metadata.kernel_name


def test_a_graph_is_replayed(taken):
    args, expected, kernels = taken
    for kernel in kernels:
        launch = kernel.prepare(args)
        launch(*args.tensors)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            launch(*args.tensors)
            launch(*args.tensors)
        for _ in range(3):
            args.out.tensor.fill_(float("nan"))
            graph.replay()
            assert torch.equal(args.out.tensor, expected), kernel.metadata.kernel_name

"""The tuner on a GPU: candidates that end a context, hang it or ask for all of its memory."""

import pytest
import torch
from support import hostile_kernels as hostile

import kernel_api as ka
from kernel_api.errors import CaptureError
from kernel_api.tuning import Policy

pytestmark = pytest.mark.gpu

GRAPHS = Policy(rounds=8)
EAGER = Policy(launches="eager", rounds=8)

#: On a GPU nothing sleeps, and what counts its runs sees those of a graph once.
CUDA_FATES = {
    one: fate
    for one, fate in hostile.FATES.items()
    if one not in (hostile.LateGemm, hostile.EndlessLaterGemm)
}


@pytest.fixture(autouse=True)
def cache(cache_directory):
    """An empty one for each test."""


def arguments(M=320, N=256, K=192):
    A, B = torch.randn(M, K, device="cuda"), torch.randn(K, N, device="cuda")
    return ka.GemmArguments(A, B, torch.zeros(M, N, device="cuda"))


@pytest.mark.parametrize("policy", [GRAPHS, EAGER], ids=["graph", "eager"])
def test_the_context_of_the_caller_survives_what_candidates_do(registry, policy):
    provider = registry.register(*CUDA_FATES, hostile.FastGemm)
    args = arguments()
    before = [tensor.clone() for tensor in args.tensors]
    result = ka.autotune(args, providers=[provider], policy=policy, timeout_s=3.0)
    assert type(result.kernel) is hostile.FastGemm
    found = {type(row.kernel.rebuild()): row for row in result.rows}
    assert len(found) == len(CUDA_FATES) + 1
    for kernel_class, (status, words) in CUDA_FATES.items():
        assert found[kernel_class].status.value == status, found[kernel_class]
        assert words in found[kernel_class].message
    torch.cuda.synchronize()
    assert all(torch.equal(one, tensor) for one, tensor in zip(before, args.tensors, strict=True))
    ka.verify(result.kernel, args)


def test_the_fastest_of_all_providers_is_found_kept_and_used(registry):
    A, B = torch.randn(512, 640, device="cuda"), torch.randn(384, 640, device="cuda").t()
    args = ka.GemmArguments(
        A.bfloat16(), B.bfloat16(), torch.zeros(512, 384, device="cuda").bfloat16()
    )
    result = ka.autotune(args, max_candidates=4)
    assert {type(row.kernel.rebuild()).provider_name() for row in result.rows} >= {
        "cutedsl",
        "torch",
    }
    assert all(row.passed for row in result.rows), result.rows
    again = ka.autotune(args, max_candidates=4)
    assert again.measured == 0 and again.rows == result.rows
    assert ka.tuned(args) == result.kernel
    out = ka.ops.gemm(args.A.tensor, args.B.tensor)
    assert ka.verify(result.kernel, args)
    torch.testing.assert_close(out, args.out.tensor)


def test_nothing_is_measured_while_a_graph_is_captured():
    args = arguments()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), pytest.raises(CaptureError, match="tune before the capture"):
        ka.autotune(args)

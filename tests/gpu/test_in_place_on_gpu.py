"""An operand of an epilogue that is out itself, by every kind of kernel: exact for integers, and
the same every time."""

import pytest
import torch
from support.memcheck import chosen

import kernel_api as ka

pytestmark = pytest.mark.gpu

RUNS = 20


def whole_numbers(*shape, element, most=3):
    return torch.randint(-most, most + 1, shape, device="cuda").to(element)


@pytest.mark.parametrize(
    ("M", "N", "K"), [(3, 200, 1000), (67, 72, 4104), (333, 520, 264)], ids=str
)
@pytest.mark.parametrize(
    ("element", "total"),
    [(torch.bfloat16, torch.float32), (torch.float16, torch.float16)],
    ids=str,
)
def test_sums_are_added_up_where_they_lie(M, N, K, element, total):
    torch.manual_seed(M)
    A = whole_numbers(M, K, element=element, most=1)
    B = whole_numbers(N, K, element=element, most=1).mT
    buffer = whole_numbers(M, N + 8, element=total)
    out, before = buffer[:, :N], buffer.clone()
    args = ka.fusions.gemm(A, B, C=out, out=out, alpha=-1.0, beta=2.0)
    assert args.in_place == ("C",)
    expected = (2 * before[:, :N].double() - A.double() @ B.double()).to(total)
    kernels = chosen(args, None)
    assert kernels
    for kernel in kernels:
        for _ in range(RUNS):
            buffer.copy_(before)
            kernel.run(args)
            assert torch.equal(out, expected), kernel.metadata.kernel_name
        assert torch.equal(buffer[:, N:], before[:, N:])


def test_a_call_that_looks_the_same_adds_up_again():
    A, B = (whole_numbers(512, 512, element=torch.bfloat16, most=1) for _ in "AB")
    total = torch.zeros(512, 512, device="cuda")
    for _ in range(5):
        ka.ops.gemm(A, B, C=total, out=total)
    assert torch.equal(total, 5 * (A.float() @ B.float()))

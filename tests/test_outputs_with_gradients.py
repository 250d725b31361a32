"""Outputs that a call is given and that belong to a graph of autograd: their gradients would be
those of what was there before."""

import pytest
import torch
from support.sampling import some

import kernel_api as ka
from kernel_api.errors import ArgumentError

M, N, K = 6, 64, 5
A, B = torch.randn(M, K, dtype=torch.float64), torch.randn(K, N, dtype=torch.float64)
X, ROW = torch.randn(M, N, dtype=torch.float64), torch.randn(M, dtype=torch.float64)
EXPERTS = torch.randn(2, K, N, dtype=torch.float64)
ENDS = torch.tensor([2, M], dtype=torch.int32)

#: Per output, its shape and a call that is given it.
GIVEN = {
    "out of gemm": ((M, N), lambda t: ka.ops.gemm(A, B, out=t)),
    "out of gemm_swiglu": ((M, N // 2), lambda t: ka.ops.gemm_swiglu(A, B, out=t)),
    "preactivation": ((M, N), lambda t: ka.ops.gemm_swiglu(A, B, preactivation=t)),
    "amax": ((), lambda t: ka.ops.gemm_amax(A, B, amax=t)),
    "dbias": ((N,), lambda t: ka.ops.gemm_dactivation(A, B, preactivation=X, dbias=t)),
    "out of grouped_gemm": ((M, N), lambda t: ka.ops.grouped_gemm(A, EXPERTS, ENDS, out=t)),
    "preactivation of groups": (
        (M, N),
        lambda t: ka.ops.grouped_gemm_glu(A, EXPERTS, ENDS, preactivation=t),
    ),
    "out of grouped_gemm_wgrad": (
        (2, K, N),
        lambda t: ka.ops.grouped_gemm_wgrad(A.t(), X, ENDS, out=t),
    ),
    "out of rmsnorm": ((M, N), lambda t: ka.ops.rmsnorm(X, out=t)),
    "rstd": ((M,), lambda t: ka.ops.rmsnorm(X, rstd=t)),
    "residual_out": ((M, N), lambda t: ka.ops.rmsnorm(X, residual=X, residual_out=t)),
    "residual_out of a quantised norm": (
        (M, N),
        lambda t: ka.ops.rmsnorm_quantize(X, "row", residual=X, residual_out=t),
    ),
    "mean": ((M,), lambda t: ka.ops.layernorm(X, mean=t, rstd=True)),
    "dx": ((M, N), lambda t: ka.ops.rmsnorm_backward(X, X, rstd=ROW, dx=t)),
}

parametrized = pytest.mark.parametrize(("shape", "call"), GIVEN.values(), ids=GIVEN)


def tensors(shape):
    leaf = torch.nn.Parameter(torch.zeros(shape, dtype=torch.float64))
    return {"a parameter": leaf, "what a graph computes": leaf * 2}.items()


@parametrized
def test_they_are_refused_every_time(shape, call):
    for _ in range(3):  # calls that look the same go another way
        call(torch.zeros(shape, dtype=torch.float64))
        for kind, given in tensors(shape):
            before = given.detach().clone()
            with pytest.raises(ArgumentError, match="needs a gradient, which is not that of what"):
                call(given)
            assert torch.equal(given, before), kind


@parametrized
def test_they_are_written_where_gradients_are_off(shape, call):
    expected = torch.zeros(shape, dtype=torch.float64)
    call(expected)
    for kind, given in tensors(shape):
        with torch.no_grad():
            call(given), call(given)
        assert torch.equal(given, expected), kind


@pytest.mark.parametrize(("shape", "call"), some(GIVEN.values(), 5), ids=some(GIVEN, 5))
def test_graphs_refuse_and_write_them_too(shape, call):
    def compiled(given, fullgraph=True):
        torch._dynamo.reset()
        return torch.compile(call, backend="aot_eager", fullgraph=fullgraph)(given)

    expected = torch.zeros(shape, dtype=torch.float64)
    call(expected)
    _, (_, given) = tensors(shape)
    with pytest.raises(Exception, match="Observed exception"):
        compiled(given)
    with pytest.raises(ArgumentError, match="needs a gradient, which is not that of what"):
        compiled(given, fullgraph=False)
    with torch.no_grad():
        compiled(given)
    assert torch.equal(given, expected)


def test_what_is_only_read_may_need_a_gradient():
    bias = torch.randn(N, dtype=torch.float64, requires_grad=True)
    for _ in range(2):
        ka.ops.gemm(A, B, bias=bias)
        ka.ops.gemm_dactivation(A, B, preactivation=X.clone().requires_grad_())
        ka.ops.rmsnorm(X, weight=bias)

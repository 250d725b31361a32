"""Autograd is told what kernels write, once per launch, as torch's own operators tell it."""

import pytest
import torch

import kernel_api as ka
import kernel_api.graph as cudnn
from kernel_api import _attention_launches, _launches

A, B, Q = torch.randn(5, 4), torch.randn(4, 6), torch.randn(1, 2, 5, 8)


@pytest.fixture
def idle(monkeypatch):
    """Launches do nothing, which torch would count."""
    monkeypatch.setenv("KERNEL_API_PROVIDERS", "reference")
    monkeypatch.setattr(
        ka.Kernel, "_launcher_in_order", lambda *given: lambda tensors, values: None
    )
    monkeypatch.setattr(_launches, "_launches", {})
    monkeypatch.setattr(_attention_launches, "_launches", {})


def counted(call, *tensors):
    """How often each was written in a call, behind two of them that make what is remembered."""
    call(), call()
    before = [tensor._version for tensor in tensors]
    call()
    return [tensor._version - count for tensor, count in zip(tensors, before, strict=True)]


def test_a_run_says_what_it_writes(monkeypatch):
    A, B, out, amax = torch.randn(5, 4), torch.randn(4, 6), torch.empty(5, 6), torch.zeros(())
    args = ka.fusions.gemm_amax(A, B, out=out, amax=amax)
    kernel = ka.get_kernels(args, providers=["reference"])[0]
    monkeypatch.setattr(type(kernel), "_run", lambda *given: None)
    assert counted(lambda: kernel.run(args), A, B, out, amax) == [0, 0, 1, 1]


def test_experts_are_written_and_their_addresses_read(monkeypatch):
    monkeypatch.setenv("KERNEL_API_PROVIDERS", "reference")
    tokens, offsets = torch.randn(6, 4), torch.tensor([2, 6], dtype=torch.int32)
    outs = [torch.empty(4, 4) for _ in range(2)]
    addresses = torch.tensor([one.data_ptr() for one in outs])
    anywhere = ka.ExpertPointers(addresses, shape=(4, 4), stride=(4, 1), dtype="f32")

    def sums_to(out):
        return lambda: ka.ops.grouped_gemm_wgrad(tokens.t(), tokens, offsets, out=out)

    args = ka.fusions.grouped_gemm_wgrad(tokens.t(), tokens, offsets, out=outs)
    monkeypatch.setattr(type(ka.get_kernels(args)[0]), "_run", lambda *given: None)
    assert counted(sums_to(outs), tokens, *outs) == [0, 1, 1]
    assert counted(sums_to(anywhere), addresses, offsets) == [0, 0]


def test_products_say_what_they_write(idle):
    out, amax = torch.empty(5, 6), torch.zeros(())
    assert counted(lambda: ka.ops.gemm(A, B, out=out), A, B, out) == [0, 0, 1]
    assert counted(lambda: ka.ops.gemm(A, B), A, B) == [0, 0]
    bias = torch.randn(6)
    assert counted(lambda: ka.ops.gemm(A, B, out=out, bias=bias), bias, out) == [0, 1]
    assert counted(lambda: ka.ops.gemm_amax(A, B, out=out, amax=amax), out, amax) == [1, 1]
    assert counted(lambda: ka.ops.gemm_amax(A, B, amax=amax), amax) == [1]


def test_attention_says_what_it_writes(idle):
    out, lse, bias = torch.empty_like(Q), torch.empty(1, 2, 5), torch.randn(1, 1, 5, 5)
    assert counted(lambda: ka.ops.sdpa(Q, Q, Q, out=out), Q, out) == [0, 1]
    both = {"out": out, "lse": lse, "bias": bias}
    assert counted(lambda: ka.ops.sdpa(Q, Q, Q, **both), Q, out, lse, bias) == [0, 1, 1, 0]


def test_graphs_say_what_they_write(idle):
    graph, out, amax = cudnn.pygraph(), torch.empty(5, 6), torch.zeros(1, 1)
    a, b = graph.tensor_like(A), graph.tensor_like(B)
    product = graph.matmul(a, b).set_output(True)
    largest = graph.reduction(product, cudnn.reduction_mode.AMAX).set_dim((1, 1)).set_output(True)
    graph.build([cudnn.heur_mode.A])
    pack = {a: A, b: B, product: out, largest: amax}
    assert counted(lambda: graph.execute(pack), A, B, out, amax) == [0, 0, 1, 1]


def test_backward_refuses_what_was_overwritten(idle):
    x = torch.randn(5, 6, requires_grad=True)
    kept = x.exp()
    ka.ops.gemm(A, B, out=torch.empty(5, 6))
    ka.ops.gemm(A, B, out=kept.detach())
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        kept.sum().backward()


def test_tensors_of_inference_have_no_count(idle):
    with torch.inference_mode():
        out = torch.empty(5, 6)
        for _ in range(3):
            assert ka.ops.gemm(A, B, out=out) is out

"""One-call forms: ka.ops."""

import threading

import numpy as np
import pytest
import torch
from support.data import gemm_tensors
from support.kernels import CpuGemm

import kernel_api as ka
from kernel_api.errors import ArgumentError, NoKernelError


def exact(A, B):
    return A.double() @ B.double()


def test_gemm_allocates_a_row_major_out_of_the_type_of_a():
    A, B, _ = gemm_tensors(4, 5, 6, values="integers", layouts="nnt")
    out = ka.ops.gemm(A, B)
    assert out.dtype is torch.float32
    assert out.is_contiguous()
    assert torch.equal(out.double(), exact(A, B))


def test_gemm_writes_and_returns_a_given_out():
    A, B, out = gemm_tensors(4, 5, 6, values="integers", pads=(0, 0, 3))
    assert ka.ops.gemm(A, B, out=out) is out
    assert torch.equal(out.double(), exact(A, B))


def test_gemm_multiplies_batches():
    A, B, _ = gemm_tensors(4, 5, 6, 3, values="integers")
    assert torch.equal(ka.ops.gemm(A, B).double(), exact(A, B))


@pytest.mark.parametrize("spelling", ["float64", torch.float64, np.float64, "f64"], ids=str)
def test_gemm_allocates_the_type_that_is_asked_for_in_any_spelling(spelling):
    A, B, _ = gemm_tensors(4, 5, 6, values="integers")
    out = ka.ops.gemm(A, B, out_dtype=spelling)
    assert out.dtype is torch.float64
    assert torch.equal(out, exact(A, B))


def test_gemm_of_an_empty_sum_is_zero():
    assert not ka.ops.gemm(torch.empty(3, 0), torch.empty(0, 4)).any()


def test_gemm_takes_numpy_operands():
    A, B = np.ones((4, 6), np.float32), np.ones((6, 5), np.float32)
    out = ka.ops.gemm(A, B)
    assert torch.equal(out, torch.full((4, 5), 6.0))


def test_a_repeated_call_takes_new_data_and_sizes():
    for seed, extent in enumerate((4, 4, 5, 4)):
        A, B, _ = gemm_tensors(extent, extent, extent, values="integers", seed=seed)
        assert torch.equal(ka.ops.gemm(A, B).double(), exact(A, B))


def test_the_best_kernel_is_used_also_when_it_is_registered_later(registry):
    ran = []

    class Better(CpuGemm):
        def _run(self, args, artifact, stream, workspace=None):
            ran.append(args)
            super()._run(args, artifact, stream, workspace)

    A, B, _ = gemm_tensors(4, 4, 4, values="integers")
    ka.ops.gemm(A, B)
    provider = registry.register(Better)
    assert torch.equal(ka.ops.gemm(A, B).double(), exact(A, B))
    assert len(ran) == 1
    provider.unregister(Better)
    ka.ops.gemm(A, B)
    assert len(ran) == 1


def test_contradicting_operands_are_refused_with_both_values():
    with pytest.raises(ArgumentError, match="A has K = 6 but B has K = 7"):
        ka.ops.gemm(torch.empty(4, 6), torch.empty(7, 5))
    with pytest.raises(ArgumentError, match=r"out has \(M, N\) = \(4, 4\)"):
        ka.ops.gemm(torch.empty(4, 6), torch.empty(6, 5), out=torch.empty(4, 4))


@pytest.mark.parametrize("B", [None, 3, "B", torch.tensor(1.0), torch.empty(6)], ids=type)
def test_what_is_no_matrix_is_refused(B):
    with pytest.raises(ArgumentError):
        ka.ops.gemm(torch.empty(4, 6), B)
    with pytest.raises(ArgumentError):
        ka.ops.gemm(B, torch.empty(6, 5))


def test_what_no_kernel_takes_is_an_error_that_carries_the_explanation(monkeypatch):
    monkeypatch.setenv("KERNEL_API_PROVIDERS", "torch")
    A, B, _ = gemm_tensors(4, 5, 6, types=("int16",) * 3)
    with pytest.raises(NoKernelError, match="A is int16; expected") as caught:
        ka.ops.gemm(A, B)
    assert isinstance(caught.value, LookupError)
    assert "torch.mm" in [r.family for r in caught.value.explanation.rejected]
    assert not caught.value.explanation.accepted


def test_operands_behind_a_and_b_are_keyword_only():
    with pytest.raises(TypeError):
        ka.ops.gemm(*gemm_tensors(4, 4, 4))


def test_threads_may_call_at_the_same_time():
    wrong = []

    def work(seed):
        for extent in range(1, 20):
            A, B, _ = gemm_tensors(extent, extent, extent, values="integers", seed=seed)
            if not torch.equal(ka.ops.gemm(A, B).double(), exact(A, B)):
                wrong.append((seed, extent))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []

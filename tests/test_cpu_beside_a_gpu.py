"""Problems on the CPU ask nothing of a GPU that is there: asking begins to use it, which takes
memory, and fails in a process that was forked from one that does."""

import pytest
import torch
from support import hostile_kernels as hostile

import kernel_api as ka
import kernel_api.graph as cudnn
from kernel_api import devices, masks
from kernel_api.explanation import Explanation
from kernel_api.tuning import TuningResult


@pytest.fixture(autouse=True)
def gpu(monkeypatch):
    """One that must not be asked."""

    def refuse(*given, **named):
        raise RuntimeError("Cannot re-initialize CUDA in forked subprocess")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    for name in ("current_device", "get_device_capability", "get_device_properties", "_lazy_init"):
        monkeypatch.setattr(torch.cuda, name, refuse)
    devices.cuda_available.cache_clear()
    yield
    devices.cuda_available.cache_clear()


def drawn(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)))


def arguments():
    return ka.GemmArguments(drawn(8, 16), drawn(16, 24), torch.empty(8, 24))


def test_the_gpu_is_asked_for_problems_that_lie_nowhere():
    args = ka.GemmArguments(*(tensor.to("meta") for tensor in arguments().tensors))
    with pytest.raises(RuntimeError, match="re-initialize"):
        ka.get_kernels(args)


def test_kernels_are_found_run_and_verified():
    args = arguments()
    kernels = ka.get_kernels(args)
    assert kernels and ka.verify(kernels[0], args)
    assert kernels[0].supports(args)
    kernels[0].prepare(args)(*args.tensors)
    assert isinstance(ka.explain(args), Explanation)


def test_problems_are_tuned(registry, cache_directory):
    provider = registry.register(hostile.FastGemm)
    assert isinstance(ka.autotune(arguments(), providers=[provider]), TuningResult)
    assert ka.tuned(arguments()) is not None


def groups():
    ends = torch.tensor([3, 3, 12], dtype=torch.int32)
    return ka.ops.grouped_gemm(drawn(12, 8), drawn(3, 8, 16), ends)


def attention():
    leaves = [drawn(1, 2, 9, 16).requires_grad_() for _ in range(3)]
    out = ka.nn.attention(*leaves, mask=masks.Causal())
    return torch.autograd.grad(out, leaves, torch.ones_like(out))


def layer():
    return ka.nn.linear_swiglu(drawn(4, 16), drawn(64, 16))


def norm():
    return ka.ops.rmsnorm(drawn(4, 64), weight=drawn(64))


def rows():
    return ka.ops.gather_rows(drawn(9, 64), torch.tensor([[3], [8]], dtype=torch.int32))


def graph():
    x = drawn(8, 8)
    with cudnn.Graph() as made:
        made.relu(made.matmul(x, x)).set_output(True)
    return made(x)


@pytest.mark.parametrize("call", [groups, attention, layer, norm, rows, graph])
def test_a_call_needs_the_cpu_alone(call):
    call()

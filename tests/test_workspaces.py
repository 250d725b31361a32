"""Memory that launches borrow: one buffer per stream, and another one in every captured graph."""

from types import SimpleNamespace

import pytest
import torch

from kernel_api import _workspaces
from kernel_api.errors import DeviceError


@pytest.fixture
def cuda(monkeypatch):
    """A device whose streams are numbers; memory is of the CPU."""
    now = SimpleNamespace(stream=0, is_captured=False, made=[])

    def empty(size, dtype, device):
        now.made.append((device, size))
        return torch.full((size,), 7, dtype=dtype)

    monkeypatch.setattr(torch, "empty", empty)
    monkeypatch.setattr(_workspaces, "_buffers", {})
    monkeypatch.setattr(
        torch._C, "_cuda_getCurrentRawStream", lambda index: now.stream, raising=False
    )

    def is_captured():
        assert now.stream, "the legacy stream never is"
        return now.is_captured

    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", is_captured)
    return now


def test_launches_on_one_stream_share_a_buffer(cuda):
    lend, other = _workspaces.lender(0), _workspaces.lender(0)
    buffer = lend(10)
    assert buffer is lend(_workspaces.ZEROED) is other(1)
    assert cuda.made == [("cuda:0", _workspaces.ZEROED)]
    assert (buffer.size, buffer.address) == (_workspaces.ZEROED, buffer.tensor.data_ptr())
    assert not buffer.tensor.any()


def test_every_stream_and_every_device_has_its_own(cuda):
    lend = _workspaces.lender(0)
    first = lend(10)
    cuda.stream = 7
    second, other = lend(10), _workspaces.lender(1)(10)
    assert len({first.address, second.address, other.address}) == 3
    cuda.stream = 0
    assert lend(10) is first
    assert [device for device, _ in cuda.made] == ["cuda:0", "cuda:0", "cuda:1"]


def test_a_larger_one_takes_the_place_of_one_that_is_too_small(cuda):
    lend = _workspaces.lender(0)
    small, large = lend(10), lend(_workspaces.ZEROED + 1)
    assert lend(10) is large is not small
    assert large.size == _workspaces.ZEROED + 1
    # Who has borrowed the small one still has its memory.
    assert small.tensor.numel() == _workspaces.ZEROED
    assert not large.tensor[: _workspaces.ZEROED].any()


def test_a_graph_that_is_captured_gets_memory_of_its_own(cuda):
    lend = _workspaces.lender(0)
    cuda.stream = 7
    shared = lend(10)
    cuda.is_captured = True
    own = [lend(10), lend(10)]
    assert len({shared.address, *(one.address for one in own)}) == 3
    cuda.is_captured = False
    assert lend(10) is shared


def test_without_cuda_there_is_nothing_to_borrow(monkeypatch):
    monkeypatch.delattr(torch._C, "_cuda_getCurrentRawStream", raising=False)
    lend = _workspaces.lender(0)
    with pytest.raises(DeviceError, match="without CUDA"):
        lend(10)

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

    def new(index, size):
        size = max(size, _workspaces.ZEROED)
        now.made.append((index, size))
        return _workspaces._Buffer(None, size, 1000 * len(now.made))

    monkeypatch.setattr(_workspaces, "_new", new)
    monkeypatch.setattr(_workspaces, "_buffers", {})
    monkeypatch.setattr(
        torch._C, "_cuda_getCurrentRawStream", lambda index: now.stream, raising=False
    )
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: now.is_captured)
    return now


def test_launches_on_one_stream_share_a_buffer(cuda):
    lend, other = _workspaces.lender(0), _workspaces.lender(0)
    assert lend(10) == lend(_workspaces.ZEROED) == other(1) == 1000
    assert cuda.made == [(0, _workspaces.ZEROED)]


def test_every_stream_and_every_device_has_its_own(cuda):
    lend = _workspaces.lender(0)
    first = lend(10)
    cuda.stream = 7
    assert lend(10) != first
    assert _workspaces.lender(1)(10) not in (first, lend(10))
    cuda.stream = 0
    assert lend(10) == first
    assert len(cuda.made) == 3


def test_a_larger_one_takes_the_place_of_one_that_is_too_small(cuda):
    lend = _workspaces.lender(0)
    small, large = lend(10), lend(_workspaces.ZEROED + 1)
    assert small != large
    assert lend(10) == large


def test_a_graph_that_is_captured_gets_memory_of_its_own(cuda):
    lend = _workspaces.lender(0)
    cuda.stream = 7
    shared = lend(10)
    cuda.is_captured = True
    assert len({shared, lend(10), lend(10)}) == 3
    cuda.is_captured = False
    assert lend(10) == shared


def test_without_cuda_there_is_nothing_to_borrow(monkeypatch):
    monkeypatch.delattr(torch._C, "_cuda_getCurrentRawStream", raising=False)
    lend = _workspaces.lender(0)
    with pytest.raises(DeviceError, match="without CUDA"):
        lend(10)

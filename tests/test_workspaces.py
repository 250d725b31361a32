"""Memory that launches borrow: one buffer per stream, and another one in every captured graph."""

import gc
import subprocess
import sys
import threading
import weakref
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from kernel_api import _workspaces
from kernel_api.errors import DeviceError


@pytest.fixture
def cuda(monkeypatch):
    """A device whose streams and captures are numbers; memory is of the CPU."""
    now = SimpleNamespace(stream=0, capture=None, made=[], threads=[])

    def empty(size, dtype, device):
        now.made.append((device, size))
        now.threads.append(threading.current_thread())
        return torch.full((size,), 7, dtype=dtype)

    monkeypatch.setattr(torch, "empty", empty)
    monkeypatch.setattr(torch.cuda, "ExternalStream", lambda stream, index: stream)
    monkeypatch.setattr(torch.cuda, "stream", nullcontext)
    monkeypatch.setattr(_workspaces, "_buffers", {})
    monkeypatch.setattr(_workspaces, "_captured", {})
    monkeypatch.setattr(_workspaces, "_capture_of", lambda stream: now.capture)
    monkeypatch.setattr(
        torch._C, "_cuda_getCurrentRawStream", lambda index: now.stream, raising=False
    )

    def is_captured():
        assert now.stream, "the legacy stream never is"
        return now.capture is not None

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
    cuda.capture = 1
    own = lend(10)
    assert own.address != shared.address and not own.tensor.any()
    cuda.capture = None
    assert lend(10) is shared


def test_launches_of_one_captured_stream_share_a_buffer(cuda):
    lend = _workspaces.lender(0)
    cuda.stream, cuda.capture = 7, 1
    own = lend(10)
    assert own is lend(_workspaces.ZEROED) is _workspaces.lender(0)(1)
    cuda.stream = 8
    assert lend(10).address != own.address
    cuda.stream = 7
    assert lend(10) is own
    large = lend(_workspaces.ZEROED + 1)
    assert lend(10) is large and not large.tensor[: _workspaces.ZEROED].any()
    assert len(cuda.made) == 3


def test_the_next_capture_may_have_the_memory_of_the_one_before(cuda, monkeypatch):
    lend = _workspaces.lender(0)
    cuda.stream, cuda.capture = 7, 1
    first = weakref.ref(lend(10).tensor)
    cuda.capture = 2
    of_the_first, make = [], _workspaces._allocated
    monkeypatch.setattr(
        _workspaces, "_allocated", lambda *given: of_the_first.append(first()) or make(*given)
    )
    lend(10)
    assert of_the_first == [None]


def test_behind_a_capture_its_memory_is_given_back_when_garbage_is_collected(cuda):
    lend = _workspaces.lender(0)
    cuda.stream, cuda.capture = 7, 1
    captured = weakref.ref(lend(10).tensor)
    cuda.capture = None
    eager = weakref.ref(lend(10).tensor)
    gc.collect(0)
    assert captured() is not None
    gc.collect()
    assert captured() is None and eager() is not None


INTERRUPTED = """
import ctypes, gc, operator, signal
from kernel_api import _workspaces

signal.signal(signal.SIGINT, signal.default_int_handler)  # which shells ignore in the background

if {keeps}:
    _workspaces._allocated = lambda index, size: None
    _workspaces._cleared = lambda tensor: _workspaces.Buffer(None, 1, 0)
    _workspaces._capture_of = lambda stream: 1
    _workspaces._of_capture(0, 7, 1)
    assert _workspaces._captured
    gc.collect()
    assert not _workspaces._captured
try:
    # An interrupt that comes while garbage is collected: no function of Python is between them.
    list(map(operator.methodcaller("__call__"), [ctypes.pythonapi.PyErr_SetInterrupt, gc.collect]))
except KeyboardInterrupt:
    print("interrupted")
"""


@pytest.mark.parametrize("keeps", [False, True])
def test_an_interrupt_while_garbage_is_collected_is_not_lost(keeps):
    code = INTERRUPTED.format(keeps=keeps)
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (ran.stdout, ran.stderr) == ("interrupted\n", "")


def test_who_else_hears_of_collections_hears_of_all(cuda):
    heard = []
    gc.callbacks.append(lambda phase, info: heard.append(phase))
    try:
        lend = _workspaces.lender(0)
        cuda.stream = 7
        for cuda.capture in (1, 2):
            captured = weakref.ref(lend(10).tensor)
            heard.clear()
            gc.collect()
            assert captured() is None and heard == ["start", "stop"]
    finally:
        gc.callbacks.pop()


def test_a_capture_that_goes_on_behind_garbage_takes_other_memory(cuda):
    lend = _workspaces.lender(0)
    cuda.stream, cuda.capture = 7, 1
    first = lend(10)  # the launch is not made yet
    gc.collect()
    second = lend(10)
    assert second.address != first.address and not second.tensor.any()


def test_memory_for_launches_to_come_is_in_no_pool_that_the_thread_allocates_in(cuda):
    lend = _workspaces.lender(0)
    cuda.stream = 7
    lend(10)
    cuda.capture = 1
    lend(10)
    assert [one is threading.current_thread() for one in cuda.threads] == [False, True]


@pytest.mark.parametrize(
    ("manager", "shares"),
    [
        (None, True),
        (SimpleNamespace(stream=SimpleNamespace(cuda_stream=8)), True),
        (SimpleNamespace(stream=SimpleNamespace(cuda_stream=7)), False),
        (SimpleNamespace(), False),  # a torch that we do not know
    ],
)
def test_graph_trees_get_memory_back_behind_every_launch(cuda, monkeypatch, manager, shares):
    trees = SimpleNamespace(get_manager=lambda index, create_if_none_exists: manager)
    monkeypatch.setitem(sys.modules, "torch._inductor.cudagraph_trees", trees)
    lend = _workspaces.lender(0)
    cuda.stream, cuda.capture = 7, 1
    first = weakref.ref(lend(10).tensor)
    assert (first() is not None) == shares
    lend(10)
    assert len(cuda.made) == (1 if shares else 2)


def test_where_the_driver_does_not_tell_captures_apart_every_launch_has_its_own(cuda, monkeypatch):
    lend = _workspaces.lender(0)
    cuda.stream, cuda.capture = 7, 1
    monkeypatch.setattr(_workspaces, "_capture_of", lambda stream: None)
    assert lend(10).address != lend(10).address


def test_without_a_driver_captures_have_no_number(monkeypatch):
    monkeypatch.setattr(_workspaces, "_driver", lambda: None)
    assert _workspaces._capture_of(7) is None
    monkeypatch.setattr(_workspaces, "_driver", lambda: lambda *given: 1)  # an error's number
    assert _workspaces._capture_of(7) is None


def test_the_driver_writes_the_number_of_the_capture(monkeypatch):
    def ask(stream, status, number, *nothing):
        assert stream.value == 7 and nothing == (None, None, None)
        number._obj.value = 1 << 40
        return 0

    monkeypatch.setattr(_workspaces, "_driver", lambda: ask)
    assert _workspaces._capture_of(7) == 1 << 40


def test_without_cuda_there_is_nothing_to_borrow(monkeypatch):
    monkeypatch.delattr(torch._C, "_cuda_getCurrentRawStream", raising=False)
    lend = _workspaces.lender(0)
    with pytest.raises(DeviceError, match="without CUDA"):
        lend(10)

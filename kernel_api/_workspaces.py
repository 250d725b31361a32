"""Device memory that kernels borrow for a launch: one buffer per device and stream.

Launches on one stream follow each other, so they can share it. Its first bytes are zero before
every launch, and the kernels leave them so: no launch has to clear anything. In a CUDA graph that
matters twice: a node that clears takes longer than many a kernel, and the kernel behind it cannot
start before it has ended (programmatic dependent launch).
"""

from __future__ import annotations

import ctypes
import functools
import gc
import operator
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from kernel_api.errors import DeviceError

#: Bytes at the start of a borrowed workspace that are zero.
ZEROED = 65536

#: Bytes of a counter in them, and of a partial sum behind.
COUNTER_BYTES = PART_BYTES = 4

#: Bytes that the address of a workspace is a multiple of.
ALIGNMENT = 128


class Buffer(NamedTuple):
    """Memory, its size in bytes and its address."""

    tensor: Any
    size: int
    address: int


#: By the index of a device and the handle of a stream of it.
_buffers: dict[tuple[int, int], Buffer] = {}

#: The same of streams that are captured: of the last capture, by its number, until Python collects
#: garbage. A buffer must not go back to the graph's memory between launches that share it; behind
#: the capture it should, but nobody says when that has ended.
_captured: dict[tuple[int, int], tuple[int, Buffer]] = {}

#: The handle of the stream that is never captured.
_LEGACY = 0

_EVERYTHING = 2  # the generation of garbage that `gc.collect` asks for


def lender(index: int) -> Callable[[int], Buffer]:
    """A function that lends at least so many bytes of a CUDA device, which is the current one, for
    a launch on its current stream. Who borrows keeps the buffer until the launch is made: another
    thread may borrow more, and put a new one in its place.

    While a CUDA graph is captured it is memory of its own, the graph's: replays may run beside
    other launches. The zeros are then written by every replay, before the first launch.
    """
    import torch

    # Bound once: a launch costs little more than what is asked for it. A torch for the CPU alone
    # has no such function, and makes launchers only.
    stream_of: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", _no_cuda)
    is_captured = torch.cuda.is_current_stream_capturing
    buffers = _buffers

    def lend(size: int) -> Buffer:
        stream = stream_of(index)
        if stream != _LEGACY and is_captured():
            return _of_capture(index, stream, size)
        buffer = buffers.get((index, stream))
        if buffer is None or buffer.size < size:
            # The old one goes back to torch, which gives it to later work of the stream only.
            buffer = buffers[index, stream] = _cleared(_apart(index, stream, size))
        return buffer

    return lend


def _of_capture(index: int, stream: int, size: int) -> Buffer:
    """For a launch that a stream captures; the same for all that it captures into one graph."""
    key = index, stream
    capture = None if _is_of_graph_trees(index, stream) else _capture_of(stream)
    number, buffer = _captured.get(key, (None, None))
    if buffer is None or number != capture or buffer.size < size:
        buffer = None
        _captured.pop(key, None)  # so that the graph may take this memory again
        buffer = _cleared(_allocated(index, size))
        if capture is not None:
            _captured[key] = capture, buffer
            _Collections.call(_give_back)
    return buffer


def _give_back(phase: str, info: dict[str, int]) -> None:
    """What captures keep; one that has not ended takes other memory for its further launches."""
    if phase == "start" and info["generation"] == _EVERYTHING:
        # In this order: what another thread keeps meanwhile is cleared too, or heard of again.
        _Collections.call(operator.is_)
        _captured.clear()


class _Collections:
    """What Python calls when it collects garbage: :func:`_give_back` as long as a capture keeps
    something, otherwise a function of C that does nothing. An interrupt of the user that a function
    of Python meets there is lost: it is printed, and that is all.

    An object of this class stays in ``gc.callbacks``, whose items Python calls by their places: it
    would leave out the one behind an item that goes.
    """

    __call__ = staticmethod(operator.is_)

    @classmethod
    def call(cls, function: Callable[[str, dict[str, int]], object]) -> None:
        cls.__call__ = staticmethod(function)  # type: ignore[method-assign]


gc.callbacks.append(_Collections())


def _capture_of(stream: int) -> int | None:
    """The number of the capture that a stream takes part in, which no other one ever has; None if
    the driver does not say."""
    ask = _driver()
    if ask is None:
        return None
    status, number = ctypes.c_int(), ctypes.c_uint64()
    failed = ask(
        *(ctypes.c_void_p(stream), ctypes.byref(status), ctypes.byref(number)),
        *(None, None, None),
    )
    return None if failed else number.value


@functools.cache
def _driver() -> Callable[..., int] | None:
    """Its cuStreamGetCaptureInfo, of the handle of a stream and where status, number, graph, nodes
    and how many are to be written."""
    try:
        found: Callable[..., int] = ctypes.CDLL("libcuda.so.1").cuStreamGetCaptureInfo_v2
    except (OSError, AttributeError):
        return None
    return found


def _is_of_graph_trees(index: int, stream: int) -> bool:
    """Whether torch.compile records a graph on a stream (mode="reduce-overhead"). It knows of all
    memory that a graph has at its end, and refuses to go on if that is more than the results."""
    trees = sys.modules.get("torch._inductor.cudagraph_trees")
    if trees is None:
        return False
    try:
        manager = trees.get_manager(index, create_if_none_exists=False)
        return manager is not None and bool(manager.stream.cuda_stream == stream)
    except Exception:  # nothing there is promised; memory for a single launch is never wrong
        return True


def _no_cuda(index: int) -> int:
    raise DeviceError("torch was built without CUDA: there is no device to borrow memory of")


def _allocated(index: int, size: int) -> Any:
    import torch

    return torch.empty(max(size, ZEROED), dtype=torch.uint8, device=f"cuda:{index}")


def _apart(index: int, stream: int, size: int) -> Any:
    """The same for launches to come, in memory of no pool. A thread may allocate in one for a while
    (torch.cuda.use_mem_pool; torch.compile, before it records graphs), whose owner gives memory to
    others that it does not know of; so this is done by another thread."""
    import torch

    cuda: Any = torch.cuda

    def allocated() -> Any:
        with cuda.stream(cuda.ExternalStream(stream, index)):
            return _allocated(index, size)

    with ThreadPoolExecutor(max_workers=1) as thread:
        return thread.submit(allocated).result()


def _cleared(tensor: Any) -> Buffer:
    """On the current stream."""
    tensor[:ZEROED].zero_()
    return Buffer(tensor, tensor.numel(), tensor.data_ptr())

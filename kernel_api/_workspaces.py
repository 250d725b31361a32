"""Device memory that kernels borrow for a launch: one buffer per device and stream.

Launches on one stream follow each other, so they can share it. Its first bytes are zero before
every launch, and the kernels leave them so: no launch has to clear anything.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from kernel_api.errors import DeviceError

#: Bytes at the start of a borrowed workspace that are zero.
ZEROED = 65536

#: Bytes that the address of a workspace is a multiple of.
ALIGNMENT = 128


class Buffer(NamedTuple):
    """Memory, its size in bytes and its address."""

    tensor: Any
    size: int
    address: int


#: By the index of a device and the handle of a stream of it.
_buffers: dict[tuple[int, int], Buffer] = {}

#: The handle of the stream that is never captured.
_LEGACY = 0


def lender(index: int) -> Callable[[int], Buffer]:
    """A function that lends at least so many bytes of a CUDA device, which is the current one, for
    a launch on its current stream. Who borrows keeps the buffer until the launch is made: another
    thread may borrow more, and put a new one in its place.

    While a CUDA graph is captured it is memory of its own, the graph's: replays may run beside
    other launches. The zeros are then written by every replay.
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
            return _new(index, size)
        buffer = buffers.get((index, stream))
        if buffer is None or buffer.size < size:
            # The old one goes back to torch, which gives it to later work of the stream only.
            buffer = buffers[index, stream] = _new(index, size)
        return buffer

    return lend


def _no_cuda(index: int) -> int:
    raise DeviceError("torch was built without CUDA: there is no device to borrow memory of")


def _new(index: int, size: int) -> Buffer:
    import torch

    buffer = torch.empty(max(size, ZEROED), dtype=torch.uint8, device=f"cuda:{index}")
    buffer[:ZEROED].zero_()
    return Buffer(buffer, buffer.numel(), buffer.data_ptr())

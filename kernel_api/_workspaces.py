"""Device memory that kernels borrow for a launch: one buffer per device and stream.

Launches on one stream follow each other, so they can share it. Its first bytes are zero before
every launch, and the kernels leave them so: no launch has to clear anything.
"""

from __future__ import annotations

from typing import Any

#: Bytes at the start of a borrowed workspace that are zero.
ZEROED = 65536

#: Bytes that the address of a workspace is a multiple of.
ALIGNMENT = 128

_buffers: dict[tuple[int, int], Any] = {}


def borrow(index: int, size: int) -> Any:
    """A uint8 tensor of at least ``size`` bytes on a CUDA device, for its current stream; the
    device is the current one.

    While a CUDA graph is captured it gets one of its own, from the graph's memory: replays may run
    beside other launches. The zeros are then written by every replay.
    """
    import torch

    if torch.cuda.is_current_stream_capturing():
        return _new(index, size)
    key = (index, torch._C._cuda_getCurrentRawStream(index))
    buffer = _buffers.get(key)
    if buffer is None or buffer.numel() < size:
        # The old one goes back to torch, which gives it to later work of the same stream only.
        buffer = _buffers[key] = _new(index, size)
    return buffer


def _new(index: int, size: int) -> Any:
    import torch

    buffer = torch.empty(max(size, ZEROED), dtype=torch.uint8, device=f"cuda:{index}")
    buffer[:ZEROED].zero_()
    return buffer

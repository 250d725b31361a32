"""Streams, as torch's current one."""

from __future__ import annotations

import contextlib
from typing import Any

from kernel_api.errors import DeviceError
from kernel_api.utils import stream_handle


def on_stream(stream: Any, index: int | None = None) -> contextlib.AbstractContextManager[Any]:
    """Make a stream torch's current one, which is what torch and TVM-FFI launch on.

    Args:
        stream: In any form that ``run`` takes; None: the one that is current.
        index: Of the CUDA device that the operands are on; None: of the current one.

    Raises:
        DeviceError: the stream is one of another device.
        TypeError: it is no stream.
        ArgumentError: it is an int, or gives one, that is no address.
    """
    if stream is None:
        return contextlib.nullcontext()
    import torch

    cuda: Any = torch.cuda
    if not isinstance(stream, torch.Stream):  # a handle does not tell its device
        stream = cuda.ExternalStream(stream_handle(stream), device=index)
    elif index is not None and stream.device != torch.device("cuda", index):
        raise DeviceError(
            f"the stream is one of {stream.device}, the operands are on cuda:{index}; pass a "
            f"stream of their device"
        )
    elif not isinstance(stream, cuda.Stream):
        stream = cuda.Stream(
            stream_id=stream.stream_id,
            device_index=stream.device_index,
            device_type=stream.device_type,
        )
    return torch.cuda.stream(stream)

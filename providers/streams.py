"""Streams, as torch's current one."""

from __future__ import annotations

import contextlib
from typing import Any

from kernel_api.utils import stream_handle


def on_stream(stream: Any) -> contextlib.AbstractContextManager[Any]:
    """Make a stream torch's current one, which is what torch and TVM-FFI launch on."""
    if stream is None:
        return contextlib.nullcontext()
    import torch

    if not isinstance(stream, torch.cuda.Stream):
        stream = torch.cuda.ExternalStream(stream_handle(stream))  # type: ignore[no-untyped-call]
    return torch.cuda.stream(stream)

"""Handles: a device and a stream."""

from __future__ import annotations

import threading
from typing import Any

from kernel_api.errors import GraphError


class Handle:
    """What graphs are executed with.

    Attributes:
        device: The torch device: the current GPU when the handle is made, the CPU where there is
            none.
        stream: In any form that kernels take; None: torch's current one at every execution.
    """

    __slots__ = ("_is_open", "device", "stream")

    def __init__(self, device: Any = None) -> None:
        import torch

        if device is None:
            device = _current_device()
        try:
            self.device = torch.device(device)
        except (RuntimeError, TypeError) as error:
            raise GraphError(f"device is {device!r}; expected a device of torch") from error
        self.stream: Any = None
        self._is_open = True

    def check(self) -> None:
        """Raise GraphError if it is destroyed."""
        if not self._is_open:
            raise GraphError("the handle is destroyed; create_handle() makes another one")

    def destroy(self) -> None:
        self._is_open = False

    def __repr__(self) -> str:
        return f"<handle of {self.device}{'' if self._is_open else ', destroyed'}>"


def create_handle(device: Any = None) -> Handle:
    """A handle of a device; of the current GPU, or of the CPU where there is none, by default."""
    return Handle(device)


def destroy_handle(handle: Handle) -> None:
    """What uses the handle afterwards raises GraphError."""
    required(handle).destroy()


def set_stream(handle: Handle, stream: Any) -> None:
    """Let executions with the handle be on a stream; None: on torch's current one."""
    required(handle).stream = stream


def get_stream(handle: Handle) -> Any:
    return required(handle).stream


_local = threading.local()


def default_handle() -> Handle:
    """One for each thread and device."""
    device = _current_device()
    handles = _local.__dict__.setdefault("handles", {})
    if device not in handles:
        handles[device] = Handle(device)
    found: Handle = handles[device]
    return found


def backend_version() -> int:
    """Version of this library as cuDNN counts: 10000·major + 100·minor + patch."""
    major, minor, patch = map(int, backend_version_string().split("."))
    return 10000 * major + 100 * minor + patch


def backend_version_string() -> str:
    from kernel_api import __version__

    return __version__


def _current_device() -> str:
    import torch

    if not torch.cuda.is_available():
        return "cpu"
    return f"cuda:{torch.cuda.current_device()}"


def required(handle: Any) -> Handle:
    if not isinstance(handle, Handle):
        raise GraphError(f"expected a handle of create_handle(), got a {type(handle).__name__}")
    handle.check()
    return handle

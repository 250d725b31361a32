"""A process that compiles kernels for :func:`kernel_api.compile_all`, into the cache on disk.

It is sent one job after another, and answers each. It sees no GPU.
"""

from __future__ import annotations

import socket
from typing import Any

from kernel_api._fork_server import answer, messages


def work(channel: socket.socket) -> None:
    """Until the channel ends."""
    for job in messages(channel):
        answer(channel, _done(job))


def _done(job: dict[str, Any]) -> dict[str, str | None]:
    """The error's kind and text, if there was one."""
    try:
        from kernel_api import _description
        from kernel_api.metadata import KernelMetadata

        kernel = KernelMetadata.from_dict(job["kernel"]).rebuild()
        kernel.compile(_description.rebuilt(job["arguments"], job["device"]), cc=job["target"])
    except Exception as error:
        return {"error": type(error).__name__, "text": str(error)}
    return {"error": None, "text": None}

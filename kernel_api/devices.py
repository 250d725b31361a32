"""What GPU and driver are here, asked once and only when needed."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

from kernel_api.errors import ArgumentError, DeviceError
from kernel_api.targets import CcLike, Target, target


@lru_cache(maxsize=64)
def device_target(index: int) -> Target:
    """Architecture of one CUDA device."""
    import torch

    major, minor = torch.cuda.get_device_capability(index)
    return Target(major, minor)


#: Of the environment: multiprocessors that kernels share work among at most.
_LIMIT = "KERNEL_API_MULTIPROCESSORS"


@lru_cache(maxsize=64)
def sm_count(index: int) -> int:
    """Streaming multiprocessors of one CUDA device that kernels share their work among: all, or as
    many as ``KERNEL_API_MULTIPROCESSORS`` says where others have some, such as communication."""
    import torch

    return _shared_of(int(torch.cuda.get_device_properties(index).multi_processor_count))


def _shared_of(count: int) -> int:
    return min(count, most_multiprocessors() or count)


@lru_cache(maxsize=1)
def most_multiprocessors() -> int | None:
    """What ``KERNEL_API_MULTIPROCESSORS`` says, read once; None if it says nothing."""
    given = os.environ.get(_LIMIT, "")
    if not given:
        return None
    if not (given.isascii() and given.isdecimal() and int(given)):
        raise ArgumentError(
            f"{_LIMIT} is {given!r}; expected how many multiprocessors kernels share their work "
            f"among at most: set it to such as 112, or to nothing"
        )
    return int(given)


@lru_cache(maxsize=64)
def gpu_name(index: int) -> str:
    """What the driver calls one CUDA device, such as ``NVIDIA H200``."""
    import torch

    return str(torch.cuda.get_device_properties(index).name)


#: Of the GPU that is assumed where there is none: an H200.
_ASSUMED_MULTIPROCESSORS = 132


def multiprocessors_of(device: Any) -> int:
    """Those among which kernels share their work on a tensor's device, see :func:`sm_count`;
    without a GPU, of an H200."""
    if device.type != "cuda" or not cuda_available():
        return _shared_of(_ASSUMED_MULTIPROCESSORS)
    return sm_count(device.index or 0)


def gpu_name_of(device: Any) -> str | None:
    """The name of a tensor's device; None without a GPU."""
    if device.type != "cuda" or not cuda_available():
        return None
    return gpu_name(device.index or 0)


@lru_cache(maxsize=1)
def cuda_available() -> bool:
    import torch

    return bool(torch.cuda.is_available())


def torch_device(given: Any) -> Any:
    """What a caller gave as `device`; raises ArgumentError for what is none."""
    import torch

    try:
        return torch.device(given)
    except (RuntimeError, TypeError):
        raise ArgumentError(
            f"device is {given!r}; expected a torch device, or the name of one: pass such as "
            f"'cuda:0', or leave it out"
        ) from None


def target_of(device: Any) -> Target | None:
    """Architecture of a tensor's device; None for the CPU, meta, and fake CUDA devices."""
    if device.type != "cuda" or not cuda_available():
        return None
    if device.index is None:
        import torch

        return device_target(torch.cuda.current_device())
    return device_target(device.index)


def devices_here() -> list[Target]:
    """Architectures of all CUDA devices; empty without a GPU."""
    if not cuda_available():
        return []
    import torch

    return [device_target(index) for index in range(torch.cuda.device_count())]


@lru_cache(maxsize=1)
def driver_version() -> str | None:
    """Version of the NVIDIA driver, such as ``580.65.06``; None without one."""
    ways: tuple[Callable[[], str], ...] = (_said_by_the_kernel, _said_by_nvml, _said_by_nvidia_smi)
    for way in ways:  # from cheap to dear
        try:
            found = _VERSION.search(way())
        except (OSError, AttributeError, subprocess.SubprocessError):
            continue
        if found is not None:
            return found[0]
    return None


def driver_major() -> int | None:
    """Its first number, such as 580; None without a driver."""
    version = driver_version()
    return int(version.partition(".")[0]) if version is not None else None


_VERSION = re.compile(r"\b\d{3,}(\.\d+)+\b")
_KERNEL_MODULE = Path("/proc/driver/nvidia/version")


def _said_by_the_kernel() -> str:
    return _KERNEL_MODULE.read_text()


def _said_by_nvml() -> str:
    library = ctypes.CDLL("libnvidia-ml.so.1")
    if library.nvmlInit_v2() != 0:
        return ""
    try:
        text = ctypes.create_string_buffer(80)
        said = library.nvmlSystemGetDriverVersion(text, len(text)) == 0
        return text.value.decode(errors="replace") if said else ""
    finally:
        library.nvmlShutdown()


def _said_by_nvidia_smi() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    if shutil.which(command[0]) is None:
        return ""
    return subprocess.run(command, capture_output=True, text=True, timeout=20).stdout


def query_target(device: Any, cc: CcLike) -> Target | None:
    """The architecture that a query is about; None means all of them.

    In this order: ``cc``, the device of the operands, ``KERNEL_API_ARCH``, the current device;
    of operands on the CPU not the last, which would begin to use the GPU (and not in a process
    that was forked from one that does).

    Raises ArgumentError for settings that make no sense, before rules depend on them.
    """
    most_multiprocessors()
    if cc is not None:
        return target(cc)
    found = target_of(device) if device is not None else None
    if found is not None:
        return found
    if arch := os.environ.get("KERNEL_API_ARCH"):
        try:
            return target(arch)
        except ArgumentError as error:
            raise ArgumentError(f"KERNEL_API_ARCH: {error}") from None
    if (device is None or device.type != "cpu") and cuda_available():
        import torch

        return device_target(torch.cuda.current_device())
    return None


def require_streams(device: Any, stream: Any) -> None:
    """Raise DeviceError for a stream that is given where operands are on the CPU."""
    if device.type == "cpu":
        raise DeviceError(
            f"stream is {stream!r}; the operands are on cpu, which has no streams; leave stream out"
        )


def capturing(index: int | None, stream: Any = None) -> bool:
    """Whether a CUDA graph records what is launched on a stream of a device, or on the current
    stream: loading code may break either capture."""
    import torch

    from kernel_api.providers.streams import on_stream

    if torch.cuda.is_current_stream_capturing():
        return True
    if stream is None:
        return False
    with on_stream(stream, index):
        return bool(torch.cuda.is_current_stream_capturing())

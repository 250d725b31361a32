"""Say what is installed, which GPU is here, and what works."""

from __future__ import annotations

import argparse
import os
import platform
import re
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from kernel_api import devices
from kernel_api.cli import _describe
from kernel_api.cli._render import Output, Table

if TYPE_CHECKING:
    from kernel_api.arguments import GemmArguments
    from kernel_api.provider import Provider

HELP = "what is installed, which GPU is here, what works"

#: From this driver on, code of the CUDA 13 generator can be loaded.
DRIVER_FOR_CUDA_13 = 580

_PACKAGES = ("nvidia-cutlass-dsl", "apache-tvm-ffi", "cuda-python", "torch", "rich")
_VARIABLES = "KERNEL_API_"
_TARGETS = ("sm_80", "sm_90a")

Section = dict[str, str]


def add_options(parser: argparse.ArgumentParser) -> None:
    """None beside ``--json``."""


def run(options: argparse.Namespace, output: Output) -> int:
    """Always 0: what is missing is an answer."""
    checks: dict[str, Callable[[], Section]] = {
        "versions": _versions,
        "code generator": _code_generator,
        "GPU": _gpu,
        "environment": _environment,
        "cache": _cache,
        "providers": _providers,
        "what works here": _what_works,
    }
    found = {name: checks[name]() for name in output.track(list(checks), "looking")}
    tables = [
        Table((name, ""), list(section.items())) for name, section in found.items() if section
    ]
    blocks: list[str | Table] = []
    for table in tables:
        blocks += [table, ""]
    output.show(found, *blocks[:-1])
    return 0


def _attempt(what: Callable[[], str]) -> str:
    """What a check says, or why it could not be made."""
    try:
        return what()
    except Exception as error:
        first_line = str(error).partition("\n")[0]
        return f"no: {type(error).__name__}: {first_line}"


def _versions() -> Section:
    from kernel_api import __version__

    section = {"kernel-api": __version__, "python": platform.python_version()}
    for name in _PACKAGES:
        section[name] = _version(name) or "not installed"
    section["torch built for"] = _attempt(_torch_build)
    return section


def _version(distribution: str) -> str | None:
    import importlib.metadata

    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _torch_build() -> str:
    import torch

    cuda, cudnn = torch.version.cuda, torch.backends.cudnn
    if cuda is None:
        return "the CPU only"
    return f"CUDA {cuda}, cuDNN {cudnn.version()}"  # type: ignore[no-untyped-call]


def _code_generator() -> Section:
    """Which of the DSL's code generators are installed, and which one it will use."""
    import importlib.metadata

    section = {}
    for distribution in importlib.metadata.distributions():
        name = (distribution.name or "").lower()
        if name.startswith("nvidia-cutlass-dsl-libs-"):
            section[name] = distribution.version
    installed = [int(found[1]) for n in section if (found := re.search(r"libs-cu(\d+)$", n))]
    driver = devices.driver_version()
    allowed = [cuda for cuda in installed if cuda < 13 or _takes_cuda_13(driver)]
    used = max(allowed or installed, default=None)
    section["in use"] = f"CUDA {used}" if used else "none installed"
    if driver is None:
        section["CUDA 13"] = f"needs driver {DRIVER_FOR_CUDA_13} or newer; there is none here"
    elif not _takes_cuda_13(driver):
        section["CUDA 13"] = f"needs driver {DRIVER_FOR_CUDA_13} or newer; here is {driver}"
    elif 13 not in installed:
        section["CUDA 13"] = f"driver {driver} allows it: pip install 'kernel-api[cu13]'"
    return section


def _takes_cuda_13(driver: str | None) -> bool:
    return driver is None or int(driver.partition(".")[0]) >= DRIVER_FOR_CUDA_13


def _gpu() -> Section:
    section = {"driver": devices.driver_version() or "none"}
    section["devices"] = _attempt(_device_count)
    if section["devices"].isdigit():
        for index in range(int(section["devices"])):
            section[f"cuda:{index}"] = _attempt(partial(_device, index))
    return section


def _device_count() -> str:
    import torch

    return str(torch.cuda.device_count())


def _device(index: int) -> str:
    import torch

    found = torch.cuda.get_device_properties(index)
    memory = found.total_memory / 2**30
    return (
        f"{found.name}, compute capability {found.major}.{found.minor}, "
        f"{found.multi_processor_count} SMs, {memory:.0f} GiB"
    )


def _environment() -> Section:
    named = {name: value for name, value in os.environ.items() if name.startswith(_VARIABLES)}
    return dict(sorted(named.items())) or {f"{_VARIABLES}*": "none set"}


def _cache() -> Section:
    """Where compiled kernels are kept, and as what."""
    return {"directory": _attempt(_cache_directory), "entries are": _attempt(_kind_of_entries)}


def _cache_directory() -> str:
    import warnings

    from kernel_api._disk_cache import DiskCache, directory, is_disabled

    if is_disabled():
        return "none: KERNEL_API_DISABLE_CACHE is set"
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # says why the directory cannot be used
        cache = DiskCache.open()
    count = sum(1 for _ in cache.entries_at.iterdir()) if cache is not None else 0
    return f"{directory()}, {count} entries"


def _kind_of_entries() -> str:
    from kernel_api.errors import LinkError
    from kernel_api.providers.cutedsl.linking import toolchain

    try:
        return f"shared libraries, linked by {toolchain()}"
    except LinkError as error:
        return f"object files, which need the DSL to be loaded: {error}"


def _providers() -> Section:
    """Each provider, whether it can work, and how many kernels its families have."""
    import kernel_api as ka
    from kernel_api.errors import ArgumentError
    from kernel_api.provider import providers

    try:
        listed = providers()
    except ArgumentError as error:  # every query says so
        return {"KERNEL_API_PROVIDERS": f"no: {error}"}
    section = {}
    for provider in listed:
        counts: dict[str, int] = {}
        for kernel in ka.get_kernels(providers=[provider]):
            family = _describe.family(kernel.metadata)
            counts[family] = counts.get(family, 0) + 1
        kernels = ", ".join(f"{name} {count}" for name, count in counts.items()) or "no kernels"
        why_not = _unavailable(provider)
        section[provider.name] = f"{kernels}; not available: {why_not}" if why_not else kernels
    return section


def _unavailable(provider: type[Provider]) -> str | None:
    """Why a provider cannot work here; None if it can."""
    try:
        status = provider.available()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None if status else str(status)


def _what_works() -> Section:
    section = {"reference on the CPU": _attempt(_reference_run)}
    section["load the CuTe DSL"] = _attempt(_load_dsl)
    for target in _TARGETS:
        section[f"compile for {target}"] = _attempt(partial(_compile, target))
    section["run on the GPU"] = _attempt(_gpu_run)
    return section


def _problem(device: str, size: int = 256) -> GemmArguments:
    import torch

    import kernel_api as ka

    def matrix() -> torch.Tensor:
        return torch.randn(size, size, dtype=torch.bfloat16, device=device)

    return ka.GemmArguments(matrix(), matrix(), matrix())


def _reference_run() -> str:
    import kernel_api as ka

    args = _problem("cpu")
    kernel = ka.get_kernels(args, providers=["reference"])[0]
    started = time.perf_counter()
    found = ka.verify(kernel, args)
    return f"{found}, {_milliseconds(started)}"


def _load_dsl() -> str:
    import importlib.util

    if importlib.util.find_spec("cutlass") is None:
        return "no: nvidia-cutlass-dsl is not installed"
    was_there = "cutlass" in sys.modules
    started = time.perf_counter()
    import cutlass.cute  # noqa: F401

    return "already loaded" if was_there else _milliseconds(started)


def _compile(target: str) -> str:
    import kernel_api as ka

    args = _problem("meta")
    kernels = ka.get_kernels(args, cc=target, providers=["cutedsl"])
    if not kernels:
        return "no: the cutedsl provider offers no kernel for it"
    started = time.perf_counter()
    artifact = kernels[0].compile(args, cc=target)
    spent = _milliseconds(started)
    found = artifact.resources
    registers = f", {found.registers} registers, {found.spill_bytes} bytes spilled" if found else ""
    return f"{spent}{registers} ({kernels[0].metadata.kernel_name})"


def _gpu_run() -> str:
    import torch

    import kernel_api as ka

    if not torch.cuda.is_available():
        return "no: torch sees no GPU"
    args = _problem("cuda")
    kernel = ka.get_kernels(args)[0]
    started = time.perf_counter()
    found = ka.verify(kernel, args)
    return f"{found}, {_milliseconds(started)} ({kernel.metadata.kernel_name})"


def _milliseconds(started: float) -> str:
    return f"{1e3 * (time.perf_counter() - started):.0f} ms"

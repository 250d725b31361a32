"""What compiled code was made from: versions of the compilers, sources of the kernel.

Answered without importing a compiler. Two processes that would compile the same code have the same
fingerprint, whether or not they see a GPU.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib.metadata
import os
import platform
import re
import sys
from collections.abc import Iterable

from kernel_api import _compile_cache, _log
from kernel_api._known_sources import sources
from kernel_api._sources import installed_by, is_ours, modules_of

logger = _log.logger(__name__)

#: What compiles and runs kernels.
DISTRIBUTIONS = (
    "kernel-api",
    "nvidia-cutlass-dsl",
    "nvidia-cutlass-dsl-libs-base",
    "nvidia-cutlass-dsl-libs-core",
    "apache-tvm-ffi",
)
_GENERATORS = ("cu13", "cu12")

#: Settings of the DSL that may change the code.
_SETTINGS = "CUTE_DSL_"


@functools.cache
def fingerprint(kernel_class: type) -> dict[str, str] | None:
    """Of the code that a kernel class compiles to in this process.

    It has the versions of what the class's provider says that its kernels run, and of what is
    installed that a contributor's sources import, and the sources that :mod:`kernel_api._sources`
    finds: kernels that stand beside it, and how kernels are found
    and timed, have no part in it.

    None where it cannot be known: the class stands in no file, or in one that cannot be read, or a
    source is newer than this process, which may run what was there before.
    """
    try:
        found = sources(kernel_class) if is_importable(kernel_class) else None
    except OSError as error:
        logger.info("%s is not kept on disk: %s", kernel_class, error)
        return None
    if found is None:
        logger.debug("%s is not kept on disk: it has no name or no file", kernel_class)
        return None
    newest = max(found, key=lambda one: one.changed)
    if newest.changed > _compile_cache.STARTED:
        logger.info("%s changed after this process started: nothing is kept", newest.path)
        return None
    text = "".join(f"{one.name} {one.sha256}\n" for one in found)
    run = versions_of([*_run_by(kernel_class), *_imported_by(kernel_class)])
    return {**_environment(), **run, "sources": hashlib.sha256(text.encode()).hexdigest()}


def _run_by(kernel_class: type) -> tuple[str, ...]:
    """What the provider of a class says; nothing for one that is no kernel, or not registered."""
    found: tuple[str, ...] = getattr(getattr(kernel_class, "_provider", None), "distributions", ())
    return found


def _imported_by(kernel_class: type) -> list[str]:
    """Distributions of what a contributor's sources import."""
    modules = [name for name in modules_of(kernel_class) if not is_ours(name)]
    tops = installed_by(kernel_class) if modules else []
    if not tops:
        return []
    installed = importlib.metadata.distributions()
    return sorted({one.metadata["Name"] for one in installed if not _tops_of(one).isdisjoint(tops)})


def _tops_of(distribution: importlib.metadata.Distribution) -> set[str]:
    """What can be imported of it, as it says itself or, if it does not, by its files;
    ``packages_distributions`` of Python 3.10 looks at the former alone."""
    if said := (distribution.read_text("top_level.txt") or "").split():
        return set(said)
    modules = (file for file in distribution.files or () if file.suffix == ".py")
    return {file.parts[0].removesuffix(".py") for file in modules}


def versions(kernel_class: type) -> dict[str, str]:
    """The fingerprint, or as much of it as is known."""
    return fingerprint(kernel_class) or _environment()


def is_importable(cls: type) -> bool:
    """Whether the class is what its module has under its name, so that the name stands for it."""
    found: object = sys.modules.get(cls.__module__)
    for part in cls.__qualname__.split("."):
        found = getattr(found, part, None)
    return found is cls


@functools.lru_cache(maxsize=1)
def _environment() -> dict[str, str]:
    """Versions, and the settings that a compiler reads."""
    settings = {n: v for n, v in sorted(os.environ.items()) if n.startswith(_SETTINGS)}
    return {
        **versions_of(DISTRIBUTIONS),
        **settings,
        **code_generator(),
        "machine": platform.machine(),
    }


def versions_of(distributions: Iterable[str]) -> dict[str, str]:
    """Of those that are installed."""
    return {name: version for name in distributions if (version := version_of(name))}


def version_of(distribution: str) -> str | None:
    """Of a distribution, if it is installed; all of its metadata takes milliseconds to parse."""
    try:
        text = importlib.metadata.distribution(distribution).read_text("METADATA") or ""
    except importlib.metadata.PackageNotFoundError:
        return None
    found = re.search(r"^Version: *(\S+)", text, re.MULTILINE)
    return found[1] if found else None


def code_generator() -> dict[str, str]:
    """The code generator that the DSL will use, with its version; empty without any."""
    versions = {n: version_of(f"nvidia-cutlass-dsl-libs-{n}") for n in _GENERATORS}
    installed = {name: version for name, version in versions.items() if version}
    if not installed:
        return {}
    driver = driver_major() if len(installed) > 1 else None
    # As the DSL does: the newest that the driver takes; without a driver the newest.
    able = [n for n in installed if driver is None or int(n[2:]) <= driver] or list(installed)
    return {"code generator": f"{able[0]} {installed[able[0]]}"}


@functools.lru_cache(maxsize=1)
def driver_major() -> int | None:
    """The CUDA version that the driver is made for; None without a driver."""
    try:
        version = ctypes.c_int(0)
        if ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version)) == 0:
            return version.value // 1000
    except (OSError, AttributeError):
        pass
    return None

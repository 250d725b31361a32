"""What compiled code was made from: versions of the compilers, sources of the kernel.

Answered without importing a compiler. Two processes that would compile the same code have the same
fingerprint, whether or not they see a GPU.
"""

from __future__ import annotations

import ast
import ctypes
import functools
import hashlib
import importlib.metadata
import importlib.util
import os
import platform
import re
import sys
import sysconfig
from collections.abc import Iterator
from importlib.machinery import PathFinder
from pathlib import Path

from kernel_api import _compile_cache, _log

logger = _log.logger(__name__)

_DISTRIBUTIONS = (
    "kernel-api",
    "nvidia-cutlass-dsl",
    "nvidia-cutlass-dsl-libs-base",
    "nvidia-cutlass-dsl-libs-core",
    "apache-tvm-ffi",
)
_GENERATORS = ("cu13", "cu12")

#: Settings of the DSL that may change the code.
_SETTINGS = "CUTE_DSL_"

#: Our own packages that decide what is compiled; all of each is hashed.
_OWN = ("implementations", "providers.cutedsl", "epilogue")


@functools.cache
def fingerprint(kernel_class: type) -> dict[str, str] | None:
    """Of the code that a kernel class compiles to in this process.

    None where it cannot be known: the class stands in no file, or a source is newer than this
    process, which may run what was there before.
    """
    if not is_importable(kernel_class) or None in _files_of(kernel_class).values():
        logger.debug("%s is not kept on disk: it has no name or no file", kernel_class)
        return None
    sources = list(dict.fromkeys((*_own_sources(), *_sources_of(kernel_class))))
    newest = max(sources, key=lambda path: path.stat().st_mtime)
    if newest.stat().st_mtime > _compile_cache.STARTED:
        logger.info("%s changed after this process started: nothing is kept on disk", newest)
        return None
    return {**_environment(), "sources": _digest(sources)}


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
    found = {name: version for name in _DISTRIBUTIONS if (version := _version(name))}
    settings = {n: v for n, v in sorted(os.environ.items()) if n.startswith(_SETTINGS)}
    return {**found, **settings, **code_generator(), "machine": platform.machine()}


def _version(distribution: str) -> str | None:
    """Without parsing all of the metadata, which takes milliseconds."""
    try:
        text = importlib.metadata.distribution(distribution).read_text("METADATA") or ""
    except importlib.metadata.PackageNotFoundError:
        return None
    found = re.search(r"^Version: *(\S+)", text, re.MULTILINE)
    return found[1] if found else None


def code_generator() -> dict[str, str]:
    """The code generator that the DSL will use, with its version; empty without any."""
    versions = {n: _version(f"nvidia-cutlass-dsl-libs-{n}") for n in _GENERATORS}
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


# Sources -----------------------------------------------------------------------------------


def _digest(sources: list[Path]) -> str:
    content = hashlib.sha256()
    for path in sources:
        data = path.read_bytes()
        content.update(f"{path.name} {len(data)}\n".encode())
        content.update(data)
    return content.hexdigest()


def _own_sources() -> Iterator[Path]:
    for name in _OWN:
        spec = importlib.util.find_spec(f"kernel_api.{name}")
        assert spec is not None
        for folder in spec.submodule_search_locations or ():
            yield from sorted(Path(folder).rglob("*.py"))


def _files_of(kernel_class: type) -> dict[str, Path | None]:
    """The files of the modules that the class and its bases are defined in, but for our own.

    None for a module without a source file, such as that of a notebook.
    """
    found: dict[str, Path | None] = {}
    for cls in kernel_class.__mro__:
        if _top(cls.__module__) not in ("kernel_api", "builtins"):
            file = Path(getattr(sys.modules.get(cls.__module__), "__file__", None) or "")
            found[cls.__module__] = file if file.suffix == ".py" and file.exists() else None
    return found


def _sources_of(kernel_class: type) -> Iterator[Path]:
    """The files of the class and its bases, and what these import of their own package or of
    what is not installed."""
    seen: set[Path] = set()
    files = _files_of(kernel_class).items()
    waiting = [(_package_of(module), path) for module, path in files if path is not None]
    while waiting:
        package, path = waiting.pop(0)
        if path in seen or path.suffix != ".py":
            continue
        seen.add(path)
        yield path
        for name in _imported(path, package):
            found = _file_of(name)
            if found is not None and (_top(name) == _top(package) or not _is_installed(found)):
                inside = name if found.name == "__init__.py" else name.rpartition(".")[0]
                waiting.append((inside, found))


def _package_of(module: str) -> str:
    found = sys.modules[module]
    return getattr(found, "__package__", None) or ""


def _top(name: str) -> str | None:
    return name.partition(".")[0] or None


def _imported(path: Path, package: str) -> Iterator[str]:
    """Full names of the modules that a file imports anywhere, also inside functions."""
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")
                kept = parents[: len(parents) - node.level + 1]
                base = ".".join([*kept, base] if base else kept)
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)


def _file_of(name: str) -> Path | None:
    """The file of a module, found without importing anything."""
    places: list[str] | None = None
    origin: str | None = None
    top, *rest = name.split(".")
    if top in sys.builtin_module_names or top in sys.stdlib_module_names or top == "kernel_api":
        return None
    for part in (top, *rest):
        spec = PathFinder.find_spec(part, places)
        if spec is None or (spec.origin is None and not spec.submodule_search_locations):
            return None
        origin = spec.origin
        places = list(spec.submodule_search_locations or ())
    return Path(origin) if origin is not None else None


@functools.lru_cache(maxsize=1)
def _installed_places() -> tuple[str, ...]:
    return tuple(sysconfig.get_paths()[n] for n in ("stdlib", "platstdlib", "purelib", "platlib"))


def _is_installed(path: Path) -> bool:
    return any(path.is_relative_to(place) for place in _installed_places())

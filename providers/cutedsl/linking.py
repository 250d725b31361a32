"""Files of compiled kernels: object files from the DSL, linked to libraries that do without it.

A library needs TVM-FFI alone at run time. The DSL's launch helpers and the CUDA runtime are linked
in, hidden, so that nothing of the process that loads it takes their place.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kernel_api import _fingerprint, _manifest
from kernel_api._code_files import FUNCTION, CodeFiles, temporary_folder
from kernel_api._manifest import Manifest
from kernel_api.errors import LinkError
from kernel_api.providers.cutedsl import compiler

_HELPERS = "libcuda_dialect_runtime_static.a"
_CUDA_RUNTIME = "libcudart_static.a"
_COMPILERS = ("cc", "gcc", "clang")
_SECONDS = 120

# The DSL's own definition of the function below is in its large run-time library. It is called
# only to raise an error.
_SOURCE = """
#include <stdint.h>
typedef void (*SetError)(const char *kind, const char **parts, int32_t count);
extern const char *cudaGetErrorName(int32_t code);
extern const char *cudaGetErrorString(int32_t code);
__attribute__((visibility("hidden")))
void CuteDSLRT_TVMFFISetRaisedCudaError(SetError set_error, int32_t code) {
  const char *parts[] = {"CUDA error ", cudaGetErrorName(code), ": ", cudaGetErrorString(code)};
  set_error("RuntimeError", parts, 4);
}
__attribute__((used, visibility("default"), section("%(section)s")))
const char %(symbol)s[] = {%(bytes)s, 0};
"""


@dataclass(frozen=True)
class Toolchain:
    """What a shared library is linked with."""

    compiler: str
    helpers: Path
    cuda_runtime: Path
    tvm_ffi: Path

    def __str__(self) -> str:
        return f"{self.compiler} with {self.cuda_runtime}"


class CuteCodeFiles(CodeFiles):
    """Object files by ``export_to_c``, libraries by the C compiler of this machine."""

    def object_code(self, compiled_obj: Any) -> bytes | None:
        return compiler.object_code(compiled_obj, FUNCTION)

    def link(self, code: bytes, manifest: Manifest, path: Path) -> None:
        text = manifest.text.encode()
        source = _SOURCE % {
            "section": _manifest.SECTION,
            "symbol": _manifest.SYMBOL,
            "bytes": ",".join(map(str, text)),
        }
        tools = toolchain()
        with temporary_folder() as folder:
            object_file = folder / "kernel.o"
            object_file.write_bytes(code)
            command = _command(tools, object_file, path)
            try:
                ran = subprocess.run(
                    command, input=source, capture_output=True, text=True, timeout=_SECONDS
                )
            except (OSError, subprocess.TimeoutExpired) as error:
                raise LinkError(f"{tools.compiler} could not be run: {error}") from error
        if ran.returncode != 0:
            raise LinkError(f"{tools.compiler} failed: {ran.stderr.strip()[-2000:]}")

    def cuda_version(self) -> int | None:
        return _major(toolchain().cuda_runtime)

    def load_object(self, path: Path) -> Callable[..., Any]:
        return compiler.load_object(path, FUNCTION)


CODE_FILES = CuteCodeFiles()


def _command(tools: Toolchain, object_file: Path, path: Path) -> list[str]:
    return [
        tools.compiler,
        *("-shared", "-fPIC", "-O1", "-s", "-o", str(path)),
        *("-x", "c", "-", "-x", "none"),
        *map(str, (object_file, tools.helpers, tools.cuda_runtime, tools.tvm_ffi)),
        *("-lpthread", "-ldl", "-lrt"),
        # Its own CUDA runtime, never one that the process has loaded.
        *("-Wl,--exclude-libs,ALL", "-Wl,-Bsymbolic", "-Wl,--build-id=none"),
    ]


@functools.lru_cache(maxsize=1)
def toolchain() -> Toolchain:
    """What is here to link with; raises LinkError naming what is missing."""
    named = os.environ.get("CC")
    found = next(filter(None, map(shutil.which, (named, *_COMPILERS) if named else _COMPILERS)), "")
    if not found:
        raise LinkError(
            f"there is no linker here: none of {', '.join(_COMPILERS)} is on PATH; install one or "
            f"set CC"
        )
    helpers = _helpers()
    if helpers is None:
        raise LinkError(f"there is no {_HELPERS} here; it comes with nvidia-cutlass-dsl")
    runtime = _cuda_runtime()
    if runtime is None:
        raise LinkError(
            f"there is no {_CUDA_RUNTIME} here; it comes with nvidia-cuda-runtime and with every "
            f"CUDA toolkit (set CUDA_HOME)"
        )
    from tvm_ffi.libinfo import find_libtvm_ffi

    return Toolchain(found, helpers, runtime, Path(find_libtvm_ffi()))


def _generator() -> int:
    """The CUDA version of the code generator."""
    name = _fingerprint.code_generator().get("code generator", "")
    found = re.match(r"cu(\d+)", name)
    return int(found[1]) if found else 0


def _helpers() -> Path | None:
    for place in _package_places("nvidia_cutlass_dsl"):
        path = place / f"cu{_generator()}" / "lib" / _HELPERS
        if path.exists():
            return path
    return None


def _cuda_runtime() -> Path | None:
    """The one of the code generator's CUDA version, if there are several that the driver takes."""
    driver = _fingerprint.driver_major()
    found = [path for place in _cuda_places() if (path := place / _CUDA_RUNTIME).exists()]
    able = [p for p in found if driver is None or (_major(p) or 0) <= driver]
    own = [p for p in able if _major(p) == _generator()]
    return next(iter(own or able), None)


def _cuda_places() -> Iterator[Path]:
    for place in _package_places("nvidia"):
        yield from sorted(place.glob("*/lib"))
    named = filter(None, map(os.environ.get, ("CUDA_HOME", "CUDA_PATH")))
    for home in (*map(Path, named), *sorted(Path("/usr/local").glob("cuda*"), reverse=True)):
        yield from (home / "lib64", home / "lib", home / "targets" / "x86_64-linux" / "lib")
    yield Path("/usr/lib/x86_64-linux-gnu")


def _package_places(name: str) -> list[Path]:
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):  # something on the import path refuses to look
        return []
    return [Path(place) for place in (spec.submodule_search_locations or ())] if spec else []


def _major(runtime: Path) -> int | None:
    """The CUDA version that the folders on the way to a library tell; wheels without one are 12."""
    if "cuda_runtime" in runtime.parts:
        return 12
    found = re.search(r"(?:cu|cuda-)(\d\d)\b", str(runtime.resolve()))
    return int(found[1]) if found else None

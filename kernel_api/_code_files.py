"""How compiled code becomes a file and comes back."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from kernel_api import _locks
from kernel_api._manifest import Manifest
from kernel_api.errors import LinkError

#: The name of the one function in a file of code.
FUNCTION = "kernel"

LIBRARY, OBJECT = ".so", ".o"


class CodeFiles(Protocol):
    """What a provider knows of files of its compiled code. A kernel class names it as
    ``code_files``; its artifacts are then kept on disk and can be exported."""

    def object_code(self, compiled_obj: Any) -> bytes | None:
        """A relocatable object file with :data:`FUNCTION`; None for what cannot be one."""

    def link(self, code: bytes, manifest: Manifest, path: Path) -> None:
        """Make a shared library that carries the manifest; raises LinkError."""

    def cuda_version(self) -> int | None:
        """The CUDA version that a driver must be made for to run a library that is linked here;
        None: any. Raises LinkError where none can be linked."""
        return None

    def load_object(self, path: Path) -> Callable[..., Any]:
        """The function in an object file; needs the compiler's run-time library."""


#: The file that was loaded from each path, as the system knows it: dlopen takes a path that it
#: knows for what it has loaded from it.
_loaded: dict[str, tuple[int, ...]] = {}
_loading = _locks.lock()


def load_library(path: Path) -> Callable[..., Any]:
    """The function in a shared library; needs TVM-FFI alone. The file has been checked.

    Where another file was loaded from the same path, it is loaded from a copy.
    """
    import tvm_ffi

    place, stat = os.path.abspath(path), path.stat()
    file = stat.st_dev, stat.st_ino, stat.st_mtime_ns, stat.st_size
    with _loading:
        if _loaded.setdefault(place, file) == file:
            module = tvm_ffi.load_module(place)
        else:
            with temporary_folder() as folder:  # what is loaded stays, without a name
                copy = folder / f"{FUNCTION}{LIBRARY}"
                shutil.copyfile(path, copy)
                module = tvm_ffi.load_module(str(copy))
    function: Callable[..., Any] = module[FUNCTION]
    return function


@contextlib.contextmanager
def temporary_folder() -> Iterator[Path]:
    """A folder that is removed afterwards; raises LinkError where nothing can be written there."""
    try:
        with tempfile.TemporaryDirectory() as folder:
            yield Path(folder)
    except OSError as error:
        raise LinkError(
            f"temporary files cannot be written: {error}; make room, or set TMPDIR to another "
            f"folder"
        ) from error


def write_durably(path: Path, data: bytes) -> None:
    """Make a new file whose content is on the disk when this returns."""
    with open(path, "xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def replace_durably(path: Path, data: bytes) -> None:
    """Make or replace a file; whoever reads it meanwhile has all of the old or of the new one."""
    with replacing_durably(path) as file:
        file.write(data)


@contextlib.contextmanager
def replacing_durably(path: Path) -> Iterator[BinaryIO]:
    """The same for what is written in parts; after an error the old file is there as it was.

    Links are followed. What is no file, such as a pipe or ``/dev/null``, is written to as it is:
    its name is not given to a file.
    """
    if path.exists() and not (path.is_file() or path.is_dir()):
        with open(path, "wb") as file:
            yield file
        return
    path = Path(os.path.realpath(path))
    temporary = path.with_name(f".{path.name}.{os.urandom(8).hex()}")
    try:
        with open(temporary, "xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)

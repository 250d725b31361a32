"""Compiled kernels as shared libraries: written by ``artifact.export``, read by :func:`load`.

A library needs TVM-FFI alone at run time. It carries its manifest: the kernel's metadata, the
signature, the target and the fingerprint; the same text stands beside it in a file ``.json``.
"""

from __future__ import annotations

import os
from pathlib import Path

from kernel_api._code_files import LIBRARY, OBJECT, load_library, replace_durably, temporary_folder
from kernel_api._fingerprint import driver_major, versions
from kernel_api._manifest import Identity, Manifest
from kernel_api.artifact import CompiledArtifact
from kernel_api.devices import devices_here
from kernel_api.errors import ArgumentError, LibraryError, LinkError, TargetError

#: TVM-FFI, in Python and in C++, goes by the name.
_NAMES = f"libraries are loaded from files whose names end in {LIBRARY}"


def load(path: str | os.PathLike[str]) -> CompiledArtifact:
    """The artifact in a shared library; works without a compiler, and without a GPU.

    Its kernel is rebuilt from the metadata, so ``artifact.kernel.run(args, artifact)`` runs it.

    Raises:
        LibraryError: the file is no library of ours, is cut off or damaged.
        TargetError: there are GPUs here and none of them runs its code.
        ArgumentError: the kernel's class is not here, or takes other metadata now.
    """
    manifest = read_manifest(path)
    if Path(path).suffix != LIBRARY:
        raise LibraryError(f"{path} is a library, but {_NAMES}; rename it")
    artifact = artifact_of(manifest, Path(path))
    here = devices_here()
    if here and not any(map(artifact.runs_on, here)):
        raise TargetError(
            f"{path} is compiled for {manifest.target}; the devices here are "
            f"{', '.join(map(str, here))}"
        )
    return artifact


def read_manifest(path: str | os.PathLike[str]) -> Manifest:
    """The manifest inside a library that is whole; raises LibraryError for any other file."""
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise LibraryError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:  # a name that no file can have
        raise LibraryError(f"{str(path)!r} cannot be read: {error}") from error
    try:
        manifest = Manifest.of_library(data)
        manifest.check(data)
    except LibraryError as error:
        raise LibraryError(f"{path} is {error}") from None
    return manifest


def artifact_of(manifest: Manifest, path: Path) -> CompiledArtifact:
    """The artifact in a file of code that has been checked: a library, or an object file.

    Raises:
        ArgumentError: the kernel cannot be rebuilt.
        LibraryError: the file cannot be loaded, or not run by this driver.
    """
    path = path.absolute()  # the folder may change, and a bare name is no path to the loader
    kernel = manifest.metadata.rebuild()
    driver = driver_major()
    if manifest.cuda is not None and driver is not None and driver < manifest.cuda:
        raise LibraryError(
            f"{path} is linked with the runtime of CUDA {manifest.cuda}, and the driver here is "
            f"made for CUDA {driver}; update it, or compile the kernel on this machine"
        )
    try:
        if path.suffix == OBJECT:
            assert kernel.code_files is not None
            function = kernel.code_files.load_object(path)
        else:
            function = load_library(path)
    except Exception as error:
        raise LibraryError(f"{path} cannot be loaded: {error}") from error
    artifact = CompiledArtifact(function, kernel, manifest.signature, manifest.target)
    artifact.resources = manifest.resources
    artifact.file = path
    return artifact


def export(artifact: CompiledArtifact, path: str | os.PathLike[str]) -> Path:
    """Write an artifact as a shared library, and its manifest beside it.

    Raises:
        LinkError: there is no linker here or no room for temporary files, the kernel has no code
            that can be linked, or the file that it was loaded from is another one now.
        ArgumentError: the kernel's metadata or the signature cannot be written as JSON, or the
            library not to that path.
    """
    path = Path(path)
    if path.suffix != LIBRARY:
        name = path.name.partition(".")[0] or "kernel"
        raise ArgumentError(f"path is {str(path)!r}; {_NAMES}, such as {name}{LIBRARY}")
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise ArgumentError(f"{path} cannot be written: it is no file")
    manifest, data = _from_file(artifact) or _linked(artifact)
    try:
        replace_durably(path, data)
        replace_durably(path.with_name(f"{path.name}.json"), manifest.text.encode())
    except OSError as error:
        raise ArgumentError(f"{path} cannot be written: {error.strerror}") from error
    return path


def _from_file(artifact: CompiledArtifact) -> tuple[Manifest, bytes] | None:
    """The library that the artifact was loaded from, if it was."""
    manifest = _own_manifest(artifact)
    if manifest is None or artifact.file is None:
        return None
    data = artifact.file.read_bytes()
    manifest.check(data)
    return manifest, data


def _own_manifest(artifact: CompiledArtifact) -> Manifest | None:
    """Of the library that it was loaded from; raises LinkError where that is another one now."""
    if artifact.file is None or artifact.file.suffix != LIBRARY:
        return None
    why = _is_gone(artifact)
    try:
        manifest = read_manifest(artifact.file)
    except LibraryError as error:
        raise LinkError(f"{why}: {error}") from error
    own = artifact.kernel.metadata, artifact.signature, artifact.target
    if (manifest.metadata, manifest.signature, manifest.target) != own:
        raise LinkError(f"{why}: {manifest.kernel_name} for {manifest.target} has its place")
    return manifest


def _is_gone(artifact: CompiledArtifact) -> str:
    name = artifact.kernel.metadata.kernel_name
    return f"{name} was loaded from {artifact.file}, which is not there any more"


def _linked(artifact: CompiledArtifact) -> tuple[Manifest, bytes]:
    identity, code = identity_of(artifact), object_code(artifact)
    if code is None:
        raise LinkError(f"{artifact.kernel.metadata.kernel_name} has no code that can be linked")
    return link(artifact, identity, code)


def identity_of(artifact: CompiledArtifact) -> Identity:
    """What an artifact is; raises LinkError for what is no machine code."""
    kernel = artifact.kernel
    if artifact.signature is None or artifact.target is None:
        raise LinkError(
            f"{kernel.metadata.kernel_name} is not compiled to machine code: there is nothing to "
            f"export"
        )
    manifest = _own_manifest(artifact)
    if manifest is not None:
        return manifest.identity
    found = versions(type(kernel))
    return Identity.of(kernel.metadata, artifact.signature, artifact.target, found)


def object_code(artifact: CompiledArtifact) -> bytes | None:
    """The object file of an artifact; None if it has none, LinkError where it was removed."""
    if artifact.file is not None and artifact.file.suffix == OBJECT:
        try:
            return artifact.file.read_bytes()
        except OSError as error:
            raise LinkError(f"{_is_gone(artifact)}: {error.strerror}") from error
    files = artifact.kernel.code_files
    return files.object_code(artifact.compiled_obj) if files is not None else None


def link(artifact: CompiledArtifact, identity: Identity, code: bytes) -> tuple[Manifest, bytes]:
    """The library made of an object file, sealed; raises LinkError."""
    files = artifact.kernel.code_files
    assert files is not None
    manifest = Manifest.unsealed(identity, artifact.resources, files.cuda_version())
    with temporary_folder() as folder:
        path = folder / f"kernel{LIBRARY}"
        files.link(code, manifest, path)
        return manifest.sealed(path.read_bytes())

"""Bundles: folders of kernel libraries with an index, offered to discovery without a compiler.

>>> ka.load_bundle("kernels")           # or KERNEL_API_BUNDLE=kernels
>>> ka.get_kernels(args)[0].run(args)   # nothing is compiled

A bundle is what ``kernel-api bundle`` makes of libraries that were exported. Its kernels come from
the provider ``bundle``, before all others, for the signatures and targets that it has them for.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from kernel_api import _locks
from kernel_api._code_files import LIBRARY, replace_durably
from kernel_api._manifest import Identity, Manifest
from kernel_api.arguments import Arguments, EpilogueArguments
from kernel_api.artifact import CompiledArtifact, code_runs_on
from kernel_api.errors import ArgumentError, LibraryError, PluginWarning
from kernel_api.kernel import Kernel
from kernel_api.library import artifact_of, identity_of, read_manifest
from kernel_api.metadata import KernelMetadata
from kernel_api.provider import Provider
from kernel_api.status import Status
from kernel_api.targets import CcLike, Target

if TYPE_CHECKING:
    from collections.abc import Hashable

INDEX = "index.json"

#: By what they are for: their files, and what these say of themselves.
_Libraries = dict[tuple[Any, ...], tuple[Path, Manifest]]

_FORMAT = 1


class BundleProvider(Provider):
    """Kernels that were compiled ahead of time; first, because they cost no compilation."""

    name: ClassVar[str] = "bundle"
    rank: ClassVar[int] = -1

    @classmethod
    def _taken_from(cls, kernel_class: Any) -> Iterable[str]:
        """Nothing: the families of several providers are here, which may have one name."""
        return ()


@dataclass(frozen=True)
class Bundled:
    """One library of a bundle."""

    path: Path
    signature: tuple[Hashable, ...]
    target: Target


class BundledKernel(Kernel):
    """What a kernel class becomes in a bundle: offered for what it is compiled for, and no more.

    Mixed in before the class, whose metadata, rules and launch stay.
    """

    libraries: ClassVar[dict[KernelMetadata, list[Bundled]]]
    space = None
    code_files = None
    _made_by = Kernel._made_by  # nothing that compiles is loaded

    @classmethod
    def generate_kernels(
        cls,
        metadata_filter: Callable[[KernelMetadata], bool],
        epilogue_args: EpilogueArguments | None = None,
        cc: int | None = None,
    ) -> list[Kernel]:
        return [cls(metadata) for metadata in cls.libraries if metadata_filter(metadata)]

    def status_behind_operands(self, args: Arguments, target: Target | None) -> Status:
        status = super().status_behind_operands(args, target)
        if status and self._library(args, target) is None:
            held = sorted({str(one.target) for one in self._libraries()})
            return Status.fail(
                f"the bundle has it for other signatures or targets than these (for "
                f"{', '.join(held)})",
                rule="in the bundle",
                progress=999,
            )
        return status

    def _compile_target(self, args: Arguments, asked: Target | None) -> Target | None:
        return self._held(args, asked).target

    def compile(self, args: Arguments, cc: CcLike = None) -> CompiledArtifact:
        found = self._held(args, self.compile_target(args, cc))
        artifact = artifact_of(read_manifest(found.path), found.path)
        held = artifact.kernel, artifact.signature, artifact.target
        if held != (self, args.signature, found.target):
            raise LibraryError(f"{found.path} is another library than the bundle's index says")
        return artifact

    def _held(self, args: Arguments, device: Target | None) -> Bundled:
        found = self._library(args, device)
        assert found is not None  # status_behind_operands has looked
        return found

    def _libraries(self) -> list[Bundled]:
        return type(self).libraries.get(self.metadata, [])

    def _library(self, args: Arguments, device: Target | None) -> Bundled | None:
        """The best one for a device; for any, if that is None."""
        fitting = [
            one
            for one in self._libraries()
            if one.signature == args.signature
            and (device is None or code_runs_on(one.target, device))
        ]
        return max(fitting, key=lambda one: (one.target.cc, one.target.suffix), default=None)


def load_bundle(path: str | os.PathLike[str]) -> list[Kernel]:
    """Offer a bundle's kernels in this process; returns them.

    The libraries are read when they are first used. An entry whose kernel class is not here is left
    out with a PluginWarning.

    Raises LibraryError where there is no bundle.
    """
    folder = Path(path).absolute()  # libraries are read later, maybe from another folder
    kernels = []
    for file, manifest in _index(folder):
        try:
            library = Bundled(folder / file, manifest.signature, manifest.target)
            family = _family(manifest.metadata.kernel_class)
            kernel = family(manifest.metadata)
            _require_one_name(manifest.metadata, family.libraries)
        except Exception as error:  # of an index that anything may have written
            warnings.warn(
                f"{manifest.kernel_name} of bundle {folder} is left out: {error}",
                PluginWarning,
                stacklevel=2,
            )
            continue
        held = family.libraries.setdefault(manifest.metadata, [])
        if library not in held:
            held.append(library)
        kernels.append(kernel)
    return list(dict.fromkeys(kernels))


def pack(sources: Iterable[str | os.PathLike[str]], folder: str | os.PathLike[str]) -> list[str]:
    """Make a bundle, or add to one: copy libraries into a folder and write its index. Of several
    builds of a kernel for the same types and target the newest file is the one.

    Args:
        sources: Exported libraries, or folders of them.

    Returns the names of the kernels in the bundle.

    Raises:
        LibraryError: one of the files is no library of ours, or there is none.
        ArgumentError: the folder cannot be written, or ``sources`` is one path.
    """
    if isinstance(sources, (str, os.PathLike)):
        raise ArgumentError(f"sources is {sources!r}; expected several, as in [{str(sources)!r}]")
    folder, sources = Path(folder), list(sources)
    if not sources:
        raise LibraryError("there is no library to pack: sources is empty")
    libraries = [path for source in sources for path in _libraries_at(Path(source))]
    manifests = [read_manifest(path) for path in libraries]  # all are checked before any is copied
    if not (libraries or any(folder.glob(f"*{LIBRARY}"))):
        raise LibraryError(f"there is no library to pack in {', '.join(map(str, sources))}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _locks.alone_at(folder):  # an index has what the folder has
            return _add(_newest(zip(libraries, manifests, strict=True)), folder)
    except OSError as error:
        raise ArgumentError(f"{folder} cannot be written: {error.strerror}") from error


def _add(newest: _Libraries, folder: Path) -> list[str]:
    """The names of the kernels that the folder has then."""
    for path, manifest in newest.values():
        target = folder / _file_name(manifest.identity)
        if not (target.exists() and path.samefile(target)):
            replace_durably(target, path.read_bytes())
    held = []
    for path in sorted(folder.glob(f"*{LIBRARY}")):
        manifest = read_manifest(path)
        new = newest.get(_served(manifest))
        if new is None or path.name == _file_name(new[1].identity):
            held.append((path, manifest))
        else:
            path.unlink()
    kernels = [{"file": path.name, "manifest": json.loads(m.text)} for path, m in held]
    index = json.dumps({"format": _FORMAT, "kernels": kernels}, indent=1)
    replace_durably(folder / INDEX, index.encode())
    return [manifest.kernel_name for _, manifest in held]


def _require_one_name(metadata: KernelMetadata, known: Iterable[KernelMetadata]) -> None:
    for other in known:
        if other.kernel_name == metadata.kernel_name and other != metadata:
            raise ArgumentError("another kernel has its name")


def _served(manifest: Manifest) -> tuple[Any, ...]:
    """What a library is for: of several that are for the same, one is loaded."""
    return manifest.metadata, manifest.signature, manifest.target


def _newest(libraries: Iterable[tuple[Path, Manifest]]) -> _Libraries:
    by_age = sorted(libraries, key=lambda one: one[0].stat().st_mtime_ns)
    return {_served(manifest): (path, manifest) for path, manifest in by_age}


def name_of(artifact: CompiledArtifact) -> str:
    """What an artifact's library is called among others."""
    return _file_name(identity_of(artifact))


def _file_name(identity: Identity) -> str:
    name = identity.kernel["kernel_name"]
    return f"{name}-{identity.target}-{identity.key[:8]}{LIBRARY}"


def _libraries_at(source: Path) -> list[Path]:
    return sorted(source.glob(f"*{LIBRARY}")) if source.is_dir() else [source]


def _index(folder: Path) -> list[tuple[str, Manifest]]:
    """The files of a bundle, and what its index says of each."""
    try:
        index = json.loads((folder / INDEX).read_text())
    except OSError as error:
        raise LibraryError(f"{folder} is no bundle: {INDEX}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise LibraryError(f"{folder} is no bundle: {INDEX} cannot be read: {error!r}") from error
    what = f"{folder} is no bundle: {INDEX} cannot be read"
    if not isinstance(index, dict):
        raise LibraryError(f"{what}: it is {index!r:.99}; expected an object with format, kernels")
    if index.get("format") != _FORMAT:
        raise LibraryError(
            f"{folder}: the index has format {index.get('format')!r:.99}; expected {_FORMAT}"
        )
    kernels = index.get("kernels")
    if not isinstance(kernels, list):
        raise LibraryError(f"{what}: kernels is {kernels!r:.99}; expected a list")
    return [_entry(entry, f"{what}: kernels[{i}]") for i, entry in enumerate(kernels)]


def _entry(entry: Any, what: str) -> tuple[str, Manifest]:
    if not isinstance(entry, dict):
        raise LibraryError(f"{what} is {entry!r:.99}; expected an object with file, manifest")
    file = entry.get("file")
    if not isinstance(file, str):
        raise LibraryError(f"{what}.file is {file!r:.99}; expected the name of a library")
    try:
        return file, Manifest.parsed(json.dumps(entry.get("manifest")))
    except LibraryError as error:
        raise LibraryError(f"{what}: {error}") from error


_families: dict[type[Kernel], type[BundledKernel]] = {}


def _family(kernel_class: type[Kernel]) -> type[BundledKernel]:
    """The class of a kernel class's kernels in bundles, which is offered. Raises RegistrationError
    for one that cannot be."""
    if kernel_class not in _families:
        body: dict[str, Any] = {
            "__module__": __name__,
            "__qualname__": f"Bundled({kernel_class.__module__}:{kernel_class.__qualname__})",
            "__doc__": kernel_class.__doc__,
            "family": f"{kernel_class.family_name()} (bundle)",
            "libraries": {},
        }
        metaclass: Any = type(kernel_class)
        name = f"Bundled{kernel_class.__name__}"
        made = BundleProvider.register(metaclass(name, (BundledKernel, kernel_class), body))
        _families[kernel_class] = made
    return BundleProvider.register(_families[kernel_class])

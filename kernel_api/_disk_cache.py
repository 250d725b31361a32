"""Compiled code on disk: one folder per entry, compiled once by however many processes.

An entry is a file of code (a shared library; an object file where nothing links) and its manifest.
It is made under another name and renamed, so that it is there as a whole or not at all. Whatever
does not agree with its digest, or with the name of its folder, is moved aside and compiled again.

The folder is the user's own: code is loaded from it, so one that others may write to is refused.
What the same user changes on purpose is out of scope.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import stat
import time
import warnings
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kernel_api import _log
from kernel_api._code_files import LIBRARY, OBJECT, write_durably
from kernel_api._fingerprint import fingerprint
from kernel_api._manifest import Identity, Manifest
from kernel_api.errors import ArgumentError, CacheWarning, LibraryError, LinkError

if TYPE_CHECKING:
    from kernel_api.artifact import CompiledArtifact
    from kernel_api.kernel import Kernel
    from kernel_api.targets import Target

logger = _log.logger(__name__)

_DIRECTORY, _DISABLE = "KERNEL_API_CACHE_DIR", "KERNEL_API_DISABLE_CACHE"

_MANIFEST = "manifest.json"
_FILES = (f"kernel{LIBRARY}", f"kernel{OBJECT}")
_TEMPORARY = "tmp-"

#: Another process compiles the same key at most this long; then this one does as well.
_SECONDS_TO_WAIT = 600.0


def artifact_for(
    kernel: Kernel,
    signature: tuple[Hashable, ...],
    target: Target | None,
    build: Callable[[], CompiledArtifact],
) -> CompiledArtifact:
    """The artifact on disk; else ``build()``, which is then kept there.

    Nothing that is wrong with the cache keeps a kernel from being compiled.
    """
    identity = identity_of(kernel, signature, target)
    cache = DiskCache.open() if identity is not None else None
    if identity is None or cache is None:
        return build()
    found = cache.load(identity.key)
    if found is not None:
        return found
    with cache.flight(identity.key):
        found = cache.load(identity.key)
        if found is not None:
            return found
        artifact = build()
        cache.keep(identity, artifact)
        return artifact


def identity_of(
    kernel: Kernel, signature: tuple[Hashable, ...], target: Target | None
) -> Identity | None:
    """None for what has no code to keep, or none that could be told from other code."""
    if kernel.code_files is None or target is None:
        return None
    found = fingerprint(type(kernel))
    if found is None:
        return None
    name = kernel.metadata.kernel_name
    try:
        identity = Identity.of(kernel.metadata, signature, target, found)
    except ArgumentError as error:
        logger.debug("%s is not kept on disk: %s", name, error)
        return None
    if "<locals>" in str(identity.kernel):
        logger.debug("%s is not kept on disk: its metadata has a class of a function", name)
        return None
    return identity


def directory() -> Path:
    """Where the cache is: ``KERNEL_API_CACHE_DIR``, or the user's cache folder.

    Raises ArgumentError where neither is known: a user without a home folder, a path that is
    relative to a folder that is gone.
    """
    if named := os.environ.get(_DIRECTORY):
        try:
            return _absolute(named)
        except FileNotFoundError:
            raise ArgumentError(
                f"{_DIRECTORY} is {named!r}, relative to the folder that this process works in, "
                f"which is gone; set it to an absolute path"
            ) from None
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if os.path.isabs(base) else _home() / ".cache") / "kernel_api"


@functools.cache
def _absolute(named: str) -> Path:
    """As it was when it was first asked for: a program may change its folder."""
    return Path(named).absolute()


def _home() -> Path:
    try:
        return Path.home()
    except RuntimeError:
        raise ArgumentError(
            f"there is no home folder to keep a cache in; set {_DIRECTORY} to a folder, or HOME"
        ) from None


#: What decides where the cache is.
SETTINGS = (_DIRECTORY, _DISABLE, "XDG_CACHE_HOME", "HOME")


def is_disabled() -> bool:
    return os.environ.get(_DISABLE, "0").lower() not in ("", "0", "false", "no")


_told: set[str] = set()


def warn(text: str, outcome: str = "kernels compile without the cache") -> None:
    """Once per text: every compilation would say it again."""
    if text not in _told:
        _told.add(text)
        warnings.warn(f"{text}; {outcome}", CacheWarning, stacklevel=3)


@dataclass(frozen=True)
class Entry:
    """One folder of the cache, as it was found.

    Attributes:
        manifest: None if it cannot be read.
        reason: What is wrong with it; None for a good one.
        unread: Whether the system gave no more than an error, such as that too many files are open:
            the entry may be good.
    """

    path: Path
    manifest: Manifest | None
    file: Path | None
    reason: str | None
    unread: bool = False

    @property
    def size(self) -> int:
        """In bytes; 0 if another process has removed it meanwhile."""
        try:
            return sum(one.stat().st_size for one in self.path.iterdir())
        except FileNotFoundError:
            return 0

    @property
    def used(self) -> float:
        """When it was made, or loaded last, in seconds of the epoch; now if another process has
        removed it meanwhile."""
        try:
            return self.path.stat().st_mtime
        except FileNotFoundError:
            return time.time()


class DiskCache:
    """The entries below one folder."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.entries_at = root / "kernels"

    @classmethod
    def open(cls) -> DiskCache | None:
        """The cache of this process; None, with a CacheWarning, where it may not be used."""
        if is_disabled():
            return None
        try:
            return cls.at(directory())
        except ArgumentError as error:
            warn(str(error))
        except OSError as error:
            warn(f"the cache directory {directory()} cannot be used: {error}")
        return None

    @classmethod
    def at(cls, root: Path) -> DiskCache:
        """The cache below a folder, which is made; raises OSError where it may not be used."""
        root.parent.mkdir(parents=True, exist_ok=True)
        for folder in (root, root / "kernels", root / "locks"):
            with contextlib.suppress(FileExistsError):
                folder.mkdir(mode=0o700)
            check_owner(folder)
        return cls(root)

    # One entry ---------------------------------------------------------------------------

    def load(self, key: str) -> CompiledArtifact | None:
        """The artifact of a good entry; a bad one is moved aside."""
        from kernel_api.library import artifact_of

        folder = self.entries_at / key
        if not self.has(key):
            return None
        entry = self.read(folder)
        if entry.manifest is None or entry.file is None or entry.reason is not None:
            if entry.unread:
                logger.warning(
                    "%s cannot be read, so the kernel is compiled: %s", folder, entry.reason
                )
            else:
                self.move_aside(entry)
            return None
        try:
            artifact = artifact_of(entry.manifest, entry.file)
        except (LibraryError, ArgumentError) as error:
            logger.warning("%s cannot be used, so the kernel is compiled: %s", folder, error)
            return None
        with contextlib.suppress(OSError):
            os.utime(folder)  # `prune` goes by the last use
        logger.info("loaded %s from %s", entry.manifest.kernel_name, folder)
        return artifact

    def has(self, key: str) -> bool:
        """Whether there is an entry, good or not; none where nobody can tell."""
        try:
            return (self.entries_at / key).exists()
        except OSError as error:
            logger.warning("%s cannot be looked into: %s", self.entries_at, error)
            return False

    def read(self, folder: Path) -> Entry:
        """What is in a folder, checked in full."""
        manifest = file = None
        try:
            manifest = Manifest.parsed((folder / _MANIFEST).read_text())
            file = next((folder / name for name in _FILES if (folder / name).exists()), None)
            if file is None:
                raise LibraryError("it has no file of code")
            if manifest.identity.key != folder.name:
                raise LibraryError("it belongs to another key")
            manifest.check(file.read_bytes())
        except (LibraryError, FileNotFoundError, NotADirectoryError, UnicodeDecodeError) as error:
            return Entry(folder, manifest, file, str(error))
        except OSError as error:
            return Entry(folder, manifest, file, str(error), unread=True)
        return Entry(folder, manifest, file, None)

    def keep(self, identity: Identity, artifact: CompiledArtifact) -> None:
        """Add an artifact that was just compiled. What goes wrong is logged, and no more."""
        try:
            made = _files_of(identity, artifact)
            if made is not None:
                self.add(identity.key, made)
        except Exception as error:
            logger.warning("%s is not kept on disk: %s", artifact, error)

    def add(self, key: str, files: dict[str, bytes]) -> bool:
        """Add an entry, all of it at once; one that is there already stays.

        Returns whether it was added.
        """
        temporary = self.entries_at / f"{_TEMPORARY}{os.urandom(8).hex()}"
        temporary.mkdir(mode=0o700)
        try:
            for name, data in files.items():
                write_durably(temporary / name, data)
            _rename_new(temporary, self.entries_at / key)
            return True
        except FileExistsError:
            return False
        finally:
            shutil.rmtree(temporary, ignore_errors=True)

    def move_aside(self, entry: Entry) -> None:
        """Out of the way, kept for whoever wants to know what happened."""
        logger.warning("cache entry %s is moved aside: %s", entry.path, entry.reason)
        aside = self.root / "aside"
        with contextlib.suppress(OSError):
            aside.mkdir(mode=0o700, exist_ok=True)
            entry.path.rename(aside / f"{entry.path.name}-{os.urandom(4).hex()}")

    @contextlib.contextmanager
    def flight(self, key: str) -> Iterator[None]:
        """One process at a time for a key. A lock that cannot be had is done without."""
        from filelock import FileLock, Timeout

        lock = FileLock(self.root / "locks" / f"{key}.lock", timeout=_SECONDS_TO_WAIT)
        try:
            lock.acquire()
        except Timeout:
            logger.warning("another process compiles %s for too long; not waiting for it", key)
        except (OSError, NotImplementedError) as error:
            logger.warning("%s cannot be locked: %s", key, error)
        try:
            yield
        finally:
            lock.release()

    # All entries -------------------------------------------------------------------------

    def entries(self) -> Iterator[Entry]:
        """Every entry, checked; those that are being made are left out."""
        for folder in sorted(self.entries_at.iterdir()):
            if folder.is_dir() and not folder.name.startswith(_TEMPORARY):
                yield self.read(folder)

    def remove(self, entry: Entry) -> None:
        shutil.rmtree(entry.path, ignore_errors=True)

    def sweep(self, older_than: float) -> int:
        """Remove what killed processes left, what was moved aside, and what is known of sources and
        would be found again, if it is old enough.

        Args:
            older_than: In seconds.

        Returns the number of things removed.
        """
        oldest = time.time() - older_than
        left = [
            *self.entries_at.glob(f"{_TEMPORARY}*"),
            *(self.root / "aside").glob("*"),
            *(self.root / "locks").glob("*.lock"),
            *(self.root / "sources").glob("*"),
        ]
        old = [path for path in left if path.exists() and path.lstat().st_mtime < oldest]
        for path in old:
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)
        return len(old)


def check_owner(folder: Path) -> None:
    """Raises OSError for a folder that others could put code into."""
    found = folder.stat()
    if found.st_uid != os.geteuid():
        raise PermissionError(f"{folder} is owned by user {found.st_uid}, not by {os.geteuid()}")
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        mode = stat.S_IMODE(found.st_mode)
        raise PermissionError(f"{folder} can be written by others (mode {mode:o}); chmod it to 700")


def _rename_new(source: Path, name: Path) -> None:
    """Rename a folder, unless the name is taken by one with content; raises FileExistsError."""
    try:
        source.rename(name)
    except OSError:
        if name.exists():
            raise FileExistsError(str(name)) from None
        raise


def _files_of(identity: Identity, artifact: CompiledArtifact) -> dict[str, bytes] | None:
    """The files of an entry; None if the artifact is no code that can be written."""
    from kernel_api.library import link, object_code

    code = object_code(artifact)
    if code is None:
        return None
    try:
        manifest, data = link(artifact, identity, code)
        name = f"kernel{LIBRARY}"
    except LinkError as error:
        logger.info("kept as an object file: %s", error)
        manifest, data = Manifest.unsealed(identity, artifact.resources).sealed(code)
        name = f"kernel{OBJECT}"
    return {name: data, _MANIFEST: manifest.text.encode()}

"""Look after the compiled kernels on disk."""

from __future__ import annotations

import argparse
import io
import lzma
import re
import tarfile
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kernel_api._code_files import replacing_durably
from kernel_api.cli._query import at_least
from kernel_api.cli._render import Output, Table
from kernel_api.errors import ArgumentError, LibraryError

if TYPE_CHECKING:
    from kernel_api._disk_cache import DiskCache, Entry
    from kernel_api._manifest import Manifest

HELP = "list, check, clean and move the compiled kernels on disk"

_DAY = 86400.0

#: What a killed process leaves is removed when it is so old that no living one can own it.
_LEFTOVER = 3600.0

_MEMBER = re.compile(r"([0-9a-f]{64})/(kernel\.so|kernel\.o|manifest\.json)")
_LARGEST_MEMBER = 256 * 2**20


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "what",
        choices=("ls", "verify", "prune", "export", "import", "path"),
        help="ls: the entries; verify: check each, move bad ones aside; prune: remove what is of "
        "no use; export, import: write or read an archive; path: where they are",
    )
    parser.add_argument("archive", nargs="?", help="the tar file of export and import")
    parser.add_argument("--filter", metavar="TEXT", help="only kernels with TEXT in their name")
    group = parser.add_argument_group("prune (by default what other versions or sources made)")
    group.add_argument(
        "--older-than", type=at_least(0), metavar="DAYS", help="what was not used for that long"
    )
    group.add_argument("--all", action="store_true", help="everything")


def run(options: argparse.Namespace, output: Output) -> int:
    """0, or 1 if ``verify`` or ``import`` met entries that are not good."""
    from kernel_api._disk_cache import DiskCache, directory

    if options.what == "path":
        output.show({"path": directory()}, str(directory()))
        return 0
    if (options.archive is None) == (options.what in ("export", "import")):
        raise ArgumentError(
            f"cache {options.what} takes {'a' if options.archive is None else 'no'} file"
        )
    cache = DiskCache.open()
    if cache is None:
        raise ArgumentError(
            "there is no cache: it is disabled, or its directory cannot be used (see the warning)"
        )
    return {
        "ls": _ls,
        "verify": _verify,
        "prune": _prune,
        "export": _export,
        "import": _import,
    }[options.what](cache, options, output)


def _chosen(cache: DiskCache, options: argparse.Namespace) -> list[Entry]:
    return [e for e in cache.entries() if not options.filter or options.filter in _name(e)]


def _name(entry: Entry) -> str:
    return entry.manifest.kernel_name if entry.manifest is not None else "unreadable"


def _ls(cache: DiskCache, options: argparse.Namespace, output: Output) -> int:
    entries = _chosen(cache, options)
    rows = [_row(entry) for entry in entries]
    size = sum(entry.size for entry in entries)
    data = [
        {
            "key": entry.path.name,
            "kernel": _name(entry),
            "target": row[2],
            "kind": row[3],
            "bytes": entry.size,
            "days_unused": (time.time() - entry.used) / _DAY,
            "state": entry.reason or "ok",
        }
        for entry, row in zip(entries, rows, strict=True)
    ]
    total = f"{len(entries)} entries, {size / 2**20:.1f} MiB in {cache.root}"
    output.show(data, *([Table(_COLUMNS, rows)] if rows else []), total)
    return 0


_COLUMNS = ("key", "kernel", "target", "kind", "KiB", "days unused", "state")


def _row(entry: Entry) -> tuple[str, ...]:
    manifest, file = entry.manifest, entry.file
    return (
        entry.path.name[:12],
        _name(entry),
        manifest.identity.target if manifest is not None else "-",
        {".so": "library", ".o": "object"}.get(file.suffix, "-") if file is not None else "-",
        f"{entry.size / 1024:.0f}",
        f"{(time.time() - entry.used) / _DAY:.1f}",
        entry.reason or "ok",
    )


def _verify(cache: DiskCache, options: argparse.Namespace, output: Output) -> int:
    entries = _chosen(cache, options)
    bad = [entry for entry in entries if entry.reason is not None]
    for entry in bad:
        cache.move_aside(entry)
    lines = [f"{entry.path.name[:12]} {_name(entry)}: {entry.reason}" for entry in bad]
    data = {
        "passed": not bad,
        "entries": len(entries),
        "moved_aside": {entry.path.name: entry.reason for entry in bad},
    }
    output.show(data, *lines, f"{len(entries) - len(bad)} of {len(entries)} ok")
    return 1 if bad else 0


def _prune(cache: DiskCache, options: argparse.Namespace, output: Output) -> int:
    oldest = None if options.older_than is None else time.time() - options.older_than * _DAY
    gone = [
        entry
        for entry in _chosen(cache, options)
        if options.all or (entry.used < oldest if oldest is not None else not _is_current(entry))
    ]
    freed = sum(entry.size for entry in gone)
    for entry in gone:
        cache.remove(entry)
    left = cache.sweep(0 if options.all else _LEFTOVER)
    data = {"removed": [entry.path.name for entry in gone], "bytes": freed, "leftovers": left}
    output.show(data, f"{len(gone)} entries removed, {freed / 2**20:.1f} MiB; {left} leftovers")
    return 0


def _is_current(entry: Entry) -> bool:
    """Whether this installation would compile the same code for the same question; it may, where
    the class of a plug-in is not imported."""
    from kernel_api._fingerprint import fingerprint

    if entry.manifest is None or entry.reason is not None:
        return False
    try:
        kernel_class = entry.manifest.metadata.kernel_class
    except ArgumentError:
        return not entry.manifest.identity.kernel["kernel_class"]["class"].startswith("kernel_api.")
    return fingerprint(kernel_class) in (None, entry.manifest.identity.fingerprint)


def _export(cache: DiskCache, options: argparse.Namespace, output: Output) -> int:
    entries = [entry for entry in _chosen(cache, options) if entry.reason is None]
    try:
        with (
            replacing_durably(Path(options.archive)) as written,
            tarfile.open(fileobj=written, mode="w") as archive,
        ):
            for entry in entries:
                for file in sorted(entry.path.iterdir()):
                    archive.add(file, f"{entry.path.name}/{file.name}")
    except OSError as error:
        raise ArgumentError(f"{options.archive} cannot be written: {error.strerror}") from error
    count = f"{len(entries)} entries written to {options.archive}"
    output.show({"entries": len(entries), "archive": options.archive}, count)
    return 0


def _import(cache: DiskCache, options: argparse.Namespace, output: Output) -> int:
    added, kept_out, refused = 0, 0, {}
    for key, files in _members(Path(options.archive)):
        try:
            manifest = _checked(key, files)
        except LibraryError as error:
            refused[key] = str(error)
            continue
        if options.filter and options.filter not in manifest.kernel_name:
            continue
        if _added(cache, key, files):
            added += 1
        else:
            kept_out += 1
    lines = [f"{key[:12]}: {reason}" for key, reason in refused.items()]
    data = {"entries": added, "kept_out": kept_out, "refused": refused}
    output.show(
        data,
        *lines,
        f"{added} entries taken from {options.archive}, {kept_out} were here, {len(refused)} are "
        f"damaged",
    )
    return 1 if refused else 0


def _added(cache: DiskCache, key: str, files: dict[str, bytes]) -> bool:
    """Whether an entry was taken: not where a good one is here."""
    if cache.has(key):
        mine = cache.read(cache.entries_at / key)
        if mine.reason is None:
            return False
        cache.move_aside(mine)
    return cache.add(key, files)


def _checked(key: str, files: dict[str, bytes]) -> Manifest:
    """Its manifest; raises LibraryError for what the cache would move aside."""
    from kernel_api._manifest import Manifest

    code = [data for name, data in files.items() if name != "manifest.json"]
    if len(files) != 2 or len(code) != 1:
        raise LibraryError("it is not one file of code and a manifest")
    manifest = Manifest.parsed(files["manifest.json"].decode(errors="replace"))
    if manifest.identity.key != key:
        raise LibraryError("it belongs to another key")
    manifest.check(code[0])
    return manifest


def _members(path: Path) -> Iterator[tuple[str, dict[str, bytes]]]:
    """The entries of an archive; whatever else is in it is not looked at."""
    entries: dict[str, dict[str, bytes]] = {}
    try:
        with tarfile.open(path) as archive:
            for member in archive:
                found = _MEMBER.fullmatch(member.name)
                if found and member.isreg() and member.size <= _LARGEST_MEMBER:
                    file: Any = archive.extractfile(member) or io.BytesIO()
                    entries.setdefault(found[1], {})[found[2]] = file.read()
    except tarfile.ReadError as error:
        why = "it is no archive, or a damaged one"  # in a line for each format of archives there
        raise ArgumentError(f"{path} cannot be read: {why}") from error
    except (OSError, EOFError, tarfile.TarError, zlib.error, lzma.LZMAError) as error:
        raise ArgumentError(f"{path} cannot be read: {error}") from error
    yield from entries.items()

"""The sources of our kernel classes as an earlier process found them.

Following imports takes tens of milliseconds; reading what was followed takes two. What is known of
a class holds as long as our modules are the same files, and those that are its sources have the
same bytes: nothing else decides where imports lead. It stands in the cache directory, one file for
the modules of a class.
"""

from __future__ import annotations

import functools
import hashlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from kernel_api import _log, _sources
from kernel_api._sources import Source

logger = _log.logger(__name__)


def sources(kernel_class: type) -> list[Source] | None:
    """As :func:`kernel_api._sources.sources`, which is asked if nothing is known."""
    modules = _sources.modules_of(kernel_class)
    if not modules or not all(map(_sources.is_ours, modules)):
        return _sources.sources(kernel_class)
    file = _file_for(modules)
    known = _read(file) if file is not None else None
    if known is not None:
        return known
    found = _sources.sources(kernel_class)
    if file is not None and found is not None:
        _write(file, found)
    return found


def _file_for(modules: Sequence[str]) -> Path | None:
    """None where nothing can be kept."""
    from kernel_api._disk_cache import DiskCache

    cache = DiskCache.open()
    if cache is None:
        return None
    key = hashlib.sha256(f"{_rules()} {modules}".encode()).hexdigest()
    return cache.root / "sources" / f"{key}.json"


@functools.lru_cache(maxsize=1)
def _rules() -> str:
    """What decides where imports lead, beside the text of the sources."""
    return _digest([Path(_sources.__file__).read_text(), sys.version, _sources.own_files()])


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()


def _read(file: Path) -> list[Source] | None:
    """None if it is not there, or is not what holds now."""
    try:
        fields = json.loads(file.read_bytes())
        rows = fields["sources"]
        if fields["digest"] != _digest(rows):
            raise ValueError("the digest is another one")
        found = [_sources.source(path, sha256) for path, sha256, _ in rows]
        same = all(one.content == content for one, (*_, content) in zip(found, rows, strict=True))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        logger.info("%s is not used: %r", file, error)
        return None
    return found if same else None


def _write(file: Path, found: list[Source]) -> None:
    from kernel_api._code_files import replace_durably

    rows = [(one.path, one.sha256, one.content) for one in found]
    try:
        file.parent.mkdir(mode=0o700, exist_ok=True)
        replace_durably(file, json.dumps({"sources": rows, "digest": _digest(rows)}).encode())
    except (OSError, ValueError) as error:
        logger.info("%s is not kept: %s", file, error)

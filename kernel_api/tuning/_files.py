"""Measurements on disk, each in a file of its own.

``<folder>/<environment>/<likeness of the problem>/<problem>/<kernel>.json``, all of these hashes.
A file is made under another name and renamed, so that it is there as a whole or not at all, and
processes that write at once are not in each other's way. It says in full what its name says in
short: whatever does not agree is not there, which a line in the log says.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from kernel_api import _log
from kernel_api._code_files import replace_durably
from kernel_api.errors import ArgumentError
from kernel_api.tuning._canonical import as_object, parsed, taken
from kernel_api.tuning._environment import Environment
from kernel_api.tuning._row import FORMAT, Row, content

logger = _log.logger(__name__)

#: Files of writers that are at it, or were killed; replace_durably names them so.
_TEMPORARY = "."
_ABANDONED_AFTER = 3600.0

#: A folder may be removed, because it is empty, before a file is made in it: so often in a row.
_ATTEMPTS = 8


def is_temporary(name: str) -> bool:
    """Whether a file is being written, or was when its writer died."""
    return name.startswith(_TEMPORARY)


class Imported(NamedTuple):
    """What became of the rows of an exported file.

    Attributes:
        taken: Number of those that are here now.
        kept_out: Number of those in whose place there is one that they do not replace.
        damaged: By number in the file, from 0, why it is none.
    """

    taken: int
    kept_out: int
    damaged: dict[int, str]


class RowFiles:
    """The rows below one folder, of whatever environment."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def rows(self) -> Iterator[Row]:
        """Every row that can be read, of whatever environment, also of kernels that changed."""
        return filter(None, map(self._read, self._all_files()))

    def export(self, path: Path) -> int:
        """Write every row into one JSON file; returns their number."""
        rows = [row.to_dict() for row in self.rows()]
        text = json.dumps({"format": FORMAT, "rows": rows}, sort_keys=True, indent=1)
        replace_durably(path, text.encode())
        return len(rows)

    def import_(self, path: Path) -> Imported:
        """Take the rows of an exported file, as :meth:`add` does.

        Returns how many were taken, how many were not, and which are no rows: these are left out
        and logged.

        Raises:
            ArgumentError: the file is none that ``export`` wrote.
            OSError: it cannot be read, or a row cannot be written.
        """
        try:
            fields = as_object(parsed(path.read_bytes()), "the content")
            if taken(fields, "format", int) != FORMAT:
                raise ArgumentError(f"format is {fields['format']}; expected {FORMAT}")
            rows = taken(fields, "rows", list)
        except ArgumentError as error:
            raise ArgumentError(f"{path} is no export of measurements: {error}") from error
        taken_rows, damaged = 0, {}
        for number, data in enumerate(rows):
            try:
                row = Row.from_dict(data)
            except ArgumentError as error:
                logger.warning("row %d of %s is left out: %s", number, path, error)
                damaged[number] = str(error)
                continue
            taken_rows += self.add(row)
        return Imported(taken_rows, len(rows) - len(damaged) - taken_rows, damaged)

    def add(self, row: Row) -> bool:
        """Keep a row from elsewhere, unless one is here that it does not replace
        (:meth:`Measurement.replaces`); whether it was kept.

        Raises OSError if it cannot be written.
        """
        mine = self._read(row.place)
        is_kept = mine is None or row.measurement.replaces(mine.measurement)
        if is_kept:
            self._write(row)
        return is_kept

    def prune(self, *, older_than: float | None = None, keep: Environment | None = None) -> int:
        """Remove files; without arguments only what killed writers left an hour ago.

        Args:
            older_than: Remove rows that were measured this many seconds ago, and files of that
                age that are no rows.
            keep: Remove all of other environments than this one.

        Returns the number of files removed. One that cannot be is left, and logged.
        """
        now, count = time.time(), 0
        for place in self._all_files(temporary=True):
            limit = _ABANDONED_AFTER if is_temporary(place.name) else older_than
            is_other = keep is not None and place.parts[0] != keep.digest
            try:
                if is_other or (limit is not None and now - self._made(place) >= limit):
                    (self.folder / place).unlink()
                    count += 1
            except FileNotFoundError:
                continue  # renamed, or removed by another process
            except OSError as error:
                logger.warning("%s cannot be removed: %s", self.folder / place, error)
        self._remove_empty_folders()
        return count

    def verify(self) -> list[tuple[Path, str]]:
        """Every file that is no row at its place, with the reason. Nothing is changed."""
        found = []
        for place in self._all_files():
            try:
                Row.read(place, self._content(place))
            except FileNotFoundError:
                continue
            except (ArgumentError, OSError) as error:
                found.append((self.folder / place, str(error)))
        return found

    # Files -------------------------------------------------------------------------------

    def _write(self, row: Row) -> None:
        path = self.folder / row.place
        for attempt in range(_ATTEMPTS):
            try:
                path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                replace_durably(path, row.text.data)
                return
            except (FileNotFoundError, FileExistsError):  # one that mkdir found is gone as well
                if attempt == _ATTEMPTS - 1:
                    raise

    def _read(self, place: Path) -> Row | None:
        """The row in a file; None, and a line in the log, for what is none."""
        try:
            return Row.read(place, self._content(place))
        except FileNotFoundError:
            return None
        except (ArgumentError, OSError) as error:
            logger.warning("%s is not used: %s", self.folder / place, error)
            return None

    def _made(self, place: Path) -> float:
        """When a row was measured, or what is no row was written, in seconds of the epoch."""
        with contextlib.suppress(ArgumentError):
            return Row.read(place, self._content(place)).measurement.date.timestamp()
        return (self.folder / place).stat().st_mtime

    def _content(self, place: str | Path) -> bytes:
        """Of a file; raises ArgumentError for one that is too large, and OSError."""
        return content(os.path.join(self.folder, place))

    def _names(self, folder: Path) -> list[str]:
        try:
            return sorted(os.listdir(self.folder / folder))
        except OSError as error:
            if not isinstance(error, (FileNotFoundError, NotADirectoryError)):
                logger.warning("%s cannot be read: %s", self.folder / folder, error)
            return []

    def _files(self, folder: Path) -> list[Path]:
        """Those below a problem's folder that are not being written."""
        return [folder / n for n in self._names(folder) if not is_temporary(n)]

    def _all_files(self, temporary: bool = False) -> Iterator[Path]:
        # Others may remove folders meanwhile: os.walk passes over what is gone.
        found = [Path(at, name) for at, _, names in os.walk(self.folder) for name in names]
        for path in sorted(found):
            if temporary or not is_temporary(path.name):
                yield path.relative_to(self.folder)

    def _remove_empty_folders(self) -> None:
        for at, *_ in os.walk(self.folder, topdown=False):
            if Path(at) != self.folder:
                with contextlib.suppress(OSError):  # not empty
                    os.rmdir(at)

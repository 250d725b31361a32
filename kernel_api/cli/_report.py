"""Write one HTML page of all tuning measurements, to be opened in any browser."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from kernel_api.cli._render import Output
from kernel_api.errors import ArgumentError

if TYPE_CHECKING:
    from kernel_api.tuning._row import Row

HELP = "write one HTML page of the tuning measurements"


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--out", default="report.html", metavar="FILE", help="the page (default: report.html)"
    )
    parser.add_argument(
        "--store",
        metavar="PATH",
        help="a folder of measurements, or a JSON file that they were exported to (default: those "
        "in the user's cache)",
    )


def run(options: argparse.Namespace, output: Output) -> int:
    """0, or 1 if there is nothing to report."""
    from kernel_api import report

    store, out = _store(options.store), Path(options.out)
    rows = _rows(store, output)
    data = {
        "out": str(out) if rows else None,
        "store": str(store),
        "rows": len(rows),
        "problems": len({row.measurement.problem for row in rows}),
        "environments": len({row.environment.digest for row in rows}),
    }
    if not rows:
        told = f"no measurements in {store}; tune a problem first, or name another --store"
        output.show(data, told)
        return 1
    try:
        report.write(out, rows)
    except OSError as error:
        raise ArgumentError(f"{out} cannot be written: {error.strerror}") from error
    output.show(data, f"{len(rows)} rows of {data['problems']} problems written to {out}")
    return 0


def _store(named: str | None) -> Path:
    """What is named, or the folder of the user's cache, which need not exist."""
    from kernel_api._disk_cache import directory

    if named is None:
        return directory() / "tuning"
    if not Path(named).exists():
        raise ArgumentError(
            f"--store is {named}, which is not there; expected a folder of measurements, or a "
            f"file that they were exported to"
        )
    return Path(named)


def _rows(store: Path, output: Output) -> list[Row]:
    from kernel_api.tuning._files import RowFiles

    return list(RowFiles(store).rows()) if not store.is_file() else _exported(store, output)


def _exported(path: Path, output: Output) -> list[Row]:
    """The rows of an exported file; a note says of each that is none why."""
    from kernel_api.tuning._canonical import as_object, taken
    from kernel_api.tuning._row import Row

    try:
        content = json.loads(path.read_bytes())
        found = taken(as_object(content, "the content"), "rows", list)
    except OSError as error:
        raise ArgumentError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:  # an ArgumentError is a ValueError
        raise ArgumentError(f"{path} is no export of measurements: {error}") from error
    rows = []
    for number, data in enumerate(found):
        try:
            rows.append(Row.from_dict(data))
        except ArgumentError as error:
            output.note(f"row {number} of {path} is left out: {error}")
    return rows

"""The only module of the command line that writes anything: answers, notes, progress.

Tables are drawn by rich where it is installed and the reader is a terminal that has room for every
word, such as a kernel's name, in one piece; otherwise they are plain aligned text. ``NO_COLOR``
keeps the tables and drops the colours.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TextIO, TypeVar

T = TypeVar("T")

#: Without a progress bar, a line of progress is written at most this often.
_SECONDS_BETWEEN_LINES = 2.0
#: Characters of a drawn table that are of no cell, for each column; at the edge there is another.
_BETWEEN_COLUMNS = 3
_STYLES = {"passed": "green", "ok": "green", "failed": "bold red", "error": "bold red"}


@dataclass(frozen=True)
class Table:
    """Rows of text below named columns; columns of numbers are aligned to the right. A cell is one
    line: what ends it, or a terminal would obey, is a blank."""

    columns: tuple[str, ...]
    rows: Sequence[Sequence[str]]
    title: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "rows", [[_one_line(cell) for cell in row] for row in self.rows])

    def widths(self, room: int) -> list[int] | None:
        """Of the columns, in as many characters; None where a word would have to be cut."""
        columns = list(zip(self.columns, *self.rows, strict=True))
        widths = [max(map(len, cells)) for cells in columns]
        least = [
            max(len(word) for cell in cells for word in (cell.split() or [""])) for cells in columns
        ]
        while sum(widths) > room:
            wider = [place for place, width in enumerate(widths) if width > least[place]]
            if not wider:
                return None
            widths[max(wider, key=widths.__getitem__)] -= 1
        return widths

    def is_numeric(self, column: int) -> bool:
        cells = [row[column] for row in self.rows if row[column] not in ("", "-")]
        return bool(cells) and all(_is_number(cell) for cell in cells)


def _one_line(text: str) -> str:
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() else " " for one in text)


class Output:
    """Where a command's answer goes: JSON, or tables and text for a reader."""

    def __init__(self, *, as_json: bool = False) -> None:
        self.as_json = as_json
        self._console = None if as_json else _rich_console(sys.stdout)

    @property
    def for_reader(self) -> bool:
        """Whether a person reads along: a terminal, and no ``--json``."""
        return not self.as_json and sys.stdout.isatty()

    def show(self, data: Any, *blocks: str | Table) -> None:
        """Write the answer: ``data`` as JSON if that is asked for, else the blocks."""
        if self.as_json:
            # Indented for a person; for a program, json's encoder in C, which cannot indent, does.
            indent = 2 if sys.stdout.isatty() else None
            sys.stdout.write(f"{json.dumps(_json_value(data), indent=indent)}\n")
            return
        for block in blocks:
            if isinstance(block, str):
                sys.stdout.write(f"{block}\n")
            else:
                self._show_table(block)

    def _show_table(self, table: Table) -> None:
        drawn = None if self._console is None else _rich_table(table, self._console.width)
        if self._console is None or drawn is None:
            sys.stdout.write(f"{plain(table)}\n")
        else:
            self._console.print(drawn)

    def note(self, text: str) -> None:
        """Write a line for the reader beside the answer, on stderr."""
        sys.stderr.write(f"{text}\n")

    def track(self, items: Sequence[T], doing: str) -> Iterator[T]:
        """The items one by one, with progress on stderr."""
        console = _rich_console(sys.stderr)
        if console is not None:
            from rich.progress import track

            yield from track(items, doing, console=console, transient=True)
            return
        told, noted = time.monotonic(), False
        for done, item in enumerate(items):
            if time.monotonic() - told > _SECONDS_BETWEEN_LINES:
                told, noted = time.monotonic(), True
                self.note(f"{doing}: {done} of {len(items)}")
            yield item
        if noted:
            self.note(f"{doing}: {len(items)} of {len(items)}")


def plain(table: Table) -> str:
    """The table as aligned text, without anything that a terminal would have to understand."""
    lines: list[Sequence[str]] = [table.columns, *table.rows]
    widths = [max(len(line[c]) for line in lines) for c in range(len(table.columns))]
    right = [table.is_numeric(c) for c in range(len(table.columns))]
    text = [
        "  ".join(
            cell.rjust(width) if numeric else cell.ljust(width)
            for cell, width, numeric in zip(line, widths, right, strict=True)
        ).rstrip()
        for line in lines
    ]
    text.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join([table.title, *text] if table.title else text)


def _rich_console(stream: TextIO) -> Any:
    """A console on the stream if rich is here and the stream is a terminal, else None."""
    if not stream.isatty():
        return None
    try:
        from rich.console import Console
    except ImportError:
        return None
    return Console(file=stream, highlight=False, soft_wrap=False)


def _rich_table(table: Table, room: int) -> Any:
    """None where it does not fit into as many columns of characters."""
    import rich.box
    import rich.table
    from rich.text import Text

    widths = table.widths(room - _BETWEEN_COLUMNS * len(table.columns) - 1)
    if widths is None:
        return None
    drawn = rich.table.Table(title=table.title, title_justify="left", box=rich.box.SIMPLE_HEAD)
    for index, (column, width) in enumerate(zip(table.columns, widths, strict=True)):
        justify: Any = "right" if table.is_numeric(index) else "left"
        drawn.add_column(column, justify=justify, width=width)
    for row in table.rows:
        drawn.add_row(*(Text(cell, style=_STYLES.get(cell, "")) for cell in row))
    return drawn


def _is_number(cell: str) -> bool:
    try:
        float(cell.removesuffix("x").replace(",", ""))
    except ValueError:
        return False
    return True


def _json_value(value: Any) -> Any:
    """The value in JSON's own types; what is not finite becomes null, unknown things text."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if type(value) is dict or isinstance(value, Mapping):  # an abstract class takes longer to ask
        return {str(key): _json_value(one) for key, one in value.items()}
    if isinstance(value, Iterable):
        return [_json_value(one) for one in value]
    return str(value)

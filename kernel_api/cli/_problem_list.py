"""Lists of problems, as files.

A list in JSON or YAML has objects, one in CSV has rows below a header::

    op, M, N, K, dtype, layout, bias      # names of the options that describe a problem
    gemm, 4096, 4096, 4096, bfloat16, tn,
    gemm_swiglu, 4096, 28672, 4096, bfloat16, tn, true

A name is that of an option without dashes; ``op`` is ``operation``, ``L`` is ``batch``, and what
``--with`` takes is named as it is. An empty cell, or null, is as if it were not there. What a
program recorded (see :mod:`kernel_api._recording`) has one problem in each line.
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from kernel_api.cli._attention_problem import ATTENTION_OPTIONS
from kernel_api.cli._fused_problem import option_names
from kernel_api.cli._norm_problem import NORMS
from kernel_api.cli._problem import add_problem_options, problem_arguments
from kernel_api.errors import ArgumentError, CacheWarning

if TYPE_CHECKING:
    from kernel_api.arguments import Arguments

_SHORT = {"op": "operation", "l": "batch"}

#: Options that are not of a problem, but of what is done with it.
_OF_THE_COMMAND = ("cc", "device", "seed")

#: Where a problem stands, and what is said of it there.
Entry = tuple[str, Any]


def problems(
    path: Path, options: argparse.Namespace, *, with_sizes: bool = True
) -> list[Arguments]:
    """The problems of a file, each once, in its order; on meta tensors if the options say so.

    Args:
        options: What an entry does not say is as they say.
        with_sizes: Whether every entry has to say its sizes.

    Raises:
        ArgumentError: the file cannot be read, has no problem, or one that makes no sense.
    """
    from kernel_api.tuning import Problem

    parser = _Parser(options, with_sizes)
    found: dict[Problem, Arguments] = {}
    for place, entry in _entries(path):
        try:
            args = _recorded(entry) if _is_recorded(entry) else parser.arguments(entry)
            found.setdefault(Problem.of(args), args)
        except Exception as error:  # torch has many for sizes that nothing can have
            what = error if isinstance(error, ArgumentError) else f"{type(error).__name__}: {error}"
            raise ArgumentError(f"{path}, {place}: {what}") from error
    if not found:
        raise ArgumentError(f"{path} has no problem; expected one at least")
    return list(found.values())


# Entries ---------------------------------------------------------------------------------


class _Parser(argparse.ArgumentParser):
    """The options that describe a problem, as the names of an entry."""

    def __init__(self, options: argparse.Namespace, with_sizes: bool) -> None:
        super().__init__(add_help=False, allow_abbrev=False)
        add_problem_options(self, devices=(options.device,), device=options.device)
        own = vars(self.parse_args([]))
        self.set_defaults(**{name: getattr(options, name) for name in own})
        self.names = [name for name in own if name not in (*_OF_THE_COMMAND, "beside")]
        self.with_sizes = with_sizes

    def error(self, message: str) -> NoReturn:
        raise ArgumentError(message)

    def arguments(self, entry: Mapping[Any, Any]) -> Arguments:
        """Of the entry that has these names."""
        given: dict[str, str] = {}
        beside: list[str] = []
        for title, value in entry.items():
            name = self._name(str(title))
            if value is None or (text := str(value).strip()) == "":
                continue
            if name not in self.names:
                beside.append(f"--with={name}={text}")
            elif name in given:
                raise ArgumentError(f"{name} is given twice, also as {title}; expected it once")
            else:
                given[name] = text
        if self.with_sizes:
            _check_sizes(given.get("operation", self.get_default("operation")), given)
        texts = [f"--{name.replace('_', '-')}={text}" for name, text in given.items()]
        options = self.parse_args([*texts, *beside])
        if options.operation in NORMS and "k" not in given:
            options.k = None  # that of the command line is for the products of the list
        return problem_arguments(options)

    def _name(self, title: str) -> str:
        name = title.strip().replace("-", "_")
        small = _SHORT.get(name.lower(), name.lower())
        if small in self.names:
            return small
        if name not in (others := option_names()) and name not in ATTENTION_OPTIONS:
            raise ArgumentError(
                f"there is no option {title.strip()} of a problem; there are op, L, "
                f"{', '.join(self.names)}, of fused products {', '.join(others)}, and of attention "
                f"{', '.join(ATTENTION_OPTIONS)}"
            )
        return name


def _check_sizes(operation: str, given: Mapping[str, str]) -> None:
    sizes = ("m", "n") if operation in NORMS else ("m", "n", "k")
    names = ", ".join(sizes).upper()
    for size in sizes:
        if size not in given:
            raise ArgumentError(f"there is no {size.upper()}; {operation} has sizes {names}")
    if len(sizes) == 2 and "k" in given:
        raise ArgumentError(f"K is {given['k']}; {operation} has sizes {names}, leave it out")


def _is_recorded(entry: Mapping[Any, Any]) -> bool:
    return "class" in entry


def _recorded(entry: Any) -> Arguments:
    """What a program ran; its class is loaded only if it is ours."""
    from kernel_api._description import rebuilt

    try:
        module, name = entry["class"]
        if module.partition(".")[0] != "kernel_api" and module not in sys.modules:
            raise ArgumentError(f"{module}.{name} is not loaded; expected arguments of kernel_api")
        return rebuilt(entry)
    except (LookupError, TypeError, ValueError, AttributeError, ImportError) as error:
        if isinstance(error, ArgumentError):
            raise
        raise ArgumentError(
            f"this is no problem as KERNEL_API_RECORD writes it ({error!r}); record it again"
        ) from error


# Files -----------------------------------------------------------------------------------


def _entries(path: Path) -> list[Entry]:
    """Every entry of a file and where it stands."""
    try:
        text = path.read_text(encoding="utf-8-sig")  # spreadsheets begin a file with its mark
        if path.suffix == ".csv":
            return _rows(text)
        if path.suffix in (".yaml", ".yml"):
            return _objects(_yaml(text))
        if text.lstrip().startswith("{"):
            return _recorded_lines(text, path)
        return _objects(json.loads(text, object_pairs_hook=_once) if text.strip() else [])
    except (OSError, ValueError, RecursionError) as error:
        raise ArgumentError(f"{path} cannot be read: {error}") from error


def _yaml(text: str) -> Any:
    try:
        import yaml  # type: ignore[import-untyped, unused-ignore]
    except ImportError:
        raise ArgumentError(
            "YAML needs pyyaml, which is not installed; pip install 'kernel-api[cli]', or write "
            "JSON or CSV"
        ) from None

    class Loader(yaml.SafeLoader):  # type: ignore[misc, unused-ignore]
        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            _check_once(key.value for key, _ in node.value)
            return super().construct_mapping(node, deep)

    try:
        found = yaml.load(text, Loader)
    except yaml.YAMLError as error:
        raise ArgumentError(str(error)) from error
    return [] if found is None else found


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of its names and values."""
    _check_once(name for name, _ in pairs)
    return dict(pairs)


def _check_once(names: Iterable[Any]) -> None:
    for name, count in Counter(map(str, names)).items():
        if count > 1:
            raise ArgumentError(f"{name} is given twice; expected it once")


def _objects(listed: Any) -> list[Entry]:
    if not isinstance(listed, list) or not all(isinstance(one, dict) for one in listed):
        raise ArgumentError("it is no list of objects, such as [{...}, {...}]")
    return [(f"entry {number}", one) for number, one in enumerate(listed, 1)]


def _recorded_lines(text: str, path: Path) -> list[Entry]:
    """With a CacheWarning where the writer of the last line was killed."""
    found: list[Entry] = []
    lines = text.splitlines(keepends=True)
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
        except ValueError as error:
            if found and number == len(lines) and not line.endswith("\n"):
                warnings.warn(
                    f"{path}, line {number}: it is cut off, as its writer was killed; it is left "
                    f"out",
                    CacheWarning,
                    stacklevel=2,
                )
                continue
            raise ArgumentError(f"line {number} is not JSON: {error}") from error
        if not isinstance(entry, dict) or not _is_recorded(entry):
            raise ArgumentError(
                f"it is no list of objects, such as [{{...}}, {{...}}], and line {number} of it is "
                f"no recorded problem"
            )
        found.append((f"line {number}", entry))
    return found


def _cells(number: int, line: str) -> list[str]:
    try:
        return [cell.strip() for cell in next(csv.reader([line], skipinitialspace=True))]
    except csv.Error as error:
        raise ArgumentError(f"line {number}: {error}") from error


def _rows(text: str) -> list[Entry]:
    """Those below the header; what is behind a # is a comment."""
    lines = ((number, line.partition("#")[0]) for number, line in enumerate(text.splitlines(), 1))
    rows = [(number, _cells(number, line)) for number, line in lines if line.strip()]
    if not rows:
        return []
    (number, header), *rows = rows
    for name, count in Counter(header).items():
        if count > 1:
            raise ArgumentError(f"line {number} has {count} columns {name!r}; expected one")
    for number, cells in rows:
        if len(cells) > len(header):
            raise ArgumentError(
                f"line {number} has {len(cells)} cells; expected {len(header)}, one of each column"
            )
    return [(f"line {n}", dict(zip(header, cells, strict=False))) for n, cells in rows]

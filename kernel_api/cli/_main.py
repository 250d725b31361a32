"""The parser, and the way from a command to its exit code."""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import sys
import warnings
from collections.abc import Iterator, Sequence

from kernel_api import __version__
from kernel_api.cli import (
    _bench,
    _bundle,
    _cache,
    _compile,
    _doctor,
    _explain,
    _list,
    _report,
    _tune,
    _verify,
)
from kernel_api.cli._render import Output
from kernel_api.errors import ArgumentError, KernelApiError

_COMMANDS = {
    "list": _list,
    "explain": _explain,
    "verify": _verify,
    "compile": _compile,
    "bench": _bench,
    "tune": _tune,
    "report": _report,
    "cache": _cache,
    "bundle": _bundle,
    "doctor": _doctor,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code is 0 for yes, 1 for no, 2 for a question without sense."""
    _open_streams()
    try:
        options = _parser().parse_args(argv)
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else 2
    output = Output(as_json=options.json)
    try:
        with _warnings_as_notes(output), _logging():
            code: int = _COMMANDS[options.command].run(options, output)
            sys.stdout.flush()
            return code
    except KernelApiError as error:
        output.note(f"kernel-api {options.command}: {error}")
        return 2
    except KeyboardInterrupt:
        output.note("interrupted")
        return 130
    except BrokenPipeError:
        _write_no_more()  # the reader (head, less) has seen enough
        return 0
    except OSError as error:
        output.note(f"kernel-api {options.command}: {error}")
        try:
            sys.stdout.flush()
        except OSError:
            _write_no_more()
        return 2


def _open_streams() -> None:
    """Write nowhere where a stream is closed, and ``?`` for what the reader's encoding has not."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 (as long as the process)
        elif getattr(stream, "errors", None) == "strict" and hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")


def _write_no_more() -> None:
    """Keep what is left of the answer from being written at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kernel-api", description="Find, understand, compile, verify and time GPU kernels."
    )
    parser.add_argument("--version", action="version", version=f"kernel-api {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="command", required=True)
    for name, module in _COMMANDS.items():
        command = commands.add_parser(name, help=module.HELP, description=module.__doc__)
        command.add_argument("--json", action="store_true", help="print one JSON value, only that")
        module.add_options(command)
    return parser


@contextlib.contextmanager
def _warnings_as_notes(output: Output) -> Iterator[None]:
    """Show warnings, such as a plug-in that misbehaved, as one line without source code."""
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *_, **__: output.note(f"warning: {message}")
        yield


@contextlib.contextmanager
def _logging() -> Iterator[None]:
    """Show the library's log on stderr from the level that ``KERNEL_API_LOG`` names."""
    name = os.environ.get("KERNEL_API_LOG")
    if not name:
        yield
        return
    level = logging.getLevelName(name.upper())
    if not isinstance(level, int):
        raise ArgumentError(f"KERNEL_API_LOG is {name!r}; expected debug, info, warning or error")
    logger = logging.getLogger("kernel_api")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(level)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)

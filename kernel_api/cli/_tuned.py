"""What is known from measurements: shown, moved, checked and cleaned. Part of ``tune``."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kernel_api.cli._measured import (
    COLUMNS,
    cells,
    kind,
    label,
    operands,
    provider,
    sizes,
    summary,
)
from kernel_api.cli._problem_list import problems
from kernel_api.cli._query import at_least
from kernel_api.cli._render import Output, Table
from kernel_api.dtypes import dtype
from kernel_api.errors import ArgumentError

if TYPE_CHECKING:
    from kernel_api.tuning import Environment, Measurement, Policy, Problem, Store

_DAY = 86400.0


def add_policy_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("measurement (times of two policies are not compared)")
    group.add_argument(
        "--launches", choices=("graph", "eager"), help="(default: graph; eager on the CPU)"
    )
    group.add_argument("--l2", choices=("cold", "warm"), help="(default: cold; warm on the CPU)")
    group.add_argument("--rounds", type=at_least(1), metavar="COUNT", help="(default: 20)")
    group.add_argument(
        "--rest",
        type=at_least(0),
        metavar="TIMES",
        help="let the GPU rest after each batch, so many times as long (default: 4; 0 on the CPU)",
    )


def device_of(options: argparse.Namespace) -> str:
    """Where the options say that it is measured."""
    from kernel_api import devices

    here = devices.cuda_available()
    if options.device == "cuda" and not here:
        raise ArgumentError("--device cuda: torch sees no GPU here")
    return options.device or ("cuda" if here else "cpu")


def policy(options: argparse.Namespace) -> Policy:
    """How the options say that it is measured; the rest is as the tuner does it there.

    Raises ArgumentError for what there is not on the device.
    """
    from kernel_api.tuning._choice import Choice

    if device_of(options) == "cpu":
        _check_on_cpu(options)
    names = ("launches", "l2", "rounds", "rest", "seed")
    given = {name: getattr(options, name) for name in names}
    own = Choice().policy_on(device_of(options))
    return replace(own, **{name: one for name, one in given.items() if one is not None})


def _check_on_cpu(options: argparse.Namespace) -> None:
    """Raises ArgumentError for what would be said of times, and not be so."""
    from kernel_api.tuning._policy import why_not_on_cpu

    refused = {name: why_not_on_cpu(name, getattr(options, name)) for name in ("launches", "l2")}
    refused["rest"] = "the CPU does not rest" if options.rest else None
    for name, why in refused.items():
        if why is not None:
            raise ArgumentError(
                f"--{name} {getattr(options, name)}: {why}; leave it out, or pass --device cuda"
            )


def add_store_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("show")
    group.add_argument(
        "--problem",
        action="append",
        type=_condition,
        metavar="NAME=VALUE",
        help="only problems of that size, or kind, or with operands of that type, as M=4096, "
        "kind=gemm or dtype=bfloat16; may be repeated",
    )
    group.add_argument(
        "--all", action="store_true", help="every candidate, also of sources that changed"
    )
    group = parser.add_argument_group("prune (by default what killed writers left)")
    group.add_argument(
        "--older-than", type=at_least(0), metavar="DAYS", help="what was measured before that"
    )
    group.add_argument(
        "--other-environments",
        action="store_true",
        help="what was measured on other devices, with other versions, or in another way",
    )


# Actions ---------------------------------------------------------------------------------


def _show(words: Sequence[str], options: argparse.Namespace, output: Output) -> int:
    store = _store()
    wanted = _wanted(list(map(Path, words)), options)
    environments: dict[str, Environment] = {}
    groups: dict[tuple[str, Problem], list[Measurement]] = {}
    for row in store.rows():
        one = row.measurement
        if (options.all or one.kernel.is_current) and wanted(one.problem):
            environments[row.environment.digest] = row.environment
            groups.setdefault((row.environment.digest, one.problem), []).append(one)
    groups = dict(sorted(groups.items(), key=lambda item: (item[0][0], _order(item[0][1]))))
    shown = [
        _known(environments[where], problem, found, with_all=options.all)
        for (where, problem), found in groups.items()
    ]
    blocks: list[str | Table] = list(map(str, environments.values()))
    if shown:
        blocks.append(_candidates_table(shown) if options.all else _best_table(shown))
    output.show(
        {"environments": {n: e.to_dict() for n, e in environments.items()}, "problems": shown},
        *blocks,
        f"{len(shown)} problem{'' if len(shown) == 1 else 's'} in {store.folder}",
    )
    return 0 if shown else 1


def _export(words: Sequence[str], options: argparse.Namespace, output: Output) -> int:
    path = _file("export", words)
    try:
        count = _store().export(path)
    except OSError as error:
        raise ArgumentError(f"{path} cannot be written: {error.strerror}") from error
    output.show({"rows": count, "file": path}, f"{count} measurements written to {path}")
    return 0


def _import(words: Sequence[str], options: argparse.Namespace, output: Output) -> int:
    path = _file("import", words)
    try:
        found = _store().import_(path)
    except OSError as error:
        raise ArgumentError(f"{path} cannot be imported: {error.strerror}") from error
    data = {
        "passed": not found.damaged,
        "rows": found.taken,
        "kept_out": found.kept_out,
        "damaged": {str(number): reason for number, reason in found.damaged.items()},
        "file": path,
    }
    output.show(
        data,
        *(f"row {number} is damaged: {reason}" for number, reason in found.damaged.items()),
        f"{found.taken} measurements taken from {path}, {found.kept_out} were here, or newer ones, "
        f"{len(found.damaged)} are damaged",
    )
    return 1 if found.damaged else 0


def _prune(words: Sequence[str], options: argparse.Namespace, output: Output) -> int:
    _no_file("prune", words)
    older = None if options.older_than is None else options.older_than * _DAY
    keep = _environment(options) if options.other_environments else None
    count = _store().prune(older_than=older, keep=keep)
    output.show({"removed": count}, f"{count} files removed")
    return 0


def _verify(words: Sequence[str], options: argparse.Namespace, output: Output) -> int:
    _no_file("verify", words)
    store = _store()
    damaged = store.verify()
    count = sum(1 for _ in store.rows())
    lines = [f"{path}: {reason}" for path, reason in damaged]
    data = {
        "passed": not damaged,
        "rows": count,
        "damaged": {str(path): reason for path, reason in damaged},
    }
    output.show(data, *lines, f"{count} of {count + len(damaged)} files ok")
    return 1 if damaged else 0


#: By the word behind ``tune``.
ACTIONS: dict[str, Callable[[Sequence[str], argparse.Namespace, Output], int]] = {
    "show": _show,
    "export": _export,
    "import": _import,
    "prune": _prune,
    "verify": _verify,
}


def _file(action: str, words: Sequence[str]) -> Path:
    if len(words) != 1:
        raise ArgumentError(f"tune {action} takes one file; there are {len(words)}")
    return Path(words[0])


def _no_file(action: str, words: Sequence[str]) -> None:
    if words:
        raise ArgumentError(f"tune {action} takes no file; there is {' '.join(words)}")


def _store() -> Store:
    """That of the user, for what looks at every environment."""
    from kernel_api.tuning import Environment, Policy, Store

    store = Store.open(Environment.of("cpu", Policy()))
    if store is None:
        raise ArgumentError(
            "there is no store: the cache is disabled, or its directory cannot be used (see the "
            "warning)"
        )
    return store


def _environment(options: argparse.Namespace) -> Environment:
    """Where and how the options say that it is measured."""
    from kernel_api.tuning import Environment

    return Environment.of(device_of(options), policy(options))


# Problems --------------------------------------------------------------------------------


def _condition(text: str) -> tuple[str, str]:
    name, separator, value = text.partition("=")
    if not separator:
        raise argparse.ArgumentTypeError(f"{text!r} is no NAME=VALUE, such as M=4096")
    return name.strip(), value.strip()


def _wanted(files: Sequence[Path], options: argparse.Namespace) -> Callable[[Problem], bool]:
    """Whether a problem is in one of the files, and as ``--problem`` says."""
    from kernel_api.tuning import Problem

    on_meta = argparse.Namespace(**{**vars(options), "device": "meta"})
    listed = {Problem.of(args) for path in files for args in problems(path, on_meta)}
    conditions = [_meets(*one) for one in options.problem or ()]
    return lambda problem: (
        (not files or problem in listed) and all(meets(problem) for meets in conditions)
    )


#: Of products and norms; of attention.
_SIZES = ("M", "N", "K", "L", "B", "H", "H_kv", "S_q", "S_kv", "D", "D_v")


def _meets(name: str, value: str) -> Callable[[Problem], bool]:
    """Whether a problem meets a condition; raises ArgumentError for one that none could meet."""
    if name == "kind":
        return lambda problem: value == kind(problem)
    if name == "dtype":
        element = dtype(value).name
        return lambda problem: element in [operand[0] for operand in operands(problem)]
    size = {one.lower(): one for one in _SIZES}.get(name.lower())
    if size is None:
        raise ArgumentError(
            f"--problem {name}={value}: there is no {name}; expected {', '.join(_SIZES)}, kind or "
            f"dtype"
        )
    if not value.isdecimal():
        raise ArgumentError(f"--problem {name}={value}: {value!r} is no size; expected a number")
    return lambda problem: str(problem.sizes.get(size)) == value


def _order(problem: Problem) -> tuple[Any, ...]:
    return (kind(problem), *sizes(problem), problem.digest)


# Measurements ----------------------------------------------------------------------------


def _known(
    environment: Environment, problem: Problem, rows: list[Measurement], *, with_all: bool
) -> dict[str, Any]:
    """What is known of a problem, as JSON; what changed does not win."""
    ordered = sorted(rows, key=lambda one: one.place(environment.policy.rounds))
    data = {
        "environment": environment.digest,
        "problem": label(problem),
        "digest": problem.digest,
        "sizes": problem.sizes,
        **summary([one for one in ordered if one.kernel.is_current]),
    }
    if with_all:
        data["candidates"] = [_candidate(one) for one in ordered]
    return data


def _candidate(one: Measurement) -> dict[str, Any]:
    return {
        "kernel": one.kernel.name,
        "provider": provider(one),
        "status": str(one.status),
        "message": one.message,
        "us": one.median_us if one.passed else None,
        "spread_us": one.spread_us if one.passed else None,
        "state": "current" if one.kernel.is_current else "changed",
        "date": one.date.isoformat(timespec="seconds"),
    }


def _best_table(shown: list[dict[str, Any]]) -> Table:
    rows = [(one["environment"][:8], *cells(one)) for one in shown]
    return Table(("environment", *COLUMNS), rows)


def _candidates_table(shown: list[dict[str, Any]]) -> Table:
    columns = ("environment", "problem", "kernel", "status", "us", "spread", "state", "message")
    rows = [
        (
            known["environment"][:8],
            known["problem"],
            one["kernel"],
            one["status"],
            "-" if one["us"] is None else f"{one['us']:.2f}",
            "-" if one["us"] is None else f"{one['spread_us']:.2f}",
            one["state"],
            one["message"],
        )
        for known in shown
        for one in known["candidates"]
    ]
    return Table(columns, rows)

"""Measurements that come with the library, of GPUs that problems were tuned on beforehand.

There is a file for each GPU and policy, ``tables/<digest of these>.json``: the files of a store as
texts, by likeness of the problem, problem and name. Like those of a store, rows of kernels that
have changed since are not used; those of torch's kernels hold for the torch that was measured, all
others for any, and for any driver.
"""

from __future__ import annotations

import functools
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from kernel_api import _log
from kernel_api._code_files import replace_durably
from kernel_api.errors import ArgumentError
from kernel_api.tuning._canonical import as_object, parsed
from kernel_api.tuning._environment import Environment
from kernel_api.tuning._problem import Problem
from kernel_api.tuning._row import Row
from kernel_api.tuning._store import Store

logger = _log.logger(__name__)

FOLDER = Path(__file__).with_name("tables")

#: Rows of a problem that a table has: the first in their order.
_ROWS = 3


class Table(Store):
    """What comes with the library for one GPU and policy. It is never written to.

    Its environment is the one that it was measured in.
    """

    @classmethod
    def of(cls, environment: Environment, folder: Path = FOLDER) -> Table | None:
        """None for an environment without one, or whose one cannot be read."""
        path = folder / f"{environment.gpu_and_policy_digest}.json"
        return cls._read_once(path) if path.exists() else None

    @classmethod
    @functools.lru_cache(maxsize=8)
    def _read_once(cls, path: Path) -> Table | None:
        try:
            texts = dict(as_object(parsed(path.read_bytes()), "the table"))
            environment = _environment_of(texts)
            if path.stem != environment.gpu_and_policy_digest:
                raise ArgumentError(f"it is of {environment}, not of what its name says")
            return cls(path, environment, texts)
        except (OSError, ValueError) as error:
            logger.warning("%s is not used: %s", path, error)
            return None

    def __init__(self, path: Path, environment: Environment, texts: dict[str, Any]) -> None:
        super().__init__(path, environment)
        self._texts = texts  # by likeness, problem and name
        self._known: dict[str, frozenset[Problem]] = {}

    def _below(self, folder: str | Path) -> Any:
        """What the table has at a place below its environment; an empty object for nothing."""
        found: Any = {}
        for depth, part in enumerate(Path(folder).parts):
            if depth == 0:
                found = self._texts if part == self.environment.digest else {}
            else:
                found = found.get(part, {}) if isinstance(found, dict) else {}
        return found

    def _names(self, folder: Path) -> list[str]:
        found = self._below(folder)
        return sorted(found) if isinstance(found, dict) else []

    def _content(self, place: str | Path) -> bytes:
        found = self._below(place)
        if not isinstance(found, str):
            raise FileNotFoundError(f"{self.folder} has nothing at {place}")
        return found.encode()

    def _changed(self, place: str) -> int:
        return -1  # it is a file, which is read once

    def _problems_like(self, likeness: str) -> frozenset[Problem]:
        found = self._known.get(likeness)
        if found is None:
            found = self._known[likeness] = super()._problems_like(likeness)
        return found

    def _all_files(self, temporary: bool = False) -> Iterator[Path]:
        for likeness in self._names(root := Path(self.environment.digest)):
            for problem in self._names(root / likeness):
                for name in self._names(root / likeness / problem):
                    yield root / likeness / problem / name


def _environment_of(texts: dict[str, Any]) -> Environment:
    """That of all rows of a table, as its first one says; raises ArgumentError without one."""
    found: Any = texts
    for what in ("all rows", "rows of problems that are alike", "rows of a problem"):
        found = next(iter(as_object(found, what).values()), None)
    if not isinstance(found, str):
        raise ArgumentError("there is no row in it")
    return Environment.from_dict(as_object(parsed(found), "the row").get("environment"))


def write(rows: Iterable[Row], folder: Path = FOLDER) -> list[Path]:
    """Make the tables of the environments that rows are from, in place of earlier ones.

    Raises ArgumentError for rows of a GPU and policy with unlike drivers or packages.
    """
    problems: defaultdict[tuple[Environment, Path], list[Row]] = defaultdict(list)
    for row in rows:
        if row.measurement.passed:
            problems[row.environment, row.place.parent].append(row)
    tables: defaultdict[Environment, Any] = defaultdict(lambda: defaultdict(dict))
    for (environment, place), found in problems.items():
        rounds = environment.policy.rounds
        best = sorted(found, key=lambda row: row.measurement.place(rounds))[:_ROWS]
        texts = {row.place.name: row.text.data.decode() for row in best}
        tables[environment][place.parent.name][place.name] = texts
    if len({one.gpu_and_policy_digest for one in tables}) < len(tables):
        names = "; ".join(sorted(map(str, tables)))
        raise ArgumentError(
            f"rows for one table are of unlike drivers or packages ({names}); pass rows of one"
        )
    folder.mkdir(exist_ok=True)
    paths = []
    for environment, table in tables.items():
        paths.append(folder / f"{environment.gpu_and_policy_digest}.json")
        replace_durably(paths[-1], f"{json.dumps(table, indent=0, sort_keys=True)}\n".encode())
    return paths

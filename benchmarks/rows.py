"""Keep what was measured: rows on disk as they come, and what never returned."""

from __future__ import annotations

import datetime
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import harness

RESULTS = Path(__file__).parent / "results"

Row = dict[str, Any]


def row(
    suite: str,
    problem: str,
    subject: tuple[str, harness.Timing],
    peer: tuple[str, harness.Timing],
    verified: bool,
    policy: str,
    **extra: Any,
) -> Row:
    """One measured line."""
    return {
        "suite": suite,
        "problem": problem,
        "subject": subject[0],
        "peer": peer[0],
        "subject_us": round(subject[1].median, 2),
        "peer_us": round(peer[1].median, 2),
        "ratio": round(peer[1].median / subject[1].median, 4),
        "spread": round(max(subject[1].spread, peer[1].spread), 4),
        "verified": verified,
        "policy": policy,
        "env": harness.environment(),
        "date": today(),
        **extra,
    }


def today() -> str:
    return datetime.date.today().isoformat()


def path_of(suite: str, folder: Path | None = None) -> Path:
    """Where the rows of a suite are kept: in the folder, or in the one of the GPU."""
    name = f"{suite}-rested" if harness.rests() else suite
    return (folder or RESULTS / harness.gpu_folder()) / f"{name}.json"


def write(path: Path, data: Any) -> Path:
    """Write JSON at once or not at all: a process that is killed leaves the old file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_suffix(".tmp")
    beside.write_text(_text(data) + "\n")
    os.replace(beside, path)
    return path


def _text(data: Any, depth: int = 2) -> str:
    """JSON with one row per line, so that a changed row is a changed line."""
    if isinstance(data, list):
        lines = ",\n".join(map(json.dumps, data))
        return f"[\n{lines}\n]"
    if isinstance(data, dict) and depth:
        named = (f"{json.dumps(key)}: {_text(one, depth - 1)}" for key, one in data.items())
        lines = ",\n".join(named)
        return f"{{\n{lines}\n}}"
    return json.dumps(data)


class Journal:
    """The rows of a suite, and the attempts that did not return.

    An attempt is noted before it begins and struck out when it ends, well or badly. What a
    process leaves noted has killed it (or hung it); the next one, resuming, goes round it.
    """

    def __init__(self, path: Path, resume: bool) -> None:
        self.path = path
        self._notes = path.with_suffix(".unfinished")
        self.rows: list[Row] = []
        self.never_returned: list[list[str]] = []
        if resume and path.exists():
            self.rows = json.loads(path.read_text())
        if resume and self._notes.exists():
            self.never_returned = json.loads(self._notes.read_text())
        else:
            self._notes.unlink(missing_ok=True)

    def has(self, problem: str) -> bool:
        return any(row["problem"] == problem for row in self.rows)

    def add(self, rows: list[Row]) -> None:
        self.rows += rows
        write(self.path, self.rows)

    def lost(self, problem: str, what: str) -> bool:
        """Whether this attempt ended a process before."""
        return [problem, what] in self.never_returned

    @contextmanager
    def attempt(self, problem: str, what: str, seconds: float) -> Iterator[None]:
        """A block that may hang: after ``seconds`` the process ends."""
        self._note([*self.never_returned, [problem, what]])
        with harness.watchdog(seconds):
            try:
                yield
            finally:
                if harness.alive():
                    self._note(self.never_returned)

    def _note(self, unfinished: list[list[str]]) -> None:
        if unfinished:
            write(self._notes, unfinished)
        else:
            self._notes.unlink(missing_ok=True)


class Candidates:
    """Times of all candidates of a problem, from which the performance model is fitted.

    The file says of every problem how long each kernel took, and of kernels of dense products what
    the model knows of them. Problems measured again replace what was there.
    """

    SUITE = "gemm-candidates"

    def __init__(self, path: Path) -> None:
        self.path = path
        found = json.loads(path.read_text()) if path.exists() else {}
        self.kernels: dict[str, Row] = found.get("kernels", {})
        self.problems: list[Row] = found.get("problems", [])

    def add(self, kernels: dict[str, Row], problem: Row) -> None:
        self.kernels.update(kernels)
        self.problems = [p for p in self.problems if p["problem"] != problem["problem"]]
        self.problems.append(problem)
        write(self.path, {"kernels": self.kernels, "problems": self.problems})

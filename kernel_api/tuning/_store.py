"""The measurements of one environment: recorded, and looked up by problem."""

from __future__ import annotations

import os
import time
from collections.abc import Hashable
from pathlib import Path
from typing import TYPE_CHECKING

from kernel_api import _log
from kernel_api._cached_property import cached_property
from kernel_api._disk_cache import DiskCache, check_owner, warn
from kernel_api.errors import ArgumentError
from kernel_api.tuning._canonical import digest, parsed
from kernel_api.tuning._environment import Environment
from kernel_api.tuning._files import RowFiles, is_temporary
from kernel_api.tuning._kernel import KernelIdentity
from kernel_api.tuning._measurement import Measurement
from kernel_api.tuning._problem import Problem
from kernel_api.tuning._row import Row, RowText

if TYPE_CHECKING:
    from kernel_api.kernel import Kernel

logger = _log.logger(__name__)

#: Longer than what file systems round the time of a change to.
_TICK_NS = 100_000_000

#: Below folders of problems that are alike, as of when they had last changed.
_problems: dict[str, tuple[int, frozenset[Problem]]] = {}


class Store(RowFiles):
    """The measurements of one environment below a folder.

    Lookups see those of kernels that are what they were when measured. What looks after the files
    (``rows``, ``export``, ``import_``, ``prune``, ``verify``) sees every environment.

    Args:
        folder: Need not exist, nor may be written to, as long as nothing is recorded.
        environment: That measurements are looked up of, and recorded.
        beneath: Where to look for what is not here, such as a table that was shipped. It is never
            written to.
    """

    def __init__(
        self, folder: Path, environment: Environment, *, beneath: Store | None = None
    ) -> None:
        super().__init__(folder)
        self.environment, self.beneath = environment, beneath

    @classmethod
    def open(cls, environment: Environment, *, beneath: Store | None = None) -> Store | None:
        """The store in the user's cache directory; None where that may not be used.

        With a CacheWarning, unless the cache was disabled on purpose.
        """
        cache = DiskCache.open()
        if cache is None:
            return None
        folder = cache.root / "tuning"
        try:
            folder.mkdir(mode=0o700, exist_ok=True)
            check_owner(folder)
        except OSError as error:
            outcome = "nothing measured is kept or found there"
            warn(f"the tuning store {folder} cannot be used: {error}", outcome)
            return None
        return cls(folder, environment, beneath=beneath)

    def record(self, measurement: Measurement) -> bool:
        """Keep a measurement, in place of an earlier one of the same kernel and problem.

        Returns whether it is kept: not without a fingerprint of its kernel's code.

        Raises:
            ArgumentError: it was measured in another environment.
            OSError: the file cannot be written.
        """
        if measurement.environment != self.environment.digest:
            raise ArgumentError(
                f"the measurement is of environment {measurement.environment} but the store is "
                f"of {self.environment.digest}; open a store for the environment it was made in"
            )
        if measurement.kernel.fingerprint is None:
            logger.info("%s is not kept: its code has no fingerprint", measurement)
            return False
        self._write(Row(self.environment, measurement))
        return True

    def measurements(self, problem: Problem) -> list[Measurement]:
        """What is known of a problem, in the order of :meth:`Measurement.place`."""
        rounds = self.environment.policy.rounds
        rows = self._rows(problem).values()
        found = filter(None, (self._current(row, problem) for row in rows))
        return sorted(found, key=lambda one: one.place(rounds))

    def best(self, problem: Problem) -> Measurement | None:
        """The fastest of those that passed, the first of ``measurements``; None if none did."""
        rounds = self.environment.policy.rounds
        best: Measurement | None = None
        placed = [(row.place(rounds), row) for row in self._rows(problem).values()]
        for place, row in sorted(placed):
            if place[0] or (best is not None and place > best.place(rounds)[:3]):
                break
            one = self._current(row, problem)
            if one is not None and (best is None or one.kernel.name < best.kernel.name):
                best = one
        return best

    def stamp(self, problem: Problem) -> Hashable:
        """Changes whenever any process adds, replaces or removes a row of a problem, and when a
        problem that is like it comes or goes. So what was looked up holds for as long as the
        stamp from before the lookup is the present one. It costs microseconds.

        What :meth:`near` leads to has stamps of its own.
        """
        folder = self._folder_of(problem)
        places = (os.path.join(self.folder, one) for one in (folder, folder.parent))
        times = [*map(self._changed, places)]
        # A clock ticks; a folder may change twice at one tick. Before that is over, no two stamps
        # are the same.
        now = time.time_ns()
        unsettled = now if max(times) > now - _TICK_NS else 0
        beneath = None if self.beneath is None else self.beneath.stamp(problem)
        return (*times, unsettled, beneath)

    def _changed(self, place: str) -> int:
        """When names in a folder last changed, in nanoseconds of the epoch, at least 1; 0 without
        one, and less where that cannot be told."""
        try:
            return max(os.stat(place).st_mtime_ns, 1)
        except (FileNotFoundError, NotADirectoryError):
            return 0
        except OSError:
            return -1

    def find(self, problem: Problem, kernel: Kernel) -> Measurement | None:
        """What is known of a kernel, with its present sources, on a problem."""
        try:
            identity = KernelIdentity.of(kernel)
        except ArgumentError as error:
            logger.info("nothing is known of %s: %s", kernel, error)
            return None
        return self._find(problem, identity) if identity.fingerprint is not None else None

    def _find(self, problem: Problem, kernel: KernelIdentity) -> Measurement | None:
        folder = self._folder_of(problem)
        row = self._row(folder, f"{kernel.digest}.json", problem)
        if row is None or row.kernel != kernel.text:
            return None if self.beneath is None else self.beneath._find(problem, kernel)
        return self._measurement(row, problem)

    def has_like(self, problem: Problem) -> bool:
        """Whether there are rows of a problem that is alike in all but sizes, or of itself."""
        return bool(self._problems_like(problem.likeness))

    def near(self, problem: Problem) -> list[Problem]:
        """Those with rows that are near, nearest first (see :meth:`Problem.near`)."""
        return problem.near(self._problems_like(problem.likeness))

    def _problems_like(self, likeness: str) -> frozenset[Problem]:
        """Those that rows are of; ours are read again where a problem has come or gone."""
        place = os.path.join(self._place, likeness)
        changed = self._changed(place)
        known = _problems.get(place)
        if known is None or known[0] != changed:
            folder = Path(self.environment.digest, likeness)
            names = self._names(folder) if changed else ()  # most have nothing there
            found = [self._problem_in(folder / name) for name in names]
            known = changed, frozenset(filter(None, found))
            if None not in found and 0 < changed < time.time_ns() - _TICK_NS:
                _problems[place] = known
        return (
            known[1] if self.beneath is None else known[1] | self.beneath._problems_like(likeness)
        )

    def _problem_in(self, folder: Path) -> Problem | None:
        """That the rows in a folder are of; None where there are none yet, or they are of another
        environment or problem."""
        texts = (self._text(folder, place.name) for place in self._files(folder))
        ours = (one for one in texts if one and one.environment == self._environment_text)
        found = next(filter(None, map(_problem_of, ours)), None)
        return found if found is not None and self._folder_of(found) == folder else None

    def _rows(self, problem: Problem) -> dict[str, RowText]:
        """Those of a problem, by the names of their files; our own hide those beneath."""
        found = {} if self.beneath is None else self.beneath._rows(problem)
        folder = self._folder_of(problem)
        for name in self._names(folder):
            row = None if is_temporary(name) else self._row(folder, name, problem)
            if row is not None:
                found[name] = row
        return found

    def _row(self, folder: Path, name: str, problem: Problem) -> RowText | None:
        """The row in a file of a problem's folder; None, and a line in the log, if it is none, or
        belongs elsewhere: texts are compared, not only hashes."""
        text, wanted = self._text(folder, name), (self._environment_text, problem.text)
        if text is None or (text.environment, text.problem) == wanted:
            return text
        if self._read(folder / name) is not None:  # else it has said why
            logger.warning("%s is of another problem or environment", self.folder / folder / name)
        return None

    def _text(self, folder: Path, name: str) -> RowText | None:
        """The row in a file, which may be of another problem than the folder is."""
        try:
            text = RowText.parsed(self._content(os.path.join(folder, name)))
        except (ArgumentError, OSError):
            text = None
        if text is not None and name == f"{digest(text.kernel)}.json":
            return text
        row = self._read(folder / name)  # slowly; says what is wrong with it
        return row.text if row is not None else None

    def _current(self, row: RowText, problem: Problem) -> Measurement | None:
        """What a row has, if its kernel is what it was."""
        found = self._measurement(row, problem)
        return found if found is not None and found.kernel.is_current else None

    def _measurement(self, row: RowText, problem: Problem) -> Measurement | None:
        try:
            return row.measurement(problem)
        except ArgumentError as error:
            logger.warning("a row of %s is not used: %s", problem, error)
            return None

    @cached_property
    def _place(self) -> str:
        """Where rows of the environment are."""
        return os.path.join(self.folder, self.environment.digest)

    @cached_property
    def _environment_text(self) -> str:
        return self.environment.to_json()

    def _folder_of(self, problem: Problem) -> Path:
        return Path(self.environment.digest, problem.likeness, problem.digest)


def _problem_of(row: RowText) -> Problem | None:
    try:
        return Problem.from_dict(parsed(row.problem))
    except ArgumentError as error:
        logger.warning("a row is not used: %s", error)
        return None

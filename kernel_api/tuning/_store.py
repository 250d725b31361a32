"""The measurements of one environment: recorded, and looked up by problem."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from kernel_api import _log
from kernel_api._disk_cache import DiskCache, _check_owner, _warn
from kernel_api.errors import ArgumentError
from kernel_api.tuning._environment import Environment
from kernel_api.tuning._files import RowFiles
from kernel_api.tuning._kernel import KernelIdentity
from kernel_api.tuning._measurement import Measurement
from kernel_api.tuning._problem import Problem
from kernel_api.tuning._row import Row

if TYPE_CHECKING:
    from kernel_api.kernel import Kernel

logger = _log.logger(__name__)


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
            _check_owner(folder)
        except OSError as error:
            _warn(f"the tuning store {folder} cannot be used: {error}")
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
        """What is known of a problem: those that passed first, from fast to slow."""
        found = [] if self.beneath is None else self.beneath.measurements(problem)
        mine = list(self._measurements(self._folder_of(problem), problem))
        known = {one.kernel for one in mine}
        mine += [one for one in found if one.kernel not in known]
        return sorted(mine, key=lambda one: (one.median_us, one.kernel.name))

    def best(self, problem: Problem) -> Measurement | None:
        """The fastest of those that passed; None if none did."""
        found = self.measurements(problem)
        return found[0] if found and found[0].passed else None

    def find(self, problem: Problem, kernel: Kernel) -> Measurement | None:
        """What is known of a kernel, with its present sources, on a problem."""
        try:
            identity = KernelIdentity.of(kernel)
        except ArgumentError as error:
            logger.info("nothing is known of %s: %s", kernel, error)
            return None
        return None if identity.fingerprint is None else self._find(problem, identity)

    def _find(self, problem: Problem, kernel: KernelIdentity) -> Measurement | None:
        place = self._folder_of(problem) / f"{kernel.digest}.json"
        row = self._read(place)
        if row is not None and row.measurement.kernel == kernel and self._is_of(row, problem):
            return row.measurement
        return None if self.beneath is None else self.beneath._find(problem, kernel)

    def nearest(self, problem: Problem) -> Problem | None:
        """The problem with a kernel that passed whose sizes are nearest, of those that are alike.

        Alike is all but the sizes (see :attr:`Problem.likeness`). Nearest is where the largest
        |log2| of the ratios of M, N, K and L is smallest, and it is at most 1: no size is more
        than twice, or less than half of it. Ties go by the sum of these, then by the text.
        """
        near = []
        for one in self._problems_like(problem):
            distance = problem.distance(one)
            if distance is not None and distance[0] <= 1:
                near.append((distance, one.text, one))
        return next((one for *_, one in sorted(near) if self.best(one) is not None), None)

    def _problems_like(self, problem: Problem) -> set[Problem]:
        found = set() if self.beneath is None else self.beneath._problems_like(problem)
        folder = Path(self.environment.digest, problem.likeness)
        for name in self._names(folder):
            rows = filter(None, map(self._read, self._files(folder / name)))
            if (row := next(rows, None)) is not None:
                found.add(row.measurement.problem)
        return found

    def _measurements(self, folder: Path, problem: Problem) -> Iterator[Measurement]:
        for place in self._files(folder):
            row = self._read(place)
            if row is not None and self._is_of(row, problem) and row.measurement.kernel.is_current:
                yield row.measurement

    def _is_of(self, row: Row, problem: Problem) -> bool:
        """Whether the texts agree, not only the hashes."""
        same = row.environment == self.environment and row.measurement.problem == problem
        if not same:
            logger.warning("%s is of another problem or environment", self.folder / row.place)
        return same

    def _folder_of(self, problem: Problem) -> Path:
        return Path(self.environment.digest, problem.likeness, problem.digest)

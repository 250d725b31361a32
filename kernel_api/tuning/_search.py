"""Which of many candidates is the fastest: all are checked, then timed in heats.

Every heat times its field in turn, round by round, and the better half goes on, until a few
finalists are left; they are timed in as many rounds as the policy says, and as many again if the
first two are too close. A candidate keeps the times of its last heat. What is chosen without
tuning and the first of every provider always come to the final.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from kernel_api import _log
from kernel_api.errors import CompilerKilledError, KernelApiError
from kernel_api.kernel import Kernel
from kernel_api.tuning._bench import Bench
from kernel_api.tuning._choice import Candidates
from kernel_api.tuning._measurement import Status
from kernel_api.tuning._worker import Outcome

logger = _log.logger(__name__)

_FINALISTS = 5

#: Seconds of work after which a GPU that is limited by power runs at the clocks that it keeps;
#: before that it is up to a fifth faster. They go up and down, so finalists are timed a while.
_WARM_SECONDS, _FINAL_SECONDS = 0.15, 0.25

#: Rounds of a heat before the final, of those of the policy.
_HEAT_SHARE = 0.25
_FEWEST_ROUNDS = 3

#: How often finalists are timed again as long as the first two are closer than they spread.
_EXTENSIONS = 2

#: A winner so much faster than the next is timed again alone, and believed if it agrees so well.
_AHEAD, _AGREES = 0.9, 0.05

#: What every batch is assumed to take beside its launches, in seconds.
_BATCH_SECONDS = 1e-3


@dataclass(eq=False)
class Candidate:
    """A kernel and what came of it.

    Attributes:
        index: Its place in the order of the performance model.
        is_seeded: Whether it comes to the final however slow it is.
        is_default: Whether it is what is chosen without tuning, which is always begun.
        measured_us: Microseconds per launch of every round of its last heat.
        times_us: The same without what the whole field has in common from round to round, which
            are clocks that change.
        launches: Of a batch, which is what a round times.
    """

    index: int
    kernel: Kernel
    is_seeded: bool = False
    is_default: bool = False
    status: Status = Status.PASSED
    message: str = ""
    error_ratio: float | None = None
    measured_us: list[float] = field(default_factory=list)
    times_us: list[float] = field(default_factory=list)
    launches: int = 1
    mhz: tuple[int | None, int | None] = (None, None)

    @property
    def median_us(self) -> float:
        return statistics.median(self.times_us) if self.times_us else math.inf

    def fail(self, found: Outcome) -> None:
        self.status, self.message = found.status, found.message
        self.measured_us, self.times_us = [], []
        logger.info("%s: %s: %s", self.kernel.metadata.kernel_name, self.status, self.message)


def search(
    bench: Bench,
    candidates: Sequence[Candidate],
    rounds: int,
    *,
    ready: Callable[[Candidate], KernelApiError | None],
    budget_s: float | None = None,
    begins_one: bool = True,
    least_us: float = 0.0,
    recheck: bool = True,
    done: Callable[[Candidate], Any],
) -> None:
    """Check and time candidates.

    Args:
        ready: Waits until a candidate is compiled; the error if it cannot be.
        budget_s: Seconds after which no more candidates are begun, but the default.
        begins_one: Whether the first is begun all the same.
        least_us: What is faster than the hardware can be is timed again.
        recheck: Whether a winner that is faster than it should be is timed again, alone.
        done: Is called with each candidate when all is known of it.

    Raises BenchError.
    """
    field: list[Candidate] = []
    until = math.inf if budget_s is None else time.monotonic() + budget_s
    bench.open()  # while the first candidate is still compiled
    for place, one in enumerate(candidates):
        is_begun = one.is_default or (begins_one and place == 0)
        if not is_begun and time.monotonic() > until:
            logger.info("no time is left for %s", one.kernel)
            continue
        _check(bench, one, ready(one))
        if one.status is Status.PASSED:
            field.append(one)
        else:
            done(one)
    heats = _Heats(bench, rounds, done)
    heats.run(field)
    if recheck:
        heats.suspect(least_us)
    heats.finish()


def _check(bench: Bench, one: Candidate, error: KernelApiError | None) -> None:
    if error is not None:
        lacks_memory = isinstance(error, CompilerKilledError)
        status = Status.OOM if lacks_memory else Status.COMPILE_ERROR
        one.fail(Outcome(status, f"{type(error).__name__}: {error}"))
        return
    found = bench.check(one.index, one.kernel)
    one.error_ratio = found.error_ratio
    if found.status is not Status.PASSED:
        one.fail(found)


class _Heats:
    """The heats of one problem."""

    def __init__(self, bench: Bench, rounds: int, done: Callable[[Candidate], Any]) -> None:
        self._bench, self._rounds, self._done = bench, rounds, done
        self._warm_s = 0.0
        self._field: list[Candidate] = []

    def run(self, field: Sequence[Candidate]) -> None:
        self._field = list(field)
        self._warm_s = _WARM_SECONDS
        rounds = min(self._rounds, max(_FEWEST_ROUNDS, int(self._rounds * _HEAT_SHARE)))
        while len(self._field) > _FINALISTS + sum(one.is_seeded for one in self._field):
            self._time(rounds)
            if not self._keep(max(_FINALISTS, math.ceil(len(self._field) / 2))):
                break  # the slower half is seeded: it would be the same field again
        self._time(self._rounds, least_s=_FINAL_SECONDS)
        for _ in range(_EXTENSIONS):
            if not self._is_close():
                break
            self._time(self._rounds, least_s=_FINAL_SECONDS, again=True)

    def suspect(self, least_us: float) -> None:
        """Time a winner again, alone, that is faster than it should be: in a new process if it is
        faster than the hardware."""
        ranked = self._ranked()
        if not ranked:
            return
        winner = ranked[0]
        ahead = len(ranked) > 1 and winner.median_us < _AHEAD * ranked[1].median_us
        if not ahead and winner.median_us >= least_us:
            return
        before = winner.median_us
        if before < least_us:
            self._bench.restart()
        self._time_alone(winner, self._rounds)
        if winner.times_us and abs(winner.median_us / before - 1) > _AGREES:
            name = winner.kernel.metadata.kernel_name
            logger.warning("%s: %.2f us, alone %.2f us", name, before, winner.median_us)
        if winner.median_us < least_us:
            logger.warning("%s is faster than its GPU can be", winner.kernel.metadata.kernel_name)

    def finish(self) -> None:
        """Whoever is left is run on poisoned outputs once more: it may have worked once only."""
        for one in self._field:
            found = self._bench.check(one.index, one.kernel)
            if found.status is not Status.PASSED:
                one.fail(found)
            self._done(one)
        self._field = []

    def _ranked(self) -> list[Candidate]:
        return sorted(self._field, key=lambda one: one.median_us)

    def _keep(self, count: int) -> bool:
        """The fastest, and those that are seeded; whether there were others."""
        ranked = self._ranked()
        kept = [one for place, one in enumerate(ranked) if place < count or one.is_seeded]
        dropped = [one for one in ranked if one not in kept]
        self._bench.forget([one.index for one in dropped])
        for one in dropped:
            self._done(one)
        self._field = kept
        return bool(dropped)

    def _is_close(self) -> bool:
        ranked = self._ranked()
        if len(ranked) < 2 or len(ranked[0].times_us) < 4:
            return False
        first, second = ranked[:2]
        quarters = statistics.quantiles(first.times_us, n=4)
        error = (quarters[2] - quarters[0]) / math.sqrt(len(first.times_us))
        return second.median_us - first.median_us < error

    def _time(
        self, rounds: int, *, least_s: float = 0.0, again: bool = False, is_last: bool = False
    ) -> None:
        """Time the field in turn; one that breaks off loses its place, not the others theirs.

        Args:
            again: Whether there are times, which these are added to.
            is_last: Whether the same field broke off before: if it does again though none does
                alone, times of each alone have to do.
        """
        expected_s = sum(_batch_seconds(one) for one in self._field) * rounds
        found = self._bench.time(
            [one.index for one in self._field],
            rounds,
            warm_s=self._warm_s,
            least_s=least_s,
            expected_s=expected_s,
        )
        if found.status is Status.PASSED:
            self._warm_s = 0.0
            for one, times, launches in _timed(self._field, found):
                one.measured_us = one.measured_us + times if again else times
                one.launches, one.mhz = launches, found.mhz
            self._correct()
            return
        field = list(self._field)
        if len(field) == 1:
            self._failed(field[0], found)
            return
        for one in field:
            self._time_alone(one, rounds if is_last else _FEWEST_ROUNDS)
        if is_last:
            self._cut()
        elif self._field:
            self._time(rounds, least_s=least_s, is_last=len(self._field) == len(field))

    def _cut(self) -> None:
        """To as many rounds of each: alone, those that are soon over have more of them."""
        rounds = min((len(one.measured_us) for one in self._field), default=0)
        for one in self._field:
            one.measured_us = one.times_us = one.measured_us[:rounds]

    def _correct(self) -> None:
        """Take the same share off all times of a round, or add it, so that all rounds are alike."""
        rounds = zip(*(one.measured_us for one in self._field), strict=True)
        means = [statistics.geometric_mean(times) for times in rounds]
        shares = [statistics.median(means) / mean for mean in means]
        for one in self._field:
            one.times_us = one.measured_us
            if len(self._field) > 1:
                pairs = zip(one.measured_us, shares, strict=True)
                one.times_us = [us * share for us, share in pairs]

    def _time_alone(self, one: Candidate, rounds: int) -> None:
        found = self._bench.time(
            [one.index],
            rounds,
            warm_s=_WARM_SECONDS,
            least_s=_FINAL_SECONDS,
            expected_s=_batch_seconds(one) * rounds,
        )
        if found.status is not Status.PASSED:
            self._failed(one, found)
            return
        ((_, one.measured_us, one.launches),) = _timed([one], found)
        one.times_us, one.mhz = one.measured_us, found.mhz

    def _failed(self, one: Candidate, found: Outcome) -> None:
        self._field.remove(one)
        self._bench.forget([one.index])
        one.fail(found)
        self._done(one)


def _timed(
    field: Sequence[Candidate], found: Outcome
) -> Iterator[tuple[Candidate, list[float], int]]:
    """What was found of each: its times, and the launches of a batch."""
    assert found.times_us is not None and found.launches is not None
    return zip(field, found.times_us, found.launches, strict=True)


def _batch_seconds(one: Candidate) -> float:
    known = one.launches * one.median_us if one.times_us else 0.0
    return _BATCH_SECONDS + 1e-6 * known


def seeded(candidates: Candidates) -> Iterator[Candidate]:
    """In their order; the default, and the first of every provider, are seeded."""
    met: set[str] = set()
    for index, kernel in enumerate(candidates.with_default):
        provider, is_default = type(kernel).provider_name(), kernel == candidates.default
        yield Candidate(index, kernel, is_default or provider not in met, is_default)
        met.add(provider)

"""The heats of the tuner, beside a bench that says how long everything takes."""

from types import SimpleNamespace

import pytest

from kernel_api.tuning import Status
from kernel_api.tuning._search import Candidate, search
from kernel_api.tuning._worker import Outcome

ROUNDS = 8


class Bench:
    """All candidates are right; the one with index i takes i microseconds and one more.

    Args:
        most: So many are timed together; more come to no end.
        launches: Of every batch.
    """

    def __init__(self, most=100, launches=1):
        self.most, self.launches = most, launches
        self.fields, self.expected_s = [], []

    def open(self):
        pass

    def forget(self, indices):
        pass

    def check(self, index, kernel):
        return Outcome(Status.PASSED)

    def time(self, indices, rounds, *, expected_s, **limits):
        assert len(self.fields) < 100, "it never ends"
        self.fields.append(indices)
        self.expected_s.append(expected_s)
        if len(indices) > self.most:
            return Outcome(Status.TIMEOUT, "it took more than 1 s", is_over=True)
        times = [[1.0 + index] * rounds for index in indices]
        return Outcome(Status.PASSED, times_us=times, launches=[self.launches] * len(indices))


def candidates(count, *, seeded=()):
    kernel = SimpleNamespace(metadata=SimpleNamespace(kernel_name="any"))
    return [Candidate(index, kernel, index in seeded) for index in range(count)]


def searched(bench, field):
    done = []
    search(bench, field, ROUNDS, ready=lambda one: None, recheck=False, done=done.append)
    return done


@pytest.mark.parametrize("count", [6, 8, 20])
def test_heats_end_where_the_slower_half_comes_to_the_final_anyway(count):
    bench = Bench()
    field = candidates(2 * count, seeded=range(count, 2 * count))
    done = searched(bench, field)
    assert sorted(one.index for one in done) == [*range(2 * count)]
    assert all(len(one.times_us) == ROUNDS for one in field[count:])
    assert {*range(count, 2 * count)} <= {*bench.fields[-1]}


@pytest.mark.parametrize("count", [2, 12])
def test_what_breaks_off_only_together_is_timed_alone(count):
    bench = Bench(most=1)
    field = candidates(count)
    done = searched(bench, field)
    assert [one.status for one in done] == [Status.PASSED] * count
    assert [len(one.times_us) for one in field[:2]] == [ROUNDS] * 2
    assert [one.median_us for one in field] == [1.0 + one.index for one in field]
    assert max(map(len, bench.fields)) == count


def test_a_batch_is_expected_to_take_as_long_as_all_of_its_launches():
    bench = Bench(launches=1000)
    searched(bench, candidates(6))
    first, last = bench.expected_s[0], bench.expected_s[-1]
    assert first < 0.1 and last > 1e-6 * 1000 * (1 + 2 + 3 + 4 + 5) * ROUNDS

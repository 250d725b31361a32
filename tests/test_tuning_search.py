"""The heats of the tuner, beside a bench that says how long everything takes."""

from types import SimpleNamespace

import pytest

from kernel_api.tuning import Status
from kernel_api.tuning._search import Candidate, search
from kernel_api.tuning._worker import Outcome

ROUNDS = 8


class Bench:
    """All candidates are right; the one with index i takes i microseconds and one more."""

    def __init__(self):
        self.fields = []

    def open(self):
        pass

    def forget(self, indices):
        pass

    def check(self, index, kernel):
        return Outcome(Status.PASSED)

    def time(self, indices, rounds, **limits):
        assert len(self.fields) < 100, "it never ends"
        self.fields.append(indices)
        times = [[1.0 + index] * rounds for index in indices]
        return Outcome(Status.PASSED, times_us=times)


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

"""The heats of the tuner, beside a bench that says how long everything takes."""

from types import SimpleNamespace

import pytest

from kernel_api.errors import CompileError, CompilerKilledError
from kernel_api.tuning import Status
from kernel_api.tuning._search import Candidate, search
from kernel_api.tuning._worker import Outcome

ROUNDS = 8


class Bench:
    """All candidates are right; the one with index i takes i microseconds and one more.

    Args:
        most: So many are timed together; more come to no end.
        until: From so many attempts on, all are.
        launches: Of every batch.
        step: Microseconds between one and the next, in place of one.
        alone: Times as many rounds that the first one has time for where it is timed alone.
    """

    def __init__(self, most=100, launches=1, until=100, step=1.0, alone=1):
        self.step, self.alone = step, alone
        self.most, self.launches, self.until = most, launches, until
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
        if len(indices) > self.most and len(self.fields) < self.until:
            return Outcome(Status.TIMEOUT, "it took more than 1 s", is_over=True)
        rounds *= self.alone if indices == [0] else 1
        noise = [0.01 * (i % 3) for i in range(rounds)]
        times = [[1.0 + self.step * index + us for us in noise] for index in indices]
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
    assert [int(one.median_us) for one in field] == [1 + one.index for one in field]
    assert max(map(len, bench.fields)) == count


def test_times_alone_and_together_go_on_with_as_many_rounds():
    """Too close to tell, the two are timed on, and together they do come to an end then."""
    bench = Bench(most=1, until=5, step=0.0, alone=3)
    done = searched(bench, candidates(2))
    assert [one.status for one in done] == [Status.PASSED] * 2
    assert bench.fields[-1] == [0, 1]
    assert len({len(one.times_us) for one in done}) == 1


def test_a_batch_is_expected_to_take_as_long_as_all_of_its_launches():
    bench = Bench(launches=1000)
    searched(bench, candidates(6))
    first, last = bench.expected_s[0], bench.expected_s[-1]
    assert first < 0.1 and last > 1e-6 * 1000 * (1 + 2 + 3 + 4 + 5) * ROUNDS


def test_a_compiler_that_was_killed_says_nothing_of_the_kernel():
    errors = (None, CompileError("no such type"), CompilerKilledError("by SIGKILL"))
    done = []
    ready = lambda one: errors[one.index]  # noqa: E731
    search(Bench(), candidates(3), ROUNDS, ready=ready, recheck=False, done=done.append)
    found = {one.index: (one.status, one.message) for one in done}
    assert found[0] == (Status.PASSED, "")
    assert found[1] == (Status.COMPILE_ERROR, "CompileError: no such type")
    assert found[2] == (Status.OOM, "CompilerKilledError: by SIGKILL")

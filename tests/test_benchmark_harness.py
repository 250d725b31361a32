"""What the harness of the benchmarks measures, and in which order."""

import contextlib
from types import SimpleNamespace

import pytest
import torch
from support.benchmarks import script

harness, rows = map(script, ("harness", "rows"))


@pytest.fixture
def clock(monkeypatch):
    """A time in microseconds that calls move, and events that read it."""
    now = SimpleNamespace(us=0.0, order=[])

    class Event:
        def __init__(self, enable_timing):
            self.at = 0.0

        def record(self):
            self.at = now.us

        def elapsed_time(self, other):
            return (other.at - self.at) / 1e3

    def spend(name, microseconds):
        now.order.append(name)
        now.us += microseconds

    now.spend = spend
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(harness, "_flush_buffer", lambda: torch.ones(1))
    monkeypatch.setattr(harness, "WARM_SECONDS", 0.0)
    return now


def test_every_round_begins_with_another_call(clock):
    calls = {n: [lambda n=n: clock.spend(n, 100.0)] for n in "abc"}
    times, policy = harness.interleaved(calls, 1 << 30, "eager", rounds=4)
    assert "".join(clock.order[3:]) == "abc" + "bca" + "cab" + "abc"
    assert {n: t.median for n, t in times.items()} == pytest.approx(dict.fromkeys("abc", 100.0))
    assert policy.startswith("eager, cold L2")


def test_a_gpu_rests_as_often_as_it_is_asked_to(clock, monkeypatch, tmp_path):
    slept = []
    monkeypatch.setattr(harness.time, "sleep", slept.append)
    monkeypatch.setattr(harness, "_rest", 0.0)
    calls = {"a": [lambda: clock.spend("a", 100.0)], "b": [lambda: clock.spend("b", 300.0)]}
    assert "rest" not in harness.interleaved(calls, 1 << 30, "eager", rounds=4)[1]
    assert slept == []
    assert rows.path_of("fake", tmp_path).name == "fake.json"
    harness.rest_after_calls(4)
    times, policy = harness.interleaved(calls, 1 << 30, "eager", rounds=4)
    assert slept == pytest.approx([0.0004, 0.0012, 0.0012, 0.0004] * 2)
    assert policy.endswith("followed by a rest 4 times as long")
    assert {n: t.median for n, t in times.items()} == pytest.approx({"a": 100.0, "b": 300.0})
    assert rows.path_of("fake", tmp_path).name == "fake-rested.json"


def test_operand_sets_take_turns(clock):
    calls = {"a": [lambda i=i: clock.spend(i, 1.0) for i in range(3)]}
    harness.interleaved(calls, 1 << 30, "eager", rounds=6)
    assert clock.order == [0, 1, 2] + [0, 1, 2] * 2


def test_short_calls_are_timed_by_graphs(clock, monkeypatch):
    monkeypatch.setattr(
        harness,
        "_graphs",
        lambda calls, copies, rounds: {n: harness.Timing([float(copies)] * 4) for n in calls},
    )
    short = {"a": [lambda: clock.spend("a", 20.0)] * 4}
    long = {"a": [lambda: clock.spend("a", 70.0)] * 4}
    times, policy = harness.interleaved(short, 64 << 20)
    assert policy.startswith("CUDA graph of 16 calls on 4 operand sets")
    assert times["a"].median == 16
    assert harness.interleaved(long, 64 << 20)[1].startswith("eager")


def test_a_graph_holds_calls_on_all_operand_sets(clock, monkeypatch):
    captured = []

    class Graph:
        def replay(self):
            clock.spend("replay", 40.0)

    @contextlib.contextmanager
    def capture(graph):
        before = len(clock.order)
        yield
        captured.append(clock.order[before:])

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", capture)
    calls = {n: [lambda n=n, i=i: clock.spend(f"{n}{i}", 0.0) for i in range(2)] for n in "ab"}
    times = harness._graphs(calls, copies=4, rounds=5)
    assert captured == [["a0", "a1"] * 2, ["b0", "b1"] * 2]
    assert times["a"].median == pytest.approx(10.0)  # of one call


def test_sets_that_fit_in_l2_together_are_used_once_in_a_graph():
    assert harness._copies(32, 1 << 10, 5.0) == 32
    assert harness._copies(4, 1 << 30, 100.0) == 4
    assert harness._copies(4, 1 << 30, 30.0) == 12


def test_what_cannot_be_captured_is_timed_call_by_call(clock, monkeypatch):
    def refuse(*_):
        raise RuntimeError("not permitted when stream is capturing")

    monkeypatch.setattr(harness, "_graphs", refuse)
    _, policy = harness.interleaved({"a": [lambda: clock.spend("a", 5.0)]}, 1 << 30)
    assert policy.startswith("eager (no graph: RuntimeError)")


def test_operand_sets_exceed_the_cache_three_times():
    for size in (1, 1 << 20, 100 << 20, 1 << 30):
        sets = harness.operand_sets(size)
        assert 2 <= sets <= 32
        assert sets == 32 or (sets - 1) * size >= 3 * harness.l2_bytes()


def test_a_budget_leaves_room_for_another_step(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(harness.time, "monotonic", lambda: now[0])
    budget = harness.Budget(100.0)
    with budget.step():
        now[0] = 40.0
    assert budget.allows_another()
    now[0] = 60.0
    assert not budget.allows_another()
    assert harness.Budget(None).allows_another()

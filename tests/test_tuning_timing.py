"""How launches are timed on the CPU: by the wall's clock, and in turn."""

import subprocess
import sys

import pytest
import torch

from kernel_api.tuning import Policy, _timing
from kernel_api.tuning._timing import Batch, CpuTimer, GpuTimer

SLEEPS = """
import time
from kernel_api.tuning._timing import CpuTimer

timer = CpuTimer()
batch = timer.batch([lambda: time.sleep(0.002)])
(found,) = timer.rounds([batch], 3)
assert batch.launches == 1 and len(found) == 3
assert all(us >= 2000 for us in found), found
"""


def test_what_takes_its_time_is_seen_to_take_it():
    """In a process of its own: kernels of other tests bring their own clock."""
    subprocess.run([sys.executable, "-c", SLEEPS], check=True)


@pytest.fixture
def clock(monkeypatch):
    seconds = [0.0]
    monkeypatch.setattr(CpuTimer, "now", staticmethod(lambda: seconds[0]))
    return seconds


def test_short_launches_are_timed_together_and_every_round_begins_with_another(clock):
    calls = []

    def launch(name, us):
        def run():
            calls.append(name)
            clock[0] += 1e-6 * us

        return run

    timer = CpuTimer()
    short, long = timer.batch([launch("short", 120)]), timer.batch([launch("long", 5000)])
    assert (short.launches, long.launches) == (3, 1)  # about 300 us
    calls.clear()
    found = timer.rounds([short, long], 2)
    assert found[0] == pytest.approx([120] * 2) and found[1] == pytest.approx([5000] * 2)
    assert calls == ["short"] * 3 + ["long"] * 2 + ["short"] * 3


class Event:
    """Of a GPU that takes two milliseconds for everything."""

    def record(self):
        pass

    def elapsed_time(self, other):
        return 2.0


@pytest.mark.parametrize("rest", [0, 3])
def test_a_gpu_rests_after_every_batch_as_long_as_the_policy_says(monkeypatch, rest):
    slept = []
    monkeypatch.setattr(_timing, "_event", Event)
    monkeypatch.setattr(_timing, "l2_bytes", lambda: 1)
    monkeypatch.setattr(_timing.time, "sleep", slept.append)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    timer = GpuTimer(Policy(l2="warm", rest=rest), set_bytes=8, sets=1)
    found = timer.rounds([Batch(lambda: None, 4), Batch(lambda: None, 1)], 5)
    assert found == [[500.0] * 5, [2000.0] * 5]
    assert slept == pytest.approx([0.006] * 10 if rest else [])

"""The tuner among processes that are killed, forked, interrupted, or at the same problems."""

import importlib
import logging
import os
import random
import signal
import sys
import threading
import time
import uuid
from types import SimpleNamespace

import pytest
import torch
from support import hostile_kernels as hostile
from support import mortal_kernels as mortal
from support import processes
from support.processes import MARK, QUICK, marked, until

import kernel_api as ka
from kernel_api import _compile_cache, _fingerprint, _fork_server, devices
from kernel_api.targets import Target
from kernel_api.tuning import (
    Environment,
    Status,
    Store,
    _autotune,
    _bench,
    _environment,
    _search,
    _spread,
)

#: How often a tuner is killed; 20 are a thorough test.
KILLS = int(os.environ.get("KERNEL_API_TEST_KILLS", "3"))
TUNERS = 8

PAIR = (mortal.ImpatientGemm, hostile.RaisingGemm)


@pytest.fixture(autouse=True)
def log(cache_directory, monkeypatch):
    monkeypatch.setenv(hostile.LOG, str(cache_directory.parent / "runs"))
    for name in ("_WARM_SECONDS", "_FINAL_SECONDS"):
        monkeypatch.setattr(_search, name, 0.0)


@pytest.fixture
def mark():
    """No process that has it is there when the test is over."""
    found = uuid.uuid4().hex
    yield found
    until(lambda: not marked(found))


def store():
    return Store.open(Environment.of("cpu", QUICK))


def rows():
    """(class, M) of whatever is kept."""
    return {
        (one.kernel.metadata["kernel_class"]["class"].partition(":")[2], one.problem.sizes["M"])
        for one in (row.measurement for row in store().rows())
    }


def tune_a_list(kernel_classes, sizes):
    processes.tune(kernel_classes, sizes)


def pairs(sizes):
    return {(one.__name__, M) for one in PAIR for M in sizes}


def server():
    """That of this process, from which it tunes."""
    return _fork_server._servers[_fork_server._key(_bench._IMPORTED)]


# Other tuners ----------------------------------------------------------------------------


def test_a_tuner_that_is_killed_goes_on_where_it_was(mark):
    chosen = random.Random(6)
    sizes = range(1, 1 + 8 * KILLS)
    for _ in range(KILLS):
        before = rows()
        tuner = processes.start(tune_a_list, PAIR, sizes, **{MARK: mark})
        if chosen.random() < 0.75:  # else while it starts
            until(lambda before=before: rows() > before)
        time.sleep(chosen.uniform(0, 0.4))
        os.kill(tuner.pid, signal.SIGKILL)
        tuner.join()
        until(lambda: not marked(mark))
        assert store().verify() == []
        assert rows() >= before
    kept = rows()
    assert 0 < len(kept) < 2 * len(sizes)
    complete = [M for M in sizes if pairs([M]) <= kept]
    count = len(hostile.runs())
    assert [one.measured for one in processes.tune(PAIR, complete)] == [0] * len(complete)
    assert len(hostile.runs()) == count
    assert sum(one.measured for one in processes.tune(PAIR, sizes)) == 2 * len(sizes) - len(kept)
    assert rows() == pairs(sizes)


def test_tuners_of_the_same_problems_at_once_lose_no_row(mark):
    tuners = [
        processes.start(tune_a_list, PAIR, range(first, first + 5), **{MARK: mark})
        for first in range(1, 1 + TUNERS)
    ]
    for one in tuners:
        one.join(60)
    assert [one.exitcode for one in tuners] == [0] * TUNERS
    assert rows() == pairs(range(1, TUNERS + 5))
    assert store().verify() == []


def tune_until_interrupted(devices):
    """Problems on devices that are none, which end; and one each that does not."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # jobs in the background ignore it
    _spread.devices_here = lambda: devices
    _autotune._lock_of = lambda device: None
    processes.tune(PAIR, [1, 2, 3, 4])
    processes.tune([hostile.EndlessGemm], [5, 6], timeout_s=1000.0)


def test_an_interrupt_ends_it_in_seconds_and_keeps_the_rows(mark):
    tuners = [
        processes.start(tune_until_interrupted, devices, **{MARK: f"{mark}"})
        for devices in (["cpu"], ["cpu", "cpu:1"])
    ]
    until(lambda: hostile.runs().count("EndlessGemm") == 3)
    started = time.monotonic()
    for one in tuners:
        os.kill(one.pid, signal.SIGINT)
    for one in tuners:
        one.join(20)
    until(lambda: not marked(mark))
    assert time.monotonic() - started < 5
    assert [one.exitcode for one in tuners] == [1, 1]
    assert rows() == pairs([1, 2, 3, 4])
    assert store().verify() == []


# What it is measured with ----------------------------------------------------------------


def test_another_gpu_driver_or_dsl_is_another_measurement(monkeypatch):
    """Of a GPU that is said to be here; the kernel runs on the CPU."""
    gpu = SimpleNamespace(name="NVIDIA H200", driver=580, dsl="4.8.0")
    real_of, real_version = Environment.of, _fingerprint.version_of
    versions = {"nvidia-cutlass-dsl": lambda: gpu.dsl}
    monkeypatch.setattr(devices, "cuda_available", lambda: True)
    monkeypatch.setattr(devices, "device_target", lambda number: Target(9, 0, "a"))
    monkeypatch.setattr(devices, "sm_count", lambda number: 132)
    monkeypatch.setattr(devices, "driver_major", lambda: gpu.driver)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(devices, "gpu_name", lambda number: gpu.name)
    monkeypatch.setattr(Environment, "of", lambda device, policy: real_of("cuda", policy))
    monkeypatch.setattr(
        _fingerprint, "version_of", lambda name: versions.get(name, lambda: real_version(name))()
    )
    known = (_fingerprint.fingerprint, _fingerprint._environment, _environment.packages)

    def measured():
        for one in known:
            one.cache_clear()
        (found,) = processes.tune([hostile.FastGemm], [8])
        return found.measured

    try:
        assert [measured(), measured()] == [1, 0]
        for name, other in (("name", "NVIDIA H100"), ("driver", 590), ("dsl", "4.8.1")):
            before = getattr(gpu, name)
            setattr(gpu, name, other)
            assert [measured(), measured()] == [1, 0], name
            setattr(gpu, name, before)
            assert measured() == 0, name
    finally:
        for one in known:
            one.cache_clear()


_OWN = """
from support.hostile_kernels import TorchGemm

class OwnGemm(TorchGemm):
    '''{}'''
"""


def tune_own(folder, result):
    # What this process was forked from began before the source was written, and has not read it.
    vars(_compile_cache)["STARTED"] = time.time()
    sys.path.insert(0, str(folder))
    (found,) = processes.tune([importlib.import_module("own_kernels").OwnGemm], [8])
    result.write_text(str(getattr(found, "measured", found)))


def test_an_edited_kernel_is_measured_again(tmp_path, mark):
    source, result = tmp_path / "own" / "own_kernels.py", tmp_path / "result"
    source.parent.mkdir()
    measured = []
    for text in ("first", "first", "second edition"):
        if not source.exists() or text not in source.read_text():
            source.write_text(_OWN.format(text))
        tuner = processes.start(tune_own, source.parent, result, **{MARK: mark})
        tuner.join(60)
        assert tuner.exitcode == 0
        measured.append(result.read_text())
    assert measured == ["1", "0", "1"]


# Its own processes -----------------------------------------------------------------------


def at_work(act):
    """Tune one patient kernel, and do something once it is timed; returns the row."""
    found = []
    tuner = threading.Thread(target=lambda: found.extend(processes.tune([mortal.PatientGemm], [8])))
    tuner.start()
    until(lambda: hostile.runs().count("PatientGemm") > 4)
    act()
    tuner.join(60)
    ((row,),) = [one.rows for one in found]
    return row


def outlive_servers():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_fork_server, "_IDLE_SECONDS", 0.2)
        assert processes.tune([hostile.FastGemm], [1])[0].measured == 1
    first = server()
    until(lambda: first._process.poll() is not None)  # its worker as well: it has nothing to do
    assert first._process.poll() == 0
    row = at_work(lambda: os.kill(server()._process.pid, signal.SIGKILL))
    assert row.passed and row.rounds >= QUICK.rounds
    os.kill(server()._process.pid, signal.SIGKILL)  # now a worker of it waits for something to do
    assert processes.tune([hostile.FastGemm], [2])[0].measured == 1


def test_a_server_that_ended_or_is_killed_is_replaced(mark):
    tuner = processes.start(outlive_servers, **{MARK: mark})
    tuner.join(60)
    assert tuner.exitcode == 0
    assert rows() == {("FastGemm", 1), ("PatientGemm", 8), ("FastGemm", 2)}


def test_a_worker_that_somebody_kills_is_no_fault_of_its_candidate(caplog):
    with caplog.at_level(logging.WARNING, logger="kernel_api"):
        row = at_work(lambda: [os.kill(one, signal.SIGKILL) for one in workers()])
    assert "the process that measures died by SIGKILL" in caplog.text
    assert row.passed and row.rounds >= QUICK.rounds
    (idle,) = workers()
    os.kill(idle, signal.SIGKILL)
    assert processes.tune([hostile.FastGemm], [1])[0].measured == 1


def workers():
    return processes.children(server()._process.pid)


def test_a_candidate_that_dies_in_every_process_is_to_blame():
    (found,) = processes.tune([mortal.KilledGemm, hostile.FastGemm], [8])
    row = found.rows[1]
    assert (row.status, row.message) == (Status.RUNTIME_ERROR, "its process died (by SIGKILL)")
    assert hostile.runs().count("KilledGemm") == 2


def test_a_candidate_that_is_right_only_once_harms_no_other():
    classes = (mortal.OnceGemm, hostile.FastGemm, hostile.ExitingGemm)
    (found,) = processes.tune(classes, [8])
    assert [one.status.value for one in found.rows] == ["PASSED", "RUNTIME_ERROR", "RUNTIME_ERROR"]
    assert type(found.kernel) is hostile.FastGemm
    assert {one.message for one in found.rows[1:]} == {"its process died (with exit code 7)"}


def test_what_a_candidate_starts_ends_with_it(monkeypatch, mark):
    processes.tune([hostile.FastGemm], [1])  # from now on there is a server, without the mark
    monkeypatch.setenv(MARK, mark)
    processes.tune([mortal.LitteringGemm, hostile.FastGemm], [8])
    until(lambda: not marked(mark))


def test_threads_tune_at_once():
    found = {}

    def tune(number, provider):
        problems = [processes.arguments(M) for M in (1, number)]
        found[number] = ka.autotune(problems, providers=[provider], policy=processes.QUICK)

    with processes.registered([hostile.FastGemm]) as provider:
        threads = [threading.Thread(target=tune, args=(n, provider)) for n in range(2, 6)]
        for one in threads:
            one.start()
        for one in threads:
            one.join()
    assert sorted(found) == [2, 3, 4, 5]
    assert all(row.passed for results in found.values() for one in results for row in one.rows)
    assert rows() == {("FastGemm", M) for M in range(1, 6)}


def tune_before_and_after_a_fork():
    processes.tune([hostile.FastGemm], [1])
    before = server()
    pid = os.fork()
    processes.tune([hostile.FastGemm], [2 if pid else 3])
    if pid:
        assert os.waitpid(pid, 0)[1] == 0
        assert server() is before  # what ended with the other process was not ours
        assert processes.tune([hostile.FastGemm], [4])[0].measured == 1


def test_a_process_that_was_forked_after_tuning_tunes(mark):
    tuner = processes.start(tune_before_and_after_a_fork, **{MARK: mark})
    tuner.join(60)
    assert tuner.exitcode == 0
    assert rows() == {("FastGemm", M) for M in (1, 2, 3, 4)}

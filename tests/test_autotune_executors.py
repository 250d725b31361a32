"""Problems tuned by executors: threads, processes, a cluster, and those that lose what they get."""

import functools
import importlib.util
import multiprocessing
import os
import signal
import sys
import threading
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from support import hostile_kernels as hostile
from support import processes
from support.processes import QUICK, until

import kernel_api as ka
from kernel_api import _disk_cache, _fingerprint
from kernel_api.errors import CacheWarning, DeviceError, NoKernelError
from kernel_api.tuning import BenchError, Environment, Store, _files, _lookup, _remote, _search

CLASSES = (hostile.FastGemm, hostile.SlowGemm, hostile.WrongGemm)
SIZES = (8, 9, 10)


@pytest.fixture(autouse=True)
def log(cache_directory, monkeypatch):
    monkeypatch.setenv(hostile.LOG, str(cache_directory.parent / "runs"))
    for name in ("_WARM_SECONDS", "_FINAL_SECONDS"):
        monkeypatch.setattr(_search, name, 0.0)


def tune(executor, sizes=SIZES, classes=CLASSES):
    return processes.tune(classes, sizes, executor=executor)


def outcomes(results):
    """What does not depend on how fast the machine is just now."""
    return [{(row.kernel.name, row.problem, row.status) for row in one.rows} for one in results]


@pytest.fixture(scope="module")
def locally(tmp_path_factory):
    """The outcomes without an executor, kept elsewhere."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KERNEL_API_CACHE_DIR", str(tmp_path_factory.mktemp("locally")))
        return outcomes(processes.tune(CLASSES, SIZES))


def kept():
    store = Store.open(Environment.of("cpu", QUICK))
    return [{(row.kernel.name, row.problem, row.status) for row in rows} for rows in by_size(store)]


def by_size(store):
    rows = [row.measurement for row in store.rows()]
    return [[row for row in rows if row.problem.sizes["M"] == M] for M in SIZES]


def test_threads_find_what_is_found_without_them(locally):
    with ThreadPoolExecutor(2) as pool:
        results = tune(pool)
        again = tune(pool)
    assert outcomes(results) == locally == kept()
    assert [one.measured for one in (*results, *again)] == [3, 3, 3, 0, 0, 0]
    assert [one.rows for one in again] == [one.rows for one in results]


def test_processes_find_what_is_found_without_them_and_one_that_dies_loses_nothing(
    locally, monkeypatch, tmp_path, caplog
):
    here = os.environ["KERNEL_API_CACHE_DIR"]
    monkeypatch.setenv("KERNEL_API_CACHE_DIR", str(tmp_path / "theirs"))
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, spawn, initializer=processes.hurry) as pool:
        pool.submit(os.getpid).result()  # from now on the process has a cache of its own
        monkeypatch.setenv("KERNEL_API_CACHE_DIR", here)
        results = tune(pool)
        assert outcomes(results) == locally == kept()
        assert [one.measured for one in results] == [3, 3, 3]
        assert all(type(one.kernel) is hostile.FastGemm for one in results)

        count = len(hostile.runs())
        (worker,) = pool._processes
        killer = threading.Thread(target=lambda: kill(worker, count))
        killer.start()
        results = tune(pool, (11, 12))
        killer.join()
    assert [len(one.rows) for one in results] == [3, 3]
    assert all(type(one.kernel) is hostile.FastGemm for one in results)
    assert "problems [0, 1] are tuned without the executor" in caplog.text


def kill(pid, count):
    """As soon as there are more runs than so many."""
    until(lambda: len(hostile.runs()) > count)
    os.kill(pid, signal.SIGKILL)


# Executors that are not as they should be ------------------------------------------------


class Forgetful(Executor):
    """Loses the second task that it gets, and takes none from so many on."""

    def __init__(self, most=1000):
        self.count, self.most = 0, most

    def submit(self, function, /, *args, **keywords):
        self.count += 1
        if self.count > self.most:
            raise RuntimeError("cannot schedule new futures after shutdown")
        future = Future()
        if self.count == 2:
            future.set_exception(ConnectionError("the machine is gone"))
        else:
            future.set_result(function(*args, **keywords))
        return future


def test_what_an_executor_loses_it_gets_again(locally, caplog):
    executor = Forgetful()
    assert outcomes(tune(executor)) == locally
    assert executor.count == len(SIZES) + 1
    assert "problem 1 is lost (attempt 0): ConnectionError('the machine is gone')" in caplog.text


class Dropping(Executor):
    """Cancels all but the first task, which nobody will say to be done."""

    def __init__(self):
        self.first = True

    def submit(self, function, /, *args, **keywords):
        future = Future()
        if self.first:
            future.set_result(function(*args, **keywords))
        else:
            threading.Timer(0.05, future.cancel).start()
        self.first = False
        return future


@pytest.mark.timeout(60)
def test_tasks_that_are_cancelled_in_the_queue_are_tuned_here(locally, caplog):
    assert outcomes(tune(Dropping())) == locally
    assert "are tuned without the executor" in caplog.text


class Promising(Executor):
    def submit(self, function, /, *args, **keywords):
        return "a promise"


def test_what_is_no_future_is_lost(locally, caplog):
    assert outcomes(tune(Promising())) == locally
    assert "submit gave a str, no Future" in caplog.text


def test_what_an_executor_does_not_take_is_tuned_here(locally, caplog):
    assert outcomes(tune(Forgetful(most=0))) == locally
    assert "problems [0, 1, 2] are tuned without the executor" in caplog.text


def test_errors_stand_in_the_place_of_their_problems():
    results = processes.tune([hostile.WrongGemm], [8], executor=Forgetful())
    assert [type(one) for one in results] == [NoKernelError]
    assert [one.status.value for one in results[0].rows] == ["WRONG"]
    assert str(results[0]).startswith("none of 1 candidates passed\n")


def test_a_gpu_problem_is_not_tuned_where_there_is_no_gpu(monkeypatch):
    monkeypatch.setattr(_remote, "devices_here", lambda: ["cpu"])
    with (
        pytest.raises(DeviceError, match="let the executor's workers see a GPU each"),
        _remote._free_device("cuda"),
    ):
        pass
    sent = {0: {"device": "cuda"}}
    (found,) = _remote._tuned_here([processes.arguments(8)], sent, None).values()
    assert isinstance(found, BenchError)
    assert str(found).startswith("the executor lost the problem 3 times, and there is no GPU here")


def test_calls_at_once_take_different_gpus(monkeypatch, cache_directory):
    """Of which there are none here."""
    monkeypatch.setattr(_remote, "devices_here", lambda: ["cuda:0", "cuda:1"])
    monkeypatch.setattr(_remote, "is_measured_on", lambda device: device == measured)
    monkeypatch.setattr(_remote, "_seat_file", lambda device: cache_directory / device[-1])
    cache_directory.mkdir()
    measured = None
    with _remote._free_device("cuda") as first, _remote._free_device("cuda") as second:
        assert [first, second] == ["cuda:0", "cuda:1"]
    measured = "cuda:0"
    with _remote._free_device("cuda") as first:
        assert first == "cuda:1"


def test_rows_that_cannot_be_kept_are_given_all_the_same(monkeypatch):
    def add(store, row):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(_files.RowFiles, "add", add)
    monkeypatch.setattr(_disk_cache, "_told", set())
    with pytest.warns(CacheWarning, match=r"is not kept: \[Errno 28\] No space left on device"):
        (result,) = tune(Forgetful(), [8])
    assert len(result.rows) == 3


def test_kernels_without_a_fingerprint_come_back_too(monkeypatch):
    monkeypatch.setattr(_fingerprint._compile_cache, "STARTED", 0.0)
    _fingerprint.fingerprint.cache_clear()
    try:
        (result,) = tune(Forgetful(), [8])
    finally:
        _fingerprint.fingerprint.cache_clear()
    assert len(result.rows) == 3 and result.rows[0].kernel.fingerprint is None
    assert kept() == [set(), set(), set()]


# Progress --------------------------------------------------------------------------------


@pytest.mark.parametrize("executor", [None, Forgetful()], ids=["here", "elsewhere"])
def test_progress_is_a_bar_on_stderr_where_rich_is_installed(executor, monkeypatch, capsys):
    pytest.importorskip("rich")
    processes.tune([hostile.FastGemm], [8], executor=executor, progress=True)
    out, err = capsys.readouterr()
    assert out == "" and "1/1" in err
    assert ("measuring" if executor is None else "problems") in err
    monkeypatch.setitem(sys.modules, "rich.console", None)
    processes.tune([hostile.FastGemm], [8], executor=executor, progress=True)
    assert capsys.readouterr() == ("", "")


# A cluster -------------------------------------------------------------------------------

has_distributed = importlib.util.find_spec("distributed") is not None
needs_distributed = pytest.mark.skipif(not has_distributed, reason="distributed is not installed")


@functools.lru_cache(maxsize=1)
def example():
    path = Path(__file__).parents[1] / "examples" / "tune_on_a_cluster.py"
    spec = importlib.util.spec_from_file_location("tune_on_a_cluster", path)
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


@needs_distributed
def test_a_cluster_finds_what_is_found_without_it(locally, monkeypatch, tmp_path, capsys):
    here = os.environ["KERNEL_API_CACHE_DIR"]
    monkeypatch.setenv("KERNEL_API_CACHE_DIR", str(tmp_path / "theirs"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with example().client(None) as client:
        monkeypatch.setenv("KERNEL_API_CACHE_DIR", here)
        with client.get_executor() as executor:
            results = tune(executor)
        assert outcomes(results) == locally == kept()
        assert [one.measured for one in results] == [3, 3, 3]

        assert example().main([client.scheduler.address]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in lines] == ["1x512x256", "16x512x256", "64x512x256"]
    assert all(" 1 PASSED" in line for line in lines)
    assert ka.tuned(example().problem(16).__class__(*cpu_tensors())) is not None


def cpu_tensors():
    return (torch.empty(one.shape) for one in example().problem(16).tensors)


class Elsewhere(Executor):
    """As in another process: what happens there is not noticed here."""

    def submit(self, call, /, *args, **options):
        future = Future()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(_lookup, "changed", lambda: None)
            future.set_result(call(*args, **options))
        return future


@pytest.fixture
def far_away(monkeypatch, tmp_path):
    """An executor whose processes keep what they measure elsewhere."""

    class FarAway(Elsewhere):
        def submit(self, call, /, *args, **options):
            with monkeypatch.context() as patch:
                patch.setenv("KERNEL_API_CACHE_DIR", str(tmp_path / "theirs"))
                return super().submit(call, *args, **options)

    return FarAway()


def test_the_default_comes_back_from_elsewhere_too(far_away):
    here = os.environ["KERNEL_API_CACHE_DIR"]
    args = ka.GemmArguments(torch.randn(8, 24), torch.randn(24, 16), torch.zeros(8, 16))
    with processes.registered([hostile.FastGemm, hostile.SlowGemm]) as provider:
        options = {"providers": [provider], "executor": far_away}
        only = lambda metadata: metadata.kernel_class is hostile.SlowGemm  # noqa: E731
        result = ka.autotune(args, only, **options)
        assert type(result.kernel) is hostile.SlowGemm and result.measured == len(result.rows) == 1
        assert type(result.default.kernel.rebuild()) is hostile.FastGemm
        assert os.environ["KERNEL_API_CACHE_DIR"] == here
        assert type(ka.tuned(args)) is hostile.FastGemm
        assert ka.autotune(args, only, **options).measured == 0


def test_the_default_comes_back_though_none_that_the_filter_keeps_passes(far_away):
    args = ka.GemmArguments(torch.randn(8, 24), torch.randn(24, 16), torch.zeros(8, 16))
    with processes.registered([hostile.FastGemm, hostile.WrongGemm]) as provider:
        only = lambda metadata: metadata.kernel_class is hostile.WrongGemm  # noqa: E731
        with pytest.raises(NoKernelError, match="none of 1 candidates passed") as caught:
            ka.autotune(args, only, providers=[provider], executor=far_away)
        assert [row.status.value for row in caught.value.rows] == ["WRONG"]
        assert type(ka.tuned(args)) is hostile.FastGemm


def test_what_was_measured_before_it_broke_off_comes_back(far_away, monkeypatch):
    def broken(heats, least_us):
        raise BenchError("the process that measures died")

    monkeypatch.setattr(_search._Heats, "suspect", broken)
    results = tune(far_away)
    assert [str(one) for one in results] == ["the process that measures died"] * len(SIZES)
    assert [[status.value for *_, status in rows] for rows in kept()] == [["WRONG"]] * len(SIZES)


def test_what_was_measured_elsewhere_is_looked_up_at_once():
    args = ka.GemmArguments(torch.randn(8, 24), torch.randn(24, 16), torch.zeros(8, 16))
    with processes.registered([hostile.FastGemm]) as provider:
        assert ka.tuned(args) is None
        result = ka.autotune(args, providers=[provider], executor=Elsewhere())
        assert result.measured == 1 and ka.tuned(args) == result.kernel

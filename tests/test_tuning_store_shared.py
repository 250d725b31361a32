"""Processes that write to one store of measurements, and look after it, at once."""

import os
import random
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from support.tuning import ENVIRONMENT, files, measured, problem, some_kernels

from kernel_api.tuning import Store


@pytest.fixture(scope="module")
def kernels():
    return some_kernels()


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path / "tuning", ENVIRONMENT)


@pytest.mark.parametrize("look", [lambda s: list(s.rows()), Store.verify, Store.prune])
def test_a_folder_that_another_process_removes_meanwhile_is_passed_over(
    store, kernels, monkeypatch, look
):
    for size in (256, 512):
        store.record(measured(kernels[0], problem(size), 2.0))
    scandir, gone = os.scandir, files(store)[0].parent

    def removed_before(path="."):
        if os.fspath(path) == str(gone) and gone.exists():
            for file in os.listdir(gone):
                os.remove(gone / file)
            gone.rmdir()
        return scandir(path)

    monkeypatch.setattr(os, "scandir", removed_before)
    look(store)
    assert not gone.exists() and len(files(store)) == 1


def test_a_folder_that_is_removed_while_it_is_made_is_made_again(store, kernels, monkeypatch):
    mkdir, times = Path.mkdir, []

    def is_there_and_gone(path, *how, **options):
        times.append(path)
        if len(times) == 1:
            raise FileExistsError(17, "File exists", str(path))
        mkdir(path, *how, **options)

    monkeypatch.setattr(Path, "mkdir", is_there_and_gone)
    assert store.record(measured(kernels[0], problem(), 2.0))
    assert len(files(store)) == 1


_WRITE = """
    import dataclasses, itertools, json, sys
    from pathlib import Path
    from kernel_api.tuning import KernelIdentity, Problem, Store
    from kernel_api.tuning._row import Row

    row = Row.from_dict(json.loads(Path(sys.argv[1]).read_text())["rows"][0])
    store = Store(Path(sys.argv[2]), row.environment)
    name, count = sys.argv[3], int(sys.argv[4])
    kernel = row.measurement.kernel
    kernel = KernelIdentity({**kernel.metadata, "kernel_name": name}, kernel.fingerprint)
    print("writing", flush=True)
    for index in range(count):
        data = row.measurement.problem.to_dict()
        data["sizes"]["M"] = 1 + index % 500
        one = Problem.from_dict(data)
        store.record(dataclasses.replace(row.measurement, problem=one, kernel=kernel))
"""


def writer(template, folder, name, count):
    code = f"import sys; sys.path[:] = {sys.path!r}\n{textwrap.dedent(_WRITE)}"
    command = [sys.executable, "-c", code, str(template), str(folder), name, str(count)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


@pytest.fixture
def template(store, kernels, tmp_path):
    store.record(measured(kernels[0], problem(), 2.0, 3.0))
    store.export(tmp_path / "template.json")
    (path,) = files(store)
    path.unlink()
    return tmp_path / "template.json"


def test_processes_that_write_at_once_lose_no_row(store, template):
    names = ("one", "two", "three")
    writers = [writer(template, store.folder, name, 60) for name in names]
    while any(process.poll() is None for process in writers):
        store.prune()  # removes empty folders, in which a file may be about to be made
    assert [process.wait() for process in writers] == [0, 0, 0]
    found = {(r.measurement.kernel.name, r.measurement.problem.sizes["M"]) for r in store.rows()}
    assert found == {(name, 1 + index) for name in names for index in range(60)}
    assert store.verify() == []


def test_a_writer_that_is_killed_leaves_nothing_that_cannot_be_read(store, template):
    chosen = random.Random(5)
    for _ in range(5):
        process = writer(template, store.folder, "killed", 10**6)
        assert process.stdout.readline() == "writing\n"
        time.sleep(chosen.uniform(0.05, 0.2))
        process.kill()
        process.communicate()
    assert list(store.rows())
    assert store.verify() == []


def test_rows_in_place_change_the_stamp_as_another_process_writes_them(store, template):
    before = store.stamp(problem())
    process = writer(template, store.folder, "other", 500)
    assert process.wait() == 0
    assert store.stamp(problem()) != before

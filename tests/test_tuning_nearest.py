"""The problems that the nearest is one of: read once, and again where one has come or gone."""

import os
import shutil
import time

import pytest
from support.tuning import ENVIRONMENT, measured, problem, some_kernels

from kernel_api.tuning import Store
from kernel_api.tuning._row import Row
from kernel_api.tuning._table import Table, write

SIZES = (256, 320, 400, 512)


@pytest.fixture(scope="module")
def kernel():
    return some_kernels()[0]


@pytest.fixture
def store(tmp_path, kernel):
    store = Store(tmp_path / "tuning", ENVIRONMENT)
    for size in SIZES:
        store.record(measured(kernel, problem(size), 1.0))
    return store


@pytest.fixture
def opened(monkeypatch):
    """The files whose content was asked for."""
    found = []
    content = Store._content
    monkeypatch.setattr(
        Store, "_content", lambda self, place: found.append(str(place)) or content(self, place)
    )
    return found


def of_other_problems(places, *sizes):
    mine = {problem(size).digest for size in sizes}
    return [place for place in places if not any(one in place for one in mine)]


def settle(store):
    """As long after the last change as its time is told from others."""
    folder = store.folder / ENVIRONMENT.digest / problem().likeness
    then = time.time_ns() - 10**9
    os.utime(folder, ns=(then, then))


def another(store):
    """That another process has: lookups open one each."""
    return Store(store.folder, ENVIRONMENT)


def test_a_size_that_was_not_tuned_reads_the_rows_of_the_nearest_alone(store, opened):
    settle(store)
    assert store.nearest(problem(300)) == problem(320)
    assert len(of_other_problems(opened, 320)) == len(SIZES) - 1
    opened.clear()
    assert another(store).nearest(problem(390)) == problem(400)
    assert opened
    assert not of_other_problems(opened, 400)


def test_a_problem_that_another_process_tunes_is_seen(store, kernel):
    settle(store)
    assert store.nearest(problem(300)) == problem(320)
    another(store).record(measured(kernel, problem(304), 1.0))
    assert store.nearest(problem(300)) == problem(304)
    assert store.nearest(problem(300)) == problem(304)


def test_a_problem_that_is_gone_is_not_the_nearest(store):
    settle(store)
    assert store.nearest(problem(300)) == problem(320)
    shutil.rmtree(store.folder / ENVIRONMENT.digest / problem().likeness / problem(320).digest)
    assert store.nearest(problem(300)) == problem(256)


def test_a_row_that_is_written_after_its_folder_is_seen(store, kernel):
    row = Row(ENVIRONMENT, measured(kernel, problem(304), 1.0))
    folder = (store.folder / row.place).parent
    folder.mkdir()
    settle(store)
    assert store.nearest(problem(300)) == problem(320)
    before = folder.parent.stat().st_mtime_ns
    (store.folder / row.place).write_bytes(row.text.data)
    assert folder.parent.stat().st_mtime_ns == before
    assert store.nearest(problem(300)) == problem(304)


def test_nothing_is_kept_of_a_folder_that_changes_at_this_tick(store, kernel):
    folder = store.folder / ENVIRONMENT.digest / problem().likeness
    assert store.nearest(problem(300)) == problem(320)
    now = folder.stat().st_mtime_ns
    store.record(measured(kernel, problem(304), 1.0))
    os.utime(folder, ns=(now, now))  # as a clock that has not ticked would have it
    assert store.nearest(problem(300)) == problem(304)


def test_a_table_is_read_once(store, opened, tmp_path, kernel, monkeypatch):
    rows = [Row(ENVIRONMENT, measured(kernel, problem(size), 1.0)) for size in SIZES]
    write(rows, tmp_path / "tables")
    table = Table.of(ENVIRONMENT, tmp_path / "tables")
    texts = []
    content = Table._content
    monkeypatch.setattr(
        Table, "_content", lambda self, place: texts.append(str(place)) or content(self, place)
    )
    assert table.nearest(problem(300)) == problem(320)
    texts.clear()
    beneath = Store(tmp_path / "empty", ENVIRONMENT, beneath=table)
    assert beneath.nearest(problem(390)) == problem(400)
    assert texts
    assert not of_other_problems(texts, 400)

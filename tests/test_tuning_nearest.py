"""The problems that the nearest is one of, and its rows: read once, and again where one has come or
gone."""

import os
import shutil
import time

import pytest
import torch
from support.tuning import ENVIRONMENT, arguments, measured, nearest, problem, some_kernels

from kernel_api.tuning import KernelIdentity, Store
from kernel_api.tuning._lookup import nearest_on
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
    assert nearest(store, problem(300)) == problem(320)
    assert len(of_other_problems(opened, 320)) == len(SIZES) - 1
    opened.clear()
    assert nearest(another(store), problem(390)) == problem(400)
    assert opened
    assert not of_other_problems(opened, 400)


def test_a_problem_that_another_process_tunes_is_seen(store, kernel):
    settle(store)
    assert nearest(store, problem(300)) == problem(320)
    another(store).record(measured(kernel, problem(304), 1.0))
    assert nearest(store, problem(300)) == problem(304)
    assert nearest(store, problem(300)) == problem(304)


def test_a_problem_that_is_gone_is_not_the_nearest(store):
    settle(store)
    assert nearest(store, problem(300)) == problem(320)
    shutil.rmtree(store.folder / ENVIRONMENT.digest / problem().likeness / problem(320).digest)
    assert nearest(store, problem(300)) == problem(256)


def test_a_row_that_is_written_after_its_folder_is_seen(store, kernel):
    row = Row(ENVIRONMENT, measured(kernel, problem(304), 1.0))
    folder = (store.folder / row.place).parent
    folder.mkdir()
    settle(store)
    assert nearest(store, problem(300)) == problem(320)
    before = folder.parent.stat().st_mtime_ns
    (store.folder / row.place).write_bytes(row.text.data)
    assert folder.parent.stat().st_mtime_ns == before
    assert nearest(store, problem(300)) == problem(304)


def test_nothing_is_kept_of_a_folder_that_changes_at_this_tick(store, kernel):
    folder = store.folder / ENVIRONMENT.digest / problem().likeness
    assert nearest(store, problem(300)) == problem(320)
    now = folder.stat().st_mtime_ns
    store.record(measured(kernel, problem(304), 1.0))
    os.utime(folder, ns=(now, now))  # as a clock that has not ticked would have it
    assert nearest(store, problem(300)) == problem(304)


def test_a_table_is_read_once(store, opened, tmp_path, kernel, monkeypatch):
    rows = [Row(ENVIRONMENT, measured(kernel, problem(size), 1.0)) for size in SIZES]
    write(rows, tmp_path / "tables")
    table = Table.of(ENVIRONMENT, tmp_path / "tables")
    texts = []
    content = Table._content
    monkeypatch.setattr(
        Table, "_content", lambda self, place: texts.append(str(place)) or content(self, place)
    )
    assert nearest(table, problem(300)) == problem(320)
    texts.clear()
    beneath = Store(tmp_path / "empty", ENVIRONMENT, beneath=table)
    assert nearest(beneath, problem(390)) == problem(400)
    assert texts
    assert not of_other_problems(texts, 400)


def test_rows_of_the_nearest_are_read_once_and_again_where_one_has_come(store, opened):
    settle(store)
    folder = store.folder / ENVIRONMENT.digest / problem().likeness / problem(320).digest
    then = time.time_ns() - 10**9
    os.utime(folder, ns=(then, then))
    assert [row.times_us for row in nearest_on(store, problem(300)).rows] == [(1.0,)]
    opened.clear()
    found = nearest_on(another(store), problem(310))
    assert found.rows[0].problem == problem(320) and not opened
    faster = some_kernels()[1]
    another(store).record(measured(faster, problem(320), 0.5))
    rows = nearest_on(store, problem(300)).rows
    assert rows[0].kernel.name == faster.metadata.kernel_name
    assert len(rows) == 2


def test_kernels_of_a_row_are_made_once_for_arguments_that_they_take(store, kernel, monkeypatch):
    found = nearest_on(store, problem(300))
    (row,) = found.rows
    made = found.kernel(row, arguments(300))
    assert made == kernel
    monkeypatch.setattr(KernelIdentity, "rebuild", None)
    assert found.kernel(row, arguments(310)) is made
    assert found.kernel(row, arguments(310, dtype=torch.float64)) is None


def test_a_folder_as_old_as_the_epoch_is_one(store):
    folder = store.folder / ENVIRONMENT.digest / problem().likeness
    os.utime(folder, ns=(0, 0))
    assert nearest(store, problem(300)) == problem(320)


def test_a_table_that_is_replaced_is_read_as_it_was(tmp_path, kernel):
    write([Row(ENVIRONMENT, measured(kernel, problem(320), 1.0))], tmp_path / "tables")
    table = Table.of(ENVIRONMENT, tmp_path / "tables")
    shutil.rmtree(tmp_path / "tables")
    assert nearest(table, problem(300)) == problem(320)

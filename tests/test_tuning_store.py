"""Where measurements are kept: kernel_api.tuning.Store."""

import copy
import dataclasses
import functools
import json
import logging
import os
import random
import sys
import time
from datetime import datetime, timedelta, timezone

import pytest
import torch
from support.tuning import ENVIRONMENT, OTHER, files, measured, nearest, problem, some_kernels

from kernel_api.errors import ArgumentError, CacheWarning
from kernel_api.tuning import (
    KernelIdentity,
    Status,
    Store,
)
from kernel_api.tuning._canonical import canonical, digest
from kernel_api.tuning._row import RowText


@pytest.fixture(scope="module")
def kernels():
    return some_kernels()


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path / "tuning", ENVIRONMENT)


# Lookups ---------------------------------------------------------------------------------


def test_what_is_recorded_is_found_as_it_was(store, kernels):
    row = measured(kernels[0], problem(), 2.0, 3.0, error_ratio=0.5)
    assert store.record(row)
    assert store.find(problem(), kernels[0]) == row
    assert store.find(problem(), kernels[1]) is None
    assert store.find(problem(512), kernels[0]) is None
    assert Store(store.folder, OTHER).find(problem(), kernels[0]) is None


def test_the_best_is_the_fastest_that_passed(store, kernels):
    assert store.best(problem()) is None
    store.record(measured(kernels[0], problem(), status=Status.WRONG))
    assert store.best(problem()) is None
    slow, fast = measured(kernels[1], problem(), 5.0), measured(kernels[2], problem(), 4.0)
    store.record(slow)
    store.record(fast)
    assert store.best(problem()) == fast
    found = store.measurements(problem())
    assert found[:2] == [fast, slow]
    assert [one.status for one in found] == [Status.PASSED, Status.PASSED, Status.WRONG]


def test_a_later_measurement_takes_the_place_of_an_earlier_one(store, kernels):
    store.record(measured(kernels[0], problem(), 2.0))
    store.record(measured(kernels[0], problem(), status=Status.TIMEOUT))
    (found,) = store.measurements(problem())
    assert found.status is Status.TIMEOUT
    assert len(files(store)) == 1


def test_a_row_has_the_time_that_its_kernel_was_given_where_that_did_not_suffice(store, kernels):
    row = measured(kernels[0], problem(), status=Status.TIMEOUT, timeout_s=0.5)
    store.record(row)
    store.record(unknown := measured(kernels[1], problem(), status=Status.TIMEOUT))
    assert store.find(problem(), kernels[0]) == row
    assert "timeout_s" not in unknown.result()
    assert [row.stands_for(seconds) for seconds in (0.1, 0.5, 0.6)] == [True, True, False]
    assert not unknown.stands_for(0.1)
    assert store.verify() == []


@pytest.mark.parametrize("status", Status)
def test_only_what_did_not_end_in_time_has_a_timeout(kernels, status):
    times = (1.0,) if status is Status.PASSED else ()
    if status is not Status.TIMEOUT:
        with pytest.raises(ArgumentError, match=f"is {status} with timeout_s = 3"):
            measured(kernels[0], problem(), *times, status=status, timeout_s=3.0)
        row = measured(kernels[0], problem(), *times, status=status)
        assert row.stands_for(1e9) is (status is not Status.OOM)


def test_a_measurement_of_another_environment_is_refused(store, kernels):
    with pytest.raises(ArgumentError, match="open a store for the environment it was made in"):
        store.record(measured(kernels[0], problem(), 1.0, environment=OTHER))


def without_fingerprint(row):
    return dataclasses.replace(row, kernel=KernelIdentity(row.kernel.metadata, None))


def test_a_kernel_whose_code_has_no_fingerprint_is_not_kept(store, kernels):
    assert not store.record(without_fingerprint(measured(kernels[0], problem(), 1.0)))
    assert files(store) == []


def test_a_kernel_whose_sources_changed_is_a_miss_and_does_not_hide_others(store, kernels):
    row = measured(kernels[0], problem(), 1.0)
    changed = KernelIdentity(row.kernel.metadata, {**row.kernel.fingerprint, "sources": "older"})
    store.record(dataclasses.replace(row, kernel=changed))
    assert store.best(problem()) is None
    assert nearest(store, problem()) is None
    assert store.find(problem(), kernels[0]) is None
    store.record(row)
    assert store.measurements(problem()) == [row]
    assert len(files(store)) == 2


def test_a_kernel_whose_class_is_not_registered_is_a_miss(store, kernels):
    row = measured(kernels[0], problem(), 1.0)
    metadata = {**row.kernel.metadata, "kernel_class": {"class": "this:Antigravity"}}
    unknown = KernelIdentity(metadata, row.kernel.fingerprint)
    store.record(dataclasses.replace(row, kernel=unknown))
    assert store.measurements(problem()) == []
    assert "this" not in sys.modules


def test_the_nearest_problem_is_the_one_with_the_smallest_largest_ratio(store, kernels):
    for sizes in ((512, 512, 128), (320, 640, 128), (256, 512, 520), (2048, 512, 128)):
        store.record(measured(kernels[0], problem(*sizes), 1.0))
    assert nearest(store, problem()).sizes == {"M": 320, "N": 640, "K": 128, "L": 1}
    assert nearest(store, problem(320, 640, 128)) == problem(320, 640, 128)
    assert nearest(store, problem(8, 512, 128)) is None
    assert nearest(store, problem(dtype=torch.float16)) is None


def test_a_problem_twice_as_large_is_near_and_a_larger_one_is_not(store, kernels):
    store.record(measured(kernels[0], problem(512, 512, 128), 1.0))
    assert nearest(store, problem(256)) == problem(512)
    assert nearest(store, problem(1024)) == problem(512)
    assert nearest(store, problem(255)) is None
    assert nearest(store, problem(1025)) is None


def test_ties_of_distance_go_the_same_way_always(store, kernels):
    for sizes in ((512, 512, 128), (128, 512, 128)):
        store.record(measured(kernels[0], problem(*sizes), 1.0))
    expected = min(problem(512), problem(128), key=lambda one: one.text)
    assert nearest(store, problem(256)) == expected


def test_the_nearest_problem_has_a_kernel_that_passed(store, kernels):
    store.record(measured(kernels[0], problem(), status=Status.OOM))
    assert nearest(store, problem()) is None
    store.record(measured(kernels[0], problem(200), 1.0))
    assert nearest(store, problem()) == problem(200)


def test_a_store_beneath_another_is_asked_for_what_that_lacks(store, tmp_path, kernels):
    shipped = Store(tmp_path / "shipped", ENVIRONMENT)
    shipped.record(measured(kernels[0], problem(), 1.0))
    shipped.record(measured(kernels[1], problem(), 2.0))
    before = {path: path.read_bytes() for path in files(shipped)}
    both = Store(store.folder, ENVIRONMENT, beneath=shipped)
    assert both.best(problem()).kernel.name == kernels[0].metadata.kernel_name
    assert both.find(problem(), kernels[1]).median_us == 2.0
    assert nearest(both, problem(300)) == problem()
    own = measured(kernels[0], problem(), 3.0)
    both.record(own)
    assert both.find(problem(), kernels[0]) == own
    assert [one.median_us for one in both.measurements(problem())] == [2.0, 3.0]
    assert {path: path.read_bytes() for path in files(shipped)} == before


def test_a_stamp_is_the_same_until_a_row_is_added_replaced_or_removed(store, kernels):
    def settled():
        stamp = store.stamp(problem())
        assert stamp != store.stamp(problem())  # it may change again at the same tick
        time.sleep(0.15)
        assert store.stamp(problem()) == store.stamp(problem())
        return store.stamp(problem())

    nothing = store.stamp(problem())
    assert store.stamp(problem()) == nothing
    store.record(measured(kernels[0], problem(), 2.0))
    first = settled()
    store.record(measured(kernels[1], problem(), 1.0))
    added = settled()
    store.record(measured(kernels[1], problem(), 3.0))
    replaced = settled()
    next(path for path in files(store)).unlink()
    removed = settled()
    assert len({nothing, first, added, replaced, removed}) == 5
    assert store.prune(older_than=0.0) == 1
    assert store.stamp(problem()) == nothing


def test_a_stamp_changes_with_problems_that_are_like_it_and_with_the_store_beneath(
    store, tmp_path, kernels
):
    shipped = Store(tmp_path / "shipped", ENVIRONMENT)
    both = Store(store.folder, ENVIRONMENT, beneath=shipped)
    nothing = both.stamp(problem())
    store.record(measured(kernels[0], problem(512), 2.0))
    like = both.stamp(problem())
    assert like != nothing
    time.sleep(0.15)
    one = both.stamp(problem())
    shipped.record(measured(kernels[0], problem(), 2.0))
    assert both.stamp(problem()) != one
    time.sleep(0.15)
    one = both.stamp(problem())
    store.record(measured(kernels[0], problem(64, dtype=torch.float16), 2.0))
    assert both.stamp(problem()) == one


# Where it is -----------------------------------------------------------------------------


def test_it_is_in_the_cache_directory_and_for_its_user_alone(cache_directory, kernels):
    store = Store.open(ENVIRONMENT)
    store.record(measured(kernels[0], problem(), 1.0))
    (path,) = files(store)
    one = problem()
    kernel = KernelIdentity.of(kernels[0])
    place = f"{ENVIRONMENT.digest}/{one.likeness}/{one.digest}/{kernel.digest}.json"
    assert path == cache_directory / "tuning" / place
    for folder in (cache_directory, store.folder):
        assert folder.stat().st_mode & 0o777 == 0o700
    assert Store.open(ENVIRONMENT).best(problem()) is not None


def test_there_is_none_where_the_cache_is_disabled(cache_directory, monkeypatch):
    monkeypatch.setenv("KERNEL_API_DISABLE_CACHE", "1")
    assert Store.open(ENVIRONMENT) is None


def test_a_folder_that_others_may_write_to_is_refused(cache_directory):
    folder = Store.open(ENVIRONMENT).folder
    folder.chmod(0o777)
    with pytest.warns(CacheWarning, match="can be written by others"):
        assert Store.open(ENVIRONMENT) is None


def test_a_folder_of_another_user_is_refused(cache_directory, monkeypatch):
    Store.open(ENVIRONMENT)
    stranger = os.geteuid() + 1
    monkeypatch.setattr(os, "geteuid", lambda: stranger)
    with pytest.warns(CacheWarning, match="is owned by user"):
        assert Store.open(ENVIRONMENT) is None


def test_a_folder_that_cannot_be_made_is_a_warning(cache_directory):
    cache_directory.mkdir(mode=0o700)
    (cache_directory / "tuning").write_text("a file")
    text = "the tuning store .* cannot be used: .*; nothing measured is kept or found there$"
    with pytest.warns(CacheWarning, match=text):
        assert Store.open(ENVIRONMENT) is None


# Files that are not what they should be --------------------------------------------------


@pytest.fixture
def one_file(store, kernels):
    store.record(measured(kernels[0], problem(), 2.0, 3.0))
    (path,) = files(store)
    return path


def row_of(**parts):
    """A row without content, but for parts as JSON."""
    names = ("environment", "kernel", "problem", "result")
    body = ", ".join(f'"{name}": {parts.get(name, "{}")}' for name in names)
    return f'{{"format": 2, "digest": "0", {body}}}'.encode()


def assert_missed(store, kernel, caplog, reason):
    caplog.clear()
    with caplog.at_level(logging.WARNING, "kernel_api"):
        assert store.measurements(problem()) == []
    assert reason in caplog.text
    assert store.best(problem()) is None
    assert store.find(problem(), kernel) is None
    assert nearest(store, problem()) is None
    assert list(store.rows()) == []
    assert len(store.verify()) == 1


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "this is not JSON"),
        (b"\xff\xfe", "this is not JSON"),
        (b"[" * 100_000, "this is not JSON"),
        (b"null", "expected an object"),
        (b"{}", "there is no format"),
        (b'{"format": 1}', "format is 1; expected 2"),
        (row_of(result='{"error_ratio": NaN}'), "a number that is none"),
        (row_of(), "its digest is another one"),
        (row_of(kernel="[]"), "kernel is []; expected dict"),
        (b'{"format": 2, "digest": "0"}', "there is no environment"),
    ],
)
def test_a_foreign_file_is_a_miss_and_logged(store, one_file, kernels, caplog, content, reason):
    one_file.write_bytes(content)
    assert_missed(store, kernels[0], caplog, reason)


def test_a_file_that_is_cut_off_anywhere_or_has_a_wrong_byte_is_a_miss(store, one_file, kernels):
    whole, chosen = one_file.read_bytes(), random.Random(3)
    for _ in range(100):
        at = chosen.randrange(len(whole))
        swapped = whole[:at] + bytes([whole[at] ^ 1 << chosen.randrange(8)]) + whole[at + 1 :]
        for content in (whole[:at], swapped):
            one_file.write_bytes(content)
            assert store.find(problem(), kernels[0]) is None
            assert store.measurements(problem()) == []
    one_file.write_bytes(whole)
    assert store.verify() == []


def places_in(value, place=()):
    """Where a value can be swapped for another one."""
    yield place
    if isinstance(value, (dict, list)):
        for one in value if isinstance(value, dict) else range(len(value)):
            yield from places_in(value[one], (*place, one))


def test_a_row_with_a_value_of_another_type_and_a_right_digest_raises_nothing(store, one_file):
    row, chosen = json.loads(one_file.read_bytes()), random.Random(7)
    places = [place for place in places_in(row) if place]
    for _ in range(100):
        *path, last = chosen.choice(places)
        changed = copy.deepcopy(row)
        functools.reduce(lambda value, one: value[one], path, changed)[last] = chosen.choice(
            [None, True, -1, 1.5, 10**400, "", "\ud800", [], {}, [1], {"alignment": "x"}]
        )
        parts = (canonical(changed.get(name)) for name in RowText._fields)
        text = RowText(*parts)
        if chosen.random() < 0.5:
            one_file.write_bytes(text.data)
        else:
            one_file.write_text(json.dumps({**changed, "digest": text.digest}))
        for found in store.measurements(problem()):
            assert found.problem == problem()
        assert nearest(store, problem()) in (None, problem())
        assert len(store.verify()) + len(list(store.rows())) == 1


def test_a_row_that_was_laid_out_in_another_way_is_found(store, one_file, kernels):
    before = store.measurements(problem())
    one_file.write_text(json.dumps(json.loads(one_file.read_bytes()), indent=4))
    assert store.measurements(problem()) == before
    assert store.best(problem()) == store.find(problem(), kernels[0]) == before[0]
    assert nearest(store, problem()) == problem()
    assert store.verify() == []


@pytest.mark.parametrize(
    "changes", [{"kernel": "[]"}, {"kernel": "{}"}, {"result": "{}"}, {"result": "0"}]
)
def test_a_row_in_its_layout_with_a_part_that_is_none_is_a_miss(store, one_file, changes):
    text = RowText.parsed(one_file.read_bytes())._replace(**changes)
    path = one_file.with_name(f"{digest(text.kernel)}.json")
    one_file.unlink()
    path.write_bytes(text.data)
    assert store.measurements(problem()) == []
    assert store.best(problem()) is None
    assert len(store.verify()) == 1


def test_a_good_row_at_another_place_is_a_miss(store, one_file, kernels, caplog):
    elsewhere = Store(store.folder.with_name("elsewhere"), ENVIRONMENT)
    elsewhere.record(measured(kernels[0], problem(512), 1.0))
    one_file.write_bytes(files(elsewhere)[0].read_bytes())
    assert_missed(store, kernels[0], caplog, "it belongs to")


def test_problems_with_one_hash_are_told_apart(store, one_file, kernels, monkeypatch, caplog):
    other = problem(512)
    monkeypatch.setitem(vars(other), "digest", problem().digest)
    assert store.find(other, kernels[0]) is None
    assert store.measurements(other) == []
    assert "of another problem or environment" in caplog.text


def test_a_folder_or_a_link_to_nothing_in_place_of_a_file_is_a_miss(store, one_file, kernels):
    one_file.unlink()
    one_file.mkdir()
    assert store.measurements(problem()) == []
    one_file.rmdir()
    one_file.symlink_to("nowhere")
    assert store.measurements(problem()) == []
    stray = one_file.parents[1] / "stray"
    stray.write_text("a file among the problems")
    assert nearest(store, problem()) is None
    assert (stray, "this is not JSON") in [(p, r.partition(":")[0]) for p, r in store.verify()]


def test_a_store_without_a_folder_is_empty(store, kernels):
    assert store.measurements(problem()) == []
    assert nearest(store, problem()) is None
    assert (list(store.rows()), store.verify(), store.prune()) == ([], [], 0)


# Looking after the files -----------------------------------------------------------------


def test_an_export_is_imported_elsewhere_with_what_is_newer_kept(store, tmp_path, kernels):
    first = datetime(2026, 1, 1, tzinfo=timezone.utc)
    for index, kernel in enumerate(kernels):
        store.record(measured(kernel, problem(), 2.0, date=first + timedelta(days=index)))
    Store(store.folder, OTHER).record(measured(kernels[0], problem(), 9.0, environment=OTHER))
    path = tmp_path / "export.json"
    assert store.export(path) == 4
    other = Store(tmp_path / "other", ENVIRONMENT)
    older = measured(kernels[0], problem(), 5.0, date=first - timedelta(days=1))
    newer = measured(kernels[1], problem(), 5.0, date=first + timedelta(days=9))
    other.record(older)
    other.record(newer)
    assert other.import_(path) == (3, 1, {})
    assert other.find(problem(), kernels[0]).median_us == 2.0
    assert other.find(problem(), kernels[1]) == newer
    assert other.find(problem(), kernels[2]) == store.find(problem(), kernels[2])
    assert Store(other.folder, OTHER).best(problem()).median_us == 9.0
    assert other.import_(path) == (0, 4, {})


@pytest.mark.parametrize(
    ("status", "keeps"),
    [(Status.OOM, True), (Status.TIMEOUT, True), (Status.WRONG, False), (Status.PASSED, False)],
    ids=str,
)
def test_what_passed_here_outlives_a_newer_lack_of_memory_or_time(
    store, tmp_path, kernels, status, keeps
):
    day = datetime(2026, 1, 1, tzinfo=timezone.utc)
    times = (4.0,) if status is Status.PASSED else ()
    store.record(
        measured(kernels[0], problem(), *times, status=status, date=day + timedelta(days=1))
    )
    store.export(tmp_path / "newer.json")
    mine = measured(kernels[0], problem(), 2.0, date=day)
    other = Store(tmp_path / "other", ENVIRONMENT)
    other.record(mine)
    assert other.import_(tmp_path / "newer.json") == (not keeps, keeps, {})
    found = other.find(problem(), kernels[0])
    assert found == mine if keeps else found.status is status and found != mine


def test_a_lack_of_memory_takes_the_place_of_one_that_is_older(store, tmp_path, kernels):
    day = datetime(2026, 1, 1, tzinfo=timezone.utc)
    store.record(measured(kernels[0], problem(), status=Status.OOM, date=day + timedelta(days=1)))
    store.export(tmp_path / "newer.json")
    other = Store(tmp_path / "other", ENVIRONMENT)
    other.record(measured(kernels[0], problem(), status=Status.TIMEOUT, date=day))
    assert other.import_(tmp_path / "newer.json") == (1, 0, {})


def test_a_bad_row_of_an_export_is_left_out(store, tmp_path, one_file, kernels, caplog):
    path = tmp_path / "export.json"
    store.export(path)
    content = json.loads(path.read_text())
    unkept = without_fingerprint(measured(kernels[0], problem(), 1.0))
    content["rows"] += [3, {}, {**content["rows"][0], "kernel": unkept.kernel.to_dict()}]
    path.write_text(json.dumps(content))
    other = Store(tmp_path / "other", ENVIRONMENT)
    found = other.import_(path)
    assert (found.taken, found.kept_out) == (1, 0)
    assert list(found.damaged) == [1, 2, 3]
    assert all(found.damaged.values())
    assert caplog.text.count("is left out") == 3


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"format": 9}', '{"format": 2, "rows": 1}'])
def test_what_is_no_export_is_an_error_that_names_the_file(store, tmp_path, content):
    path = tmp_path / "export.json"
    path.write_text(content)
    with pytest.raises(ArgumentError, match=r"export\.json is no export of measurements"):
        store.import_(path)


def test_prune_removes_what_is_old(store, kernels):
    now = datetime.now(timezone.utc)
    store.record(measured(kernels[0], problem(), 1.0, date=now - timedelta(days=30)))
    store.record(measured(kernels[1], problem(), 1.0))
    garbage = files(store)[0].with_name("garbage.json")
    garbage.write_text("garbage")
    assert store.prune() == 0
    assert store.prune(older_than=86400.0) == 1
    os.utime(garbage, (0, 0))
    assert store.prune(older_than=86400.0) == 1
    assert [one.kernel.name for one in store.measurements(problem())] == [
        kernels[1].metadata.kernel_name
    ]


def test_prune_removes_other_environments_and_their_folders(store, kernels):
    store.record(measured(kernels[0], problem(), 1.0))
    Store(store.folder, OTHER).record(measured(kernels[0], problem(), 9.0, environment=OTHER))
    assert store.prune(keep=ENVIRONMENT) == 1
    assert [path.name for path in store.folder.iterdir()] == [ENVIRONMENT.digest]
    assert store.prune(older_than=0.0) == 1
    assert list(store.folder.iterdir()) == []


def test_a_temporary_file_is_no_row_and_is_pruned_when_it_is_old(store, one_file):
    left = one_file.with_name(f".{one_file.name}.0123")
    left.write_text("half a row")
    assert len(store.measurements(problem())) == 1
    assert (len(list(store.rows())), store.verify(), store.prune()) == (1, [], 0)
    os.utime(left, (time.time() - 7200,) * 2)
    assert store.prune() == 1
    assert files(store) == [one_file]

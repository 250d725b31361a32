"""Measurements that come with the library."""

import dataclasses
import json

import pytest
from support.tuning import ENVIRONMENT, OTHER, arguments, measured, nearest, problem, some_kernels

import kernel_api as ka
from kernel_api import _fingerprint
from kernel_api.tuning import KernelIdentity, Status, Store
from kernel_api.tuning._row import Row
from kernel_api.tuning._table import FOLDER, Table, write

#: The same hardware and policy, with another driver and another torch.
ELSEWHERE = dataclasses.replace(
    ENVIRONMENT, driver=1, packages={**ENVIRONMENT.packages, "torch": "0.1"}
)


@pytest.fixture
def rows():
    first, second, third = some_kernels()
    times = [1.0] * ENVIRONMENT.policy.rounds
    one, other = problem(256), problem(300)
    found = [
        measured(first, one, *[3.0, *times[1:]]),
        measured(second, one, *[0.5 * us for us in times]),
        measured(third, one, status=Status.WRONG),
        measured(third, other, *times),
    ]
    return [Row(ENVIRONMENT, row) for row in found]


def test_a_table_is_looked_up_like_a_store(rows, tmp_path):
    (path,) = write(rows, tmp_path)
    assert path.name == f"{ENVIRONMENT.gpu_and_policy_digest}.json"
    table = Table.of(ENVIRONMENT, tmp_path)
    first, _, third = some_kernels()
    assert table.best(problem(256)) == rows[1].measurement
    assert table.measurements(problem(256)) == [rows[1].measurement, rows[0].measurement]
    assert table.find(problem(300), third) == rows[3].measurement
    assert table.find(problem(300), first) is None and table.best(problem(999)) is None
    assert nearest(table, problem(310)) == problem(300)
    assert table.verify() == [] and len(list(table.rows())) == 3
    assert Table.of(OTHER, tmp_path) is None


def test_what_was_measured_here_hides_what_came_with_the_library(rows, tmp_path):
    write(rows, tmp_path / "tables")
    table = Table.of(ENVIRONMENT, tmp_path / "tables")
    store = Store(tmp_path / "store", ENVIRONMENT, beneath=table)
    assert store.best(problem(256)) == rows[1].measurement
    slower = measured(some_kernels()[1], problem(256), *[7.0] * ENVIRONMENT.policy.rounds)
    store.record(slower)
    assert store.best(problem(256)) == rows[0].measurement
    assert store.find(problem(256), some_kernels()[1]) == slower


def test_a_table_holds_for_other_drivers_and_versions_of_torch(rows, tmp_path):
    write(rows, tmp_path)
    table = Table.of(ELSEWHERE, tmp_path)
    assert table.environment == ENVIRONMENT
    assert table.best(problem(256)) == rows[1].measurement
    assert nearest(table, problem(310)) == problem(300)
    store = Store(tmp_path / "store", ELSEWHERE, beneath=table)
    assert store.best(problem(256)) == rows[1].measurement


@pytest.mark.parametrize("provider", ["torch", "reference"])
def test_what_kernels_of_torch_took_holds_for_one_torch(provider, rows, tmp_path):
    """What they run is not in their sources."""
    of_torch = ka.get_kernels(arguments(), providers=[provider])[0]
    times = [0.25] * ENVIRONMENT.policy.rounds
    fastest = measured(of_torch, problem(256), *times)
    other = {**fastest.kernel.fingerprint, "torch": "0.1"}
    outdated = dataclasses.replace(
        fastest, kernel=dataclasses.replace(fastest.kernel, fingerprint=other)
    )
    for number, (row, best) in enumerate([(fastest, fastest), (outdated, rows[1].measurement)]):
        folder = tmp_path / str(number)
        write([*rows, Row(ENVIRONMENT, row)], folder)
        assert Table.of(ENVIRONMENT, folder).best(problem(256)) == best


def test_a_table_is_of_one_environment(rows, tmp_path):
    other = dataclasses.replace(rows[0].measurement, environment=ELSEWHERE.digest)
    with pytest.raises(ka.errors.ArgumentError, match="are of unlike drivers or packages"):
        write([*rows, Row(ELSEWHERE, other)], tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "text", ["", "[]", "{", "{}", '{"a": 3}', '{"a": {"b": {}}}', '{"a": {"b": {"c": 1}}}', "\xff"]
)
def test_a_damaged_table_is_none(text, tmp_path, caplog):
    (tmp_path / f"{ENVIRONMENT.gpu_and_policy_digest}.json").write_text(text)
    with caplog.at_level("WARNING", logger="kernel_api"):
        assert Table.of(ENVIRONMENT, tmp_path) is None
    assert f"{ENVIRONMENT.gpu_and_policy_digest}.json is not used: " in caplog.text


def test_a_table_under_the_name_of_another_is_none(rows, tmp_path, caplog):
    (path,) = write(rows, tmp_path)
    path.rename(tmp_path / f"{OTHER.gpu_and_policy_digest}.json")
    with caplog.at_level("WARNING", logger="kernel_api"):
        assert Table.of(OTHER, tmp_path) is None
    assert f"it is of {ENVIRONMENT}, not of what its name says" in caplog.text


def test_a_row_that_was_changed_is_not_served(rows, tmp_path):
    (path,) = write(rows, tmp_path)
    text = path.read_text()
    # Of times, which others follow: dates may have such digits, too.
    assert "0.5,0.5," in text
    path.write_text(text.replace("0.5,", "0.1,"))
    assert Table.of(ENVIRONMENT, tmp_path).best(problem(256)) == rows[0].measurement


def shipped(path):
    """The rows of a table with the names of their files."""
    return [
        (name, Row.from_dict(json.loads(text)))
        for problems in json.loads(path.read_text()).values()
        for texts in problems.values()
        for name, text in texts.items()
    ]


def test_the_tables_that_are_shipped_can_be_read():
    for path in FOLDER.glob("*.json"):
        rows = shipped(path)
        assert rows
        for name, row in rows:
            assert (row.environment.gpu_and_policy_digest, row.place.name) == (path.stem, name)
            assert row.measurement.passed
            assert row.measurement.kernel.fingerprint.keys() == names_in_fingerprints(row)


def names_in_fingerprints(row):
    """Of an installation: one that lacks a name is of kernels that no user has."""
    run = type(row.measurement.kernel.rebuild())._provider.distributions
    return {*_fingerprint.DISTRIBUTIONS, "code generator", "machine", "sources", *run}


@pytest.mark.parametrize("path", [pytest.param(p, id=p.stem) for p in FOLDER.glob("*.json")])
def test_the_tables_that_are_shipped_are_of_the_kernels_as_they_are(path):
    """A row counts only as long as the sources of its kernel are those that were measured: whoever
    changes them brings new rows, see "Measure it" in CONTRIBUTING.md."""
    measured_ones = {row.measurement.kernel for _, row in shipped(path)}
    changed = sorted(one.name for one in measured_ones if not _is_as_measured(one))
    assert not changed, (
        f"{len(changed)} of {len(measured_ones)} kernels have changed since they were tuned, such "
        f"as {', '.join(changed[:3])}; tune them again with benchmarks/tuning.py --out"
    )


def _is_as_measured(one):
    """Versions of packages may be others here, sources may not; of those that somebody writes while
    this runs nothing is known."""
    now = KernelIdentity.of(one.rebuild()).fingerprint
    return now is None or now["sources"] == one.fingerprint["sources"]

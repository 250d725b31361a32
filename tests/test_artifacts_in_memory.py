"""Artifacts in memory: compiled once, and those forgotten that were not used lately."""

import threading
from types import SimpleNamespace

import pytest

from kernel_api import _compile_cache, _disk_cache


@pytest.fixture
def built(monkeypatch):
    """An artifact is a text; names of those that were built. 8 are kept."""
    made = []

    def artifact_for(kernel, signature, target, build):
        made.append(kernel)
        return build()

    monkeypatch.setattr(_disk_cache, "artifact_for", artifact_for)
    for name, value in (("_artifacts", {}), ("_flights", {}), ("_KEPT", 8)):
        monkeypatch.setattr(_compile_cache, name, value)
    return made


def artifact(kernel, build=None):
    args = SimpleNamespace(signature=("any",))
    return _compile_cache.get_or_build(kernel, args, None, build or (lambda: f"{kernel} compiled"))


def test_no_more_are_kept_than_a_number(built):
    for number in range(100):
        assert artifact(f"k{number}") == f"k{number} compiled"
        assert len(_compile_cache._artifacts) <= 8
    assert not _compile_cache._flights
    assert len(built) == 100
    for number in range(100):
        put = SimpleNamespace(target=None)
        assert _compile_cache.put(f"other {number}", (), put) is put
        assert _compile_cache.get(f"other {number}", (), None) is put
        assert len(_compile_cache._artifacts) <= 8


@pytest.mark.parametrize("used", [artifact, lambda k: _compile_cache.get(k, ("any",), None)])
def test_what_is_used_is_kept(built, used):
    artifact("used")
    for number in range(100):
        artifact(f"k{number}")
        assert used("used") == "used compiled"
    assert built.count("used") == 1
    artifact("k0")
    assert built.count("k0") == 2


def test_a_failure_keeps_nothing(built):
    with pytest.raises(ZeroDivisionError):
        artifact("failing", lambda: 1 / 0)
    assert not _compile_cache._flights and not _compile_cache._artifacts
    assert artifact("failing") == "failing compiled"


def test_many_threads_build_one(built):
    together = threading.Barrier(8)
    entered = threading.Event()

    def slowly():
        entered.wait(0.1)
        return "compiled"

    found = []

    def asking():
        together.wait()
        found.append(artifact("one", slowly))

    threads = [threading.Thread(target=asking) for _ in range(8)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert found == ["compiled"] * 8 and built == ["one"]

"""Which files the code of a contributor's kernel comes from, however packages are installed."""

import importlib.machinery
import sys
from importlib.abc import MetaPathFinder

import pytest

from kernel_api import _sources


@pytest.fixture(autouse=True)
def forgotten():
    _sources._installed_places.cache_clear()
    yield
    _sources._installed_places.cache_clear()


def test_packages_of_other_places_are_installed(tmp_path, monkeypatch):
    """Of a user, or of a folder on the path: what is installed has its metadata beside it."""
    for place, path in {
        "user": "lib/python3.11/site-packages/torch/nn.py",
        "debian": "lib/python3/dist-packages/numpy/core.py",
    }.items():
        assert _sources._is_installed(str(tmp_path / place / path))
    target, own = tmp_path / "target", tmp_path / "own"
    (target / "torch-2.13.dist-info").mkdir(parents=True)
    own.mkdir()
    for place in (target, own):
        monkeypatch.syspath_prepend(place)
    _sources._installed_places.cache_clear()
    assert _sources._is_installed(str(target / "torch" / "nn.py"))
    assert not _sources._is_installed(str(own / "kernel.py"))


def test_a_place_that_cannot_be_looked_into_has_nothing_installed(tmp_path, monkeypatch):
    """Imports pass over it as well."""
    (tmp_path / "torch-2.13.dist-info").mkdir()
    monkeypatch.setattr(sys, "path", ["", "x" * 300, str(tmp_path), *sys.path])
    assert _sources._is_installed(str(tmp_path / "torch" / "nn.py"))


def test_modules_of_an_editable_installation_are_found(tmp_path, monkeypatch):
    """By the finder that it leaves on sys.meta_path."""
    package = tmp_path / "edited_plug"
    package.mkdir()
    for name in ("__init__", "helper"):
        (package / f"{name}.py").write_text("")

    class Finder(MetaPathFinder):
        def find_spec(self, name, path=None, target=None):
            if name != "edited_plug":
                return None
            return importlib.machinery.PathFinder.find_spec(name, [str(tmp_path)])

    class Broken(MetaPathFinder):
        def find_spec(self, name, path=None, target=None):
            raise RuntimeError(name)

    assert _sources._file_of("edited_plug.helper") is None
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, Broken(), Finder()])
    assert _sources._file_of("edited_plug.helper") == str(package / "helper.py")
    assert _sources._file_of("edited_plug.none") is None
    assert "edited_plug" not in sys.modules

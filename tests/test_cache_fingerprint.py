"""What compiled code is told apart by: kernel_api._fingerprint."""

import importlib
import os
import shutil
import sys
import textwrap
import time
import types
from pathlib import Path

import pytest
from support.code_kernels import CodeGemm

from kernel_api import _compile_cache, _sources
from kernel_api._fingerprint import code_generator, fingerprint, is_importable
from kernel_api.providers.cutedsl import CuTeDSLProvider

_KERNEL = """
    import json
    import kernel_api as ka

    class Kernel(ka.Kernel):
        def implementation(self):
            from {package}.parts import tiles
            return tiles
"""


@pytest.fixture
def third_party(tmp_path, monkeypatch):
    """Writes a package of a name of its own, and gives its kernel class; files by their names. The
    process starts when the test has ended: what a test changes is what runs."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(_compile_cache, "STARTED", time.time() + 3600)
    number = iter(range(10))

    def make(**files):
        package = f"third_party_{next(number)}_{tmp_path.name}".replace("-", "_")
        folder = tmp_path / package
        (folder / "parts").mkdir(parents=True)
        content = {
            "__init__.py": "",
            "kernel.py": textwrap.dedent(_KERNEL).format(package=package),
            "parts/__init__.py": "",
            "parts/tiles.py": "from . import sizes",
            "parts/sizes.py": "TILE = 64",
            "unrelated.py": "",
        }
        for name, text in {
            **content,
            **{n.replace("__", "/") + ".py": t for n, t in files.items()},
        }.items():
            (folder / name).write_text(text)
        importlib.invalidate_caches()
        return importlib.import_module(f"{package}.kernel").Kernel

    yield make
    for name in [n for n in sys.modules if n.startswith("third_party_")]:
        del sys.modules[name]


def paths(found):
    return [Path(one.path) for one in _sources.sources(found)]


def names(found):
    return {path.name for path in paths(found)}


def test_it_names_the_versions_and_the_code_generator():
    found = fingerprint(CodeGemm)
    for name in ("kernel-api", "nvidia-cutlass-dsl", "apache-tvm-ffi", "code generator", "sources"):
        assert found[name]
    assert found["code generator"].startswith("cu1")
    assert code_generator()["code generator"] == found["code generator"]


def test_every_family_has_one_and_the_implementations_are_in_it():
    for family in CuTeDSLProvider.families():
        assert fingerprint(family)["sources"]


def test_a_kernel_s_own_file_and_what_it_imports_are_in_it(third_party):
    assert names(third_party()) == {"kernel.py", "__init__.py", "tiles.py", "sizes.py"}


@pytest.mark.parametrize("changed", ["kernel", "parts__tiles", "parts__sizes"])
def test_it_changes_with_a_source(third_party, changed):
    one = third_party()
    path = next(p for p in paths(one) if p.stem == changed.rpartition("__")[2])
    before = fingerprint(one)["sources"]
    stat = path.stat()
    path.write_text(path.read_text() + "\n# changed\n")
    os.utime(path, (stat.st_atime, stat.st_mtime))
    fingerprint.cache_clear()
    assert fingerprint(one)["sources"] != before


def test_it_does_not_change_with_a_file_that_is_not_imported(third_party):
    one = third_party()
    before = fingerprint(one)
    path = paths(one)[0].with_name("unrelated.py")
    path.write_text("# changed")
    fingerprint.cache_clear()
    assert fingerprint(one) == before


def test_it_changes_with_the_version_of_what_is_installed(third_party, tmp_path, monkeypatch):
    """And imported by a file that is followed, in a function as well."""
    place = tmp_path / "site-packages"
    (place / "installed_lib").mkdir(parents=True)
    (place / "installed_lib" / "__init__.py").write_text("FACTOR = 1.0")
    (place / "installed_lib" / "other.py").write_text("import pytest")
    monkeypatch.syspath_prepend(str(place))

    def install(version):
        for old in place.glob("*.dist-info"):
            shutil.rmtree(old)
        folder = place / f"the_lib-{version}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: the-lib\nVersion: {version}\n"
        )
        (folder / "RECORD").write_text("installed_lib/__init__.py,,\n")
        fingerprint.cache_clear()
        importlib.invalidate_caches()

    install("1.0")
    sizes = "def tile():\n    from installed_lib import FACTOR\n    return FACTOR"
    one = third_party(parts__sizes=sizes)
    before = fingerprint(one)
    assert before["the-lib"] == "1.0" and "pytest" not in before
    install("2.0")
    after = fingerprint(one)
    assert after["the-lib"] == "2.0" and after["sources"] == before["sources"]
    assert "the-lib" not in fingerprint(CuTeDSLProvider.families()[0])


def test_the_sources_of_a_base_class_elsewhere_are_in_it():
    derived = type("Derived", (CodeGemm,), {"__module__": __name__})
    assert {"test_cache_fingerprint.py", "code_kernels.py"} <= names(derived)


def test_settings_of_the_compiler_are_in_it(monkeypatch):
    from kernel_api import _fingerprint

    monkeypatch.setenv("CUTE_DSL_LINEINFO", "1")
    monkeypatch.setattr(_fingerprint, "_environment", _fingerprint._environment.__wrapped__)
    fingerprint.cache_clear()
    assert fingerprint(CodeGemm)["CUTE_DSL_LINEINFO"] == "1"
    fingerprint.cache_clear()


def test_a_source_that_is_newer_than_the_process_gives_none(monkeypatch):
    monkeypatch.setattr(_compile_cache, "STARTED", 0.0)
    fingerprint.cache_clear()
    assert fingerprint(CodeGemm) is None
    fingerprint.cache_clear()


def test_a_source_that_was_replaced_by_one_of_an_older_date_gives_none(third_party, monkeypatch):
    """As copies are that keep the dates of the originals."""
    one = third_party()
    monkeypatch.setattr(_compile_cache, "STARTED", time.time())
    assert fingerprint(one) is not None
    time.sleep(0.05)  # the clock of files may be behind
    path = next(p for p in paths(one) if p.stem == "sizes")
    path.write_text("TILE = 128")
    os.utime(path, (0, 0))
    fingerprint.cache_clear()
    assert fingerprint(one) is None


@pytest.mark.parametrize("change", [lambda p: os.link(p, f"{p}.link"), lambda p: p.chmod(0o600)])
def test_links_to_a_source_and_its_mode_have_no_part_in_it(third_party, monkeypatch, change):
    """Installers link the files of one cache into many environments."""
    one = third_party()
    before = fingerprint(one)
    time.sleep(0.05)
    monkeypatch.setattr(_compile_cache, "STARTED", time.time() - 0.01)
    time.sleep(0.05)
    change(next(p for p in paths(one) if p.stem == "sizes"))
    fingerprint.cache_clear()
    assert before is not None
    assert fingerprint(one) == before


def test_a_source_that_cannot_be_read_gives_none(third_party, monkeypatch):
    one = third_party()

    def unreadable(path):
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr(_sources, "_content", unreadable)
    assert fingerprint(one) is None


def test_a_class_without_a_file_gives_none(monkeypatch):
    notebook = types.ModuleType("notebook_of_this_test")
    monkeypatch.setitem(sys.modules, notebook.__name__, notebook)
    exec("class Own(CodeGemm): pass", {**vars(notebook), "CodeGemm": CodeGemm}, vars(notebook))
    assert is_importable(notebook.Own)
    assert fingerprint(notebook.Own) is None


def test_a_class_that_its_name_does_not_find_gives_none():
    class Local(CodeGemm):
        pass

    renamed = type("CodeGemm", (CodeGemm,), {"__module__": CodeGemm.__module__})
    assert is_importable(CodeGemm)
    assert fingerprint(Local) is None
    assert fingerprint(renamed) is None

"""The commands that look after compiled kernels: cache, bundle, compile --out."""

import bz2
import gzip
import json
import lzma
import os
import tarfile

import pytest
from support.code_kernels import CodeGemm
from support.data import arguments_for
from support.kernels import kernels_of
from support.registry import restored_registry

import kernel_api as ka
from kernel_api import _compile_cache, _disk_cache, bundle
from kernel_api._manifest import Manifest
from kernel_api.cli import main
from kernel_api.errors import ArgumentError


@pytest.fixture(autouse=True)
def registered(cache_directory, monkeypatch):
    with restored_registry() as registry:
        registry.provider("codes").register(CodeGemm)
        monkeypatch.setenv("KERNEL_API_PROVIDERS", "codes")
        yield
        monkeypatch.delenv("KERNEL_API_PROVIDERS")
    bundle._families.clear()


@pytest.fixture(autouse=True)
def nothing_told():
    _disk_cache._told.clear()


@pytest.fixture
def filled(cache_directory):
    """Two kernels in the cache."""
    _compile_cache.clear()
    kernels = kernels_of(CodeGemm)[:2]
    for kernel in kernels:
        kernel.compile(arguments_for(kernel, 64, 64, 64, device="meta"), cc=90)
    return kernels


def answer(capsys, *command):
    """Exit code and JSON of a command."""
    capsys.readouterr()
    code = main([*map(str, command), "--json"])
    out = capsys.readouterr().out
    return code, json.loads(out) if out else None


def test_path_is_where_the_cache_would_be(cache_directory, capsys):
    assert answer(capsys, "cache", "path") == (0, {"path": str(cache_directory)})
    assert not cache_directory.exists()


@pytest.mark.parametrize("command", [["cache", "path"], ["cache", "ls"], ["report"]], ids=str)
def test_without_a_home_folder_commands_that_need_one_exit_with_2(homeless, command, capsys):
    assert main(command) == 2
    told = capsys.readouterr().err
    assert "there is no home folder to keep a cache in; set KERNEL_API_CACHE_DIR" in told


def test_ls_lists_what_was_compiled(filled, cache_directory, capsys):
    code, rows = answer(capsys, "cache", "ls")
    assert code == 0
    assert {row["kernel"] for row in rows} == {k.metadata.kernel_name for k in filled}
    assert {(row["target"], row["kind"], row["state"]) for row in rows} == {
        ("sm_90", "library", "ok")
    }
    folders = {entry.name: entry for entry in (cache_directory / "kernels").iterdir()}
    assert {row["key"] for row in rows} == folders.keys()
    assert all(0 <= row["days_unused"] < 1 and row["bytes"] > 1024 for row in rows)
    name = filled[0].metadata.kernel_name
    assert len(answer(capsys, "cache", "ls", "--filter", name)[1]) == 1
    assert main(["cache", "ls"]) == 0
    assert "2 entries" in capsys.readouterr().out


def test_verify_moves_aside_what_is_damaged(filled, cache_directory, capsys):
    assert answer(capsys, "cache", "verify") == (
        0,
        {"passed": True, "entries": 2, "moved_aside": {}},
    )
    entry = next((cache_directory / "kernels").iterdir())
    os.truncate(entry / "kernel.so", 100)
    code, found = answer(capsys, "cache", "verify")
    assert code == 1
    assert found["moved_aside"] == {
        entry.name: "damaged: its bytes are not those that the manifest was made for"
    }
    assert answer(capsys, "cache", "verify")[1]["entries"] == 1


def test_prune_removes_what_other_sources_made_and_what_was_not_used(
    filled, cache_directory, capsys, monkeypatch
):
    assert answer(capsys, "cache", "prune")[1]["removed"] == []
    old, other = (cache_directory / "kernels").iterdir()
    os.utime(old, (0, 0))
    assert answer(capsys, "cache", "prune", "--older-than", "7")[1]["removed"] == [old.name]
    monkeypatch.setattr("kernel_api._fingerprint.fingerprint", lambda cls: {"sources": "others"})
    assert answer(capsys, "cache", "prune")[1]["removed"] == [other.name]
    assert not list((cache_directory / "kernels").iterdir())


def test_prune_keeps_kernels_of_plug_ins_that_are_not_imported(filled, capsys, monkeypatch):
    def missing(self):
        raise ArgumentError("there is no module of that name")

    monkeypatch.setattr(Manifest, "metadata", property(missing))
    assert answer(capsys, "cache", "prune")[1]["removed"] == []


def test_prune_all_leaves_nothing(filled, cache_directory, capsys):
    (cache_directory / "kernels" / "tmp-0123").mkdir()
    sources = cache_directory / "sources"
    sources.mkdir(exist_ok=True)
    for name in (".of_a_killed_writer", "known.json"):
        (sources / name).write_text("")
    code, found = answer(capsys, "cache", "prune", "--all")
    assert (code, len(found["removed"])) == (0, 2)
    assert not list((cache_directory / "kernels").iterdir())
    assert not list((cache_directory / "locks").iterdir())
    assert not list(sources.iterdir())


def test_an_archive_moves_entries_to_another_cache(filled, tmp_path, capsys, monkeypatch):
    archive = tmp_path / "kernels.tar"
    assert answer(capsys, "cache", "export", archive)[1]["entries"] == 2
    monkeypatch.setenv("KERNEL_API_CACHE_DIR", str(tmp_path / "elsewhere"))
    found = {"entries": 2, "kept_out": 0, "refused": {}}
    assert answer(capsys, "cache", "import", archive) == (0, found)
    _compile_cache.clear()
    monkeypatch.setattr(CodeGemm, "before_code", None)  # a compilation would raise
    for kernel in filled:
        kernel.compile(arguments_for(kernel, 64, 64, 64, device="meta"), cc=90)


def test_import_replaces_what_is_damaged_and_counts_what_was_here(
    filled, cache_directory, tmp_path, capsys
):
    archive = tmp_path / "kernels.tar"
    answer(capsys, "cache", "export", archive)
    entry = next((cache_directory / "kernels").iterdir())
    os.truncate(entry / "kernel.so", 100)
    found = {"entries": 1, "kept_out": 1, "refused": {}}
    assert answer(capsys, "cache", "import", archive) == (0, found)
    assert answer(capsys, "cache", "verify")[1]["passed"]
    assert main(["cache", "import", str(archive)]) == 0
    assert f"0 entries taken from {archive}, 2 were here" in capsys.readouterr().out


@pytest.mark.parametrize("module", [bz2, gzip, lzma], ids=lambda module: module.__name__)
def test_a_compressed_archive_that_is_damaged_cannot_be_read(filled, tmp_path, capsys, module):
    archive = tmp_path / "kernels.tar"
    answer(capsys, "cache", "export", archive)
    data = module.compress(archive.read_bytes())
    archive.write_bytes(data)
    assert main(["cache", "import", str(archive)]) == 0
    middle = len(data) // 2
    archive.write_bytes(data[:middle])
    assert main(["cache", "import", str(archive)]) == 2
    assert f"{archive} cannot be read: " in capsys.readouterr().err
    archive.write_bytes(data[:middle] + bytes(64) + data[middle + 64 :])
    code = main(["cache", "import", str(archive)])
    found = capsys.readouterr()  # not every such stream ends early: then an entry is damaged
    assert "cannot be read: " in found.err if code == 2 else "1 are damaged" in found.out


def test_a_file_that_is_no_archive_is_refused_in_one_line(tmp_path, capsys):
    (tmp_path / "text.tar").write_text("text")
    assert main(["cache", "import", str(tmp_path / "text.tar")]) == 2
    told = capsys.readouterr().err
    assert told.endswith("text.tar cannot be read: it is no archive, or a damaged one\n")
    assert told.count("\n") == 1


def test_import_takes_only_the_kernels_that_are_asked_for(filled, tmp_path, capsys, monkeypatch):
    archive = tmp_path / "kernels.tar"
    answer(capsys, "cache", "export", archive)
    monkeypatch.setenv("KERNEL_API_CACHE_DIR", str(tmp_path / "elsewhere"))
    name = filled[0].metadata.kernel_name
    assert answer(capsys, "cache", "import", archive, "--filter", "zzz")[1]["entries"] == 0
    assert answer(capsys, "cache", "import", archive, "--filter", name)[1]["entries"] == 1
    assert [row["kernel"] for row in answer(capsys, "cache", "ls")[1]] == [name]


def test_an_export_that_fails_leaves_the_archive_as_it_was(filled, tmp_path, capsys, monkeypatch):
    def full(self, name, arcname):
        self.fileobj.write(b"the beginning")
        raise OSError(28, "No space left on device")

    archive = tmp_path / "kernels.tar"
    answer(capsys, "cache", "export", archive)
    before = archive.read_bytes()
    monkeypatch.setattr(tarfile.TarFile, "add", full)
    assert main(["cache", "export", str(archive)]) == 2
    assert f"{archive} cannot be written: No space left on device" in capsys.readouterr().err
    assert archive.read_bytes() == before
    assert {path.name for path in tmp_path.iterdir()} == {"cache", "kernels.tar"}


def _without_a_name(text):
    return json.dumps({**json.loads(text), "kernel": {}})


@pytest.mark.parametrize(
    "change", [_without_a_name, lambda text: "[" * 100_000], ids=["no name", "deep"]
)
def test_a_manifest_that_makes_no_sense_is_an_entry_that_is_not_good(
    filled, cache_directory, capsys, change
):
    entry = next((cache_directory / "kernels").iterdir())
    manifest = entry / "manifest.json"
    manifest.write_text(change(manifest.read_text()))
    row = next(row for row in answer(capsys, "cache", "ls")[1] if entry.name.startswith(row["key"]))
    assert row["kernel"] == "unreadable"
    assert "the manifest cannot be read" in row["state"]
    _compile_cache.clear()
    for kernel in filled:  # moved aside, and compiled again
        kernel.compile(arguments_for(kernel, 64, 64, 64, device="meta"), cc=90)
    assert answer(capsys, "cache", "verify")[1]["passed"]


def test_an_archive_is_not_trusted(filled, cache_directory, tmp_path, capsys, monkeypatch):
    entry = next((cache_directory / "kernels").iterdir())
    (tmp_path / "evil").write_text("evil")
    with tarfile.open(tmp_path / "bad.tar", "w") as archive:
        archive.add(entry / "kernel.so", f"{'0' * 64}/kernel.so")
        archive.add(entry / "manifest.json", f"{'0' * 64}/manifest.json")
        archive.add(entry / "manifest.json", f"{entry.name}/manifest.json")
        archive.add(tmp_path / "evil", "../../evil")
        archive.add(tmp_path / "evil", "/evil")
    monkeypatch.setenv("KERNEL_API_CACHE_DIR", str(tmp_path / "elsewhere"))
    code, found = answer(capsys, "cache", "import", tmp_path / "bad.tar")
    assert code == 1
    assert found == {
        "entries": 0,
        "kept_out": 0,
        "refused": {
            "0" * 64: "it belongs to another key",
            entry.name: "it is not one file of code and a manifest",
        },
    }
    assert answer(capsys, "cache", "ls")[1] == []


@pytest.mark.parametrize(
    ("command", "text"),
    [
        (["export"], "cache export takes a file"),
        (["ls", "x.tar"], "cache ls takes no file"),
        (["import", "missing.tar"], "missing.tar cannot be read"),
        (["export", "/missing/x.tar"], "/missing/x.tar cannot be written"),
    ],
)
def test_questions_without_sense_exit_with_2(command, text, capsys):
    assert main(["cache", *command]) == 2
    assert text in capsys.readouterr().err


def test_a_disabled_cache_has_nothing_to_list(monkeypatch, capsys):
    monkeypatch.setenv("KERNEL_API_DISABLE_CACHE", "1")
    assert main(["cache", "ls"]) == 2
    assert "it is disabled" in capsys.readouterr().err


# compile --out, bundle --------------------------------------------------------------------


def test_compile_writes_libraries_for_a_file_of_signatures_and_bundle_packs_them(tmp_path, capsys):
    signatures = tmp_path / "signatures.json"
    signatures.write_text('[{"layout": "tn"}, {"layout": "nt", "out-dtype": "float32"}]')
    code, found = answer(
        capsys,
        *("compile", "--target", "sm_80", "--target", "sm_90", "--limit", 1),
        *("--signatures", signatures, "--out", tmp_path / "out"),
    )
    assert code == 0
    assert [one["target"] for one in found["outcomes"]] == ["sm_80", "sm_90"] * 2
    for one in found["outcomes"]:
        assert ka.load(one["file"]).kernel.metadata.kernel_name == one["kernel"]
    code, packed = answer(capsys, "bundle", tmp_path / "out", "--out", tmp_path / "bundle")
    assert code == 0
    assert sorted(packed["kernels"]) == sorted(one["kernel"] for one in found["outcomes"])
    assert len(ka.load_bundle(tmp_path / "bundle")) == 2


def test_a_target_that_is_named_twice_is_compiled_for_once(capsys):
    words = ("--target", "sm_90", "--target", "90", "--limit", 1)
    code, found = answer(capsys, "compile", *words)
    assert code == 0
    assert [one["target"] for one in found["outcomes"]] == ["sm_90"]


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("s.json", '{"m": 1}', "is no list of objects"),
        ("s.json", "[", "cannot be read"),
        ("s.json", '[{"size": 1}]', "there is no option size of a problem"),
        ("s.json", None, "No such file"),
    ],
)
def test_a_file_of_signatures_that_makes_no_sense_is_named(name, text, reason, tmp_path, capsys):
    if text is not None:
        (tmp_path / name).write_text(text)
    code = main(["compile", "--target", "sm_90", "--signatures", str(tmp_path / name)])
    assert code == 2
    assert reason in capsys.readouterr().err


def test_yaml_is_read_where_pyyaml_is_installed(tmp_path, capsys):
    (tmp_path / "s.yaml").write_text("- {m: 1, layout: tn}\n")
    code = main(["compile", "--target", "sm_90", "--limit", "1",
                 "--signatures", str(tmp_path / "s.yaml")])  # fmt: skip
    try:
        import yaml  # noqa: F401
    except ImportError:
        assert code == 2
        assert "YAML needs pyyaml" in capsys.readouterr().err
    else:
        assert code == 0

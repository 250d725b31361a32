"""Bundles of libraries: kernel_api.load_bundle, and what makes them."""

import json
import os
import shutil
import threading
import warnings

import pytest
from support.code_kernels import CodeGemm
from support.data import arguments_for
from support.kernels import kernels_of
from support.libraries import arguments, cut, damaged, kernels, registered_code, write_libraries

import kernel_api as ka
from kernel_api import _compile_cache, bundle, provider
from kernel_api import library as library_module
from kernel_api.errors import (
    ArgumentError,
    LibraryError,
    PluginWarning,
)
from kernel_api.targets import target


@pytest.fixture(scope="module", autouse=True)
def registered():
    with registered_code() as provider:
        yield provider


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_libraries(tmp_path_factory.mktemp("libraries"))


@pytest.fixture
def packed(folder, tmp_path):
    bundle._families.clear()
    _compile_cache.clear()  # what is compiled in this process would be found first
    return tmp_path / "bundle", bundle.pack([folder], tmp_path / "bundle")


def from_bundle(args, **query):
    return ka.get_kernels(args, providers=["bundle"], **query)


def test_a_bundle_offers_its_kernels_for_the_targets_it_has(packed, registry):
    path, names = packed
    small, large = (k.metadata.kernel_name for k in kernels()[:2])
    assert sorted(names) == sorted([small, large, large])
    loaded = ka.load_bundle(path)
    assert [k.metadata.kernel_name for k in loaded] == sorted({small, large}, key=names.index)
    offered = {cc: {k.metadata.kernel_name for k in from_bundle(arguments(), cc=cc)}
               for cc in (80, 90, 86, 100)}  # fmt: skip
    assert offered == {80: {large}, 90: {small, large}, 86: {large}, 100: set()}
    (kernel,) = from_bundle(arguments(), cc=86)
    artifact = kernel.compile(arguments(), cc=86)
    assert artifact.target == target(80)
    assert artifact.compiled_obj(1, 2) == 2
    assert artifact.kernel == kernel == kernels()[1]


def test_of_several_builds_of_a_kernel_a_bundle_has_the_newest(monkeypatch, tmp_path):
    """Whatever their files are called, which have the state of the sources in their names."""
    bundled, small, real = tmp_path / "bundle", kernels()[0], library_module.versions
    monkeypatch.setenv("KERNEL_API_DISABLE_CACHE", "1")
    _compile_cache.clear()
    for age, state in enumerate("7153"):
        sources = {"sources": state * 64}
        monkeypatch.setattr(library_module, "versions", lambda cls, new=sources: real(cls) | new)
        path = tmp_path / f"{state}.so"
        small.compile(arguments(), cc=90).export(path)
        os.utime(path, ns=(10**18 + age * 10**9,) * 2)
        if age == 1:
            assert len(bundle.pack(tmp_path.glob("*.so"), bundled)) == 1
    before = {one.name for one in bundled.glob("*.so")}
    assert len(bundle.pack([tmp_path / "3.so", tmp_path / "5.so"], bundled)) == 1
    (held,) = bundled.glob("*.so")
    assert held.read_bytes() == (tmp_path / "3.so").read_bytes()
    assert held.name not in before
    assert len(ka.load_bundle(bundled)) == 1


def test_an_index_with_what_is_no_kernel_leaves_that_out(packed, registry):
    path, names = packed
    index = json.loads((path / bundle.INDEX).read_text())
    odd = json.loads(json.dumps(index["kernels"][0]))
    for change in ({"design": None}, {"kernel_class": {"class": "kernel_api.kernel:Kernel"}}):
        worse = json.loads(json.dumps(odd))
        worse["manifest"]["kernel"].update(change)
        index["kernels"].append(worse)
    (path / bundle.INDEX).write_text(json.dumps(index))
    with pytest.warns(PluginWarning, match="is left out"):
        assert {one.metadata.kernel_name for one in ka.load_bundle(path)} == set(names)
    assert from_bundle(arguments(), cc=86)


@pytest.mark.parametrize("where", [".", "bundle"])
def test_a_bundle_that_is_named_from_here_is_found_from_elsewhere(
    packed, registry, monkeypatch, tmp_path_factory, where
):
    path, _ = packed
    monkeypatch.chdir(path if where == "." else path.parent)
    ka.load_bundle(where)
    monkeypatch.chdir(tmp_path_factory.mktemp("elsewhere"))
    (kernel,) = from_bundle(arguments(), cc=80)
    assert kernel.compile(arguments(), cc=80).compiled_obj(1, 2) == 2


class Namesake(CodeGemm):
    family = "CodeGemm"


def test_a_bundle_may_have_families_of_one_name_of_two_providers(packed, registry, tmp_path):
    registry.register(Namesake)
    kernels_of(Namesake)[0].compile(arguments(), cc=90).export(tmp_path / "namesake.so")
    bundle.pack([tmp_path / "namesake.so"], packed[0])
    assert len(ka.load_bundle(packed[0])) == 3
    assert len(from_bundle(arguments(), cc=90)) == 3


def test_a_bundle_is_made_of_several_files(tmp_path):
    with pytest.raises(ArgumentError, match=r"sources is '/x.so'; expected several, as in \['/x"):
        bundle.pack("/x.so", tmp_path)
    with pytest.raises(LibraryError, match="there is no library to pack: sources is empty"):
        bundle.pack([], tmp_path)


def test_a_bundle_comes_before_what_compiles_and_explains_itself(packed, registry):
    ka.load_bundle(packed[0])
    listed = ka.get_kernels(arguments(), cc=90)
    assert [type(k).provider_name() for k in listed[:2]] == ["bundle", "bundle"]
    batched = arguments_for(kernels()[0], 64, 64, 64, 2, device="meta")
    assert from_bundle(batched, cc=90) == []
    refusal = next(r for r in ka.explain(batched, cc=90).rejected if r.provider == "bundle")
    assert refusal.family == "CodeGemm (bundle)"
    assert refusal.reason.startswith(
        "the bundle has it for other signatures or targets than these (for sm_"
    )


def test_a_bundle_can_be_added_to(packed, folder, tmp_path):
    path, names = packed
    kernels()[2].compile(arguments(), cc=90).export(tmp_path / "third.so")
    assert len(bundle.pack([tmp_path / "third.so"], path)) == len(names) + 1
    assert len(bundle.pack([folder], path)) == len(names) + 1


def test_a_bundle_may_be_added_to_by_two_at_once(packed, tmp_path, monkeypatch):
    """The second begins when the first has listed what is there: it has to wait for the index."""
    path, names = packed
    kernels()[2].compile(arguments(), cc=90).export(tmp_path / "third.so")
    kernels()[2].compile(arguments(), cc=80).export(tmp_path / "fourth.so")
    second = threading.Thread(target=bundle.pack, args=([tmp_path / "fourth.so"], path))
    replace = bundle.replace_durably

    def replaced(file, data):
        if file.name == bundle.INDEX and second.ident is None:
            second.start()
            second.join(0.3)
        replace(file, data)

    monkeypatch.setattr(bundle, "replace_durably", replaced)
    bundle.pack([tmp_path / "third.so"], path)
    second.join()
    held = {file for file, _ in bundle._index(path)}
    assert held == {one.name for one in path.glob("*.so")}
    assert len(held) == len(names) + 2


def test_what_is_no_bundle_says_so(packed, tmp_path, folder):
    path, _ = packed
    with pytest.raises(LibraryError, match=r"is no bundle: index\.json: No such file"):
        ka.load_bundle(tmp_path)
    with pytest.raises(LibraryError, match="there is no library to pack"):
        bundle.pack([tmp_path], tmp_path / "empty")
    assert not (tmp_path / "empty").exists()
    for text, match in [("[]", "cannot be read"), ('{"format": 7}', "has format 7; expected 1")]:
        (path / "index.json").write_text(text)
        with pytest.raises(LibraryError, match=match):
            ka.load_bundle(path)


WRONG = (None, 7, "x", [], ["x"], {}, {"type": "a:b", "fields": {}}, {"class": "os:path"})


@pytest.mark.parametrize(
    ("place", "match"),
    [
        ([], "index.json cannot be read: it is None; expected an object with format, kernels"),
        (["format"], "the index has format None; expected 1"),
        (["kernels"], r"kernels is None; expected a list"),
        (["kernels", 0], r"kernels\[0\] is None; expected an object with file, manifest"),
        (["kernels", 0, "file"], r"kernels\[0\].file is None; expected the name of a library"),
        (["kernels", 0, "manifest"], r"kernels\[0\]: .* it is None; expected an object"),
        (["kernels", 0, "manifest", "kernel"], "kernel is None; expected an object"),
        (["kernels", 0, "manifest", "sha256"], "sha256 is None; expected 64 hexadecimal digits"),
    ],
)
def test_a_bundle_with_another_value_in_its_index_says_which(packed, place, match):
    path, _ = packed
    put(path / "index.json", place, None)
    with pytest.raises(LibraryError, match=match):
        ka.load_bundle(path)


def test_a_bundle_with_any_value_in_its_index_is_refused_or_left_out(packed, registry):
    path, _ = packed
    index = json.loads((path / "index.json").read_text())
    index["kernels"] = index["kernels"][:1]
    places = [place for place in places_in(index) if "signature" not in place[:-1]]
    refused = 0
    for at, place in enumerate(places):
        for wrong in (WRONG[at % len(WRONG)], WRONG[(at * 3 + 1) % len(WRONG)], GONE):
            (path / "index.json").write_text(json.dumps(index))
            put(path / "index.json", place, wrong)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", PluginWarning)
                try:
                    assert all(isinstance(k, ka.Kernel) for k in ka.load_bundle(path))
                except LibraryError as error:
                    assert str(path) in str(error)
                    refused += 1
    assert refused > 30


GONE = object()


def put(file, place, value):
    """Write JSON with another value in a place; GONE: with none."""
    whole = {"": json.loads(file.read_text())}
    inside, last = whole, ""
    for key in place:
        inside, last = inside[last], key
    if value is GONE and place:
        del inside[last]
    else:
        inside[last] = None if value is GONE else value
    file.write_text(json.dumps(whole[""]))


def places_in(value, above=()):
    yield above
    keys = value if isinstance(value, dict) else range(len(value)) if type(value) is list else ()
    for key in keys:
        yield from places_in(value[key], (*above, key))


def test_a_path_that_is_no_bundle_is_a_warning_and_the_others_are_loaded(
    packed, registry, monkeypatch, tmp_path
):
    path, _ = packed
    monkeypatch.setenv("KERNEL_API_BUNDLE", f"{tmp_path / 'none'}:{path}:{tmp_path / 'neither'}")
    provider.rescan()
    with pytest.warns(PluginWarning, match="is no bundle") as caught:
        assert len(from_bundle(arguments(), cc=90)) == 2
    first, second = (str(warning.message) for warning in caught)
    assert first.startswith(f"bundle '{tmp_path / 'none'}' could not be loaded and is left out: ")
    assert str(tmp_path / "neither") in second


def test_a_kernel_whose_class_is_gone_is_left_out_with_a_warning(packed, registry):
    path, _ = packed
    text = (path / "index.json").read_text()
    name = kernels()[0].metadata.kernel_name
    index = json.loads(text)
    for one in index["kernels"]:
        if one["manifest"]["kernel"]["kernel_name"] == name:
            one["manifest"]["kernel"]["kernel_class"]["class"] = "support.code_kernels:Gone"
    (path / "index.json").write_text(json.dumps(index))
    with pytest.warns(PluginWarning, match=f"{name} of bundle .* is left out: .*Gone"):
        assert kernels()[1] in ka.load_bundle(path)


def test_a_damaged_library_of_a_bundle_is_named_when_it_is_used(packed, registry):
    path, _ = packed
    ka.load_bundle(path)
    (kernel,) = from_bundle(arguments(), cc=80)
    file = next(path.glob("*sm_80-*.so"))
    damaged(file, cut(0.5))
    with pytest.raises(LibraryError, match="not a complete shared library"):
        kernel.compile(arguments(), cc=80)


@pytest.mark.parametrize("other", ["small90", "large90"])
def test_a_library_in_the_place_of_another_is_named_when_it_is_used(packed, registry, other):
    path, _ = packed
    ka.load_bundle(path)
    (kernel,) = from_bundle(arguments(), cc=80)
    small, large = (k.metadata.kernel_name for k in kernels()[:2])
    (file,) = path.glob(f"{large}-sm_80-*.so")
    name = {"small90": small, "large90": large}[other]
    shutil.copy(next(path.glob(f"{name}-sm_90-*.so")), file)
    with pytest.raises(LibraryError, match="is another library than the bundle's index says"):
        kernel.compile(arguments(), cc=80)

"""Which sources a kernel class is made from: kernel_api._sources and _known_sources."""

import ast
import importlib
import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from support.data import arguments_for
from support.kernels import EVERY_KERNEL, generated_by

import kernel_api as ka
from kernel_api import _compile_cache, _known_sources, _sources
from kernel_api._disk_cache import DiskCache
from kernel_api._fingerprint import fingerprint
from kernel_api.provider import providers


def classes(*names):
    return [pytest.param(c, id=c.__name__) for one in providers(names) for c in one.families()]


COMPILED, LAUNCHED = classes("cutedsl"), classes("torch", "reference")
CLASSES = COMPILED + LAUNCHED
FAMILIES = {param.values[0].__name__: param.values[0] for param in CLASSES}
SMALL = (128, 128, 128)


def modules(kernel_class):
    """Names of our own that are in, without ``kernel_api``."""
    by_path = {path: name for name, path in _sources._own_modules().items()}
    found = _sources.sources(kernel_class)
    return {by_path[one.path].partition(".")[2] for one in found}


# Of our own kernels ----------------------------------------------------------------------


def executed(call):
    """The files that a call runs code of."""
    found = set()

    def note(frame, event, arg):
        if event == "call":
            found.add(frame.f_code.co_filename)

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return found & set(_sources.own_files())


#: Families whose compilations together run all of the code; KERNEL_API_TEST_EVERY_KERNEL=1 takes
#: every family.
SAMPLE = ("Sm80Gemm", "Sm90Fp8Gemm", "Sm90RepackedGemm", "Sm80RmsNorm", "Sm80LayerNormBackward")
#: That run on a GPU only, for the arguments of the test.
NOT_HERE = ("TorchLayerNormBackward", "TorchScaledGroupedGemm")


@pytest.mark.compile
@pytest.mark.parametrize(
    "kernel_class", [one for one in COMPILED if EVERY_KERNEL or one.id in SAMPLE]
)
def test_all_code_that_runs_in_a_compilation_is_in_it(kernel_class, monkeypatch):
    monkeypatch.setenv("KERNEL_API_DISABLE_CACHE", "1")
    kernel = generated_by(kernel_class)[0]
    args = arguments_for(kernel, *SMALL, device="meta")
    _compile_cache.clear()
    ran = executed(lambda: kernel.compile(args, cc=kernel_class.targets[0]))
    assert any("implementations" in path for path in ran)
    assert ran <= {one.path for one in _sources.sources(kernel_class)}


@pytest.mark.parametrize(
    "kernel_class",
    [one for one in LAUNCHED if one.id not in NOT_HERE and "cpu" in one.values[0].devices],
)
def test_all_code_that_runs_in_a_launch_is_in_it(kernel_class):
    kernel = generated_by(kernel_class)[0]
    args = arguments_for(kernel, *SMALL)
    ran = executed(lambda: kernel.run(args))
    assert ran
    assert ran <= {one.path for one in _sources.sources(kernel_class)}


@pytest.mark.compile
@pytest.mark.parametrize("name", ["Sm80RmsNorm", "Sm90Fp8Gemm"])
def test_every_module_that_a_compilation_loads_is_in_it(name):
    code = f"""
        import json, sys
        sys.path[:] = {sys.path!r}
        from support.data import arguments_for
        from support.kernels import generated_by
        import kernel_api as ka
        from kernel_api import _sources
        ka.get_kernels(cc=90, providers=["torch"])
        found = {{c.__name__: c for c in ka.providers.cutedsl.CuTeDSLProvider.families()}}[{name!r}]
        kernel = generated_by(found)[0]
        args = arguments_for(kernel, 128, 128, 128, device="meta")
        before = set(sys.modules)
        kernel.compile(args, cc=found.targets[0])
        loaded = [n for n in set(sys.modules) - before if _sources.is_ours(n)]
        print(json.dumps([loaded, [one.path for one in _sources.sources(found)]]))
    """
    environment = {**os.environ, "KERNEL_API_DISABLE_CACHE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True, text=True, check=True, env=environment,
    )  # fmt: skip
    loaded, found = json.loads(done.stdout.splitlines()[-1])
    assert any(one.startswith("kernel_api.implementations.sm") for one in loaded)
    assert {_sources._own_modules()[one] for one in loaded} <= set(found)


@pytest.mark.parametrize("kernel_class", CLASSES)
def test_it_is_the_same_whatever_else_is_loaded(kernel_class):
    found = _sources.sources(kernel_class)
    _sources._files.clear()
    assert _sources.sources(kernel_class) == found
    assert found == sorted(found, key=lambda one: (one.name, one.sha256, one.path))


def test_other_kernels_are_not_in_it():
    sm80, sm90 = modules(FAMILIES["Sm80Gemm"]), modules(FAMILIES["Sm90Gemm"])
    norm = modules(FAMILIES["Sm80RmsNorm"])
    assert {"implementations.sm80.gemm", "implementations.common.epilogue"} <= sm80
    assert "providers.cutedsl.epilogue.lower" in sm80
    assert not any("sm90" in one or "norm" in one for one in sm80)
    assert not any(one.startswith("implementations.sm80.") for one in sm90)
    assert {"implementations.sm80.norm", "implementations.common.hadamard"} <= norm
    assert "implementations.sm80.gemm" not in norm
    assert not any("gemm" in one for one in norm)


def test_a_kernel_is_the_same_however_it_is_ranked():
    for name in ("Sm90Gemm", "Sm80RmsNorm"):
        assert not any(one.endswith(".model") for one in modules(FAMILIES[name]))


def test_the_providers_that_wrap_others_code_have_their_own_sources():
    assert "providers.torch.gemm" in modules(FAMILIES["TorchGemm"])
    assert "providers.torch.norm" not in modules(FAMILIES["TorchGemm"])
    reference = modules(FAMILIES["ReferenceGemm"])
    assert {"providers.reference.gemm", "providers.reference.tensor_cores"} <= reference
    assert not any("cutedsl" in one or "implementations" in one for one in reference)


@pytest.fixture
def copied(tmp_path, monkeypatch):
    """Our packages, but for the modules of the classes, from files that may be changed."""
    places = {}
    for name, path in _sources._own_modules().items():
        package, place = name.split(".")[1], Path(path)
        at = place.parts[len(place.parts) - place.parts[::-1].index(package) :]
        places[name] = tmp_path.joinpath(package, *at)
        places[name].parent.mkdir(parents=True, exist_ok=True)
        places[name].write_bytes(place.read_bytes())
    found = {name: str(path) for name, path in places.items()}
    monkeypatch.setattr(_sources, "_own_modules", lambda: found)
    return places


def digests(kernel_class):
    return [(one.name, one.sha256) for one in _sources.sources(kernel_class)]


def test_a_new_kernel_beside_others_leaves_them_alone(copied):
    before = {name: digests(one) for name, one in FAMILIES.items()}
    gemm = copied["kernel_api.providers.cutedsl.gemm"]
    gemm.write_text(gemm.read_text().replace("sm80,", "new, sm80,").replace('["', '["new", "'))
    cutedsl = copied["kernel_api.providers.cutedsl"]
    cutedsl.write_text(cutedsl.read_text().replace("import gemm,", "import attention, gemm,"))
    for package, name in (
        ("providers.cutedsl.gemm", "new"),
        ("providers.cutedsl", "attention"),
        ("implementations.sm90", "new"),
        ("epilogue", "new"),
    ):
        path = copied[f"kernel_api.{package}"].with_name(f"{name}.py")
        path.write_text("from kernel_api.implementations.sm90 import new")
        _sources._own_modules()[f"kernel_api.{package}.{name}"] = str(path)
    assert {name: digests(one) for name, one in FAMILIES.items()} == before


@pytest.mark.parametrize(
    ("module", "changed", "same"),
    [
        ("implementations.sm90.mma", "Sm90Gemm", "Sm80Gemm"),
        ("implementations.common.rows", "Sm80RmsNorm", "Sm90Gemm"),
        ("providers.cutedsl.epilogue.lower", "Sm80Gemm", "TorchGemm"),
        ("providers.cutedsl.compiler", "Sm80RmsNorm", "TorchGemm"),
        ("providers.cutedsl", "Sm80RmsNorm", "TorchGemm"),
        ("providers.streams", "TorchGemm", None),
        ("epilogue.graph", "Sm90Gemm", "TorchGemm"),
        ("providers.reference.epilogue", "ReferenceGemm", "Sm80Gemm"),
    ],
)
def test_a_changed_module_changes_the_kernels_that_import_it(copied, module, changed, same):
    before = {name: digests(one) for name, one in FAMILIES.items()}
    path = copied[f"kernel_api.{module}"]
    path.write_text(path.read_text() + "\nCHANGED = 1\n")
    after = {name: digests(one) for name, one in FAMILIES.items()}
    assert after[changed] != before[changed]
    assert same is None or after[same] == before[same]


@pytest.mark.parametrize("folder", ["implementations", "providers", "epilogue", "stdlib"])
def test_import_statements_are_found_without_parsing_the_rest(folder):
    own = _sources._own_modules()
    files = [p for name, p in own.items() if name.startswith(f"kernel_api.{folder}")]
    if folder == "stdlib":
        files = sorted(Path(os.__file__).parent.glob("*.py"))[:60]
    for path in files:
        data = Path(path).read_bytes()
        expected = set(_sources._imports(_sources._parsed(data), "a.b.c"))
        assert set(_sources._imports(_sources._import_statements(data), "a.b.c")) >= expected


@pytest.mark.parametrize(
    "source",
    [
        "from a import (b,  # )\n    c)\nimport d",
        "from a \\\n    import b",
        "import a; from b import c",
        "if x: import a\nelse: import b",
        '"""\n""" ; import a; """\n"""',
        "from .import a",
        "from a import(b)",
        "x = 1\r\nimport a\r\n",
        "from a\fimport b",
        "def f():\n    try:\n        import a.b as c\n    except E:\n        import d.e\n",
        "x = '''\nfrom a import (\n'''\nimport b",
        "match x:\n    case 1:\n        from a import *",
        "important = 1",
    ],
)
def test_no_import_statement_is_missed(source):
    expected = set(_sources._imports(ast.parse(source), "a.b"))
    found = set(_sources._imports(_sources._import_statements(source.encode()), "a.b"))
    assert found >= expected


def test_a_class_of_the_general_machinery_has_none():
    assert _sources.sources(ka.Kernel) is None
    assert _known_sources.sources(ka.Kernel) is None
    assert fingerprint(ka.Kernel) is None


# Of others -------------------------------------------------------------------------------

KERNEL = "import kernel_api as ka\n{imports}\nclass Kernel(ka.Kernel):\n    {body}\n"


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Writes a package, with parts beside the kernel, and gives the kernel's class."""
    monkeypatch.syspath_prepend(str(tmp_path))
    name = f"others_{tmp_path.name}".replace("-", "_")

    def make(imports="", body="pass", init="", **parts):
        files = {"__init__": init, "kernel": KERNEL.format(imports=imports, body=body), **parts}
        for file, text in files.items():
            path = tmp_path / name / f"{file}.py"
            path.parent.mkdir(exist_ok=True, parents=True)
            path.write_text(text.replace("PACKAGE", name))
        importlib.invalidate_caches()
        return importlib.import_module(f"{name}.kernel").Kernel

    yield make
    for module in [n for n in sys.modules if n.startswith(name)]:
        del sys.modules[module]


def others(kernel_class):
    """Files that are in, those of packages by their folders."""
    own = set(_sources.own_files())
    paths = [Path(one.path) for one in _sources.sources(kernel_class) if one.path not in own]
    return {p.stem if p.stem != "__init__" else p.parent.name.partition("_")[0] for p in paths}


def test_an_init_that_registers_its_siblings_does_not_make_them_one(package):
    found = package(init="from PACKAGE import kernel, other", other="X = 1")
    assert others(found) == {"others", "kernel"}


def test_what_an_init_uses_itself_is_in(package):
    init = "from PACKAGE import base, kernel\nfrom PACKAGE.unused import y\nX = base.X"
    assert others(package(init=init, base="X = 1", unused="y = 1")) == {"others", "kernel", "base"}


def test_a_package_may_call_what_it_has_from_a_module_as_the_module(package):
    parts = {
        "parts/__init__": "from .one import one\nfrom PACKAGE.parts import two\ntwo = two.two",
        "parts/one": "class one:\n    made = 1",
        "parts/two": "class two:\n    made = 2",
    }
    body = "made = parts.one.made, parts.two.made"
    found = package("from PACKAGE import parts", body, **parts)
    assert others(found) == {"others", "kernel", "parts", "one", "two"}


def test_what_is_asked_of_an_init_is_in_from_where_it_has_it(package):
    parts = {
        "parts/__init__": "from .one import x\nfrom .two import y\n__all__ = ['x', 'y']",
        "parts/one": "x = 1",
        "parts/two": "y = 1",
    }
    assert others(package("from PACKAGE.parts import x", **parts)) == {
        "others", "kernel", "parts", "one",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("imports", "body"),
    [
        ("from PACKAGE import parts", "x = parts.x"),
        ("import PACKAGE.parts", "x = PACKAGE.parts.x"),
        ("import PACKAGE.parts as p", "x = p.x"),
    ],
)
def test_of_a_package_that_is_imported_what_is_used_is_in(package, imports, body):
    parts = {
        "parts/__init__": "from .one import x\nfrom .two import y",
        "parts/one": "x = 1",
        "parts/two": "y = 1",
    }
    found = package(imports, body, **parts)
    assert others(found) == {"others", "kernel", "parts", "one"}


def test_a_package_that_is_passed_around_is_in_as_a_whole(package):
    parts = {"parts/__init__": "", "parts/one": "x = 1", "parts/two": "y = 1"}
    found = package("from PACKAGE import parts", "x = vars(parts)", **parts)
    assert others(found) == {"others", "kernel", "parts", "one", "two"}


def test_where_modules_are_imported_by_name_all_may_be(package):
    body = "def f(self): return importlib.import_module('PACKAGE.one')"
    found = package("import importlib", body, one="x = 1", two="y = 1")
    assert others(found) == {"others", "kernel", "one", "two"}
    assert set(_sources.own_files()) <= {one.path for one in _sources.sources(found)}


@pytest.mark.parametrize("hides", [False, True])
def test_what_a_package_makes_up_may_be_anything_in_it(package, hides):
    made_up = "def __getattr__(n): return 1"
    if hides:  # from checkers of types
        made_up = f"from typing import TYPE_CHECKING\nif not TYPE_CHECKING:\n    {made_up}"
    parts = {"parts/__init__": made_up, "parts/one": "x = 1"}
    assert "one" in others(package("from PACKAGE.parts import x", **parts))


@pytest.mark.parametrize(
    ("imports", "body", "module"),
    [
        ("", "x = ka.epilogue.relu", "epilogue.functions"),
        ("from kernel_api import epilogue as ep", "x = ep.relu", "epilogue.functions"),
        ("from kernel_api.epilogue import relu", "x = relu", "epilogue.functions"),
        ("", "def f(s): return ka.providers.cutedsl.compiler.X", "providers.cutedsl.compiler"),
        (
            "",
            "def f(self):\n        from kernel_api.implementations.sm80.mma import x",
            "implementations.sm80.mma",
        ),
    ],
)
def test_what_others_take_from_us_is_in(package, imports, body, module):
    found = {one.path for one in _sources.sources(package(imports, body))}
    assert _sources._own_modules()[f"kernel_api.{module}"] in found
    assert _sources._own_modules()["kernel_api.implementations.sm90.gemm"] not in found


# What an earlier process found -----------------------------------------------------------


@pytest.fixture
def known(cache_directory, monkeypatch):
    """A class whose sources are known, and the file that says so."""
    found = FAMILIES["Sm80RmsNorm"]
    expected = _known_sources.sources(found)
    (file,) = (DiskCache.open().root / "sources").iterdir()
    return found, expected, file


def no_walk(kernel_class):
    raise AssertionError("imports were followed")


def test_what_is_known_is_not_looked_for_again(known, monkeypatch):
    kernel_class, expected, _ = known
    assert expected == _sources.sources(kernel_class)
    monkeypatch.setattr(_sources, "sources", no_walk)
    assert _known_sources.sources(kernel_class) == expected


@pytest.mark.parametrize(
    "damage",
    [
        "",
        "null",
        "{}",
        '{"digest": "", "sources": []}',
        "shorter",
        pytest.param("[" * 10**5, id="deep"),
    ],
)
def test_what_is_damaged_is_looked_for_again(known, damage):
    kernel_class, expected, file = known
    fields = json.loads(file.read_text())
    if damage == "shorter":
        fields["sources"].pop()
        damage = json.dumps(fields)
    file.write_text(damage)
    assert _known_sources.sources(kernel_class) == expected
    assert _known_sources._read(file) == expected


def test_a_changed_source_is_looked_for_again(known, monkeypatch):
    kernel_class = known[0]
    content = _sources._content

    def changed(path):
        data, sha256, time = content(path)
        return data, "changed" if path.endswith("hadamard.py") else sha256, time

    monkeypatch.setattr(_sources, "_content", changed)
    monkeypatch.setattr(_sources, "sources", lambda kernel_class: [])
    assert _known_sources.sources(kernel_class) == []


def test_nothing_is_kept_where_there_is_no_cache(cache_directory, monkeypatch):
    monkeypatch.setenv("KERNEL_API_DISABLE_CACHE", "1")
    found = FAMILIES["Sm80RmsNorm"]
    assert _known_sources.sources(found) == _sources.sources(found)
    assert not cache_directory.exists()

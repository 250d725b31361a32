"""Libraries: artifact.export, kernel_api.load."""

import errno
import json
import os
import shutil
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

import pytest
import torch
from support.data import arguments_for
from support.kernels import cpu_kernel
from support.libraries import (
    arguments,
    cut,
    damaged,
    flip,
    kernels,
    registered_code,
    write_libraries,
)

import kernel_api as ka
from kernel_api import bundle
from kernel_api.errors import (
    ArgumentError,
    ArtifactError,
    DeviceError,
    LibraryError,
    LinkError,
    SignatureError,
    TargetError,
    UnsupportedError,
)
from kernel_api.providers.cutedsl import linking
from kernel_api.targets import target


@pytest.fixture(scope="module", autouse=True)
def registered():
    with registered_code() as provider:
        yield provider


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_libraries(tmp_path_factory.mktemp("libraries"))


@pytest.fixture
def library(folder, tmp_path):
    return shutil.copy(folder / "small.so", tmp_path / "gemm.so")


# Export and load --------------------------------------------------------------------------


def test_what_was_exported_is_loaded_as_it_was(library):
    kernel = kernels()[0]
    compiled = kernel.compile(arguments(), cc=90)
    loaded = ka.load(library)
    assert loaded.kernel == kernel
    assert (loaded.signature, loaded.target) == (compiled.signature, compiled.target)
    assert loaded.resources == compiled.resources
    assert loaded.compiled_obj(1, 2, 3) == 3
    loaded.check(kernel, arguments(), target(90))


@pytest.mark.parametrize("name", ["gemm.so", "./gemm.so", Path("gemm.so")], ids=repr)
def test_a_library_of_the_current_folder_is_loaded_and_stays_itself_elsewhere(
    library, monkeypatch, tmp_path_factory, name
):
    monkeypatch.chdir(Path(library).parent)
    loaded = ka.load(name)
    assert loaded.compiled_obj(1, 2, 3) == 3
    monkeypatch.chdir(tmp_path_factory.mktemp("elsewhere"))
    assert loaded.export("again.so").read_bytes() == Path(library).read_bytes()


def test_the_manifest_is_inside_and_beside(folder):
    beside = (folder / "small.so.json").read_text()
    assert beside.encode() in (folder / "small.so").read_bytes()
    found = json.loads(beside)
    assert found["kernel"]["kernel_name"] == kernels()[0].metadata.kernel_name
    assert found["target"] == "sm_90"
    assert found["signature"][0] == "gemm"
    assert found["epilogue"] is None
    assert found["fingerprint"]["kernel-api"] == ka.__version__
    assert found["resources"]["registers"] == 32
    assert found["cuda"] == linking.CODE_FILES.cuda_version() >= 12


def test_a_library_can_be_renamed_and_exported_again(library, tmp_path):
    again = ka.load(library).export(tmp_path / "again.so")
    assert again.read_bytes() == Path(library).read_bytes()
    assert ka.load(again).kernel == kernels()[0]


def test_a_library_that_has_another_one_in_its_place_is_not_exported_as_that(library, tmp_path):
    loaded = ka.load(library)
    other = kernels()[1]
    other.compile(arguments(), cc=90).export(library)
    for change, words in ((None, f"{other.metadata.kernel_name} for sm_90 has"), (os.unlink, "No")):
        if change is not None:
            change(library)
        with pytest.raises(LinkError, match=rf"gemm\.so, which is not there any more: .*{words}"):
            loaded.export(tmp_path / "again.so")
        with pytest.raises(LinkError, match="which is not there any more"):
            bundle.name_of(loaded)
    assert not (tmp_path / "again.so").exists()


@pytest.mark.parametrize("name", ["gemm", "gemm.o", "gemm.so.1", ""])
def test_a_library_is_called_as_the_loader_wants_it(library, tmp_path, name):
    artifact = kernels()[0].compile(arguments(), cc=90)
    with pytest.raises(ArgumentError, match=r"; libraries are loaded from .* end in \.so, such as"):
        artifact.export(tmp_path / name if name else name)
    if name:
        os.rename(library, tmp_path / name)
        with pytest.raises(LibraryError, match=r"is a library, but .* end in \.so; rename it"):
            ka.load(tmp_path / name)


def test_export_keeps_what_is_no_file(tmp_path):
    os.mkfifo(tmp_path / "pipe.so")
    with pytest.raises(ArgumentError, match=r"pipe\.so cannot be written: it is no file"):
        kernels()[0].compile(arguments(), cc=90).export(tmp_path / "pipe.so")
    assert (tmp_path / "pipe.so").is_fifo()


def test_export_replaces_a_library_and_leaves_nothing_else(library, tmp_path):
    kernels()[1].compile(arguments(), cc=90).export(library)
    assert ka.load(library).kernel == kernels()[1]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["gemm.so", "gemm.so.json"]


def test_export_without_a_linker_says_what_is_missing(monkeypatch, tmp_path):
    artifact = kernels()[2].compile(arguments(), cc=86)
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    linking.toolchain.cache_clear()
    artifact.file = None
    artifact.compiled_obj = b"code"
    with pytest.raises(LinkError, match="no linker here: none of cc, gcc, clang is on PATH"):
        artifact.export(tmp_path / "gemm.so")
    linking.toolchain.cache_clear()
    assert not list(tmp_path.iterdir())


def test_export_says_what_the_linker_said(tmp_path):
    artifact = kernels()[2].compile(arguments(), cc=87)
    artifact.file, artifact.compiled_obj = None, b"no object file"
    with pytest.raises(LinkError, match=r"cc failed: .*(not recognized|format)"):
        artifact.export(tmp_path / "gemm.so")


def test_export_without_room_for_temporary_files_says_what_to_do(monkeypatch, tmp_path):
    def full(*args, **options):
        raise OSError(errno.ENOSPC, "No space left on device")

    artifact = kernels()[2].compile(arguments(), cc=89)
    artifact.file, artifact.compiled_obj = None, b"code"
    monkeypatch.setattr(tempfile, "mkdtemp", full)
    with pytest.raises(LinkError, match="No space left on device; make room, or set TMPDIR"):
        artifact.export(tmp_path / "gemm.so")


def test_export_of_what_is_no_machine_code_is_refused(tmp_path):
    kernel = cpu_kernel()
    artifact = kernel.compile(arguments_for(kernel, 4, 4, 4))
    with pytest.raises(LinkError, match="is not compiled to machine code"):
        artifact.export(tmp_path / "gemm.so")


def test_export_to_where_nothing_can_be_written_is_an_argument_error(tmp_path):
    artifact = kernels()[0].compile(arguments(), cc=90)
    with pytest.raises(ArgumentError, match="cannot be written: No such file or directory"):
        artifact.export(tmp_path / "missing" / "gemm.so")


# Files that are not good ------------------------------------------------------------------


@pytest.mark.parametrize("where", [0.001, 0.1, 0.4, 0.5, 0.6, 0.8, 0.95, 1.0])
def test_a_flipped_byte_is_found(library, where):
    damaged(library, flip(where))
    with pytest.raises(LibraryError, match=r"gemm\.so is "):
        ka.load(library)


def test_a_flipped_bit_of_the_header_is_found(library):
    whole = Path(library).read_bytes()
    for bit in range(8 * 64):
        data = bytearray(whole)
        data[bit // 8] ^= 1 << bit % 8
        Path(library).write_bytes(data)
        with pytest.raises(LibraryError, match=r"gemm\.so is "):
            ka.load(library)


@pytest.mark.parametrize("share", [0.0, 0.0001, 0.3, 0.9, 0.999])
def test_a_truncated_file_is_no_complete_library(library, share):
    damaged(library, cut(share))
    with pytest.raises(LibraryError, match=r"gemm\.so is not a complete shared library: its? "):
        ka.load(library)


def test_something_behind_the_library_is_damage(library):
    damaged(library, lambda data: data.extend(b"more"))
    with pytest.raises(LibraryError, match="is damaged: its bytes are not those that the manifest"):
        ka.load(library)


def test_a_library_of_others_carries_no_manifest():
    with pytest.raises(LibraryError, match=r"is not made by kernel-api: .* carries no manifest"):
        ka.load(torch._C.__file__)


def test_other_files_are_named_errors(tmp_path):
    with pytest.raises(LibraryError, match=r"missing\.so cannot be read: No such file"):
        ka.load(tmp_path / "missing.so")
    with pytest.raises(LibraryError, match=r"'gemm\\x00\.so' cannot be read: embedded null"):
        ka.load("gemm\0.so")
    (tmp_path / "text.so").write_text("text")
    with pytest.raises(LibraryError, match="not a complete shared library: it is no ELF file"):
        ka.load(tmp_path / "text.so")
    assert issubclass(LibraryError, ArtifactError)


def test_another_library_of_a_path_is_loaded_where_one_was_loaded_before(folder, tmp_path):
    """The loader of the system takes a path that it knows for what it has loaded from it."""
    path, loaded = tmp_path / "kernel.so", []
    for name in ("small.so", "large90.so", "small.so"):
        shutil.copy(folder / name, tmp_path / "new.so")
        (tmp_path / "new.so").replace(path)
        loaded.append(ka.load(path))
    small, large, again = loaded
    assert small.kernel == again.kernel != large.kernel
    # What is compiled gives one more of its arguments with every kernel.
    assert [one.compiled_obj(1) for one in (small, again)] == [1, 1]
    assert large.compiled_obj(1, 2) == 2


# What an artifact refuses -----------------------------------------------------------------


def test_a_library_for_other_devices_than_those_here_is_refused(library, monkeypatch):
    monkeypatch.setattr("kernel_api.library.devices_here", lambda: [target(80), target(100)])
    with pytest.raises(TargetError, match="compiled for sm_90; the devices here are sm_80, sm_100"):
        ka.load(library)
    monkeypatch.setattr("kernel_api.library.devices_here", lambda: [target(80), target(90)])
    assert ka.load(library).target == target(90)


def test_wrong_signatures_targets_and_devices_are_named_before_anything_runs(library):
    artifact = ka.load(library)
    kernel = artifact.kernel
    with pytest.raises(UnsupportedError, match="the operands are on cpu; the kernel runs on cuda"):
        kernel.run(arguments("cpu"), artifact)
    with pytest.raises(DeviceError, match="A is a meta or fake tensor"):
        kernel.run(arguments(), artifact)
    with pytest.raises(DeviceError, match="A is a meta or fake tensor"):
        kernel.prepare(arguments(), artifact)
    batched = arguments_for(kernel, 64, 64, 64, 2, device="meta")
    with pytest.raises(SignatureError, match="compile for them"):
        artifact.check(kernel, batched, target(90))
    with pytest.raises(TargetError, match="compiled for sm_90, the device is sm_80"):
        artifact.check(kernel, arguments(), target(80))


def test_a_library_for_a_newer_driver_than_the_one_here_is_refused(library, monkeypatch):
    needed = linking.CODE_FILES.cuda_version()
    monkeypatch.setattr("kernel_api.library.driver_major", lambda: needed - 1)
    text = f"linked with the runtime of CUDA {needed}, and the driver here is made for CUDA"
    with pytest.raises(LibraryError, match=text):
        ka.load(library)
    monkeypatch.setattr("kernel_api.library.driver_major", lambda: needed)
    assert ka.load(library).compiled_obj(1) == 1


# Without the compiler ---------------------------------------------------------------------


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    """A kernel of the DSL, and one that takes a workspace, exported and packed."""
    folder = tmp_path_factory.mktemp("real")
    args = ka.GemmArguments(
        *(torch.empty(256, 256, dtype=torch.float16, device="meta") for _ in "ABC")
    )
    offered = ka.get_kernels(args, cc="sm_90a", providers=["cutedsl"])
    plain = next(k for k in offered if not k.takes_more and k.metadata.targets == ("sm_80",))
    plain.compile(args, cc=90).export(folder / "plain.so")
    more = next((k for k in offered if k.takes_more), None)
    if more is not None:
        more.compile(args, cc=90).export(folder / "more.so")
    bundle.pack([folder], folder / "bundle")
    return folder


_BLOCKED = """
    import importlib.abc, importlib.util, os, sys, time
    sys.path[:] = {path!r}

    class Blocked(importlib.abc.MetaPathFinder):
        def find_spec(self, name, path=None, target=None):
            if name.partition(".")[0] in ("cutlass", "nvidia_cutlass_dsl"):
                raise ModuleNotFoundError(name)

    sys.meta_path.insert(0, Blocked())
    import torch, tvm_ffi
    import kernel_api as ka

    folder = {folder!r}
    A, B, out = (torch.ones(256, 256, dtype=torch.float16) for _ in "ABC")
    on_cpu = ka.GemmArguments(A, B, out)
    args = ka.GemmArguments(*(t.to("meta") for t in (A, B, out)))
    ka.load(folder + "/plain.so")
    for name in sorted(n for n in os.listdir(folder) if n.endswith(".so")):
        started = time.perf_counter()
        artifact = ka.load(os.path.join(folder, name))
        print("loaded", name, round(1e3 * (time.perf_counter() - started), 2), "ms",
              artifact.resources.registers > 0)
        for wrong in (on_cpu, args):
            try:
                artifact.kernel.run(wrong, artifact)
            except ka.errors.KernelApiError as error:
                print(type(error).__name__)
        # The library checks its arguments itself, on any machine: rank, type, device.
        kernel = artifact.kernel
        scalars = kernel.scalars(132)
        try:
            artifact.compiled_obj(A[0], B, out, *([(), 0] if kernel.takes_more else []), *scalars)
        except (ValueError, TypeError) as error:
            print("expected ndim=2" in str(error), "Tensor([n0, n1], float16)" in str(error))
    os.environ["KERNEL_API_BUNDLE"] = folder + "/bundle"
    first = ka.get_kernels(args, cc=90)[0]
    print(type(first).provider_name(), first.compile(args, cc=90).target)
    print([a.family for a in ka.explain(args, cc=90).accepted if a.provider == "cutedsl"])
    print(any(n.partition(".")[0] == "cutlass" for n in sys.modules))
"""


@pytest.mark.compile
def test_libraries_and_bundles_do_without_the_compiler(real):
    code = textwrap.dedent(_BLOCKED).format(path=sys.path, folder=str(real))
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200)
    assert ran.returncode == 0, ran.stderr
    print(ran.stdout)
    lines = ran.stdout.splitlines()
    libraries = sorted(n for n in os.listdir(real) if n.endswith(".so"))
    for name in libraries:
        at = next(i for i, line in enumerate(lines) if line.startswith(f"loaded {name} "))
        assert lines[at].endswith("True")
        assert lines[at + 1 : at + 4] == ["UnsupportedError", "DeviceError", "True True"]
    assert lines[-3].startswith("bundle sm_90")
    assert lines[-2:] == ["[]", "False"]

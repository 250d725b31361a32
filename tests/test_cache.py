"""The cache on disk behind compile: kernel_api._disk_cache, _manifest."""

import errno
import json
import logging
import os
import random
import signal
import subprocess
import sys
import textwrap
import time
import warnings
from pathlib import Path

import pytest
import torch
from support.code_kernels import LOG, CodeGemm, SlowGemm, compilations, machine_code
from support.data import arguments_for
from support.kernels import kernels_of

import kernel_api as ka
from kernel_api import _compile_cache, _disk_cache
from kernel_api._disk_cache import DiskCache
from kernel_api.errors import CacheWarning

#: The issue's number is 40; a handful keeps this file fast.
KILLS = int(os.environ.get("KERNEL_API_TEST_KILLS", "4"))

#: Processes and kernels; the issue's numbers are 16 and 50.
RACERS, RACED = map(int, os.environ.get("KERNEL_API_TEST_RACE", "3x3").split("x"))


@pytest.fixture(autouse=True)
def log(cache_directory, monkeypatch):
    monkeypatch.setenv(LOG, str(cache_directory.parent / "compilations"))


def one_kernel(kernel_class=CodeGemm):
    return kernels_of(kernel_class)[0]


def arguments(kernel):
    return arguments_for(kernel, 64, 64, 64, device="meta")


def compiled(kernel=None, cc=90):
    """Compile as a process that has compiled nothing yet."""
    _compile_cache.clear()
    kernel = kernel or one_kernel()
    return kernel.compile(arguments(kernel), cc=cc)


def entry(directory):
    (found,) = (directory / "kernels").iterdir()
    return found


def run_python(code, *arguments):
    """Run code in a fresh interpreter that imports what this one can."""
    boot = f"import sys; sys.path[:] = {sys.path!r}\n"
    return subprocess.Popen(
        [sys.executable, "-c", boot + textwrap.dedent(code), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def output_of(process):
    out, err = process.communicate(timeout=250)
    assert process.returncode == 0, err
    return out


# Hits ------------------------------------------------------------------------------------


def test_what_is_on_disk_is_not_compiled_again(cache_directory):
    first = compiled()
    second = compiled()
    assert len(compilations()) == 1
    assert second is not first
    assert (second.kernel, second.signature, second.target) == (
        first.kernel,
        first.signature,
        first.target,
    )
    assert second.resources == first.resources
    assert second.compiled_obj(1, 2, 3) == 3


def test_an_entry_is_a_library_with_its_manifest_readable_by_nobody_else(cache_directory):
    compiled()
    assert sorted(p.name for p in entry(cache_directory).iterdir()) == [
        "kernel.so",
        "manifest.json",
    ]
    for folder in (cache_directory, cache_directory / "kernels", entry(cache_directory)):
        assert folder.stat().st_mode & 0o777 == 0o700
    manifest = json.loads((entry(cache_directory) / "manifest.json").read_text())
    assert manifest["kernel"]["kernel_name"] == one_kernel().metadata.kernel_name
    assert manifest["target"] == "sm_90"
    assert manifest["fingerprint"]["kernel-api"] == ka.__version__


def test_other_kernels_signatures_and_targets_have_entries_of_their_own(cache_directory):
    small, large = kernels_of(CodeGemm)[:2]
    compiled(small), compiled(large), compiled(small, cc=80)
    small.compile(arguments_for(small, 64, 64, 64, 2, device="meta"), cc=90)
    assert len(list((cache_directory / "kernels").iterdir())) == 4


def test_a_kernel_that_cannot_be_imported_by_name_is_not_kept(cache_directory):
    class Local(CodeGemm):
        pass

    compiled(one_kernel(Local)), compiled(one_kernel(Local))
    assert len(compilations()) == 2
    assert not cache_directory.exists()


def test_disabled_means_that_nothing_is_read_or_written(cache_directory, monkeypatch):
    monkeypatch.setenv("KERNEL_API_DISABLE_CACHE", "1")
    compiled(), compiled()
    assert len(compilations()) == 2
    assert not cache_directory.exists()


def test_the_directory_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("KERNEL_API_CACHE_DIR", "/somewhere")
    assert _disk_cache.directory() == Path("/somewhere")
    monkeypatch.delenv("KERNEL_API_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert _disk_cache.directory() == tmp_path / "kernel_api"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")  # which the specification says to ignore
    monkeypatch.setenv("HOME", str(tmp_path))
    assert _disk_cache.directory() == tmp_path / ".cache" / "kernel_api"


# Entries that are not good ----------------------------------------------------------------


def flip(path, at):
    data = bytearray(path.read_bytes())
    data[at] ^= 0x20
    path.write_bytes(data)


def _flipped(name, where):
    def damage(folder):
        size = (folder / name).stat().st_size
        flip(folder / name, int(where * (size - 1)))

    return damage


def _truncated(name):
    return lambda folder: os.truncate(folder / name, (folder / name).stat().st_size // 2)


def _renamed(folder):
    folder.rename(folder.with_name("0" * 64))
    folder.mkdir()


def _of_another_kernel(folder):
    """The entry of another key, whole, under this key's name."""
    kernel = kernels_of(CodeGemm)[1]
    before = set(folder.parent.iterdir())
    compiled(kernel)
    (other,) = set(folder.parent.iterdir()) - before
    for name in ("kernel.so", "manifest.json"):
        (folder / name).write_bytes((other / name).read_bytes())


DAMAGES = {
    **{f"byte {w} of {n}": _flipped(n, w) for n in ("kernel.so", "manifest.json")
       for w in (0, 0.3, 0.5, 0.7, 0.999)},
    "truncated library": _truncated("kernel.so"),
    "truncated manifest": _truncated("manifest.json"),
    "empty library": lambda folder: os.truncate(folder / "kernel.so", 0),
    "no library": lambda folder: (folder / "kernel.so").unlink(),
    "no manifest": lambda folder: (folder / "manifest.json").unlink(),
    "manifest of another format": lambda folder: (folder / "manifest.json").write_text(
        (folder / "manifest.json").read_text().replace('"format": 1', '"format": 2')),
    "no JSON object": lambda folder: (folder / "manifest.json").write_text("[]"),
    "other key": _of_another_kernel,
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_or_foreign_entry_is_moved_aside_and_compiled_again(
    damage, cache_directory, caplog
):
    compiled()
    folder = entry(cache_directory)
    damage(folder)
    before = len(compilations())
    with caplog.at_level(logging.WARNING, logger="kernel_api"):
        assert compiled().compiled_obj == machine_code()
    assert "moved aside" in caplog.text
    assert len(compilations()) == before + 1
    assert len(list((cache_directory / "aside").iterdir())) == 1
    assert compiled().compiled_obj(1) == 1  # the new entry is good
    assert len(compilations()) == before + 1


def test_a_library_for_a_newer_driver_is_compiled_again(monkeypatch, caplog):
    """As it would be where several machines share a directory."""
    compiled()
    with (
        monkeypatch.context() as patch,
        caplog.at_level(logging.WARNING, logger="kernel_api"),
    ):
        patch.setattr("kernel_api.library.driver_major", lambda: 11)
        assert compiled().compiled_obj == machine_code()
    assert "and the driver here is made for CUDA 11" in caplog.text
    assert compiled().compiled_obj(1) == 1


# Directories that are not good ------------------------------------------------------------


@pytest.fixture(autouse=True)
def nothing_told():
    _disk_cache._told.clear()


def refused(match):
    with pytest.warns(CacheWarning, match=match):
        assert compiled().compiled_obj == machine_code()
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # said once
        compiled()
    assert len(compilations()) == 2


def test_a_directory_that_others_can_write_is_refused(cache_directory):
    cache_directory.mkdir(mode=0o700)
    cache_directory.chmod(0o777)
    refused("can be written by others .mode 777.; chmod it to 700; kernels compile without")


def test_a_directory_of_another_user_is_refused(cache_directory, monkeypatch):
    cache_directory.mkdir(mode=0o700)
    uid = os.geteuid()
    monkeypatch.setattr("os.geteuid", lambda: uid + 1)
    refused(f"is owned by user {uid}, not by {uid + 1}")


def test_a_directory_that_cannot_be_made_is_a_warning(cache_directory):
    cache_directory.write_text("a file")
    refused("cannot be used: .*(Not a directory|File exists)")


def test_without_a_home_folder_there_is_a_warning_and_no_cache(homeless):
    refused("there is no home folder to keep a cache in; set KERNEL_API_CACHE_DIR to a folder")


def test_without_a_home_folder_nothing_is_tuned_and_calls_are_served(homeless):
    A = torch.ones(4, 4)
    with pytest.warns(CacheWarning, match="there is no home folder"):
        assert ka.tuned(ka.GemmArguments(A, A, torch.empty(4, 4))) is None
    assert torch.equal(ka.ops.gemm(A, A), A @ A)


def test_a_relative_directory_stays_the_folder_that_it_was_at_first(tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KERNEL_API_CACHE_DIR", "relative_cache")
    compiled()
    monkeypatch.chdir("elsewhere")
    assert compiled().compiled_obj(1) == 1
    assert len(compilations()) == 1
    assert _disk_cache.directory() == tmp_path / "relative_cache"


def test_a_directory_relative_to_a_folder_that_is_gone_is_a_warning(tmp_path, monkeypatch):
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    monkeypatch.setenv("KERNEL_API_CACHE_DIR", "relative_to_what_is_gone")
    refused("relative to the folder .* which is gone; set it to an absolute path")


def test_entries_that_cannot_be_looked_for_are_compiled(cache_directory, monkeypatch, caplog):
    """A folder that this user may not search, say."""
    compiled()
    exists = Path.exists

    def denied(path, **how):
        if path.parent.name == "kernels":
            raise PermissionError(13, "Permission denied", str(path))
        return exists(path, **how)

    monkeypatch.setattr(Path, "exists", denied)
    with caplog.at_level(logging.WARNING, logger="kernel_api"):
        assert compiled().compiled_obj == machine_code()
    assert "kernels cannot be looked into: [Errno 13] Permission denied" in caplog.text
    assert not DiskCache.open().has(entry(cache_directory).name)


def test_an_entry_that_cannot_be_written_is_a_log_line(cache_directory, monkeypatch, caplog):
    def full(self, key, files):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(DiskCache, "add", full)
    with caplog.at_level(logging.WARNING, logger="kernel_api"):
        assert compiled().compiled_obj == machine_code()
    assert "is not kept on disk: [Errno 28] No space left on device" in caplog.text


# Several processes ------------------------------------------------------------------------

_COMPILE = """
    from support.code_kernels import SlowGemm
    from support.data import arguments_for
    from support.kernels import kernels_of

    for kernel in kernels_of(SlowGemm)[:int(sys.argv[1])]:
        artifact = kernel.compile(arguments_for(kernel, 64, 64, 64, device="meta"), cc=90)
        print(artifact.resources.registers)
"""


def test_processes_that_race_compile_each_key_once(cache_directory):
    processes = [run_python(_COMPILE, str(RACED)) for _ in range(RACERS)]
    kernels = kernels_of(SlowGemm)[:RACED]
    assert len(kernels) == RACED
    for process in processes:
        assert output_of(process).split() == ["32"] * len(kernels)
    names = [line.split()[0] for line in compilations()]
    assert sorted(names) == sorted(kernel.metadata.kernel_name for kernel in kernels)
    every_entry_is_found_damaged_after_a_flip(DiskCache.at(cache_directory), RACED)


def every_entry_is_found_damaged_after_a_flip(cache, count):
    chosen = random.Random(5)
    good = list(cache.entries())
    assert [one.reason for one in good] == [None] * count
    for one in good:
        path = chosen.choice(list(one.path.iterdir()))
        flip(path, chosen.randrange(path.stat().st_size))
    assert [cache.load(one.path.name) for one in good] == [None] * count
    assert len(list((cache.root / "aside").iterdir())) == count


_WRITE_FOREVER = """
    import itertools, secrets
    from pathlib import Path
    from kernel_api._disk_cache import DiskCache
    from kernel_api._manifest import Identity, Manifest

    cache = DiskCache.at(Path(sys.argv[1]))
    print("writing", flush=True)
    for number in itertools.count():
        identity = Identity({"kernel_name": secrets.token_hex(4)}, [], "sm_90", {})
        manifest, data = Manifest.unsealed(identity, None).sealed(secrets.token_bytes(1 << 20))
        cache.add(identity.key, {"kernel.o": data, "manifest.json": manifest.text.encode()})
"""


def test_a_writer_that_is_killed_leaves_no_entry_that_is_not_whole(cache_directory):
    chosen = random.Random(11)
    for _ in range(KILLS):
        process = run_python(_WRITE_FOREVER, str(cache_directory))
        assert process.stdout.readline() == "writing\n"
        time.sleep(chosen.uniform(0.01, 0.2))
        process.send_signal(signal.SIGKILL)
        process.communicate()
    cache = DiskCache.at(cache_directory)
    found = list(cache.entries())
    assert found
    assert [one.reason for one in found if one.reason] == []
    cache.sweep(0)
    assert not list(cache.entries_at.glob("tmp-*"))


def test_threads_load_and_compile_different_kernels_at_once(cache_directory):
    from concurrent.futures import ThreadPoolExecutor

    different = kernels_of(CodeGemm)[:4]
    kernels = different * 4
    _compile_cache.clear()
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda k: k.compile(arguments(k), cc=90), kernels))
    assert len(set(map(id, found))) == len(different) == len(compilations())


# The compiler -----------------------------------------------------------------------------

_WARM_START = """
    import json, time, torch, tvm_ffi
    import kernel_api as ka
    from kernel_api.metadata import GemmOperandsMetadata

    made = []
    check = GemmOperandsMetadata.__post_init__
    GemmOperandsMetadata.__post_init__ = lambda self: made.append(1) or check(self)

    A, B, out = (torch.empty(256, 256, dtype=torch.float16, device="meta") for _ in range(3))
    args = ka.GemmArguments(A, B, out)
    started = time.perf_counter()
    kernel = ka.get_kernels(args, cc=80, providers=["cutedsl"])[0]
    asked = time.perf_counter()
    artifact = kernel.compile(args, cc=80)
    done = time.perf_counter()
    of_query = len(made)
    families = ka.providers.cutedsl.CuTeDSLProvider.families()
    every = [o for f in families if f.arguments is ka.GemmArguments for o in f.operand_variants()]
    try:
        artifact.compiled_obj(*(torch.empty_like(t, device="cpu") for t in (A, B, out)))
    except ValueError as error:
        refusal = str(error)
    print(json.dumps({
        "ms to kernels, to an artifact": [1e3 * (asked - started), 1e3 * (done - asked)],
        "file": str(artifact.file),
        "loaded": [n for n in ("cutlass", "kernel_api.explanation") if n in sys.modules],
        "variants": [of_query, len(every)],
        "refusal": refusal,
    }))
"""


@pytest.mark.compile
def test_a_warm_start_loads_no_compiler_and_makes_only_the_variants_that_it_needs(cache_directory):
    kinds = {"dtype": torch.float16, "device": "meta"}
    args = ka.GemmArguments(*(torch.empty(256, 256, **kinds) for _ in range(3)))
    kernel = ka.get_kernels(args, cc=80, providers=["cutedsl"])[0]
    _compile_cache.clear()
    kernel.compile(args, cc=80)
    found = json.loads(output_of(run_python(_WARM_START)))
    print(found)
    assert found["file"] == str(entry(cache_directory) / "kernel.so")
    assert found["loaded"] == []
    made, every = found["variants"]
    assert made < every / 3
    assert "expected device_type=cuda" in found["refusal"]


def test_an_entry_that_the_system_cannot_open_now_stays_where_it_is(
    cache_directory, caplog, monkeypatch
):
    """It may be good, and other processes load it."""
    compiled()
    folder = entry(cache_directory)

    def out_of_files(path):
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING, logger="kernel_api"):
        patch.setattr(Path, "read_bytes", out_of_files)
        patch.setattr(Path, "read_text", lambda path, *how: out_of_files(path))
        assert compiled().compiled_obj == machine_code()
    assert (
        "cannot be read, so the kernel is compiled: [Errno 24] Too many open files" in caplog.text
    )
    assert folder.is_dir()
    assert not (cache_directory / "aside").exists()

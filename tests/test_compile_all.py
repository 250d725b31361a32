"""Compilation by several processes: kernel_api.compile_all."""

import errno
import logging
import os
import subprocess
import sys
import tempfile
import textwrap

import pytest
import torch
from support.code_kernels import (
    LOG,
    CodeGemm,
    EndlessGemm,
    ExitingGemm,
    RaisingGemm,
    SegfaultingGemm,
    SlowGemm,
    compilations,
)
from support.data import arguments_for
from support.kernels import kernels_of

import kernel_api as ka
from kernel_api import _compile_cache, _description, _fork_server, parallel
from kernel_api.arguments import EpilogueArguments, ScaledOperand, ScaleMode
from kernel_api.errors import (
    ArgumentError,
    BenchError,
    CompileError,
    CompilerKilledError,
    DeviceError,
    UnsupportedError,
)


@pytest.fixture(autouse=True)
def log(cache_directory, monkeypatch):
    monkeypatch.setenv(LOG, str(cache_directory.parent / "compilations"))
    _compile_cache.clear()


def of_one_layout(kernel_class):
    """One kernel for each tile."""
    return kernels_of(kernel_class)[:3]


def arguments(kernel):
    return arguments_for(kernel, 64, 64, 64, device="meta")


def test_artifacts_come_in_the_order_of_the_kernels_and_errors_in_their_place():
    classes = (ExitingGemm, SegfaultingGemm, RaisingGemm, CodeGemm)
    kernels = [of_one_layout(one)[0] for one in classes] + of_one_layout(CodeGemm)[1:]
    args = arguments(kernels[0])
    found = ka.compile_all(kernels, args, cc=90, workers=2)
    failed, made = found[:3], found[3:]
    assert all(type(one) is CompileError for one in failed)
    assert len(made) == 3 and all(type(one) is ka.CompiledArtifact for one in made)
    name = kernels[0].metadata.kernel_name
    assert str(failed[0]) == f"{name}: the compiler's process died (with exit code 7)"
    assert str(failed[1]).endswith("the compiler's process died (by SIGSEGV)")
    name = kernels[2].metadata.kernel_name
    assert str(failed[2]) == f"{name} does not compile: ValueError: no registers are left"
    for kernel, artifact in zip(kernels, found, strict=True):
        if isinstance(artifact, ka.CompiledArtifact):
            assert artifact.kernel == kernel
            assert artifact.compiled_obj(1, 2) == 2
            assert kernel.compile(args, cc=90) is artifact  # it is in memory from now on
    assert str(os.getpid()) not in {line.split()[1] for line in compilations()}


def test_what_is_in_a_cache_starts_no_process(monkeypatch):
    kernels = of_one_layout(CodeGemm)
    args = arguments(kernels[0])
    before = [kernel.compile(args, cc=90) for kernel in kernels[:2]]
    monkeypatch.setattr(_fork_server, "start", None)
    assert ka.compile_all(kernels[:2], args, cc=90) == before
    _compile_cache.clear()
    again = ka.compile_all(kernels[:2], args, cc=90)
    assert [one.kernel for one in again] == kernels[:2]
    assert len(compilations()) == 2


def test_without_a_cache_and_a_temporary_folder_it_says_what_to_set(monkeypatch):
    def full(*args, **options):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setenv("KERNEL_API_DISABLE_CACHE", "1")
    monkeypatch.setattr(tempfile, "mkdtemp", full)
    parallel._cache_of_this_process.cache_clear()
    with pytest.raises(CompileError, match="No space left on device; make room, or set KERNEL_API"):
        parallel.cache_to_share()


def test_without_a_cache_the_workers_hand_the_code_back(monkeypatch, cache_directory, tmp_path):
    monkeypatch.setenv("KERNEL_API_DISABLE_CACHE", "1")
    kernel = of_one_layout(CodeGemm)[0]
    (artifact,) = ka.compile_all([kernel], arguments(kernel), cc=90, workers=1)
    assert artifact.compiled_obj(1, 2) == 2
    assert not cache_directory.exists()
    assert ka.load(artifact.export(tmp_path / "gemm.so")).kernel == kernel


def test_what_a_worker_cannot_import_compiles_here(caplog):
    class Local(CodeGemm):
        pass

    (kernel,) = kernels_of(Local)[:1]
    with caplog.at_level(logging.INFO, logger="kernel_api"):
        (artifact,) = ka.compile_all([kernel], arguments(kernel), cc=90)
    assert artifact.kernel is kernel
    assert f"{kernel.metadata.kernel_name} cannot be rebuilt in another process" in caplog.text
    assert {line.split()[1] for line in compilations()} == {str(os.getpid())}


def test_kernels_that_do_not_take_the_arguments_are_errors_in_the_list():
    kernel = of_one_layout(CodeGemm)[0]
    wrong = arguments_for(kernel, 64, 64, 64, device="meta")
    wrong = ka.GemmArguments(*(t.to(torch.float16) for t in wrong.tensors))
    (refused,) = ka.compile_all([kernel], wrong, cc=90)
    assert isinstance(refused, UnsupportedError)
    assert ka.compile_all([], wrong) == []


def test_there_may_be_arguments_for_each_kernel():
    kernel = of_one_layout(CodeGemm)[0]
    flat, batched = arguments(kernel), arguments_for(kernel, 64, 64, 64, 2, device="meta")
    found = [kernel.compile(args, cc=90) for args in (flat, batched)]
    assert ka.compile_all([kernel, kernel], [flat, batched], cc=90) == found
    with pytest.raises(ArgumentError, match="there are 2 kernels but 1 arguments"):
        ka.compile_all([kernel, kernel], [flat], cc=90)


def test_the_number_of_workers_is_checked(monkeypatch):
    args = arguments(of_one_layout(CodeGemm)[0])
    with pytest.raises(ArgumentError, match="workers is 0; expected at least 1"):
        ka.compile_all([], args, workers=0)
    for workers in ("2", 1.5, True):
        with pytest.raises(ArgumentError, match="expected at least 1, a whole number"):
            ka.compile_all([], args, workers=workers)
    for given in (None, [None], of_one_layout(CodeGemm)[0]):
        with pytest.raises(ArgumentError, match="expected ones that get_kernels returns, in a lis"):
            ka.compile_all(given, args)
    with pytest.raises(ArgumentError, match="args is a NoneType; expected an arguments object"):
        ka.compile_all([], None)
    monkeypatch.setenv("KERNEL_API_COMPILE_WORKERS", "²")
    with pytest.raises(ArgumentError, match="KERNEL_API_COMPILE_WORKERS is '²'"):
        ka.compile_all([], args)
    monkeypatch.setenv("KERNEL_API_COMPILE_WORKERS", "many")
    with pytest.raises(ArgumentError, match="KERNEL_API_COMPILE_WORKERS is 'many'"):
        ka.compile_all([], args)


_SCRIPT = """
    import sys
    sys.path[:] = {path!r}
    import logging
    logging.basicConfig(level=logging.INFO, stream=sys.stdout)
    import kernel_api as ka
    from support.code_kernels import CodeGemm
    from support.data import arguments_for
    from support.kernels import kernels_of

    class Own(CodeGemm):
        pass

    kernels = [kernels_of(CodeGemm)[0], kernels_of(Own)[0]]
    args = arguments_for(kernels[0], 64, 64, 64, device="meta")
    print("started")
    found = ka.compile_all(kernels, args, cc=90, workers=1, progress=True)
    print([artifact.compiled_obj for artifact in found][0](1, 2, 3))
"""


def test_a_script_needs_no_main_guard_and_its_own_kernels_compile_in_it(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(_SCRIPT).format(path=sys.path))
    ran = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.count("started") == 1
    assert ran.stdout.splitlines()[-1] == "3"
    assert "is defined in __main__: compiled in this process" in ran.stdout
    assert len(compilations()) == 2


# What a worker is told about arguments ----------------------------------------------------


def matrices(*shapes, dtype=torch.bfloat16):
    return [torch.empty(shape, dtype=dtype) for shape in shapes]


def _plain():
    A, B, out = matrices((100, 64), (32, 56), (97, 32))
    return ka.GemmArguments(A[3:, 8:], B.t(), out)


def _scaled():
    A, B = matrices((256, 128), (128, 128), dtype=torch.float8_e4m3fn)
    A = ScaledOperand(A, torch.ones(256, 1), ScaleMode.BLOCK_1x128)
    B = ScaledOperand(B.t(), torch.ones(1, 1), ScaleMode.BLOCK_128x128)
    return ka.GemmArguments(A, B, *matrices((256, 128)))


def _with_epilogue():
    def fn(accum, bias, factor):
        return accum * factor + bias, accum

    A, B, out, aux = matrices((64, 64), (64, 64), (64, 64), (64, 64))
    epilogue = EpilogueArguments(fn, bias=torch.ones(64), factor=2.0, aux=aux)
    return ka.GemmArguments(A, B, out, epilogue=epilogue)


def _with_names_of_an_accumulator():
    def fn(x, accum):
        return x * accum, x

    A, B, out, aux = matrices((64, 64), (64, 64), (64, 64), (64, 64))
    epilogue = EpilogueArguments(fn, accum=torch.ones(64), accum_=aux)
    return ka.GemmArguments(A, B, out, epilogue=epilogue)


@pytest.mark.parametrize("make", [_plain, _scaled, _with_epilogue, _with_names_of_an_accumulator])
def test_arguments_come_back_with_their_signature_sizes_and_alignment(make):
    import json

    args = make()
    again = _description.rebuilt(json.loads(json.dumps(_description.described(args))))
    assert again.device.type == "meta"
    assert again.signature == args.signature
    for name, operand in args.named_operands.items():
        other = again.named_operands[name]
        assert (other.shape, other.stride) == (operand.shape, operand.stride)
        assert other.alignment == operand.alignment


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("ArgumentError", (ArgumentError, "why")),
        ("DeviceError", (DeviceError, "why")),
        ("BenchError", (BenchError, "why")),
        ("CompileError", (CompileError, "why")),
        ("NoKernelError", (CompileError, "one does not compile: NoKernelError: why")),
        ("ValueError", (CompileError, "one does not compile: ValueError: why")),
    ],
)
def test_errors_of_ours_come_back_from_workers_as_they_are(kind, expected):
    found = parallel._error(kind, "why", "one")
    assert (type(found), str(found)) == expected


def doomed(monkeypatch, times):
    """Of the workers that are started, so many are killed at once; those."""
    start, killed = _fork_server.start, []

    def start_and_kill(*how):
        child = start(*how)
        if len(killed) < times:
            killed.append(child)
            child._server.request({"kill": child._number})
        return child

    monkeypatch.setattr(_fork_server, "start", start_and_kill)
    return killed


def test_a_worker_that_somebody_kills_costs_nothing(monkeypatch):
    killed = doomed(monkeypatch, 1)
    kernel = of_one_layout(CodeGemm)[0]
    (artifact,) = ka.compile_all([kernel], arguments(kernel), cc=90, workers=1)
    assert killed and artifact.compiled_obj(1, 2) == 2


def test_a_compilation_whose_workers_are_killed_twice_fails_alone(monkeypatch):
    killed = doomed(monkeypatch, 2)
    pairs = [(kernel, arguments(kernel)) for kernel in of_one_layout(CodeGemm)[:2]]
    found = dict(parallel.Compilations(pairs, 90, 1))
    assert len(killed) == 2
    assert type(found[0]) is CompilerKilledError
    assert "the compiler's process died (by SIGKILL)" in str(found[0])
    assert type(found[1]) is ka.CompiledArtifact


def test_a_compilation_that_takes_too_long_fails_alone():
    kernels = [*of_one_layout(EndlessGemm)[:1], *of_one_layout(CodeGemm)[:1]]
    pairs = [(kernel, arguments(kernel)) for kernel in kernels]
    found = dict(parallel.Compilations(pairs, 90, 1, timeout_s=2.0))
    assert str(found[0]).endswith("compiled for more than 2 s")
    assert type(found[1]) is ka.CompiledArtifact


def test_whoever_stops_before_the_end_is_not_waited_for():
    kernels = of_one_layout(SlowGemm)
    pairs = [(kernel, arguments(kernel)) for kernel in kernels]
    several = parallel.Compilations(pairs, 90, 1)
    for _ in several:
        several.close()
    assert len(compilations()) < len(kernels)


def test_what_stands_in_the_place_of_an_artifact_has_the_name_of_the_interface():
    assert ka.errors.KernelError is ka.errors.KernelApiError

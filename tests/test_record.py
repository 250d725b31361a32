"""Problems of a running program, recorded: KERNEL_API_RECORD."""

import argparse
import json
import os
import subprocess
import sys
import textwrap
import time

import pytest
import torch
from support.data import gemm_tensors
from support.kernels import CpuGemm

import kernel_api as ka
from kernel_api import _recording
from kernel_api.cli._problem import add_problem_options
from kernel_api.cli._problem_list import problems
from kernel_api.errors import CacheWarning
from kernel_api.tuning import Problem


def program(text, **environment):
    """A program, started."""
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(text)],
        env={**os.environ, **{name: str(value) for name, value in environment.items()}},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def printed(process):
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    return out


def read(path):
    parser = argparse.ArgumentParser()
    add_problem_options(parser, devices=("meta",), device="meta")
    return list(map(Problem.of, problems(path, parser.parse_args([]))))


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def recorded(tmp_path, monkeypatch):
    """The file that this process records into."""
    path = tmp_path / "recorded"
    monkeypatch.setenv(_recording.VARIABLE, str(path))
    monkeypatch.setattr(_recording, "_recorder", _recording._FirstUse())
    return path


def arguments(*sizes, **options):
    return ka.GemmArguments(*gemm_tensors(*sizes, **options))


# Whole programs --------------------------------------------------------------------------

EVERY_WAY = """
    import torch
    import kernel_api as ka
    from kernel_api.tuning import Problem

    A, B, weight = torch.randn(64, 32), torch.randn(64, 32).t(), torch.randn(32)
    out, half, rows = torch.empty(64, 64), torch.empty(64, 32), torch.empty(64, 32)
    for _ in range(3):
        ka.ops.gemm(A, B, out=out)
        ka.ops.gemm_swiglu(A, B, out=half, alpha=0.5)
        ka.ops.rmsnorm(A, weight=weight, out=rows)
    ka.ops.gemm_swiglu(A, B, out=half, alpha=0.7)  # a number at run time is no other problem
    run, prepared = (ka.GemmArguments(A[:n], B, out[:n]) for n in (8, 16))
    kernel = ka.get_kernels(run)[0]
    kernel.run(run)
    kernel.run(run, assume_supported_args=True)
    launch = kernel.prepare(prepared)
    launch(A[:16], B, out[:16])
    kernel.compile(ka.GemmArguments(A[:4], B, out[:4]))  # nothing runs
    shown = (
        ka.fusions.gemm(A, B, out=out),
        ka.fusions.gemm_swiglu(A, B, out=half),
        ka.fusions.rmsnorm(A, weight=weight, out=rows),
        run,
        prepared,
    )
    print("\\n".join(Problem.of(args).text for args in shown))
"""


def test_whatever_runs_is_recorded_once_and_read_as_a_list_of_problems(tmp_path):
    path = tmp_path / "recorded"
    expected = printed(program(EVERY_WAY, KERNEL_API_RECORD=path)).splitlines()
    assert [problem.text for problem in read(path)] == expected
    assert len(lines(path)) == len(expected)
    before = path.read_bytes()
    printed(program(EVERY_WAY, KERNEL_API_RECORD=path))
    assert path.read_bytes() == before


def test_processes_that_record_at_once_append_whole_lines_only(tmp_path):
    path, go = tmp_path / "recorded", tmp_path / "go"
    text = """
        import os, sys, time
        import torch
        import kernel_api as ka

        first = int(os.environ["FIRST"])
        ka.ops.gemm(torch.ones(1, 1), torch.ones(1, 1))
        print("ready", flush=True)
        while not os.path.exists(os.environ["GO"]):
            time.sleep(0.001)
        for M in range(first, first + 40):
            ka.ops.gemm_bias_activation(torch.ones(M, 3), torch.ones(3, 4), bias=torch.ones(4))
    """
    firsts = [10, 30]
    started = [program(text, KERNEL_API_RECORD=path, GO=go, FIRST=first) for first in firsts]
    for process in started:
        assert process.stdout.readline() == "ready\n"
    go.touch()
    for process in started:
        printed(process)
    assert path.read_bytes().endswith(b"\n")
    found = read(path)
    assert len(lines(path)) >= len(found) == len({entry["problem"] for entry in lines(path)})
    assert sorted(one.sizes["M"] for one in found) == [1, *range(10, 70)]


# In one process --------------------------------------------------------------------------


def test_nothing_is_recorded_where_nobody_asks(monkeypatch):
    monkeypatch.delenv(_recording.VARIABLE, raising=False)
    monkeypatch.setattr(_recording, "_recorder", _recording._FirstUse())
    args = arguments(4, 5, 6)
    ka.get_kernels(args)[0].run(args)
    assert _recording._recorder is None


def test_looking_for_the_recorder_takes_less_than_a_microsecond(monkeypatch):
    monkeypatch.setattr(_recording, "_recorder", None)
    args = arguments(4, 5, 6)
    times = []
    for _ in range(20):
        start = time.perf_counter()
        for _ in range(1000):
            _recording.record(args)
        times.append(time.perf_counter() - start)
    assert min(times) < 1e-3


class Direct(CpuGemm):
    """Launched without arguments, as compiled kernels are."""

    def _launcher(self, args, artifact):
        return lambda A, B, out, stream=None: out.copy_(A @ B)


def test_a_repeated_call_does_not_come_by(registry, monkeypatch):
    registry.register(Direct)
    seen = []
    monkeypatch.setattr(_recording, "record", seen.append)
    A, B, out = gemm_tensors(4, 5, 6, values="integers")
    for _ in range(3):
        ka.ops.gemm(A, B, out=out)
    assert torch.equal(out, A @ B)
    assert len(seen) == 1


def test_the_variable_may_be_set_until_something_runs(recorded):
    args = arguments(4, 5, 6)
    ka.get_kernels(args)[0].run(args)  # it was set when all of this was loaded
    assert read(recorded) == [Problem.of(args)]


def test_what_is_in_the_file_already_is_not_appended_again(recorded):
    args = arguments(4, 5, 6)
    _recording.record(args)
    before = recorded.read_bytes()
    for _ in range(2):
        _recording._recorder = _recording._FirstUse()
        _recording.record(args)
    _recording.record(arguments(4, 5, 6))
    assert recorded.read_bytes() == before


def test_what_another_process_has_appended_meanwhile_is_not_appended_again(recorded):
    first, second = (_recording._Recorder(str(recorded)) for _ in range(2))
    for M in (4, 5, 4, 6):
        for one in (first, second):
            one.record(arguments(M, 5, 6))
        first, second = second, first
    assert [problem.sizes["M"] for problem in read(recorded)] == [4, 5, 6]
    assert len(lines(recorded)) == 3


def test_a_relative_file_stays_where_it_was_at_first(recorded, tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(_recording.VARIABLE, recorded.name)
    _recording.record(arguments(4, 5, 6))
    monkeypatch.chdir("elsewhere")
    _recording.record(arguments(5, 5, 6))
    assert len(lines(recorded)) == 2
    assert not os.listdir()


def test_alignment_beyond_what_counts_is_no_other_problem(recorded):
    memory = torch.empty(4096)
    start = -memory.data_ptr() // 4 % 32
    for offset in (start, start + 16):  # 128 bytes, 64
        A = memory[offset : offset + 16 * 64].view(16, 64)
        _recording.record(ka.GemmArguments(A, torch.empty(64, 64), torch.empty(16, 64)))
    assert len(lines(recorded)) == 1


def test_what_else_is_in_the_file_stays(recorded):
    text = b'no JSON\n[1]\n{"m": 1}\n%b\n{"problem": "of a writer that was ki'
    recorded.write_bytes(text % (b"[" * 100_000))
    _recording.record(arguments(4, 5, 6))
    head, *others = recorded.read_text().splitlines()
    assert head == "no JSON"
    assert len(others) == 5
    assert json.loads(others[-1])["class"] == ["kernel_api.arguments.gemm", "GemmArguments"]


def test_after_many_problems_the_file_still_has_each_once(recorded, monkeypatch):
    monkeypatch.setattr(_recording, "_KEPT", 3)
    for _ in range(3):
        for M in range(1, 9):
            _recording.record(arguments(M, 5, 6))
    assert [problem.sizes["M"] for problem in read(recorded)] == list(range(1, 9))
    assert len(lines(recorded)) == 8


def test_an_output_without_elements_is_not_recorded(recorded):
    args = arguments(0, 5, 6)
    ka.get_kernels(args)[0].run(args)
    assert not recorded.exists()


class Odd(ka.GemmArguments):
    def _keywords(self):
        return {**super()._keywords(), "odd": object()}


def test_what_cannot_be_described_runs_and_is_one_line_in_the_log(recorded, registry, caplog):
    registry.register(CpuGemm)
    A, B, out = gemm_tensors(4, 5, 6, values="integers")
    kernel = ka.get_kernels(ka.GemmArguments(A, B, out), lambda m: m.kernel_class is CpuGemm)[0]
    for _ in range(2):
        kernel.run(Odd(A, B, out))
    assert torch.equal(out, A @ B)
    assert not recorded.exists()
    (line,) = caplog.messages
    assert "is not recorded" in line
    assert "cannot be described" in line


@pytest.mark.parametrize("place", ["", "none/recorded"], ids=["a folder", "not there"])
def test_a_file_that_cannot_be_written_is_one_warning(recorded, tmp_path, place, monkeypatch):
    path = tmp_path / place
    monkeypatch.setenv(_recording.VARIABLE, str(path))
    with pytest.warns(CacheWarning) as caught:
        for M in (4, 5, 6):
            args = arguments(M, 5, 6, values="integers")
            ka.get_kernels(args)[0].run(args)
            assert torch.equal(args.out.tensor, args.A.tensor @ args.B.tensor)
    (warning,) = caught
    told = str(warning.message)
    assert told.startswith(f"KERNEL_API_RECORD: {path} cannot be written, nothing more is recorded")


def test_a_file_relative_to_a_folder_that_is_gone_is_one_warning(recorded, tmp_path, monkeypatch):
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    monkeypatch.setenv(_recording.VARIABLE, "relative")
    with pytest.warns(CacheWarning, match="cannot be found, nothing is recorded") as caught:
        for M in (4, 5, 6):
            _recording.record(arguments(M, 5, 6))
    assert len(caught) == 1


@pytest.mark.filterwarnings("error::kernel_api.errors.CacheWarning")
def test_where_warnings_are_errors_the_program_still_runs(recorded, tmp_path, monkeypatch, caplog):
    monkeypatch.setenv(_recording.VARIABLE, str(tmp_path))
    for M in (4, 5, 6):
        _recording.record(arguments(M, 5, 6))
    (line,) = caplog.messages
    assert "cannot be written, nothing more is recorded" in line


def test_a_disk_that_is_full_is_one_warning(recorded, monkeypatch):
    monkeypatch.setattr(_recording.os, "write", lambda file, data: len(data) - 1)
    with pytest.warns(CacheWarning, match="bytes could be written") as caught:
        for M in (4, 5, 6):
            _recording.record(arguments(M, 5, 6))
    assert len(caught) == 1

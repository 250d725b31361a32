"""kernel-api bench: kernels of one problem beside each other, on the CPU."""

import json

import pytest
import torch
from support import hostile_kernels as hostile

import kernel_api as ka
from kernel_api.cli import main
from kernel_api.tuning import BenchError, Policy, _comparison
from kernel_api.tuning._measurement import Status

SIZES = ("--m", 48, "--n", 40, "--k", 56, "--dtype", "float32", "--device", "cpu")
QUICK = ("--rounds", 3, "--timeout", 60)


@pytest.fixture(autouse=True)
def log(cache_directory, monkeypatch):
    monkeypatch.setenv(hostile.LOG, str(cache_directory.parent / "runs"))
    monkeypatch.setattr("kernel_api.devices.cuda_available", lambda: False)


def run(capsys, *arguments):
    code = main([str(a) for a in ("bench", *arguments)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def run_json(capsys, *arguments):
    code, out, _ = run(capsys, *arguments, "--json")
    return code, json.loads(out)


@pytest.fixture
def bench(capsys, registry):
    """Of these classes alone, by default as JSON."""

    def bench(*classes, words=(), as_text=False):
        provider = registry.register(*classes).name
        how = run if as_text else run_json
        return how(capsys, *SIZES, *QUICK, "--providers", provider, *words)

    return bench


def names(told):
    return [one["kernel"].partition("_")[0] for one in told["kernels"]]


def test_kernels_stand_from_fast_to_slow_beside_the_first(bench):
    code, told = bench(hostile.SlowGemm, hostile.FastGemm, hostile.SlowerGemm)
    assert code == 0 and told["passed"] and told["verified"] and told["reason"] is None
    assert names(told) == ["FastGemm", "SlowGemm", "SlowerGemm"]
    assert told["problem"] == "gemm 48x40x56 f32 x f32 -> f32 ttt"
    assert told["sizes"] == {"M": 48, "N": 40, "K": 56, "L": 1}
    assert told["environment"]["gpu"] == "cpu"
    for one, us in zip(told["kernels"], (300, 2000, 4000), strict=True):
        assert (one["status"], one["message"], one["rounds"] >= 3) == ("PASSED", "", True)
        assert one["us"] == pytest.approx(us) and one["spread_us"] == pytest.approx(0, abs=1e-6)
        assert one["ratio"] == pytest.approx(300 / us)
        assert one["tflops"] == pytest.approx(2 * 48 * 40 * 56 / us * 1e-6)
        assert one["gbs"] == pytest.approx(4 * (48 * 56 + 56 * 40 + 48 * 40) / us * 1e-3)
        assert 0 <= one["error_ratio"] <= 1


def test_the_table_is_for_a_reader(bench):
    code, out, _ = bench(hostile.SlowGemm, hostile.FastGemm, as_text=True)
    assert code == 0
    title, header, _, first, second, total = out.splitlines()
    assert title.startswith("gemm 48x40x56 f32 x f32 -> f32 ttt on cpu, eager, warm L2 (")
    assert header.split() == ["kernel", "status", "us", "spread", "TFLOP/s", "of", "first"]
    assert first.split()[1:3] + first.split()[-1:] == ["PASSED", "300.00", "1.000x"]
    assert second.split()[1:3] + second.split()[-1:] == ["PASSED", "2000.00", "0.150x"]
    assert total == "2 of 2 passed"


def test_what_has_no_operations_is_told_in_bytes(capsys):
    words = ("--operation", "rmsnorm", "--m", 16, "--n", 32, "--device", "cpu", *QUICK)
    code, out, _ = run(capsys, *words)
    assert code == 0
    assert "GB/s" in out and "TFLOP/s" not in out
    _, told = run_json(capsys, *words)
    assert told["kernels"][0]["tflops"] is None and told["kernels"][0]["gbs"] > 0


def test_all_take_turns_to_the_end(bench):
    code, told = bench(hostile.DawdlingGemm, words=("--top", 99))
    assert code == 0
    assert len(told["kernels"]) == 10
    assert len({one["rounds"] for one in told["kernels"]}) == 1


def test_kernels_take_turns(bench):
    bench(hostile.SlowerGemm, hostile.SlowGemm)
    timed = hostile.runs()[4:-4]  # each is checked twice before, and after
    turns = [timed[place : place + 4] for place in range(2, len(timed) - 3, 4)]
    assert len(turns) >= 1
    assert all(sorted(turn) == ["SlowGemm"] * 2 + ["SlowerGemm"] * 2 for turn in turns)


def test_what_is_wrong_is_told_and_not_timed(bench):
    code, told = bench(hostile.WrongGemm, hostile.FastGemm)
    assert code == 1 and not told["passed"]
    fast, wrong = told["kernels"]
    assert (wrong["status"], wrong["us"], wrong["ratio"]) == ("WRONG", None, None)
    assert "of what is allowed" in wrong["message"] and fast["status"] == "PASSED"
    code, out, _ = bench(hostile.RaisingGemm, hostile.FastGemm, as_text=True)
    assert code == 1
    assert "ValueError: the grid has no blocks\n1 of 2 passed\n" in out


def test_results_need_not_be_compared(bench, capsys):
    code, told = bench(hostile.WrongGemm, words=("--no-verify",))
    assert code == 0 and not told["verified"]
    (one,) = told["kernels"]
    assert (one["status"], one["error_ratio"]) == ("PASSED", None) and one["us"] > 0
    code, told = bench(hostile.RaisingGemm, words=("--no-verify",))
    assert code == 1 and told["kernels"][0]["status"] == "RUNTIME_ERROR"
    _, out, _ = bench(hostile.WrongGemm, words=("--no-verify",), as_text=True)
    assert out.endswith("1 of 1 passed; results were not compared with the reference\n")


def test_nothing_is_kept_and_nothing_known_is_taken(bench, cache_directory):
    bench(hostile.FastGemm)
    count = len(hostile.runs())
    _, told = bench(hostile.FastGemm)
    assert len(hostile.runs()) >= count + told["kernels"][0]["rounds"]
    assert not list(cache_directory.glob("tuning/**/*.json"))


def test_the_best_and_those_that_are_named_are_timed(bench, registry):
    classes = (hostile.SlowGemm, hostile.SlowerGemm, hostile.FastGemm)
    slow, slower, fast = (
        kernel.metadata.kernel_name
        for kernel in ka.get_kernels(providers=[registry.register(*classes)])
    )
    _, told = bench(*classes, words=("--top", 1))
    assert names(told) == ["SlowGemm"]
    _, told = bench(*classes, words=("--top", 1, fast, slow))
    assert names(told) == ["FastGemm", "SlowGemm"]
    _, told = bench(*classes, words=("--top", 0, slower))
    assert names(told) == ["SlowerGemm"]
    _, told = bench(*classes, words=("--filter", f"name={fast}"))
    assert names(told) == ["FastGemm"]
    _, told = bench(*classes, words=("--filter", f"name={fast}", slower))
    assert names(told) == ["FastGemm", "SlowerGemm"]


def test_options_say_how_it_is_measured(capsys, monkeypatch):
    asked = []

    def compared(args, kernels, environment, device, choice, **how):
        asked.append((args.device.type, len(kernels), environment.policy, device, choice, how))
        return []

    monkeypatch.setattr(_comparison, "compared", compared)
    words = ("--launches", "eager", "--l2", "warm", "--rounds", 7, "--rest", 0, "--seed", 3)
    run(capsys, *SIZES, *words, "--timeout", 4, "--no-verify")
    ((where, count, policy, device, choice, how),) = asked
    assert (where, count, device) == ("cpu", 1, "cpu")  # torch's
    assert policy == Policy("eager", "warm", 7, rest=0, seed=3)
    assert choice.timeout_s == 4
    assert how == {"verify": False, "progress": False}


def test_an_architecture_is_not_asked_of_the_cpu(capsys):
    code, out, err = run(capsys, *SIZES, "--cc", 90, "--device", "cpu")
    assert (code, out) == (2, "")
    assert "cc is '90' but the problem is measured on the CPU" in err


def test_a_problem_without_a_kernel_or_without_data_fails(capsys, monkeypatch):
    words = ("--m", 16, "--n", 16, "--k", 16, "--dtype", "complex64", "--device", "cpu")
    code, told = run_json(capsys, *words, "--providers", "torch")
    assert code == 1 and not told["passed"] and told["kernels"] == []
    assert told["reason"].startswith("NoKernelError: ")

    def compared(*given, **how):
        raise BenchError("the data or the reference cannot be made")

    monkeypatch.setattr(_comparison, "compared", compared)
    code, out, _ = run(capsys, *SIZES)
    assert code == 1
    assert "\nBenchError: the data or the reference cannot be made\n" in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nobody"], "no kernel called nobody takes the problem on cpu; kernel-api list has "),
        (["--top", "0"], "--top is 0 and no kernel is named"),
        (["--top", "-1"], "-1 is less than 0"),
        (["--filter", "foo=1"], "there is no axis foo"),
        (["--timeout", "soon"], "'soon' is no number of seconds"),
        (["--seed", "-1"], "seed is -1"),
        (["--dtype", "f17"], "names no element type"),
        (["--launches", "graph"], "--launches graph: the CPU has no graphs of launches; leave it"),
        (["--l2", "cold"], "--l2 cold: on the CPU no cache is emptied; leave it out"),
        (["--rest", "3"], "--rest 3: the CPU does not rest; leave it out, or pass --device cuda"),
        (["--device", "cuda"], "--device cuda: torch sees no GPU here"),
        (["{cuda}", "--cc", "90"], " takes the problem on cpu; kernel-api list has the names"),
    ],
)
def test_a_question_without_sense_is_exit_code_2(capsys, words, message):
    sizes = ("--m", 64, "--n", 64, "--k", 64)
    args = ka.GemmArguments(*(torch.empty(64, 64, device="meta").bfloat16() for _ in range(3)))
    name = ka.get_kernels(args, cc=90, providers=["cutedsl"])[0].metadata.kernel_name
    words = [word.format(cuda=name) for word in words]
    code, out, err = run(capsys, *sizes, *words)
    assert code == 2
    assert out == ""
    assert message in err


def test_statuses_are_those_of_the_tuner(bench):
    code, told = bench(hostile.UncompilableGemm, hostile.ExitingGemm)
    assert code == 1
    assert {Status(one["status"]) for one in told["kernels"]} == {
        Status.COMPILE_ERROR,
        Status.RUNTIME_ERROR,
    }

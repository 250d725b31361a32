"""kernel-api tune: problems in, winners out; and what is done with the measurements."""

import json
import os
import threading
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from types import SimpleNamespace

import pytest
import torch
from support.tuning import measured

import kernel_api as ka
from kernel_api import _recording, tuning
from kernel_api._description import described, rebuilt
from kernel_api.cli import main
from kernel_api.errors import ArgumentError, NoKernelError
from kernel_api.tuning import (
    Environment,
    KernelIdentity,
    Measurement,
    Policy,
    Problem,
    Status,
    Store,
    heuristics,
)

pytestmark = pytest.mark.usefixtures("cache_directory")

#: Of operands that no process can address.
HUGE = ("--m", 20000000, "--n", 20000000, "--k", 4)
SIZES = ("--m", 256, "--n", 512, "--k", 128)
PROVIDERS = ["torch", "reference"]


def run(capsys, *arguments):
    code = main([str(a) for a in arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def run_json(capsys, *arguments):
    code, out, _ = run(capsys, *arguments, "--json")
    return code, json.loads(out)


def store():
    return Store.open(Environment.of("cpu", Policy.usual("cpu")))


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch):
    monkeypatch.setattr("kernel_api.devices.cuda_available", lambda: False)


@pytest.fixture
def tuner(monkeypatch):
    """Stands for the tuner: every kernel takes a microsecond more than the one before, the last
    is wrong. What it was asked is kept."""
    asked = []

    def autotune(args, metadata_filter=None, *, providers=None, policy=None, **options):
        asked.append(SimpleNamespace(
            args=args, filter=metadata_filter, providers=providers, policy=policy, **options
        ))  # fmt: skip
        return [one(each, metadata_filter, providers, policy) for each in args]

    def one(args, metadata_filter, providers, policy):
        environment = Environment.of("cpu", policy)
        kernels = ka.get_kernels(args, metadata_filter, providers=providers or PROVIDERS)
        if not kernels:
            return NoKernelError(ka.explain(args))
        problem, where = Problem.of(args), {"environment": environment}
        rows = [measured(k, problem, 1.0 + n, **where) for n, k in enumerate(kernels[:-1])]
        rows.append(measured(kernels[-1], problem, status=Status.WRONG, **where))
        if len(kernels) == 1:
            rows = [measured(kernels[0], problem, 2.0, **where)]
        for row in rows:
            Store.open(environment).record(row)
        return tuning.TuningResult(kernels[0], tuple(rows), problem, environment, len(rows))

    monkeypatch.setattr(tuning, "autotune", autotune, raising=False)
    return asked


@pytest.fixture
def shapes(tmp_path):
    path = tmp_path / "shapes.csv"
    path.write_text(
        "op, M, N, K, dtype\n"
        "gemm, 256, 512, 128, bf16\n"
        "gemm, 16, 512, 128, bf16\n"
        "gemm, 256, 512, 128, bfloat16\n"
        "gemm_swiglu, 256, 512, 128, bf16\n"
    )
    return path


# Tuning ----------------------------------------------------------------------------------


def test_every_problem_of_a_list_is_a_row_with_its_winner(capsys, tuner, shapes):
    code, out, _ = run(capsys, "tune", shapes)
    assert code == 0
    _, _, *rows, total = out.splitlines()
    assert total == "3 of 3 tuned, 5 candidates measured now"
    assert [row.split()[:2] for row in rows] == [
        ["gemm", "256x512x128"],
        ["gemm", "16x512x128"],
        ["gemm", "256x512x128"],
    ]
    assert "bf16 x bf16 -> bf16 ttt" in rows[0]
    assert "epilogue" in rows[2]
    assert "torch_mm_bf16_bf16_bf16_f32" in rows[0]
    assert "1.00" in rows[0]
    assert "1.000x" in rows[0]
    assert "1 PASSED, 1 WRONG" in rows[0]
    (asked,) = tuner
    assert asked.progress is False
    assert "max_candidates" not in vars(asked)


def test_without_a_file_the_options_describe_the_problem(capsys, tuner):
    code, told = run_json(capsys, "tune", *SIZES, "--operation", "gemm_amax", "--layout", "tn")
    assert code == 0
    assert told["passed"]
    (row,) = told["problems"]
    assert row["sizes"] == {"M": 256, "N": 512, "K": 128, "L": 1}
    assert row["problem"].startswith("gemm 256x512x128 bf16 x bf16 -> bf16 tnt epilogue ")
    assert row["reason"] is None
    assert row["us"] == 2.0


def test_several_lists_are_tuned_as_one(capsys, tuner, shapes, tmp_path):
    other = tmp_path / "other.json"
    other.write_text('[{"M": 16, "N": 512, "K": 128}, {"op": "rmsnorm", "M": 16, "N": 512}]')
    code, told = run_json(capsys, "tune", shapes, other)
    assert code == 0
    assert len(told["problems"]) == len(tuner[0].args) == 4
    assert told["problems"][-1]["problem"] == "rmsnorm 16x512 bf16 -> bf16 tt"


def test_the_ratio_is_to_the_best_of_torch(capsys, tuner):
    _, told = run_json(capsys, "tune", *SIZES)
    (row,) = told["problems"]
    assert (row["provider"], row["us"], row["torch_us"], row["ratio"]) == ("torch", 1.0, 1.0, 1.0)
    _, told = run_json(capsys, "tune", *SIZES, "--providers", "reference")
    (row,) = told["problems"]
    assert (row["provider"], row["us"], row["torch_us"], row["ratio"]) == (
        *("reference", 2.0, None, None),
    )
    assert row["statuses"] == {"PASSED": 1}


def test_options_say_how_it_is_measured_and_which_are_candidates(capsys, tuner):
    words = ("--launches", "eager", "--l2", "warm", "--rounds", 7, "--seed", 3, "--budget", 2.5)
    words += ("--timeout", 4, "--providers", "torch, reference", "--cc", 90)
    code, _ = run_json(capsys, "tune", *SIZES, *words, "--filter", "family=torch.mm,torch.x")
    assert code == 0
    (asked,) = tuner
    assert asked.policy == Policy("eager", "warm", 7, rest=0, seed=3)
    assert (asked.budget_s, asked.timeout_s, asked.cc) == (2.5, 4.0, "90")
    assert asked.providers == ["torch", "reference"]
    found = ka.get_kernels(asked.args[0], asked.filter)
    assert found
    assert {kernel.family_name() for kernel in found} == {"torch.mm"}


@pytest.mark.parametrize("axis", ["tile", "tile_shape"])
def test_filters_are_axes_of_the_design_and_all_of_them_count(capsys, tuner, axis):
    words = ("--filter", f"{axis}=128x128x32", "--filter", "stages=3,4")
    run(capsys, "tune", *SIZES, "--layout", "tn", *words)
    (asked,) = tuner
    args = rebuilt(described(asked.args[0]))
    found = ka.get_kernels(args, asked.filter, cc=80, providers=["cutedsl"])
    assert found
    designs = [kernel.metadata.design for kernel in found]
    assert {design.tile_shape for design in designs} == {(128, 128, 32)}
    assert {design.stages for design in designs} <= {3, 4}


@pytest.mark.parametrize(
    ("words", "gpu", "device", "policy"),
    [
        ([], True, "meta", Policy()),
        ([], False, "meta", Policy("eager", "warm", rest=0)),
        (["--device", "cpu"], True, "cpu", Policy("eager", "warm", rest=0)),
        (["--device", "cuda", "--rest", 2], True, "meta", Policy(rest=2)),
        (["--device", "cuda", "--rounds", 5], True, "meta", Policy(rounds=5)),
        (["--l2", "warm", "--rest", 0], False, "meta", Policy("eager", "warm", rest=0)),
    ],
)
def test_arguments_lie_on_the_cpu_or_nowhere(capsys, monkeypatch, words, gpu, device, policy):
    asked = []

    def autotune(args, metadata_filter, **options):
        asked.append((args[0].device.type, options["policy"]))
        return [ArgumentError("that is enough")]

    monkeypatch.setattr(tuning, "autotune", autotune)
    monkeypatch.setattr("kernel_api.devices.cuda_available", lambda: gpu)
    code, out, _ = run(capsys, "tune", *SIZES, *words)
    assert code == 1
    assert "ArgumentError: that is enough" in out
    assert asked == [(device, policy)]


def test_a_device_that_is_not_here_is_refused(capsys, tuner):
    code, _, err = run(capsys, "tune", *SIZES, "--device", "cuda")
    assert code == 2
    assert "--device cuda: torch sees no GPU here" in err
    assert not tuner


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--cc", "foo"], "'foo' names no GPU architecture"),
        (["--providers", "torch,nope"], "no provider is called 'nope'; there are"),
    ],
)
def test_what_no_problem_can_be_asked_is_refused(capsys, words, message):
    code, out, err = run(capsys, "tune", *SIZES, *words)
    assert (code, out) == (2, "")
    assert message in err


def test_an_architecture_is_not_asked_of_the_cpu(capsys):
    code, told = run_json(capsys, "tune", *SIZES, "--device", "cpu", "--cc", 90)
    assert code == 1
    assert told["problems"][0]["reason"].startswith("DeviceError: cc is '90' but the problem is")


@pytest.mark.parametrize(("words", "count"), [(["--limit", 3], 3), (["--all"], None)])
def test_the_number_of_candidates_can_be_set(capsys, tuner, words, count):
    run(capsys, "tune", *SIZES, *words)
    assert tuner[0].max_candidates == count


def test_the_order_of_candidates_can_be_that_of_heuristics(capsys, tuner, monkeypatch):
    run(capsys, "tune", *SIZES)
    monkeypatch.setattr(heuristics, "is_installed", lambda: True)
    run(capsys, "tune", *SIZES, "--order", "heuristics")
    assert [asked.order for asked in tuner] == [None, heuristics.ranked]
    monkeypatch.setattr(heuristics, "is_installed", lambda: False)
    code, _, err = run(capsys, "tune", *SIZES, "--order", "heuristics")
    assert code == 2
    assert "pip install 'kernel-api[heuristics]'" in err
    assert len(tuner) == 2


def test_a_problem_without_a_kernel_fails_and_the_others_are_tuned(capsys, tuner, tmp_path):
    path = tmp_path / "shapes.csv"
    path.write_text("M,N,K,dtype\n16,16,16,complex64\n16,16,16,f32\n")
    code, told = run_json(capsys, "tune", path, "--providers", "torch")
    assert code == 1
    assert not told["passed"]
    failed, tuned = told["problems"]
    assert failed["reason"].startswith("NoKernelError: ")
    assert failed["kernel"] is None
    assert tuned["kernel"]
    code, out, _ = run(capsys, "tune", path, "--providers", "torch")
    assert code == 1
    assert "NoKernelError" in out
    assert "\n1 of 2 tuned, " in out


def test_a_problem_without_room_is_a_row_and_the_others_are_tuned(capsys, tuner, tmp_path):
    path = tmp_path / "shapes.csv"
    path.write_text("M,N,K,dtype\n16,16,16,f32\n20000000,20000000,4,f32\n32,16,16,f32\n")
    code, told = run_json(capsys, "tune", path, "--device", "cpu", "--providers", "torch")
    assert code == 1
    first, failed, last = told["problems"]
    assert failed["reason"].startswith("BenchError: OOM, the operands cannot be made: ")
    assert failed["sizes"]["M"] == 20000000
    assert failed["kernel"] is None
    assert [first["sizes"]["M"], last["sizes"]["M"]] == [16, 32]
    assert first["kernel"] and last["kernel"]
    assert [args.device.type for args in tuner[0].args] == ["cpu", "cpu"]


def test_where_no_problem_has_room_nothing_is_tuned(capsys):
    code, out, _ = run(capsys, "tune", *HUGE, "--device", "cpu")
    assert code == 1
    assert "BenchError: OOM, " in out
    assert "\n0 of 1 tuned, 0 candidates measured now" in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["none.csv"], "none.csv cannot be read"),
        (["--filter", "stages"], "'stages' is no AXIS=VALUE"),
        (["--filter", "stages="], "'stages=' is no AXIS=VALUE"),
        (["--filter", "foo=1"], "--filter foo=1: there is no axis foo; expected one of family, "),
        (["--filter", "tile=1", "--filter", "stagse=1,2"], "there is no axis stagse; expected"),
        (["--order", "size"], "invalid choice: 'size'"),
        (["--budget", "0"], "more than 0"),
        (["--timeout", "soon"], "'soon' is no number of seconds"),
        (["--providers", ","], "names none"),
        (["--rounds", "0"], "0 is less than 1"),
        (["--seed", "-1"], "seed is -1"),
        (["--operation", "conv"], "invalid choice: 'conv'"),
        (["export"], "tune export takes one file; there are 0"),
        (["import", "a", "b"], "tune import takes one file; there are 2"),
        (["import", "none.json"], "none.json cannot be imported"),
        (["export", "none/of/this.json"], "cannot be written"),
        (["verify", "x"], "tune verify takes no file; there is x"),
        (["prune", "x"], "tune prune takes no file; there is x"),
        (["show", "--problem", "M"], "'M' is no NAME=VALUE"),
    ],
)
def test_a_question_without_sense_is_exit_code_2(capsys, tuner, words, message):
    code, out, err = run(capsys, "tune", *words)
    assert code == 2
    assert out == ""
    assert message in err


def test_without_a_cache_there_is_no_store(capsys, monkeypatch):
    monkeypatch.setenv("KERNEL_API_DISABLE_CACHE", "1")
    code, _, err = run(capsys, "tune", "show")
    assert code == 2
    assert "there is no store" in err


def test_a_recorded_program_is_tuned_for_real_and_not_measured_again(capsys, tmp_path, monkeypatch):
    path = tmp_path / "recorded"
    monkeypatch.setenv("KERNEL_API_RECORD", str(path))
    monkeypatch.setattr(_recording, "_recorder", _recording._FirstUse())
    ka.ops.gemm(torch.ones(17, 33), torch.ones(33, 65))
    ka.ops.rmsnorm(torch.ones(17, 33), weight=torch.ones(33))
    monkeypatch.delenv("KERNEL_API_RECORD")
    words = ("tune", path, "--device", "cpu", "--rounds", 2, "--timeout", 60)
    code, told = run_json(capsys, *words, "--providers", "torch,reference")
    assert code == 0
    for row, name in zip(told["problems"], ("gemm 17x65x33 ", "rmsnorm 17x33 "), strict=True):
        assert row["problem"].startswith(name)
        assert row["statuses"] == {"PASSED": row["measured"]}
        assert row["measured"] >= 2
        assert row["us"] > 0
        assert row["ratio"] > 0
    code, again = run_json(capsys, *words, "--providers", "torch,reference")
    assert code == 0
    assert [row["measured"] for row in again["problems"]] == [0, 0]
    assert [row["us"] for row in again["problems"]] == [row["us"] for row in told["problems"]]
    code, shown = run_json(capsys, "tune", "show", path)
    assert code == 0
    assert [one["us"] for one in shown["problems"]] == [row["us"] for row in told["problems"]]


# What is known ---------------------------------------------------------------------------


@pytest.fixture
def tuned(capsys, tuner, shapes):
    code, told = run_json(capsys, "tune", shapes)
    assert code == 0
    return told["problems"]


def test_show_tells_the_best_of_every_problem(capsys, tuned):
    code, told = run_json(capsys, "tune", "show")
    assert code == 0
    (environment,) = told["environments"]
    assert told["environments"][environment]["gpu"] == "cpu"
    names = ("problem", "digest", "kernel", "us", "ratio", "statuses")
    expected = [{name: row[name] for name in names} for row in tuned]
    shown = [{name: row[name] for name in names} for row in told["problems"]]
    assert sorted(shown, key=str) == sorted(expected, key=str)
    code, out, _ = run(capsys, "tune", "show")
    assert code == 0
    assert environment in out
    assert out.count("torch_mm_bf16_bf16_bf16_f32") == 2
    assert "\n3 problems in " in out


def test_show_all_tells_every_candidate_with_its_message(capsys, tuned):
    code, out, _ = run(capsys, "tune", "show", "--all", "--problem", "M=16")
    assert code == 0
    assert "PASSED" in out
    assert "WRONG" in out
    assert "it is said why" in out
    code, told = run_json(capsys, "tune", "show", "--all")
    assert code == 0
    assert sorted(len(row["candidates"]) for row in told["problems"]) == [1, 2, 2]
    assert [one["status"] for one in told["problems"][0]["candidates"]] == ["PASSED", "WRONG"]


@pytest.mark.parametrize(
    ("words", "count"),
    [
        (["M=16"], 1),
        (["m=256"], 2),
        (["M=256", "N=512", "kind=gemm", "dtype=bf16"], 2),
        (["M=257"], 0),
        (["kind=rmsnorm"], 0),
        (["dtype=float32"], 0),
    ],
)
def test_show_takes_conditions(capsys, tuned, words, count):
    code, told = run_json(capsys, "tune", "show", *(w for one in words for w in ("--problem", one)))
    assert code == int(not count)
    assert len(told["problems"]) == count


@pytest.mark.parametrize("is_empty", [False, True])
@pytest.mark.parametrize(
    ("condition", "message"),
    [
        ("Q=1", "there is no Q"),
        ("dtype=f17", "names no element type"),
        ("M=abc", "--problem M=abc: 'abc' is no size; expected a number"),
        ("M=", "--problem M=: '' is no size; expected a number"),
    ],
)
def test_show_refuses_conditions_that_it_does_not_know(
    capsys, request, is_empty, condition, message
):
    if not is_empty:
        request.getfixturevalue("tuned")
    code, _, err = run(capsys, "tune", "show", "--problem", condition)
    assert code == 2
    assert message in err


def test_show_takes_sizes_of_attention(capsys):
    sizes = ("--operation", "sdpa", "--batch", 2, "--heads", 3, "--m", 8, "--n", 16, "--k", 32)
    assert run(capsys, "tune", *sizes, "--providers", "reference")[0] == 0
    for one in ("B=2", "h=3", "S_q=8", "s_kv=16", "D=32"):
        code, told = run_json(capsys, "tune", "show", "--problem", one)
        assert (code, len(told["problems"])) == (0, 1), one
    assert run(capsys, "tune", "show", "--problem", "S_q=16")[0] == 1


def test_show_takes_lists_of_problems(capsys, tuned, tmp_path):
    path = tmp_path / "some.json"
    path.write_text('[{"M": 16, "N": 512, "K": 128}, {"M": 17, "N": 512, "K": 128}]')
    code, told = run_json(capsys, "tune", "show", path)
    assert code == 0
    assert [row["sizes"]["M"] for row in told["problems"]] == [16]


def test_show_leaves_out_kernels_whose_sources_changed_unless_all_are_asked_for(capsys, tuned):
    here = store()
    row = next(r.measurement for r in here.rows() if r.measurement.passed)
    older = KernelIdentity(row.kernel.metadata, {**row.kernel.fingerprint, "sources": "older"})
    here.record(replace(row, kernel=older, times_us=(0.5,)))
    _, told = run_json(capsys, "tune", "show")
    assert all(one["us"] >= 1 for one in told["problems"])
    _, told = run_json(capsys, "tune", "show", "--all")
    states = [c["state"] for one in told["problems"] for c in one["candidates"]]
    assert states.count("changed") == 1
    assert all(one["us"] >= 1 for one in told["problems"])


def test_show_of_nothing_is_exit_code_1(capsys):
    code, out, _ = run(capsys, "tune", "show")
    assert code == 1
    assert "0 problems in " in out
    assert run_json(capsys, "tune", "show") == (1, {"environments": {}, "problems": []})


def test_what_is_exported_can_be_imported(capsys, tuned, tmp_path):
    file, before = tmp_path / "rows.json", run_json(capsys, "tune", "show", "--all")
    code, told = run_json(capsys, "tune", "export", file)
    assert (code, told) == (0, {"rows": 5, "file": str(file)})
    code, told = run_json(capsys, "tune", "prune", "--older-than", 0)
    assert (code, told) == (0, {"removed": 5})
    assert run(capsys, "tune", "show")[0] == 1
    code, told = run_json(capsys, "tune", "import", file)
    assert (code, told["rows"]) == (0, 5)
    assert run_json(capsys, "tune", "show", "--all") == before
    code, told = run_json(capsys, "tune", "import", file)
    assert (code, told["rows"], told["kept_out"], told["damaged"]) == (0, 0, 5, {})


def test_an_import_tells_what_was_taken_what_was_here_and_what_is_damaged(capsys, tuned, tmp_path):
    file = tmp_path / "rows.json"
    run(capsys, "tune", "export", file)
    content = json.loads(file.read_text())
    next(store().folder.rglob("*.json")).unlink()
    content["rows"] += [{}, 3]
    file.write_text(json.dumps(content))
    code, told = run_json(capsys, "tune", "import", file)
    assert (code, told["passed"]) == (1, False)
    assert (told["rows"], told["kept_out"], list(told["damaged"])) == (1, 4, ["5", "6"])
    code, out, _ = run(capsys, "tune", "import", file)
    assert code == 1
    told = "0 measurements taken from {}, 5 were here, or newer ones, 2 are damaged\n"
    assert out.endswith(told.format(file))
    assert out.startswith("row 5 is damaged: ")


def test_what_is_no_file_is_written_to_and_stays(capsys, tuned, tmp_path):
    pipe, found = tmp_path / "pipe", []
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: found.append(pipe.read_bytes()))
    reader.start()
    assert run(capsys, "tune", "export", pipe)[0] == 0
    reader.join()
    assert len(json.loads(found[0])["rows"]) == len(list(store().rows()))
    assert pipe.is_fifo()


def test_links_are_followed(capsys, tuned, tmp_path):
    (tmp_path / "there").mkdir()
    (tmp_path / "link").symlink_to("there/rows.json")
    assert run(capsys, "tune", "export", tmp_path / "link")[0] == 0
    assert (tmp_path / "link").is_symlink()
    assert json.loads((tmp_path / "there" / "rows.json").read_text())["rows"]


def test_an_import_of_something_else_is_refused(capsys, shapes):
    code, _, err = run(capsys, "tune", "import", shapes)
    assert code == 2
    assert "is no export of measurements" in err


def test_prune_removes_what_is_old_or_of_other_environments(capsys, tuned, shapes):
    here = store()
    row = next(r.measurement for r in here.rows())
    here.record(replace(row, date=datetime.now(timezone.utc) - timedelta(days=9)))
    assert run_json(capsys, "tune", "prune") == (0, {"removed": 0})
    assert run_json(capsys, "tune", "prune", "--older-than", 10)[1] == {"removed": 0}
    assert run_json(capsys, "tune", "prune", "--older-than", 8)[1] == {"removed": 1}
    run(capsys, "tune", shapes, "--rounds", 7)
    words = ("tune", "prune", "--other-environments", "--device", "cpu")
    code, told = run_json(capsys, *words, "--rounds", 7)
    assert (code, told) == (0, {"removed": 4})
    assert run_json(capsys, *words, "--rounds", 7)[1] == {"removed": 0}
    assert run_json(capsys, *words)[1] == {"removed": 5}


def test_verify_names_damaged_files(capsys, tuned):
    code, told = run_json(capsys, "tune", "verify")
    assert (code, told) == (0, {"passed": True, "rows": 5, "damaged": {}})
    damaged = next(path for path in sorted(store().folder.rglob("*.json")))
    damaged.write_text(damaged.read_text().replace("PASSED", "WRONG"))
    code, told = run_json(capsys, "tune", "verify")
    assert code == 1
    assert told["rows"] == 4
    assert list(told["damaged"]) == [str(damaged)]
    code, out, _ = run(capsys, "tune", "verify")
    assert code == 1
    assert f"{damaged}: " in out
    assert "4 of 5 files ok" in out


def test_a_measurement_of_an_odd_problem_is_shown_by_its_hash(capsys):
    kernel = ka.get_kernels(providers=["reference"])[0]
    data = {
        "signature": ["mine", ["x"]],
        "arguments": {"class": ["my", "Arguments"], "operands": [], "keywords": {}},
        "sizes": {"M": 3},
    }
    problem = Problem.from_dict(data)
    environment = store().environment
    row = Measurement(
        KernelIdentity.of(kernel), problem, environment.digest, Status.PASSED, times_us=(1.0,)
    )
    store().record(row)
    code, out, _ = run(capsys, "tune", "show")
    assert code == 0
    assert problem.digest in out

"""The GEMM suites: what they measure, what they write, and what they do when something fails."""

import functools
import itertools
import json
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from support.benchmarks import FOLDER, SUITES, script
from support.versions import since_torch

import kernel_api as ka
from kernel_api.artifact import CompiledArtifact
from kernel_api.kernel import Kernel
from kernel_api.metadata import BLASDesignMetadata, GroupedGemmOperandsMetadata
from kernel_api.space import Operands, Space
from kernel_api.verification import judge

driver, harness, rows, suite, problems, peers, grouped = map(
    script, ("driver", "harness", "rows", "suite", "problems", "peers", "gemm_grouped")
)

#: What every row has.
FIELDS = {
    *("suite", "problem", "subject", "peer", "subject_us", "peer_us", "ratio", "spread"),
    *("verified", "policy", "env", "date"),
}
SMALL = tuple(problems.Problem(m, 32, 64) for m in (16, 32, 48))


# Without timing --------------------------------------------------------------------------


@pytest.mark.parametrize("name", SUITES)
def test_a_dry_run_lists_every_problem_with_its_peers(name, capsys):
    module = script(name)
    assert module.main(["--dry-run"]) == 0
    text = capsys.readouterr().out
    wanted = module.SUITE if hasattr(module, "SUITE") else module.suite_of("bfloat16")
    for problem in wanted.problems:
        assert problem.label in text
    assert text.count("peers: torch.") == len(wanted.problems)


def test_layers_of_experts_are_listed_where_there_is_no_gpu(capsys):
    assert script("moe_layer").main(["--only", "Mixtral"]) == driver.FAILURES
    assert "Mixtral-8x7B, 4096 tokens" in capsys.readouterr().out


def test_a_dry_run_lists_the_candidates_best_first(capsys):
    script("gemm_bf16").main(["--dry-run", "--only", "8192x8192x8192", "--candidates", "3"])
    expected = [line for line in capsys.readouterr().out.splitlines() if "us expected" in line]
    times = [float(line.split()[-3]) for line in expected]
    assert len(times) == 3
    assert times == sorted(times)


def test_where_nothing_but_torch_is_offered_it_says_so_and_why(capsys):
    script("gemm_bf16").main(["--dry-run", "--filter", "no such kernel", "--limit", "1"])
    assert "nothing but torch is offered" in capsys.readouterr().out


def test_without_a_gpu_the_suites_say_what_can_be_done(capsys):
    assert script("gemm_bf16").main([]) == driver.FAILURES
    assert "--dry-run" in capsys.readouterr().err


def test_scripts_start_from_the_command_line():
    found = subprocess.run(
        [sys.executable, FOLDER / "gemm_decode.py", "--dry-run", "--limit", "1"],
        capture_output=True,
        text=True,
    )
    assert found.returncode == 0, found.stderr
    assert "16x8192x8192" in found.stdout


def test_the_models_suite_has_120_different_shapes_of_every_size():
    module = script("gemm_models")
    shapes = [(p.M, p.N, p.K) for p in module.SUITE.problems]
    assert len(set(shapes)) == len(shapes) == 120
    assert {m for m, _, _ in shapes} >= set(module.TOKENS)
    layers = {p.origin for p in module.SUITE.problems}
    assert len(layers) == 1 + sum(map(len, module.LAYERS.values()))


def test_labels_are_unique_in_every_suite():
    for name in SUITES:
        module = script(name)
        wanted = module.SUITE if hasattr(module, "SUITE") else module.suite_of("float16")
        labels = [p.label for p in wanted.problems]
        assert len(set(labels)) == len(labels)


def test_half_precision_has_a_file_of_its_own():
    assert script("gemm_bf16").suite_of("float16").name == "gemm-f16"
    assert script("gemm_bf16").suite_of("bfloat16").name == "gemm-bf16"


@pytest.mark.parametrize(
    ("problem", "label"),
    [
        (problems.Problem(1, 2, 3), "1x2x3 (M x N x K) TN bf16"),
        (problems.Problem(1, 2, 3, "float32", "float32"), "1x2x3 (M x N x K) TN tf32"),
        (problems.Problem(1, 2, 3, "int8", "int32"), "1x2x3 (M x N x K) TN i8 -> i32"),
        (
            problems.Problem(1, 2, 3, "float8_e4m3fn", "bfloat16", "per_row"),
            "1x2x3 (M x N x K) TN e4m3 per row -> bf16",
        ),
    ],
)
def test_labels_say_sizes_and_types(problem, label):
    assert problem.label == label


def test_variants_for_operands_aligned_to_less_are_no_candidates():
    args = problems.Problem(512, 512, 512).arguments("meta")
    options = suite.options("gemm", "").parse_args(["--all"])
    designs = [(type(k), k.metadata.design) for k in suite.candidates(args, options)]
    assert len(set(designs)) == len(designs) > 10


# Problems and peers ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "problem",
    [
        problems.Problem(32, 48, 64),
        problems.Problem(32, 48, 64, "float16"),
        problems.Problem(32, 48, 64, "float32", "float32"),
        problems.Problem(32, 48, 64, "int8", "int32"),
        problems.Problem(32, 48, 64, "float8_e4m3fn", "bfloat16", "per_tensor"),
        pytest.param(
            problems.Problem(32, 48, 64, "float8_e4m3fn", "bfloat16", "per_row"),
            marks=pytest.mark.skipif(
                torch.__version__ < "2.13", reason="torch before 2.13 scales rows on GPUs alone"
            ),
        ),
    ],
    ids=lambda p: p.label,
)
def test_peers_compute_the_product(problem):
    before = torch.get_float32_matmul_precision()
    try:
        args = problem.arguments("cpu")
        name, peer = next(iter(peers.peers_of(problem).items()))
        peer(args)()
        assert judge(args, factor=3.0), name
    finally:
        torch.set_float32_matmul_precision(before)


def test_block_scales_have_the_shapes_that_arguments_ask():
    problem = problems.Problem(130, 257, 300, "float8_e4m3fn", "bfloat16", "blocks")
    args = problem.arguments("meta")
    assert args.A.scale.shape == (130, 3)
    assert args.B.scale.shape == (3, 3)
    peers.peers_of(problem)["torch._scaled_mm"](args)


def test_bytes_and_operations_are_what_must_be_done_at_least():
    problem = problems.Problem(2, 3, 5, "int8", "int32")
    assert problem.bytes == 2 * 5 + 5 * 3 + 2 * 3 * 4
    assert problem.operations == 2 * 2 * 3 * 5


# Runs on the CPU, with a clock that is made up ----------------------------------------------


class CpuGemm(Kernel):
    """A product that the CPU computes; the second design is wrong, the third raises."""

    arguments = ka.GemmArguments
    devices = ("cpu",)
    operands = (Operands(A="bf16", B="bf16", out="bf16", accumulator="f32", majors="strided"),)
    space = Space(tile_shape=((1, 1, 1), (2, 2, 2), (3, 3, 3)))
    design = BLASDesignMetadata

    def _compile(self, args, cc=None):
        return CompiledArtifact(None, self)

    def _run(self, args, artifact, stream, workspace=None):
        A, B, out = args.tensors
        tile = self.metadata.design.tile_shape[0]
        if tile == 3:
            raise ZeroDivisionError("this one raises")
        torch.mm(A, B, out=out)
        if tile == 2:
            out[0, 0] += 100


def timed(calls, set_bytes, policy="auto", rounds=20):
    """Every call is made; ours take 10 us, all others 20."""
    for one in calls.values():
        for call in one:
            call()
    times = {name: 10.0 if "CpuGemm" in name else 20.0 for name in calls}
    return {n: harness.Timing([t] * 4) for n, t in times.items()}, "made up"


@pytest.fixture
def lab(monkeypatch, registry, tmp_path):
    """A registry with the kernel above, and a function that runs a suite of small problems."""
    registry.register(CpuGemm)
    monkeypatch.setattr(harness, "DEVICE", "cpu")
    monkeypatch.setattr(harness, "interleaved", timed)
    monkeypatch.setattr(harness, "environment", lambda: {"gpu": "made up"})

    def run(*options, what=SMALL, **more):
        parsed = suite.options("fake", "").parse_args(["--out", str(tmp_path), *options])
        return suite.run(suite.Suite("fake", tuple(what), **more), parsed)

    return SimpleNamespace(run=run, file=tmp_path / "fake.json", folder=tmp_path)


def test_a_row_has_every_field_and_the_better_peer(lab, monkeypatch):
    slow = {"torch.mm": peers._mm, "slower": peers._mm}
    monkeypatch.setattr(suite, "peers_of", lambda problem: slow)
    monkeypatch.setattr(
        harness,
        "interleaved",
        lambda calls, *_: (
            {
                n: harness.Timing([{"torch.mm": 15.0, "slower": 30.0}.get(n, 10.0)] * 4)
                for n in calls
            },
            "made up",
        ),
    )
    assert lab.run("--limit", "1") == driver.DONE
    (row,) = json.loads(lab.file.read_text())
    assert set(row) >= FIELDS
    assert (row["peer"], row["ratio"], row["verified"], row["rank"]) == ("torch.mm", 1.5, True, 0)
    assert row["peers_us"] == {"torch.mm": 15.0, "slower": 30.0}
    assert row["tflops"] == pytest.approx(1e-6 * row["operations"] / 10, abs=0.05)


def test_a_kernel_that_is_wrong_or_raises_costs_its_own_row_only(lab, capsys):
    assert lab.run("--candidates", "3") == driver.FAILURES
    text = capsys.readouterr().out
    assert "WRONG" in text
    assert "this one raises" in text
    found = json.loads(lab.file.read_text())
    assert [row["problem"] for row in found] == [p.label for p in SMALL]
    assert all("1x1x1" in row["subject"] for row in found)


def test_a_peer_that_computes_something_else_is_left_out(lab, monkeypatch, capsys):
    def zeros(args):
        return lambda: args.out.tensor.zero_()

    both = {"zeros": zeros, "torch.mm": peers._mm}
    monkeypatch.setattr(suite, "peers_of", lambda problem: both)
    lab.run("--limit", "1")
    (row,) = json.loads(lab.file.read_text())
    assert row["peer"] == "torch.mm"
    assert "left out: " in capsys.readouterr().err


def test_a_problem_that_nothing_of_ours_takes_is_named(lab, capsys):
    half = problems.Problem(16, 32, 64, "float16")
    assert lab.run(what=(half, *SMALL)) == driver.DONE
    assert f"nothing but torch is offered: {half.label}" in capsys.readouterr().out
    assert len(json.loads(lab.file.read_text())) == 3


def test_a_run_that_resumes_measures_only_what_is_missing(lab, monkeypatch):
    lab.run("--limit", "2")
    before = json.loads(lab.file.read_text())
    timed_now = []
    monkeypatch.setattr(
        harness, "interleaved", lambda calls, *a: timed_now.append(1) or timed(calls, *a)
    )
    assert lab.run("--resume") == driver.DONE
    after = json.loads(lab.file.read_text())
    assert after[:2] == before
    assert [row["problem"] for row in after] == [p.label for p in SMALL]
    assert len(timed_now) == 1


def test_a_run_that_does_not_resume_starts_a_new_file(lab):
    lab.run()
    lab.run("--limit", "1")
    assert len(json.loads(lab.file.read_text())) == 1


def test_a_run_out_of_time_stops_and_says_what_it_skipped(lab, capsys):
    assert lab.run("--seconds", "0") == driver.DONE
    text = capsys.readouterr().out
    assert "skipped 3" in text
    assert SMALL[2].label in text


def test_rows_are_on_disk_before_the_next_problem_begins(lab, monkeypatch):
    seen = []

    def note(calls, *more):
        seen.append(len(json.loads(lab.file.read_text())) if lab.file.exists() else 0)
        return timed(calls, *more)

    monkeypatch.setattr(harness, "interleaved", note)
    lab.run()
    assert seen == [0, 1, 2]


def test_what_never_returned_is_left_out_when_the_run_resumes(lab, capsys):
    lab.run("--limit", "1")
    name = json.loads(lab.file.read_text())[0]["subject"]
    notes = lab.file.with_suffix(".unfinished")
    notes.write_text(json.dumps([[SMALL[1].label, name]]))
    lab.run("--resume")
    found = [row["problem"] for row in json.loads(lab.file.read_text())]
    assert found == [SMALL[0].label, SMALL[2].label]
    assert f"never returned, left out: {name} on {SMALL[1].label}" in capsys.readouterr().out


def test_a_lost_gpu_ends_the_run_and_keeps_the_rows(lab, monkeypatch, capsys):
    answers = iter([True] * 4)  # the first problem: kernel, peer, timing
    monkeypatch.setattr(harness, "alive", lambda: next(answers, False))

    def lost(calls, *more):
        if lab.file.exists():
            raise RuntimeError("illegal memory access")
        return timed(calls, *more)

    monkeypatch.setattr(harness, "interleaved", lost)
    assert lab.run() == driver.DIED
    assert len(json.loads(lab.file.read_text())) == 1
    assert "illegal memory access" in capsys.readouterr().out


def test_a_hang_ends_the_process_and_is_remembered(tmp_path):
    code = (
        f"import sys, time; sys.path.insert(0, {str(FOLDER)!r})\n"
        "import pathlib, rows\n"
        f"journal = rows.Journal(pathlib.Path({str(tmp_path / 'x.json')!r}), False)\n"
        "journal.add([{'problem': 'a'}])\n"
        "with journal.attempt('b', 'kernel', 0.5): time.sleep(60)\n"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60)
    assert found.returncode == driver.DIED
    journal = rows.Journal(tmp_path / "x.json", resume=True)
    assert journal.has("a")
    assert journal.lost("b", "kernel")


def test_all_candidates_are_kept_for_the_fit(lab):
    lab.run("--all", "--limit", "1")
    lab.run("--all", "--limit", "2")
    found = json.loads((lab.folder / "gemm-candidates.json").read_text())
    assert [row["problem"] for row in found["problems"]] == [p.label for p in SMALL[:2]]
    (times,) = {tuple(row["times_us"].values()) for row in found["problems"]}
    assert times == (10.0,)
    assert found["problems"][0]["sizes"]["K"] == 64


class CpuGroups(Kernel):
    """Products of groups that the CPU computes, in two designs."""

    arguments = ka.GroupedGemmArguments
    devices = ("cpu",)
    operands = (
        Operands(
            A="bf16", B="bf16", out="bf16", offsets="i32", accumulator="f32", majors="strided"
        ),
    )
    operands_metadata = GroupedGemmOperandsMetadata
    space = Space(tile_shape=((1, 1, 1), (2, 2, 2)))
    design = BLASDesignMetadata

    def _compile(self, args, cc=None):
        return CompiledArtifact(None, self)

    def _run(self, args, artifact, stream, workspace=None):
        multiply_groups(args)


def multiply_groups(args):
    A, B, out, offsets = args.tensors
    begin = 0
    for matrix, end in zip(B, offsets.tolist(), strict=True):
        out[begin:end] = A[begin:end] @ matrix
        begin = end


def test_all_candidates_of_other_suites_are_rows(lab, registry):
    registry.register(CpuGroups)
    problem = grouped.Problem(24, 16, 8, groups=3)
    by_torch = {"torch": lambda args: functools.partial(multiply_groups, args)}
    assert lab.run("--all", what=[problem], peers=lambda problem: by_torch) == driver.DONE
    assert [row["rank"] for row in json.loads(lab.file.read_text())] == [0, 1]
    assert not (lab.folder / "gemm-candidates.json").exists()


def test_large_operands_have_one_set(lab, registry, monkeypatch):
    """None of them is in L2 when it is read again, and several may not be in memory."""
    made = []
    own = CpuGemm._run

    def run(self, args, *rest):
        made.append(args.A.tensor.data_ptr())
        return own(self, args, *rest)

    monkeypatch.setattr(CpuGemm, "_run", run)
    monkeypatch.setattr(suite, "MOST_BYTES", SMALL[0].bytes)
    lab.run("--limit", "1")
    assert len(set(made)) == 1


def test_candidates_behind_the_best_are_verified_too(lab, capsys):
    assert lab.run("--all", "--limit", "1") == driver.FAILURES
    text = capsys.readouterr().out
    assert "WRONG" in text
    assert "this one raises" in text
    found = json.loads((lab.folder / "gemm-candidates.json").read_text())
    assert len(found["problems"][0]["times_us"]) == 1


def test_what_a_suite_times_beside_is_in_its_rows(lab):
    def beside(problem, args):
        return {"other": [lambda: None]}

    def extra(problem, microseconds, medians):
        return {"beside_us": medians["other"], "own_us": microseconds}

    lab.run("--limit", "1", beside=beside, extra=extra)
    (row,) = json.loads(lab.file.read_text())
    assert (row["beside_us"], row["own_us"]) == (20.0, 10.0)


def test_decode_compares_with_the_copy():
    module = script("gemm_decode")
    problem = module.SUITE.problems[0]
    copy_us = 2e-6 * harness.COPIED_BYTES / 4.0  # 4 TB/s
    found = module.extra(problem, 1e-6 * problem.bytes / 3.6, {harness.COPY: copy_us})
    assert found["ceiling_tb_s"] == pytest.approx(4.0)
    assert found["of_ceiling"] == pytest.approx(0.9)


# Fused epilogues -------------------------------------------------------------------------


@pytest.mark.parametrize("name", script("fusion_dense").FUSIONS)
def test_formulas_beside_fusions_compute_the_same(name):
    fused = script("fusion_dense")
    problem = fused.Problem(24, 256, 64, fusion=name)
    args = problem.arguments("cpu")
    fused.bound(fused.writer(fused.FUSIONS[name]), args)()
    assert fused.wrong(args) is None
    args.out.tensor.add_(0.1 * args.out.tensor.abs().max())
    assert fused.wrong(args).startswith("out: ")


@since_torch("2.12", "multiplies on the CPU by scales of whole tensors alone")
def test_the_formula_behind_a_scaled_product_computes_the_same():
    fused = script("fusion_dense")
    types = {"element": "float8_e4m3fn", "out": "bfloat16", "scales": "per_row"}
    for problem in (p for p in fused.SCALED if p.scales == "per_row" and p.M == 64):
        args = fused.Problem(24, 256, 64, fusion=problem.fusion, **types).arguments("cpu")
        fused.bound_behind(fused.behind(fused.FUSIONS[problem.fusion]), args)()
        assert fused.wrong(args) is None


def test_what_fusions_move_beyond_the_plain_product():
    fused = script("fusion_dense")
    M, N, K = 24, 256, 64
    moved = {name: fused.Problem(M, N, K, fusion=name).extra_bytes for name in fused.FUSIONS}
    assert moved["swiglu"] == 0  # it writes half as much
    assert moved["swiglu, preactivation stored"] == M * N // 2 * 2
    assert moved["residual"] == M * N * 2
    assert moved["dswiglu, dprob"] == M * N * 2 * 3 + 2 * M * 4


def test_the_limit_of_a_fusion_counts_the_plain_product_and_the_bytes_beyond():
    fused = script("fusion_dense")
    problem = fused.Problem(24, 256, 64, fusion="swiglu, preactivation stored")
    medians = {fused.PLAIN: 100.0, harness.COPY: 500.0}
    found = fused.extra(problem, 110.0, medians)
    copied = problem.extra_bytes * 500.0 / (2 * harness.COPIED_BYTES)
    assert found["of_plain"] == 1.1
    assert found["of_limit"] == pytest.approx(110.0 / (103.0 + copied), rel=1e-3)


def test_layers_of_experts_are_compared_with_their_peer_before_they_are_timed():
    moe_layer = script("moe_layer")
    example = moe_layer.example()
    layer = example.Layer(experts=4, chosen=2, hidden=128, inner=64)
    operands = (*layer.tokens(40, "cpu"), *layer.weights("cpu"))
    right = {"ours": ka.nn.moe, "theirs": example.layer_by_expert}
    for makes in (moe_layer._forward, moe_layer._steps):
        calls = makes(right, operands)
        assert list(calls) == list(right)
    assert [one.shape for one in calls["ours"]()] == [
        operands[place].shape for place in (0, 2, 3, 4)
    ]
    wrong = {**right, "ours": lambda *given: 1.1 * ka.nn.moe(*given)}
    for makes, words in (
        (moe_layer._forward, "ours is off by"),
        (moe_layer._steps, "gradients of"),
    ):
        with pytest.raises(RuntimeError, match=words):
            makes(wrong, operands)


def scaled_grouped_mm(A, B, of_A, of_B, offs, out_dtype, use_fast_accum):
    """As torch has it on a GPU."""
    out = torch.zeros(A.shape[0], B.shape[2])
    for expert, (first, end) in enumerate(itertools.pairwise((0, *offs.tolist()))):
        product = A[first:end].float() @ B[expert].float()
        out[first:end] = product * of_A[first:end, None] * of_B[expert]
    return out.to(out_dtype)


@since_torch("2.10", "takes no rows of 8-bit floats on the CPU")
@pytest.mark.parametrize("scales", ["blocks", "rows"])
def test_layers_of_8_bits_are_compared_with_their_peer_less_closely(scales, monkeypatch):
    moe_layer = script("moe_layer")
    monkeypatch.setattr(torch, "_scaled_grouped_mm", scaled_grouped_mm)
    example = moe_layer.example()
    layer = example.Layer(experts=4, chosen=2, hidden=256, inner=128)
    weights = layer.weights("cpu")
    operands = (*layer.tokens(40, "cpu"), *weights)
    if scales == "rows":
        layers = moe_layer._of_rows(weights)
        ours, theirs = layers
        rough = (ours, theirs)
    else:
        ours, rough = "ours", ("ours",)
        experts = tuple(map(moe_layer.in_blocks, weights))
        layers = {ours: moe_layer._of_8_bits(experts), "theirs": example.layer_by_expert}
    with torch.compiler.set_stance("force_eager"):
        assert list(moe_layer._forward(layers, operands, rough)) == list(layers)
        with pytest.raises(RuntimeError, match=f"{ours} is off by"):
            moe_layer._forward(layers, operands)
        with pytest.raises(RuntimeError, match=f"{rough[-1]} is off by"):
            moe_layer._forward(layers, operands, rough[:-1])
    listed = script("moe_layer_8_bits").problems()
    assert {problem.scales for problem in listed} == {"blocks", "rows"}
    labels = [problem.label for problem in listed]
    assert len(set(labels)) == len(labels)
    assert "Mixtral-8x7B, 16 tokens, experts of 8 bits" in labels


def test_what_takes_more_memory_than_there_is_costs_its_own_row_only(monkeypatch, tmp_path, capsys):
    moe_layer = script("moe_layer")
    measured = []

    def measure(problem, rounds):
        measured.append(problem)
        if len(measured) == 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return {"suite": "some", "rank": 0, "problem": problem.label}

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    options = driver.few_options("", rounds=1).parse_args(["--out", str(tmp_path)])
    problems = moe_layer.problems()[:3]
    lines = (lambda row: row["problem"], lambda found: [f"{len(found)} rows"])
    assert driver.in_turn("some", problems, options, measure, *lines) == driver.DONE
    shown = capsys.readouterr()
    assert "2 rows" in shown.out
    assert f"left out: {problems[0].label}: OutOfMemoryError: CUDA out of m" in shown.err


@pytest.mark.parametrize(
    ("name", "folder"),
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA GeForce RTX 4090", "4090"),
        ("Some GPU", "gpu"),
    ],
)
def test_rows_are_filed_under_the_model_of_the_gpu(name, folder, monkeypatch):
    monkeypatch.setattr(harness.torch.cuda, "get_device_name", lambda: name)
    assert harness.gpu_folder() == folder

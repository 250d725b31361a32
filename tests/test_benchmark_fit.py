"""Fitting the performance model: known constants are found again from noisy times, and times of
tuners take the place of older ones."""

import copy
import dataclasses
import json
import math
import random

import pytest
import torch
from support.benchmarks import script
from support.gemm_constants import GPU
from support.tuning import ENVIRONMENT, measured
from support.tuning import arguments as tuned_arguments

import kernel_api as ka
from kernel_api.fusions import rmsnorm
from kernel_api.providers.cutedsl.gemm import machine, model
from kernel_api.providers.cutedsl.gemm.model import Candidate, Problem
from kernel_api.tuning import Problem as TunedProblem
from kernel_api.tuning import Status
from kernel_api.tuning._row import Row
from kernel_api.tuning._table import write

fit_model = script("fit_model")
fit_rows = script("fit_rows")

FAMILY = "sm90.gemm"
NOISE = 0.02
CANDIDATES = {
    "128x256": Candidate((128, 256, 64), (2, 1), "cooperative", 4),
    "256x128": Candidate((256, 128, 64), (2, 1), "cooperative", 4),
    "128x128 pingpong": Candidate((128, 128, 64), (2, 1), "pingpong", 6),
    "128x128": Candidate((128, 128, 64), (1, 1), "cooperative", 6),
    "128x128 split": Candidate((128, 128, 64), (1, 1), "cooperative", 6, split_k=4),
    "128x64 meeting": Candidate((128, 64, 64), (1, 1, 4), "cooperative", 8, split_k=4),
    "128x128 stream": Candidate((128, 128, 64), (1, 1), "cooperative", 6, stream_k=True),
    "64x128": Candidate((64, 128, 64), (1, 1), "cooperative", 9),
    "64x64": Candidate((64, 64, 64), (1, 1), "cooperative", 13),
    "16x64 swap": Candidate((64, 16, 64), (1, 1), "cooperative", 22, swap_ab=True),
}
SIZES = [(m, n, k) for m in (1, 16, 128, 1024, 8192) for n in (4096, 14336) for k in (1024, 8192)]
SIZES += [(s, s, s) for s in (256, 512, 1000, 1500, 2048, 3000, 4096, 6000)]


def table():
    """Where every fit starts from."""
    return copy.deepcopy(GPU)


@pytest.fixture(scope="module")
def truth():
    """Constants that are up to a third larger or smaller than those of the file; arithmetic is
    limited by power, or nothing could be learned of it."""

    def changed(name, value):
        """Whatever other constants there are."""
        if isinstance(value, dict):
            return {key: changed(key, one) for key, one in value.items()}
        return value * math.exp(random.Random(f"{name} 0").uniform(-0.4, 0.4))

    found = table()
    for part in (found["machine"], found["families"][FAMILY]):
        for name in part.keys() - set(fit_model.NOT_FITTED):
            part[name] = changed(name, part[name])
    found["families"][FAMILY]["share"] = {"cooperative": 0.8, "pingpong": 1.1}
    found["families"][FAMILY]["store"] *= 0.5
    found["machine"]["bandwidth"] = 0.75 * table()["machine"]["bandwidth"]
    found["machine"]["sustained"] = {"float16": 0.65 * table()["machine"]["sustained"]["float16"]}
    return found


@pytest.fixture(scope="module")
def rows(truth, tmp_path_factory):
    """A file of candidates' times: those of the true constants, and noise."""
    dice = random.Random(7)
    constants = machine.Constants.of(truth, FAMILY)
    problems = []
    for m, n, k in SIZES:
        sizes = Problem(m, n, k, 1, 2, 2, 2, 2 * m * k, 2 * n * k, 2 * m * n, "float16")
        times = {
            name: 1e6 * model.seconds(sizes, one, constants) * math.exp(dice.gauss(0, NOISE))
            for name, one in CANDIDATES.items()
        }
        problems.append(
            {
                "problem": f"{m}x{n}x{k}",
                "sizes": dataclasses.asdict(sizes),
                "times_us": {**times, "unknown to the model": 1e9},
                "env": {"gpu": "NVIDIA H200"},
            }
        )
    kernels = {
        name: {"family": FAMILY, "candidate": dataclasses.asdict(one), "factor": 1.0}
        for name, one in CANDIDATES.items()
    }
    kernels["unknown to the model"] = {"family": "other"}
    path = tmp_path_factory.mktemp("rows") / "gemm-candidates.json"
    path.write_text(json.dumps({"kernels": kernels, "problems": problems}))
    return path


@pytest.fixture(scope="module")
def fitted(rows):
    _, problems = fit_model.load(rows)
    train, held_out = fit_model.split(problems)
    parameters = fit_model.Parameters(table(), train)
    point = fit_model.Fit(parameters, train).run()
    return parameters.table_at(point), held_out


def mean_regret(problems, constants):
    return fit_model.geometric_mean([c.regret for c in fit_model.choices(problems, constants)])


@pytest.mark.parametrize("name", ["bandwidth", "sustained"])
def test_what_the_gpu_does_is_found_again(fitted, truth, name):
    found, wanted = (t["machine"][name] for t in (fitted[0], truth))
    if name == "sustained":
        found, wanted = found["float16"], wanted["float16"]
    before = table()["machine"][name]
    before = before["float16"] if name == "sustained" else before
    assert found == pytest.approx(wanted, rel=0.05)
    assert before != pytest.approx(wanted, rel=0.05)


def test_what_the_tensor_cores_do_is_found_again(fitted, truth):
    def rate(constants):
        own = constants["families"][FAMILY]
        return own["rate"]["float16"] * own["share"]["cooperative"]

    assert rate(fitted[0]) == pytest.approx(rate(truth), rel=0.1)


def test_times_of_problems_held_out_are_predicted(fitted, truth):
    found, held_out = fitted
    guess, wanted = (machine.Constants.of(t, FAMILY) for t in (found, truth))
    for problem in held_out:
        for name, candidate in CANDIDATES.items():
            expected = model.seconds(problem.sizes, candidate, wanted)
            assert model.seconds(problem.sizes, candidate, guess) == pytest.approx(
                expected, rel=0.15
            ), (problem.label, name)


def test_first_choices_for_problems_held_out_are_within_5_percent(fitted):
    found, held_out = fitted
    assert len(held_out) >= 10
    assert mean_regret(held_out, found) < 1.05
    assert max(c.regret for c in fit_model.choices(held_out, found)) < 1.25


def test_the_fit_makes_better_choices_than_what_it_started_from(fitted):
    found, held_out = fitted
    assert mean_regret(held_out, found) < mean_regret(held_out, table())


def test_constants_that_no_row_depends_on_stay(fitted):
    found, before = fitted[0], table()
    assert found["machine"]["sustained"]["int8"] == before["machine"]["sustained"]["int8"]
    assert found["machine"]["multiprocessors"] == before["machine"]["multiprocessors"]


def test_families_without_rows_keep_what_they_had_of_the_machine(fitted):
    found, before = fitted[0], table()
    for family in before["families"].keys() - {FAMILY}:
        after, kept = (machine.Constants.of(one, family) for one in (found, before))
        assert vars(after) == vars(kept)
    assert found["machine"]["bandwidth"] != before["machine"]["bandwidth"]


def test_polishing_does_not_spoil_the_choices(rows, fitted):
    _, problems = fit_model.load(rows)
    train, _ = fit_model.split(problems)
    parameters = fit_model.Parameters(table(), train)
    fit = fit_model.Fit(parameters, train)
    polished = parameters.table_at(fit.polish(parameters.start, sweeps=1))
    assert mean_regret(train, polished) <= mean_regret(train, table()) + 1e-9


def test_half_of_the_problems_are_held_out_whatever_their_order(rows):
    _, problems = fit_model.load(rows)
    train, held_out = fit_model.split(problems)
    assert abs(len(train) - len(held_out)) <= 1
    assert not {p.label for p in train} & {p.label for p in held_out}
    assert fit_model.split(problems[::-1]) == (train, held_out)


def test_a_family_without_constants_gets_its_own(rows):
    _, problems = fit_model.load(rows)
    renamed = [
        dataclasses.replace(
            p, times=tuple(dataclasses.replace(t, family="sm90.gemm_fp8") for t in p.times)
        )
        for p in problems
    ]
    start = fit_model.Parameters(table(), renamed)
    own = start.table_at(start.start)["families"]["sm90.gemm_fp8"]
    assert own.keys() == table()["families"][FAMILY].keys()


def test_the_script_prints_the_hold_out_and_writes_what_the_model_reads(rows, tmp_path, capsys):
    path = tmp_path / "model.json"
    path.write_text(json.dumps({"NVIDIA H200": GPU}))
    assert fit_model.main(["--rows", str(rows), "--constants", str(path), "--write"]) == 0
    text = capsys.readouterr().out
    assert "after, held out" in text
    assert "instead of" in text
    written = json.loads(path.read_text())["NVIDIA H200"]
    assert written["machine"]["bandwidth"] != table()["machine"]["bandwidth"]
    assert machine.Constants.of(written, FAMILY).multiprocessors == 132


# Times of tuners -------------------------------------------------------------------------

SIZES_OF_ONE = Problem(64, 64, 64, 1, 2, 2, 2, 8192, 8192, 8192, "float16")


def time(kernel, microseconds, **fields):
    return fit_rows.Time(kernel, FAMILY, CANDIDATES["128x128"], 1.0, 1e-6 * microseconds, **fields)


def problem(*times, k=64, **fields):
    sizes = dataclasses.replace(SIZES_OF_ONE, K=k)
    return fit_rows.Measured(f"64x64x{k}", sizes, times, **fields)


def times_of(problem):
    return {t.kernel: pytest.approx(1e6 * t.seconds) for t in problem.times}


@pytest.fixture
def dense():
    """Arguments of a dense product, and kernels of ours that take them."""
    args = tuned_arguments(M=1024)
    found = [k for k in ka.get_kernels(args, cc=90) if hasattr(k, "candidate")]
    return args, found[:3]


def test_a_table_has_times_of_kernels_that_the_model_knows(dense, tmp_path):
    args, (first, second, third) = dense
    (torch_kernel,) = ka.get_kernels(args, cc=90, providers=["torch"])
    one, many, few = TunedProblem.of(args), [40.0] * 20, [44.0] * 5
    rows = [
        measured(first, one, *many),
        measured(second, one, *few),
        measured(third, one, status=Status.WRONG),
        measured(torch_kernel, one, *[38.0] * 20),
    ]
    norm = rmsnorm(
        torch.empty(8, 512, dtype=torch.bfloat16, device="meta"),
        weight=torch.empty(512, dtype=torch.bfloat16, device="meta"),
        out=torch.empty(8, 512, dtype=torch.bfloat16, device="meta"),
    )
    other = next(iter(ka.get_kernels(norm, cc=90)))
    rows.append(measured(other, TunedProblem.of(norm), 3.0))
    (path,) = write([Row(ENVIRONMENT, row) for row in rows], tmp_path)
    (found,) = fit_rows.tuned(path)
    assert found.sizes == model.Problem.of(args)
    assert found.has_fastest and found.peer == pytest.approx(38e-6)
    known = {t.kernel: t for t in found.times}
    assert known.keys() == {k.metadata.kernel_name for k in (first, second)}
    for kernel, microseconds in ((first, 40), (second, 44)):
        one = known[kernel.metadata.kernel_name]
        assert one.measured == pytest.approx(1e-6 * microseconds)
        assert dataclasses.asdict(one.candidate) == dataclasses.asdict(kernel.candidate)
        constants = machine.constants(one.family)
        estimate = one.factor * model.seconds(found.sizes, one.candidate, constants)
        assert estimate == pytest.approx(kernel.predict(args), rel=1e-5)
    weights = [known[k.metadata.kernel_name].weight for k in (first, second)]
    assert 1 > weights[0] > weights[1] > 0


def test_the_rows_of_the_suite_tuning_have_all_candidates(tmp_path):
    asked = script("gemm_models").SUITE.problems[0]
    kernels = [
        k.metadata.kernel_name
        for k in ka.get_kernels(asked.arguments("meta"), cc="90")
        if hasattr(k, "candidate")
    ]
    times = {kernels[0]: [16.0, 80], kernels[1]: [17.0, 5], kernels[2]: "WRONG"}
    times |= {"not here any more": [3.0, 5], "torch_mm": [18.0, 80]}
    path = tmp_path / "tuning.json"
    path.write_text(json.dumps([{"problem": asked.label, "runs": [times, {}]}]))
    (found,) = fit_rows.tuned(path)
    assert not found.has_fastest and found.peer == pytest.approx(18e-6)
    assert {t.kernel: 1e6 * t.measured for t in found.times} == pytest.approx(
        {kernels[0]: 16.0, kernels[1]: 17.0}
    )
    assert all(t.is_tuned for t in found.times)


def test_times_of_few_rounds_weigh_less(rows, tmp_path):
    found = json.loads(rows.read_text())
    name = next(iter(found["problems"][0]["times_us"]))
    found["problems"][0]["rounds"] = {name: 5}
    (path := tmp_path / "rows.json").write_text(json.dumps(found))
    weights = {time.kernel: time.weight for time in fit_rows.load(path)[1][0].times}
    assert weights.pop(name) == 0.5
    assert set(weights.values()) == {1.0}


def test_newer_times_win_and_older_ones_are_shifted_by_the_ratio_of_clocks():
    older = [problem(time("a", 100), time("b", 120), time("c", 200), peer=150e-6)]
    newer = [problem(time("a", 110), time("d", 130))]
    (found,) = fit_rows.merged(older, newer)
    assert times_of(found) == {"a": 110, "d": 130, "b": 132, "c": 220}
    assert found.peer == pytest.approx(165e-6)
    weights = {t.kernel: t.weight for t in found.times}
    assert weights["a"] == weights["d"] == 1 > weights["b"] == weights["c"]


def test_older_times_are_shifted_by_what_a_launch_takes_less():
    sizes = range(64, 64 + 16)
    older = [problem(time("a", 10 + k), time("b", 12 + k), k=k) for k in sizes]
    newer = [problem(time("a", 9 + k), k=k) for k in sizes]
    for one in fit_rows.merged(older, newer):
        assert times_of(one) == {"a": 9 + one.sizes.K, "b": 11 + one.sizes.K}


def test_candidates_that_a_table_does_not_keep_are_not_faster_than_those_it_keeps():
    older = [problem(time("a", 90), time("b", 95, is_tuned=True), time("c", 95))]
    newer = [problem(time("a", 90), time("d", 100), has_fastest=True)]
    (found,) = fit_rows.merged(older, newer)
    assert times_of(found) == {"a": 90, "d": 100, "b": 100, "c": 95}


def test_measurements_of_one_problem_are_joined_by_medians():
    several = [
        problem(time("a", 100), time("b", 120), peer=150e-6),
        problem(time("a", 104), time("c", 200)),
        problem(time("a", 120), peer=170e-6),
    ]
    other = problem(time("a", 10), k=128)
    found, unchanged = fit_rows.joined([several[0], other, *several[1:]])
    assert times_of(found) == {"a": 104, "b": 120, "c": 200}
    assert found.peer == pytest.approx(160e-6)
    assert unchanged == other


def test_rows_of_several_gpus_are_not_put_together(rows, tmp_path):
    other = tmp_path / "other.json"
    other.write_text(rows.read_text().replace("NVIDIA H200", "NVIDIA H100"))
    with pytest.raises(SystemExit, match=r"other.json has times of NVIDIA H100, .* of NVIDIA H200"):
        fit_model.main(["--rows", str(rows), "--rows", str(other)])


def test_problems_of_one_source_alone_stay():
    older = [problem(time("a", 10), time("b", 12))]
    newer = [problem(time("a", 10), time("b", 12), k=128), problem(time("a", 10), k=256)]
    found = fit_rows.merged(older, newer)
    assert found == [older[0], newer[0]]  # one kernel alone is no choice


def test_the_script_takes_tables_and_says_how_far_peers_are(rows, dense, tmp_path, capsys):
    args, kernels = dense
    (torch_kernel,) = ka.get_kernels(args, cc=90, providers=["torch"])
    one = TunedProblem.of(args)
    found = [measured(k, one, *[40.0] * 20) for k in kernels[:2]]
    found.append(measured(torch_kernel, one, *[20.0] * 20))
    (table_path,) = write([Row(ENVIRONMENT, row) for row in found], tmp_path)
    path = tmp_path / "model.json"
    path.write_text(json.dumps({"NVIDIA H200": GPU}))
    options = ["--rows", str(rows), "--constants", str(path), "--table", str(table_path)]
    assert fit_model.main([*options, "--everything"]) == 0
    text = capsys.readouterr().out
    assert f"{len(SIZES) + 1} problems" in text
    assert "peer over first choice: geometric mean 0.5000, worst 0.500, 1 of 1 below" in text

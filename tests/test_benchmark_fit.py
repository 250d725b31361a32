"""Fitting the performance model: known constants are found again from noisy times."""

import copy
import dataclasses
import json
import math
import random

import pytest
from support.benchmarks import script
from support.gemm_constants import GPU

from kernel_api.providers.cutedsl.gemm import model
from kernel_api.providers.cutedsl.gemm.model import Candidate, Problem

fit_model = script("fit_model")

FAMILY = "sm90.gemm"
NOISE = 0.02
CANDIDATES = {
    "128x256": Candidate((128, 256, 64), (2, 1), "cooperative", 4),
    "256x128": Candidate((256, 128, 64), (2, 1), "cooperative", 4),
    "128x128 pingpong": Candidate((128, 128, 64), (2, 1), "pingpong", 6),
    "128x128": Candidate((128, 128, 64), (1, 1), "cooperative", 6),
    "128x128 split": Candidate((128, 128, 64), (1, 1), "cooperative", 6, split_k=4),
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
    dice = random.Random(3)

    def changed(value):
        if isinstance(value, dict):
            return {name: changed(one) for name, one in value.items()}
        return value * math.exp(dice.uniform(-0.4, 0.4))

    found = table()
    for part in (found["machine"], found["families"][FAMILY]):
        for name in sorted(part.keys() - set(fit_model.NOT_FITTED)):
            part[name] = changed(part[name])
    found["families"][FAMILY]["share"] = {"cooperative": 0.8, "pingpong": 1.1}
    found["families"][FAMILY]["store"] *= 0.5
    found["machine"]["bandwidth"] = 0.75 * table()["machine"]["bandwidth"]
    found["machine"]["sustained"] = {"float16": 0.65 * table()["machine"]["sustained"]["float16"]}
    return found


@pytest.fixture(scope="module")
def rows(truth, tmp_path_factory):
    """A file of candidates' times: those of the true constants, and noise."""
    dice = random.Random(7)
    constants = model.Constants.of(truth, FAMILY)
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
    guess, wanted = (model.Constants.of(t, FAMILY) for t in (found, truth))
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
    assert found["families"]["sm80.gemm"] == before["families"]["sm80.gemm"]
    assert found["machine"]["sustained"]["int8"] == before["machine"]["sustained"]["int8"]
    assert found["machine"]["multiprocessors"] == before["machine"]["multiprocessors"]


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
    assert model.Constants.of(written, FAMILY).multiprocessors == 132

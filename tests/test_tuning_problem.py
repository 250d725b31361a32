"""What was measured, and of what: kernel_api.tuning.Problem and Measurement."""

import json
import math
from datetime import datetime

import pytest
import torch
from support.tuning import ENVIRONMENT, arguments, measured, problem, some_kernels, tensor

import kernel_api as ka
from kernel_api.errors import ArgumentError
from kernel_api.tuning import (
    KernelIdentity,
    Measurement,
    Problem,
    Status,
)


@pytest.fixture(scope="module")
def kernels():
    return some_kernels()


# Problems --------------------------------------------------------------------------------


def test_problems_of_equal_arguments_are_equal():
    assert problem() == problem()
    assert problem().digest == problem().digest
    assert problem().sizes == {"M": 256, "N": 512, "K": 128, "L": 1}


def scaled(args, value):
    return ka.GemmArguments(
        *args.tensors, epilogue=ka.EpilogueArguments(lambda accum, s: accum * s, s=value)
    )


@pytest.mark.parametrize(
    "other",
    [
        lambda: arguments(512),
        lambda: arguments(dtype=torch.float16),
        lambda: arguments(offset=1),
        lambda: arguments(L=1),
        lambda: arguments(accumulator_type="float64"),
        lambda: scaled(arguments(), 2.0),
        lambda: ka.GemmArguments(tensor(128, 256).mT, tensor(128, 512), tensor(256, 512)),
        lambda: ka.GemmArguments(tensor(256, 256)[:, :128], tensor(128, 512), tensor(256, 512)),
    ],
    ids=["size", "type", "alignment", "batch", "accumulator", "epilogue", "major", "pitch"],
)
def test_problems_differ_with_what_a_kernel_may_depend_on(other):
    assert Problem.of(other()) != problem()


def test_the_float32_precision_is_in_it():
    found = {problem(dtype=torch.float32, fp32_precision=p) for p in ("ieee", "tf32", "tf32x3")}
    assert len(found) == 3


def test_scale_modes_are_in_it():
    def with_scale(shape, mode):
        scale = torch.empty(shape, device="meta")
        a, b, out = arguments(dtype=torch.float8_e4m3fn).tensors
        return Problem.of(ka.GemmArguments(ka.ScaledOperand(a, scale, mode), b, out))

    assert with_scale((), ka.ScaleMode.PER_TENSOR) != with_scale((256,), ka.ScaleMode.PER_ROW)


def test_numbers_given_at_run_time_have_no_part():
    assert Problem.of(scaled(arguments(), 2.0)) == Problem.of(scaled(arguments(), 3.0))
    one, other = (
        Problem.of(ka.RmsNormArguments(tensor(64, 128), tensor(64, 128), eps=eps))
        for eps in (1e-6, 1e-5)
    )
    assert one == other
    assert one.sizes == {"M": 64, "N": 128}


def test_memory_that_is_more_aligned_than_counts_makes_no_other_problem():
    memory, B, out = (torch.empty(size, dtype=torch.bfloat16) for size in (4096, 1024, 1024))
    start = -memory.data_ptr() // 2 % 64
    for step, equal in ((64, True), (32, False)):  # bytes that the second is aligned to
        A = [memory[at : at + 1024].view(32, 32) for at in (start, start + step // 2)]
        found = [Problem.of(ka.GemmArguments(a, B.view(32, 32), out.view(32, 32))) for a in A]
        assert (found[0] == found[1]) is equal


def test_a_problem_comes_back_from_its_json_form():
    for one in (problem(), Problem.of(scaled(arguments(), 2.0))):
        again = Problem.from_dict(json.loads(json.dumps(one.to_dict())))
        assert again == one
        assert again.likeness == one.likeness


@pytest.mark.parametrize(
    "wrong", [[], {}, {"signature": [], "sizes": {"M": -1}}, {"signature": [], "sizes": {}}]
)
def test_what_is_no_problem_is_an_error(wrong):
    with pytest.raises(ArgumentError):
        Problem.from_dict(wrong)


def test_likeness_has_all_but_the_sizes():
    one = problem()
    assert one.likeness == problem(257, 1024, 64).likeness
    assert one.likeness == problem(256, 520, 128).likeness  # 16 bytes divide both pitches
    others = [problem(256, 513, 128), problem(dtype=torch.float16), problem(L=1), problem(offset=1)]
    assert one.likeness not in [other.likeness for other in others]


def test_the_distance_is_the_largest_ratio_and_then_their_sum():
    assert problem().distance(problem()) == (0, 0)
    assert problem().distance(problem(512, 256, 128)) == (1, 2)
    assert problem().distance(problem(dtype=torch.float16)) is None
    assert problem(0).distance(problem(0)) == (0, 0)
    assert problem(0).distance(problem(1))[0] == math.inf


# Measurements ----------------------------------------------------------------------------


def test_median_and_spread_are_of_the_rounds(kernels):
    found = measured(kernels[0], problem(), 4, 1.0, 2.0, 3.0, 5.0)
    assert (found.median_us, found.spread_us, found.rounds) == (3.0, 2.0, 5)
    assert measured(kernels[0], problem(), 4.0).spread_us == 0


def test_a_measurement_comes_back_from_its_json_form(kernels):
    for one in (
        measured(kernels[0], problem(), 1.5, 2.5, error_ratio=0.3, sm_mhz=1980, memory_mhz=3201),
        measured(kernels[1], problem(), status=Status.WRONG, error_ratio=math.inf),
    ):
        text = json.dumps(one.to_dict(), allow_nan=False)
        assert Measurement.from_dict(json.loads(text)) == one


def test_the_kernel_of_a_measurement_can_be_rebuilt(kernels):
    found = Measurement.from_dict(measured(kernels[0], problem(), 1.0).to_dict())
    assert found.kernel.rebuild().metadata == kernels[0].metadata


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({}, "PASSED without a time"),
        ({"times_us": (1.0, 0.0)}, "times_us has 0.0; expected microseconds, more than 0"),
        ({"times_us": (math.nan,)}, "times_us has nan"),
        ({"times_us": (10**400,)}, "times_us has 1000"),
        ({"status": Status.TIMEOUT, "message": "m", "times_us": (1.0,)}, "TIMEOUT with 1 times"),
        ({"status": Status.OOM}, "OOM without a message; say why"),
        ({"status": "FINE"}, "status is 'FINE'; expected one of PASSED, WRONG, COMPILE_ERROR"),
        ({"times_us": (1.0,), "date": datetime(2026, 1, 1)}, "without a time zone"),
    ],
)
def test_fields_that_contradict_each_other_are_refused(kernels, fields, text):
    kernel = KernelIdentity.of(kernels[0])
    with pytest.raises(ArgumentError, match=text):
        Measurement(kernel, problem(), ENVIRONMENT.digest, **{"status": Status.PASSED, **fields})

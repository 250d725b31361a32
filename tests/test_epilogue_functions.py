"""Functions of each element, against torch's own in float64."""

import math

import numpy as np
import pytest
import torch
from support.epilogues import computed, normal, torch_functions, with_accumulator
from torch.nn import functional

import kernel_api.epilogue as ep
from kernel_api.dtypes import dtype
from kernel_api.errors import EpilogueError

M, N = 7, 12


def accumulator():
    x = normal(M, N) * 3
    x[0, :5] = torch.tensor([0.0, 3.0, -3.0, 40.0, -40.0], dtype=torch.float64)
    return x


def column(*values):
    """An accumulator of one column, which may hold what is not finite."""
    return torch.tensor(values, dtype=torch.float64).unsqueeze(1)


def check(fn, expected, x=None, **operands):
    x = accumulator() if x is None else x
    torch.testing.assert_close(
        computed(x, fn, **operands), expected(x), rtol=1e-13, atol=1e-13, equal_nan=True
    )


@pytest.mark.parametrize(
    ("fn", "expected"),
    [
        (ep.exp, torch.exp),
        (lambda x: ep.log(x * x), lambda x: 2 * torch.log(x.abs())),
        (lambda x: ep.sqrt(abs(x)), lambda x: x.abs() ** 0.5),
        (lambda x: ep.rsqrt(x * x + 1), lambda x: (x * x + 1) ** -0.5),
        (ep.reciprocal, lambda x: 1 / x),
        (ep.erf, torch.special.erf),
        (ep.tanh, torch.tanh),
        (ep.sigmoid, torch.special.expit),
        (ep.abs, torch.abs),
        (ep.floor, torch.floor),
        (ep.ceil, torch.ceil),
        (math.floor, torch.floor),
        (math.ceil, torch.ceil),
        (lambda x: x // 0.7, lambda x: x // 0.7),
        (lambda x: x // -2, lambda x: x // -2),
        (lambda x: 5 // x, lambda x: 5 // x),
        (lambda x: x % 0.7, lambda x: x % 0.7),
        (lambda x: x % -2, lambda x: x % -2),
        (lambda x: 5 % (x * x + 0.3), lambda x: 5 % (x * x + 0.3)),
        (lambda x: sum(divmod(x, 3)), lambda x: x // 3 + x % 3),
        (lambda x: sum(divmod(5, x * x + 0.3)), lambda x: 5 // (x * x + 0.3) + 5 % (x * x + 0.3)),
        (lambda x: np.float32(5) // (x * x + 1), lambda x: 5 // (x * x + 1)),
        (lambda x: 2 ** (x / 9), lambda x: 2 ** (x / 9)),
        (lambda x: np.float32(0.5) ** (x / 9), lambda x: 0.5 ** (x / 9)),
        (lambda x: x**1.75, lambda x: x**1.75),
        (lambda x: x**2.5, lambda x: x**2.5),
        (lambda x: x**-1.5, lambda x: x**-1.5),
        (lambda x: ep.floor(abs(ep.floor(x)) ** 1.5), lambda x: x.floor().abs().pow(1.5).floor()),
        (lambda x: x**-0.3, lambda x: x**-0.3),
        (lambda x: ep.minimum(x, 1.5), lambda x: x.clamp(max=1.5)),
        (lambda x: ep.maximum(-1, x), lambda x: x.clamp(min=-1)),
        (lambda x: ep.clamp(x, -1, 2), lambda x: x.clamp(-1, 2)),
        (lambda x: ep.clamp(x, low=0.5), lambda x: x.clamp(min=0.5)),
        (lambda x: ep.clamp(x, high=0.5), lambda x: x.clamp(max=0.5)),
        (lambda x: ep.where(x > 1, x, 0.0), lambda x: x * (x > 1)),
        (ep.relu, functional.relu),
        (lambda x: ep.relu(x, 0.1), lambda x: functional.leaky_relu(x, 0.1)),
        (lambda x: ep.relu(x, upper=6.0), functional.relu6),
        (lambda x: ep.relu(x, lower=-1.0, upper=2.0), lambda x: functional.hardtanh(x, -1, 2)),
        (
            lambda x: ep.relu(x, 0.5, 1.0, 3.0),
            lambda x: torch.where(x > 1, x, 1 + 0.5 * (x - 1)).clamp(max=3),
        ),
        (ep.leaky_relu, functional.leaky_relu),
        (lambda x: ep.leaky_relu(x, 1.5), lambda x: functional.leaky_relu(x, 1.5)),
        (ep.silu, functional.silu),
        (lambda x: ep.silu(x, beta=1.702), lambda x: x * torch.sigmoid(1.702 * x)),
        (ep.gelu, functional.gelu),
        (ep.gelu_tanh, lambda x: functional.gelu(x, approximate="tanh")),
        (ep.softplus, lambda x: torch.logaddexp(x, torch.zeros_like(x))),
        (ep.elu, functional.elu),
        (lambda x: ep.elu(x, 2.0), lambda x: functional.elu(x, 2.0)),
        (ep.hardswish, functional.hardswish),
        (ep.squared_relu, lambda x: functional.relu(x).square()),
        (lambda x: ep.softcap(x, 5.0), lambda x: 5 * torch.tanh(x / 5)),
    ],
)
def test_a_function_is_torchs(fn, expected):
    check(fn, expected)


@pytest.mark.parametrize(
    ("fn", "expected"),
    [
        (lambda x: x + 2, lambda x: x + 2),
        (lambda x: 2 + x, lambda x: 2 + x),
        (lambda x: x - 2, lambda x: x - 2),
        (lambda x: 2 - x, lambda x: 2 - x),
        (lambda x: x * 3, lambda x: x * 3),
        (lambda x: 3 * x, lambda x: 3 * x),
        (lambda x: x / 3, lambda x: x / 3),
        (lambda x: 3 / x, lambda x: 3 / x),
        (lambda x: -x, lambda x: -x),
        (lambda x: +x, lambda x: x),
        (lambda x: abs(x), lambda x: x.abs()),
        (lambda x: x**2, lambda x: x * x),
        (lambda x: x**7, lambda x: x.pow(7)),
        (lambda x: x**-1, lambda x: 1 / x),
        (lambda x: x**-4, lambda x: x.pow(-4)),
        (lambda x: abs(x) ** 0.5, lambda x: x.abs().sqrt()),
        (lambda x: (x * x + 1) ** -0.5, lambda x: (x * x + 1).rsqrt()),
        (lambda x: np.float32(2) * x, lambda x: 2 * x),
        (lambda x: x - np.float64(0.1), lambda x: x - 0.1),
        (lambda x: x * np.int64(3), lambda x: 3 * x),
        (lambda x: np.array(2.0) * x, lambda x: 2 * x),
        (lambda x: x * np.array(2.0), lambda x: 2 * x),
        (lambda x: x + np.bool_(True), lambda x: x + 1),
        (lambda x: ep.maximum(x, np.array(1)), lambda x: x.clamp(min=1)),
        (lambda x: x * True, lambda x: x),
        (lambda x: (x > 0) * x, functional.relu),
        (lambda x: (x > 0) + (x > 1), lambda x: (x > 0).double() + (x > 1)),
        (lambda x: x + math.inf, lambda x: x + math.inf),
        (lambda x: x + math.nan, lambda x: x + math.nan),
    ],
)
def test_operators_are_as_in_python(fn, expected):
    check(fn, expected)


@pytest.mark.parametrize(
    ("fn", "expected"),
    [
        (lambda x: x < 0, lambda x: x < 0),
        (lambda x: x <= 0, lambda x: x <= 0),
        (lambda x: x > 0, lambda x: x > 0),
        (lambda x: x >= 0, lambda x: x >= 0),
        (lambda x: x == 0, lambda x: x == 0),
        (lambda x: x != 0, lambda x: x != 0),
        (lambda x: 3.0 > x, lambda x: x < 3),  # noqa: SIM300
        (lambda x: np.float64(3.0) > x, lambda x: x < 3),
        (lambda x: (x > -1) & (x < 1), lambda x: x.abs() < 1),
        (lambda x: (x < -1) | (x > 1), lambda x: x.abs() > 1),
        (lambda x: ~(x < 1), lambda x: x >= 1),
    ],
)
def test_comparisons_are_stored_as_bool_and_as_numbers(fn, expected):
    x = accumulator()
    out = torch.empty(M, N, dtype=torch.bool)
    assert torch.equal(computed(x, fn, out), expected(x))
    assert torch.equal(computed(x, fn), expected(x).double())


def test_comparisons_with_nan_are_torchs():
    x = column(math.nan, 1.0, -math.inf)
    for fn in (lambda v: v < 0, lambda v: ~(v >= 0), lambda v: v != v):
        assert torch.equal(computed(x, fn), fn(x).double())


@pytest.mark.parametrize("fn", [ep.minimum, ep.maximum])
def test_minimum_and_maximum_keep_nan(fn):
    found = computed(column(math.nan, 1.0, -math.inf), lambda v: fn(v, 0.5))
    assert torch.isnan(found[0])
    assert not torch.isnan(found[1:]).any()


def test_relu_keeps_nan():
    x = column(math.nan)
    for fn in (ep.relu, ep.leaky_relu, ep.silu, ep.gelu, ep.elu, ep.hardswish, ep.softplus):
        assert torch.isnan(computed(x, fn)).all()


# Derivatives ------------------------------------------------------------------------------

ACTIVATIONS = [
    ("relu", {}),
    ("relu", {"slope": 0.25}),
    ("relu", {"slope": 0.25, "lower": -1.0, "upper": 2.0}),
    ("leaky_relu", {}),
    ("leaky_relu", {"slope": 0.2}),
    ("sigmoid", {}),
    ("tanh", {}),
    ("silu", {}),
    ("silu", {"beta": 1.702}),
    ("gelu", {}),
    ("gelu_tanh", {}),
    ("softplus", {}),
    ("elu", {}),
    ("elu", {"alpha": 1.5}),
    ("hardswish", {}),
    ("squared_relu", {}),
    ("softcap", {"cap": 4.0}),
]


@pytest.mark.parametrize(("name", "parameters"), ACTIVATIONS, ids=str)
def test_a_derivative_is_what_autograd_gives(name, parameters):
    x = normal(M, N, seed=1) * 3
    found = computed(x, lambda v: ep.derivative(name)(v, **parameters))
    expected = torch_functions.derivative(name)(x, **parameters)
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-11)


def test_a_derivative_is_a_function_of_an_accumulator():
    x = normal(M, N)
    expected = torch_functions.derivative("softcap")(x, 3.0)
    torch.testing.assert_close(computed(x, ep.derivative("softcap"), cap=3.0), expected)


@pytest.mark.parametrize("name", ["relu", "leaky_relu", "elu", "squared_relu", "hardswish"])
def test_the_derivative_at_a_kink_is_that_of_torch(name):
    kinks = torch.tensor([[0.0, -3.0]], dtype=torch.float64)
    found = computed(kinks, lambda v: ep.derivative(name)(v))
    assert torch.equal(found, torch_functions.derivative(name)(kinks))


def test_a_derivative_of_what_is_no_activation_names_those_there_are():
    with pytest.raises(EpilogueError, match=r"no derivative of 'mish'.*silu, gelu"):
        computed(accumulator(), lambda x: ep.derivative("mish")(x))


# Casts ------------------------------------------------------------------------------------


@pytest.mark.parametrize("to", [torch.float16, torch.bfloat16, torch.float32])
def test_a_cast_rounds_and_arithmetic_goes_on(to):
    check(lambda x: 3 * ep.cast(x, to), lambda x: 3 * x.to(to).double())


@pytest.mark.parametrize(
    ("to", "largest"), [("float8_e4m3fn", 448.0), ("e5m2", 57344.0), (torch.float8_e4m3fn, 448.0)]
)
def test_a_cast_to_8_bit_floats_saturates(to, largest):
    x = column(1e6, -1e6, math.inf, 0.3, math.nan)
    found = computed(x, lambda v: ep.cast(v, to))
    assert found[:3, 0].tolist() == [largest, -largest, largest]
    assert found[3] == x[3].to(dtype(to).torch).double()
    assert torch.isnan(found[4])


def test_a_cast_to_e8m0_rounds_up_to_a_power_of_two():
    x = column(0.3, 1.0, 1.01, 3.0, 2.0**-140, 0.0, -1.0, 2.0**127.5, math.inf, math.nan)
    found = computed(x, lambda v: ep.cast(v, "e8m0"))[:, 0].tolist()
    assert found[:9] == [0.5, 1.0, 2.0, 4.0, *[2.0**-127] * 3, 2.0**127, 2.0**127]
    assert math.isnan(found[9])


@pytest.mark.parametrize(
    ("to", "low", "high"), [("int8", -128, 127), ("uint8", 0, 255), ("int16", -32768, 32767)]
)
def test_a_cast_to_integers_rounds_to_even_and_saturates(to, low, high):
    x = column(0.5, 1.5, 2.5, 2.6, 1e9, -1e9, math.nan)
    found = computed(x, lambda v: ep.cast(v, to))
    assert found[:, 0].tolist() == [0, 2, 2, 3, high, low, 0]


def test_quantize_divides_by_the_scale_and_rounds():
    scale = torch.tensor(0.1, dtype=torch.float64)
    x = accumulator()
    out = torch.empty(M, N, dtype=torch.int8)
    computed(x, lambda v, scale: ep.quantize(v, "int8", scale), out, scale=scale)
    assert torch.equal(out, (x / 0.1).round().clamp(-128, 127).to(torch.int8))


def test_outputs_are_rounded_as_casts_are():
    x = column(0.5, 1.5, 300.0, -300.0, math.nan)
    out = torch.empty(5, 1, dtype=torch.int8)
    assert computed(x, lambda v: v, out)[:, 0].tolist() == [0, 2, 127, -128, 0]
    narrow = torch.empty(5, 1, dtype=torch.float8_e4m3fn)
    found = computed(2 * x, lambda v: v, narrow).double()
    assert found[:4, 0].tolist() == [1.0, 3.0, 448.0, -448.0]


# Operands ---------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(), (1,), (N,), (1, N), (M, 1), (M, N), (1, 1)], ids=str)
@pytest.mark.parametrize("element", [torch.float64, torch.bfloat16, torch.int32, torch.uint8])
def test_operands_broadcast_as_in_torch(shape, element):
    operand = (normal(*shape, seed=3) * 4).abs().to(element)
    x = accumulator()
    found = computed(x, lambda v, operand: v * operand + operand, operand=operand)
    torch.testing.assert_close(found, x * operand.double() + operand.double())


@pytest.mark.parametrize(
    "shape", [(), (N,), (1, N), (M, 1), (M, N), (3, 1, 1), (3, 1, N), (3, M, 1), (3, M, N),
              (1, M, N), (1, 1, 1)], ids=str
)  # fmt: skip
def test_operands_broadcast_against_batches(shape):
    x, operand = normal(3, M, N), normal(*shape, seed=3)
    found = computed(x, lambda v, operand: v - operand, operand=operand)
    assert torch.equal(found, x - operand)


def test_a_row_of_a_problem_of_one_row_is_a_full_operand_and_a_vector_is_not():
    x, one, vector = normal(1, N), normal(1, N, seed=1), normal(N, seed=2)
    shapes = {}
    for name, operand in (("one", one), ("vector", vector)):
        args = with_accumulator(x, lambda v, operand: v + operand, operand=operand)
        shapes[name] = args.epilogue.graph.leaves["operand"].shape
    assert shapes["one"].rows
    assert not shapes["vector"].rows


def test_operands_of_bool_choose():
    mask = normal(M, N, seed=4) > 0
    check(lambda x, mask: ep.where(mask, x, -1.0), lambda x: torch.where(mask, x, -1.0), mask=mask)
    check(lambda x, mask: x * mask, lambda x: x * mask, mask=mask)


@pytest.mark.parametrize("alpha", [2, 0.1, -1e-3, np.float32(0.1), np.int64(3), math.inf])
def test_python_numbers_are_run_time_values(alpha):
    check(lambda x, alpha: alpha * x, lambda x: float(alpha) * x, alpha=alpha)


def test_numbers_are_rounded_to_float32_where_the_accumulator_is():
    x = normal(M, N, dtype=torch.float32)
    found = computed(x, lambda v, alpha: (v * 0 + alpha) == 0.1, alpha=0.1)
    assert found.all()  # both are the float32 next to 0.1


def test_a_parameter_with_a_default_need_not_be_passed():
    def scaled(accum, factor=3.0):
        return accum * factor

    check(scaled, lambda x: 3 * x)
    check(scaled, lambda x: 5 * x, factor=5)


def test_parameters_may_be_positional_or_keyword_only():
    def mixed(accum, bias, /, *, alpha):
        return alpha * accum + bias

    bias = normal(N, seed=5)
    check(mixed, lambda x: 2 * x + bias, bias=bias, alpha=2.0)

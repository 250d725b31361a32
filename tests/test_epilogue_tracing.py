"""What cannot be traced raises, with the line of the user's code and the name of the operand."""

import functools
import inspect
import math

import numpy as np
import pytest
import torch
from support.epilogues import computed, normal, with_accumulator

import kernel_api as ka
import kernel_api.epilogue as ep
from kernel_api.errors import ArgumentError, EpilogueError

M, N = 4, 8


def refusal(fn, x=None, out=None, **operands):
    with pytest.raises(EpilogueError) as caught:
        with_accumulator(normal(M, N) if x is None else x, fn, out, **operands)
    return str(caught.value)


def line(fn, offset=0):
    """How messages write a line of a function, counted from its first."""
    return f"{__file__}:{fn.__code__.co_firstlineno + offset} in {fn.__name__}: "


# What has no value yet -------------------------------------------------------------------


def with_if(accum, bias):
    if accum > bias:
        return accum
    return bias


def with_if_on_an_operand(accum, bias):
    return accum if bias else -accum


def with_and(accum, bias):
    return ep.where(accum > 0 and bias > 0, accum, bias)


def with_chained_comparison(accum, bias):
    return ep.where(0 < accum < bias, accum, bias)


def with_min(accum, bias):
    return min(accum, bias)


def with_while(accum, bias):
    while bias < 1:
        bias = bias * 2
    return accum * bias


def with_assert(accum, bias):
    assert bias != 0
    return accum / bias


@pytest.mark.parametrize(
    ("fn", "name", "offset"),
    [
        (with_if, "the accumulator and bias", 1),
        (with_if_on_an_operand, "bias", 1),
        (with_and, "the accumulator", 1),
        (with_chained_comparison, "the accumulator", 1),
        (with_min, "the accumulator and bias", 1),
        (with_while, "bias", 1),
        (with_assert, "bias", 1),
    ],
)
def test_a_branch_that_depends_on_data_is_refused(fn, name, offset):
    text = refusal(fn, bias=normal(N))
    assert text.startswith(line(fn, offset))
    assert f"{name} has no value while fn is traced: no if can depend on it" in text
    assert "use where(condition, a, b)" in text


@pytest.mark.parametrize(
    ("fn", "text"),
    [
        (lambda x, b: [v * 2 for v in x], "it cannot be looped over or unpacked"),
        (lambda x, b: sum(b), "it cannot be looped over or unpacked"),
        (lambda x, b: (lambda one, two: one)(*b), "it cannot be looped over or unpacked"),
        (lambda x, b: len(b), "it has no length"),
        (lambda x, b: x[0], "it cannot be indexed"),
        (lambda x, b: x[:, :4], "it cannot be indexed"),
        (lambda x, b: b in [x], "no if can depend on it"),
        (lambda x, b: 3 in b, "'in' cannot search it"),
        (lambda x, b: float(b), "float() and the functions of math cannot have it"),
        (lambda x, b: math.exp(b), "float() and the functions of math cannot have it"),
        (lambda x, b: int(b), "int() cannot have it"),
        (lambda x, b: complex(b), "complex() cannot have it"),
        (lambda x, b: range(b), "it is no index and no length of a range"),
        (lambda x, b: [1, 2][b], "it is no index and no length of a range"),
        (lambda x, b: round(b), "round() cannot have it"),
        (lambda x, b: np.asarray(b), "it is no array"),
        (lambda x, b: np.exp(b), "numpy's exp cannot be applied to b"),
        (lambda x, b: np.multiply(x, 5.0, where=False), "numpy's multiply is traced without where"),
        (lambda x, b: x + np.array("1"), "a ndarray of shape () is used that fn does not take"),
        (lambda x, b: np.maximum(x, 0.0), "numpy's maximum cannot be applied to the accumulator"),
        (lambda x, b: torch.relu(x), "torch's relu cannot be applied to the accumulator"),
        (lambda x, b: torch.nn.functional.gelu(b), "torch's gelu cannot be applied to b"),
        (lambda x, b: torch.where(x > 0, x, b), "torch's where cannot be applied to"),
        (lambda x, b: x.relu(), "the accumulator is traced and has no attribute 'relu'"),
        (lambda x, b: b.shape, "b is traced and has no attribute 'shape'"),
        (lambda x, b: x.to(torch.float16), "has no attribute 'to'"),
        (lambda x, b: x @ b, "@ cannot be traced"),
        (lambda x, b: x ^ b, "^ cannot be traced"),
        (lambda x, b: x << 1, "<< and >> cannot be traced"),
        (lambda x, b: 1 & (x > b), "& and | with a number cannot be traced"),
        (lambda x, b: math.trunc(x), "trunc cannot be traced for the accumulator; use where(x < 0"),
        (lambda x, b: (-2) ** x, "-2.0 to the power of the accumulator: expected a finite number"),
        (lambda x, b: 0.0**b, "0.0 to the power of b: expected a finite number above 0"),
        (lambda x, b: "2" ** x, "'2' is no number and no traced value"),
        (lambda x, b: x**b, "the exponent is b; expected a whole number from 1 to 16"),
        (lambda x, b: x**17, "the exponent is 17; expected a whole number from 1 to 16"),
        (lambda x, b: x**math.inf, "the exponent is inf; expected"),
        (lambda x, b: hash(x), "unhashable type"),
        (lambda x, b: {x: b}, "unhashable type"),
        (lambda x, b: x + "1", "'1' is no number and no traced value"),
        (lambda x, b: x + object, "is no number and no traced value"),
        (lambda x, b: undefined + x, "fn raised NameError while it was traced"),  # noqa: F821
        (lambda x, b: 1 / 0, "fn raised ZeroDivisionError"),
    ],
)
def test_what_cannot_be_traced_is_told_with_the_line(fn, text):
    found = refusal(fn, b=normal(N))
    assert found.startswith(f"{__file__}:{fn.__code__.co_firstlineno} in ")
    assert text in found


def test_an_element_cannot_be_assigned():
    def fn(accum):
        accum[0] = 1.0
        return accum

    assert refusal(fn).startswith(line(fn, 1) + "the accumulator has no value")


def test_the_line_is_the_one_in_a_helper():
    def helper(x):
        y = x * 2
        return y if y > 0 else x

    assert refusal(lambda accum: helper(accum)).startswith(line(helper, 2))


def test_an_error_that_fn_catches_still_stands():
    def fn(accum):
        try:
            if accum > 0:
                return accum
        except Exception:
            pass
        return -accum

    assert refusal(fn).startswith(line(fn, 2))


def test_an_error_of_fn_itself_is_chained():
    def fn(accum):
        scale = {"a": 1.0}
        return accum * scale["b"]

    with pytest.raises(EpilogueError, match="fn raised KeyError") as caught:
        with_accumulator(normal(M, N), fn)
    assert isinstance(caught.value.__cause__, KeyError)
    assert str(caught.value).startswith(line(fn, 2))


# Tensors that fn does not take -----------------------------------------------------------


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: x + CAPTURED,
        lambda x: CAPTURED + x,
        lambda x: x * CAPTURED.numpy(),
        lambda x: CAPTURED.numpy() * x,
        lambda x: x > CAPTURED,
        lambda x: ep.maximum(x, CAPTURED),
        lambda x: torch.add(x, CAPTURED),
    ],
)
def test_a_tensor_from_outside_must_be_an_operand(fn):
    text = refusal(fn)
    assert "of shape (8,) is used that fn does not take; pass it to EpilogueArguments" in text
    assert text.startswith(f"{__file__}:")


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: ep.relu(x, ZERO),
        lambda x: ep.relu(x, 0.5, ZERO),
        lambda x: ep.silu(x, beta=ONE),
        lambda x: ep.derivative("silu")(x, ONE),
        lambda x: ep.elu(x, ONE),
        lambda x: np.multiply(x, ONE),
    ],
)
def test_a_number_of_a_tensor_from_outside_is_no_constant(fn):
    assert "a Tensor of shape () is used that fn does not take; pass it to Ep" in refusal(fn)


CAPTURED = torch.ones(N)
ZERO, ONE = torch.tensor(0.0), torch.tensor(1.0)


def test_a_value_of_another_trace_is_refused():
    kept = []
    with_accumulator(normal(M, N), lambda accum: kept.append(accum) or accum * 2)
    assert "belongs to another trace" in refusal(lambda accum: accum + kept[0])


def test_the_functions_work_while_tracing_only():
    with pytest.raises(EpilogueError, match="are for functions given to EpilogueArguments"):
        ep.relu(3.0)
    with pytest.raises(EpilogueError, match="are for functions given to EpilogueArguments"):
        ep.exp(torch.ones(3))


# In place --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ("+=", lambda x, b: x + b),
        ("-=", lambda x, b: x - b),
        ("*=", lambda x, b: x * b),
        ("/=", lambda x, b: x / b),
    ],
)
def test_an_assignment_in_place_is_not_dropped(change, expected):
    scope = {}
    exec(f"def fn(accum, bias):\n    D = accum\n    D {change} bias\n    return D", scope)
    x, bias = normal(M, N), normal(N, seed=1)
    assert torch.equal(computed(x, scope["fn"], bias=bias), expected(x, bias))


def test_assignments_in_place_add_up():
    def fn(accum, bias, alpha):
        accum *= alpha
        accum += bias
        for _ in range(3):
            accum **= 2
            bias /= 2
        accum -= bias
        return accum

    x, bias = normal(M, N), normal(N, seed=1)
    torch.testing.assert_close(
        computed(x, fn, bias=bias, alpha=0.5), (0.5 * x + bias) ** 8 - bias / 8
    )


def test_comparisons_are_joined_in_place():
    def fn(accum, bias):
        inside = accum > -1
        inside &= accum < bias
        inside |= accum > 2
        return inside

    x, bias = normal(M, N) * 2, normal(N, seed=1)
    expected = ((x > -1) & (x < bias)) | (x > 2)
    assert torch.equal(computed(x, fn, bias=bias), expected.double())


def test_the_old_value_of_an_assignment_in_place_cannot_be_used():
    def fn(accum, bias):
        D = accum
        D += bias
        return D, accum

    text = refusal(fn, bias=normal(N), before=torch.empty(M, N))
    assert "the accumulator was changed in place at" in text
    assert f"{__file__}:{fn.__code__.co_firstlineno + 2} in fn" in text
    assert "write x = x + y where the old value is still needed" in text


def test_a_helper_that_changes_its_argument_in_place_is_refused():
    def add_bias(x, bias):
        x += bias

    def fn(accum, bias):
        add_bias(accum, bias)
        return accum * 2

    text = refusal(fn, bias=normal(N))
    assert "the accumulator was changed in place at" in text
    assert "in add_bias" in text


# Operands and outputs --------------------------------------------------------------------


def unused(accum, bias, alpha):
    return accum * alpha


def test_an_unused_operand_is_refused():
    text = refusal(unused, bias=normal(N), alpha=2.0)
    assert text.startswith(line(unused))
    assert "bias is passed to EpilogueArguments, but nothing that fn returns depends on it" in text


def test_an_operand_that_only_a_dropped_value_depends_on_is_refused():
    def fn(accum, bias):
        _ = accum + bias
        return accum

    assert "bias is passed" in refusal(fn, bias=normal(N))


@pytest.mark.parametrize(
    ("fn", "operands", "text"),
    [
        (lambda x: x, {"aux": 1}, "fn returns 1 value, and 2 are expected: D, aux"),
        (lambda x: (x, x), {}, "fn returns 2 values, and 1 are expected: D ("),
        (lambda x: (x, x, x), {"a": 1}, "fn returns 3 values, and 2 are expected: D, a"),
        (lambda x: (), {}, "fn returns 0 values"),
        (lambda x: None, {}, "fn returns None as D; expected a value computed from the acc"),
        (lambda x: 1.0, {}, "fn returns 1.0 as D"),
        (lambda x: (x, None), {"aux": 1}, "fn returns None as aux"),
        (lambda x: {"D": x}, {}, "fn returns {'D': the accumulator} as D"),
    ],
)
def test_outputs_that_are_not_produced_or_not_asked_for_are_refused(fn, operands, text):
    tensors = {name: torch.empty(M, N) for name in operands}
    found = refusal(fn, **tensors)
    assert found.startswith(line(fn))
    assert text in found


def test_an_output_without_the_accumulator_is_refused():
    text = refusal(lambda x, b: (x + b, b * 2), b=normal(N), aux=torch.empty(N))
    assert "aux does not depend on the accumulator; it is a value computed from b" in text
    assert "D does not depend on the accumulator" in refusal(lambda x, b: b, b=normal(M, N))


def test_a_reduction_is_no_d():
    text = refusal(lambda x: ep.sum(x, -1))
    assert "D is (L, M) and out is a matrix" in text


@pytest.mark.parametrize(
    ("shape", "expected"),
    [((M,), "(4, 8)"), ((N, M), "(4, 8)"), ((M, N // 2), "(4, 8)"), ((1, M, N), "(4, 8)")],
)
def test_an_output_of_another_shape_is_refused(shape, expected):
    def fn(accum):
        pre = accum + 1
        return ep.relu(pre), pre

    text = refusal(fn, pre=torch.empty(shape))
    assert text.startswith(line(fn, 1))
    assert f"pre has shape {shape}; fn gives it {expected}" in text


def test_an_out_of_another_shape_is_refused():
    text = refusal(lambda x: ep.glu_pair(x, granularity=1)[0])
    assert "out has shape (4, 8); fn gives it (4, 4), for an accumulator of (4, 8)" in text


@pytest.mark.parametrize("shape", [(5,), (N, 1), (2,), (1, 1, N), (M, 3), (3, N)], ids=str)
def test_an_operand_that_does_not_broadcast_is_refused(shape):
    def fn(accum, bias):
        D = accum * 2
        return D + bias

    text = refusal(fn, bias=torch.empty(shape))
    assert text.startswith(line(fn, 2))
    assert f"bias has shape {shape}, which does not broadcast against the accumulator's" in text
    assert "one value per column is (N,), one per row (M, 1)" in text


@pytest.mark.parametrize("shape", [(2, 1, 1), (2, M, N), (3, N), (3, 1), (1, 3, 1, 1)], ids=str)
def test_an_operand_that_does_not_broadcast_against_batches_is_refused(shape):
    text = refusal(lambda x, b: x + b, normal(3, M, N), b=torch.empty(shape))
    assert f"b has shape {shape}, which does not broadcast" in text


@pytest.mark.parametrize("element", [torch.complex64, torch.complex128])
def test_an_operand_that_is_no_real_number_is_refused(element):
    with pytest.raises(EpilogueError, match=f"b is {element}".replace("torch.", "")):
        ka.EpilogueArguments(unused, bias=normal(N), alpha=1.0, b=torch.empty(N, dtype=element))


@pytest.mark.parametrize("element", [torch.int64, torch.uint32, torch.float8_e5m2fnuz])
def test_an_output_of_a_type_that_nothing_is_rounded_to_is_refused(element):
    text = refusal(lambda x: (x, x * 2), twice=torch.empty(M, N, dtype=element))
    assert f"twice is {element}; an epilogue writes bool, float64".replace("torch.", "") in text
    text = refusal(lambda x: x * 2, out=torch.empty(M, N, dtype=element))
    assert "out is" in text


def test_numbers_are_not_stored_as_bool():
    text = refusal(lambda x: (x, x * 2), mask=torch.empty(M, N, dtype=torch.bool))
    assert "mask is bool and what fn returns for it is a number; return a comparison" in text


# What fn may be --------------------------------------------------------------------------


def construction(fn, **operands):
    with pytest.raises(ArgumentError) as caught:
        ka.EpilogueArguments(fn, **operands)
    return str(caught.value)


def test_a_function_says_what_it_takes():
    assert "fn is a str; expected a function" in construction("relu")
    assert "fn takes bias; pass it" in construction(with_if)
    assert "fn takes bias, alpha; pass them" in construction(unused)
    assert "fn takes no accumulator" in construction(lambda: 1)
    assert "fn takes no accumulator" in construction(lambda *, accum: accum)
    assert "fn takes *rest; name every operand" in construction(lambda accum, *rest: accum)
    assert "fn takes **rest; name every operand" in construction(lambda accum, **rest: accum)
    assert "accum is the accumulator" in construction(lambda accum: accum, accum=normal(N))
    assert "D is the arguments' out" in construction(lambda accum: accum, D=normal(N))
    assert "does not say what it takes" in construction(max)


@pytest.mark.parametrize(
    ("operands", "text"),
    [
        ({"alpha": True}, "alpha is True; fn is traced once, so a flag cannot decide"),
        ({"alpha": "2"}, "alpha is a str; expected a torch tensor"),
        ({"alpha": None}, "alpha is a NoneType; expected a torch tensor"),
        ({"alpha": 1 + 2j}, "alpha is a complex; expected a torch tensor"),
        ({"alpha": 2.0, "aux": 3.0}, "aux is 3.0 and no parameter of fn; an operand that is"),
        (
            {"alpha": ka.ScaledOperand(torch.ones(M, N), torch.ones(()), ka.ScaleMode.PER_TENSOR)},
            "alpha is a ScaledOperand; pass the tensor and its scale",
        ),
    ],
)
def test_operands_are_tensors_or_numbers(operands, text):
    assert text in construction(lambda accum, alpha: accum * alpha, **operands)


class Affine:
    def __init__(self, factor):
        self.factor = factor

    def __call__(self, accum, bias):
        return self.factor * accum + bias

    def method(self, accum, bias):
        return self(accum, bias)

    @staticmethod
    def static(accum, bias):
        return 3.0 * accum + bias


def affine(factor, accum, bias):
    return factor * accum + bias


@functools.wraps(affine)
def wrapped(*args, **kwargs):
    return affine(3.0, *args, **kwargs)


wrapped.__signature__ = inspect.signature(Affine.static)


@pytest.mark.parametrize(
    "fn",
    [
        Affine(3.0),
        Affine(3.0).method,
        Affine.static,
        functools.partial(affine, 3.0),
        lambda accum, bias: affine(3.0, accum, bias),
        wrapped,
    ],
)
def test_any_callable_is_traced(fn):
    x, bias = normal(M, N), normal(N, seed=1)
    assert torch.equal(computed(x, fn, bias=bias), 3 * x + bias)


def test_a_list_is_returned_as_well():
    aux = torch.empty(M, N, dtype=torch.float64)
    x = normal(M, N)
    assert torch.equal(computed(x, lambda x: [x, 2 * x], aux=aux), x)
    assert torch.equal(aux, 2 * x)


def test_loops_and_branches_over_what_is_known_are_unrolled():
    layers = [ep.relu, ep.silu, None]

    def fn(accum, bias):
        D = accum
        for layer in layers:
            if layer is not None:
                D = layer(D) + bias
        return D

    x, bias = normal(M, N), normal(N, seed=1)
    expected = torch.nn.functional.silu(torch.relu(x) + bias) + bias
    torch.testing.assert_close(computed(x, fn, bias=bias), expected)


def test_what_is_used_often_is_traced_once():
    def fn(accum):
        D, total = accum, ep.sum(accum, None)
        for _ in range(200):
            D = D * 0.5 + D * 0.5
            total = total * 0.5 + total * 0.5
        return D, total

    x, total = normal(2, M, N), torch.empty((), dtype=torch.float64)
    torch.testing.assert_close(computed(x, fn, total=total), x)
    torch.testing.assert_close(total, x.sum())


def test_a_value_can_be_printed():
    shown = []

    def fn(accum, bias):
        shown.extend([repr(accum), f"{bias}", str(accum * bias), repr(accum * 0)])
        return accum * bias

    with_accumulator(normal(M, N), fn, bias=normal(N))
    assert shown[:3] == [
        "the accumulator",
        "bias",
        "a value computed from the accumulator and bias",
    ]


def test_an_epilogue_that_joined_nothing_has_no_graph():
    epilogue = ka.EpilogueArguments(lambda accum: accum)
    with pytest.raises(EpilogueError, match="has joined no arguments yet"):
        _ = epilogue.graph


def _changed(D, b):
    before = D
    D += b
    return before


@pytest.mark.parametrize(
    ("fn", "outputs", "text"),
    [
        (lambda a, b: b, {"b": torch.ones(8)}, "D does not depend on the accumulator"),
        (_changed, {"b": torch.ones(8)}, "is used again under its old name"),
        (lambda a, b: b, {"b": torch.ones(3)}, "does not broadcast"),
        (lambda a: (a, a), {"other": torch.ones(4, 8, dtype=torch.int64)}, "other is int64"),
    ],
    ids=["an operand", "an old name", "a shape", "a type"],
)
def test_what_fn_returns_is_refused_where_fn_is_defined(fn, outputs, text):
    epilogue = ka.EpilogueArguments(fn, **outputs)
    with pytest.raises(EpilogueError, match=text) as error:
        ka.GemmArguments(torch.ones(4, 6), torch.ones(6, 8), torch.empty(4, 8), epilogue=epilogue)
    code = fn.__code__
    assert str(error.value).startswith(
        f"{code.co_filename}:{code.co_firstlineno} in {fn.__name__}: "
    )

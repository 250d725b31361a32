"""The emulator's directed roundings of float32, against exact fractions."""

from fractions import Fraction

import numpy as np
import pytest
from support.ptx import hopper  # noqa: F401  it adds operations
from support.ptx.arithmetic import OPERATIONS

EXACT = {
    "fma": lambda a, b, c: a * b + c,
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
}


def drawn(count):
    """Numbers of very different sizes, some of them equal or small integers."""
    generator = np.random.default_rng(0)
    exponents = generator.integers(-60, 60, (count, 600))
    values = np.ldexp(generator.standard_normal((count, 600)), exponents).astype(np.float32)
    values[:, ::3] = generator.integers(-9, 10, values[:, ::3].shape)
    return values


@pytest.mark.parametrize("rounding", ["rm", "rp", "rz"])
@pytest.mark.parametrize("name", EXACT)
def test_results_are_rounded_to_one_side(name, rounding):
    operation = OPERATIONS[f"{name}.{rounding}.f32"]
    values = drawn(len(operation.inputs))
    found = operation.function(*values)
    assert found.dtype == np.float32
    for given, one in zip(values.T, found, strict=True):
        exact = EXACT[name](*map(Fraction, map(float, given)))
        down = rounding == "rm" or (rounding == "rz" and exact > 0)
        beyond = np.nextafter(one, np.float32(np.inf if down else -np.inf))
        near, far = Fraction(float(one)), Fraction(float(beyond))
        assert (near <= exact < far) if down else (far < exact <= near)


def test_what_is_not_finite_stays():
    infinity, nan = np.float32([np.inf]), np.float32([np.nan])
    for rounding in ("rm", "rp", "rz"):
        add = OPERATIONS[f"add.{rounding}.f32"].function
        with np.errstate(invalid="ignore"):
            assert np.isposinf(add(infinity, np.float32([1])))
            assert np.isnan(add(nan, infinity))


@pytest.mark.parametrize(("name", "infinity"), [("f16", 0x7C00), ("bf16", 0x7F80)])
def test_halves_are_compared_by_whether_they_are_numbers(name, infinity):
    a, b = np.uint16([1, infinity, infinity, infinity + 1]), np.uint16([2, 2, 0xFFFF, 2])
    numbers = np.array([True, True, False, False])
    assert (OPERATIONS[f"setp.num.{name}"].function(a, b) == numbers).all()
    assert (OPERATIONS[f"setp.nan.{name}"].function(a, b) == ~numbers).all()

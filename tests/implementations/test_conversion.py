"""Conversions that kernels write out themselves: the same numbers as torch's, bit by bit."""

from functools import cache

import cutlass
import cutlass.cute as cute
import numpy as np
import pytest
import torch
from cutlass import Float8E4M3FN, Float8E5M2, Float32, Uint8, Uint32
from on_the_cpu import fixed

from kernel_api.dtypes import dtype
from kernel_api.implementations.common.conversion import (
    FLOAT8,
    _from_float8,
    _power_of_two,
    _power_of_two_above,
    _to_float8,
    reciprocal_of_power,
)
from kernel_api.providers.reference.epilogue import rounded

E4M3, E5M2, E8M0 = torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu
TYPES = {E4M3: FLOAT8[Float8E4M3FN], E5M2: FLOAT8[Float8E5M2]}


def numbers():
    """Every bfloat16, what lies in the middle between two, and a float32 beside that."""
    upper = torch.arange(1 << 16, dtype=torch.int64) << 16
    bits = torch.stack([upper, upper + 0x8000, upper + 0x7FFF, upper + 0x8001]).flatten()
    return bits.to(torch.int32).view(torch.float32)


@cache
def converting(function, result_type):
    """A function of one number as a function of arrays."""

    @cute.jit
    def convert(values: cute.Tensor, found: cute.Tensor):
        for i in cutlass.range(cute.size(values), unroll=1):
            found[i] = result_type(function(values[i]))

    compiled = {}

    def run(values):
        found = np.empty(values.shape, {Uint8: np.uint8, Float32: np.float32}[result_type])
        if values.shape not in compiled:
            compiled[values.shape] = cute.compile(convert, fixed(values), fixed(found))
        compiled[values.shape](fixed(values), fixed(found))
        return found

    return run


@pytest.mark.parametrize("element", TYPES, ids=str)
def test_numbers_become_8_bit_floats_as_in_torch(element):
    given = numbers()
    found = converting(lambda x: _to_float8(x, TYPES[element]), Uint8)(given.numpy())
    expected = rounded(given.double(), dtype(element)).view(torch.uint8)
    number = ~torch.isnan(given)
    assert torch.equal(torch.from_numpy(found)[number], expected[number])
    assert torch.isnan(torch.from_numpy(found).view(element)[~number].float()).all()


@pytest.mark.parametrize("element", TYPES, ids=str)
def test_8_bit_floats_become_the_numbers_that_they_are(element):
    codes = np.arange(256, dtype=np.uint8)
    found = converting(lambda x: _from_float8(Uint32(x), TYPES[element]), Float32)(codes)
    expected = torch.from_numpy(codes).view(element).float().numpy()
    np.testing.assert_array_equal(found, expected)


def test_numbers_become_the_next_power_of_two_above():
    given = numbers()
    found = converting(_power_of_two_above, Uint8)(given.numpy())
    expected = rounded(given.double(), dtype(E8M0)).view(torch.uint8)
    assert torch.equal(torch.from_numpy(found), expected)


def test_powers_of_two_become_numbers_and_their_reciprocals():
    codes = np.arange(256, dtype=np.uint8)
    expected = torch.from_numpy(codes).view(E8M0).double()
    found = converting(lambda x: _power_of_two(Uint32(x)), Float32)(codes)
    np.testing.assert_array_equal(found, expected.numpy())
    inverse = converting(lambda x: reciprocal_of_power(_power_of_two(Uint32(x))), Float32)(codes)
    np.testing.assert_array_equal(inverse, (1 / expected).numpy())

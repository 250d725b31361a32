"""The canonical element type: kernel_api.dtypes."""

import copy
import pickle
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest
import torch

from kernel_api.dtypes import TF32, dtype
from kernel_api.errors import ArgumentError

SPELLINGS = {
    "float64": (torch.float64, np.float64, np.dtype("float64"), "f64", "double", "torch.float64"),
    "float32": (torch.float32, np.float32, np.dtype("float32"), "f32", "FLOAT32", "single"),
    "float16": (torch.float16, torch.half, np.float16, "f16", "half", "fp16"),
    "bfloat16": (torch.bfloat16, ml_dtypes.bfloat16, np.dtype(ml_dtypes.bfloat16), "bf16"),
    "float8_e4m3fn": (torch.float8_e4m3fn, ml_dtypes.float8_e4m3fn, "e4m3"),
    "float8_e5m2": (torch.float8_e5m2, ml_dtypes.float8_e5m2, "e5m2"),
    "int64": (torch.int64, np.int64, "i64", "long"),
    "int32": (torch.int32, np.int32, "i32"),
    "int16": (torch.int16, np.int16, "i16", "short"),
    "int8": (torch.int8, np.int8, "i8"),
    "uint8": (torch.uint8, np.uint8, "u8", "byte"),
    "bool": (torch.bool, np.bool_, np.dtype(bool), "b1"),
    "complex64": (torch.complex64, np.complex64, "c64"),
}


@pytest.mark.parametrize(
    ("name", "spelling"),
    [(name, spelling) for name, spellings in SPELLINGS.items() for spelling in spellings],
    ids=str,
)
def test_every_spelling_names_the_same_object(name, spelling):
    assert dtype(spelling) is dtype(name)
    assert dtype(name).name == name


def test_cutlass_types_name_the_same_object():
    import cutlass

    for name, spelled in {
        "float64": cutlass.Float64,
        "float32": cutlass.Float32,
        "tfloat32": cutlass.TFloat32,
        "float16": cutlass.Float16,
        "bfloat16": cutlass.BFloat16,
        "float8_e4m3fn": cutlass.Float8E4M3FN,
        "float8_e5m2": cutlass.Float8E5M2,
        "int8": cutlass.Int8,
        "uint8": cutlass.Uint8,
        "int32": cutlass.Int32,
    }.items():
        assert dtype(spelled) is dtype(name)
        assert dtype(name).cutlass is spelled


@pytest.mark.parametrize("name", SPELLINGS)
def test_the_torch_type_comes_back(name):
    assert dtype(name).torch is getattr(torch, name)
    assert dtype(name).itemsize == dtype(name).torch.itemsize


def test_tfloat32_is_stored_as_float32_but_is_another_type():
    assert TF32.torch is torch.float32
    assert TF32 is not dtype("float32")
    assert torch.float32 != TF32


def test_a_dtype_equals_what_names_the_same_type_and_nothing_else():
    assert dtype("bf16") == torch.bfloat16
    assert torch.bfloat16 == dtype("bf16")
    assert dtype("bf16") == "bfloat16"
    assert dtype("bf16") != torch.float16
    assert dtype("bf16") != "no such type"
    assert dtype("bf16") != 16
    assert dtype("bf16") is not None


@pytest.mark.parametrize("nonsense", ["float7", "", 8, 3.5, None, object(), [], {}, "sm_90a"])
def test_what_names_no_type_is_refused_with_the_known_names(nonsense):
    with pytest.raises(ArgumentError, match=r"names no element type; known are float64, float32"):
        dtype(nonsense)


def test_a_different_8_bit_float_of_ml_dtypes_is_not_taken_for_e4m3fn():
    """IEEE-like e4m3 has infinities and other NaNs: the same bits mean other numbers."""
    with pytest.raises(ArgumentError):
        dtype(ml_dtypes.float8_e4m3)


@pytest.mark.parametrize("kind", [float, int])
def test_a_bare_python_number_type_is_refused_because_libraries_disagree_on_its_width(kind):
    with pytest.raises(ArgumentError):
        dtype(kind)


def test_a_type_that_only_torch_knows_still_has_a_name():
    found = dtype(torch.float8_e4m3fnuz)
    assert found.name == "float8_e4m3fnuz"
    assert found.bits == 8
    assert found.is_float
    assert found is dtype(torch.float8_e4m3fnuz)


def test_kinds_tell_floats_integers_and_others_apart():
    assert dtype("bf16").is_float
    assert not dtype("bf16").is_integer
    assert dtype("u8").is_integer
    assert dtype("i8").is_integer
    assert not dtype("bool").is_integer
    assert dtype("complex64").kind == "other"


def test_a_dsl_type_that_does_not_exist_is_refused_by_name():
    with pytest.raises(ArgumentError, match="CuTe DSL has no type for complex64"):
        _ = dtype("complex64").cutlass


@pytest.mark.parametrize("name", SPELLINGS)
def test_copies_and_pickles_are_the_same_object(name):
    assert copy.deepcopy(dtype(name)) is dtype(name)
    assert pickle.loads(pickle.dumps(dtype(name))) is dtype(name)


def test_naming_a_type_by_string_loads_neither_torch_nor_the_dsl():
    code = (
        "import sys; from kernel_api.dtypes import dtype; assert dtype('bf16').bits == 16;"
        "assert not {'torch', 'cutlass', 'numpy'} & set(sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

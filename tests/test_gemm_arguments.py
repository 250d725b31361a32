"""What GemmArguments checks, defaults and tells apart."""

import numpy as np
import pytest
import torch
from support.data import gemm_arguments, gemm_tensors

import kernel_api as ka
from kernel_api.arguments import gemm
from kernel_api.dtypes import dtype
from kernel_api.errors import ArgumentError

# Refusals: at construction, with both values ---------------------------------------------


def refusal(A, B, out, *rest, **options):
    with pytest.raises(ArgumentError) as caught:
        ka.GemmArguments(A, B, out, *rest, **options)
    assert isinstance(caught.value, ValueError)
    return str(caught.value)


def test_two_different_k_are_refused_with_both_values_and_shapes():
    text = refusal(torch.empty(256, 128), torch.empty(64, 512), torch.empty(256, 512))
    assert text == ("A has K = 128 but B has K = 64 (A (M, K) = (256, 128), B (K, N) = (64, 512))")


def test_two_different_k_of_a_batch_are_refused_with_batched_letters():
    text = refusal(torch.empty(2, 8, 5), torch.empty(2, 6, 9), torch.empty(2, 8, 9))
    assert "A has K = 5 but B has K = 6 (A (L, M, K) = (2, 8, 5)" in text


@pytest.mark.parametrize(
    ("a", "b", "out"),
    [
        ((2, 8, 5), (5, 9), (8, 9)),
        ((8, 5), (2, 5, 9), (8, 9)),
        ((8, 5), (5, 9), (1, 8, 9)),
        ((5,), (5, 9), (9,)),
        ((), (), ()),
        ((1, 1, 8, 5), (1, 1, 5, 9), (1, 1, 8, 9)),
    ],
)
def test_ranks_that_differ_or_are_neither_two_nor_three_are_refused_with_all_ranks(a, b, out):
    text = refusal(torch.empty(a), torch.empty(b), torch.empty(out))
    assert f"A has rank {len(a)}, B rank {len(b)}, out rank {len(out)}; expected all 2" in text


@pytest.mark.parametrize("shape", [(9, 8), (8, 8), (7, 9), (1, 9), (8, 10)])
def test_an_out_of_another_shape_is_refused_with_both_shapes(shape):
    text = refusal(torch.empty(8, 5), torch.empty(5, 9), torch.empty(shape))
    assert f"out has (M, N) = {shape} but A and B give (8, 9)" in text


@pytest.mark.parametrize("batches", [(2, 3, 2), (2, 2, 3), (1, 3, 3), (3, 1, 3), (3, 3, 1)])
def test_different_batches_are_refused_with_all_three(batches):
    a, b, out = batches
    text = refusal(torch.empty(a, 8, 5), torch.empty(b, 5, 9), torch.empty(out, 8, 9))
    assert f"batch of A is {a}, of B {b}, of out {out}" in text
    assert "expand" in text


def test_operands_on_two_devices_are_refused_with_both_devices():
    text = refusal(torch.empty(8, 5), torch.empty(5, 9, device="meta"), torch.empty(8, 9))
    assert "B is on meta but A is on cpu" in text


def test_an_out_on_another_device_is_refused():
    text = refusal(torch.empty(8, 5), torch.empty(5, 9), torch.empty(8, 9, device="meta"))
    assert "out is on meta but A is on cpu" in text


def test_an_out_that_is_an_input_is_refused_by_name():
    A = torch.empty(8, 8)
    assert "out shares memory with A" in refusal(A, torch.empty(8, 8), A)
    assert "out shares memory with B" in refusal(torch.empty(8, 8), A, A.T)


def test_an_out_that_lies_between_the_rows_of_an_input_is_accepted():
    packed = torch.zeros(8, 16)
    args = ka.GemmArguments(packed[:, :8], torch.empty(8, 8), packed[:, 8:])
    assert args.out.stride == (16, 1)


def test_an_out_with_one_element_for_several_indices_is_refused():
    text = refusal(torch.empty(8, 5), torch.empty(5, 9), torch.empty(1, 9).expand(8, 9))
    assert "out has shape (8, 9) and stride (0, 1)" in text
    assert "cannot be written" in text


def test_what_layouts_do_not_tell_is_checked_though_they_were_seen_before():
    A, B, out = (torch.empty(8, 8) for _ in range(3))
    ka.GemmArguments(A, B, out)
    assert "out shares memory with A" in refusal(out, B, out)
    assert "out shares memory with B" in refusal(A, out, out)
    assert "scale has shape (3,)" in refusal(
        ka.ScaledOperand(A, torch.rand(3), ka.ScaleMode.PER_ROW), B, out
    )
    assert "epilogue is a function" in refusal(A, B, out, epilogue=lambda accum: accum)
    assert "fp32_precision is 'half'" in refusal(A, B, out, fp32_precision="half")
    fused = ka.EpilogueArguments(lambda accum, bias: accum + bias, bias=out[0])
    assert "out shares memory with bias" in refusal(A, B, out, epilogue=fused)


def test_what_was_refused_is_refused_again():
    for _ in range(2):
        assert "out has (M, N) = (8, 4)" in refusal(*map(torch.empty, ((8, 8), (8, 8), (8, 4))))
        assert "cannot be written" in refusal(
            torch.empty(8, 8), torch.empty(8, 8), torch.empty(1, 8).expand(8, 8)
        )


def test_layouts_that_fit_are_not_kept_without_end(monkeypatch):
    monkeypatch.setattr(gemm, "_FITTING_KEPT", 4)
    for rows in range(1, 20):
        gemm_arguments(rows, 3, 2)
        assert len(gemm._fitting) <= 4


@pytest.mark.parametrize("position", [0, 1, 2])
@pytest.mark.parametrize("value", [None, 3, "tensor", [[1.0]]])
def test_what_is_no_tensor_is_refused_by_the_name_of_its_field(position, value):
    tensors = [torch.empty(8, 8), torch.empty(8, 8), torch.empty(8, 8)]
    tensors[position] = value
    assert refusal(*tensors).startswith(f"{['A', 'B', 'out'][position]} is a ")


def test_an_accumulator_that_names_no_type_is_refused():
    assert "names no element type" in refusal(*gemm_tensors(4, 4, 4), "float7")


def test_an_unknown_precision_is_refused_with_the_known_ones():
    text = refusal(*gemm_tensors(4, 4, 4), fp32_precision="bf16x3")
    assert "fp32_precision is 'bf16x3'" in text
    assert "ieee" in text
    assert "tf32" in text


def test_an_epilogue_that_is_a_bare_function_is_refused_with_what_to_write():
    text = refusal(*gemm_tensors(4, 4, 4), epilogue=torch.relu)
    assert "expected EpilogueArguments" in text


def test_everything_behind_the_accumulator_is_keyword_only():
    with pytest.raises(TypeError):
        ka.GemmArguments(*gemm_tensors(4, 4, 4), None, None)


# What is accepted ------------------------------------------------------------------------


def test_sizes_are_named():
    args = gemm_arguments(8, 9, 5)
    assert (args.M, args.N, args.K, args.L) == (8, 9, 5, 1)
    args = gemm_arguments(8, 9, 5, 3)
    assert (args.M, args.N, args.K, args.L) == (8, 9, 5, 3)


@pytest.mark.parametrize(("M", "N", "K"), [(0, 4, 4), (4, 0, 4), (4, 4, 0), (0, 0, 0)])
def test_empty_problems_are_accepted(M, N, K):
    args = gemm_arguments(M, N, K)
    assert (args.M, args.N, args.K) == (M, N, K)


def test_a_batch_broadcast_by_expand_is_accepted():
    A, B, out = gemm_tensors(8, 9, 5, 3)
    args = ka.GemmArguments(A[:1].expand(3, 8, 5), B, out)
    assert args.A.stride[0] == 0
    assert args.L == 3


def test_meta_operands_with_storage_offsets_are_accepted():
    args = gemm_arguments(8, 9, 5, device="meta", offsets=(8, 16, 24))
    assert [o.tensor.storage_offset() for o in args.operands] == [8, 16, 24]


def test_numpy_operands_are_accepted():
    args = ka.GemmArguments(np.ones((4, 5), np.float32), torch.ones(5, 6), torch.empty(4, 6))
    assert args.A.dtype is dtype("float32")


def test_an_array_that_is_read_only_is_read_and_not_written():
    read_only, writable = np.zeros((4, 4), np.float32), np.zeros((4, 4), np.float32)
    read_only.flags.writeable = False
    A, B = torch.ones(4, 4), torch.ones(4, 4)
    refusal = "is an array that may not be written"
    for _ in range(2):  # layouts that were seen before, too
        ka.GemmArguments(A, B, writable)
        assert torch.equal(ka.ops.gemm(read_only, B), torch.zeros(4, 4))
        with pytest.raises(ArgumentError, match=f"out {refusal}"):
            ka.GemmArguments(A, B, read_only)
        with pytest.raises(ArgumentError, match=f"preactivation {refusal}"):
            ka.ops.gemm_bias_activation(A, B, preactivation=read_only)
    assert not read_only.any()


@pytest.mark.parametrize(
    ("operand", "accumulator"),
    [
        ("float16", "float32"),
        ("bfloat16", "float32"),
        ("float32", "float32"),
        ("float8_e4m3fn", "float32"),
        ("float64", "float64"),
        ("int8", "int32"),
        ("uint8", "int32"),
        ("int16", "int32"),
    ],
)
def test_the_accumulator_follows_the_operands(operand, accumulator):
    args = gemm_arguments(4, 4, 4, types=(operand, operand, operand))
    assert args.accumulator_type is dtype(accumulator)


@pytest.mark.parametrize("spelling", [torch.float64, np.float64, "f64", dtype("f64")])
def test_an_accumulator_is_taken_in_any_spelling(spelling):
    assert gemm_arguments(4, 4, 4, accumulator_type=spelling).accumulator_type == torch.float64


@pytest.fixture
def torch_precision():
    before = torch.get_float32_matmul_precision()
    yield torch.set_float32_matmul_precision
    torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize(
    ("setting", "precision"), [("highest", "ieee"), ("high", "tf32"), ("medium", "tf32")]
)
def test_float32_multiplies_as_torch_is_set_to(torch_precision, setting, precision):
    torch_precision(setting)
    assert gemm_arguments(4, 4, 4).fp32_precision == precision


def test_float32_multiplies_as_asked_whatever_torch_is_set_to(torch_precision):
    torch_precision("highest")
    assert gemm_arguments(4, 4, 4, fp32_precision="tf32").fp32_precision == "tf32"
    torch_precision("high")
    assert gemm_arguments(4, 4, 4, fp32_precision="ieee").fp32_precision == "ieee"


def test_precision_says_nothing_about_other_types():
    args = gemm_arguments(4, 4, 4, types=("bf16",) * 3, fp32_precision="tf32")
    assert args.fp32_precision is None


# Identity --------------------------------------------------------------------------------


def test_the_signature_does_not_depend_on_sizes():
    assert gemm_arguments(4, 5, 6).signature == gemm_arguments(40, 50, 60).signature


@pytest.mark.parametrize(
    "other",
    [
        {"types": ("bf16", "float32", "float32")},
        {"types": ("float32", "float32", "float64")},
        {"layouts": "tnt"},
        {"L": 2},
        {"accumulator_type": "float64"},
        {"fp32_precision": "tf32"},
    ],
    ids=str,
)
def test_the_signature_tells_types_majors_ranks_and_precision_apart(other):
    plain = gemm_arguments(4, 5, 6, fp32_precision="ieee")
    assert gemm_arguments(4, 5, 6, **{"fp32_precision": "ieee", **other}).signature != (
        plain.signature
    )


def test_the_key_tells_sizes_strides_alignment_and_device_apart():
    plain = {"types": ("bf16",) * 3, "device": "meta"}
    keys = {
        gemm_arguments(64, 64, 64, **plain).key,
        gemm_arguments(64, 64, 128, **plain).key,
        gemm_arguments(64, 64, 64, **plain, pads=(8, 0, 0)).key,
        gemm_arguments(64, 64, 64, **plain, offsets=(1, 0, 0)).key,
        gemm_arguments(64, 64, 64, types=("bf16",) * 3).key,
    }
    assert len(keys) == 5
    assert gemm_arguments(64, 64, 64, **plain).key in keys


def test_tensors_are_those_given_in_the_order_of_the_fields():
    tensors = gemm_tensors(4, 5, 6)
    args = ka.GemmArguments(*tensors)
    assert all(kept is given for kept, given in zip(args.tensors, tensors, strict=True))
    assert (args.A.tensor, args.B.tensor, args.out.tensor) == args.tensors


def test_repr_says_sizes_types_and_device():
    args = gemm_arguments(4, 5, 6, 2, types=("bf16", "bf16", "float32"))
    assert repr(args) == (
        "GemmArguments(2x4x5x6 (M x N x K), bf16 x bf16 -> f32, accumulated in f32, on cpu)"
    )


def test_arguments_are_built_within_a_millisecond():
    from time import perf_counter

    tensors = gemm_tensors(64, 64, 64)
    times = []
    for _ in range(200):
        start = perf_counter()
        ka.GemmArguments(*tensors)
        times.append(perf_counter() - start)
    assert sorted(times)[len(times) // 2] <= 1e-3

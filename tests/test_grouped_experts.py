"""Matrices of groups that lie anywhere: lists and addresses as operands, and their scales."""

import pytest
import torch
from support.grouped import ends

import kernel_api as ka
from kernel_api._description import described, rebuilt
from kernel_api.errors import ArgumentError
from kernel_api.tuning._data import random_arguments

OFFSETS = ends(4, 4, 18)


def zeros(*shape, element=torch.float32):
    return torch.zeros(shape, dtype=element)


def refusal(*operands, **options):
    with pytest.raises(ArgumentError) as caught:
        ka.GroupedGemmArguments(*operands, **options)
    return str(caught.value)


def test_a_list_of_experts_stands_for_one_tensor():
    B = [zeros(8, 6) for _ in range(3)]
    args = ka.GroupedGemmArguments(zeros(20, 8), B, zeros(20, 6), OFFSETS)
    assert args.B.discrete
    assert (args.B.shape, args.B.stride, args.B.unit_mode) == ((3, 8, 6), (0, 6, 1), -1)
    assert args.B.tensor.tolist() == [one.data_ptr() for one in B]
    assert args.B.alignment % 8 == 0


def test_pointers_stand_for_one_tensor():
    pointers = torch.zeros(3, dtype=torch.int64)
    B = ka.ExpertPointers(pointers, shape=(8, 6), stride=(1, 8), dtype="bf16")
    args = ka.GroupedGemmArguments(
        zeros(20, 8, element=torch.bfloat16), B, zeros(20, 6), OFFSETS
    )  # fmt: skip
    assert args.tensors[1] is pointers
    assert (args.B.shape, args.B.unit_mode, args.B.alignment) == ((3, 8, 6), -2, 16)
    rest = {"shape": (8, 8), "stride": (8, 1), "dtype": "f32"}
    assert ka.ExpertPointers(pointers, **rest).alignment == 16
    assert ka.ExpertPointers(pointers, **rest, alignment=4).alignment == 4


def test_experts_that_are_unlike_are_refused():
    operands = (zeros(20, 6), OFFSETS)
    A = zeros(20, 8)
    assert "B is an empty list" in refusal(A, [], *operands)
    text = refusal(A, [zeros(8, 6), zeros(8, 7), zeros(8, 6)], *operands)
    assert "B[1] is float32[8, 7]" in text
    text = refusal(A, [zeros(8, 6), zeros(8, 6), zeros(6, 8).t()], *operands)
    assert "B[2] is float32[8, 6]:[1, 8]" in text
    text = refusal(A, [zeros(1, 8, 6)] * 3, *operands)
    assert "B[0] has shape (1, 8, 6); expected a matrix" in text
    assert "offsets has shape (3,); expected (2,)" in refusal(A, [zeros(8, 6)] * 2, *operands)


def test_pointers_that_are_none_are_refused():
    rest = {"shape": (8, 6), "stride": (6, 1), "dtype": "f32"}
    for pointers in (zeros(3), torch.zeros(3, 1, dtype=torch.int64), OFFSETS):
        with pytest.raises(ArgumentError, match=r"expected int64 \(E,\), contiguous"):
            ka.ExpertPointers(pointers, **rest)
    pointers = torch.zeros(3, dtype=torch.int64)
    with pytest.raises(ArgumentError, match=r"shape is \(3, 8, 6\); expected that of one"):
        ka.ExpertPointers(pointers, **{**rest, "shape": (3, 8, 6)})
    with pytest.raises(ArgumentError, match="alignment is 12; expected a power of two"):
        ka.ExpertPointers(pointers, **rest, alignment=12)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(
            ("shape", value)
            for value in (None, (8,), (-1, 6), (8.0, 6), ("8", 6), (8, None, 6), "86")
        ),
        *(("stride", value) for value in (None, (-6, 1), (6, 0.5))),
        *(("alignment", value) for value in (None, "16", 16.0, 0)),
    ],
)
def test_a_layout_that_is_none_is_refused_by_name(name, value):
    rest = {"shape": (8, 6), "stride": (6, 1), "dtype": "f32", name: value}
    with pytest.raises(ArgumentError, match=f"{name} is "):
        ka.ExpertPointers(torch.zeros(3, dtype=torch.int64), **rest)


def test_an_out_within_an_expert_is_refused_by_its_place():
    storage = torch.zeros(3 * 160)
    B = [storage[160 * e :][:160].view(8, 20) for e in range(3)]
    out = storage[160:].view(16, 20)
    text = refusal(zeros(16, 8), B, out, ends(1, 2, 3))
    assert "out shares memory with B[1]" in text


def test_sums_may_be_written_to_a_list():
    operands = (zeros(8, 20), zeros(20, 6))
    args = ka.GroupedGemmArguments(*operands, [zeros(8, 6) for _ in range(3)], OFFSETS)
    assert (args.ragged, args.out.discrete, args.out.shape) == ("K", True, (3, 8, 6))
    assert args.signature != ka.GroupedGemmArguments(*operands, zeros(3, 8, 6), OFFSETS).signature
    one, two = zeros(8, 6), zeros(8, 6)
    assert "out[0] shares memory with out[2]" in refusal(*operands, [one, two, one], OFFSETS)
    wide = zeros(48, 6)
    parts = [wide[8 * place :][:8] for place in range(3)]
    text = refusal(zeros(8, 20), wide[10:30], parts, OFFSETS)
    assert text == "out[1] shares memory with B"
    text = refusal(*operands, [zeros(1, 6).expand(8, 6)] * 3, OFFSETS)
    assert "out[0] has shape (8, 6) and stride (0, 1): several of its elements are one" in text
    element = torch.bfloat16
    made = ka.GroupedGemmArguments(
        zeros(8, 24, element=element), zeros(24, 8, element=element),
        [zeros(8, 8, element=element) for _ in range(3)], OFFSETS,
    )  # fmt: skip
    rejected = {one.family: one.reason for one in ka.explain(made).rejected}
    assert "out is given as matrices that lie anywhere" in rejected["torch.grouped_mm_sum"]


def test_kernels_of_one_tensor_refuse_experts_that_lie_anywhere():
    element = torch.bfloat16
    args = ka.GroupedGemmArguments(
        zeros(20, 8, element=element), [zeros(8, 8, element=element)] * 3,
        zeros(20, 8, element=element), OFFSETS,
    )  # fmt: skip
    rejected = {one.family: one.reason for one in ka.explain(args).rejected}
    assert "B is given as matrices that lie anywhere" in rejected["torch.grouped_mm"]


def empty(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype, device="meta")


@pytest.mark.parametrize("alignment", [1, 2, 4, 8])
def test_addresses_that_are_multiples_of_few_bytes_are_a_reason(alignment):
    layout = {"shape": (64, 128), "stride": (1, 64), "dtype": torch.bfloat16}
    pointers = empty(3, dtype=torch.int64)
    B = ka.ExpertPointers(pointers, **layout, alignment=alignment)
    offsets = empty(3, dtype=torch.int32)
    args = ka.GroupedGemmArguments(empty(30, 64), B, empty(30, 128), offsets)
    offered = ka.get_kernels(args, cc=90, providers=["cutedsl"])
    assert offered and {one.family for one in offered} == {"sm80.grouped_gemm_pointers"}
    rejected = {one.family: one for one in ka.explain(args, cc=90).rejected}
    told = rejected["sm90.grouped_gemm_pointers"]
    assert f"B's addresses are known to be multiples of {alignment} bytes" in told.reason
    assert "if all in B started at multiples of 16" in told.nearest


def test_one_expert_that_is_misaligned_is_a_reason():
    B = [empty(64, 64), empty(64 * 64 + 1)[1:].view(64, 64)]
    offsets = empty(2, dtype=torch.int32)
    args = ka.GroupedGemmArguments(empty(20, 64), B, empty(20, 64), offsets)
    assert ka.get_kernels(args, cc=90, providers=["cutedsl"])
    rejected = {one.family: one.reason for one in ka.explain(args, cc=90).rejected}
    told = "B's addresses are known to be multiples of 2 bytes"
    assert told in rejected["sm90.grouped_gemm_pointers"]


# Scales ----------------------------------------------------------------------------------


@pytest.mark.parametrize("pointers", [False, True])
@pytest.mark.parametrize(
    ("shape", "mode"),
    [
        ((), "per_tensor"),
        ((3,), "per_tensor"),
        ((3, 6), "per_row"),
        ((3, 2, 1), "block_128x128"),
    ],
)
def test_experts_that_lie_anywhere_have_one_scale(shape, mode, pointers):
    B = [zeros(200, 6) for _ in range(3)]
    if pointers:
        addresses = torch.tensor([one.data_ptr() for one in B])
        B = ka.ExpertPointers(addresses, shape=(200, 6), stride=(6, 1), dtype="f32", alignment=4)
    operands, scale = (zeros(20, 200), B, zeros(20, 6), OFFSETS), torch.ones(shape)
    args = ka.GroupedGemmArguments(*operands, B_scale=scale)
    one = ka.ScaledOperand(zeros(3, 200, 6), scale, ka.ScaleMode(mode))
    dense = ka.GroupedGemmArguments(operands[0], one, *operands[2:])
    assert args.scaled == dense.scaled == ("B",)
    assert (args.B.mode, args.B_scale.tensor) == (ka.ScaleMode(mode), scale)
    assert f"f32*{mode}" in repr(args)
    plain = ka.GroupedGemmArguments(*operands)
    assert plain.B_scale is None  # though the experts may be the same
    assert len({one.signature for one in (args, dense, plain)}) == 3
    assert len({one.key for one in (args, dense, plain)}) == 3
    assert args.rebuilt(*args.tensors).signature == args.signature
    assert args.rebuilt(*args.operands).B_scale.tensor is scale
    again = rebuilt(described(args))
    assert (again.signature, again.B_scale.shape) == (args.signature, shape)
    drawn = random_arguments(described(args), "cpu", 0).B_scale.tensor
    assert ((drawn >= 0.5) & (drawn < 1.5)).all()


def test_scales_of_experts_that_are_none_are_refused():
    A, B, out = zeros(20, 8), [zeros(8, 6) for _ in range(3)], zeros(20, 6)
    text = refusal(A, zeros(3, 8, 6), out, OFFSETS, B_scale=torch.ones(3))
    assert "B_scale is given and B is one tensor" in text
    text = refusal(A, B, out, OFFSETS, B_scale=torch.ones(3).double())
    assert text == "B_scale is float64; expected float32"
    text = refusal(A, B, out, OFFSETS, B_scale=torch.ones(3, 1, 1, 1))
    assert "B_scale has shape (3, 1, 1, 1); expected (), (E,), (E, N)" in text
    text = refusal(A, B, out, OFFSETS, B_scale=torch.ones(3, 5))
    assert "B's per_row scale has shape (3, 5); expected (3, 6)" in text
    text = refusal(A, B, out, OFFSETS, B_scale=torch.ones(3, device="meta"))
    assert "B's scale is on meta but the operands are on cpu" in text

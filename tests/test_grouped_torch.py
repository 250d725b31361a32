"""torch's own products of groups as candidates: when they are offered, and that they are right."""

import pytest
import torch
from support.grouped import GROUPS, GroupedDraw

import kernel_api as ka
from kernel_api.errors import ArgumentError

BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn


def reasons(args):
    return {one.family: one.reason for one in ka.explain(args, providers=["torch"]).rejected}


def families(args):
    return [k.family_name() for k in ka.get_kernels(args, providers=["torch"])]


def of_rows(draw, **options):
    A, B, out = draw.A, draw.B, draw.written(draw.T, draw.N)
    return ka.GroupedGemmArguments(A, B, out, draw.offsets, **options)


def of_sums(draw, **options):
    A, B = draw.per_token(draw.K).t(), draw.per_token(draw.N)
    return ka.GroupedGemmArguments(
        A, B, draw.written(draw.E, draw.K, draw.N), draw.offsets, **options
    )  # fmt: skip


@pytest.mark.parametrize("groups", [g for g in GROUPS.values() if g[1]], ids=str)
def test_both_forms_are_offered_and_right(groups):
    draw = GroupedDraw(*groups, 16, 24, element=BF16)
    for args, family in ((of_rows(draw), "torch.grouped_mm"),
                         (of_sums(draw), "torch.grouped_mm_sum")):  # fmt: skip
        (kernel,) = ka.get_kernels(args, providers=["torch"])
        assert kernel.family_name() == family
        verdict = ka.verify(kernel, args)
        assert verdict, verdict


def test_a_prepared_launch_takes_other_tensors_and_offsets():
    draw = GroupedDraw([3, 3, 9], 11, 16, 24, element=BF16)
    args = of_rows(draw)
    (kernel,) = ka.get_kernels(args, providers=["torch"])
    launch = kernel.prepare(args)
    other = GroupedDraw([1, 7, 8], 11, 16, 24, element=BF16, seed=1)
    A, B, out = other.A, other.B, other.written(11, 16)
    launch(A, B, out, other.offsets)
    assert out[8:].isnan().all()
    expected = other.product(A.double(), B.double())
    torch.testing.assert_close(out[:8].double(), expected, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("form", [of_rows, of_sums])
@pytest.mark.parametrize(
    ("given", "text"),
    [
        ([-1, 3, 9], r"offsets\[0\] is -1 and the first group begins at 0"),
        ([4, 3, 9], r"offsets\[1\] is 3 and offsets\[0\] is 4; they may not decrease"),
        ([3, 3, 12], r"offsets\[2\] is 12; there are T = 11 tokens"),
    ],
)
def test_offsets_on_the_host_are_checked(form, given, text):
    args = form(GroupedDraw([3, 3, 9], 11, 16, 24, element=BF16))
    (kernel,) = ka.get_kernels(args, providers=["torch"])
    launch = kernel.prepare(args)
    bad = torch.tensor(given, dtype=torch.int32)
    for call in (launch, lambda *tensors: kernel.run(args.rebuilt(*tensors))):
        with pytest.raises(ArgumentError, match=text):
            call(*args.tensors[:3], bad)
    assert args.out.tensor.isnan().all()


def test_an_out_of_any_strides_is_written():
    draw = GroupedDraw([3, 3, 9], 11, 16, 24, element=BF16)
    out = draw.written(16, 13)[:, :11].t()
    args = ka.GroupedGemmArguments(draw.A, draw.B, out, draw.offsets)
    (kernel,) = ka.get_kernels(args, providers=["torch"])
    assert ka.verify(kernel, args)


def test_refusals_say_what_torch_cannot_do():
    draw = GroupedDraw([3, 3, 9], 11, 16, 24, element=BF16)
    tokens = torch.arange(11, dtype=torch.int32)
    assert "row_index is given" in reasons(of_rows(draw, row_index=tokens))["torch.grouped_mm"]
    assert "out_row_index is given" in reasons(
        of_rows(draw, out_row_index=tokens)
    )["torch.grouped_mm"]  # fmt: skip
    assert reasons(of_sums(draw, accumulate=True))["torch.grouped_mm_sum"] == (
        "torch writes its result and adds to nothing"
    )
    epilogue = ka.EpilogueArguments(lambda accum: accum * 2)
    assert "an epilogue is asked for" in reasons(
        of_rows(draw, epilogue=epilogue)
    )["torch.grouped_mm"]  # fmt: skip
    odd = GroupedDraw([3, 3, 9], 11, 16, 23, element=BF16)
    assert (
        "torch groups operands in multiples of 16 bytes"
        in reasons(of_rows(odd))["torch.grouped_mm"]
    )
    wide = GroupedDraw([3, 3, 9], 11, 16, 24, element=torch.float32)
    assert "A is float32; expected bfloat16" in reasons(of_rows(wide))["torch.grouped_mm"]
    empty = GroupedDraw([0], 0, 16, 24, element=BF16)
    assert "T is 0" in reasons(of_rows(empty))["torch.grouped_mm"]


def repeated(*shape):
    """One row, again and again."""
    return torch.randn(shape[-1]).to(BF16).expand(shape)


def test_what_is_repeated_is_computed_by_another_kernel():
    draw = GroupedDraw([3, 3, 9], 11, 16, 24, element=BF16)
    B, offsets = draw.B, draw.offsets
    for A in (repeated(11, 24), repeated(24, 11).t()):
        args = ka.GroupedGemmArguments(A, B, draw.written(11, 16), offsets)
        assert f"A has shape (11, 24) and stride {A.stride()}" in reasons(args)["torch.grouped_mm"]
        found, expected = (ka.ops.grouped_gemm(one, B, offsets)[:9] for one in (A, A.contiguous()))
        torch.testing.assert_close(found, expected, rtol=0.02, atol=0.02)
    B = repeated(3, 16, 24).mT
    args = ka.GroupedGemmArguments(draw.A, B, draw.written(11, 16), offsets)
    assert "B has shape (3, 24, 16) and stride (0, 1, 0)" in reasons(args)["torch.grouped_mm"]
    A = repeated(11, 24).t()
    args = ka.GroupedGemmArguments(A, draw.A, draw.written(3, 24, 24), offsets)
    assert "A has shape (24, 11) and stride (1, 0)" in reasons(args)["torch.grouped_mm_sum"]


def on_meta(*shape, transposed=False):
    made = torch.empty(shape, dtype=BF16, device="meta")
    return made.mT if transposed else made


def test_tokens_are_not_split_inside_of_a_vector_on_a_gpu():
    offsets = torch.empty(3, dtype=torch.int32, device="meta")
    experts, out = on_meta(3, 64, 48), on_meta(32, 48)
    args = ka.GroupedGemmArguments(on_meta(32, 64), experts, out, offsets)
    assert families(args) == ["torch.grouped_mm"]
    args = ka.GroupedGemmArguments(on_meta(64, 32, transposed=True), experts, out, offsets)
    assert "A has stride 1 along the tokens" in reasons(args)["torch.grouped_mm"]

    A, B = on_meta(32, 64, transposed=True), on_meta(32, 48)
    args = ka.GroupedGemmArguments(A, B, experts, offsets)
    assert families(args) == ["torch.grouped_mm_sum"]
    args = ka.GroupedGemmArguments(on_meta(64, 32), B, experts, offsets)
    assert "A has stride 1 along the tokens" in reasons(args)["torch.grouped_mm_sum"]
    args = ka.GroupedGemmArguments(A, on_meta(48, 32, transposed=True), experts, offsets)
    assert "B has stride 1 along the tokens" in reasons(args)["torch.grouped_mm_sum"]


def scaled(*shape, scales, transposed=False):
    made = torch.empty(shape, dtype=E4M3, device="meta")
    made = made.mT if transposed else made
    scale = torch.empty(scales, device="meta")
    return ka.ScaledOperand(made, scale, ka.ScaleMode.PER_ROW)


def test_eight_bits_are_offered_with_scales_per_row_on_a_gpu():
    def args(transposed):
        shape = (3, 48, 32) if transposed else (3, 32, 48)
        return ka.GroupedGemmArguments(
            scaled(20, 32, scales=(20,)),
            scaled(*shape, scales=(3, 48), transposed=transposed),
            torch.empty(20, 48, dtype=BF16, device="meta"),
            torch.empty(3, dtype=torch.int32, device="meta"),
        )

    assert families(args(True)) == ["torch.scaled_grouped_mm"]
    assert "B is N-major; expected K-major" in reasons(args(False))["torch.scaled_grouped_mm"]


def test_a_torch_without_the_function_says_so(monkeypatch):
    draw = GroupedDraw([3, 3, 9], 11, 16, 24, element=BF16)
    monkeypatch.delattr(torch, "_grouped_mm")
    name = "torch_grouped_mm_ragged_m_bf16_bf16_bf16_f32_tnt_align16x16x2"
    (kernel,) = (
        one for one in ka.get_kernels(providers=["torch"]) if one.metadata.kernel_name == name
    )
    assert "has no _grouped_mm" in kernel.supports(of_rows(draw)).error


def test_offsets_may_be_those_of_no_tokens():
    args = of_rows(GroupedDraw([0, 0], 5, 16, 24, element=BF16))
    (kernel,) = ka.get_kernels(args, providers=["torch"])
    assert ka.verify(kernel, args)

"""A wrong result is detected, a right one passes: ka.verify."""

import math

import pytest
import torch
from support.data import gemm_arguments, gemm_tensors
from support.kernels import CpuGemm, exact_product

import kernel_api as ka
from kernel_api.errors import ArgumentError, UnsupportedError
from kernel_api.verification import compare, judge

TYPES = {
    "f64": ("f64", "f64", "f64"),
    "f32": ("f32", "f32", "f32"),
    "f16": ("f16", "f16", "f16"),
    "bf16": ("bf16", "bf16", "bf16"),
    "bf16 to f32": ("bf16", "bf16", "f32"),
    "f32 to bf16": ("f32", "f32", "bf16"),
    "e4m3": ("e4m3", "e4m3", "bf16"),
    "e5m2": ("e5m2", "e4m3", "f32"),
    "i8": ("i8", "i8", "i32"),
    "i32": ("i32", "i32", "i32"),
    "u8": ("u8", "u8", "i32"),
}
every_type = pytest.mark.parametrize("types", TYPES.values(), ids=TYPES)


def kernel_that(spoil=None, run=None):
    """A right kernel, whose result ``spoil(args)`` then changes; or one that does ``run``."""

    class Spoiled(CpuGemm):
        def _run(self, args, artifact, stream, workspace=None):
            if run is not None:
                run(args)
                return
            args.out.tensor.copy_(exact_product(args))
            if spoil is not None:
                spoil(args)

    (kernel,) = (
        kernel
        for operands in Spoiled.operand_variants()
        for kernel in Spoiled.kernels_for(operands)
    )
    return kernel


def verdict(kernel, args):
    found = ka.verify(kernel, args)
    assert bool(found) is found.passed
    return found


# A right result passes -------------------------------------------------------------------


@every_type
@pytest.mark.parametrize("L", [None, 3])
def test_a_right_result_passes(types, L):
    found = verdict(kernel_that(), gemm_arguments(33, 47, 65, L, types=types))
    assert found.passed, found
    assert found.reason is None
    assert found.error_ratio <= 1
    assert str(found).startswith("passed")


@pytest.mark.parametrize(
    ("M", "N", "K"), [(0, 4, 4), (4, 0, 4), (4, 4, 0), (0, 0, 0), (1, 1, 1), (1, 4, 4), (4, 1, 4)]
)
@every_type
def test_empty_and_single_extents_pass(types, M, N, K):
    assert verdict(kernel_that(), gemm_arguments(M, N, K, types=types))


@pytest.mark.parametrize("layouts", ["ttt", "tnt", "nnn", "ttn"])
def test_padded_operands_of_every_layout_pass(layouts):
    args = gemm_arguments(9, 10, 11, 2, layouts=layouts, pads=(1, 2, 3), offsets=(4, 5, 6))
    assert verdict(kernel_that(), args)


@pytest.mark.parametrize("kind", ["float32", "float64", "int32"])
@pytest.mark.parametrize("stored", ["complex64", "complex128"])
def test_a_product_of_real_matrices_stored_as_complex_numbers_is_compared(kind, stored):
    args = gemm_arguments(7, 5, 8, types=(kind, kind, stored))
    (kernel,) = ka.get_kernels(args, providers=["reference"])
    assert ka.verify(kernel, args)
    right = args.out.tensor.clone()
    for wrong in (1.0, 1.0j):
        args.out.tensor.copy_(right)[3, 2] += wrong
        assert not judge(args)


def test_inputs_with_infinities_and_nans_pass_where_the_result_has_them():
    A, B, out = gemm_tensors(8, 8, 8)
    A[1, 2], A[3, 4], A[5] = float("nan"), float("inf"), 0
    assert verdict(kernel_that(), ka.GemmArguments(A, B, out))


def test_sums_formed_in_another_order_pass():
    def in_pieces(args):
        A, B, out = args.tensors
        total = torch.zeros_like(out)
        for piece in range(0, args.K, 8):
            total += A[:, piece : piece + 8] @ B[piece : piece + 8]
        out.copy_(total)

    assert verdict(kernel_that(run=in_pieces), gemm_arguments(64, 64, 512))


def test_an_out_that_is_a_slice_of_a_buffer_passes():
    buffer = torch.zeros(8, 64)
    A, B, _ = gemm_tensors(8, 8, 8)
    assert verdict(kernel_that(), ka.GemmArguments(A, B, buffer[:, 8:16]))


# A wrong one does not --------------------------------------------------------------------


@every_type
@pytest.mark.parametrize("L", [None, 3])
def test_one_wrong_element_is_detected(types, L):
    def wrong(args):
        element = args.out.tensor.select(-1, 5).select(-1, 7)
        element.copy_((element.double() * 2 + 8).to(args.out.tensor.dtype))

    found = verdict(kernel_that(wrong), gemm_arguments(33, 47, 65, L, types=types))
    assert not found
    assert found.error_ratio > 1
    assert found.max_abs_error > 0
    assert str(found).startswith("failed: ")


@pytest.mark.parametrize("kind", ["i8", "i32", "u8"])
def test_an_integer_that_is_off_by_one_is_detected(kind):
    def wrong(args):
        args.out.tensor[3, 4] += 1

    found = verdict(kernel_that(wrong), gemm_arguments(33, 47, 65, types=(kind, kind, "i32")))
    assert found.reason == "1 of 1551 integers differ"
    assert found.max_abs_error == 1


@every_type
def test_an_unwritten_last_row_is_detected(types):
    def partial(args):
        args.out.tensor[:-1].copy_(exact_product(args)[:-1])

    assert not verdict(kernel_that(run=partial), gemm_arguments(33, 47, 65, types=types))


@every_type
def test_a_kernel_that_writes_nothing_is_detected_even_if_the_right_result_is_there(types):
    args = gemm_arguments(33, 47, 65, types=types)
    args.out.tensor.copy_(exact_product(args))
    assert not verdict(kernel_that(run=lambda args: None), args)


@pytest.mark.parametrize("kind", ["i32", "u8", "bool"])
def test_a_kernel_that_writes_nothing_is_detected_where_zeros_are_right(kind):
    args = gemm_arguments(4, 4, 0, types=(kind, kind, kind))
    args.out.tensor.zero_()
    assert not verdict(kernel_that(run=lambda args: None), args)


def test_a_missing_contribution_of_the_last_k_is_detected():
    def short(args):
        A, B, out = args.tensors
        out.copy_(A[:, :-1].double() @ B[:-1].double())

    for types in (TYPES["bf16"], TYPES["f32"], TYPES["e4m3"]):
        assert not verdict(kernel_that(run=short), gemm_arguments(33, 47, 65, types=types))


def test_only_the_first_batch_computed_is_detected():
    def first(args):
        args.out.tensor.copy_(exact_product(args)[:1].expand(args.out.shape))

    assert not verdict(kernel_that(run=first), gemm_arguments(9, 10, 11, 3))


def test_operands_taken_for_transposed_are_detected():
    def transposed(args):
        A, B, out = args.tensors
        out.copy_(A.T @ B)

    assert not verdict(kernel_that(run=transposed), gemm_arguments(16, 16, 16))


def test_a_wrong_small_row_is_detected_beside_large_ones():
    """Its error is far below one unit in the last place of the largest element."""
    A, B, out = gemm_tensors(16, 32, 32, types=("bf16", "bf16", "f32"))
    A[:8] *= 2**12
    A[8:] *= 2**-12

    def wrong(args):
        args.out.tensor[12] *= 1.5

    assert not verdict(kernel_that(wrong), ka.GemmArguments(A, B, out))


def test_writing_into_the_padding_between_rows_is_detected():
    args = gemm_arguments(8, 8, 8, pads=(0, 0, 4))

    def wide(args):
        whole = args.out.tensor.as_strided((8, 9), args.out.stride)
        whole[3, 8] = 1.0

    args.out.tensor.as_strided((8, 12), args.out.stride).zero_()
    found = verdict(kernel_that(wide), args)
    assert found.reason == "the kernel wrote outside of out, into memory between its rows"


def test_writing_before_and_behind_the_output_is_detected():
    for shift in (-1, 8 * 8):
        buffer = torch.zeros(100)
        A, B, _ = gemm_tensors(8, 8, 8)
        out = buffer[10:74].view(8, 8)

        def stray(args, buffer=buffer, shift=shift):
            buffer[10 + shift] = 5.0

        assert not verdict(kernel_that(stray), ka.GemmArguments(A, B, out))


@pytest.mark.parametrize("name", ["A", "B"])
@pytest.mark.parametrize("value", [0.0, -0.0, float("nan")])
def test_a_changed_input_is_detected_by_its_bits(name, value):
    args = gemm_arguments(8, 8, 8)
    getattr(args, name).tensor[2, 3] = 0.0 if value != 0 or str(value) == "-0.0" else 1.0

    def change(args):
        getattr(args, name).tensor[2, 3] = value

    found = verdict(kernel_that(change), args)
    assert found.reason == f"the kernel changed its input {name}"


def test_a_lost_nan_is_detected():
    A, B, out = gemm_tensors(8, 8, 8)
    A[1, 2] = float("nan")

    def lose(args):
        args.out.tensor.nan_to_num_(0.0)

    found = verdict(kernel_that(lose), ka.GemmArguments(A, B, out))
    assert found.reason == "a NaN of the inputs is lost"


@pytest.mark.parametrize("instead", [0.0, float("-inf"), float("nan")])
def test_a_lost_infinity_is_detected(instead):
    A, B, out = gemm_tensors(8, 8, 8)
    A[1, 2] = float("inf")

    def lose(args):
        args.out.tensor[1] = instead

    assert not verdict(kernel_that(lose), ka.GemmArguments(A, B, out))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_an_element_that_is_not_finite_is_detected(value):
    def spoil(args):
        args.out.tensor[2, 3] = value

    found = verdict(kernel_that(spoil), gemm_arguments(8, 8, 8))
    assert "not finite" in found.reason


def test_rounding_to_a_narrower_type_on_the_way_is_detected():
    def narrow(args):
        args.out.tensor.copy_(exact_product(args).to(torch.bfloat16))

    assert not verdict(kernel_that(narrow), gemm_arguments(33, 47, 65))


def test_accumulating_in_a_narrower_type_is_detected():
    def narrow(args):
        A, B, out = args.tensors
        total = torch.zeros(out.shape, dtype=torch.bfloat16)
        for k in range(args.K):
            total += A[:, k : k + 1] * B[k]
        out.copy_(total)

    args = gemm_arguments(33, 47, 512, types=("bf16", "bf16", "bf16"))
    assert not verdict(kernel_that(run=narrow), args)


def test_multiplying_float32_in_tfloat32_is_detected_unless_it_was_allowed():
    def tf32(args):
        A, B, out = args.tensors
        a, b = (((t.view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32) for t in (A, B))
        out.copy_(a.double() @ b.double())

    kernel = kernel_that(run=tf32)
    assert not verdict(kernel, gemm_arguments(33, 47, 65, fp32_precision="ieee"))
    assert verdict(kernel, gemm_arguments(33, 47, 65, fp32_precision="tf32"))


# What is not about the result ------------------------------------------------------------


def test_what_run_refuses_is_raised():
    A, B, out = gemm_tensors(4, 4, 4)
    scaled = ka.ScaledOperand(A, torch.tensor(2.0), ka.ScaleMode.PER_TENSOR)
    with pytest.raises(UnsupportedError, match="A carries a per_tensor scale"):
        ka.verify(kernel_that(), ka.GemmArguments(scaled, B, out))


def test_arguments_without_a_reference_are_refused_by_type():
    with pytest.raises(ArgumentError, match="no reference for int"):
        ka.verify(kernel_that(), 3)


def test_a_reordering_kernel_may_be_off_three_times_as_much_as_torch():
    ref = torch.full((4, 4), 1000.0, dtype=torch.float64)
    base = ref + 1.0
    out = (ref + 2.5).to(torch.float32)
    assert not compare(out, ref, base, factor=2.0)
    assert compare(out, ref, base, factor=3.0)


def test_one_unit_in_the_last_place_is_allowed_where_torch_is_exact():
    ref = torch.full((4, 4), 1.0, dtype=torch.float64)
    one_up = torch.full((4, 4), 1.0 + torch.finfo(torch.float32).eps)
    assert compare(one_up, ref, ref)
    assert not compare(one_up + 3 * torch.finfo(torch.float32).eps, ref, ref)


# Where the baseline says little ------------------------------------------------------------


@pytest.mark.parametrize("value", [math.nan, 0.0, -math.inf, 3.0])
@pytest.mark.parametrize("element", [torch.float16, torch.bfloat16])
def test_what_is_wrong_where_the_right_result_overflows_is_detected(element, value):
    large = 300.0 if element is torch.float16 else 3e38
    A, B = (torch.full(shape, large, dtype=element) for shape in ((8, 16), (16, 8)))
    args = ka.GemmArguments(A, B, torch.empty(8, 8, dtype=element))
    args.out.tensor.copy_(A @ B)
    assert args.out.tensor.isinf().all()
    assert judge(args)
    args.out.tensor[3, 4:] = value
    assert "where torch in the same type overflows" in judge(args).reason


def test_a_right_result_passes_where_only_torch_overflows():
    ref = torch.tensor([[6e4, 1.0, 2.0]], dtype=torch.float64)
    base = torch.tensor([[math.inf, 1.0, 2.0]], dtype=torch.float16)
    for right in (6e4, math.inf):
        assert compare(torch.tensor([[right, 1.0, 2.0]], dtype=torch.float16), ref, base)
    assert not compare(torch.tensor([[5e4, 1.0, 2.0]], dtype=torch.float16), ref, base)


def powers(changed):
    x = torch.randn(16, 64, generator=torch.Generator().manual_seed(0))
    out = torch.empty(16, 64, dtype=torch.float8_e4m3fn)
    scale = torch.empty(16, 2, dtype=torch.float8_e8m0fnu)
    args = ka.fusions.quantize(x, out=out, scale=scale, mode="mx")
    ka.get_kernels(args, providers=["reference"])[0].run(args)
    assert judge(args)
    scale.copy_(changed(scale.clone()))
    return judge(args)


@pytest.mark.parametrize("factor", [0.5, 0.25, 2.0, 2.0**-20])
def test_powers_of_two_that_are_off_are_detected(factor):
    found = powers(lambda scale: (scale.float() * factor).to(scale.dtype))
    assert "powers of two differ" in found.reason


def test_powers_of_two_in_another_order_are_detected():
    assert "powers of two differ" in powers(lambda scale: scale.flip(0)).reason


def test_lost_rows_are_detected_beside_rows_that_cancel():
    """The first query sees one key, so that the gradient of its score is zero, but for rounding."""
    draw = torch.Generator().manual_seed(0)
    Q, K, V, dO = (torch.randn(2, 1, 64, 64, generator=draw).bfloat16() for _ in range(4))
    dO[1] *= 1e-3
    mask = ka.masks.Causal()
    out, lse = ka.ops.sdpa(Q, K, V, mask=mask, return_lse=True)
    made = (torch.empty_like(Q) for _ in range(3))
    args = ka.SdpaBackwardArguments(Q, K, V, out, dO, lse, *made, mask=mask)
    ka.get_kernels(args, providers=["reference"])[0].run(args)
    assert judge(args)
    args.dQ.tensor[1] = 0
    assert "a row is off" in judge(args).reason


def test_lost_rows_are_detected_beside_one_that_the_baseline_gets_wrong():
    ref = torch.full((64, 8), 0.01, dtype=torch.float64)
    ref[0] = 0.1
    base = ref * 1.0001
    base[0] = ref[0] * 1.2
    assert compare(base.float(), ref, base.float())
    out = base.clone()
    out[1:] = 0
    assert "a row is off" in compare(out.float(), ref, base.float()).reason


def test_rows_that_cancel_altogether_may_be_off_as_the_worst_of_them():
    ref = torch.ones(64, 8, dtype=torch.float64)
    ref[:3] = 1e-17
    base = ref * 1.0001
    base[0], base[2] = 1e-3, 0.0  # by luck there is no error
    out = base.clone()
    out[2] = 1e-3
    assert compare(out.float(), ref, base.float())
    out[2] = 4e-3
    assert not compare(out.float(), ref, base.float())


def test_rows_that_a_type_hardly_holds_may_be_off_as_the_baseline_is_in_the_same_row():
    """Numbers below half of the smallest one of 8 bits are 0, in whatever is right."""
    draw = torch.randn(64, 96, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    ref = draw * torch.logspace(-8, 2, 64, dtype=torch.float64)[:, None]
    right = ref.to(torch.float8_e4m3fn)
    assert compare(right, ref, right)
    largest = ref.abs().amax(1, keepdim=True)
    lost = torch.where((largest > 2.0**-6) & (largest < 2.0**-4), 0.0, ref)
    assert "a row is off" in compare(lost.to(right.dtype), ref, right).reason


@pytest.mark.parametrize("factor", [2.0, 3.0])
def test_a_row_may_be_off_by_no_more_than_the_baseline_allows_or_is_missing(factor):
    draw = torch.Generator().manual_seed(0)
    ref, noise = (torch.randn(64, 96, generator=draw, dtype=torch.float64) for _ in range(2))
    ref[0] *= 1000  # the norm of row 1 is nothing beside its error
    base = ref * (1 + 1e-4 * noise)
    away = noise / noise.norm(dim=1, keepdim=True) * ref.norm(dim=1, keepdim=True)
    base[:2] += 0.27 * away[:2]

    def judged(row):
        out = ref.clone()
        out[1] = row
        return compare(out.float(), ref, base, factor=factor)

    assert judged(ref[1] + 0.27 * 0.95 * factor * away[1])
    for wrong in (torch.zeros(96), ref[1] + 0.27 * 1.05 * factor * away[1]):
        assert "a row is off" in judged(wrong).reason


def test_an_infinity_that_is_rightly_rounded_passes_where_torch_has_a_nan():
    ref = torch.tensor([[7e4, 1.0, 2.0]], dtype=torch.float64)
    base = torch.tensor([[math.nan, 1.0, 2.0]], dtype=torch.float16)
    for value, passes in ((math.inf, True), (math.nan, True), (0.0, False), (-math.inf, False)):
        out = torch.tensor([[value, 1.0, 2.0]], dtype=torch.float16)
        assert bool(compare(out, ref, base)) == passes


def test_a_changed_scale_of_an_input_is_detected(monkeypatch):
    from kernel_api.providers.reference.gemm import ReferenceGemm

    F8, mode = torch.float8_e4m3fn, ka.ScaleMode.PER_TENSOR
    scale = torch.ones(())
    A = ka.ScaledOperand(torch.randn(8, 16).to(F8), scale, mode)
    B = ka.ScaledOperand(torch.randn(32, 16).to(F8).t(), torch.ones(()), mode)
    args = ka.GemmArguments(A, B, torch.empty(8, 32, dtype=torch.bfloat16))
    (kernel,) = ka.get_kernels(args, providers=["reference"])
    right = ReferenceGemm._run

    def changes(self, args, *rest):
        scale.mul_(2)
        right(self, args, *rest)

    monkeypatch.setattr(ReferenceGemm, "_run", changes)
    assert ka.verify(kernel, args).reason == "the kernel changed the scale of A"

"""Operands with scales: their checks, their reference, and who takes them."""

import math

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import kernel_api as ka
from kernel_api import GemmArguments, ScaledOperand, ScaleMode
from kernel_api.errors import ArgumentError
from kernel_api.operands import Operand
from kernel_api.providers.torch.gemm import _columns_together

M, N, K = 48, 64, 256
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def operand(rows, columns, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    if dtype is torch.int8:
        return torch.randint(-99, 100, (rows, columns), generator=generator).to(dtype)
    return torch.randn(rows, columns, generator=generator).to(dtype)


def scale(*shape, seed=7):
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) + 0.25


SCALES = {
    "A": {
        ScaleMode.PER_TENSOR: scale(),
        ScaleMode.PER_ROW: scale(M),
        ScaleMode.BLOCK_1x128: scale(M, 2),
    },
    "B": {
        ScaleMode.PER_TENSOR: scale(),
        ScaleMode.PER_ROW: scale(N),
        ScaleMode.BLOCK_128x128: scale(2, 1),
    },
}


def real_values(name, stored, mode, values):
    """From the definition: the scale that belongs to element (i, j)."""
    i, j = torch.meshgrid(*map(torch.arange, stored.shape), indexing="ij")
    index = {
        ScaleMode.PER_TENSOR: (),
        ScaleMode.PER_ROW: (i if name == "A" else j,),
        ScaleMode.BLOCK_1x128: (i, j // 128),
        ScaleMode.BLOCK_128x128: (i // 128, j // 128),
    }[mode]
    return stored.double() * values.double()[index]


@pytest.mark.parametrize("dtype", [E4M3, E5M2, torch.int8, torch.bfloat16], ids=str)
@pytest.mark.parametrize("mode_b", SCALES["B"], ids=lambda m: m.value)
@pytest.mark.parametrize("mode_a", SCALES["A"], ids=lambda m: m.value)
def test_the_reference_multiplies_stored_values_by_their_scales(mode_a, mode_b, dtype):
    a, b = operand(M, K, dtype, 1), operand(K, N, dtype, 2)
    out = torch.empty(M, N)
    args = GemmArguments(
        ScaledOperand(a, SCALES["A"][mode_a], mode_a),
        ScaledOperand(b, SCALES["B"][mode_b], mode_b),
        out,
    )
    kernel = ka.get_kernels(args, providers=["reference"])[0]
    kernel.run(args)
    real_a = real_values("A", a, mode_a, SCALES["A"][mode_a])
    real_b = real_values("B", b, mode_b, SCALES["B"][mode_b])
    assert torch.equal(out, (real_a @ real_b).float())


def test_a_scaled_output_stores_the_product_over_the_scale():
    a, b = operand(M, K, torch.bfloat16, 1), operand(K, N, torch.bfloat16, 2)
    stored, unit = torch.empty(M, N, dtype=E4M3), torch.tensor(0.37)
    args = GemmArguments(a, b, ScaledOperand(stored, unit, ScaleMode.PER_TENSOR))
    ka.get_kernels(args, providers=["reference"])[0].run(args)
    assert torch.equal(stored.float(), ((a.double() @ b.double()) / unit.double()).to(E4M3).float())


@pytest.mark.parametrize(
    ("element", "stored"),
    [(torch.int8, [-128, 127, 4]), (torch.uint8, [0, 255, 4]), (E5M2, [-57344, 57344, 4])],
)
@pytest.mark.parametrize("how", ["plain", "by an epilogue", "with a scale"])
def test_real_numbers_are_rounded_to_nearest_and_saturate(element, stored, how):
    a, b = torch.full((2, 1), 2.0), torch.tensor([[-1e6, 1e6, 1.95]])
    out = torch.empty(2, 3, dtype=element)
    if how == "by an epilogue":
        ka.ops.gemm(a, b, out=out, bias=torch.zeros(3))
    else:
        scaled = ScaledOperand(out, torch.tensor(0.5), ScaleMode.PER_TENSOR)
        args = GemmArguments(a, b, out) if how == "plain" else GemmArguments(a / 2, b, scaled)
        kernel = ka.get_kernels(args)[0]
        kernel.run(args)
        assert ka.verify(kernel, args)
    assert out.double().tolist() == [stored, stored]


def test_products_of_integers_keep_their_low_bits_unless_they_are_scaled():
    a = torch.full((1, 3), 127, dtype=torch.int8)
    assert ka.ops.gemm(a, a.t(), out_dtype="int8").tolist() == [[3]]
    units = ScaledOperand(a, torch.tensor(1.0), ScaleMode.PER_TENSOR)
    assert ka.ops.gemm(units, a.t(), out_dtype="int8").tolist() == [[127]]


def test_what_integers_are_allowed_is_on_the_device_of_the_operands():
    (kernel,) = ka.get_kernels(
        GemmArguments(*(torch.ones(2, 2, dtype=torch.int8) for _ in range(3))),
        providers=["reference"],
    )
    with FakeTensorMode():
        a, b, out = (torch.empty(4, 4, dtype=torch.int8, device="cuda") for _ in range(3))
        units = ScaledOperand(a, torch.empty((), device="cuda"), ScaleMode.PER_TENSOR)
        bias = torch.empty(4, device="cuda")
        for args in (GemmArguments(units, b, out), ka.fusions.gemm(a, b, out=out, bias=bias)):
            assert kernel.allowance(args)["out"].device == args.device


@pytest.mark.parametrize(
    ("element", "stored"), [(E4M3, 448), (E5M2, 57344), (torch.float16, float("inf"))]
)
def test_products_of_integers_beyond_the_floats_that_they_are_stored_in_are_verified(
    element, stored
):
    a = torch.full((4, 16), 127, dtype=torch.int8)
    a[0] = 1
    args = GemmArguments(a, a.t(), torch.empty(4, 4, dtype=element))
    (kernel,) = ka.get_kernels(args, providers=["reference"])
    assert ka.verify(kernel, args)
    assert args.out.tensor[1, 1].item() == stored


def test_an_operand_has_one_scale():
    a = ScaledOperand(operand(M, K, E4M3, 1), scale(), ScaleMode.PER_TENSOR)
    with pytest.raises(ArgumentError, match="tensor is a ScaledOperand; expected a tensor without"):
        ScaledOperand(a, scale(), ScaleMode.PER_TENSOR)
    with pytest.raises(ArgumentError, match="scale is a ScaledOperand; expected a tensor without"):
        ScaledOperand(a.tensor, a, ScaleMode.PER_TENSOR)


def test_a_batch_may_share_one_scale_or_have_one_each():
    a, b = torch.randn(3, 5, 8), torch.randn(3, 8, 7)
    for values in (torch.tensor(1.7), torch.tensor([0.5, 2.0, 3.0])):
        out = torch.empty(3, 5, 7)
        args = GemmArguments(ScaledOperand(a, values, ScaleMode.PER_TENSOR), b, out)
        ka.get_kernels(args, providers=["reference"])[0].run(args)
        expected = a.double() * values.double().reshape(-1, 1, 1) @ b.double()
        assert torch.equal(out, expected.float())


@pytest.mark.parametrize("mode", [ScaleMode.PER_TENSOR, ScaleMode.PER_ROW], ids=lambda m: m.value)
def test_torch_scaled_mm_is_offered_and_right(mode):
    a, b = operand(M, K, E4M3, 1), operand(N, K, E4M3, 2).t()
    args = GemmArguments(
        ScaledOperand(a, SCALES["A"][mode], mode),
        ScaledOperand(b, SCALES["B"][mode], mode),
        torch.empty(M, N, dtype=torch.bfloat16),
    )
    if mode is ScaleMode.PER_ROW and torch.__version__ < "2.13":
        assert "torch before 2.13 scales rows on GPUs alone" in str(ka.explain(args))
        return
    kernel = ka.get_kernels(args, providers=["torch"])[0]
    assert kernel.family_name() == "torch.scaled_mm"
    assert ka.verify(kernel, args)


def test_torch_scaled_mm_writes_an_output_with_a_gradient():
    a, b = operand(32, 32, E4M3, 1), operand(32, 32, E4M3, 2).t()
    out = torch.empty(32, 32, dtype=torch.bfloat16, requires_grad=True)
    whole = ScaleMode.PER_TENSOR
    args = GemmArguments(ScaledOperand(a, scale(), whole), ScaledOperand(b, scale(), whole), out)
    for kernel in ka.get_kernels(args):
        with torch.no_grad():
            out.fill_(math.nan)
        kernel.run(args)
        assert out.isfinite().all(), kernel


def scaled_in_blocks(M, N, K, device="meta", out="bfloat16"):
    (a, b), (m, n, k) = (
        [torch.empty(n, K, dtype=E4M3, device=device) for n in (M, N)],
        (M, -(-N // 128), -(-K // 128)),
    )
    scales = torch.empty(m, k, device=device), torch.empty(k, n, device=device)
    return GemmArguments(
        ScaledOperand(a, scales[0], ScaleMode.BLOCK_1x128),
        ScaledOperand(b.t(), scales[1], ScaleMode.BLOCK_128x128),
        torch.empty(M, N, dtype=getattr(torch, out), device=device),
    )


@pytest.mark.parametrize(
    ("sizes", "refused"),
    [
        ((48, 272, 512), None),
        ((4, 16, 400), None),
        ((48, 272, 384), "there are 3 blocks along K and 48 rows"),
        ((48, 272, 528), "there are 5 blocks along K and 48 rows"),
        ((46, 272, 512), "there are 4 blocks along K and 46 rows"),
        ((48, 280, 512), "N and K multiples of 16"),
        ((0, 272, 512), "at least one row, column and product"),
    ],
)
def test_torch_scales_blocks_on_hopper_where_it_is_right(sizes, refused):
    args = scaled_in_blocks(*sizes)
    found = {k.family_name() for k in ka.get_kernels(args, cc=90, providers=["torch"])}
    assert found == (set() if refused else {"torch.scaled_mm_blocks"})
    if refused:
        reasons = {r.family: r.reason for r in ka.explain(args, cc=90).rejected}
        assert refused in reasons["torch.scaled_mm_blocks"]
    assert not ka.get_kernels(args, cc=100, providers=["torch"])
    assert not ka.get_kernels(scaled_in_blocks(*sizes, "cpu"), providers=["torch"])


@pytest.mark.parametrize("shape", [(4, 1), (1, 4), (3, 8)])
def test_scales_of_blocks_are_copied_unless_they_lie_as_they_are_read(shape):
    rows = scale(*shape)
    columns = scale(*shape[::-1]).t()
    for given in (rows, columns, scale(2 * shape[0], 2 * shape[1])[::2, ::2]):
        found = _columns_together(given)
        assert found.stride() == (1, shape[0])
        assert torch.equal(found, given)
    assert _columns_together(columns) is columns
    misaligned = scale(columns.numel() + 1)[1:].as_strided(columns.shape, columns.stride())
    assert _columns_together(misaligned).data_ptr() % 16 == 0


def test_torch_int_mm_is_offered_and_exact():
    a, b = operand(M, K, torch.int8, 1), operand(K, N, torch.int8, 2)
    args = GemmArguments(a, b, torch.empty(M, N, dtype=torch.int32))
    kernel = ka.get_kernels(args, providers=["torch"])[0]
    assert kernel.family_name() == "torch.int_mm"
    assert ka.verify(kernel, args)


@pytest.mark.parametrize(
    "stride_a, stride_b",
    [((0, 1), (9, 1)), ((1, 0), (1, 7)), ((7, 1), (0, 1)), ((7, 1), (1, 0)), ((2, 1), (9, 1))],
)
def test_torch_int_mm_is_exact_where_rows_are_nearer_than_they_are_long(stride_a, stride_b):
    a = operand(1, 99, torch.int8, 1)[0].as_strided((5, 7), stride_a)
    b = operand(1, 99, torch.int8, 2)[0].as_strided((7, 9), stride_b)
    out = torch.empty(5, 9, dtype=torch.int32)
    kernel = ka.get_kernels(GemmArguments(a, b, out), providers=["torch"])[0]
    kernel.prepare(GemmArguments(a, b, out))(a, b, out)
    assert torch.equal(out.long(), a.long() @ b.long())


def test_torch_int_mm_is_exact_for_a_column_that_is_transposed():
    column, b = operand(32, 1, torch.int8, 1), operand(32, 16, torch.int8, 2)
    assert torch.equal(ka.ops.gemm(column.t(), b).long(), column.t().long() @ b.long())


@pytest.mark.parametrize("gappy", ["A", "B"])
def test_torch_scaled_mm_refuses_scales_with_gaps(gappy):
    scales = {"A": scale(M), "B": scale(N)}
    scales[gappy] = scale(2 * len(scales[gappy]))[::2]
    args = GemmArguments(
        ScaledOperand(operand(M, K, E4M3, 1), scales["A"], ScaleMode.PER_ROW),
        ScaledOperand(operand(N, K, E4M3, 2).t(), scales["B"], ScaleMode.PER_ROW),
        torch.empty(M, N, dtype=torch.bfloat16),
    )
    assert not ka.get_kernels(args, providers=["torch"])
    reasons = {r.family: r.reason for r in ka.explain(args).rejected}
    assert reasons["torch.scaled_mm"] == "torch._scaled_mm takes scales without gaps"
    ka.get_kernels(args)[0].run(args)


def test_kernels_for_plain_operands_refuse_scaled_ones_by_name():
    a, b = (operand(64, 64, torch.bfloat16, seed) for seed in (1, 2))
    args = GemmArguments(ScaledOperand(a, scale(), ScaleMode.PER_TENSOR), b, torch.empty_like(a))
    kernel = ka.get_kernels(GemmArguments(a, b, torch.empty_like(a)), providers=["torch"])[0]
    assert kernel.supports(args).error == "A carries a per_tensor scale; expected none"


def test_kernels_for_scaled_operands_refuse_plain_ones_by_name():
    a, b = operand(M, K, E4M3, 1), operand(N, K, E4M3, 2).t()
    args = GemmArguments(a, b, torch.empty(M, N, dtype=torch.bfloat16))
    reasons = {r.family: r.reason for r in ka.explain(args).rejected}
    assert "A carries no scale" in reasons["torch.scaled_mm"]


def test_two_modes_give_two_signatures():
    a, b, out = operand(M, K, E4M3, 1), operand(K, N, E4M3, 2), torch.empty(M, N)
    signatures = {
        GemmArguments(ScaledOperand(a, SCALES["A"][mode], mode), b, out).signature
        for mode in SCALES["A"]
    }
    assert len(signatures) == len(SCALES["A"])


def test_scales_that_are_loaded_in_vectors_make_another_problem():
    """Other code is compiled for them, so that neither an artifact nor an offer is shared."""

    def made(B_scale, N=64):
        A = ScaledOperand(operand(M, K, E4M3, 1), scale(M), ScaleMode.PER_ROW)
        B = ScaledOperand(operand(K, N, E4M3, 2), B_scale, ScaleMode.PER_ROW)
        return GemmArguments(A, B, torch.empty(M, N))

    packed, unaligned, gaps = made(scale(64)), made(scale(65)[1:]), made(scale(128)[::2])
    shifted, odd = made(scale(68)[4:]), made(scale(63), 63)
    assert packed.signature == shifted.signature
    assert unaligned.signature == gaps.signature == odd.signature != packed.signature
    assert len({one.key for one in (packed, unaligned, gaps, odd)}) == 4


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (
            lambda a, b: GemmArguments(ScaledOperand(a, scale(M - 1), ScaleMode.PER_ROW), b, None),
            "out is a NoneType",
        ),
        (lambda a, b: ScaledOperand(a, scale().double(), ScaleMode.PER_TENSOR), "float64"),
        (lambda a, b: ScaledOperand(a, scale(), "per_tensor"), "expected one of"),
    ],
)
def test_what_is_no_scaled_operand_is_refused(build, message):
    with pytest.raises(ArgumentError, match=message):
        build(operand(M, K, E4M3, 1), operand(K, N, E4M3, 2))


@pytest.mark.parametrize(
    ("name", "mode", "shape", "message"),
    [
        (
            "A",
            ScaleMode.PER_ROW,
            (M - 1,),
            r"A's per_row scale has shape \(47,\); expected \(48,\)",
        ),
        ("B", ScaleMode.PER_ROW, (K,), r"B's per_row scale has shape \(256,\); expected \(64,\)"),
        ("A", ScaleMode.PER_TENSOR, (1,), r"expected \(\)"),
        ("A", ScaleMode.BLOCK_1x128, (M, 3), r"expected \(48, 2\)"),
        ("B", ScaleMode.BLOCK_128x128, (1, 2), r"expected \(2, 1\)"),
        ("B", ScaleMode.BLOCK_1x128, (M, 2), r"that is for \(M, K\) operands, B is \(K, N\)"),
        ("A", ScaleMode.BLOCK_128x128, (2, 1), r"that is for \(K, N\) operands, A is \(M, K\)"),
    ],
)
def test_a_scale_of_the_wrong_shape_is_refused_with_both_shapes(name, mode, shape, message):
    operands = {"A": operand(M, K, E4M3, 1), "B": operand(K, N, E4M3, 2)}
    operands[name] = ScaledOperand(operands[name], scale(*shape), mode)
    with pytest.raises(ArgumentError, match=message):
        GemmArguments(**operands, out=torch.empty(M, N))


@pytest.mark.parametrize("name", ["A", "B", "out"])
def test_an_out_that_shares_memory_with_a_scale_is_refused(name):
    out = torch.empty(M, N)
    operands = {"A": operand(M, K, E4M3, 1), "B": operand(K, N, E4M3, 2), "out": out}
    shared = out[0] if name == "B" else out[:, 0]
    operands[name] = ScaledOperand(operands[name], shared, ScaleMode.PER_ROW)
    with pytest.raises(ArgumentError, match=f"out shares memory with {name}'s scale"):
        GemmArguments(**operands)


def test_a_scale_on_another_device_is_refused():
    a = ScaledOperand(operand(M, K, E4M3, 1), scale().to("meta"), ScaleMode.PER_TENSOR)
    with pytest.raises(ArgumentError, match="A's scale is on meta"):
        GemmArguments(a, operand(K, N, E4M3, 2), torch.empty(M, N))


def test_an_operand_may_not_be_written_where_it_is_read():
    stored, B = operand(8, 8, E4M3, 1), torch.zeros(8, 8)
    A, x = ScaledOperand(stored, scale(), ScaleMode.PER_TENSOR), Operand(torch.zeros(8, 8))
    for _ in range(2):  # layouts that were seen before, too
        with pytest.raises(ArgumentError, match="out shares memory with A"):
            ka.ops.gemm(A, B, out=A)
        with pytest.raises(ArgumentError, match="out shares memory with B"):
            GemmArguments(B, x, x)
        with pytest.raises(ArgumentError, match="out shares memory with x"):
            ka.RmsNormArguments(x, x)
        with pytest.raises(ArgumentError, match="out shares memory with preactivation"):
            ka.ops.gemm_bias_activation(B, B, out=x, preactivation=x)
        GemmArguments(B, B.clone(), torch.empty(8, 8))

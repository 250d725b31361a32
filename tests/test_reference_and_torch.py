"""The kernels of the reference and torch providers, against formulas written here."""

import numpy as np
import pytest
import torch
from support.data import fill, gemm_arguments, gemm_tensors, strided_empty

import kernel_api as ka
from kernel_api.dtypes import dtype

FLOATING = ("f64", "f32", "f16", "bf16", "e4m3", "e5m2")
INTEGER = ("i64", "i32", "i16", "i8", "u8")


def kernel_of(provider, args):
    (kernel,) = ka.get_kernels(args, providers=[provider])
    return kernel


def run(provider, args):
    args.out.tensor.copy_(torch.full(args.out.shape, 77).to(args.out.tensor.dtype))
    kernel_of(provider, args).run(args)
    return args.out.tensor


def by_hand(args):
    """A · B by numpy's einsum, in float64 or exact integers."""
    A, B, _ = args.tensors
    wide = np.float64 if A.dtype.is_floating_point else np.int64
    a, b = (t.to(torch.float64 if wide is np.float64 else torch.int64).numpy() for t in (A, B))
    return torch.from_numpy(np.einsum("...mk,...kn->...mn", a, b, dtype=wide))


def bits(tensor):
    whole = tensor.contiguous()
    return whole.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[
        whole.element_size()
    ])  # fmt: skip


def bound(args, unit):
    """Of the error of sums in any order, K · u · |A| · |B|, and of one rounding more."""
    A, B, _ = args.tensors
    magnitude = A.double().abs() @ B.double().abs()
    return (args.K + 2) * unit * magnitude + 1e-300


UNIT = {"f64": 2.0**-53, "f32": 2.0**-24, "f16": 2.0**-11, "bf16": 2.0**-8}


# Reference -------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", FLOATING)
@pytest.mark.parametrize("L", [None, 3])
def test_reference_rounds_the_exact_product_once(kind, L):
    for out_kind in (kind, "f32", "f64"):
        args = gemm_arguments(9, 17, 23, L, types=(kind, kind, out_kind), values="integers")
        expected = by_hand(args).to(args.out.tensor.dtype)
        assert torch.equal(bits(run("reference", args)), bits(expected))


@pytest.mark.parametrize("kind", FLOATING[1:])
def test_reference_is_within_one_rounding_for_random_operands(kind):
    args = gemm_arguments(9, 17, 23, types=(kind, kind, "f64"))
    error = (run("reference", args) - by_hand(args)).abs()
    assert (error <= bound(args, UNIT["f64"])).all()


@pytest.mark.parametrize("kind", INTEGER)
@pytest.mark.parametrize("out_kind", ["i64", "i32"])
@pytest.mark.parametrize("L", [None, 3])
def test_reference_is_exact_for_integers(kind, out_kind, L):
    args = gemm_arguments(9, 17, 23, L, types=(kind, kind, out_kind))
    assert torch.equal(run("reference", args).long(), by_hand(args))


def test_reference_is_exact_for_integers_beyond_the_reach_of_float64():
    A = torch.tensor([[2**31, 1]], dtype=torch.int64)
    B = torch.tensor([[2**31], [1]], dtype=torch.int64)
    out = torch.empty(1, 1, dtype=torch.int64)
    run("reference", ka.GemmArguments(A, B, out))
    assert out.item() == 2**62 + 1


def test_reference_multiplies_complex_numbers():
    A, B, out = gemm_tensors(4, 5, 6, types=("complex64", "complex64", "complex64"))
    run("reference", ka.GemmArguments(A, B, out))
    expected = np.einsum("mk,kn->mn", A.numpy(), B.numpy(), dtype=np.complex128)
    error = (out.to(torch.complex128) - torch.from_numpy(expected)).abs()
    assert (error <= (A.abs() @ B.abs()) * 8 * UNIT["f32"]).all()


@pytest.mark.filterwarnings("error")
def test_reference_refuses_to_drop_the_imaginary_part():
    A, B, _ = gemm_tensors(4, 5, 6, types=("complex64", "complex64", "complex64"))
    args = ka.GemmArguments(A, B, torch.empty(4, 5))
    assert ka.get_kernels(args, providers=["reference"]) == []


def test_reference_multiplies_bools_as_any_of_both():
    A, B, out = gemm_tensors(4, 5, 6, types=("bool", "bool", "bool"))
    run("reference", ka.GemmArguments(A, B, out))
    assert torch.equal(out, (A[:, :, None] & B[None]).any(1))


def test_reference_mixes_types():
    args = gemm_arguments(4, 5, 6, types=("bf16", "f16", "f32"), values="integers")
    assert torch.equal(run("reference", args).double(), by_hand(args))


def test_reference_carries_infinities_and_nans():
    A, B, out = gemm_tensors(4, 4, 4)
    A[0, 0], A[1, 1], B[0], B[1] = float("inf"), float("nan"), 1.0, 1.0
    run("reference", ka.GemmArguments(A, B, out))
    assert torch.isinf(out[0]).all()
    assert torch.isnan(out[1]).all()
    assert torch.isfinite(out[2:]).all()


# torch -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["f64", "f32", "f16", "bf16"])
@pytest.mark.parametrize("L", [None, 3])
def test_torch_is_within_the_rounding_bound_of_its_type(kind, L):
    args = gemm_arguments(9, 17, 23, L, types=(kind, kind, kind))
    error = (run("torch", args).double() - by_hand(args)).abs()
    assert (error <= bound(args, UNIT[kind])).all()


@pytest.mark.parametrize(
    "types",
    [
        ("i8", "i8", "i8"),
        ("f16", "bf16", "f32"),
        ("e4m3", "e4m3", "e4m3"),
        ("f16", "f16", "f32"),
        ("f32", "f32", "f16"),
    ],
    ids="-".join,
)
def test_torch_offers_nothing_for_what_it_cannot_multiply_on_the_cpu(types):
    assert ka.get_kernels(gemm_arguments(4, 4, 4, types=types), providers=["torch"]) == []


def test_torch_widens_16_bit_products_on_a_gpu():
    args = gemm_arguments(4, 4, 4, types=("bf16", "bf16", "f32"), device="meta")
    assert len(ka.get_kernels(args, providers=["torch"])) == 1


@pytest.mark.parametrize("setting", ["highest", "high"])
@pytest.mark.parametrize("asked", ["ieee", "tf32"])
def test_torchs_own_setting_is_as_before_afterwards(setting, asked):
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(setting)
    try:
        run("torch", gemm_arguments(4, 4, 4, fp32_precision=asked))
        assert torch.get_float32_matmul_precision() == setting
    finally:
        torch.set_float32_matmul_precision(before)


def test_torch_takes_operands_that_require_gradients():
    A, B, out = gemm_tensors(4, 4, 4)
    A.requires_grad_(True)
    args = ka.GemmArguments(A, B, out)
    kernel_of("torch", args).run(args)
    assert not out.requires_grad


# Both ------------------------------------------------------------------------------------

both = pytest.mark.parametrize("provider", ["reference", "torch"])


@both
@pytest.mark.parametrize("layouts", ["ttt", "ttn", "tnt", "tnn", "ntt", "ntn", "nnt", "nnn"])
@pytest.mark.parametrize("L", [None, 2])
@pytest.mark.parametrize(
    "how", [{}, {"pads": (3, 5, 7), "offsets": (1, 2, 3)}], ids=["packed", "padded"]
)
def test_every_layout_packed_or_padded_gives_the_exact_product(provider, layouts, L, how):
    args = gemm_arguments(9, 17, 23, L, layouts=layouts, values="integers", **how)
    assert torch.equal(run(provider, args).double(), by_hand(args))


@both
def test_padding_between_the_rows_of_out_is_not_written(provider):
    args = gemm_arguments(8, 8, 8, pads=(0, 0, 4))
    whole = args.out.tensor.as_strided((8, 12), args.out.stride)
    whole.fill_(-5)
    kernel_of(provider, args).run(args)
    assert (whole[:, 8:] == -5).all()
    assert torch.isfinite(whole).all()


@both
def test_strides_without_a_unit_mode_are_taken(provider):
    def spread(rows, columns, seed):
        return fill(torch.empty(rows, 3 * columns)[:, ::3], seed, "integers")

    args = ka.GemmArguments(spread(8, 9, 0), spread(9, 7, 1), torch.empty(8, 21)[:, ::3])
    assert torch.equal(run(provider, args).double(), by_hand(args))


@both
@pytest.mark.parametrize("name", ["A", "B"])
def test_a_broadcast_batch_gives_what_its_copy_gives(provider, name):
    A, B, out = gemm_tensors(8, 9, 10, 3, values="integers")
    tensors = {"A": A, "B": B}
    tensors[name] = tensors[name][:1].expand(tensors[name].shape)
    args = ka.GemmArguments(tensors["A"], tensors["B"], out)
    assert torch.equal(run(provider, args).double(), by_hand(args))


@both
@pytest.mark.parametrize("kind", ["f64", "f32", "bf16"])
@pytest.mark.parametrize("L", [None, 3])
def test_an_empty_sum_is_zero(provider, kind, L):
    args = gemm_arguments(8, 9, 0, L, types=(kind, kind, kind))
    assert (run(provider, args) == 0).all()


@both
@pytest.mark.parametrize(("M", "N", "L"), [(0, 9, None), (8, 0, None), (0, 0, 3), (8, 9, 0)])
def test_an_empty_out_is_nothing_to_do(provider, M, N, L):
    args = gemm_arguments(M, N, 10, L)
    assert kernel_of(provider, args).run(args) is None
    assert args.out.tensor.numel() == 0


@both
def test_inputs_are_as_before(provider):
    args = gemm_arguments(8, 9, 10)
    before = args.A.tensor.clone(), args.B.tensor.clone()
    kernel_of(provider, args).run(args)
    assert torch.equal(args.A.tensor, before[0])
    assert torch.equal(args.B.tensor, before[1])


@both
def test_verify_passes(provider):
    for types in (("f64",) * 3, ("f32",) * 3, ("bf16",) * 3):
        args = gemm_arguments(33, 47, 65, 2, types=types)
        assert ka.verify(kernel_of(provider, args), args)


@both
def test_names_say_provider_and_types(provider):
    args = gemm_arguments(4, 4, 4)
    metadata = kernel_of(provider, args).metadata
    assert metadata.provider == provider
    assert metadata.kernel_name.startswith(provider)
    assert strided_empty((2, 2), dtype("f32").torch).dtype is torch.float32

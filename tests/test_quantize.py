"""Quantisation in blocks: by products, gated ones and of matrices that are there; and what products
make of it."""

import pytest
import torch
from support.fusions import computed

import kernel_api as ka
from kernel_api.errors import ArgumentError
from kernel_api.verification import judge

F8, F32, BF16 = torch.float8_e4m3fn, torch.float32, torch.bfloat16
TOP, LEAST = 448.0, 2.0**-126
WIDTHS = {"block": 128, "mx": 32}


def drawn(*shape, seed=0, element=BF16):
    """Rows and blocks of very different size; one of zeros."""
    random = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=random)
    values *= 4.0 ** torch.randint(-4, 4, (*shape[:-1], 1), generator=random)
    values[..., 0, :] = 0
    return values.to(element)


def expected(x, mode):
    """(stored, scale), from the definition."""
    x = x.float()
    width = WIDTHS.get(mode)
    if mode == "tensor":
        largest = x.abs().amax()
    elif mode == "row":
        largest = x.abs().amax(-1)
    else:
        largest = x.unflatten(-1, (-1, width)).abs().amax(-1)
    scale = torch.where(largest == 0, 1.0, (largest / TOP).clamp(min=LEAST))
    if mode == "row":
        each = scale.unsqueeze(-1)
    else:
        each = scale if mode == "tensor" else scale.repeat_interleave(width, -1)
    return (x / each).clamp(-TOP, TOP).to(F8), scale


def judged(x, found):
    """What was called, by the error-ratio rule."""
    return judge(ka.fusions.quantize(x, out=found.out, scale=found.scale, mode=found.mode))


def same(found, wanted):
    return torch.equal(found.float(), wanted.float())


@pytest.mark.parametrize("batch", [(), (3,)])
@pytest.mark.parametrize("mode", ["tensor", "row", "block"])
def test_a_matrix_is_quantised_as_the_definition_says(mode, batch):
    x = drawn(*batch, 7, 384)
    found = ka.ops.quantize(x, mode)
    stored, scale = expected(x, mode)
    assert judged(x, found)
    assert found.out.dtype is F8 and found.scale.dtype is F32
    assert same(found.scale, scale) and same(found.out, stored)
    assert found.operand.mode.value == {"block": "block_1x128"}.get(mode, f"per_{mode}")


def test_scales_of_mx_are_powers_of_two():
    x = drawn(7, 384)
    found = ka.ops.quantize(x, "mx")
    assert found.scale.dtype is torch.float8_e8m0fnu and found.scale.shape == (7, 12)
    scale = found.scale.float().repeat_interleave(32, -1)
    assert same(found.out, (x.float() / scale).to(F8))
    with pytest.raises(ArgumentError, match="mode is 'mx'; products take tensor, row, block"):
        _ = found.operand


def test_a_scale_that_is_known_is_taken():
    x, scale = drawn(7, 384), torch.tensor(0.37)
    found = ka.ops.quantize(x, "tensor", scale=scale)
    assert found.scale is scale
    assert same(found.out, (x.float() / scale).clamp(-TOP, TOP).to(F8))


@pytest.mark.parametrize("element", [BF16, F32])
@pytest.mark.parametrize("mode", ["tensor", "row", "block", "mx"])
def test_compiled_graphs_quantise_alike(mode, element):
    def quantised(x):
        found = ka.ops.quantize(x, mode)
        return found.out, found.scale

    x = drawn(7, 384, element=element)
    compiled = torch.compile(quantised, fullgraph=True, backend="aot_eager")
    for one, other in zip(compiled(x), quantised(x), strict=True):
        assert same(one, other)


def test_products_quantise_their_results_in_blocks():
    A, B = drawn(7, 64), drawn(256, 64, seed=1).t()
    out, scale = torch.empty(7, 256, dtype=F8), torch.empty(7, 2)
    args = ka.fusions.gemm_quantize(A, B, out=out, scale=scale, mode="block")
    found = computed(args)
    stored, scales = expected(A.double() @ B.double(), "block")
    torch.testing.assert_close(found["scale"], scales, rtol=1e-6, atol=0)
    assert (found["out"].float() - stored.float()).abs().max() <= 32  # a step of the largest
    called = ka.ops.gemm_quantize(A, B, mode="block")
    assert same(called.out, found["out"]) and same(called.scale, found["scale"])


@pytest.mark.parametrize("grouped", [False, True])
def test_gated_products_are_what_the_next_product_takes(grouped):
    """Two layers of 8 bits beside the same in float64."""
    x, up, down = drawn(9, 128), drawn(512, 128, seed=1) / 64, drawn(64, 256, seed=2) / 64
    gate, other = (x.double() @ up.double().t()).view(9, -1, 2, 32).unbind(-2)
    hidden = (torch.nn.functional.silu(gate) * other).flatten(-2)
    weights = ka.ops.quantize(down, "row")
    if grouped:
        ends = torch.tensor([4, 9], dtype=torch.int32)
        found = ka.ops.grouped_gemm_glu(x, up.expand(2, -1, -1).mT, ends, scale=True)
    else:
        found = ka.ops.gemm_swiglu(x, up.t(), order="gate_up", scale=True)
    assert found.out.dtype is F8 and found.scale.shape == (9, 2)
    written = {"out": found.out, "scale": found.scale}
    if grouped:
        args = ka.fusions.grouped_gemm_glu(x, up.expand(2, -1, -1).mT, ends, **written)
    else:
        args = ka.fusions.gemm_swiglu(x, up.t(), order="gate_up", **written)
    assert judge(args)
    stored, scales = expected(hidden, "block")
    torch.testing.assert_close(found.scale, scales, rtol=1e-5, atol=0)
    A = ka.ScaledOperand(found.out, found.scale, ka.ScaleMode.BLOCK_1x128)
    B = ka.ScaledOperand(weights.out.t(), torch.ones(2, 1), ka.ScaleMode.BLOCK_128x128)
    y = ka.ops.gemm(A, B)
    assert y.dtype is BF16
    wanted = (stored.double() * scales.repeat_interleave(128, -1)) @ weights.out.double().t()
    torch.testing.assert_close(y.double(), wanted, rtol=0.02, atol=0.02 * float(wanted.abs().max()))


def test_a_pre_activation_beside_8_bits_is_not_of_8_bits():
    found = ka.ops.gemm_swiglu(drawn(4, 64), drawn(256, 64).t(), scale=True, preactivation=True)
    assert found._fields == ("out", "preactivation", "scale")
    assert found.preactivation.dtype is BF16


@pytest.mark.parametrize(
    "name",
    ["gemm_quantize", "gemm_swiglu", "grouped_gemm_quantize", "grouped_gemm_glu", "quantize"],
)
def test_kernels_quantise_in_blocks(name):
    def empty(*shape, element=BF16):
        return torch.empty(shape, dtype=element, device="meta")

    A, B, ends = empty(64, 128), empty(512, 128).t(), empty(4, element=torch.int32)
    if "grouped" in name:
        B = empty(4, 512, 128).mT
    gated = "glu" in name
    columns = 128 if name == "quantize" else 256 if gated else 512
    written = {
        "out": empty(64, columns, element=F8),
        "scale": empty(64, columns // 128, element=F32),
    }
    how = {} if gated else {"mode": "block"}
    operands = {"quantize": (A,), "gemm_quantize": (A, B), "gemm_swiglu": (A, B)}.get(
        name, (A, B, ends)
    )
    args = getattr(ka.fusions, name)(*operands, **written, **how)
    kernels = ka.get_kernels(args, cc=90, providers=["cutedsl"])
    assert kernels, str(ka.explain(args, cc=90, providers=["cutedsl"]))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda x: ka.ops.quantize(x, "rows"), "mode is 'rows'; expected one of tensor, row, mx, "),
        (lambda x: ka.ops.quantize(x, "row", scale=1.0), "scale is given and mode is 'row'"),
        (lambda x: ka.ops.quantize(x[0]), "x has rank 1; expected 2, or 3 with a batch"),
        (lambda x: ka.ops.quantize(x[0], "row"), "x has rank 1; expected 2, or 3 with a batch"),
        (lambda x: ka.ops.quantize(x[:, :100]), "x has N = 100; blocks of 128 columns need a mult"),
        (lambda x: ka.ops.quantize(x, out_dtype=BF16), "out's type is 'bfloat16'; expected one of"),
        (
            lambda x: ka.ops.quantize(x, "tensor", out_dtype=BF16),
            "out's type is 'bfloat16'; expected one of",
        ),
        (
            lambda x: ka.ops.quantize(x, out=torch.empty(7, 384, dtype=F8), out_dtype="int8"),
            "out is float8_e4m3fn and out_dtype int8",
        ),
        (
            lambda x: ka.fusions.quantize(x, out=torch.empty(7, 384, dtype=F8), scale=None),
            r"scale is None; expected a tensor \(7, 3\)",
        ),
        (
            lambda x: ka.ops.gemm_swiglu(x, drawn(192, 384).t(), scale=True),
            "out has 96 columns; blocks of 128 columns need a multiple",
        ),
        (
            lambda x: ka.ops.gemm_swiglu(x, drawn(512, 384).t(), scale=True, out_dtype=BF16),
            "out's type is 'bfloat16'",
        ),
    ],
)
def test_what_contradicts_itself_is_refused(call, words):
    with pytest.raises(ArgumentError, match=words):
        call(drawn(7, 384))

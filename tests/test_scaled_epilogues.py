"""Epilogues of operands with scales: who takes them, what they see, and what is refused."""

import pytest
import torch
from support import fusion_cases as make
from support.fusion_cases import BF16, E4M3, F32, on_meta, same_bits
from support.fusions import computed
from support.scaled_fusions import MODES, ScaledCase, ScaledDraw

import kernel_api as ka
from kernel_api.epilogue import Graph
from kernel_api.errors import EpilogueError
from kernel_api.operands import Operand
from kernel_api.providers.cutedsl.epilogue.plan import Plan, plan
from kernel_api.providers.cutedsl.epilogue.scales import scaled
from kernel_api.providers.reference.epilogue import evaluate
from kernel_api.verification import judge

INT8 = {"of_A": torch.int8, "of_B": torch.int8}
SIZES = {"M": 64, "N": 192, "K": 256, "pad": 16}


def arguments(fusion, **how):
    return ScaledCase("", fusion, how={**SIZES, **how}).drawn(1)


def families(args, cc):
    meta = on_meta(args)
    return {k.family for k in ka.get_kernels(meta, cc=cc, providers=["cutedsl"])}


def told(args, family, cc=90):
    explained = ka.explain(on_meta(args), cc=cc, providers=["cutedsl"]).rejected
    return next(one for one in explained if one.family == family)


# What is computed ------------------------------------------------------------------------


@pytest.mark.parametrize("scales", MODES)
@pytest.mark.parametrize("of_both", [{}, INT8], ids=["floats", "integers"])
@pytest.mark.parametrize("batch", [None, 2])
def test_the_accumulator_is_in_units_of_the_scales(scales, of_both, batch):
    draw = ScaledDraw(13, 64, 264, batch, element=BF16, scales=scales, **of_both)
    A, B, bias = draw.A, draw.B, draw.random(64)
    real = [one.tensor.double() * expanded(one, name) for one, name in ((A, "A"), (B, "B"))]

    def fn(accum, bias):
        return ka.epilogue.silu(accum) + bias, ka.epilogue.amax(accum, None)

    out, amax = draw.written(element=F32), draw.reduced(*draw.batches, element=F32)
    epilogue = ka.EpilogueArguments(fn, bias=bias, amax=amax)
    found = computed(ka.GemmArguments(A, B, out, epilogue=epilogue))
    x = real[0] @ real[1]
    expected = torch.nn.functional.silu(x) + bias.double()
    torch.testing.assert_close(found["out"].double(), expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(found["amax"].double(), x.abs().amax((-1, -2)), rtol=1e-6, atol=0)


def expanded(operand, name):
    """The scale of every element, from the definition."""
    scale, (rows, columns) = operand.scale.tensor.double(), operand.shape[-2:]
    if operand.mode is ka.ScaleMode.PER_TENSOR:
        return scale
    if operand.mode is ka.ScaleMode.PER_ROW:
        return scale[..., :, None] if name == "A" else scale[..., None, :]
    i, j = torch.arange(rows)[:, None], torch.arange(columns)[None]
    return scale[..., i, j // 128] if name == "A" else scale[..., i // 128, j // 128]


KINDS = {"A": "lm", "B": "ln", "out": "l"}


@pytest.mark.parametrize("name", make.CATALOGUE)
def test_scales_become_a_part_of_the_graph(name):
    """The same numbers, to the bit: it multiplies in the same order."""
    draw = ScaledDraw(6, 192, 8, 2, element=BF16)
    args = make.CATALOGUE[name](draw)
    graph, operands = args.epilogue.graph, args.epilogue.operands
    product = torch.randn(2, 6, 192, generator=torch.Generator().manual_seed(1))
    scales = {"A": torch.rand(2, 6, 1), "B": torch.rand(2, 1, 192), "out": torch.rand(2, 1, 1)}
    expected = evaluate(graph, product * scales["A"] * scales["B"], operands, wide=False)
    expected["D"] = expected["D"] * (1.0 / scales["out"])

    folded = scaled(graph, KINDS)
    given = {f"scale of {name}": Operand(scale) for name, scale in scales.items()}
    found = evaluate(folded, product, {**operands, **given}, wide=False)
    assert all(same_bits(found[name], expected[name]) for name in expected)

    assert list(folded.leaves)[:3] == list(given)
    assert list(folded.leaves)[3:] == list(graph.leaves)
    assert Graph.from_json(folded.to_json()) == folded
    before, after = plan(graph), plan(folded)
    assert isinstance(before, Plan)
    assert isinstance(after, Plan)
    for what in ("names", "bundle", "halves", "heads", "alone", "row_pairs", "spans_row"):
        assert getattr(before, what) == getattr(after, what)


def test_without_scales_a_graph_stays_the_same_one():
    graph = make.a_gemm(ScaledDraw(6, 64, 8, element=BF16)).epilogue.graph
    assert scaled(graph, {}) is graph


# Who takes them --------------------------------------------------------------------------


@pytest.mark.parametrize("scales", MODES)
@pytest.mark.parametrize("name", ["bias gelu", "swiglu", "amax", "quantize, mx"])
def test_hopper_fuses_epilogues_of_8_bit_floats_in_every_mode(name, scales):
    args = arguments(make.CATALOGUE[name], scales=scales)
    assert families(args, 90) == {"sm90.gemm_fp8"}
    first = ka.get_kernels(on_meta(args), cc=90)[0]
    assert first.metadata.operands.A.scale is MODES[scales][0]
    assert first.metadata.epilogue == args.epilogue.graph


@pytest.mark.parametrize("scales", ["tensors", "rows"])
def test_8_bit_integers_are_fused_on_every_gpu(scales):
    args = arguments(make.a_glu("swiglu"), scales=scales, **INT8)
    assert families(args, 80) == {"sm80.gemm_int8"}
    assert families(args, 90) == {"sm80.gemm_int8", "sm90.gemm_int8"}


def test_integers_without_scales_become_floats_by_an_epilogue():
    A, B = (torch.ones(64, 64, dtype=torch.int8, device="meta") for _ in range(2))
    out = torch.empty(64, 64, dtype=BF16, device="meta")
    args = ka.GemmArguments(A, B.t(), out, epilogue=ka.EpilogueArguments(lambda x: x * 0.01))
    found = {k.family for k in ka.get_kernels(args, cc=90, providers=["cutedsl"])}
    assert found == {"sm80.gemm_int8", "sm90.gemm_int8"}

    plain = ka.GemmArguments(A, B.t(), out)
    assert not ka.get_kernels(plain, cc=90, providers=["cutedsl"])
    rejected = ka.explain(plain, cc=90, providers=["cutedsl"]).rejected
    (one,) = [one for one in rejected if one.family == "sm90.gemm_int8"]
    assert one.rule == "sums of integers become floats by scales of A and B, or by an epilogue"
    assert one.nearest == "would match with an epilogue"


def test_one_call_forms_fuse_operands_with_scales():
    draw = ScaledDraw(13, 64, 264, element=BF16)
    A, B, bias = draw.A, draw.B, draw.random(64)
    found = ka.ops.gemm_bias_activation(A, B, bias=bias, activation="gelu")
    assert found.dtype is BF16
    args = ka.fusions.gemm_bias_activation(A, B, out=found, bias=bias, activation="gelu")
    assert judge(args)
    wide = [one.tensor.double() * expanded(one, name) for one, name in ((A, "A"), (B, "B"))]
    expected = torch.nn.functional.gelu(wide[0] @ wide[1] + bias.double())
    torch.testing.assert_close(found.double(), expected, rtol=2**-8, atol=1e-6)


# What is refused -------------------------------------------------------------------------


def test_halves_of_columns_have_whole_blocks_of_scales():
    halves = make.a_glu("swiglu", granularity="halves")
    one = told(arguments(halves, scales="blocks"), "sm90.gemm_fp8")
    assert one.rule == (
        "columns that share a scale of blocks lie side by side, or in halves of whole blocks"
    )
    assert one.nearest == (
        "would match with whole blocks of 128 columns in each half, or pairs of 32 columns"
    )
    assert families(arguments(halves, scales="rows"), 90) == {"sm90.gemm_fp8"}
    args = on_meta(arguments(halves, M=16, N=512, scales="blocks"))
    found = [k.metadata.design for k in ka.get_kernels(args, cc=90, providers=["cutedsl"])]
    assert {design.tile_shape[1] for design in found} == {64, 128, 256}
    assert not any(design.swap_ab for design in found)


@pytest.mark.parametrize(("granularity", "transposed"), [(32, True), (64, True), (128, False)])
def test_transposed_tiles_take_pairs_of_which_both_share_a_scale_of_blocks(granularity, transposed):
    glu = make.a_glu("swiglu", granularity=granularity)
    args = on_meta(arguments(glu, M=8, N=512, scales="blocks"))
    kernels = ka.get_kernels(args, cc=90, providers=["cutedsl"])
    assert kernels
    assert any(k.metadata.design.swap_ab for k in kernels) == transposed


def test_heads_are_not_taken_apart_where_they_share_scales_of_blocks():
    rope = make.a_rope(head_dim=128)
    columns = {}
    for scales in ("rows", "blocks"):
        args = on_meta(arguments(rope, N=384, scales=scales))
        kernels = ka.get_kernels(args, cc=90, providers=["cutedsl"])
        columns[scales] = {k.metadata.design.tile_shape[1] for k in kernels}
    assert any(one % 128 for one in columns["rows"])
    assert columns["blocks"]
    assert not any(one % 128 for one in columns["blocks"])


@pytest.mark.parametrize("name", ["A_scale", "B_scale"])
def test_an_operand_of_an_epilogue_is_not_called_like_a_scale(name):
    draw = ScaledDraw(16, 32, 16, element=BF16)

    def fn(accum, A_scale=1.0, B_scale=1.0):
        return accum * A_scale * B_scale

    epilogue = ka.EpilogueArguments(fn, **{name: 0.5})
    with pytest.raises(EpilogueError, match=f"called {name}, which is taken by the arguments"):
        ka.GemmArguments(draw.A, draw.B, draw.written(), epilogue=epilogue)
    plain = ka.GemmArguments(draw.A.tensor, draw.B.tensor, draw.written(), epilogue=epilogue)
    assert plain.epilogue.scalars == {name: 0.5}


def test_products_to_8_bits_say_how():
    draw = ScaledDraw(64, 64, 64, element=BF16)
    out = torch.empty(64, 64, dtype=E4M3, device="meta")
    operands = [ka.ScaledOperand(one.tensor.to("meta"), one.scale.tensor.to("meta"), one.mode)
                for one in (draw.A, draw.B)]  # fmt: skip
    rejected = ka.explain(ka.GemmArguments(*operands, out), cc=90, providers=["cutedsl"]).rejected
    (one,) = [one for one in rejected if one.family == "sm90.gemm_fp8"]
    assert one.rule == "8 bits are written in units of a scale, or as an epilogue says"
    assert one.nearest.endswith("gemm_quantize, or with per_tensor scales of A, B and out")


def test_a_scale_of_out_alone_is_refused_by_what_would_match():
    def product(*scaled):
        A, B, out = (torch.empty(64, 64, dtype=E4M3, device="meta") for _ in range(3))
        named = {"A": A, "B": B.t(), "out": out}
        one = torch.empty((), device="meta")
        for name in scaled:
            named[name] = ka.ScaledOperand(named[name], one, ka.ScaleMode.PER_TENSOR)
        return ka.explain(ka.GemmArguments(**named), cc=90, providers=["cutedsl"])

    (refused,) = [one for one in product("out").rejected if one.family == "sm90.gemm_fp8"]
    assert refused.reason.endswith("in units of theirs, be it 1; out alone has a per_tensor scale")
    assert refused.nearest == "would match with per_tensor scales of A and B"
    assert [one.family for one in product("A", "B", "out").accepted] == ["sm90.gemm_fp8"]

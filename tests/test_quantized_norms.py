"""Norms with quantised results: by the definition, in one call, in graphs; what refuses them."""

import subprocess
import sys

import numpy as np
import pytest
import torch
from support.fusions import computed
from support.quantized_norms import MODES, STORED, check, drawn

import kernel_api as ka
from kernel_api.errors import ArgumentError
from kernel_api.fusions._store import Quantization, quantization_of

F8, BF16 = torch.float8_e4m3fn, torch.bfloat16
NAMES = ("rmsnorm_quantize", "layernorm_quantize")


@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", NAMES)
def test_rows_are_quantised_as_the_definition_says(name, mode, stored):
    index = NAMES.index(name) + MODES.index(mode)
    args = drawn(name, mode, 9, 256, stored=stored, seed=index)
    found = computed(args)
    args.out.tensor.copy_(found["out"])
    if mode != "tensor":
        args.epilogue.outputs["scale"].tensor.copy_(found["scale"])
    check(args, mode)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("mode", MODES)
def test_calls_and_graphs_give_what_the_norm_and_a_quantisation_do(name, mode):
    x, weight, bias = torch.randn(2, 5, 256), torch.randn(256), torch.randn(256)
    given = {"weight": weight, "bias": bias}
    if mode == "tensor":
        given["scale"] = torch.tensor(0.02)
    called = getattr(ka.ops, name)
    found = called(x, mode, **given)
    plain = getattr(ka.ops, name.removesuffix("_quantize"))(x, weight=weight, bias=bias)
    wanted = ka.ops.quantize(plain, mode, **({"scale": given["scale"]} if mode == "tensor" else {}))
    assert found.out.shape == x.shape and found.mode == mode
    assert found.scale.shape == wanted.scale.shape and found.scale.dtype is wanted.scale.dtype
    steps = (found.out.float() - wanted.out.float()).abs() / (wanted.out.float().abs() / 8 + 1e-3)
    assert steps.max() <= 1.01 and (steps > 0).float().mean() < 0.02

    def tensors(x):
        made = called(x, mode, **given)
        return made.out, made.scale

    compiled = torch.compile(tensors, fullgraph=True, backend="aot_eager")
    for one, other in zip(compiled(x), (found.out, found.scale), strict=True):
        assert torch.equal(one.float(), other.float())


def test_a_number_is_a_scale_in_graphs_too():
    x = torch.randn(5, 64)
    found = ka.ops.rmsnorm_quantize(x, "tensor", scale=0.25, out_dtype="int8")
    assert found.out.dtype is torch.int8 and found.scale == 0.25
    compiled = torch.compile(
        lambda x: ka.ops.rmsnorm_quantize(x, "tensor", scale=0.25, out_dtype="int8").out,
        fullgraph=True,
        backend="aot_eager",
    )
    assert torch.equal(compiled(x), found.out)


def test_what_is_written_is_what_a_product_takes():
    x, w = torch.randn(6, 256, dtype=BF16), torch.randn(128, 256) / 16
    q, weights = ka.ops.rmsnorm_quantize(x, "row"), ka.ops.quantize(w, "row")
    B = ka.ScaledOperand(weights.out.t(), weights.scale, ka.ScaleMode.PER_ROW)
    y = ka.ops.gemm(q.operand, B)
    wanted = torch.nn.functional.rms_norm(x.float(), (256,), eps=1e-6) @ w.t()
    assert (y.float() - wanted).norm() < 0.06 * wanted.norm()


def test_an_output_that_is_given_is_written():
    x, out = torch.randn(4, 128), torch.empty(4, 128, dtype=torch.float8_e5m2)
    found = ka.ops.layernorm_quantize(x, out=out)
    assert found.out is out
    assert torch.equal(
        out.float(), ka.ops.layernorm_quantize(x, out_dtype="float8_e5m2").out.float()
    )


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("mode", MODES)
def test_kernels_take_every_quantisation_and_nothing_else(name, mode):
    for stored, top in STORED.items():
        args = drawn(name, mode, 64, 4096, stored=stored, device="meta", seed=3)
        found = quantization_of(args.epilogue.graph)
        assert found.mode == mode and (mode == "tensor" or found == Quantization(mode, top))
        offered = ka.get_kernels(args, cc=90, providers=["cutedsl"])
        assert offered and {kernel.family for kernel in offered} == {f"sm80.{name}"}
        assert all(kernel.predict(args) > 0 for kernel in offered)
    kind = type(args)
    doubled = kind(
        args.x, args.out, epilogue=ka.EpilogueArguments(lambda accum, by: accum * by, by=2.0)
    )
    told = ka.explain(doubled, cc=90, providers=["cutedsl"])
    (refused,) = (one for one in told.rejected if one.family == f"sm80.{name}")
    assert refused.reason == "an epilogue is a quantisation of the result, and nothing else"


def test_results_that_are_not_scaled_are_of_8_bits_too():
    x, out = (torch.empty(64, 512, dtype=one, device="meta") for one in (BF16, F8))
    offered = ka.get_kernels(ka.RmsNormArguments(x, out), cc=90, providers=["cutedsl"])
    assert {kernel.family for kernel in offered} == {"sm80.rmsnorm_quantize"}


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: ka.ops.rmsnorm_quantize(x, "rows"), "mode is 'rows'; expected one of tensor, "),
        (lambda x: ka.ops.rmsnorm_quantize(x, "row", scale=1.0), "scale is given and mode is 'row"),
        (
            lambda x: ka.ops.rmsnorm_quantize(x, "tensor"),
            "scale is None; mode 'tensor' takes one t",
        ),
        (lambda x: ka.ops.rmsnorm_quantize(x[:, :100]), "x has N = 100; blocks of 128 columns ne"),
        (lambda x: ka.ops.rmsnorm_quantize(x[0, 0]), r"x has no modes; expected \(..., N\)"),
        (lambda x: ka.ops.rmsnorm_quantize(x, out_dtype=BF16), "out's type is 'bfloat16'; expec"),
        (
            lambda x: ka.ops.rmsnorm_quantize(x, out=torch.empty(4, 64, dtype=F8)),
            r"out has shape \(4, 64\); expected \(4, 128\)",
        ),
        (
            lambda x: ka.ops.rmsnorm_quantize(x, x[0]),
            "mode is a Tensor; expected one of tensor, row",
        ),
        (
            lambda x: ka.ops.layernorm_quantize(x, weight=torch.ones(5)),
            r"weight has shape \(5,\); expected \(N\) = \(128,\)",
        ),
        (
            lambda x: ka.fusions.rmsnorm_quantize(x, out=x.to(F8), scale=torch.empty(4)),
            r"scale has shape \(1, 4\); expected \(4, 1\)",
        ),
        (
            lambda x: ka.fusions.rmsnorm_quantize(x, out=x.to(F8), scale=None, mode="row"),
            r"scale is None; expected a tensor \(4,\)",
        ),
    ],
)
def test_what_contradicts_itself_is_refused(call, message):
    with pytest.raises(ArgumentError, match=message):
        call(torch.randn(4, 128))


def test_rows_that_are_no_whole_vectors_are_told():
    x, out = (torch.empty(8, 104, dtype=one, device="meta")[:, :100] for one in (BF16, F8))
    args = ka.fusions.rmsnorm_quantize(x, out=out, scale=x.new_empty(8).float(), mode="row")
    told = str(ka.explain(args, cc=90, providers=["cutedsl"]))
    assert "rows are whole vectors" in told and "N padded to 104" in told


def test_rows_of_any_width_are_quantised_by_a_kernel():
    for N in (256, 4096, 100_000):
        args = drawn("quantize", "row", 64, N, device="meta")
        assert ka.get_kernels(args, cc=80)[0].family == "sm80.quantize_rows"
    told = ka.explain(
        ka.fusions.quantize(
            torch.empty(2, 3, 4096, device="meta"),
            out=torch.empty(2, 3, 4096, device="meta", dtype=F8),
            scale=torch.empty(2, 3, device="meta"),
            mode="row",
        ),
        cc=80,
    )
    (refused,) = (one for one in told.rejected if one.family == "sm80.quantize_rows")
    assert "x has rank 3 (would match with x.flatten(0, 1))" in str(refused)


def families(args):
    return {kernel.family for kernel in ka.get_kernels(args, cc=90, providers=["cutedsl"])}


def test_a_transform_and_largest_magnitudes_are_not_left_out():
    x, out = (torch.empty(64, 512, dtype=one, device="meta") for one in (BF16, F8))
    number = torch.empty((), device="meta")
    assert families(ka.RmsNormArguments(x, out)) == {"sm80.rmsnorm_quantize"}
    for given in ({"hadamard": True}, {"global_amax": number}):
        assert not families(ka.RmsNormArguments(x, out, **given))


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
@pytest.mark.parametrize("rows", [1, 4])
def test_a_scale_of_one_element_is_a_number_whatever_its_shape(shape, rows):
    x, scale = torch.randn(rows, 64), torch.full(shape, 0.02)
    found = ka.ops.rmsnorm_quantize(x, "tensor", scale=scale)
    wanted = ka.ops.rmsnorm_quantize(x, "tensor", scale=0.02)
    assert torch.equal(found.out.float(), wanted.out.float())
    out = torch.empty(rows, 64, dtype=F8, device="meta")
    args = ka.fusions.rmsnorm_quantize(x.to("meta"), out=out, scale=scale.to("meta"), mode="tensor")
    assert families(args) == {"sm80.rmsnorm_quantize"}
    kernel = ka.get_kernels(args, cc=90, providers=["cutedsl"])[0]
    assert kernel.compile(args, cc=90).resources.spill_bytes == 0


@pytest.mark.parametrize("name", [*NAMES, "quantize"])
def test_scales_of_another_type_are_refused(name):
    args = drawn(name, "row", 8, 256, device="meta")
    assert families(args) & {f"sm80.{name}", "sm80.quantize_rows"}
    scale = torch.empty(8, dtype=BF16, device="meta")
    others = args.rebuilt(*args.tensors, scale=scale)
    told = ka.explain(others, cc=90, providers=["cutedsl"])
    family = "sm80.quantize_rows" if name == "quantize" else f"sm80.{name}"
    (refused,) = (one for one in told.rejected if one.family == family)
    assert "scales are float32" in refused.reason and "bfloat16" in refused.reason


def test_rows_without_columns_have_scales_of_one():
    for shape in ((5, 0), (2, 3, 0)):
        found = ka.ops.quantize(torch.empty(shape), "row")
        assert found.out.shape == shape and found.scale.eq(1).all()
    x = torch.empty(5, 256, device="meta")[:, :0]
    out = torch.empty(5, 256, dtype=F8, device="meta")[:, :0]
    args = ka.fusions.quantize(x, out=out, scale=x.new_empty(5), mode="row")
    assert "sm80.quantize_rows" not in families(args)


def test_where_nothing_takes_rows_that_is_told(monkeypatch):
    monkeypatch.setenv("KERNEL_API_PROVIDERS", "cutedsl")
    for mode in ("row", "block"):
        with pytest.raises(ka.errors.NoKernelError, match="no kernel takes these arguments"):
            ka.ops.quantize(torch.randn(4, 256), mode)


def test_rows_of_several_matrices_are_those_of_one_in_graphs_too(monkeypatch):
    from kernel_api import _quantize_ops

    ranks = []
    arguments_of = _quantize_ops.arguments_of
    monkeypatch.setattr(
        _quantize_ops, "arguments_of", lambda x, **k: ranks.append(x.dim()) or arguments_of(x, **k)
    )
    x, out = torch.randn(2, 3, 256), torch.empty(2, 3, 256, dtype=F8)
    graph = torch.compile(lambda x: ka.ops.quantize(x, "row").out, backend="aot_eager")
    assert torch.equal(graph(x).float(), ka.ops.quantize(x, "row", out=out).out.float())
    assert set(ranks) == {2}


@pytest.mark.parametrize("scale", [0.25, torch.tensor([0.25]), torch.tensor(0.25, dtype=BF16)])
@pytest.mark.parametrize("quantized", [ka.ops.quantize, ka.ops.rmsnorm_quantize])
def test_a_product_takes_what_a_given_scale_made(scale, quantized):
    x, w = torch.randn(4, 64, dtype=BF16), torch.randn(16, 64)
    found, weights = quantized(x, "tensor", scale=scale), ka.ops.quantize(w, "tensor")
    B = ka.ScaledOperand(weights.out.t(), weights.scale, ka.ScaleMode.PER_TENSOR)
    y = ka.ops.gemm(found.operand, B).double()
    wanted = 0.25 * found.out.double() @ (weights.scale.double() * weights.out.double()).t()
    assert (y - wanted).abs().max() <= 2**-7 * wanted.abs().max()


@pytest.mark.parametrize("scale", [0.25, torch.tensor(0.25)])
def test_a_given_scale_is_taken_in_graphs(scale):
    x = torch.randn(4, 64)
    graph = torch.compile(
        lambda x: ka.ops.quantize(x, "tensor", scale=scale).out, fullgraph=True, backend="aot_eager"
    )
    assert torch.equal(graph(x).float(), ka.ops.quantize(x, "tensor", scale=scale).out.float())


def test_operators_of_all_forms_are_registered_for_what_was_exported():
    code = "import torch, kernel_api as ka; ka.ops.register_operators(); " + "; ".join(
        f"torch.ops.kernel_api.{name}.default" for name in (*NAMES, "quantize", "rmsnorm")
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("call", [ka.ops.rmsnorm, ka.ops.rmsnorm_quantize, ka.ops.quantize])
def test_sparse_rows_are_refused_by_name(call):
    with pytest.raises(ArgumentError, match=r"x is a torch\.sparse_coo tensor; expected a strided"):
        call(torch.eye(128).to_sparse())


def test_launches_are_given_a_scale_without_modes(monkeypatch):
    from kernel_api import _again

    given = []
    monkeypatch.setattr(
        _again, "repeated", lambda key, tensors, values: given.append(values[-1].shape)
    )
    for shape in ((), (1,), (1, 1)):
        ka.ops.rmsnorm_quantize(torch.randn(2, 3, 64), "tensor", scale=torch.full(shape, 0.5))
    assert given == [()] * 3


@pytest.mark.parametrize("scale", [np.float32(0.5), np.full((), 0.5), np.full((1,), 0.5), 1])
def test_scales_of_numpy_are_numbers_or_tensors(scale):
    x = torch.randn(2, 64)
    found = ka.ops.rmsnorm_quantize(x, "tensor", scale=scale)
    wanted = ka.ops.rmsnorm_quantize(x, "tensor", scale=float(np.asarray(scale).item()))
    assert torch.equal(found.out.float(), wanted.out.float())

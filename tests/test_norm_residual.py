"""Norms of the sum with a residual: what is refused, what is stored, gradients, and one memory for
both. Kernels are in ``emulated/test_norm_numerics.py``."""

import pytest
import torch
from support.norms import LAYER, LAYER_BACKWARD, RMS, RMS_BACKWARD, Draw, gradients, norm
from torch.testing import assert_close

import kernel_api as ka
from kernel_api.errors import ArgumentError
from kernel_api.nn import Normalised
from kernel_api.verification import poison

M, N, EPS = 6, 48, 0.03
FLOATS = ("float64", "float32", "float16", "bfloat16")
every_forward = pytest.mark.parametrize("kind", [RMS, LAYER], ids=["rmsnorm", "layernorm"])


def summed(x, residual):
    """As it is stored."""
    return (x.to(torch.promote_types(x.dtype, torch.float32)) + residual).to(residual.dtype)


def only(args, provider="reference"):
    (kernel,) = ka.get_kernels(args, providers=[provider])
    return kernel


def refused(args, provider):
    """What kernels of the same arguments say."""
    kind = type(args).__name__
    told = ka.explain(args, cc=90, providers=[provider]).rejected
    return "\n".join(str(one) for one in told if f"these are {kind}" not in str(one))


def with_residual(draw, kind, element=None, **given):
    sums = {"residual": draw.matrix(element=element)}
    sums["residual_out"] = draw.matrix(read=False, element=element)
    return draw.arguments(kind, weight=draw.columns(), eps=EPS, **{**sums, **given})


# Computed --------------------------------------------------------------------------------


@every_forward
@pytest.mark.parametrize("element", FLOATS)
@pytest.mark.parametrize("of_residual", FLOATS)
def test_the_sum_is_rounded_to_the_residuals_type_and_then_normalised(kind, element, of_residual):
    if (element == "float64") != (of_residual == "float64"):
        with pytest.raises(ArgumentError, match="expected both to be float64, or neither"):
            with_residual(Draw(M, N, element), kind, of_residual)
        return
    args = with_residual(Draw(M, N, element, pad=3), kind, of_residual, rstd=None)
    for output in args.outputs.values():
        poison(output.tensor)
    only(args).run(args)
    expected = summed(args.x.tensor, args.residual.tensor)
    assert torch.equal(args.residual_out.tensor, expected)
    exact = norm(expected, args.weight.tensor, centred=kind is LAYER, eps=EPS)
    unit = torch.finfo(args.out.tensor.dtype).eps
    assert_close(args.out.tensor.double(), exact, rtol=unit, atol=1e-7)
    assert ka.verify(only(args), args)


@every_forward
def test_a_sum_need_not_be_stored(kind):
    args = with_residual(Draw(M, N), kind, residual_out=None)
    assert set(args.outputs) == {"out"}
    assert ka.verify(only(args), args)


@every_forward
@pytest.mark.parametrize("element", FLOATS)
def test_torch_adds_a_residual_of_the_same_type(kind, element):
    args = with_residual(Draw(M, N, element), kind)
    assert ka.verify(only(args, "torch"), args)
    if element == "float64":
        return
    other = "float32" if element != "float32" else "bfloat16"
    args = with_residual(Draw(M, N, element), kind, other)
    assert "torch takes a residual of x's type; residual is" in refused(args, "torch")


@pytest.mark.parametrize("kind", [RMS_BACKWARD, LAYER_BACKWARD])
@pytest.mark.parametrize("element", FLOATS)
def test_what_x_has_from_elsewhere_is_added_to_its_gradient(kind, element):
    draw = Draw(M, N, element)
    sums = {n: draw.columns(read=False, element=draw.wide) for n in ("dweight", "dbias")}
    more = draw.matrix(element="float32")
    args = draw.arguments(kind, weight=draw.columns(), dresidual=more, **sums)
    assert ka.verify(only(args), args)
    centred = kind is LAYER_BACKWARD
    operands = args.dy.tensor, args.x.tensor, args.weight.tensor
    exact = gradients(*operands, centred=centred, eps=1e-5)
    exact["dx"] = exact["dx"] + more.double()
    for name, output in args.outputs.items():
        scale = float(exact[name].abs().max()) * torch.finfo(output.tensor.dtype).eps
        assert_close(output.tensor.double(), exact[name], rtol=0.0, atol=scale + 1e-5)


def test_torchs_gradients_are_refused_as_they_are_rounded_before():
    draw = Draw(M, N)
    args = draw.arguments(LAYER_BACKWARD, weight=draw.columns(), dresidual=draw.matrix())
    words = "torch rounds a gradient before another one is added; dresidual is given"
    assert words in refused(args, "torch")


# One memory for both ---------------------------------------------------------------------


@every_forward
@pytest.mark.parametrize("provider", ["reference", "torch"])
def test_the_sum_may_be_stored_where_the_residual_is(kind, provider):
    draw = Draw(M, N, "bfloat16", pad=8)
    args = with_residual(draw, kind)
    shared = args.residual.tensor
    args = args.rebuilt(*args.tensors, residual_out=shared)
    assert (args.in_place, args.overwriting) == (("residual",), ("residual_out",))
    assert ka.verify(only(args, provider), args)
    expected = summed(args.x.tensor, shared)
    only(args, provider).run(args)
    assert torch.equal(shared, expected)


def test_other_memory_is_nobody_elses():
    x = torch.zeros(2 * M, N)
    with pytest.raises(ArgumentError, match="residual_out shares memory with residual"):
        RMS(x[:M], x[M:].clone(), residual=x.clone()[:M], residual_out=x.clone()[:M]).rebuilt(
            x[:M].clone(), x[:M].clone(), residual=x[:M], residual_out=x[1 : M + 1]
        )
    with pytest.raises(ArgumentError, match="residual_out shares memory with x"):
        RMS(x[:M], x[M:], residual=x[:M].clone(), residual_out=x[:M])
    with pytest.raises(ArgumentError, match="out shares memory with residual"):
        RMS(x[M:], x[:M], residual=x[:M])
    apart = RMS(x[:M], x[M:], residual=x[:M].clone(), residual_out=x[M:].clone())
    assert (apart.in_place, apart.overwriting) == ((), ())


# Refused ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"residual_out": (M, N)}, "residual_out is given and residual is not"),
        ({"residual": (M, 40)}, r"residual has shape \(6, 40\); expected \(M, N\) = \(6, 48\)"),
        ({"residual": (M, N), "residual_out": (4, N)}, r"residual_out has shape \(4, 48\); exp"),
    ],
)
@every_forward
def test_residuals_that_do_not_fit_are_refused(kind, given, words):
    matrices = {name: torch.zeros(shape) for name, shape in given.items()}
    with pytest.raises(ArgumentError, match=words):
        Draw(M, N).arguments(kind, **matrices)


def test_the_sum_has_the_type_of_the_residual():
    draw = Draw(M, N, "bfloat16")
    with pytest.raises(ArgumentError, match="residual_out is bfloat16; expected float32, the type"):
        draw.arguments(RMS, residual=draw.matrix(element="float32"), residual_out=draw.matrix())


@pytest.mark.parametrize("name", ["residual", "residual_out"])
def test_an_epilogue_may_have_the_names_of_what_is_not_there(name):
    draw = Draw(M, N)
    fn = eval(f"lambda accum, {name}: accum * {name}")
    args = draw.arguments(RMS, epilogue=ka.EpilogueArguments(fn, **{name: draw.matrix()}))
    found = args.rebuilt(*args.tensors)
    only(found).run(found)
    exact = norm(found.x.tensor, centred=False, eps=1e-6) * args.epilogue.tensors[name].tensor
    assert_close(found.out.tensor.double(), exact, rtol=1e-5, atol=1e-5)
    assert ka.verify(only(found), found)


def on_meta(kind, N, element, **given):
    draw = Draw(8, N, element, device="meta")
    return draw.arguments(kind, **{name: make(draw) for name, make in given.items()})


@pytest.mark.parametrize(
    ("kind", "given", "words"),
    [
        (
            RMS,
            {"residual": lambda d: torch.empty(N, 8, dtype=torch.bfloat16, device="meta").t()},
            "residual has strides (1, 8) (would match with residual.contiguous())",
        ),
        (
            RMS_BACKWARD,
            {"dresidual": lambda d: d.matrix(element="float64")},
            "dresidual is float64",
        ),
    ],
)
def test_kernels_say_why_they_take_no_such_residual(kind, given, words):
    args = on_meta(kind, N, "bfloat16", **given)
    assert words in refused(args, "cutedsl")


@pytest.mark.parametrize("name", ["residual", "residual_out"])
def test_rows_that_begin_anywhere_are_read_in_short_vectors(name):
    given = {"residual": lambda d: d.matrix(), "residual_out": lambda d: d.matrix(read=False)}
    args = on_meta(LAYER, N, "bfloat16", **given)
    anywhere = on_meta(LAYER, N, "bfloat16", **{**given, name: lambda d: d.matrix(pad=1)})
    first = ka.get_kernels(args, cc=90, providers=["cutedsl"])[0]
    words = f"{name} has rows at multiples of 2 bytes (would match if they were at multiples of 16)"
    assert str(first.supports(anywhere)).endswith(words)
    assert ka.get_kernels(anywhere, cc=90, providers=["cutedsl"])


def test_rows_that_do_not_fit_beside_a_residual_have_fewer_stages_or_none():
    alone, beside = (
        {k.metadata.design.stages for k in ka.get_kernels(args, cc=90, providers=["cutedsl"])}
        for args in (
            on_meta(RMS, 16384, "bfloat16"),
            on_meta(RMS, 16384, "bfloat16", residual=lambda d: d.matrix(element="float32")),
        )
    )
    assert max(alone) == 3
    assert beside == {0, 1}


# Calls -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["rmsnorm", "layernorm"])
def test_a_call_returns_what_is_asked_for(name):
    draw = Draw(M, N)
    x, residual = draw.matrix().view(2, 3, N), draw.matrix(element="bfloat16").view(2, 3, N)
    call = getattr(ka.ops, name)
    out = call(x, residual=residual, eps=EPS)
    found = call(x, residual=residual, residual_out=True, rstd=True, eps=EPS)
    assert found._fields == ("out", "rstd", "residual_out")
    assert torch.equal(found.residual_out, summed(x, residual))
    assert found.residual_out.dtype is torch.bfloat16
    assert torch.equal(found.out, out)
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    again = compiled(x, residual=residual, residual_out=True, rstd=True, eps=EPS)
    for one, other in zip(again, found, strict=True):
        assert_close(one, other)


def test_a_quantised_norm_adds_it_too():
    draw = Draw(M, 128, "bfloat16")
    x, residual = draw.matrix(), draw.matrix()
    out, scale = torch.empty(M, 128, dtype=torch.float8_e4m3fn), torch.empty(M)
    args = ka.fusions.rmsnorm_quantize(
        x, out=out, scale=scale, mode="row", residual=residual, residual_out=draw.matrix(read=False)
    )
    assert ka.verify(only(args), args)
    y = norm(summed(x, residual), centred=False, eps=1e-6)
    assert (out.double() * scale.double()[:, None] - y).abs().max() < 0.2
    assert torch.equal(args.residual_out.tensor, summed(x, residual))
    given = {"residual": lambda d: d.matrix(), "residual_out": lambda d: d.matrix(read=False)}
    element = {"out": lambda d: d.matrix(read=False, element="float8_e4m3fn")}
    (first, *_) = ka.get_kernels(on_meta(RMS, 128, "bfloat16", **given, **element), cc=90)
    assert first.family == "sm80.rmsnorm_quantize"


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("name", ["rmsnorm_quantize", "layernorm_quantize"])
def test_a_call_quantises_the_norm_of_a_sum(name, compiled):
    draw = Draw(M, 128, "bfloat16")
    x, weight = draw.matrix().view(2, 3, 128), draw.columns()
    residual = draw.matrix().view(2, 3, 128)
    call = getattr(ka.ops, name)

    def both(x, residual, place):
        found = call(x, "row", residual=residual, weight=weight)
        again = call(x, "row", residual=residual, residual_out=place, weight=weight)
        return *found[:2], *again[:2]

    used = torch.compile(both, backend="aot_eager", fullgraph=True) if compiled else both
    for place in (torch.full_like(x, torch.nan), residual.clone()):
        expected = call(summed(x, residual), "row", weight=weight)
        out, scale, again, scales = used(x, residual, place)
        assert torch.equal(place, summed(x, residual))
        for one in (out, again):
            assert torch.equal(one.view(torch.uint8), expected.out.view(torch.uint8))
        for one in (scale, scales):
            assert torch.equal(one, expected.scale)
    call(x, "row", residual=place, residual_out=place, weight=weight)
    assert torch.equal(place, summed(x, summed(x, residual)))


def test_a_call_that_quantises_has_no_place_for_a_sum_of_its_own():
    x = torch.zeros(2, 128)
    with pytest.raises(ArgumentError, match="residual_out is True; give a tensor, or residual its"):
        ka.ops.rmsnorm_quantize(x, residual=x, residual_out=True)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_a_call_writes_a_sum_in_place(compiled):
    draw = Draw(M, 128, "bfloat16", pad=8)

    def both(x, residual):
        out = ka.ops.rmsnorm(x, residual=residual, residual_out=residual).out
        return out, ka.ops.rmsnorm_quantize(x, residual=residual, residual_out=residual).out

    used = torch.compile(both, backend="aot_eager", fullgraph=True) if compiled else both
    x, residual = draw.matrix(), draw.matrix()
    once = summed(x, residual)
    twice = summed(x, once)
    out, quantised = used(x, residual)
    assert torch.equal(residual, twice)
    assert torch.equal(out, ka.ops.rmsnorm(once))
    expected = ka.ops.rmsnorm_quantize(twice).out
    assert torch.equal(quantised.view(torch.uint8), expected.view(torch.uint8))


def test_operators_of_saved_programs_take_calls_without_a_residual():
    """What was added since then stands at the end, and is absent by default."""
    import kernel_api._norm_operators
    import kernel_api._quantized_norm_operators  # noqa: F401  (register)

    of_sums = {"residual", "residual_out", "dresidual"}
    for name in ("norm", "norm_backward", "rmsnorm", "layernorm", "rmsnorm_backward"):
        packet = getattr(torch.ops.kernel_api, name)
        for overload in packet.overloads():
            given = getattr(packet, overload)._schema.arguments
            later = [one for one in given if one.name in of_sums]
            assert later and given[-len(later) :] == later
            assert all(one.has_default_value() for one in later)


def test_one_row_lies_where_it_does_whatever_its_stride():
    row = torch.randn(1, 16)
    again = row.as_strided((1, 16), (999, 1))
    args = RMS(torch.randn(1, 16), torch.empty(1, 16), residual=row, residual_out=again)
    assert args.in_place == ("residual",)


def test_the_same_problem_with_a_residual():
    args = Draw(M, N).arguments(RMS)
    assert args.rebuilt(*args.tensors, residual=torch.zeros(M, N)).residual is not None
    with pytest.raises(
        ArgumentError, match=r"residual has shape \(3, 2, 48\); expected \(2, 3, 48"
    ):
        ka.fusions.rmsnorm(
            torch.zeros(2, 3, N), out=torch.zeros(2, 3, N), residual=torch.zeros(3, 2, N)
        )


# Layers with gradients -------------------------------------------------------------------


def formula(x, weight, bias, residual, centred):
    s = x + residual
    c = s - s.mean(-1, keepdim=True) if centred else s
    return c * torch.rsqrt((c * c).mean(-1, keepdim=True) + EPS) * weight + bias, s


LOSSES = {
    "both": lambda y, s: (y * y).sum() + (s**3).sum(),
    "norm": lambda y, s: (y * y).sum(),
    "sum": lambda y, s: (s**3).sum(),
    "expanded": lambda y, s: y.sum() + s.sum(),
}


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("centred", [False, True], ids=["rmsnorm", "layernorm"])
def test_gradients_are_those_of_the_formula(centred, compiled, loss):
    draw = torch.Generator().manual_seed(0)
    shapes = ((3, 4, 16), (16,), (16,), (3, 4, 16))
    leaves = [torch.randn(s, generator=draw, dtype=torch.float64).requires_grad_() for s in shapes]
    layer = ka.nn.layernorm if centred else ka.nn.rmsnorm

    def of_layer(x, weight, bias, residual):
        found = layer(x, weight, bias, residual=residual, eps=EPS)
        return LOSSES[loss](found.out, found.residual_out)

    if compiled:
        of_layer = torch.compile(of_layer, backend="aot_eager", fullgraph=True)
    found = torch.autograd.grad(of_layer(*leaves), leaves, allow_unused=True)
    exact = LOSSES[loss](*formula(*leaves, centred))
    expected = torch.autograd.grad(exact, leaves, allow_unused=True)
    for one, other in zip(found, expected, strict=True):
        nothing = other is None
        assert_close(torch.zeros(()) if one is None else one.abs().sum() if nothing else one,
                     torch.zeros((), dtype=torch.float64 if one is not None else None)
                     if nothing else other)  # fmt: skip


@pytest.mark.parametrize(
    ("loss", "calls"), [("both", 1), ("norm", 1), ("sum", 0)], ids=["both", "norm", "sum"]
)
def test_graphs_compute_nothing_of_what_is_not_used(loss, calls):
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    graphs = []

    def kept(graph, inputs):
        graphs.append([str(node.target) for node in graph.graph.nodes])
        return make_boxed_func(graph.forward)

    backend = aot_autograd(fw_compiler=lambda g, _: make_boxed_func(g.forward), bw_compiler=kept)
    x, residual, weight = (torch.randn(s, requires_grad=True) for s in ((3, 16), (3, 16), (16,)))
    layer = torch.compile(
        lambda *given: LOSSES[loss](*ka.nn.rmsnorm(given[0], given[2], residual=given[1])),
        backend=backend,
        fullgraph=True,
    )
    layer(x, residual, weight).backward()
    ((*nodes,),) = graphs
    assert sum("norm_backward" in node for node in nodes) == calls
    assert not any("zeros" in node and loss != "sum" for node in nodes)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("of_residual", ["float32", "float16"])
def test_a_stream_may_be_of_another_type(of_residual, compiled):
    """As under autocast: x of 16 bits, what it is added to of 32."""
    draw = Draw(M, N, "bfloat16")
    x, residual = draw.random((M, N)), draw.random((M, N), of_residual)
    weight = draw.random((N,), "float32")
    leaves = [one.requires_grad_() for one in (x, weight, residual)]

    def layer(x, weight, residual):
        return ka.nn.rmsnorm(x, weight, residual=residual, eps=EPS)

    used = torch.compile(layer, backend="aot_eager", fullgraph=True) if compiled else layer
    out, s = used(*leaves)
    assert (out.dtype, s.dtype) == (x.dtype, residual.dtype)
    found = torch.autograd.grad((out.float() ** 2).sum() + (s.float() ** 3).sum(), leaves)
    wide = [one.detach().double().requires_grad_() for one in leaves]
    y, exact = formula(wide[0], wide[1], 0.0, wide[2], False)
    expected = torch.autograd.grad((y**2).sum() + (exact**3).sum(), wide)
    for one, other, leaf in zip(found, expected, leaves, strict=True):
        assert one.dtype is leaf.dtype
        assert (one.double() - other).norm() < 0.02 * other.norm()


@pytest.mark.parametrize("which", range(4))
def test_gradients_are_for_those_that_ask(which):
    leaves = [torch.randn(s, dtype=torch.float64) for s in ((3, 16), (16,), (16,), (3, 16))]
    leaves[which].requires_grad_()
    *others, residual = leaves
    y, s = ka.nn.rmsnorm(*others, residual=residual, eps=EPS)
    ((y * y).sum() + (s * s).sum()).backward()
    assert [one.grad is not None for one in leaves] == [i == which for i in range(4)]


def test_the_sum_is_all_that_is_kept_of_the_rows():
    x, residual = (torch.randn(3, 16, requires_grad=True) for _ in range(2))
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda one: kept.append(one) or one, lambda o: o):
        found = ka.nn.rmsnorm(x, residual=residual)
    assert isinstance(found, Normalised)
    rows = [one for one in kept if one is not None and one.dim() == 2]
    assert [one.data_ptr() for one in rows] == [found.residual_out.data_ptr()]


@pytest.mark.parametrize(
    ("residual", "words"),
    [
        (torch.zeros(4, 16), r"residual has shape \(4, 16\); expected \(3, 16\), that of x"),
        (torch.zeros(3, 16).double(), "residual is float64 and x is float32; expected both to"),
    ],
)
def test_layers_take_a_residual_like_x(residual, words):
    with pytest.raises(ArgumentError, match=words):
        ka.nn.rmsnorm(torch.zeros(3, 16), residual=residual)

"""The forms of kernel_api.ops in graphs of torch: fake tensors, torch.compile, torch.export."""

import io
import subprocess
import sys

import pytest
import torch
from support.fusions import GLU, pairs
from support.versions import since_torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import kernel_api as ka
from kernel_api import _norm_ops, _operators
from kernel_api.errors import ArgumentError

M, N, K = 6, 64, 5


def matrix(rows, columns, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, columns, generator=generator, dtype=torch.float64)


A, B, BIAS, PROB = matrix(M, K), matrix(K, N, 1), matrix(1, N, 2)[0], matrix(1, M, 3)[0]
FULL, WIDE = matrix(M, N, 4), matrix(M, 2 * N, 5)
HALF = matrix(M, N // 2, 6)

#: What each form needs beside A and B.
NEEDED = {
    "gemm_residual": {"C": FULL, "beta": 0.5},
    "gemm_dglu": {"preactivation": WIDE},
    "gemm_dswiglu": {"preactivation": WIDE, "dprob": True, "dbias": True},
    "gemm_recompute_dglu": {"upstream": HALF, "dbias": True},
    "gemm_dsrelu": {"preactivation": FULL, "dprob": True},
    "gemm_dactivation": {"preactivation": FULL},
    "gemm_recompute_dsrelu": {"upstream": FULL, "prob": PROB},
    "gemm_recompute_dactivation": {"upstream": FULL, "activation": "tanh"},
    "gemm_rope": {"cos": FULL[:, :8], "sin": FULL[:, 8:16], "head_dim": 16},
    "gemm_quantize": {"mode": "row", "amax": True},
    "gemm_dropout": {"p": 0.5, "seed": 1, "offset": 2},
    "gemm_bias_activation": {"bias": BIAS, "preactivation": True},
    "gemm_swiglu": {"granularity": "halves", "preactivation": True, "prob": PROB},
    "gemm": {"bias": BIAS, "alpha": torch.tensor(0.5)},
}


def leaves(found):
    return tuple(found) if isinstance(found, tuple) else (found,)


def close(found, expected):
    found, expected = leaves(found), leaves(expected)
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert one.dtype is other.dtype
        torch.testing.assert_close(one.double(), other.double())


def operands_of(form):
    """What torch cannot convert to 8-bit floats is in float32."""
    tensors = (A, B)
    return tuple(t.float() for t in tensors) if form.name == "gemm_quantize" else tensors


@pytest.mark.parametrize(
    ("form", "call"), ka.ops.FORMS, ids=[form.name for form, _ in ka.ops.FORMS]
)
def test_every_form_is_an_operator_that_computes_what_the_form_does(form, call):
    needed = NEEDED.get(form.name, {})
    tensors = operands_of(form)
    graph = make_fx(lambda *given: leaves(call(*given, **needed)), tracing_mode="fake",
                    _allow_non_fake_inputs=True)(*tensors)  # fmt: skip
    targets = [node.target for node in graph.graph.nodes if node.op == "call_function"]
    assert getattr(torch.ops.kernel_api, form.name).default in targets
    expected = call(*tensors, **needed)
    close(graph(*tensors), leaves(expected))
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = call(*map(mode.from_tensor, tensors), **needed)
    assert [(t.shape, t.dtype) for t in leaves(fake)] == [
        (t.shape, t.dtype) for t in leaves(expected)
    ]


def test_make_fx_of_tensors_with_memory_makes_nodes_too():
    """Whatever computes them then, be it nothing that torch's dispatcher sees."""

    def function(a, b):
        return ka.ops.rmsnorm(ka.ops.gemm(a, b)) + ka.ops.gemm(A, B)

    expected = function(A, B)
    graph = make_fx(function)(A, B)
    targets = [node.target for node in graph.graph.nodes if node.op == "call_function"]
    assert targets.count(torch.ops.kernel_api.gemm.default) == 2
    assert targets.count(torch.ops.kernel_api.rmsnorm.default) == 1
    close(graph(A, B), expected)


def test_calls_among_fake_tensors_run_nothing_though_their_operands_have_memory():
    buffer = torch.zeros(M, N, dtype=torch.float64)
    for _ in range(2):
        ka.ops.gemm(A, B), ka.ops.gemm(A, B, out=buffer)
    buffer.zero_()
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        assert mode.is_our_fake(ka.ops.gemm(A, B))
        assert mode.is_our_fake(ka.ops.gemm(A, mode.from_tensor(B)))
        assert mode.is_our_fake(ka.ops.rmsnorm(A, weight=torch.empty(K, dtype=A.dtype)))
        ka.ops.gemm(A, B, out=buffer)
    assert not buffer.any()


def test_the_library_checks_the_operators():
    ka.ops.register_operators()
    written = [torch.empty(M, N, dtype=torch.float64)]
    out = torch.empty(M, N // 2, dtype=torch.float64)
    options = ["kind='geglu'", "granularity=32"]
    torch.library.opcheck(
        torch.ops.kernel_api.gemm_glu.out,
        (A, B, out, written, [BIAS], [0.5], [], ["preactivation", "bias", "alpha"], options),
    )
    options.append("preactivation=True")
    torch.library.opcheck(
        torch.ops.kernel_api.gemm_glu.default,
        (A, B, torch.float32, [BIAS], [0.5], [], ["bias", "alpha"], options),
    )


def test_lists_that_are_none_are_empty():
    """AOTInductor's packages give those that a call has nothing for so."""
    out = torch.empty(M, N, dtype=torch.float64)
    _operators._run(ka.ops.gemm, A, B, out, None, None, None, None, None, None)
    torch.testing.assert_close(out, A @ B)


# torch.compile ----------------------------------------------------------------------------


def swiglu_layer(x, weight, prob, alpha):
    """Outputs allocated and given, tensors and numbers, other operations around."""
    y, z = ka.ops.gemm_swiglu(x, weight.t(), preactivation=True, prob=prob, alpha=alpha)
    total = torch.empty_like(z)
    ka.ops.gemm_residual(z, torch.eye(N, dtype=z.dtype), out=total, C=z, beta=-0.25)
    return y + 1, total


def swiglu_expected(x, weight, prob, alpha):
    z = alpha * (x @ weight.t())
    return GLU["swiglu"](*pairs(z, "up_gate", 32)) * prob[:, None] + 1, 0.75 * z


def test_compile_takes_the_forms_without_a_break():
    compiled = torch.compile(swiglu_layer, fullgraph=True, backend="aot_eager", dynamic=True)
    for rows, alpha in ((M, 0.5), (M + 3, 1.0), (M + 1, 2.5)):
        given = matrix(rows, K, rows), B.t().contiguous(), matrix(1, rows)[0], alpha
        close(compiled(*given), swiglu_expected(*given))


@pytest.mark.parametrize("seed", [0, -1, 2**63 - 1, 2**63, 2**64 - 1, -(2**63)])
def test_compile_takes_all_whole_numbers_of_64_bits(seed):
    def dropped(a, b, seed):
        return ka.ops.gemm_dropout(a, b, p=0.5, seed=seed, offset=seed)

    torch._dynamo.reset()
    compiled = torch.compile(dropped, backend="aot_eager", fullgraph=True)
    for one in (5, seed, 6, 7):  # numbers that change become symbols
        close(compiled(A, B, one), dropped(A, B, one))
    close(
        torch.compile(lambda a, b: ka.ops.gemm(a, b, alpha=2**63), backend="aot_eager")(A, B),
        2.0**63 * (A @ B),
    )


@pytest.mark.parametrize("seed", [2**64, -(2**63) - 1])
def test_compile_says_which_number_is_beyond_64_bits(seed):
    torch._dynamo.reset()
    with pytest.raises(Exception, match="seed is beyond all whole numbers of 64 bits"):
        torch.compile(
            lambda a, b: ka.ops.gemm_dropout(a, b, p=0.5, seed=seed, offset=0), backend="aot_eager"
        )(A, B)


def test_compile_keeps_what_is_written_to_an_argument():
    def function(out):
        found = ka.ops.gemm(A, B, out=out)
        return found * 2

    out = torch.full((M, N), torch.nan, dtype=torch.float64)
    twice = torch.compile(function, fullgraph=True, backend="aot_eager")(out)
    close(out, A @ B)
    close(twice, 2 * (A @ B))


def test_compile_says_what_is_wrong_with_the_operands():
    compiled = torch.compile(lambda a, b: ka.ops.gemm(a, b), fullgraph=True, backend="eager")
    with pytest.raises(Exception, match="A has K = 5 but B has K = 64"):
        compiled(A, B.t())


def test_what_no_graph_holds_breaks_the_graph_and_is_computed_all_the_same():
    epilogue = ka.EpilogueArguments(lambda accum: accum * 3)

    def function(a, b):
        return ka.ops.gemm(a + 1, b, epilogue=epilogue) + 1

    close(torch.compile(function, backend="eager")(A, B), 3 * ((A + 1) @ B) + 1)
    torch.compiler.reset()
    with pytest.raises(Exception, match="an epilogue, a number of NumPy, or experts"):
        torch.compile(function, fullgraph=True, backend="eager")(A, B)
    with (
        FakeTensorMode() as mode,
        pytest.raises(ArgumentError, match=r"gemm: an epilogue, .* outside of torch\.export"),
    ):
        function(mode.from_tensor(A), mode.from_tensor(B))


# torch.export -----------------------------------------------------------------------------


class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(B.clone())

    def forward(self, x, bias):
        return tuple(ka.ops.gemm_bias_activation(x, self.weight, bias=bias, preactivation=True))


def test_an_exported_program_is_saved_and_takes_other_sizes():
    rows = torch.export.Dim("rows", min=2)
    program = torch.export.export(Layer(), (A, BIAS), dynamic_shapes=({0: rows}, None))
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    loaded = torch.export.load(file).module()
    for x in (A, matrix(M + 5, K, 9)):
        z = x @ B + BIAS
        close(loaded(x, BIAS), (torch.nn.functional.gelu(z), z))


@pytest.mark.parametrize("strict", [True, False])
def test_an_option_that_depends_on_a_size_makes_it_one_size(strict):
    class Blocks(torch.nn.Module):
        def forward(self, a, b):
            return ka.ops.gemm_glu(a, b, granularity=a.shape[0])

    given = A, torch.cat((B, B, B), dim=1)  # of pairs of 6 columns
    exported = torch.export.export(Blocks(), given, strict=strict).module()
    close(exported(*given), Blocks()(*given))
    rows = ({0: torch.export.Dim("rows", min=2)}, None)
    with pytest.raises(torch._dynamo.exc.UserError, match="specialized it to be a constant"):
        torch.export.export(Blocks(), given, dynamic_shapes=rows, strict=strict)


class SeveralResults(torch.nn.Module):
    def forward(self, a, b):
        q = a.view(1, 1, *a.shape)
        return [
            ka.ops.gemm_swiglu(a, b, preactivation=True),
            ka.ops.rmsnorm(a, rstd=True),
            ka.ops.sdpa(q, q, q, return_lse=True),
        ]


def test_an_exported_program_that_returns_several_results_by_name_is_saved():
    program, file = torch.export.export(SeveralResults(), (A, B)), io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    found = torch.export.load(file).module()(A, B)
    for one, expected in zip(found, SeveralResults()(A, B), strict=True):
        assert type(one) is type(expected)
        close(one, expected)


class Constant(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.matrix = A.clone()  # neither a parameter nor a buffer

    def forward(self, b):
        return ka.ops.gemm(self.matrix, b), ka.ops.gemm(self.matrix, B)


@since_torch("2.10", "exports no module with a tensor of its globals")
@pytest.mark.parametrize("strict", [False, True])
def test_tensors_that_a_module_holds_are_operands_of_exported_programs(strict):
    layer = Constant()
    program = torch.export.export(layer, (-B,), strict=strict)
    close(program.module()(2 * B), layer(2 * B))


@pytest.mark.parametrize("tracer", ["export", "make_fx"])
def test_factors_of_sizes_are_what_they_are(tracer):
    """Not the whole numbers below them; torch then guards the size."""

    class Layer(torch.nn.Module):
        def forward(self, a, b):
            return ka.ops.gemm(a, b, alpha=1.0 / a.shape[0])

    if tracer == "export":
        shapes = ({0: torch.export.Dim.AUTO}, None)
        program = torch.export.export(Layer(), (A, B), dynamic_shapes=shapes, strict=False)
        found = program.module()
        with pytest.raises(AssertionError, match="Guard failed"):
            found(A[1:], B)
    else:
        found = make_fx(Layer(), tracing_mode="symbolic")(A, B)
    torch.testing.assert_close(found(A, B), A @ B / M)


UP = torch.randn(1, 32, 64)
KNOWN = {
    "gemm": lambda x: ka.ops.gemm(x, x.t()),
    "gemm_swiglu": lambda x: ka.ops.gemm_swiglu(x, UP[0]),
    "rmsnorm": lambda x: ka.ops.rmsnorm(x, weight=x[0]),
    "quantize": lambda x: ka.ops.quantize(x, "row").out,
    "quantize, one scale": lambda x: ka.ops.quantize(x, "tensor").out,
    "quantize, a scale that is given": lambda x: ka.ops.quantize(x, "tensor", scale=0.5).out,
    "rmsnorm_quantize": lambda x: ka.ops.rmsnorm_quantize(x, "row", weight=x[0]).out,
    "gather_rows": lambda x: ka.ops.gather_rows(x, torch.ones(3, 1, dtype=torch.int32)),
    "sdpa": lambda x: ka.ops.sdpa(*[x.view(1, 1, 9, 32)] * 3),
    "a layer of experts": lambda x: ka.nn.moe(
        x, torch.zeros(9, 1, dtype=torch.int32), x[:, :1], UP, UP[:, :, :32].mT.contiguous()
    ),
}


@pytest.mark.parametrize("name", KNOWN)
@pytest.mark.parametrize("before", [False, True])
def test_calls_that_are_known_are_nodes_of_what_make_fx_traces(name, before):
    x, y = (torch.randn(9, 32) for _ in range(2))
    for _ in range(3):
        KNOWN[name](x)
    graph = make_fx(KNOWN[name], pre_dispatch=before)(x)
    assert any("kernel_api" in str(node.target) for node in graph.graph.nodes)
    assert torch.equal(graph(y).float(), KNOWN[name](y).float())


REGIONS = {
    "cond": lambda call: (
        lambda x: torch.cond(x.sum() > 0, lambda x: call(x) * 2.0, lambda x: call(x) * 3.0, (x,))
    ),
    "nested_compile_region": lambda call: (lambda region: lambda x: region(x) + region(x * 2))(
        torch.compiler.nested_compile_region(call)
    ),
}
IN_REGIONS = KNOWN.keys()


@pytest.mark.parametrize(
    ("name", "region"),
    [*((name, "cond") for name in IN_REGIONS), ("gemm", "nested_compile_region")],
)
def test_forms_are_part_of_what_may_not_write(name, region):
    torch._dynamo.reset()
    call, x = (lambda x: KNOWN[name](x).float()), torch.randn(9, 32)
    expected = call(x) + call(x * 2) if region != "cond" else call(x) * (2 if x.sum() > 0 else 3)
    function = REGIONS[region](call)
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), expected)


@pytest.mark.parametrize("dynamic", [None, True])
def test_forms_are_compiled_themselves(dynamic):
    """Without a function of the caller's around them."""
    torch._dynamo.reset()
    A, B, preactivation = torch.randn(5, 8), torch.randn(8, 64), torch.randn(5, 128)
    for form, options in ((ka.ops.gemm, {}), (ka.ops.gemm_dglu, {"preactivation": preactivation})):
        compiled = torch.compile(form, fullgraph=True, backend="eager", dynamic=dynamic)
        found, right = compiled(A, B, **options), form(A, B, **options)
        torch.testing.assert_close(found, right)


def test_forms_do_not_share_the_limit_of_compilations():
    torch._dynamo.reset()
    A, B, C = torch.randn(5, 8), torch.randn(8, 64), torch.randn(5, 64)
    before = {"preactivation": C}
    forms = {
        "gemm": {}, "gemm_bias_activation": {}, "gemm_residual": {"C": C}, "gemm_amax": {},
        "gemm_srelu": {}, "gemm_dsrelu": before, "gemm_dactivation": before,
        "gemm_recompute_dsrelu": {"upstream": C}, "gemm_recompute_dactivation": {"upstream": C},
    }  # fmt: skip
    assert len(forms) > torch._dynamo.config.recompile_limit
    for name, options in forms.items():
        torch.compile(getattr(ka.ops, name), fullgraph=True, backend="eager")(A, B, **options)
    calls = [call for _, call in (*ka.ops.FORMS, *ka.ops.GROUPED_FORMS)]
    calls += [getattr(ka.ops, form.name) for form in _norm_ops.FORMS]
    assert len({id(call.__code__) for call in calls}) == len(calls)


def test_registering_operators_is_enough_to_load_exported_layers():
    code = (
        "import torch, kernel_api as ka; ka.ops.register_operators(); "
        "print(torch.ops.kernel_api.linear.default, torch.ops.kernel_api.linear_backward.default)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def ones(*shape, dtype=torch.float32):
    return torch.ones(shape, dtype=dtype)


#: Calls that contradict themselves, of every form that is an operator.
CONTRADICTIONS = {
    "sdpa, D": lambda o: o.sdpa(ones(2, 4, 5, 8), ones(2, 2, 7, 9), ones(2, 2, 7, 9)),
    "sdpa, heads": lambda o: o.sdpa(ones(2, 4, 5, 8), *[ones(2, 3, 7, 8)] * 2),
    "sdpa, type": lambda o: o.sdpa(
        ones(2, 4, 5, 8), ones(2, 2, 7, 8, dtype=torch.float64), ones(2, 2, 7, 8)
    ),
    "sdpa, bias": lambda o: o.sdpa(ones(2, 4, 5, 8), *[ones(2, 2, 7, 8)] * 2, bias=ones(3, 3)),
    "sdpa, scale": lambda o: o.sdpa(*[ones(2, 4, 5, 8)] * 3, scale=float("nan")),
    "sdpa_backward": lambda o: o.sdpa_backward(*[ones(2, 4, 5, 8)] * 5, ones(2, 4, 6)),
    "rmsnorm": lambda o: o.rmsnorm(ones(5, 8), weight=ones(7)),
    "rmsnorm, eps": lambda o: o.rmsnorm(ones(5, 8), eps=-1.0),
    "layernorm_backward": lambda o: o.layernorm_backward(
        ones(5, 8), ones(5, 8), mean=ones(5), rstd=ones(4)
    ),
    "rmsnorm_quantize": lambda o: o.rmsnorm_quantize(ones(5, 256), weight=ones(255)),
    "quantize": lambda o: o.quantize(ones(5, 200)),
    "quantize, type": lambda o: o.quantize(ones(5, 256), mode="row", out_dtype="float32"),
    "gather_rows": lambda o: o.gather_rows(ones(5, 8), ones(2, 2)),
    "scatter_rows": lambda o: o.scatter_rows(ones(5, 8), ones(4, 1, dtype=torch.int32)),
    "group_rows": lambda o: o.group_rows(ones(5, 2, dtype=torch.int32), 3, weight=ones(5, 3)),
    "gemm": lambda o: o.gemm(ones(5, 8), ones(7, 4)),
}


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_tracers_refuse_what_calls_refuse(name):
    call = CONTRADICTIONS[name]
    with pytest.raises(ArgumentError) as called:
        call(ka.ops)
    with FakeTensorMode(), pytest.raises(ArgumentError) as traced:
        call(ka.ops)
    assert str(traced.value) == str(called.value)


def test_an_export_refuses_what_calls_refuse():
    class Attention(torch.nn.Module):
        def forward(self, q, k):
            return ka.nn.attention(q, k, k)

    with pytest.raises(ArgumentError, match="Q has D = 8 but K has D = 9"):
        torch.export.export(Attention(), (ones(2, 4, 5, 8), ones(2, 2, 7, 9)))


@pytest.mark.parametrize(
    "call",
    [
        lambda x: ka.ops.quantize(x, "row")[:2],  # torch loads no text that is returned
        lambda x: ka.ops.group_rows(x.int() * 0, 4),
        lambda x: ka.ops.rmsnorm(x, rstd=True),
    ],
    ids=["quantize", "group_rows", "rmsnorm"],
)
def test_programs_that_return_named_outputs_can_be_saved(call, tmp_path):
    class Layer(torch.nn.Module):
        def forward(self, x):
            return call(x)

    x = torch.randn(9, 4)
    torch.export.save(torch.export.export(Layer(), (x,)), tmp_path / "program.pt2")
    found = torch.export.load(tmp_path / "program.pt2").module()(x)
    assert type(found) is type(call(x))
    assert torch.equal(found[0].float(), call(x)[0].float())

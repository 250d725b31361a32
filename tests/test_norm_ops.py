"""Norms in one call, and with gradients: ka.ops and ka.nn."""

import inspect

import numpy as np
import pytest
import torch
from support.norms import block_maxima, hadamard, norm, poisoned, statistics
from support.sampling import some
from torch.testing import assert_close

import kernel_api as ka
from kernel_api import _launches
from kernel_api.errors import ArgumentError, NoKernelError

EPS = 0.03
SHAPE = (3, 5, 48)
FORWARD = {"rmsnorm": False, "layernorm": True}


def random(*shape, seed=0, element=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(element)


X, WEIGHT, BIAS = random(*SHAPE), random(48, seed=1), random(48, seed=2)
MATRIX = X.view(15, 48)
SCALED = ka.ScaledOperand(X, torch.tensor(2.0), ka.ScaleMode.PER_TENSOR)

every_forward = pytest.mark.parametrize(("name", "centred"), FORWARD.items(), ids=str)


@pytest.fixture(autouse=True)
def nothing_remembered(monkeypatch):
    """Providers are asked anew: by some of the tests others than by the rest."""
    monkeypatch.setattr(_launches, "_chosen", {})


# ops -------------------------------------------------------------------------------------


def test_every_norm_among_the_fusions_has_a_one_call_form():
    plain = (n for n in ka.fusions.__all__ if "norm" in n and not n.endswith("_quantize"))
    for name in plain:
        fusion, form = getattr(ka.fusions, name), getattr(ka.ops, name)
        first = "dx" if "backward" in name else "out"
        taken = inspect.signature(form).parameters
        assert set(taken) - {f"{first}_dtype"} == set(inspect.signature(fusion).parameters)
        assert taken[first].default is None
        assert (form.__module__, form.__name__) == ("kernel_api.ops", name)
        assert form.__doc__ == fusion.__doc__


@pytest.mark.parametrize(
    ("name", "eps"), [("rmsnorm", 1e-6), ("layernorm", 1e-5), ("rmsnorm_rht_amax", 1e-5)]
)
def test_calls_of_a_norm_have_one_eps_by_default(name, eps):
    calls = [getattr(ways, name) for ways in (ka.fusions, ka.ops, ka.nn) if hasattr(ways, name)]
    assert len(calls) >= 2
    assert {inspect.signature(call).parameters["eps"].default for call in calls} == {eps}


def test_arguments_of_norms_have_one_eps_by_default():
    for kind in (ka.RmsNormArguments, ka.LayerNormArguments):
        assert inspect.signature(kind).parameters["eps"].default == 1e-6


@every_forward
def test_out_is_allocated_in_the_shape_and_type_of_x(name, centred):
    form = getattr(ka.ops, name)
    out = form(X, weight=WEIGHT, bias=BIAS, eps=EPS)
    exact = norm(MATRIX, WEIGHT, BIAS, centred=centred, eps=EPS).view(SHAPE)
    assert_close(out, exact)
    assert form(X[0, 0], eps=EPS).shape == (48,)
    assert form(X.bfloat16()).dtype is torch.bfloat16
    assert form(X, out_dtype="bf16").dtype is torch.bfloat16
    assert form(X.numpy()).shape == SHAPE
    given = poisoned(torch.empty_like(X))
    assert form(X, weight=WEIGHT, bias=BIAS, eps=EPS, out=given) is given
    assert_close(given, exact)


@every_forward
def test_statistics_come_back_by_name_in_the_shape_of_the_rows(name, centred):
    asked = {"mean": True, "rstd": True} if centred else {"rstd": True}
    found = getattr(ka.ops, name)(X.float(), eps=EPS, **asked)
    assert found._fields == ("out", *asked)
    assert type(found).__name__ == name.capitalize()
    mean, rstd = statistics(MATRIX, centred, EPS)
    assert found.rstd.dtype is torch.float32
    assert_close(found.rstd.double(), rstd.view(3, 5), rtol=1e-6, atol=1e-6)
    if centred:
        assert_close(found.mean.double(), mean.view(3, 5), rtol=1e-6, atol=1e-6)
    assert getattr(ka.ops, name)(X, rstd=False).shape == SHAPE


@pytest.mark.parametrize("name", ["rmsnorm_backward", "layernorm_backward"])
def test_gradients_come_back_with_the_sums_that_are_asked_for(name):
    centred = "layer" in name
    leaf, weight, bias = (t.clone().requires_grad_() for t in (MATRIX, WEIGHT, BIAS))
    dy = random(15, 48, seed=3)
    norm(leaf, weight, bias, centred=centred, eps=EPS).backward(dy)
    mean, rstd = statistics(MATRIX, centred, EPS)
    given = {"rstd": rstd.view(3, 5), "weight": WEIGHT}
    if centred:
        given["mean"] = mean.view(3, 5)
    form = getattr(ka.ops, name)
    dx = form(dy.view(SHAPE), X, **given)
    assert_close(dx, leaf.grad.view(SHAPE))
    found = form(dy.view(SHAPE), X, dweight=True, dbias=True, **given)
    assert found._fields == ("dx", "dweight", "dbias")
    assert_close(found.dx, leaf.grad.view(SHAPE))
    assert_close(found.dweight, weight.grad)
    assert_close(found.dbias, bias.grad)


def test_a_transform_comes_back_with_the_maxima_of_blocks_of_rows():
    signs = random(16, seed=4).sign()
    found = ka.ops.rmsnorm_rht_amax(X, weight=WEIGHT, signs=signs, global_amax=True, eps=EPS)
    h = hadamard(norm(MATRIX, WEIGHT, centred=False, eps=EPS), signs)
    assert found._fields == ("out", "amax", "global_amax")
    assert_close(found.out, h.view(SHAPE))
    assert_close(found.amax, block_maxima(h, 2))
    assert_close(found.global_amax, h.abs().max())
    found = ka.ops.rmsnorm_rht_amax(X, weight=WEIGHT, rows_per_block=4, eps=EPS)
    assert found._fields == ("out", "amax")
    assert_close(
        found.amax, block_maxima(hadamard(norm(MATRIX, WEIGHT, centred=False, eps=EPS)), 4)
    )


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: ka.ops.rmsnorm(X.transpose(0, 1)), ArgumentError, "no view of it has shape"),
        (lambda: ka.ops.rmsnorm(X, out=X.float(), out_dtype="f16"), ArgumentError, "one of them"),
        (lambda: ka.ops.rmsnorm(SCALED), ArgumentError, "x is a ScaledOperand; expected a plain"),
        (lambda: ka.ops.rmsnorm(torch.tensor(1.0)), ArgumentError, "x has no modes; expected"),
        (lambda: ka.ops.rmsnorm(X, weight=WEIGHT[:47]), ArgumentError, r"expected \(N\) = \(48"),
        (lambda: ka.ops.layernorm(X, colour=3), TypeError, "unexpected keyword argument 'colour'"),
        (lambda: ka.ops.layernorm_backward(X, X), TypeError, "missing a required argument: 'mean'"),
    ],
)
def test_what_does_not_fit_is_refused(call, error, words):
    with pytest.raises(error, match=words):
        call()


def test_where_no_kernel_takes_the_operands_the_reasons_are_told(monkeypatch):
    monkeypatch.setenv("KERNEL_API_PROVIDERS", "torch")
    with pytest.raises(NoKernelError, match="torch's RMS norm adds no bias"):
        ka.ops.rmsnorm(X, bias=BIAS)


# nn --------------------------------------------------------------------------------------


@pytest.fixture(params=["reference", "all"])
def provided(request, monkeypatch):
    if request.param == "reference":
        monkeypatch.setenv("KERNEL_API_PROVIDERS", "reference")


@every_forward
@pytest.mark.parametrize("given", [(), (WEIGHT,), (WEIGHT, BIAS)], ids=["", "weight", "bias"])
def test_gradients_are_those_that_differences_say(name, centred, given, provided):
    function = getattr(ka.nn, name)
    x, given = X[:1, :3, :13], [factor[:13] for factor in given]
    leaves = [t.clone().requires_grad_() for t in (x, *given)]
    assert torch.autograd.gradcheck(lambda *t: function(*t, eps=EPS), leaves)
    exact = norm(x[0], *given, centred=centred, eps=EPS)
    assert_close(function(*leaves, eps=EPS).detach(), exact.view(1, 3, 13))


@every_forward
def test_only_what_needs_a_gradient_gets_one(name, centred):
    function = getattr(ka.nn, name)
    weight = WEIGHT.bfloat16().requires_grad_()
    x = X.bfloat16()
    y = function(x, weight, BIAS.bfloat16())
    y.sum().backward()
    assert weight.grad.dtype is torch.bfloat16
    assert x.grad is None
    assert not function(x, WEIGHT.bfloat16()).requires_grad
    with torch.no_grad():
        assert not function(x, weight).requires_grad


@every_forward
def test_operands_that_are_not_contiguous_are_taken(name, centred):
    function = getattr(ka.nn, name)
    turned = X.transpose(0, 1).clone().transpose(0, 1).requires_grad_()
    plain = X.clone().requires_grad_()
    for leaf in (turned, plain):
        function(leaf, WEIGHT).sum().backward()
    assert_close(turned.grad, plain.grad)
    assert function(X[0, 0]).shape == (48,)
    assert function(X[:0]).shape == (0, 5, 48)


@every_forward
def test_torch_compiles_functions_with_gradients_in_one_graph(name, centred):
    function = getattr(ka.nn, name)
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    results = []
    for one in (function, compiled):
        leaves = [t.float().requires_grad_() for t in (X, WEIGHT, BIAS)]
        y = one(*leaves)
        y.square().sum().backward()
        results.append([y.detach(), *(leaf.grad for leaf in leaves)])
    for eager, found in zip(*results, strict=True):
        assert_close(found, eager)


@pytest.mark.parametrize("options", [{}, {"global_amax": True}])
def test_an_output_that_is_not_wanted_is_none_of_a_graph(options):
    def call(x, weight):
        return ka.ops.rmsnorm_rht_amax(x, weight=weight, amax=False, **options)

    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)(X, WEIGHT)
    expected = call(X, WEIGHT)
    assert getattr(compiled, "_fields", ()) == getattr(expected, "_fields", ())
    torch.testing.assert_close(compiled, expected)


@pytest.mark.parametrize("form", [ka.ops.rmsnorm, ka.nn.layernorm])
def test_true_is_no_number_in_graphs_either(form):
    with pytest.raises(Exception, match=r"expected (a number|one)"):
        form(X, eps=True)
    with pytest.raises(Exception, match="True is given for a number; expected one"):
        torch.compile(lambda x: form(x, eps=True), backend="eager", fullgraph=True)(X)


def test_torch_compiles_and_exports_one_call_forms():
    def call(x, weight):
        eps = np.float64(0.5)
        return ka.ops.rmsnorm_rht_amax(x, weight=weight, global_amax=True, eps=eps)

    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    for found, exact in zip(compiled(X, WEIGHT), call(X, WEIGHT), strict=True):
        assert_close(found, exact)

    class Module(torch.nn.Module):
        def forward(self, x, weight):
            return ka.ops.layernorm(x, weight=weight)

    exported = torch.export.export(Module(), (X, WEIGHT))
    assert "kernel_api.layernorm" in str(exported.graph)
    assert_close(exported.module()(X, WEIGHT), ka.ops.layernorm(X, weight=WEIGHT))


NUMBERS = [{"eps": np.float32(0.5)}, {"rows_per_block": np.int64(4)}]


@pytest.mark.parametrize("number", some(NUMBERS, 1))
def test_numbers_of_numpy_that_graphs_do_not_know_are_read_between_two(number):
    def call(x, weight):
        return ka.ops.rmsnorm_rht_amax(x, weight=weight, **number)

    compiled = torch.compile(call, backend="aot_eager")
    for found, exact in zip(compiled(X, WEIGHT), call(X, WEIGHT), strict=True):
        assert_close(found, exact)


@pytest.mark.parametrize("number", NUMBERS)
def test_numbers_of_numpy_are_refused_where_there_is_one_graph(number):
    def call(x, weight):
        return ka.ops.rmsnorm_rht_amax(x, weight=weight, **number)

    with pytest.raises(torch._dynamo.exc.Unsupported, match="a number of NumPy is an array"):
        torch.compile(call, backend="aot_eager", fullgraph=True)(X, WEIGHT)


@every_forward
def test_a_graph_takes_an_out_with_gaps_between_its_rows(name, centred):
    def call(x, buffer):
        getattr(ka.ops, name)(x, out=buffer[:, 8:56], eps=EPS)
        return buffer + 1

    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    buffers = [torch.zeros(15, 64, dtype=torch.float64) for _ in range(2)]
    assert_close(compiled(MATRIX, buffers[0]), call(MATRIX, buffers[1]))
    assert_close(*buffers)


@pytest.mark.parametrize(
    "name", ["rmsnorm", "layernorm", "rmsnorm_backward", "layernorm_backward", "rmsnorm_rht_amax"]
)
def test_operators_pass_the_checks_of_torch(name):
    import kernel_api._norm_operators  # noqa: F401  (registers)

    operator = getattr(torch.ops.kernel_api, name)
    x, rstd = X.float().view(15, 48), torch.ones(15)
    read = ("rstd", "mean") if "backward" in name else ()
    given = {"out": torch.empty(15, 48), "weight": WEIGHT.float()}
    if "backward" in name:
        matrices = (x, x.clone())
        given = {"dx": torch.empty(15, 48), "rstd": rstd, "weight": WEIGHT.float()}
        given |= {"dweight": torch.empty(48), "dbias": None}
        given |= {"mean": rstd} if "layer" in name else {}
        given |= {"dresidual": x.clone()}
    else:
        matrices = (x,)
        given |= {"eps": EPS}
        if name == "rmsnorm_rht_amax":
            given |= {"amax": torch.empty(8), "global_amax": None, "rows_per_block": None}
            given |= {"signs": None}
        else:
            given |= {"bias": None, "rstd": torch.empty(15)}
            given |= {"mean": None} if "layer" in name else {}
            given |= {"residual": x.clone(), "residual_out": torch.empty(15, 48)}
    tests = {"test_utils": ("test_schema", "test_faketensor")}
    torch.library.opcheck(operator.out, matrices, given, **tests)
    outputs = ("out", "dx", "dweight", "dbias", "rstd", "mean", "amax", "global_amax")
    outputs += ("residual_out",)
    made = {
        n: one.dtype if n in outputs and n not in read and one is not None else one
        for n, one in given.items()
    }
    torch.library.opcheck(operator.default, matrices, made, **tests)


def test_an_exported_transform_takes_any_number_of_rows():
    class Module(torch.nn.Module):
        def forward(self, x):
            return ka.ops.rmsnorm_rht_amax(x, weight=x.new_ones(32), rows_per_block=4)

    x = torch.randn(8, 32)
    rows = torch.export.Dim("rows", min=5, max=64)
    exported = torch.export.export(Module(), (x,), dynamic_shapes=({0: rows},)).module()
    for count in (8, 16):
        given = torch.randn(count, 32)
        for one, other in zip(exported(given), Module()(given), strict=True):
            assert_close(one, other)

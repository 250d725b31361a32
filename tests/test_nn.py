"""Functions with gradients: against torch, in eager mode and compiled."""

import pytest
import torch
from support.fusions import ACTIVATIONS, GLU, close, pairs
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.library import opcheck

import kernel_api as ka
from kernel_api.errors import ArgumentError

NAMES = [name for name in ACTIVATIONS if name is not None]
LIMITS = {"geglu_clamped": {"limit": 0.8, "offset": 0.3}}


def leaves(*lead, N=64, K=6, bias=True, element=torch.float64):
    generator = torch.Generator().manual_seed(0)

    def leaf(*shape):
        drawn = torch.randn(shape, generator=generator, dtype=torch.float64)
        return drawn.to(element).requires_grad_()

    return leaf(*lead, K), leaf(N, K), leaf(N) if bias else None


def gradients(y, operands):
    generator = torch.Generator().manual_seed(1)
    dy = torch.randn(y.shape, generator=generator, dtype=torch.float64).to(y.dtype)
    return torch.autograd.grad(y, [one for one in operands if one is not None], dy)


def check(function, expected, operands, tolerance=1e-12):
    found, wanted = function(*operands), expected(torch.nn.functional.linear(*operands))
    close(found, wanted, tolerance)
    for one, other in zip(gradients(found, operands), gradients(wanted, operands), strict=True):
        close(one, other, tolerance)


@pytest.mark.parametrize("activation", NAMES)
@pytest.mark.parametrize("bias", [False, True])
def test_linear_activation_and_its_gradients_are_torchs(activation, bias):
    check(
        lambda *operands: ka.nn.linear_activation(*operands, activation=activation),
        ACTIVATIONS[activation],
        leaves(5, N=7, bias=bias),
    )


@pytest.mark.parametrize("kind", GLU)
@pytest.mark.parametrize("bias", [False, True])
def test_linear_glu_and_its_gradients_are_torchs(kind, bias):
    limits = LIMITS.get(kind, {})
    check(
        lambda *operands: ka.nn.linear_glu(*operands, kind=kind, **limits),
        lambda x: GLU[kind](*pairs(x, "up_gate", 32), **limits),
        leaves(5, bias=bias),
    )


@pytest.mark.parametrize("order", ["gate_up", "up_gate"])
@pytest.mark.parametrize("granularity", [1, 8, "halves"])
def test_pairs_are_ordered_and_blocked_as_asked(order, granularity):
    check(
        lambda *a: ka.nn.linear_swiglu(*a, order=order, granularity=granularity),
        lambda x: GLU["swiglu"](*pairs(x, order, granularity)),
        leaves(5),
    )


@pytest.mark.parametrize("lead", [(), (1,), (2, 3), (2, 0)], ids=str)
def test_x_may_have_any_number_of_modes(lead):
    check(ka.nn.linear_activation, torch.nn.functional.gelu, leaves(*lead, N=7))


@pytest.mark.parametrize("lead", [(), (5,), (2, 3), (2, 0)], ids=str)
@pytest.mark.parametrize("bias", [False, True])
def test_a_product_over_nothing_is_the_bias(lead, bias):
    operands = leaves(*lead, K=0, bias=bias)
    check(ka.nn.linear_activation, torch.nn.functional.gelu, operands)
    check(ka.nn.linear_swiglu, lambda x: GLU["swiglu"](*pairs(x, "up_gate", 32)), operands)


def test_no_features_have_gradients():
    check(ka.nn.linear_activation, torch.nn.functional.gelu, leaves(5, N=0))


@pytest.mark.parametrize("operands", [leaves(5, N=7), leaves(5, N=7, bias=False)])
@pytest.mark.parametrize("function", [ka.nn.linear_activation, ka.nn.linear_swiglu])
def test_gradients_are_those_of_finite_differences(function, operands):
    if function is ka.nn.linear_swiglu:
        operands = leaves(2, K=3, bias=operands[2] is not None)
    assert torch.autograd.gradcheck(function, operands)


@pytest.mark.parametrize("element", [torch.float32, torch.bfloat16, torch.float16])
def test_other_types_are_rounded_once(element):
    operands = leaves(33, element=element)
    y = ka.nn.linear_swiglu(*operands)
    wide = [one.detach().double().requires_grad_() for one in operands]
    expected = GLU["swiglu"](*pairs(torch.nn.functional.linear(*wide), "up_gate", 32))
    assert y.dtype is element
    close(y, expected.to(element), 0 if element is not torch.float32 else 1e-6)
    for one, other in zip(gradients(y, operands), gradients(expected, wide), strict=True):
        assert one.dtype is element
        norm = torch.linalg.vector_norm
        assert norm(one.double() - other) < 4 * torch.finfo(element).eps * norm(other)


@pytest.mark.parametrize("which", range(3))
def test_only_the_gradients_that_are_asked_for_are_computed(which, monkeypatch):
    operands = [one.detach() for one in leaves(5)]
    operands[which].requires_grad_()
    products = []
    gemm = ka.ops.gemm
    monkeypatch.setattr(ka.ops, "gemm", lambda *a, **k: products.append(1) or gemm(*a, **k))
    ka.nn.linear_swiglu(*operands).sum().backward()
    assert [one.grad is not None for one in operands] == [i == which for i in range(3)]
    assert len(products) == (which < 2)


def test_nothing_but_the_operands_is_kept():
    x, weight, bias = leaves(5)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda one: kept.append(one) or one, lambda o: o):
        ka.nn.linear_swiglu(x, weight, bias)
    assert {id(one) for one in kept} == {id(x), id(weight), id(bias)}


def test_a_gradient_may_be_expanded_or_strided():
    operands = leaves(5)
    for reduce in (torch.sum, lambda y: (y.t() * torch.arange(5).double()).sum()):
        found = torch.autograd.grad(reduce(ka.nn.linear_swiglu(*operands)), operands)
        y = GLU["swiglu"](*pairs(torch.nn.functional.linear(*operands), "up_gate", 32))
        for one, other in zip(found, torch.autograd.grad(reduce(y), operands), strict=True):
            close(one, other)


IN_PLACE = {
    "activation": lambda x, weight, bias: ka.nn.linear_activation(x, weight, bias),
    "glu": lambda x, weight, bias: ka.nn.linear_swiglu(x, weight, bias),
    "rmsnorm": lambda x, weight, bias: ka.nn.rmsnorm(x, weight[0]),
    "layernorm": lambda x, weight, bias: ka.nn.layernorm(x, weight[0], weight[1]),
}


@pytest.mark.parametrize("name", IN_PLACE)
def test_results_may_be_changed_in_place(name):
    operands = leaves(2, 5)
    y, other = (IN_PLACE[name](*operands) for _ in range(2))
    y *= 2.5
    y += 1
    used = [one for one in operands if one is not operands[2] or name in ("activation", "glu")]
    close(y, 2.5 * other + 1)
    for one, wanted in zip(
        torch.autograd.grad(y.square().sum(), used),
        torch.autograd.grad((2.5 * other + 1).square().sum(), used),
        strict=True,
    ):
        close(one, wanted)


# Compiled --------------------------------------------------------------------------------


def layers(x, weight, bias):
    y = ka.nn.linear_swiglu(x, weight, bias) * 2
    return ka.nn.linear_activation(y, weight[:, :1].expand(-1, y.shape[-1]), activation="silu")


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_torch_compile_takes_them_whole(backend):
    torch._dynamo.reset()
    compiled = torch.compile(layers, fullgraph=True, backend=backend)
    for rows in (5, 9):  # the second is compiled for any number
        operands = leaves(rows)
        found, expected = compiled(*operands), layers(*operands)
        close(found, expected, 0)
        for one, other in zip(
            gradients(found, operands), gradients(expected, operands), strict=True
        ):
            close(one, other, 0)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("name", ["geglu", "gelu"])
def test_the_operators_are_what_torch_expects(name, bias):
    operands = leaves(2, 3, bias=bias)
    opcheck(torch.ops.kernel_api.linear, (*operands, name, "up_gate", "32", None, None))


def test_the_backward_operator_is_what_torch_expects():
    operands = [one.detach() for one in leaves(2, 3)]
    wanted = [True, False, True]
    opcheck(
        torch.ops.kernel_api.linear_backward,
        (operands[0].new_ones(2, 3, 32), *operands, wanted, "swiglu", "up_gate", "1", None, None),
    )


ELEMENTS = [
    torch.float16, torch.bfloat16, torch.float32,
    torch.float8_e4m3fn, torch.float8_e5m2, torch.int8,
]  # fmt: skip


def seen(found):
    return [(one.dtype, one.shape, one.stride()) for one in found]


def both(operator, tensors, *rest):
    """What a tracer is told of the results, and what they are."""
    with FakeTensorMode() as mode:
        fakes = [one if one is None else mode.from_tensor(one) for one in tensors]
        told = operator(*fakes, *rest)
    found = operator(*tensors, *rest)
    return [seen(one if isinstance(one, tuple) else [one]) for one in (told, found)]


@pytest.mark.parametrize("element", ELEMENTS, ids=str)
@pytest.mark.parametrize("name", ["swiglu", "gelu"])
@pytest.mark.parametrize("lead", [(), (5,), (2, 3), (2, 0)], ids=str)
def test_a_tracer_is_told_the_results_that_there_are(element, name, lead):
    function = (name, "up_gate", "32", None, None)
    x, weight = torch.ones(*lead, 16).to(element), torch.ones(64, 16).to(element)
    told, found = both(torch.ops.kernel_api.linear, (x, weight, None), *function)
    assert told == found
    dy = torch.ones(found[0][1], dtype=found[0][0])
    for bias in (None, torch.ones(64)):
        operands = (dy, x, weight, bias)
        wanted = [True, True, bias is not None]
        told, found = both(torch.ops.kernel_api.linear_backward, operands, wanted, *function)
        assert told == found


def test_a_tracer_is_told_the_gradients_of_a_layer_without_columns():
    """They lie as others do, whatever x and the weights do."""
    x, weight, dy = torch.ones(7, 5).t(), torch.ones(7, 0).t(), torch.ones(5, 0)
    function = ("gelu", "up_gate", "32", None, None)
    wanted = [True, True, False]
    told, found = both(
        torch.ops.kernel_api.linear_backward, (dy, x, weight, None), wanted, *function
    )
    assert told == found


@pytest.mark.parametrize(
    ("element", "taken"), [(torch.float8_e4m3fn, torch.bfloat16), (torch.int8, torch.int32)]
)
def test_products_of_eight_bits_are_of_a_type_that_holds_them(element, taken):
    x, weight = torch.ones(5, 16).to(element), torch.full((64, 16), 2).to(element)
    y = ka.nn.linear_activation(x, weight, activation="relu")
    assert y.dtype is taken
    assert (y == 32).all()


# Refusals --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"weight": torch.ones(64, 5)}, r"x has shape \(5, 6\) and weight \(64, 5\)"),
        ({"weight": torch.ones(6)}, r"weight \(6,\); expected \(\.\.\., K\) and \(N, K\)"),
        ({"bias": torch.ones(32)}, r"bias has shape \(32,\); expected \(64,\)"),
        ({"weight": torch.ones(64, 6, device="meta")}, "weight is on meta but x is on cpu"),
        ({"bias": torch.ones(64, device="meta")}, "bias is on meta but x is on cpu; expected one"),
        ({"kind": "mish"}, "kind is 'mish'; expected one of glu, swiglu"),
        ({"granularity": 48}, "weight has N = 64; pairs of 48 columns need a multiple of 96"),
        ({"granularity": "thirds"}, "granularity is 'thirds'"),
        ({"limit": 3.0}, "limit is 3.0 and kind is 'swiglu'"),
    ],
    ids=str,
)
def test_what_contradicts_itself_is_refused_with_both_values(changes, message):
    x, weight, bias = leaves(5, element=torch.float32)
    given = {"weight": weight, "bias": bias, **changes}
    with pytest.raises(ArgumentError, match=message):
        ka.nn.linear_glu(x, **given)


def test_an_activation_is_one_of_a_list():
    with pytest.raises(ArgumentError, match="activation is 'mish'; expected one of relu, leaky"):
        ka.nn.linear_activation(*leaves(5), activation="mish")


def test_layers_without_columns_have_gradients_of_zeros():
    x, w = torch.randn(3, 16, requires_grad=True), torch.randn(0, 16, requires_grad=True)
    ka.nn.linear_glu(x, w, granularity="halves").sum().backward()
    assert torch.equal(x.grad, torch.zeros(3, 16)) and w.grad.shape == (0, 16)


@pytest.mark.parametrize("dynamic", [None, True])
def test_a_granularity_may_change_between_calls_of_a_graph(dynamic):
    torch._dynamo.reset()
    x, weight = torch.randn(5, 8), torch.randn(16, 8)

    def layer(x, weight, granularity):
        return ka.nn.linear_glu(x, weight, granularity=granularity)

    compiled = torch.compile(layer, fullgraph=True, backend="eager", dynamic=dynamic)
    for granularity in (4, 8, 2, "halves"):
        right = layer(x, weight, granularity)
        torch.testing.assert_close(compiled(x, weight, granularity), right)

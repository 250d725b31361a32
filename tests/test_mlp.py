"""Two linear layers with an activation between them: against torch, in eager mode and compiled."""

import pytest
import torch
from support.fusions import GLU, close
from support.mlp import INNER, LIMITS, NAMES, WHICH, gradients, leaves, of_torch
from torch.library import opcheck

import kernel_api as ka
from kernel_api.errors import ArgumentError, GradientError


def check(operands, tolerance=1e-11, layer=ka.nn.mlp, **options):
    found, wanted = layer(*operands, **options), of_torch(*operands, **options)
    close(found, wanted, tolerance)
    for one, other in zip(gradients(found, operands), gradients(wanted, operands), strict=True):
        close(one, other, tolerance)


@pytest.mark.parametrize("kind", [*GLU, *NAMES])
@pytest.mark.parametrize("bias", [False, True])
def test_the_layer_and_its_gradients_are_torchs(kind, bias):
    check(leaves(5, kind=kind, bias=bias), kind=kind, **LIMITS.get(kind, {}))


@pytest.mark.parametrize("order", ["gate_up", "up_gate"])
@pytest.mark.parametrize("granularity", [1, 8, "halves"])
def test_pairs_are_ordered_and_blocked_as_asked(order, granularity):
    check(leaves(5), order=order, granularity=granularity)


@pytest.mark.parametrize("lead", [(), (1,), (2, 3), (2, 0)], ids=str)
def test_x_may_have_any_number_of_modes(lead):
    check(leaves(*lead))


@pytest.mark.parametrize("kind", ["swiglu", "gelu"])
@pytest.mark.parametrize("without", ["K", "inner", "N"])
def test_modes_may_be_empty(kind, without):
    check(leaves(5, kind=kind, **{without: 0}), kind=kind)


@pytest.mark.parametrize("kind", ["swiglu", "gelu"])
def test_gradients_are_those_of_finite_differences(kind):
    operands = leaves(2, kind=kind, K=3, N=2)
    assert torch.autograd.gradcheck(lambda *given: ka.nn.mlp(*given, kind=kind), operands)


@pytest.mark.parametrize("element", [torch.float32, torch.bfloat16, torch.float16])
def test_other_types_are_rounded_between_products(element):
    operands = leaves(33, element=element)
    wide = [one.detach().double().requires_grad_() for one in operands]
    y, expected = ka.nn.mlp(*operands), of_torch(*wide)
    assert y.dtype is element
    norm = torch.linalg.vector_norm
    for one, other in zip(
        (y, *gradients(y, operands)), (expected, *gradients(expected, wide)), strict=True
    ):
        assert one.dtype is element
        assert norm(one.double() - other) < 4 * torch.finfo(element).eps * norm(other)


@pytest.mark.parametrize(("which", "products"), [*enumerate((1, 1, 1, 0, 0))])
def test_only_the_gradients_that_are_asked_for_are_computed(which, products, monkeypatch):
    operands = [one.detach() for one in leaves(5)]
    operands[which].requires_grad_()
    y, found = ka.nn.mlp(*operands), []
    gemm = ka.ops.gemm
    monkeypatch.setattr(ka.ops, "gemm", lambda *a, **k: found.append(1) or gemm(*a, **k))
    y.sum().backward()
    assert [one.grad is not None for one in operands] == [i == which for i in range(5)]
    assert len(found) == products


def test_what_is_kept_is_the_pre_activation_and_what_it_became():
    operands, kept = leaves(5), []
    with torch.autograd.graph.saved_tensors_hooks(lambda one: kept.append(one) or one, lambda o: o):
        ka.nn.mlp(*operands)
    own = {id(one) for one in operands}
    assert sorted(tuple(one.shape) for one in kept if id(one) not in own) == [
        (5, INNER),
        (5, 2 * INNER),
    ]
    kept.clear()
    with (
        torch.no_grad(),
        torch.autograd.graph.saved_tensors_hooks(lambda one: kept.append(one), lambda o: o),
    ):
        ka.nn.mlp(*operands)
    assert not kept


def test_a_gradient_may_be_expanded_or_strided():
    operands = leaves(5)
    for reduce in (torch.sum, lambda y: (y.t() * torch.arange(5).double()).sum()):
        found = torch.autograd.grad(reduce(ka.nn.mlp(*operands)), operands)
        wanted = torch.autograd.grad(reduce(of_torch(*operands)), operands)
        for one, other in zip(found, wanted, strict=True):
            close(one, other, 1e-12)


def test_results_may_be_changed_in_place():
    operands = leaves(2, 5)
    y, other = ka.nn.mlp(*operands), of_torch(*operands)
    y *= 2.5
    for one, wanted in zip(gradients(y, operands), gradients(2.5 * other, operands), strict=True):
        close(one, wanted, 1e-11)


def test_results_without_gradients_may_take_part_in_others():
    with torch.no_grad():
        y = ka.nn.mlp(*leaves(5))
    learning = torch.ones(9, dtype=y.dtype, requires_grad=True)
    y += learning
    y.sum().backward()
    assert torch.equal(learning.grad, torch.full((9,), 5.0, dtype=y.dtype))


@pytest.mark.parametrize(
    ("learning", "wanted"),
    [
        (("x", "w_down"), [(5, INNER), (5, 2 * INNER)]),
        (("b_up",), [(5, 2 * INNER)]),
        (("w_down", "b_down"), [(5, INNER)]),
        (("b_down",), []),
    ],
    ids=str,
)
def test_nothing_is_kept_that_no_gradient_needs(learning, wanted):
    operands, kept = [one.detach() for one in leaves(5)], []
    for name in learning:
        operands[WHICH.index(name)].requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda one: kept.append(one) or one, lambda o: o):
        y = ka.nn.mlp(*operands)
    own = {id(one) for one in operands}
    assert sorted(tuple(one.shape) for one in kept if id(one) not in own) == wanted
    given = [one for one in operands if one.requires_grad]
    exact = of_torch(*operands)
    for one, other in zip(gradients(y, given), gradients(exact, given), strict=True):
        close(one, other, 1e-11)


def test_a_gradient_of_a_gradient_is_refused():
    operands = leaves(5)
    (dx,) = torch.autograd.grad(ka.nn.mlp(*operands).square().sum(), operands[0], create_graph=True)
    with pytest.raises(GradientError, match="a gradient of an MLP is differentiated again"):
        dx.sum().backward()


def test_autocast_casts_the_operands():
    operands = leaves(5, element=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        y = ka.nn.mlp(*operands)
    assert y.dtype is torch.bfloat16
    assert {one.dtype for one in gradients(y, operands)} == {torch.float32}


# Compiled --------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["swiglu", "gelu"])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_torch_compile_takes_it_whole(backend, kind):
    torch._dynamo.reset()

    def layers(*operands):
        return 3 * ka.nn.mlp(*operands, kind=kind)

    compiled = torch.compile(layers, fullgraph=True, backend=backend)
    for rows in (5, 9):  # the second is compiled for any number
        operands = leaves(rows, kind=kind)
        found, expected = compiled(*operands), layers(*operands)
        close(found, expected, 0)
        pairs_of = zip(gradients(found, operands), gradients(expected, operands), strict=True)
        for one, other in pairs_of:
            close(one, other, 0)
        with torch.no_grad():
            close(compiled(*operands), expected, 0)


@pytest.mark.parametrize("learns", [False, True])
@pytest.mark.parametrize("kind", ["geglu", "gelu"])
def test_the_operators_are_what_torch_expects(kind, learns):
    operands = leaves(2, 3, kind=kind, bias=learns)
    given = operands if learns else (*operands, None, None)
    function = (kind, "up_gate", "32", None, None)
    opcheck(torch.ops.kernel_api.mlp, (*given, *function, learns))
    fixed = [one if one is None else one.detach() for one in given]
    y, hidden, preactivation = torch.ops.kernel_api.mlp(*fixed, *function, True)
    for kept in (hidden, None) if not learns else (hidden,):
        wanted = [True, True, kept is not None, learns, learns]
        saved = (torch.ones_like(y), *fixed, kept, preactivation)
        opcheck(torch.ops.kernel_api.mlp_backward, (*saved, wanted, *function))


def test_an_exported_layer_learns_though_it_was_exported_without_gradients():
    operands = leaves(5)

    class Layer(torch.nn.Module):
        def forward(self, *given):
            return ka.nn.mlp(*given)

    with torch.no_grad():
        program = torch.export.export(Layer(), tuple(one.detach() for one in operands))
    found = program.module()(*operands)
    for one, other in zip(
        gradients(found, operands), gradients(of_torch(*operands), operands), strict=True
    ):
        close(one, other, 1e-11)


# Refusals --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"x": torch.ones(5, 7)},
            r"x has shape \(5, 7\) and w_up \(64, 6\); expected .* \(2I, K\)",
        ),
        ({"w_up": torch.ones(6)}, r"w_up \(6,\); expected \(\.\.\., K\) and \(2I, K\)"),
        ({"w_down": torch.ones(9, 64)}, r"w_down has shape \(9, 64\); expected \(N, 32\), because"),
        ({"w_down": torch.ones(32)}, r"w_down has shape \(32,\); expected \(N, 32\)"),
        ({"b_up": torch.ones(32)}, r"b_up has shape \(32,\); expected \(64,\), the rows of w_up"),
        (
            {"b_down": torch.ones(32)},
            r"b_down has shape \(32,\); expected \(9,\), the rows of w_do",
        ),
        ({"w_down": torch.ones(9, 32, device="meta")}, "w_down is on meta but x is on cpu"),
        ({"w_down": None}, "w_down is None; expected a torch tensor"),
        ({"kind": "mish"}, "kind is 'mish'; expected one of glu, swiglu, .*, squared_relu"),
        ({"kind": "gelu", "limit": 3.0}, "limit is 3.0 and kind is 'gelu', which has none"),
        ({"limit": 3.0}, "limit is 3.0 and kind is 'swiglu'"),
        ({"kind": "geglu_clamped", "limit": torch.tensor(3.0)}, "limit is a tensor; expected a n"),
        ({"granularity": 48}, "w_up has 2I = 64; pairs of 48 columns need a multiple of 96"),
        ({"order": "down_up"}, "order is 'down_up'"),
    ],
    ids=str,
)
def test_what_contradicts_itself_is_refused_with_both_values(changes, message):
    given = dict(zip(WHICH, leaves(5, element=torch.float32), strict=True))
    with pytest.raises(ArgumentError, match=message):
        ka.nn.mlp(**{**given, **changes})

"""Gradients of gradients, which no kernel computes: refused in eager mode, whatever the loss."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import kernel_api as ka
from kernel_api.errors import GradientError

E, CHOSEN = 4, torch.tensor([[0, 1], [3, 1], [2, 0], [1, 3], [0, 2]])


def experts(x, weight, up, down):
    return ka.nn.moe(x, CHOSEN, weight, up, down)


def biased_attention(q, k, v, bias, sink):
    return ka.nn.attention(q, k, v, bias=bias, sink=sink)


def norm_of_a_sum(x, weight, residual):
    return ka.nn.rmsnorm(x, weight, residual=residual).out


#: Functions, with the shapes of what they are differentiated by.
FUNCTIONS = {
    "attention": (ka.nn.attention, [(1, 2, 5, 8)] * 3),
    "attention with more": (biased_attention, [*[(1, 2, 5, 8)] * 3, (1, 2, 5, 5), (2,)]),
    "sdpa": (ka.ops.sdpa, [(1, 2, 5, 8)] * 3),
    "rmsnorm": (ka.nn.rmsnorm, [(5, 6), (6,)]),
    "rmsnorm of a sum": (norm_of_a_sum, [(5, 6), (6,), (5, 6)]),
    "layernorm": (ka.nn.layernorm, [(5, 6), (6,), (6,)]),
    "linear_activation": (ka.nn.linear_activation, [(5, 6), (7, 6), (7,)]),
    "linear_swiglu": (ka.nn.linear_swiglu, [(5, 6), (64, 6)]),
    "mlp": (ka.nn.mlp, [(5, 6), (64, 6), (7, 32), (64,), (7,)]),
    "moe": (experts, [(5, 6), (5, 2), (E, 6, 64), (E, 32, 6)]),
}
#: That the gradient of the first loss depends on the operands through what is saved alone, and
#: through the gradient of the result as well.
LOSSES = {"a sum": torch.sum, "a sum of squares": lambda y: y.square().sum()}

each_function = pytest.mark.parametrize(
    ("function", "shapes"), FUNCTIONS.values(), ids=FUNCTIONS.keys()
)
each_loss = pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES.keys())


def leaves(shapes):
    torch.manual_seed(0)
    return [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]


@each_loss
@each_function
def test_a_penalty_on_a_gradient_is_refused_for_every_input(function, shapes, loss):
    for by in range(len(shapes)):
        operands = leaves(shapes)
        first = loss(function(*operands))
        gradients = torch.autograd.grad(first, operands, create_graph=True)
        penalised = first + sum(one.square().sum() for one in gradients)
        with pytest.raises(GradientError, match=r"differentiated again.*without create_graph"):
            torch.autograd.grad(penalised, operands[by])


@each_loss
@each_function
def test_a_gradient_is_refused_as_a_loss_of_its_own(function, shapes, loss):
    operands = leaves(shapes)
    gradient, *_ = torch.autograd.grad(loss(function(*operands)), operands, create_graph=True)
    with pytest.raises(GradientError):
        gradient.sum().backward()


@pytest.mark.parametrize("learning", range(4))
def test_it_does_not_matter_which_operand_learns(learning):
    function, shapes = FUNCTIONS["moe"]
    operands = [one.detach() for one in leaves(shapes)]
    operands[learning].requires_grad_()
    loss = function(*operands).square().sum()
    (gradient,) = torch.autograd.grad(loss, operands[learning], create_graph=True)
    with pytest.raises(GradientError, match="a gradient of a layer of experts"):
        torch.autograd.grad(loss + gradient.square().sum(), operands[learning])


@each_function
def test_a_graph_of_the_backward_pass_changes_no_gradient(function, shapes):
    operands = leaves(shapes)
    plain = torch.autograd.grad(function(*operands).square().sum(), operands)
    loss = function(*operands).square().sum()
    recorded = torch.autograd.grad(loss, operands, create_graph=True)
    for one, other in zip(plain, recorded, strict=True):
        assert torch.equal(one, other)
        assert not one.requires_grad
    for other in recorded:  # they may be changed, as those of torch, which terms of a sum share
        other.mul_(2)
    again = torch.autograd.grad(loss + 2 * loss.detach(), operands)
    for one, other in zip(plain, again, strict=True):
        assert torch.equal(one, other)


def test_a_checkpointed_layer_is_refused_too():
    x = leaves([(5, 6)])[0]
    loss = checkpoint(ka.nn.rmsnorm, x, use_reentrant=False).square().sum()
    (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
    with pytest.raises(GradientError):
        torch.autograd.grad(gradient.square().sum(), x)

"""The layer of experts of 8 bits: beside the same layer of what its experts hold."""

import pytest
import torch

import kernel_api as ka
from kernel_api.errors import ArgumentError, GradientError

BF16, F8 = torch.bfloat16, torch.float8_e4m3fn
E, K, INNER = 5, 256, 384
INDEX = torch.tensor([[0, 3], [4, 4], [-1, 2], [1, 5], [0, 0], [2, 3], [-7, 9]])


def experts(N, K, seed):
    """(E, K, N) in blocks of 128 x 128, and what they hold."""
    random = torch.Generator().manual_seed(seed)
    weight = torch.randn(E, N, K, generator=random) / K**0.5
    blocks = weight.unflatten(1, (-1, 128)).unflatten(3, (-1, 128))
    scale = blocks.abs().amax((2, 4), keepdim=True) / 448
    stored = (blocks / scale).to(F8)
    held = (stored.float() * scale).view(weight.shape)
    operand = ka.ScaledOperand(
        stored.view(weight.shape).mT, scale[:, :, 0, :, 0].mT, ka.ScaleMode.BLOCK_128x128
    )
    return operand, held.mT


UP, UP_HELD = experts(2 * INNER, K, 1)
DOWN, DOWN_HELD = experts(K, INNER, 2)


def tokens(element=BF16):
    random = torch.Generator().manual_seed(3)
    x = torch.randn(len(INDEX), K, generator=random).to(element)
    return x, INDEX, torch.rand(INDEX.shape, generator=random)


@pytest.mark.parametrize("how", [{}, {"granularity": 32, "order": "up_gate"}, {"kind": "geglu"}])
@pytest.mark.parametrize("element", [BF16, torch.float32])
def test_the_layer_is_that_of_what_its_experts_hold(element, how):
    x, *routed = tokens(element)
    found = ka.nn.moe(x, *routed, UP, DOWN, **how)
    assert found.dtype is element
    expected = ka.nn.moe(x.float(), *routed, UP_HELD, DOWN_HELD, **how)
    apart = (found.float() - expected).norm() / expected.norm()
    assert apart < 0.06  # twice 3 bits of 8-bit floats, of tokens and of what is between
    assert not found[-1].any()  # without an expert


def test_compiled_graphs_break_around_it_and_compute_the_same():
    operands = (*tokens(), UP, DOWN)
    compiled = torch.compile(ka.nn.moe, backend="eager")
    assert torch.equal(compiled(*operands), ka.nn.moe(*operands))


def whole(operand):
    return ka.ScaledOperand(operand.tensor.to(torch.int8), operand.scale.tensor, operand.mode)


def by_row(operand):
    scale = torch.ones(E, operand.shape[-1])
    return ka.ScaledOperand(operand.tensor, scale, ka.ScaleMode.PER_ROW)


@pytest.mark.parametrize(
    ("changed", "error", "words"),
    [
        ({"w_up": UP_HELD}, ArgumentError, "w_down is a ScaledOperand and w_up is none"),
        ({"w_down": DOWN_HELD}, ArgumentError, "w_up is a ScaledOperand and w_down is none"),
        ({"w_up": whole(UP)}, ArgumentError, "w_up is torch.int8; expected 8-bit floats"),
        ({"w_up": by_row(UP)}, ArgumentError, "w_up carries a per_row scale; expected block_128"),
        ({"w_down": by_row(DOWN)}, ArgumentError, "w_down carries a per_row scale"),
        ({"x": tokens(torch.float64)[0]}, ArgumentError, "x is torch.float64; beside experts of 8"),
        ({"x": tokens()[0].requires_grad_()}, GradientError, "experts of 8 bits have no gradients"),
        ({"x": tokens()[0][:, :200]}, ArgumentError, r"expected \(E, 200, 2I\)"),
    ],
)
def test_what_contradicts_itself_is_refused(changed, error, words):
    names = ("x", "expert_index", "expert_weight", "w_up", "w_down")
    given = dict(zip(names, (*tokens(), UP, DOWN), strict=True))
    with pytest.raises(error, match=words):
        ka.nn.moe(**{**given, **changed})


def test_half_blocks_of_scales_are_refused():
    x, *routed = tokens()
    up = ka.ScaledOperand(UP.tensor[..., :640], UP.scale.tensor[..., :5], UP.mode)
    down = ka.ScaledOperand(DOWN.tensor[:, :320], DOWN.scale.tensor[:, :3], DOWN.mode)
    with pytest.raises(ArgumentError, match="w_up has 2I = 640; expected a multiple of 256"):
        ka.nn.moe(x, *routed, up, down)


def test_gradients_are_refused_only_where_they_are_asked_for():
    x, *routed = tokens()
    with torch.no_grad():
        ka.nn.moe(x.requires_grad_(), *routed, UP, DOWN)

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


def by_rows(N, K, seed, mode=ka.ScaleMode.PER_ROW, element=F8):
    """The same with a scale per column or expert, which differ by far."""
    random = torch.Generator().manual_seed(seed)
    weight = torch.randn(E, N, K, generator=random) / K**0.5
    weight *= torch.logspace(-2, 2, E).view(E, 1, 1)
    top = 127 if element is torch.int8 else 448
    modes = 2 if mode is ka.ScaleMode.PER_ROW else (1, 2)
    scale = weight.abs().amax(modes, keepdim=True) / top
    stored = weight / scale
    stored = (stored.round() if element is torch.int8 else stored).to(element)
    held = stored.float() * scale
    return ka.ScaledOperand(stored.mT, scale.flatten(1).squeeze(1), mode), held.mT


UP, UP_HELD = experts(2 * INNER, K, 1)
DOWN, DOWN_HELD = experts(K, INNER, 2)
PER_TENSOR, PER_ROW = ka.ScaleMode.PER_TENSOR, ka.ScaleMode.PER_ROW
LAYERS = {
    "blocks": (experts(2 * INNER, K, 1), experts(K, INNER, 2)),
    "rows": (by_rows(2 * INNER, K, 1), by_rows(K, INNER, 2)),
    "tensors": (by_rows(2 * INNER, K, 1, PER_TENSOR), by_rows(K, INNER, 2, PER_TENSOR)),
    "integers": (by_rows(2 * INNER, K, 1, element=torch.int8),
                 by_rows(K, INNER, 2, PER_TENSOR, torch.int8)),
    "blocks, then rows": (experts(2 * INNER, K, 1), by_rows(K, INNER, 2)),
    "rows, then blocks": (by_rows(2 * INNER, K, 1), experts(K, INNER, 2)),
}  # fmt: skip


def tokens(element=BF16):
    random = torch.Generator().manual_seed(3)
    x = torch.randn(len(INDEX), K, generator=random).to(element)
    return x, INDEX, torch.rand(INDEX.shape, generator=random)


HOW = [{}, {"granularity": 32, "order": "up_gate"}, {"kind": "geglu"}]


@pytest.mark.parametrize(
    ("scales", "how"), [*(("blocks", how) for how in HOW), *((name, {}) for name in LAYERS)]
)
@pytest.mark.parametrize("element", [BF16, torch.float32])
def test_the_layer_is_that_of_what_its_experts_hold(element, scales, how):
    x, *routed = tokens(element)
    (up, up_held), (down, down_held) = LAYERS[scales]
    found = ka.nn.moe(x, *routed, up, down, **how)
    assert found.dtype is element
    expected = ka.nn.moe(x.float(), *routed, up_held, down_held, **how)
    for one, exact in zip(found.float(), expected, strict=True):  # whose experts differ by far
        # Twice 3 bits of 8-bit floats, of tokens and of what is between; rounding in bfloat16.
        assert (one - exact).norm() <= 0.06 * exact.norm()
    assert not found[-1].any()  # without an expert


@pytest.mark.parametrize("scales", LAYERS)
def test_there_may_be_no_tokens(scales):
    experts = (operand for operand, _ in LAYERS[scales])
    assert ka.nn.moe(*(one[:0] for one in tokens()), *experts).shape == (0, K)


def test_tokens_may_have_no_columns():
    x, *routed = tokens()
    (up, _), (down, _) = by_rows(2 * 32, 8, 1), by_rows(8, 32, 2)
    up = ka.ScaledOperand(up.tensor[:, :0], up.scale.tensor, up.mode)
    down = ka.ScaledOperand(down.tensor[..., :0], down.scale.tensor[:, :0], down.mode)
    assert ka.nn.moe(x[:, :0], *routed, up, down).shape == (len(x), 0)


def test_columns_may_be_any_number_beside_scales_of_rows():
    """That none of the words is of which kernels move rows."""
    x, *routed = tokens()
    (up, up_held), (down, down_held) = by_rows(2 * 31, 50, 1), by_rows(50, 31, 2)
    found = ka.nn.moe(x[:, :50], *routed, up, down)
    expected = ka.nn.moe(x[:, :50].float(), *routed, up_held, down_held)
    assert (found.float() - expected).norm() <= 0.06 * expected.norm()


@pytest.mark.parametrize("scales", LAYERS)
def test_it_is_part_of_one_graph(scales):
    torch._dynamo.reset()
    operands = (*tokens(), *(operand for operand, _ in LAYERS[scales]))
    compiled = torch.compile(ka.nn.moe, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(*operands), ka.nn.moe(*operands))


@pytest.mark.parametrize("scales", ["blocks", "rows"])
def test_it_is_part_of_what_may_not_write(scales):
    torch._dynamo.reset()
    (up, _), (down, _) = LAYERS[scales]

    def function(x, index, weight):
        def layer(x, index, weight):
            return ka.nn.moe(x, index, weight, up, down)

        return torch.cond(x[0, 0] > 1e9, lambda x, i, w: x * 2, layer, (x, index, weight))

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(*tokens()), ka.nn.moe(*tokens(), up, down))


def whole(operand):
    return ka.ScaledOperand(operand.tensor.to(torch.int8), operand.scale.tensor, operand.mode)


def rescaled(operand, *shape):
    return ka.ScaledOperand(operand.tensor, torch.ones(shape), PER_ROW)


def of_tokens(operand):
    return ka.ScaledOperand(operand.tensor, torch.ones(E, K), ka.ScaleMode.BLOCK_1x128)


def learning(operand):
    scale = operand.scale.tensor.clone().requires_grad_()
    return ka.ScaledOperand(operand.tensor, scale, operand.mode)


def halved(operand):
    return ka.ScaledOperand(operand.tensor.half(), operand.scale.tensor, operand.mode)


@pytest.mark.parametrize(
    ("changed", "error", "words"),
    [
        ({"w_up": UP_HELD}, ArgumentError, "w_down is a ScaledOperand and w_up is none"),
        ({"w_down": DOWN_HELD}, ArgumentError, "w_up is a ScaledOperand and w_down is none"),
        (
            {"w_up": whole(UP)},
            ArgumentError,
            "w_up is int8 with a block_128x128 scale; expected one",
        ),
        ({"w_up": halved(UP)}, ArgumentError, "w_up is torch.float16; expected 8-bit floats or"),
        ({"w_up": of_tokens(UP)}, ArgumentError, "w_up carries a block_1x128 scale; that is for"),
        (
            {"w_down": rescaled(DOWN, E, 7)},
            ArgumentError,
            r"w_down's per_row .* \(5, 256\)",
        ),
        ({"w_up": learning(UP)}, GradientError, "experts of 8 bits have no gradients"),
        ({"w_down": whole(DOWN)}, ArgumentError, "w_down is int8 with a block_128x128 scale"),
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

"""Convolutions of graphs, and their gradients."""

import pytest
import torch
from support.graph_operations import Nodes, close, random

from kernel_api.errors import GraphError
from kernel_api.graph._enums import convolution_mode

CONVOLUTIONS = {1: torch.nn.functional.conv1d, 2: torch.nn.functional.conv2d,
                3: torch.nn.functional.conv3d}  # fmt: skip

#: Spatial extents, those of the filter, groups, and options.
CASES = [
    ((9,), (3,), 1, {}),
    ((8, 7), (3, 2), 1, {"padding": [1, 1], "stride": [1, 1], "dilation": [1, 1]}),
    ((8, 7), (3, 3), 2, {"padding": 1, "stride": [2, 3]}),
    ((11, 9), (2, 3), 3, {"pre_padding": [1, 0], "post_padding": [2, 3], "dilation": [2, 1]}),
    ((8, 7), (3, 3), 1, {"convolution_mode": convolution_mode.CONVOLUTION, "padding": [2, 0]}),
    ((5, 6, 4), (2, 3, 2), 1, {"padding": [1, 0, 1], "stride": [1, 2, 1]}),
]


def tensors(image, filter, groups):
    N, C, K = 2, 2 * groups, 3 * groups
    channels_last = random(N, *image, C).movedim(-1, 1)
    return channels_last, random(K, C // groups, *filter, seed=1)


def expected(image, weight, groups, options):
    modes = weight.dim() - 2

    def each(name, default):
        given = options.get(name, default)
        return [given] * modes if isinstance(given, int) else given

    pre, post = (each(n, each("padding", 0)) for n in ("pre_padding", "post_padding"))
    sides = [side for pair in zip(pre[::-1], post[::-1], strict=True) for side in pair]
    if options.get("convolution_mode") is convolution_mode.CONVOLUTION:
        weight = weight.flip(tuple(range(2, weight.dim())))
    return CONVOLUTIONS[modes](
        torch.nn.functional.pad(image, sides), weight, stride=each("stride", 1),
        dilation=each("dilation", 1), groups=groups,
    )  # fmt: skip


@pytest.mark.parametrize(("image", "filter", "groups", "options"), CASES)
def test_convolutions(image, filter, groups, options):
    x, w = tensors(image, filter, groups)
    g = Nodes()
    y = g.conv_fprop(image=g.given(x), weight=g.given(w), **options)
    found = g.compute(y)
    exact = expected(x.double(), w.double(), groups, options)
    close(found, exact, expected(x, w, groups, options))
    assert y.stride[1] == 1 and y.stride[-1] == y.dim[1]


@pytest.mark.parametrize(("image", "filter", "groups", "options"), CASES)
def test_gradients_of_convolutions(image, filter, groups, options):
    x, w = tensors(image, filter, groups)
    leaves = [one.double().requires_grad_() for one in (x, w)]
    y = expected(*leaves, groups, options)
    loss = random(*y.shape, seed=2)
    exact = torch.autograd.grad(y, leaves, loss.double())
    g = Nodes()
    dx = g.conv_dgrad(loss=g.given(loss), filter=g.given(w), **options)
    dw = g.conv_wgrad(image=g.given(x), loss=g.given(loss), **options)
    if groups > 1 or options.get("stride", [1]) not in ([1], [1, 1]):
        dx.set_dim(x.shape)
        dw.set_dim(w.shape)
    found = g.compute(dx, dw)
    for value, one in zip(found, exact, strict=True):
        floor = 64 * torch.finfo(torch.float32).eps * float(one.abs().max() + 1)
        assert value.shape == one.shape and float((value - one).abs().max()) < floor


def test_calls_of_the_reference_document():
    x, w, dy = random(2, 3, 8, 7), random(4, 3, 3, 3), random(2, 4, 8, 7)
    g = Nodes()
    X, W, DY = map(g.given, (x, w, dy))
    y = g.conv_fprop(image=X, weight=W, padding=[1, 1], stride=[1, 1], dilation=[1, 1])
    dx = g.conv_dgrad(weight=W, loss=DY, padding=[1, 1])
    dw = g.conv_wgrad(image=X, loss=DY, padding=[1, 1])
    g.infer()
    assert (y.dim, dx.dim, dw.dim) == (dy.shape, x.shape, w.shape)


def test_convolutions_of_integers_are_exact():
    generator = torch.Generator().manual_seed(0)
    x, w = (
        torch.randint(-128, 128, shape, generator=generator, dtype=torch.int8)
        for shape in ((2, 5, 9), (3, 5, 2))
    )
    g = Nodes()
    found = g.compute(g.conv_fprop(g.given(x), g.given(w)))
    exact = torch.nn.functional.conv1d(x.double(), w.double())
    assert torch.equal(found.double(), exact)


def test_convolutions_say_what_does_not_fit():
    g = Nodes()
    x, w, dy = (g.unknown(dim) for dim in ((2, 3, 8, 8), (4, 3, 3, 3), (2, 4, 4, 4)))
    with pytest.raises(GraphError, match="padding = 1 is given beside pre_padding"):
        g.conv_fprop(x, w, padding=1, pre_padding=[1, 1])
    with pytest.raises(GraphError, match="filter= or weight="):
        g.conv_dgrad(loss=dy, filter=w, weight=w)
    for add, words in (
        (lambda: g.conv_fprop(x, w, stride=[1]), "expected 2 numbers"),
        (lambda: g.conv_fprop(x, g.unknown((4, 2, 3, 3))), "C = 3 channels"),
        (lambda: g.conv_fprop(x, g.unknown((4, 3, 9, 3))), "smaller than its filter"),
        (lambda: g.conv_fprop(g.unknown((3, 4)), g.unknown((3, 4))), "1 to 3"),
        (lambda: g.conv_fprop(x, g.unknown((4, 3, 3))), "as many modes of each"),
        (lambda: g.conv_dgrad(dy, w, stride=2, padding=1), "no dim, and a stride of .* call set_d"),
        (lambda: g.conv_wgrad(x, dy, stride=2, padding=1), "no dim, and a stride of .* call set_d"),
        (
            lambda: g.conv_dgrad(dy, w, stride=2, padding=1).set_dim([2, 3, 9, 8]),
            r"which give \[2, 4, 5, 4\], but \[2, 4, 4, 4\]",
        ),
        (lambda: g.conv_fprop(x, g.unknown((4, 3, 0, 3))), "spatial extents of 1 or more"),
        (lambda: g.conv_fprop(g.unknown((2, 0, 8, 8)), g.unknown((4, 0, 3, 3))), "C at least 1"),
        (lambda: g.conv_dgrad(dy, w, padding=9), "spatial extents of 1 or more"),
        (lambda: g.conv_wgrad(dy, x), "spatial extents of 1 or more"),
    ):
        g.nodes.clear()
        add()
        with pytest.raises(GraphError, match=words):
            g.infer()


@pytest.mark.parametrize(("N", "K"), [(0, 4), (2, 0), (0, 0)])
def test_convolutions_of_nothing(N, K):
    x, w, dy = random(N, 3, 8, 7), random(K, 3, 3, 2), random(N, K, 6, 6)
    g = Nodes()
    y = g.conv_fprop(g.given(x), g.given(w))
    dx = g.conv_dgrad(g.given(dy), g.given(w))
    dw = g.conv_wgrad(g.given(x), g.given(dy))
    for found, like in zip(g.compute(y, dx, dw), (dy, x, w), strict=True):
        assert torch.equal(found, torch.zeros_like(like))

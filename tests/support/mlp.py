"""Two linear layers with an activation between them, and the same by torch."""

import torch
from torch.nn.functional import linear

from support.fusions import ACTIVATIONS, GLU, pairs

K, INNER, N = 6, 32, 9
NAMES = [name for name in ACTIVATIONS if name is not None]
LIMITS = {"geglu_clamped": {"limit": 0.8, "offset": 0.3}}
WHICH = ("x", "w_up", "w_down", "b_up", "b_down")


def leaves(*lead, kind="swiglu", bias=True, element=torch.float64, inner=INNER, K=K, N=N):
    generator = torch.Generator().manual_seed(0)
    wide = inner * (2 if kind in GLU else 1)
    shapes = [(*lead, K), (wide, K), (N, inner), *([(wide,), (N,)] if bias else [])]
    drawn = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    return [one.to(element).requires_grad_() for one in drawn]


def of_torch(x, w_up, w_down, b_up=None, b_down=None, kind="swiglu", **options):
    z = linear(x, w_up, b_up)
    if kind in GLU:
        order, granularity = options.pop("order", "up_gate"), options.pop("granularity", 32)
        hidden = GLU[kind](*pairs(z, order, granularity), **options)
    else:
        hidden = ACTIVATIONS[kind](z)
    return linear(hidden, w_down, b_down)


def gradients(y, operands):
    generator = torch.Generator().manual_seed(1)
    dy = torch.randn(y.shape, generator=generator, dtype=torch.float64).to(y.device, y.dtype)
    return torch.autograd.grad(y, operands, dy)

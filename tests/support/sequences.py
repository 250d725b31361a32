"""Calls of several launches that are repeated as one, and how to see that they are."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import kernel_api as ka
from kernel_api import _again


class ATorchMode(TorchDispatchMode):
    """Under one that is not ours nothing is remembered: each launch is made for itself."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


def repeated():
    """The sequences that are remembered; none if a call was more than launches."""
    found = list(_again._sequences.values())
    assert found
    return [] if any(isinstance(one, int) for one in found) else found


def gradients(operands):
    """What a layer of experts computes of them, and all gradients."""
    x, index, *others = (one.detach() for one in operands)
    leaves = [one.requires_grad_() for one in (x, *others)]
    y = ka.nn.moe(x, index, *others)
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y)
    return y, *torch.autograd.grad(y, leaves, dy)


def check_gradients_as_one(layer_of_seed, long_way):
    """Of three layers that look alike the first runs the long way; each is that of its own
    launches."""
    _again._sequences.clear()
    for seed in range(3):
        operands = layer_of_seed(seed)
        del long_way[:]
        found = gradients(operands)
        assert bool(long_way) == (seed == 0)
        with ATorchMode():
            alone = gradients(operands)
        for one, other in zip(found, alone, strict=True):
            assert torch.equal(one, other)
            assert one.stride() == other.stride()
    assert len(repeated()) == 2

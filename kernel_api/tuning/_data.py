"""Arguments with random data, made of their description."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kernel_api._description import rebuilt
from kernel_api.arguments import Arguments, ScaledOperand
from kernel_api.arguments.experts import memory_of
from kernel_api.operands import without_repetitions

if TYPE_CHECKING:
    from kernel_api.operands import Operand

#: Operands that are the reciprocal of a root: random signs make no sense.
_POSITIVE = ("rstd",)


def random_arguments(description: dict[str, Any], device: str, seed: int) -> Arguments:
    """What :func:`kernel_api._description.described` described, on a device, with random inputs.

    Strides and alignment are those described. Floats are normal, scales and what is a reciprocal
    root lie between 0.5 and 1.5, integers are of their full range if they have 8 bits, else -9
    to 9; what is a place in other operands is one.
    """
    import torch

    args = rebuilt(description, device)
    random = torch.Generator(device).manual_seed(seed)
    outputs = args.outputs
    for name, operand in args.named_operands.items():
        if name not in outputs:
            for part in memory_of(operand):
                _fill(part, random, positive=name in _POSITIVE)
        if isinstance(operand, ScaledOperand):
            _fill(operand.scale, random, positive=True)
    args.draw_indices(random)
    return args


def _fill(operand: Operand, random: Any, positive: bool) -> None:
    import torch

    tensor = without_repetitions(operand)
    shape, device = tensor.shape, tensor.device
    if tensor.dtype is getattr(torch, "float8_e8m0fnu", None):
        exponents = torch.randint(124, 131, shape, generator=random, device=device)
        tensor.view(torch.uint8).copy_(exponents)
    elif tensor.dtype.is_floating_point:
        wide = torch.float64 if tensor.dtype is torch.float64 else torch.float32
        draw = torch.rand if positive else torch.randn
        drawn = draw(shape, generator=random, device=device, dtype=wide)
        tensor.copy_(drawn + 0.5 if positive else drawn)
    elif tensor.dtype.is_complex:
        tensor.copy_(torch.randn(shape, generator=random, device=device, dtype=tensor.dtype))
    else:
        low, high = _range(tensor.dtype)
        tensor.copy_(torch.randint(low, high, shape, generator=random, device=device))


def _range(element: Any) -> tuple[int, int]:
    import torch

    if element is torch.bool:
        return 0, 2
    limits = torch.iinfo(element)
    if limits.bits == 8:
        return limits.min, limits.max + 1
    return max(limits.min, -9), 10

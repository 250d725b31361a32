"""Arguments that a grouped kernel's metadata asks for."""

from __future__ import annotations

from typing import Any

import torch

import kernel_api as ka
from kernel_api.arguments.grouped import GroupedGemmArguments
from support.data import fill, strided_empty, with_scales

#: Groups, where a test asks for no number of them.
GROUPS = 3


def offsets_of(tokens: int, groups: int) -> torch.Tensor:
    """Ends of groups of different sizes, with some tokens left behind the last."""
    ends = [tokens * (place + 1) ** 2 // (groups + 1) ** 2 for place in range(groups)]
    return torch.tensor(ends, dtype=torch.int32)


def arguments_for(
    kernel: ka.Kernel,
    M: int,
    N: int,
    K: int,
    L: int | None = None,
    *,
    device: Any = "cpu",
    values: str = "random",
    seed: int = 0,
) -> GroupedGemmArguments:
    """See :func:`support.data.arguments_for`. L: Groups; M or K: tokens, those without one too."""
    operands: Any = kernel.metadata.operands
    batched, tokens = ("B", M) if operands.ragged == "M" else ("out", K)
    groups, letters = L or GROUPS, {"M": M, "N": N, "K": K}
    tensors: dict[str, Any] = {}
    for place, name in enumerate(("A", "B", "out")):
        asked = operands.tensors[name]
        shape = [letters[letter] for letter in ka.GemmArguments.modes[name]]
        extent = shape[asked.unit_mode or -1]
        pitch = -(-max(extent, 2) // asked.divisibility) * asked.divisibility
        layout = "n" if asked.unit_mode == -2 else "t"
        element = asked.dtype.torch if asked.dtype is not None else torch.float32
        batch = [groups] if name == batched else []
        tensor = strided_empty(batch + shape, element, layout, pad=pitch - extent, device=device)
        if name != "out" and tensor.device.type != "meta":
            fill(tensor, 2 * seed + place, values)
        tensors[name] = tensor
    multiplied_as = operands.multiplication_type
    options = {"fp32_precision": multiplied_as.short if multiplied_as is not None else None}

    def made(A: Any, B: Any, out: Any, **further: Any) -> GroupedGemmArguments:
        offsets = offsets_of(tokens, groups).to(device)
        return GroupedGemmArguments(
            A, B, out, offsets, operands.accumulator_type, **options, **further
        )

    dense = made(tensors["A"], tensors["B"], tensors["out"])
    scales = {name: asked.scale for name, asked in operands.tensors.items()}
    if any(scales.values()):
        dense = with_scales(dense, scales, seed)
    if operands.experts != "pointers":
        return dense
    tensors[batched] = list(tensors[batched].unbind())
    further = {"B_scale": dense.B.scale} if scales["B"] else {}
    return made(dense.A, tensors["B"], tensors["out"], **further)

"""Arguments of GEMM kernels that are as awkward as the kernels allow."""

from __future__ import annotations

from typing import Any

import kernel_api as ka
from support.data import fill, strided_empty, supported_sizes, with_scales
from support.ptx.gemm import storage_bytes


def leading_stride(extent: int, divisibility: int) -> int:
    """Longer than needed, and no more divisible than asked."""
    padded = extent + 1
    return padded + (divisibility - padded) % (2 * divisibility)


def awkward_arguments(
    kernel: Any,
    M: int,
    N: int,
    K: int,
    batch: int | None = None,
    *,
    values: str,
    seed: int = 0,
    broadcast: str | None = None,
) -> ka.GemmArguments:
    """Rows and outputs that are surrounded by NaN, at no more than the alignment that is asked.

    Args:
        batch: None for operands without that mode.
        broadcast: The operand that has but one batch, or None.
    """
    M, N, K = supported_sizes(kernel, M, N, K)
    extents = {"M": M, "N": N, "K": K}
    tensors = []
    for index, (operand, asked) in enumerate(kernel.metadata.operands.tensors.items()):
        shape = [extents[letter] for letter in ka.GemmArguments.modes[operand]]
        if batch is not None:
            shape.insert(0, 1 if operand == broadcast else batch)
        unit = shape[asked.unit_mode]
        tensor = strided_empty(
            shape,
            asked.dtype.torch,
            "t" if asked.unit_mode == -1 else "n",
            pad=leading_stride(unit, asked.divisibility) - unit,
        )
        storage_bytes(tensor)[:] = 0xFF
        if operand != "out":
            fill(tensor, 2 * seed + index, values)
        if operand == broadcast:
            tensor = tensor.expand(batch, *shape[1:])
        tensors.append(tensor)
    operands = kernel.metadata.operands
    multiplied_as = operands.multiplication_type
    args = ka.GemmArguments(
        *tensors,
        operands.accumulator_type,
        fp32_precision=multiplied_as.short if multiplied_as is not None else None,
    )
    scales = {name: asked.scale for name, asked in operands.tensors.items()}
    return with_scales(args, scales, seed) if any(scales.values()) else args

"""Matrices in units of scales, as products of 8 bits take them."""

from __future__ import annotations

from typing import Any

from kernel_api.arguments import ElementwiseArguments
from kernel_api.errors import ArgumentError
from kernel_api.fusions._shared import (
    above_0,
    batches,
    epilogue_of,
    matrix,
    one_of,
    required,
    rows,
    shaped,
)
from kernel_api.fusions._store import MODES, quantized, written_scale


def quantize(
    x: Any, *, out: Any, scale: Any, mode: str = "block", amax: Any = None
) -> ElementwiseArguments:
    """out = round(x / scale), so that x ≈ out × scale: :func:`gemm_quantize` of a matrix that is
    there.

    Args:
        x: (M, N), or (L, M, N).
        out, scale, mode, amax: As there, but that kernels compute ``"row"`` of any number of
            whole vectors of columns (16 bytes), of one matrix and without ``amax``.
    """
    x = matrix(x, "x")
    one_of("mode", mode, MODES)
    out = required("out", out, x.shape)
    reads: dict[str, Any] = {}
    writes: dict[str, Any] = {"amax": shaped("amax", amax, (), batches(x))}
    if mode == "tensor":
        if scale is None:
            raise ArgumentError("scale is None; it is read if mode is 'tensor'")
        reads["scale"] = above_0("scale", scale)
    else:
        writes["scale"] = written_scale(mode, scale, rows(x), x.shape[-1], "x")
    epilogue = epilogue_of(quantized(mode, out), reads, writes)
    return ElementwiseArguments(x, out, epilogue=epilogue)

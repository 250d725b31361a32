"""What a user has without this package: the vendor's libraries through torch, and quack."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from problems import Problem

import kernel_api as ka
from kernel_api.dtypes import dtype

#: From arguments to a callable that computes them.
Peer = Callable[[ka.GemmArguments], Callable[[], Any]]


def peers_of(problem: Problem) -> dict[str, Peer]:
    """The peers of a problem by name; those that turn out not to take it are left out later."""
    element = dtype(problem.element)
    if element.is_integer:
        return {"torch._int_mm": _int_mm}
    if problem.scales:
        return {"torch._scaled_mm": scaled_mm}
    if element.bits == 32:
        return {"torch.mm (tf32)": _mm}
    found: dict[str, Peer] = {"torch.mm": _mm}
    if importlib.util.find_spec("quack") is not None:
        found["quack"] = _quack
    return found


def _mm(args: ka.GemmArguments) -> Callable[[], Any]:
    A, B, out = args.tensors
    if out.dtype is not A.dtype:
        return functools.partial(torch.mm, A, B, out_dtype=out.dtype, out=out)
    if A.dtype is not torch.float32:
        return functools.partial(torch.mm, A, B, out=out)
    # For the whole process: setting it around every call would be timed, too.
    torch.set_float32_matmul_precision("high")
    return functools.partial(torch.mm, A, B, out=out)


def _int_mm(args: ka.GemmArguments) -> Callable[[], Any]:
    A, B, out = args.tensors
    return functools.partial(torch._int_mm, A, B, out=out)


def scaled_mm(args: Any) -> Callable[[], Any]:
    A, B, out = args.tensors
    scale_a, scale_b = args.A.scale.tensor, args.B.scale.tensor
    if args.A.mode is ka.ScaleMode.PER_ROW:
        scale_a, scale_b = scale_a.unsqueeze(1), scale_b.unsqueeze(0)
    elif args.A.mode is ka.ScaleMode.BLOCK_1x128:
        # cuBLAS reads both along M and N, and wants them stored the other way round.
        scale_a, scale_b = scale_a.t().contiguous().t(), scale_b.t().contiguous().t()
    return functools.partial(torch._scaled_mm, A, B, scale_a, scale_b, out_dtype=out.dtype, out=out)


def _quack(args: ka.GemmArguments) -> Callable[[], Any]:
    """Its default configuration, as someone gets it who does not tune."""
    from quack.gemm_interface import gemm

    A, B, out = args.tensors
    return functools.partial(gemm, A, B, out=out, tuned=False)

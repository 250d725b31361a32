"""Suite gemm-fp8: e4m3 with scales per tensor, per row, and in blocks, beside torch._scaled_mm.

    python benchmarks/gemm_fp8.py [--only "per tensor"] [--candidates N | --all] [--seconds S]

Where the scales are finer than per tensor, our best kernel for one scale per tensor is timed in
the same run, on the same stored values: ``per_tensor_us``. Where they are not, cuBLAS is timed a
second time, accumulating in less than float32: ``fast_accumulation_us``.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import harness
import peers
import rows
import suite
import torch
from problems import Problem

import kernel_api as ka

SQUARES = (8192, 4096)
#: Layers of DeepSeek-V3, which stores its weights in blocks of 128x128 with a scale each.
LAYERS = (
    *((4096, 7168, 16384), (4096, 24576, 1536), (128, 7168, 16384), (16, 7168, 16384)),
    *((128, 18432, 7168), (128, 4096, 7168), (128, 2112, 7168), (64, 2112, 7168)),
)
SCALES = ("per_tensor", "per_row", "blocks")
PER_TENSOR, FAST = "per tensor", "torch._scaled_mm, fast accumulation"


def problems() -> tuple[Problem, ...]:
    shapes = [(size, size, size) for size in SQUARES]
    return tuple(
        Problem(*shape, element="float8_e4m3fn", out="bfloat16", scales=scales)
        for group in (shapes, LAYERS)
        for scales in SCALES
        for shape in group
    )


def beside(problem: Problem, args: Sequence[Any]) -> Mapping[str, harness.Calls]:
    """With scales per tensor, cuBLAS accumulating in less than float32; with finer ones, the best
    of our kernels for scales per tensor, if there is one."""
    if problem.scales == "per_tensor":
        return {
            FAST: [functools.partial(peers.scaled_mm(one), use_fast_accum=True) for one in args]
        }
    calls = []
    for one in args:
        scale = torch.ones((), device=one.device)
        A, B = (ka.ScaledOperand(t, scale, ka.ScaleMode.PER_TENSOR) for t in one.tensors[:2])
        plain = ka.GemmArguments(A, B, torch.empty_like(one.tensors[2]))
        offered = [k for k in ka.get_kernels(plain) if k.metadata.provider not in suite.NOT_OURS]
        if not offered:
            return {}
        calls.append(functools.partial(offered[0].prepare(plain), *plain.tensors))
    return {PER_TENSOR: calls}


def extra(problem: Problem, microseconds: float, medians: Mapping[str, float]) -> Mapping[str, Any]:
    named = {PER_TENSOR: "per_tensor_us", FAST: "fast_accumulation_us"}
    return {column: round(medians[name], 2) for name, column in named.items() if name in medians}


def report(measured: list[rows.Row]) -> list[str]:
    shares = [
        f"{row['problem']}: {row['per_tensor_us'] / row['subject_us']:.3f} of the time per tensor"
        for row in measured
        if "per_tensor_us" in row
    ]
    return shares + suite.mean_ratio(measured)


SUITE = suite.Suite("gemm-fp8", problems(), beside=beside, extra=extra, report=report)


def main(arguments: Sequence[str] | None = None) -> int:
    return suite.run(SUITE, suite.options(SUITE.name, __doc__).parse_args(arguments))


if __name__ == "__main__":
    sys.exit(main())

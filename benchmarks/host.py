"""Suite host: what a call costs on the CPU, beside the raw TVM-FFI call and torch.

python benchmarks/host.py [--out FOLDER]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import harness
import rows
import torch

import kernel_api as ka
from kernel_api.providers.cutedsl import compiler

SUITE = "host"


def microseconds(call: Callable[[], Any], number: int = 2000, repeats: int = 7) -> harness.Timing:
    """Host time of a call; the GPU drains between repeats, so the launch queue never fills."""
    samples = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        started = time.perf_counter()
        for index in range(number):
            call()
            if index % 200 == 199:
                pause = time.perf_counter()
                torch.cuda.synchronize()
                started += time.perf_counter() - pause
        samples.append((time.perf_counter() - started) / number * 1e6)
    return harness.Timing(samples)


def first_query() -> harness.Timing:
    """get_kernels on signatures and sizes that were not asked before."""
    samples = []
    for size in range(64, 64 + 8 * 20, 8):
        x = torch.empty(size, size, device="cuda", dtype=torch.bfloat16)
        args = ka.GemmArguments(x, torch.empty_like(x), torch.empty_like(x))
        started = time.perf_counter()
        ka.get_kernels(args)
        samples.append((time.perf_counter() - started) * 1e6)
    return harness.Timing(samples)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    A, B, out = (torch.randn(64, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    args = ka.GemmArguments(A, B, out)
    kernel = ka.get_kernels(args, providers=["cutedsl"])[0]
    artifact = kernel.compile(args)
    kernel.run(args, artifact)
    raw = compiler.raw_function(artifact.compiled_obj)
    scalars = kernel.scalars(132)
    launch = kernel.prepare(args)
    verified = bool(ka.verify(kernel, args))
    calls: dict[str, Callable[[], Any]] = {
        "raw TVM-FFI call": lambda: raw(A, B, out, *scalars),
        "torch.mm(A, B, out=out)": lambda: torch.mm(A, B, out=out),
        "prepared launch": lambda: launch(A, B, out),
        "run(args, artifact)": lambda: kernel.run(args, artifact),
        "run(args, artifact, assume_supported_args=True)": lambda: kernel.run(
            args, artifact, assume_supported_args=True
        ),
        "run(args)": lambda: kernel.run(args),
        "ops.gemm(A, B, out=out)": lambda: ka.ops.gemm(A, B, out=out),
        "GemmArguments(A, B, out)": lambda: ka.GemmArguments(A, B, out),
        "get_kernels(args), repeated": lambda: ka.get_kernels(args),
        "get_kernels(GemmArguments(A, B, out)), repeated": lambda: ka.get_kernels(
            ka.GemmArguments(A, B, out)
        ),
        "supports(args)": lambda: kernel.supports(args),
    }
    times = {name: microseconds(call) for name, call in calls.items()}
    times["get_kernels(args), first"] = first_query()
    peer = ("raw TVM-FFI call", times["raw TVM-FFI call"])
    policy = "host time per call, median of 7 x 2000 calls"
    measured = [
        rows.row(SUITE, name, (kernel.metadata.kernel_name, timing), peer, verified, policy)
        for name, timing in times.items()
    ]
    for one in measured:
        over = one["subject_us"] - one["peer_us"]
        print(f"{one['problem']:52} {one['subject_us']:8.2f} us  ({over:+.2f} over raw)")
    print(rows.write(rows.path_of(SUITE, options.out), measured))


if __name__ == "__main__":
    main()

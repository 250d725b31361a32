"""Suite gemm-bf16: the six shapes, every SM80 and SM90 design beside cuBLAS.

python benchmarks/gemm_bf16.py [--out FOLDER]
"""

from __future__ import annotations

import argparse
from pathlib import Path

import harness
import torch

import kernel_api as ka

SUITE = "gemm-bf16"
SHAPES = (
    (8192, 8192, 8192),
    (4096, 4096, 4096),
    (2048, 2048, 2048),
    (8192, 2048, 8192),
    (1024, 28672, 8192),
    (16, 8192, 8192),
)


def operands(m: int, n: int, k: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A row-major, B stored (N, K) as linear layers store it."""
    A = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
    B = torch.randn(n, k, device="cuda", dtype=torch.bfloat16).t()
    return A, B, torch.empty(m, n, device="cuda", dtype=torch.bfloat16)


def measure(m: int, n: int, k: int) -> list[dict[str, object]]:
    A, B, out = operands(m, n, k)
    args = ka.GemmArguments(A, B, out)
    kernels = ka.get_kernels(args, providers=["cutedsl"])
    verified = {kernel: bool(ka.verify(kernel, args)) for kernel in kernels}
    launches = {kernel: kernel.prepare(args) for kernel in kernels}
    calls = {
        kernel.metadata.kernel_name: lambda launch=launch: launch(A, B, out)
        for kernel, launch in launches.items()
    }
    times = harness.interleaved({"torch.mm": lambda: torch.mm(A, B, out=out), **calls})
    rows = []
    for rank, kernel in enumerate(kernels):
        name = kernel.metadata.kernel_name
        rows.append(
            harness.row(
                SUITE,
                f"{m}x{n}x{k} (M x N x K) TN bf16",
                (name, times[name]),
                ("torch.mm", times["torch.mm"]),
                verified[kernel],
                family=kernel.family_name(),
                rank=rank,
                tflops=round(2e-6 * m * n * k / times[name].median, 1),
            )
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rows = []
    for shape in SHAPES:
        measured = measure(*shape)
        rows += measured
        for one in sorted(measured, key=lambda r: r["subject_us"])[:4]:
            print(
                f"{one['problem']:36} {one['ratio']:.3f} of torch {one['peer_us']:9.1f} us  "
                f"{one['tflops']:6.1f} TF  rank {one['rank']:2} {one['subject']} "
                f"{'' if one['verified'] else 'WRONG'}",
                flush=True,
            )
    print(harness.write(SUITE, rows, options.out))


if __name__ == "__main__":
    main()

"""Times of all candidates of products of groups of rows, from which their constants are fitted.

    python benchmarks/grouped_candidates.py [--only TEXT] [--rounds N] [--seconds S] [--out FOLDER]

One after the other without a pause, so that the clocks are those of a busy GPU: consumers that take
turns need less power for the same product. Layers are those of Mixtral-8x7B, DeepSeek-V3 and others
of many small experts; what is fused is what ``kernel_api.nn.moe`` fuses. ``fit_grouped.py`` reads
what this writes.
"""

from __future__ import annotations

import argparse
import functools
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import gemm_grouped
import harness
import rows
import torch

import kernel_api as ka
from kernel_api import fusions
from kernel_api.kernel import Kernel

SUITE = "grouped-candidates"
PEER = "torch._grouped_mm"
BF16, F32, E4M3 = torch.bfloat16, torch.float32, torch.float8_e4m3fn
BLOCK = 128
#: Candidates that are expected to take longer than so many times the first are left out.
FAR = 2.2
#: Operations that no problem has more of.
MOST = 2.6e13
#: Bytes that TMA copies at least.
PIECE = 16

#: (groups, N, K) of the first matrices of a layer's experts, and of the second.
UP = ((8, 28672, 4096), (256, 4096, 7168), (128, 1536, 2048), (32, 5760, 2880), (128, 3072, 4096))
UP = (*UP, (64, 2816, 2048))
DOWN = ((8, 4096, 14336), (256, 7168, 2048), (128, 2048, 768), (32, 2880, 2880), (128, 4096, 1536))
DOWN = (*DOWN, (64, 2048, 1408))
#: Where experts are spread over GPUs, so that one has few.
OF_FEW = ((1, 28672, 4096), (2, 28672, 4096), (4, 28672, 4096), (1, 4096, 14336), (2, 4096, 14336))
OF_FEW = (*OF_FEW, (4, 4096, 14336), (4, 4096, 7168), (4, 7168, 2048), (2, 7168, 2048))
#: The same of so few rows each that K is cut.
OF_FEW_ROWS = ((1, 4096, 7168), (1, 7168, 2048), (1, 3072, 4096), (2, 4096, 7168), (2, 3072, 4096))
#: What the first matrices are fused with, and rows of the first three layers.
OF_TRAINING = ("swiglu of halves, prob", "swiglu of halves, prob, preactivation")
TOKENS_OF_TRAINING = ((32768, 8192), (131072, 32768), (131072, 32768, 8192))
#: By scales.
OF_8_BITS = {
    "per_row": (*UP[:4], UP[5], *DOWN[:2], DOWN[4]),
    "blocks": (*UP[:3], *DOWN[:2]),
}


@dataclass(frozen=True)
class Problem(gemm_grouped.Problem):
    """The same with what it is fused with.

    Attributes:
        fused: ``""``; ``"swiglu"``, with what it names beside; ``"dglu"``; or ``"scattered"`` rows.
    """

    fused: str = ""

    @property
    def label(self) -> str:
        types = f"e4m3 {self.scales}" if self.scales else "bf16"
        return f"{super().label} {types} {self.fused}".rstrip()

    def arguments(self, device: str) -> ka.GroupedGemmArguments:
        new = functools.partial(torch.empty, device=device)
        T, N = self.M, self.N
        A, B, offsets = self.operands(device)
        a, b = scaled(A, B, self.scales) if self.scales else (A, B)
        if self.fused == "dglu":
            return fusions.grouped_gemm_dglu(
                a, b, offsets, out=new(T, 2 * N, dtype=BF16), dprob=new(T, dtype=F32),
                preactivation=new(T, 2 * N, dtype=BF16).normal_(),
                prob=new(T, dtype=BF16).normal_(), granularity="halves",
            )  # fmt: skip
        if self.fused.startswith("swiglu"):
            how: dict[str, Any] = {}
            if "halves" in self.fused:
                how = {"granularity": "halves", "prob": new(T, dtype=BF16).normal_()}
            if "preactivation" in self.fused:
                how["preactivation"] = new(T, N, dtype=BF16)
            out = new(T, N // 2, dtype=BF16)
            return fusions.grouped_gemm_glu(a, b, offsets, out=out, **how)
        index = None
        if self.fused == "scattered":
            index = torch.randperm(T, device=device, dtype=torch.int32)
        out = new(T, N, dtype=BF16)
        return ka.GroupedGemmArguments(a, b, out, offsets, out_row_index=index)


#: What a row says of a problem beside its sizes.
SAID = ("groups", "sizes", "fused", "scales")


def of_row(row: rows.Row) -> Problem:
    """What a row was measured of."""
    return Problem(row["T"], row["N"], row["K"], **{name: row[name] for name in SAID})


def scaled(A: torch.Tensor, B: torch.Tensor, scales: str) -> tuple[Any, Any]:
    (T, K), (E, _, N) = A.shape, B.shape
    new = functools.partial(torch.ones, device=A.device, dtype=F32)
    of_a, of_b = (T,), (E, N)
    modes = ka.ScaleMode.PER_ROW, ka.ScaleMode.PER_ROW
    if scales == "blocks":
        of_a, of_b = (T, K // BLOCK), (E, K // BLOCK, N // BLOCK)
        modes = ka.ScaleMode.BLOCK_1x128, ka.ScaleMode.BLOCK_128x128
    return (
        ka.ScaledOperand(A.to(E4M3), new(of_a), modes[0]),
        ka.ScaledOperand(B.to(E4M3), new(of_b), modes[1]),
    )


def problems() -> Iterator[Problem]:
    for groups, N in ((8, 4096), (64, 2048)):
        for sizes in gemm_grouped.UNEVEN:
            yield Problem(16384, N, N, groups=groups, sizes=sizes)
    routed = functools.partial(Problem, sizes="routed")
    for T in (32768, 8192, 131072, 512, 65536, 16384, 4096, 2048, 128):
        fused = "swiglu" if T in (32768, 8192, 131072, 512) else ""
        for up, down in zip(UP, DOWN, strict=True):
            yield routed(T, *up[1:], groups=up[0], fused=fused)
            yield routed(T, *down[1:], groups=down[0])
    for (groups, N, K), down, tokens in zip(UP, DOWN, TOKENS_OF_TRAINING, strict=False):
        for T in tokens:
            yield from (routed(T, N, K, groups=groups, fused=fused) for fused in OF_TRAINING)
            yield routed(T, down[2], down[1], groups=groups, fused="dglu")
            yield routed(T, K, N, groups=groups)
    for down, tokens in ((DOWN[0], (32768,)), (DOWN[1], (131072, 32768))):
        for T in tokens:
            yield routed(T, *down[1:], groups=down[0], fused="scattered")
    for T in (16384, 4096, 512, 64):
        yield from (routed(T, *one[1:], groups=one[0]) for one in OF_FEW)
    for each, scales in product((16, 64, 128, 256), ("", "blocks")):
        for groups, N, K in OF_FEW_ROWS:
            yield routed(groups * each, N, K, groups=groups, scales=scales)
    for T in (131072, 32768, 8192, 2048):
        for scales, of_8_bits in OF_8_BITS.items():
            yield from (routed(T, *one[1:], groups=one[0], scales=scales) for one in of_8_bits)


def candidates(args: ka.GroupedGemmArguments) -> list[Kernel]:
    """Those for operands like these, but for what the model has far behind the first."""
    found = [
        one
        for one in ka.get_kernels(args, providers=["cutedsl"])
        if one.family_name().startswith("sm90.") and _takes_whole_pieces(one)
    ]
    expected = {one: one.predict(args) or 0.0 for one in found}
    least = min(expected.values(), default=0.0)
    return [one for one in found if expected[one] < FAR * least]


def _takes_whole_pieces(kernel: Kernel) -> bool:
    operands: Any = kernel.metadata.operands
    return all(one.alignment == PIECE for one in (operands.A, operands.B, operands.out))


def measure(problem: Problem, rounds: int) -> rows.Row:
    args = problem.arguments(harness.DEVICE)
    kernels = candidates(args)
    ka.compile_all(kernels, args)
    read = args.epilogue.operands if args.epilogue is not None else {}
    given = {name: getattr(operand, "tensor", operand) for name, operand in read.items()}
    if args.out_row_index is not None:
        given["out_row_index"] = args.launch_values["out_row_index"]
    calls: dict[str, harness.Calls] = {
        one.metadata.kernel_name: [functools.partial(one.prepare(args), *args.tensors, **given)]
        for one in kernels
    }
    if not problem.scales:
        A, B, _, offsets = args.tensors
        calls[PEER] = [functools.partial(torch._grouped_mm, A, B, offs=offsets)]
    found, policy = harness.interleaved(calls, 0, "eager", rounds)
    times = {name: round(timing.median, 2) for name, timing in found.items()}
    peers = {PEER: times.pop(PEER)} if PEER in times else {}
    return {
        "problem": problem.label,
        "suite": SUITE,
        "T": problem.M,
        "N": problem.N,
        "K": problem.K,
        **{name: getattr(problem, name) for name in SAID},
        "times_us": times,
        "peers_us": peers,
        "policy": policy,
        "env": harness.environment(),
        "date": rows.today(),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", metavar="TEXT", help="problems whose label has TEXT")
    parser.add_argument("--rounds", type=int, default=8, metavar="N", help="(default: 8)")
    parser.add_argument("--seconds", type=float, metavar="S", help="stop before S seconds are over")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="for the times")
    options = parser.parse_args(arguments)
    kept = rows.Candidates(rows.path_of(SUITE, options.out))
    end = time.monotonic() + (options.seconds or float("inf"))
    for problem in problems():
        if options.only not in problem.label or problem.operations > MOST:
            continue
        if time.monotonic() > end:
            break
        row = measure(problem, options.rounds)
        kept.add({}, row)
        first, best = next(iter(row["times_us"].values())), min(row["times_us"].values())
        print(f"{problem.label}: {first:.1f} us, the best of {len(row['times_us'])} {best:.1f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

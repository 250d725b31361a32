"""Suite norm-quantize: rows that are quantised, of norms and as they are, beside torch's, and
beside a copy in the same run.

    python benchmarks/norm_quantize.py [--only block] [--candidates N | --all] [--seconds S]

Rows of x are read and their 8 bits written, see streams.py. Peers are the same of torch, operator
by operator and by torch.compile.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import streams
import torch
from torch.nn import functional

import kernel_api as ka

NAME = "norm-quantize"
EPS = 1e-6
BF16, F8, F32 = torch.bfloat16, torch.float8_e4m3fn, torch.float32
TOP, LEAST, BLOCK = 448.0, 2.0**-126, 128


@dataclass(frozen=True)
class Problem:
    """Rows of x (M, N); what shares a scale.

    Attributes:
        norm: Whether they are divided by their root mean square before, with a weight.
    """

    mode: str
    M: int
    N: int
    norm: bool = True

    @property
    def operation(self) -> str:
        return f"{'rmsnorm_' if self.norm else ''}quantize by {self.mode}"

    @property
    def label(self) -> str:
        """What rows call it."""
        return f"{self.operation} {self.M}x{self.N} (M x N) bf16 -> e4m3"

    @property
    def origin(self) -> str:
        return ""

    @property
    def bytes(self) -> int:
        """What must move at least: each element once."""
        return self.M * self.N * (BF16.itemsize + F8.itemsize)

    def arguments(self, device: str) -> Any:
        """The problem on new random operands."""
        M, N = self.M, self.N
        scale = torch.empty(
            {"block": (M, N // BLOCK), "row": (M,)}.get(self.mode, ()), device=device, dtype=F32
        )
        if self.mode == "tensor":
            scale.fill_(0.013)
        x = torch.randn(M, N, device=device, dtype=BF16)
        written = {"out": torch.empty(M, N, device=device, dtype=F8), "scale": scale}
        if not self.norm:
            return ka.fusions.quantize(x, **written, mode=self.mode)
        weight = torch.randn(N, device=device, dtype=BF16)
        return ka.fusions.rmsnorm_quantize(x, **written, weight=weight, mode=self.mode, eps=EPS)


SIZES = ((16, 7168), (256, 7168), (4096, 4096), (4096, 7168), (16384, 4096), (8192, 16384))
MODES = ("block", "row", "tensor")
PROBLEMS = (
    *(Problem(mode, M, N) for mode in MODES for M, N in SIZES),
    *(Problem(mode, M, N, norm=False) for mode in ("row", "block") for M, N in SIZES),
)


def _written(mode: str, x: torch.Tensor, weight: torch.Tensor | None, scale: torch.Tensor) -> Any:
    y = x.float()
    if weight is not None:
        y = functional.rms_norm(y, x.shape[-1:], weight.float(), EPS)
    if mode == "tensor":
        return (y / scale).clamp(-TOP, TOP).to(F8)
    blocks = y.unflatten(-1, (-1, BLOCK)) if mode == "block" else y
    largest = blocks.abs().amax(-1, keepdim=True)
    found = torch.where(largest == 0, 1.0, (largest / TOP).clamp(min=LEAST))
    return (blocks / found).clamp(-TOP, TOP).to(F8).view(x.shape), found.squeeze(-1)


@functools.cache
def _compiled(mode: str) -> Callable[..., Any]:
    # Sizes of the problem before would make this one's dynamic.
    return torch.compile(functools.partial(_written, mode), fullgraph=True, dynamic=False)


def _peers(problem: Problem, args: Any) -> dict[str, Callable[[], Any]]:
    """What torch has, by name, on the operands of the arguments."""
    torch.compiler.reset()  # of other sizes it keeps few
    epilogue = args.epilogue
    scale = {**epilogue.inputs, **epilogue.outputs}["scale"].tensor
    given = args.x.tensor, args.weight.tensor if problem.norm else None, scale
    return {
        "torch.compile": functools.partial(_compiled(problem.mode), *given),
        "torch": functools.partial(_written, problem.mode, *given),
    }


SUITE = streams.Suite(NAME, PROBLEMS, _peers)


def main(arguments: Sequence[str] | None = None) -> int:
    return streams.main(SUITE, __doc__, arguments)


if __name__ == "__main__":
    sys.exit(main())

"""Suite elementwise: chains of element-wise operations beside torch's, and beside a copy in the
same run.

    python benchmarks/elementwise.py [--only swiglu] [--candidates N | --all] [--seconds S]

A chain can only be as fast as its matrices are moved, see streams.py. Peers are the same chain by
torch, operator by operator and by torch.compile. ``--all`` gives rows of all designs for the
problem's alignment, best ranked first.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import streams
import torch

import kernel_api as ka
from kernel_api import epilogue as ep

NAME = "elementwise"
ALPHA = 0.7
BF16, F32 = torch.bfloat16, torch.float32

Chain = Callable[..., Any]


def _swiglu(accum: Any) -> Any:
    up, gate = ep.glu_pair(accum, granularity="halves")
    return ep.silu(gate) * up


#: What is computed, as an epilogue and by torch; both of x and of the operands by name.
EPILOGUES: dict[str, Chain | None] = {
    "add": lambda accum, b: accum + b,
    "bias gelu": lambda accum, bias: ep.gelu(accum + bias),
    "scale residual": lambda accum, residual, alpha: alpha * accum + residual,
    "swiglu": _swiglu,
    "cast": None,
    "row sum": lambda accum: (accum, ep.sum(accum, -1)),
}
FUNCTIONS: dict[str, Chain] = {
    "add": lambda x, b: x + b,
    "bias gelu": lambda x, bias: torch.nn.functional.gelu(x + bias),
    "scale residual": lambda x, residual, alpha: alpha * x + residual,
    "swiglu": lambda x: torch.nn.functional.silu(x.chunk(2, -1)[1]) * x.chunk(2, -1)[0],
    "cast": lambda x: x.to(BF16),
    "row sum": lambda x: (x.clone(), x.sum(-1, dtype=F32)),
}


@dataclass(frozen=True)
class Problem:
    """A chain on x, whose result is (M, N); x of swiglu is (M, 2N), that of a cast is float32."""

    operation: str
    M: int
    N: int

    @property
    def label(self) -> str:
        """What rows call it."""
        types = "f32 -> bf16" if self.operation == "cast" else "bf16"
        return f"{self.operation} {self.M}x{self.N} (M x N) {types}"

    @property
    def origin(self) -> str:
        return ""

    @property
    def bytes(self) -> int:
        """What must move at least: each element of a matrix once."""
        matrices = {"add": 3, "scale residual": 3, "swiglu": 3, "cast": 3}.get(self.operation, 2)
        return matrices * self.M * self.N * BF16.itemsize

    def operands(self, device: str) -> tuple[torch.Tensor, dict[str, Any]]:
        """x, and what is read beside it by name: new and random."""
        M, N = self.M, self.N

        def drawn(*shape: int, element: torch.dtype = BF16) -> torch.Tensor:
            return torch.randn(shape, device=device, dtype=element)

        wide = 2 * N if self.operation == "swiglu" else N
        x = drawn(M, wide, element=F32 if self.operation == "cast" else BF16)
        beside = {
            "add": lambda: {"b": drawn(M, N)},
            "bias gelu": lambda: {"bias": drawn(N)},
            "scale residual": lambda: {"residual": drawn(M, N), "alpha": ALPHA},
        }
        return x, beside.get(self.operation, dict)()

    def arguments(self, device: str) -> ka.ElementwiseArguments:
        """The problem on new operands."""
        x, read = self.operands(device)
        out = torch.empty((self.M, self.N), device=device, dtype=BF16)
        chain = EPILOGUES[self.operation]
        if chain is None:
            return ka.ElementwiseArguments(x, out)
        written = {}
        if self.operation == "row sum":
            written = {"sums": torch.empty(self.M, device=device, dtype=F32)}
        epilogue = ka.EpilogueArguments(chain, **read, **written)
        return ka.ElementwiseArguments(x, out, epilogue=epilogue)


SIZES = ((8192, 4096), (8192, 8192), (8192, 14336))

PROBLEMS = tuple(Problem(operation, M, N) for M, N in SIZES for operation in EPILOGUES)


# Peers -----------------------------------------------------------------------------------


def peers_of(problem: Problem, args: Any) -> dict[str, Callable[[], Any]]:
    """What torch has, by name, on the operands of the arguments."""
    function = FUNCTIONS[problem.operation]
    read = {}
    if args.epilogue is not None:
        tensors = {name: one.tensor for name, one in args.epilogue.inputs.items()}
        read = {**tensors, **args.epilogue.scalars}
    x = args.x.tensor
    return {
        "torch": functools.partial(function, x, **read),
        "torch.compile": functools.partial(_compiled(problem.operation), x, **read),
    }


@functools.cache
def _compiled(operation: str) -> Chain:
    compiled: Chain = torch.compile(FUNCTIONS[operation])
    return compiled


SUITE = streams.Suite(NAME, PROBLEMS, peers_of)


def main(arguments: Sequence[str] | None = None) -> int:
    return streams.main(SUITE, __doc__, arguments)


if __name__ == "__main__":
    sys.exit(main())

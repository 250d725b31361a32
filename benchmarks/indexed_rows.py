"""Suite indexed-rows: rows of tokens on their way to experts and back, beside torch's own, and
beside a copy in the same run.

    python benchmarks/indexed_rows.py [--only gather] [--candidates N | --all] [--seconds S]

Tokens go to k random ones of 64 experts each, sorted by expert. Both directions can only be as fast
as rows are moved, see streams.py. Peers are the same of torch, operator by operator and by
torch.compile; to scatter, torch picks the rows in their order.
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

NAME = "indexed-rows"
EXPERTS = 64
BF16, INT32 = torch.bfloat16, torch.int32


@dataclass(frozen=True)
class Problem:
    """T tokens of N columns, each of which has k rows elsewhere."""

    operation: str
    T: int
    k: int
    N: int

    @property
    def label(self) -> str:
        """What rows call it."""
        return f"{self.operation} {self.T}x{self.k} rows of {self.N} (T x k, N) bf16"

    @property
    def origin(self) -> str:
        return ""

    @property
    def bytes(self) -> int:
        """What must move at least: each row, and each token, once."""
        return (self.k + 1) * self.T * self.N * BF16.itemsize

    def arguments(self, device: str) -> Any:
        """The problem on new operands."""
        tokens, rows = (
            torch.randn(count, self.N, device=device, dtype=BF16)
            for count in (self.T, self.T * self.k)
        )
        rank = _rank(self.T, self.k, device)
        if self.operation == "gather":
            return ka.GatherRowsArguments(rows, tokens, rank)
        return ka.ScatterRowsArguments(tokens, rows, rank)


def _rank(T: int, k: int, device: str) -> torch.Tensor:
    """(T, k), of each pair its place among those sorted by expert."""
    rank = torch.empty(T * k, dtype=INT32, device=device)
    if device == "meta":
        return rank.view(T, k)
    place = torch.randint(EXPERTS, (T * k,), device=device).argsort(stable=True)
    return rank.index_copy_(0, place, torch.arange(T * k, dtype=INT32, device=device)).view(T, k)


#: Of Mixtral-8x7B and DeepSeek-V3, in training and in inference; and narrow rows.
SIZES = (
    *((16384, 2, 4096), (4096, 2, 4096), (256, 2, 4096)),
    *((16384, 8, 7168), (4096, 8, 7168), (256, 8, 7168)),
    *((16384, 8, 512), (65536, 4, 128)),
)
PROBLEMS = tuple(Problem(operation, *size) for size in SIZES for operation in ("gather", "scatter"))


# Peers -----------------------------------------------------------------------------------


def _gathered(x: torch.Tensor, rank: torch.Tensor) -> torch.Tensor:
    return x[rank].sum(1)


def _scattered(x: torch.Tensor, token: torch.Tensor) -> torch.Tensor:
    return x[token]


def peers_of(problem: Problem, args: Any) -> dict[str, Callable[[], Any]]:
    """What torch has, by name, on the operands of the arguments."""
    x, rank = args.x.tensor, args.row_index.tensor
    if problem.operation == "gather":
        bags = functools.partial(functional.embedding_bag, rank, x, mode="sum")
        return {"torch": bags, "torch.compile": functools.partial(_compiled(_gathered), x, rank)}
    token = (rank.flatten().argsort() // problem.k).to(INT32) if not x.is_meta else rank.flatten()
    return {
        "torch": functools.partial(torch.index_select, x, 0, token),
        "torch.compile": functools.partial(_compiled(_scattered), x, token),
    }


@functools.cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    compiled: Callable[..., Any] = torch.compile(function)
    return compiled


SUITE = streams.Suite(NAME, PROBLEMS, peers_of)


def main(arguments: Sequence[str] | None = None) -> int:
    return streams.main(SUITE, __doc__, arguments)


if __name__ == "__main__":
    sys.exit(main())

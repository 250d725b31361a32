"""Suite sdpa-decode-fp8: one query per sequence and many keys of 8-bit floats.

    python benchmarks/sdpa_decode_fp8.py [--quick] [--candidates N | --all] [--seconds S]

As suite sdpa-decode, of e4m3 with a scale per sequence and head of keys, so a copy has half as many
bytes; also of queries of bfloat16. torch has no such attention: the peer is that of bfloat16, on as
many keys.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import attention
import sdpa_decode
import torch
from sdpa_forward import by_torch

import kernel_api as ka

E4M3 = torch.float8_e4m3fn
BATCHES = (1, 4, 16, 64)
LENGTHS = (1 << 10, 1 << 12, 1 << 14, 1 << 16)


@dataclass(frozen=True)
class Problem(sdpa_decode.Problem):
    """One query of each sequence, and S keys, of 8 bits.

    Attributes:
        mixed: Whether queries are of bfloat16.
    """

    mixed: bool = False

    @property
    def label(self) -> str:
        types = "bf16, e4m3" if self.mixed else "e4m3"
        return super().label.replace("decode", f"decode {types}")

    @property
    def bytes(self) -> int:
        return super().bytes // 2

    def arguments(self, device: str) -> Any:
        args = super().arguments(device)
        Q, K, V, out = args.tensors
        scale = functools.partial(torch.rand, (self.B, self.H_kv), device=device)
        names = (
            ("descale_k", "descale_v") if self.mixed else ("descale_q", "descale_k", "descale_v")
        )
        given = {name: 0.5 + scale() for name in names}
        for name in ("page_table", "seq_lens_kv"):
            if name in args.further:
                given[name] = args.further[name].tensor
        Q = Q if self.mixed else Q.to(E4M3)
        return ka.SdpaArguments(Q, K.to(E4M3), V.to(E4M3), out, **given)

    def peers(self) -> dict[str, attention.Peer]:
        return {"torch, bfloat16": _Wide(self)}


class _Wide:
    """torch's function on as much in bfloat16, side by side."""

    comparable = False

    def __init__(self, problem: Problem) -> None:
        self._problem = problem

    def __call__(self, args: Any) -> Callable[[], Any]:
        one = self._problem
        shape = (one.B, one.H_kv, one.S, one.D)
        Q, K, V, out = args.tensors
        K, V = (tensor.to(torch.bfloat16).view(shape) for tensor in (K, V))
        return by_torch(ka.SdpaArguments(Q.to(torch.bfloat16), K, V, out), sdpa_decode.BACKENDS)


def problems(batches: Sequence[int], lengths: Sequence[int]) -> Iterator[Problem]:
    most = sdpa_decode.MOST_BYTES // 4
    for kind in (Problem, functools.partial(Problem, mixed=True)):
        yield from sdpa_decode.problems(batches, lengths, kind, most)


SUITE = attention.Suite(
    "sdpa-decode-fp8",
    problems=tuple(problems(BATCHES, LENGTHS)),
    quick=tuple(problems((1, 16), (1 << 14,))),
    report=sdpa_decode.report,
    policy="graph",
)


def main(arguments: Sequence[str] | None = None) -> int:
    return attention.run(SUITE, __doc__, arguments)


if __name__ == "__main__":
    sys.exit(main())

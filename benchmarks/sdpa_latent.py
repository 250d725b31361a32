"""Suite sdpa-latent: one query per sequence and many latent vectors, as DeepSeek-V3 decodes.

    python benchmarks/sdpa_latent.py [--quick] [--candidates N | --all] [--seconds S]

A latent vector is a key of 576 numbers for all heads, and its first 512 are the value (arXiv
2412.19437). H heads are those that a GPU has: 128, or 16 where 8 GPUs share a layer. As such
attention reads one vector for 2 · H products, many heads are bound by the tensor cores and few by
memory: ``tflops`` are of both products, ``of_ceiling`` is the share of a copy as in suite
sdpa-decode. The peer is what torch has for it: a product of batches, softmax, and another product.
Everything is timed by CUDA graphs of several launches.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import attention
import sdpa_decode
import torch

import kernel_api as ka

HEADS = (16, 128)
D, D_V = 576, 512
BATCHES = (1, 16, 128)
LENGTHS = (1 << 10, 1 << 12, 1 << 14, 1 << 16)
PAGE = sdpa_decode.PAGE
#: Of latent vectors, which the copy has again.
MOST_BYTES = 5 << 30


@dataclass(frozen=True)
class Problem(sdpa_decode.Problem):
    """One query of each sequence, and S latent vectors."""

    @property
    def label(self) -> str:
        lie = f"pages of {self.page_size}" if self.page_size else "contiguous"
        return f"{self.B}x{self.H}/1x{self.S}x{D}/{D_V} (B x H x S x D) latent, {lie}"

    @property
    def operations(self) -> int:
        return 2 * self.B * self.H * self.S * (D + D_V)

    @property
    def bytes(self) -> int:
        """Latent vectors."""
        return 2 * self.B * self.S * D

    def arguments(self, device: str) -> Any:
        Q, K = self.queries(device), self.keys(device)
        given = {}
        if self.page_size:
            order = torch.randperm(len(K)).int().to(device)
            lengths = torch.full((self.B,), self.S, dtype=torch.int32, device=device)
            given = {"page_table": order.view(self.B, -1), "seq_lens_kv": lengths}
        V = K[..., :D_V]
        return ka.SdpaArguments(Q, K, V, torch.empty_like(Q[..., :D_V]), **given)

    def peers(self) -> dict[str, attention.Peer]:
        return {"torch, no pages" if self.page_size else "torch": _Products(self)}

    def parts(self, args: Any) -> Iterator[Any]:
        Q, K, V, out = args.tensors
        for b, h in self.ends(self.H):
            of_queries = (b, slice(h, h + 1))
            further = args.launch_values
            given = {n: further[n][b] for n in ("page_table", "seq_lens_kv") if n in further}
            of_keys = slice(None) if given else b
            operands = Q[of_queries], K[of_keys], V[of_keys], out[of_queries]
            yield ka.SdpaArguments(*operands, **given)


class _Products:
    """Two products and softmax by torch; of pages, on their memory as if they were none."""

    def __init__(self, problem: Problem) -> None:
        self._problem, self.comparable = problem, not problem.page_size

    def __call__(self, args: Any) -> Callable[[], Any]:
        one, scale = self._problem, args.scale
        Q = args.Q.tensor.reshape(one.B, one.H, D)
        K = args.K.tensor.reshape(one.B, one.S, D)
        across, V = K.transpose(1, 2), K[..., :D_V]

        def attend() -> Any:
            scores = torch.baddbmm(Q.new_empty(()), Q, across, beta=0.0, alpha=scale)
            return torch.bmm(scores.softmax(-1), V).unsqueeze(2)

        return attend


def problems(
    heads: Sequence[int], batches: Sequence[int], lengths: Sequence[int]
) -> Iterator[Problem]:
    for page_size in (0, PAGE):
        for H in heads:
            for B in batches:
                for S in lengths:
                    one = Problem(B, H, 1, S, D, page_size=page_size)
                    if one.bytes <= MOST_BYTES:
                        yield one


SUITE = attention.Suite(
    "sdpa-latent",
    problems=tuple(problems(HEADS, BATCHES, LENGTHS)),
    quick=tuple(problems(HEADS, (16,), (1 << 12,))),
    report=sdpa_decode.report,
    policy="graph",
)


def main(arguments: Sequence[str] | None = None) -> int:
    return attention.run(SUITE, __doc__, arguments)


if __name__ == "__main__":
    sys.exit(main())

"""Suite sdpa-short: attention of few queries, or of few sequences, beside torch's.

    python benchmarks/sdpa_short.py [--quick] [--candidates N | --all] [--seconds S]

What a launch and a tile take counts more here than products do: prompts of 16 to 256 tokens, chunks
of as many tokens behind keys that are there already, and images and captions of 197 and 77 tokens.
A query sees the keys up to its own, where the problem is causal: the last one sees all of them.
Everything is timed by CUDA graphs of several launches.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import attention
import sdpa_forward
import torch
from torch.nn.attention import SDPBackend

import kernel_api as ka


@dataclass(frozen=True)
class Problem(sdpa_forward.Problem):
    """Attention of S_q queries to S keys."""

    S_q: int = 1

    @property
    def label(self) -> str:
        heads = f"{self.H}" if self.H_kv == self.H else f"{self.H}/{self.H_kv}"
        sizes = f"{self.B}x{heads}x{self.S_q}:{self.S}x{self.D}"
        return f"{sizes} (B x H x S_q:S_kv x D) {self.masked}"

    @property
    def origin(self) -> str:
        return "prompts" if self.S_q == self.S else "chunks"

    @property
    def operations(self) -> int:
        hidden = self.S_q * self.S_q // 2 if self.causal else 0
        return 4 * self.B * self.H * self.D * (self.S_q * self.S - hidden)

    @property
    def bytes(self) -> int:
        return 4 * self.B * self.D * (self.H * self.S_q + self.H_kv * self.S)

    @property
    def options(self) -> dict[str, Any]:
        return {"mask": ka.masks.Causal("bottom_right")} if self.causal else {}

    def queries(self, device: str) -> torch.Tensor:
        drawn = torch.randn(self.B, self.S_q, self.H, self.D, device=device, dtype=attention.BF16)
        return drawn.transpose(1, 2)

    def peers(self) -> dict[str, attention.Peer]:
        flash = SDPBackend.FLASH_ATTENTION
        if self.causal and self.S_q < self.S:
            return {"torch's flash": by_operator}
        return {"torch's flash": functools.partial(sdpa_forward.by_torch, backends=(flash,))}

    def libraries(self) -> dict[str, attention.Peer]:
        """cuDNN as well, where it has the mask."""
        if self.causal and self.S_q < self.S:
            return super().libraries()
        return {"cuDNN, its operator": sdpa_forward.by_operator, **super().libraries()}


def by_operator(args: Any) -> Callable[[], torch.Tensor]:
    """torch's flash, whose bound runs to the last key; its function has another one. On the CPU
    that function with the bound as a mask."""
    Q, K, V = args.tensors[:3]
    if not Q.is_cuda:
        mask = torch.ones(args.S_q, args.S_kv, dtype=torch.bool).tril(args.S_kv - args.S_q)
        how = {"attn_mask": mask, "scale": args.scale, "enable_gqa": True}
        return lambda: torch.nn.functional.scaled_dot_product_attention(Q, K, V, **how)
    operator: Any = torch.ops.aten._scaled_dot_product_flash_attention
    given = (Q, K, V, 0.0, bool(args.bounds))
    return lambda: operator(*given, scale=args.scale)[0]


#: (B, H, H_kv, S_q, S_kv, D, causal)
SIZES = (
    *((B, 32, 8, S, S, 128, True) for B in (1, 8) for S in (16, 64, 128, 256)),
    *((4, 16, 16, S, S, 64, True) for S in (64, 128, 256)),
    *((1, 16, 4, S, S, 256, True) for S in (64, 256)),
    *((1, 8, 8, 128, 128, D, False) for D in (64, 128, 256)),
    *((B, 12, 12, 197, 197, 64, False) for B in (1, 32)),
    *((B, 12, 12, 77, 77, 64, True) for B in (1, 32)),
    *((1, 32, 8, S, 1024, 128, True) for S in (16, 64, 128, 256)),
    *((1, 32, 8, S, 8192, 128, True) for S in (16, 64, 128, 256)),
    *((8, 32, 8, S, 2048, 128, True) for S in (4, 16, 64)),
    *((1, 64, 8, S, 4096, 128, True) for S in (4, 32)),
    *((1, 16, 16, S, 1024, 256, True) for S in (16, 64)),
    *((2, 16, 4, S, 2048, 256, True) for S in (16, 64)),
    *((1, 32, 8, S, 2048, 64, True) for S in (16, 64)),
)


def problems(sizes: Sequence[tuple]) -> Iterator[Problem]:
    for B, H, H_kv, S_q, S, D, causal in sizes:
        yield Problem(B, H, H_kv, S, D, causal, S_q)


SUITE = attention.Suite(
    "sdpa-short",
    problems=tuple(problems(SIZES)),
    quick=tuple(problems(SIZES[:4])),
    policy="graph",
)


def main(arguments: Sequence[str] | None = None) -> int:
    return attention.run(SUITE, __doc__, arguments)


if __name__ == "__main__":
    sys.exit(main())

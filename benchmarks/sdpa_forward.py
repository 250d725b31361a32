"""Suite sdpa-forward: attention in bf16, beside cuDNN's through torch.

    python benchmarks/sdpa_forward.py [--quick] [--candidates N | --all] [--seconds S]

16384 tokens as sequences of 512 to 16384, model width 2048 as heads of 64, 128 and 256, causal and
full, with as many heads of keys as of queries or a quarter of them; and four problems that others
publish. ``tflops`` counts 4 · B · H · S² · D operations, half of them where causal.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import attention
import flash
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import kernel_api as ka

TOKENS, WIDTH = 16384, 2048
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
HEAD_DIMS = (64, 128, 256)
GROUP = 4


@dataclass(frozen=True)
class Problem(attention.Problem):
    """A forward pass, without statistics."""

    def arguments(self, device: str) -> Any:
        Q, K, V = self.queries(device), self.keys(device), self.keys(device)
        return ka.SdpaArguments(Q, K, V, torch.empty_like(Q), **self.options)

    def peers(self) -> dict[str, attention.Peer]:
        cudnn, flash = SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION
        return {
            "cuDNN": functools.partial(by_torch, backends=(cudnn,)),
            "cuDNN, its operator": by_operator,
            "torch's flash": functools.partial(by_torch, backends=(flash,)),
        }

    def libraries(self) -> dict[str, attention.Peer]:
        return {flash.NAME: flash.forward} if flash.is_here() else {}

    def compared(self, args: Any) -> list[torch.Tensor]:
        return [args.out.tensor]

    def parts(self, args: Any) -> Iterator[Any]:
        Q, K, V, out = args.tensors
        for b, h in self.ends(self.H):
            h_kv = h * self.H_kv // self.H
            of_queries, of_keys = (b, slice(h, h + 1)), (b, slice(h_kv, h_kv + 1))
            operands = Q[of_queries], K[of_keys], V[of_keys], out[of_queries]
            yield ka.SdpaArguments(*operands, **self.options)


def by_torch(args: Any, backends: Sequence[SDPBackend]) -> Callable[[], torch.Tensor]:
    """torch's function, by one of its backends; on the CPU by whatever it takes."""
    Q, K, V = args.tensors[:3]
    how = {"is_causal": bool(args.bounds), "enable_gqa": args.H_kv != args.H, "scale": args.scale}
    compute = functools.partial(torch.nn.functional.scaled_dot_product_attention, Q, K, V, **how)

    def call() -> torch.Tensor:
        with sdpa_kernel(list(backends)):
            return compute()

    return call if Q.is_cuda else compute


def by_operator(args: Any) -> Callable[[], torch.Tensor]:
    """cuDNN where torch's function does not choose it."""
    operator: Any = torch.ops.aten._scaled_dot_product_cudnn_attention
    given = (*args.tensors[:3], None, False, 0.0, bool(args.bounds))
    return lambda: operator(*given, scale=args.scale)[0]


def grid(lengths: Sequence[int] = LENGTHS, groups: Sequence[int] = (1, GROUP)) -> Iterator[Any]:
    """Sizes of problems of TOKENS tokens, with what is causal."""
    for D in HEAD_DIMS:
        H = WIDTH // D
        for group in groups:
            for S in lengths:
                for causal in (False, True):
                    yield TOKENS // S, H, H // group, S, D, causal


#: (B, H, H_kv, S, D, causal)
NAMED = (
    (2, 32, 32, 8192, 128, False),
    (2, 32, 32, 8192, 128, True),
    (2, 16, 16, 4096, 256, False),
    (4, 32, 32, 4096, 64, True),
)

SUITE = attention.Suite(
    "sdpa-forward",
    problems=tuple(Problem(*sizes) for sizes in dict.fromkeys((*NAMED, *grid()))),
    quick=tuple(Problem(*sizes) for sizes in (*NAMED, (4, 16, 4, 4096, 128, True))),
)


def main(arguments: Sequence[str] | None = None) -> int:
    return attention.run(SUITE, __doc__, arguments)


if __name__ == "__main__":
    sys.exit(main())

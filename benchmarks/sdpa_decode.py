"""Suite sdpa-decode: one query per sequence and many keys, beside a copy in the same run.

    python benchmarks/sdpa_decode.py [--quick] [--candidates N | --all] [--seconds S]

Such attention can only be as fast as keys and values are read. The ceiling is what a copy moves
whose bytes, read and written, are those of K and V together: torch's ``copy_`` or an element-wise
kernel, whichever is faster; ``of_ceiling`` is the kernel's share of it. Keys lie (B, H, S, D), or
in pages of PAGE keys in random order. The peer is torch's function, which knows no pages: there it
reads as many keys that lie side by side. Everything is timed by CUDA graphs of several launches.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import attention
import harness
import rows
import suite
import torch
from sdpa_forward import by_torch
from torch.nn.attention import SDPBackend

import kernel_api as ka

HEADS, HEADS_KV, D = 64, 8, 128
BATCHES = (1, 4, 16, 64)
LENGTHS = (1 << 10, 1 << 12, 1 << 14, 1 << 16, 1 << 17)
PAGE = 64
#: Of keys and values, which the copy has again.
MOST_BYTES = 20 << 30
#: From here on the rest that L2 keeps of a set does not matter.
ENOUGH_BYTES = 4 << 30

COPIES = ("copy_", "torch.mul")
#: Without the one that holds all probabilities, and copies keys for every head.
BACKENDS = (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION)


@dataclass(frozen=True)
class Problem(attention.Problem):
    """One query of each sequence, and S keys.

    Attributes:
        page_size: Keys of a page; 0: all keys of a sequence lie together.
    """

    page_size: int = 0

    @property
    def label(self) -> str:
        lie = f"pages of {self.page_size}" if self.page_size else "contiguous"
        return f"{self.B}x{self.H}/{self.H_kv}x{self.S}x{self.D} (B x H x S x D) decode, {lie}"

    @property
    def origin(self) -> str:
        return "paged" if self.page_size else "contiguous"

    @property
    def operations(self) -> int:
        return 4 * self.B * self.H * self.S * self.D

    @property
    def bytes(self) -> int:
        """Keys and values."""
        return 4 * self.B * self.H_kv * self.S * self.D

    @property
    def sets(self) -> int:
        return 1 if self.bytes >= ENOUGH_BYTES else super().sets

    def queries(self, device: str) -> torch.Tensor:
        drawn = torch.randn(self.B, 1, self.H, self.D, device=device, dtype=attention.BF16)
        return drawn.transpose(1, 2)

    def keys(self, device: str) -> torch.Tensor:
        shape = (self.B, self.H_kv, self.S, self.D)
        if self.page_size:
            shape = (self.B * self.S // self.page_size, self.H_kv, self.page_size, self.D)
        return torch.randn(shape, device=device, dtype=attention.BF16)

    def arguments(self, device: str) -> Any:
        Q, K, V = self.queries(device), self.keys(device), self.keys(device)
        given = {}
        if self.page_size:
            order = torch.randperm(len(K)).int().to(device)
            lengths = torch.full((self.B,), self.S, dtype=torch.int32, device=device)
            given = {"page_table": order.view(self.B, -1), "seq_lens_kv": lengths}
        return ka.SdpaArguments(Q, K, V, torch.empty_like(Q), **given)

    def peers(self) -> dict[str, attention.Peer]:
        return {"torch, no pages" if self.page_size else "torch": _Sdpa(self)}

    def compared(self, args: Any) -> list[torch.Tensor]:
        return [args.out.tensor]

    def parts(self, args: Any) -> Iterator[Any]:
        group = self.H // self.H_kv
        Q, K, V, out = args.tensors
        for b, h_kv in self.ends(self.H_kv):
            of_queries = (b, slice(h_kv * group, (h_kv + 1) * group))
            heads, further = slice(h_kv, h_kv + 1), args.launch_values
            given = {n: further[n][b] for n in ("page_table", "seq_lens_kv") if n in further}
            of_keys = (slice(None) if given else b, heads)
            given |= {n: further[n][b, heads] for n in further if n.startswith("descale")}
            operands = Q[of_queries], K[of_keys], V[of_keys], out[of_queries]
            yield ka.SdpaArguments(*operands, **given)

    def beside(self, sets: Sequence[Any]) -> Mapping[str, harness.Calls]:
        """Copies of half as much, which are as much read and written; one set for all of them, as
        they take turns."""
        half = self.bytes // 8  # float32
        new = functools.partial(torch.randn, half, device=harness.DEVICE)
        pairs = [(new(), new()) for _ in sets]
        calls = (
            [functools.partial(target.copy_, source) for source, target in pairs],
            [functools.partial(torch.mul, source, 1.0, out=target) for source, target in pairs],
        )
        return dict(zip(COPIES, calls, strict=True))

    def extra(self, microseconds: float, medians: Mapping[str, float]) -> Mapping[str, Any]:
        copied = min(medians[name] for name in COPIES)
        return {
            "ceiling_tb_s": round(1e-6 * self.bytes / copied, 3),
            "tb_s": round(1e-6 * self.bytes / microseconds, 3),
            "of_ceiling": round(copied / microseconds, 4),
        }


class _Sdpa:
    """torch's function; of pages, on their memory as if they were none."""

    def __init__(self, problem: Problem) -> None:
        self._problem, self.comparable = problem, not problem.page_size

    def __call__(self, args: Any) -> Callable[[], Any]:
        if not self.comparable:
            one = self._problem
            shape = (one.B, one.H_kv, one.S, one.D)
            Q, K, V, out = args.tensors
            args = ka.SdpaArguments(Q, K.view(shape), V.view(shape), out)
        return by_torch(args, BACKENDS)


def report(measured: list[rows.Row]) -> list[str]:
    """Shares of the copy, by how keys lie."""
    first = [row for row in measured if not row["rank"]]
    found = []
    for origin in dict.fromkeys(row["origin"] for row in first):
        shares = [100 * row["of_ceiling"] for row in first if row["origin"] == origin]
        found.append(f"{origin}: {min(shares):.1f} to {max(shares):.1f} % of the copy")
    return found + suite.mean_ratio(measured)


def problems(
    batches: Sequence[int],
    lengths: Sequence[int],
    kind: Callable[..., Any] = Problem,
    most_bytes: int = MOST_BYTES,
) -> Iterator[Any]:
    for page_size in (0, PAGE):
        for B in batches:
            for S in lengths:
                one = kind(B, HEADS, HEADS_KV, S, D, page_size=page_size)
                if one.bytes <= most_bytes:
                    yield one


SUITE = attention.Suite(
    "sdpa-decode",
    problems=tuple(problems(BATCHES, LENGTHS)),
    quick=tuple(problems((1, 16), (1 << 14,))),
    report=report,
    policy="graph",
)


def main(arguments: Sequence[str] | None = None) -> int:
    return attention.run(SUITE, __doc__, arguments)


if __name__ == "__main__":
    sys.exit(main())

"""Suite sdpa-packed: packed queries and keys in pages, as servers have them, beside torch's.

    python benchmarks/sdpa_packed.py [--quick] [--candidates N | --all] [--seconds S]

A batch has sequences of which the next token is asked for, chunks of prompts behind keys that are
there already, and whole prompts, side by side; the last query of a sequence sees all of its keys.
Keys lie in pages of PAGE in random order. The table has room for twice as many keys as the longest
sequence has. Where torch's flash takes no pages (torch 2.11), or none of that size, it reads the
same keys one behind the other. Everything is timed by CUDA graphs of several launches.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import attention
import torch

import kernel_api as ka

PAGE = 256
_ROOM = 2


@dataclass(frozen=True)
class Problem(attention.Problem):
    """Sequences of some queries and keys each.

    Attributes:
        name: What a batch is.
        lengths: Of queries and of keys.
    """

    name: str = ""
    lengths: tuple[tuple[int, int], ...] = ()

    @property
    def label(self) -> str:
        queries = sum(own for own, _ in self.lengths)
        sizes = f"{self.B}x{self.H}/{self.H_kv}x{queries}:{self.S}x{self.D}"
        return f"{sizes} (B x H x T_q:S_kv x D) {self.name}"

    @property
    def origin(self) -> str:
        return f"D{self.D}"

    @property
    def operations(self) -> int:
        seen = sum(own * keys - own * (own - 1) // 2 for own, keys in self.lengths)
        return 4 * self.H * self.D * seen

    @property
    def bytes(self) -> int:
        queries, keys = (sum(one) for one in zip(*self.lengths, strict=True))
        return 4 * self.D * (self.H * queries + self.H_kv * keys)

    def arguments(self, device: str) -> Any:
        queries, keys = zip(*self.lengths, strict=True)

        def numbers(values: Sequence[int]) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.int32).to(device)

        def drawn(*shape: int) -> torch.Tensor:
            return torch.randn(shape, device=device, dtype=attention.BF16)

        each = [-(-count // PAGE) for count in keys]
        order = torch.randperm(sum(each)).int()
        table = torch.zeros(self.B, _ROOM * max(each), dtype=torch.int32)
        for b, (count, own) in enumerate(zip(each, order.split(each), strict=True)):
            table[b, :count] = own
        K, V = (drawn(sum(each), PAGE, self.H_kv, self.D).transpose(1, 2) for _ in range(2))
        Q = drawn(sum(queries), self.H, self.D)
        return ka.SdpaArguments(
            *(Q, K, V, torch.empty_like(Q)),
            mask=ka.masks.Causal("bottom_right"),
            cu_seqlens_q=numbers([0, *torch.tensor(queries).cumsum(0).tolist()]),
            max_seqlen_q=max(queries),
            seq_lens_kv=numbers(keys),
            page_table=table.to(device),
        )

    def peers(self) -> dict[str, attention.Peer]:
        return {"torch's flash": by_pages, "torch's flash, no pages": by_rows}

    def compared(self, args: Any) -> list[torch.Tensor]:
        return [args.out.tensor]

    def parts(self, args: Any) -> Iterator[Any]:
        group = self.H // self.H_kv
        Q, K, V, out = args.tensors
        further = args.launch_values
        end = sum(own for own, _ in self.lengths)
        begins = (0, self.lengths[0][0]), (end - self.lengths[-1][0], end)
        for (b, h_kv), rows in zip(self.ends(self.H_kv), begins, strict=False):
            heads = slice(h_kv * group, (h_kv + 1) * group)
            of_queries = (one[slice(*rows), heads].transpose(0, 1)[None] for one in (Q, out))
            of_keys = (one[:, h_kv : h_kv + 1] for one in (K, V))
            (own_Q, own_out), (own_K, own_V) = of_queries, of_keys
            given = {name: further[name][b] for name in ("page_table", "seq_lens_kv")}
            yield ka.SdpaArguments(own_Q, own_K, own_V, own_out, mask=args.mask, **given)


def by_pages(args: Any) -> Callable[[], torch.Tensor]:
    """torch's flash, if it takes pages; on the CPU, the reference."""
    if not args.Q.tensor.is_cuda:
        return _by_reference(args)
    given, (K, V) = args.launch_values, args.tensors[1:3]
    pages = {"seqused_k": given["seq_lens_kv"], "block_table": given["page_table"]}
    return _flash(args, K.transpose(1, 2), V.transpose(1, 2), **pages)


def by_rows(args: Any) -> Callable[[], torch.Tensor]:
    """torch's flash of the same keys, packed ahead; on the CPU, the reference."""
    table, lens = (args.launch_values[name].tolist() for name in ("page_table", "seq_lens_kv"))
    pages = [own[: -(-keys // PAGE)] for own, keys in zip(table, lens, strict=True)]

    def packed(tensor: torch.Tensor) -> torch.Tensor:
        rows = (
            tensor[own].transpose(1, 2).flatten(0, 1)[:keys]
            for own, keys in zip(pages, lens, strict=True)
        )
        return torch.cat(list(rows))

    Q, out = args.Q.tensor, torch.empty_like(args.out.tensor)
    K, V = map(packed, args.tensors[1:3])
    if Q.is_cuda:
        return _flash(args, K, V)
    starts = args.launch_values["cu_seqlens_q"]
    ends = {"cu_seqlens_q": starts, "cu_seqlens_kv": _ends(args)}
    longest = {"max_seqlen_q": args.S_q, "max_seqlen_kv": max(lens)}
    return _by_reference(ka.SdpaArguments(Q, K, V, out, mask=args.mask, **ends, **longest))


def _flash(args: Any, K: Any, V: Any, **pages: Any) -> Callable[[], torch.Tensor]:
    operator: Any = torch.ops.aten._flash_attention_forward
    given = args.launch_values
    lengths = given["cu_seqlens_q"], _ends(args), args.S_q, int(given["seq_lens_kv"].max())
    operands = (args.tensors[0], K, V, *lengths, 0.0, True, False)
    return lambda: operator(*operands, scale=args.scale, **pages)[0]


def _ends(args: Any) -> torch.Tensor:
    """Of keys one behind the other."""
    lens = args.launch_values["seq_lens_kv"]
    return torch.nn.functional.pad(lens.cumsum(0, dtype=torch.int32), (1, 0))


def _by_reference(args: Any) -> Callable[[], torch.Tensor]:
    (kernel,) = ka.get_kernels(args, providers=["reference"])
    return lambda: (kernel.run(args), args.out.tensor)[1]


def uneven(count: int, least: int, most: int) -> list[int]:
    """Numbers from one to the other, the large ones as rare as the small ones, in disorder."""
    drawn = torch.rand(count, generator=torch.Generator().manual_seed(count)).tolist()
    return [round(least * (most / least) ** one) for one in drawn]


def decoding(count: int, least: int, most: int, queries: int = 1) -> list[tuple[int, int]]:
    return [(queries, keys) for keys in uneven(count, least, most)]


CHUNKED = (256, 700, 2048, 5000)
BATCHES: tuple[tuple[str, list[tuple[int, int]]], ...] = (
    ("8 decode", decoding(8, 1024, 16384)),
    ("64 decode", decoding(64, 512, 8192)),
    ("256 decode", decoding(256, 256, 2048)),
    ("16 decode, 5 queries", decoding(16, 1024, 16384, 5)),
    ("32 decode, a chunk", [*decoding(32, 512, 8192), (512, 4096)]),
    ("128 decode, a chunk", [*decoding(128, 512, 4096), (384, 1024)]),
    ("4 decode, a long chunk", [*decoding(4, 8192, 32768), (2048, 16384)]),
    ("60 decode, 4 chunks", [*decoding(60, 512, 4096), *((256, n) for n in CHUNKED)]),
    ("a chunk", [(512, 32768)]),
    ("prompts", [(n, n) for n in uneven(12, 32, 2048)]),
)
HEADS = ((32, 8, 128), (64, 8, 128), (16, 4, 256), (32, 8, 64))


def problems(batches: Sequence[tuple[str, list[tuple[int, int]]]]) -> Iterator[Problem]:
    for H, H_kv, D in HEADS:
        for name, lengths in batches:
            longest = max(keys for _, keys in lengths)
            yield Problem(len(lengths), H, H_kv, longest, D, True, name, tuple(lengths))


SUITE = attention.Suite(
    "sdpa-packed",
    problems=tuple(problems(BATCHES)),
    quick=tuple(problems(BATCHES[4:5])),
    policy="graph",
)


def main(arguments: Sequence[str] | None = None) -> int:
    return attention.run(SUITE, __doc__, arguments)


if __name__ == "__main__":
    sys.exit(main())

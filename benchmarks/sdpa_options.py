"""Suite sdpa-options: attention whose scores are changed or hidden, beside torch's.

    python benchmarks/sdpa_options.py [--only TEXT] [--candidates N | --all] [--seconds S]

Windows, a bias, slopes, caps, sinks, lengths, documents, tables of blocks, functions and dropout,
in bf16, as models have them; and heads that are as wide as no tile. The peer is the fastest of what
torch has that takes the problem: cuDNN and its other backends, the operator behind them where that
takes more, or flex_attention, compiled, whose mask of blocks is made before. ``tflops`` counts
2 · B · H · S² · (D + D_v) operations, as far as scores are seen by the mask.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import attention
import torch
from torch.nn.attention import SDPBackend

import kernel_api as ka
from kernel_api.arguments import Dropout

_aten: Any = torch.ops.aten

#: What flex_attention calls: (score_mod, mask_mod) of some arguments; either may be None.
Functions = Callable[[Any], tuple[Any, Any]]

CAP, DROPPED, DOCUMENT, BLOCK, SHOWN = 50.0, 0.1, 1024, 128, 4
SEED, OFFSET = 2024, 1 << 20


@dataclass(frozen=True)
class Option:
    """How scores differ from scaled products.

    Attributes:
        name: In labels.
        given: Keywords of the arguments, for a problem and a device.
        functions: The same for flex_attention; None: it has nothing like it.
        peers: Further ones, by name.
        seen: The share of scores that a query sees.
        bytes: That are read beside the operands.
    """

    name: str
    given: Callable[[Any, str], dict[str, Any]]
    functions: Functions | None = lambda args: (None, None)
    peers: Mapping[str, attention.Peer] = field(default_factory=dict)
    seen: Callable[[Any], float] = lambda problem: 1.0
    bytes: Callable[[Any], int] = lambda problem: 0

    def __hash__(self) -> int:
        return hash(self.name)


@dataclass(frozen=True)
class Problem(attention.Problem):
    """A forward pass.

    Attributes:
        option: How scores are changed or hidden, beside `causal`.
        D_v: Elements of a row of V; 0: as many as of K.
    """

    option: Option = Option("heads", lambda problem, device: {})
    D_v: int = 0

    every_peer = True

    @property
    def label(self) -> str:
        heads = f"{self.H}" if self.H_kv == self.H else f"{self.H}/{self.H_kv}"
        width = f"{self.D}:{self.D_v}" if self.D_v else f"{self.D}"
        sizes = f"{self.B}x{heads}x{self.S}x{width} (B x H x S x D)"
        return f"{sizes} {self.option.name}{', causal' if self.causal else ''}"

    @property
    def origin(self) -> str:
        return self.option.name.partition(" ")[0]

    @property
    def operations(self) -> int:
        share = self.option.seen(self) * (0.5 if self.causal else 1.0)
        both = self.D + (self.D_v or self.D)
        return round(2 * self.B * self.H * self.S**2 * both * share)

    @property
    def bytes(self) -> int:
        both = self.D + (self.D_v or self.D)
        return 2 * self.B * self.S * both * (self.H + self.H_kv) + self.option.bytes(self)

    def values(self, device: str) -> torch.Tensor:
        drawn = torch.randn(
            *(self.B, self.S, self.H_kv, self.D_v or self.D), device=device, dtype=attention.BF16
        )
        return drawn.transpose(1, 2)

    def empty(self, device: str) -> torch.Tensor:
        """For O."""
        shape = self.B, self.S, self.H, self.D_v or self.D
        return torch.empty(shape, device=device, dtype=attention.BF16).transpose(1, 2)

    def keywords(self, device: str) -> dict[str, Any]:
        """Of arguments."""
        given = self.option.given(self, device)
        if self.causal:
            given.setdefault("mask", ka.masks.Causal())
        return given

    def arguments(self, device: str) -> Any:
        operands = self.queries(device), self.keys(device), self.values(device), self.empty(device)
        return ka.SdpaArguments(*operands, **self.keywords(device))

    def peers(self) -> dict[str, attention.Peer]:
        found = dict(self.option.peers)
        if self.option.functions is not None:
            found["flex_attention"] = functools.partial(by_flex, functions=self.option.functions)
        return found

    def compared(self, args: Any) -> list[torch.Tensor]:
        return [args.out.tensor]

    def parts(self, args: Any) -> Iterator[Any]:
        for b, h in self.ends(self.H):
            h_kv = h * self.H_kv // self.H
            of_queries, of_keys = (b, slice(h, h + 1)), (b, slice(h_kv, h_kv + 1))
            Q, K, V, out = args.tensors[:4]
            operands = Q[of_queries], K[of_keys], V[of_keys], out[of_queries]
            yield ka.SdpaArguments(*operands, **of_heads(args, b, slice(h, h + 1)))


def of_heads(args: Any, b: slice, heads: slice) -> dict[str, Any]:
    """Keywords of arguments, for some heads of one sequence; `b`: a slice of one."""
    given: dict[str, Any] = {"mask": args.mask, "softcap": args.softcap}
    for name, operand in args.further.items():
        tensor = operand.tensor
        if name == "bias":
            places = zip((b, heads), tensor.shape, strict=False)
            given[name] = tensor[tuple(one if extent > 1 else slice(1) for one, extent in places)]
        elif name in ("alibi", "sink"):
            given[name] = tensor[heads]
        elif name == "seq_lens_kv":
            given[name] = tensor[b]
    if args.score is not None:
        operands = dict(args.score.operands)
        operands["table"] = operands["table"].tensor[heads]
        given |= {"score_mod": relative, "score_operands": operands}
    if args.dropout is not None:
        # Of the numbers that are drawn, those of a head begin at its number.
        offset = OFFSET + b.start * args.H + heads.start
        given["dropout"] = Dropout(DROPPED, SEED, offset)
    return given


# Options ---------------------------------------------------------------------------------


def drawn(*shape: int, device: str, dtype: torch.dtype = attention.BF16) -> torch.Tensor:
    return torch.randn(shape, device=device, dtype=dtype)


def window(left: int) -> Option:
    def functions(args: Any) -> tuple[Any, Any]:
        return None, lambda b, h, q, kv: (q >= kv) & (q - kv <= left)

    return Option(
        f"window of {left + 1}",
        lambda problem, device: {"mask": ka.masks.SlidingWindow(left, 0)},
        functions,
        {"torch's flash": functools.partial(by_flash, left=left)},
        seen=lambda problem: (left + 1) / problem.S,
    )


def relative(score: Any, b: Any, h: Any, q: Any, kv: Any, table: Any, first: Any) -> Any:
    """A bias by how far a key is away."""
    return score + table[h, kv - q + first]


def _causal(b: Any, h: Any, q: Any, kv: Any) -> Any:
    return q >= kv


def _hidden(args: Any) -> Any:
    return _causal if args.bounds else None


def _with_bias(args: Any) -> tuple[Any, Any]:
    bias = args.further["bias"].tensor
    of_sequences, of_heads, of_queries = (extent > 1 for extent in bias.shape[:3])

    def score(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return score + bias[b * of_sequences, h * of_heads, q * of_queries, kv]

    return score, _hidden(args)


def _with_slopes(args: Any) -> tuple[Any, Any]:
    slopes = args.further["alibi"].tensor
    return lambda score, b, h, q, kv: score + slopes[h] * (kv - q), _hidden(args)


def _with_table(args: Any) -> tuple[Any, Any]:
    table = args.score.operands["table"].tensor
    middle = (table.shape[1] - 1) // 2
    return lambda score, b, h, q, kv: score + table[h, kv - q + middle], _hidden(args)


def _capped(args: Any) -> tuple[Any, Any]:
    return lambda score, b, h, q, kv: CAP * torch.tanh(score / CAP), _hidden(args)


def _with_lengths(args: Any) -> tuple[Any, Any]:
    lengths = args.further["seq_lens_kv"].tensor
    return None, lambda b, h, q, kv: kv < lengths[b]


def _of_documents(args: Any) -> tuple[Any, Any]:
    ids = args.mask.operands["ids"].tensor
    return None, lambda b, h, q, kv: (ids[q] == ids[kv]) & (q >= kv)


def _by_blocks(args: Any) -> tuple[Any, Any]:
    table = args.mask.blocks.table.tensor[0, 0]
    return None, lambda b, h, q, kv: table[q // BLOCK, kv // BLOCK]


def numbers_of_documents(problem: Any) -> torch.Tensor:
    """Of each token. Documents have DOCUMENT on average: most have few, some thousands."""
    begins = torch.arange(problem.S) * 7919 % problem.S < problem.S // DOCUMENT
    return begins.cumsum(0)


def share_of_documents(problem: Any) -> float:
    """Of pairs, those within a document."""
    counts = numbers_of_documents(problem).bincount()
    return float((counts / problem.S).square().sum())


def documents(problem: Any, device: str) -> dict[str, Any]:
    """The table of blocks is made before, as flex_attention's is."""
    ids = numbers_of_documents(problem).int().to(device)
    same = ka.masks.MaskMod(lambda b, h, q, kv, ids: ids[q] == ids[kv], ids=ids)
    if problem.causal:
        same &= ka.masks.Causal()
    return {"mask": ka.masks.with_blocks(same, problem.S, problem.S)}


def shown_blocks(problem: Any) -> torch.Tensor:
    """One in SHOWN, and those on the diagonal."""
    count = problem.S // BLOCK
    places = torch.arange(count)
    shown = (places[:, None] * 5 + places * 3) % SHOWN == 0
    return shown | torch.eye(count, dtype=torch.bool)


def blocks(problem: Any, device: str) -> dict[str, Any]:
    table = shown_blocks(problem)[None, None].to(device)
    return {"mask": ka.masks.BlockSparse(table, (BLOCK, BLOCK))}


def numbers_of_keys(problem: Any) -> torch.Tensor:
    """Between a quarter of the room and all of it."""
    steps = torch.arange(problem.B) * 37 % problem.B
    return problem.S // 4 + (steps + 1) * (problem.S * 3 // 4) // problem.B


def lengths(problem: Any, device: str) -> dict[str, Any]:
    return {"seq_lens_kv": numbers_of_keys(problem).int().to(device)}


# Peers -----------------------------------------------------------------------------------


def by_flex(args: Any, functions: Functions) -> Callable[[], torch.Tensor]:
    """flex_attention, compiled; the CPU evaluates the same functions."""
    score, mask = functions(args)
    sink = args.further["sink"].tensor if "sink" in args.further else None
    q_k_v, how = args.tensors[:3], {"score": score, "scale": args.scale, "sink": sink}
    if not args.Q.tensor.is_cuda:
        return functools.partial(evaluated, *q_k_v, mask=mask, **how)
    attend, block_mask_of = _compiled()
    block_mask = None
    if mask is not None:
        batches = args.B if "seq_lens_kv" in args.further else None
        block_mask = block_mask_of(mask, batches, None, args.S_q, args.S_kv, args.device)
    return functools.partial(attend, *q_k_v, block_mask=block_mask, **how)


@functools.cache
def _compiled() -> tuple[Any, Any]:
    from torch.nn.attention.flex_attention import create_block_mask

    torch._dynamo.config.cache_size_limit = 1024  # else what is compiled often runs as it is
    # For these sizes alone: kernels for any are slower.
    return torch.compile(attended, dynamic=False), create_block_mask


def attended(Q: Any, K: Any, V: Any, score: Any, block_mask: Any, scale: float, sink: Any) -> Any:
    """By flex_attention; it has no sink, but tells what one asks for."""
    from torch.nn.attention.flex_attention import AuxRequest, flex_attention

    how = {"score_mod": score, "block_mask": block_mask, "scale": scale}
    how["enable_gqa"] = Q.shape[1] != K.shape[1]
    if sink is None:
        return flex_attention(Q, K, V, **how)
    out, aux = flex_attention(Q, K, V, **how, return_aux=AuxRequest(lse=True))
    return with_share(out, aux.lse, sink).to(Q.dtype)


def with_share(out: torch.Tensor, lse: torch.Tensor, sink: torch.Tensor) -> torch.Tensor:
    """O as far as a sink leaves it."""
    return out * torch.sigmoid(lse - sink[:, None]).unsqueeze(-1)


def evaluated(Q: Any, K: Any, V: Any, score: Any, mask: Any, scale: float, sink: Any) -> Any:
    """What flex_attention computes, with all scores at once."""
    group = Q.shape[1] // K.shape[1]
    q, k, v = (one.double() for one in (Q, *(x.repeat_interleave(group, 1) for x in (K, V))))
    scores = scale * q @ k.mT
    places = torch.meshgrid(*map(torch.arange, scores.shape), indexing="ij")
    if score is not None:
        scores = score(scores, *places)
    if mask is not None:
        scores = scores.masked_fill(~mask(*places), float("-inf"))
    out = scores.softmax(-1) @ v
    if sink is not None:
        out = with_share(out, scores.logsumexp(-1), sink)
    return out.to(Q.dtype)


def by_flash(args: Any, left: int = -1) -> Callable[[], torch.Tensor]:
    """The operator behind torch's flash, which takes windows and slopes as well."""
    Q, K, V = (one.transpose(1, 2) for one in args.tensors[:3])
    how: dict[str, Any] = {"scale": args.scale}
    if left >= 0:
        how |= {"window_size_left": left, "window_size_right": 0}
    if "alibi" in args.further:
        how["alibi_slopes"] = args.further["alibi"].tensor
    given = (Q, K, V, None, None, args.S_q, args.S_kv, 0.0, bool(args.bounds), False)
    return lambda: _aten._flash_attention_forward(*given, **how)[0].transpose(1, 2)


def by_torch(args: Any, backend: SDPBackend) -> Callable[[], torch.Tensor]:
    """torch's function, with a mask of lengths, a bias or dropout, by one of its backends."""
    Q, K, V = args.tensors[:3]
    how: dict[str, Any] = {"scale": args.scale, "enable_gqa": args.H_kv != args.H}
    if "bias" in args.further:
        bias = args.further["bias"].tensor
        if args.bounds:
            hidden = torch.ones(args.S_q, args.S_kv, dtype=torch.bool, device=bias.device).triu(1)
            bias = bias.masked_fill(hidden, float("-inf"))
        how["attn_mask"] = bias
    elif "seq_lens_kv" in args.further:
        places = torch.arange(args.S_kv, device=Q.device)
        lengths = args.further["seq_lens_kv"].tensor
        how["attn_mask"] = (places < lengths[:, None])[:, None, None]
    else:
        how["is_causal"] = bool(args.bounds)
    if args.dropout is not None:
        how["dropout_p"] = DROPPED
    compute = functools.partial(torch.nn.functional.scaled_dot_product_attention, Q, K, V, **how)

    def call() -> torch.Tensor:
        with torch.nn.attention.sdpa_kernel([backend]):
            return compute()

    return call if Q.is_cuda else compute


def _backends(*names: str, comparable: bool = True) -> dict[str, attention.Peer]:
    """Some of torch's."""
    found: dict[str, attention.Peer] = {}
    for name in names:
        peer = functools.partial(by_torch, backend=getattr(SDPBackend, _BACKENDS[name]))
        peer.comparable = comparable  # type: ignore[attr-defined]
        found[name] = peer
    return found


_BACKENDS = {
    "cuDNN": "CUDNN_ATTENTION",
    "torch's flash": "FLASH_ATTENTION",
    "torch's efficient": "EFFICIENT_ATTENTION",
}


def biased(name: str, shape: Callable[[Any], tuple[int, int, int]]) -> Option:
    """shape: Of the bias, but for its keys."""

    def given(problem: Any, device: str) -> dict[str, Any]:
        return {"bias": drawn(*shape(problem), problem.S, device=device)}

    def read(problem: Any) -> int:
        sequences, heads, queries = shape(problem)
        return 2 * sequences * heads * queries * problem.S

    return Option(name, given, _with_bias, _backends("cuDNN", "torch's efficient"), bytes=read)


WIDTHS = Option(
    "heads", lambda problem, device: {},
    lambda args: (None, _hidden(args)), _backends("cuDNN", "torch's flash"),
)  # fmt: skip
SINK = Option(
    "sink", lambda problem, device: {"sink": drawn(problem.H, device=device, dtype=torch.float32)},
    lambda args: (None, _hidden(args)),
)  # fmt: skip
SLOPES = Option(
    "alibi", lambda problem, device: {
        "alibi": drawn(problem.H, device=device, dtype=torch.float32).abs() / 8
    },
    _with_slopes, {"torch's flash": by_flash},
)  # fmt: skip
CAPPED = Option("softcap", lambda problem, device: {"softcap": CAP}, _capped)
OF_ALL = biased("bias of all", lambda problem: (problem.B, problem.H, problem.S))
OF_HEADS = biased("bias of heads", lambda problem: (1, problem.H, problem.S))
OF_PAIRS = biased("bias of pairs", lambda problem: (problem.B, 1, problem.S))
OF_KEYS = biased("bias of keys", lambda problem: (problem.B, 1, 1))
TABLE = Option(
    "function: bias by distance", lambda problem, device: {
        "score_mod": relative,
        "score_operands": {
            "table": drawn(problem.H, 2 * problem.S - 1, device=device, dtype=torch.float32),
            "first": problem.S - 1,
        },
    },
    _with_table,
)  # fmt: skip
DOCUMENTS = Option("documents", documents, _of_documents, seen=share_of_documents)
BLOCKS = Option(
    "blocks", blocks, _by_blocks, seen=lambda problem: float(shown_blocks(problem).float().mean())
)  # fmt: skip
LENGTHS = Option(
    "lengths", lengths, _with_lengths, _backends("cuDNN", "torch's efficient"),
    seen=lambda problem: float(numbers_of_keys(problem).float().mean() / problem.S),
)  # fmt: skip
DROPPING = Option(
    "dropout", lambda problem, device: {"dropout": Dropout(DROPPED, SEED, OFFSET)},
    None, _backends("cuDNN", "torch's flash", comparable=False),
)  # fmt: skip


def with_sink(option: Option) -> Option:
    """The same with a sink."""

    def given(problem: Any, device: str) -> dict[str, Any]:
        return option.given(problem, device) | SINK.given(problem, device)

    return Option(f"{option.name} and a sink", given, option.functions, seen=option.seen)


#: (B, H, H_kv, S, D, causal, option, D_v)
SIZES: tuple[tuple[Any, ...], ...] = (
    (2, 32, 8, 8192, 128, False, window(1023)),
    (2, 16, 8, 8192, 256, False, window(1023)),
    (2, 64, 8, 8192, 64, False, with_sink(window(127))),
    (2, 64, 8, 4096, 64, True, SINK),
    (2, 16, 8, 4096, 256, True, CAPPED),
    (2, 32, 8, 4096, 128, True, CAPPED),
    (2, 32, 32, 4096, 128, True, SLOPES),
    (4, 16, 16, 1024, 64, False, OF_ALL),
    (2, 16, 16, 4096, 128, False, OF_ALL),
    (8, 16, 16, 2048, 64, False, OF_HEADS),
    (2, 32, 32, 4096, 128, True, OF_HEADS),
    (4, 16, 16, 2048, 128, False, OF_PAIRS),
    (32, 16, 16, 512, 64, False, OF_KEYS),
    (8, 16, 16, 2048, 128, False, OF_KEYS),
    (2, 32, 8, 4096, 128, True, TABLE),
    (1, 32, 8, 16384, 128, True, DOCUMENTS),
    (1, 32, 32, 8192, 128, False, BLOCKS),
    (32, 16, 16, 512, 64, False, LENGTHS),
    (8, 32, 8, 2048, 128, False, LENGTHS),
    (4, 16, 16, 4096, 64, True, DROPPING),
    (2, 32, 32, 4096, 128, True, DROPPING),
    (8, 16, 16, 1024, 72, False, WIDTHS),
    (8, 16, 16, 1024, 80, False, WIDTHS),
    (2, 32, 32, 4096, 96, True, WIDTHS),
    (1, 128, 128, 4096, 192, True, WIDTHS, 128),
)

SUITE = attention.Suite(
    "sdpa-options",
    problems=tuple(Problem(*sizes) for sizes in SIZES),
    quick=tuple(Problem(*sizes) for sizes in SIZES[:4]),
)


def main(arguments: Sequence[str] | None = None) -> int:
    return attention.run(SUITE, __doc__, arguments)


if __name__ == "__main__":
    sys.exit(main())

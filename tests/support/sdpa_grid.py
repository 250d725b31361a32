"""Attention of random sizes and strides, with every mask and option, for tests on a GPU.

Cases of a kind that have the same head dimensions share their signature, so that few kernels are
compiled. What must not be read is NaN.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

import kernel_api as ka
from kernel_api import epilogue, masks
from kernel_api.arguments import Dropout
from support import sdpa
from support.sdpa import NAN, backward_of, run

LENGTHS = (1, 3, 64, 113, 203, 256, 384, 799, 1023, 1024, 2048)
#: Of Q and K, and of V.
HEAD_DIMS = (*((D, D) for D in (32, 40, 64, 96, 128, 192, 256)), (192, 128))
#: Heads of queries, and of keys.
HEADS = ((4, 4), (4, 2), (6, 2), (8, 1), (1, 1))
#: Of queries and keys.
BLOCK = (64, 128)
PAGE = 64
#: What a case may have of scores, all heads together.
MOST_SCORES = 1 << 24

BF16, F16, F8 = "bfloat16", "float16", "float8_e4m3fn"


class Draw(sdpa.Draw):
    """On any device; matrices lie in memory in any order of their modes, with gaps or without."""

    def __init__(self, *sizes: int, device: Any, seed: int, pads: tuple[int, ...], **how: Any):
        super().__init__(*sizes, device=device, seed=seed, **how)
        self.choice = random.Random(seed)
        self._pads = pads
        if self.device.type != "meta":
            self._generator = torch.Generator(self.device).manual_seed(seed)

    def random(self, *shape: int, element: Any = None) -> torch.Tensor:
        element = element or self.element
        if self.device.type == "meta":
            return torch.empty(shape, dtype=element, device=self.device)
        return torch.randn(shape, generator=self._generator, device=self.device).to(element)

    def heads(self, heads: int, rows: int, columns: int, *, read: bool = True) -> torch.Tensor:
        extents = {"B": self.B, "H": heads, "S": rows}
        order, pad = self.choice.choice(("BSH", "BHS", "SBH")), self.choice.choice(self._pads)
        shape = [*(extents[mode] for mode in order), columns + pad]
        whole = torch.full(shape, NAN, device=self.device).to(self.element)
        found = whole[..., :columns].permute(*(order.index(mode) for mode in "BHS"), 3)
        return found.copy_(self.random(*found.shape)) if read else found

    def integers(self, values: Any) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32).to(self.device)


# Options ---------------------------------------------------------------------------------

Options = Callable[[Draw], dict[str, Any]]


def nothing(draw: Draw) -> dict[str, Any]:
    return {}


def causal(draw: Draw) -> dict[str, Any]:
    return {"mask": masks.Causal()}


def bottom_right(draw: Draw) -> dict[str, Any]:
    return {"mask": masks.Causal("bottom_right")}


def window(draw: Draw) -> dict[str, Any]:
    left, right = draw.choice.choice((0, 3, 64, 200)), draw.choice.choice((0, 5, 100))
    return {"mask": masks.SlidingWindow(left, right)}


def bands(draw: Draw) -> dict[str, Any]:
    """Two windows, of both alignments."""
    ends = masks.SlidingWindow(draw.choice.choice((10, 300)), 7, "bottom_right")
    return {"mask": masks.SlidingWindow(400, 50) & ends}


def padded(draw: Draw) -> dict[str, Any]:
    return {"mask": masks.Padding() & masks.Causal("bottom_right")}


def biased(draw: Draw) -> dict[str, Any]:
    """What is added has some of the modes in front."""
    shape = (draw.choice.choice((1, draw.B)), draw.choice.choice((1, draw.H)), draw.S_q, draw.S_kv)
    return {"bias": draw.random(*shape), "softcap": draw.choice.choice((2.0, 20.0))}


def sloped(draw: Draw) -> dict[str, Any]:
    given = {"alibi": draw.wides(draw.H) / 16, "sink": draw.wides(draw.H)}
    return {**given, "mask": masks.Causal()}


def sloped_at_the_end(draw: Draw) -> dict[str, Any]:
    return {**sloped(draw), **bottom_right(draw)}


def dropped(draw: Draw) -> dict[str, Any]:
    return {"dropout": Dropout(draw.choice.choice((0.1, 0.5)), (1 << 40) + 3, (1 << 32) - 2)}


def blocks(draw: Draw) -> dict[str, Any]:
    """Rows of blocks that see nothing are among them."""
    rows, columns = (-(-n // size) for n, size in zip((draw.S_q, draw.S_kv), BLOCK, strict=True))
    table = draw.random(draw.choice.choice((1, draw.B)), draw.H, rows, columns) > 0
    table[:, 0, 0] = False
    return {"mask": masks.BlockSparse(table, BLOCK) & masks.Causal("bottom_right")}


def documents(draw: Draw) -> dict[str, Any]:
    """Their blocks say where a document is all that is seen."""
    ids = draw.integers([i * 5 // draw.S_kv for i in range(max(draw.S_q, draw.S_kv))])
    mask = masks.MaskMod(lambda b, h, q, kv, ids: ids[q] == ids[kv], ids=ids) & masks.Causal()
    return {"mask": masks.with_blocks(mask, draw.S_q, draw.S_kv, block_shape=BLOCK)}


def functions(draw: Draw) -> dict[str, Any]:
    """A score function whose derivative is no constant, and a mask of some diagonals."""

    def changed(score: Any, b: Any, h: Any, q: Any, kv: Any, table: Any, gain: Any) -> Any:
        return gain * score * epilogue.sigmoid(score) + table[h, kv - q + 8]

    return {
        "score_mod": changed,
        "score_operands": {"table": draw.wides(draw.H, 16), "gain": 0.7},
        "mask": masks.MaskMod(lambda b, h, q, kv, left: (kv + q + b) % 3 != left, left=1),
    }


def descaled(draw: Draw) -> dict[str, Any]:
    per_head = [draw.wides(draw.B, draw.H_kv).abs() for _ in range(2)]
    scales = dict(zip(("descale_k", "descale_v"), per_head, strict=True))
    return {"mask": masks.Causal(), "descale_q": draw.wides(1)[0].abs(), **scales}


def descaled_at_the_end(draw: Draw) -> dict[str, Any]:
    return {**descaled(draw), **bottom_right(draw)}


# Kinds -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Kind:
    """What cases have in common.

    Attributes:
        options: From the draw to the arguments' options.
        head_dims: Some of HEAD_DIMS.
        count: Of cases for each of them.
        form: ``dense``, ``padded``, ``packed``, ``paged`` or ``packed paged``.
        gradients: Names of those beside dQ, dK and dV; None: there is no backward pass.
        element: Of what is multiplied.
        pads: Elements between rows of heads.
        queries: Lengths that there are.
        statistics: Of rows, beside lse.
    """

    options: Options = nothing
    head_dims: tuple[tuple[int, int], ...] = ((64, 64),)
    count: int = 4
    form: str = "dense"
    gradients: tuple[str, ...] | None = ()
    element: str = BF16
    pads: tuple[int, ...] = (0, 8, 24)
    queries: tuple[int, ...] = LENGTHS
    keys: tuple[int, ...] = LENGTHS
    statistics: tuple[str, ...] = ()


_128, _64_128 = ((128, 128),), ((64, 64), (128, 128))
_FEW = (1, 3, 16)
_BOTH = ("score_max", "score_sum_exp")
KINDS = {
    "plain": Kind(head_dims=HEAD_DIMS, count=2),
    "causal": Kind(causal, head_dims=HEAD_DIMS, count=2),
    "bottom right": Kind(bottom_right, _64_128, count=3),
    "window": Kind(window, _64_128, count=3),
    "bands": Kind(bands, _128),
    "padded": Kind(padded, form="padded", count=5),
    "packed": Kind(bottom_right, _128, form="packed", count=5),
    "packed, everything seen": Kind(head_dims=((96, 96),), form="packed", count=3),
    "bias, softcap": Kind(biased, _128, gradients=("dBias",)),
    "alibi, sink": Kind(sloped, _128, gradients=("dSink",)),
    "dropout": Kind(dropped),
    "blocks": Kind(blocks),
    "documents": Kind(documents, _64_128, count=4),
    "functions": Kind(functions, _128),
    "few queries": Kind(head_dims=_64_128, queries=_FEW, gradients=None),
    "pages": Kind(form="paged", head_dims=_128, queries=_FEW, gradients=None),
    "pages, causal": Kind(
        bottom_right, _64_128, form="paged", count=3, queries=_FEW, gradients=None
    ),
    "unaligned": Kind(head_dims=((40, 40),), count=3, element=F16, pads=(1, 3)),
    "float16": Kind(head_dims=_128, count=3, element=F16),
    "8 bits": Kind(
        descaled, (*_64_128, (256, 256)), count=2, element=F8, pads=(0, 16), gradients=None
    ),
    "far below zero": Kind(head_dims=_64_128, count=2, queries=(64, 192, 320), keys=(192, 320)),
    "few queries, bias, softcap": Kind(biased, _128, count=3, queries=_FEW, gradients=None),
    "few queries, blocks": Kind(blocks, _64_128, count=2, queries=_FEW, gradients=None),
    "few queries, functions": Kind(functions, _128, count=3, queries=_FEW, gradients=None),
    "pages, alibi, sink": Kind(
        sloped_at_the_end, _64_128, form="paged", count=2, queries=_FEW, gradients=None
    ),
    "statistics, sink": Kind(
        sloped_at_the_end, _64_128, form="padded", gradients=None, statistics=_BOTH
    ),
    "statistics, packed": Kind(
        bottom_right,
        ((64, 64), (256, 256)),
        count=2,
        form="packed",
        gradients=None,
        statistics=_BOTH,
    ),
    "statistics, few queries": Kind(
        sloped_at_the_end, _64_128, form="paged", queries=_FEW, gradients=None, statistics=_BOTH
    ),
    "pages of 8 bits": Kind(
        descaled_at_the_end,
        (*_64_128, (256, 256)),
        count=2,
        form="paged",
        element=F8,
        pads=(0, 16),
        gradients=None,
    ),
    "statistics, 8 bits": Kind(
        descaled, _64_128, count=2, element=F8, pads=(0, 16), gradients=None, statistics=_BOTH
    ),
    "pages, many queries": Kind(
        bottom_right, (*_64_128, (96, 96), (256, 256)), form="paged", count=2, gradients=None
    ),
    "pages, packed queries": Kind(
        bottom_right, (*_64_128, (256, 256)), form="packed paged", count=3, gradients=None
    ),
    "pages, few packed queries": Kind(
        sloped_at_the_end,
        _64_128,
        form="packed paged",
        queries=_FEW,
        gradients=None,
        statistics=_BOTH,
    ),
}


@dataclass(frozen=True)
class Case:
    """A problem; the same one every time.

    Attributes:
        kind: One of KINDS.
        sizes: B, H, H_kv, S_q, S_kv, D, D_v.
        seed: Of values and strides; it differs from case to case.
        gradient: Whether it is a backward pass.
    """

    kind: str
    sizes: tuple[int, int, int, int, int, int, int]
    seed: int
    gradient: bool = False

    def __str__(self) -> str:
        direction = "backward" if self.gradient else "forward"
        sizes = "x".join(map(str, self.sizes))
        return f"{direction}-{self.kind}-{sizes}-seed{self.seed}"

    def arguments(self, device: Any) -> Any:
        """Of whichever pass it is; of a backward pass, the reference has run the forward one."""
        draw, args = self._forward(device)
        if not self.gradient:
            return args
        if draw.device.type != "meta":
            run(args)
        dO = torch.full_like(args.out.tensor, NAN)
        dO.copy_(draw.random(*dO.shape))
        if KINDS[self.kind].form == "padded":
            for b, queries in enumerate(self._lengths(0)):
                dO[b, :, queries:] = NAN
                args.out.tensor[b, :, queries:] = NAN
        more = {}
        for name in KINDS[self.kind].gradients or ():
            more[name] = torch.full_like(args.further[name[1:].lower()].tensor, NAN)
        return backward_of(args, dO, **more)

    def _forward(self, device: Any) -> tuple[Draw, Any]:
        kind = KINDS[self.kind]
        how: dict[str, Any] = {"element": kind.element, "device": device, "pads": kind.pads}
        draw = Draw(*self.sizes, seed=self.seed, **how)
        options = kind.options(draw)
        if kind.form == "packed":
            return draw, ka.SdpaArguments(**self._packed(draw, how), **options)
        if kind.form == "packed paged":
            packed = self._packed(draw, how)
            for name in ("cu_seqlens_kv", "max_seqlen_kv"):
                del packed[name]
            pages = self._paged(draw, {"K": draw.keys(), "V": draw.values()})
            return draw, ka.SdpaArguments(**{**packed, **pages}, **options)
        tensors = {
            "Q": draw.queries(),
            "K": draw.keys(),
            "V": draw.values(),
            "out": draw.results(read=False),
            **{name: draw.lse() for name in ("lse", *kind.statistics)},
        }
        if kind.element == F8:
            tensors["out"] = tensors["out"].bfloat16()
        if self.kind == "far below zero":
            _lower(tensors["Q"], tensors["K"])
        if kind.form == "padded":
            tensors |= self._padded(draw, tensors)
        if kind.form == "paged":
            tensors |= self._paged(draw, tensors)
        return draw, ka.SdpaArguments(**tensors, **options)

    def _lengths(self, which: int) -> list[int]:
        """Of each sequence: of queries (0) or of keys (1). The first has all, the last none."""
        most, choice = self.sizes[3 + which], random.Random(self.seed + which)
        lengths = [most, *(choice.randint(0, most) for _ in range(self.sizes[0] - 1))]
        if self.sizes[0] > 2:
            lengths[-1] = 0
        return lengths

    def _padded(self, draw: Draw, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
        lengths = self._lengths(0), self._lengths(1)
        for b, (queries, keys) in enumerate(zip(*lengths, strict=True)):
            tensors["Q"][b, :, queries:] = NAN
            tensors["K"][b, :, keys:] = NAN
            tensors["V"][b, :, keys:] = NAN
        return dict(zip(("seq_lens_q", "seq_lens_kv"), map(draw.integers, lengths), strict=True))

    def _packed(self, draw: Draw, how: dict[str, Any]) -> dict[str, Any]:
        """Q, K, V, out and lse, with their lengths."""
        found: dict[str, Any] = {}
        totals = []
        for which, side in enumerate(("q", "kv")):
            ends = torch.tensor([0, *self._lengths(which)]).cumsum(0)
            totals.append(int(ends[-1]))
            found |= {f"cu_seqlens_{side}": draw.integers(ends.tolist())}
            found |= {f"max_seqlen_{side}": self.sizes[3 + which]}
        sizes = (1, draw.H, draw.H_kv, *totals, draw.D, draw.D_v)
        wide = Draw(*sizes, seed=self.seed, **how)
        tensors = {"Q": wide.queries(), "K": wide.keys(), "V": wide.values()}
        tensors["out"] = wide.results(read=False)
        found |= {name: one[0].transpose(0, 1) for name, one in tensors.items()}
        statistics = ("lse", *KINDS[self.kind].statistics)
        return found | {name: wide.lse()[0] for name in statistics}

    def _paged(self, draw: Draw, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
        """K and V in pages in any order; one of them is NaN, and so is what is behind lengths."""
        B, keys = self.sizes[0], self.sizes[4]
        each = -(-keys // PAGE)
        order = list(range(B * each + 1))
        draw.choice.shuffle(order)
        lengths = [max(length, 1) for length in self._lengths(1)]
        table = torch.tensor(order[: B * each]).view(B, each)
        found: dict[str, Any] = {"page_table": draw.integers(table.tolist())}
        found["seq_lens_kv"] = draw.integers(lengths)
        for name in "KV":
            dense = tensors[name]
            shape = (B * each + 1, draw.H_kv, PAGE, dense.shape[3])
            pages = torch.full(shape, NAN, dtype=draw.element, device=draw.device)
            for b, length in enumerate(lengths):
                for page in range(-(-length // PAGE)):
                    rows = dense[b, :, page * PAGE : min((page + 1) * PAGE, length)]
                    pages[int(table[b, page]), :, : rows.shape[1]] = rows
            found[name] = pages
        return found


def _lower(Q: torch.Tensor, K: torch.Tensor) -> None:
    """All scores are about -150, with a scale of 1/√D."""
    Q[..., :8] = 4.0
    K[..., :8] = -150 * Q.shape[-1] ** 0.5 / 32


def cases() -> Iterator[Case]:
    """Those of all kinds; every second one backward, too."""
    seed = 0
    for name, kind in KINDS.items():
        for D, D_v in kind.head_dims:
            for number in range(kind.count):
                seed += 1
                sizes = (*_extents(kind, random.Random(f"{name} {seed}")), D, D_v)
                yield Case(name, sizes, seed)
                if kind.gradients is not None and (number % 2 == 0 or kind.count > 3):
                    yield Case(name, sizes, seed, gradient=True)


def _extents(kind: Kind, choice: random.Random) -> tuple[int, int, int, int, int]:
    """B, H, H_kv, S_q, S_kv"""
    S_q, S_kv = choice.choice(kind.queries), choice.choice(kind.keys)
    B = 5 if "packed" in kind.form else 3 if kind.form == "padded" else choice.choice((1, 2, 3))
    H, H_kv = choice.choice(HEADS)
    while B * H * S_q * S_kv > MOST_SCORES and H > 1:
        H, H_kv = 2 if H > 2 else 1, 1
    return B, H, H_kv, S_q, S_kv

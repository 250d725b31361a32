"""Problems of attention for the emulator: every option, NaN wherever nothing may be read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

import kernel_api as ka
from kernel_api import epilogue, masks
from kernel_api.arguments import Dropout
from kernel_api.dtypes import dtype
from kernel_api.verification import FACTOR_REORDERED, conduct, judge
from support.ptx.kernel import EmulatedKernel
from support.sdpa import NAN, Draw, backward_of, run

BF16, F16 = "bfloat16", "float16"

Options = Callable[[Draw], dict[str, Any]]


def nothing(draw: Draw) -> dict[str, Any]:
    return {}


@dataclass(frozen=True)
class Case:
    """A problem, and which kernel is to compute it.

    Attributes:
        sizes: B, H, H_kv, S_q, S_kv, D, D_v.
        tile: Queries and keys of its tile.
        aligned: Whether it asks for rows at multiples of 16 bytes.
        lengths: Of queries and of keys, per sequence.
        behind: Rows of packed queries and keys behind the last sequence.
        packed, page_size: How sequences lie; with both, queries are packed and keys in pages.
        options: From the draw to the arguments' further options.
        gradient: The same, of the backward pass alone.
        factor: Q is multiplied with.
        statistics: Whether the largest scores and the sums of exponentials are written.
    """

    name: str
    sizes: tuple[int, int, int, int, int, int, int] = (1, 2, 1, 70, 100, 64, 64)
    tile: tuple[int, int] = (64, 32)
    aligned: bool = True
    element: str = BF16
    lengths: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    packed: bool = False
    behind: tuple[int, int] = (11, 7)
    page_size: int | None = None
    options: Options = nothing
    gradient: Options = nothing
    factor: float = 1.0
    statistics: bool = False
    keywords: dict[str, Any] = field(default_factory=dict)

    def drawn(self) -> Draw:
        return Draw(*self.sizes, element=self.element, pad=8 if self.aligned else 3)

    def arguments(self) -> Any:
        """Of the forward pass."""
        draw = self.drawn()
        given = {**self.keywords, **self.options(draw)}
        if self.packed:
            return ka.SdpaArguments(**self._packed(draw), **given)
        tensors = {
            "Q": draw.queries(),
            "K": draw.keys(),
            "V": draw.values(),
            "out": draw.results(read=False),
            **{name: draw.lse() for name in self._statistics()},
        }
        tensors["Q"] *= self.factor
        if self.lengths is not None:
            tensors = self._padded(tensors)
        if self.page_size is not None:
            tensors |= self._paged(tensors)
        return ka.SdpaArguments(**tensors, **given)

    def backward(self) -> Any:
        """Of the backward pass; the reference has run the forward pass."""
        args = self.arguments()
        run(args)
        draw = self.drawn()
        dO = torch.full_like(args.out.tensor, NAN)
        dO.copy_(draw.random(*dO.shape))
        if self.lengths is not None and not self.packed:
            for b, queries in enumerate(self.lengths[0]):
                dO[b, :, queries:] = NAN
                args.out.tensor[b, :, queries:] = NAN
        if self.lengths is not None and self.packed:
            dO[sum(self.lengths[0]) :] = NAN
            args.out.tensor[sum(self.lengths[0]) :] = NAN
        return backward_of(args, dO, **self.gradient(draw))

    def _padded(self, tensors: dict[str, Any]) -> dict[str, Any]:
        assert self.lengths is not None
        for b, (queries, keys) in enumerate(zip(*self.lengths, strict=True)):
            tensors["Q"][b, :, queries:] = NAN
            tensors["K"][b, :, keys:] = NAN
            tensors["V"][b, :, keys:] = NAN
        lens = (torch.tensor(one, dtype=torch.int32) for one in self.lengths)
        return tensors | dict(zip(("seq_lens_q", "seq_lens_kv"), lens, strict=True))

    def _packed(self, draw: Draw) -> dict[str, Any]:
        """Q, K, V, out with their lengths."""
        assert self.lengths is not None
        found: dict[str, Any] = {}
        for side, lens in zip(("q", "kv"), self.lengths, strict=True):
            ends = torch.tensor((0, *lens)).cumsum(0)
            found |= {f"cu_seqlens_{side}": ends.int(), f"max_seqlen_{side}": max(lens) + 2}
        used, used_kv = (sum(lens) for lens in self.lengths)
        T, T_kv = used + self.behind[0], used_kv + self.behind[1]
        wide = Draw(1, draw.H, draw.H_kv, T, T_kv, draw.D, draw.D_v, element=draw.element)
        wide.pad = draw.pad
        tensors = {
            "Q": wide.queries(),
            "K": wide.keys(),
            "V": wide.values(),
            "out": wide.results(read=False),
        }
        for name, end in (("Q", used), ("K", used_kv), ("V", used_kv)):
            tensors[name][:, :, end:] = NAN
        found |= {name: one[0].transpose(0, 1) for name, one in tensors.items()}
        if self.page_size is not None:
            padded = self._padded({"Q": draw.queries(), "K": draw.keys(), "V": draw.values()})
            found |= self._paged(padded) | {"seq_lens_kv": padded["seq_lens_kv"]}
            del found["cu_seqlens_kv"], found["max_seqlen_kv"]
        return found | {name: wide.lse()[0] for name in self._statistics()}

    def _statistics(self) -> tuple[str, ...]:
        return ("lse", "score_max", "score_sum_exp") if self.statistics else ("lse",)

    def _paged(self, tensors: dict[str, Any]) -> dict[str, Any]:
        """K and V in pages, which lie in disorder; a page that no sequence has is NaN."""
        size, B = self.page_size, self.sizes[0]
        assert size is not None and self.lengths is not None
        each = -(-self.sizes[4] // size)
        order = torch.randperm(B * each + 1, generator=torch.Generator().manual_seed(1))
        table = order[: B * each].view(B, each).int()
        found = {"page_table": table}
        for name in "KV":
            dense = tensors[name]
            heads, columns = dense.shape[1], dense.shape[3]
            whole = torch.full((B * each + 1, heads, size, columns + 8), NAN).to(dense.dtype)
            pages = whole[..., :columns]
            for b in range(B):
                for page in range(each):
                    rows = dense[b, :, page * size : (page + 1) * size]
                    pages[int(table[b, page]), :, : rows.shape[1]] = rows
            found[name] = pages
        return found


def on_meta(args: Any) -> Any:
    """The same for any device: a query asks tensors of a GPU or of none."""

    def meta(tensor: Any) -> Any:
        if not isinstance(tensor, torch.Tensor):
            return tensor
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")

    values = {name: meta(value) for name, value in args.launch_values.items()}
    return args.blueprint()(*(meta(one) for one in args.tensors), **values)


def check(case: Case, args: Any, family: str) -> EmulatedKernel:
    """Runs the family's kernel of the case in the emulator, and compares with the reference."""
    kernels = ka.get_kernels(on_meta(args), cc=80, providers=["cutedsl"])
    found = [
        kernel
        for kernel in kernels
        if kernel.family == family
        and kernel.metadata.design.tile_shape == case.tile
        and (kernel.metadata.operands.Q.alignment == 16) == case.aligned
    ]
    assert found, f"{len(kernels)} kernels, none of tile {case.tile}"
    compiled = EmulatedKernel.compile(found[0], args, "sm_80")
    assert not compiled.artifact.resources.spill_bytes
    broken = conduct(args, lambda: compiled.run(args))
    assert broken is None, broken
    verdict = judge(args, FACTOR_REORDERED)
    assert verdict, f"{found[0].metadata.kernel_name}: {verdict}"
    return compiled


# Options ---------------------------------------------------------------------------------


def dropped(draw: Draw) -> dict[str, Any]:
    seed = torch.tensor(0x1234_5678_9ABC)
    return {"dropout": Dropout(0.3, seed, (1 << 32) - 1)}


def biased(*modes: int, element: str = BF16) -> Options:
    """modes: Those of (B, H, S_q, S_kv) that it has."""

    def options(draw: Draw) -> dict[str, Any]:
        full = (draw.B, draw.H, draw.S_q, draw.S_kv)
        shape = [n if mode in modes else 1 for mode, n in enumerate(full)]
        return {"bias": draw.random(*shape, element=dtype(element).torch)}

    return options


def blocks(draw: Draw) -> dict[str, Any]:
    shape = (16, 40)
    rows, columns = (-(-n // size) for n, size in zip((draw.S_q, draw.S_kv), shape, strict=True))
    table = draw.random(1, draw.H, rows, columns) > 0
    table[:, 0, 0] = False
    return {"mask": masks.BlockSparse(table, shape)}


def in_order(draw: Draw) -> dict[str, Any]:
    return {"deterministic": True}


def documents(*shape: int, further: masks.Mask) -> Options:
    """Of three, and the blocks that they show some of, or all. shape: (queries, keys) of one."""

    def made(draw: Draw) -> dict[str, Any]:
        ids = torch.arange(draw.S_kv) * 16 // (10 * draw.S_kv) + (torch.arange(draw.S_kv) < 9)
        mask = masks.MaskMod(lambda b, h, q, kv, ids: ids[q] == ids[kv], ids=ids) & further
        return {"mask": masks.with_blocks(mask, draw.S_q, draw.S_kv, block_shape=shape)}

    return made


def sloped(draw: Draw) -> dict[str, Any]:
    return {"alibi": draw.wides(draw.H) / 8, "sink": draw.wides(draw.H), "softcap": 3.0}


def far_apart(draw: Draw) -> dict[str, Any]:
    """Sinks, of which the first has an exponential of 0."""
    sink = draw.wides(draw.H)
    sink[0] = -200.0
    return {"sink": sink}


def everything(draw: Draw) -> dict[str, Any]:
    mask = masks.SlidingWindow(50, 9) & masks.SlidingWindow(None, 12, "bottom_right")
    return {
        **sloped(draw),
        **biased(0, 2, 3)(draw),
        **dropped(draw),
        "mask": mask & blocks(draw)["mask"],
    }


def functions(draw: Draw) -> dict[str, Any]:
    """A score function whose derivative is no constant, and a mask of every third diagonal."""

    def changed(score: Any, b: Any, h: Any, q: Any, kv: Any, table: Any, gain: Any) -> Any:
        return gain * score * epilogue.sigmoid(score) + table[h, kv - q + 8]

    mask = masks.MaskMod(lambda b, h, q, kv, left: (kv + q + b) % 3 != left, left=1)
    return {
        "score_mod": changed,
        "score_operands": {"table": draw.wides(draw.H, 16), "gain": 0.7},
        "mask": mask & masks.Causal(),
    }


def whole_numbers(draw: Draw) -> dict[str, Any]:
    """That float32 does not hold, of 32 bits and of 64; some are made of them."""
    most = max(draw.S_q, draw.S_kv)
    marks = torch.arange(most, dtype=torch.int32) // 3 + 2**24
    times = 3 * torch.arange(most) + 2**40

    def seen(b: Any, h: Any, q: Any, kv: Any, marks: Any, times: Any, since: Any) -> Any:
        own = marks[q] == epilogue.maximum(marks[kv], -marks[q] // 2)
        later = epilogue.where(kv % 5 < 3, times[kv] + 1, times[kv]) // 2 > since // 2
        return own | later & (abs(q - kv) != epilogue.cast(h, "int32"))

    def changed(score: Any, b: Any, h: Any, q: Any, kv: Any, marks: Any) -> Any:
        least = kv - 2**31
        third = (least // 3 + least % (2**31 + 5)) / 2**31 + epilogue.cast(2.7, "int32") * 0.1
        hidden = epilogue.where(kv < 1e30, 0.0, -1e30) - abs(q - kv) * 1e3
        return score - (marks[q] - marks[kv]) / 8 + epilogue.minimum(kv, 2 * h) + third + hidden

    return {
        "mask": masks.MaskMod(seen, marks=marks, times=times, since=2**40 + 3 * most // 2),
        "score_mod": changed,
        "score_operands": {"marks": marks},
    }


def of_8_bits(draw: Draw) -> dict[str, Any]:
    """Floats that the oldest of the GPUs do not convert, in operands and on the way."""

    def changed(score: Any, b: Any, h: Any, q: Any, kv: Any, t: Any, u: Any, scale: Any) -> Any:
        kept = epilogue.cast(kv * 0.375, "float8_e4m3fn") - epilogue.cast(q * 1.25, "float8_e5m2")
        return score * t[h, kv] + u[q] * scale[0] + kept * 0.1

    def seen(b: Any, h: Any, q: Any, kv: Any) -> Any:
        return epilogue.cast(kv * 0.5, "float8_e5m2") <= epilogue.cast(q * 1.0, "float8_e4m3fn")

    operands = {
        "t": draw.random(draw.H, draw.S_kv, element=torch.float8_e4m3fn),
        "u": draw.random(draw.S_q, element=torch.float8_e5m2),
        "scale": torch.tensor([0.25]).to(torch.float8_e8m0fnu),
    }
    return {"score_mod": changed, "score_operands": operands, "mask": masks.MaskMod(seen)}


def far_below(draw: Draw) -> dict[str, Any]:
    """Log-sum-exps are about -200."""
    return {"bias": torch.full((1, 1, 1, 1), -200.0)}


def hidden_by(number: float) -> Options:
    """A bias with which some queries see nothing, and others not all keys."""

    def options(draw: Draw) -> dict[str, Any]:
        bias = torch.zeros(1, 1, draw.S_q, draw.S_kv)
        bias[..., :3, :] = bias[..., 5:9, 10:] = number
        return {"bias": bias}

    return options


#: Those in front are run every time.
FORWARD = [
    Case(
        "everything, padded",
        sizes=(2, 2, 1, 66, 40, 40, 24),
        lengths=((65, 3), (38, 20)),
        options=everything,
    ),
    Case(
        "packed, causal",
        sizes=(3, 2, 1, 1, 1, 64, 64),
        tile=(128, 64),
        packed=True,
        lengths=((65, 0, 20), (70, 9, 0)),
        behind=(300, 200),
        keywords={"mask": masks.Causal("bottom_right")},
    ),
    Case(
        "pages, a window",
        sizes=(2, 2, 1, 5, 90, 64, 64),
        tile=(64, 64),
        page_size=24,
        lengths=((5, 3), (90, 31)),
        keywords={"mask": masks.SlidingWindow(30, 2, "bottom_right")},
    ),
    Case("plain", tile=(128, 64), sizes=(1, 2, 2, 150, 130, 64, 64)),
    Case("unaligned", sizes=(2, 1, 1, 65, 66, 40, 24), aligned=False, element=F16),
    Case(
        "unaligned pages",
        sizes=(1, 2, 1, 3, 40, 64, 64),
        aligned=False,
        page_size=7,
        lengths=((2,), (39,)),
    ),
    Case("values wider than queries", sizes=(1, 2, 1, 40, 50, 64, 128)),
    Case("128", tile=(64, 64), sizes=(1, 2, 1, 70, 140, 128, 128), element=F16),
    Case("192, 128", sizes=(1, 1, 1, 40, 70, 192, 128), keywords={"mask": masks.Causal()}),
    Case("192", sizes=(1, 1, 1, 40, 70, 136, 192)),
    Case("256", sizes=(1, 1, 1, 70, 70, 256, 248)),
    Case("softcap, alibi, sink", options=sloped, element=F16),
    Case("a bias", options=biased(1, 2, 3)),
    Case("a bias of keys", options=biased(0, 3, element="float32")),
    Case("blocks", sizes=(1, 3, 1, 70, 100, 64, 64), options=blocks),
    Case("dropout", options=dropped),
    Case("functions", sizes=(2, 2, 1, 70, 100, 64, 64), options=functions),
    Case("functions of 8 bits", sizes=(1, 2, 1, 20, 40, 64, 64), options=of_8_bits),
    Case("no keys", sizes=(1, 2, 1, 70, 0, 64, 64), options=lambda d: {"sink": d.wides(d.H)}),
    Case(
        "more queries than keys",
        sizes=(1, 1, 1, 140, 20, 64, 64),
        keywords={"mask": masks.Causal("bottom_right")},
    ),
    Case("lengths of queries", sizes=(2, 1, 1, 140, 20, 64, 64), lengths=((0, 70), (20, 0))),
    Case("one query", sizes=(3, 8, 1, 1, 150, 64, 64), tile=(64, 64)),
    Case(
        "everything, 128",
        sizes=(2, 4, 2, 70, 80, 40, 72),
        lengths=((66, 3), (77, 20)),
        options=everything,
    ),
    Case(
        "everything, 256",
        tile=(64, 16),
        sizes=(1, 2, 1, 40, 40, 256, 248),
        lengths=((39,), (38,)),
        options=everything,
    ),
    Case("a scale", keywords={"scale": 0.7}, factor=4.0),
    Case(
        "statistics, a sink",
        sizes=(2, 4, 2, 140, 70, 64, 64),
        lengths=((139, 66), (20, 70)),
        options=far_apart,
        statistics=True,
        keywords={"mask": masks.Causal("bottom_right")},
    ),
    Case(
        "statistics, rows that see nothing",
        sizes=(2, 2, 1, 140, 70, 64, 64),
        lengths=((139, 66), (20, 0)),
        statistics=True,
        keywords={"mask": masks.Causal("bottom_right"), "softcap": 3.0},
    ),
    Case(
        "statistics, packed",
        sizes=(3, 2, 1, 1, 1, 128, 128),
        packed=True,
        lengths=((65, 0, 20), (70, 9, 0)),
        statistics=True,
        keywords={"scale": 0.3},
    ),
    Case(
        "packed, pages",
        sizes=(3, 2, 1, 1, 80, 64, 64),
        packed=True,
        page_size=24,
        lengths=((65, 0, 3), (70, 9, 31)),
        options=sloped,
        keywords={"mask": masks.Causal("bottom_right")},
    ),
]


def bias_gradient(*modes: int, element: str = BF16) -> Options:
    """Of a bias that has these modes."""

    def options(draw: Draw) -> dict[str, Any]:
        bias = biased(*modes)(draw)["bias"]
        return {"dBias": torch.full(bias.shape, NAN, dtype=dtype(element).torch)}

    return options


def sink_gradient(draw: Draw) -> dict[str, Any]:
    return {"dSink": torch.full((draw.H,), NAN, dtype=torch.float32)}


def every_gradient(draw: Draw) -> dict[str, Any]:
    return {**bias_gradient(0, 2, 3)(draw), **sink_gradient(draw)}


BACKWARD = [
    Case(
        "everything, padded",
        tile=(64, 16),
        sizes=(2, 2, 1, 66, 40, 40, 24),
        lengths=((65, 3), (38, 20)),
        options=everything,
        gradient=every_gradient,
    ),
    Case(
        "packed, causal",
        sizes=(3, 2, 1, 1, 1, 64, 64),
        tile=(64, 64),
        packed=True,
        lengths=((65, 0, 20), (70, 9, 0)),
        options=lambda d: {"sink": d.wides(d.H)},
        gradient=sink_gradient,
        keywords={"mask": masks.Causal("bottom_right")},
    ),
    Case("plain", tile=(64, 64), sizes=(1, 2, 2, 150, 130, 64, 64)),
    Case("unaligned", sizes=(2, 1, 1, 65, 66, 40, 24), aligned=False, element=F16),
    Case("values wider than queries", sizes=(1, 2, 1, 40, 50, 64, 128)),
    Case("a group of heads, 128", sizes=(1, 3, 1, 70, 70, 128, 128), element=F16),
    Case("192, 128", sizes=(1, 1, 1, 40, 70, 192, 128), keywords={"mask": masks.Causal()}),
    Case("192", sizes=(1, 1, 1, 40, 70, 136, 192)),
    Case("256", sizes=(1, 1, 1, 70, 70, 256, 248)),
    Case("softcap, alibi, sink", options=sloped, gradient=sink_gradient, element=F16),
    Case("a bias", options=biased(1, 2, 3), gradient=bias_gradient(1, 2, 3)),
    Case("a bias of queries", options=biased(2), gradient=bias_gradient(2, element="float32")),
    Case("a bias of keys", options=biased(0, 3), gradient=bias_gradient(0, 3)),
    Case("blocks", tile=(64, 16), sizes=(1, 3, 1, 70, 100, 64, 64), options=blocks),
    Case("dropout", tile=(64, 16), options=dropped),
    Case("functions", tile=(64, 16), sizes=(2, 2, 1, 70, 100, 64, 64), options=functions),
    Case("8 bits", tile=(64, 16), sizes=(1, 2, 1, 20, 40, 64, 64), options=of_8_bits),
    Case("no keys", sizes=(1, 2, 1, 70, 0, 64, 64)),
    Case("no queries", sizes=(1, 2, 1, 0, 70, 64, 64)),
    Case(
        "more queries than keys",
        sizes=(1, 1, 1, 140, 20, 64, 64),
        keywords={"mask": masks.Causal("bottom_right")},
    ),
    Case(
        "a window",
        tile=(64, 64),
        sizes=(1, 2, 1, 150, 150, 64, 64),
        keywords={"mask": masks.SlidingWindow(20, 3)},
    ),
    Case("lengths", sizes=(2, 1, 1, 140, 130, 64, 64), lengths=((0, 70), (20, 65))),
    Case(
        "everything, 128",
        tile=(64, 16),
        sizes=(2, 4, 2, 70, 80, 40, 72),
        lengths=((66, 3), (77, 20)),
        options=everything,
        gradient=every_gradient,
    ),
    Case("scores far below zero", sizes=(1, 1, 1, 64, 64, 64, 64), options=far_below),
]

"""Grouped problems for the emulator: poisoned outputs, groups that begin anywhere, empty ones."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

import kernel_api as ka
from kernel_api import epilogue as ep
from kernel_api.arguments.grouped import GroupedGemmArguments
from kernel_api.verification import conduct, judge
from support.data import strided_empty
from support.ptx.gemm import storage_bytes
from support.ptx.kernel import EmulatedKernel

BF16, F16, F32, F8 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn
SIZES = (0, 65, 1, 7, 0, 64, 3, 0)
SLACK = 4  # rows behind the last group


def matrix(*shape, element=BF16, layout="t", pad=0, seed=None):
    """Of random numbers between rows of NaN; of NaN alone without a seed."""
    found = strided_empty(shape, element, layout, pad=pad)
    storage_bytes(found)[:] = 0xFF
    if seed is not None:
        random = torch.Generator().manual_seed(seed)
        found.copy_(torch.randn(shape, generator=random))
    return found


@dataclass(frozen=True)
class Case:
    """A problem, and which kernel is to compute it.

    Attributes:
        rows: Of its tiles.
        alignment: That it asks of A, in bytes.
        layouts: Of A, B and out: ``t`` has columns side by side.
        pad: Elements between rows.
        epilogue: From the sizes (T, N, E) to the epilogue.
        discrete: Whether the matrices of groups, B or out, lie anywhere.
        scales: Of A and B, of groups of rows: how many elements share one.
        options: Of the arguments.
    """

    name: str
    rows: int = 64
    alignment: int = 16
    sizes: tuple[int, ...] = SIZES
    N: int = 72
    other: int = 40  # K, or M where the groups are summed over
    element: torch.dtype = BF16
    out: torch.dtype | None = None
    layouts: str = "ttt"
    pad: int = 0
    epilogue: Any = None
    indices: tuple[str, ...] = ()
    discrete: bool = False
    scales: str | None = None
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def offsets(self) -> torch.Tensor:
        return torch.tensor(self.sizes).cumsum(0).int()

    @property
    def T(self) -> int:
        return sum(self.sizes) + SLACK

    def operand(self, index: int, *shape: int) -> torch.Tensor:
        element = (self.out or self.element) if index == 2 else self.element
        seed = None if index == 2 else index
        how = {"layout": self.layouts[index], "pad": self.pad, "seed": seed}
        return matrix(*shape, element=element, **how)

    def of_rows(self) -> GroupedGemmArguments:
        """Each group of rows with a matrix of its own."""
        T, N, K, E = self.T, self.N, self.other, len(self.sizes)
        indices, rows = {}, {"A": T, "out": T}
        random = torch.Generator().manual_seed(7)
        if "row_index" in self.indices:
            rows["A"] = 31
            indices["row_index"] = torch.randint(31, (T,), generator=random).int()
        if "out_row_index" in self.indices:
            rows["out"] = T + 9
            indices["out_row_index"] = torch.randperm(T + 9, generator=random)[:T].int()
        epilogue, columns = self.epilogue(T, N, E) if self.epilogue else (None, N)
        A, B = self.operand(0, rows["A"], K), self.operand(1, E, K, N)
        further = {**indices, **self.further(epilogue)}
        A, B = self.in_units(A, B, further) if self.scales else (A, B)
        return GroupedGemmArguments(
            A,
            list(B.unbind()) if isinstance(B, torch.Tensor) and self.discrete else B,
            self.operand(2, rows["out"], columns),
            self.offsets,
            **further,
        )

    def in_units(self, A: Any, B: Any, further: dict[str, Any]) -> tuple[Any, Any]:
        """With their scales; those of a B that lies anywhere are an option."""
        (rows, K), (E, _, N) = A.shape, B.shape
        blocks = [-(-extent // 128) for extent in (K, N)]
        modes, shapes = {
            "tensor": (["per_tensor"] * 2, [(), (E,)]),
            "rows": (["per_row"] * 2, [(rows,), (E, N)]),
            "tokens": (["per_row", "per_tensor"], [(rows,), (E,)]),
            "columns": (["per_tensor", "per_row"], [(), (E, N)]),
            "blocks": (["block_1x128", "block_128x128"], [(rows, blocks[0]), (E, *blocks)]),
        }[self.scales]
        random = torch.Generator().manual_seed(11)
        of_A, of_B = (torch.rand(shape, generator=random) + 0.25 for shape in shapes)
        A = ka.ScaledOperand(A, of_A, ka.ScaleMode(modes[0]))
        if not self.discrete:
            return A, ka.ScaledOperand(B, of_B, ka.ScaleMode(modes[1]))
        further["B_scale"] = of_B
        return A, B

    def of_sums(self) -> GroupedGemmArguments:
        """Groups that are summed over."""
        T, N, M, E = self.T, self.N, self.other, len(self.sizes)
        epilogue, columns = self.epilogue(M, N, E) if self.epilogue else (None, N)
        out = [self.operand(2, M, columns) for _ in self.sizes]
        return GroupedGemmArguments(
            self.operand(0, M, T),
            self.operand(1, T, N),
            out if self.discrete else self.operand(2, E, M, columns),
            self.offsets,
            **self.further(epilogue),
        )

    def further(self, epilogue: Any) -> dict[str, Any]:
        found: dict[str, Any] = {**self.options, "epilogue": epilogue}
        if self.element is F32:
            found["fp32_precision"] = "tf32"
        return found


def swiglu(T, N, E):
    """With all that a mixture of experts has: per token, per group, per column of a group."""

    def fn(accum, alpha, bias, prob):
        x = accum * alpha + bias
        gate, up = ep.glu_pair(x)
        y = ep.silu(gate) * up * prob
        return y, x, ep.amax(y, None), ep.sum(x, -2), ep.max(x, -1)

    epilogue = ka.EpilogueArguments(
        fn,
        alpha=matrix(E, 1, 1, element=F32, seed=3),
        bias=matrix(E, 1, N, seed=4),
        prob=matrix(T, 1, element=F32, seed=5),
        pre=matrix(T, N),
        amax=matrix(E, 1, element=F32)[:, 0],
        columns=matrix(E, N, element=F32),
        rows=matrix(T, 1, element=F32)[:, 0],
    )
    return epilogue, N // 2


def halves(T, N, E):
    """Pairs whose gates are the left half of the columns."""

    def fn(accum):
        gate, up = ep.glu_pair(accum, granularity="halves")
        return ep.silu(gate) * up

    return ka.EpilogueArguments(fn), N // 2


def gated(granularity=32, order="gate_up", stores=True):
    """What transposed tiles compute as well: nothing is reduced to rows or columns."""

    def make(T, N, E):
        def fn(accum, alpha, bias, prob):
            x = accum * alpha + bias
            gate, up = ep.glu_pair(x, order, granularity)
            y = ep.silu(gate) * up * prob
            return (y, x, ep.amax(y, None)) if stores else y

        writes = {"pre": matrix(T, N), "amax": matrix(E, 1, element=F32)[:, 0]}
        epilogue = ka.EpilogueArguments(
            fn,
            alpha=matrix(E, 1, 1, element=F32, seed=3),
            bias=matrix(E, 1, N, seed=4),
            prob=matrix(T, 1, element=F32, seed=5),
            **(writes if stores else {}),
        )
        return epilogue, N // 2

    return make


def spread(T, N, E):
    """Two columns for each of the product."""

    def fn(accum):
        return ep.interleave(accum, accum * accum)

    return ka.EpilogueArguments(fn), 2 * N


def gradient(T, N, E):
    """Reads a matrix per token; means are over what a group has."""

    def fn(accum, saved):
        y = accum * saved
        return y, ep.sum(y, -1), ep.min(y, -2), ep.sum(y, None)

    epilogue = ka.EpilogueArguments(
        fn,
        saved=matrix(T, N, seed=6),
        dprob=matrix(T, 1, element=F32)[:, 0],
        least=matrix(E, N, element=F32),
        total=matrix(E, 1, element=F32)[:, 0],
    )
    return epilogue, N


def scaled(M, N, E):
    def fn(accum, alpha):
        return accum * alpha, ep.amax(accum, None)

    alpha = matrix(E, 1, 1, element=F32, seed=3)
    return ka.EpilogueArguments(fn, alpha=alpha, amax=matrix(E, 1, element=F32)[:, 0]), N


def on_meta(args):
    """The same for any device: a query asks tensors of a GPU or of none."""

    def meta(operand):
        if operand.discrete:
            return [meta(one) for one in operand.memory]
        if operand.mode is not None:
            values = torch.empty_like(operand.tensor, device="meta")
            return ka.ScaledOperand(values, operand.scale.tensor.to("meta"), operand.mode)
        tensor = operand.tensor
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")

    keywords = args._keywords()
    others = {**args.indices, **({} if args.B_scale is None else {"B_scale": args.B_scale})}
    keywords.update({name: meta(one) for name, one in others.items()})
    if args.epilogue is not None:
        operands = {name: meta(one) for name, one in args.epilogue.tensors.items()}
        keywords["epilogue"] = args.epilogue.with_operands(**operands)
    return GroupedGemmArguments(*map(meta, args.operands), **keywords)


def check(kernel: ka.Kernel, args: Any, target: str, seed: int = 0) -> None:
    """Compiles the kernel, runs it in the emulator, and compares with the reference.

    Args:
        seed: Of the interleaving of Hopper's warps.
    """
    compiled = EmulatedKernel.compile(kernel, args, target)
    assert not compiled.artifact.resources.spill_bytes
    broken = conduct(args, lambda: compiled.run(args, seed=seed))
    assert broken is None, broken
    verdict = judge(args)
    assert verdict, f"{kernel.metadata.kernel_name}: {verdict}"

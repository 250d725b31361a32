"""Grouped products are right for groups of any size: their PTX runs in the emulator, without GPU.

Outputs are poisoned, and what belongs to no group has to stay. Sizes are no multiples of a tile;
groups begin anywhere; some are empty.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from support.data import strided_empty
from support.ptx.gemm import storage_bytes
from support.ptx.kernel import EmulatedKernel

import kernel_api as ka
from kernel_api import epilogue as ep
from kernel_api.arguments.grouped import GroupedGemmArguments
from kernel_api.verification import conduct, judge

pytestmark = pytest.mark.compile

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
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
        B = self.operand(1, E, K, N)
        return GroupedGemmArguments(
            self.operand(0, rows["A"], K),
            list(B.unbind()) if self.discrete else B,
            self.operand(2, rows["out"], columns),
            self.offsets,
            **indices,
            **self.further(epilogue),
        )

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


BOTH = ("row_index", "out_row_index")

#: Those in front are run every time.
OF_ROWS = [
    Case("swiglu, gathered and scattered", epilogue=swiglu, N=64, indices=BOTH),
    Case("unaligned, gathered", rows=16, alignment=2, indices=("row_index",), N=37, other=19),
    Case("plain"),
    Case("few rows", rows=16, sizes=(1, 0, 3, 1, 1, 17), N=136),
    Case("gathered and scattered", element=F16, indices=BOTH),
    Case("anywhere", discrete=True, epilogue=gradient, rows=32, indices=("row_index",)),
    Case("columns side by side", rows=32, alignment=2, layouts="nnn", pad=1, N=35, out=F32),
    Case("tf32", element=F32, layouts="tnt"),
    Case("swiglu", epilogue=swiglu, N=192),
    Case("gradient", rows=32, epilogue=gradient, N=136),
    Case("no rows at all", sizes=(0, 0, 0), epilogue=gradient),
    Case("one group", sizes=(129,), rows=128),
    Case("halves of a vector", alignment=4, pad=2, N=36, other=20),
    Case("many groups", rows=16, sizes=(1, 0) * 20, N=64),
]

#: The same.
OF_SUMS = [
    Case("along K", layouts="tnt"),
    Case("scaled, added to", layouts="ntn", epilogue=scaled, options={"accumulate": True}),
    Case("along K in A alone", out=F32),
    Case("weights of a layer", layouts="ntt", sizes=(64, 0, 129, 65)),
    Case("added to", layouts="ntt", out=F32, options={"accumulate": True}),
    Case("scaled", layouts="tnt", epilogue=scaled, N=136),
    Case("anywhere", discrete=True, epilogue=scaled, options={"accumulate": True}),
    Case("anywhere, other columns side by side", discrete=True, layouts="ntn", out=F32),
    Case("unaligned", alignment=2, layouts="tnn", pad=1, N=37, options={"accumulate": True}),
    Case("halves of a vector", alignment=4, layouts="tnt", pad=2, N=38, other=22),
    Case("tf32", layouts="tnt", element=F32),
    Case("no tokens at all", layouts="ntt", sizes=(0, 0)),
]


def integers(scaled):
    """Groups of rows of 8-bit integers; scaled: one factor per row, and per column of a group."""
    case, random = Case("integers", rows=32), torch.Generator().manual_seed(0)
    T, E, N, K = case.T, len(SIZES), 72, 48

    def drawn(*shape):
        return torch.randint(-128, 128, shape, generator=random, dtype=torch.int8)

    A, B = drawn(T, K), drawn(E, N, K).transpose(1, 2)
    if scaled:
        A = ka.ScaledOperand(A, torch.rand(T, generator=random), ka.ScaleMode.PER_ROW)
        B = ka.ScaledOperand(B, torch.rand(E, N, generator=random), ka.ScaleMode.PER_ROW)
    out = matrix(T, N, element=BF16) if scaled else torch.zeros(T, N, dtype=torch.int32)
    return case, GroupedGemmArguments(A, B, out, case.offsets)


EVERY = bool(os.environ.get("KERNEL_API_EMULATE"))
FIRST = 2  # of each list, run every time


def on_meta(args):
    """The same for any device: a query asks tensors of a GPU or of none."""

    def meta(operand):
        if operand.mode is not None:
            values = torch.empty_like(operand.tensor, device="meta")
            return ka.ScaledOperand(values, operand.scale.tensor.to("meta"), operand.mode)
        if getattr(operand, "discrete", False):
            return [meta(one) for one in operand.memory]
        tensor = operand.tensor
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")

    keywords = args._keywords()
    keywords.update({name: meta(index) for name, index in args.indices.items()})
    if args.epilogue is not None:
        operands = {name: meta(one) for name, one in args.epilogue.tensors.items()}
        keywords["epilogue"] = args.epilogue.with_operands(**operands)
    return GroupedGemmArguments(*map(meta, args.operands), **keywords)


def kernels_of(args):
    """Those of the Ampere families that take the arguments, the best aligned first."""
    kernels = ka.get_kernels(on_meta(args), cc=80, providers=["cutedsl"])
    found = [kernel for kernel in kernels if kernel.metadata.targets == ("sm_80",)]
    return sorted(found, key=lambda kernel: -kernel.metadata.operands.A.alignment)


def check(case, args):
    kernels = kernels_of(args)
    of_size = [k for k in kernels if k.metadata.design.tile_shape[0] == case.rows]
    assert of_size, f"{len(kernels)} kernels, none of {case.rows} rows"
    assert of_size[0].metadata.operands.A.alignment == case.alignment
    compiled = EmulatedKernel.compile(of_size[0], args, "sm_80")
    assert not compiled.artifact.resources.spill_bytes
    broken = conduct(args, lambda: compiled.run(args))
    assert broken is None, broken
    verdict = judge(args)
    assert verdict, f"{of_size[0].metadata.kernel_name}: {verdict}"


def named(cases):
    chosen = cases if EVERY else cases[:FIRST]
    return {"argvalues": chosen, "ids": [case.name for case in chosen]}


@pytest.mark.parametrize("case", **named(OF_ROWS))
def test_groups_of_rows_are_multiplied_with_their_own_matrix(case):
    check(case, case.of_rows())


@pytest.mark.parametrize("case", **named(OF_SUMS))
def test_groups_are_summed_over(case):
    check(case, case.of_sums())


@pytest.mark.skipif(not EVERY, reason="KERNEL_API_EMULATE is not set")
@pytest.mark.parametrize("scaled", [False, True])
def test_groups_of_rows_of_integers_are_multiplied(scaled):
    check(*integers(scaled))

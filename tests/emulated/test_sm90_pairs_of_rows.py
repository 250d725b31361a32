"""Pairs of columns in transposed tiles of the Hopper GEMM, where they are rows: in the emulator.

Few rows of A become few columns there, and TMA deals out the rows of the weights so that a thread
has both of a pair.
"""

import os
from dataclasses import dataclass

import pytest
import torch
from support.fusion_cases import BF16, F16, F32, on_meta
from support.fusions import Draw, pairs
from support.ptx.kernel import EmulatedKernel

import kernel_api as ka
from kernel_api import epilogue as ep
from kernel_api.verification import FACTOR_REORDERED, judge

pytestmark = pytest.mark.compile

EVERY = bool(os.environ.get("KERNEL_API_EMULATE"))
F8 = torch.float8_e4m3fn


@dataclass(frozen=True)
class Case:
    """A gated product with all that may be read and written beside.

    Attributes:
        precision: That float32 is multiplied in.
        by_columns: Whether the product has its rows side by side.
    """

    granularity: int | str = 32
    order: str = "gate_up"
    M: int = 7
    N: int = 192
    K: int = 136
    batch: int | None = None
    element: torch.dtype = BF16
    pad: int = 8
    stores: bool = True
    reduces: bool = False
    precision: str | None = None
    by_columns: bool = False

    def arguments(self) -> ka.GemmArguments:
        layout = "n" if self.by_columns else "t"
        wide = BF16 if self.element is F8 else self.element
        draw = Draw(self.M, self.N, self.K, self.batch, layout, self.pad, 1, wide)
        A, B = draw.A.to(self.element), draw.B.to(self.element)
        out, stored = draw.written(self.N // 2, wide), draw.written(element=wide)
        largest, total = (draw.reduced(*draw.batches, element=F32) for _ in range(2))
        reads = {
            "alpha": draw.random(*draw.batches, 1, 1, element=F32),
            "bias": draw.random(*draw.batches, 1, self.N, element=wide) + 1,
            "prob": draw.random(*draw.batches, self.M, 1, element=F32),
            "half": draw.random(*draw.batches, self.M, self.N // 2, element=wide),
        }
        writes = {"stored": stored} if self.stores else {}
        if self.reduces:
            writes |= {"largest": largest, "total": total}

        def fn(accum, alpha, bias, prob, half):
            x = accum * alpha + bias
            gate, up = ep.glu_pair(x, self.order, self.granularity)
            y = ep.silu(gate) * up * prob + half
            found = (y, *((x,) if self.stores else ()))
            return (*found, ep.amax(y, None), ep.sum(x, None)) if self.reduces else found

        epilogue = ka.EpilogueArguments(fn, **reads, **writes)
        options = {"fp32_precision": self.precision} if self.precision else {}
        return ka.GemmArguments(A, B, out, epilogue=epilogue, **options)


def transposed(args):
    """Kernels that compute the transposed product, those with clusters first."""
    kernels = ka.get_kernels(on_meta(args), cc=90, providers=["cutedsl"])
    found = [k for k in kernels if getattr(k.metadata.design, "swap_ab", False)]
    return sorted(found, key=lambda k: -k.metadata.design.cluster_size)


def check(kernel, args):
    compiled = EmulatedKernel.compile(kernel, args)
    assert not compiled.artifact.resources.spill_bytes
    compiled.run(args, multiprocessors=2, seed=1)
    verdict = judge(args, FACTOR_REORDERED)
    assert verdict, f"{kernel.metadata.kernel_name}: {verdict}"


CASES = {
    "pairs": Case(N=448, M=17, reduces=True),
    "halves": Case("halves", "up_gate", M=33, N=448, stores=False),
    "one row": Case(order="up_gate", M=1),
    "halves of one row": Case("halves", M=1, N=64, reduces=True, pad=3),
    "batches": Case(M=33, batch=2, reduces=True),
    "batches of halves": Case("halves", M=9, batch=3, reduces=True, pad=3),
    "wider": Case(64, M=9, N=384),
    "neighbours of 8": Case(8, N=144, stores=False),
    "by columns": Case(M=24, by_columns=True, stores=False),
    "halves by columns": Case("halves", M=17, pad=3, by_columns=True),
    "float16": Case("halves", element=F16),
    "8 bits": Case(element=F8, K=144),
    "halves of 8 bits": Case("halves", element=F8, K=272, M=33, reduces=True),
    "tfloat32": Case("halves", N=128, element=F32, precision="tf32"),
    "float32": Case(N=128, element=F32, precision="tf32x3"),
}


@pytest.mark.parametrize("name", CASES if EVERY else list(CASES)[:2])
def test_pairs_are_right_in_transposed_tiles(name):
    args = CASES[name].arguments()
    kernels = transposed(args)
    assert kernels
    for kernel in kernels if EVERY else kernels[:1]:
        check(kernel, args)


@pytest.mark.parametrize("granularity", [8, 32, "halves"] if EVERY else [32])
@pytest.mark.parametrize("order", ["gate_up", "up_gate"] if EVERY else ["up_gate"])
def test_pairs_of_whole_numbers_are_exact(granularity, order):
    M, N, K = 17, 192, 72
    drawn = torch.Generator().manual_seed(3)
    A, B = (torch.randint(-3, 4, shape, generator=drawn).to(BF16) for shape in ((M, K), (N, K)))
    out = torch.full((M, N // 2), float("nan"))

    def fn(accum):
        gate, up = ep.glu_pair(accum, order, granularity)
        return gate * (up + 1.0)

    args = ka.GemmArguments(A, B.t(), out, epilogue=ka.EpilogueArguments(fn))
    gate, up = pairs(A.double() @ B.t().double(), order, granularity)
    exact = gate * (up + 1)
    assert exact.abs().max() < 1 << 24
    for kernel in transposed(args)[:: 1 if EVERY else 100]:
        out.fill_(float("nan"))
        EmulatedKernel.compile(kernel, args).run(args, multiprocessors=2, seed=1)
        assert torch.equal(out.double(), exact), kernel.metadata.kernel_name


@pytest.mark.parametrize("granularity", [32, "halves"] if EVERY else ["halves"])
def test_gradients_of_pairs_are_written_where_they_belong(granularity):
    draw = Draw(M=13, N=192, K=72, element=BF16, pad=8)
    args = ka.fusions.gemm_recompute_dglu(
        draw.A,
        draw.B,
        out=draw.written(),
        upstream=draw.matrix(96),
        bias=draw.columns(),
        granularity=granularity,
    )
    for kernel in transposed(args)[:: 1 if EVERY else 100]:
        check(kernel, args)

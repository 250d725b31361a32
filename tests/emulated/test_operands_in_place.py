"""An operand of an epilogue may be out itself: every kind of kernel reads an element before whoever
computes it writes it. The emulator says so of all threads, however they take turns."""

import dataclasses

import pytest
import torch
from support.fusion_cases import on_meta
from support.memcheck import chosen
from support.ptx.kernel import EmulatedKernel
from support.sampling import some

import kernel_api as ka
from kernel_api.verification import FACTOR_REORDERED, compare

pytestmark = pytest.mark.compile

TARGETS = {"sm80": "sm_80", "sm90": "sm_90a"}


@dataclasses.dataclass(frozen=True)
class Case:
    """Of C and out one tensor.

    Attributes:
        K: Large, for kernels that cut it.
        pad: Columns between rows of out.
    """

    M: int
    N: int
    K: int
    element: torch.dtype
    out: torch.dtype
    pad: int = 0
    batch: int | None = None

    def arguments(self):
        """With what out holds before, too."""
        draw = torch.Generator().manual_seed(self.M)

        def drawn(*shape):
            lead = () if self.batch is None else (self.batch,)
            return torch.randn(*lead, *shape, generator=draw)

        A, B = drawn(self.M, self.K).to(self.element), drawn(self.N, self.K).to(self.element).mT
        C = drawn(self.M, self.N + self.pad).to(self.out)[..., : self.N]
        return ka.fusions.gemm(A, B, out=C, C=C, alpha=0.75, beta=-1.25), C.clone()


#: Tiles of the last ones go beyond out. There some kernels read the nearest elements of C and use
#: nothing of them, which the emulator does not know.
CASES = [
    Case(128, 128, 136, torch.bfloat16, torch.float32),
    Case(128, 128, 72, torch.bfloat16, torch.bfloat16, batch=2),
    Case(67, 72, 264, torch.bfloat16, torch.float32),
    Case(13, 136, 1032, torch.float16, torch.float16, pad=8),
    Case(3, 200, 520, torch.bfloat16, torch.bfloat16),
    Case(33, 77, 53, torch.bfloat16, torch.bfloat16),
]


def reads_the_nearest(kernel):
    design = kernel.metadata.design
    return kernel.family_name().startswith("sm80") or getattr(design, "parallel", False)


def kinds():
    """Of every case, the first kernel of each kind that is offered."""
    for place, case in enumerate(CASES):
        args, _ = case.arguments()
        for kernel in chosen(on_meta(args), 90):
            if case.M == 128 or not reads_the_nearest(kernel):
                yield pytest.param(place, kernel, id=f"{place}-{kernel.metadata.kernel_name}")


@pytest.mark.parametrize(("place", "kernel"), some(kinds(), 4))
def test_an_operand_may_be_out_itself(place, kernel):
    args, before = CASES[place].arguments()
    assert args.in_place == ("C",)
    A, B = (operand.tensor for operand in (args.A, args.B))
    exact = 0.75 * (A.double() @ B.double()) - 1.25 * before.double()
    base = (0.75 * (A.float() @ B.float()) - 1.25 * before.float()).to(before.dtype)
    target = TARGETS[kernel.family_name().partition(".")[0]]
    EmulatedKernel.compile(kernel, args, target).run(args, seed=place)
    verdict = compare(args.out.tensor, exact, base, factor=FACTOR_REORDERED)
    assert verdict, verdict

"""Grids of problems with more matrices, rows or sequences than a grid has blocks along y and z.

The host code of kernels says what it would launch; nothing is computed.
"""

from collections.abc import Callable
from math import prod
from typing import Any

import pytest
import torch
from support.ptx.hopper import within_limits
from support.ptx.kernel import EmulatedKernel
from support.sampling import some

import kernel_api as ka

pytestmark = pytest.mark.compile

MANY = 65536 + 1
BF16, F32, F8 = torch.bfloat16, torch.float32, torch.float8_e4m3fn


def matrices(device: str, *shapes: tuple[int, ...]) -> list[torch.Tensor]:
    return [torch.empty(shape, dtype=BF16, device=device) for shape in shapes]


def products(device: str) -> Any:
    return ka.GemmArguments(*matrices(device, (MANY, 3, 8), (MANY, 8, 16), (MANY, 3, 16)))


def unaligned_products(device: str) -> Any:
    return ka.GemmArguments(*matrices(device, (MANY, 3, 7), (MANY, 7, 5), (MANY, 3, 5)))


def unaligned_rows(device: str) -> Any:
    return ka.GemmArguments(*matrices(device, (1 << 23, 9), (9, 7), (1 << 23, 7)))


def groups(device: str) -> Any:
    A, B, out = matrices(device, (MANY, 8), (MANY, 8, 16), (MANY, 16))
    offsets = torch.empty(MANY, dtype=torch.int32, device=device)
    return ka.GroupedGemmArguments(A, B, out, offsets)


def heads(count: int, element: torch.dtype, device: str) -> list[torch.Tensor]:
    return [torch.empty(MANY, 1, 8, 64, dtype=element, device=device) for _ in range(count)]


def attention(device: str) -> Any:
    return ka.SdpaArguments(*heads(4, BF16, device))


def attention_of_8_bits(device: str) -> Any:
    return ka.SdpaArguments(*heads(3, F8, device), *heads(1, BF16, device))


def gradients(device: str) -> Any:
    Q, K, V, out, dO, *rest = heads(8, BF16, device)
    lse = torch.empty(MANY, 1, 8, dtype=F32, device=device)
    return ka.SdpaBackwardArguments(Q, K, V, out, dO, lse, *rest)


def elements(device: str) -> Any:
    x, out = matrices(device, (MANY, 3, 8), (MANY, 3, 8))
    return ka.ElementwiseArguments(x, out)


def rows(device: str) -> Any:
    x, out = matrices(device, (1 << 23, 8), (1 << 23, 8))
    return ka.fusions.rmsnorm(x, out=out)


PROBLEMS = (
    products, unaligned_products, unaligned_rows, groups, attention, attention_of_8_bits,
    gradients, elements, rows,
)  # fmt: skip


def tile_of(kernel: ka.Kernel) -> int:
    return prod(getattr(kernel.metadata.design, "tile_shape", ()))


def of_families(args: Any) -> dict[str, ka.Kernel]:
    """One kernel of each that is offered, and one that adds up parts of tiles in a kernel of its
    own: those with the smallest tiles, of which there are most."""
    found: dict[str, ka.Kernel] = {}
    for kernel in sorted(ka.get_kernels(args, cc=90, providers=["cutedsl"]), key=tile_of):
        found.setdefault(kernel.family_name(), kernel)
        if getattr(kernel.metadata.design, "parallel", False):
            found.setdefault(f"{kernel.family_name()}, sums behind", kernel)
    return found


@pytest.mark.parametrize("problem", some(PROBLEMS, 5), ids=lambda made: made.__name__)
def test_grids_are_within_the_limits_of_gpus(problem: Callable[[str], Any]) -> None:
    found = of_families(problem("meta"))
    assert found, str(ka.explain(problem("meta"), cc=90))
    args = problem("cpu")
    for name, kernel in found.items():
        for launch in EmulatedKernel.compile(kernel, args).launches(args):
            assert within_limits(launch.grid), (name, launch.kernel, launch.grid)


def test_modes_of_more_than_32_bits_count_are_refused() -> None:
    def offered(K: int) -> list[ka.Kernel]:
        A, B, out = (
            torch.empty(shape, dtype=BF16, device="meta") for shape in ((8, K), (K, 8), (8, 8))
        )
        return ka.get_kernels(ka.GemmArguments(A, B, out), cc=90, providers=["cutedsl"])

    assert offered((1 << 29) - 8)
    assert not offered(1 << 29)

"""Suite grouped: a matrix per group of tokens, beside torch._grouped_mm.

    python benchmarks/gemm_grouped.py [--only TEXT] [--candidates N | --all] [--seconds S]

Groups are even, follow Zipf's law, or half of them are empty. Few tokens on many experts can only
be as fast as the experts' weights are read: ``of_ceiling`` is the kernel's share of what a copy
moves, as in the suite gemm-decode; only experts that have tokens count. ``sums`` are gradients of
weights.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import gemm_decode
import harness
import problems
import rows
import suite
import torch
from peers import Peer

import kernel_api as ka

BF16 = torch.bfloat16


def even(groups: int, tokens: int) -> torch.Tensor:
    sizes = torch.full((groups,), tokens // groups)
    sizes[: tokens % groups] += 1
    return sizes


def zipf(groups: int, tokens: int) -> torch.Tensor:
    """The i-th most popular has 1/i of the first, in random order."""
    order = torch.randperm(groups, generator=torch.Generator().manual_seed(1))
    return _shares(1 / (1 + order.double()), tokens)


def half_empty(groups: int, tokens: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    shares = torch.rand(groups, generator=generator, dtype=torch.float64)
    shares[torch.randperm(groups, generator=generator)[: groups // 2]] = 0
    return _shares(shares, tokens)


def routed(groups: int, tokens: int) -> torch.Tensor:
    """Every token goes anywhere."""
    chosen = torch.randint(groups, (tokens,), generator=torch.Generator().manual_seed(1))
    return torch.bincount(chosen, minlength=groups)


def _shares(shares: torch.Tensor, tokens: int) -> torch.Tensor:
    sizes = (shares / shares.sum() * tokens).long()
    sizes[sizes.argmax()] += tokens - sizes.sum()
    return sizes


SIZES: dict[str, Callable[[int, int], torch.Tensor]] = {
    "even": even,
    "zipf": zipf,
    "half empty": half_empty,
    "routed": routed,
}


@dataclass(frozen=True)
class Problem(problems.Problem):
    """M tokens in groups, each with a B (K, N) of its own.

    Attributes:
        groups: How many.
        sizes: Which of SIZES.
        sums: Whether tokens are summed over instead: a gradient of (K, N) for each group.
    """

    groups: int = 8
    sizes: str = "even"
    sums: bool = False

    @property
    def label(self) -> str:
        what = " sums" if self.sums else ""
        return f"{self.groups} groups, {self.sizes}, {self.M}x{self.N}x{self.K} (T x N x K){what}"

    @functools.cached_property
    def tokens(self) -> torch.Tensor:
        """Of every group."""
        return SIZES[self.sizes](self.groups, self.M)

    @functools.cached_property
    def bytes(self) -> int:
        """What must move at least; experts without tokens need not."""
        matrices = self.groups if self.sums else int((self.tokens > 0).sum())
        return 2 * (self.M * (self.N + self.K) + matrices * self.N * self.K)

    def operands(self, device: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(A, B, offsets) as they are multiplied."""
        offsets = self.tokens.cumsum(0).int().to(device)
        drawn = functools.partial(torch.randn, device=device, dtype=BF16)
        if self.sums:
            return drawn(self.M, self.K).t(), drawn(self.M, self.N), offsets
        return drawn(self.M, self.K), drawn(self.groups, self.N, self.K).mT, offsets

    def arguments(self, device: str) -> ka.GroupedGemmArguments:  # type: ignore[override]
        A, B, offsets = self.operands(device)
        shape = (self.groups, self.K, self.N) if self.sums else (self.M, self.N)
        return ka.GroupedGemmArguments(A, B, A.new_empty(shape), offsets)


def peers_of(problem: problems.Problem) -> dict[str, Peer]:
    return {"torch._grouped_mm": _grouped_mm}


def _grouped_mm(args: Any) -> Callable[[], Any]:
    A, B, _, offsets = args.tensors
    return functools.partial(torch._grouped_mm, A, B, offs=offsets)


def beside(
    problem: problems.Problem, args: Sequence[ka.GemmArguments]
) -> Mapping[str, harness.Calls]:
    return gemm_decode.beside(problem, args) if _is_decode(problem) else {}


def extra(
    problem: problems.Problem, microseconds: float, medians: Mapping[str, float]
) -> Mapping[str, Any]:
    return gemm_decode.extra(problem, microseconds, medians) if _is_decode(problem) else {}


def _is_decode(problem: problems.Problem) -> bool:
    return cast(Problem, problem).sizes == "routed"


def report(measured: list[rows.Row]) -> list[str]:
    said = [
        f"{row['problem']}: {row['ratio']:.3f} of the peer"
        + (f", {100 * row['of_ceiling']:.1f} % of the copy" if "of_ceiling" in row else "")
        for row in measured
        if not row["rank"]
    ]
    return said + suite.mean_ratio(measured)


UNEVEN = ("even", "zipf", "half empty")
#: (groups, tokens, N, K)
LARGE = ((8, 16384, 4096, 4096), (64, 16384, 2048, 2048))
#: The same, of tokens times 8 for DeepSeek-V3's experts and times 2 for Mixtral-8x7B's: up and
#: gate, then down; and of one or two of the experts that are spread over many GPUs.
FEW = (
    *((256, tokens, 4096, 7168) for tokens in (256, 512, 1024, 4096)),
    (256, 256, 7168, 2048),
    *((8, tokens, N, K) for tokens in (32, 512) for N, K in ((28672, 4096), (4096, 14336))),
    *((1, 64, N, K) for N, K in ((4096, 7168), (7168, 2048))),
    (2, 128, 4096, 7168),
)

SUITE = suite.Suite(
    "grouped",
    (
        *(Problem(T, N, K, groups=E, sizes=sizes) for E, T, N, K in LARGE for sizes in UNEVEN),
        *(Problem(T, N, K, groups=E, sizes="routed") for E, T, N, K in FEW),
        *(
            Problem(T, N, K, groups=E, sizes=sizes, sums=True)
            for E, T, N, K in LARGE
            for sizes in UNEVEN
        ),
    ),
    peers=peers_of,
    beside=beside,
    extra=extra,
    report=report,
)


def main(arguments: Sequence[str] | None = None) -> int:
    return suite.run(SUITE, suite.options(SUITE.name, __doc__).parse_args(arguments))


if __name__ == "__main__":
    sys.exit(main())

"""Operands of products of groups: offsets with and without empty groups, tensors drawn."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

import kernel_api as ka
from support.epilogues import reference_kernel

#: Where groups end, and tokens in all.
GROUPS = {
    "empty first, middle and last": ([0, 5, 5, 12, 13, 13], 13),
    "all empty": ([0, 0, 0], 6),
    "one expert": ([7], 7),
    "one token": ([0, 1], 1),
    "slack": ([3, 4, 4, 9], 14),
    "one expert and slack": ([7], 9),
    "no tokens": ([0, 0], 0),
}


def ends(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


#: Row numbers are integers of the same type.
index = ends

#: Of three groups, the second of which is empty; of 20 tokens two belong to none.
OFFSETS = ends(4, 4, 18)


def zeros(*shape: int, element: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(shape, dtype=element)


def of_rows(**options: object) -> ka.GroupedGemmArguments:
    """20 tokens and 3 experts."""
    return ka.GroupedGemmArguments(
        zeros(20, 8), zeros(3, 8, 6), zeros(20, 6), OFFSETS, **options
    )  # fmt: skip


def of_sums(**options: object) -> ka.GroupedGemmArguments:
    """Sums over the same tokens."""
    return ka.GroupedGemmArguments(
        zeros(8, 20), zeros(20, 6), zeros(3, 8, 6), OFFSETS, **options
    )  # fmt: skip


@dataclass
class GroupedDraw:
    """Random operands of products of groups of rows, in float64 unless said otherwise.

    What belongs to no group is NaN.
    """

    ends: list[int]
    T: int
    N: int
    K: int
    seed: int = 0
    element: torch.dtype = torch.float64
    drawn: torch.Generator = field(init=False)

    def __post_init__(self) -> None:
        self.drawn = torch.Generator().manual_seed(self.seed)

    @property
    def E(self) -> int:
        return len(self.ends)

    @property
    def offsets(self) -> torch.Tensor:
        return ends(*self.ends)

    @property
    def used(self) -> int:
        """Tokens that belong to a group."""
        return self.ends[-1]

    @property
    def groups(self) -> list[slice]:
        return list(map(slice, [0, *self.ends], self.ends))

    @property
    def expert(self) -> torch.Tensor:
        """Of each token that belongs to one."""
        sizes = [group.stop - group.start for group in self.groups]
        return torch.arange(self.E).repeat_interleave(torch.tensor(sizes))

    def random(self, *shape: int, element: torch.dtype | None = None) -> torch.Tensor:
        values = torch.randn(shape, generator=self.drawn, dtype=torch.float64)
        return values.to(element or self.element)

    def per_token(self, *shape: int, element: torch.dtype | None = None) -> torch.Tensor:
        found = self.random(self.T, *shape, element=element)
        found[self.used :] = float("nan")
        return found

    @property
    def A(self) -> torch.Tensor:
        return self.per_token(self.K)

    @property
    def B(self) -> torch.Tensor:
        """K-major, as the weights of torch.nn.Linear are."""
        return self.random(self.E, self.N, self.K).transpose(-1, -2) / self.K**0.5

    def written(self, *shape: int, element: torch.dtype | None = None) -> torch.Tensor:
        """Full of NaN."""
        return torch.full(shape, float("nan"), dtype=element or self.element)

    def product(self, A: torch.Tensor, B: torch.Tensor) -> torch.Tensor:
        """Of the tokens that belong to a group."""
        parts = [A[group] @ B[e] for e, group in enumerate(self.groups)]
        return torch.cat(parts)

    def summed(self, values: torch.Tensor) -> torch.Tensor:
        """Over the tokens of each group."""
        return torch.stack([values[group].sum(0) for group in self.groups])

    def largest(self, values: torch.Tensor) -> torch.Tensor:
        """Magnitudes over the tokens and columns of each group; 0 of none."""
        of = (values[group].abs() for group in self.groups)
        return torch.stack([one.max() if one.numel() else values.new_zeros(()) for one in of])


def computed(args: ka.GroupedGemmArguments) -> dict[str, torch.Tensor]:
    """Every output as the reference kernel writes it."""
    reference_kernel(args).run(args)
    return {name: operand.tensor for name, operand in args.outputs.items()}

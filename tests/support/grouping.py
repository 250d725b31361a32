"""Operands of rows that are sorted by group, and what they become, written as a loop."""

from __future__ import annotations

from typing import Any

import torch

import kernel_api as ka
from support.elementwise import drawn, matrix, on


def index_of(M: int, k: int, E: int, element: Any = torch.int64, seed: int = 0) -> torch.Tensor:
    """(M, k), with a gap between its rows; about one in six names no group, be it by -1, E, or what
    no group could be."""
    generator = torch.Generator().manual_seed(seed)
    limits, most = torch.iinfo(element), torch.iinfo(torch.int64).max
    found = torch.randint(E, (M, k), generator=generator)
    absent = torch.rand((M, k), generator=generator) < 1 / 6
    nowhere = torch.tensor([max(-1, limits.min), E, limits.min, min(limits.max, most)])
    others = nowhere[torch.randint(4, (M, k), generator=generator)]
    return matrix((M, k), element, pad=1).copy_(torch.where(absent, others, found))


def arguments(
    M: int,
    k: int,
    E: int,
    *,
    element: Any = torch.int64,
    weight: Any = torch.float32,
    device: Any = "cpu",
    seed: int = 0,
    index: Any = None,
) -> ka.GroupRowsArguments:
    """Outputs are poisoned, and their rows apart."""
    index = index_of(M, k, E, element, seed) if index is None else index
    outputs = [
        matrix(shape, torch.int32, pad=1).fill_(-7) for shape in ((1, E), (M, k), (1, M * k))
    ]
    offsets, row_index, place = outputs[0][0], outputs[1], outputs[2][0]
    weights = []
    if weight is not None:
        weights = [drawn((M, k), weight, pad=1, seed=seed), drawn((1, M * k), weight, seed=seed)[0]]
        weights[1].fill_(float("nan"))
    return ka.GroupRowsArguments(
        *(on(one, device) for one in (index, offsets, row_index, place, *weights))
    )


def arguments_for(
    kernel: Any, M: int, *, device: Any = "cpu", seed: int = 0, **given: Any
) -> ka.GroupRowsArguments:
    """Arguments of three choices that a kernel takes, of as many groups as it has room for."""
    element = kernel.metadata.operands.index.dtype
    groups = getattr(kernel.metadata.design, "most_groups", 8)
    how = {"element": element.torch if element else torch.int64, "device": device, "seed": seed}
    return arguments(M, 3, groups, **{**how, **given})


def computed(args: ka.GroupRowsArguments) -> dict[str, torch.Tensor]:
    """Pair by pair, as lists."""
    index = args.index.tensor.tolist()
    pairs = [(m, j) for m in range(args.M) for j in range(args.k)]
    of_group: list[list[tuple[int, int]]] = [[] for _ in range(args.L + 1)]
    for m, j in pairs:
        chosen = index[m][j]
        of_group[chosen if 0 <= chosen < args.L else args.L].append((m, j))
    ordered = [pair for group in of_group for pair in group]
    ends = [sum(map(len, of_group[: group + 1])) for group in range(args.L)]
    rank = torch.full((args.M, args.k), -1)
    for place, (m, j) in enumerate(ordered[: ends[-1]]):
        rank[m, j] = place
    place = torch.tensor([m * args.k + j for m, j in ordered], dtype=torch.int64)
    found = {"offsets": torch.tensor(ends), "row_index": rank, "place": place}
    if args.weight is not None:
        found["grouped"] = args.weight.tensor.cpu().flatten()[place]
    return found


def check(args: ka.GroupRowsArguments) -> None:
    """Assert that outputs are what they should be, to the bit."""
    for name, expected in computed(args).items():
        found = args.outputs[name].tensor.cpu()
        assert torch.equal(found.double(), expected.double()), name

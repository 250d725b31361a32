"""Operands of rows that an index names, and what they become, written as a loop.

Matrices stand in storages of NaN, their rows apart; outputs are poisoned, and what nobody names is
NaN that may not leak.
"""

from __future__ import annotations

from typing import Any

import torch

import kernel_api as ka
from kernel_api.dtypes import dtype
from support.elementwise import drawn, matrix, on

GATHER, SCATTER = ka.GatherRowsArguments, ka.ScatterRowsArguments
KINDS = (GATHER, SCATTER)


def index_of(kind: Any, M: int, k: int, rows: int, seed: int = 0) -> torch.Tensor:
    """(M, k), with a gap between its rows; about one in four names no row. Scattered ones are
    different."""
    generator = torch.Generator().manual_seed(seed)
    if kind is GATHER:
        found = torch.randint(max(rows, 1), (M, k), generator=generator)
        found = found.where(torch.tensor(rows > 0), -1)
    else:
        found = torch.randperm(max(rows, M * k), generator=generator)[: M * k].view(M, k)
    absent = torch.rand((M, k), generator=generator) < 0.25
    nowhere = torch.tensor([-1, rows, -(2**31), 2**31 - 1])
    others = nowhere[torch.randint(4, (M, k), generator=generator)]
    found = torch.where(absent, others, found).to(torch.int32)
    return matrix((M, k), torch.int32, pad=1).copy_(found)


def arguments(
    kind: Any,
    M: int,
    N: int,
    k: int,
    rows: int,
    types: Any = ("bfloat16", "bfloat16"),
    *,
    weight: Any = "float32",
    pads: tuple[int, int] = (8, 8),
    offset: int = 0,
    device: Any = "cpu",
    seed: int = 0,
) -> Any:
    """types: of x and out; weight: its type, or None; of a gathered x, rows that nobody names are
    NaN, and so are weights of no row."""
    index = index_of(kind, M, k, rows, seed)
    x_rows, out_rows = (rows, M) if kind is GATHER else (M, rows)
    x = drawn((x_rows, N), dtype(types[0]).torch, pad=pads[0], offset=offset, seed=seed)
    out = matrix((out_rows, N), dtype(types[1]).torch, pad=pads[1], offset=offset)
    there = (index >= 0) & (index < rows)
    if kind is GATHER:
        unnamed = torch.ones(rows, dtype=torch.bool)
        unnamed[index[there].long()] = False
        x.view(torch.uint8)[unnamed] = 0xFF  # NaN of any type
    factors = None
    if weight is not None:
        factors = drawn((M, k), dtype(weight).torch, pad=1, seed=seed + 1)
        factors.masked_fill_(~there, float("nan"))
    return kind(*(None if one is None else on(one, device) for one in (x, out, index, factors)))


def arguments_for(
    kernel: Any, M: int, N: int, *, k: int = 3, device: Any = "cpu", seed: int = 0, **given: Any
) -> Any:
    """Arguments that a kernel takes, at no more than the alignment that it asks."""
    x, out = (kernel.metadata.operands.tensors[name] for name in ("x", "out"))
    N = columns_for(kernel, N)
    pads = tuple(1 + (-N - 1) % t.divisibility for t in (x, out))
    pads = tuple(
        pad if t.divisibility == 1 or (N + pad) // t.divisibility % 2 else pad + t.divisibility
        for pad, t in zip(pads, (x, out), strict=True)
    )
    rows = M * k + 2 if kernel.arguments is SCATTER else 2 * M + 1
    types = x.dtype or "float32", out.dtype or "float32"
    how = {"pads": pads, "device": device, "seed": seed, **given}
    return arguments(kernel.arguments, M, N, k, rows, types, **how)


def columns_for(kernel: Any, N: int) -> int:
    """The nearest number of columns that the kernel's design and vectors take."""
    design, operands = kernel.metadata.design, kernel.metadata.operands
    if not hasattr(design, "threads_per_row"):
        return N
    vector = min(t.alignment // t.dtype.itemsize for t in operands.tensors.values())
    if design.threads_per_row > 8:
        N = max(N, design.threads_per_row * vector // 4 + 1)
    return -(-N // vector) * vector


def computed(args: Any) -> torch.Tensor:
    """What out is, in float64; NaN where nothing is written."""
    x, index = args.x.tensor.double().cpu(), args.row_index.tensor.tolist()
    weight = None if args.weight is None else args.weight.tensor.double().cpu()
    gathers = isinstance(args, GATHER)
    out = torch.full(args.out.shape, 0.0 if gathers else float("nan"), dtype=torch.float64)
    for m, places in enumerate(index):
        for j, row in enumerate(places):
            if not 0 <= row < args.indexed.shape[0]:
                continue
            factor = 1.0 if weight is None else weight[m, j]
            if gathers:
                out[m] += factor * x[row]
            else:
                out[row] = factor * x[m]
    return out


def check(args: Any) -> None:
    """Out is near what it should be, and what is not written as poisoned as it was."""
    expected, found = computed(args), args.out.tensor.double().cpu()
    assert torch.equal(found.isnan(), expected.isnan())
    of_x = args.x.tensor.double().cpu().nan_to_num().abs().amax() if args.x.tensor.numel() else 1
    stored = torch.finfo(args.out.tensor.dtype)
    allowed = stored.eps * expected.nan_to_num().abs() + stored.eps * stored.smallest_normal
    off = (found - expected).nan_to_num().abs()
    assert (off <= allowed + 8 * args.k * of_x * 2.0**-23).all()

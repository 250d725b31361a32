"""Which blocks of queries and keys a mask shows a pair of."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from kernel_api._autocast import off
from kernel_api._score import whole_numbers
from kernel_api.epilogue.graph import Graph
from kernel_api.masks import BlockSparse, Mask
from kernel_api.providers.reference.sdpa_scores import Arithmetic, evaluated, within_bounds

#: Pairs that are looked at at a time, of all sequences and heads; on a GPU, which would wait for
#: the host with fewer.
_PAIRS, _PAIRS_OF_GPU = 1 << 21, 1 << 24

#: What kernels read and compute numbers that are not whole in, and what the reference does. They
#: differ where what is compared is nearly the same; a block is left out if none shows it.
_ARITHMETICS = (
    (torch.float32, torch.float32),
    (torch.float32, torch.float64),
    (torch.float64, torch.float64),
)


def shown_blocks(
    mask: Mask,
    bounds: Mapping[str, int],
    extents: tuple[int, ...],
    block_shape: tuple[int, ...],
    device: Any,
) -> Any:
    """(B, H, ceil(S_q / bq), ceil(S_kv / bkv)): whether the functions of a mask and bounds show any
    query of a block any key of it; as :class:`BlockSparse` has it, uint8 if there are functions,
    else bool. It does not wait for the device.

    Args:
        extents: (B, H, S_q, S_kv), at least 1 of each.
        block_shape: (bq, bkv).
        device: Where the operands of the functions are.
    """
    blocks = [min(*one) for one in zip((1, 1, *block_shape), extents, strict=True)]
    shape = [-(-extent // block) for extent, block in zip(extents, blocks, strict=True)]
    some = torch.zeros(shape, dtype=torch.bool, device=device)
    full = torch.ones_like(some)
    steps = _steps(extents, blocks, _PAIRS_OF_GPU if device.type == "cuda" else _PAIRS)
    with torch.no_grad(), off():
        for cuts in itertools.product(*map(_cuts, extents, blocks, steps)):
            own = zip(cuts, blocks, strict=True)
            place = tuple(slice(cut.start // block, -(-cut.stop // block)) for cut, block in own)
            seen, shown = _seen(mask, bounds, cuts, extents[3] - extents[2], device)
            if shown:
                seen = seen & functools.reduce(torch.logical_or, shown)
                hidden = ~functools.reduce(torch.logical_and, shown)
                full[place] &= ~_any_of_blocks(hidden, blocks)
            some[place] |= _any_of_blocks(seen, blocks)
    if mask.graph is None:
        return some
    return some * torch.where(full, BlockSparse.FULL, 1).byte()


def _steps(extents: tuple[int, ...], blocks: list[int], room: int) -> list[int]:
    """How much of each mode there is room for at a time: whole blocks, or less than one.

    room: For so many pairs.
    """
    found: list[int] = []
    for extent, block in zip(reversed(extents), reversed(blocks), strict=True):
        step = room // block * block if room > block else max(room, 1)
        found.append(step)
        room //= min(step, extent)
    return found[::-1]


def _cuts(extent: int, block: int, step: int) -> Iterator[slice]:
    """A mode in parts of a step; none has parts of two blocks unless it has all of them."""
    width = max(step, block)
    for first in range(0, extent, width):
        end = min(first + width, extent)
        for start in range(first, end, step):
            yield slice(start, min(start + step, end))


def _seen(
    mask: Mask, bounds: Mapping[str, int], cuts: tuple[slice, ...], beyond: int, device: Any
) -> tuple[Any, list[Any]]:
    """Which queries see which keys, of some sequences and heads, (B, H, queries, keys): by bounds,
    and by functions, if there are any, in each arithmetic."""
    b, h, i, j = (
        torch.arange(cut.start, cut.stop, device=device).view(*(1,) * mode, -1, *(1,) * (3 - mode))
        for mode, cut in enumerate(cuts)
    )
    extents = [cut.stop - cut.start for cut in cuts]
    found = within_bounds(bounds, i, j, beyond)
    found = found or [torch.ones((), dtype=torch.bool, device=device)]
    within, shown, graph = functools.reduce(torch.logical_and, found), [], mask.graph
    if graph is not None:
        indices = {"b": b, "h": h, "q": i, "kv": j}
        types = _ARITHMETICS if _is_real(graph) else _ARITHMETICS[:1]
        ways = (Arithmetic(device, *one) for one in types)
        shown = [evaluated(graph, None, indices, mask.operands, way) for way in ways]
    return within.expand(extents), [way.expand(extents) for way in shown]


def _is_real(graph: Graph) -> bool:
    """Whether it computes numbers that are not whole."""
    nodes = zip(graph.nodes, whole_numbers(graph.nodes), strict=True)
    return any(not whole and not node.is_boolean for node, whole in nodes)


def _any_of_blocks(seen: Any, blocks: list[int]) -> Any:
    """Whether anything is seen, of the last two modes by blocks; the last ones may be smaller."""
    for mode, behind in ((-1, ()), (-2, (0, 0))):
        width = min(blocks[mode], seen.shape[mode])
        lacking = -seen.shape[mode] % width
        if lacking:
            seen = torch.nn.functional.pad(seen, (*behind, 0, lacking))
        seen = seen.unflatten(mode, (-1, width)).any(mode)
    return seen

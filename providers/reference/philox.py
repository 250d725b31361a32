"""Philox4x32-10 in torch: random words that depend on a key and a counter alone.

Salmon, Moraes, Dror and Shaw, Parallel Random Numbers: As Easy as 1, 2, 3 (SC 2011).
"""

from __future__ import annotations

from typing import Any

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
_WORD = 0xFFFFFFFF
_HALF = 0xFFFF


def philox(counter: tuple[Any, Any, Any, Any], key: tuple[Any, Any]) -> tuple[Any, Any, Any, Any]:
    """Four words of 32 bits, as int64 tensors, from four of counter and two of key."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        high0, low0 = _product(_MULTIPLIERS[0], c0)
        high1, low1 = _product(_MULTIPLIERS[1], c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + _KEY_STEPS[0]) & _WORD, (k1 + _KEY_STEPS[1]) & _WORD
    return c0, c1, c2, c3


def _product(a: int, b: Any) -> tuple[Any, Any]:
    """High and low word of a 64-bit product; int64 wraps around, which leaves its bits right."""
    product = b * a
    return (product >> 32) & _WORD, product & _WORD


def uniform(seed: Any, offset: Any, extents: tuple[int, int, int], device: Any) -> Any:
    """Random numbers in [0, 1), multiples of 2⁻²⁴, for elements (l, m, n) of a batch of matrices.

    Element (l, m, n) is word n mod 4 of counter (n // 4, l · M + m, offset), key seed.
    """
    import torch

    batches, rows, columns = extents
    groups = torch.arange(-(-columns // 4), device=device)
    row = torch.arange(batches * rows, device=device).unsqueeze(-1)
    (seed_low, seed_high), (low, high) = (_words(state, device) for state in (seed, offset))
    shape = (len(row), len(groups))
    counter = (groups.expand(shape), row.expand(shape), low.expand(shape), high.expand(shape))
    words = torch.stack(philox(counter, (seed_low, seed_high)), dim=-1)
    drawn = (words >> 8).double() * 2.0**-24
    return drawn.reshape(batches, rows, 4 * len(groups))[..., :columns]


def uniform_apart(seed: Any, offset: Any, extents: tuple[int, int, int], device: Any) -> Any:
    """The same where every matrix counts its rows by itself, as heads of attention do.

    Element (l, m, n) is word n mod 4 of counter (n // 4, m, offset + l), key seed.
    """
    import torch

    batches, rows, columns = extents
    row = torch.arange(rows, device=device)
    words = _words_apart(seed, offset, (batches, row, -(-columns // 4)), device)
    drawn = (words >> 8).double() * 2.0**-24
    return drawn.flatten(-2)[..., :columns]


def halves_apart(seed: Any, offset: Any, extents: tuple[int, Any, int], device: Any) -> Any:
    """Random numbers in [0, 1), multiples of 2⁻¹⁶, as :class:`kernel_api.arguments.Dropout` says.

    Args:
        extents: Heads, queries (as a tensor of their indices) and keys. The first head draws by the
            offset, each further one by the next.
    """
    import torch

    heads, queries, keys = extents
    groups = -(-keys // 32)
    words = _words_apart(seed, offset, (heads, queries, 4 * groups), device)
    # Of a group: from (pair of neighbours, block of 8, which of the pair) to the order of keys.
    halves = torch.stack((words & _HALF, words >> 16), dim=-1)
    halves = halves.view(heads, len(queries), groups, 4, 4, 2).transpose(-3, -2)
    drawn = halves.double() * 2.0**-16
    return drawn.flatten(-4)[..., :keys]


def _words_apart(seed: Any, offset: Any, extents: tuple[int, Any, int], device: Any) -> Any:
    """(l, m, n, 4) of counters (n, m, offset + l).

    Args:
        extents: How many l, which m, and how many n.
    """
    import torch

    batches, rows, counters = extents
    key, (low, high) = (_words(state, device) for state in (seed, offset))
    low = low + torch.arange(batches, device=device).view(-1, 1, 1)
    high = (high + (low >> 32)) & _WORD
    counter = torch.broadcast_tensors(  # type: ignore[no-untyped-call]
        torch.arange(counters, device=device), rows.view(-1, 1), low & _WORD, high
    )
    return torch.stack(philox(tuple(counter), key), dim=-1)


def _words(state: Any, device: Any) -> tuple[Any, Any]:
    """Low and high 32 bits of an integer, as int64 tensors."""
    import torch

    if isinstance(state, int):
        low, high = state & _WORD, (state >> 32) & _WORD
        return torch.tensor(low, device=device), torch.tensor(high, device=device)
    wide = state.reshape(()).to(torch.int64)
    return wide & _WORD, (wide >> 32) & _WORD

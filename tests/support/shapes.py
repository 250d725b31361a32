"""Odd sizes for kernels, few per kernel and all of them over a family."""

from __future__ import annotations

SIZES = (1, 7, 63, 65, 129, 1000, 4097)
BATCHES = (1, 3)
COMBINATIONS = 6

#: Products of more elements than this take too long to check in float64 for every kernel.
LARGEST = 3 * 1000 * 1000 * 1000


def problems(index: int) -> list[tuple[int, int, int, int | None]]:
    """(M, N, K, L) for the kernel at this place in its family.

    The sizes rotate with the place: over seven kernels each of M, N and K takes every size.
    Every kernel gets both batch counts; every third one a problem without batch as well.
    """
    count = len(SIZES)
    found: list[tuple[int, int, int, int | None]] = []
    for step in range(COMBINATIONS):
        M = SIZES[(index + step) % count]
        N = SIZES[(index + 2 * step + 3) % count]
        K = SIZES[(index + 4 * step + 5) % count]
        L = BATCHES[step % 2]
        if M * N * K * L > LARGEST:
            L = 1
        found.append((M, N, K, L))
    if index % 3 == 0:
        found.append((*found[0][:3], None))
    return found

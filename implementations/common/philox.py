"""Random numbers: Philox4x32-10.

Salmon et al., Parallel Random Numbers: As Easy as 1, 2, 3, 2011.
"""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, Uint64

from .conversion import select

_Value = Any

_FACTORS = (0xD2511F53, 0xCD9E8D57)
_KEYS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10


def words_of_pairs(
    first: _Value, rows: tuple[_Value, _Value], offset: _Value, seed: _Value, lane: _Value
) -> tuple[list[_Value], list[_Value]]:
    """For the pair of columns of a thread in each of its two rows.

    A call gives the words of 4 columns, which two threads side by side have; so each of them
    makes the call for one of the rows, and they exchange what is the other's.

    Args:
        first: Even column of the pair; the threads of a quad have 8 columns side by side.
    """
    odd = lane % 2 == 1
    words = philox(Uint32(first) // 4, select(odd, rows[1], rows[0]), offset, seed)
    own = [select(odd, words[2 + i], words[i]) for i in range(2)]
    others = [
        cute.arch.shuffle_sync_bfly(select(odd, words[i], words[2 + i]), offset=1) for i in range(2)
    ]
    upper = [select(odd, other, mine) for mine, other in zip(own, others, strict=True)]
    lower = [select(odd, mine, other) for mine, other in zip(own, others, strict=True)]
    return upper, lower


def uniform_of_pairs(
    first: _Value, rows: tuple[_Value, _Value], offset: _Value, seed: _Value, lane: _Value
) -> tuple[list[_Value], list[_Value]]:
    """Of `words_of_pairs`, in [0, 1): the upper 24 bits · 2⁻²⁴."""
    upper, lower = words_of_pairs(first, rows, offset, seed, lane)
    return [*map(_unit, upper)], [*map(_unit, lower)]


def _unit(word: _Value) -> _Value:
    return Float32(Int32(word >> Uint32(8))) * Float32(2.0**-24)


def least_word(probability: _Value) -> _Value:
    """Of those whose number in [0, 1) is not below a probability."""
    least = cute.math.ceil(probability * Float32(2.0**24))
    most = Float32(2.0**24 - 1)  # words end there
    return Uint32(Int32(select(least < most, least, most))) << Uint32(8)


def philox(n: _Value, row: _Value, offset: _Value, seed: _Value) -> list[_Value]:
    """The four words of a counter."""
    counter = [Uint32(n), Uint32(row), *_halves(_of_64_bits(offset))]
    key = _halves(_of_64_bits(seed))
    for _ in range(_ROUNDS):
        products = [
            Uint64(counter[i]) * Uint64(factor) for i, factor in zip((0, 2), _FACTORS, strict=True)
        ]
        (low0, high0), (low1, high1) = map(_halves, products)
        counter = [high1 ^ counter[1] ^ key[0], low1, high0 ^ counter[3] ^ key[1], low0]
        key = [k + Uint32(step) for k, step in zip(key, _KEYS, strict=True)]
    return counter


def _of_64_bits(whole: _Value) -> _Value:
    """Of any width; `Uint64` alone fills up a negative one that is narrower with zeros."""
    return Uint64(Int64(whole))


def _halves(value: _Value) -> list[_Value]:
    """Of 64 bits, the lower one first."""
    return [Uint32(value), Uint32(value >> Uint64(32))]

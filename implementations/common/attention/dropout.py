"""Random numbers of dropout.

Those of query i and key j are of the counter that begins with 4 · (j // 32) + j % 8 // 2 and i: of
its word j % 32 // 8 the lower half for even j, the upper one for odd j. So a counter is for a pair
of neighbours in each of 4 blocks of 8 keys, which is what a thread has of as many columns of an
accumulator.
"""

import math

import cutlass
from cutlass import Float32, Int32, Int64, Uint32

from ..conversion import select
from ..philox import least_word, philox

_BLOCK = 8  # keys, of which a thread has two side by side, or one
_WORDS = 4  # of a counter
_HALF = 16  # bits

COUNTED = _WORDS * _BLOCK  # keys, of which the pairs that are a block apart share a counter


def least_half(probability: Float32) -> Uint32:
    """Of those that are kept, in the upper half of a word; the last one if none is."""
    least = ((least_word(probability) >> 8) + 0xFF) >> 8  # rounded up once more
    return cutlass.min(least, Uint32(2**_HALF - 1)) << _HALF


def kept_factor(probability: Float32) -> Float32:
    """Of what is kept; 0 if nothing is."""
    some = probability <= 1.0 - 2.0**-_HALF
    return select(some, 1.0 / (1.0 - probability), Float32(0.0))


def counter_of(key: Int32) -> Uint32:
    """Of a key, and of its neighbour."""
    key = Uint32(key)
    return key // COUNTED * _WORDS + key % _BLOCK // 2


def halves_of(word: Uint32) -> tuple[Uint32, Uint32]:
    """Random numbers of an even key and of the next one, as those of `Halves`."""
    return word << _HALF, word


class Halves:
    """Random numbers of a query, for keys of a thread: by how far they are behind its first one.

    pairs: Whether the first key of a block is even, and the thread has the next one as well; else
        it has one of each block.
    keys: That the first block begins at a multiple of.
    """

    def __init__(
        self, first: Int32, query: Int32, offset: Int64, seed: Int64, *, pairs: bool, keys: int
    ):
        if keys % _BLOCK:
            raise ValueError(f"threads have keys from multiples of {keys} on, not of {_BLOCK}")
        first = Uint32(first)
        self._pairs = pairs
        self._up = Uint32(_HALF) - first % 2 * _HALF
        self._counter = counter_of(first)
        self._of_counter = query, offset, seed
        #: Which word the first key takes, and what that is known to be a multiple of.
        self._word = first // _BLOCK % _WORDS
        self._step = math.gcd(keys // _BLOCK, _WORDS)
        self._drawn: dict[int, list[Uint32]] = {}

    def __call__(self, behind: int) -> Uint32:
        """In the upper half of a word, whose lower half may be anything."""
        block, second = divmod(behind, _BLOCK)
        if second > self._pairs:
            raise ValueError(f"a thread has no key that is {behind} behind its first one")
        found = self._of_block(block)
        if not self._pairs:
            return found << self._up
        return halves_of(found)[second]

    def _of_block(self, block: int) -> Uint32:
        """The word of so many blocks behind that of the first key."""
        found = self._numbered(block)
        for word in range(self._step, _WORDS, self._step):
            found = select(self._word == word, self._numbered(block + word), found)
        return found

    def _numbered(self, word: int) -> Uint32:
        """From the counter of the first key on, in the order of keys."""
        counter, word = divmod(word, _WORDS)
        if counter not in self._drawn:
            number = self._counter + counter * _WORDS
            self._drawn[counter] = philox(number, *self._of_counter)
        return self._drawn[counter][word]

"""What attention for Hopper has in its workspace; no compiler is loaded to allocate one."""

from typing import Any, NamedTuple

MOST_NUMBERS = 2  # of a row of a part: the logarithm of its sum, and the largest score
MOST_PARTS = 640  # of the keys of all tiles together, where there are several of a tile
MOST_LATENT_PARTS = 288  # the same of latent vectors, whose parts are large
PERMUTED = 16  # keys that change places, see `ValuesAcross`

ENTRY_NUMBERS = 4  # of a `Listing`, 32 bits each

_FLOAT_BYTES = _NUMBER_BYTES = 4
_ELEMENT_BYTES, _VECTOR = 2, 8  # of 16 bits, and how many 16 bytes are


def part_bytes(rows: int, columns: int, numbers: int) -> int:
    """Of the rows of a part in float32, and of some numbers of each."""
    return rows * (columns + numbers) * _FLOAT_BYTES


def left_pitch(keys: Any) -> Any:
    """Elements from one row of dS to the next, where blocks leave it: whole vectors."""
    return (keys + _VECTOR - 1) // _VECTOR * _VECTOR


def left_scores_bytes(batches: Any, heads: Any, queries: Any, keys: Any) -> Any:
    """Of dS in 16 bits."""
    return batches * heads * queries * left_pitch(keys) * _ELEMENT_BYTES


class Listing(NamedTuple):
    """Of parts of packed sequences: some numbers, then an entry for each part of tiles that have
    several, and for each other tile."""

    most_parts: Any
    tiles: Any

    def addresses(self, first: Any) -> tuple:
        """Of numbers, which begin at the first one, and of entries."""
        return first, first + ENTRY_NUMBERS * _NUMBER_BYTES

    @property
    def bytes(self) -> int:
        return int((1 + self.most_parts + self.tiles) * ENTRY_NUMBERS * _NUMBER_BYTES)


def first_place(rows: Any, sequence: Any, tile: int) -> Any:
    """Of a sequence's blocks of rows, behind as many other sequences with so many rows together:
    that of all rows and all sequences is how many places there are.

    As if every sequence before had one block more than its rows fill. None reaches the next one: n
    rows behind r others of a block add ⌊(r + n) / tile⌋ + 1 places, and the ⌈n / tile⌉ blocks that
    they fill are no more.
    """
    return rows // tile + sequence


def keys_with_room(keys):
    """Of a row of Vᵀ: whole vectors."""
    return (keys + PERMUTED - 1) // PERMUTED * PERMUTED


def first_of_packed(keys, sequences, tile: int):
    """Where in a row of Vᵀ a sequence begins that has so many keys of so many packed sequences in
    front of it: at a tile. That of all keys and all sequences is the length of the row.

    As if every sequence before took one tile more than its keys fill. None reaches the next one: n
    keys behind r others of a tile add ⌊(r + n) / tile⌋ + 1 tiles, and the ⌈n / tile⌉ that they take
    are no more.
    """
    return (keys + sequences * tile) // tile * tile

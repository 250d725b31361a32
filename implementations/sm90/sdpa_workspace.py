"""What attention for Hopper has in its workspace; no compiler is loaded to allocate one."""

MOST_NUMBERS = 2  # of a row of a part: the logarithm of its sum, and the largest score
MOST_PARTS = 640  # of the keys of all tiles together, where there are several of a tile
MOST_LATENT_PARTS = 288  # the same of latent vectors, whose parts are large
PERMUTED = 16  # keys that change places, see `ValuesAcross`

_FLOAT_BYTES = 4


def part_bytes(rows: int, columns: int, numbers: int) -> int:
    """Of the rows of a part in float32, and of some numbers of each."""
    return rows * (columns + numbers) * _FLOAT_BYTES


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

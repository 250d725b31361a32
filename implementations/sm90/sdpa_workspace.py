"""What attention for Hopper has in its workspace; no compiler is loaded to allocate one."""

MOST_PARTS = 640  # of the keys of all tiles together, where there are several of a tile
PERMUTED = 16  # keys that change places, see `ValuesAcross`

_FLOAT_BYTES = 4


def part_bytes(rows: int, columns: int) -> int:
    """Of the rows of a part in float32, and of the logarithms of their sums."""
    return rows * (columns + 1) * _FLOAT_BYTES


def keys_with_room(keys):
    """Of a row of Vᵀ: whole vectors."""
    return (keys + PERMUTED - 1) // PERMUTED * PERMUTED

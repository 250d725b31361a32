"""Entries of a table of blocks of queries and keys; no compiler is loaded to ask."""


def are_whole(block_shape: tuple[int, int] | None, tile: tuple[int, int]) -> bool:
    """Whether there is a table, and no tile of (queries, keys) meets more than one entry."""
    if block_shape is None:
        return False
    return all(entry % size == 0 for entry, size in zip(block_shape, tile, strict=True))

"""Entries of a table of blocks of queries and keys; no compiler is loaded to ask."""


def are_whole(block_shape: tuple[int, int], tile: tuple[int, int]) -> bool:
    """Whether no tile of (queries, keys) meets more than one entry."""
    return all(entry % size == 0 for entry, size in zip(block_shape, tile, strict=True))

"""Blocks that have a multiprocessor together."""


def residence(blocks: int) -> dict:
    """What a launch says so that registers and shared memory are shared out to so many."""
    if blocks == 1:
        return {"min_blocks_per_mp": 1}
    # Else the compiler asks a GPU, which there need not be.
    return {"min_blocks_per_mp": blocks, "preferred_smem_carveout": 100}  # percent

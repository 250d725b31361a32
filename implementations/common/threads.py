"""How threads are grouped on every GPU."""

QUAD = 4  # that share rows of accumulators
WARP = 32
GROUP = 128  # of warps that multiply together
WHOLE_BLOCK = 0  # the named barrier of all threads

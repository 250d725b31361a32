"""How many blocks share a block of keys of the gradient of attention: each has some of the heads of
queries that share the keys, and what they leave is added up.

Numbers are those of Python, or of a kernel's host code: ``select(condition, one, other)`` is what
chooses between two of them. No compiler is loaded here.
"""

from collections.abc import Callable
from typing import Any

_BLOCKS = 132  # of a launch: one for each multiprocessor
_MOST = 16
_FLOAT_BYTES = 4
ALIGNMENT = 16  # of what they leave


def shares_of(blocks: Any, sharing: Any, select: Callable) -> Any:
    """The most that have as many heads each, and a multiprocessor.

    blocks: Of keys, of all heads of all sequences; sharing: heads of queries of each.
    """
    found: Any = 1
    for shares in range(2, _MOST + 1):
        fits = (sharing % shares == 0) & (blocks * shares <= _BLOCKS)
        found = select(fits, shares, found)
    return found


def may_share(tile: tuple[int, int], head_dims: tuple[int, int], packed: bool) -> bool:
    """Whether a design has what it takes. Where 128 keys of 64 columns fill the registers it made
    all problems 2 to 4 % slower, on an H100; of packed sequences it is not known on the host how
    many blocks there are."""
    _, keys = tile
    return not packed and not (max(head_dims) == 64 and keys == 128)


def share_bytes(keys: int, head_dims: tuple[int, int]) -> int:
    """Of dK and dV in float32, of a block of so many keys."""
    return keys * sum(head_dims) * _FLOAT_BYTES

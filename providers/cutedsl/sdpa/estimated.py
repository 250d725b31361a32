"""Arguments of attention as estimates see them: lengths that are nearly the same are one."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from kernel_api._estimated_sizes import told_apart

#: Queries up to which each number of them has tiles of its own, with those of heads that share one.
_FEW = 64


class Estimated:
    """The arguments, but for their lengths; packed ones as they are."""

    def __init__(self, args: Any) -> None:
        self._args, self.key = args, _key_of(args)
        self.S_q, self.S_kv = lengths(args)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._args, name)


#: The key of the last arguments asked about, and that of what estimates see of them: models know
#: the last by identity.
_last: tuple[Any, Any] = (None, None)


def _key_of(args: Any) -> Any:
    global _last
    key, found = _last
    if key is not args.key:
        found = ("estimated", args.key)
        _last = args.key, found
    return found


def lengths(args: Any) -> tuple[int, int]:
    """Of queries and keys."""
    queries, keys = int(args.S_q), int(args.S_kv)
    if args.is_packed:
        return queries, keys
    return queries if queries <= _FEW else told_apart(queries), told_apart(keys)


def estimated_by(args: Any) -> Hashable | None:
    """What of the arguments estimates depend on; None: that is not told of packed sequences."""
    if args.is_packed:
        return None
    counts = args.B, args.H, args.H_kv, args.D, args.D_v
    places = args.K.alignment, args.V.alignment
    return *lengths(args), *counts, *places, args.signature, *args.bounds.items()

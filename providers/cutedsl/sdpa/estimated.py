"""Arguments of attention as estimates see them: lengths that are nearly the same are one."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from kernel_api._estimated_sizes import told_apart

#: Queries up to which each number of them has tiles of its own, with those of heads that share one.
_FEW = 64


class Estimated:
    """The arguments, but for their lengths, and for all rows of packed sequences together."""

    def __init__(self, args: Any) -> None:
        self._args, self.key = args, _key_of(args)
        self.S_q, self.S_kv = lengths(args)
        if args.is_packed:
            self.Q, self.K = _Packed(args.Q), _Packed(args.K)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._args, name)


class _Packed:
    """An operand, but for its rows, or pages."""

    def __init__(self, operand: Any) -> None:
        self._operand, (rows, *others) = operand, operand.shape
        self.shape = told_apart(rows), *others

    def __getattr__(self, name: str) -> Any:
        return getattr(self._operand, name)


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
    return queries if queries <= _FEW else told_apart(queries), told_apart(keys)


def estimated_by(args: Any) -> Hashable | None:
    """What of the arguments estimates depend on."""
    counts = args.B, args.H, args.H_kv, args.D, args.D_v
    places = args.K.alignment, args.V.alignment
    rows = [told_apart(one.shape[0]) for one in (args.Q, args.K)] if args.is_packed else ()
    return *lengths(args), *counts, *rows, *places, args.signature, *args.bounds.items()

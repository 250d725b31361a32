"""Objects among the arguments that another process can make again."""

from __future__ import annotations

from typing import Any


class Described:
    """Base of what arguments carry beside tensors and numbers: masks, dropout, functions.

    A subclass says what it is made of, and is made of that again.
    """

    __slots__ = ()

    def description(self) -> dict[str, Any]:
        """What :meth:`from_description` takes: tensors, numbers, texts, graphs, further such
        objects, and lists or dicts of them."""
        raise NotImplementedError

    @classmethod
    def from_description(cls, fields: dict[str, Any]) -> Any:
        """Inverse of :meth:`description`."""
        return cls(**fields)

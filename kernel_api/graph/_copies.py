"""Graphs and what they are made of belong together: none of it is copied alone."""

from __future__ import annotations

from typing import Any

from kernel_api.errors import GraphError


class Uncopied:
    """Refuses ``copy`` and ``pickle``, which would take compiled kernels and locks along."""

    __slots__ = ()

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise GraphError(
            f"{self!r} cannot be copied or pickled; serialize() of a built graph gives what "
            f"deserialize() of another one takes"
        )

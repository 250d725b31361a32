"""Why something is not part of a kernel."""

from __future__ import annotations

from typing import NamedTuple

from kernel_api.graph._node import Node


class Refusal(NamedTuple):
    """Why a node was not fused into the kernel of another, or has no kernel."""

    node: Node
    into: str
    why: str

    def __str__(self) -> str:
        return f"{self.node} {self.into}: {self.why}"

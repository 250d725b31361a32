"""The epilogue: a function of the accumulator, and the operands it names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kernel_api.errors import ArgumentError


class EpilogueArguments:
    """A plain Python function of the accumulator with the operands it reads and writes.

    Attributes:
        fn: ``fn(accum, ...)``; what it returns are D and the other outputs.
        operands: Inputs by the names of fn's parameters, outputs by the names fn returns.
    """

    __slots__ = ("fn", "operands")

    def __init__(self, fn: Callable[..., Any], **operands: Any) -> None:
        if not callable(fn):
            raise ArgumentError(
                f"fn is a {type(fn).__name__}; expected a function of the accumulator"
            )
        self.fn = fn
        self.operands = operands

    @property
    def identity(self) -> tuple[Any, ...]:
        """What tells two epilogues apart in a kernel's identity and in cache keys."""
        return (self.fn, *sorted(self.operands))

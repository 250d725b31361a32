"""The answer to "can this kernel take these arguments?"."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, replace

#: The rule that arguments of another operation fail.
KIND_OF_OPERATION = "the kind of operation"

#: The rule that operands on a device of another type fail.
DEVICE = "device"

#: The rule that products fail whose operands may not be rounded as the kernel does.
ROUNDED_FLOAT32 = "tfloat32 has to be allowed"

#: Rules asked before others, so that what would match by them may not by those.
_ASKED_BEFORE_OTHERS = (DEVICE, ROUNDED_FLOAT32)


@dataclass(frozen=True)
class Status:
    """Truthy if supported; else ``error`` is a sentence with operand, expected and actual value.

    Attributes:
        error: The reason, or None on success.
        rule: The name of the rule that failed, the same for every kernel that shares it.
        operand: The operand that the rule is about, where it is about one.
        expected: What the rule asks, where that is one value among a family's several.
        actual: What the arguments have instead.
        nearest: What change would satisfy the rule ("would match with K padded to 1008").
        progress: How many checks had passed before; the family's nearest miss has the most.
        limit: What the kernel takes at most, where kernels of a family differ in that; of those
            that are as near, the nearest miss has the largest.
    """

    error: str | None = None
    rule: str | None = None
    operand: str | None = None
    expected: str | None = None
    actual: str | None = None
    nearest: str | None = None
    progress: int = 0
    limit: float = 0.0

    @classmethod
    def success(cls) -> Status:
        return _SUCCESS

    @classmethod
    def fail(
        cls,
        error: str,
        *,
        rule: str | None = None,
        operand: str | None = None,
        expected: str | None = None,
        actual: str | None = None,
        nearest: str | None = None,
        progress: int = 0,
        limit: float = 0.0,
    ) -> Status:
        if not error:
            raise ValueError("Status.fail needs a reason")
        reason = str(error)
        return cls(reason, rule or reason, operand, expected, actual, nearest, progress, limit)

    def at(self, progress: int) -> Status:
        """The same, that so many checks had passed before."""
        return Status(
            self.error,
            self.rule,
            self.operand,
            self.expected,
            self.actual,
            self.nearest,
            progress,
            self.limit,
        )

    def __bool__(self) -> bool:
        return self.error is None

    def __str__(self) -> str:
        if self.error is None:
            return "supported"
        return f"{self.error} ({self.nearest})" if self.nearest else self.error


_SUCCESS = Status()


def with_true_nearest(status: Status, fits: Callable[[str], object]) -> Status:
    """The status, without ``nearest`` where another rule fails as well.

    ``fits``: whether all rules but the named one hold.
    """
    if status.rule not in _ASKED_BEFORE_OTHERS:
        return status
    with contextlib.suppress(Exception):  # rules may rely on what the named one asks
        if fits(status.rule):
            return status
    return replace(status, nearest=None)

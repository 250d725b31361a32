"""What the rules of a design leave to ask in a query: what metadata alone decide is asked once."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from kernel_api.matching import BEHIND_OPERANDS
from kernel_api.metadata import KernelMetadata
from kernel_api.space import Rule
from kernel_api.status import Status

#: Checks that have passed before the first rule: the operands, the target and the epilogue.
BEFORE_RULES = BEHIND_OPERANDS + 2


class Questions:
    """The rules of one kernel's design that arguments decide, up to the first one that its metadata
    do not satisfy.

    Args:
        rules: With their places among all of the family.
        metadata: Of the kernel.
    """

    def __init__(self, rules: Iterable[tuple[int, Rule]], metadata: KernelMetadata) -> None:
        self._open: list[tuple[int, Rule, Callable[[Any], Any]]] = []
        self._refusal: Status | None = None
        for place, rule in rules:
            holds = _over_arguments(rule, metadata)
            if rule.needs_args or isinstance(metadata.epilogue, str):
                self._open.append((place, rule, holds))
            elif not (status := rule.status_of(holds(None))):
                self._refusal = status.at(BEFORE_RULES + place)
                break

    def refusal(self, args: Any) -> Status | None:
        """That of the first rule that does not hold; None if all do."""
        for place, rule, holds in self._open:
            verdict = holds(args)
            if verdict is not True and not (status := rule.status_of(verdict)):
                return status.at(BEFORE_RULES + place)
        return self._refusal


def _over_arguments(rule: Rule, metadata: KernelMetadata) -> Callable[[Any], Any]:
    design, operands, graph = metadata.design, metadata.operands, metadata.epilogue
    if isinstance(graph, str):  # the arguments have the graph of that identity
        return lambda args: rule.bound(design, operands, args.epilogue.graph)(args)
    return rule.bound(design, operands, graph)

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
        any_epilogue: Whether it computes whatever epilogue arguments have.
    """

    def __init__(
        self,
        rules: Iterable[tuple[int, Rule]],
        metadata: KernelMetadata,
        any_epilogue: bool = False,
    ) -> None:
        is_open = any_epilogue or isinstance(metadata.epilogue, str)
        self._open: list[tuple[int, Rule, Callable[[Any], Any]]] = []
        self._refusal: Status | None = None
        for place, rule in rules:
            bind = _over_their_graph if is_open and rule.needs_graph else _over_arguments
            holds = bind(rule, metadata)
            if rule.needs_args or bind is _over_their_graph:
                self._open.append((place, rule, holds))
            elif not (status := rule.status_of(holds(None))):
                self._refusal = status.at(BEFORE_RULES + place)
                break

    def may_hold(self, args: Any) -> bool:
        """False where a rule refuses that metadata decide alone, or what rules are ``by``."""
        if self._refusal is not None:
            return False
        decided = ((rule, holds(args)) for _, rule, holds in self._open if rule.by is not None)
        return all(verdict is True or rule.status_of(verdict) for rule, verdict in decided)

    def refusal(self, args: Any) -> Status | None:
        """That of the first rule that does not hold; None if all do."""
        for place, rule, holds in self._open:
            verdict = holds(args)
            if verdict is not True and not (status := rule.status_of(verdict)):
                return status.at(BEFORE_RULES + place)
        return self._refusal


def _over_arguments(rule: Rule, metadata: KernelMetadata) -> Callable[[Any], Any]:
    return rule.bound(metadata.design, metadata.operands, metadata.epilogue)


def _over_their_graph(rule: Rule, metadata: KernelMetadata) -> Callable[[Any], Any]:
    """The same where metadata have no graph, or its identity alone: that of the arguments."""

    def holds(args: Any) -> Any:
        graph = None if args.epilogue is None else args.epilogue.graph
        return rule.bound(metadata.design, metadata.operands, graph)(args)

    return holds

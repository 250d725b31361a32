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
        is_open = _is_open(metadata, any_epilogue)
        known = {
            "design": metadata.design,
            "operands": metadata.operands,
            "graph": metadata.epilogue,
        }
        self._open: list[tuple[int, Rule, Callable[[Any], Any]]] = []
        self._refusal: Status | None = None
        for place, rule in rules:
            if is_open and rule.needs_graph:
                self._open.append((place, rule, _over_their_graph(rule, metadata)))
            elif rule.needs_args:
                self._open.append((place, rule, rule.bound(**known)))
            elif not rule.agrees(**known):
                self._refusal = rule.check(**known).at(BEFORE_RULES + place)
                break

    def refusal(self, args: Any) -> Status | None:
        """That of the first rule that does not hold; None if all do."""
        for place, rule, holds in self._open:
            verdict = holds(args)
            if verdict is not True and not (status := rule.status_of(verdict)):
                return status.at(BEFORE_RULES + place)
        return self._refusal


def agree_by(
    rules: Iterable[tuple[int, Rule]], metadata: KernelMetadata, args: Any, any_epilogue: bool
) -> bool:
    """Whether those rules do that metadata decide alone, or with what the rules are ``by``."""
    is_open = _is_open(metadata, any_epilogue)
    known = metadata.design, metadata.operands, metadata.epilogue, args
    return all(
        rule.agrees(*known)
        for _, rule in rules
        if not (rule.needs_args and rule.by is None) and not (is_open and rule.needs_graph)
    )


def _is_open(metadata: KernelMetadata, any_epilogue: bool) -> bool:
    """Whether the graph is that of the arguments."""
    return any_epilogue or isinstance(metadata.epilogue, str)


def _over_their_graph(rule: Rule, metadata: KernelMetadata) -> Callable[[Any], Any]:
    """The same where metadata have no graph, or its identity alone: that of the arguments."""

    def holds(args: Any) -> Any:
        graph = None if args.epilogue is None else args.epilogue.graph
        return rule.bound(metadata.design, metadata.operands, graph)(args)

    return holds

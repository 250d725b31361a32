"""The list of a graph's plans: made, barred, built and selected."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from kernel_api import _log
from kernel_api._numbers import whole_number
from kernel_api.errors import (
    CompileError,
    GraphError,
    GraphNotSupportedError,
    NoKernelError,
    SerializedGraphError,
    UnsupportedError,
)
from kernel_api.graph._enums import heur_mode
from kernel_api.graph._node import Node
from kernel_api.graph._planning.explanation import Explanation
from kernel_api.graph._planning.partition import Partition, needed, partition
from kernel_api.graph._planning.plan import Plan, reason
from kernel_api.graph._planning.ragged import unpacked
from kernel_api.graph._planning.steps import KernelStep, Prober, Step, TorchStep

logger = _log.logger(__name__)

#: Other kernels for the step that takes longest, each of which makes a plan of its own.
_ALTERNATIVES = 4

#: What lets the next plan have a try; anything else is an error of its own.
DECLINES = (UnsupportedError, NoKernelError, CompileError, NotImplementedError, ImportError)


class PlanList:
    """Plans in the order of their modes, best first in each. Indices never change.

    Attributes:
        selected: The plan that is executed; None before one is built.
    """

    def __init__(self, plans: Iterable[Plan], device: Any, cc: Any) -> None:
        self.plans = list(plans)
        self.device, self.cc = device, cc
        self.selected: Plan | None = None

    @classmethod
    def of(cls, graph: Any, nodes: list[Node], modes: list[heur_mode], device: Any) -> PlanList:
        """The plans of the modes. Raises GraphNotSupportedError if there are none."""
        prober = Prober(device, graph.sm_version)
        found: Partition | None = None
        plans: list[Plan] = []
        for mode in modes:
            if mode is heur_mode.FALLBACK:
                plans.append(Plan(mode, _by_torch(nodes)))
                continue
            if found is None:
                found = partition(nodes, prober)
            plans += _plans_of(mode, found, device)
        if not nodes:
            raise GraphNotSupportedError("the graph has no operation, so there is nothing to plan")
        return cls(_without_twins(plans), device, prober._cc())

    @classmethod
    def restored(cls, graph: Any, nodes: list[Node], data: dict[str, Any], device: Any) -> PlanList:
        """The plan that ``Plan.to_dict`` described, of the same kernels.

        Raises SerializedGraphError if a step is no step of the graph, and GraphNotSupportedError
        if a kernel is not there any more.
        """
        try:
            mode, described = heur_mode[data["mode"]], list(data["steps"])
            kinds = [(one["kind"], tuple(one["nodes"]), one.get("kernel")) for one in described]
        except (KeyError, TypeError) as error:
            raise SerializedGraphError(f"the plan is damaged: {error!r}") from error
        prober = Prober(device, graph.sm_version)
        if mode is heur_mode.FALLBACK:
            plan = Plan(mode, _by_torch(nodes))
        else:
            found = partition(nodes, prober)
            plan = Plan(mode, _matched(found.steps, kinds), found.refusals)
        return cls([plan], device, prober._cc())

    # What there is -----------------------------------------------------------------------

    def at(self, index: int) -> Plan:
        if whole_number(index) is None or not 0 <= index < len(self.plans):
            raise GraphError(f"there is no plan {index!r}; there are {len(self.plans)}, from 0 on")
        return self.plans[index]

    def explain(self) -> Explanation:
        return Explanation(tuple(self.plans), self.selected)

    # Barring -----------------------------------------------------------------------------

    def bar_engines(self, names: list[str]) -> None:
        for name in names:
            if not any(name in plan.name for plan in self.plans):
                shown = "; ".join(plan.name for plan in self.plans)
                logger.warning("deselect_engines(%r) bars none of the plans: %s", name, shown)
        for plan in self.plans:
            hit = [name for name in names if name in plan.name]
            if hit:
                plan.barred = f"deselect_engines({hit[0]!r})"

    def bar_notes(self, notes: list[Any], *, having: bool) -> None:
        for plan in self.plans:
            own = [*plan.behavior_notes, *plan.numerical_notes]
            for note in notes:
                if (note in own) is having:
                    plan.barred = f"{'it has' if having else 'it lacks'} the note {note.name}"

    def bar_workspace(self, size: int) -> None:
        for plan in self.plans:
            if plan.workspace_size > size:
                plan.barred = f"it needs a workspace of {plan.workspace_size} bytes, over {size}"

    # Building ----------------------------------------------------------------------------

    def check_support(self) -> None:
        if all(plan.barred for plan in self.plans):
            raise GraphNotSupportedError(
                "no plan is left", {plan.name: plan.barred for plan in self.plans}
            )

    def build(self, *, every: bool) -> None:
        failures: dict[str, str] = {}
        for plan in self.plans:
            if plan.barred:
                failures[plan.name] = plan.barred
                continue
            try:
                plan.build(self.cc, self.device)
            except DECLINES as error:
                failures[plan.name] = reason(error)
                logger.warning("plan %s cannot be built: %s", plan.name, reason(error))
                continue
            if self.selected is None:
                self.selected = plan
            if not every:
                return
        if self.selected is None:
            raise GraphNotSupportedError("no plan of the graph can be built", failures)

    def build_at(self, index: int) -> None:
        plan = self.at(index)
        if plan.barred:
            raise GraphError(f"plan {index} ({plan.name}) is excluded: {plan.barred}")
        try:
            plan.build(self.cc, self.device)
        except DECLINES as error:
            raise GraphNotSupportedError(
                f"plan {index} cannot be built", {plan.name: reason(error)}
            ) from error
        self.selected = plan

    def built(self, index: int) -> Plan:
        """A plan that is compiled, without selecting it."""
        selected = self.selected
        self.build_at(index)
        self.selected = selected if selected is not None else self.selected
        return self.at(index)


def _by_torch(nodes: list[Node]) -> list[Step]:
    live = [one for node in needed(nodes) for one in unpacked(node)]
    return [TorchStep(tuple(live))] if live else []


def _plans_of(mode: heur_mode, found: Partition, device: Any) -> Iterator[Plan]:
    if mode is heur_mode.CUDNN_FIND:
        from kernel_api.graph._autotune import tuned_steps

        yield Plan(mode, tuned_steps(found.steps, device), found.refusals)
        return
    if mode is heur_mode.B:
        others = [_next_design(step) for step in found.steps]
        yield Plan(mode, others, found.refusals)
        return
    yield Plan(mode, found.steps, found.refusals)
    longest = _longest(found.steps)
    if longest is not None:
        for kernel in longest.kernels[1 : 1 + _ALTERNATIVES]:
            steps = [s.with_kernel(kernel) if s is longest else s for s in found.steps]
            yield Plan(mode, steps, found.refusals)


def _next_design(step: Step) -> Step:
    if isinstance(step, KernelStep) and len(step.kernels) > 1:
        return step.with_kernel(step.kernels[1])
    return step


def _longest(steps: Iterable[Step]) -> KernelStep | None:
    """The launch that is expected to take longest, of those with a choice."""
    found = [s for s in steps if isinstance(s, KernelStep) and len(s.kernels) > 1]
    return max(found, key=lambda step: step.predicted or 0.0, default=None)


def _without_twins(plans: Iterable[Plan]) -> list[Plan]:
    """The first of those that launch the same kernels."""
    kept: dict[tuple[str, ...], Plan] = {}
    for plan in plans:
        kept.setdefault(tuple(step.title for step in plan.steps), plan)
    return list(kept.values())


def _matched(steps: Iterable[Step], described: list[tuple[Any, ...]]) -> list[Step]:
    """The steps with the kernels that were described."""
    own = list(steps)
    if [(s.kind, tuple(n.name for n in s.nodes)) for s in own] != [d[:2] for d in described]:
        raise GraphNotSupportedError(
            "the graph is planned otherwise here than where it was serialised",
            {"here": " + ".join(step.title for step in own)},
        )
    matched: list[Step] = []
    for step, (_, _, name) in zip(own, described, strict=True):
        if isinstance(step, KernelStep):
            kernels = [k for k in step.kernels if k.metadata.kernel_name == name]
            if not kernels:
                raise GraphNotSupportedError(
                    "a kernel of the serialised plan is not there",
                    {str(name): f"instead there is {step.title}"},
                )
            step = step.with_kernel(kernels[0])
        matched.append(step)
    return matched

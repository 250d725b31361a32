"""What a graph says of its plans."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kernel_api.graph._planning.plan import Plan
from kernel_api.graph._planning.steps import KernelStep


@dataclass(frozen=True)
class Explanation:
    """Every plan with its kernels, what each fuses, and why the rest was not fused.

    Attributes:
        plans: Best first.
        selected: The one that is executed; None before one is built.
    """

    plans: tuple[Plan, ...]
    selected: Plan | None

    @property
    def kernels(self) -> list[str]:
        """Names of what the selected plan (else the first) launches, in order."""
        plan = self.selected or (self.plans[0] if self.plans else None)
        return [] if plan is None else [s.title for s in plan.steps if s.kind != "view"]

    def to_dict(self) -> dict[str, Any]:
        return {
            "selected": self.selected.name if self.selected is not None else None,
            "plans": [_described(plan) for plan in self.plans],
        }

    def __str__(self) -> str:
        lines = []
        for index, plan in enumerate(self.plans):
            mark = "*" if plan is self.selected else " "
            barred = f"  (excluded: {plan.barred})" if plan.barred else ""
            lines.append(f"{mark}[{index}] {plan}{barred}")
        return "\n".join(lines)


def _described(plan: Plan) -> dict[str, Any]:
    steps = []
    for step in plan.steps:
        one = {**step.to_dict(), "title": step.title}
        if isinstance(step, KernelStep):
            one["provider"] = step.provider
            one["predicted_s"] = step.predicted
        steps.append(one)
    return {
        "name": plan.name,
        "workspace_bytes": plan.workspace_size,
        "steps": steps,
        "not_fused": [{"node": r.node.name, "into": r.into, "why": r.why} for r in plan.refusals],
        "excluded": plan.barred or None,
    }

"""The answer of ``explain``: every family, accepted or rejected, and the reason."""

from __future__ import annotations

import html
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kernel_api.status import KIND_OF_OPERATION

if TYPE_CHECKING:
    from kernel_api.kernel import Kernel


@dataclass(frozen=True)
class Acceptance:
    """A family that can: its kernels, best first within the family's own order."""

    family: str
    provider: str
    kernels: tuple[Kernel, ...]

    def __str__(self) -> str:
        count = len(self.kernels)
        return f"{count} design{'s' if count > 1 else ''}"


@dataclass(frozen=True)
class Rejection:
    """A family that cannot: the rule that failed, the reason with both values, the nearest miss."""

    family: str
    provider: str
    rule: str
    reason: str
    nearest: str | None = None

    def __str__(self) -> str:
        return f"{self.reason} ({self.nearest})" if self.nearest else self.reason


@dataclass(frozen=True)
class Explanation:
    """Printable, and an object: ``accepted`` and ``rejected``, family by family.

    What is printed names the families of other operations in one line at the end.
    """

    problem: str
    accepted: tuple[Acceptance, ...]
    rejected: tuple[Rejection, ...]

    def _rows(self) -> list[tuple[str, str, str]]:
        yes = [("yes", a.family, str(a)) for a in self.accepted]
        no = [("no", r.family, str(r)) for r in self.rejected if r.rule != KIND_OF_OPERATION]
        others = [r.family for r in self.rejected if r.rule == KIND_OF_OPERATION]
        if len(others) == 1 or not yes + no:
            return yes + [("no", r.family, str(r)) for r in self.rejected]
        if others:
            no.append(
                ("no", f"{len(others)} others", f"compute something else: {', '.join(others)}")
            )
        return yes + no

    def __str__(self) -> str:
        rows = self._rows()
        width = max((len(family) for _, family, _ in rows), default=0)
        lines = [f"{verdict + ':':<4} {family:<{width}}  {text}" for verdict, family, text in rows]
        return "\n".join([self.problem, *lines])

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        return {
            "problem": self.problem,
            "accepted": [
                {
                    "family": a.family,
                    "provider": a.provider,
                    "kernels": [k.metadata.kernel_name for k in a.kernels],
                }
                for a in self.accepted
            ],
            "rejected": [
                {
                    "family": r.family,
                    "provider": r.provider,
                    "rule": r.rule,
                    "reason": r.reason,
                    "nearest": r.nearest,
                }
                for r in self.rejected
            ],
        }

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><td>{verdict}</td><td>{html.escape(family)}</td><td>{html.escape(text)}</td></tr>"
            for verdict, family, text in self._rows()
        )
        return f"<table><caption>{html.escape(self.problem)}</caption>{rows}</table>"

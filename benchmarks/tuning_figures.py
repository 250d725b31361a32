"""What the rows of the suite tuning say: gain, regret, and how far two runs agree."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any


def figures(found: Sequence[Mapping[str, Any]]) -> list[str]:
    """In words, from rows."""
    ratios = [row["ratio"] for row in found]
    regrets, costs = [], []
    for row in found:
        one, again = row["runs"]
        regrets.append(_time(one, row["first"]) / min(times(one)))
        costs.append(_time(again, row["subject"]) / min(times(again)))
    chosen = [[next(iter(run)) for run in row["runs"]] for row in found]
    top = sum(row["first"] == next(iter(row["runs"][0])) for row in found)
    flips = sum(one != again for one, again in chosen)
    lines = [
        f"{len(found)} problems: peer / tuned {_mean(ratios):.3f}, worst {min(ratios):.3f}",
        f"the model's first choice: regret {_mean(regrets) - 1:.2%} (geometric mean), "
        f"{max(regrets) - 1:.2%} (worst); the best in {top / len(found):.0%}",
        f"the second run chose another in {flips / len(found):.1%}; the first one's choice by its "
        f"times: {_mean(costs) - 1:.2%} (geometric mean), {max(costs) - 1:.2%} (worst)",
    ]
    for name in sorted({name for row in found for name in row.get("replays", ())}):
        again = [row["replays"][name] for row in found if "replays" in row]
        if again:
            away = max(abs(ratio - 1) for ratio in again)
            lines.append(
                f"measured again in {name} mode, over the stored time: "
                f"median {statistics.median(again):.3f}, farthest {away:.2%}"
            )
    return lines


def times(run: Mapping[str, Any]) -> list[float]:
    """Of candidates that were timed as long as any."""
    timed = [one for one in run.values() if not isinstance(one, str)]
    most = max(rounds for _, rounds in timed)
    return [median for median, rounds in timed if rounds == most]


def _time(run: Mapping[str, Any], name: str) -> float:
    found: float = run[name][0]
    return found


def _mean(values: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))

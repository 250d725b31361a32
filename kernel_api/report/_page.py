"""The page: what the template is given."""

from __future__ import annotations

import base64
import hashlib
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from markupsafe import Markup

from kernel_api._code_files import replace_durably
from kernel_api.report import _charts, _tables
from kernel_api.report._results import PEER, Candidate, Result, geometric_mean, results
from kernel_api.tuning import Environment, Status
from kernel_api.tuning._row import Row

#: Axes that are in every kernel, beside those of its design.
_COMMON_AXES = ("provider", "family")


def write(path: Path, rows: Iterable[Row]) -> int:
    """Write the page; returns the number of rows in it.

    Raises:
        OSError: the file cannot be written.
    """
    taken = list(rows)
    replace_durably(path, page(taken).encode("utf-8", "backslashreplace"))
    return len(taken)


def page(rows: Iterable[Row]) -> str:
    """The page as HTML. Every row is in it, whatever it is of and whatever came of it."""
    import jinja2

    found = results(rows)
    files = resources.files("kernel_api.report")
    style, script = ((files / f"page.{kind}").read_text("utf-8") for kind in ("css", "js"))
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    template = environment.from_string((files / "page.html").read_text("utf-8"))
    return template.render(
        style=Markup(style),
        script=Markup(script),
        # No other script runs in the page, whatever a row's text may say.
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        **_content(found),
    )


def _content(found: Sequence[Result]) -> dict[str, Any]:
    environments = list({one.environment.digest: one.environment for one in found}.values())
    names = {one.digest: f"E{number}" for number, one in enumerate(environments, 1)}
    dates = [c.measurement.date for one in found for c in one.candidates]
    counts = sum((one.counts for one in found), Counter[str]())
    return {
        "tiles": _tiles(found),
        "dates": " to ".join(dict.fromkeys(f"{f(dates):%Y-%m-%d}" for f in (min, max) if dates)),
        "statuses": [(s.value, counts[s.value]) for s in Status if counts[s.value]],
        "environments": [_environment(one, names[one.digest], found) for one in environments],
        "summary": _tables.summary(found, names),
        "roofs": [
            (names[one.digest], one, chart)
            for one in environments
            if (chart := _all_rooflines([r for r in found if r.environment == one])) is not None
        ],
        "regret": _regret(found),
        "axes": _axes_of_all(found),
        "problems": [_problem(one, names) for one in found],
        "several": len(environments) > 1,
    }


def _environment(one: Environment, name: str, found: Sequence[Result]) -> dict[str, Any]:
    mine = [result for result in found if result.environment == one]
    policy = {k: v for k, v in one.policy.to_dict().items() if v is not None}
    return {
        "name": name,
        "digest": one.digest,
        "gpu": one.gpu,
        "capability": one.compute_capability,
        "multiprocessors": one.multiprocessors,
        "driver": one.driver,
        "policy": ", ".join(f"{k.replace('_', ' ')} {v}" for k, v in policy.items()),
        "packages": sorted(one.packages.items()),
        "problems": len(mine),
        "rows": sum(len(result.candidates) for result in mine),
    }


def _tiles(found: Sequence[Result]) -> list[tuple[str, str, str]]:
    """Figures of the whole, with what they are of."""
    rows = sum(len(one.candidates) for one in found)
    passed = sum(one.counts[Status.PASSED.value] for one in found)
    tiles = [
        ("problems", str(len(found)), f"{sum(one.winner is not None for one in found)} solved"),
        ("rows", str(rows), f"{passed} passed, {rows - passed} failed"),
    ]
    peers = [one.peer_ratio for one in found if one.peer_ratio is not None]
    if (mean := geometric_mean(peers)) is not None:
        tiles.append(("torch over best", f"{mean:.3f} ×", f"geometric mean of {len(peers)}"))
    regrets = [one.regret for one in found if one.regret is not None]
    if (mean := geometric_mean(regrets)) is not None:
        tiles.append(("regret of the model", f"{mean:.3f} ×", f"worst {max(regrets):.2f} ×"))
        first = sum(one <= 1 for one in regrets)
        tiles.append(("model is right", f"{first / len(regrets):.0%}", f"{first} first choices"))
    return tiles


# Charts ----------------------------------------------------------------------------------


def _all_rooflines(found: Sequence[Result]) -> Markup | None:
    """The winners of an environment, and the best of torch."""
    points = []
    for kind in ("peer", "best"):
        for one in found:
            torch = (c for c in one.passed if c.provider == PEER)
            chosen = next(torch, None) if kind == "peer" else one.winner
            points += _points(one, [chosen] if chosen is not None else [], kind)
    return _roofline(points, found, 640, 330)


def _roofline(points: list[_charts.Point], found: Sequence[Result], *size: float) -> Markup | None:
    """None without a point."""
    if not points:
        return None
    kinds = dict.fromkeys(one.work.kind for one in found if one.work and one.work.kind)
    return _charts.roofline(points, found[0].roofs, kinds, *size)


def _points(one: Result, chosen: Iterable[Candidate], kind: str) -> list[_charts.Point]:
    if one.work is None or not one.work.operations or not one.work.bytes:
        return []
    points = []
    for candidate in chosen:
        rate = one.tflops(candidate.time_us)
        if rate is not None and 1e-12 < rate < 1e12:
            told = _tables.microseconds(candidate.time_us)
            hint = f"{one.description}: {candidate.name}, {told} µs, {rate:.1f} TFLOP/s"
            intensity = one.work.operations / one.work.bytes
            points.append(_charts.Point(intensity, rate, hint, kind))
    return points


def _regret(found: Sequence[Result]) -> dict[str, Any] | None:
    """None where the model knows no candidate."""
    known = [(one.regret, one) for one in found if one.regret is not None]
    if not known:
        return None
    values = [value for value, _ in known]
    worst = sorted(known, key=lambda pair: -pair[0])[:5]
    return {
        "chart": _charts.distribution(values),
        "mean": geometric_mean(values),
        "count": len(values),
        "worst": [(value, one.key, str(one.description)) for value, one in worst if value > 1],
    }


def _values(candidate: Candidate, axis: str) -> str | None:
    return getattr(candidate, axis) if axis in _COMMON_AXES else candidate.axes.get(axis)


def _names(found: Iterable[Result]) -> list[str]:
    named = (name for one in found for c in one.passed for name in c.axes)
    return list(dict.fromkeys((*_COMMON_AXES, *named)))


def _times(one: Result, axis: str) -> dict[str, list[float]]:
    """Times by value of an axis; nothing where there is no choice."""
    times: dict[str, list[float]] = {}
    for candidate in one.passed:
        if value := _values(candidate, axis):
            times.setdefault(value, []).append(candidate.time_us)
    return times if len(times) > 1 else {}


def _strips(one: Result) -> list[tuple[_charts.Strip, Markup]]:
    """Of one problem: what matters most first."""
    strips = []
    for axis in _names([one]):
        if times := _times(one, axis):
            marks = {value: min(all_of) for value, all_of in times.items()}
            notes = {value: f"{_tables.microseconds(best)} µs" for value, best in marks.items()}
            strips.append(_charts.Strip(axis, times, marks, notes))
    return _drawn(strips)


def _axes_of_all(found: Sequence[Result]) -> list[tuple[_charts.Strip, Markup]]:
    """The best with a value over the best, of all problems; marks are geometric means."""
    strips = []
    for axis in _names(found):
        ratios: dict[str, list[float]] = {}
        wins: Counter[str] = Counter()
        for one in found:
            if (times := _times(one, axis)) and one.winner is not None:
                for value, all_of in times.items():
                    ratios.setdefault(value, []).append(min(all_of) / one.winner.time_us)
                wins[_values(one.winner, axis) or ""] += 1
        if ratios:
            marks = {value: geometric_mean(all_of) or 1.0 for value, all_of in ratios.items()}
            notes = {v: f"{marks[v]:.2f}× · {wins[v]}/{len(ratios[v])}" for v in ratios}
            strips.append(_charts.Strip(axis, ratios, marks, notes))
    return _drawn(strips)


def _drawn(strips: Sequence[_charts.Strip]) -> list[tuple[_charts.Strip, Markup]]:
    numbers = [n for strip in strips for all_of in strip.values.values() for n in all_of]
    usable = [n for n in numbers if math.isfinite(n)]
    if not usable:
        return []
    bounds = min(usable), max(usable)
    ordered = sorted(strips, key=lambda strip: -strip.effect)
    return [(strip, strip.svg(bounds)) for strip in ordered]


def _problem(one: Result, names: dict[str, str]) -> dict[str, Any]:
    torch = [c for c in one.passed if c.provider == PEER][:1]
    others = [c for c in one.passed if c is not one.winner and c not in torch]
    points = [
        *_points(one, others, ""),
        *_points(one, torch, "peer"),
        *_points(one, one.passed[:1], "best"),
    ]
    return {
        "key": one.key,
        "title": str(one.description),
        "options": one.description.options,
        "environment": names[one.environment.digest],
        "result": one,
        "statuses": [(s.value, one.counts[s.value]) for s in Status if one.counts[s.value]],
        "best": _tables.microseconds(one.winner.time_us) if one.winner else None,
        "digest": one.problem.digest,
        "table": _tables.candidates(one),
        "roofline": _roofline(points, [one]),
        "strips": _strips(one),
    }

"""Pictures as inline SVG, coloured by the page's style sheet; dots have tooltips."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from markupsafe import Markup, escape

from kernel_api.tuning._roofs import Roofs

#: Values of an axis that a strip has room for; the best ones are taken.
_MOST_VALUES = 10

#: Bounds of the bars of the distribution of regrets.
_BOUNDS = (1.0, 1.01, 1.02, 1.05, 1.1, 1.2, 1.5)


class Drawing:
    """An SVG picture of a size."""

    def __init__(self, width: float, height: float, label: str) -> None:
        self._parts = [
            f'<svg viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" '
            f'height="{height:.0f}" role="img" aria-label="{escape(label)}">'
        ]

    def text(self, x: float, y: float, words: str, kind: str = "", anchor: str = "start") -> None:
        self._parts.append(
            f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}" text-anchor="{anchor}">'
            f"{escape(words)}</text>"
        )

    def line(self, *places: tuple[float, float], kind: str = "grid") -> None:
        path = "L".join(f"{x:.1f} {y:.1f}" for x, y in places)
        self._parts.append(f'<path d="M{path}" class="{kind}"/>')

    def dots(self, places: Iterable[tuple[float, float]]) -> None:
        """Small ones without tooltips: thousands of them take little room."""
        path = "".join(f"M{x:.1f} {y:.1f}h0" for x, y in places)
        self._parts.append(f'<path d="{path}" class="dots"/>')

    def dot(self, x: float, y: float, hint: str, kind: str, radius: float = 4) -> None:
        self._parts.append(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius}" class="{kind}">'
            f"<title>{escape(hint)}</title></circle>"
        )

    def bar(self, x: float, y: float, width: float, height: float, hint: str) -> None:
        self._parts.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" rx="2" '
            f'class="bar"><title>{escape(hint)}</title></rect>'
        )

    def svg(self) -> Markup:
        return Markup("".join([*self._parts, "</svg>"]))


def logarithmic(low: float, high: float, start: float, end: float) -> Callable[[float], float]:
    """From values to places, in proportion to logarithms."""
    zero = math.log(low)
    span = math.log(high) - zero or 1.0
    return lambda value: start + (end - start) * (math.log(value) - zero) / span


# Roofline --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Point:
    """A kernel on a problem: operations per byte, TFLOP/s."""

    intensity: float
    tflops: float
    hint: str
    kind: str


def roofline(
    points: Sequence[Point],
    roofs: Roofs | None,
    kinds: Iterable[str],
    width: float = 586,
    height: float = 240,
) -> Markup:
    """Achieved rates over arithmetic intensity, below the ceilings if these are known.

    Args:
        points: Drawn in this order, the last on top.
        roofs: Ceilings of the GPU.
        kinds: Of arithmetic, whose ceilings are drawn.
    """
    left, right, top, bottom = 44.0, width - 22, 22.0, height - 34
    peaks = {kind: roofs.rates[kind] for kind in kinds if roofs and kind in roofs.rates}
    rates = [one.tflops for one in points] + [peak / 1e12 for peak in peaks.values()]
    places = [one.intensity for one in points]
    if roofs:
        places += [peak / roofs.bandwidth for peak in peaks.values()]
    x_low, x_high = _decades(places)
    y_low, y_high = _decades(rates)
    along = logarithmic(x_low, x_high, left, right)
    up = logarithmic(y_low, y_high, bottom, top)
    drawing = Drawing(width, height, "TFLOP/s over operations per byte")
    for value in _powers(x_low, x_high):
        drawing.line((along(value), top), (along(value), bottom))
        drawing.text(along(value), bottom + 14, f"{value:g}", "muted", "middle")
    for value in _powers(y_low, y_high):
        drawing.line((left, up(value)), (right, up(value)))
        drawing.text(left - 6, up(value) + 4, f"{value:g}", "muted", "end")
    drawing.text((left + right) / 2, height - 4, "operations per byte", "muted", "middle")
    drawing.text(4, 12, "TFLOP/s", "muted")
    if roofs:
        _ceilings(drawing, roofs, peaks, along, up, (x_low, x_high, y_low))
    drawing.dots((along(one.intensity), up(one.tflops)) for one in points if not one.kind)
    for one in points:
        if one.kind:
            drawing.dot(along(one.intensity), up(one.tflops), one.hint, one.kind)
    return drawing.svg()


def _ceilings(
    drawing: Drawing,
    roofs: Roofs,
    peaks: Mapping[str, float],
    along: Callable[[float], float],
    up: Callable[[float], float],
    bounds: tuple[float, float, float],
) -> None:
    x_low, x_high, y_low = bounds
    slope = roofs.bandwidth / 1e12
    highest = max(peaks.values(), default=slope * x_high * 1e12) / 1e12
    knee = min(highest / slope, x_high)
    foot = max(x_low, y_low / slope)
    if foot < knee:
        drawing.line((along(foot), up(foot * slope)), (along(knee), up(knee * slope)), kind="roof")
    for kind, peak in peaks.items():
        start = max(peak / 1e12 / slope, x_low)
        if start < x_high:
            height = up(peak / 1e12)
            drawing.line((along(start), height), (along(x_high), height), kind="roof")
            words = f"{kind} {peak / 1e12:.0f}, {slope:.2f} TB/s"
            drawing.text(along(x_high), height - 4, words, "muted small", "end")


def _decades(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    bottom = math.floor(math.log10(low) + 1e-9)
    return 10.0**bottom, 10.0 ** max(math.ceil(math.log10(high) - 1e-9), bottom + 1)


def _powers(low: float, high: float) -> list[float]:
    first, last = round(math.log10(low)), round(math.log10(high))
    step = 1 if last - first <= 7 else 2 + (last - first) // 14
    return [10.0**i for i in range(first, last + 1, step)]


# Axes ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Strip:
    """What one axis does: all times by value, and one that stands for each value.

    Attributes:
        axis: Its name.
        values: Times, or ratios to the best, by value of the axis.
        marks: The one that stands for a value: the best, or a mean.
        notes: What is said of a value, beside its dots.
    """

    axis: str
    values: Mapping[str, Sequence[float]]
    marks: Mapping[str, float]
    notes: Mapping[str, str]

    @property
    def effect(self) -> float:
        """How much worse the worst value is than the best one."""
        return max(self.marks.values()) / min(self.marks.values())

    def svg(self, bounds: tuple[float, float], width: float = 284) -> Markup:
        """Bounds: the smallest and largest number of all strips beside this one."""
        best = sorted(self.marks, key=lambda value: (self.marks[value], value))[:_MOST_VALUES]
        chosen = sorted(best, key=_natural)
        pitch, top, left, right = 15, 8, 100.0, width - 92
        low, high = bounds
        place = logarithmic(low, max(high, low * 1.01), left, right)
        height = top + pitch * len(chosen) + 4
        drawing = Drawing(width, height, f"{self.axis}: times by value")
        for number, value in enumerate(chosen):
            y = top + pitch * number + pitch / 2
            kind = "best" if value == best[0] else ""
            drawing.line((left, y), (right, y))
            drawing.text(left - 8, y + 4, _shortened(value), kind, "end")
            drawing.dots((place(one), y) for one in self.values[value])
            hint = f"{self.axis} {value}: {self.notes[value]}, {len(self.values[value])} rows"
            drawing.dot(place(self.marks[value]), y, hint, kind or "mark", 3.5)
            drawing.text(width - 2, y + 4, self.notes[value], kind or "muted", "end")
        return drawing.svg()

    @property
    def left_out(self) -> int:
        return max(len(self.marks) - _MOST_VALUES, 0)


def _natural(text: str) -> list[tuple[int, float, str]]:
    """Sorts 16x64 before 128x64."""
    parts = re.findall(r"\d+(?:\.\d+)?|\D+", text)
    return [(0, float(one), "") if one[0].isdecimal() else (1, 0.0, one) for one in parts]


def _shortened(text: str) -> str:
    return text if len(text) <= 13 else f"{text[:11]}…"


# Regret ----------------------------------------------------------------------------------


def distribution(regrets: Sequence[float], width: float = 420, height: float = 170) -> Markup:
    """How many problems have a regret of how much, as bars."""
    bounds = (*_BOUNDS, math.inf)
    names = [f"≤ {100 * (high - 1):.0f} %" for high in _BOUNDS[1:]]
    names = ["0 %", *names, f"> {100 * (_BOUNDS[-1] - 1):.0f} %"]
    counts = [sum(one <= 1 for one in regrets)]
    for low, high in itertools.pairwise(bounds):
        counts.append(sum(low < one <= high for one in regrets))
    left, top, bottom = 4.0, 20.0, height - 34
    pitch = (width - 2 * left) / len(counts)
    drawing = Drawing(width, height, "problems by regret of the model")
    most = max(*counts, 1)
    for number, (name, count) in enumerate(zip(names, counts, strict=True)):
        x, tall = left + pitch * number, (bottom - top) * count / most
        drawing.bar(x + 4, bottom - tall, pitch - 8, tall, f"{name}: {count} problems")
        drawing.text(x + pitch / 2, bottom - tall - 5, str(count), "", "middle")
        drawing.text(x + pitch / 2, bottom + 14, name, "muted", "middle")
    drawing.line((left, bottom), (width - left, bottom), kind="axis")
    drawing.text(width / 2, height - 4, "slower than the best by", "muted", "middle")
    return drawing.svg()

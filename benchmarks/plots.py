"""Draw the recorded rows as SVG: docs/plots/<gpu>-<suite>.svg, and <gpu>-roofline.svg.

    python benchmarks/plots.py [--check]

What is drawn depends on the rows alone; the colours follow the reader's light or dark mode.
``--check`` changes nothing and fails if the files are not what the rows say.
"""

from __future__ import annotations

import argparse
import math
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

from tables import RESULTS, ROOT, Row, best_rows, ceilings, recorded

PLOTS = ROOT / "docs" / "plots"

#: Up to so many problems each have a line of their own; more of them are a cloud of points.
MOST_LINES = 24
WIDTH = 760
#: Distinct in lightness as well as in hue, on white and on black.
SERIES = ("#2f7ed8", "#e8710a", "#1b9e77", "#a35bd1", "#8a8f98", "#d64d6e")
STYLE = """<style>
text { font: 12px system-ui, sans-serif; fill: #24292f; }
.title { font-size: 15px; font-weight: 600; }
.muted { fill: #57606a; }
.grid { stroke: #d0d7de; stroke-width: 1; }
.axis { stroke: #57606a; stroke-width: 1.2; }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3; }
  .muted { fill: #9198a1; }
  .grid { stroke: #3d444d; }
  .axis { stroke: #9198a1; }
}
</style>"""

#: How plots name what the labels of problems call the element types; and whose peak is theirs.
KINDS = {"bf16": "float16", "f16": "float16", "e4m3": "float8", "i8": "int8", "tf32": "float32"}


class Drawing:
    """An SVG picture that grows downwards."""

    def __init__(self, height: float, title: str, subtitle: str) -> None:
        self.height = height
        self._parts: list[str] = []
        self.text(16, 26, title, "title")
        self.text(16, 45, subtitle, "muted")

    def text(self, x: float, y: float, words: str, kind: str = "", anchor: str = "start") -> None:
        look = f'text-anchor="{anchor}"' + (f' class="{kind}"' if kind else "")
        self._parts.append(f'<text x="{x:.1f}" y="{y:.1f}" {look}>{escape(words)}</text>')

    def line(self, x1: float, y1: float, x2: float, y2: float, kind: str = "grid") -> None:
        look = (
            f'class="{kind}"' if not kind.startswith("#") else f'stroke="{kind}" stroke-width="2"'
        )
        self._parts.append(
            f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" {look}/>'
        )

    def dot(self, x: float, y: float, colour: str, hint: str, hollow: bool = False) -> None:
        look = (
            f'fill="none" stroke="{colour}" stroke-width="1.5"'
            if hollow
            else f'fill="{colour}" fill-opacity="0.85"'
        )
        inside = f"<title>{escape(hint)}</title>"
        self._parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" {look}>{inside}</circle>')

    def legend(self, y: float, names: Iterable[tuple[str, str, bool]]) -> None:
        """Names with their colours, side by side."""
        x = 20.0
        for name, colour, hollow in names:
            self.dot(x, y - 4, colour, name, hollow)
            self.text(x + 10, y, name)
            x += 26 + 7 * len(name)

    def svg(self) -> str:
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {self.height:.0f}" '
            f'width="{WIDTH}" height="{self.height:.0f}" role="img">'
        )
        return "\n".join([head, STYLE, *self._parts, "</svg>"]) + "\n"


def logarithmic(low: float, high: float, start: float, end: float) -> Callable[[float], float]:
    """From values to places, in proportion to logarithms."""
    span = math.log(high / low) or 1.0
    return lambda value: start + (end - start) * math.log(value / low) / span


def ratio_range(ratios: Sequence[float]) -> tuple[float, float, list[float]]:
    """An axis that has 1 and all ratios, and its ticks."""
    low, high = min(*ratios, 1.0), max(*ratios, 1.0)
    step = 0.05 if high - low < 0.4 else 0.1 if high - low < 1 else 0.5
    first, last = math.floor(low / step - 1e-9), math.ceil(high / step + 1e-9)
    ticks = [round(step * i, 2) for i in range(first, last + 1) if i > 0]
    return ticks[0], ticks[-1], ticks


def subtitle(rows: Sequence[Row]) -> str:
    mean = math.exp(sum(math.log(row["ratio"]) for row in rows) / len(rows))
    return f"time of the best peer over ours, higher is better; geometric mean {mean:.3f}"


def ratio_lines(title: str, rows: Sequence[Row]) -> str:
    """One line per problem: how much longer the peer takes."""
    left, right, top, pitch = 330, WIDTH - 70, 92, 24
    bottom = top + pitch * len(rows)
    drawing = Drawing(bottom + 16, title, subtitle(rows))
    low, high, ticks = ratio_range([row["ratio"] for row in rows])
    place = logarithmic(low, high, left, right)
    for tick in ticks:
        drawing.line(place(tick), top - 14, place(tick), bottom - 8)
        drawing.text(place(tick), top - 20, f"{tick:g}", "muted", "middle")
    for number, row in enumerate(rows):
        y = top + pitch * number
        colour = SERIES[0] if row["ratio"] >= 1 else SERIES[1]
        hint = f"{row['subject']}: {row['subject_us']} us; {row['peer']}: {row['peer_us']} us"
        drawing.text(left - 14, y + 4, short(row["problem"]), anchor="end")
        drawing.line(place(1), y, place(row["ratio"]), y, colour)
        drawing.dot(place(row["ratio"]), y, colour, hint)
        drawing.text(right + 16, y + 4, f"{row['ratio']:.3f}")
    drawing.line(place(1), top - 14, place(1), bottom - 8, "axis")
    return drawing.svg()


def ratio_cloud(title: str, rows: Sequence[Row]) -> str:
    """A point per problem over its size, coloured by where it comes from."""
    left, right, top, bottom = 60, WIDTH - 24, 96, 400
    drawing = Drawing(bottom + 48, title, subtitle(rows))
    origins = list(dict.fromkeys(origin(row) for row in rows))
    colours = {name: SERIES[i % len(SERIES)] for i, name in enumerate(origins)}
    drawing.legend(72, [(name, colours[name], False) for name in origins])
    low, high, ticks = ratio_range([row["ratio"] for row in rows])
    up = logarithmic(low, high, bottom, top)
    sizes = [size_of(row) for row in rows]
    along = logarithmic(min(sizes), max(*sizes, 2 * min(sizes)), left + 12, right - 12)
    for tick in ticks:
        drawing.line(left, up(tick), right, up(tick))
        drawing.text(left - 8, up(tick) + 4, f"{tick:g}", "muted", "end")
    power = 1 << max(min(sizes) - 1, 0).bit_length()
    while power <= max(sizes):
        drawing.text(along(power), bottom + 18, f"{power}", "muted", "middle")
        power *= 4 if max(sizes) / min(sizes) > 256 else 2
    axis = "S, keys of a sequence" if "S" in rows[0] else "M, rows of A"
    drawing.text((left + right) / 2, bottom + 38, axis, "muted", "middle")
    for row, size in zip(rows, sizes, strict=True):
        hint = f"{row['problem']}: {row['ratio']:.3f}, {row['subject']}"
        drawing.dot(along(size), up(row["ratio"]), colours[origin(row)], hint)
    drawing.line(left, up(1), right, up(1), "axis")
    return drawing.svg()


def roofline(title: str, rows: Sequence[Row], gpu: dict[str, Any]) -> str:
    """TFLOP/s over FLOP per byte, ours and the peer's, under what the GPU sustains."""
    left, right, top, bottom = 64, WIDTH - 24, 96, 430
    bandwidth, sustained = gpu["machine"]["bandwidth"], gpu["machine"]["sustained"]
    drawing = Drawing(
        bottom + 48,
        title,
        f"roofs: {bandwidth / 1e12:.1f} TB/s, and arithmetic within the power limit (as fitted)",
    )
    kinds = list(dict.fromkeys(KINDS[element(row)] for row in rows))
    colours = {kind: SERIES[i] for i, kind in enumerate(kinds)}
    drawing.legend(
        72,
        [(kind, colours[kind], False) for kind in kinds]
        + [("hollow: the best peer", "#8a8f98", True)],
    )
    points = [(row["operations"] / row["bytes"], row) for row in rows]
    rates = [
        1e-6 * row["operations"] / row[f"{who}_us"] for row in rows for who in ("subject", "peer")
    ]
    highest = max(*rates, *(sustained[kind] / 1e12 for kind in kinds))
    x_low, x_high = _decades(min(x for x, _ in points), max(x for x, _ in points))
    y_low, y_high = _decades(min(rates), highest)
    along = logarithmic(x_low, x_high, left, right)
    up = logarithmic(y_low, y_high, bottom, top)
    for value in _powers(x_low, x_high):
        drawing.line(along(value), top, along(value), bottom)
        drawing.text(along(value), bottom + 18, f"{value:g}", "muted", "middle")
    for value in _powers(y_low, y_high):
        drawing.line(left, up(value), right, up(value))
        drawing.text(left - 8, up(value) + 4, f"{value:g}", "muted", "end")
    drawing.text((left + right) / 2, bottom + 38, "FLOP per byte", "muted", "middle")
    drawing.text(16, top - 10, "TFLOP/s", "muted")
    for kind in kinds:
        knee = max(x_low, min(sustained[kind] / bandwidth, x_high))
        foot = max(x_low, y_low * 1e12 / bandwidth)
        roof = min(sustained[kind], knee * bandwidth) / 1e12
        drawing.line(along(foot), up(foot * bandwidth / 1e12), along(knee), up(roof), "axis")
        drawing.line(along(knee), up(roof), right, up(roof), colours[kind])
    for x, row in points:
        colour = colours[KINDS[element(row)]]
        for who, hollow in (("peer", True), ("subject", False)):
            rate = 1e-6 * row["operations"] / row[f"{who}_us"]
            hint = f"{row['problem']}: {row[who]}, {rate:.1f} TFLOP/s"
            drawing.dot(along(x), up(rate), colour, hint, hollow)
    return drawing.svg()


def _decades(low: float, high: float) -> tuple[float, float]:
    return 10.0 ** math.floor(math.log10(low)), 10.0 ** math.ceil(math.log10(high) + 1e-9)


def _powers(low: float, high: float) -> list[float]:
    return [10.0**i for i in range(round(math.log10(low)), round(math.log10(high)) + 1)]


def short(problem: str) -> str:
    """The label without what all of them say."""
    return re.sub(r" \(M x N x K\)( TN)?| \(B x H x S x D\)", "", problem)


def size_of(row: Row) -> int:
    """What a cloud lies along: keys of a sequence, or rows of a product."""
    return int(row["S"] if "S" in row else row["problem"].split("x")[0])


def element(row: Row) -> str:
    """Of a product; labels of grouped ones and of attention do not say it."""
    types = re.search(r" [NT]{2} (\w+)", row["problem"])
    return types[1] if types else "bf16"


def origin(row: Row) -> str:
    return str(row.get("origin", "")).split(" ")[0] or "all"


def drawn(results: Path = RESULTS) -> dict[str, str]:
    """Every picture by its file name."""
    pictures: dict[str, str] = {}
    for gpu, suites in recorded(results).items():
        points = []
        for suite, rows in suites.items():
            best = [row for row in best_rows(rows) if "operations" in row]
            if not best:
                continue
            points += best
            draw = ratio_lines if len(best) <= MOST_LINES else ratio_cloud
            pictures[f"{gpu}-{suite}.svg"] = draw(f"{suite} on {gpu}", best)
        of_gpu = ceilings(points)
        if of_gpu is not None:
            pictures[f"{gpu}-roofline.svg"] = roofline(f"Roofline of {gpu}", points, of_gpu)
    return pictures


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args(arguments)
    wanted = drawn()
    found = {path.name: path.read_text() for path in sorted(PLOTS.glob("*.svg"))}
    if options.check:
        return int(found != wanted)
    for name in found.keys() - wanted.keys():
        (PLOTS / name).unlink()
    for name, picture in wanted.items():
        PLOTS.mkdir(parents=True, exist_ok=True)
        (PLOTS / name).write_text(picture)
        print(PLOTS / name)
    return 0


if __name__ == "__main__":
    sys.exit(main())

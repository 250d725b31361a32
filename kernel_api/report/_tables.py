"""Tables of the page: columns, and cells as text with the number that they are sorted by."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from kernel_api.report._problem import in_order
from kernel_api.report._results import Result
from kernel_api.tuning import Status


@dataclass(frozen=True)
class Column:
    """A column by the name that tests and style sheets know it by."""

    name: str
    title: str
    hint: str = ""
    is_numeric: bool = True


@dataclass(frozen=True)
class Cell:
    """Text; the number to sort by where the text does not say it; a link within the page."""

    text: str = ""
    value: float | None = None
    kind: str = ""
    hint: str = ""
    target: str = ""

    @property
    def sort_key(self) -> str | None:
        """Exactly, so that what looks equal is in order as well."""
        if isinstance(self.value, int):
            return str(self.value)
        return repr(self.value) if self.value is not None and math.isfinite(self.value) else None


@dataclass(frozen=True)
class Line:
    """A row of a table; key: the problem that it belongs to."""

    key: str
    kind: str
    cells: Sequence[Cell]
    status: str = ""


@dataclass(frozen=True)
class Table:
    columns: Sequence[Column]
    lines: Sequence[Line]


def microseconds(value: float) -> str:
    if not value < 1e7:
        return f"{value:.3e}"
    return f"{value:.0f}" if value >= 1000 else f"{value:.1f}" if value >= 100 else f"{value:.2f}"


def number(value: float | None, digits: int = 1, kind: str = "", hint: str = "") -> Cell:
    """A cell; nothing for None."""
    if value is None:
        return Cell()
    text = f"{value:.{digits}f}" if abs(value) < 1e7 else f"{value:.3e}"
    return Cell(text, value, kind, hint)


def rate(value: float | None) -> Cell:
    return number(value, 0 if value is not None and value >= 100 else 1)


def ratio(value: float | None, hint: str = "") -> Cell:
    """How many times the best; 1 % is worth a look, 5 % a colour."""
    kind = "" if value is None or value <= 1.01 else "off" if value <= 1.05 else "far"
    return number(value, 3, kind, hint)


def whole(value: int | None) -> Cell:
    return Cell() if value is None else Cell(str(value), value)


def text(value: str, kind: str = "", hint: str = "") -> Cell:
    return Cell(value, None, kind, hint)


# Problems --------------------------------------------------------------------------------


def summary(found: Sequence[Result], environments: Mapping[str, str]) -> Table:
    """One line per problem.

    Args:
        found: The problems.
        environments: Short names by digest; a column says them if there are several.
    """
    sizes = in_order({name for one in found for name in one.description.sizes})
    columns = [
        Column("problem", "problem", "operation and element types", False),
        Column("environment", "env", "see the table of environments", False),
        Column("layout", "layout", "t: row-major, n: column-major, per operand", False),
        *(Column(f"size-{name}", name) for name in sizes),
        Column("options", "epilogue, options", "", False),
        Column("time", "best µs", "median time of the winner"),
        Column("tflops", "TFLOP/s", "of the winner"),
        Column("gbytes", "GB/s", "operands, each once, over the time of the winner"),
        Column("roof", "% roof", "least time that the data sheet allows over the time"),
        Column("second", "2nd ×", "time of the second best over the best"),
        Column("torch", "torch ×", "time of the best of provider torch over the best"),
        Column("regret", "regret ×", "time of the model's first choice over the best"),
        Column("passed", "passed", "candidates that passed"),
        Column("failed", "failed", "candidates that did not, by status", False),
        Column("winner", "winner", "the fastest kernel that passed", False),
    ]
    lines = [
        Line(one.key, "problem", _problem_cells(one, sizes, environments[one.environment.digest]))
        for one in found
    ]
    return _without(columns, lines, {"environment"} if len(environments) < 2 else set())


def _problem_cells(one: Result, sizes: Sequence[str], environment: str) -> list[Cell]:
    about, winner = one.description, one.winner
    name = " ".join(filter(None, (about.operation, about.types)))
    cells = [
        Cell(name, target=f"problem-{one.key}"),
        text(environment),
        text(about.layout),
        *(whole(about.sizes.get(size)) for size in sizes),
        text(about.options, "wide", about.options),
    ]
    if winner is None:
        none = text("none passed", "far")
        return [*cells, *[Cell()] * 7, whole(one.counts["PASSED"]), _failed(one), none]
    time = winner.time_us
    return [
        *cells,
        Cell(microseconds(time), time, "strong"),
        rate(one.tflops(time)),
        rate(one.gbytes(time)),
        _percent(one.roof_share(time)),
        number(one.second_ratio, 3),
        _gain(one.peer_ratio),
        ratio(one.regret, _choice(one)),
        whole(one.counts["PASSED"]),
        _failed(one),
        text(winner.name, "kernel", winner.name),
    ]


def _without(columns: Sequence[Column], lines: Sequence[Line], names: Iterable[str] = ()) -> Table:
    """The table without columns of these names, and without those of text that say nothing."""
    kept = [
        index
        for index, column in enumerate(columns)
        if column.name not in names
        and (column.is_numeric or any(line.cells[index].text for line in lines))
    ]
    return Table(
        [columns[index] for index in kept],
        [replace(line, cells=[line.cells[index] for index in kept]) for line in lines],
    )


def _choice(one: Result) -> str:
    """The model's first choice in words."""
    if not one.by_prediction:
        return ""
    first, chosen = one.by_prediction[0], one.first_choice
    told = f"the model's first choice is {first.name}"
    if first is not chosen:
        told += f", which is {first.measurement.status}"
        told += f"; the first that passed is {chosen.name}" if chosen is not None else ""
    return told


def _failed(one: Result) -> Cell:
    counts = {s: one.counts[s.value] for s in Status if s is not Status.PASSED}
    total = sum(counts.values())
    # The space is one that no line is broken at.
    told = ", ".join(f"{count}\N{NO-BREAK SPACE}{s}" for s, count in counts.items() if count)
    return Cell(told or "0", total, "counts far" if total else "muted")


def _percent(share: float | None) -> Cell:
    return number(None if share is None else 100 * share, 0)


def _gain(value: float | None) -> Cell:
    return number(value, 3, "good" if value is not None and value >= 1.05 else "")


# Candidates ------------------------------------------------------------------------------


def candidates(one: Result) -> Table:
    """One line per row of the store."""
    names = axes(one)
    knows_model, roofs = bool(one.by_prediction), one.roofs is not None
    columns = [
        Column("place", "#", "by time, of those that passed"),
        Column("time", "µs", "median of the rounds"),
        Column("ratio", "× best", "time over that of the best"),
        Column("spread", "± %", "what the middle half of the rounds spans, of the median"),
        Column("rounds", "rounds"),
        Column("tflops", "TFLOP/s"),
        Column("gbytes", "GB/s", "operands, each once, over the time"),
        *([Column("roof", "% roof", "least time of the data sheet over the time")] * roofs),
        Column("status", "status", "", False),
        Column("message", "message", "why it did not pass", False),
        Column("provider", "provider", "", False),
        Column("family", "family", "", False),
        *(Column(f"axis-{name}", name.replace("_", " "), name, False) for name in names),
        *([Column("predicted", "model µs", "as the performance model expects")] * knows_model),
        *([Column("choice", "model #", "place in the model's order")] * knows_model),
        Column("error", "error", "largest error over the one that is allowed"),
        Column("clocks", "MHz", "clock of the multiprocessors, and of the memory"),
        Column("date", "measured", "", False),
        Column("kernel", "kernel", "", False),
    ]
    places = {id(c): place for place, c in enumerate(one.passed, 1)}
    choices = {id(c): place for place, c in enumerate(one.by_prediction, 1)}
    lines = []
    for candidate in one.candidates:
        measurement = candidate.measurement
        passed, time = measurement.passed, candidate.time_us
        best = one.winner.time_us if one.winner is not None else None
        status = measurement.status.value
        cells = [
            whole(places.get(id(candidate))),
            Cell(microseconds(time), time, "strong") if passed else Cell(),
            number(time / best, 3) if passed and best else Cell(),
            number(100 * measurement.spread_us / time, 1) if passed else Cell(),
            whole(measurement.rounds) if passed else Cell(),
            rate(one.tflops(time) if passed else None),
            rate(one.gbytes(time) if passed else None),
            *([_percent(one.roof_share(time) if passed else None)] * roofs),
            text(status, f"status {status}") if candidate.is_latest else _earlier(status),
            text(measurement.message, "message"),
            text(candidate.provider),
            text(candidate.family),
            *(text(candidate.axes.get(name, "")) for name in names),
            *([_predicted(candidate.predicted_us)] * knows_model),
            *([whole(choices.get(id(candidate)))] * knows_model),
            _error(measurement.error_ratio),
            _clocks(measurement.sm_mhz, measurement.memory_mhz),
            text(f"{measurement.date:%Y-%m-%d %H:%M}", "muted"),
            text(candidate.name, "kernel"),
        ]
        kind = "winner" if candidate is one.winner else "" if passed else "failed"
        lines.append(Line(one.key, f"candidate {kind}", cells, status))
    return _without(columns, lines)


def axes(one: Result) -> list[str]:
    """Those of the designs; what operands have to be divisible by where that differs."""
    names = list(dict.fromkeys(name for c in one.candidates for name in c.axes))
    found = {c.axes["divisibility"] for c in one.candidates if "divisibility" in c.axes}
    return [name for name in names if name != "divisibility" or len(found) > 1]


def _earlier(status: str) -> Cell:
    hint = "a later row is of the same kernel with other sources; this one is not compared"
    return text(f"{status} (earlier)", f"status {status} earlier", hint)


def _predicted(value: float | None) -> Cell:
    return Cell() if value is None else Cell(microseconds(value), value)


def _error(value: float | None) -> Cell:
    if value is None:
        return Cell()
    sortable = value if math.isfinite(value) else None
    kind = "" if value <= 1 else "far"
    return Cell(f"{value:.3g}", sortable, kind)


def _clocks(sm: int | None, memory: int | None) -> Cell:
    shown = " / ".join(str(one) for one in (sm, memory) if one is not None)
    value = sm if sm is not None else memory
    return Cell(shown, value, "", "multiprocessors / memory" if shown else "")

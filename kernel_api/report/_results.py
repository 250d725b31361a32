"""The rows by problem: who won, by how much, and what the performance model would have chosen."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kernel_api._cached_property import cached_property
from kernel_api.provider import registered_class
from kernel_api.report._model import Model
from kernel_api.report._problem import Description, describe
from kernel_api.tuning import Environment, Measurement, Problem
from kernel_api.tuning._roofs import Roofs, roofs_of
from kernel_api.tuning._row import Row
from kernel_api.tuning._work import Work, work_of

#: The provider that others are compared with.
PEER = "torch"


@dataclass(frozen=True)
class Candidate:
    """A kernel on one problem.

    Attributes:
        measurement: What came of it.
        provider: Name of the provider.
        family: Name of the kernel family; of its class where that is not here.
        axes: The design by axis, as text.
        predicted_us: By the performance model, if it has one.
        is_latest: Whether no later row is of the same kernel with other sources.
    """

    measurement: Measurement
    provider: str
    family: str
    axes: Mapping[str, str]
    predicted_us: float | None
    is_latest: bool

    @property
    def name(self) -> str:
        return self.measurement.kernel.name

    @property
    def time_us(self) -> float:
        return self.measurement.median_us


@dataclass(frozen=True)
class Result:
    """All candidates of one problem in one environment, the fast ones first."""

    environment: Environment
    problem: Problem
    candidates: Sequence[Candidate]
    description: Description = field(init=False)
    work: Work | None = field(init=False)
    roofs: Roofs | None = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "description", describe(self.problem))
        object.__setattr__(self, "work", work_of(self.problem))
        object.__setattr__(self, "roofs", roofs_of(self.environment.gpu))

    @property
    def key(self) -> str:
        """Names it in the page."""
        return f"{self.environment.digest[:8]}-{self.problem.digest}"

    @cached_property
    def passed(self) -> list[Candidate]:
        """Those that are compared: they passed, and are of the latest sources."""
        return [one for one in self.candidates if one.measurement.passed and one.is_latest]

    @property
    def winner(self) -> Candidate | None:
        return self.passed[0] if self.passed else None

    @property
    def counts(self) -> Counter[str]:
        return Counter(one.measurement.status.value for one in self.candidates)

    @cached_property
    def by_prediction(self) -> list[Candidate]:
        """Those that the model knows, also those that failed, in its order."""
        known = [one for one in self.candidates if one.is_latest and one.predicted_us is not None]
        return sorted(known, key=lambda one: (one.predicted_us, one.name))

    @property
    def first_choice(self) -> Candidate | None:
        """The model's first that passed."""
        return next((one for one in self.by_prediction if one.measurement.passed), None)

    @property
    def regret(self) -> float | None:
        """Time of the model's first choice over the best time of all."""
        return self._over_best(self.first_choice)

    @property
    def second_ratio(self) -> float | None:
        return self._over_best(self.passed[1] if len(self.passed) > 1 else None)

    @property
    def peer_ratio(self) -> float | None:
        """The same of the best kernel of provider ``torch``."""
        return self._over_best(next((one for one in self.passed if one.provider == PEER), None))

    def _over_best(self, one: Candidate | None) -> float | None:
        if one is None or self.winner is None:
            return None
        return one.time_us / self.winner.time_us

    # Rates of a time --------------------------------------------------------------------

    def tflops(self, time_us: float) -> float | None:
        if self.work is None or self.work.operations is None:
            return None
        return self.work.operations / time_us / 1e6

    def gbytes(self, time_us: float) -> float | None:
        return self.work.bytes / time_us / 1e3 if self.work is not None else None

    def roof_share(self, time_us: float) -> float | None:
        """The least time that the GPU's ceilings allow over this one."""
        if self.work is None or self.roofs is None:
            return None
        least = self.roofs.seconds(self.work)
        return 1e6 * least / time_us if least is not None else None


def results(rows: Iterable[Row]) -> list[Result]:
    """In the order of operations, types and sizes."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        key = row.environment.digest, row.measurement.problem.text
        groups.setdefault(key, []).append(row)
    model = Model()
    found = [
        Result(group[0].environment, group[0].measurement.problem, _candidates(group, model))
        for group in groups.values()
    ]
    return sorted(found, key=_order)


def _order(one: Result) -> tuple[Any, ...]:
    d = one.description
    environment = one.environment
    where = environment.gpu, environment.driver or 0, environment.digest
    return d.operation, d.types, d.layout, *where, tuple(d.sizes.values()), one.problem.text


def _candidates(rows: Sequence[Row], model: Model) -> list[Candidate]:
    latest: dict[str, Measurement] = {}
    texts = [json.dumps(row.measurement.kernel.metadata, sort_keys=True) for row in rows]
    for row, text in zip(rows, texts, strict=True):
        one = row.measurement
        if one.date >= latest.setdefault(text, one).date:
            latest[text] = one
    found = [
        _candidate(row.measurement, latest[text] is row.measurement, model)
        for row, text in zip(rows, texts, strict=True)
    ]
    return sorted(found, key=lambda one: (not one.is_latest, one.time_us, one.name))


def _candidate(measurement: Measurement, is_latest: bool, model: Model) -> Candidate:
    metadata = measurement.kernel.metadata
    return Candidate(
        measurement,
        str(metadata.get("provider") or "unknown"),
        _family(metadata["kernel_class"]),
        axes_of(metadata),
        model.microseconds(measurement.kernel, measurement.problem),
        is_latest,
    )


def _family(kernel_class: Mapping[str, Any]) -> str:
    path = str(kernel_class.get("class", "unknown"))
    name = getattr(registered_class(path), "family", None)
    return name if isinstance(name, str) and name else path.rpartition(":")[2]


# Axes ------------------------------------------------------------------------------------


def axes_of(metadata: Mapping[str, Any]) -> dict[str, str]:
    """The design's fields as text, whatever they are, and what operands have to be divisible by."""
    design, operands = _fields(metadata.get("design")), _fields(metadata.get("operands"))
    axes = {str(name): shown(value) for name, value in design.items()}
    tensors = [_fields(one) for one in operands.values()]
    divisible = [one["divisibility"] for one in tensors if "divisibility" in one]
    if divisible and "divisibility" not in axes:
        axes["divisibility"] = shown(divisible)
    return axes


def _fields(value: Any) -> Mapping[str, Any]:
    found = value.get("fields") if isinstance(value, dict) else None
    return found if isinstance(found, dict) else {}


def shown(value: Any) -> str:
    """A value of a design in short."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        numbers = all(isinstance(one, (int, float)) for one in value)
        return ("x" if numbers else ", ").join(map(shown, value))
    if isinstance(value, dict):
        if len(value) == 1:
            return shown(next(iter(value.values())))
        return json.dumps(value, sort_keys=True)
    return str(value)


def geometric_mean(values: Sequence[float]) -> float | None:
    return math.exp(sum(map(math.log, values)) / len(values)) if values else None

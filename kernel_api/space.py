"""The declarative design space: the one source for what a kernel family offers.

A family declares three things and writes no loops::

    operands = (Operands(A="f16 | bf16", B="like A", out="f16 | bf16 | f32", accumulator="f32"),)
    space = Space(tile_shape=((128, 128, 32), (64, 64, 32)), stages=(3, 4))

    @rule("a pingpong group holds at most 128 rows of the tile")
    def _(design):
        return design.schedule != "pingpong" or design.tile_shape[0] <= 128

Enumeration, queries, ``supports``, ``explain`` and tuning all read these declarations.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from kernel_api._numbers import truth
from kernel_api.dtypes import DType, dtype
from kernel_api.errors import RegistrationError
from kernel_api.metadata import DesignMetadata, OperandsMetadata, TensorAttributes
from kernel_api.status import Status

_RULE_PARAMETERS = ("design", "operands", "args")


@dataclass(frozen=True)
class Miss:
    """A rule's "no" with the value that it saw and the nearest one that it would accept."""

    actual: str
    nearest: str | None = None

    def __bool__(self) -> bool:
        return False


class Rule:
    """A named predicate over ``design``, ``operands`` (metadata) and ``args``, as it needs.

    It returns True to agree; False, None, or a :class:`Miss` with details, to refuse. Whatever else
    it returns is an error, as a reason would else be taken for consent. A rule without ``args`` shapes the family; one with ``args`` decides a query.
    """

    def __init__(self, text: str, predicate: Callable[..., Any]) -> None:
        _check_text(text)
        if not callable(predicate):
            raise RegistrationError(
                f"rule {text!r} is over {predicate!r}; expected a function of {_RULE_PARAMETERS}, "
                f"those that it needs"
            )
        unknown = set(inspect.signature(predicate).parameters) - set(_RULE_PARAMETERS)
        if unknown:
            raise RegistrationError(
                f"rule {text!r} takes {sorted(unknown)}; rules may take {_RULE_PARAMETERS}"
            )
        self.text = text
        self._predicate = predicate
        self._names = tuple(inspect.signature(predicate).parameters)
        self._places = [_RULE_PARAMETERS.index(name) for name in self._names]

    @property
    def needs_args(self) -> bool:
        return "args" in self._names

    @property
    def needs_design(self) -> bool:
        return "design" in self._names

    def check(self, *, design: Any = None, operands: Any = None, args: Any = None) -> Status:
        given = (design, operands, args)
        verdict = self._predicate(*[given[place] for place in self._places])
        if verdict is True:
            return Status.success()
        if isinstance(verdict, Miss):
            return Status.fail(
                f"{self.text}; {verdict.actual}",
                rule=self.text,
                actual=verdict.actual,
                nearest=verdict.nearest,
            )
        if verdict is not None and self._truth(verdict):
            return Status.success()
        return Status.fail(self.text)

    def _truth(self, verdict: Any) -> bool:
        found = truth(verdict)
        if found is None:
            raise RegistrationError(
                f"rule {self.text!r} returned {verdict!r}; expected True, or False, None or a Miss "
                f"to refuse"
            )
        return found

    def __repr__(self) -> str:
        return f"<rule: {self.text}>"


def _check_text(text: object) -> None:
    if not isinstance(text, str) or not text.strip():
        shown = getattr(text, "__qualname__", repr(text))
        raise RegistrationError(
            f"a rule has {shown} for its text; expected the sentence that explain prints, as in "
            f'@rule("tiles are even")'
        )


def rule(text: str) -> Callable[[Callable[..., Any]], Rule]:
    """Make a predicate a named rule; ``text`` is the sentence that ``explain`` prints.

    Raises RegistrationError without a text, or for what cannot be called.
    """
    _check_text(text)
    return lambda predicate: Rule(text, predicate)


class Space:
    """The design points of a family: designs listed one by one, or a product of axes.

    Args:
        points: Designs; or groups of fields that vary together, as mappings.
        axes: Values of each further field, multiplied with every group.
    """

    def __init__(self, *points: DesignMetadata | Mapping[str, Any], **axes: tuple[Any, ...]):
        if axes and any(isinstance(point, DesignMetadata) for point in points):
            raise RegistrationError("whole designs leave no axes to multiply with")
        self.points = points or ({},)
        self.axes = axes
        self._designs: dict[Callable[..., DesignMetadata], tuple[DesignMetadata, ...]] = {}

    def designs(self, design: Callable[..., DesignMetadata]) -> Iterator[DesignMetadata]:
        """Every point, constructed; all operands share the same designs."""
        if design not in self._designs:
            self._designs[design] = tuple(self._constructed(design))
        return iter(self._designs[design])

    def _constructed(self, design: Callable[..., DesignMetadata]) -> Iterator[DesignMetadata]:
        for point in self.points:
            if isinstance(point, DesignMetadata):
                yield point
                continue
            for values in itertools.product(*self.axes.values()):
                yield design(**point, **dict(zip(self.axes, values, strict=True)))


@dataclass(frozen=True)
class Operands:
    """One row of operand types that the hardware has.

    Args:
        types: Element types of each operand, alternatives separated by ``|``; ``like A`` repeats
            the type of another operand; ``any`` takes all.
        accumulator: The accumulator's type, or ``any``.
        multiplication: The type that products are formed in, where it is not the operands'.
        majors: ``any`` for one variant per mode of stride 1, or that mode for some operands:
            ``"A:k B:k"``; ``strided`` for one variant that takes any strides.
        scales: The scale mode of operands that carry one: ``{"A": "per_tensor"}``; ``any`` takes
            all, and none.
        alignments: Variants of byte alignment per operand; what one leaves out is only
            element-aligned. The aligned ones come first.
        why_aligned: The reason for asking, as ``explain`` prints it.
    """

    accumulator: str
    types: Mapping[str, str]
    multiplication: str | None
    majors: str
    scales: Mapping[str, str]
    alignments: tuple[Mapping[str, int], ...]
    why_aligned: str

    def __init__(
        self,
        *,
        accumulator: str,
        multiplication: str | None = None,
        majors: str = "any",
        scales: Mapping[str, str] | None = None,
        alignments: tuple[Mapping[str, int], ...] = ({},),
        why_aligned: str = "the kernel reads whole vectors",
        **types: str,
    ) -> None:
        object.__setattr__(self, "accumulator", accumulator)
        object.__setattr__(self, "types", dict(types))
        object.__setattr__(self, "multiplication", multiplication)
        object.__setattr__(self, "majors", majors)
        object.__setattr__(self, "scales", dict(scales or {}))
        object.__setattr__(self, "alignments", alignments)
        object.__setattr__(self, "why_aligned", why_aligned)

    def groups(
        self, metadata: Callable[..., OperandsMetadata], modes: Mapping[str, str]
    ) -> Iterator[Variants]:
        """Every combination of types; the variants of each are made as they are asked for."""
        majors = self._unit_modes(modes)
        for types in self._type_combinations():
            yield Variants(self._variants(types, majors, metadata))

    def variants(
        self, metadata: Callable[..., OperandsMetadata], modes: Mapping[str, str]
    ) -> Iterator[OperandsMetadata]:
        """Every combination of types, majors and alignments."""
        return itertools.chain.from_iterable(self.groups(metadata, modes))

    def _variants(
        self,
        types: Mapping[str, DType | None],
        majors: Mapping[str, tuple[int | None, ...]],
        metadata: Callable[..., OperandsMetadata],
    ) -> Iterator[OperandsMetadata]:
        extra = {"accumulator_type": _type(self.accumulator)}
        if self.multiplication:
            extra["multiplication_type"] = dtype(self.multiplication)
        for alignment in self.alignments:
            for units in itertools.product(*majors.values()):
                tensors = {
                    name: _attributes(types[name], unit, alignment.get(name), self.scales.get(name))
                    for name, unit in zip(majors, units, strict=True)
                }
                yield metadata(**tensors, **extra)

    def _type_combinations(self) -> Iterator[dict[str, DType | None]]:
        names = list(self.types)
        free = [n for n in names if not self.types[n].startswith("like ")]
        for chosen in itertools.product(*(self.types[n].split("|") for n in free)):
            types = {n: _type(text.strip()) for n, text in zip(free, chosen, strict=True)}
            for name in names:
                if name not in types:
                    types[name] = types[self.types[name].removeprefix("like ").strip()]
            yield types

    def _unit_modes(self, modes: Mapping[str, str]) -> dict[str, tuple[int | None, ...]]:
        if self.majors == "strided":
            return dict.fromkeys(modes, (None,))
        fixed: dict[str, str] = {}
        if self.majors != "any":
            fixed = dict(part.split(":") for part in self.majors.split())
        units: dict[str, tuple[int | None, ...]] = {}
        for name, letters in modes.items():
            if name in fixed:
                units[name] = (letters.lower().index(fixed[name].lower()) - len(letters),)
            else:
                units[name] = (-1, -2)[: len(letters)]
        return units


class Variants:
    """Operands that differ in majors and alignments only, made as they are asked for."""

    def __init__(self, variants: Iterable[OperandsMetadata]) -> None:
        self._made: list[OperandsMetadata] = []
        self._waiting = iter(variants)

    @property
    def first(self) -> OperandsMetadata:
        """One of them, which stands for all where types are compared."""
        return next(iter(self))

    def __iter__(self) -> Iterator[OperandsMetadata]:
        place = 0
        while True:  # another iteration may have made some in between
            if place == len(self._made):
                made = next(self._waiting, None)
                if made is None:
                    return
                self._made.append(made)
            yield self._made[place]
            place += 1


def _type(text: str) -> DType | None:
    return None if text == "any" else dtype(text)


_STRIDES = {-1: (0, 0, 1), -2: (0, 1, 0), None: None}


@functools.cache
def _attributes(
    element: DType | None, unit: int | None, alignment: int | None, scale: str | None
) -> TensorAttributes:
    itemsize = element.itemsize if element is not None else 1
    divisibility = max((alignment or 0) // itemsize, 1)
    return TensorAttributes(element, _STRIDES[unit], divisibility, scale)

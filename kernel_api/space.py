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
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kernel_api._numbers import truth
from kernel_api.arguments.scaled import ScaleMode
from kernel_api.dtypes import DType, dtype
from kernel_api.errors import ArgumentError, RegistrationError
from kernel_api.metadata import DesignMetadata, OperandsMetadata, TensorAttributes
from kernel_api.operands import MAX_ALIGNMENT
from kernel_api.status import Status

_SCALES = ("any", *(mode.value for mode in ScaleMode))
#: That the alignment of operands is told in.
_ALIGNMENTS = tuple(1 << bits for bits in range(MAX_ALIGNMENT.bit_length()))
_RULE_PARAMETERS = ("design", "operands", "graph", "args")


@dataclass(frozen=True)
class Miss:
    """A rule's "no" with the value that it saw and the nearest one that it would accept.

    Attributes:
        actual, nearest: As the messages say them.
        limit: What would do at most, if that is what the designs of a family differ in: the one
            with the largest is told.
    """

    actual: str
    nearest: str | None = None
    limit: float = 0.0

    def __bool__(self) -> bool:
        return False


class Rule:
    """A named predicate over ``design``, ``operands`` and ``graph``, the epilogue's or None, which
    are of the metadata, and ``args``, as it needs.

    It returns True to agree; False, or a :class:`Miss` with details, to refuse; anything else is an
    error: a reason is no consent, and None is what comes of a ``return`` that is missing. A rule
    over design and operands alone shapes the family; one with ``graph`` or ``args`` decides a
    query. What a graph says is asked once per kernel, what arguments say in every query; but
    whoever looks for the first kernel alone remembers the answer to what ``by`` gives of them.
    """

    def __init__(
        self, text: str, predicate: Callable[..., Any], by: Callable[[Any], Hashable] | None = None
    ) -> None:
        _check_text(text)
        if not callable(predicate):
            raise RegistrationError(
                f"rule {text!r} is over {predicate!r}; expected a function of {_RULE_PARAMETERS}, "
                f"those that it needs"
            )
        try:
            taken = inspect.signature(predicate).parameters
        except ValueError as error:  # as some of C have none
            raise RegistrationError(
                f"rule {text!r} is over {predicate!r}, which does not say what it takes"
            ) from error
        if any(one.kind is one.KEYWORD_ONLY for one in taken.values()):
            raise RegistrationError(f"rule {text!r} takes values by name alone; expected places")
        unknown = set(taken) - set(_RULE_PARAMETERS)
        if unknown:
            raise RegistrationError(
                f"rule {text!r} takes {sorted(unknown)}; rules may take {_RULE_PARAMETERS}"
            )
        if by is not None and not callable(by):
            raise RegistrationError(
                f"rule {text!r} is by {by!r}; expected a function of the arguments, or None"
            )
        self.text = text
        self.by = by
        self._predicate = predicate
        self._names = tuple(taken)
        self._places = [_RULE_PARAMETERS.index(name) for name in self._names]
        self.needs_args = "args" in taken
        self.needs_graph = "graph" in taken
        self.needs_design = "design" in taken
        self.needs_operands = "operands" in taken

    def allows(self, design: Any) -> bool:
        """Whether a rule of designs alone agrees; one that raises does not say no."""
        try:
            return self.agrees(design)
        except Exception:
            return True

    def agrees(
        self, design: Any = None, operands: Any = None, graph: Any = None, args: Any = None
    ) -> bool:
        """Without a reason, where many are asked."""
        known = (design, operands, graph, args)
        verdict = self._predicate(*[known[n] for n in self._places])
        return verdict is True or bool(self.status_of(verdict))

    def check(
        self, *, design: Any = None, operands: Any = None, graph: Any = None, args: Any = None
    ) -> Status:
        return self.status_of(self.bound(design, operands, graph)(args))

    def bound(self, design: Any, operands: Any, graph: Any = None) -> Callable[[Any], Any]:
        """The predicate over arguments alone."""
        known = (design, operands, graph)
        if self._names[-1:] == ("args",):  # what is called in every query, without more around it
            return functools.partial(self._predicate, *[known[n] for n in self._places[:-1]])
        return lambda args: self._predicate(*[(*known, args)[n] for n in self._places])

    def status_of(self, verdict: Any) -> Status:
        """What the predicate returned."""
        if verdict is True:
            return Status.success()
        if isinstance(verdict, Miss):
            return Status.fail(
                f"{self.text}; {verdict.actual}",
                rule=self.text,
                actual=verdict.actual,
                nearest=verdict.nearest,
                limit=verdict.limit,
            )
        if self._truth(verdict):
            return Status.success()
        return Status.fail(self.text)

    def _truth(self, verdict: Any) -> bool:
        found = truth(verdict)
        if found is None:
            raise RegistrationError(
                f"rule {self.text!r} returned {verdict!r}; expected True, or False or a Miss to "
                f"refuse{'; is a return missing?' if verdict is None else ''}"
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


def rule(
    text: str, *, by: Callable[[Any], Hashable] | None = None
) -> Callable[[Callable[..., Any]], Rule]:
    """Make a predicate a named rule; ``text`` is the sentence that ``explain`` prints.

    ``by`` gives all of the arguments that the predicate looks at beside the metadata and, in a
    family that fuses, the epilogue's graph: something hashable that few queries differ in. Kernels
    of the library that the rule refuses then take no time in later queries.

    Raises RegistrationError without a text, or for what cannot be called.
    """
    _check_text(text)
    return lambda predicate: Rule(text, predicate, by)


class Space:
    """The design points of a family: designs listed one by one, or a product of axes.

    Args:
        points: Designs; or groups of fields that vary together, as mappings.
        axes: Values of each further field, multiplied with every group.

    Raises RegistrationError for a point that is neither, and for an axis without values.
    """

    def __init__(self, *points: DesignMetadata | Mapping[str, Any], **axes: tuple[Any, ...]):
        if axes and any(isinstance(point, DesignMetadata) for point in points):
            raise RegistrationError("whole designs leave no axes to multiply with")
        for point in points:
            _check_point(point, axes)
        for name, values in axes.items():
            _check_axis(name, values)
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

    def repeated(self) -> str | None:
        """What is there twice, so that two kernels would have one name; None if nothing is."""
        for axis, values in self.axes.items():
            for value in _repeated(values):
                return f"the axis {axis} of space has {value!r} twice; expected it once"
        for point in _repeated(self.points):
            return f"space has {point!r} twice; expected it once"
        return None

    def sample(self) -> Iterator[dict[str, Any]]:
        """Fields of a few designs, where every group and every value of an axis is in one."""
        groups = [dict(point) for point in self.points if isinstance(point, Mapping)]
        first = {name: next(iter(values)) for name, values in self.axes.items()}
        for group in groups:
            yield {**group, **first}
        for name, values in self.axes.items() if groups else ():
            for value in itertools.islice(values, 1, None):
                yield {**groups[0], **first, name: value}


def _repeated(values: Iterable[Any]) -> Iterator[Any]:
    seen: set[Any] = set()
    for value in values:
        told = _with_a_hash(value)
        if told in seen:
            yield value
        seen.add(told)


def _with_a_hash(value: Any) -> Any:
    try:
        hash(value)
    except TypeError:
        return repr(value)
    return value


def _check_point(point: Any, axes: Mapping[str, Any]) -> None:
    if isinstance(point, DesignMetadata):
        return
    if not isinstance(point, Mapping):
        raise RegistrationError(
            f"a space has the point {point!r}; expected designs, or mappings such as "
            f"{{'stages': 3}}; values of a field are given by its name, as in stages=(3, 4)"
        )
    both = [name for name in point if name in axes]
    if both:
        raise RegistrationError(
            f"{', '.join(both)} is in the point {point!r} of a space, and is an axis; expected it "
            f"in one of both"
        )


def _check_axis(name: str, values: Any) -> None:
    is_text = isinstance(values, (str, bytes, Mapping))
    if is_text or not isinstance(values, Collection):
        raise RegistrationError(
            f"the axis {name} of a space is {values!r}; expected a tuple of its values, as in "
            f"{name}=({values!r},)"
        )
    if not len(values):
        raise RegistrationError(
            f"the axis {name} of a space has no values, so there are no designs; give it one, or "
            f"leave it out"
        )


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

    Raises RegistrationError for what names no type, no operand or no mode.
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
        scales = dict(scales or {}) if isinstance(scales, (Mapping, type(None))) else scales
        object.__setattr__(self, "scales", scales)
        object.__setattr__(self, "alignments", alignments)
        object.__setattr__(self, "why_aligned", why_aligned)
        for fault in self._faults():
            raise RegistrationError(f"Operands cannot be made: {fault}")

    @property
    def fixed_majors(self) -> dict[str, str]:
        """The letter of the mode with stride 1, of operands for which ``majors`` names one."""
        if self.majors in ("any", "strided"):
            return {}
        parts = (part.partition(":") for part in self.majors.split())
        return {name: letter for name, _, letter in parts}

    def _faults(self) -> Iterator[str]:
        yield from self._faults_of_types()
        if not isinstance(self.majors, str) or any(
            len(one) != 1 for one in self.fixed_majors.values()
        ):
            yield (
                f"majors is {self.majors!r}; expected any, strided, or modes of operands such as "
                f"'A:k B:k'"
            )
            return
        yield from self._unknown("majors", self.fixed_majors)
        if not isinstance(self.scales, Mapping):
            yield f"scales is {self.scales!r}; expected a mapping such as {{'A': 'per_tensor'}}"
            return
        yield from self._unknown("scales", self.scales)
        for name, mode in self.scales.items():
            if not isinstance(mode, ScaleMode) and mode not in _SCALES:
                yield f"scales of {name} are {mode!r}; expected one of {', '.join(_SCALES)}"
        if isinstance(self.alignments, (tuple, list)) and self.alignments:
            for one in self.alignments:
                yield from self._faults_of_alignment(one)
        else:
            yield f"alignments is {self.alignments!r}; expected a tuple such as ({{'A': 16}}, {{}})"

    def _faults_of_types(self) -> Iterator[str]:
        yield from _fault_of_type("accumulator", self.accumulator)
        if self.multiplication is not None:
            yield from _fault_of_type("multiplication", self.multiplication)
        told = [name for name, text in self.types.items() if not _is_like(text)]
        for name, text in self.types.items():
            if not isinstance(text, str):
                yield f"{name} is {text!r}; expected text such as 'f16 | bf16', 'like A' or 'any'"
            elif not _is_like(text):
                for one in text.split("|"):
                    yield from _fault_of_type(name, one.strip())
            elif text.removeprefix("like ").strip() in told:
                told.append(name)
            else:
                yield f"{name} is {text!r}; expected like one of {', '.join(told)}, or its types"

    def _faults_of_alignment(self, alignment: Any) -> Iterator[str]:
        if not isinstance(alignment, Mapping):
            yield f"alignments have {alignment!r}; expected mappings such as {{'A': 16, 'B': 16}}"
            return
        yield from self._unknown("alignments", alignment)
        for name, size in alignment.items():
            if not isinstance(size, int) or size not in _ALIGNMENTS:
                yield (
                    f"the alignment of {name} is {size!r}; expected bytes, a power of two up to "
                    f"{_ALIGNMENTS[-1]}"
                )
            elif size > 1 and self.types[name] == "any":
                yield (
                    f"the alignment of {name} is {size} bytes, and its type any, of which nobody "
                    f"knows how many elements that are; expected types, as in {name}='f16 | bf16'"
                )

    def _unknown(self, of: str, names: Iterable[str]) -> Iterator[str]:
        for name in names:
            if name not in self.types:
                yield f"{of} name {name}; expected one of {', '.join(self.types)}"

    def combinations(self) -> Iterator[dict[str, DType | None]]:
        """Types of each operand."""
        names = list(self.types)
        free = [n for n in names if not _is_like(self.types[n])]
        for chosen in itertools.product(*(self.types[n].split("|") for n in free)):
            types = {n: _type(text.strip()) for n, text in zip(free, chosen, strict=True)}
            for name in names:
                if name not in types:
                    types[name] = types[self.types[name].removeprefix("like ").strip()]
            yield types

    def groups(
        self, metadata: Callable[..., OperandsMetadata], modes: Mapping[str, str]
    ) -> Iterator[Variants]:
        """Every combination of types; the variants of each are made as they are asked for."""
        majors = self._unit_modes(modes)
        for types in self.combinations():
            yield Variants(*self._variants(types, majors, metadata))

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
    ) -> tuple[Sequence[Any], Callable[[Any], OperandsMetadata]]:
        """Alignments and majors, and what makes operands of these."""
        extra = {"accumulator_type": _type(self.accumulator)}
        if self.multiplication:
            extra["multiplication_type"] = dtype(self.multiplication)

        def make(choice: tuple[Mapping[str, int], tuple[int | None, ...]]) -> OperandsMetadata:
            alignment, units = choice
            tensors = {
                name: _attributes(types[name], unit, alignment.get(name), self.scales.get(name))
                for name, unit in zip(majors, units, strict=True)
            }
            return metadata(**tensors, **extra)

        units_of_all = itertools.product(*majors.values())
        return tuple(itertools.product(self.alignments, units_of_all)), make

    def _unit_modes(self, modes: Mapping[str, str]) -> dict[str, tuple[int | None, ...]]:
        if self.majors == "strided":
            return dict.fromkeys(modes, (None,))
        fixed = self.fixed_majors
        units: dict[str, tuple[int | None, ...]] = {}
        for name, letters in modes.items():
            if name in fixed:
                units[name] = (letters.lower().index(fixed[name].lower()) - len(letters),)
            else:
                units[name] = (-1, -2)[: len(letters)]
        return units


class Variants:
    """Operands that differ in majors and alignments only, made as they are asked for. What could
    not be made, or was interrupted, is made when it is asked for again.

    Args:
        choices: What each is made of.
        make: Makes one.
    """

    def __init__(self, choices: Sequence[Any], make: Callable[[Any], OperandsMetadata]) -> None:
        self._choices, self._make = choices, make
        self._made: list[OperandsMetadata] = []

    @property
    def first(self) -> OperandsMetadata:
        """One of them, which stands for all where types are compared."""
        return next(iter(self))

    def __iter__(self) -> Iterator[OperandsMetadata]:
        for place, choice in enumerate(self._choices):
            if place == len(self._made):  # another iteration may have made it
                self._made.append(self._make(choice))
            yield self._made[place]


def _is_like(text: Any) -> bool:
    return isinstance(text, str) and text.startswith("like ")


def _type(text: str) -> DType | None:
    return None if text == "any" else dtype(text)


def _fault_of_type(name: str, text: Any) -> Iterator[str]:
    """One at most."""
    try:
        _type(text)
    except ArgumentError as error:
        yield f"{name} is {text!r}: {error}"


_STRIDES = {-1: (0, 0, 1), -2: (0, 1, 0), None: None}


@functools.cache
def _attributes(
    element: DType | None, unit: int | None, alignment: int | None, scale: str | None
) -> TensorAttributes:
    itemsize = element.itemsize if element is not None else 1
    divisibility = max((alignment or 0) // itemsize, 1)
    return TensorAttributes(element, _STRIDES[unit], divisibility, scale)

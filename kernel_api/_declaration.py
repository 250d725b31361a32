"""Whether what a kernel class declares goes together: asked before the class is registered.

What :class:`~kernel_api.space.Operands` and :class:`~kernel_api.space.Space` can tell alone they
refuse where they stand. Here no operands are enumerated, and few designs are made.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import itertools
import sys
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from kernel_api._naming import in_names
from kernel_api._numbers import are_names
from kernel_api.arguments import Arguments, GemmArguments
from kernel_api.errors import ArgumentError
from kernel_api.metadata import DesignMetadata, OperandsMetadata, encode
from kernel_api.space import Operands, Rule, Space
from kernel_api.targets import target

if TYPE_CHECKING:
    from kernel_api.kernel import Kernel


#: What a class may write, and how it is called: values by place, and by name.
_HOOKS = {
    "_run": (("args", "artifact", "stream", "workspace"), ()),
    "_compile": (("args", "cc"), ()),
    "compile": (("args", "cc"), ()),
    "_supports": (("args",), ()),
    "predict": (("args",), ()),
    "get_workspace_size": (("args",), ()),
    "read_resources": (("artifact",), ()),
    "_launcher": (("args", "artifact"), ()),
    "generate_kernels": (("metadata_filter",), ("epilogue_args", "cc")),
}
_OF_CLASS = ("generate_kernels",)


def faults_of_class(family: type[Kernel]) -> Iterator[str]:
    """What any kernel class has to mend."""
    name, devices, targets = (getattr(family, n, None) for n in ("family", "devices", "targets"))
    if not isinstance(name, str):
        yield f"family is {name!r}; expected a name"
    else:
        yield from _faults_of_name(family)
    if not (are_names(devices) and devices):
        yield f"devices is {devices!r}; expected a tuple of names, as in ('cuda',)"
    elif wrong := [one for one in devices if not one.isidentifier() or one.lower() in ("gpu", "")]:
        yield (
            f"devices has {wrong[0]!r}; expected types of device as torch has them, such as 'cuda' "
            f"or 'cpu', without a number"
        )
    arguments = family.arguments
    if arguments is not None and not _is_class_of(arguments, Arguments):
        yield f"arguments is {arguments!r}; expected a class derived from Arguments"
    yield from _faults_of_hooks(family)
    if not isinstance(targets, (tuple, list)):
        yield f"targets is {targets!r}; expected a tuple of architectures, as in ('sm_90a',)"
        return
    for one in targets:
        try:
            target(one)
        except ArgumentError as error:
            yield f"targets has {one!r}: {error}"


def _faults_of_hooks(family: type[Kernel]) -> Iterator[str]:
    """Whether what a class writes can be called as it will be."""
    for name, (places, named) in _HOOKS.items():
        hook = getattr(family, name)
        if not callable(hook):
            yield f"{name} is {hook!r}; expected a method"
            continue
        raw = inspect.getattr_static(family, name)
        of_instance = name not in _OF_CLASS and not isinstance(raw, (classmethod, staticmethod))
        of_instance &= _binds(raw)
        try:
            taken = inspect.signature(hook)
        except (ValueError, TypeError):  # as some of C have none
            continue
        try:
            taken.bind(*["self"] * of_instance, *places, **dict.fromkeys(named))
        except TypeError:
            called = ", ".join([*places, *(f"{one}=..." for one in named)])
            yield f"{name}{taken} is called as {name}({called}); expected one that takes these"


def _binds(hook: Any) -> bool:
    """Whether it is called with the kernel in front, as functions are."""
    if isinstance(hook, functools.partial) and sys.version_info < (3, 14):
        return False  # though 3.13, which warns of the change, finds it has a __get__
    return hasattr(hook, "__get__")


def _faults_of_name(family: type[Kernel]) -> Iterator[str]:
    try:
        found = family.family_name()
    except Exception as error:
        yield f"family_name raises {error!r}; expected a name"
    else:
        if not isinstance(found, str):
            yield f"family_name gives {found!r}; expected a name"


def faults(family: type[Kernel]) -> Iterator[str]:
    """What a class with a space has to mend; each says what was expected."""
    yield from _faults_of_operands(family)
    if isinstance(family.space, Space):
        yield from _faults_of_designs(family.space, family.design, family.shaping_rules)
    else:
        yield f"space is {family.space!r}; expected a Space, as in Space(stages=(3, 4))"


def _faults_of_operands(family: type[Kernel]) -> Iterator[str]:
    rows: Any = family.operands
    if not isinstance(rows, (tuple, list)):
        comma = " with a comma behind it" if isinstance(rows, Operands) else ""
        yield f"operands is {rows!r}; expected a tuple of Operands{comma}: (Operands(...),)"
        return
    arguments: Any = family.arguments or GemmArguments
    if not _is_class_of(arguments, Arguments):
        return
    if not hasattr(arguments, "modes"):
        yield f"{arguments.__name__} has no modes; expected the letters of each operand's modes"
        return
    found: list[str] = []
    for row in rows:
        if isinstance(row, Operands):
            found += _faults_of_row(row, arguments)
        else:
            found.append(f"operands has {row!r}; expected Operands(...)")
    found += _faults_of_metadata(family.operands_metadata, arguments)
    yield from found or _faults_of_variants(family)
    yield from _faults_of_repeats([row for row in rows if isinstance(row, Operands)])


def _faults_of_variants(family: type[Kernel]) -> Iterator[str]:
    """Of one description of operands for each combination of types."""
    try:
        for variants in family.operand_groups():
            _ = variants.first
    except Exception as error:
        kinds = (row.multiplication for row in family.operands if row.multiplication is not None)
        given = {name: getattr(family, name) for name in ("ragged", "experts")}
        given["multiplication"] = next(kinds, None)
        told = [f"{name} {value!r}" for name, value in given.items() if value is not None]
        name = family.operands_metadata.__name__
        beside = f", with {' and '.join(told)}" if told else ""
        yield f"no {name} can be made of the operands{beside}: {error!r}"


def _faults_of_repeats(rows: Iterable[Operands]) -> Iterator[str]:
    """What is there twice, so that two kernels would have one name. Rows of the same types may
    differ in what else they have, of which no part is compared with a part."""
    seen = set()
    for row in rows:
        alignments = [frozenset(one.items()) for one in row.alignments]
        if len(set(alignments)) < len(alignments):
            yield f"operands has alignments {row.alignments!r}; expected each of them once"
        for types in row.combinations():
            told = (*types.items(), *row.scales.items(), *alignments)
            key = (frozenset(told), row.accumulator, row.multiplication, row.majors)
            if key in seen:
                shown = ", ".join(f"{name}={types[name] or 'any'}" for name in row.types)
                yield f"operands has {shown} twice; expected it once"
                return
            seen.add(key)


def _faults_of_row(row: Operands, arguments: type[Arguments]) -> Iterator[str]:
    modes = arguments.modes
    known = f"{arguments.__name__} has {', '.join(modes)}"
    for name in _lacking(modes, row.types):
        yield f"Operands({_listed(row.types)}) lacks {name}; {known}: give each its types"
    for name in _lacking(row.types, modes):
        yield f"Operands({_listed(row.types)}) has {name}; {known}: leave {name} out"
    for name, letter in row.fixed_majors.items():
        letters = modes.get(name, letter)[-2:].lower()
        if letter.lower() not in letters:
            yield (
                f"majors is {row.majors!r}; the mode of stride 1 of {name} is one of "
                f"{' and '.join(letters)}"
            )


def _faults_of_metadata(metadata: Any, arguments: type[Arguments]) -> Iterator[str]:
    if not _is_class_of(metadata, OperandsMetadata):
        yield f"operands_metadata is {metadata!r}; expected a class derived from OperandsMetadata"
        return
    for name in _lacking(arguments.modes, [one.name for one in dataclasses.fields(metadata)]):
        yield (
            f"operands_metadata is {metadata.__name__}, which has no {name}; expected one with "
            f"{', '.join(arguments.modes)}, the operands of {arguments.__name__}"
        )


def _is_class_of(given: Any, base: type) -> bool:
    return isinstance(given, type) and issubclass(given, base)


def _lacking(names: Iterable[str], there: Iterable[str]) -> list[str]:
    return [name for name in names if name not in there]


def _listed(names: Iterable[str]) -> str:
    return ", ".join(f"{name}=..." for name in names)


def _faults_of_designs(space: Space, design: Any, rules: Iterable[Rule]) -> Iterator[str]:
    """Of one design for each group of fields, and for each value of an axis; what rules refuse,
    whatever the operands, does not exist."""
    name = getattr(design, "__name__", repr(design))
    parameters = _parameters(design)
    made = [(repr(point), point) for point in space.points if isinstance(point, DesignMetadata)]
    for given in space.sample():
        shown = f"{name}({', '.join(f'{field}={value!r}' for field, value in given.items())})"
        fault = _fault_of_fields(given, parameters, name)
        if fault is None:
            try:
                made.append((shown, design(**given)))
            except Exception as error:
                fault = (
                    f"no design can be made, {shown}: {error!r}; expected an axis of a space to be "
                    f"a tuple of values, as in tile_shape=((32, 32, 1),)"
                )
        if fault is not None:
            yield fault
            return
    alone = [one for one in rules if not one.needs_operands]
    made = [one for one in made if all(rule.allows(one[1]) for rule in alone)]
    fault = space.repeated() or next(filter(None, itertools.starmap(_fault_of_design, made)), None)
    fault = fault or _fault_of_labels(made)
    if fault is not None:
        yield fault


def _parameters(design: Any) -> dict[str, bool] | None:
    """The fields that a design takes, and whether it needs them; None where that cannot be told."""
    try:
        found = inspect.signature(design).parameters.values()
    except (TypeError, ValueError):
        return None
    if any(one.kind is not one.POSITIONAL_OR_KEYWORD for one in found):
        return None
    return {one.name: one.default is one.empty for one in found}


def _fault_of_fields(
    given: dict[str, Any], parameters: dict[str, bool] | None, name: str
) -> str | None:
    if parameters is None:
        return None
    unknown = _lacking(given, parameters)
    if unknown:
        known = ", ".join(parameters) or "no fields"
        return f"space has {', '.join(unknown)}; {name} has {known}: leave it out, or set design"
    lacking = [field for field, needed in parameters.items() if needed and field not in given]
    if lacking:
        return f"space has no {', '.join(lacking)}, which {name} needs: give it values"
    return None


def _fault_of_design(shown: str, made: Any) -> str | None:
    """What keeps a design from being compared, named or written."""
    if not isinstance(made, DesignMetadata):
        return f"{shown} is {made!r}; expected a design, derived from DesignMetadata"
    try:
        hash(made)
    except Exception as error:
        return f"{shown} cannot be compared: {error}; expected values such as tuples"
    try:
        label = made.label()
    except Exception as error:
        return f"label() of {shown} raises {error!r}; expected text, the design's part of a name"
    if not isinstance(label, str):
        return f"label() of {shown} is {label!r}; expected text, the design's part of a name"
    try:
        encode(made)
    except ArgumentError as error:
        return f"{shown}: {error}; expected numbers, text, and tuples of them"
    return None


def _fault_of_labels(made: Iterable[tuple[str, DesignMetadata]]) -> str | None:
    """That two are told apart by nothing, or not by what names of kernels say."""
    seen: dict[str, tuple[str, DesignMetadata]] = {}
    for shown, design in made:
        before, other = seen.setdefault(in_names(design.label()), (shown, design))
        if other is design:
            continue
        if other == design:
            fields = ", ".join(one.name for one in dataclasses.fields(design) if one.compare)
            return (
                f"{before} and {shown} are one design, by {fields or 'no fields'}; expected a "
                f"frozen dataclass with fields that tell designs apart, and each of them once"
            )
        return (
            f"{before} and {shown} are both called {design.label()}; expected a label for each, "
            f"as kernels have their names by it"
        )
    return None

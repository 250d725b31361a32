"""The kernels of one family, by the operands that they ask for; built as they are needed."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, NamedTuple

from kernel_api.arguments import Arguments
from kernel_api.kernel import Kernel
from kernel_api.matching import (
    layouts_of_arguments,
    match_layouts,
    match_types,
    types_of,
    types_of_arguments,
)
from kernel_api.metadata import KernelMetadata, OperandsMetadata, encode
from kernel_api.space import Rule, Variants
from kernel_api.status import Status
from kernel_api.targets import Target

#: A refusal, and the operands of the kernels that it is of.
Miss = tuple[Status, OperandsMetadata]

#: What matching looks at of arguments: types and layouts.
Look = tuple[Any, ...]

#: A rule, and its predicate over arguments alone.
_Asked = tuple[Rule, Callable[[Any], Any]]

#: Combinations of types, and of these and layouts, of which a family remembers its operands.
_TYPES_KEPT = 512
#: Combinations of operands and epilogues whose kernels are remembered, and those that lead.
_FUSED_KEPT = 512


def look_of(args: Arguments) -> Look:
    return types_of_arguments(args), layouts_of_arguments(args)


class Leading(NamedTuple):
    """A kernel, and those behind it: of its design, for operands of less alignment.

    Attributes:
        place: Among the kernels of its family whose operands fit.
    """

    place: int
    kernel: Kernel
    laxer: list[Leading]


class Catalogue:
    """The kernels of one family, by the operands they ask for; built as they are needed."""

    def __init__(self, family: type[Kernel]) -> None:
        self.family = family
        self._declared = family.is_declared()
        self._variants: dict[Any, dict[OperandsMetadata, tuple[Kernel, ...]]] = {}
        self._operands: tuple[Variants, ...] | None = None
        self._of_types: dict[Any, tuple[list[Variants], list[Miss]]] = {}
        self._fitting: dict[Any, list[OperandsMetadata]] = {}
        self._built: dict[Any, tuple[Kernel, ...]] = {}
        self._leading: dict[Any, list[Leading]] = {}
        self._asked: dict[OperandsMetadata, list[_Asked]] = {}
        of_operands = [rule for _, rule in family.operand_rules]
        self._of_all = [
            (rule, rule.bound(None, None)) for rule in of_operands if not rule.needs_operands
        ]
        self._of_each = [rule for rule in of_operands if rule.needs_operands]
        rules = [rule for _, rule in family.design_rules]
        self._keys = [rule.by for rule in rules if rule.by is not None]

    def operands(self, args: Arguments | None, target: Target | None) -> Iterable[Variants]:
        """What the kernels ask of operands; variants of the same element types together."""
        if not self._declared:
            return _by_types(self._generated(args, target))
        if self._operands is None:
            self._operands = tuple(self.family.operand_groups())
        return self._operands

    def of_types(
        self, args: Arguments, target: Target | None, but_for: str | None = None
    ) -> tuple[list[Variants], list[Miss]]:
        """The operands of the arguments' types, and why the others are not.

        ``but_for``: see :func:`~kernel_api.matching.match_types`.
        """
        if not self._declared or but_for is not None:
            return _of_types(self.operands(args, target), args, but_for)
        key = types_of_arguments(args)
        found = self._of_types.get(key)
        if found is None:
            if len(self._of_types) >= _TYPES_KEPT:
                self._of_types.clear()
            found = self._of_types[key] = _of_types(self.operands(args, target), args)
        return found

    def fitting(self, args: Arguments, target: Target | None, look: Look) -> list[OperandsMetadata]:
        """The operands of the arguments' types and layouts, which are their look."""
        key = look if self._declared else None
        found = self._fitting.get(key)
        if found is None:
            why = self.family.why_aligned()
            alike = (one for variants in self.of_types(args, target)[0] for one in variants)
            found = [one for one in alike if match_layouts(one, args, why)]
            if key is not None:
                if len(self._fitting) >= _TYPES_KEPT:
                    self._fitting.clear()
                self._fitting[key] = found
        return found

    def kernels(
        self, operands: OperandsMetadata, args: Arguments | None, target: Target | None
    ) -> tuple[Kernel, ...]:
        if not self._declared:
            return self._generated(args, target)[operands]
        graph = self._graph(args)
        key = (operands, graph)
        built = self._built.get(key)
        if built is None:
            if graph is not None and len(self._built) > _FUSED_KEPT:
                self._built.clear()
                self._leading.clear()
            built = self._built[key] = tuple(self.family.kernels_for(operands, graph))
        return built

    def leading(
        self, args: Arguments, target: Target | None, fitting: Iterable[OperandsMetadata]
    ) -> list[Leading]:
        """The kernels for a target whose operands fit, without those that rules refuse for what
        these are ``by``; of a declared family. Where it is ``faster_if_aligned``, those of less
        alignment are behind others."""
        suited: tuple[OperandsMetadata, ...] = ()
        if _agree(self._of_all, args):
            suited = tuple([one for one in fitting if self._suit(one, args)])
        asked = tuple([of_arguments(args) for of_arguments in self._keys])
        key = (suited, self._graph(args), target, asked)
        found = self._leading.get(key)
        if found is None:
            made = [
                (operands, kernel)
                for operands in suited
                for kernel in self.kernels(operands, args, target)
                if target is None or kernel.metadata.runs_on(target)
                if kernel.may_suit(args)
            ]
            if len(self._leading) >= _FUSED_KEPT:
                self._leading.clear()
            found = self._leading[key] = _led(made, self.family.faster_if_aligned)
        return found

    def _suit(self, operands: OperandsMetadata, args: Arguments) -> bool:
        """Whether the rules agree that are the same for all designs, and not for all operands."""
        asked = self._asked.get(operands)
        if asked is None:
            asked = [(rule, rule.bound(None, operands)) for rule in self._of_each]
            self._asked[operands] = asked
        return _agree(asked, args)

    def _graph(self, args: Arguments | None) -> Any:
        if args is None or args.epilogue is None or not self.family.fuses:
            return None
        return args.epilogue.graph

    def _generated(
        self, args: Arguments | None, target: Target | None
    ) -> dict[OperandsMetadata, tuple[Kernel, ...]]:
        epilogue = args.epilogue if args is not None else None
        key = (target, epilogue.signature if epilogue is not None else None)
        if key not in self._variants:
            if len(self._variants) > _FUSED_KEPT:
                self._variants.clear()
            cc = target.cc if target is not None else None
            made = self.family.generate_kernels(_everything, epilogue_args=epilogue, cc=cc)
            self._variants[key] = _grouped(self.family, made)
        return self._variants[key]


def _agree(asked: Iterable[_Asked], args: Arguments) -> bool:
    for rule, ask in asked:
        verdict = ask(args)
        if verdict is not True and not rule.status_of(verdict):
            return False
    return True


def _led(
    kernels: Iterable[tuple[OperandsMetadata, Kernel]], faster_if_aligned: bool
) -> list[Leading]:
    """Each behind the last one before that asks for as much alignment at least, if there is one."""
    found: list[Leading] = []
    alike: dict[Any, list[tuple[OperandsMetadata, Leading]]] = {}
    without_alignment = functools.lru_cache(_without_alignment)
    for place, (operands, kernel) in enumerate(kernels):
        one = Leading(place, kernel, [])
        before = alike.setdefault((without_alignment(operands), kernel.metadata.design), [])
        stricter = [
            leading
            for other, leading in before
            if faster_if_aligned and _is_as_strict(other, operands)
        ]
        (stricter[-1].laxer if stricter else found).append(one)
        before.append((operands, one))
    return found


def _without_alignment(operands: OperandsMetadata) -> OperandsMetadata:
    loose = {name: replace(one, divisibility=1) for name, one in operands.tensors.items()}
    return replace(operands, **loose)


def _is_as_strict(operands: OperandsMetadata, other: OperandsMetadata) -> bool:
    """Of two that differ in alignment alone: whether what fits these fits the other."""
    pairs = zip(operands.tensors.values(), other.tensors.values(), strict=True)
    return all(one.divisibility % less.divisibility == 0 for one, less in pairs)


def _by_types(operands: Iterable[OperandsMetadata]) -> tuple[Variants, ...]:
    groups: dict[Any, list[OperandsMetadata]] = {}
    for one in operands:
        groups.setdefault(types_of(one), []).append(one)
    return tuple(Variants(found, _unchanged) for found in groups.values())


def _unchanged(operands: OperandsMetadata) -> OperandsMetadata:
    return operands


def _of_types(
    variants: Iterable[Variants], args: Arguments, but_for: str | None = None
) -> tuple[list[Variants], list[Miss]]:
    alike, misses = [], []
    for one in variants:
        status = match_types(one.first, args, but_for)
        if status:
            alike.append(one)
        else:
            misses.append((status, one.first))
    return alike, misses


def _everything(metadata: KernelMetadata) -> bool:
    return True


def _grouped(family: type[Kernel], made: Any) -> dict[OperandsMetadata, tuple[Kernel, ...]]:
    """Check what ``generate_kernels`` returned, and order it by operands."""
    if not isinstance(made, (list, tuple)):
        raise TypeError(f"generate_kernels returned {type(made).__name__}; expected a list")
    groups: dict[OperandsMetadata, list[Kernel]] = {}
    names: dict[str, KernelMetadata] = {}
    for kernel in made:
        metadata = getattr(kernel, "metadata", None)
        if not isinstance(kernel, Kernel) or not isinstance(metadata, KernelMetadata):
            raise TypeError(f"generate_kernels gave {kernel!r}, which is no kernel with metadata")
        if not isinstance(kernel, metadata.kernel_class):
            raise TypeError(
                f"generate_kernels gave a {type(kernel).__name__} whose metadata say that it is a "
                f"{metadata.kernel_class.__name__}; expected its own class as kernel_class"
            )
        encode(metadata.design)
        if names.setdefault(metadata.kernel_name, metadata) != metadata:
            raise TypeError(f"two different kernels share the name {metadata.kernel_name}")
        groups.setdefault(metadata.operands, []).append(kernel)
    return {operands: tuple(dict.fromkeys(kernels)) for operands, kernels in groups.items()}

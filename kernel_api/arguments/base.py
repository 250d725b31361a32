"""What every arguments class shares: its operands by name, its signature, its cache key."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, ClassVar

from kernel_api.arguments.epilogue import EpilogueArguments
from kernel_api.dtypes import DType
from kernel_api.epilogue.shape import Problem
from kernel_api.errors import ArgumentError, EpilogueError
from kernel_api.operands import Operand, overlap, self_overlapping
from kernel_api.utils import untraced

#: Keywords of a prepared launch that are no operands.
_LAUNCH_NAMES = ("stream", "workspace")


def check_number(tensors: Sequence[Any], names: Sequence[str], further: Sequence[str] = ()) -> None:
    """Raise ArgumentError unless there are as many as names, or some of the further ones behind."""
    if not len(names) <= len(tensors) <= len(names) + len(further):
        behind = f", and behind them {', '.join(further)}, as far as wanted" if further else ""
        raise ArgumentError(
            f"{len(tensors)} tensors are given; expected {', '.join(names)}{behind}"
        )


def alike(tensors: Iterable[Any], makers: Iterable[Callable[[Any], Any] | None]) -> list[Any]:
    """Tensors as the operands that others are; an operand is taken as it is."""
    return [
        tensor if make is None or isinstance(tensor, Operand) else make(tensor)
        for tensor, make in zip(tensors, makers, strict=True)
    ]


def check_writable(name: str, out: Operand) -> None:
    """Raise ArgumentError for what may not be written, or not each element by itself."""
    if out.layout.read_only:
        raise ArgumentError(
            f"{name} is an array that may not be written (flags.writeable is False); pass a copy "
            f"of it"
        )
    if self_overlapping(out):
        raise ArgumentError(
            f"{name} has shape {out.shape} and stride {out.stride}: several of its elements are "
            f"one in memory, so it cannot be written"
        )


class Arguments:
    """Base of the argument classes.

    A subclass names its operand fields in ``operand_names`` (in the order of its constructor),
    the modes of each in ``modes``, and the ones written in ``output_names``.
    """

    kind: ClassVar[str]
    operand_names: ClassVar[tuple[str, ...]]
    output_names: ClassVar[tuple[str, ...]]
    #: Letters of the last modes of each operand, as messages name them.
    modes: ClassVar[dict[str, str]]

    __slots__ = (
        "_accepted",
        "_key",
        "_signature",
        "accumulator_type",
        "device",
        "epilogue",
        "operands",
    )

    accumulator_type: DType
    epilogue: EpilogueArguments | None
    device: Any
    _signature: tuple[Hashable, ...] | None
    _key: tuple[Hashable, ...] | None
    _accepted: dict[Any, Any]
    #: The operands in the order of the fields.
    operands: tuple[Operand, ...]

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "__init__" in cls.__dict__:  # or torch's compiler would watch what is remembered there
            cls.__init__ = untraced(cls.__init__)  # type: ignore[method-assign]

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Of arguments, without what this process has found out about them."""
        found: Any = super().__reduce_ex__(protocol)
        make, given, (fields, slots), *others = found
        return make, given, (fields, {**slots, "_accepted": {}}), *others

    @property
    def tensors(self) -> tuple[Any, ...]:
        """The torch tensors in the order of the fields."""
        return tuple([operand.tensor for operand in self.operands])

    @property
    def named_operands(self) -> dict[str, Operand]:
        """Every tensor that is read or written, those of the epilogue too."""
        named = dict(zip(self.operand_names, self.operands, strict=True))
        return named if self.epilogue is None else {**named, **self.epilogue.tensors}

    @property
    def outputs(self) -> dict[str, Operand]:
        """Every tensor that is written, those of the epilogue too."""
        named = {name: getattr(self, name) for name in self.output_names}
        return named if self.epilogue is None else {**named, **self.epilogue.outputs}

    @property
    def launch_values(self) -> dict[str, Any]:
        """Tensors and numbers beside the operands and those of an epilogue, by name: what a
        launch may be given anew."""
        return {}

    def rows_written(self) -> dict[str, Any]:
        """Of outputs that are written in part, which rows are: what indexes their first mode.

        It may depend on what is in the operands; then it waits for the device.
        """
        return {}

    def draw_indices(self, random: Any) -> None:
        """Fill operands that are no data but places in others, with what makes sense.

        Args:
            random: A generator on their device.
        """

    def check_values(self, stream: Any = None) -> None:
        """What a run on a stream checks of what is in the operands; by default nothing."""

    def checked(self, launch: Callable[..., None]) -> Callable[..., None]:
        """A launcher of these arguments' kernel that checks the same before each launch, if that
        is asked now, and what no launch may change; it keeps no tensor."""
        return launch

    @property
    def sizes(self) -> dict[str, int]:
        """What a problem's cost depends on, by name."""
        return {name: int(getattr(self, name)) for name in "MNKL" if hasattr(self, name)}

    @property
    def least_factor(self) -> float:
        """How often ``verify`` allows the error of the same-dtype baseline at least."""
        return 0.0

    @property
    def accumulated(self) -> tuple[str, ...]:
        """Names of outputs that are added to: read, and written."""
        return ()

    @property
    def in_place(self) -> tuple[str, ...]:
        """Names of operands that are read where an output is written."""
        return ()

    @property
    def overwriting(self) -> tuple[str, ...]:
        """Names of the outputs that are written there."""
        return ("out",) if self.in_place else ()

    def rebuilt(self, /, *tensors: Any, **others: Any) -> Arguments:
        """The same problem on other tensors; a scaled operand keeps its scale.

        What is beside the operands, and operands of the epilogue, are given by name; those that
        are not stay.
        """
        values = {name: others.pop(name, value) for name, value in self.launch_values.items()}
        if self.epilogue is not None:
            others = {**self.epilogue.with_operands(**others).operands}
        return self.blueprint()(*tensors, **values, **others)

    def blueprint(self) -> Callable[..., Arguments]:
        """Makes the same problem on other tensors, and keeps none of these but scales.

        What is beside the operands, and operands of the epilogue, are given by name, all of them.
        """
        kind, own, names = type(self), tuple(self.launch_values), self.operand_names
        makers = [operand.maker() for operand in self.operands]
        keywords = {name: value for name, value in self._keywords().items() if name not in own}
        epilogue = keywords.pop("epilogue", None)
        bare = epilogue.without_operands() if epilogue is not None else None

        def make(*tensors: Any, **others: Any) -> Arguments:
            missing = [name for name in own if name not in others]
            if missing:
                raise ArgumentError(f"{' and '.join(missing)} must be given by name")
            check_number(tensors, names)
            given = {name: others.pop(name) for name in own}
            if bare is not None:
                given["epilogue"] = bare.applied_to(**others)
            elif others:
                raise ArgumentError(f"there is no epilogue, so it has no {', '.join(others)}")
            return kind(*alike(tensors, makers), **keywords, **given)

        return make

    def _keywords(self) -> dict[str, Any]:
        """The constructor's arguments beside the operands."""
        return {"accumulator_type": self.accumulator_type, "epilogue": self.epilogue}

    @property
    def writes_anything(self) -> bool:
        """False where every output has no elements: then there is nothing to launch."""
        return any(0 not in operand.shape for operand in self.outputs.values())

    def _options(self) -> tuple[Hashable, ...]:
        """What beside the operands tells two problems apart."""
        return ()

    @property
    def signature(self) -> tuple[Hashable, ...]:
        """What one compiled artifact is for: element types, ranks, majors, epilogue; no sizes, but
        whether scales of columns come in whole vectors."""
        if self._signature is None:
            operands = tuple(
                [(o.dtype.name, len(o.shape), o.unit_mode, o.mode) for o in self.operands]
            )
            epilogue = self.epilogue.signature if self.epilogue is not None else None
            self._signature = (
                self.kind,
                operands,
                self.accumulator_type.name,
                epilogue,
                *self._options(),
            )
        return self._signature

    @property
    def key(self) -> tuple[Hashable, ...]:
        """All that a query may depend on: what the signature says, with sizes, strides, alignment
        and device."""
        if self._key is None:
            epilogue = self.epilogue
            self._key = (
                self.kind,
                tuple([(o.layout, o.alignment, o.mode) for o in self.operands]),
                tuple([o.scale.stride for _, o in self._scaled_operands()]),
                self.accumulator_type.name,
                None if epilogue is None else (epilogue.signature, epilogue.key),
                *self._options(),
            )
        return self._key

    def _join_epilogue(self, epilogue: Any, problem: Problem, out: Operand) -> None:
        """Trace the epilogue for a problem, and keep it."""
        if not isinstance(epilogue, EpilogueArguments):
            raise ArgumentError(
                f"epilogue is a {type(epilogue).__name__}; expected EpilogueArguments(fn, ...)"
            )
        scales = [f"{name}_scale" for name in self.scaled]
        for name in (*self.operand_names, *self.launch_values, *scales, *_LAUNCH_NAMES):
            if name in epilogue.operands:
                raise EpilogueError(
                    f"an operand of the epilogue is called {name}, which is taken by the "
                    f"arguments; choose another name"
                )
        self.epilogue = epilogue.joined(problem, out)

    def _all_operands(self) -> tuple[Operand, ...]:
        """Every tensor that is read or written, those of the epilogue too."""
        if self.epilogue is None:
            return self.operands
        return (*self.operands, *self.epilogue.tensors.values())

    def _scales(self) -> dict[str, Operand]:
        """The scales of operands, as messages call them."""
        return {f"{name}'s scale": operand.scale for name, operand in self._scaled_operands()}

    def _check_devices(self) -> None:
        self.device = device = self.operands[0].device
        for operand in self._all_operands()[1:]:
            if operand.device != device:
                raise ArgumentError(
                    f"{self._name_of(operand)} is on {operand.device} but "
                    f"{self.operand_names[0]} is on {device}; all operands must be on one device"
                )

    def _check_outputs(self) -> None:
        operands = (*self._all_operands(), *self._scales().values())
        for name, out in self.outputs.items():
            self._check_written(name, out, operands)

    def _check_written(self, name: str, out: Operand, operands: Iterable[Operand]) -> None:
        check_writable(name, out)
        self._check_apart(out, operands)

    def _check_apart(self, out: Operand, operands: Iterable[Operand]) -> None:
        """Raise ArgumentError where an output shares memory with one of the operands, among which
        it stands itself."""
        met = False
        for other in operands:
            if other is out and not met:
                met = True
            elif overlap(out, other) and not self._is_in_place(out, other):
                named = {**self.named_operands, **self._scales()}
                name = next(name for name, one in self.outputs.items() if one is out)
                shared = next(n for n, one in named.items() if one is other and n != name)
                raise ArgumentError(
                    f"{name} shares memory with {shared}; the kernel would read what it has "
                    f"overwritten"
                )

    def takes_in_place(self, operand: Operand) -> bool:
        """Whether an operand that is read may be ``out`` itself."""
        return False

    def _is_in_place(self, out: Operand, operand: Operand) -> bool:
        address = out.address if out is getattr(self, "out", None) else 0
        return address != 0 and operand.address == address and self.takes_in_place(operand)

    def _name_of(self, operand: Operand) -> str:
        named = {**self.named_operands, **self._scales()}
        return next(name for name, one in named.items() if one is operand)

    @property
    def scaled(self) -> tuple[str, ...]:
        """Names of the operands that carry a scale."""
        return tuple([name for name, _ in self._scaled_operands()])

    def _scaled_operands(self) -> list[tuple[str, Any]]:
        for operand in self.operands:
            if operand.mode is not None:
                named = zip(self.operand_names, self.operands, strict=True)
                return [(name, one) for name, one in named if one.mode is not None]
        return []

    def __repr__(self) -> str:
        named = zip(self.operand_names, self.operands, strict=True)
        return f"{type(self).__name__}({', '.join(f'{n}={o!r}' for n, o in named)})"

"""Arguments of rows, with operands beside the matrices that may be absent."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Any, ClassVar

from kernel_api.arguments.base import Arguments, check_number
from kernel_api.arguments.scaled import ScaledOperand
from kernel_api.dtypes import DType, dtype
from kernel_api.errors import ArgumentError
from kernel_api.operands import Operand

_FLOAT32, _FLOAT64 = dtype("float32"), dtype("float64")

#: Layouts of operands that have passed all checks but that of their memory.
fitting: set[tuple[Hashable, ...]] = set()
_FITTING_KEPT = 4096


class RowArguments(Arguments):
    """Matrices of rows, x among them, and operands beside them that may be absent.

    Attributes:
        further: Those of the latter that are there, by name, in the order of the fields.
    """

    #: Operands that may be absent, in the order of the constructor; each is an attribute.
    further_names: ClassVar[tuple[str, ...]]

    __slots__ = ("further",)

    x: Operand
    further: dict[str, Operand]

    def _take(self, matrices: Mapping[str, Any], further: Mapping[str, Any]) -> None:
        """Keep the operands; before all else."""
        for name, value in matrices.items():
            setattr(self, name, _operand(name, value))
        self.operands = tuple(getattr(self, name) for name in self.operand_names)
        for name, value in further.items():
            setattr(self, name, None if value is None else _operand(name, value))
        present = ((name, getattr(self, name)) for name in self.further_names)
        self.further = {name: operand for name, operand in present if operand is not None}
        self.accumulator_type = self.arithmetic
        self.epilogue = None
        self._signature = self._key = None
        self._accepted = {}

    @property
    def arithmetic(self) -> DType:
        """The type of what is computed."""
        return _FLOAT64 if self.x.dtype is _FLOAT64 else _FLOAT32

    @property
    def named_operands(self) -> dict[str, Operand]:
        named = {**dict(zip(self.operand_names, self.operands, strict=True)), **self.further}
        return named if self.epilogue is None else {**named, **self.epilogue.tensors}

    @property
    def outputs(self) -> dict[str, Operand]:
        named = {**dict(zip(self.operand_names, self.operands, strict=True)), **self.further}
        written = {name: named[name] for name in self.output_names if name in named}
        return written if self.epilogue is None else {**written, **self.epilogue.outputs}

    @property
    def launch_values(self) -> dict[str, Any]:
        """Tensors and numbers beside the matrices, by name: what a launch may be given anew."""
        return {**{name: o.tensor for name, o in self.further.items()}, **self._numbers()}

    def rebuilt(self, /, *tensors: Any, **others: Any) -> Arguments:
        """The same problem on other tensors: the matrices, then the further ones in the order of
        the fields, or by name. Those that are not given stay, and so do numbers."""
        own = {name: others.pop(name) for name in self._own_names() if name in others}
        if self.epilogue is not None:
            others = {**self.epilogue.with_operands(**others).operands}
        placed = self.further_names[: max(len(tensors) - len(self.operands), 0)]
        kept = {n: value for n, value in self.launch_values.items() if n not in placed}
        return self.blueprint()(*tensors, **{**kept, **own, **others})

    def blueprint(self) -> Callable[..., Arguments]:
        kind, count, names = type(self), len(self.operands), self.further_names
        operands, own = self.operand_names, self._own_names()
        options = {**self._options_by_name(), **self._numbers()}
        bare = self.epilogue.without_operands() if self.epilogue is not None else None

        def make(*tensors: Any, **others: Any) -> Arguments:
            check_number(tensors, operands, names)
            given = {**options, **{n: others.pop(n) for n in own if n in others}}
            given.update(zip(names, tensors[count:], strict=False))
            if bare is not None:
                given["epilogue"] = bare.applied_to(**others)
            elif others:
                raise ArgumentError(f"{kind.__name__} takes no {', '.join(others)}")
            return kind(*tensors[:count], **given)

        return make

    def _keywords(self) -> dict[str, Any]:
        further = {name: getattr(self, name) for name in self.further_names}
        epilogue = {} if self.epilogue is None else {"epilogue": self.epilogue}
        return {**further, **self._numbers(), **self._options_by_name(), **epilogue}

    def _own_names(self) -> tuple[str, ...]:
        """What the arguments take by name; operands of an epilogue have other ones."""
        return (*self.further_names, *self._numbers())

    def _numbers(self) -> dict[str, Any]:
        """Run-time values by name."""
        return {}

    def _options_by_name(self) -> dict[str, Any]:
        """What else the constructor takes and the compiled code depends on."""
        return {}

    def _options(self) -> tuple[Hashable, ...]:
        further = tuple(
            (name, o.dtype.name, o.rank, o.unit_mode) for name, o in self.further.items()
        )
        return (further, *self._options_by_name().values())

    @property
    def key(self) -> tuple[Hashable, ...]:
        if self._key is None:
            further = tuple([(o.layout, o.alignment) for o in self.further.values()])
            self._key = (*super().key, further)
        return self._key

    def _all_operands(self) -> tuple[Operand, ...]:
        return (*super()._all_operands(), *self.further.values())


def _operand(name: str, value: Any) -> Operand:
    if isinstance(value, ScaledOperand):
        raise ArgumentError(f"{name} is a ScaledOperand; expected a plain tensor")
    return value if isinstance(value, Operand) else Operand(value, name)


def remember_fitting(layouts: tuple[Hashable, ...]) -> None:
    if len(fitting) >= _FITTING_KEPT:
        fitting.clear()
    fitting.add(layouts)

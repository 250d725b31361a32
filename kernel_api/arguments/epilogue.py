"""The epilogue: a function of the accumulator, and the operands it names."""

from __future__ import annotations

import copy
import itertools
import numbers
from collections.abc import Callable, Hashable, Mapping
from typing import Any

from kernel_api._numbers import of_64_bits, real_number
from kernel_api.arguments.scaled import ScaledOperand
from kernel_api.dtypes import dtype
from kernel_api.epilogue.frozen import kept
from kernel_api.epilogue.functions import STORED_TYPES
from kernel_api.epilogue.graph import Graph
from kernel_api.epilogue.shape import SCALAR, Problem, shape_of
from kernel_api.epilogue.tracing import (
    RESULT,
    Output,
    Parameters,
    Trace,
    parameters_of,
    place_of,
    trace,
)
from kernel_api.epilogue.value import Input
from kernel_api.errors import ArgumentError, EpilogueError
from kernel_api.operands import Operand
from kernel_api.utils import untraced

_KINDS = {"float": "real", "int": "integer", "uint": "integer", "bool": "bool"}
_BOOL = dtype("bool")
#: Of one function, for operands of other shapes.
_TRACES_KEPT = 64


class EpilogueArguments:
    """A plain Python function of the accumulator with the operands it reads and writes.

    ``fn(accum, ...)`` returns D, which goes to the arguments' ``out``, or a tuple of D and
    further outputs. It is traced when it joins arguments, because only there the sizes are known;
    an object that joins again, or with other operands, is not traced again. See
    :mod:`kernel_api.epilogue` for what ``fn`` may do.

    Args:
        fn: A function, lambda, partial or callable object. Its first parameter is the accumulator.
        operands: Those with the name of a parameter of ``fn`` are read: tensors, or Python numbers
            that are passed at run time. The others are written: they take, in the order given
            here, what ``fn`` returns behind D.

    Tensors that are read broadcast against the accumulator as in torch: (N,) is one value per
    column, (M, 1) one per row, () one for all, (L, 1, 1) one per batch. A mode of the problem's
    own extent is there even if that is 1, so that (1, N) is one row of a problem with M = 1, and
    one value per column of any other; (N,) always is the latter. Tensors that are written have the
    modes that a value has: a sum over the columns is (M,), or (L, M). Where groups of rows are
    batches, what has rows has no batch mode, see :class:`GroupedGemmArguments`.

    Raises:
        ArgumentError: ``fn`` is not callable.
        EpilogueError: operands and parameters do not fit each other.
    """

    __slots__ = (
        "_inputs",
        "_joined",
        "_outputs",
        "_parameters",
        "_signature",
        "_trace",
        "_traces",
        "fn",
        "kept",
        "operands",
        "scalars",
    )

    #: Every operand in the order given: tensors as Operand, Python numbers as they are.
    operands: dict[str, Operand | float]
    #: The Python numbers by name.
    scalars: dict[str, float]
    #: Once joined: outputs that have modes of extent 1 in place of those that are not there.
    kept: tuple[str, ...]

    @untraced
    def __init__(self, fn: Callable[..., Any], /, **operands: Any) -> None:
        if not callable(fn):
            raise ArgumentError(
                f"fn is a {type(fn).__name__}; expected a function of the accumulator"
            )
        self.fn = fn
        self._parameters: Parameters = parameters_of(fn)
        self._traces: dict[Any, Trace] = {}
        self._check_names(operands)
        self._take(operands)

    def _check_names(self, operands: Mapping[str, Any]) -> None:
        parameters, place = self._parameters, place_of(self.fn)
        for name in (parameters.accumulator, RESULT):
            if name in operands:
                what = "the accumulator" if name == parameters.accumulator else "the arguments' out"
                raise EpilogueError(f"{place}: {name} is {what}; it is not passed as an operand")
        missing = [name for name in parameters.required if name not in operands]
        if missing:
            raise EpilogueError(
                f"{place}: fn takes {', '.join(missing)}; pass "
                f"{'them' if len(missing) > 1 else 'it'} to EpilogueArguments by name"
            )

    def _take(self, operands: Mapping[str, Any]) -> None:
        self.operands = {name: self._operand(name, value) for name, value in operands.items()}
        tensors = {n: o for n, o in self.operands.items() if isinstance(o, Operand)}
        self.scalars = {n: o for n, o in self.operands.items() if not isinstance(o, Operand)}
        self._inputs = {n: tensors[n] for n in self._parameters.names if n in tensors}
        self._outputs = {n: o for n, o in tensors.items() if n not in self._inputs}
        self._trace: Trace | None = None
        self._joined: dict[Any, EpilogueArguments] = {}
        self.kept = ()
        self._signature: tuple[Hashable, ...] | None = None
        for name in self.scalars:
            if name not in self._parameters.names:
                raise EpilogueError(
                    f"{place_of(self.fn)}: {name} is {self.scalars[name]!r} and no parameter of "
                    f"fn; an operand that is written must be a tensor"
                )

    def _operand(self, name: str, value: Any) -> Operand | float:
        if isinstance(value, bool):
            raise EpilogueError(
                f"{place_of(self.fn)}: {name} is {value}; fn is traced once, so a flag cannot "
                f"decide anything later: let fn take it from outside, or pass 0 or 1"
            )
        if isinstance(value, float):
            return value
        if isinstance(value, numbers.Integral):
            return of_64_bits(name, value)
        if isinstance(value, numbers.Real):
            return real_number(name, value)
        if isinstance(value, ScaledOperand):
            raise EpilogueError(
                f"{place_of(self.fn)}: {name} is a ScaledOperand; pass the tensor and its scale, "
                f"and multiply in fn"
            )
        operand = value if isinstance(value, Operand) else Operand(value, name)
        if operand.dtype.kind not in _KINDS:
            raise EpilogueError(
                f"{place_of(self.fn)}: {name} is {operand.dtype}; expected real numbers or bool"
            )
        return operand

    # What it reads and writes ------------------------------------------------------------

    @property
    def inputs(self) -> dict[str, Operand]:
        """The tensors that are read, in the order of fn's parameters; once joined, of the graph's
        leaves."""
        return self._inputs

    @property
    def outputs(self) -> dict[str, Operand]:
        """The tensors that are written beside ``out``, in the order that ``fn`` returns them."""
        return self._outputs

    @property
    def tensors(self) -> dict[str, Operand]:
        """Inputs, then outputs."""
        return {**self._inputs, **self._outputs}

    def with_operands(self, /, **operands: Any) -> EpilogueArguments:
        """The same epilogue on other operands; those not named stay. It is not traced again.

        Raises EpilogueError for a name that it does not have.
        """
        unknown = [name for name in operands if name not in self.operands]
        if unknown:
            raise EpilogueError(
                f"{place_of(self.fn)}: there is no operand {', '.join(unknown)}; there are "
                f"{', '.join(self.operands) or 'none'}"
            )
        return self.applied_to(**{**self.operands, **operands})

    def without_operands(self) -> EpilogueArguments:
        """The function alone with what was traced, to be :meth:`applied_to` others."""
        made = copy.copy(self)
        made._take({})
        return made

    def applied_to(self, /, **operands: Any) -> EpilogueArguments:
        """The same function on these operands alone; what was traced before is not again.

        Raises EpilogueError as the constructor does.
        """
        self._check_names(operands)
        made = copy.copy(self)
        made._take(operands)
        return made

    # What it computes --------------------------------------------------------------------

    def joined(self, problem: Problem, out: Operand) -> EpilogueArguments:
        """The epilogue of a problem: traced, or with the trace that fits, and checked.

        Args:
            problem: Extents of the accumulator.
            out: The arguments' out.

        Raises EpilogueError for what cannot be traced, and for operands that do not fit.
        """
        key = (problem, out.shape, out.dtype)
        made = self._joined.get(key)
        if made is None:
            made = self._join(problem, out)
            if len(self._joined) >= _TRACES_KEPT:
                self._joined.clear()
            self._joined[key] = made
        return made

    def _join(self, problem: Problem, out: Operand) -> EpilogueArguments:
        inputs = tuple(self._described(name, problem) for name in self._read_names())
        outputs = tuple(Output(name, len(o.shape)) for name, o in self._outputs.items())
        found = self._fitting(inputs, outputs, problem)
        written = {RESULT: out, **self._outputs}
        found.check(problem, {name: operand.shape for name, operand in written.items()})
        _check_types(found, written)
        made = copy.copy(self)
        made._trace = found
        made.kept = tuple(
            name
            for name, operand in self._outputs.items()
            if operand.shape != found.graph.output_shape(name).stored(problem)
        )
        made._joined = {}  # its own: a dict that holds itself would keep the tensors alive
        # Epilogues of one graph take their operands in one order, whatever fn looks like.
        made._inputs = {n: self._inputs[n] for n in found.graph.leaves if n in self._inputs}
        made.scalars = {n: self.scalars[n] for n in found.graph.leaves if n in self.scalars}
        return made

    def _fitting(
        self, inputs: tuple[Input, ...], outputs: tuple[Output, ...], problem: Problem
    ) -> Trace:
        if problem.N:
            return self._trace_of(inputs, outputs, problem)
        # No columns are as many as N, 2N and N/2 of none: which of them, fn tells.
        refused: EpilogueError | None = None
        for reading in itertools.product(*map(_of_any_width, inputs)):
            try:
                return self._trace_of(reading, outputs, problem)
            except EpilogueError as error:
                refused = refused or error
        assert refused is not None
        raise refused

    def _trace_of(
        self, inputs: tuple[Input, ...], outputs: tuple[Output, ...], problem: Problem
    ) -> Trace:
        key = (inputs, outputs, problem.L is not None)
        found = self._traces.get(key)
        if found is None:
            found = self._traced(key, inputs, outputs, problem)
            if len(self._traces) >= _TRACES_KEPT:
                self._traces.clear()
            self._traces[key] = found
        return found

    def _traced(
        self, key: Any, inputs: tuple[Input, ...], outputs: tuple[Output, ...], problem: Problem
    ) -> Trace:
        def traced() -> Trace:
            extents = {name: str(o.shape) for name, o in self._inputs.items()}
            return trace(self.fn, self._parameters, inputs, outputs, extents, problem)

        return kept(self.fn, key, traced)

    def _read_names(self) -> tuple[str, ...]:
        return tuple(name for name in self._parameters.names if name in self.operands)

    def _described(self, name: str, problem: Problem) -> Input:
        operand = self.operands[name]
        if not isinstance(operand, Operand):
            kind = "integer" if isinstance(operand, int) else "real"
            return Input(name, kind, True, SCALAR, None, 0)
        extents = operand.shape
        # Read as a table, its columns are its own and no broadcast of the problem's.
        table = shape_of((*extents[:-1], 1), problem._replace(N=0)) if extents else None
        columns = extents[-1] if extents else 0
        kind = _KINDS[operand.dtype.kind]
        return Input(name, kind, False, shape_of(extents, problem), table, columns)

    @property
    def graph(self) -> Graph:
        """What ``fn`` computes; known once the epilogue is part of arguments."""
        if self._trace is None:
            raise EpilogueError(
                f"{place_of(self.fn)}: the epilogue has joined no arguments yet, so it is not "
                f"traced; ask the epilogue attribute of the arguments"
            )
        return self._trace.graph

    @property
    def identity(self) -> str:
        """The graph's: the same in every process, for every value of the operands."""
        return self.graph.identity

    @property
    def signature(self) -> tuple[Hashable, ...]:
        """What one compiled artifact is for: the graph, element types, ranks and majors."""
        if self._signature is None:
            tensors = tuple(
                (name, o.dtype.name, len(o.shape), o.unit_mode) for name, o in self.tensors.items()
            )
            self._signature = (self.identity, tensors)
        return self._signature

    @property
    def key(self) -> tuple[Hashable, ...]:
        """Sizes, strides and alignment of the operands; values of scalars play no part."""
        return tuple((o.shape, o.stride, o.alignment) for o in self.tensors.values())

    def __repr__(self) -> str:
        names = ", ".join(f"{name}={value!r}" for name, value in self.operands.items())
        function = getattr(self.fn, "__name__", repr(self.fn))
        return f"EpilogueArguments({function}{', ' if names else ''}{names})"


def _of_any_width(given: Input) -> list[Input]:
    """An operand without columns, where it has the mode: as N, as pairs joined and as split."""
    shape = given.shape
    if shape is None or not shape.columns:
        return [given]
    widths = shape.columns, 2 * shape.columns, shape.columns / 2
    return [given._replace(shape=shape._replace(columns=width)) for width in widths]


def _check_types(found: Trace, written: Mapping[str, Operand]) -> None:
    for name, index in found.graph.outputs:
        element = written[name].dtype
        shown = "out" if name == RESULT else name
        if element is _BOOL and not found.graph.nodes[index].is_boolean:
            raise EpilogueError(
                f"{found.lines[index]}: {shown} is bool and what fn returns for it is a number; "
                f"return a comparison, or pass a tensor of numbers"
            )
        if element is not _BOOL and element.name not in STORED_TYPES:
            raise EpilogueError(
                f"{found.lines[index]}: {shown} is {element}; an epilogue writes bool, "
                f"{', '.join(STORED_TYPES)}"
            )

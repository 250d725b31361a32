"""Calling ``fn`` once with symbolic values, and checking what it returned."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable, Iterable, Mapping
from types import FunctionType
from typing import Any, NamedTuple

from kernel_api.epilogue.graph import Graph, canonical
from kernel_api.epilogue.shape import Problem
from kernel_api.epilogue.structure import over_batches
from kernel_api.epilogue.value import Input, Tracer, Value, inside, numeric, trace_apart
from kernel_api.errors import EpilogueError

RESULT = "D"


_parameters: dict[tuple[Any, ...], Parameters] = {}
_PARAMETERS_KEPT = 512


class Output(NamedTuple):
    """What a trace depends on of an output: its name, and how many modes its tensor has."""

    name: str
    rank: int


class Parameters(NamedTuple):
    """The parameters of ``fn`` behind the accumulator.

    Attributes:
        names: In their order.
        required: Those without a default.
        by_position: Those that can only be passed by position.
    """

    accumulator: str
    names: tuple[str, ...]
    required: tuple[str, ...]
    by_position: tuple[str, ...]


class Trace(NamedTuple):
    """A graph with what messages about it need.

    Attributes:
        graph: What ``fn`` computes.
        lines: The user's line behind each node.
        place: Where ``fn`` is defined.
    """

    graph: Graph
    lines: tuple[str, ...]
    place: str

    def check(self, problem: Problem, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Raise EpilogueError unless the columns divide and the outputs have their shapes.

        Args:
            shapes: Of the output operands, ``D`` first.
        """
        for index, why in self.graph.indivisible(problem.N):
            raise EpilogueError(f"{self.lines[index]}: {self.graph.nodes[index].op} {why}")
        for name, index in self.graph.outputs:
            shape = self.graph.nodes[index].shape
            asked = problem.of_out if name == RESULT else problem
            expected = shape.stored(asked)
            if shapes[name] not in (expected, shape.kept(asked)):
                shown = "out" if name == RESULT else name
                raise EpilogueError(
                    f"{self.lines[index]}: {shown} has shape {shapes[name]}; fn gives it "
                    f"{expected}, for an accumulator of {problem}"
                )


def parameters_of(fn: Callable[..., Any]) -> Parameters:
    """How ``fn`` takes the accumulator and its operands; raises EpilogueError if it cannot."""
    if type(fn) is not FunctionType or fn.__dict__:  # of attributes, one may be a signature
        return _parameters_of(fn)
    defaults = len(fn.__defaults__ or ()), tuple(fn.__kwdefaults__ or ())
    key = fn.__code__, defaults
    found = _parameters.get(key)
    if found is None:
        if len(_parameters) >= _PARAMETERS_KEPT:
            _parameters.clear()
        found = _parameters[key] = _parameters_of(fn)
    return found


def _parameters_of(fn: Callable[..., Any]) -> Parameters:
    place = place_of(fn)
    try:
        found = list(inspect.signature(fn).parameters.values())
    except (TypeError, ValueError) as error:
        raise EpilogueError(
            f"{place}: {fn!r} does not say what it takes ({error}); wrap it in a def"
        ) from error
    for one in found:
        if one.kind in (one.VAR_POSITIONAL, one.VAR_KEYWORD):
            raise EpilogueError(f"{place}: fn takes {one}; name every operand as a parameter")
    if not found or found[0].kind is found[0].KEYWORD_ONLY:
        raise EpilogueError(f"{place}: fn takes no accumulator; that is its first parameter")
    operands = found[1:]
    return Parameters(
        found[0].name,
        tuple(p.name for p in operands),
        tuple(p.name for p in operands if p.default is p.empty),
        tuple(p.name for p in operands if p.kind is p.POSITIONAL_ONLY),
    )


def trace(
    fn: Callable[..., Any],
    parameters: Parameters,
    inputs: Iterable[Input],
    outputs: Iterable[Output],
    extents: dict[str, str],
    problem: Problem,
) -> Trace:
    """Call ``fn`` with symbolic values; what it returns becomes the graph.

    Args:
        inputs: The operands that are read, by the names of parameters.
        outputs: The operands that are written, in the order of the returned values behind D.
        extents: Shapes of the inputs as text, for messages.
        problem: Extents of the accumulator, for messages and to tell whether there is a batch.

    Raises:
        EpilogueError: something cannot be traced; the text starts with the line.
    """
    place = place_of(fn)
    with trace_apart() as run:
        tracer = Tracer(inputs, extents, str(problem), place)
        run(tracer)
        returned = _called(fn, parameters, tracer, place)
        roots = _roots(tracer, returned, tuple(outputs), problem, place)
    graph, kept = canonical(tracer.nodes, roots)
    _check_use(tracer, graph, place)
    return Trace(graph, tuple(tracer.lines[index] for index in kept), place)


def _called(
    fn: Callable[..., Any], parameters: Parameters, tracer: Tracer, place: str
) -> tuple[Any, ...]:
    given = tracer.inputs
    by_position = [given[n] for n in parameters.by_position if n in given]
    by_name = {n: v for n, v in given.items() if n not in parameters.by_position}
    try:
        with inside(tracer):
            returned = fn(tracer.accumulator, *by_position, **by_name)
    except EpilogueError:
        raise
    except Exception as error:
        where = line_of(error, fn) or place
        name = type(error).__name__
        raise EpilogueError(f"{where}: fn raised {name} while it was traced: {error}") from error
    if tracer.failure is not None:
        raise tracer.failure
    return tuple(returned) if isinstance(returned, (tuple, list)) else (returned,)


def _roots(
    tracer: Tracer,
    returned: tuple[Any, ...],
    outputs: tuple[Output, ...],
    problem: Problem,
    place: str,
) -> list[tuple[str, int]]:
    names = [RESULT, *(output.name for output in outputs)]
    if len(returned) != len(names):
        raise EpilogueError(
            f"{place}: fn returns {_count(len(returned), 'value')}, and {len(names)} are expected: "
            f"{', '.join(names)} (D is the arguments' out; operands that are no parameters of fn "
            f"are outputs, in the order that they are passed in)"
        )
    roots: list[tuple[str, int]] = []
    for name, value in zip(names, returned, strict=True):
        if not isinstance(value, Value):
            raise EpilogueError(
                f"{place}: fn returns {value!r} as {name}; expected a value computed from the "
                f"accumulator"
            )
        index = _stored(value)
        if "the accumulator" not in tracer.names_of(index):
            raise EpilogueError(
                f"{tracer.lines[index]}: {name} does not depend on the accumulator; it is {value}"
            )
        roots.append((name, index))
    shape = tracer.nodes[roots[0][1]].shape
    if not shape.is_full:
        raise EpilogueError(
            f"{tracer.lines[roots[0][1]]}: D is {shape} and out is a matrix; return a reduction "
            f"behind D, as an operand of its own"
        )
    return [roots[0], *map(_over_batches(tracer, outputs, problem), roots[1:])]


def _stored(value: Value) -> int:
    """The node that is written; a truth value stays one."""
    return value.node if value.is_boolean else numeric(value).node


def _over_batches(
    tracer: Tracer, outputs: tuple[Output, ...], problem: Problem
) -> Callable[[tuple[str, int]], tuple[str, int]]:
    """Makes a reduction to one per batch one in all where its output has no batch mode."""
    ranks = {output.name: output.rank for output in outputs}

    def root(one: tuple[str, int]) -> tuple[str, int]:
        name, index = one
        shape = tracer.nodes[index].shape
        if problem.L is None or ranks[name] or shape.rows or shape.columns:
            return one
        whole = over_batches(tracer, index)
        return (name, index if whole is None else whole)

    return root


def _check_use(tracer: Tracer, graph: Graph, place: str) -> None:
    used: dict[str, str] = {}
    for index, node in enumerate(graph.nodes):
        if node.op not in ("operand", "scalar", "table"):
            continue
        name, kind = node["name"], "a table" if node.op == "table" else f"{node['type']} values"
        if used.setdefault(name, kind) != kind:
            raise EpilogueError(
                f"{tracer.lines[index]}: {name} is read as {used[name]} and as {kind}; pass it "
                f"twice, under two names"
            )
    for name in tracer.inputs:
        if name not in used:
            raise EpilogueError(
                f"{place}: {name} is passed to EpilogueArguments, but nothing that fn returns "
                f"depends on it"
            )


def place_of(fn: Any) -> str:
    """File, line and name of a function's definition."""
    inner = fn
    while not hasattr(inner, "__code__"):
        if hasattr(inner, "func"):  # functools.partial
            inner = inner.func
        elif hasattr(type(inner).__call__, "__code__"):
            inner = type(inner).__call__
        else:
            return str(getattr(fn, "__qualname__", repr(fn)))
    code = inner.__code__
    return f"{code.co_filename}:{code.co_firstlineno} in {inner.__name__}"


def line_of(error: Exception, fn: Any) -> str | None:
    """The innermost line in the file of ``fn`` that the error went through."""
    code = getattr(fn, "__code__", None)
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if code is None or frame.filename == code.co_filename:
            return f"{frame.filename}:{frame.lineno} in {frame.name}"
    return None


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"

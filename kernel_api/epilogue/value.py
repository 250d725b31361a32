"""Traced values: what ``fn`` sees in place of numbers, and the trace that they write."""

from __future__ import annotations

import contextlib
import contextvars
import math
import numbers
import operator
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from kernel_api.epilogue.graph import Node
from kernel_api.epilogue.shape import FULL, SCALAR, Shape, broadcast
from kernel_api.errors import EpilogueError

_OURS = (str(Path(__file__).parent), str(Path(__file__).parents[1] / "_score"))
#: Libraries whose frames may stand between a user's line and us.
_LIBRARIES = ("torch", "numpy", "functools")

_running: contextvars.ContextVar[Tracer | None] = contextvars.ContextVar(
    "kernel_api_epilogue", default=None
)


class Input(NamedTuple):
    """What a trace depends on of an operand that is read. Sizes play no part.

    Attributes:
        name: The parameter that it is given to.
        kind: ``"real"``, ``"integer"`` or ``"bool"``.
        is_number: Whether it is a Python number, not a tensor.
        shape: How it broadcasts against the accumulator; None if it does not.
        table: The modes in front of its columns, read as a table; None if they do not fit.
        columns: How many columns such a table has.
    """

    name: str
    kind: str
    is_number: bool
    shape: Shape | None
    table: Shape | None
    columns: int


class Tracer:
    """Collects the nodes of one call of ``fn``; equal nodes are one."""

    #: How a tensor becomes an operand, for messages.
    how_to_pass = "pass it to EpilogueArguments by the name of a parameter of fn"

    def __init__(
        self, inputs: Iterable[Input], extents: dict[str, str], problem: str, place: str
    ) -> None:
        self.nodes: list[Node] = []
        #: The line that made each node first.
        self.lines: list[str] = []
        #: Where fn is defined, which stands for what is done while it does not run.
        self.outside: str | None = place
        self._index: dict[Node, int] = {}
        self._extents = extents
        self._problem = problem
        #: The first refusal; it stands even if fn catches it.
        self.failure: EpilogueError | None = None
        self.accumulator = Value(self, self._add("accumulator", shape=FULL))
        self.inputs = {i.name: Value(self, None, i) for i in inputs}

    def _add(
        self,
        op: str,
        inputs: tuple[int, ...] = (),
        shape: Shape = SCALAR,
        **attributes: Any,
    ) -> int:
        node = Node(op, inputs, shape, tuple(sorted(attributes.items())))
        if node not in self._index:
            self._index[node] = len(self.nodes)
            self.nodes.append(node)
            self.lines.append(self.outside or here())
        return self._index[node]

    def node(self, op: str, *inputs: Value, shape: Shape, **attributes: Any) -> Value:
        """A value computed by an operation."""
        return Value(self, self._add(op, tuple(v.node for v in inputs), shape, **attributes))

    def constant(self, number: numbers.Real | float) -> Value:
        # Hexadecimal text tells -0.0 from 0.0 and is exact in JSON.
        return Value(self, self._add("constant", value=float(number).hex()))

    def leaf(self, given: Input, kind: str) -> int:
        """The node of an operand, read as ``real``, ``bool`` or ``integer`` values."""
        if given.is_number:
            return self._add("scalar", name=given.name, type=kind)
        if given.shape is None:
            fail(
                f"{given.name} has shape {self._extents[given.name]}, which does not broadcast "
                f"against the accumulator's {self._problem}; one value per column is (N,), one "
                f"per row (M, 1), one per batch (L, 1, 1)"
            )
        return self._add("operand", shape=given.shape, name=given.name, type=kind)

    def table(self, value: Value, columns: int, rows: bool, what: str) -> Value:
        """An operand read as a table, of shape (columns,) or ([L,] M, columns)."""
        given = value.input
        if given is None or given.is_number:
            fail(f"{what} must be an operand, not a value that fn computes")
        table = given.table
        if table is None or table.rows != rows or given.columns != columns:
            expected = f"([L,] M, {columns})" if rows else f"({columns},)"
            fail(f"{given.name} has shape {self._extents[given.name]}; {what} is {expected}")
        return Value(self, self._add("table", shape=table, name=given.name, columns=columns))

    def names_of(self, index: int) -> list[str]:
        """The leaves that a node is computed from, by name."""
        found: set[str] = set()
        seen, pending = {index}, [index]
        while pending:
            node = self.nodes[pending.pop()]
            pending += [i for i in node.inputs if i not in seen]
            seen.update(node.inputs)
            if node.op == "accumulator":
                found.add("the accumulator")
            elif node.op in ("operand", "scalar", "table"):
                found.add(node["name"])
        return sorted(found, key=lambda name: (name != "the accumulator", name))


class Value:
    """A number per element that is not known yet; operators and functions record what to do.

    Values do not change: ``D += b`` makes a new one under the name D. Going on with the old one
    under another name is an error, because torch would have changed it and a float would not.
    """

    __slots__ = ("_changed", "_node", "input", "tracer")
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, tracer: Tracer, node: int | None, given: Input | None = None) -> None:
        self.tracer = tracer
        self.input = given
        self._node = node
        self._changed: str | None = None

    @property
    def node(self) -> int:
        """Index of the node; an operand becomes one when it is first used."""
        self.check()
        if self._node is None:
            assert self.input is not None
            if self.input.kind == "bool":
                self._node = self.tracer.leaf(self.input, "bool")
            else:
                self._node = self.tracer.leaf(self.input, "real")
        return self._node

    def check(self) -> None:
        """Raise where the value may not be used any more."""
        if self._changed is not None:
            fail(
                f"{self} was changed in place at {self._changed} and is used again under its old "
                f"name; write x = x + y where the old value is still needed"
            )
        if _running.get() is not self.tracer:
            fail(f"{self} belongs to another trace; values must not be kept between calls")

    @property
    def modes(self) -> Shape:
        return self.tracer.nodes[self.node].shape

    @property
    def is_boolean(self) -> bool:
        return self.tracer.nodes[self.node].is_boolean

    def __repr__(self) -> str:
        if self.input is not None:
            return self.input.name
        assert self._node is not None
        names = self.tracer.names_of(self._node)
        if names and not self.tracer.nodes[self._node].inputs:
            return names[0]
        return f"a value computed from {' and '.join(names) or 'constants'}"

    # What has no value while tracing -----------------------------------------------------

    def __bool__(self) -> NoReturn:
        self._unknown(
            "no if can depend on it, nor and, or, not, min, max, a < b < c",
            "where(condition, a, b), minimum, maximum, or & | ~",
        )

    def __float__(self) -> NoReturn:
        self._unknown("float() and the functions of math cannot have it", _FUNCTIONS)

    def __int__(self) -> NoReturn:
        self._unknown("int() cannot have it", "cast(x, dtype)")

    def __index__(self) -> NoReturn:
        self._unknown("it is no index and no length of a range", "a number from outside of fn")

    def __complex__(self) -> NoReturn:
        self._unknown("complex() cannot have it", "real arithmetic")

    def __len__(self) -> NoReturn:
        self._unknown("it has no length", "a number from outside of fn")

    def __iter__(self) -> NoReturn:
        self._unknown("it cannot be looped over or unpacked", _FUNCTIONS)

    def __contains__(self, item: object) -> NoReturn:
        self._unknown("'in' cannot search it", "comparisons and where")

    def __getitem__(self, key: object) -> NoReturn:
        self._unknown("it cannot be indexed", "glu_pair for halves of the columns")

    def __setitem__(self, key: object, value: object) -> NoReturn:
        self._unknown("its elements cannot be assigned", "where(condition, a, b)")

    def __round__(self, digits: int | None = None) -> NoReturn:
        self._unknown("round() cannot have it", "cast(x, dtype)")

    def __array__(self, *args: Any, **kwargs: Any) -> NoReturn:
        self._unknown("it is no array", _FUNCTIONS)

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        fail(f"{self} is traced and has no attribute {name!r}; use {_FUNCTIONS}")

    def _unknown(self, why: str, instead: str) -> NoReturn:
        fail(f"{self} has no value while fn is traced: {why}; use {instead}")

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> NoReturn:
        name = getattr(func, "__name__", str(func))
        captured = [a for a in args if type(a).__module__.partition(".")[0] == "torch"]
        traced = next((a for a in args if isinstance(a, Value)), "a traced value")
        if captured:
            _refuse_captured(captured[0])
        fail(f"torch's {name} cannot be applied to {traced}; use {_FUNCTIONS}")

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        # NumPy asks here for numpy.float32(2) * x too, which is a constant like any other.
        applied = _UFUNCS.get(ufunc.__name__)
        if applied is None or method != "__call__" or len(inputs) != 2:
            fail(f"numpy's {ufunc.__name__} cannot be applied to {self}; use {_FUNCTIONS}")
        if kwargs:
            fail(
                f"numpy's {ufunc.__name__} is traced without {', '.join(kwargs)}; use {_FUNCTIONS}"
            )
        return applied(*(x if isinstance(x, Value) else _number(x) for x in inputs))

    # Operators ---------------------------------------------------------------------------

    def __add__(self, other: Any) -> Value:
        return elementwise("add", self, other)

    def __radd__(self, other: Any) -> Value:
        return elementwise("add", other, self)

    def __sub__(self, other: Any) -> Value:
        return elementwise("sub", self, other)

    def __rsub__(self, other: Any) -> Value:
        return elementwise("sub", other, self)

    def __mul__(self, other: Any) -> Value:
        return elementwise("mul", self, other)

    def __rmul__(self, other: Any) -> Value:
        return elementwise("mul", other, self)

    def __truediv__(self, other: Any) -> Value:
        return elementwise("div", self, other)

    def __rtruediv__(self, other: Any) -> Value:
        return elementwise("div", other, self)

    def __floordiv__(self, other: Any) -> Value:
        return elementwise("floor_divide", self, other)

    def __rfloordiv__(self, other: Any) -> Value:
        return elementwise("floor_divide", other, self)

    def __mod__(self, other: Any) -> Value:
        return elementwise("modulo", self, other)

    def __rmod__(self, other: Any) -> Value:
        return elementwise("modulo", other, self)

    def __divmod__(self, other: Any) -> tuple[Value, Value]:
        return self // other, self % other

    def __rdivmod__(self, other: Any) -> tuple[Value, Value]:
        return other // self, other % self

    def __pow__(self, exponent: Any) -> Value:
        return power(self, exponent)

    def __rpow__(self, base: Any) -> Value:
        return _power_of(base, self)

    def __neg__(self) -> Value:
        return elementwise("neg", self)

    def __pos__(self) -> Value:
        return numeric(self)

    def __abs__(self) -> Value:
        return elementwise("abs", self)

    def __floor__(self) -> Value:
        return elementwise("floor", self)

    def __ceil__(self) -> Value:
        return -elementwise("floor", -self)

    def __lt__(self, other: Any) -> Value:
        return elementwise("lt", self, other)

    def __le__(self, other: Any) -> Value:
        return elementwise("le", self, other)

    def __gt__(self, other: Any) -> Value:
        return elementwise("gt", self, other)

    def __ge__(self, other: Any) -> Value:
        return elementwise("ge", self, other)

    def __eq__(self, other: Any) -> Value:  # type: ignore[override]
        return elementwise("eq", self, other)

    def __ne__(self, other: Any) -> Value:  # type: ignore[override]
        return elementwise("ne", self, other)

    def __and__(self, other: Any) -> Value:
        return logical("and", self, other)

    def __or__(self, other: Any) -> Value:
        return logical("or", self, other)

    def __invert__(self) -> Value:
        return logical("not", self)

    def _replaced_by(self, result: Value) -> Value:
        self._changed = here()
        return result

    def __iadd__(self, other: Any) -> Value:
        return self._replaced_by(self + other)

    def __isub__(self, other: Any) -> Value:
        return self._replaced_by(self - other)

    def __imul__(self, other: Any) -> Value:
        return self._replaced_by(self * other)

    def __itruediv__(self, other: Any) -> Value:
        return self._replaced_by(self / other)

    def __ifloordiv__(self, other: Any) -> Value:
        return self._replaced_by(self // other)

    def __imod__(self, other: Any) -> Value:
        return self._replaced_by(self % other)

    def __ipow__(self, other: Any) -> Value:
        return self._replaced_by(self**other)

    def __iand__(self, other: Any) -> Value:
        return self._replaced_by(self & other)

    def __ior__(self, other: Any) -> Value:
        return self._replaced_by(self | other)


_FUNCTIONS = "the functions of kernel_api.epilogue"
_UFUNCS = {
    "add": operator.add,
    "subtract": operator.sub,
    "multiply": operator.mul,
    "divide": operator.truediv,
    "floor_divide": operator.floordiv,
    "remainder": operator.mod,
    "divmod": divmod,
    "power": operator.pow,
    "less": operator.lt,
    "less_equal": operator.le,
    "greater": operator.gt,
    "greater_equal": operator.ge,
    "equal": operator.eq,
    "not_equal": operator.ne,
}


def _refused(symbol: str, instead: str) -> Callable[..., NoReturn]:
    def operator(self: Value, *others: Any) -> NoReturn:
        fail(f"{symbol} cannot be traced for {self}; use {instead}")

    return operator


for _names, _symbol, _instead in (
    ("matmul rmatmul imatmul", "@", "the product that the arguments describe"),
    ("rand ror", "& and | with a number", "comparisons on both sides"),
    ("xor rxor ixor", "^", "a != b of comparisons"),
    ("lshift rlshift rshift rrshift", "<< and >>", "multiplication"),
    ("trunc", "trunc", "where(x < 0, ceil(x), floor(x))"),
):
    for _name in _names.split():
        setattr(Value, f"__{_name}__", _refused(_symbol, _instead))


def here() -> str:
    """File, line and function of the user's code that called us."""
    tracer = _running.get()
    if tracer is not None and tracer.outside is not None:
        return tracer.outside
    frame = sys._getframe(1)
    while frame.f_back is not None:
        file = frame.f_code.co_filename
        if not file.startswith(_OURS):
            library = str(frame.f_globals.get("__name__", "")).partition(".")[0] in _LIBRARIES
            if not library:
                break
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"


@contextlib.contextmanager
def trace_apart() -> Iterator[Callable[[Tracer], object]]:
    """For a trace of its own, also while another one runs; gives what a tracer runs by once it is
    made. What is refused before is no failure of the other one."""
    token = _running.set(None)
    try:
        yield _running.set
    finally:
        _running.reset(token)


@contextlib.contextmanager
def inside(tracer: Tracer) -> Iterator[None]:
    """While fn runs."""
    place, tracer.outside = tracer.outside, None
    try:
        yield
    finally:
        tracer.outside = place


def fail(text: str) -> NoReturn:
    """Raise EpilogueError at the user's line."""
    error = EpilogueError(f"{here()}: {text}")
    tracer = _running.get()
    if tracer is not None and tracer.failure is None:
        tracer.failure = error
    raise error


def running() -> Tracer:
    """The trace that is being written; the functions of this package work inside of one only."""
    tracer = _running.get()
    if tracer is None:
        fail("the functions of kernel_api.epilogue are for functions given to EpilogueArguments")
    return tracer


def as_value(x: Any) -> Value:
    """A traced value as it is, a number as a constant; nothing else."""
    if isinstance(x, Value):
        x.check()
        return x
    return running().constant(_number(x))


def _number(x: Any) -> numbers.Real:
    number = _item(x)
    if not isinstance(number, numbers.Real):
        _refuse_captured(x)
    return number


def _refuse_captured(x: Any) -> NoReturn:
    if hasattr(x, "shape"):
        fail(
            f"a {type(x).__name__} of shape {tuple(x.shape)} is used that fn does not take; "
            f"{running().how_to_pass}"
        )
    fail(f"{x!r} is no number and no traced value")


def _item(x: Any) -> Any:
    """The number in an array () of NumPy, which makes them of scalars; anything else as it is."""
    is_one = type(x).__module__ == "numpy" and getattr(x, "shape", None) == ()
    return x.item() if is_one else x


def numeric(x: Any) -> Value:
    """As a number; a truth value as 1 or 0."""
    value = as_value(x)
    if not value.is_boolean:
        return type(value)(value.tracer, value.node)
    tracer = running()
    one, zero = tracer.constant(1), tracer.constant(0)
    return tracer.node("where", value, one, zero, shape=value.modes)


def elementwise(op: str, *inputs: Any) -> Value:
    """An operation on numbers, element by element."""
    values = [numeric(x) for x in inputs]
    return running().node(op, *values, shape=common_shape(op, values))


def logical(op: str, *inputs: Any) -> Value:
    values = []
    for x in inputs:
        if not isinstance(x, Value) or not x.is_boolean:
            fail(f"{op} is for comparisons, and {x!r} is none; write x != 0")
        values.append(x)
    return running().node(op, *values, shape=common_shape(op, values))


def common_shape(op: str, values: list[Value]) -> Shape:
    shape = Shape()
    for value in values:
        joined = broadcast(shape, value.modes)
        if joined is None:
            shapes = " and ".join(f"{v} is {v.modes}" for v in values)
            fail(f"the operands of {op} have different numbers of columns: {shapes}")
        shape = joined
    return shape


def power(x: Value, exponent: Any) -> Value:
    """x to a small whole power, or to one that is not whole: NaN of what is negative."""
    exponent = _item(exponent)
    if isinstance(exponent, numbers.Real):
        number = float(exponent)
        if number in (0.5, -0.5):
            return elementwise("sqrt" if number > 0 else "rsqrt", x)
        if number.is_integer() and 1 <= abs(number) <= 16:
            return _whole_power(numeric(x), int(number))
        if (2 * number).is_integer() and 1 < abs(number) < 17:
            return _power_of_halves(numeric(x), number)
        if math.isfinite(number) and not number.is_integer():
            return elementwise("exp", elementwise("mul", number, elementwise("log", x)))
    fail(
        f"the exponent is {exponent!r}; expected a whole number from 1 to 16, its negative, or a "
        f"number that is not whole; write exp(y * log(x)) for a value y"
    )


def _power_of(base: Any, exponent: Value) -> Value:
    number = float(_number(base))
    if not 0 < number < math.inf:
        fail(f"{number} to the power of {exponent}: expected a finite number above 0")
    return elementwise("exp", elementwise("mul", exponent, math.log(number)))


def _power_of_halves(x: Value, exponent: float) -> Value:
    if exponent < 0:
        return elementwise("div", 1.0, _power_of_halves(x, -exponent))
    return elementwise("mul", _whole_power(x, int(exponent)), elementwise("sqrt", x))


def _whole_power(x: Value, exponent: int) -> Value:
    if exponent < 0:
        return elementwise("div", 1.0, _whole_power(x, -exponent))
    if exponent == 1:
        return x
    half = _whole_power(x, exponent // 2)
    square = elementwise("mul", half, half)
    return elementwise("mul", square, x) if exponent % 2 else square

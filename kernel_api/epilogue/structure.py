"""Functions that look beyond one element: pairs of columns, rotations, reductions, dropout."""

from __future__ import annotations

import numbers
from typing import Any

from kernel_api.epilogue.functions import where
from kernel_api.epilogue.graph import HADAMARD_BLOCK
from kernel_api.epilogue.shape import SCALAR, Shape, broadcast
from kernel_api.epilogue.value import (
    Tracer,
    Value,
    fail,
    numeric,
    running,
)

_ORDERS = ("gate_up", "up_gate")
_STYLES = ("half", "interleaved")
_AXES = {-1: "columns", -2: "rows", None: "matrix"}


# Pairs of columns ------------------------------------------------------------------------


def glu_pair(x: Any, order: str = "gate_up", granularity: Any = 32) -> tuple[Value, Value]:
    """(gate, up) out of the columns of x, each with half as many.

    Args:
        order: ``"gate_up"``: the gate stands first in every pair; ``"up_gate"``: second, which
            :func:`~kernel_api.fusions.gemm_glu` has by default.
        granularity: Blocks of so many columns alternate; ``"halves"``: the first half of the
            columns and the second.
    """
    value = _with_columns(x, "glu_pair")
    check_order(order)
    attributes = {"granularity": _granularity(granularity)}
    shape = value.modes._replace(columns=value.modes.columns / 2)
    first, second = (
        running().node("split", value, shape=shape, part=part, **attributes) for part in (0, 1)
    )
    return (first, second) if order == "gate_up" else (second, first)


def interleave(gate: Any, up: Any, order: str = "gate_up", granularity: Any = 32) -> Value:
    """The inverse of :func:`glu_pair`: as many columns as both have together."""
    check_order(order)
    values = [_with_columns(v, "interleave") for v in (gate, up)]
    shape = broadcast(values[0].modes, values[1].modes)
    if shape is None:
        fail(f"gate is {values[0].modes} and up is {values[1].modes}; expected as many columns")
    pair = values if order == "gate_up" else values[::-1]
    shape = shape._replace(columns=shape.columns * 2)
    return running().node("interleave", *pair, shape=shape, granularity=_granularity(granularity))


def check_order(order: Any) -> None:
    if order not in _ORDERS:
        fail(f"order is {order!r}; expected one of {_ORDERS}")


def _granularity(given: Any) -> int | str:
    if given == "halves":
        return "halves"
    if not isinstance(given, numbers.Integral) or int(given) < 1:
        fail(f"granularity is {given!r}; expected a number of columns, or 'halves'")
    return int(given)


# Rotations -------------------------------------------------------------------------------


def rotate(
    x: Any,
    cos: Any,
    sin: Any,
    head_dim: int,
    start: int = 0,
    width: int | None = None,
    style: str = "half",
    heads: int | None = None,
) -> Value:
    """Rotates pairs of columns of heads (rotary position embedding).

    (a, b) → (a · cos − b · sin, b · cos + a · sin), with one angle per row and pair.

    Args:
        cos, sin: Operands (M, width / 2), or (L, M, width / 2).
        head_dim: Columns of a head; heads stand side by side.
        start: First column of a head that is rotated; the ones before stay as they are.
        width: How many columns are rotated; by default all from ``start`` on.
        style: ``"half"``: column i and i + width / 2 are a pair; ``"interleaved"``: 2i and 2i + 1.
        heads: How many are rotated, from the first on; by default all. The rest stay as they are:
            the values of a product that is queries, keys and values.
    """
    value = _full(x, "rotate")
    head_dim, start = _whole("head_dim", head_dim), _whole("start", start)
    width = head_dim - start if width is None else _whole("width", width)
    if width < 2 or width % 2 or start < 0 or start + width > head_dim:
        fail(
            f"columns {start} to {start + width} of heads of {head_dim} are to be rotated; "
            f"expected an even width that fits"
        )
    if style not in _STYLES:
        fail(f"style is {style!r}; expected one of {_STYLES}")
    if heads is not None and (heads := _whole("heads", heads)) < 1:
        fail(f"heads is {heads}; expected how many are rotated, 1 or more, or None for all")
    tracer = running()
    tables = [
        tracer.table(_operand(t, name), width // 2, True, f"{name} of rotate")
        for name, t in (("cos", cos), ("sin", sin))
    ]
    attributes = {"head_dim": head_dim, "start": start, "width": width, "style": style}
    if heads is not None:
        attributes["heads"] = heads
    return tracer.node("rotate", value, *tables, shape=value.modes, **attributes)


def hadamard(x: Any, normalised: bool = True, signs: Any = None) -> Value:
    """Each 16 columns times the Sylvester Hadamard matrix H16 of ±1.

    Args:
        normalised: Divide by 4 = √16, which makes it orthonormal.
        signs: An operand (16,) that the columns of a block are multiplied with before.
    """
    value = _full(x, "hadamard")
    tracer = running()
    inputs = [value]
    if signs is not None:
        operand = _operand(signs, "signs")
        inputs.append(tracer.table(operand, HADAMARD_BLOCK, False, "signs of hadamard"))
    result = tracer.node("hadamard", *inputs, shape=value.modes)
    return result * 0.25 if normalised else result


# Reductions ------------------------------------------------------------------------------


def sum(x: Any, axis: int | None) -> Value:
    """The sum over the columns (axis −1: one per row), the rows (−2: one per column) or both
    (None: one per batch, or one in all where the output has no batch mode)."""
    return _reduced("sum", x, axis)


def max(x: Any, axis: int | None) -> Value:
    """The largest, over the axis as in :func:`sum`; NaN if one is; −∞ of nothing."""
    return _reduced("max", x, axis)


def min(x: Any, axis: int | None) -> Value:
    """The smallest, over the axis as in :func:`sum`; NaN if one is; ∞ of nothing."""
    return _reduced("min", x, axis)


def amax(x: Any, axis: int | None, block: int | None = None) -> Value:
    """The largest magnitude, over the axis as in :func:`sum`; NaN if one is; 0 of nothing.

    Args:
        block: With axis −1: one for each so many columns instead of one per row, N / block.
    """
    if block is None:
        return _reduced("amax", x, axis)
    value, block = _with_columns(x, "amax of blocks"), _whole("block", block)
    if axis != -1 or block < 1:
        fail(f"axis is {axis!r} and block is {block}; expected axis -1 and at least 1 column")
    after = value.modes._replace(columns=value.modes.columns / block)
    return running().node("reduce", value, shape=after, kind="amax", axis="block", block=block)


def repeat(x: Any, times: int) -> Value:
    """Every column so many times, side by side: brings one value per block to its columns."""
    value = _with_columns(x, "repeat")
    times = _whole("times", times)
    if times < 1:
        fail(f"times is {times}; expected at least 1")
    after = value.modes._replace(columns=value.modes.columns * times)
    return running().node("repeat", value, shape=after, times=times)


def mean(x: Any, axis: int | None) -> Value:
    """The mean, over the axis as in :func:`sum`."""
    return _reduced("mean", x, axis)


def mean_square(x: Any, axis: int | None) -> Value:
    """The mean of the squares, over the axis as in :func:`sum`."""
    value = numeric(x)
    return _reduced("mean", value * value, axis)


def _reduced(kind: str, x: Any, axis: int | None) -> Value:
    value = numeric(x)
    if isinstance(axis, bool) or axis not in _AXES:
        fail(f"axis is {axis!r}; expected -1 (columns), -2 (rows) or None (both)")
    before = value.modes
    after = Shape(before.batch, before.rows and axis == -1, before.columns * (axis == -2))
    if before == after:
        fail(f"{value} is {before}: it has no {_AXES[axis]} to reduce")
    return running().node("reduce", value, shape=after, kind=kind, axis=_AXES[axis])


def over_batches(tracer: Tracer, root: int) -> int | None:
    """The value of a node with its reductions to one per batch going over all batches.

    None where it cannot be had: where something in it has a batch mode of its own.
    """
    # In the order of the nodes, inputs come first; what the root does not need is left out later.
    found: dict[int, int | None] = {}
    for index in range(root + 1):
        node = tracer.nodes[index]
        attributes = dict(node.attributes)
        inputs: list[int | None] = [found[i] for i in node.inputs]
        if not node.shape.batch:
            found[index] = index
            continue
        if node.op == "reduce" and node["axis"] == "matrix":
            inputs, attributes["axis"] = list(node.inputs), "all"
        elif node.shape.rows or node.shape.columns or not inputs:
            inputs = [None]
        values = [Value(tracer, i) for i in inputs if i is not None]
        shape = node.shape._replace(batch=False)
        complete = len(values) == len(inputs)
        found[index] = (
            tracer.node(node.op, *values, shape=shape, **attributes).node if complete else None
        )
    return found[root]


# Random numbers --------------------------------------------------------------------------


def dropout(x: Any, p: Any, seed: Any, offset: Any) -> Value:
    """x / (1 − p) with probability 1 − p, else 0.

    Args:
        p: Probability of a zero, a number from 0 to 1 or an operand.
        seed, offset: Operands: Python integers, or tensors () of integers, for compiled kernels of
            signed ones or uint64. A run-time value, so a new seed compiles nothing.

    Kept is what has u ≥ p, for u = (word >> 8) · 2⁻²⁴ of Philox4x32-10 (Salmon et al., Parallel
    Random Numbers: As Easy as 1, 2, 3) under key (seed mod 2³², seed >> 32) and counter

        (n // 4, l · M + m, offset mod 2³², offset >> 32)

    of which element (l, m, n) of x takes word n mod 4; of what has no batches, l is 0. Negative
    states are those of two's complement. Sizes, tiles and devices make no difference.
    """
    value = _full(x, "dropout")
    if isinstance(p, numbers.Real) and not 0 <= float(p) <= 1:
        fail(f"p is {p}; expected a probability from 0 to 1")
    tracer = running()
    state = [_integer(v, name) for name, v in (("seed", seed), ("offset", offset))]
    random = tracer.node("uniform", *state, shape=value.modes)
    if isinstance(p, numbers.Real):
        kept = value * (1.0 / (1.0 - float(p))) if float(p) < 1 else value
    else:
        kept = value / (1.0 - numeric(p))
    return where(random >= p, kept, 0.0)


def _integer(value: Any, name: str) -> Value:
    if not isinstance(value, Value) or value.input is None:
        fail(f"{name} is {value!r}; pass it to EpilogueArguments by name, so that it can change")
    value.check()
    given = value.input
    if given.kind != "integer":
        fail(f"{given.name}, the {name} of dropout, is not an integer")
    if not given.is_number and given.shape != SCALAR:
        fail(f"{given.name}, the {name} of dropout, must be one integer, a tensor of shape ()")
    return Value(value.tracer, value.tracer.leaf(given, "integer"))


# What they share -------------------------------------------------------------------------


def _with_columns(x: Any, what: str) -> Value:
    value = numeric(x)
    if not value.modes.columns:
        fail(f"{value} is {value.modes}: {what} needs columns")
    return value


def _full(x: Any, what: str) -> Value:
    value = numeric(x)
    if not (value.modes.rows and value.modes.columns):
        fail(f"{value} is {value.modes}: {what} needs rows and columns")
    return value


def _operand(value: Any, name: str) -> Value:
    if not isinstance(value, Value):
        fail(f"{name} is {value!r}; pass it to EpilogueArguments by name")
    value.check()
    return value


def _whole(name: str, given: Any) -> int:
    if not isinstance(given, numbers.Integral):
        fail(f"{name} is {given!r}; expected a whole number")
    return int(given)

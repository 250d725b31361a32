"""What a node computes as part of an epilogue: in the terms of the traced expression graph."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from typing import Any

from kernel_api import epilogue as ep
from kernel_api.epilogue.structure import mean, over_batches
from kernel_api.epilogue.value import Value, running
from kernel_api.graph._enums import data_type, element_type, reduction_mode
from kernel_api.graph._node import Node
from kernel_api.graph._operations.pointwise import POINTWISE, POWERS
from kernel_api.graph._planning.frame import Frame
from kernel_api.graph._tensor import Tensor

#: From the inputs of a node, by name, to its outputs, by name.
Folded = Callable[[Mapping[str, Any]], dict[str, Any]]

_AXES: dict[tuple[bool, bool], int | None] = {(False, True): -1, (True, False): -2}

#: Numbers here decide what is computed, not only with what; they are no run-time values.
STATIC_INPUTS = {"pow": ("input1",)}
#: Inputs that are read as tables, not broadcast.
TABLES = {"rope": ("cos", "sin")}


def why_not(node: Node) -> str | None:
    """Why an operation can be part of no epilogue; None if it may be."""
    return _why_no_form(node) or _why_no_rounding(node) or _why_no_integers(node)


def _why_no_form(node: Node) -> str | None:
    if node.op in POINTWISE:
        if POINTWISE[node.op].epilogue is None:
            return f"{node.op} has no form in epilogues"
        return _why_no_power(node) if node.op == "pow" else None
    if node.op == "reduction":
        mode = node["mode"]
        if mode in _REDUCTIONS:
            return None
        return f"epilogues have no reduction {mode}"
    if node.op in ("glu_pair", "rope", "slice"):
        return None
    return f"{node.op} is no operation of epilogues"


def _why_no_power(node: Node) -> str | None:
    exponent = node.input("input1")
    if not exponent.is_constant:
        return "epilogues have powers by numbers that are known, not by tensors"
    if exponent.value in POWERS:
        return None
    return (
        f"epilogues have no exact power {exponent.value}; expected 0.5, a whole number up to 16, "
        f"or minus one of these"
    )


def _why_no_rounding(node: Node) -> str | None:
    wide = next((one for one in node.writes if one.data_type is data_type.INT64), None)
    return None if wide is None else f"{wide} is INT64, which epilogues do not round to"


def _why_no_integers(node: Node) -> str | None:
    """Why arithmetic in float32 would not do; where a floating number takes part, it does."""
    if not _is_exact(node):
        return None
    given = [t for name, t in node.inputs.items() if name != "mask" and isinstance(t, Tensor)]
    if any(element_type(tensor.data_type).is_float for tensor in given):
        return None
    sizes = [_largest(tensor) for tensor in given]
    found = _LARGEST[node.op](*sizes) if node.op in _LARGEST else max(sizes)
    if node.op == "reduction" and node["mode"] in ("ADD", "NORM1"):
        found *= prod(given[0].dim) // max(prod(next(node.writes).dim), 1)
    if found <= _HELD:
        return None
    shown = " and ".join(f"{tensor}, {tensor.data_type.name}" for tensor in given)
    return f"it may make integers above 2^24 of {shown}; epilogues compute in float32"


#: Up to this float32 holds every integer.
_HELD = 2**24

#: The largest magnitude that comes of two; of what is not here, that of the larger one.
_LARGEST: dict[str, Callable[[int, int], int]] = {
    **dict.fromkeys(("add", "bias", "sub"), lambda a, b: a + b),
    **dict.fromkeys(("mul", "scale"), lambda a, b: a * b),
    "add_square": lambda a, b: a + b * b,
}


def _is_exact(node: Node) -> bool:
    """Whether it makes integers, or truth values, of what integers are."""
    if node.op in POINTWISE:
        is_float = node.op == "identity" and next(node.writes).data_type is data_type.FLOAT
        return POINTWISE[node.op].is_exact and not node.op.startswith("logical") and not is_float
    return node.op in ("glu_pair", "slice") or (node.op == "reduction" and node["mode"] != "AVG")


def _largest(tensor: Tensor) -> int:
    """A magnitude that integers do not exceed."""
    producer = tensor.producer
    if tensor.is_constant:
        assert tensor.value is not None
        return abs(int(tensor.value))
    if producer is not None and producer.op == "gen_index":
        return max(tensor.dim)
    kind = element_type(tensor.data_type)
    return 1 if kind.kind == "bool" else 2**kind.bits


def folded(node: Node, frame: Frame) -> Folded | str:
    """What the node does in an epilogue over the frame, or why it cannot be there."""
    refusal = why_not(node)
    if refusal is not None:
        return refusal
    if node.op == "reduction":
        return _reduction(node, frame)
    if node.op == "slice":
        return _half(node, frame)
    if node.op == "glu_pair":
        return _glu_pair(node)
    if node.op == "rope":
        return _rope(node)
    return _pointwise(node)


def is_double(node: Node) -> bool:
    """Whether a node asks for arithmetic in float64; by a number alone it does not."""
    given = (one.data_type for one in node.reads if not one.is_pass_by_value)
    return data_type.DOUBLE in (node.compute, *given)


def rounded(value: Any, tensor: Tensor, in_double: bool) -> Any:
    """A value as a tensor of its type holds it.

    Args:
        in_double: Whether it is computed in float64; else in float32.
    """
    kind = tensor.data_type
    if kind is data_type.BOOLEAN:
        return value if value.is_boolean else value != 0
    name = element_type(kind).name
    if value.is_boolean or name == "float64" or (name == "float32" and not in_double):
        return value
    return ep.cast(value, name)


def _pointwise(node: Node) -> Folded:
    entry = POINTWISE[node.op]
    of = entry.epilogue
    assert of is not None

    def fold(given: Mapping[str, Any]) -> dict[str, Any]:
        operands = [given[name] for name in entry.arguments if name in given]
        return {result: of(*operands, **node.attributes) for result in node.outputs}

    return fold


def _reduction(node: Node, frame: Frame) -> Folded | str:
    tensor = next(node.writes)
    given = next(t for t in node.inputs.values() if isinstance(t, Tensor))
    if not frame.has_all(given.dim):
        return "it reduces what is already reduced"
    lost = frame.reduced(tensor.dim)
    if lost is None:
        return "it reduces some of the modes that are rows, or columns, here"
    *batch, rows, columns = lost
    if frame.ragged and rows:
        return "rows of groups are reduced group by group"
    if any(batch) and not (rows and columns):
        return "it reduces batches, and not rows and columns as well"
    axis: int | None
    if rows and columns:
        axis = None
    elif (rows, columns) in _AXES:
        axis = _AXES[(rows, columns)]
    else:
        return "it reduces nothing"
    of = _REDUCTIONS[node["mode"]]

    def fold(values: Mapping[str, Any]) -> dict[str, Any]:
        (value,) = values.values()
        found = of(value, axis)
        if any(batch):  # an epilogue's own functions go over one
            found = Value(running(), over_batches(running(), found.node))
        return dict.fromkeys(node.outputs, found)

    return fold


_REDUCTIONS: dict[str, Callable[[Any, Any], Any]] = {
    reduction_mode.ADD.name: lambda x, axis: ep.sum(x, axis),
    reduction_mode.MAX.name: lambda x, axis: ep.max(x, axis),
    reduction_mode.MIN.name: lambda x, axis: ep.min(x, axis),
    reduction_mode.AMAX.name: lambda x, axis: ep.amax(x, axis),
    reduction_mode.AVG.name: lambda x, axis: mean(x, axis),
    reduction_mode.NORM1.name: lambda x, axis: ep.sum(ep.abs(x), axis),
}


def _half(node: Node, frame: Frame) -> Folded | str:
    """A slice that is the left or the right half of the columns."""
    (given,) = node.inputs.values()
    tensor = next(node.writes)
    assert isinstance(given, Tensor)
    (view,) = node.operation.views(node).values()  # type: ignore[attr-defined]
    columns = frame.groups[-1]
    if len(columns) != 1 or not frame.has_all(given.dim):
        return "it is no half of the columns"
    mode = columns[0] - len(frame.dim)
    full, own = given.dim[mode], tensor.dim[mode]
    rest = [
        (a, b)
        for i, (a, b) in enumerate(zip(given.dim, tensor.dim, strict=True))
        if i != len(given.dim) + mode
    ]
    step = given.stride[mode]
    if any(a != b for a, b in rest) or 2 * own != full or view.stride[mode] != step:
        return "it is no half of the columns"
    if view.offset not in (0, own * step):
        return "it is no half of the columns"
    part = 1 if view.offset else 0

    def fold(values: Mapping[str, Any]) -> dict[str, Any]:
        (value,) = values.values()
        pair = ep.glu_pair(value, order="gate_up", granularity="halves")
        return dict.fromkeys(node.outputs, pair[part])

    return fold


def _glu_pair(node: Node) -> Folded:
    def fold(values: Mapping[str, Any]) -> dict[str, Any]:
        (value,) = values.values()
        pair = ep.glu_pair(value, order=node["order"], granularity=node["granularity"])
        return dict(zip(node.operation.result, pair, strict=True))

    return fold


def _rope(node: Node) -> Folded:
    names = ("head_dim", "start", "width", "style", "heads")
    options = {name: node[name] for name in names if node[name] is not None}

    def fold(values: Mapping[str, Any]) -> dict[str, Any]:
        value = ep.rotate(values["input"], values["cos"], values["sin"], **options)
        return dict.fromkeys(node.outputs, value)

    return fold

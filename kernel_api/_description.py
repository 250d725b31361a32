"""Arguments as JSON, without their data: enough to compile for them in another process.

Every tensor comes back as a meta tensor of the same sizes, strides and alignment.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Collection, Sequence
from typing import Any

from kernel_api._described import Described
from kernel_api._sketch import Sketch
from kernel_api.arguments import Arguments, EpilogueArguments, ScaledOperand, ScaleMode
from kernel_api.arguments.experts import Experts, ExpertTensors
from kernel_api.dtypes import DType, dtype
from kernel_api.epilogue import Graph
from kernel_api.epilogue.tracing import Trace
from kernel_api.errors import ArgumentError
from kernel_api.operands import MAX_ALIGNMENT, Operand


def described(args: Arguments) -> dict[str, Any]:
    """Raises ArgumentError for arguments that carry what cannot be described."""
    return {
        "class": [type(args).__module__, type(args).__qualname__],
        "operands": [_encode(operand) for operand in args.operands],
        "keywords": {name: _encode(value) for name, value in args._keywords().items()},
    }


#: The device of what stands for tensors where torch is not imported.
SKETCHED = "sketch"


def rebuilt(description: dict[str, Any], device: str = "meta") -> Arguments:
    """The arguments that :func:`described` was given, on meta tensors or uninitialised ones; or
    of `SKETCHED` ones, which is enough to compile products for."""
    cls = _class_at(description["class"], Arguments, "arguments class")
    operands = [_decode(one, device) for one in description["operands"]]
    keywords = {n: _decode(value, device) for n, value in description["keywords"].items()}
    made = cls(*operands, **keywords)
    assert isinstance(made, Arguments)
    return made


def _class_at(place: Sequence[str], base: type, what: str) -> Any:
    """The class of a module and a name, which must be one of a base."""
    module, name = place
    cls = getattr(importlib.import_module(module), name)
    if not (isinstance(cls, type) and issubclass(cls, base)):
        raise ArgumentError(f"{module}.{name} is no {what}")
    return cls


def _encode(value: Any) -> Any:
    if isinstance(value, ScaledOperand):
        return {
            "tensor": _tensor(value),
            "scale": _tensor(value.scale),
            "mode": value.mode.value,
        }
    if isinstance(value, Experts):
        return {"experts": _tensor(value)}
    if isinstance(value, Operand):
        return {"tensor": _tensor(value)}
    if isinstance(value, DType):
        return {"dtype": value.name}
    if isinstance(value, EpilogueArguments):
        operands = {name: _encode(one) for name, one in value.operands.items()}
        return {"graph": value.graph.to_dict(), "operands": operands}
    if isinstance(value, Described):
        kind = type(value)
        fields = {name: _encode(one) for name, one in value.description().items()}
        return {"object": [kind.__module__, kind.__qualname__], "fields": fields}
    if isinstance(value, Graph):
        return {"nodes": value.to_json()}
    if isinstance(value, list):
        return [_encode(one) for one in value]
    if isinstance(value, dict):
        return {"named": {name: _encode(one) for name, one in value.items()}}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise ArgumentError(f"{value!r} cannot be described to another process")


def _decode(value: Any, device: str) -> Any:
    if isinstance(value, list):
        return [_decode(one, device) for one in value]
    if not isinstance(value, dict):
        return value
    if "object" in value:
        fields = {name: _decode(one, device) for name, one in value["fields"].items()}
        return _class_at(value["object"], Described, "such object").from_description(fields)
    if "nodes" in value:
        return Graph.from_json(value["nodes"])
    if "named" in value:
        return {name: _decode(one, device) for name, one in value["named"].items()}
    if "dtype" in value:
        return dtype(value["dtype"])
    if "graph" in value:
        graph = Graph.from_dict(value["graph"])
        operands = {name: _decode(one, device) for name, one in value["operands"].items()}
        return _epilogue_of(graph, operands)
    if "scale" in value:
        tensor, scale = (_empty(value[name], device) for name in ("tensor", "scale"))
        return ScaledOperand(tensor, scale, ScaleMode(value["mode"]))
    if "experts" in value:
        experts = value["experts"]
        count, *shape = experts["shape"]
        one = {**experts, "shape": shape, "stride": experts["stride"][1:]}
        return ExpertTensors([_empty(one, device) for _ in range(count)])
    return _empty(value["tensor"], device)


def _tensor(operand: Operand) -> dict[str, Any]:
    return {
        "dtype": operand.dtype.name,
        "shape": operand.shape,
        "stride": operand.stride,
        "alignment": operand.alignment,
    }


def _empty(tensor: dict[str, Any], device: str) -> Any:
    """Its storage offset gives it the alignment."""
    element = dtype(tensor["dtype"])
    shape, stride, alignment = tensor["shape"], tensor["stride"], tensor["alignment"]
    offset = alignment // element.itemsize if alignment < MAX_ALIGNMENT else 0
    if device == SKETCHED:
        return Sketch(element, tuple(shape), tuple(stride), offset)
    import torch

    size = offset + 1 + sum(max(e - 1, 0) * s for e, s in zip(shape, stride, strict=True))
    return torch.empty(size, dtype=element.torch, device=device).as_strided(shape, stride, offset)


class _GraphFunction:
    """Stands for the function that a graph was traced from.

    operands: Names of what it reads and writes; the accumulator has a longer one than any.
    """

    def __init__(self, graph: Graph, operands: Collection[str]) -> None:
        accumulator = "accum".ljust(1 + max(map(len, operands), default=0), "_")
        names = (accumulator, *graph.leaves)
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        self.__signature__ = inspect.Signature([inspect.Parameter(n, kind) for n in names])

    def __call__(self, *operands: Any) -> Any:
        raise TypeError("this epilogue is known by its graph alone and cannot be traced again")


class _OneTrace(dict[Any, Trace]):
    """The traces of an epilogue that is known by its graph: one, whatever it is asked for."""

    def __init__(self, graph: Graph) -> None:
        lines: Any = ("the graph",) * len(graph.nodes)
        self.trace = Trace(graph, lines, "the graph")

    def get(self, key: Any, default: Any = None) -> Trace:
        return self.trace


def _epilogue_of(graph: Graph, operands: dict[str, Any]) -> EpilogueArguments:
    made = EpilogueArguments(_GraphFunction(graph, operands), **operands)
    made._traces = _OneTrace(graph)
    return made

"""Graphs as JSON, and back.

A file is one line of JSON: ``{"content": ..., "format": ..., "sha256": ..., "version": ...}``. The
checksum is of the content in canonical form (keys sorted, no blanks), so that any damage is found.
Tensors are in a list, and nodes name them by their place in it; numbers that are no integers are
hexadecimal text, which is exact. What is read is checked before the graph is changed, and nothing
in it is executed.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from enum import Enum
from typing import Any

from kernel_api.errors import GraphError, SerializedGraphError
from kernel_api.graph._enums import data_type, tensor_reordering
from kernel_api.graph._kinds import whole
from kernel_api.graph._node import Body, Node, operation
from kernel_api.graph._tensor import Tensor

FORMAT = "kernel_api.graph"
VERSION = 1

_DEFAULTS = ("io_data_type", "intermediate_data_type", "compute_data_type")


# The file ------------------------------------------------------------------------------------


def pack(content: Mapping[str, Any]) -> bytes:
    """The file of a content that JSON can hold, with a ``"graph"`` and a ``"plan"``.

    Raises GraphError for what it cannot hold.
    """
    try:
        # Once there and back: keys are text then, and sorted as text.
        text = _canonical(json.loads(json.dumps(content)))
    except (TypeError, ValueError) as error:
        raise GraphError(f"the graph cannot be serialised: {error}") from error
    head = {"content": None, "format": FORMAT, "sha256": _checksum(text), "version": VERSION}
    return _canonical(head).replace('"content":null', f'"content":{text}', 1).encode()


def unpack(data: Any) -> dict[str, Any]:
    """The content of a file: bytes, a list of them as numbers, or text.

    Raises SerializedGraphError with what is wrong with it.
    """
    try:
        # object_pairs_hook: a key that comes twice would hide what is under the first.
        found = json.loads(_text_of(data), object_pairs_hook=_without_repetitions)
    except SerializedGraphError:
        raise
    except (ValueError, RecursionError) as error:
        raise SerializedGraphError(
            f"the data is no serialised graph, or is cut off: it is no JSON ({error})"
        ) from error
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise SerializedGraphError(
            f"the data is no serialised graph of this library: its format is not {FORMAT!r}"
        )
    version = found.get("version")
    if type(version) is not int or version != VERSION:
        raise SerializedGraphError(
            f"the graph is serialised in version {version!r}; this library reads version "
            f"{VERSION}: serialise it anew"
        )
    content = found.get("content")
    if not isinstance(content, dict) or set(found) != {"content", "format", "sha256", "version"}:
        raise SerializedGraphError(
            "the serialised graph is damaged: expected content, format, sha256 and version"
        )
    try:
        is_whole = found["sha256"] == _checksum(_canonical(content))
    except (ValueError, RecursionError):
        is_whole = False
    if not is_whole:
        raise SerializedGraphError(
            "the serialised graph is damaged: its checksum is not that of its content"
        )
    for part in ("graph", "plan"):
        _expect(isinstance(content.get(part), dict), f"a {part} in it", content.get(part))
    return content


def _canonical(content: Any) -> str:
    return json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)


def _checksum(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _text_of(data: Any) -> str:
    if isinstance(data, str):
        return data
    if isinstance(data, (bytes, bytearray, memoryview)):
        return bytes(data).decode()
    if isinstance(data, Iterable):
        try:
            return bytes(data).decode()
        except TypeError:
            pass
    raise SerializedGraphError(
        f"the data is a {type(data).__name__}; expected what serialize() returned: bytes or a "
        f"list of them as numbers"
    )


def _without_repetitions(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key comes twice")
    return found


# From a graph --------------------------------------------------------------------------------


def graph_to_dict(graph: Any) -> dict[str, Any]:
    """What a graph is, without its plans: defaults, tensors, nodes.

    Raises GraphError for an attribute of a node that JSON cannot hold.
    """
    tensors = _all_tensors(graph)
    place = {id(tensor): i for i, tensor in enumerate(tensors)}
    return {
        "name": graph.name,
        **{key: getattr(graph, key).name for key in _DEFAULTS},
        # Those behind the graph's own are of the functions of nodes.
        "own_tensors": len(graph.tensors),
        "tensors": [_tensor_to_dict(tensor, place) for tensor in tensors],
        "nodes": [_node_to_dict(node, place) for node in graph.nodes],
    }


def _all_tensors(graph: Any) -> list[Tensor]:
    """The graph's list, and behind it those that only functions of nodes know."""
    found = {id(tensor): tensor for tensor in graph.tensors}
    for node in graph.nodes:
        for tensor in _tensors_of(node):
            found.setdefault(id(tensor), tensor)
    return list(found.values())


def _tensors_of(node: Node) -> Iterator[Tensor]:
    yield from node.reads
    yield from node.writes
    if node.body is not None:
        yield node.body.argument
        for inner in node.body.nodes:
            yield from _tensors_of(inner)
        yield node.body.result


def _tensor_to_dict(tensor: Tensor, place: Mapping[int, int]) -> dict[str, Any]:
    device = tensor.device
    ragged = tensor.ragged_offset
    return {
        "name": tensor.name,
        "uid": tensor.uid,
        "dim": list(tensor.dim),
        "stride": list(tensor.stride),
        "data_type": tensor.data_type.name,
        "is_virtual": tensor.is_virtual,
        "is_pass_by_value": tensor.is_pass_by_value,
        "value": _encoded(tensor.value, str(tensor)),
        # Which of several GPUs is no part of a graph.
        "device": None if device is None else str(device).split(":")[0],
        "ragged_offset": None if ragged is None else place[id(ragged)],
        "reordering": tensor.reordering.name,
    }


def _node_to_dict(node: Node, place: Mapping[int, int]) -> dict[str, Any]:
    body = node.body
    return {
        "op": node.op,
        "name": node.name,
        "compute": node.compute.name,
        # Pairs, because the order of arguments counts.
        "inputs": [
            [key, [place[id(t)] for t in given] if isinstance(given, tuple) else place[id(given)]]
            for key, given in node.inputs.items()
        ],
        "outputs": [[key, place[id(tensor)]] for key, tensor in node.outputs.items()],
        "attributes": [
            [key, _encoded(value, f"{key} of {node}")] for key, value in node.attributes.items()
        ],
        "body": None
        if body is None
        else {
            "nodes": [_node_to_dict(inner, place) for inner in body.nodes],
            "argument": place[id(body.argument)],
            "result": place[id(body.result)],
        },
    }


def _encoded(value: Any, what: str) -> Any:
    """A value in terms of JSON; what JSON does not tell apart is tagged."""
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return {"float": float(value).hex()}
    if isinstance(value, list):
        return [_encoded(one, what) for one in value]
    if isinstance(value, tuple):
        return {"tuple": [_encoded(one, what) for one in value]}
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {"dict": [[key, _encoded(one, what)] for key, one in value.items()]}
    raise GraphError(
        f"{what} is a {type(value).__name__}, which cannot be serialised; expected numbers, text, "
        f"lists and dicts"
    )


def _decoded(value: Any) -> Any:
    if isinstance(value, list):
        return [_decoded(one) for one in value]
    if not isinstance(value, dict):
        _expect(value is None or isinstance(value, (bool, int, str)), "a value", value)
        return value
    _expect(len(value) == 1, "a value with one tag", value)
    ((tag, inner),) = value.items()
    if tag == "float":
        return float.fromhex(inner)
    if tag == "tuple":
        return tuple(_decoded(one) for one in inner)
    _expect(tag == "dict", "one of the tags float, tuple, dict", tag)
    return {_text(key): _decoded(one) for key, one in inner}


# To a graph ----------------------------------------------------------------------------------


def graph_from_dict(graph: Any, data: Mapping[str, Any]) -> None:
    """Let an empty graph become what ``graph_to_dict`` gave.

    Tensors that were on a GPU are on that of the graph's handle, else on the current one.

    Raises SerializedGraphError if the data describes no graph; the given one is as before then.
    """
    try:
        made = _Reader(graph, data)
        made.read()
    except SerializedGraphError:
        raise
    except Exception as error:  # the data is at fault, whatever reading it raises
        raise damaged(error) from error
    made.fill()


def damaged(error: Exception) -> SerializedGraphError:
    """What is raised for data of which something is made that raises this."""
    if isinstance(error, RecursionError):
        what = "too deep"
    elif isinstance(error, KeyError):
        what = f"there is no {error}"
    elif isinstance(error, GraphError):
        what = str(error)
    else:
        what = f"{type(error).__name__}: {error}"
    return SerializedGraphError(f"the serialised graph is damaged: {what}")


class _Reader:
    """Makes tensors and nodes that belong to a graph, and gives them to it when all are right."""

    def __init__(self, graph: Any, data: Mapping[str, Any]) -> None:
        self._graph, self._data = graph, data
        self._defaults = {key: _member(data_type, data[key]) for key in _DEFAULTS}
        self._tensors: list[Tensor] = []
        self._nodes: list[Node] = []

    def read(self) -> None:
        data = self._data
        self._name = _text(data["name"])
        self._own = _whole(data["own_tensors"])
        listed = data["tensors"]
        _expect(self._own <= len(listed), f"{self._own} tensors or more", len(listed))
        self._tensors = [self._tensor(one) for one in listed]
        for tensor, one in zip(self._tensors, listed, strict=True):
            if one["ragged_offset"] is not None:
                tensor.ragged_offset = self._at(one["ragged_offset"], str(tensor))
        self._nodes = [self._node(one) for one in data["nodes"]]
        names = [node.name for node in self._nodes]
        twice = sorted({name for name in names if names.count(name) > 1})
        _expect(not twice, "nodes with names of their own", twice)
        self._check()

    def fill(self) -> None:
        graph = self._graph
        graph.name = self._name
        for key, value in self._defaults.items():
            setattr(graph, key, value)
        graph.tensors[:] = self._tensors[: self._own]
        graph.nodes[:] = self._nodes
        for tensor in graph.tensors:
            if tensor.uid is not None:
                uid, tensor.uid = tensor.uid, None
                graph.claim_uid(tensor, uid)

    def _tensor(self, data: Mapping[str, Any]) -> Tensor:
        made = Tensor(
            self._graph,
            name=_text(data["name"]),
            dim=[_whole(extent) for extent in data["dim"]],
            stride=[_whole(stride) for stride in data["stride"]],
            element=_member(data_type, data["data_type"]),
            is_virtual=_flag(data["is_virtual"]),
        )
        made.is_pass_by_value = _flag(data["is_pass_by_value"])
        made.reordering = _member(tensor_reordering, data["reordering"])
        made.uid = None if data["uid"] is None else _uid(data["uid"])
        made.value = _decoded(data["value"])
        _expect(_is_number(made.value), "a number", data["value"])
        is_passed = made.value is None or made.is_pass_by_value
        _expect(is_passed, "is_pass_by_value of what has a value", made.is_pass_by_value)
        made.device = _device(self._graph, data["device"])
        return made

    def _node(self, data: Mapping[str, Any]) -> Node:
        op, name = _text(data["op"]), _text(data["name"])
        results = operation(op).result
        # Those that only planning makes are none.
        _expect(hasattr(self._graph, op), "an operation of graphs", op)
        body = data["body"]
        inputs = {
            _text(key): tuple(self._at(i, name) for i in given)
            if isinstance(given, list)
            else self._at(given, name)
            for key, given in data["inputs"]
        }
        node = Node(
            op,
            name,
            inputs,
            {_text(key): _decoded(value) for key, value in data["attributes"]},
            _member(data_type, data["compute"]),
            None if body is None else self._body(body, name),
        )
        for key, place in data["outputs"]:
            tensor = self._at(place, name)
            _expect(key in results, f"results of {op}: {', '.join(results)}", key)
            if tensor.producer is not None:
                raise SerializedGraphError(
                    f"the serialised graph is damaged: {tensor} is written by {tensor.producer} "
                    f"and by {node}"
                )
            tensor.producer = node
            node.outputs[key] = tensor
        return node

    def _body(self, data: Mapping[str, Any], name: str) -> Body:
        return Body(
            tuple(self._node(inner) for inner in data["nodes"]),
            self._at(data["argument"], name),
            self._at(data["result"], name),
        )

    def _at(self, place: Any, reader: str) -> Tensor:
        if type(place) is not int or not 0 <= place < len(self._tensors):
            raise SerializedGraphError(
                f"the serialised graph is damaged: {reader} uses tensor {place!r} of "
                f"{len(self._tensors)}, which does not exist"
            )
        return self._tensors[place]

    def _check(self) -> None:
        from kernel_api.graph._validation import in_order

        uids = [tensor.uid for tensor in self._tensors[: self._own] if tensor.uid is not None]
        if len(set(uids)) != len(uids):
            twice = sorted({uid for uid in uids if uids.count(uid) > 1})
            raise SerializedGraphError(f"the serialised graph is damaged: uid {twice} comes twice")
        arguments = {
            id(node.body.argument) for node in _every(self._nodes) if node.body is not None
        }
        for tensor in self._tensors:
            if tensor.is_virtual and tensor.producer is None and id(tensor) not in arguments:
                raise SerializedGraphError(
                    f"the serialised graph is damaged: no operation writes {tensor}, which is "
                    f"virtual"
                )
            if tensor.producer is not None and (tensor.is_pass_by_value or tensor.is_constant):
                raise SerializedGraphError(
                    f"the serialised graph is damaged: {tensor.producer} writes {tensor}, which "
                    f"is a number of the host's"
                )
        in_order(self._nodes)
        for node in _every(self._nodes):
            if node.body is not None:
                in_order(node.body.nodes)
                self._check_body(node, node.body)
        own = {id(tensor) for tensor in self._tensors[: self._own]}
        for node in self._nodes:
            for tensor in (*node.reads, *node.writes):
                # Behind the graph's own tensors, those of functions of nodes stand.
                _expect(id(tensor) in own, f"{node} to use tensors of the graph", str(tensor))

    def _check_body(self, node: Node, body: Body) -> None:
        own = {id(tensor) for tensor in self._tensors[: self._own]}
        inner = [body.argument, *(tensor for one in body.nodes for tensor in one.writes)]
        for tensor in inner:
            _expect(id(tensor) not in own, f"a function of {node} beside the graph", str(tensor))
        producer = body.argument.producer
        _expect(producer is None, f"{body.argument} to be given to {node}", str(producer))


def _every(nodes: Iterable[Node]) -> Iterator[Node]:
    for node in nodes:
        yield node
        if node.body is not None:
            yield from _every(node.body.nodes)


def _device(graph: Any, kind: Any) -> Any:
    """A device of a kind: the handle's, if that is one, else the current."""
    if kind is None:
        return None
    _expect(isinstance(kind, str), "a kind of device", kind)
    import torch

    if graph.handle is not None and graph.handle.device.type == kind:
        return graph.handle.device
    if kind == "cuda":
        return torch.device(kind, torch.cuda.current_device() if torch.cuda.is_available() else 0)
    try:
        return torch.device(kind)
    except RuntimeError as error:
        raise ValueError(f"{kind!r} is no kind of device") from error


def _member(kind: type[Enum], name: Any) -> Any:
    _expect(name in kind.__members__, f"a {kind.__name__}", name)
    return kind[name]


def _whole(value: Any, least: int = 0) -> int:
    _expect(whole(least).holds(value), "a whole number", value)
    return int(value)


def _uid(value: Any) -> int:
    _expect(type(value) is int, "a whole number", value)
    return int(value)


def _is_number(value: Any) -> bool:
    """Whether it is None, or a number that can be one of float64."""
    if isinstance(value, int):
        return abs(value) <= sys.float_info.max
    return value is None or isinstance(value, float)


def _flag(value: Any) -> bool:
    _expect(isinstance(value, bool), "true or false", value)
    return bool(value)


def _text(value: Any) -> str:
    _expect(isinstance(value, str), "text", value)
    return str(value)


def _expect(is_so: bool, what: str, value: Any) -> None:
    if not is_so:
        raise SerializedGraphError(
            f"the serialised graph is damaged: expected {what}, got {value!r}"
        )

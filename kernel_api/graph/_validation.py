"""From what the user wrote to a graph in which everything is known."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from kernel_api.errors import ArgumentError, GraphError
from kernel_api.graph._enums import data_type, element_type
from kernel_api.graph._node import Node
from kernel_api.graph._tensor import Tensor, memory_order, packed_strides
from kernel_api.operands import repeats

_FLOATING = frozenset(
    (
        data_type.FLOAT,
        data_type.DOUBLE,
        data_type.HALF,
        data_type.BFLOAT16,
        data_type.FP8_E4M3,
        data_type.FP8_E5M2,
        data_type.FAST_FLOAT_FOR_FP8,
    )
)


#: More cannot be addressed, whatever their type.
_MOST_ELEMENTS = 2**58

#: Operations of matrices with the operands that are multiplied.
_MULTIPLIED = {
    "matmul": ("A", "B"),
    "sdpa": ("q", "k", "v"),
    "sdpa_backward": ("q", "k", "v", "o", "dO"),
    "conv_fprop": ("image", "weight"),
    "conv_dgrad": ("weight", "loss"),
    "conv_wgrad": ("image", "loss"),
    "moe_grouped_matmul": ("token", "weight"),
}


def validate(graph: Any) -> list[Node]:
    """Give every tensor its dim, stride, data type, name and uid; returns the nodes in an order
    in which each stands behind those that write what it reads.

    Raises:
        GraphError: something is missing, contradicts itself or goes in a circle.
    """
    nodes = in_order(graph.nodes)
    readers = _readers(nodes)
    for tensor in graph.tensors:
        if tensor.is_input:
            _check_input(tensor, graph.io_data_type)
    for node in nodes:
        if node.compute is data_type.NOT_SET:
            node.compute = graph.compute_data_type
        loose = [t for t in node.writes if t.is_virtual and not t.stride]
        for one in (node,) if node.body is None else (*node.body.nodes, node):
            _check_form(one)
        try:
            node.operation.infer(node)
        except GraphError:
            raise
        except (ArgumentError, IndexError, TypeError, ValueError) as error:
            raise GraphError(f"{node} cannot be: {error}") from error
        for tensor in node.writes:
            _complete(tensor, node, graph, readers)
        for tensor in loose:
            _lay_out(tensor, node)
    _give_uids(graph.tensors)
    _check_names(graph.tensors)
    return nodes


def _check_form(node: Node) -> None:
    """Raise GraphError unless a node has what its operation declares, and nothing else."""
    kind = node.operation
    _check_names_of(node, "input", node.inputs, kind.inputs)
    _check_names_of(node, "result", node.outputs, kind.result)
    _check_names_of(node, "attribute", node.attributes, kind.attributes)
    for name in (*kind.inputs, *kind.result):
        if name not in kind.optional and name not in node.inputs and name not in node.outputs:
            raise GraphError(f"{node} needs {name}, which is not given")
    for name, values in kind.attributes.items():
        if not values.holds(node[name]):
            raise GraphError(f"{node} has {name} = {node[name]!r}; expected {values.what}")
    for name, given in node.inputs.items():
        _check_given(node, name, given)
    if node.body is not None and not kind.has_body:
        raise GraphError(f"{node} has a function; {node.op} takes none")
    kind.check(node)


def _check_names_of(node: Node, what: str, given: Iterable[str], known: Iterable[str]) -> None:
    strange = [name for name in given if name not in known]
    if strange:
        there = ", ".join(known) or "none"
        raise GraphError(f"{node} has {what} {strange[0]!r}, which is none of {node.op}: {there}")


def _check_given(node: Node, name: str, given: Tensor | tuple[Tensor, ...]) -> None:
    """Raise GraphError where an input is several tensors, or a number, and may not be."""
    kind = node.operation
    if isinstance(given, tuple) != (name in kind.several):
        expected = "several tensors" if name in kind.several else "one tensor"
        raise GraphError(f"{node} has {name} {given!r}; expected {expected}")
    for one in given if isinstance(given, tuple) else (given,):
        if one.is_pass_by_value and name not in kind.numbers:
            raise GraphError(
                f"{node} has {one} as {name}, which is a number of the host's; expected a tensor "
                f"in memory"
            )


def in_order(nodes: Iterable[Node]) -> list[Node]:
    """The nodes, each behind those that it reads of; as they came where that is so.

    Raises GraphError for a circle, and for what is written twice.
    """
    pending = list(nodes)
    written: dict[int, Node] = {}
    for node in pending:
        for tensor in node.writes:
            other = written.setdefault(id(tensor), node)
            if other is not node:
                raise GraphError(f"{tensor} is written by {other} and by {node}")
    done: set[int] = set()
    ordered: list[Node] = []
    while pending:
        ready = [n for n in pending if _is_ready(n, written, done)]
        if not ready:
            names = ", ".join(str(node) for node in pending)
            raise GraphError(f"the graph goes in a circle through {names}")
        # One at a time keeps the user's order.
        node = ready[0]
        ordered.append(node)
        pending.remove(node)
        done.add(id(node))
    return ordered


def _is_ready(node: Node, written: dict[int, Node], done: set[int]) -> bool:
    return all(id(t) not in written or id(written[id(t)]) in done for t in node.reads)


def _check_input(tensor: Tensor, default: data_type) -> None:
    if tensor.data_type is data_type.NOT_SET:
        tensor.data_type = default
    if tensor.data_type is data_type.NOT_SET:
        raise GraphError(
            f"{tensor} has no data type; set_data_type() gives it one, io_data_type= of the graph "
            f"all of them"
        )
    if not tensor.dim and not tensor.is_pass_by_value:
        raise GraphError(f"{tensor} has no dim; set_dim() gives it one")
    if tensor.is_pass_by_value and math.prod(tensor.dim) != 1:
        raise GraphError(
            f"{tensor} is passed by value and has dim {list(tensor.dim)}; expected one element"
        )
    if not tensor.stride:
        tensor.stride = packed_strides(tensor.dim)
    _check_layout(tensor)


def _complete(tensor: Tensor, node: Node, graph: Any, readers: dict[int, list[Node]]) -> None:
    if not tensor.dim:
        raise GraphError(f"the dim of {tensor} cannot be inferred from {node}; set_dim() gives it")
    order = graph._orders.get(id(tensor))
    if order is not None:
        tensor.stride = packed_strides(tensor.dim, order)
    if not tensor.stride:
        tensor.stride = packed_strides(tensor.dim)
    if tensor.data_type is data_type.NOT_SET:
        tensor.data_type = _default_type(tensor, node, graph, readers)
    if tensor.data_type is data_type.NOT_SET:
        raise GraphError(f"the data type of {tensor} cannot be inferred; set_data_type() gives it")
    _check_layout(tensor)
    if not (tensor.is_virtual and hasattr(node.operation, "views")):
        _check_written(tensor)


def _check_written(tensor: Tensor) -> None:
    """Raise GraphError where elements that are written are one in memory."""
    if repeats(tensor.dim, tensor.stride):
        raise GraphError(
            f"{tensor} has dim {list(tensor.dim)} and stride {list(tensor.stride)}: several of its "
            f"elements are one in memory, so it cannot be written"
        )


def _lay_out(tensor: Tensor, node: Node) -> None:
    """The strides of a virtual tensor are ours: those of a view, else without gaps."""
    views = getattr(node.operation, "views", None)
    found = views(node) if views is not None else {}
    view = next((found.get(name) for name, t in node.outputs.items() if t is tensor), None)
    if view is not None:
        tensor.stride = view.stride
    else:
        tensor.stride = packed_strides(tensor.dim, memory_order(tensor.dim, tensor.stride))


def _default_type(
    tensor: Tensor, node: Node, graph: Any, readers: dict[int, list[Node]]
) -> data_type:
    """The type of a result that has none set.

    What is only seen with other modes keeps its type, and attention that of its queries. A virtual
    tensor that is multiplied has the type of the caller's tensors, as cuDNN's fused attention
    rounds probabilities, for that is what tensor cores multiply; other ones have that of
    intermediate tensors.
    """
    if hasattr(node.operation, "views"):
        return _type_of_inputs(node)
    if node.op in ("sdpa", "sdpa_backward"):
        return node.input("q").data_type
    default: data_type = graph.io_data_type
    if tensor.is_virtual and not (default in _FLOATING and _is_multiplied(tensor, readers)):
        default = graph.intermediate_data_type
    return default if default is not data_type.NOT_SET else _type_of_inputs(node)


def _is_multiplied(tensor: Tensor, readers: dict[int, list[Node]]) -> bool:
    for node in readers.get(id(tensor), ()):
        if any(node.inputs.get(name) is tensor for name in _MULTIPLIED.get(node.op, ())):
            return True
        if hasattr(node.operation, "views") and any(
            t.is_virtual and _is_multiplied(t, readers) for t in node.writes
        ):
            return True
    return False


def _readers(nodes: Iterable[Node]) -> dict[int, list[Node]]:
    found: dict[int, list[Node]] = {}
    for node in nodes:
        for tensor in node.reads:
            found.setdefault(id(tensor), []).append(node)
    return found


def _check_layout(tensor: Tensor) -> None:
    if len(tensor.dim) != len(tensor.stride):
        raise GraphError(
            f"{tensor} has dim {list(tensor.dim)} and stride {list(tensor.stride)}; they need one "
            f"number for each mode"
        )
    reach = sum((n - 1) * s for n, s in zip(tensor.dim, tensor.stride, strict=True))
    if max(math.prod(tensor.dim), reach) >= _MOST_ELEMENTS:
        raise GraphError(
            f"{tensor} has dim {list(tensor.dim)} and stride {list(tensor.stride)}; expected less "
            f"than 2**58 elements, gaps included"
        )
    try:
        element_type(tensor.data_type)
    except ArgumentError as error:
        raise GraphError(f"{tensor}: {error}") from error


def _type_of_inputs(node: Node) -> data_type:
    """Of the first input that is a floating tensor; else of the first tensor."""
    tensors = [t for t in node.reads if not t.is_pass_by_value] or list(node.reads)
    floating = [t.data_type for t in tensors if t.data_type in _FLOATING]
    kinds = floating or [t.data_type for t in tensors]
    return kinds[0] if kinds else data_type.NOT_SET


def _give_uids(tensors: Iterable[Tensor]) -> None:
    listed = list(tensors)
    taken = {tensor.uid for tensor in listed if tensor.uid is not None}
    number = 0
    for tensor in listed:
        if tensor.uid is None:
            while number in taken:
                number += 1
            tensor.uid = number
            taken.add(number)


def _check_names(tensors: Iterable[Tensor]) -> None:
    seen: dict[str, Tensor] = {}
    for tensor in tensors:
        if not tensor.name or tensor.is_constant:
            continue
        other = seen.setdefault(tensor.name, tensor)
        if other is not tensor:
            raise GraphError(
                f"two tensors are called {tensor.name!r}; set_name() gives one of them another"
            )

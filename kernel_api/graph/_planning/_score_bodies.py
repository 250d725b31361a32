"""Functions of scores: pointwise nodes between the product of Q and K and the softmax."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

from kernel_api.graph._enums import data_type
from kernel_api.graph._node import Body, Node
from kernel_api.graph._operations.pointwise import POINTWISE
from kernel_api.graph._planning._patterns import KEPT_AS, Flow, Miss
from kernel_api.graph._tensor import Tensor

_WHOLE = (data_type.INT32, data_type.INT64)

#: Operations that give whole numbers of whole numbers.
_EXACT = ("gen_index", "add", "bias", "sub", "neg", "mul", "scale", "max", "min", "identity")

#: Largest magnitude of constants. Exponents of 2 are score · log₂ e less what the largest score of
#: the row has, rounded. Where no key of a query is seen, and −1e9 is what hides them, that is off
#: by up to 64 for all of its keys, and powers leave the range of float16.
_LARGEST = 1e5


class Function(NamedTuple):
    """What the nodes between a product and a tensor compute.

    Attributes:
        product: Makes the scores that it is a function of.
        body: Copies of the nodes.
        operands: What they read beside scores.
        inner: Nodes that depend on what the product holds.
        is_indexed: Whether it depends on indices.
    """

    product: Node
    body: Body
    operands: tuple[Tensor, ...]
    inner: tuple[Node, ...]
    is_indexed: bool


def function_of_scores(flow: Flow, result: Tensor) -> Function:
    """Raises Miss where a tensor is no pointwise function of one product."""
    nodes, product = _between(flow, result)
    (scores,) = product.writes
    if scores.dim != result.dim or len(scores.dim) != 4:
        raise Miss(f"{result} has dim {list(result.dim)}, and {scores} {list(scores.dim)}")
    if scores.data_type not in KEPT_AS:
        raise Miss(f"{scores} is kept as {scores.data_type.name}")
    depending = {scores}
    inner = [product]
    for node in nodes:
        if node.op != "gen_index" and any(tensor in depending for tensor in node.reads):
            depending.update(node.writes)
            inner.append(node)
    if result not in depending:
        raise Miss(f"{result} does not depend on a product")
    for node in nodes:
        _check(node, depending, scores.dim)
    made = _Copies(nodes, scores, _copy(scores, None))
    body = Body(tuple(made.nodes), made.tensors[scores], made.tensors[result])
    is_indexed = any(node.op == "gen_index" for node in nodes)
    return Function(product, body, tuple(made.operands), tuple(inner), is_indexed)


def of_other_scores(body: Body, scores: Tensor) -> Body:
    """A function of the scores in another tensor, in nodes of its own."""
    made = _Copies(body.nodes, body.argument, scores)
    return Body(tuple(made.nodes), scores, made.tensors[body.result])


def _between(flow: Flow, result: Tensor) -> tuple[list[Node], Node]:
    """The pointwise nodes that a tensor is computed by, in order, and the product before them."""
    found: set[Node] = set()
    products: list[Node] = []
    pending = [result]
    while pending:
        node = flow.writer.get(pending.pop())
        if node is None or node in found or node in products:
            continue
        if node.op in POINTWISE:
            found.add(node)
            pending += node.reads
        elif node.op == "matmul":
            products.append(node)
    if len(products) != 1:
        raise Miss(f"{result} depends on {len(products)} products; expected one, of Q and K")
    return [node for node in flow.nodes if node in found], products[0]


def _check(node: Node, depending: set[Tensor], dim: tuple[int, ...]) -> None:
    """Raise Miss for what kernels compute otherwise than the node, or not at all."""
    (result,) = node.writes
    if node.compute is data_type.DOUBLE:
        raise Miss(f"{node} computes in DOUBLE")
    if node.op == "gen_index":
        given = node.input("input").dim
        mode = node["axis"] % max(len(given), 1) - len(given)
        if not given or given[mode] != dim[mode]:
            raise Miss(f"{node} is the index of another mode than those of scores")
    elif node.op != "mod" and POINTWISE[node.op].epilogue is None:
        raise Miss(f"{node} is no function that kernels have for scores")
    for tensor in node.reads:
        value = tensor.value
        if value is not None and math.isfinite(value) and abs(value) > _LARGEST:
            raise Miss(f"{node} has the constant {value}; expected −∞, or {_LARGEST:.0e} at most")
    kind = result.data_type
    compares = POINTWISE[node.op].element is data_type.BOOLEAN
    whole = node.op in _EXACT and all(
        tensor.data_type in _WHOLE for tensor in node.reads if node.op != "gen_index"
    )
    fits = (
        kind is data_type.FLOAT
        or (kind in KEPT_AS and result in depending)
        or (kind is data_type.BOOLEAN and compares)
        or (kind in _WHOLE and whole)
    )
    if not fits:
        # Within a kernel nothing is rounded on the way.
        raise Miss(f"{result} is kept as {kind.name}, which {node} does not give exactly")


class _Copies:
    """Nodes of their own, that the graph's tensors need not be changed for.

    Args:
        scores, instead: What they are a function of, and what the copies are.

    Attributes:
        operands: What is read, and written by none of the nodes.
    """

    def __init__(self, nodes: Iterable[Node], scores: Tensor, instead: Tensor) -> None:
        self.tensors = {scores: instead}
        self.operands: list[Tensor] = []
        self.nodes = [self._node(node) for node in nodes]

    def _node(self, node: Node) -> Node:
        inputs: dict[str, Tensor] = {}
        for name in node.inputs:
            tensor = node.input(name)
            inputs[name] = self.tensors.get(tensor, tensor)
            is_read = node.op != "gen_index" and tensor not in self.tensors
            if is_read and not tensor.is_constant and tensor not in self.operands:
                self.operands.append(tensor)
        made = Node(node.op, node.name, inputs, node.attributes, node.compute)
        for name, tensor in node.outputs.items():
            made.outputs[name] = self.tensors[tensor] = _copy(tensor, made)
        return made


def _copy(tensor: Tensor, producer: Node | None) -> Tensor:
    """In float32 where it may be rounded to 16 bits, as kernels have scores."""
    kind = data_type.FLOAT if tensor.data_type in KEPT_AS else tensor.data_type
    return Tensor(
        None, name=tensor.name, dim=tensor.dim, stride=tensor.stride, element=kind,
        is_virtual=True, producer=producer,
    )  # fmt: skip

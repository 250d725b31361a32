"""Graphs in the terms of the kernels: nodes that none computes as they are, in several."""

from __future__ import annotations

from kernel_api.graph._enums import data_type, reduction_mode
from kernel_api.graph._node import Node
from kernel_api.graph._operations._attention_arguments import STATISTICS
from kernel_api.graph._planning.attention import with_kernel_scales
from kernel_api.graph._planning.composite import Rewritten, composite_attention
from kernel_api.graph._planning.grouped import with_ends
from kernel_api.graph._planning.ragged import unpacked
from kernel_api.graph._planning.refusal import Refusal
from kernel_api.graph._planning.steps import Prober
from kernel_api.graph._tensor import Tensor, constant, packed_strides

_NORMS = ("layernorm", "rmsnorm", "layernorm_backward", "rmsnorm_backward")


def rewritten(nodes: list[Node], prober: Prober) -> Rewritten:
    """The same computation in nodes that kernels take; the given ones stay as they are.

    Args:
        prober: Finds the kernels on the device that is planned for.
    """
    composite = composite_attention(nodes, prober)
    even = [one for node in composite.nodes for one in unpacked(node)]
    read = {tensor for node in even for tensor in node.reads}
    found: list[Node] = []
    for node in even:
        if node.op == "sdpa":
            found += _with_float_statistics(node)
        elif node.op == "sdpa_fp8":
            changed = with_kernel_scales(node, lambda t: not t.is_virtual or t in read, prober)
            if isinstance(changed, str):
                composite.refusals.append(Refusal(node, "has no kernel", changed))
            found += [node] if isinstance(changed, str) else changed
        elif node.op in _NORMS and node["zero_centered_gamma"]:
            found += _with_gain(node)
        elif node.op == "reduction" and node["mode"] == reduction_mode.NORM2.name:
            found += _with_root(node)
        elif node.op == "moe_grouped_matmul":
            found += with_ends(node)
        else:
            found.append(node)
    return Rewritten(found, composite.refusals)


def _with_float_statistics(node: Node) -> list[Node]:
    """Attention whose statistics are FLOAT, and what converts them."""
    other = {
        name: one
        for name, one in node.outputs.items()
        if name in STATISTICS and one.data_type is not data_type.FLOAT
    }
    if not other:
        return [node]
    changed = node.copy()
    found = [changed]
    for name, one in other.items():
        exact = _virtual(f"{one}::float", one.dim, data_type.FLOAT)
        changed.outputs[name] = exact
        exact.producer = changed
        title = f"{node.name}::{name.lower()}"
        converted = Node("identity", title, {"input": exact}, {}, data_type.FLOAT)
        converted.outputs["OUT_0"] = one
        found.append(converted)
    return found


def _with_gain(node: Node) -> list[Node]:
    """A norm whose gain is computed before: 1 + scale."""
    scale = node.input("scale")
    gain = _virtual(f"{node.name}::gain", scale.dim, data_type.FLOAT)
    one = constant(f"{node.name}::one", 1.0)
    added = Node("add", f"{node.name}::gain", {"a": scale, "b": one}, {}, data_type.FLOAT)
    added.outputs["OUT_0"] = gain
    gain.producer = added
    changed = node.copy()
    changed.inputs["scale"] = gain
    changed.attributes["zero_centered_gamma"] = False
    return [added, changed]


def _with_root(node: Node) -> list[Node]:
    """The root of a sum of squares: roots are taken when all of a sum is there."""
    x, Y = node.input("input"), next(node.writes)
    element = data_type.DOUBLE if x.data_type is data_type.DOUBLE else data_type.FLOAT
    square, total = _virtual(f"{Y}::square", x.dim, element), _virtual(f"{Y}::sum", Y.dim, element)
    mode, two = reduction_mode.ADD.name, constant(f"{node.name}::two", 2.0)
    steps = [
        # Of integers as well, powers are floating numbers, as NORM2 is; products are not.
        Node("pow", f"{node.name}::square", {"input0": x, "input1": two}, {}, element),
        Node("reduction", f"{node.name}::sum", {"input": square}, {"mode": mode}, element),
        Node("sqrt", f"{node.name}::root", {"input": total}, {}, element),
    ]
    for step, result, tensor in zip(
        steps, ("OUT_0", "Y", "OUT_0"), (square, total, Y), strict=True
    ):
        step.outputs[result] = tensor
        if tensor is not Y:
            tensor.producer = step
    return steps


def _virtual(name: str, dim: tuple[int, ...], element: data_type) -> Tensor:
    return Tensor(
        None, name=name, dim=dim, stride=packed_strides(dim), element=element, is_virtual=True
    )

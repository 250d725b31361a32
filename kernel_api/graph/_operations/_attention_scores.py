"""Score modifications that kernels have no functions for, by torch and its autograd.

With s the scaled products and f(s) what a modification makes of them, attention with the bias
f(s) − s is that of f(s); the gradient of this bias is that of f(s), and goes on to q and k by
autograd.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from kernel_api.errors import EpilogueError, GraphNotSupportedError
from kernel_api.graph._enums import element_type
from kernel_api.graph._node import Node
from kernel_api.graph._operations._attention_arguments import is_kept, score_function
from kernel_api.graph._tensor import Tensor


class Scores(NamedTuple):
    """All scores at once, (B, H, S_q, S_kv), in float64.

    Attributes:
        q, k: With the heads of queries.
        plain: Scaled products, a leaf of autograd.
        modified: What they become.
    """

    q: Any
    k: Any
    scale: float
    plain: Any
    modified: Any

    def gradients(self, dS: Any, node: Node) -> dict[str, Any]:
        """Of q and k, and of the bias that the user gave, from those of modified scores."""
        import torch

        (slope,) = torch.autograd.grad(self.modified, self.plain, dS)
        slope = slope.where(dS != 0, 0.0) * self.scale
        groups = self.q.shape[1] // node.input("k").dim[1]
        dK = (slope.transpose(2, 3) @ self.q).unflatten(1, (-1, groups)).sum(2)
        found = {"dQ": slope @ self.k, "dK": dK}
        if "dBias" in node.outputs:
            dim = node.outputs["dBias"].dim
            summed = [mode for mode in range(4) if dim[mode] == 1]
            found["dBias"] = dS.sum(summed, keepdim=True) if summed else dS
        return found


def without_body(node: Node, tensors: dict[str, Any]) -> tuple[Node, dict[str, Any], Scores | None]:
    """The node and its operands as the reference kernel takes them.

    As they are where kernels have functions for the score modification; else in float64, with a
    bias in its place, and the scores. Changes the node.
    """
    if node.body is None:
        return node, tensors, None
    try:
        score_function(node, tensors)
    except (EpilogueError, GraphNotSupportedError):
        pass
    else:
        return node, tensors, None
    import torch

    found = {name: _wide(one) for name, one in tensors.items()}
    found.pop("score_operands", None)
    groups = node.input("q").dim[1] // node.input("k").dim[1]
    q = _within(found["q"], found.get("seq_len_q"))
    k = _within(found["k"], found.get("seq_len_kv")).repeat_interleave(groups, 1)
    scale = float(found.get("attn_scale", node["scale"]))
    plain = (scale * (q @ k.transpose(2, 3))).detach().requires_grad_()
    with torch.enable_grad():
        modified = _modified(node, tensors, plain)
    bias = (modified - plain).detach()
    found["bias"] = bias + found["bias"] if "bias" in found else bias
    node.body = None
    node.attributes["gradient_of_scores"] = True
    return node, found, Scores(q, k, scale, plain, modified)


def _within(rows: Any, lengths: Any) -> Any:
    """Zeros behind the lengths of sequences, where there may be anything."""
    import torch

    if lengths is None:
        return rows
    places = torch.arange(rows.shape[2], device=rows.device).view(1, 1, -1, 1)
    return rows.masked_fill(places >= lengths.view(-1, 1, 1, 1), 0.0)


def _wide(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(_wide, value))
    floating = hasattr(value, "is_floating_point") and value.is_floating_point()
    return value.double() if floating else value


def _modified(node: Node, tensors: Mapping[str, Any], score: Any) -> Any:
    assert node.body is not None
    values: dict[int, Any] = {id(node.body.argument): score}
    operands = node.inputs.get("score_operands", ())
    assert isinstance(operands, tuple)
    for place, one in enumerate(operands):
        values[id(one)] = _wide(tensors["score_operands"][place])

    def value(tensor: Any) -> Any:
        assert isinstance(tensor, Tensor)
        return tensor.value if tensor.is_constant else values[id(tensor)]

    for inner in node.body.nodes:
        given = {name: value(tensor) for name, tensor in inner.inputs.items()}
        found = inner.operation.evaluate(inner, given)
        values.update((id(one), _held(found[name], one)) for name, one in inner.outputs.items())
    return values[id(node.body.result)].expand(score.shape)


def _held(value: Any, tensor: Tensor) -> Any:
    """A value as a tensor of its type holds it; its gradient is as if it were not rounded."""
    from kernel_api.providers.reference.epilogue import rounded

    if is_kept(tensor) or not value.is_floating_point():
        return value
    exact = rounded(value.detach(), element_type(tensor.data_type)).to(value.dtype)
    return value + (exact - value.detach())

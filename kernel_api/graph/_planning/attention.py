"""Attention as arguments of kernels."""

from __future__ import annotations

from typing import Any

from kernel_api.arguments.base import Arguments
from kernel_api.graph._enums import data_type
from kernel_api.graph._node import Node
from kernel_api.graph._operations._attention_arguments import attention_arguments
from kernel_api.graph._planning.builds import Anchored, Needed, PlainBuilds
from kernel_api.graph._planning.steps import Take
from kernel_api.graph._tensor import Tensor

#: What kernels write in any case.
_ALWAYS = ("O", "dQ", "dK", "dV")


def attention(node: Node, needed: Needed) -> Anchored:
    """sdpa and sdpa_backward."""
    beside = [n for n in ("Max", "Sum_exp", "Rng_dump") if n in node.outputs]
    if any(needed(node.outputs[name]) for name in beside):
        return f"kernels do not write {' and '.join(beside)}"
    if "Stats" in node.outputs and node.outputs["Stats"].data_type is not data_type.FLOAT:
        return f"kernels write {node.outputs['Stats']} as FLOAT"
    written = {name: t for name, t in node.outputs.items() if name in _ALWAYS or needed(t)}

    def make(take: Take) -> Arguments:
        tensors = {name: _taken(take, given) for name, given in node.inputs.items()}
        outputs = {name: take(tensor) for name, tensor in written.items() if name not in beside}
        return attention_arguments(node, tensors, outputs)

    return [PlainBuilds(make, tuple(t for t in written.values() if not needed(t)))]


def _taken(take: Take, given: Tensor | tuple[Tensor, ...]) -> Any:
    return tuple(map(take, given)) if isinstance(given, tuple) else take(given)

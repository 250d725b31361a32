"""Ragged attention in the terms of kernels, whose sequences lie at equal distances."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kernel_api.graph._node import Node, Operation, settle
from kernel_api.graph._operations._ragged import (
    RAGGED,
    even,
    even_strides,
    offset_of,
    ragged,
    ragged_names,
    tensor_of,
)
from kernel_api.graph._tensor import Tensor


class _Moved(Operation):
    """The same sequences elsewhere, in the dim of the input."""

    result = ("Y",)
    inputs = ("input", "offset", "lengths")
    keeps_types = True

    def infer(self, node: Node) -> None:
        settle(node, node.outputs["Y"], node.input("input").dim)


class Unpack(_Moved):
    """The sequences of a ragged tensor at equal distances, zeros behind each."""

    name = "unpack"

    def evaluate(self, node: Node, given: Mapping[str, Any]) -> dict[str, Any]:
        return {"Y": even(node.input("input"), *(given[name] for name in self.inputs))}


class Pack(_Moved):
    """Sequences at equal distances where the offsets of a ragged tensor say; zeros between."""

    name = "pack"

    def evaluate(self, node: Node, given: Mapping[str, Any]) -> dict[str, Any]:
        return {"Y": ragged(node.outputs["Y"], *(given[name] for name in self.inputs))}


def unpacked(node: Node) -> list[Node]:
    """Attention of sequences at equal distances, behind what unpacks them and before what packs
    its results; the node itself where nothing is ragged.

    Kernels take packed sequences as well, but without gaps between them, and only the device knows
    whether offsets leave any.
    """
    names = ragged_names(node)
    if not names:
        return [node]
    evens = {name: _even(node, name) for name in names}
    changed = node.copy()
    before, after = [], []
    for name, one in evens.items():
        if name in node.inputs:
            before.append(_moved("unpack", node, name, node.input(name), one))
            changed.inputs[name], one.producer = one, before[-1]
        else:
            after.append(_moved("pack", node, name, one, node.outputs[name]))
            changed.outputs[name], one.producer = one, changed
    return [*before, changed, *after]


def _even(node: Node, name: str) -> Tensor:
    """A tensor for the same sequences at equal distances."""
    like = tensor_of(node, name)
    return Tensor(
        None, name=f"{node.name}::{name}::even", dim=like.dim, stride=even_strides(like.dim),
        element=like.data_type, is_virtual=True,
    )  # fmt: skip


def _moved(op: str, node: Node, name: str, source: Tensor, result: Tensor) -> Node:
    inputs = {"input": source, "offset": offset_of(node, name), "lengths": node.input(RAGGED[name])}
    made = Node(op, f"{node.name}::{name}", inputs, {}, node.compute)
    made.outputs["Y"] = result
    made.operation.infer(made)
    return made

"""Grouped matrix products as arguments of kernels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from kernel_api.arguments import EpilogueArguments, GroupedGemmArguments
from kernel_api.arguments.base import Arguments
from kernel_api.graph._enums import data_type
from kernel_api.graph._kinds import Kind, whole
from kernel_api.graph._node import Node, Operation, settle
from kernel_api.graph._planning.builds import Anchored, FusedBuilds, Needed, PlainBuilds
from kernel_api.graph._planning.frame import Frame, Layout
from kernel_api.graph._planning.steps import DeclineError, Take
from kernel_api.graph._tensor import Tensor


class GroupEnds(Operation):
    """Where groups end, of where they begin: kernels count ends."""

    name = "group_ends"
    result = ("ends",)
    inputs = ("starts",)
    attributes: ClassVar[dict[str, Kind]] = {"rows": whole(0)}

    def infer(self, node: Node) -> None:
        count = _count(node.input("starts").dim)
        settle(node, node.outputs["ends"], (count,), element=data_type.INT32)

    def evaluate(self, node: Node, given: Mapping[str, Any]) -> dict[str, Any]:
        from kernel_api.offsets import check_starts, offsets_from_starts

        starts = given["starts"].flatten()
        if starts.device.type == "cpu":  # nothing is waited for
            check_starts(starts)
        return {"ends": offsets_from_starts(starts, node["rows"])}


class GroupRows(Operation):
    """Rows of the tokens, of places in the list of pairs of tokens and experts."""

    name = "group_rows"
    result = ("rows",)
    inputs = ("index",)
    attributes: ClassVar[dict[str, Kind]] = {"top_k": whole(1)}

    def infer(self, node: Node) -> None:
        count = _count(node.input("index").dim)
        settle(node, node.outputs["rows"], (count,), element=data_type.INT32)

    def evaluate(self, node: Node, given: Mapping[str, Any]) -> dict[str, Any]:
        return {"rows": given["index"].flatten() // node["top_k"]}


def with_ends(node: Node) -> list[Node]:
    """The product behind what makes the indices that kernels take."""
    found: list[Node] = []
    changed = node.copy()

    def derived(op: str, argument: str, result: str, source: str, **attributes: Any) -> None:
        given = node.input(source)
        made = Node(op, f"{node.name}::{op}", {argument: given}, attributes, data_type.INT32)
        tensor = Tensor(None, name=f"{made.name}::{result}", is_virtual=True, producer=made)
        made.outputs[result] = tensor
        made.operation.infer(made)
        found.append(made)
        changed.inputs[source] = tensor

    rows = node.outputs["OUT"].dim[-2]
    if node["mode"] == "SCATTER":
        rows = node.input("token").dim[-2]
    derived("group_ends", "starts", "ends", "first_token_offset", rows=rows)
    index = node.optional("token_index")
    if index is not None and (node["top_k"] != 1 or index.data_type is not data_type.INT32):
        derived("group_rows", "index", "rows", "token_index", top_k=node["top_k"])
    return [*found, changed]


def grouped(node: Node, needed: Needed) -> Anchored:
    """moe_grouped_matmul, with what follows as its epilogue unless its rows are scattered."""
    out = node.outputs["OUT"]
    frame = Frame(out.dim, (tuple(range(len(out.dim) - 1)), (len(out.dim) - 1,)), True)

    def make(take: Take, stored: Any, epilogue: EpilogueArguments | None) -> Arguments:
        token, weight = node.input("token"), node.input("weight")
        index = node.optional("token_index")
        rows = None if index is None else take(index, _vector(index))
        ends = node.input("first_token_offset")
        name = "row_index" if node["mode"] == "GATHER" else "out_row_index"
        return GroupedGemmArguments(
            take(token, (token.dim[-2:], token.stride[-2:])),
            take(weight),
            stored,
            take(ends, _vector(ends)),
            epilogue=epilogue,
            **({} if rows is None else {name: rows}),
        )

    if node["mode"] != "SCATTER":
        return [FusedBuilds(out, frame, make)]
    layout = frame.of(out)
    if layout is None:
        return f"{out} has no rows of one stride"
    return [PlainBuilds(lambda take: make(take, take(out, layout), None))]


def _vector(tensor: Tensor) -> Layout:
    long = [(n, s) for n, s in zip(tensor.dim, tensor.stride, strict=True) if n != 1]
    if len(long) > 1:
        raise DeclineError(f"{tensor} has dim {list(tensor.dim)}; expected one mode that is not 1")
    extent, stride = long[0] if long else (1, 1)
    return (extent,), (stride,)


def _count(dim: tuple[int, ...]) -> int:
    found = 1
    for extent in dim:
        found *= extent
    return found

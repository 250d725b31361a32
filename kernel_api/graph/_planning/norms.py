"""Norms of rows as arguments of kernels."""

from __future__ import annotations

from kernel_api.arguments import (
    LayerNormArguments,
    LayerNormBackwardArguments,
    RmsNormArguments,
    RmsNormBackwardArguments,
)
from kernel_api.arguments.base import Arguments
from kernel_api.graph._node import Node
from kernel_api.graph._operations.norm import normalised_modes
from kernel_api.graph._planning.builds import Anchored, Needed, PlainBuilds
from kernel_api.graph._planning.frame import Frame, Layout
from kernel_api.graph._planning.steps import DeclineError, Take
from kernel_api.graph._tensor import Tensor


class _Rows:
    """The tensors of a norm as rows, columns, one per row and one per column."""

    def __init__(self, node: Node) -> None:
        dim, columns = node.input("input").dim, normalised_modes(node)
        rows = tuple(mode for mode in range(len(dim)) if mode not in columns)
        self.frame = Frame(dim, (rows, columns))

    def matrix(self, tensor: Tensor) -> Layout:
        layout = self.frame.of(tensor)
        if layout is None or layout[0] != self.frame.extents:
            raise DeclineError(f"{tensor} has no rows of one stride that hold what is normalised")
        return layout

    def per_column(self, tensor: Tensor) -> Layout:
        return self._one(tensor, 1)

    def per_row(self, tensor: Tensor) -> Layout:
        return self._one(tensor, 0)

    def _one(self, tensor: Tensor, which: int) -> Layout:
        layout = self.frame.of(tensor)
        expected = self.frame.extents[which]
        if layout is None or layout[0][which] != expected or layout[0][1 - which] != 1:
            raise DeclineError(f"{tensor} has not one number for each {('row', 'column')[which]}")
        return (expected,), (layout[1][which],)


def norm_forward(node: Node, needed: Needed) -> Anchored:
    """rmsnorm and layernorm."""
    if node["zero_centered_gamma"]:
        return "the gain is 1 + scale, which has to be computed before"
    outputs, Y = node.outputs, node.outputs["Y"]
    wanted = {name: t for name, t in outputs.items() if name != "Y" and needed(t)}

    def make(take: Take) -> Arguments:
        rows, x = _Rows(node), node.input("input")
        further = {
            keyword: take(node.input(name), rows.per_column(node.input(name)))
            for keyword, name in (("weight", "scale"), ("bias", "bias"))
            if name in node.inputs
        }
        for keyword, name in (("rstd", "inv_var"), ("mean", "mean")):
            if name in wanted:
                further[keyword] = take(wanted[name], rows.per_row(wanted[name]))
        kind = RmsNormArguments if node.op == "rmsnorm" else LayerNormArguments
        return kind(
            take(x, rows.matrix(x)),
            take(Y, rows.matrix(Y)),
            eps=float(take(node.input("epsilon"), name="eps")),
            **further,
        )

    return [PlainBuilds(make, () if needed(Y) else (Y,))]


def norm_backward(node: Node, needed: Needed) -> Anchored:
    """rmsnorm_backward and layernorm_backward, of saved statistics."""
    centred = node.op == "layernorm_backward"
    if node["zero_centered_gamma"]:
        return "the gain is 1 + scale, which has to be computed before"
    missing = [n for n in ("inv_variance", *(["mean"] if centred else [])) if n not in node.inputs]
    if missing:
        return f"{missing[0]} is not given, and kernels do not compute it again"
    if not centred and "dbias" in node.outputs and needed(node.outputs["dbias"]):
        return "the kernel of rmsnorm_backward writes no dbias"
    dx = node.outputs["dx"]

    def make(take: Take) -> Arguments:
        rows = _Rows(node)
        x, dy, scale = (node.input(name) for name in ("input", "grad", "scale"))
        further = {
            keyword: take(node.outputs[name], rows.per_column(node.outputs[name]))
            for keyword, name in (("dweight", "dscale"), ("dbias", "dbias"))
            if name in node.outputs and needed(node.outputs[name])
        }
        for keyword, name in (("mean", "mean"), ("rstd", "inv_variance")):
            if keyword == "rstd" or centred:
                further[keyword] = take(node.input(name), rows.per_row(node.input(name)))
        kind = LayerNormBackwardArguments if centred else RmsNormBackwardArguments
        return kind(
            take(dy, rows.matrix(dy)),
            take(x, rows.matrix(x)),
            take(dx, rows.matrix(dx)),
            weight=take(scale, rows.per_column(scale)),
            **further,
        )

    return [PlainBuilds(make, () if needed(dx) else (dx,))]

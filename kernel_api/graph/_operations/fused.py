"""Operations that cuDNN's frontend does not have, and kernels here do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from kernel_api.errors import GraphError
from kernel_api.graph._builder import Builder
from kernel_api.graph._kinds import WHOLE, Kind, either, one_of, optional, whole
from kernel_api.graph._node import Node, Operation, broadcast_dim, settle, strides_of
from kernel_api.graph._options import as_whole, one_whole, optional_whole
from kernel_api.graph._tensor import memory_order, packed_strides

_ORDERS, _STYLES = ("gate_up", "up_gate"), ("half", "interleaved")


class FusedMethods(Builder):
    """Pairs of columns, and rotations of them."""

    def glu_pair(
        self,
        input: Any,
        granularity: int | str = "halves",
        order: str = "gate_up",
        compute_data_type: Any = None,
        name: str | None = None,
    ) -> Any:
        """(gate, up) out of the columns of the input, as :func:`kernel_api.epilogue.glu_pair`.

        Args:
            input: (..., M, 2 · N).
            granularity: ``"halves"``: the first half of the columns and the second; a number:
                blocks of so many columns alternate.
            order: ``"gate_up"``: the gate stands first of each pair; ``"up_gate"``: second.

        Returns:
            (gate, up), each (..., M, N).

        Raises:
            GraphError: there is no such order or granularity.
        """
        if order not in _ORDERS:
            raise GraphError(f"glu_pair has order {order!r}; expected one of {_ORDERS}")
        columns = as_whole(granularity)
        if granularity != "halves" and (columns is None or columns < 1):
            raise GraphError(
                f"glu_pair has granularity {granularity!r}; expected a number of columns, or "
                f"'halves'"
            )
        return self._add(
            "glu_pair", {"input": input}, name=name, compute=compute_data_type,
            granularity=columns or "halves", order=order,
        )  # fmt: skip

    def rope(
        self,
        input: Any,
        cos: Any,
        sin: Any,
        head_dim: int,
        start: int = 0,
        width: int | None = None,
        style: str = "half",
        heads: int | None = None,
        compute_data_type: Any = None,
        name: str | None = None,
    ) -> Any:
        """OUT_0: pairs of columns of heads rotated (rotary position embedding), as
        :func:`kernel_api.epilogue.rotate`: (a, b) → (a · cos − b · sin, b · cos + a · sin).

        Args:
            input: (..., M, N); heads of ``head_dim`` columns stand side by side.
            cos, sin: (..., M, width / 2): one angle for each row and pair.
            start: First column of a head that is rotated.
            width: How many are rotated; by default all from ``start`` on.
            style: ``"half"``: column i and i + width / 2 are a pair; ``"interleaved"``: 2i and
                2i + 1.
            heads: How many are rotated, from the first on; by default all.

        Raises:
            GraphError: the columns that are rotated are not in a head, there is no such style, or
                there are not so many heads.
        """
        head_dim = one_whole("rope", "head_dim", head_dim)
        start = one_whole("rope", "start", start)
        width = head_dim - start if width is None else one_whole("rope", "width", width)
        _check_columns("rope", head_dim, start, width)
        if style not in _STYLES:
            raise GraphError(f"rope has style {style!r}; expected one of {_STYLES}")
        heads = optional_whole("rope", "heads", heads)
        if heads is not None and heads < 1:
            raise GraphError(f"rope has heads {heads}; expected 1 or more, or None for all")
        return self._add(
            "rope", {"input": input, "cos": cos, "sin": sin}, name=name, compute=compute_data_type,
            head_dim=head_dim, start=start, width=width, style=style, heads=heads,
        )  # fmt: skip


def _check_columns(what: str, head_dim: int, start: int, width: int) -> None:
    if width < 2 or width % 2 or start < 0 or start + width > head_dim:
        raise GraphError(
            f"{what} rotates columns {start} to {start + width} of heads of {head_dim}; expected "
            f"an even width that fits"
        )


class GluPair(Operation):
    """Columns in two."""

    name = "glu_pair"
    result = ("gate", "up")
    inputs = ("input",)
    attributes: ClassVar[dict[str, Kind]] = {
        "granularity": either(one_of(("halves",)), whole(1)),
        "order": one_of(_ORDERS),
    }

    def infer(self, node: Node) -> None:
        x = node.input("input")
        columns = x.dim[-1] if x.dim else 0
        pair = 2 if node["granularity"] == "halves" else 2 * node["granularity"]
        if columns % pair or not x.dim:
            raise GraphError(
                f"{node} has an input of dim {list(x.dim)}; its columns must be a multiple of "
                f"{pair}, for granularity {node['granularity']!r}"
            )
        dim = (*x.dim[:-1], columns // 2)
        stride = packed_strides(dim, memory_order(x.dim, x.stride))
        for name in self.result:
            settle(node, node.outputs.get(name), dim, stride)

    def evaluate(self, node: Node, given: Mapping[str, Any]) -> dict[str, Any]:
        x = given["input"]
        width = x.shape[-1] // 2 if node["granularity"] == "halves" else node["granularity"]
        first, second = x.unflatten(-1, (-1, 2, width)).unbind(-2)
        pair = (first, second) if node["order"] == "gate_up" else (second, first)
        return {name: one.flatten(-2) for name, one in zip(("gate", "up"), pair, strict=True)}


class Rope(Operation):
    """Pairs of columns rotated."""

    name = "rope"
    result = ("OUT_0",)
    inputs = ("input", "cos", "sin")
    attributes: ClassVar[dict[str, Kind]] = {
        "head_dim": WHOLE,
        "start": WHOLE,
        "width": WHOLE,
        "style": one_of(_STYLES),
        "heads": optional(whole(1)),
    }

    def check(self, node: Node) -> None:
        _check_columns(str(node), node["head_dim"], node["start"], node["width"])

    def infer(self, node: Node) -> None:
        x = node.input("input")
        if not x.dim or x.dim[-1] % node["head_dim"]:
            raise GraphError(
                f"{node} has an input of dim {list(x.dim)}; its columns must be whole heads of "
                f"{node['head_dim']}"
            )
        count = x.dim[-1] // node["head_dim"]
        if node["heads"] is not None and node["heads"] > count:
            raise GraphError(f"{node} rotates {node['heads']} heads; its input has {count}")
        for name in ("cos", "sin"):
            dim = node.input(name).dim
            rows = (*x.dim[:-1], node["width"] // 2)
            if not dim or dim[-1] != rows[-1] or broadcast_dim(node, rows, dim) != rows:
                raise GraphError(
                    f"{node} has {name} of dim {list(dim)}; expected (..., M, width / 2) = "
                    f"{list(rows)}"
                )
        settle(node, node.outputs.get("OUT_0"), x.dim, strides_of(x))

    def evaluate(self, node: Node, given: Mapping[str, Any]) -> dict[str, Any]:
        import torch

        start, width, x = node["start"], node["width"], given["input"]
        columns = x.shape[-1] if node["heads"] is None else node["heads"] * node["head_dim"]
        heads = x[..., :columns].unflatten(-1, (-1, node["head_dim"]))
        cos, sin = (given[name].unsqueeze(-2) for name in ("cos", "sin"))
        behind = node["head_dim"] - start - width
        before, part, rest = heads.split([start, width, behind], dim=-1)
        beside = node["style"] == "interleaved"
        pairs = part.unflatten(-1, (width // 2, 2) if beside else (2, width // 2))
        a, b = pairs.unbind(-1 if beside else -2)
        turned = torch.stack(
            [a * cos - b * sin, b * cos + a * sin], dim=-1 if beside else -2
        ).flatten(-2)
        heads = torch.cat([before, turned, rest], dim=-1).flatten(-2)
        return {"OUT_0": torch.cat([heads, x[..., columns:]], dim=-1)}

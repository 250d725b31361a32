"""Reductions: many elements become one."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar

from kernel_api.errors import GraphError
from kernel_api.graph._builder import Builder
from kernel_api.graph._enums import data_type, member_of, reduction_mode
from kernel_api.graph._kinds import WHOLE, Kind, list_of, one_of, optional, whole
from kernel_api.graph._node import Node, Operation, settle
from kernel_api.graph._options import whole_or_wholes


class ReductionMethods(Builder):
    """Reductions."""

    def reduction(
        self,
        input: Any,
        mode: Any,
        compute_data_type: Any = None,
        name: str | None = None,
        *,
        axis: int | Iterable[int] | None = None,
    ) -> Any:
        """Reduces modes of the input to extent 1.

        Args:
            input: Of any dim.
            mode: A ``reduction_mode``: the sum, the product, the smallest, the largest, the largest
                magnitude, the mean, the sum of magnitudes (NORM1), the root of the sum of squares
                (NORM2), or the product of what is not 0.
            axis: The modes that are reduced. Without it ``set_dim`` of the result says so: 1 where
                it is reduced.

        Returns:
            Y, of as many modes as the input.
        """
        kind = member_of(reduction_mode, mode).name
        given = None if axis is None else whole_or_wholes("reduction", "axis", axis)
        axes = [given] if isinstance(given, int) else given
        return self._add(
            "reduction", {"input": input}, name=name, compute=compute_data_type, mode=kind,
            axes=axes,
        )  # fmt: skip

    def genstats(self, input: Any, compute_data_type: Any = None, name: str | None = None) -> Any:
        """Sums per channel, for batch normalisation.

        Args:
            input: (N, C, ...).

        Returns:
            (SUM, SQ_SUM), FLOAT (1, C, 1, ...): of the elements, and of their squares.
        """
        return self._add("genstats", {"input": input}, name=name, compute=compute_data_type)


class Reduction(Operation):
    """Modes of extent 1 in the result are reduced."""

    name = "reduction"
    result = ("Y",)
    inputs = ("input",)
    attributes: ClassVar[dict[str, Kind]] = {
        "mode": one_of(reduction_mode.__members__),
        "axes": optional(list_of(WHOLE)),
        # Modes of one element, where the axes were told by a dim of the result.
        "unknown": optional(list_of(whole(0))),
    }

    def infer(self, node: Node) -> None:
        dim, Y = node.input("input").dim, node.outputs["Y"]
        if node["axes"] is None and not Y.dim:
            raise GraphError(
                f"{Y}, which {node} writes, has no dim; set_dim says which of {list(dim)} are "
                f"reduced, to 1 (or give axis= to reduction)"
            )
        if node["axes"] is not None:
            rank = len(dim)
            wrong = [axis for axis in node["axes"] if not -rank <= axis < rank]
            if wrong:
                raise GraphError(f"{node} has axis {wrong[0]}; its input has dim {list(dim)}")
            reduced = {axis % rank for axis in node["axes"]}
            found = tuple(1 if mode in reduced else one for mode, one in enumerate(dim))
            _check_unknown(node, dim)
        else:
            found = Y.dim
            fits = len(found) == len(dim) and all(
                own in (1, extent) for own, extent in zip(found, dim, strict=True)
            )
            if not fits:
                raise GraphError(
                    f"{Y}, which {node} writes, has dim {list(found)}; expected 1, or what the "
                    f"input has, of each of {list(dim)}"
                )
        settle(node, Y, found)

    def free_dims(self, node: Node) -> bool:
        if node["axes"] is None:
            dim = node.input("input").dim
            node.attributes["axes"] = list(reduced_modes(dim, node.outputs["Y"].dim))
            # Of what has one element, set_dim does not tell whether it is reduced.
            node.attributes["unknown"] = [mode for mode, one in enumerate(dim) if one == 1]
        return True

    def evaluate(self, node: Node, given: Mapping[str, Any]) -> dict[str, Any]:
        import torch

        x, dim = given["input"], node.outputs["Y"].dim
        modes = reduced_modes(tuple(x.shape), dim)
        if not x.is_floating_point():
            # The magnitude of the smallest integer is larger than the largest one.
            x = x.to(node.arithmetic if node["mode"] in ("AVG", "NORM2") else torch.int64)
        return {"Y": _REDUCTIONS[node["mode"]](x, modes) if modes else _of_one(node["mode"], x)}


def _check_unknown(node: Node, dim: tuple[int, ...]) -> None:
    """Raise GraphError where a mode has more elements now, and may be reduced or not."""
    wrong = [mode for mode in node["unknown"] or () if dim[mode] != 1]
    if wrong:
        raise GraphError(
            f"the input of {node} has dim {list(dim)}, and had extent 1 in mode {wrong[0]} where "
            f"set_dim said what is reduced, so it did not say it of this mode; give axis= to "
            f"reduction, or the dim of {node.outputs['Y']} in override_shapes"
        )


def reduced_modes(before: tuple[int, ...], after: tuple[int, ...]) -> tuple[int, ...]:
    """Modes that a reduction from one dim to the other goes over."""
    return tuple(
        mode
        for mode, (one, other) in enumerate(zip(before, after, strict=True))
        if other == 1 and one != 1
    )


def _product(x: Any, modes: tuple[int, ...]) -> Any:
    for mode in modes:
        x = x.prod(mode, keepdim=True)
    return x


def _without_zeros(x: Any) -> Any:
    return x.where(x != 0, x.new_ones(()))


def _of_one(mode: str, x: Any) -> Any:
    """A reduction over nothing."""
    if mode == "MUL_NO_ZEROS":
        return _without_zeros(x)
    return x.abs() if mode in ("AMAX", "NORM1", "NORM2") else x


def _extreme(x: Any, name: str, of_nothing: float, modes: tuple[int, ...]) -> Any:
    """A maximum or minimum that is also defined over no elements."""
    if x.numel():
        return getattr(x, name)(modes, keepdim=True)
    dim = [1 if mode in modes else extent for mode, extent in enumerate(x.shape)]
    return x.new_full(dim, of_nothing if x.is_floating_point() else 0)


_REDUCTIONS: dict[str, Callable[[Any, tuple[int, ...]], Any]] = {
    "ADD": lambda x, modes: x.sum(modes, keepdim=True),
    "MUL": _product,
    "MIN": lambda x, modes: _extreme(x, "amin", math.inf, modes),
    "MAX": lambda x, modes: _extreme(x, "amax", -math.inf, modes),
    "AMAX": lambda x, modes: _extreme(x.abs(), "amax", 0.0, modes),
    "AVG": lambda x, modes: x.mean(modes, keepdim=True),
    "NORM1": lambda x, modes: x.abs().sum(modes, keepdim=True),
    "NORM2": lambda x, modes: x.square().sum(modes, keepdim=True).sqrt(),
    "MUL_NO_ZEROS": lambda x, modes: _product(_without_zeros(x), modes),
}


class Genstats(Operation):
    """Sums and sums of squares of channels."""

    name = "genstats"
    result = ("SUM", "SQ_SUM")
    inputs = ("input",)

    def infer(self, node: Node) -> None:
        dim = node.input("input").dim
        if len(dim) < 2:
            raise GraphError(f"{node} has an input of dim {list(dim)}; expected (N, C, ...)")
        sums = (1, dim[1], *(1 for _ in dim[2:]))
        for name in self.result:
            settle(node, node.outputs.get(name), sums, element=data_type.FLOAT)

    def evaluate(self, node: Node, given: Mapping[str, Any]) -> dict[str, Any]:
        x = given["input"].to(node.arithmetic)
        modes = [mode for mode in range(x.dim()) if mode != 1]
        return {
            "SUM": x.sum(modes, keepdim=True),
            "SQ_SUM": x.square().sum(modes, keepdim=True),
        }

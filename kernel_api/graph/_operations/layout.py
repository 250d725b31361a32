"""Operations that change where elements are found, and no element."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, NamedTuple

from kernel_api.errors import GraphError
from kernel_api.graph._builder import Builder
from kernel_api.graph._enums import data_type, member_of, reshape_mode
from kernel_api.graph._kinds import WHOLE, Kind, list_of, one_of, optional, whole
from kernel_api.graph._node import Node, Operation, settle
from kernel_api.graph._options import listed, one_whole, optional_whole, refused, wholes
from kernel_api.graph._tensor import Tensor, memory_order, packed_strides

_Slice = slice


class LayoutMethods(Builder):
    """Views and copies."""

    def reshape(
        self,
        input: Any,
        reshape_mode: Any = "VIEW_ONLY",
        name: str | None = None,
        *,
        shape: Iterable[int] | None = None,
    ) -> Any:
        """The input with another dim.

        Args:
            reshape_mode: VIEW_ONLY: the result is the memory of the input, read by the dim and
                stride that are set of the result; without a stride, by those of a row-major
                reshape. LOGICAL: elements in row-major order, wherever they lie.
            shape: Dim of the result; else ``set_dim`` of the result gives it.

        Returns:
            Y.
        """
        mode = member_of(_ReshapeMode, reshape_mode).name
        given = None if shape is None else wholes("reshape", "shape", shape)
        return self._add("reshape", {"input": input}, name=name, mode=mode, shape=given)

    def transpose(
        self,
        input: Any,
        permutation: Iterable[int],
        compute_data_type: Any = None,
        name: str | None = None,
    ) -> Any:
        """Y, whose mode i is mode ``permutation[i]`` of the input."""
        order = wholes("transpose", "permutation", permutation)
        return self._add(
            "transpose", {"input": input}, name=name, compute=compute_data_type, permutation=order
        )

    def slice(
        self,
        input: Any,
        slices: Iterable[_Slice] | None = None,
        compute_data_type: Any = None,
        name: str | None = None,
        *,
        start: Iterable[int] | None = None,
        limit: Iterable[int] | None = None,
    ) -> Any:
        """A part of the input.

        Args:
            slices: One for each mode, with positive steps; modes behind the last are whole.
            start, limit: Instead of slices: where each mode begins and ends.

        Returns:
            Y.

        Raises:
            GraphError: neither or both are given, or a step is not positive.
        """
        if (slices is None) == (start is None or limit is None):
            raise GraphError("slice takes slices=[slice(...), ...], or start= and limit=")
        if slices is None:
            slices = _slices(start, limit)
        parts = listed("slice", "slices", slices, "a slice for each mode")
        if not all(isinstance(one, (_Slice, range)) for one in parts):
            raise refused("slice", "slices", parts, "a slice for each mode")
        kept = [
            [optional_whole("slice", key, getattr(one, key)) for key in ("start", "stop", "step")]
            for one in parts
        ]
        _check_steps("slice", kept)
        return self._add(
            "slice", {"input": input}, name=name, compute=compute_data_type, slices=kept
        )

    def concatenate(
        self,
        inputs: Iterable[Any],
        axis: int,
        in_place_index: int | None = None,
        name: str | None = None,
    ) -> Any:
        """Y: the inputs one behind the other along a mode.

        ``in_place_index`` is kept for compatibility; the result has memory of its own. Inputs of
        different types need the type of the result to be set.
        """
        given = tuple(listed("concatenate", "inputs", inputs, "tensors"))
        mode = one_whole("concatenate", "axis", axis)
        return self._add("concatenate", {"inputs": given}, name=name, axis=mode)


_ReshapeMode = reshape_mode


def _slices(start: Any, limit: Any) -> list[_Slice]:
    """Of the modes that begin and end there."""
    begins, ends = (
        listed("slice", option, given, "a whole number for each mode")
        for option, given in (("start", start), ("limit", limit))
    )
    if len(begins) != len(ends):
        raise GraphError(f"slice has start = {begins} and limit = {ends}; expected as many")
    return [_Slice(one, end) for one, end in zip(begins, ends, strict=True)]


def _check_steps(what: str, slices: list[list[int | None]]) -> None:
    steps = [step for *_, step in slices]
    if any(step is not None and step < 1 for step in steps):
        raise GraphError(f"{what} has steps {steps}; expected 1 or more")


class View(NamedTuple):
    """How an output lies in the memory of an input; offset and stride in elements."""

    input: Tensor
    dim: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


class LayoutOperation(Operation):
    """An operation that moves elements at most."""

    result = ("Y",)

    def views(self, node: Node) -> dict[str, View | None]:
        """How each output is a view of an input; None where elements must be moved."""
        raise NotImplementedError


class Reshape(LayoutOperation):
    """Other modes for the same elements."""

    name = "reshape"
    inputs = ("input",)
    attributes: ClassVar[dict[str, Kind]] = {
        "mode": one_of(_ReshapeMode.__members__),
        "shape": optional(list_of(whole(0))),
    }

    def infer(self, node: Node) -> None:
        x, Y = node.input("input"), node.outputs["Y"]
        dim = Y.dim if node["shape"] is None else tuple(node["shape"])
        if not dim:
            raise GraphError(
                f"{Y}, which {node} writes, has no dim; set_dim says it (or shape= of reshape)"
            )
        if math.prod(dim) != math.prod(x.dim):
            raise GraphError(
                f"{node} makes {list(dim)} of {list(x.dim)}; expected as many elements, "
                f"{math.prod(x.dim)}"
            )
        if node["mode"] == "LOGICAL":
            settle(node, Y, dim)
            return
        stride = Y.stride or view_strides(x.dim, x.stride, dim)
        if stride is None:
            raise GraphError(
                f"{node} makes {list(dim)} of {list(x.dim)} with stride {list(x.stride)}, which is "
                f"no view; use reshape_mode.LOGICAL"
            )
        settle(node, Y, dim, stride)
        if Y.stride and span(dim, Y.stride) > span(x.dim, x.stride):
            raise GraphError(
                f"{Y} has dim {list(dim)} and stride {list(Y.stride)}, which reaches behind the "
                f"end of {x} with {list(x.dim)} and {list(x.stride)}"
            )

    def free_dims(self, node: Node) -> bool:
        return node["shape"] is not None

    def views(self, node: Node) -> dict[str, View | None]:
        x, Y = node.input("input"), node.outputs["Y"]
        stride = Y.stride if node["mode"] == "VIEW_ONLY" else view_strides(x.dim, x.stride, Y.dim)
        return {"Y": None if stride is None else View(x, Y.dim, stride, 0)}

    def evaluate(self, node: Node, given: Mapping[str, Any]) -> dict[str, Any]:
        x, Y = node.input("input"), node.outputs["Y"]
        if node["mode"] == "LOGICAL":
            return {"Y": given["input"].reshape(Y.dim)}
        # What is given may lie elsewhere than the input: lay it out as the graph says.
        memory = given["input"].new_empty(max(span(x.dim, x.stride), 1))
        memory.as_strided(x.dim, x.stride).copy_(given["input"])
        return {"Y": memory.as_strided(Y.dim, Y.stride)}


class Transpose(LayoutOperation):
    """Modes in another order."""

    name = "transpose"
    inputs = ("input",)
    attributes: ClassVar[dict[str, Kind]] = {"permutation": list_of(WHOLE)}

    def infer(self, node: Node) -> None:
        x, order = node.input("input"), node["permutation"]
        if sorted(order) != list(range(x.rank)):
            raise GraphError(
                f"{node} has permutation {order}; expected every mode of {list(x.dim)} once"
            )
        dim, stride = (tuple(values[mode] for mode in order) for values in (x.dim, x.stride))
        settle(node, node.outputs["Y"], dim, packed_strides(dim, memory_order(dim, stride)))

    def views(self, node: Node) -> dict[str, View | None]:
        x, order = node.input("input"), node["permutation"]
        dim, stride = (tuple(values[mode] for mode in order) for values in (x.dim, x.stride))
        return {"Y": View(x, dim, stride, 0)}

    def evaluate(self, node: Node, given: Mapping[str, Any]) -> dict[str, Any]:
        return {"Y": given["input"].permute(node["permutation"])}


class Slice(LayoutOperation):
    """A part of each mode."""

    name = "slice"
    inputs = ("input",)
    attributes: ClassVar[dict[str, Kind]] = {"slices": list_of(list_of(optional(WHOLE), 3))}

    def check(self, node: Node) -> None:
        _check_steps(str(node), node["slices"])

    def infer(self, node: Node) -> None:
        x = node.input("input")
        if len(node["slices"]) > x.rank:
            raise GraphError(
                f"{node} has {len(node['slices'])} slices; its input has dim {list(x.dim)}"
            )
        dim = tuple(len(one) for one in self._ranges(node))
        settle(node, node.outputs["Y"], dim, packed_strides(dim, memory_order(x.dim, x.stride)))

    def views(self, node: Node) -> dict[str, View | None]:
        x, ranges = node.input("input"), self._ranges(node)
        stride = tuple(step * one.step for step, one in zip(x.stride, ranges, strict=True))
        offset = sum(
            step * one.start for step, one in zip(x.stride, ranges, strict=True) if len(one)
        )
        return {"Y": View(x, tuple(map(len, ranges)), stride, offset)}

    def evaluate(self, node: Node, given: Mapping[str, Any]) -> dict[str, Any]:
        return {"Y": given["input"][tuple(_Slice(*one) for one in node["slices"])]}

    @staticmethod
    def _ranges(node: Node) -> list[range]:
        dim, kept = node.input("input").dim, node["slices"]
        kept = [*kept, *([None, None, None] for _ in range(len(dim) - len(kept)))]
        return [range(*_Slice(*one).indices(extent)) for one, extent in zip(kept, dim, strict=True)]


class Concatenate(LayoutOperation):
    """Several inputs in one."""

    name = "concatenate"
    inputs = several = ("inputs",)
    attributes: ClassVar[dict[str, Kind]] = {"axis": WHOLE}

    def infer(self, node: Node) -> None:
        tensors, axis = _inputs(node), node["axis"]
        first = tensors[0].dim
        if not -len(first) <= axis < len(first):
            raise GraphError(f"{node} has axis {axis}; its inputs have dim {list(first)}")
        axis %= len(first)
        for one in tensors:
            if len(one.dim) != len(first) or any(
                mode != axis and own != extent
                for mode, (own, extent) in enumerate(zip(one.dim, first, strict=True))
            ):
                shown = " and ".join(str(list(tensor.dim)) for tensor in tensors)
                raise GraphError(
                    f"{node} puts {shown} one behind the other along mode {axis}; the other modes "
                    f"must be alike"
                )
        kinds = [one.data_type for one in tensors]
        if len(set(kinds)) > 1 and node.outputs["Y"].data_type is data_type.NOT_SET:
            shown = " and ".join(kind.name for kind in kinds)
            raise GraphError(
                f"{node} puts {shown} one behind the other; its result needs a type, by "
                f"set_data_type(), to which the others are converted"
            )
        total = sum(one.dim[axis] for one in tensors)
        dim = (*first[:axis], total, *first[axis + 1 :])
        order = memory_order(first, tensors[0].stride)
        settle(node, node.outputs["Y"], dim, packed_strides(dim, order))

    def views(self, node: Node) -> dict[str, View | None]:
        only = _inputs(node)
        one = only[0]
        return {"Y": View(one, one.dim, one.stride, 0) if len(only) == 1 else None}

    def evaluate(self, node: Node, given: Mapping[str, Any]) -> dict[str, Any]:
        import torch

        return {"Y": torch.cat(list(given["inputs"]), dim=node["axis"])}


def _inputs(node: Node) -> tuple[Tensor, ...]:
    found = node.inputs.get("inputs")
    if not isinstance(found, tuple) or not found:
        raise GraphError(f"{node} has no inputs; expected one tensor at least")
    return found


def view_strides(
    dim: tuple[int, ...], stride: tuple[int, ...], into: tuple[int, ...]
) -> tuple[int, ...] | None:
    """Strides that give a row-major reshape of a tensor where it lies; None if none do."""
    import torch

    try:
        seen = torch.empty_strided(dim, stride, device="meta").view(into)
    except RuntimeError:
        return None
    return tuple(seen.stride())


def span(dim: tuple[int, ...], stride: tuple[int, ...]) -> int:
    """Elements from the first to the last of a tensor, gaps too."""
    if 0 in dim:
        return 0
    return 1 + sum((extent - 1) * step for extent, step in zip(dim, stride, strict=True))

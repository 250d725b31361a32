"""Calls of a ``Graph``: from what a caller gives to a variant pack, and from there to results."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from kernel_api.errors import GraphError, GraphStateError, VariantPackError
from kernel_api.graph._enums import element_type
from kernel_api.graph._graph import pygraph
from kernel_api.graph._handle import Handle
from kernel_api.graph._tensor import Tensor, with_a_mode
from kernel_api.operands import Operand

#: Objects by identity: what gives the object, if it is still there, and its tensor.
Objects = dict[int, tuple[Callable[[], Any], Tensor]]

#: Makes a tensor for an output.
_Maker = Callable[[], Any]

#: Other extents whose outputs are remembered.
_MOST_EXTENTS = 256


class _Extents(NamedTuple):
    """What a call has that is not as in the graph, and outputs that fit.

    Attributes:
        base: The execution that they are for.
        uids, shapes, strides: As ``pygraph.execute`` takes them.
        makers: Of outputs.
    """

    base: Any
    uids: tuple[int, ...]
    shapes: tuple[tuple[int, ...], ...]
    strides: tuple[tuple[int, ...], ...]
    makers: list[tuple[Tensor, _Maker]]


class Calls:
    """What calls need, worked out once.

    Args:
        graph: Built.
        objects: That stand for tensors of it.
        inputs, outputs: In the order of positional calls.
        names: Of all tensors.
        is_dynamic: Whether tensors may have other extents than those of the graph.
        is_allocating: Whether calls need to bring no workspace.
    """

    def __init__(
        self,
        graph: pygraph,
        objects: Objects,
        inputs: list[Tensor],
        outputs: list[Tensor],
        names: dict[str, Tensor],
        *,
        is_dynamic: bool,
        is_allocating: bool,
    ) -> None:
        self._graph, self.objects = graph, objects
        self.inputs, self.outputs, self.names = inputs, outputs, names
        self.is_dynamic, self._is_allocating = is_dynamic, is_allocating
        self._makers = self._makers_of(outputs)
        self._extents: dict[Any, _Extents] = {}
        called: dict[int, list[str]] = {id(tensor): [tensor.name] for tensor in outputs}
        for name, tensor in names.items():
            if id(tensor) in called and name != tensor.name and _is_result(name, tensor):
                called[id(tensor)].append(name)
        self._called = [(tensor, tuple(called[id(tensor)])) for tensor in outputs]
        self._of_key: dict[Any, Tensor] = {
            **{tensor.uid: tensor for tensor in graph.tensors},
            **names,
            **{tensor: tensor for tensor in graph.tensors},
        }

    def run(self, tensors: tuple[Any, ...], workspace: Any, handle: Handle | None) -> Any:
        """Execute the graph on what a call was given; returns what the call does."""
        variant_pack, extents = self._given(tensors, handle)
        if workspace is None and not self._is_allocating and self._graph.get_workspace_size():
            raise GraphStateError(
                f"the graph has workspace_alloc=False and needs "
                f"{self._graph.get_workspace_size()} bytes; call it with workspace="
            )
        if extents is None:
            self._graph.execute(variant_pack, workspace, handle)
        else:
            by_uid = {tensor.uid: value for tensor, value in variant_pack.items()}
            self._graph.execute(
                by_uid, workspace, handle, extents.uids, extents.shapes, extents.strides
            )
        if _is_named(tensors):
            return self._named_results(tensors[0], variant_pack)
        if len(self.outputs) == 1:
            return variant_pack[self.outputs[0]]
        return tuple(variant_pack[tensor] for tensor in self.outputs)

    def variant_pack(self, tensors: tuple[Any, ...], handle: Handle | None) -> dict[Any, Any]:
        """Every input and output for what a call was given."""
        return self._given(tensors, handle)[0]

    def _given(
        self, tensors: tuple[Any, ...], handle: Handle | None
    ) -> tuple[dict[Any, Any], _Extents | None]:
        pack = self._of_names(tensors[0]) if _is_named(tensors) else self._of_places(tensors)
        extents = self._other_extents(pack) if self.is_dynamic else None
        makers = self._makers if extents is None else extents.makers
        if handle is not None and handle.stream is not None and handle.device.type == "cuda":
            import torch

            from kernel_api.utils import stream_handle

            # Memory is of the stream that it was allocated on.
            cuda: Any = torch.cuda
            with cuda.stream(cuda.ExternalStream(stream_handle(handle.stream), handle.device)):
                _allocate(pack, makers)
        else:
            _allocate(pack, makers)
        return pack, extents

    def _of_places(self, tensors: tuple[Any, ...]) -> dict[Any, Any]:
        if len(tensors) != len(self.inputs):
            names = ", ".join(map(str, self.inputs))
            raise VariantPackError(
                f"the graph was called with {len(tensors)} tensors; expected {len(self.inputs)}: "
                f"{names}"
            )
        return dict(zip(self.inputs, tensors, strict=True))

    def _of_names(self, given: Mapping[Any, Any]) -> dict[Any, Any]:
        pack: dict[Any, Any] = {}
        for key, value in given.items():
            tensor = self._tensor_of(key)
            if tensor in pack and pack[tensor] is not value:
                raise VariantPackError(f"{tensor} is given twice, once as {_shown(key)}")
            pack[tensor] = value
        missing = [str(tensor) for tensor in self.inputs if tensor not in pack]
        if missing:
            raise VariantPackError(
                f"Non-virtual input tensors not found in variant pack: {missing}"
            )
        return pack

    def _tensor_of(self, key: Any) -> Tensor:
        if isinstance(key, (str, int, Tensor)):
            found = self._of_key.get(key)
        else:
            known = self.objects.get(id(key))
            found = known[1] if known is not None and known[0]() is key else None
        if found is None:
            names = ", ".join(map(str, [*self.inputs, *self.outputs]))
            raise VariantPackError(f"{_shown(key)} is no tensor of the graph; there are {names}")
        if found.is_virtual:
            raise VariantPackError(
                f"{_shown(key)} is virtual: it has no memory of the caller's; set_output(True) in "
                f"the block makes it an output"
            )
        return found

    def _named_results(self, given: Mapping[Any, Any], pack: Mapping[Any, Any]) -> dict[Any, Any]:
        found = dict(given)
        for tensor, names in self._called:
            value = pack[tensor]
            for name in names:
                found[name] = value
        return found

    # Other extents -----------------------------------------------------------------------

    def _other_extents(self, pack: dict[Any, Any]) -> _Extents | None:
        """What is not as in the graph, with the outputs that are given, whose extents may say what
        is computed; None if everything is."""
        named, is_other = [], False
        for tensor, value in pack.items():
            if tensor.is_pass_by_value or not is_data(value):
                continue
            if not hasattr(value, "stride"):
                pack[tensor] = value = Operand(value, str(tensor)).tensor
            shape, stride = with_a_mode(value.shape), with_a_mode(value.stride())
            differs = shape != tensor.dim or stride != tensor.stride
            if differs or not tensor.is_input:
                named.append((tensor.uid, shape, stride))
            is_other = is_other or differs
        if not is_other:
            return None
        key, base = tuple(named), self._graph._execution
        found = self._extents.get(key)
        if found is None or found.base is not base:
            found = self._extents_of(base, key)
            if len(self._extents) >= _MOST_EXTENTS:
                self._extents.clear()
            self._extents[key] = found
        return found

    def _extents_of(self, base: Any, named: tuple[Any, ...]) -> _Extents:
        uids, shapes, strides = zip(*named, strict=True)
        inferred = base.overridden(uids, shapes, strides)._graph
        place = {id(tensor): i for i, tensor in enumerate(self._graph.tensors)}
        like = [inferred.tensors[place[id(tensor)]] for tensor in self.outputs]
        return _Extents(base, uids, shapes, strides, self._makers_of(like))

    def _makers_of(self, like: list[Tensor]) -> list[tuple[Tensor, _Maker]]:
        """For each output what makes a torch tensor like another graph's, or its own."""
        import torch

        device = self._graph._planned_device()
        return [
            (
                tensor,
                functools.partial(
                    torch.empty_strided,
                    one.dim,
                    one.stride,
                    dtype=element_type(one.data_type).torch,
                    device=device,
                ),
            )
            for tensor, one in zip(self.outputs, like, strict=True)
        ]


def ordered(
    what: str, tensors: list[Tensor], wanted: list[str] | None, names: Mapping[str, Tensor]
) -> list[Tensor]:
    """Inputs or outputs in the order that was asked for.

    Raises GraphError for names that are none, twice there, or not all.
    """
    if wanted is None:
        return tensors
    found: list[Tensor] = []
    for name in wanted:
        tensor = names.get(name)
        if tensor is None:
            there = ", ".join(map(str, tensors))
            raise GraphError(f"{what}s= names {name!r}, which is no tensor; there are {there}")
        if not any(tensor is one for one in tensors):
            why = "virtual" if tensor.is_virtual else f"no {what}"
            raise GraphError(f"{what}s= names {name!r}, which is {why}")
        if any(tensor is one for one in found):
            raise GraphError(f"{what}s= names {name!r}, which is there already: {wanted}")
        found.append(tensor)
    left = [str(one) for one in tensors if not any(one is other for other in found)]
    if left:
        raise GraphError(f"{what}s= has to name every non-virtual {what}; {left} are not there")
    return found


def _allocate(pack: dict[Any, Any], makers: Iterable[tuple[Tensor, _Maker]]) -> None:
    for tensor, make in makers:
        if tensor not in pack:
            pack[tensor] = make()


def _is_named(tensors: tuple[Any, ...]) -> bool:
    return len(tensors) == 1 and isinstance(tensors[0], Mapping)


def is_data(value: Any) -> bool:
    return hasattr(type(value), "__dlpack__")


def _is_result(name: str, tensor: Tensor) -> bool:
    """Whether it is the name of a tensor as the result of its node, not as another's input."""
    node = tensor.producer
    return node is not None and any(
        name == f"{node.name}::{key}" for key, one in node.outputs.items() if one is tensor
    )


def _shown(key: Any) -> str:
    if is_data(key):
        return f"a {type(key).__name__} that the block was not written with"
    return repr(str(key)) if isinstance(key, Tensor) else repr(key)

"""Nodes of graphs without plans: dims are inferred and values computed node by node."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from kernel_api.graph._enums import as_data_type, data_type
from kernel_api.graph._node import Node
from kernel_api.graph._operations import Operations
from kernel_api.graph._tensor import Tensor


class Nodes(Operations):
    """Operations, and what tensors hold.

    Attributes:
        values: Torch tensors and numbers by id of the tensor.
    """

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.tensors: list[Tensor] = []
        self.values: dict[int, Any] = {}

    def check_open(self, what: str) -> None:
        pass

    def claim_uid(self, tensor: Tensor, uid: int) -> None:
        tensor.uid = uid

    def given(self, value: torch.Tensor, name: str = "") -> Tensor:
        """A tensor with the dim, stride, type and contents of a torch tensor."""
        made = self._new_tensor(
            name=name,
            dim=value.shape,
            stride=value.stride(),
            element=as_data_type(value.dtype),
        )
        self.values[id(made)] = value
        return made

    def passed(self, value: float, element: data_type = data_type.FLOAT) -> Tensor:
        """A number that is given when a graph is executed."""
        made = self._new_tensor(name="number", dim=(1,), stride=(1,), element=element)
        made.is_pass_by_value = True
        self.values[id(made)] = value
        return made

    def unknown(self, dim: Any, element: data_type = data_type.HALF) -> Tensor:
        """A tensor that only dims are known of."""
        return self.given(torch.empty(dim, dtype=getattr(torch, element.value), device="meta"))

    def written(self, dim: Any, element: data_type = data_type.FLOAT) -> Tensor:
        """A tensor for an operation to write to."""
        from kernel_api.graph._tensor import packed_strides

        return self._new_tensor(
            name="written", dim=dim, stride=packed_strides(dim), element=element
        )

    def infer(self) -> None:
        """Everything of every tensor; unset types are FLOAT."""
        for node in self.nodes:
            node.operation.infer(node)
            for tensor in node.writes:
                assert tensor.dim is not None and len(tensor.dim) == len(tensor.stride), node
                if tensor.data_type is data_type.NOT_SET:
                    tensor.data_type = data_type.FLOAT

    def run(self) -> None:
        """Infer and compute all nodes; results are kept in the types of the tensors."""
        self.infer()
        for node in self.nodes:
            found = node.operation.evaluate(node, self._arguments(node))
            for name, tensor in node.outputs.items():
                value = found[name]
                assert tuple(value.shape) == tensor.dim, (node, name)
                assert value.dtype is not torch.float16
                self.values[id(tensor)] = value

    def value(self, tensor: Tensor) -> Any:
        return self.values[id(tensor)]

    def compute(self, *tensors: Tensor) -> Any:
        """Run, and what the tensors hold then."""
        self.run()
        found = tuple(self.value(tensor) for tensor in tensors)
        return found if len(found) > 1 else found[0]

    def _arguments(self, node: Node) -> Mapping[str, Any]:
        def given(tensor: Tensor) -> Any:
            value = tensor.value if tensor.is_constant else self.values[id(tensor)]
            floating = isinstance(value, torch.Tensor) and value.is_floating_point()
            return value.to(node.arithmetic) if floating else value

        return {
            name: tuple(map(given, one)) if isinstance(one, tuple) else given(one)
            for name, one in node.inputs.items()
        }


def close(found: torch.Tensor, exact: torch.Tensor, same: torch.Tensor | None = None) -> None:
    """By the error-ratio rule against the same in float32, or in ``same``.

    Args:
        exact: In float64.
        same: What float32 gives; by default the exact result, rounded.
    """
    from kernel_api.verification import compare

    assert found.shape == exact.shape, (found.shape, exact.shape)
    same = exact.to(torch.float32) if same is None else same
    floor = 64 * torch.finfo(torch.float32).eps
    allowance = floor * exact.abs().double().clamp_min(1e-3)
    verdict = compare(found.float(), exact.double(), same.float(), factor=3.0, allowance=allowance)
    assert verdict, verdict


def random(*shape: int, seed: int = 0, element: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(element)


def apart(*shape: int, seed: int = 0, element: torch.dtype = torch.float32) -> torch.Tensor:
    """The same with gaps between rows, and modes in another order."""
    made = random(*shape[:-2], shape[-1], shape[-2] + 3, seed=seed, element=element)
    return made.transpose(-1, -2)[..., : shape[-2], :]

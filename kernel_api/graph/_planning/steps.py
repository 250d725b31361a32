"""What a plan consists of: launches of kernels, operations of torch, and views."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from kernel_api.arguments import Arguments
from kernel_api.errors import ArgumentError, KernelApiError
from kernel_api.graph._enums import data_type, element_type
from kernel_api.graph._kinds import WHOLE
from kernel_api.graph._node import Node
from kernel_api.graph._planning.frame import Layout
from kernel_api.graph._tensor import Tensor
from kernel_api.kernel import Kernel
from kernel_api.status import KIND_OF_OPERATION

#: Gives what stands for a tensor of the graph: a torch tensor, seen with other modes if a layout is
#: given, or a number; ``name`` is that of the launch's keyword.
Take = Callable[..., Any]

#: Makes the arguments of a kernel of what stands for the tensors.
Build = Callable[[Take], Arguments]


class DeclineError(ArgumentError):
    """A node, or nodes together, cannot be put as arguments of a kernel."""


class Step:
    """Part of a plan.

    Attributes:
        nodes: What it computes.
        title: Name of the kernel, or of what stands in its place.
        kind: ``"kernel"``, ``"torch"`` or ``"view"``.
        kernel: That is launched; None for the others.
        scratch: Memory that it writes and nothing reads.
    """

    nodes: tuple[Node, ...]
    title: str
    kind: str
    kernel: Kernel | None = None
    scratch: tuple[Tensor, ...] = ()

    @property
    def inner(self) -> set[int]:
        """Ids of tensors that are read and written by its own nodes alone, if it so happens."""
        return {id(t) for node in self.nodes for t in node.writes}

    def to_dict(self) -> dict[str, Any]:
        return {"kind": self.kind, "nodes": [node.name for node in self.nodes]}


class KernelStep(Step):
    """One launch.

    Attributes:
        build: Makes its arguments.
        kernels: All that take them, best first; ``kernel`` is one of them.
        predicted: Seconds, by the kernel's model; None without.
    """

    kind = "kernel"

    def __init__(
        self,
        nodes: tuple[Node, ...],
        build: Build,
        args: Arguments,
        kernels: list[Kernel],
        scratch: tuple[Tensor, ...] = (),
    ) -> None:
        self.nodes, self.build, self.kernels = nodes, build, kernels
        self.args, self.scratch = args, scratch
        self.kernel: Kernel = kernels[0]

    @property
    def title(self) -> str:  # type: ignore[override]
        return self.kernel.metadata.kernel_name

    @property
    def provider(self) -> str:
        return type(self.kernel).provider_name()

    @property
    def predicted(self) -> float | None:
        return self.kernel.predict(self.args)

    def with_kernel(self, kernel: Kernel) -> KernelStep:
        made = KernelStep(self.nodes, self.build, self.args, self.kernels, self.scratch)
        made.kernel = kernel
        return made

    def to_dict(self) -> dict[str, Any]:
        return {**super().to_dict(), "kernel": self.title}


class TorchStep(Step):
    """Nodes that torch computes one by one, each as its operation says."""

    kind = "torch"

    def __init__(self, nodes: tuple[Node, ...]) -> None:
        self.nodes = nodes
        self.title = "torch: " + ", ".join(dict.fromkeys(node.op for node in nodes))

    def run(self, values: dict[int, Any]) -> None:
        """Compute the nodes.

        Args:
            values: By id of the tensor: torch tensors and numbers. Tensors that are written for
                others are in it, and are written to; the rest is added.
        """
        from kernel_api._autocast import off

        with off():
            for node in self.nodes:
                found = node.operation.evaluate(node, _arguments(node, values))
                for result, tensor in node.outputs.items():
                    _write(values, tensor, found[result])


def _arguments(node: Node, values: Mapping[int, Any]) -> dict[str, Any]:
    def given(tensor: Tensor) -> Any:
        value: Any = _known(tensor) if tensor.is_constant else values[id(tensor)]
        if node.operation.keeps_types or not hasattr(value, "is_floating_point"):
            return value
        return value.to(node.arithmetic) if value.is_floating_point() else value

    return {
        name: tuple(given(t) for t in one) if isinstance(one, tuple) else given(one)
        for name, one in node.inputs.items()
    }


def _known(tensor: Tensor) -> Any:
    """The number; as a floating one where torch has no whole one."""
    value = tensor.value
    assert value is not None
    return float(value) if type(value) is int and not WHOLE.holds(value) else value


def _write(values: dict[int, Any], tensor: Tensor, found: Any) -> None:
    kind = element_type(tensor.data_type)
    place = values.get(id(tensor))
    value = _converted(found.reshape(tensor.dim), kind)
    if place is None:
        values[id(tensor)] = value
    else:
        place.copy_(value)


def _converted(value: Any, kind: Any) -> Any:
    from kernel_api.providers.reference.epilogue import rounded

    return value if value.dtype is kind.torch else rounded(value, kind)


class ViewStep(Step):
    """Tensors that are others seen with other modes: nothing is launched."""

    kind = "view"

    def __init__(self, node: Node) -> None:
        self.nodes = (node,)
        self.title = f"view: {node.op}"


def view_of(tensor: Tensor) -> Any:
    """How a tensor lies in the memory of the one that it is made of; None if it has its own."""
    producer = tensor.producer
    of = getattr(producer.operation, "views", None) if producer is not None else None
    if of is None or not tensor.is_virtual:
        return None
    assert producer is not None
    result = next(name for name, one in producer.outputs.items() if one is tensor)
    view = of(producer)[result]
    if view is None or view.dim != tensor.dim or not _holds(tensor.data_type, view.input.data_type):
        return None
    modes = zip(tensor.dim, view.stride, tensor.stride, strict=True)
    return view if all(n == 1 or own == said for n, own, said in modes) else None


def _holds(kind: data_type, other: data_type) -> bool:
    """Whether elements of another type are read as they would be if they were converted."""
    return kind is other or (kind is data_type.FLOAT and element_type(other).bits <= 16)


class Origin(NamedTuple):
    """Where a tensor lies: in another one's memory, so many elements behind its first."""

    tensor: Tensor
    offset: int


def origin_of(tensor: Tensor) -> Origin:
    """The tensor whose memory a view is in; the tensor itself if it is none."""
    offset = 0
    while (view := view_of(tensor)) is not None:
        tensor, offset = view.input, offset + view.offset
    return Origin(tensor, offset)


class Prober:
    """Finds the kernels for what a plan might launch, on tensors without data.

    Args:
        device: That is planned for.
        cc: Architecture; that of the device by default.
    """

    def __init__(self, device: Any, cc: Any = None) -> None:
        self.device, self.cc = device, cc
        # By the tensors, not their ids: those of nodes that are only tried out do not live long.
        self._made: dict[Tensor, Any] = {}

    def take(self, tensor: Tensor, layout: Layout | None = None, name: str = "") -> Any:
        """What stands for a tensor while planning."""
        if tensor.is_pass_by_value:
            if tensor.value is not None:
                return tensor.value
            return 1.0 if element_type(tensor.data_type).is_float else 1
        shape, stride = (tensor.dim, tensor.stride) if layout is None else layout
        source, offset = origin_of(tensor)
        return self._memory(source).as_strided(shape, stride, offset)

    def _memory(self, tensor: Tensor) -> Any:
        import torch

        if tensor not in self._made:
            # Plans for the CPU need tensors of its own; memory that nobody touches costs nothing.
            device = "cpu" if self.device.type == "cpu" else "meta"
            element = element_type(tensor.data_type).torch
            self._made[tensor] = torch.empty_strided(
                tensor.dim, tensor.stride, dtype=element, device=device
            )
        return self._made[tensor]

    def step(
        self, nodes: tuple[Node, ...], build: Build, scratch: tuple[Tensor, ...] = ()
    ) -> KernelStep | str:
        """The launch of what the nodes compute, or why there is none."""
        try:
            args = build(self.take)
            kernels = self.kernels(args)
        except KernelApiError as error:
            return str(error)
        if not kernels:
            return self._why_none(args)
        scratch = tuple(getattr(build, "scratch", scratch))
        return KernelStep(nodes, build, args, kernels, scratch)

    def kernels(self, args: Arguments) -> list[Kernel]:
        """Best first; on a GPU without those of the reference, which are for comparison."""
        from kernel_api.discovery import get_kernels

        found = get_kernels(args, cc=self._cc())
        if self.device.type == "cpu":
            return found
        found = [k for k in found if type(k).provider_name() != "reference"]
        best = self._measured(args)
        return found if best is None else [best, *(k for k in found if k != best)]

    def _measured(self, args: Arguments) -> Kernel | None:
        """What the tuner knows to be fastest on the device, if it is here."""
        from kernel_api.devices import cuda_available
        from kernel_api.tuning import tuned

        if self.cc is not None or not cuda_available():
            return None
        return tuned(args, self.device)

    def _why_none(self, args: Arguments) -> str:
        from kernel_api.discovery import explain

        rejected = explain(args, cc=self._cc()).rejected
        own = [r for r in rejected if r.provider == "cutedsl"] or list(rejected)
        lines = dict.fromkeys(f"{r.family}: {r.reason}" for r in own if r.rule != KIND_OF_OPERATION)
        return "; ".join(lines) or "no kernel computes it"

    def _cc(self) -> Any:
        if self.cc is not None or self.device.type != "cuda":
            return self.cc
        from kernel_api.devices import target_of

        return target_of(self.device)

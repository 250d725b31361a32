"""Plans: steps in order, what they need, and what is to be said of them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from kernel_api.errors import KernelApiError
from kernel_api.graph._enums import behavior_note, element_type, heur_mode, numerical_note
from kernel_api.graph._planning.refusal import Refusal
from kernel_api.graph._planning.steps import KernelStep, Step, ViewStep
from kernel_api.graph._tensor import Tensor

#: Bytes that places in the workspace are multiples of.
ALIGNMENT = 256


class Plan:
    """One way to compute a graph.

    Attributes:
        name: The kernels, in order.
        mode: Which heuristic it is of.
        steps: In the order that they run.
        refusals: What was not fused, and why.
        places: Where in the workspace tensors lie that one step writes and another reads, by id.
        workspace_size: Bytes.
        is_built: Whether everything is compiled.
        barred: Why it may not be used; empty if it may.
    """

    def __init__(
        self,
        mode: heur_mode,
        steps: Iterable[Step],
        refusals: Iterable[Refusal] = (),
    ) -> None:
        self.mode = mode
        self.steps = tuple(steps)
        self.refusals = tuple(refusals)
        self.places, self.workspace_size = _placed(self.steps)
        self.is_built = False
        self.barred = ""

    @property
    def name(self) -> str:
        launched = [step.title for step in self.steps if not isinstance(step, ViewStep)]
        return f"{self.mode.name}: {' + '.join(launched) or 'nothing to launch'}"

    @property
    def kernel_steps(self) -> list[KernelStep]:
        return [step for step in self.steps if isinstance(step, KernelStep)]

    @property
    def launches(self) -> int:
        """Steps that launch something."""
        return sum(not isinstance(step, ViewStep) for step in self.steps)

    @property
    def behavior_notes(self) -> list[behavior_note]:
        providers = {step.provider for step in self.kernel_steps}
        notes = []
        if "cutedsl" in providers:
            notes.append(behavior_note.RUNTIME_COMPILATION)
        if "torch" in providers:
            notes.append(behavior_note.CUBLASLT_DEPENDENCY)
        return notes

    @property
    def numerical_notes(self) -> list[numerical_note]:
        fast = any(step.provider != "reference" for step in self.kernel_steps)
        return [numerical_note.TENSOR_CORE] if fast else []

    def build(self, cc: Any, device: Any) -> None:
        """Compile what is not compiled. Raises what kernels raise that cannot be."""
        if self.is_built:
            return
        for step in self.kernel_steps:
            if "cuda" in step.kernel.devices and device.type == "cuda":
                step.kernel.compile(step.args, cc=cc)
        self.is_built = True

    def to_dict(self) -> dict[str, Any]:
        """What :meth:`PlanList.restored` makes it of again."""
        return {"mode": self.mode.name, "steps": [step.to_dict() for step in self.steps]}

    def __str__(self) -> str:
        lines = [f"plan {self.name}"]
        for step in self.steps:
            nodes = ", ".join(node.name for node in step.nodes)
            lines.append(f"  {step.title}  <-  {nodes}")
        lines += [f"  not fused: {refusal}" for refusal in self.refusals]
        return "\n".join(lines)

    def __repr__(self) -> str:
        return f"<plan {self.name}>"


def size_of(tensor: Tensor) -> int:
    """Bytes from the first element to behind the last."""
    if 0 in tensor.dim:
        return 0
    reach = sum((n - 1) * s for n, s in zip(tensor.dim, tensor.stride, strict=True))
    return (reach + 1) * element_type(tensor.data_type).itemsize


def _placed(steps: tuple[Step, ...]) -> tuple[dict[int, tuple[Tensor, int]], int]:
    """Tensor and offset of what lies in the workspace; what is never alive together may overlap."""
    first, last = {}, {}
    tensors: dict[int, Tensor] = {}
    for index, step in enumerate(steps):
        for tensor in (*_written_for_others(step, steps), *step.scratch):
            first[id(tensor)] = last[id(tensor)] = index
            tensors[id(tensor)] = tensor
    for index, step in enumerate(steps):
        for node in step.nodes:
            for tensor in node.reads:
                for origin in _origins(tensor):
                    if id(origin) in last:
                        last[id(origin)] = max(last[id(origin)], index)
    placed: list[tuple[int, int, int]] = []
    places: dict[int, tuple[Tensor, int]] = {}
    for key, tensor in sorted(tensors.items(), key=lambda one: -size_of(one[1])):
        size = -(-size_of(tensor) // ALIGNMENT) * ALIGNMENT
        offset = 0
        for other, start, end in sorted(placed, key=lambda one: one[1]):
            apart = last[other] < first[key] or last[key] < first[other]
            if not apart and start < offset + size and offset < end:
                offset = end
        placed.append((key, offset, offset + size))
        places[key] = tensor, offset
    return places, max((end for _, _, end in placed), default=0)


def _written_for_others(step: Step, steps: tuple[Step, ...]) -> list[Tensor]:
    """Virtual tensors that a step writes and another reads."""
    if isinstance(step, ViewStep):
        return []
    own = {id(node) for node in step.nodes}
    readers = [n for other in steps for n in other.nodes if id(n) not in own]
    read = {id(tensor) for node in readers for tensor in node.reads}
    written = [tensor for node in step.nodes for tensor in node.writes]
    return [tensor for tensor in written if tensor.is_virtual and id(tensor) in read]


def _origins(tensor: Tensor) -> list[Tensor]:
    """A tensor, and those whose memory it is in."""
    from kernel_api.graph._planning.steps import origin_of

    source = origin_of(tensor).tensor
    return [tensor] if source is tensor else [tensor, source]


def reason(error: BaseException) -> str:
    """The first line of why a plan cannot be."""
    kind = "" if isinstance(error, KernelApiError) else f"{type(error).__name__}: "
    return kind + (str(error).strip().splitlines() or ["no reason given"])[0]

"""The same graph on tensors of other extents."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from kernel_api.errors import GraphError
from kernel_api.graph._execution import Execution
from kernel_api.graph._options import as_whole
from kernel_api.graph._planning.listing import PlanList
from kernel_api.graph._planning.plan import Plan
from kernel_api.graph._planning.steps import KernelStep, Step
from kernel_api.graph._serialization import graph_from_dict, graph_to_dict
from kernel_api.graph._tensor import Tensor, memory_order, packed_strides


def overridden(
    graph: Any,
    plan: Plan,
    uids: tuple[int, ...],
    shapes: tuple[tuple[int, ...], ...],
    strides: tuple[tuple[int, ...], ...] | None,
) -> Execution:
    """An execution of the plan's kernels for other extents.

    What is not named follows from the rest: results get what their operations give them, in the
    order in memory that they have in the graph. A reduction goes over the modes that it goes over
    there. Results whose extents alone say what is computed keep them, unless they are named.

    Raises GraphError where the extents contradict each other.
    """
    if len(uids) != len(shapes) or (strides is not None and len(uids) != len(strides)):
        raise GraphError(
            f"override_uids has {len(uids)} entries, override_shapes {len(shapes)} and "
            f"override_strides {'none' if strides is None else len(strides)}; expected as many"
        )
    made = type(graph)(
        name=graph.name,
        io_data_type=graph.io_data_type,
        intermediate_data_type=graph.intermediate_data_type,
        compute_data_type=graph.compute_data_type,
        handle=graph.handle,
        sm_version=graph.sm_version,
    )
    graph_from_dict(made, graph_to_dict(graph))
    for copy, tensor in zip(made.tensors, graph.tensors, strict=True):
        copy.device = tensor.device
    by_uid = {tensor.uid: tensor for tensor in made.tensors}
    if len(set(uids)) < len(uids):
        raise GraphError(f"override_uids has {list(uids)}; expected every uid once")
    unknown = [uid for uid in uids if uid not in by_uid]
    if unknown:
        raise GraphError(f"override_uids has {unknown[0]}, which is no uid of the graph")
    kept = _forget_results(made, {id(by_uid[uid]) for uid in uids})
    for index, uid in enumerate(uids):
        _override(by_uid[uid], shapes[index], None if strides is None else strides[index])
    try:
        made.validate()
    except GraphError as error:
        if not kept:
            raise
        names = ", ".join(map(str, kept))
        raise GraphError(
            f"{error} (what was set of {names} does not follow from other extents; "
            f"override_shapes has to say it)"
        ) from error
    device = graph._planned_device()
    found = PlanList.of(made, made._validated(), [plan.mode], device)
    chosen = Plan(plan.mode, _same_kernels(found.plans[0].steps, plan.steps))
    chosen.build(found.cc, device)
    return Execution(made, chosen, also=dict(zip(graph.tensors, made.tensors, strict=True)))


def whole_numbers(name: str, given: Iterable[Any]) -> tuple[tuple[int, ...], ...]:
    """Extents or strides of each tensor that has others."""
    found = []
    if not isinstance(given, Iterable):
        raise GraphError(f"{name} is {given!r}; expected an entry for each of override_uids")
    for one in given:
        values = [as_whole(value) for value in one] if isinstance(one, Iterable) else [None]
        if not all(value is not None and value >= 0 for value in values):
            raise GraphError(
                f"{name} has {one!r}; expected whole numbers from 0 on, of each tensor"
            )
        found.append(tuple(value for value in values if value is not None))
    return tuple(found)


def _override(tensor: Tensor, dim: tuple[int, ...], stride: tuple[int, ...] | None) -> None:
    if len(dim) != tensor.rank:
        raise GraphError(f"{tensor} has {tensor.rank} modes; override_shapes gives it {list(dim)}")
    order = memory_order(tensor.dim, tensor.stride)
    tensor.dim = dim
    tensor.stride = stride if stride else packed_strides(tensor.dim, order)


def _forget_results(graph: Any, named: set[int]) -> list[Tensor]:
    """Let the graph infer again what follows from other extents; returns what does not follow."""
    kept: list[Tensor] = []
    for node in graph.nodes:
        free = [tensor for tensor in node.writes if id(tensor) not in named]
        if free and not node.operation.free_dims(node):
            kept += free
    stays = {id(tensor) for tensor in kept} | named
    for tensor in (one for node in graph.nodes for one in node.writes):
        if id(tensor) not in stays:
            graph._orders[id(tensor)] = memory_order(tensor.dim, tensor.stride)
            tensor.dim, tensor.stride = (), ()
    for body in (node.body for node in graph.nodes if node.body is not None):
        for tensor in (one for node in body.nodes for one in node.writes):
            tensor.dim, tensor.stride = (), ()
    return kept


def _same_kernels(steps: tuple[Step, ...], planned: tuple[Step, ...]) -> list[Step]:
    """The steps, launching what was planned for the same nodes wherever it takes them."""
    before = {
        tuple(n.name for n in step.nodes): step.kernel
        for step in planned
        if isinstance(step, KernelStep)
    }
    kept: list[Step] = []
    for step in steps:
        kernel = before.get(tuple(node.name for node in step.nodes))
        if isinstance(step, KernelStep) and kernel is not None and kernel in step.kernels:
            step = step.with_kernel(kernel)
        kept.append(step)
    return kept

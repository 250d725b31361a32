"""Plans chosen by measurement."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable, Mapping
from typing import Any

from kernel_api.errors import GraphNotSupportedError, KernelApiError
from kernel_api.graph._enums import element_type
from kernel_api.graph._execution import Execution
from kernel_api.graph._planning.frame import Layout
from kernel_api.graph._planning.listing import DECLINES, PlanList
from kernel_api.graph._planning.plan import Plan, reason, size_of
from kernel_api.graph._planning.steps import KernelStep, Step, origin_of
from kernel_api.graph._tensor import Tensor

_WARM_UPS, _ROUNDS = 3, 21


def autotune(
    graph: Any,
    plans: PlanList,
    variant_pack: Mapping[Any, Any],
    workspace: Any,
    handle: Any,
) -> list[tuple[str, float]]:
    """Time every plan on the tensors of the pack, in turns, and select the fastest.

    Returns name and median seconds of those that ran, fastest first. Raises
    GraphNotSupportedError, with the reason of each, if none did.
    """
    failures: dict[str, str] = {}
    running: list[tuple[Plan, Execution]] = []
    for plan in plans.plans:
        if plan.barred:
            failures[plan.name] = plan.barred
            continue
        own = workspace if _is_enough(workspace, plan) else None
        try:
            plan.build(plans.cc, plans.device)
            execution = Execution(graph, plan)
            for _ in range(_WARM_UPS):
                execution.execute(variant_pack, own, handle)
            _wait(plans.device)
        except DECLINES as error:
            failures[plan.name] = reason(error)
            continue
        running.append((plan, execution))
    if not running:
        raise GraphNotSupportedError("no plan of the graph can be timed", failures)
    times: dict[int, list[float]] = {id(plan): [] for plan, _ in running}
    for _ in range(_ROUNDS):
        for plan, execution in running:
            own = workspace if _is_enough(workspace, plan) else None
            times[id(plan)].append(
                _timed(lambda e=execution, w=own: e.execute(variant_pack, w, handle), plans.device)
            )
    medians = {id(plan): statistics.median(times[id(plan)]) for plan, _ in running}
    ranked = sorted((plan for plan, _ in running), key=lambda plan: medians[id(plan)])
    plans.selected = ranked[0]
    return [(plan.name, medians[id(plan)]) for plan in ranked]


def _is_enough(workspace: Any, plan: Plan) -> bool:
    return workspace is not None and workspace.numel() >= plan.workspace_size


def _wait(device: Any) -> None:
    if device.type == "cuda":
        import torch

        torch.cuda.synchronize(device)


def _timed(run: Any, device: Any) -> float:
    """Seconds of one execution: by events on a GPU, by the clock elsewhere."""
    if device.type != "cuda":
        start = time.perf_counter()
        run()
        return time.perf_counter() - start
    import torch

    cuda: Any = torch.cuda
    events: list[Any] = [cuda.Event(enable_timing=True) for _ in range(2)]
    events[0].record()
    run()
    events[1].record()
    events[1].synchronize()
    return float(events[0].elapsed_time(events[1])) * 1e-3


def tuned_steps(steps: Iterable[Step], device: Any) -> list[Step]:
    """The steps with the fastest kernel of each, by the tuner: as stored, else measured now.

    A step that cannot be measured here keeps the kernel of the performance model.
    """
    return [_tuned(step, device) if isinstance(step, KernelStep) else step for step in steps]


def _tuned(step: KernelStep, device: Any) -> Step:
    from kernel_api.tuning import autotune as tune
    from kernel_api.tuning._lookup import measured

    try:
        args = step.build(_Memory(device).take)
        kernel = measured(args) or tune(args).kernel
    except KernelApiError:
        return step
    return step.with_kernel(kernel) if kernel is not None else step


class _Memory:
    """Tensors with memory, for the tuner to make others like them."""

    def __init__(self, device: Any) -> None:
        self.device = device
        self._made: dict[int, Any] = {}

    def take(self, tensor: Tensor, layout: Layout | None = None, name: str = "") -> Any:
        import torch

        if tensor.is_pass_by_value:
            if tensor.value is not None:
                return tensor.value
            return 0.5 if element_type(tensor.data_type).is_float else 1
        source, offset = origin_of(tensor)
        if id(source) not in self._made:
            element = element_type(source.data_type)
            count = max(size_of(source) // element.itemsize, 1)
            self._made[id(source)] = torch.zeros(count, dtype=element.torch, device=self.device)
        shape, stride = (tensor.dim, tensor.stride) if layout is None else layout
        return self._made[id(source)].as_strided(shape, stride, offset)

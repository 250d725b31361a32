"""Problems over the GPUs of a machine, or over whatever an executor reaches."""

from __future__ import annotations

import queue
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from kernel_api.arguments import Arguments
from kernel_api.errors import KernelApiError
from kernel_api.parallel import progress_bar
from kernel_api.tuning._autotune import Builder, Task, TuningResult, devices_here, tune
from kernel_api.tuning._choice import Choice
from kernel_api.tuning._environment import Environment
from kernel_api.tuning._policy import Policy
from kernel_api.tuning._problem import Problem

if TYPE_CHECKING:
    from concurrent.futures import Executor


def spread(
    problems: Sequence[Arguments], choice: Choice, executor: Executor | None, progress: bool
) -> list[Any]:
    """The result or the error of each problem, in their order."""
    if executor is not None:
        from kernel_api.tuning._remote import tune_elsewhere

        return tune_elsewhere(problems, choice, executor, progress)
    return run_here(problems, choice, progress)


def run_here(problems: Sequence[Arguments], choice: Choice, progress: bool) -> list[Any]:
    """A thread for each device, which takes one problem after another: those that lie on the
    device, and, if it is like the first, those that lie on none."""
    results: dict[int, Any] = {}
    lies_nowhere = any(_device_of(args) is None for args in problems)
    anywhere = _alike(devices_here()) if lies_nowhere else []
    tasks: dict[int, Task] = {}
    for index, args in enumerate(problems):
        try:
            device = _device_of(args) or anywhere[0]
            tasks[index] = Task.of(args, choice, device)
        except KernelApiError as error:
            results[index] = error
    same = _alike_tasks(tasks)
    tasks = {index: task for index, task in tasks.items() if same[index] == index}
    waiting: dict[str, queue.SimpleQueue[int]] = {}
    for index, task in tasks.items():
        is_free = problems[index].device.type == "meta"
        name = "" if is_free else task.device
        waiting.setdefault(name, queue.SimpleQueue()).put(index)
    builder = Builder(list(tasks.values()), choice.cc)
    total = sum(len(task.candidates.with_default) for task in tasks.values())
    try:
        with progress_bar("measuring", total, shown=progress) as advance:
            _run(waiting, anywhere, tasks, builder, advance, results)
    finally:
        builder.close()
    results.update({index: results[first] for index, first in same.items()})
    return [results[index] for index in range(len(problems))]


def _alike_tasks(tasks: Mapping[int, Task]) -> dict[int, int]:
    """For each task the first of the same problem on the same device: nothing is measured twice."""
    first: dict[tuple[Problem, str], int] = {}
    return {
        index: first.setdefault((task.problem, task.device), index) for index, task in tasks.items()
    }


def _alike(devices: Sequence[str]) -> list[str]:
    """Those that are like the first: tasks that go to any of them have the environment of that."""
    kinds = [Environment.of(one, Policy()) for one in devices]
    return [one for one, kind in zip(devices, kinds, strict=True) if kind == kinds[0]]


def _run(
    waiting: dict[str, queue.SimpleQueue[int]],
    anywhere: Sequence[str],
    tasks: dict[int, Task],
    builder: Builder,
    advance: Callable[[], None],
    results: dict[int, Any],
) -> None:
    def work(device: str) -> None:
        for name in (device, ""):
            while name in waiting:
                try:
                    index = waiting[name].get_nowait()
                except queue.Empty:
                    break
                results[index] = attempted(tasks[index].on(device), builder, advance)

    named = [name for name in waiting if name]
    devices = [*named, *(one for one in anywhere if one not in named and "" in waiting)]
    if len(devices) <= 1:  # in this thread: it can be interrupted
        for one in devices:
            work(one)
        return
    with ThreadPoolExecutor(len(devices)) as pool:
        try:
            for done in [pool.submit(work, one) for one in devices]:
                done.result()
        except BaseException:  # such as Ctrl-C: the pool waits for its threads
            builder.close()
            raise


def attempted(
    task: Task, builder: Builder, advance: Callable[[], None]
) -> TuningResult | KernelApiError:
    try:
        return tune(task, builder, advance)
    except KernelApiError as error:
        return error


def _device_of(args: Arguments) -> str | None:
    return None if args.device.type == "meta" else str(args.device)

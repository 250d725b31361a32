"""Problems tuned by an executor: in other processes of this machine, or on other machines.

What goes there and comes back is JSON: a problem with its candidates, and rows. Each process
keeps the rows in its own store as well. A process that dies takes with it only the problems that
it was at; these are tuned again.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from concurrent.futures import Executor, Future
from typing import Any

from kernel_api import _log
from kernel_api._description import described
from kernel_api.arguments import Arguments
from kernel_api.discovery import explain
from kernel_api.errors import KernelApiError, NoKernelError
from kernel_api.kernel import Kernel
from kernel_api.metadata import KernelMetadata
from kernel_api.parallel import progress_bar
from kernel_api.tuning._autotune import (
    Builder,
    Choice,
    Task,
    TuningResult,
    devices_here,
    is_measured_on,
    tune,
)
from kernel_api.tuning._bench import BenchError
from kernel_api.tuning._measurement import Measurement
from kernel_api.tuning._policy import Policy
from kernel_api.tuning._problem import Problem
from kernel_api.tuning._row import Row
from kernel_api.tuning._store import Store

logger = _log.logger(__name__)

#: How often a problem is given to an executor whose processes die of it; then it is tuned here.
_ATTEMPTS = 3

_POLL_SECONDS = 0.2


def tune_elsewhere(
    problems: Sequence[Arguments], choice: Choice, executor: Executor, progress: bool
) -> list[Any]:
    """The result or the error of each problem, in their order."""
    results: dict[int, Any] = {}
    sent: dict[int, dict[str, Any]] = {}
    for index, args in enumerate(problems):
        try:
            sent[index] = _message(args, choice)
        except KernelApiError as error:
            results[index] = error
    with progress_bar("problems", len(problems), shown=progress) as advance:
        for _ in results:
            advance()
        for attempt in range(_ATTEMPTS):
            lost = {}
            for index, future in _submitted(executor, sent):
                try:
                    answer = json.loads(future.result())
                except Exception as error:  # each kind of executor has its own for a death
                    logger.warning("problem %d is lost (attempt %d): %r", index, attempt, error)
                    lost[index] = sent[index]
                    continue
                results[index] = _result(answer, problems[index], choice)
                advance()
            sent = lost
            if not sent:
                break
        for index, message in sent.items():
            logger.warning("problem %d is tuned in this process", index)
            answer = json.loads(tune_there(json.dumps(message)))
            results[index] = _result(answer, problems[index], choice)
            advance()
    return [results[index] for index in range(len(problems))]


def _submitted(
    executor: Executor, sent: dict[int, dict[str, Any]]
) -> list[tuple[int, Future[str]]]:
    """As they are done. An executor that takes nothing any more has lost everything."""
    futures: dict[Future[str], int] = {}
    for index, message in sent.items():
        try:
            futures[executor.submit(tune_there, json.dumps(message))] = index
        except Exception as error:
            failed: Future[str] = Future()
            failed.set_exception(error)
            futures[failed] = index
    return [(index, future) for future, index in futures.items()]


def _message(args: Arguments, choice: Choice) -> dict[str, Any]:
    """Raises what :meth:`Task.of` raises."""
    kind = args.device.type
    if kind == "meta":
        kind = "cuda" if choice.cc is not None else devices_here()[0].partition(":")[0]
    return {
        "arguments": described(args),
        "kernels": [kernel.metadata.to_dict() for kernel in choice.kernels(args, kind)],
        "device": kind,
        "policy": choice.policy_on(kind).to_dict(),
        "budget_s": choice.budget_s,
        "timeout_s": choice.timeout_s,
    }


def tune_there(message: str) -> str:
    """In whatever process the executor chose: tune, and give the rows."""
    fields = json.loads(message)
    kernels = [KernelMetadata.from_dict(one).rebuild() for one in fields["kernels"]]
    error: str | None = None
    rows: tuple[Measurement, ...] = ()
    device = _free_device(fields["device"])
    task = Task.made(
        fields["arguments"],
        kernels,
        device,
        Policy.from_dict(fields["policy"]),
        fields["budget_s"],
        fields["timeout_s"],
    )
    builder = Builder([task], None)
    try:
        rows = tune(task, builder).rows
    except NoKernelError as none:
        rows, error = none.rows, str(none)
    except KernelApiError as other:
        error = str(other)
    finally:
        builder.close()
    return json.dumps(
        {
            "rows": [Row(task.environment, row).to_dict() for row in rows],
            "known": len(task.known),
            "error": error,
        }
    )


def _free_device(kind: str) -> str:
    """One that nobody measures on; the first to become free."""
    if kind == "cpu":
        return kind
    devices = devices_here()
    while len(devices) > 1:
        for one in devices:
            if not is_measured_on(one):
                return one
        time.sleep(_POLL_SECONDS)
    return devices[0]


def _result(answer: dict[str, Any], args: Arguments, choice: Choice) -> Any:
    """The result or the error; the rows are kept here as well."""
    rows = [Row.from_dict(one) for one in answer["rows"]]
    for row in rows:
        store = Store.open(row.environment)
        if store is not None:
            store.add(row)
    measurements = tuple(row.measurement for row in rows)
    if answer["error"] is not None:
        if not rows:
            return BenchError(answer["error"])
        report = explain(args, choice.metadata_filter, choice.cc, choice.providers)
        return NoKernelError(report, answer["error"], measurements)
    kernel: Kernel = measurements[0].kernel.rebuild()
    new = len(rows) - int(answer["known"])
    return TuningResult(kernel, measurements, Problem.of(args), rows[0].environment, new)

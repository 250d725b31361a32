"""Problems tuned by an executor: in other processes of this machine, or on other machines.

What goes there and comes back is JSON: a problem with its candidates, and rows. Each process
keeps the rows in its own store as well. A process that dies takes with it only the problems that
it was at; these are tuned again, in the end by this machine itself.
"""

from __future__ import annotations

import contextlib
import functools
import json
import queue
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import Any

from kernel_api import _disk_cache, _log
from kernel_api._description import described
from kernel_api._disk_cache import DiskCache
from kernel_api.arguments import Arguments
from kernel_api.discovery import explain
from kernel_api.errors import BenchError, DeviceError, KernelApiError, NoKernelError
from kernel_api.kernel import Kernel
from kernel_api.metadata import KernelMetadata
from kernel_api.parallel import progress_bar
from kernel_api.tuning import _lookup
from kernel_api.tuning._autotune import (
    Builder,
    Task,
    TuningResult,
    add_rows,
    devices_here,
    is_measured_on,
    result_of,
)
from kernel_api.tuning._choice import Candidates, Choice
from kernel_api.tuning._environment import Environment
from kernel_api.tuning._kernel import KernelIdentity
from kernel_api.tuning._measurement import Measurement
from kernel_api.tuning._policy import Policy
from kernel_api.tuning._problem import Problem
from kernel_api.tuning._row import Row
from kernel_api.tuning._spread import run_here
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
            for index, future in _submitted(executor, sent):
                try:
                    answer = json.loads(future.result())
                except Exception as error:  # each kind of executor has its own for a death
                    logger.warning("problem %d is lost (attempt %d): %r", index, attempt, error)
                    continue
                results[index] = _result(answer, sent[index], problems[index], choice)
                advance()
            sent = {index: one for index, one in sent.items() if index not in results}
            if not sent:
                break
        if sent:
            logger.warning("problems %s are tuned without the executor", [*sent])
            for index, found in _tuned_here(problems, sent, choice).items():
                results[index] = found
                advance()
    return [results[index] for index in range(len(problems))]


def _submitted(
    executor: Executor, sent: dict[int, dict[str, Any]]
) -> Iterator[tuple[int, Future[str]]]:
    """As they are done. An executor that takes nothing any more has lost everything."""
    futures: dict[Future[str], int] = {}
    try:
        for index, message in sent.items():
            try:
                future = executor.submit(tune_there, json.dumps(message))
                if not isinstance(future, Future):
                    raise TypeError(f"submit gave a {type(future).__name__}, no Future")
            except Exception as error:
                future = Future()
                future.set_exception(error)
            futures[future] = index
        # Not as_completed: it never gives a future that was cancelled in the executor's queue.
        done: queue.SimpleQueue[Future[str]] = queue.SimpleQueue()
        for future in futures:
            future.add_done_callback(done.put)
        for _ in futures:
            future = done.get()
            yield futures[future], future
    finally:
        for future in futures:  # whoever is interrupted wants no more of them
            future.cancel()


def _tuned_here(
    problems: Sequence[Arguments], sent: dict[int, dict[str, Any]], choice: Choice
) -> dict[int, Any]:
    """What no executor brought to an end."""
    able = {index for index, one in sent.items() if one["device"] in _kinds_here()}
    found: dict[int, Any] = {
        index: BenchError(
            f"the executor lost the problem {_ATTEMPTS} times, and there is no GPU here to tune it "
            f"on; look at what its workers say, or why they die"
        )
        for index in sent.keys() - able
    }
    here = sorted(able)
    if here:
        results = run_here([problems[index] for index in here], choice, progress=False)
        found.update(zip(here, results, strict=True))
    return found


def _message(args: Arguments, choice: Choice) -> dict[str, Any]:
    """Raises what :meth:`Task.of` raises."""
    kind = args.device.type
    if kind == "meta":
        kind = "cuda" if choice.cc is not None else devices_here()[0].partition(":")[0]
    kernels, default = choice.candidates(args, kind)
    return {
        "arguments": described(args),
        "kernels": [kernel.metadata.to_dict() for kernel in kernels],
        "default": default.metadata.to_dict(),
        "device": kind,
        "policy": choice.policy_on(kind).to_dict(),
        "budget_s": choice.budget_s,
        "timeout_s": choice.timeout_s,
    }


def tune_there(message: str) -> str:
    """In whatever process the executor chose: measure, and give the rows."""
    found: dict[str, Any] = {"environment": None, "rows": [], "error": None}
    try:
        with _free_device(json.loads(message)["device"]) as device:
            _measure_on(device, json.loads(message), found)
    except KernelApiError as error:
        found["error"] = str(error)
    return json.dumps(found)


def _measure_on(device: str, message: dict[str, Any], found: dict[str, Any]) -> None:
    """Fills in what was found, as far as it came; raises KernelApiError."""
    task = Task.made(
        message["arguments"],
        _candidates(message),
        device,
        Policy.from_dict(message["policy"]),
        message["budget_s"],
        message["timeout_s"],
    )
    found["environment"] = task.environment.to_dict()
    builder = Builder([task], None)
    rows = dict(task.known)
    try:
        task = add_rows(rows, task, builder)
    finally:
        builder.close()
        found["rows"] = [
            _row(row, is_known=task.known.get(kernel) is row) for kernel, row in rows.items()
        ]


def _candidates(message: dict[str, Any]) -> Candidates:
    kernels = [KernelMetadata.from_dict(one).rebuild() for one in message["kernels"]]
    return Candidates(kernels, KernelMetadata.from_dict(message["default"]).rebuild())


def _row(one: Measurement, *, is_known: bool) -> dict[str, Any]:
    """Without problem and environment, which all rows have in common."""
    return {"kernel": one.kernel.to_dict(), "result": one.result(), "is_known": is_known}


def _kinds_here() -> set[str]:
    return {"cpu", *(one.partition(":")[0] for one in devices_here())}


@contextlib.contextmanager
def _free_device(kind: str) -> Iterator[str]:
    """One that no other call of this has, and nobody measures on; the first to become free.

    Raises DeviceError where there is none at all.
    """
    devices = [kind] if kind == "cpu" else [d for d in devices_here() if d.startswith(kind)]
    if not devices:
        raise DeviceError(
            f"a problem for {kind} came to a process that sees none; let the executor's workers "
            f"see a GPU each"
        )
    while len(devices) > 1:
        for device in devices:
            with _seat_on(device) as is_ours:
                if is_ours and not is_measured_on(device):
                    yield device
                    return
        time.sleep(_POLL_SECONDS)
    yield devices[0]


@contextlib.contextmanager
def _seat_on(device: str) -> Iterator[bool]:
    """Whether no other call of this process or another has the device; then this one has it."""
    path = _seat_file(device)
    if path is None:
        yield True
        return
    import filelock

    lock = filelock.FileLock(path)
    try:
        lock.acquire(timeout=0)
    except filelock.Timeout:
        yield False
        return
    except OSError as error:
        logger.warning("%s may be chosen by others at the same time: %s", device, error)
        yield True
        return
    try:
        yield True
    finally:
        lock.release()


def _seat_file(device: str) -> Path | None:
    """None where there is nowhere to keep it."""
    cache = DiskCache.open()
    if cache is None:
        return None
    import torch

    return cache.root / "locks" / f"seat-{torch.cuda.get_device_properties(device).uuid}.lock"


def _result(
    answer: dict[str, Any], message: dict[str, Any], args: Arguments, choice: Choice
) -> TuningResult | KernelApiError:
    """What the rows come to, which are kept here as well: also those of what broke off."""
    if answer["environment"] is None:
        return BenchError(answer["error"])
    problem, environment = Problem.of(args), Environment.from_dict(answer["environment"])
    rows: dict[Kernel, Measurement] = {}
    known: dict[Kernel, Measurement] = {}
    for one in answer["rows"]:
        identity = KernelIdentity.from_dict(one["kernel"])
        row = Measurement.of(identity, problem, environment.digest, one["result"])
        _keep(Row(environment, row))
        kernel = identity.rebuild()
        rows[kernel] = row
        if one["is_known"]:
            known[kernel] = row
    _lookup.changed()
    if answer["error"] is not None:
        return BenchError(answer["error"])
    limits = message["budget_s"], message["timeout_s"]
    seat = _candidates(message), message["device"], environment
    task = Task(message["arguments"], problem, *seat, None, known, *limits)
    explained = functools.partial(
        explain, args, choice.metadata_filter, choice.cc, choice.providers
    )
    try:
        return result_of(rows, task, explained)
    except NoKernelError as error:
        return error


def _keep(row: Row) -> None:
    """Unless the code of its kernel has no fingerprint."""
    store = Store.open(row.environment)
    if store is None or row.measurement.kernel.fingerprint is None:
        return
    try:
        store.add(row)
    except OSError as error:
        _disk_cache.warn(f"what is measured is not kept: {error}", "it is measured again")

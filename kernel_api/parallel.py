"""Many kernels compiled at once, by processes that see no GPU.

A worker rebuilds a kernel from its metadata and compiles it into the cache on disk, from where the
artifact is loaded. Workers never import the script that runs, so it needs no ``__main__`` guard.
What dies with a worker is one compilation, not the others.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kernel_api import _compile_cache, _disk_cache, _log
from kernel_api._description import described
from kernel_api._disk_cache import DiskCache
from kernel_api._manifest import Identity
from kernel_api.arguments import Arguments
from kernel_api.artifact import CompiledArtifact
from kernel_api.errors import ArgumentError, CompileError, KernelApiError
from kernel_api.targets import CcLike, Target

if TYPE_CHECKING:
    from kernel_api.kernel import Kernel

logger = _log.logger(__name__)

_WORKERS = "KERNEL_API_COMPILE_WORKERS"
_MOST_WORKERS = 16

# The worker imports what this process could, from the same places.
_BOOT = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from kernel_api._compile_worker import main
main()
"""


@dataclass(frozen=True)
class _Job:
    """One compilation for a worker."""

    index: int
    kernel: Kernel
    identity: Identity
    line: str


def compile_all(
    kernels: Iterable[Kernel],
    args: Arguments | Sequence[Arguments],
    *,
    cc: CcLike = None,
    workers: int | None = None,
    progress: bool = False,
) -> list[CompiledArtifact | KernelApiError]:
    """Compile many kernels in parallel; what is in a cache is not compiled again.

    Args:
        kernels: The kernels, as ``get_kernels`` gives them.
        args: The arguments to compile for: one object for all kernels, or one for each.
        cc: As in :meth:`Kernel.compile`.
        workers: Processes; by default ``KERNEL_API_COMPILE_WORKERS``, else one per CPU, up to 16.
        progress: Draw a bar on stderr, where rich is installed.

    Returns the artifacts in the order of the kernels, with the error in place of each one that
    failed. Kernels that a worker cannot import (they are defined in a notebook, a script or a
    function) compile in this process.

    Raises:
        ArgumentError: there are not as many arguments as kernels, or ``workers`` makes no sense.
    """
    kernels = list(kernels)
    each = [args] * len(kernels) if isinstance(args, Arguments) else list(args)
    if len(each) != len(kernels):
        raise ArgumentError(f"there are {len(kernels)} kernels but {len(each)} arguments")
    count = _worker_count(workers)
    pairs = list(zip(kernels, each, strict=True))
    results: dict[int, CompiledArtifact | KernelApiError] = {}
    cache = DiskCache.open() or _cache_of_this_process()
    with _bar(len(pairs), shown=progress) as advance:
        jobs, here = _planned(pairs, cc, cache, results)
        for _ in results:
            advance()
        pool = _Pool(jobs, min(count, len(jobs)), cache, advance)
        for index in here:
            results[index] = _attempt(*pairs[index], cc)
            advance()
        failures = pool.finished()
        for job in jobs:
            results[job.index] = (
                failures.get(job.index)
                or _fetched(job, each[job.index], cache)
                or _not_kept(job, each[job.index], cc)
            )
    return [results[index] for index in range(len(pairs))]


def _worker_count(given: int | None) -> int:
    if given is None:
        text = os.environ.get(_WORKERS, "")
        if not text:
            return min(len(os.sched_getaffinity(0)), _MOST_WORKERS)
        if not text.isdigit():
            raise ArgumentError(f"{_WORKERS} is {text!r}; expected a number of processes")
        given = int(text)
    if given < 1:
        raise ArgumentError(f"workers is {given}; expected at least 1")
    return given


def _attempt(kernel: Kernel, args: Arguments, cc: CcLike) -> CompiledArtifact | KernelApiError:
    try:
        return kernel.compile(args, cc)
    except Exception as error:
        return _as_ours(kernel, error)


def _as_ours(kernel: Kernel, error: Exception) -> KernelApiError:
    if isinstance(error, KernelApiError):
        return error
    failed = CompileError(f"{kernel.metadata.kernel_name} does not compile: {error!r}")
    failed.__cause__ = error
    return failed


# What a worker can do ----------------------------------------------------------------------


@functools.lru_cache(maxsize=1)
def _cache_of_this_process() -> DiskCache:
    """Where there is no cache on disk: one in a folder that is removed when the process ends."""
    folder = tempfile.mkdtemp(prefix="kernel_api-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return DiskCache.at(Path(folder))


def _planned(
    pairs: Sequence[tuple[Kernel, Arguments]],
    cc: CcLike,
    cache: DiskCache,
    results: dict[int, CompiledArtifact | KernelApiError],
) -> tuple[list[_Job], list[int]]:
    """Jobs for the workers, and what stays here; what is known already goes to the results."""
    jobs: list[_Job] = []
    here: list[int] = []
    for index, (kernel, args) in enumerate(pairs):
        try:
            target = kernel.compile_target(args, cc)
            known = _compile_cache.get(kernel, args.signature, target)
            job = _job(index, kernel, args, target) if known is None else None
        except Exception as error:
            results[index] = _as_ours(kernel, error)
            continue
        if known is None and job is not None:
            known = _fetched(job, args, cache)
        if known is not None:
            results[index] = known
        elif job is not None:
            jobs.append(job)
        else:
            here.append(index)
    return jobs, here


def _job(index: int, kernel: Kernel, args: Arguments, target: Target | None) -> _Job | None:
    """None for what has to be compiled here."""
    name = kernel.metadata.kernel_name
    identity = _disk_cache.identity_of(kernel, args.signature, target)
    if identity is None:
        if kernel.code_files is not None:
            logger.info("%s cannot be rebuilt in another process: compiled in this one", name)
        return None
    line = json.dumps({"kernel": identity.kernel, "target": str(target)})
    if '"__main__:' in line:
        logger.info("%s is defined in __main__: compiled in this process", name)
        return None
    try:
        whole = {**json.loads(line), "arguments": described(args)}
    except ArgumentError as error:
        logger.info("%s is compiled in this process: %s", name, error)
        return None
    return _Job(index, kernel, identity, json.dumps(whole))


def _fetched(job: _Job, args: Arguments, cache: DiskCache) -> CompiledArtifact | None:
    """What is on disk for a job."""
    artifact = cache.load(job.identity.key)
    if artifact is None:
        return None
    return _compile_cache.put(job.kernel, args.signature, artifact)


def _not_kept(job: _Job, args: Arguments, cc: CcLike) -> CompiledArtifact | KernelApiError:
    """A worker could not write, or it met other sources than this process did."""
    logger.warning("%s is not on disk: compiled in this process", job.kernel.metadata.kernel_name)
    return _attempt(job.kernel, args, cc)


# The workers -------------------------------------------------------------------------------


class _Pool:
    """Threads that each feed one worker process at a time until there is no job left."""

    def __init__(
        self, jobs: Sequence[_Job], workers: int, cache: DiskCache, advance: Callable[[], None]
    ) -> None:
        self._jobs: queue.SimpleQueue[_Job] = queue.SimpleQueue()
        for job in jobs:
            self._jobs.put(job)
        self._failures: dict[int, KernelApiError] = {}
        self._cache = cache
        self._advance = advance
        self._processes: set[subprocess.Popen[str]] = set()
        self._threads = [threading.Thread(target=self._work, daemon=True) for _ in range(workers)]
        for thread in self._threads:
            thread.start()

    def finished(self) -> dict[int, KernelApiError]:
        """The failures by the index of the job; waits for all."""
        try:
            for thread in self._threads:
                thread.join()
        finally:  # interrupted: leave no process behind
            for process in list(self._processes):
                process.kill()
        return self._failures

    def _work(self) -> None:
        process: subprocess.Popen[str] | None = None
        while True:
            try:
                job = self._jobs.get_nowait()
            except queue.Empty:
                break
            if process is None:
                process = self._started()
            failure = self._asked(process, job)
            if failure is not None:
                self._failures[job.index] = failure
            if process.poll() is not None:
                self._processes.discard(process)
                process = None
            self._advance()
        if process is not None:
            assert process.stdin is not None
            process.stdin.close()
            process.wait()
            self._processes.discard(process)

    def _started(self) -> subprocess.Popen[str]:
        environment = {
            **os.environ,
            "CUDA_VISIBLE_DEVICES": "",
            "KERNEL_API_CACHE_DIR": str(self._cache.root),
            "KERNEL_API_DISABLE_CACHE": "0",
        }
        process = subprocess.Popen(
            [sys.executable, "-c", _BOOT, json.dumps(sys.path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            text=True,
        )
        self._processes.add(process)
        return process

    def _asked(self, process: subprocess.Popen[str], job: _Job) -> KernelApiError | None:
        """Let a worker do one job; None if it did."""
        assert process.stdin is not None and process.stdout is not None
        name = job.kernel.metadata.kernel_name
        answer = ""
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(f"{job.line}\n")
            process.stdin.flush()
            answer = process.stdout.readline()
        if not answer.endswith("\n"):
            return CompileError(f"{name}: the compiler's process died ({_cause(process)})")
        found: dict[str, Any] = json.loads(answer)
        if found["error"] is None:
            return None
        return _error(found["error"], f"{found['text']}", name)


def _cause(process: subprocess.Popen[str]) -> str:
    code = process.wait()
    if code < 0:
        with contextlib.suppress(ValueError):
            return f"by {signal.Signals(-code).name}"
    return f"with exit code {code}"


def _error(kind: str, text: str, name: str) -> KernelApiError:
    """The worker's error: a CompileError, unless it is another one of ours that takes a text."""
    from kernel_api import errors

    cls = getattr(errors, kind, None)
    if (
        isinstance(cls, type)
        and issubclass(cls, KernelApiError)
        and cls.__init__ is (KernelApiError.__init__)
    ):
        return cls(text)
    return CompileError(f"{name} does not compile: {kind}: {text}")


@contextlib.contextmanager
def _bar(total: int, *, shown: bool) -> Iterator[Callable[[], None]]:
    """A function that moves a progress bar on; without rich, or if none is wanted, a silent one."""
    if shown:
        try:
            from rich.console import Console
            from rich.progress import MofNCompleteColumn, Progress, TimeElapsedColumn
        except ImportError:
            pass
        else:
            console = Console(stderr=True)
            columns = (*Progress.get_default_columns(), MofNCompleteColumn(), TimeElapsedColumn())
            with Progress(*columns, console=console) as drawn:
                task = drawn.add_task("compiling", total=total)
                yield lambda: drawn.advance(task)
            return
    yield lambda: None

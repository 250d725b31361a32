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
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kernel_api import _compile_cache, _disk_cache, _fork_server, _log
from kernel_api._description import SKETCHED, described
from kernel_api._disk_cache import DiskCache
from kernel_api._manifest import Identity
from kernel_api._numbers import whole_number
from kernel_api.arguments import Arguments, GemmArguments
from kernel_api.artifact import CompiledArtifact
from kernel_api.errors import (
    ArgumentError,
    CompileError,
    CompilerKilledError,
    KernelApiError,
)
from kernel_api.targets import CcLike, Target

if TYPE_CHECKING:
    from kernel_api.kernel import Kernel

logger = _log.logger(__name__)

_WORKERS = "KERNEL_API_COMPILE_WORKERS"
_MOST_WORKERS = 32

#: What workers have imported when they start.
_IMPORTED = (
    "cutlass.cute",
    "cutlass.cutlass_dsl.tvm_ffi_provider",
    "kernel_api._compile_worker",
    "kernel_api._description",
    "kernel_api.discovery",
    "kernel_api.library",
    "kernel_api.providers.cutedsl",
    "kernel_api.implementations.sm80.gemm",
    "kernel_api.implementations.sm90.gemm",
)
#: What those have before that compile anything but `_TORCHLESS`; importing it takes as long as all
#: the others do.
_WITH_TORCH = ("torch", "kernel_api.providers.reference", "kernel_api.providers.torch")
#: Kernels that compile where torch is not imported, see :func:`_needs_torch`.
_TORCHLESS = "kernel_api.providers.cutedsl.gemm."


@dataclass(frozen=True)
class _Job:
    """One compilation for a worker."""

    index: int
    kernel: Kernel
    identity: Identity
    message: dict[str, Any]

    @property
    def needs_torch(self) -> bool:
        return bool(self.message["device"] != SKETCHED)


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
        workers: Processes; by default ``KERNEL_API_COMPILE_WORKERS``, else one per CPU, up to 32.
        progress: Draw a bar on stderr, where rich is installed.

    Returns the artifacts in the order of the kernels, with the error in place of each one that
    failed. Kernels that a worker cannot import (they are defined in a notebook, a script or a
    function) compile in this process.

    Raises:
        ArgumentError: there are not as many arguments as kernels, or ``workers`` makes no sense.
    """
    kernels = _kernels(kernels)
    if not isinstance(args, (Arguments, Iterable)):
        raise ArgumentError(
            f"args is a {type(args).__name__}; expected an arguments object such as GemmArguments, "
            f"or one for each kernel"
        )
    each = [args] * len(kernels) if isinstance(args, Arguments) else list(args)
    if len(each) != len(kernels):
        raise ArgumentError(f"there are {len(kernels)} kernels but {len(each)} arguments")
    count = _worker_count(workers)
    pairs = list(zip(kernels, each, strict=True))
    results: dict[int, Any] = {}
    with progress_bar("compiling", len(pairs), shown=progress) as advance:
        for index, found in Compilations(pairs, cc, count):
            results[index] = found
            advance()
    return [results[index] for index in range(len(pairs))]


class Compilations:
    """Compiles kernels, each for arguments of its own, and gives each as soon as it is done.

    Iterating yields (index, artifact or error). Whoever stops before the end calls ``close``.

    Args:
        timeout_s: No compilation in a worker takes longer, else it is a CompileError.
        load: Whether this process wants the artifacts; else None stands for what a worker made
            and :func:`cache_to_share` has.
    """

    def __init__(
        self,
        pairs: Sequence[tuple[Kernel, Arguments]],
        cc: CcLike,
        workers: int | None = None,
        *,
        timeout_s: float | None = None,
        load: bool = True,
    ) -> None:
        self._pairs, self._cc, self._load = pairs, cc, load
        self._cache = cache_to_share()
        self._known: dict[int, CompiledArtifact | KernelApiError | None] = {}
        jobs, self._here = _planned(pairs, cc, self._cache, self._known, load)
        self._pool = _Pool(jobs, min(_worker_count(workers), len(jobs)), self._cache, timeout_s)

    def __iter__(self) -> Iterator[tuple[int, CompiledArtifact | KernelApiError | None]]:
        try:
            yield from self._known.items()
            for index in self._here:
                yield index, _attempt(*self._pairs[index], self._cc)
            for job, failure in self._pool.done():
                yield job.index, failure or (self._loaded(job) if self._load else None)
        finally:
            self.close()

    def close(self) -> None:
        """Leave no process behind."""
        self._pool.close()

    def _loaded(self, job: _Job) -> CompiledArtifact | KernelApiError:
        args = self._pairs[job.index][1]
        return _fetched(job, args, self._cache) or _not_kept(job, args, self._cc)


def _worker_count(given: int | None) -> int:
    if given is None:
        text = os.environ.get(_WORKERS, "")
        if not text:
            return min(len(os.sched_getaffinity(0)), _MOST_WORKERS)
        if not (text.isascii() and text.isdecimal()):
            raise ArgumentError(f"{_WORKERS} is {text!r}; expected a number of processes")
        given = int(text)
    found = whole_number(given)
    if found is None or found < 1:
        raise ArgumentError(f"workers is {given!r}; expected at least 1, a whole number")
    return found


def _kernels(given: Any) -> list[Kernel]:
    from kernel_api.kernel import Kernel

    kernels = list(given) if isinstance(given, Iterable) else [given]
    for kernel in kernels:
        if not isinstance(kernel, Kernel) or not isinstance(given, Iterable):
            expected = "ones that get_kernels returns, in a list"
            raise ArgumentError(f"kernels has a {type(kernel).__name__}; expected {expected}")
    return kernels


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


def cache_to_share() -> DiskCache:
    """Where workers put what they compile; raises CompileError where there is no such place."""
    return DiskCache.open() or _cache_of_this_process()


@functools.lru_cache(maxsize=1)
def _cache_of_this_process() -> DiskCache:
    """Where there is no cache on disk: one in a folder that is removed when the process ends."""
    try:
        folder = tempfile.mkdtemp(prefix="kernel_api-")
    except OSError as error:
        raise CompileError(
            f"there is no cache, and no temporary folder can be made to compile into: {error}; "
            f"make room, or set KERNEL_API_CACHE_DIR or TMPDIR to another folder"
        ) from error
    atexit.register(_remove, folder, os.getpid())
    return DiskCache.at(Path(folder))


def _remove(folder: str, owner: int) -> None:
    """Unless this is a child of the process that made it: that goes on using it."""
    if os.getpid() == owner:
        shutil.rmtree(folder, ignore_errors=True)


def _planned(
    pairs: Sequence[tuple[Kernel, Arguments]],
    cc: CcLike,
    cache: DiskCache,
    results: dict[int, CompiledArtifact | KernelApiError | None],
    load: bool,
) -> tuple[list[_Job], list[int]]:
    """Jobs for the workers, and what stays here; what is known already goes to the results."""
    jobs: list[_Job] = []
    here: list[int] = []
    for index, (kernel, args) in enumerate(pairs):
        try:
            target = kernel.compile_target(args, cc)
            known = _compile_cache.get(kernel, args.signature, target) if load else None
            job = _job(index, kernel, args, target) if known is None else None
            if job is not None and not load and cache.has(job.identity.key):
                results[index] = None
                continue
        except Exception as error:
            results[index] = _as_ours(kernel, error)
            continue
        if known is None and job is not None and load:
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
    message = {"kernel": identity.kernel, "target": str(target)}
    if '"__main__:' in json.dumps(message):
        logger.info("%s is defined in __main__: compiled in this process", name)
        return None
    try:
        message["arguments"] = described(args)
        message["device"] = "meta" if _needs_torch(kernel, args) else SKETCHED
    except ArgumentError as error:
        logger.info("%s is compiled in this process: %s", name, error)
        return None
    return _Job(index, kernel, identity, message)


def _needs_torch(kernel: Kernel, args: Arguments) -> bool:
    """Whether it may ask tensors for more than :class:`Sketch` knows."""
    is_ours = type(kernel).__module__.startswith(_TORCHLESS)
    return not (is_ours and type(args) is GemmArguments) or bool(args.scaled)


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
        self, jobs: Sequence[_Job], workers: int, cache: DiskCache, timeout_s: float | None
    ) -> None:
        self._count = len(jobs)
        self._jobs: queue.SimpleQueue[_Job] = queue.SimpleQueue()
        for job in jobs:
            self._jobs.put(job)
        self._done: queue.SimpleQueue[tuple[_Job, KernelApiError | None] | None]
        self._done = queue.SimpleQueue()
        self._cache, self._timeout_s = cache, timeout_s
        self._needs_torch = any(job.needs_torch for job in jobs)
        self._is_closed = False
        self._children: set[_fork_server.Child] = set()
        for _ in range(workers):
            threading.Thread(target=self._work, daemon=True).start()

    def done(self) -> Iterator[tuple[_Job, KernelApiError | None]]:
        """Every job as it comes to its end, with its failure if it failed; until it is closed."""
        for _ in range(self._count):
            one = self._done.get()
            if one is None:
                return
            yield one

    def close(self) -> None:
        """Let what runs die, and what waits wait."""
        self._is_closed = True
        self._done.put(None)
        for child in list(self._children):
            child.kill()

    def _work(self) -> None:
        child: _fork_server.Child | None = None
        while not self._is_closed:
            try:
                job = self._jobs.get_nowait()
            except queue.Empty:
                break
            failure, child, was_killed = self._compiled(child, job)
            if was_killed and not self._is_closed:  # by somebody else: once more
                failure, child, _ = self._compiled(None, job)
            self._done.put((job, failure))
        if child is not None:
            self._children.discard(child)
            child.close()

    def _compiled(
        self, child: _fork_server.Child | None, job: _Job
    ) -> tuple[KernelApiError | None, _fork_server.Child | None, bool]:
        """What went wrong with a job, if anything did; the worker, if it lives; and whether
        somebody killed it."""
        try:
            if child is None:
                child = self._started()
            return self._asked(child, job)
        except Exception as error:  # no process can be started
            return _as_ours(job.kernel, error), None, False

    def _started(self) -> _fork_server.Child:
        environment = {
            **os.environ,
            "CUDA_VISIBLE_DEVICES": "",
            "KERNEL_API_CACHE_DIR": str(self._cache.root),
            "KERNEL_API_DISABLE_CACHE": "0",
        }
        imported: tuple[str, ...] = _IMPORTED
        without: tuple[str, ...] = ("torch",)
        if self._needs_torch:
            imported, without = (*_WITH_TORCH, *imported), ()
        child = _fork_server.start(
            imported, "kernel_api._compile_worker:work", environment, without
        )
        self._children.add(child)
        return child

    def _asked(
        self, child: _fork_server.Child, job: _Job
    ) -> tuple[KernelApiError | None, _fork_server.Child | None, bool]:
        """Let a worker do one job, see :meth:`_compiled`."""
        name = job.kernel.metadata.kernel_name
        try:
            child.send(job.message)
            found = child.receive(self._timeout_s)
        except TimeoutError:
            self._children.discard(child)
            child.kill()
            late = f"{name}: compiled for more than {self._timeout_s:g} s"
            return CompileError(late), None, False
        except (EOFError, OSError):
            self._children.discard(child)
            died = f"{name}: the compiler's process died ({child.cause_of_death()})"
            was_killed = child.was_killed()
            kind = CompilerKilledError if was_killed else CompileError
            return kind(died), None, was_killed
        if found["error"] is None:
            return None, child, False
        return _error(found["error"], f"{found['text']}", name), child, False


def _error(kind: str, text: str, name: str) -> KernelApiError:
    """The worker's error as it is, if it is one of ours that takes a text; else a CompileError."""
    from kernel_api import errors

    cls = getattr(errors, kind, None)
    if isinstance(cls, type) and issubclass(cls, KernelApiError) and _takes_text(cls):
        return cls(text)
    return CompileError(f"{name} does not compile: {kind}: {text}")


def _takes_text(cls: type[KernelApiError]) -> bool:
    """Whether an error is made of its text alone."""
    ours = (base for base in cls.__mro__ if issubclass(base, KernelApiError))
    return not any("__init__" in vars(base) for base in ours)


@contextlib.contextmanager
def progress_bar(what: str, total: int, *, shown: bool) -> Iterator[Callable[[], None]]:
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
                task = drawn.add_task(what, total=total)
                yield lambda: drawn.advance(task)
            return
    yield lambda: None

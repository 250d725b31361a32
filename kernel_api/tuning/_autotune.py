"""The fastest correct kernel for a problem, by measurement."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, overload

from kernel_api import _disk_cache, _log
from kernel_api._description import described, rebuilt
from kernel_api._disk_cache import DiskCache
from kernel_api.arguments import Arguments
from kernel_api.discovery import MetadataFilter, explain, get_kernels
from kernel_api.errors import ArgumentError, CaptureError, KernelApiError, NoKernelError
from kernel_api.kernel import Kernel
from kernel_api.parallel import Compilations, cache_to_share
from kernel_api.targets import CcLike
from kernel_api.tuning import _lookup
from kernel_api.tuning._bench import Bench, Halt
from kernel_api.tuning._environment import Environment
from kernel_api.tuning._kernel import KernelIdentity
from kernel_api.tuning._measurement import Measurement, Status
from kernel_api.tuning._policy import Policy
from kernel_api.tuning._problem import Problem
from kernel_api.tuning._search import Candidate, search, seeded
from kernel_api.tuning._store import Store
from kernel_api.tuning._work import least_us

if TYPE_CHECKING:
    from concurrent.futures import Executor

    from kernel_api.discovery import ProviderChoice

logger = _log.logger(__name__)

#: A compilation that takes longer has failed, in seconds.
_COMPILE_SECONDS = 300.0

#: How often whoever waits for a GPU looks whether it is to go on, in seconds.
_LOCK_SECONDS = 1.0

#: The oracle competes only where it is asked for, or alone.
_ORACLE = "reference"


@dataclass(frozen=True)
class TuningResult:
    """What is known of a problem.

    Attributes:
        kernel: The fastest that computes it right.
        rows: Every candidate: those that passed first, from fast to slow.
        problem: What was computed.
        environment: Where and how it was measured.
        measured: How many of the rows are new.
    """

    kernel: Kernel
    rows: tuple[Measurement, ...]
    problem: Problem
    environment: Environment
    measured: int = 0

    def __str__(self) -> str:
        counts = {one: sum(row.status is one for row in self.rows) for one in Status}
        told = ", ".join(f"{count} {status}" for status, count in counts.items() if count)
        return f"{self.rows[0]} of {told}"


@dataclass(frozen=True)
class Choice:
    """What is asked for beside the problems, see :func:`autotune`."""

    metadata_filter: MetadataFilter | None = None
    cc: CcLike = None
    providers: ProviderChoice | None = None
    budget_s: float | None = None
    max_candidates: int | None = None
    timeout_s: float = 10.0
    policy: Policy | None = None

    def __post_init__(self) -> None:
        for name in ("budget_s", "timeout_s", "max_candidates"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ArgumentError(f"{name} is {value!r}; expected more than 0")

    def policy_on(self, device: str) -> Policy:
        return self.policy or Policy.usual(device)

    def kernels(self, args: Arguments, device: str) -> list[Kernel]:
        """The candidates, in the order of the performance model; raises NoKernelError."""
        kind = device.partition(":")[0]
        found = get_kernels(args, self.metadata_filter, self.cc, self.providers)
        found = [kernel for kernel in found if kind in kernel.devices]
        if self.providers is None:
            found = [k for k in found if type(k).provider_name() != _ORACLE] or found
        if not found:
            raise NoKernelError(explain(args, self.metadata_filter, self.cc, self.providers))
        return _first(found, self.max_candidates)


def _first(kernels: Sequence[Kernel], count: int | None) -> list[Kernel]:
    """The first so many, and the first of every provider.

    Of kernels of one design, which ask different things of operands, the first comes before all
    second ones.
    """
    if count is None or len(kernels) <= count:
        return list(kernels)
    designs = {(type(kernel), kernel.metadata.design): kernel for kernel in reversed(kernels)}
    is_first = {id(kernel) for kernel in designs.values()}
    ordered = sorted(kernels, key=lambda kernel: id(kernel) not in is_first)
    wanted = {id(kernel) for kernel in ordered[:count]}
    providers = {type(kernel).provider_name(): kernel for kernel in reversed(kernels)}
    wanted |= {id(kernel) for kernel in providers.values()}
    return [kernel for kernel in kernels if id(kernel) in wanted]


@overload
def autotune(
    args: Arguments,
    metadata_filter: MetadataFilter | None = None,
    *,
    cc: CcLike = None,
    providers: ProviderChoice | None = None,
    budget_s: float | None = None,
    max_candidates: int | None = 24,
    timeout_s: float = 10.0,
    policy: Policy | None = None,
    executor: Executor | None = None,
    progress: bool = False,
) -> TuningResult: ...


@overload
def autotune(
    args: Sequence[Arguments],
    metadata_filter: MetadataFilter | None = None,
    *,
    cc: CcLike = None,
    providers: ProviderChoice | None = None,
    budget_s: float | None = None,
    max_candidates: int | None = 24,
    timeout_s: float = 10.0,
    policy: Policy | None = None,
    executor: Executor | None = None,
    progress: bool = False,
) -> list[TuningResult | KernelApiError]: ...


def autotune(
    args: Arguments | Sequence[Arguments],
    metadata_filter: MetadataFilter | None = None,
    *,
    cc: CcLike = None,
    providers: ProviderChoice | None = None,
    budget_s: float | None = None,
    max_candidates: int | None = 24,
    timeout_s: float = 10.0,
    policy: Policy | None = None,
    executor: Executor | None = None,
    progress: bool = False,
) -> TuningResult | list[TuningResult | KernelApiError]:
    """Find the fastest kernel that computes the arguments right, and keep all that was measured.

    Candidates of every provider compile in processes that see no GPU, are compared with the
    reference, and are timed in a process of their own: one that crashes, hangs or computes wrong
    gets that as its status and harms no other. What was measured before, of the same kernel,
    problem and environment, is not measured again.

    Args:
        args: What to compute, or several problems. Data is not looked at and outputs are not
            written: operands are random, of the same types, sizes, strides and alignment. Meta
            tensors will do.
        metadata_filter: Which candidates compete, as in ``get_kernels``.
        cc: Architecture to compile for; that of the device by default.
        providers: Those whose kernels compete; all but ``reference`` by default.
        budget_s: Seconds for a problem after which no more candidates are begun.
        max_candidates: So many of the performance model's order, and the first of every
            provider; None: all.
        timeout_s: Seconds that no step of a candidate may take.
        policy: How to measure; CUDA graphs and a cold L2 cache by default, and on the CPU eager
            launches.
        executor: Measures each problem in some other process, or on another machine: anything
            with the interface of :class:`concurrent.futures.Executor`. By default problems are
            spread over the GPUs of this machine.
        progress: Draw a bar on stderr, where rich is installed.

    Returns the result; of several problems a list in their order, with the error in place of each
    one that failed.

    Raises:
        NoKernelError: no kernel takes the arguments, or none of the candidates passed; the text
            has their statuses.
        CaptureError: a CUDA graph is being captured.
        ArgumentError, FilterError: as ``get_kernels``.
    """
    from kernel_api.tuning._spread import spread

    _check_no_capture()
    choice = Choice(metadata_filter, cc, providers, budget_s, max_candidates, timeout_s, policy)
    if not isinstance(args, Arguments):
        return spread(list(args), choice, executor, progress)
    found: TuningResult | KernelApiError = spread([args], choice, executor, progress)[0]
    if isinstance(found, KernelApiError):
        raise found
    return found


def _check_no_capture() -> None:
    import torch

    initialized: Any = torch.cuda.is_initialized
    if initialized() and torch.cuda.is_current_stream_capturing():
        raise CaptureError(
            "a CUDA graph is being captured, which measuring would break; tune before the capture"
        )


# One problem ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Task:
    """One problem on one device, before it is tuned.

    Attributes:
        description: The arguments, for other processes.
        kernels: The candidates in their order.
        device: ``"cpu"``, or ``"cuda:0"`` and so on.
        store: Where rows are kept; None: nowhere.
        known: What was measured before.
    """

    description: dict[str, Any]
    problem: Problem
    kernels: Sequence[Kernel]
    device: str
    environment: Environment
    store: Store | None
    known: Mapping[Kernel, Measurement]
    budget_s: float | None
    timeout_s: float

    @classmethod
    def of(cls, args: Arguments, choice: Choice, device: str) -> Task:
        """Raises what :meth:`Choice.kernels` raises, and ArgumentError for what cannot be
        described."""
        kernels = choice.kernels(args, device)
        limits = choice.budget_s, choice.timeout_s
        return cls.made(described(args), kernels, device, choice.policy_on(device), *limits)

    @classmethod
    def made(
        cls,
        description: dict[str, Any],
        kernels: Sequence[Kernel],
        device: str,
        policy: Policy,
        budget_s: float | None,
        timeout_s: float,
    ) -> Task:
        """With what is known of it here."""
        problem = Problem.of(rebuilt(description))
        environment = Environment.of(device, policy)
        store = Store.open(environment)
        known = {}
        if store is not None:
            found = ((kernel, store.find(problem, kernel)) for kernel in kernels)
            known = {kernel: row for kernel, row in found if row is not None}
        return cls(
            description, problem, kernels, device, environment, store, known, budget_s, timeout_s
        )

    @property
    def rounds(self) -> int:
        return self.environment.policy.rounds

    def meta(self) -> Arguments:
        """The arguments without data."""
        return rebuilt(self.description)

    def on(self, device: str) -> Task:
        """The same on another device of the same kind: what is known of it is known of all."""
        return self if device == self.device else replace(self, device=device)


def tune(task: Task, builder: Builder, advance: Callable[[], None] = lambda: None) -> TuningResult:
    """Measure what is not known yet, and give all that is.

    Args:
        advance: Is called for every candidate.

    Raises NoKernelError, BenchError; HaltedError once the builder is closed.
    """
    rows = dict(task.known)

    def done(one: Candidate) -> None:
        row = rows[one.kernel] = _measurement(one, task)
        if task.store is not None:
            _kept(task.store, row)
        advance()

    for _ in rows:
        advance()
    candidates = [one for one in seeded(task.kernels) if one.kernel not in rows]
    if candidates:
        meta = task.meta()
        with (
            _alone_on(task.device, builder.halt),
            Bench(
                task.description,
                task.device,
                task.environment.policy,
                task.timeout_s,
                builder.environment,
                builder.halt,
            ) as bench,
        ):
            search(
                bench,
                candidates,
                task.rounds,
                ready=lambda one: builder.wait(one.kernel, meta),
                budget_s=task.budget_s,
                least_us=least_us(task.problem, task.environment.gpu, task.environment.policy),
                done=done,
            )
        _lookup.changed()
    return _result(rows, task)


def _kept(store: Store, row: Measurement) -> None:
    try:
        store.record(row)
    except OSError as error:
        logger.warning("%s is not kept: %s", row, error)


def _measurement(one: Candidate, task: Task) -> Measurement:
    sm_mhz, memory_mhz = one.mhz if one.times_us else (None, None)
    return Measurement(
        kernel=KernelIdentity.of(one.kernel),
        problem=task.problem,
        environment=task.environment.digest,
        status=one.status,
        message=one.message,
        times_us=tuple(one.times_us),
        error_ratio=one.error_ratio,
        sm_mhz=sm_mhz,
        memory_mhz=memory_mhz,
    )


def _result(rows: Mapping[Kernel, Measurement], task: Task) -> TuningResult:
    """Raises NoKernelError if no kernel passed."""
    ranked = sorted(rows.items(), key=lambda pair: pair[1].place(task.rounds))
    measurements = tuple(row for _, row in ranked)
    if not ranked or not ranked[0][1].passed:
        told = "".join(f"\n  {row}" for row in measurements)
        text = f"none of {len(measurements)} candidates passed{told}"
        raise NoKernelError(explain(task.meta()), text, measurements)
    measured = len(rows) - len(task.known)
    return TuningResult(ranked[0][0], measurements, task.problem, task.environment, measured)


@contextlib.contextmanager
def _alone_on(device: str, halt: Halt) -> Iterator[None]:
    """While another process measures on a GPU, wait: both would measure each other."""
    lock = _lock_of(device)
    if lock is None:
        yield
        return
    import filelock

    try:
        lock.acquire(timeout=0)
    except filelock.Timeout:
        logger.info("another process measures on %s: waiting", device)
        while not lock.is_locked:
            halt.check()
            with contextlib.suppress(filelock.Timeout):
                lock.acquire(timeout=_LOCK_SECONDS)
    except OSError as error:
        logger.warning("%s may be used by others while it is measured on: %s", device, error)
    try:
        yield
    finally:
        lock.release()


def is_measured_on(device: str) -> bool:
    """Whether some process measures on a GPU just now."""
    lock = _lock_of(device)
    if lock is None:
        return False
    import filelock

    try:
        lock.acquire(timeout=0)
    except filelock.Timeout:
        return True
    except OSError:
        return False
    lock.release()
    return False


def _lock_of(device: str) -> Any:
    """None where there is nothing to lock, or nowhere."""
    cache = DiskCache.open()
    if device == "cpu" or cache is None:
        return None
    import filelock
    import torch

    uuid = torch.cuda.get_device_properties(device).uuid
    return filelock.FileLock(cache.root / "locks" / f"gpu-{uuid}.lock")


def devices_here() -> list[str]:
    """Where problems are measured that lie nowhere: on every GPU; without one, on the CPU."""
    import torch

    if not torch.cuda.is_available():
        return ["cpu"]
    return [f"cuda:{index}" for index in range(torch.cuda.device_count())]


# Compilation ---------------------------------------------------------------------------------


class Builder:
    """Compiles the candidates of all tasks, each kernel once for all problems that share its code.

    Attributes:
        environment: Variables by which other processes find what was compiled.
        halt: Is set when this is closed: what waits for a kernel, or measures one, ends as well.
    """

    def __init__(self, tasks: Sequence[Task], cc: CcLike) -> None:
        self.environment = {
            "KERNEL_API_CACHE_DIR": str(cache_to_share().root),
            "KERNEL_API_DISABLE_CACHE": "0",
        }
        self.halt = Halt()
        wanted: dict[tuple[Kernel, Any], Arguments] = {}
        for task in tasks:
            meta = task.meta()
            for kernel in task.kernels:
                if kernel not in task.known:
                    wanted.setdefault((kernel, meta.signature), meta)
        self._pairs = {
            key: meta for key, meta in wanted.items() if _is_built_before(key[0], meta, cc)
        }
        self._done = {key: threading.Event() for key in self._pairs}
        self._errors: dict[tuple[Kernel, Any], KernelApiError] = {}
        self._compilations: Compilations | None = None
        if self._pairs:
            pairs = [(kernel, meta) for (kernel, _), meta in self._pairs.items()]
            self._compilations = Compilations(pairs, cc, timeout_s=_COMPILE_SECONDS, load=False)
            threading.Thread(target=self._collect, daemon=True).start()

    def wait(self, kernel: Kernel, meta: Arguments) -> KernelApiError | None:
        """Until a kernel is compiled; the error if it cannot be. What only the process that
        measures can compile is not waited for."""
        key = (kernel, meta.signature)
        if key in self._done:
            self._done[key].wait()
            self.halt.check()
        return self._errors.get(key)

    def close(self) -> None:
        self.halt.set()
        for done in self._done.values():
            done.set()
        if self._compilations is not None:
            self._compilations.close()

    def _collect(self) -> None:
        assert self._compilations is not None
        keys = list(self._pairs)
        for index, found in self._compilations:
            if isinstance(found, KernelApiError):
                self._errors[keys[index]] = found
            self._done[keys[index]].set()


def _is_built_before(kernel: Kernel, meta: Arguments, cc: CcLike) -> bool:
    """Whether its code can be on disk. What else it does to compile, it does where it is measured:
    that may be anything."""
    try:
        target = kernel.compile_target(meta, cc)
    except KernelApiError:
        return False
    return _disk_cache.identity_of(kernel, meta.signature, target) is not None
